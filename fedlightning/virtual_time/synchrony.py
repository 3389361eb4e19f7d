"""Which algorithms need synchronous rounds: :func:`refuse_synchronous` refuses them in asynchronous ones."""

from __future__ import annotations

from fedlightning.contract import FederatedCallback
from fedlightning.errors import ConfigurationError

AT_THE_SERVER = (
    "participants",
    "on_broadcast",
    "on_federation_start",
    "on_round_start",
    "on_round_end",
    "on_update",
    "reduce",
    "on_reduced",
    "denominator",
    "server_step",
    "model_of",
)
"""Methods by which an algorithm works at the server, where it may count on rounds in which everybody answers one model."""


def refuse_synchronous(callback: FederatedCallback) -> None:
    """Refuse an algorithm that needs synchronous rounds."""
    if callback.claims("plan_round"):
        raise ConfigurationError(
            f"{callback.key} plans its rounds, and an asynchronous loop has no rounds to plan: its plan would be ignored. "
            "Leave out trainer.loop, or take an algorithm that runs there (docs/explanation/time.md)."
        )
    facts = callback.facts
    if facts.asynchronous is None and facts.takes_part:
        work = [name for name in AT_THE_SERVER if callback.claims(name)]
        runs = not work
    else:
        work, runs = [], facts.asynchronous is not False
    if not runs:
        reason = f"works at the server ({', '.join(work)})" if work else "is defined for synchronous rounds"
        raise ConfigurationError(
            f"{callback.key} {reason}, and nothing says that it is right where updates arrive one by one and late. Leave out "
            "trainer.loop; or, if it is your own and right there, say so in its facts: Facts(asynchronous=True)."
        )
