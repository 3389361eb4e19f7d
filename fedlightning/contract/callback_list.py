"""The federated callbacks of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from fedlightning.contract.callback import FAMILIES, FederatedCallback, refuse_lost_facts
from fedlightning.contract.capabilities import METHODS, Change
from fedlightning.contract.families import Protection, UpdateInterception
from fedlightning.contract.jobs import WEIGHTINGS
from fedlightning.contract.messages import Update
from fedlightning.contract.outgoing_items import Kind, OutgoingItem
from fedlightning.errors import ConfigurationError
from fedlightning.ranges import refuse_in_words

if TYPE_CHECKING:
    from fedlightning.server.server import Server

ROLES = {
    "participants": "who is in a round",
    "plan_round": "what a round does",
    "model_of": "which model a client is sent",
    "neighbours": "whose models a client mixes",
    "final_jobs": "what follows the last round",
    "local_phases": "in which phases a client trains",
    "training_batches": "how training batches are drawn",
    "encode": "in which code an update travels",
    "reduce": "how updates become one model",
    "denominator": "what the sum of updates is divided by",
    "server_step": "which step the server takes",
    "global_module": "which model is the server's",
    "personal_module": "which model is a client's own",
}
"""Methods that at most one callback of a run may answer, and what they decide."""

T = TypeVar("T", bound=FederatedCallback)


FIXED = "FederatedTrainer(callbacks=[...]) for a trainer of its own"


@refuse_in_words({}, dict.fromkeys(("append", "extend", "insert", "remove", "clear", "pop"), FIXED))
@dataclass
class CallbackList:
    """Runs events on all callbacks, finds the one that answers a role, refuses double claims.

    Attributes:
        callbacks: The callbacks by their rank, those of equal rank in the user's order.

    Raises:
        ValueError: If two callbacks have one key, claim one role, both merge, or ask for different weightings.
    """

    callbacks: list[FederatedCallback] = field(default_factory=list)

    def __post_init__(self) -> None:
        keys = [callback.key for callback in self.callbacks]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"{key} is in the list of callbacks {keys.count(key)} times. Keep one of them.")
        for callback in self.callbacks:
            refuse_lost_facts(type(callback), callback)
            for name in sorted({*METHODS, *ROLES, *FAMILIES} & vars(callback).keys()):
                if callable(getattr(callback, name)) and not callback.claims(name):
                    raise ValueError(
                        f"{callback.key}.{name} is set on the object, where nothing calls it. Write a method of the class."
                    )
        for role, what in ROLES.items():
            claimants = [callback.key for callback in self.callbacks if callback.claims(role)]
            if len(claimants) > 1:
                raise ValueError(
                    f"{' and '.join(claimants)} both claim '{role}', which only one callback can answer: {what}. "
                    "Remove one of them."
                )
        merging = [callback.key for callback in self.callbacks if Change.START in callback.facts.changes]
        if len(merging) > 1:
            raise ValueError(
                f"{' and '.join(merging)} both merge the model that arrives with what the client has kept, and each would "
                "merge what the other has merged already. Remove one of them."
            )
        self.callbacks = sorted(self.callbacks, key=lambda callback: callback.rank)
        wishes = {callback.key: callback.weighting for callback in self.callbacks if callback.weighting is not None}
        if any(wish != next(iter(wishes.values())) for wish in wishes.values()):
            wordings = {key: "a function of its own" if callable(wish) else wish for key, wish in wishes.items()}
            raise ValueError(
                f"Callbacks ask for different weightings: {wordings}. A mean has one: set the same `weighting` on "
                "them, or none beside one that weighs by a function of its own."
            )
        for key, wish in wishes.items():
            if not callable(wish) and not (isinstance(wish, str) and wish in WEIGHTINGS):
                raise ValueError(
                    f"{key} has weighting={wish!r}. Known weightings: {sorted(WEIGHTINGS)}, or a function of the server "
                    "and the update."
                )
            if callable(wish) and not _takes_two(wish):
                raise ValueError(
                    f"{key}.weighting is called with the server and the update, and takes something else. In a class, write "
                    "a method: def weighting(self, server, update)."
                )

    def __radd__(self, other: Iterable[object]) -> Any:
        """Refuse what Lightning's Tuner does: `[callback] + trainer.callbacks`."""
        raise ConfigurationError(
            f"{', '.join(type(new).__name__ for new in other)} cannot be added to the callbacks of a FederatedTrainer, "
            f"which has read them. Use {FIXED}; Lightning's Tuner tunes on one client: "
            "Tuner(Trainer()).lr_find(module, loader)."
        )

    def __iter__(self) -> Iterator[FederatedCallback]:
        return iter(self.callbacks)

    def event(self, name: str, *args: Any) -> None:
        """Run an event on every callback that has it, in order."""
        for callback in self.callbacks:
            if (method := getattr(callback, name, None)) is not None:
                method(*args)

    def role(self, name: str) -> FederatedCallback | None:
        """Return the callback that answers role `name`, or `None` for the core's default."""
        return next((callback for callback in self.callbacks if callback.claims(name)), None)

    def answering(self, kind: type[T], name: str) -> T | None:
        """Return the callback of a family that answers role `name`, or `None` for the core's default."""
        return next(
            (callback for callback in self.callbacks if isinstance(callback, kind) and callback.claims(name)), None
        )

    def making(self, change: Change) -> list[FederatedCallback]:
        """Return the callbacks that declare a change."""
        return [callback for callback in self.callbacks if change in callback.facts.changes]

    @cached_property
    def protecting(self) -> list[Protection]:
        """The callbacks that promise how little what leaves clients tells."""
        return [callback for callback in self.callbacks if isinstance(callback, Protection)]

    def withholding(self, kind: Kind) -> str:
        """Return the key of the first callback that does not let such items leave clients; empty: none."""
        return next(
            (callback.key for callback in self.protecting if callback.covers(OutgoingItem(kind)) == "withheld"), ""
        )

    @property
    def withheld_splits(self) -> list[str]:
        """The splits of which nothing leaves clients but sizes, not even a hash of who holds which samples."""
        kinds: dict[str, Kind] = {"train": "classes", "val": "scores"}
        return [split for split, kind in kinds.items() if self.withholding(kind)]

    @property
    def covers_training(self) -> bool:
        """Whether the noise of what leaves is in what training has left, and in nothing else."""
        return any(callback.covers_training for callback in self.protecting)

    @property
    def hides_clients(self) -> bool:
        """Whether a callback hides clients: each counts whatever its training did, and nothing goes by its update's size."""
        return any(callback.hides_clients for callback in self.protecting)

    def weight(self, server: Server, update: Update) -> float:
        """Return an update's weight before normalisation, by the weighting that the callbacks agree on."""
        wishes = (callback.weighting for callback in self.callbacks if callback.weighting is not None)
        weighting = next(wishes, "samples")
        return weighting(server, update) if callable(weighting) else WEIGHTINGS[weighting](update.num_samples)

    def correctors(self) -> list[FederatedCallback]:
        """Return the callbacks that have a gradient-form term."""
        return [callback for callback in self.callbacks if callback.claims("correct_gradient")]

    def loss_terms(self) -> list[FederatedCallback]:
        """Return the callbacks that have a loss-form term."""
        return [callback for callback in self.callbacks if callback.claims("training_loss")]

    def intercepting(self) -> list[UpdateInterception]:
        """Return the callbacks that change updates on their way."""
        return [
            callback
            for callback in self.callbacks
            if isinstance(callback, UpdateInterception) and callback.claims("intercept")
        ]

    def find(self, kind: type[T]) -> T | None:
        """Return the first callback of a class, or `None`."""
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    return True
