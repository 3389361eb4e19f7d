"""The machinery of `dual_by_head`: a copy of the user's module without its head, which runs the user's own step."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from fedlightning.seeding import isolated, preserved
from fedlightning.wrappers import heads
from fedlightning.wrappers.fusion import Exchange, Stop
from fedlightning.wrappers.mixing import STEPS, AddedParametersMixin, Mixin, mix, unmix, user_class
from fedlightning.wrappers.replay import Recorded

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
        found = owner.optimizers(self, use_pl_optimizer)
        return [NoStep(one) for one in found] if isinstance(found, list) else NoStep(found)

    def lr_schedulers(self) -> Any:
        """Return the module's schedulers, as ones that never step."""
        owner: Any = LightningModule
        found = owner.lr_schedulers(self)
        if isinstance(found, list):
            return [NoStep(one) for one in found]
        return None if found is None else NoStep(found)


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
    """In the place of the twin's metrics: every call returns `None` and every attribute is the object itself.

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
    twin = unmix(deepcopy(module))
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
