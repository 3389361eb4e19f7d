"""The terms on which a run was trained: what a comparison with another run must know beside the scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from fedlightning.client.optimizers import have_memory
from fedlightning.contract import CallbackList, FederatedCallback
from fedlightning.server.costs import SPENT
from fedlightning.server.server import Server


def weighting_of(callbacks: CallbackList) -> str:
    """Return by what clients are weighted: `"samples"`, `"uniform"`, `"log"`, or the callback that does it its own way.

    Example:
        >>> from fedlightning.callbacks import FedAvg, FedBABU
        >>> weighting_of(CallbackList([])), weighting_of(CallbackList([FedAvg()])), weighting_of(CallbackList([FedBABU()]))
        ('samples', 'samples', 'uniform')
    """
    reducer = callbacks.role("reduce")
    if reducer is not None:
        return f"{reducer.key}'s own"
    for callback in callbacks:
        if callback.weighting is not None:
            return callback.weighting if isinstance(callback.weighting, str) else f"{callback.key}'s own"
    return "samples"


def optimizer_state_of(
    callbacks: Sequence[Any], given: Literal["reset", "keep"] | None = None
) -> Literal["reset", "keep"]:
    """Return what becomes of optimizers between visits: as the user says, else as an algorithm wishes, else `"reset"`."""
    wishes: list[Literal["reset", "keep"]] = [
        wish
        for callback in callbacks
        if isinstance(callback, FederatedCallback) and (wish := callback.facts.optimizer_state) is not None
    ]
    return given or (wishes[0] if wishes else "reset")


def _any_memory(found: Iterable[bool | None]) -> bool | None:
    """Return True if one of them is, `None` if none is and one cannot be told."""
    answers = set(found)
    return True if True in answers else None if None in answers else False


def terms_of(server: Server, kept: Sequence[str], validations: int) -> dict[str, Any]:
    """Return the terms of a run, for `summary.json`."""
    return {
        "optimizer_state": server.blueprint.settings.optimizer_state,
        "optimizer_memory": _any_memory(have_memory(own.module) for own in server.models.architectures.values()),
        "weighting": weighting_of(server.callbacks) if server.returned_names() else None,
        "local_steps": server.costs.steps,
        **{name: server.costs.spent.get(name, 0) for name in SPENT},
        "selection": dict.fromkeys(kept, validations),
    }
