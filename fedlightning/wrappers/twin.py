"""The machinery of `dual_by_head`: a copy of the user's module without its head, which runs the user's own step.

The twin's way through a step of the user's, up to each call of the head.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from fedlightning.compat.lazy_clones import copy_module
from fedlightning.seeding import isolated, preserved
from fedlightning.wrappers import heads
from fedlightning.wrappers.follow import SIMPLE
from fedlightning.wrappers.fusion import Exchange, HeadReachedError, Stop
from fedlightning.wrappers.mixing import STEPS, AddedParametersMixin, Mixin, mix, unmix, user_class

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
    """In place of the twin's head: gives what the module's own head has given.

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
    target, twin_attributes = vars(twin), vars(twin)["twin_attributes"]
    for name, value in vars(module).items():
        if name in _INTERNALS or name.startswith("dual_"):
            continue
        if isinstance(value, Tensor):
            follow = not value.requires_grad
        elif name in twin_attributes:
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


LOCAL = "local_extractor"
INPUT_KEYS = (
    "x",
    "input",
    "inputs",
    "image",
    "images",
    "pixel_values",
    "input_values",
    "input_ids",
    "features",
    "data",
)
"""Names under which `first_input` looks for the model's input in a batch that is a mapping."""


class DualByHeadMixin(AddedParametersMixin):
    """On the user's module: computes the local features zl before the outermost step or forward, then runs it.

    Mixed in by `fedlightning.wrappers.dual_by_head`.

    Attributes:
        dual_exchange: Holds zl during a step.
        dual_originals: Name of each added parameter to name of the parameter whose optimizer group it joins.
        dual_entry: Path of the layer that takes the features.
        dual_same_draws: Whether the twin and the user's step make the same random draws.

    Example:
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers import DualByHeadMixin, dual_by_head
        >>> module = dual_by_head(Classifier(MLP(4, [3], 2), num_classes=2), head="net.fc2")
        >>> isinstance(module, DualByHeadMixin), module.dual_is_twin
        (True, True)
    """

    wraps = (*AddedParametersMixin.wraps, *STEPS)
    dual_exchange: Exchange
    dual_originals: dict[str, str]
    dual_entry: str
    dual_same_draws: bool

    @property
    def dual_is_twin(self) -> bool:
        """Whether the local extractor is a twin of the module, rather than a network that was given."""
        return isinstance(getattr(self, LOCAL), TwinMixin)

    def added_parameters(self) -> dict[str, str]:
        return {**super().added_parameters(), **self.dual_originals}

    def on_unmix(self) -> None:
        raise TypeError(
            f"A dual extractor cannot be taken off {user_class(self).__name__} again: its head was made for both "
            f"extractors. Keep a copy of the module from before dual_by_head."
        )

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        exchange = self.dual_exchange
        if name not in STEPS:
            return AddedParametersMixin.around(self, name, call, args, kwargs)
        if exchange.running:  # a step that calls self(x), or another step
            return call(*args, **kwargs)
        recorded: Recorded | None = None
        try:
            exchange.running = True
            if self.dual_is_twin:
                recorded = Recorded(self, getattr(self, LOCAL), name, args, kwargs)
                exchange.zl = recorded.first()
                exchange.later = None if torch.compiler.is_exporting() else recorded.later
            else:
                exchange.zl = self._local_features(args, kwargs)
            result = call(*args, **kwargs)
            if not exchange.reached and result is not None:  # None: the step skipped its batch
                raise RuntimeError(
                    f"FENDA: {name} of {exchange.owner} never called its head `{exchange.head}`, so it did not use the "
                    f"local extractor. Name the submodule that the step does call (functional calls of a head's "
                    f"weights cannot be seen), or build the model from a DualExtractor."
                )
            return result
        finally:
            exchange.close()
            if recorded is not None:
                recorded.close()

    def _local_features(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        with preserved() if self.dual_same_draws else contextlib.nullcontext():
            features: Tensor = getattr(self, LOCAL)(
                first_input(args or tuple(kwargs.values())[:1], self.dual_exchange.owner)
            )
            return features


class TwinMixin(Mixin):
    """On the twin: methods that act on the Trainer do nothing, because the module itself calls them.

    Lightning calls the hooks of the root module only, so the twin's hooks never run.

    Example:
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers.twin import make_twin
        >>> twin = make_twin(Classifier(MLP(4, [3], 2), num_classes=2), "net.fc2", "net.fc2", fresh=False, seed=0)
        >>> twin.log("train_loss", 1.0)  # no Trainer is needed
    """

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    log = log_dict = print = toggle_optimizer = untoggle_optimizer = manual_backward = _nothing
    clip_gradients = _nothing

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the module's optimizers, as ones that never step."""
        owner: Any = LightningModule
        optimizers = owner.optimizers(self, use_pl_optimizer)
        return [NoStep(optimizer) for optimizer in optimizers] if isinstance(optimizers, list) else NoStep(optimizers)

    def lr_schedulers(self) -> Any:
        """Return the module's schedulers, as ones that never step."""
        owner: Any = LightningModule
        schedulers = owner.lr_schedulers(self)
        if isinstance(schedulers, list):
            return [NoStep(scheduler) for scheduler in schedulers]
        return None if schedulers is None else NoStep(schedulers)


class NoStep:
    """An optimizer or scheduler as the twin sees it: it can be read, but what would change it does nothing.

    Args:
        real: The optimizer or scheduler.
    """

    def __init__(self, real: Any) -> None:
        self._real = real

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    zero_grad = add_param_group = load_state_dict = step

    @contextlib.contextmanager
    def toggle_model(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Do nothing."""
        yield

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class NoMetric(nn.Module):
    """In place of the twin's metrics: every call returns `None` and every attribute is the object itself.

    Example:
        >>> from fedlightning.wrappers.twin import NoMetric
        >>> NoMetric().compute() is None
        True
    """

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name.startswith("_") else self

    def __getitem__(self, key: Any) -> NoMetric:
        return self


def make_twin(module: LightningModule, head: str, entry: str, *, fresh: bool, seed: object) -> LightningModule:
    """Return a copy of `module` that ends at `entry`, without the head's parameters and without metrics.

    Example:
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers.twin import make_twin
        >>> twin = make_twin(Classifier(MLP(4, [3], 2), num_classes=2), "net.fc2", "net.fc2", fresh=False, seed=0)
        >>> [name for name, _ in twin.named_parameters()]
        ['net.fc1.weight', 'net.fc1.bias']
    """
    twin = unmix(copy_module(module))
    for name, child in list(twin.named_modules(remove_duplicate=False)):
        if name and isinstance(child, (Metric, MetricCollection)):
            heads.replace_everywhere(twin, child, NoMetric())
    stop_at = twin.get_submodule(entry)
    for child in list(twin.get_submodule(head).modules()):
        if child is not stop_at and any(True for _ in child.parameters(recurse=False)):
            heads.replace_everywhere(twin, child, nn.Identity())
    heads.replace_everywhere(twin, stop_at, Stop())
    if fresh:
        _initialise(twin, seed)
    vars(twin)["twin_attributes"] = frozenset(vars(twin))
    return mix(twin, TwinMixin)


def _initialise(twin: nn.Module, seed: object) -> None:
    with isolated(seed, "fenda-local-extractor"):
        for name, child in twin.named_modules():
            if callable(reset := getattr(child, "reset_parameters", None)):
                reset()
            elif any(True for _ in child.parameters(recurse=False)):
                warnings.warn(
                    f"init='fresh': `{name}` ({type(child).__name__}) has parameters but no reset_parameters(); "
                    f"the local extractor keeps a copy of them.",
                    stacklevel=4,
                )


def first_input(batch: Any, owner: str) -> Tensor:
    """Return the model's input in a batch: the tensor, the first element, or the first of `INPUT_KEYS` in a mapping.

    Example:
        >>> import torch
        >>> from fedlightning.wrappers.twin import first_input
        >>> first_input({"label": torch.ones(2), "image": torch.zeros(2, 3)}, owner="Net").shape
        torch.Size([2, 3])
    """
    while not isinstance(batch, Tensor):
        if isinstance(batch, Mapping):
            key = next((key for key in INPUT_KEYS if key in batch), None)
            if key is None:
                raise ValueError(
                    f"Cannot tell which entry of {owner}'s batch {sorted(map(str, batch))} the local extractor takes: "
                    f"none is called {', '.join(INPUT_KEYS)}. Rename it, or leave local_extractor out to use a twin."
                )
            batch = batch[key]
        elif isinstance(batch, (list, tuple)) and batch:
            batch = batch[0]
        else:
            raise ValueError(
                f"{owner}'s batch holds a {type(batch).__name__} where the local extractor needs a tensor."
            )
    return batch
