"""Networks and the module that trains them: everything here is an ordinary `nn.Module` or `LightningModule`.

In order of importance:

* `Classifier`, `Regressor` and `CoxRegressor`: the LightningModules that train and score any network, with labels, numbers
  or times of events as targets. `SupervisedModule` is what they share.
* `networks`: `MLP`, `DigitsCNN`, `MnistCNN`, `CifarCNN`, `DeepMIL` for bags of instances, and `head_name`: a network's head.
  `paper_networks`: those of the PLayer-FL and FENDA-FL papers. `sequence_networks`: LSTM, convolutions and a small
  transformer for text, convolutions over time for signals. `bridges`: networks of timm and MONAI (imported when used).
* `Segmenter`: the same for a class of each pixel or voxel.
* `ClientModels`: a LightningModule of its own for each client.
* `MultimodalNet`: an encoder for each modality and a fusion, for samples that may lack some.
* `ClassificationMetrics`, `RegressionMetrics` and `SurvivalMetrics`: their scores over a whole split.
* `HFModule`: any model of transformers, or a `PeftModel`; `load_pretrained` reads one from a folder.
* `GivenAdapters`: clients whose adapters are known beforehand, to check aggregations.
* `recipes`: how checkpoints record a network.
"""

from fedlightning.models.bridges import MonaiUNet, TimmNet, load_pretrained, timm_model
from fedlightning.models.classifier import Classifier
from fedlightning.models.client_models import ClientModels
from fedlightning.models.given_adapters import GivenAdapters
from fedlightning.models.hf_module import HFModule
from fedlightning.models.metrics import ClassificationMetrics
from fedlightning.models.multimodal import MultimodalNet
from fedlightning.models.networks import MLP, CifarCNN, DeepMIL, DigitsCNN, GivenLinear, MnistCNN, head_name
from fedlightning.models.paper_networks import FendaNet, LogisticRegression, PLayerCifarNet, PLayerConvNet, TinyNet
from fedlightning.models.regressor import RegressionMetrics, Regressor
from fedlightning.models.segmenter import DiceMetrics, Segmenter
from fedlightning.models.sequence_networks import ResNet1d, SignalCNN, SmallTransformer, TextCNN, TextLSTM
from fedlightning.models.supervised import SupervisedModule
from fedlightning.models.survival import CoxRegressor, SurvivalMetrics

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
    "GivenAdapters",
    "GivenLinear",
    "HFModule",
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
    "load_pretrained",
    "timm_model",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)
