"""FedLightning: federate the LightningModule you already have."""

from typing import TYPE_CHECKING, Any

from fedlightning._torchvision import repair_torchvision

repair_torchvision()

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedlightning.checkpoints import load
    from fedlightning.hooks import FederatedCallback
    from fedlightning.trainer import FederatedTrainer

_LAZY = {
    "FederatedTrainer": "fedlightning.trainer",
    "FederatedCallback": "fedlightning.hooks",
    "load": "fedlightning.checkpoints",
}
__all__ = ["FederatedCallback", "FederatedTrainer", "load"]


def __getattr__(name: str) -> Any:
    """Import the heavy parts when they are first asked for."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fedlightning' has no attribute '{name}'")
