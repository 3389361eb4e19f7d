"""Attackers who work together: what they send is made of what they know of each other's honest updates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

from fedlightning.algorithm import (
    Change,
    Facts,
    Message,
    Need,
    Newcomers,
    Server,
    Setup,
    State,
    Update,
    UpdateInterception,
    contributors,
    warn,
)
from fedlightning.callbacks.attacks.bad_clients import MODELS_TRAVEL, BadClients, Positive
from fedlightning.tensors import add_row, to_row

Knows = Literal["colluders", "everybody"]
WHOLE = Need(
    "makes one update out of those of all bad clients",
    (Change.PARTS, Change.SMALLER, "on_build", "encode", "model_of", "place"),
)
"""A codec's code would stand for something else than the attack; of several models some have a single attacker."""


class Colluding(UpdateInterception, BadClients):
    """Base of attacks in which all bad clients send one change, made of honest changes that they know.

    Bad clients train as all do, and keep what they have trained. On the way to the server their changes of the trainable
    entries are replaced; buffers, sample counts and extras stay honest. In simulation, in synchronous rounds.

    Args:
        clients: The bad clients' ids.
        knows: `"colluders"` (default): the bad clients know what they themselves have learnt; `"everybody"`: they know the
            changes of the good clients, and use those.
    """

    needed = 1
    """Honest changes that it is made of, at least."""

    def __init__(self, clients: Sequence[str | int], knows: Knows = "colluders") -> None:
        super().__init__(clients)
        self.knows = knows

    @property
    def facts(self) -> Facts:
        """It needs whole updates, and has no state."""
        needs, join = [WHOLE], Newcomers(join=True)
        return super().facts.extend(needs=needs, requires=[MODELS_TRAVEL], mixes_architectures=True, newcomers=join)

    @abstractmethod
    def crafted(self, changes: Tensor, clients: int, bad: int) -> Tensor:
        """Return the change that all bad clients send, `(d,)`.

        Args:
            changes: Honest changes that the bad clients know, `(k, d)`, float64.
            clients: Number of clients whose updates are combined.
            bad: Number of the bad ones among them.
        """

    def intercept(self, server: Server, sent: Sequence[Message], updates: Sequence[Update]) -> None:
        """Put one change in place of those of all bad clients that trained a model."""
        contributed = [pair for pair in zip(sent, updates, strict=True) if contributors(pair[1:])]
        for model in dict.fromkeys(update.model for _, update in contributed):
            pairs = [pair for pair in contributed if pair[1].model == model and pair[1].state]
            bad = [pair for pair in pairs if pair[1].client in self.clients]
            good = [pair for pair in pairs if pair[1].client not in self.clients]
            known_pairs = bad if self.knows == "colluders" else good
            if not bad:
                continue
            if len(known_pairs) < self.needed:
                warn(
                    f"Round {server.round + 1}: {self.key} does nothing: bad clients know {len(known_pairs)} changes of "
                    f"model '{model}', and it is made of {self.needed} or more."
                )
                continue
            names = [name for name in server.architecture(model).trainable if name in bad[0][1].state]
            old = server.models[model]
            changes = torch.stack([change_of(*pair, old, names) for pair in known_pairs])
            crafted = self.crafted(changes, len(pairs), len(bad))
            for message, update in bad:  # what the client keeps may be the same dict
                update.state = update.state | add_row(_starts(message, old, names), crafted)


def change_of(message: Message, update: Update, old: State, names: Sequence[str]) -> Tensor:
    """Return by how much a client has moved what it was sent, as one vector in float64."""
    return to_row(update.state, names) - to_row(_starts(message, old, names))


def _starts(message: Message, old: State, names: Sequence[str]) -> State:
    return {name: message.state.get(name, old[name]) for name in names}


class InnerProductManipulation(Colluding):
    """Bad clients send ``-epsilon`` times the mean of the honest changes that they know.

    Xie, Koyejo, Gupta, "Fall of empires: breaking Byzantine-tolerant SGD by inner product manipulation", UAI 2020
    (arXiv:1903.03936): the mean of the round points away from where everybody wants to go, while a small ``epsilon`` keeps
    each bad change close to good ones. Of ``n`` clients with ``m`` bad ones the mean turns round where
    ``epsilon > (n - m) / m``; rules that choose among changes are deceived by less.

    Args:
        clients: The bad clients' ids.
        epsilon: How long it is, in means. Default 0.5 (the paper also has 0.1 and 10).
        knows: `"colluders"` (default) or `"everybody"` (the paper); see :class:`Colluding`.

    Example:
        >>> InnerProductManipulation([0]).crafted(torch.tensor([[1.0], [3.0]]), clients=5, bad=1)
        tensor([-1.])
    """

    def __init__(self, clients: Sequence[str | int], epsilon: Positive = 0.5, knows: Knows = "colluders") -> None:
        super().__init__(clients, knows)
        self.epsilon = epsilon

    def crafted(self, changes: Tensor, clients: int, bad: int) -> Tensor:
        """Return the mean, turned round."""
        return -self.epsilon * changes.mean(dim=0)


class ALIE(Colluding):
    """Bad clients send the mean of the honest changes minus ``z`` standard deviations, coordinate by coordinate.

    Baruch, Baruch, Goldberg, "A little is enough: circumventing defenses for distributed learning", NeurIPS 2019
    (arXiv:1902.06156): with ``s = floor(n / 2 + 1) - m`` clients to win over, ``z_max`` is the number at which the standard
    normal distribution is ``(n - m - s) / (n - m)``; so many good clients are expected to lie farther out.
    Mean and standard deviation (of the population) are over the changes that the bad clients know.

    Args:
        clients: The bad clients' ids.
        z: Standard deviations. `None` (default): ``z_max`` of the clients and bad clients of the round.
        knows: `"colluders"` (default, the paper) or `"everybody"`; see :class:`Colluding`.

    Example:
        >>> round(ALIE([0, 1]).standard_deviations(clients=50, bad=12), 3)  # the paper's setting
        0.336
    """

    needed = 2

    def __init__(self, clients: Sequence[str | int], z: Positive | None = None, knows: Knows = "colluders") -> None:
        super().__init__(clients, knows)
        self.z = z

    def check(self, setup: Setup) -> None:
        """Refuse numbers of clients with which nothing would be changed.

        Raises:
            ValueError: With the numbers.
        """
        super().check(setup)
        count, bad = len(setup.run.clients), len(set(self.clients))
        if bad == 1 and self.knows == "colluders":
            raise ValueError(
                "ALIE needs the spread of honest changes, and the one bad client knows only its own. Name more clients, or "
                "set knows='everybody'."
            )
        if bad and self.z is None and not 0.5 < _share(count, bad) < 1:
            raise ValueError(
                f"ALIE with {bad} bad clients of {count} has no z_max above 0: (n - m - s) / (n - m) is "
                f"{_share(count, bad):.3g} and must be between 0.5 and 1. Name other clients, or give z=1.5."
            )

    def standard_deviations(self, clients: int, bad: int) -> float:
        """Return ``z``, or ``z_max`` for a number of clients; 0 if it would be below, 3 where the bad ones are most."""
        if self.z is not None:
            return self.z
        share = _share(clients, bad)
        return 3.0 if share >= 1 else max(0.0, NormalDist().inv_cdf(share)) if share > 0 else 0.0

    def crafted(self, changes: Tensor, clients: int, bad: int) -> Tensor:
        """Return the mean minus some standard deviations."""
        return changes.mean(dim=0) - self.standard_deviations(clients, bad) * changes.std(dim=0, correction=0)


def _share(clients: int, bad: int) -> float:
    """Return ``(n - m - s) / (n - m)``: where the good clients end that are to lie nearer to the mean than the bad ones."""
    return 1.0 if bad >= clients else (clients - (clients // 2 + 1)) / (clients - bad)
