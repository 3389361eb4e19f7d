"""The twin's way through a step of the user's, up to each call of the head."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlightning.seeding import preserved
from fedlightning.wrappers import heads
from fedlightning.wrappers.follow import SIMPLE
from fedlightning.wrappers.fusion import HeadReachedError

_INTERNALS = frozenset(vars(nn.Module())) | {"_trainer", "log", "log_dict"}


class Recorded:
    """One step of the user's module, and the local features for each call of the head in it.

    Before the step the twin runs it up to the first call, which gives the first features. Where the step calls the head
    again, the twin runs it once more with the same random draws, its earlier calls of the head answered by what the
    module's own head has given, up to the present call. Its buffers and counters change as if it had run the step once.

    Args:
        module: The user's module.
        twin: Its copy without the head.
        name: Name of the step.
        args: Positional arguments of the step.
        kwargs: Keyword arguments of the step.
    """

    def __init__(self, module: Any, twin: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module, self._twin = module, twin
        self._name, self._args, self._kwargs = name, args, kwargs
        self._outputs: list[Any] = []
        self._draws: Any = None
        self._autocast = _autocast(module.device.type)
        self._exports = torch.compiler.is_exporting()
        self._handle: Any = None
        if not self._exports:
            head = module.get_submodule(module.dual_exchange.head)
            self._handle = head.register_forward_hook(self._keep)

    def _keep(self, head: nn.Module, inputs: Any, output: Any) -> None:
        self._outputs.append(output)

    def close(self) -> None:
        """Let go of the step."""
        if self._handle is not None:
            self._handle.remove()
        self._outputs.clear()

    def first(self) -> Tensor | None:
        """Return the local features for the first call of the head; `None` if the twin did not get there."""
        if self._exports:
            return self._through()
        _follow(self._module, self._twin)
        with preserved() if self._same else contextlib.nullcontext():
            if self._same:
                self._draws = draws()
            return self._run()

    def later(self) -> Tensor | None:
        """Return the local features for the present call of the head; `None` if the twin did not get there."""
        head = self._twin.get_submodule(self._module.dual_exchange.head)
        before = Kept(self._twin)
        answers = Answers(list(self._outputs))

        def go_on() -> None:
            heads.replace_everywhere(self._twin, answers, head)
            before.restore()

        answers.when_done = go_on  # the next call is the present one
        heads.replace_everywhere(self._twin, head, answers)
        try:
            with preserved() if self._same else contextlib.nullcontext(), torch.autocast(*self._autocast):
                if self._same:
                    set_draws(self._draws)
                return self._run()
        finally:
            go_on()

    def _through(self) -> Tensor | None:
        """Run all of the step, past the place of the head, and return the features seen there."""
        stop: Any = self._twin.get_submodule(self._module.dual_entry)
        stop.passes = True
        try:
            getattr(self._twin, self._name)(*self._args, **self._kwargs)
            features: Tensor | None = stop.seen
            return features
        finally:
            stop.passes, stop.seen = False, None

    @property
    def _same(self) -> bool:
        """Whether the twin makes the random draws of the step."""
        return bool(self._module.dual_same_draws)

    def _run(self) -> Tensor | None:
        try:
            getattr(self._twin, self._name)(*self._args, **self._kwargs)
        except HeadReachedError as reached:
            return reached.features
        return None


class Answers(nn.Module):
    """In the place of the twin's head: gives what the module's own head has given.

    Args:
        outputs: One for each call.
    """

    def __init__(self, outputs: list[Any]) -> None:
        super().__init__()
        self._outputs = outputs
        self.when_done: Callable[[], None] = _nothing

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._outputs.pop(0)
        if not self._outputs:
            self.when_done()
        return output


def _nothing() -> None:
    """Do nothing."""


class Kept:
    """Buffers and plain attributes of a module, put aside: until :meth:`restore`, changes go into copies.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._buffers: list[tuple[dict[str, Any], str, Tensor]] = []
        for child in module.modules():
            for name, value in child._buffers.items():
                if value is not None:
                    self._buffers.append((child._buffers, name, value))
                    child._buffers[name] = value.clone()
        self._owner = vars(module)
        self._plain = {name: value for name, value in self._owner.items() if isinstance(value, SIMPLE)}

    def restore(self) -> None:
        """Put them back. A second call has no effect."""
        for owner, name, value in self._buffers:
            owner[name] = value
        self._owner.update(self._plain)
        self._buffers, self._plain = [], {}


def _autocast(device: str) -> tuple[str, torch.dtype, bool]:
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


def _follow(module: nn.Module, twin: nn.Module) -> None:
    """Copy to the twin what the module's hooks have set; the twin's own hooks never run.

    Copied are numbers, strings, tensors and everything that was added after the twin was made. Other attributes stay
    the twin's own: they may hold layers. So do methods: under DDP Lightning leaves the module's bound forward on it.
    """
    target, own = vars(twin), vars(twin)["twin_attributes"]
    for name, value in vars(module).items():
        if name in _INTERNALS or name.startswith("dual_"):
            continue
        if isinstance(value, Tensor):
            follow = not value.requires_grad
        elif name in own:
            follow = isinstance(value, SIMPLE)
        else:
            follow = not callable(getattr(type(module), name, None))
        if follow:
            target[name] = value


def draws() -> tuple[Any, ...]:
    """Return the states of all global generators, of this device's among GPUs."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_draws(states: tuple[Any, ...]) -> None:
    """Set the states of all global generators."""
    python, numpy, cpu, cuda = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda)
