"""FLoRA: adapters of differing ranks, stacked instead of averaged and merged into the network in every round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import (
    Change,
    Client,
    Facts,
    Job,
    Message,
    Need,
    Server,
    State,
    Update,
    WeightingName,
    Wire,
    requires,
)
from fedlightning.callbacks.shared.low_rank import ClientRanks, Rank
from fedlightning.ranges import PositiveFloat, ShareBelowOne
from fedlightning.tensors import WeightedMean
from fedlightning.wrappers.adapters import adapted_layers, untie_adapted

NEW_ADAPTERS = Need(
    "merges the adapters into the network after every round and begins with new ones",
    ("plan_round", "server_step", "on_reduced", Change.VALUES, Change.KEEPS, Change.PARTS),
    "use FedIT in its place",
)


class FLoRA(ClientRanks):
    r"""Low-rank adapters of differing ranks whose sum of products is exact: they are stacked and merged in every round.

    Wang, Shen, He, Sun, Wang, Lyu, Li, "FLoRA: federated fine-tuning large language models with heterogeneous low-rank
    adaptations", NeurIPS 2024.

    * Client: trains fresh adapters of its rank `r_i` beside the frozen network, `W x + (alpha_i / r_i) B_i A_i x`. In every
      visit `A_i` is drawn anew (a function of seed, round and client) and `B_i = 0`.
    * Server: with `p_i` the client's weight, `B = [B_1 ... B_m]` and `A = [p_1 (alpha_1 / r_1) A_1; ...; p_m ... A_m]`,
      so that `B A = sum_i p_i (alpha_i / r_i) B_i A_i` exactly, where :class:`FedIT` averages the factors. It merges:
      `W <- W + B A`.
    * Up: `A_i, B_i` and the head. Down, for each adapted layer: the stacks of the rounds that the client has missed (the
      last round's, if it was there), or the merged `W`, whichever is smaller. A stack grows with the number of clients in a
      round; for small layers and many clients `W` is smaller than it. Both give the client the server's very bits.
    * State: the server keeps `W`, stacks that are smaller than their layer, and what each client has; a client keeps `W`.
    * Deployed: the merged network. `fedlightning.wrappers.unmix(module)` gives the plain module.

    As everything is merged and begins anew, nothing that is tied to the factors of a round goes with it: server optimizers,
    control variates, parts that stay at a client, kept optimizers. They are refused. Adapters need `peft`
    (`pip install peft`).

    Args:
        r: Rank for all, a list dealt to the clients in turn, or a table by client. Default `(16, 8, 4)`.
        alpha: Scale, likewise; a layer's change counts `alpha_i / r_i`. `None` (default): twice the rank, as the authors'
            code.
        dropout: Dropout on the adapters' input. Default 0.05, as :class:`FedIT`.
        target_modules: Paths of `nn.Linear` layers, or ends of paths. `None` (default): every linear layer outside the head.
        head: Names of entries or modules that train in full and are averaged, such as a new classifier (`"net.fc"`).
        weighting: `"samples"` (default), `"uniform"` or `"log"`.

    Raises:
        ValueError: If a rank is less than 1, an alpha is not positive or `dropout` is outside [0, 1).

    Example:
        >>> from fedlightning.callbacks import FLoRA
        >>> method = FLoRA(r={"rome": 8, "oslo": 2}, target_modules=["q_proj"])
        >>> method.largest, method.size()
        (8, (8, 16.0))
    """

    @property
    def facts(self) -> Facts:
        """The adapters become a part of the network after every round, and new ones begin."""
        fresh = requires.FreshOptimizers("begins every visit with new adapters")
        changes = {Change.PRIVATE, Change.SMALLER, Change.ONE_WAY}
        return super().facts.extend(changes=changes, needs=[NEW_ADAPTERS], requires=[fresh])

    def __init__(
        self,
        r: Rank | Sequence[Rank] | dict[str, Rank] = (16, 8, 4),
        alpha: PositiveFloat | Sequence[PositiveFloat] | dict[str, PositiveFloat] | None = None,
        dropout: ShareBelowOne = 0.05,
        target_modules: list[str] | None = None,
        head: str | list[str] | None = None,
        weighting: WeightingName | None = None,
    ) -> None:
        self.refuse_empty(r=r, alpha=alpha)
        super().__init__(r, dropout, target_modules, head, weighting)
        self.alpha = alpha

    def size(self) -> tuple[int, float]:
        """Return the largest rank, and an alpha: clients have their own, and the server's adapters are zero."""
        return self.largest, 2.0 * self.largest

    def scale_of(self, server: Server, client: str) -> float:
        """Return a client's `alpha_i / r_i`."""
        rank = self.rank_of(server, client)
        return 2.0 if self.alpha is None else float(self._of(self.alpha, server, client, 2.0 * rank)) / rank

    def options_by_client(self) -> dict[str, Any]:
        """Return ranks and alphas."""
        return {**super().options_by_client(), "alpha": self.alpha}

    def wrap_module(self, module: LightningModule, owner: str) -> LightningModule:
        """Add adapters; a weight that an adapted layer shares with another one becomes its own, since it will change."""
        return untie_adapted(super().wrap_module(module, owner))

    # -- before round 1 ------------------------------------------------------------------------------------------------
    def wire(self, module: Any) -> Wire:
        """Declare rank, scale, the stacks and how many rows of them are of which round."""
        down: dict[str, Any] = {"rank": "scalar", "scale": "scalar", "version": "scalar", "sizes": (-1,)}
        shapes = {name: parameter.shape for name, parameter in module.named_parameters(remove_duplicate=False)}
        for path, layer in adapted_layers(module).items():
            outputs, inputs = shapes[layer.base]
            down |= {f"{path}.A": (-1, inputs), f"{path}.B": (outputs, -1)}
        return Wire(down=down)

    # -- a round -------------------------------------------------------------------------------------------------------
    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send what the client lacks of the merged network, and no adapters."""
        super().on_broadcast(server, job, message)
        kept = server.state.get(self.key, {})
        version = kept.get("version", 0)
        own = message.extras[self.key]
        own.update(scale=self.scale_of(server, job.client), version=version)
        missed = version - kept.get("has", {}).get(job.client, 0)
        whole = job.work == 0 or bool(job.tag)  # scores and other visits: no client's record counts on them
        for path, layer in adapted_layers(server.module).items():
            for name in (*layer.every_a, *layer.every_b):
                message.state.pop(name, None)
            stacks = kept.get("stacks", {}).get(path, [])
            if whole or missed > len(stacks):
                message.state[layer.base] = server.model[layer.base]
            elif missed:
                last = stacks[-missed:]
                own["sizes"] = torch.tensor([len(stack["A"]) for stack in last])
                own[f"{path}.A"] = torch.cat([stack["A"] for stack in last])
                own[f"{path}.B"] = torch.cat([stack["B"] for stack in last], dim=1)

    def on_receive(self, client: Client, message: Message) -> None:
        """Merge the stacks that came into the network, and make the adapters new."""
        own = message.extras[self.key]
        sizes = own["sizes"].tolist() if "sizes" in own else []
        have, first = client.state.get(self.key, {}).get("version", 0), own["version"] - len(sizes)
        if sizes and have != first:
            raise ValueError(
                f"{self.key}: the record of client '{client.id}' has {have} merges, and what came continues from {first}. It "
                "is not the record that the server knows; give the client back that one, or start the run anew."
            )
        now = client.entries
        fresh: State = {}
        for path, layer in adapted_layers(client.module).items():
            if f"{path}.A" in own:
                stacks = zip(own[f"{path}.A"].split(sizes), own[f"{path}.B"].split(sizes, dim=1), strict=True)
                weight = now[layer.base]
                for a, b in stacks:  # one after another, as the server did: rounding is the same
                    weight = merged(weight, a, b)
                message.state[layer.base] = weight
            fresh[layer.b] = torch.zeros_like(now[layer.b])
            if message.work != 0:
                draw = client.rng(f"adapter {path}")
                fresh[layer.a] = nn.init.kaiming_uniform_(torch.empty_like(now[layer.a]), math.sqrt(5), generator=draw)
        message.state |= fresh
        client.received |= fresh  # what terms in the gradient, as FedProx's, pull to
        client.state[self.key] = {"version": own["version"]}

    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse factors of another rank than the client's."""
        rank = self.rank_of(server, update.client)
        for path, layer in adapted_layers(server.module).items():
            if layer.a in update.state and (len(update.state[layer.a]), update.state[layer.b].shape[1]) != (rank, rank):
                raise ValueError(f"the factors of '{path}' do not have the rank {rank}")

    def on_update(self, server: Server, update: Update) -> None:
        """Note what the client has."""
        kept = server.state.get(self.key, {"version": 0, "stacks": {}, "has": {}})
        server.state[self.key] = {**kept, "has": {**kept["has"], update.client: kept["version"]}}

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Return the merged network and the mean head; keep the stacks that are smaller than their layer."""
        layers, kept = adapted_layers(server.module), server.state[self.key]
        weights = {update.client: server.weight(update) for update in updates}
        trained = [update for update in updates if weights[update.client] > 0]
        if not trained:
            return {}
        total = sum(weights.values())
        factors = {name for layer in layers.values() for name in (*layer.every_a, *layer.every_b)}
        mean = WeightedMean()
        for update in trained:
            head = {name: value for name, value in update.state.items() if name not in factors}
            mean.add(head, weights[update.client])
        new, stacks = mean.result(), {}
        for path, layer in layers.items():
            shares = [weights[one.client] / total * self.scale_of(server, one.client) for one in trained]
            a = torch.cat([share * one.state[layer.a] for share, one in zip(shares, trained, strict=True)])
            b = torch.cat([one.state[layer.b] for one in trained], dim=1)
            weight = server.model[layer.base]
            new |= dict.fromkeys(layer.every_base, merged(weight, a, b))
            stacks[path] = _newest([*kept["stacks"].get(path, []), {"A": a, "B": b}], weight.numel())
        server.state[self.key] = {**kept, "version": kept["version"] + 1, "stacks": stacks}
        return new

    def on_round_end(self, server: Server) -> None:
        """Forget what clients have before visits after the last round change it: the next messages are whole."""
        last = server.round + 1 >= server.rounds and self.key in server.state
        if last and any(callback.claims("final_jobs") for callback in server.callbacks):
            server.state[self.key] = {**server.state[self.key], "stacks": {}, "has": {}}


def merged(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return `W + B A`, worked out in float64.

    Example:
        >>> merged(torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.eye(2))
        tensor([[1., 0.],
                [0., 2.]])
    """
    return (weight.double() + b.double() @ a.double()).to(weight.dtype)


def _newest(stacks: list[dict[str, Tensor]], limit: int) -> list[dict[str, Tensor]]:
    """Return the newest stacks, as many as are together smaller than `limit` numbers."""
    kept: list[dict[str, Tensor]] = []
    for stack in reversed(stacks):
        limit -= stack["A"].numel() + stack["B"].numel()
        if limit <= 0:
            break
        kept.insert(0, stack)
    return kept
