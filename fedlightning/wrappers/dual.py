"""FENDA's dual extractor: a shared (global) and a private (local) feature extractor under one private head.

Tavakoli et al., "A comprehensive view of personalized federated learning on heterogeneous clinical datasets", 2023,
arXiv 2309.16825: prediction = head(concat(zg, zl)) with zg = f_u(x) and zl = f_v1(x). Only u is sent.
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
    """A network of two extractors and a head: `head(fuse(global_extractor(x), local_extractor(x)))`.

    The extractors may differ in architecture and, with `fusion="concat"`, in width. Their features are flattened to
    `(batch, features)`.

    Args:
        global_extractor: f_u, the part that is shared.
        local_extractor: f_v1, private.
        head: f_v2, private. Takes `(batch, d_g + d_l)` for `"concat"`, or `(batch, d)` for `"sum"`.
        fusion: `"concat"` (the paper) or `"sum"`.
        order: Features that come first in the concatenation, `"global_first"` or `"local_first"`.

    Raises:
        ValueError: If an option is unknown.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fedlightning.wrappers import DualExtractor
        >>> net = DualExtractor(nn.Linear(4, 3), nn.Linear(4, 2), head=nn.Linear(3 + 2, 1))
        >>> net(torch.zeros(8, 4)).shape
        torch.Size([8, 1])
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
        """Return predictions for inputs `x` of shape `(batch, ...)`.

        Raises:
            ValueError: If features of different width are to be added.
        """
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
    """Turn any LightningModule into a FENDA model by naming its head; `module` is changed in place.

    Before each step the *twin* (`module.local_extractor`, a private copy of the module without its head) runs the same
    step on the same batch up to the head, which gives zl. Then the user's own step runs, and where it reaches the head
    with zg, the head gets both. It therefore does not matter how the step calls its layers. Parameter names of the
    original stay. With `fusion="concat"` the head's first layer is replaced by a wider, freshly initialised one.

    Args:
        module: The user's module, with its layers made in `__init__`.
        head: Dotted path of the submodule that makes predictions from features, such as `"net.fc"`. A step may
            call it several times (views of a batch): before each further call the twin runs the step up to there again.
            Everything outside it is the extractor.
        local_extractor: Another network as the local extractor. Its input is the model's input: the first element of a
            tuple or list batch, a tensor batch, or the entry of a dict named like one of `twin.INPUT_KEYS`. `None` uses
            the twin.
        fusion: `"concat"` (the head begins with `nn.Linear` or a 1x1 convolution) or `"sum"` (any head).
        order: Features that come first in the concatenation.
        init: Start of the twin: `"copy"` of the extractor's weights, or `"fresh"` (`reset_parameters` of each layer).
        local_features: Width of a given `local_extractor`. `None` reads it from its last Linear layer or convolution.
        same_draws: Give the twin the random draws (mixup, augmentation, dropout) that the user's step then makes.
            Without it a step that augments would train the two extractors on different inputs.
        seed: Address of the fresh initialisations.

    Returns:
        `module` itself.

    Raises:
        ValueError: If there is no such submodule, nothing is outside the head, the head cannot be widened, or an option
            is unknown.

    Example:
        >>> from fedlightning.models import TinyNet, Classifier
        >>> from fedlightning.wrappers import dual_by_head
        >>> module = dual_by_head(Classifier(TinyNet(), num_classes=1), head="net.fc2")
        >>> sum(parameter.numel() for parameter in module.parameters())  # as in the paper
        151
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
    """Return the names of the parameters outside the head.

    Example:
        >>> from fedlightning.models import MLP
        >>> from fedlightning.wrappers.dual import global_candidates
        >>> global_candidates(MLP(4, [3], 2), head="fc2")
        ['fc1.weight', 'fc1.bias']
    """
    prefixes = heads.registered_names(module, module.get_submodule(head))
    return [name for name, _ in module.named_parameters() if not heads.within(name, prefixes)]


def global_names(module: nn.Module) -> list[str]:
    """Return the `state_dict` names of the global extractor: the entries that FENDA shares.

    After `dual_by_head` this is everything of the user's module outside the head. For a `DualExtractor` anywhere in the
    module it is only its `global_extractor`.

    Args:
        module: A module with a dual extractor.

    Raises:
        ValueError: If the module has none.

    Example:
        >>> from torch import nn
        >>> from fedlightning.wrappers import DualExtractor, global_names
        >>> global_names(DualExtractor(nn.Linear(4, 3), nn.Linear(4, 2), head=nn.Linear(5, 1)))
        ['global_extractor.weight', 'global_extractor.bias']
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
    """Return the `state_dict` names that never leave the client: all but `global_names`.

    Args:
        module: A module with a dual extractor.

    Example:
        >>> from torch import nn
        >>> from fedlightning.wrappers import DualExtractor, private_names
        >>> private_names(DualExtractor(nn.Linear(4, 3), nn.Linear(4, 2), head=nn.Linear(5, 1)))
        ['local_extractor.weight', 'local_extractor.bias', 'head.weight', 'head.bias']
    """
    shared = set(global_names(module))
    return [name for name in module.state_dict() if name not in shared]


def feature_taps(module: nn.Module) -> tuple[FeatureTap, FeatureTap]:
    """Return taps for zg and zl, in this order, for PerFCL's losses.

    They are not attached yet: use `with zg_tap, zl_tap: ...`.

    Args:
        module: A module with a dual extractor.

    Raises:
        ValueError: If the module has none.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from fedlightning.wrappers import DualExtractor, feature_taps
        >>> net = DualExtractor(nn.Linear(4, 3), nn.Linear(4, 2), head=nn.Linear(5, 1))
        >>> zg, zl = feature_taps(net)
        >>> with zg, zl:
        ...     _ = net(torch.zeros(8, 4))
        ...     print(zg.features.shape, zl.features.shape)
        torch.Size([8, 3]) torch.Size([8, 2])
    """
    if isinstance(module, DualByHeadMixin):
        if module.dual_is_twin:
            zl = FeatureTap(module, f"{LOCAL}.{module.dual_entry}", several=True)
        else:
            zl = FeatureTap(module, LOCAL, at="output", several=True)
        return FeatureTap(module, module.dual_entry, several=True), zl
    for name, part in module.named_modules():
        if isinstance(part, DualExtractor):
            path = f"{name}." if name else ""
            return (
                FeatureTap(module, f"{path}global_extractor", at="output", several=True),
                FeatureTap(module, f"{path}local_extractor", at="output", several=True),
            )
    global_names(module)  # raises its error
    raise AssertionError("unreachable")
