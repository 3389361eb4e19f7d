"""Where global and local features meet: the head of a dual extractor, and what waits for it during one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fedlightning.wrappers import heads
from fedlightning.wrappers.mixing import Mixin


class HeadReachedError(BaseException):
    """Carries the twin's features out of the user's step. Not an ``Exception``, which the step might catch."""

    def __init__(self, features: Tensor) -> None:
        self.features = features


class Exchange:
    """Where zl waits for the head during one step. Copies and pickles of it are empty: no tensor outlives its step.

    Args:
        head: the head's name; with ``owner``, the user's class, for messages.
        fusion: ``concat`` or ``sum``.
        order: ``global_first`` or ``local_first``.
        dim: the dimension of the features.
    """

    running = False
    zl: Tensor | None = None
    reached = 0

    def __init__(self, head: str, owner: str, fusion: str, order: str, dim: int) -> None:
        self.head, self.owner, self.fusion, self.order, self.dim = head, owner, fusion, order, dim

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("running", "zl", "reached")}

    def close(self) -> None:
        """End of the step: forget."""
        self.running, self.zl, self.reached = False, None, 0

    def fuse(self, layer: nn.Module, zg: Tensor) -> Tensor:
        """What goes into the head for ``zg``: both features, the local ones flattened if that makes them fit."""
        where = f"the head `{self.head}` of {self.owner}"
        if not self.running:
            raise RuntimeError(
                f"FENDA: {where} was called outside a step, so there are no local features for it. Call the module "
                f"itself or one of its steps rather than its layers."
            )
        self.reached += 1
        if self.reached > 1:
            raise RuntimeError(
                f"FENDA: {where} was called twice in one step, but the local features belong to the first call. "
                f"Compute the prediction once in the step and use it again, or build the model from a DualExtractor."
            )
        if self.zl is None:
            raise RuntimeError(
                f"FENDA: {where} was called, but the local extractor did not get there with the same batch. A step "
                f"must take the same way each time it is run, or the model be built from a DualExtractor."
            )
        zl = heads.flat(self.zl) if self.zl.dim() > zg.dim() == 2 else self.zl
        given = f"global {tuple(zg.shape)} and local {tuple(zl.shape)}"
        if self.fusion == "sum":
            if zg.shape != zl.shape:
                raise RuntimeError(f"FENDA: fusion='sum' at {where} needs equal shapes, got {given}. Use 'concat'.")
        elif zg.dim() != zl.dim() or zg.shape[self.dim] + zl.shape[self.dim] != heads.width(layer):
            raise RuntimeError(
                f"FENDA: {where} takes {heads.width(layer)} features in all, got {given}. If the local extractor is "
                f"your own, say its width with local_features=... and let it give (B, d)."
            )
        return heads.fuse(zg, zl, self.fusion, self.order, self.dim)


class FusedHeadMixin(Mixin):
    """On the head (or its first layer): takes zg, fuses it with the waiting zl, and goes on as before."""

    wraps = ("forward",)
    dual_exchange: Exchange

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args:
            args, kwargs = tuple(kwargs.values())[:1], dict(list(kwargs.items())[1:])
        return call(self.dual_exchange.fuse(self, args[0]), *args[1:], **kwargs)


class Stop(nn.Module):
    """In the place of the twin's head: ends the twin's step with the features that arrived."""

    def forward(self, features: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise HeadReachedError(features)
