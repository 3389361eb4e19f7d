from fedlightning.contract import FederatedCallback
from fedlightning.deployment.checkpoints import load
from fedlightning.project import FederatedCLI
from fedlightning.trainer import FederatedTrainer

__version__: str
__all__ = ["FederatedCLI", "FederatedCallback", "FederatedTrainer", "load"]
