"""FedKD: mutual distillation of adaptive strength, and updates of low rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from fedlightning.algorithm import (
    Change,
    Client,
    Facts,
    Job,
    Message,
    Need,
    Newcomers,
    Server,
    State,
    Update,
    WeightingName,
    Wire,
    requires,
)
from fedlightning.callbacks.shared.mutual import SharedPeer, divergence
from fedlightning.ranges import NonNegativeFloat, PositiveShare, make_init
from fedlightning.tensors import WeightedMean, module_state
from fedlightning.wrappers.pair import JointLoss, Side, shared_entries

FACTORS = ("u", "s", "v")

LOW_RANK_UPDATES = Need(
    "sends a client's update as factors of low rank",
    ("on_send", "encode"),
    "set energy_start=1 and energy_end=1, without compression",
)


@make_init
class FedKD(SharedPeer):
    r"""A private teacher and a small shared student learn from each other; the student's updates travel at low rank.

    Wu, Wu, Lyu, Huang, Xie, "Communication-efficient federated learning via knowledge distillation", Nature Communications
    13, 2022.

    On every batch, with predictions `p_t` of the private teacher and `p_s` of the shared student, task losses `CE_t` and
    `CE_s`, and `H` the mean squared difference of the teacher's representation and `W_h` times the student's:

    * teacher: `CE_t + (KL(p_s || p_t) + H) / (CE_t + CE_s)`
    * student: `CE_s + (KL(p_t || p_s) + H) / (CE_t + CE_s)`

    so that models which are still bad learn less from each other. Targets and denominator have no gradient, and the terms of
    distillation are weighed by `strength`. In the authors' code (`FedKD(strength=1, detach=False)`) nothing is detached: the
    gradient of the denominator is `-(KL + H) / (CE_t + CE_s)^2` times the task's, which turns the step uphill once the losses
    are small. Validation accuracy on digits (a CNN) and FashionMNIST (an MLP) over ten clients by Dirichlet(0.5), ten rounds,
    three seeds: 0.804 and 0.778 at the defaults, 0.794 and 0.722 with `strength=1`, 0.785 and 0.702 by the authors' code
    (Local: 0.787 and 0.797). A representation is the input of the head.

    * *Up*: the change of every matrix of the student by its largest singular values, as few as hold a share `T` of the sum of
      their squares; `T` grows from `energy_start` to `energy_end` over the rounds. `U, s, V` have `k (m + n + 1)` numbers;
      where that is no less than `m n`, and for vectors, the entry itself is sent. Kernels count as matrices of their outputs.
    * *Server*: the mean of the students, whose change is compressed in the same way: that is the next student.
    * *Down*: its factors. A client that missed a round gets the whole student.
    * State: teacher, `W_h` and the last student at each client.
    * Deployed: the teacher. Stage G scores the student.

    `energy_start = energy_end = 1` sends everything. `bytes_up` and `bytes_down` count the factors. The authors' code
    multiplies the factors wrongly and may keep none; HtFLlib compresses parameters instead of changes. What trains
    together, and how, is as in :class:`FML`; optimizers begin anew in every visit by default.

    Args:
        shared: The student: a LightningModule with the same classes. `None`: a copy of the client's own model, where all
            have one architecture.
        strength: Factor on the terms of distillation. Default 0.3 (measured; paper: 1). 0: FedAvg of the student beside local
            training.
        hidden: Compare representations, too (paper). Both heads must be linear layers.
        detach: Stop the gradient at targets and denominator (default). `False`: authors' code.
        energy_start: Share `T` in the first round, in (0, 1] (paper: 0.95).
        energy_end: Share that `T` reaches after the last round (paper: 0.98).
        head: Path of the layer of the private models that gives the logits. `None`: the last layer of each.
        shared_head: The same of the student.
        weighting: `"uniform"` (authors' code), `"samples"` or `"log"`.

    Raises:
        ValueError: If `strength` is negative, a share is outside (0, 1], or `shared` is not a LightningModule.

    Example:
        >>> import torch
        >>> from fedlightning.callbacks.fedkd import factors, product
        >>> change = torch.outer(torch.ones(8), torch.arange(5.0))
        >>> found = factors(change, energy=0.95)
        >>> sum(part.numel() for part in found.values())
        14
        >>> torch.allclose(product(found, change.shape).float(), change, atol=1e-5)
        True
    """

    rank = -10  # messages are whole again before others see them

    shared: LightningModule | None = None
    strength: NonNegativeFloat = 0.3
    hidden: bool = True
    detach: bool = True
    energy_start: PositiveShare = 0.95
    energy_end: PositiveShare = 0.98
    head: str | None = None
    shared_head: str | None = None
    weighting: WeightingName | None = "uniform"

    @property
    def compresses(self) -> bool:
        """Whether anything can travel as factors."""
        return min(self.energy_start, self.energy_end) < 1.0

    def claims(self, role: str) -> bool:
        """Decline what puts factors together where everything is sent."""
        return super().claims(role) and (self.compresses or role not in ("reduce", "server_step"))

    def compares(self) -> bool:
        """Return whether the losses compare predictions, as classes."""
        return self.strength > 0.0

    def joint_loss(self) -> JointLoss:
        """Return the sum of the two losses."""
        return AdaptiveLoss(self.strength, self.hidden, self.detach)

    def uses_projection(self) -> bool:
        """Return whether representations are compared."""
        return self.hidden and self.strength > 0.0

    @property
    def facts(self) -> Facts:
        """Two models train; what a client sends goes as factors of low rank where it is compressed."""
        changes, needs = ({Change.PARTS}, [LOW_RANK_UPDATES]) if self.compresses else (set(), [])
        advice = requires.Advice(
            f"(strength={self.strength}) draws each private model to a shared one, which knows less of the client's own "
            "labels: where these are skewed, private models may stay behind local training. Compare it with Local, or lower "
            "strength.",
            when="strength",
        )
        return super().facts.extend(changes=changes, needs=needs, requires=[advice], newcomers=Newcomers(join=True))

    def wire(self, module: nn.Module) -> Wire:
        """Declare the factors of every matrix of the student; down also the share of energy and the student's number."""
        state = module_state(module)
        spec: dict[str, tuple[int, ...]] = {}
        for name in shared_entries(module):
            if is_matrix(state[name]):
                rows, columns = state[name].flatten(1).shape
                spec |= {f"{name}/u": (rows, -1), f"{name}/s": (-1,), f"{name}/v": (-1, columns)}
        return Wire(down={**spec, "energy": "scalar", "version": "scalar"}, up={**spec}) if self.compresses else Wire()

    def on_federation_start(self, server: Server) -> None:
        """Fix `T_total`, which a run that is made longer later does not change."""
        if self.compresses:
            server.state[self.key] = {"rounds": server.max_rounds}

    def energy(self, server: Server) -> float:
        """Return `T` of this round: `energy_start + (energy_end - energy_start) min(t / T_total, 1)`."""
        share = min(server.round / server.state[self.key]["rounds"], 1.0)
        return self.energy_start + (self.energy_end - self.energy_start) * share

    # -- server to client ----------------------------------------------------------------------------------------------
    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send the last change of the student at low rank, to a client that has what came before."""
        if not self.compresses:
            return
        server_state = server.state.get(self.key, {})
        version, client_version = server_state.get("version", 0), server_state.get("there", {}).get(job.client)
        extras = message.extras[self.key] = {"energy": self.energy(server), "version": version}
        change: Mapping[str, Tensor] = server_state.get("change", {})
        if client_version is None or client_version not in (version, version - 1):
            return
        matrices = {name.rpartition("/")[0] for name in change}
        if client_version == version - 1:
            extras.update(change)
        message.state = {name: value for name, value in message.state.items() if name not in matrices}

    def on_receive(self, client: Client, message: Message) -> None:
        """Add the change to the student that the client has."""
        extras, client_state = message.extras.get(self.key), client.state.get(self.key)
        if client_state is None or extras is None:
            return
        missing = [name for name in client_state["student"] if name not in message.state]
        change = {} if client_state["version"] == extras["version"] else extras
        for name in missing:
            value = client_state["student"][name]
            if f"{name}/u" in change:
                value = value + product(_factors_in(change, name), value.shape).to(value)
            message.state[name] = client.received[name] = value

    # -- client to server ----------------------------------------------------------------------------------------------
    def on_send(self, client: Client, update: Update) -> None:
        """Send changes of matrices at low rank, and keep the student that came."""
        if not client.contributed or not self.compresses:
            return
        extras: dict[str, Tensor] = {}
        state, sent = dict(update.state), client.message.extras[self.key]
        for name, value in update.state.items():
            if is_matrix(value) and name in client.received and len(state) > 1:  # an update has one entry at least
                change_factors = factors(value - client.received[name].to(value), float(sent["energy"]))
                if change_factors is not None:
                    extras |= {f"{name}/{part}": factor for part, factor in change_factors.items()}
                    del state[name]
        update.state = state
        update.extras[self.key] = extras
        client.state[self.key] = {"student": dict(client.received), "version": int(sent["version"])}

    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse a matrix that is neither there nor in three factors that fit."""
        extras = update.extras.get(self.key, {})
        for name in message.returns if self.compresses and update.contributed and message.work != 0 else ():
            sizes = {
                value.shape[place]
                for part, place in (("u", 1), ("s", 0), ("v", 0))
                if (value := extras.get(f"{name}/{part}")) is not None
            }
            parts = sum(f"{name}/{part}" in extras for part in "usv")
            if (name in update.state) == bool(parts) or (parts and (parts, len(sizes)) != (3, 1)):
                raise ValueError(f"'{name}' is neither sent nor there in three factors")

    def on_update(self, server: Server, update: Update) -> None:
        """Note which student the client has."""
        if self.compresses and update.contributed:
            server_state = server.state.get(self.key, {})
            version_by_client = {**server_state.get("there", {}), update.client: server_state.get("version", 0)}
            server.state[self.key] = {**server_state, "there": version_by_client}

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Return the mean of the students, put together again."""
        old, mean = server.models[server.combining], WeightedMean()
        for update in updates:
            extras, state = update.extras.get(self.key, {}), dict(update.state)
            for name in dict.fromkeys(entry.rpartition("/")[0] for entry in extras):
                state[name] = old[name] + product(_factors_in(extras, name), old[name].shape).to(old[name])
            mean.add(state, server.weight(update))
        return mean.result()

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """Return the old student with the mean change at low rank; entries that do not get smaller are the mean itself."""
        server_state, new = server.state.get(self.key, {}), dict(reduced)
        change: State = {}
        for name, value in reduced.items():
            change_factors = factors(value - old[name], self.energy(server)) if is_matrix(value) else None
            if change_factors is not None:
                change |= {f"{name}/{part}": factor for part, factor in change_factors.items()}
                new[name] = old[name] + product(change_factors, value.shape).to(value)
        server.state[self.key] = {**server_state, "version": server_state.get("version", 0) + 1, "change": change}
        return new


@dataclass(frozen=True)
class AdaptiveLoss:
    """The sum of the losses of teacher and student.

    Attributes:
        strength: Factor on the terms of distillation.
        hidden: Compare representations.
        detach: Stop the gradient at targets and denominator.

    Example:
        >>> side = Side(torch.tensor(0.5), torch.tensor([[2.0, -1.0]]), torch.zeros(1, 3))
        >>> other = Side(torch.tensor(1.5), torch.tensor([[-1.0, 2.0]]), torch.ones(1, 3))
        >>> AdaptiveLoss(strength=1.0, hidden=True, detach=False)(side, other, nn.Identity())
        tensor(5.7154)
    """

    strength: float
    hidden: bool
    detach: bool

    def __call__(self, local: Side, shared: Side, project: nn.Module | None) -> Tensor:
        """Return `CE_t + CE_s + (KL(p_s || p_t) + KL(p_t || p_s) + 2 H) / (CE_t + CE_s)`."""
        task = local.loss + shared.loss
        if self.strength == 0.0:
            return task
        total = divergence(shared.logits, local.logits, self.detach) + divergence(
            local.logits, shared.logits, self.detach
        )
        if self.hidden and project is not None:
            mapped = project(shared.features).to(local.features)
            if self.detach:
                total = (
                    total + F.mse_loss(local.features, mapped.detach()) + F.mse_loss(mapped, local.features.detach())
                )
            else:
                total = total + 2.0 * F.mse_loss(local.features, mapped)
        scale = (task.detach() if self.detach else task).clamp_min(1e-6)
        return task + self.strength * total / scale


def is_matrix(value: Tensor) -> bool:
    """Return whether an entry can be sent as factors: floating-point, of two dimensions or more."""
    return value.ndim >= 2 and value.is_floating_point()


def factors(change: Tensor, energy: float) -> dict[str, Tensor] | None:
    """Return `u`, `s`, `v` with the fewest largest singular values whose squares sum up to a share of all squares.

    Example:
        >>> factors(torch.eye(4), energy=0.95) is None, factors(torch.zeros(4, 4), energy=0.95)["s"].shape
        (True, torch.Size([0]))
    """
    matrix = change.detach().flatten(1)
    if energy >= 1.0:
        return None
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    energy_sums = s.square().cumsum(0)
    count = int((energy_sums < energy * energy_sums[-1]).sum()) + 1 if len(s) and energy_sums[-1] > 0 else 0
    if count * (sum(matrix.shape) + 1) >= matrix.numel():
        return None
    return {
        "u": u[:, :count].to(change.dtype).contiguous(),
        "s": s[:count].to(change.dtype).contiguous(),
        "v": v[:count].to(change.dtype).contiguous(),
    }


def product(factor_by_part: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    """Return `u diag(s) v` in a shape, in fp64, so that server and client add the same bits whatever their threads."""
    u, s, v = (factor_by_part[part].double() for part in FACTORS)
    return ((u * s) @ v).reshape(shape)


def _factors_in(extras: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {part: extras[f"{name}/{part}"] for part in FACTORS}
