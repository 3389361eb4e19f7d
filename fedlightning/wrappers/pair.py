"""A client's own module with a second, smaller one beside it that trains on the same batches (deep mutual learning).

FML, FedKD, FedKEMF and FedType share the second model and keep the first. Both take their own `training_step`; a function
of the two losses, logits and representations gives the loss that is minimised. One optimizer holds the parameter groups of
both, so that corrections, mixed precision and accumulation treat them as they treat one model.

One optimizer for two modules that train together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlightning.compat.lazy_clones import copy_module
from fedlightning.compat.lightning_runs import detached_copy, takes_index
from fedlightning.layers import ordered_layers
from fedlightning.wrappers.features import FeatureTap
from fedlightning.wrappers.heads import find_submodule
from fedlightning.wrappers.mixing import Mixin, mix, unmix, user_class
from fedlightning.wrappers.muting import evaluating, muted


def one_optimizer(
    module: nn.Module, own_configured: Any, shared: LightningModule, theirs: Any, projection: nn.Module | None
) -> Optimizer:
    """Return the module's optimizer with the groups of the second one's beside its own."""
    ours, second = (_only(model, configured) for model, configured in ((module, own_configured), (shared, theirs)))
    if type(ours) is not type(second):
        raise ValueError(
            f"{user_class(module).__name__} uses {type(ours).__name__} and the shared {user_class(shared).__name__} "
            f"{type(second).__name__}, but both models take one step together. Give both the same kind of optimizer; "
            "learning rates and other options may differ."
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    first = ours.param_groups[0]
    for parameter in () if projection is None else projection.parameters():
        first["params"].append(parameter)
        if "param_names" in first:
            first["param_names"].append(names[id(parameter)])
    for group in second.param_groups:
        added = {name: value for name, value in group.items() if name != "param_names"}
        if "param_names" in first:
            added["params"] = [(names[id(parameter)], parameter) for parameter in group["params"]]
        ours.add_param_group(added)
    return ours


def _only(module: nn.Module, configured: Any) -> Optimizer:
    """Return the one optimizer in what `configure_optimizers` returned."""
    while isinstance(configured, list | tuple) and len(configured) == 1:
        configured = configured[0]
    if isinstance(configured, dict) and not configured.get("lr_scheduler"):
        configured = configured.get("optimizer")
    if isinstance(configured, tuple) and len(configured) == 2 and not configured[1]:
        return _only(module, configured[0])
    if not isinstance(configured, Optimizer):
        raise ValueError(
            f"configure_optimizers of {user_class(module).__name__} returns a schedule or more than one optimizer, and two "
            "models that learn from each other take one step together. Return one optimizer without a schedule (lr_decay of "
            "the trainer lowers learning rates from round to round)."
        )
    return configured


SHARED = "shared_model"
"""Name of the second module in the first. It is part of the state's names."""
PROJECTION = "shared_projection"
"""Name of the map from the second module's representation to the width of the first one's."""


@dataclass(frozen=True)
class Side:
    """What one of the two modules gave for a batch, with its graph.

    Attributes:
        loss: The loss that its `training_step` returned.
        logits: Output of its head, `(batch, classes)`, in fp32 at least.
        features: Input of its head, `(batch, width)`, in fp32 at least.
    """

    loss: Tensor
    logits: Tensor
    features: Tensor


class JointLoss(Protocol):
    """Makes the loss to minimise out of what both modules gave. It is copied and pickled with the module."""

    def __call__(self, local: Side, shared: Side, project: nn.Module | None, /) -> Tensor: ...


@dataclass
class _Pair:
    head: str
    shared_head: str
    loss: JointLoss
    frozen: Literal["own", "shared"] | None = None


class PairMixin(Mixin):
    """On a module that trains together with its `shared_model`. Mixed in by `pair`.

    Attributes:
        pair_parts: Heads of both modules, and the function that makes the loss.
    """

    wraps = ("training_step", "configure_optimizers")
    pair_parts: _Pair

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shared = shared_of(self)
        if name == "configure_optimizers":
            with _apart(self):
                configured = call(*args, **kwargs)
            return one_optimizer(self, configured, shared, shared.configure_optimizers(), self._modules.get(PROJECTION))
        parts = self.pair_parts
        with ExitStack() as stack:
            tap = stack.enter_context(_HeadTap(self, parts.head))
            with _apart(self), _teaching(cast(LightningModule, self), parts.frozen == "own"):
                output = call(*args, **kwargs)
            loss = output.get("loss") if isinstance(output, dict) else output
            if not isinstance(loss, Tensor):  # a skipped batch
                return output
            local = tap.side(loss)
        with _HeadTap(shared, parts.shared_head) as tap, _teaching(shared, parts.frozen == "shared"):
            batch, batch_idx = (*args, *kwargs.values(), 0)[:2]
            theirs = tap.side(_loss_of(shared, batch, batch_idx))
        if local.logits.shape != theirs.logits.shape:
            raise ValueError(
                f"`{parts.head}` of {user_class(self).__name__} gives logits {tuple(local.logits.shape)}, and "
                f"`{parts.shared_head}` of the shared {user_class(shared).__name__} {tuple(theirs.logits.shape)}: both "
                "must have a row for each sample and the same classes. Set head=... and shared_head=... to the layers that "
                "give the logits."
            )
        total = parts.loss(local, theirs, self._modules.get(PROJECTION))
        return {**output, "loss": total} if isinstance(output, dict) else total

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of the two models apart, each as if it were alone. The user's own hook comes first."""
        above: Any = super()
        if user_class(self).configure_gradient_clipping is not LightningModule.configure_gradient_clipping:  # type: ignore[attr-defined]
            above.configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val is not None:
            theirs = list(shared_of(self).parameters())
            second = {id(parameter) for parameter in theirs}
            ours = [parameter for parameter in self.parameters() if id(parameter) not in second]
            how = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)  # Lightning's enum, or its word
            clip: Any = nn.utils.clip_grad_value_ if how == "value" else nn.utils.clip_grad_norm_
            for parameters in (ours, theirs):
                clip(parameters, gradient_clip_val)

    def on_unmix(self) -> None:
        """Remove the second module: what is left is the module as the user gave it."""
        delattr(self, SHARED)
        if PROJECTION in self._modules:
            delattr(self, PROJECTION)
        del vars(self)["pair_parts"]


def pair(
    module: LightningModule,
    shared: LightningModule | None,
    loss: JointLoss,
    head: str | None = None,
    shared_head: str | None = None,
    project: bool = False,
) -> LightningModule:
    """Put a second module beside `module`, in place; both then train on the same batches.

    Only the training step and the optimizers change. What the second module logs in training is not kept, and Lightning
    does not call its hooks.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers.pair import pair, shared_of
        >>> large, small = (Classifier(MLP(4, [width], 2), num_classes=2) for width in (9, 3))
        >>> both = pair(large, small, lambda own, shared, project: own.loss + shared.loss)
        >>> both.training_step((torch.zeros(5, 4), torch.zeros(5).long()), 0).shape, shared_of(both).net.fc1.out_features
        (torch.Size([]), 3)
    """
    for model in (module, *(() if shared is None else (shared,))):
        if not model.automatic_optimization:
            raise ValueError(
                f"{user_class(model).__name__} optimizes manually, but two models that learn from each other take one step "
                "together. Use automatic optimization."
            )
    for name in (SHARED, PROJECTION):
        if hasattr(module, name):
            raise ValueError(f"{user_class(module).__name__} has an attribute `{name}` of its own. Rename it.")
    second = unmix(copy_module(module)) if shared is None else detached_copy(shared)
    parts = _Pair(_head(module, head), _head(second, shared_head), loss)
    mapped = None
    if project:
        mapped = nn.Linear(_width(second, parts.shared_head), _width(module, parts.head), bias=False)
    mix(module, PairMixin)
    vars(module)["pair_parts"] = parts
    module.add_module(SHARED, second)
    if mapped is not None:
        module.add_module(PROJECTION, mapped)
    return module


def shared_of(module: nn.Module) -> LightningModule:
    """Return the second module of a pair."""
    return cast(LightningModule, module.get_submodule(SHARED))


def minimise(module: nn.Module, loss: JointLoss, frozen: Literal["own", "shared"] | None = None) -> None:
    """Let a pair minimise another loss from now on.

    Example:
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers.pair import minimise, pair
        >>> both = pair(Classifier(MLP(4, [9], 2), num_classes=2), None, lambda own, shared, project: own.loss)
        >>> minimise(both, lambda own, shared, project: shared.loss, frozen="own")
        >>> loss = both.training_step((torch.zeros(5, 4), torch.zeros(5).long()), 0)
        >>> loss.backward()
        >>> both.net.fc1.weight.grad is None, both.shared_model.net.fc1.weight.grad is None
        (True, False)
    """
    parts: _Pair = vars(module)["pair_parts"]
    parts.loss, parts.frozen = loss, frozen


def sides_of(module: LightningModule, batch: Any) -> tuple[Side, Side]:
    """Return what both modules of a pair give for a batch in the modes they are in.

    Example:
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers.pair import pair, sides_of
        >>> both = pair(Classifier(MLP(4, [9], 2), num_classes=2), None, lambda own, shared, project: own.loss)
        >>> [side.logits.shape for side in sides_of(both, (torch.zeros(5, 4), torch.zeros(5).long()))]
        [torch.Size([5, 2]), torch.Size([5, 2])]
    """
    parts: _Pair = vars(module)["pair_parts"]
    sides: list[tuple[Side, Side]] = []

    def keep(local: Side, shared: Side, project: nn.Module | None) -> Tensor:
        sides.append((local, shared))
        return local.loss

    vars(module)["pair_parts"] = replace(parts, loss=keep)
    try:
        module.training_step(*((batch, 0) if takes_index(module.training_step) else (batch,)))
    finally:
        vars(module)["pair_parts"] = parts
    if not sides:
        raise ValueError(f"training_step of {user_class(module).__name__} skipped a batch whose logits are needed")
    return sides[0]


def shared_entries(module: nn.Module) -> list[str]:
    """Return the state names of the second module within the pair.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers.pair import shared_entries
        >>> shared_entries(MLP(4, [3], 2))
        []
    """
    return [name for name in module.state_dict() if name.startswith(f"{SHARED}.")]


class _HeadTap:
    """Input and output of a head in one step."""

    def __init__(self, module: nn.Module, head: str) -> None:
        self._head = head
        self._taps = [FeatureTap(module, head, at=at) for at in ("input", "output")]

    def __enter__(self) -> _HeadTap:
        for tap in self._taps:
            tap.attach()
        return self

    def __exit__(self, *exception: object) -> None:
        for tap in self._taps:
            tap.remove()

    def side(self, loss: Tensor) -> Side:
        shape = tuple(self._taps[1].features.shape)
        if sum(size > 1 for size in shape[1:]) > 1:  # softmax would run over classes and places at once
            raise ValueError(
                f"`{self._head}` gives {shape}: a prediction for every pixel or token, not a row of logits a sample"
            )
        features, logits = (_rows(tap.features) for tap in self._taps)
        return Side(loss, nn.functional.pad(logits, (1, 0)) if logits.shape[1] == 1 else logits, features)


def _rows(values: Tensor) -> Tensor:
    return values.flatten(1).to(torch.promote_types(values.dtype, torch.float32))


def _loss_of(shared: LightningModule, batch: Any, batch_idx: int) -> Tensor:
    with muted(shared):
        output = shared.training_step(*((batch, batch_idx) if takes_index(shared.training_step) else (batch,)))
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"training_step of the shared {user_class(shared).__name__} returned {type(output).__name__} and no loss, for a "
            "batch that the client's own model does not skip."
        )
    return loss


@contextmanager
def _teaching(module: LightningModule, active: bool) -> Iterator[None]:
    """Within the block, if `active`, a module runs in eval mode, without gradients, and logs nothing."""
    if not active:
        yield
        return
    with evaluating(module), torch.no_grad(), muted(module):
        yield


@contextmanager
def _apart(module: nn.Module) -> Iterator[None]:
    """Within the block, the module is as the user gave it: `self.parameters()` are its own."""
    extra = {name: module._modules[name] for name in (SHARED, PROJECTION) if name in module._modules}
    for name in extra:
        delattr(module, name)
    try:
        yield
    finally:
        for name, child in extra.items():
            module.add_module(name, child)


def _head(module: nn.Module, head: str | None) -> str:
    name = ordered_layers(module)[-1].name if head is None else head
    find_submodule(module, name)
    return name


def _width(module: nn.Module, head: str) -> int:
    layer = module.get_submodule(head)
    if not isinstance(layer, nn.Linear):
        raise ValueError(
            f"`{head}` of {user_class(module).__name__} is a {type(layer).__name__}, and the width of a representation is "
            "known at a linear head. Name such a head, or leave the representations out (hidden=False)."
        )
    return layer.in_features
