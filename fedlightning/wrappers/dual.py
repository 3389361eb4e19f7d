"""FENDA's dual extractor: a shared (global) and a private (local) feature extractor under one private head.

Tavakoli et al., "A comprehensive view of personalized federated learning on heterogeneous clinical datasets", 2023,
arXiv 2309.16825: prediction = head(concat(zg, zl)) with zg = f_u(x), zl = f_v1(x); only u travels.
"""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.wrappers import heads
from fedlightning.wrappers.features import FeatureTap
from fedlightning.wrappers.fusion import Exchange, FusedHeadMixin
from fedlightning.wrappers.mixing import mix, mixins_of, user_class
from fedlightning.wrappers.twin import LOCAL, DualByHeadMixin, make_twin

Fusion = Literal["concat", "sum"]
Order = Literal["global_first", "local_first"]


class DualExtractor(nn.Module):
    """Two extractors and a head: ``head(fuse(global_extractor(x), local_extractor(x)))``.

    The extractors may differ in architecture and, with ``fusion="concat"``, in width. Features are flattened to (B, d).

    Args:
        global_extractor: f_u, the part that is shared.
        local_extractor: f_v1, private.
        head: f_v2, private; takes (B, d_g + d_l) for ``concat`` (or (B, d) for ``sum``).
        fusion: ``concat`` (the paper) or ``sum``.
        order: whose features come first in the concatenation.
    """

    def __init__(
        self,
        global_extractor: nn.Module,
        local_extractor: nn.Module,
        head: nn.Module,
        fusion: Fusion = "concat",
        order: Order = "global_first",
    ) -> None:
        super().__init__()
        heads.check_choice("fusion", fusion, ("concat", "sum"))
        heads.check_choice("order", order, ("global_first", "local_first"))
        self.global_extractor = global_extractor
        self.local_extractor = local_extractor
        self.head = head
        self.fusion = fusion
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        """Predict for ``x`` of shape (B, ...)."""
        zg, zl = heads.flat(self.global_extractor(x)), heads.flat(self.local_extractor(x))
        if self.fusion == "sum" and zg.shape != zl.shape:
            raise ValueError(
                f"fusion='sum' needs features of one width, got {tuple(zg.shape)} and {tuple(zl.shape)}. Use 'concat'."
            )
        prediction: Tensor = self.head(heads.fuse(zg, zl, self.fusion, self.order))
        return prediction


def dual_by_head(
    module: LightningModule,
    head: str,
    local_extractor: nn.Module | None = None,
    *,
    fusion: Fusion = "concat",
    order: Order = "global_first",
    init: Literal["copy", "fresh"] = "copy",
    local_features: int | None = None,
    same_draws: bool = True,
    seed: int = 0,
) -> LightningModule:
    """Make FENDA of any LightningModule by naming its head; wraps ``module`` in place and returns it.

    Before each step the *twin* (``module.local_extractor``, a private copy of the module without its head) runs the
    same step on the same batch up to the head, which gives zl; then the user's own step runs, and where it reaches the
    head with zg, the head gets both. So it does not matter how the step calls its layers. Parameter names of the
    original stay. With ``fusion="concat"`` the head's first layer is replaced by a wider, freshly initialised one.

    Args:
        module: the user's module, with its layers made in ``__init__``.
        head: dotted path of the submodule that makes predictions from features, such as ``"net.fc"``. The step must
            call it exactly once; all that is not under it is the extractor.
        local_extractor: another network as the local extractor. It gets the model's input: the first element of a tuple
            or list batch, a tensor batch, or the entry of a dict named like one of ``twin.INPUT_KEYS``.
        fusion: ``concat`` (the head begins with ``nn.Linear`` or a 1x1 convolution) or ``sum`` (any head).
        order: whose features come first in the concatenation.
        init: the twin starts as a copy of the extractor or is initialised anew (``reset_parameters`` of each layer).
        local_features: width of a given ``local_extractor``; by default read off its last Linear or convolution.
        same_draws: the twin sees the random draws (mixup, augmentation, dropout) that the user's own step then makes;
            without it a step that augments would train the two extractors on different inputs.
        seed: the address of the fresh initialisations.

    Raises:
        ValueError: no such submodule; nothing outside the head; a head that cannot be widened; an unknown option.
    """
    heads.check_choice("fusion", fusion, ("concat", "sum"))
    heads.check_choice("order", order, ("global_first", "local_first"))
    heads.check_choice("init", init, ("copy", "fresh"))
    heads.find_submodule(module, head)
    if DualByHeadMixin in mixins_of(module):
        raise ValueError(f"This {user_class(module).__name__} has a dual extractor already.")
    if hasattr(module, LOCAL):
        raise ValueError(f"{user_class(module).__name__} has an attribute `{LOCAL}` of its own; rename it for FENDA.")
    heads.require_body(module, head)
    entry = heads.entry_layer(module, head) if fusion == "concat" else head
    layer = module.get_submodule(entry)
    names = [name for name in global_candidates(module, head) if module.get_parameter(name).requires_grad]

    if local_extractor is None:
        local: nn.Module = make_twin(module, head, entry, fresh=init == "fresh", seed=seed)
        added = {f"{LOCAL}.{name}": name for name, _ in local.named_parameters()}
        local_features = heads.width(layer) if fusion == "concat" else None
    else:
        local, names = local_extractor, names or [name for name, _ in module.named_parameters()]
        added = {f"{LOCAL}.{name}": names[0] for name, _ in local.named_parameters()}
        local_features = local_features or heads.output_width(local)
        if fusion == "concat" and local_features is None:
            raise ValueError(
                f"Cannot tell how many features {type(local).__name__} gives: it has no Linear and no convolution. "
                f"Say local_features=..."
            )

    exchange = Exchange(head, user_class(module).__name__, fusion, order, heads.feature_dim(layer))
    vars(mix(layer, FusedHeadMixin))["dual_exchange"] = exchange
    if fusion == "concat":
        assert local_features is not None
        heads.widen(layer, heads.width(layer) + local_features, seed)
    mix(module, DualByHeadMixin)
    vars(module).update(dual_exchange=exchange, dual_originals=added, dual_entry=entry, dual_same_draws=same_draws)
    setattr(module, LOCAL, local)
    local.train(module.training)
    return module


def global_candidates(module: nn.Module, head: str) -> list[str]:
    """Names of the parameters outside the head."""
    prefixes = heads.registered_names(module, module.get_submodule(head))
    return [name for name, _ in module.named_parameters() if not heads.within(name, prefixes)]


def global_names(module: nn.Module) -> list[str]:
    """The state_dict names of the global extractor: what FENDA shares.

    After :func:`dual_by_head` this is everything of the user's module outside the head; for a :class:`DualExtractor`
    anywhere in the module only its ``global_extractor``.

    Raises:
        ValueError: the module has neither.
    """
    names = list(module.state_dict())
    if isinstance(module, DualByHeadMixin):
        head = module.get_submodule(module.dual_exchange.head)
        private = [LOCAL, *heads.registered_names(module, head)]
        return [name for name in names if not heads.within(name, private)]
    parts = [
        name for part in module.modules() if isinstance(part, DualExtractor)
        for name in heads.registered_names(module, part.global_extractor)
    ]  # fmt: skip
    if not parts:
        raise ValueError(
            f"{user_class(module).__name__} has no dual extractor. Name its head (dual_by_head(module, head=...)) or "
            f"build it from a DualExtractor(global_extractor, local_extractor, head)."
        )
    return [name for name in names if heads.within(name, parts)]


def private_names(module: nn.Module) -> list[str]:
    """The state_dict names that never leave the client: all but :func:`global_names`."""
    shared = set(global_names(module))
    return [name for name in module.state_dict() if name not in shared]


def feature_taps(module: nn.Module) -> tuple[FeatureTap, FeatureTap]:
    """Taps for zg and zl, in this order, not yet attached (``with zg_tap, zl_tap: ...``); for PerFCL's losses."""
    if isinstance(module, DualByHeadMixin):
        if module.dual_is_twin:
            zl = FeatureTap(module, f"{LOCAL}.{module.dual_entry}")
        else:
            zl = FeatureTap(module, LOCAL, at="output")
        return FeatureTap(module, module.dual_entry), zl
    for name, part in module.named_modules():
        if isinstance(part, DualExtractor):
            path = f"{name}." if name else ""
            return (
                FeatureTap(module, f"{path}global_extractor", at="output"),
                FeatureTap(module, f"{path}local_extractor", at="output"),
            )
    global_names(module)  # raises the sentence
    raise AssertionError("unreachable")
