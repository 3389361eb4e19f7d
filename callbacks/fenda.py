"""FENDA-FL."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Literal

import torch
from lightning.pytorch import LightningModule
from torch import nn

from fedlightning.algorithm import FederatedCallback, Server, WeightingName
from fedlightning.callbacks.shared.representations import head_path
from fedlightning.ranges import make_init
from fedlightning.wrappers.adapters import adapter_names
from fedlightning.wrappers.dual import DualExtractor, dual_by_head, global_names
from fedlightning.wrappers.mixing import user_class

DEFAULTS = {
    "local_extractor": None,
    "fusion": "concat",
    "order": "global_first",
    "init": "copy",
    "local_features": None,
}


@make_init
class FENDA(FederatedCallback):
    """A shared and a private feature extractor under one private head (FENDA-FL).

    Tavakoli, Emerson, Ayromlou, Jewell, Krishnan, Zhang, Verma, Razak, "A comprehensive view of personalized federated
    learning on heterogeneous clinical datasets" (FENDA-FL), 2024; after Kim, Stratos, Sarikaya, COLING 2016.

    * Client: the prediction is ``head(concat(f_u(x), f_v1(x)))``. The global extractor ``u``, the local extractor
      ``v1`` and the head ``v2`` train jointly on the task loss. Every client starts from the same ``u, v1, v2``.
    * Server: the weighted mean of the ``u_i``.
    * Down: ``u``. Up: ``u_i``. State: ``v1`` and ``v2`` at each client.
    * Deployed: the client's model. There is no global model: select with :class:`LocalCheckpoint`.

    Args:
        head: Path of the submodule that turns features into predictions (``"net.fc"``). The extractor is everything
            else, and a private twin of it is added. ``None`` (default): the module holds a
            :class:`~fedlightning.wrappers.DualExtractor` already.
        local_extractor: Another network as the local extractor, of any width, which is fed the model's input. ``None``
            (default): a twin of the global one.
        fusion: ``"concat"`` (paper, default) or ``"sum"`` (widths must agree).
        order: Whose features come first: ``"global_first"`` (default) or ``"local_first"``.
        init: The twin starts as a ``"copy"`` of the extractor (default), or ``"fresh"``.
        local_features: Width of ``local_extractor``, where it cannot be read off its last layer.
        weighting: ``"samples"`` (default) or ``"uniform"``.

    Example:
        The network of the paper's Fed-Heart-Disease experiment has 151 parameters, of which 70 travel.

        >>> from fedlightning.callbacks import FENDA
        >>> from fedlightning.models import Classifier, TinyNet
        >>> fenda, module = FENDA(head="net.fc2"), Classifier(TinyNet(), num_classes=1)
        >>> module = fenda.wrap_module(module, "server")
        >>> sum(parameter.numel() for parameter in module.parameters())
        151
        >>> fenda.shared_names(None, module)
        ['net.fc1.weight', 'net.fc1.bias']
    """

    head: str | list[str] | None = None
    local_extractor: nn.Module | None = None
    fusion: Literal["concat", "sum"] = "concat"
    order: Literal["global_first", "local_first"] = "global_first"
    init: Literal["copy", "fresh"] = "copy"
    local_features: int | None = None
    weighting: WeightingName | None = None

    def wrap_module(self, module: LightningModule, owner: str) -> LightningModule:
        """Add the private extractor and widen the head.

        Raises:
            ValueError: If there is no such head, or nothing outside it to share, or the module has adapters. The
                sentence lists what there is.
        """
        if self.head is None:
            options = {name: getattr(self, name) for name in DEFAULTS}
            changed = [name for name, value in options.items() if value != DEFAULTS[name]]
            if changed:
                raise ValueError(
                    f"{self.key} got {changed[0]}={options[changed[0]]!r} but no head to build a dual extractor for. Set "
                    "head=..., or give these options to the DualExtractor in the module."
                )
            if not any(isinstance(part, DualExtractor) for part in module.modules()):
                linear_layers = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
                raise ValueError(
                    f"{self.key} needs to know the head of {user_class(module).__name__}. Set head=... to the submodule "
                    f"that makes predictions (linear layers here: {linear_layers}), or build the model from a DualExtractor."
                )
            return module
        if adapter_names(module):
            raise ValueError(
                f"{self.key}(head={self.head!r}) doubles a network and widens its head, but another callback has put "
                "adapters into it, which would not fit. Build the model from a DualExtractor and leave head out, or remove "
                f"{self.key} or the adapters."
            )
        return dual_by_head(
            module,
            head_path(module, self.head),
            copy.deepcopy(self.local_extractor),
            fusion=self.fusion,
            order=self.order,
            init=self.init,
            local_features=self.local_features,
            seed=int(torch.randint(2**31, ())),  # building is seeded: the same bits for every owner
        )

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Return the names of the global extractor."""
        return global_names(module)
