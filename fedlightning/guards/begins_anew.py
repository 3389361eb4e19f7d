"""What a step goes by that begins anew in every visit: numbers that a module keeps as attributes, and its clock.

An attribute is taken up, and a clock is followed, if the same step from the same model with the same draws comes out another
way with another value of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.client.kept import Values, is_same, values_of
from fedlightning.compat.lightning_runs import detached
from fedlightning.fast.log_sheet import FastLoopRefused
from fedlightning.tensors import clone, module_state
from fedlightning.wrappers.mixing import Mixin, mix

AHEAD = 1000
"""Epochs and steps by which a clock is put forward."""
Build = Callable[[], LightningModule]
"""Makes a module as a visit begins with it."""
Step = Callable[[LightningModule], object]
"""Takes a step with a module."""


class Clock:
    """The clock of a module, which notes what is read of it.

    Attributes:
        ahead: Epochs and steps by which it is put forward.
        reads: Names of the properties that were read.
    """

    def __init__(self, ahead: int = 0) -> None:
        self.ahead = ahead
        self.reads: set[str] = set()

    def __deepcopy__(self, memo: object) -> Clock:
        return self  # a copy of the module has the same one


class ClockMixin(Mixin):
    """A module whose epochs and steps are those of a :class:`Clock`."""

    watched_clock: Clock

    @property
    def current_epoch(self) -> int:
        return self._ahead("current_epoch", super().current_epoch)  # type: ignore[misc]

    @property
    def global_step(self) -> int:
        return self._ahead("global_step", super().global_step)  # type: ignore[misc]

    def _ahead(self, name: str, value: int) -> int:
        self.watched_clock.reads.add(name)
        return value + self.watched_clock.ahead


CLOCKS = frozenset(("current_epoch", "global_step"))
"""Names of a module's clocks. No attribute of a LightningModule can be called so."""


def watch_clock(module: LightningModule, ahead: int = 0) -> Clock:
    """Give a module a clock of its own, which is returned. The class of the module is another one then."""
    module.watched_clock = clock = Clock(ahead)  # type: ignore[assignment]
    mix(module, ClockMixin)
    return clock


def taken_up(build: Build, step: Step, before: Values, after: Values) -> list[str]:
    """Return the attributes that a step takes up where the last one left them, as it does not do with a sum of its own.

    The same step, from the same model, leaves another value of these if it begins with the value that it left before.

    Args:
        build: Makes the module.
        step: Takes the step.
        before: Values of its attributes before a step.
        after: Those after it.
    """
    changed = {name: value for name, value in after.items() if not is_same(value, before.get(name))}

    def begin(module: LightningModule) -> None:
        for name, value in changed.items():
            part, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(part), attribute, value.clone() if isinstance(value, Tensor) else value)

    again = _left(build, step, values_of, begin) if changed else None
    names = [name for name, value in changed.items() if again is not None and not is_same(value, again.get(name))]
    repeated = _left(build, step, values_of) if names else None
    return sorted(name for name in names if repeated is not None and is_same(changed[name], repeated.get(name)))


def followed(build: Build, step: Step, trained: LightningModule, clock: Clock) -> list[str]:
    """Return the clocks by which a step goes: with others it moves the model another way.

    Args:
        build: Makes the module.
        step: Takes the step.
        trained: A module that has taken it.
        clock: The clock that it had.
    """
    if not clock.reads:
        return []
    entries = _entries(trained)
    ahead = _left(build, step, _entries, partial(watch_clock, ahead=AHEAD))
    if ahead is None or _are_same(ahead, entries):
        return []
    repeated = _left(build, step, _entries)
    return sorted(clock.reads) if repeated is not None and _are_same(repeated, entries) else []


def _left(
    build: Build, step: Step, read: Callable[[LightningModule], Values], begin: Step | None = None
) -> Values | None:
    """Return what a step leaves of a new module; `None`: it fails, as it has one behind it that it does not know of.

    A step that leaves something else each time (random numbers of its own, kernels of a GPU) tells nothing: whoever says
    what a difference comes from takes the step from the same beginning once more.
    """
    module = build()
    try:
        if begin is not None:
            begin(module)
        step(module)
        return read(module)
    except (Exception, FastLoopRefused):  # whatever the user's code may raise
        return None
    finally:
        detached(module)


def _are_same(values: Values, others: Values) -> bool:
    return values.keys() == others.keys() and all(is_same(value, others[name]) for name, value in values.items())


def _entries(module: LightningModule) -> Values:
    """Return copies of a model's entries and of their gradients, which a step that accumulates has alone."""
    gradients = {
        f"grad of {name}": entry.grad
        for name, entry in module.named_parameters()
        if entry.grad is not None and entry.grad.layout == torch.strided
    }
    return {**clone(module_state(module)), **clone(gradients)}
