"""What attacks share: who makes them, and that they are refused at real sites."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from torch import Tensor
from torch.utils.data import DataLoader

from fedlightning.algorithm import Change, Client, Facts, FederatedCallback, Newcomers, Server, Setup, Update, requires
from fedlightning.ranges import Range
from fedlightning.tensors import narrow, tied_names, widen

Positive = Annotated[float, Range("(0, inf)")]
FACTS = Facts(mixes_architectures=True, asynchronous=True, newcomers=Newcomers(join=True))
"""Of an attack by which each bad client acts alone."""
MODELS_TRAVEL = requires.Travels(
    "changes the models that bad clients send",
    "Remove it, or let bad clients train on other data: LabelFlip, Backdoor.",
)


class BadClients(FederatedCallback):
    """Base of whatever some bad clients do. At real sites it is refused.

    Args:
        clients: The bad clients' ids.
    """

    def __init__(self, clients: Sequence[str | int]) -> None:
        self.clients = [str(client) for client in clients]

    def check(self, setup: Setup) -> None:
        """Refuse clients that there are not.

        Raises:
            ValueError: Naming one.
        """
        unknown = [client for client in self.clients if client not in set(map(str, setup.run.clients))]
        if unknown:
            raise ValueError(
                f"{self.key} is to be made by client '{unknown[0]}', who is not among {list(setup.run.clients)[:20]}."
            )

    def on_federation_start(self, server: Server) -> None:
        """Refuse real sites.

        Raises:
            ValueError: Always, if there are sites.
        """
        if server.sites:
            raise ValueError(f"{self.key} is an attack for simulations, and these clients are at sites. Remove it.")

    def on_round_start(self, server: Server) -> None:
        """Refuse real sites in a run that goes on with another configuration too."""
        self.on_federation_start(server)


def bad_loader(loader: DataLoader[Any], change: Callable[[Any], Any]) -> DataLoader[Any]:
    """Return a loader whose batches are changed, in the same order."""
    bad = copy.copy(loader)
    bad.collate_fn = partial(_changed, change, loader.collate_fn)
    return bad


def _changed(change: Callable[[Any], Any], collate: Callable[[Any], Any], samples: Any) -> Any:
    return change(collate(samples))


class Attack(BadClients):
    """Base of attacks: some clients train as all do, and send something else.

    Give one to a trainer beside a rule of aggregation. It changes what travels of the model's trainable entries, and nothing
    else; what the clients keep stays honest. At real sites it is refused.

    Args:
        clients: The bad clients' ids.
    """

    rank = 100  # after everybody else has made the honest update

    @property
    def facts(self) -> Facts:
        """Each bad client acts alone, in any loop."""
        return FACTS.extend(changes={Change.ALTERS}, requires=[MODELS_TRAVEL])

    @abstractmethod
    def attacked(self, client: Client, change: Tensor, name: str) -> Tensor:
        """Return what takes the place of the change of an entry.

        Args:
            client: The bad client.
            change: The honest change, float64.
            name: The entry.
        """

    def on_send(self, client: Client, update: Update) -> None:
        """Put the attack in place of the honest change."""
        if client.id not in self.clients or client.evaluating:
            return
        trainable = {name for name, parameter in client.module.named_parameters() if parameter.requires_grad}
        tied = tied_names(client.module)
        for name in sorted(trainable & update.state.keys() & client.received.keys()):
            sent, value = widen(client.received[name]), update.state[name]
            bad = sent + self.attacked(client, widen(value) - sent, name)
            update.state |= dict.fromkeys(tied.get(name, (name,)), narrow(bad, value))
