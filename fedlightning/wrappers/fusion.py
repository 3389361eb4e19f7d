"""Where global and local features meet: the head of a dual extractor and the exchange that holds features for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedlightning.wrappers import heads
from fedlightning.wrappers.mixing import Mixin


class HeadReachedError(BaseException):
    """Carries the twin's features out of the user's step. Not an `Exception`, which the step might catch.

    Args:
        features: The input of the twin's head.
    """

    def __init__(self, features: Tensor) -> None:
        self.features = features


class Exchange:
    """The local features zl of one step, until the head takes them.

    Copies and pickles are empty: no tensor outlives its step.

    Args:
        head: Name of the head, for messages.
        owner: Name of the user's class, for messages.
        fusion: `"concat"` or `"sum"`.
        order: `"global_first"` or `"local_first"`.
        dim: Dimension of the features.

    Attributes:
        running: Whether a step is running.
        zl: Local features of the first call of the head in this step.
        later: Gives those of a later call; `None` if the local extractor takes the batch only once.
        reached: Number of times the head was called in this step.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fedlightning.wrappers.fusion import Exchange
        >>> exchange = Exchange("fc2", "MLP", "concat", "global_first", dim=-1)
        >>> exchange.running, exchange.zl = True, torch.ones(1, 3)
        >>> exchange.fuse(nn.Linear(6, 2), torch.zeros(1, 3))
        tensor([[0., 0., 0., 1., 1., 1.]])
    """

    running = False
    zl: Tensor | None = None
    later: Callable[[], Tensor | None] | None = None
    reached = 0

    def __init__(self, head: str, owner: str, fusion: str, order: str, dim: int) -> None:
        self.head, self.owner, self.fusion, self.order, self.dim = head, owner, fusion, order, dim

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("running", "zl", "later", "reached")}

    def close(self) -> None:
        """Forget the features at the end of the step."""
        self.running, self.zl, self.later, self.reached = False, None, None, 0

    def fuse(self, layer: nn.Module, zg: Tensor) -> Tensor:
        """Return the input of the head: global and local features together.

        Local features are flattened if that makes them fit.
        """
        where = f"the head `{self.head}` of {self.owner}"
        if not self.running:
            raise RuntimeError(
                f"FENDA: {where} was called outside a step, so there are no local features for it. Call the module "
                f"itself or one of its steps rather than its layers."
            )
        self.reached += 1
        if self.reached > 1:
            if self.later is None:
                reason = (
                    "which cannot be exported. Build"
                    if torch.compiler.is_exporting()
                    else "but the local extractor that was given takes the batch once. Leave local_extractor out to use a "
                    "twin, or build"
                )
                raise RuntimeError(
                    f"FENDA: {where} was called twice in one step, {reason} the model from a DualExtractor."
                )
            self.zl = self.later()
        if self.zl is None:
            raise RuntimeError(
                f"FENDA: {where} was called, but the local extractor did not get there with the same batch. A step "
                f"must take the same way each time it is run, or the model be built from a DualExtractor."
            )
        zl = heads.flat(self.zl) if self.zl.dim() > zg.dim() == 2 else self.zl
        shapes = f"global {tuple(zg.shape)} and local {tuple(zl.shape)}"
        if self.fusion == "sum":
            if zg.shape != zl.shape:
                raise RuntimeError(f"FENDA: fusion='sum' at {where} needs equal shapes, got {shapes}. Use 'concat'.")
        elif zg.dim() != zl.dim() or zg.shape[self.dim] + zl.shape[self.dim] != heads.width(layer):
            raise RuntimeError(
                f"FENDA: {where} takes {heads.width(layer)} features in all, got {shapes}. If the local extractor is "
                f"your own, say its width with local_features=... and let it give (B, d)."
            )
        return heads.fuse(zg, zl, self.fusion, self.order, self.dim)


class FusedHeadMixin(Mixin):
    """On the head (or its first layer): fuses its input zg with the local features zl, then runs as before."""

    wraps = ("forward",)
    dual_exchange: Exchange

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args:
            args, kwargs = tuple(kwargs.values())[:1], dict(list(kwargs.items())[1:])
        return call(self.dual_exchange.fuse(self, args[0]), *args[1:], **kwargs)


class Stop(nn.Module):
    """In place of the twin's head: ends the twin's step with the features that arrive.

    Example:
        >>> import torch
        >>> from fedlightning.wrappers.fusion import HeadReachedError, Stop
        >>> try:
        ...     Stop()(torch.ones(2))
        ... except HeadReachedError as reached:
        ...     print(reached.features)
        tensor([1., 1.])
    """

    passes = False
    """Whether features pass through, for `torch.export`, which cannot trace an exception. :attr:`seen` keeps them."""
    seen: Tensor | None = None

    def forward(self, features: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.passes:
            self.seen = features
            return features
        raise HeadReachedError(features)
