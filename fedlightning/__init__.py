"""FedLightning: federate the LightningModule you already have."""

from typing import Any

from fedlightning.compat.torchvision import repair_torchvision_when_imported

repair_torchvision_when_imported()

__version__ = "0.1.0"

_LAZY = {
    "FederatedCLI": "fedlightning.project",
    "FederatedTrainer": "fedlightning.trainer",
    "FederatedCallback": "fedlightning.contract",
    "load": "fedlightning.deployment.checkpoints",
}
__all__ = ["FederatedCLI", "FederatedCallback", "FederatedTrainer", "load"]


def __getattr__(name: str) -> Any:
    """Import the heavy parts when they are first asked for."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fedlightning' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Return the public names."""
    return [*__all__, "__version__"]
