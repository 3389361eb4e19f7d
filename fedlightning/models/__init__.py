"""Networks and the module that trains them: everything here is an ordinary `nn.Module` or `LightningModule`.

In order of importance:

* `Classifier`, `Regressor` and `CoxRegressor`: the LightningModules that train and score any network, with labels, numbers
  or times of events as targets. `SupervisedModule` is what they share.
* `networks`: `MLP`, `DigitsCNN`, `MnistCNN` and `CifarCNN`. `player_fl`, `heart` and `transformer`: the networks of the
  PLayer-FL and FENDA-FL papers and a small transformer for text. `text`: LSTM, GRU and convolutions over words.
  `signals`: convolutions over time.
  `mil`: bags of instances.
* `Segmenter`: the same for a class of each pixel or voxel. `MonaiUNet`: MONAI's U-Net (imported only when used).
* `ClientModels`: a LightningModule of its own for each client.
* `MultimodalNet`: an encoder for each modality and a fusion, for samples that may lack some.
* `TimmNet`: any image model of timm (imported only when used).
* `ClassificationMetrics`, `RegressionMetrics` and `SurvivalMetrics`: their scores over a whole split.
* `head_name`: the submodule that is a network's head.
* `recipes` and `labels`: how checkpoints record a network, and the check of labels.
"""

from fedlightning.models.classifier import Classifier
from fedlightning.models.client_models import ClientModels
from fedlightning.models.heads import head_name
from fedlightning.models.heart import FendaNet, LogisticRegression, TinyNet
from fedlightning.models.linear import GivenLinear
from fedlightning.models.metrics import ClassificationMetrics
from fedlightning.models.mil import DeepMIL
from fedlightning.models.monai_bridge import MonaiUNet
from fedlightning.models.multimodal import MultimodalNet
from fedlightning.models.networks import MLP, CifarCNN, DigitsCNN, MnistCNN
from fedlightning.models.player_fl import PLayerCifarNet, PLayerConvNet
from fedlightning.models.regression_metrics import RegressionMetrics
from fedlightning.models.regressor import Regressor
from fedlightning.models.segmenter import DiceMetrics, Segmenter
from fedlightning.models.signals import ResNet1d, SignalCNN
from fedlightning.models.supervised import SupervisedModule
from fedlightning.models.survival import CoxRegressor
from fedlightning.models.survival_metrics import SurvivalMetrics
from fedlightning.models.text import TextCNN, TextLSTM
from fedlightning.models.timm_bridge import TimmNet, timm_model
from fedlightning.models.transformer import SmallTransformer

__all__ = [
    "MLP",
    "CifarCNN",
    "ClassificationMetrics",
    "Classifier",
    "ClientModels",
    "CoxRegressor",
    "DeepMIL",
    "DiceMetrics",
    "DigitsCNN",
    "FendaNet",
    "GivenLinear",
    "LogisticRegression",
    "MnistCNN",
    "MonaiUNet",
    "MultimodalNet",
    "PLayerCifarNet",
    "PLayerConvNet",
    "RegressionMetrics",
    "Regressor",
    "ResNet1d",
    "Segmenter",
    "SignalCNN",
    "SmallTransformer",
    "SupervisedModule",
    "SurvivalMetrics",
    "TextCNN",
    "TextLSTM",
    "TimmNet",
    "TinyNet",
    "head_name",
    "timm_model",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)
