"""Reference networks of the papers, one classification module, and a bridge to timm (imported only when used)."""

from fedlightning.models.classifier import Classifier
from fedlightning.models.heads import head_name
from fedlightning.models.heart import FendaNet, LogisticRegression, TinyNet
from fedlightning.models.metrics import ClassificationMetrics
from fedlightning.models.networks import MLP, CifarCNN, DigitsCNN, MnistCNN
from fedlightning.models.player_fl import PLayerCifarNet, PLayerConvNet
from fedlightning.models.timm_bridge import TimmNet, timm_model
from fedlightning.models.transformer import SmallTransformer

__all__ = [
    "MLP",
    "CifarCNN",
    "ClassificationMetrics",
    "Classifier",
    "DigitsCNN",
    "FendaNet",
    "LogisticRegression",
    "MnistCNN",
    "PLayerCifarNet",
    "PLayerConvNet",
    "SmallTransformer",
    "TimmNet",
    "TinyNet",
    "head_name",
    "timm_model",
]
