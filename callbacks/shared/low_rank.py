"""Bases of methods that train low-rank adapters.

They are of one rank (`LowRank`), or of a rank for each client (`ClientRanks`); the server may merge something into the
network after every round (`MergedStacks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import (
    Change,
    Client,
    Facts,
    Job,
    Message,
    Newcomers,
    Server,
    ServerModels,
    Setup,
    State,
    SubModels,
    Update,
    WeightingName,
    Wire,
    requires,
)
from fedlightning.callbacks.shared.values_by_turn import dealt_to, refuse_new_deal
from fedlightning.layers import as_names, expand
from fedlightning.ranges import Range
from fedlightning.tensors import WeightedMean
from fedlightning.wrappers import DualByHeadMixin
from fedlightning.wrappers.adapters import (
    ADAPTER,
    Adapted,
    adapted_layers,
    adapter_names,
    add_adapters,
    resize_adapters,
    untie_adapted,
)

Rank = Annotated[int, Range("[1, inf)", strict=True)]
"""The rank of adapters."""


class AdaptersLearn(requires.Requirement):
    """The loss reaches every adapter that is to train, of whatever kind."""

    usual = (
        "The loss does not reach it: adapt other layers (target_modules), or, with gradient checkpointing, let it be "
        "non-reentrant (use_reentrant=False)."
    )

    def fault(self, owner: Any, setup: Setup) -> str:
        others = (".lora_A.", ".modules_to_save.")  # a first factor is reached where its second one is
        lost = [
            name
            for name in setup.first_step().without_gradient
            if f".{ADAPTER}" in name and not any(part in name for part in others)
        ]
        return f"trains '{lost[0]}', which got no gradient from the first batch" if lost else ""


class LowRank(ServerModels):
    """Base of methods in which the network is frozen, and low-rank adapters beside its linear layers train and travel.

    A subclass gives :meth:`size`.

    Args:
        dropout: Dropout on the adapters' input.
        target_modules: Layers to adapt, or ends of their paths. `None`: every linear layer outside the head.
        head: Names of what trains in full.
        weighting: Weights of the clients.

    Attributes:
        train_a: Whether the first factor trains too.
    """

    train_a: bool = True

    @property
    def facts(self) -> Facts:
        """Adapters have to learn."""
        return super().facts.extend(requires=[AdaptersLearn()])

    def __init__(
        self,
        dropout: float,
        target_modules: list[str] | None,
        head: str | list[str] | None,
        weighting: WeightingName | Callable[[Server, Update], float] | None,
    ) -> None:
        self.dropout = dropout
        self.target_modules = target_modules
        self.head = head
        self.weighting = weighting

    def size(self) -> tuple[int | None, float]:
        """Return rank and alpha of the adapters that every module is built with; `None`: of those that are there."""
        raise NotImplementedError

    def refuse_empty(self, **options: Any) -> None:
        """Refuse lists and tables without an entry."""
        for name, value in options.items():
            if isinstance(value, Sequence | Mapping) and not value:
                raise ValueError(f"{self.key} got {name}={value}. Give one number at least.")

    def wrap_module(self, module: LightningModule, owner: str) -> LightningModule:
        """Freeze everything but the head and add adapters; they start with the same bits for every owner."""
        if isinstance(module, DualByHeadMixin):
            raise ValueError(
                f"{self.key} puts adapters into a network, which FENDA's head=... has doubled already: the copy and the "
                f"wider head would not fit them. Build the model from a DualExtractor and leave head out, or remove "
                f"{self.key} or FENDA."
            )
        r, alpha = self.size()
        return add_adapters(
            module,
            r=r,
            alpha=alpha,
            dropout=self.dropout,
            target_modules=self.target_modules,
            head=expand(as_names(self.head), module.state_dict()),
            train_a=self.train_a,
        )

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Return the names of the adapters and the head."""
        return adapter_names(module)

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the network with the server's adapters, or ``None`` where other callbacks keep some of them private."""
        private = set(adapter_names(server.module)) - set(server.shared_names())
        return None if private else server.module_with(server.model)


class ClientRanks(LowRank, SubModels):
    """Base of methods in which every client has adapters of a rank that it can afford.

    Modules are built with the largest rank; a client's own one is cut to its rank when it is opened.

    Args:
        r: One rank for all, a list that is dealt to the clients in turn, or a table by client id.
        dropout: Dropout on the adapters' input.
        target_modules: Layers to adapt.
        head: Names of what trains in full.
        weighting: Weights of the clients.
    """

    rank = -1  # what came gets the shapes of the client's module before others look at it

    def __init__(
        self,
        r: int | Sequence[int] | dict[str, int],
        dropout: float,
        target_modules: list[str] | None,
        head: str | list[str] | None,
        weighting: WeightingName | Callable[[Server, Update], float] | None,
    ) -> None:
        super().__init__(dropout, target_modules, head, weighting)
        self.r = r

    @property
    def facts(self) -> Facts:
        """Ranks that are dealt in turn must stay when clients join."""
        tables = requires.ForEveryClient(of=tuple(self.options_by_client()))
        return super().facts.extend(requires=[tables], newcomers=Newcomers(join=self._join))

    @property
    def largest(self) -> int:
        """The largest rank."""
        return int(max(_values(self.r)))

    def rank_of(self, server: Server, client: str) -> int:
        """Return a client's rank; the largest for one that takes no part in training and that no table names."""
        return int(self._of(self.r, server, client, self.largest))

    def _of(self, values: Any, server: Server, client: str, otherwise: Any) -> Any:
        """Return a client's value of an option that is a number, a list dealt in turn, or a table."""
        if isinstance(values, int | float):
            return values
        has_value = client in (values if isinstance(values, Mapping) else server.clients)
        return dealt_to(values, server.clients, client) if has_value else otherwise

    def options_by_client(self) -> dict[str, Any]:
        """Return the options that may differ by client."""
        return {"r": self.r}

    def _join(self, server: Server, clients: Sequence[str]) -> None:
        """Refuse to change the ranks of the clients that are there, which come from a list in turn."""
        for option, values in self.options_by_client().items():
            if isinstance(values, Sequence):
                refuse_new_deal(self, server, clients, option, values)

    def wire(self, module: Any) -> Wire:
        """Declare the client's rank."""
        return Wire(down={"rank": "scalar"})

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Tell the client its rank."""
        message.extras[self.key] = {"rank": self.rank_of(server, job.client)}

    def on_build(self, client: Client, message: Message) -> None:
        """Cut the adapters to the client's rank."""
        extras, (_, alpha) = message.extras[self.key], self.size()
        resize_adapters(client.module, extras["rank"], extras.get("scale", alpha / self.largest))


class MergedStacks(LowRank):
    """Base of methods whose server merges a low-rank change into the network after every round: `W <- W + B A`.

    A client gets the changes of the rounds that it has missed, as stacks, or the merged `W`, whichever is smaller. Both give
    it the server's very bits. A subclass gives its :meth:`reduce` and calls :meth:`merge` there.
    """

    @property
    def facts(self) -> Facts:
        """Messages hold entries of the network, which never leave a client."""
        return super().facts.extend(changes={Change.PRIVATE})

    def wrap_module(self, module: LightningModule, owner: str) -> LightningModule:
        """Add adapters; a weight that an adapted layer shares with another one becomes its own, since it will change.

        Raises:
            ValueError: If a weight is of a short type, which would round the changes away.
        """
        module = untie_adapted(super().wrap_module(module, owner))
        entries = dict(module.named_parameters(remove_duplicate=False))
        for path, layer in adapted_layers(module).items():
            if entries[layer.base].dtype.itemsize < 4:
                raise ValueError(
                    f"{self.key} merges into '{path}', whose weight is {entries[layer.base].dtype}: changes below its "
                    "rounding would be lost in every round. Give the network in float32, or use FedIT, whose adapters stay "
                    "beside the weights."
                )
        return module

    def wire(self, module: Any) -> Wire:
        """Declare the stacks and how many rows of them are of which round."""
        down: dict[str, Any] = {**super().wire(module).down, "version": "scalar", "sizes": (-1,)}
        shapes = {name: parameter.shape for name, parameter in module.named_parameters(remove_duplicate=False)}
        for path, layer in adapted_layers(module).items():
            outputs, inputs = shapes[layer.base]
            down |= {f"{path}.A": (-1, inputs), f"{path}.B": (outputs, -1)}
        return Wire(down=down)

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send what the client lacks of the merged network."""
        super().on_broadcast(server, job, message)
        kept = server.state.get(self.key, {})
        version = kept.get("version", 0)
        extras = message.extras.setdefault(self.key, {})
        extras["version"] = version
        missed = version - kept.get("has", {}).get(job.client, 0)
        whole = job.work == 0 or bool(job.tag)  # scores and other visits: no client's record counts on them
        for path, layer in adapted_layers(server.module).items():
            stacks = kept.get("stacks", {}).get(path, [])
            if whole or missed > len(stacks):
                message.state[layer.base] = server.model[layer.base]
            elif missed:
                last = stacks[-missed:]
                extras["sizes"] = torch.tensor([len(stack["A"]) for stack in last])
                extras[f"{path}.A"] = torch.cat([stack["A"] for stack in last])
                extras[f"{path}.B"] = torch.cat([stack["B"] for stack in last], dim=1)

    def on_receive(self, client: Client, message: Message) -> None:
        """Merge the stacks that came into the network."""
        extras = message.extras[self.key]
        sizes = extras["sizes"].tolist() if "sizes" in extras else []
        have, first = client.state.get(self.key, {}).get("version", 0), extras["version"] - len(sizes)
        if sizes and have != first:
            raise ValueError(
                f"{self.key}: the record of client '{client.id}' has {have} merges, and what came continues from {first}. It "
                "is not the record that the server knows; give the client back that one, or start the run anew."
            )
        now = client.entries
        for path, layer in adapted_layers(client.module).items():
            if f"{path}.A" in extras:
                stacks = zip(extras[f"{path}.A"].split(sizes), extras[f"{path}.B"].split(sizes, dim=1), strict=True)
                weight = now[layer.base]
                for a, b in stacks:  # one after another, as the server did: rounding is the same
                    weight = merged(weight, a, b)
                message.state[layer.base] = weight
        client.state[self.key] = {"version": extras["version"]}

    def on_update(self, server: Server, update: Update) -> None:
        """Note what the client has."""
        kept = server.state.get(self.key, {"version": 0, "stacks": {}, "has": {}})
        server.state[self.key] = {**kept, "has": {**kept["has"], update.client: kept["version"]}}

    def merge(self, server: Server, changes: Mapping[str, tuple[Tensor, Tensor]]) -> State:
        """Return the network with a change `B A` of each adapted layer; keep the stacks that are smaller than their layer.

        Args:
            server: The server.
            changes: By path, `B` and `A`.
        """
        kept, stacks = server.state[self.key], {}
        new: State = {}
        for path, layer in adapted_layers(server.module).items():
            b, a = changes[path]
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


def _values(option: Any) -> list[Any]:
    """Return all values of an option that is one value, a list or a table."""
    if isinstance(option, Mapping):
        return list(option.values())
    return list(option) if isinstance(option, Sequence) else [option]


def truncated(state: State, layers: Iterable[Adapted], rank: int) -> State:
    """Return a state with the first `rank` rows of every `A` and columns of every `B` in it."""
    cut: State = {}
    for layer in layers:
        if layer.a in state:
            cut |= {name: state[name][:rank].clone() for name in layer.every_a}
            cut |= {name: state[name][:, :rank].clone() for name in layer.every_b}
    return {**state, **cut}


def refuse_other_rank(server: Server, update: Update, rank: int) -> None:
    """Refuse factors of another rank than a client's.

    Raises:
        ValueError: Naming the layer.
    """
    for path, layer in adapted_layers(server.module).items():
        if layer.a in update.state and (len(update.state[layer.a]), update.state[layer.b].shape[1]) != (rank, rank):
            raise ValueError(f"the factors of '{path}' do not have the rank {rank}")


def mean_of_rest(server: Server, updates: list[Update]) -> tuple[list[tuple[Update, float]], State]:
    """Return the updates that count, each with its share, and the mean of their entries that are not factors."""
    layers = adapted_layers(server.module).values()
    factors = {name for layer in layers for name in (*layer.every_a, *layer.every_b)}
    weights = [server.weight(update) for update in updates]
    counting, mean = [], WeightedMean()
    for update, weight in zip(updates, weights, strict=True):
        if weight > 0:
            counting.append((update, weight / sum(weights)))
            mean.add({name: value for name, value in update.state.items() if name not in factors}, weight)
    return counting, mean.result() if counting else {}


def singular_factors(b: Tensor, a: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors of the best approximation of `B A` of a rank, without `B A` itself, in float64.

    Both hold the root of each singular value, largest first; none that is zero up to rounding in float32 is there, so that
    there may be fewer than `rank`. (A shorter type's rounding, times a layer's width, would be more than all of them.) The
    largest entry of each row of the second one is positive.

    Example:
        >>> b, a = singular_factors(torch.eye(2), torch.tensor([[0.0, 4.0], [1.0, 0.0]]), rank=1)
        >>> b.tolist(), a.tolist()
        ([[2.0], [0.0]], [[0.0, 2.0]])
    """
    of_b, core_b = torch.linalg.qr(b.double())
    of_a, core_a = torch.linalg.qr(a.double().T)
    u, values, v = torch.linalg.svd(core_b @ core_a.T, full_matrices=False)
    left, right = of_b @ u, v @ of_a.T
    largest = right.gather(1, right.abs().argmax(1, keepdim=True)).sign().T
    rounding = min(torch.finfo(dtype).eps for dtype in (a.dtype, torch.float32)) * max(len(b), a.shape[1])
    kept = min(rank, int((values > values.max() * rounding).sum()))
    roots = values[:kept].sqrt()
    return (left * largest)[:, :kept] * roots, (right * largest.T)[:kept] * roots[:, None]
