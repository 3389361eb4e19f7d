"""Partial sharing: FedPer, FedBN and the siloed baseline."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedlightning.hooks import FederatedCallback, Setup
from fedlightning.layers import expand, head_names, ordered_layers
from fedlightning.server import Server


class FedPer(FederatedCallback):
    """A shared body and a personal head.

    Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization layers", 2019.

    Up and down: the body ``u``. The head ``v_i`` stays with its client; both are trained jointly. There is no global
    model. Server: ``u = sum_i p_i u_i``.

    Args:
        personal: names or module prefixes of the personal part (``["head"]``, ``["net.fc"]``); or
        num_layers: the last K layers are personal (paper: K_P from 1); used when ``personal`` is ``None``.
        weighting: ``"samples"`` or ``"uniform"``.
    """

    def __init__(self, personal: list[str] | None = None, num_layers: int = 1, weighting: str | None = None) -> None:
        self.personal = personal
        self.num_layers = num_layers
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse names that are not there, and a split with nothing shared."""
        if len(self._private(setup.module)) == len(setup.kinds):
            raise ValueError(
                f"FedPer leaves nothing to share: {type(setup.template).__name__} has "
                f"{len(ordered_layers(setup.module))} layer(s), all personal. Make fewer layers personal, or use Local()."
            )

    def _private(self, module: nn.Module) -> list[str]:
        if self.personal is not None:
            return expand(self.personal, module.state_dict())
        return head_names(module, self.num_layers)

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Everything but the personal part."""
        private = set(self._private(module))
        return [name for name in server.kinds if name not in private]


class FedBN(FederatedCallback):
    """FedAvg on everything except batch normalisation.

    Li, Jiang, Zhang, Kamp, Dou, "FedBN: federated learning on non-IID features via local batch normalization", ICLR
    2021.

    All state of BatchNorm layers (affine parameters and running statistics, found by module type) stays with each
    client; LayerNorm and GroupNorm are shared. There is no global model for unseen clients.

    Args:
        weighting: ``"samples"`` or ``"uniform"`` (the authors' code).
    """

    def __init__(self, weighting: str | None = None) -> None:
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse a module without batch normalisation."""
        if not batch_norm_names(setup.module):
            raise ValueError(
                f"FedBN keeps batch normalisation local, but {type(setup.template).__name__} has no BatchNorm layer. "
                "Remove FedBN, or use FedPer(personal=[...])."
            )

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Everything outside BatchNorm layers."""
        private = batch_norm_names(module)
        return [name for name in server.kinds if name not in private]


class Local(FederatedCallback):
    """The siloed baseline: every client trains alone; nothing travels.

    Called Silo in the FENDA-FL paper, CLT in FLIU, Local in PLayer-FL. Optimizers go on from round to round, so that R
    rounds of E epochs are one ordinary training of R*E epochs.
    """

    optimizer_state = "keep"

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str]:
        """Nothing."""
        return []


def batch_norm_names(module: nn.Module) -> set[str]:
    """State names inside BatchNorm layers (also SyncBatchNorm), by module type."""
    layers = [path for path, child in module.named_modules() if isinstance(child, _BatchNorm)]
    return {name for name in module.state_dict() if any(name.startswith(f"{path}.") for path in layers)}


__all__ = ["FedBN", "FedPer", "Local", "batch_norm_names"]
