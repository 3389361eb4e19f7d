"""Bases of methods that train low-rank adapters: of one rank (`LowRank`), or of a rank for each client (`ClientRanks`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from lightning.pytorch import LightningModule
from torch import nn

from fedlightning.algorithm import (
    Client,
    Facts,
    Job,
    Message,
    Newcomers,
    Server,
    ServerModels,
    SubModels,
    Update,
    WeightingName,
    Wire,
    requires,
)
from fedlightning.callbacks.shared.dealt import dealt_to, refuse_new_deal
from fedlightning.layers import as_names, expand
from fedlightning.ranges import Range
from fedlightning.wrappers import DualByHeadMixin
from fedlightning.wrappers.adapters import adapter_names, add_adapters, resize_adapters

Rank = Annotated[int, Range("[1, inf)", strict=True)]
"""The rank of adapters."""


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

    def size(self) -> tuple[int, float]:
        """Return rank and alpha of the adapters that every module is built with."""
        raise NotImplementedError

    def refuse_empty(self, **given: Any) -> None:
        """Refuse lists and tables without an entry."""
        for name, value in given.items():
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
        return Facts(requires=[tables], newcomers=Newcomers(join=self._join))

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
        known = client in (values if isinstance(values, Mapping) else server.clients)
        return dealt_to(values, server.clients, client) if known else otherwise

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
        own, (r, alpha) = message.extras[self.key], self.size()
        resize_adapters(client.module, own["rank"], own.get("scale", alpha / r))


def _values(option: Any) -> list[Any]:
    """Return all values of an option that is one value, a list or a table."""
    if isinstance(option, Mapping):
        return list(option.values())
    return list(option) if isinstance(option, Sequence) else [option]
