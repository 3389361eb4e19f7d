"""Data of a federation: data modules that know their clients, and partitioners that divide data among clients.

In order of importance:

* `FederatedDataModule`: the contract between data and the rest of the package.
* `Partitioned`: any LightningDataModule or datasets, divided among clients. `LoaderDataModule`: one loader per client.
* Partitioners. `IIDPartitioner`: even. `DirichletPartitioner`, `LabelSkewPartitioner`, `QuantitySkewPartitioner`,
  `LabelQuantitySkewPartitioner`, `PathologicalPartitioner` and `PowerLawPartitioner`: skewed. `NaturalPartitioner`: by
  hospital, user or scanner. `EmbeddingPartitioner`: by what samples look like.
* Data sets: `DigitsDataModule` (needs no files), `MNISTDataModule`, `FashionMNISTDataModule`, `EMNISTDataModule`,
  `CIFAR10DataModule`, `CIFAR100DataModule`, `SVHNDataModule`, `TinyImageNetDataModule`; `UCIHARDataModule`,
  `KUHARDataModule` (sensors).
* Clinical data sets: `HeartDiseaseDataModule`, `TCGABRCADataModule` (survival), `ISIC2019DataModule` (images of skin),
  `Camelyon16DataModule` (slides), `PTBXLDataModule` (ECG), `IXITinyDataModule` (brains in three dimensions).
* Your own files: `TabularFederatedDataModule` (CSV), `SurvivalTableDataModule` (with times of events),
  `TextTableDataModule` (texts),
  `ImageFolderDataModule` (a folder for each client) and `HuggingFaceDataModule`. `TextDataModule`: texts for transformers.
* LEAF's users as clients: `LEAFFEMNISTDataModule`, `ShakespeareDataModule`, `LEAFSent140DataModule`, `LEAFCelebADataModule`,
  `LEAFSyntheticDataModule` and their base `LEAFDataModule`.
* `MixtureDataModule`: clients with shares of two or more groups of classes or orientations.
* `ShiftedDataModule`: clients whose inputs are turned or noisy, or who name classes differently.
* `DriftingDataModule`: clients whose training data change from round to round, in the order of time.
* `MultimodalDataModule`: several modalities, which clients may lack. `PairedDigitsDataModule` (needs no files) and
  `SpokenDigitsDataModule` (images with recordings), `UTDMHADDataModule` (a sensor with a skeleton).
  `ModalityDataset`: their samples.
* `LazyClients`: a hundred thousand clients and more, each made or read when it is visited. `SyntheticDataModule`: such
  clients, drawn (needs no files). `SyntheticDevicesDataModule`: FedProx's thirty, with its sizes.
* `GivenDataModule`: a few numbers for each client, written in the configuration. `ValidatedOnTest`: another data module with
  its test samples as validation samples, to compare with published curves of test data.
* `PublicDataModule`: public data alone, for a server whose clients are at sites.
* `describe` and `plot_partition`: the samples of each client as a table and as a picture.
* Bases for your own: `ArrayFederatedDataModule`, `ImageFederatedDataModule`, `IndexedFederatedDataModule`,
  `Partitioner`, `Plan`.
* `AddressedSampler`: the batch order. `ArrayDataset` and `IndexView`: datasets in memory, and views of them.
"""

from fedlightning.datamodules.arrays import ArrayFederatedDataModule
from fedlightning.datamodules.by_inputs import EmbeddingPartitioner
from fedlightning.datamodules.camelyon16 import Camelyon16DataModule
from fedlightning.datamodules.digits import DigitsDataModule, PairedDigitsDataModule
from fedlightning.datamodules.drifting import DriftingDataModule
from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.datamodules.har import KUHARDataModule, UCIHARDataModule
from fedlightning.datamodules.heart_disease import HeartDiseaseDataModule
from fedlightning.datamodules.huggingface import HuggingFaceDataModule
from fedlightning.datamodules.image_folders import ImageFolderDataModule
from fedlightning.datamodules.image_sets import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    EMNISTDataModule,
    FashionMNISTDataModule,
    ImageFederatedDataModule,
    MNISTDataModule,
    SVHNDataModule,
)
from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.datamodules.isic2019 import ISIC2019DataModule
from fedlightning.datamodules.ixi import IXITinyDataModule
from fedlightning.datamodules.lazy import LazyClients
from fedlightning.datamodules.leaf import (
    LEAFCelebADataModule,
    LEAFDataModule,
    LEAFFEMNISTDataModule,
    LEAFSent140DataModule,
    LEAFSyntheticDataModule,
    ShakespeareDataModule,
)
from fedlightning.datamodules.loaders import LoaderDataModule
from fedlightning.datamodules.mixtures import MixtureDataModule
from fedlightning.datamodules.modality_dataset import ModalityDataset
from fedlightning.datamodules.multimodal_data import MultimodalDataModule
from fedlightning.datamodules.partition_report import PartitionReport, describe, plot_partition
from fedlightning.datamodules.partitioned import Partitioned
from fedlightning.datamodules.partitioners import GroupPlan, IIDPartitioner, NaturalPartitioner, PathologicalPartitioner
from fedlightning.datamodules.plans import Partitioner, Plan, SharePlan
from fedlightning.datamodules.ptb_xl import PTBXLDataModule
from fedlightning.datamodules.public_only import PublicDataModule
from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.datamodules.shifted import ShiftedDataModule
from fedlightning.datamodules.skew import (
    DirichletPartitioner,
    LabelQuantitySkewPartitioner,
    LabelSkewPartitioner,
    PowerLawPartitioner,
    QuantitySkewPartitioner,
)
from fedlightning.datamodules.spoken_digits import SpokenDigitsDataModule
from fedlightning.datamodules.survival_table import SurvivalTableDataModule
from fedlightning.datamodules.synthetic import GivenDataModule, SyntheticDataModule, SyntheticDevicesDataModule
from fedlightning.datamodules.tabular import TabularFederatedDataModule
from fedlightning.datamodules.tcga_brca import TCGABRCADataModule
from fedlightning.datamodules.text_table import TextTableDataModule
from fedlightning.datamodules.texts import ByteTokenizer, TextDataModule, TextFolderDataModule
from fedlightning.datamodules.tiny_imagenet import TinyImageNetDataModule
from fedlightning.datamodules.utd_mhad import UTDMHADDataModule
from fedlightning.datamodules.views import ArrayDataset, IndexView
from fedlightning.datamodules.wrapped import ValidatedOnTest

__all__ = [
    "AddressedSampler",
    "ArrayDataset",
    "ArrayFederatedDataModule",
    "ByteTokenizer",
    "CIFAR100DataModule",
    "CIFAR10DataModule",
    "Camelyon16DataModule",
    "DigitsDataModule",
    "DirichletPartitioner",
    "DriftingDataModule",
    "EMNISTDataModule",
    "EmbeddingPartitioner",
    "FashionMNISTDataModule",
    "FederatedDataModule",
    "GivenDataModule",
    "GroupPlan",
    "HeartDiseaseDataModule",
    "HuggingFaceDataModule",
    "IIDPartitioner",
    "ISIC2019DataModule",
    "IXITinyDataModule",
    "ImageFederatedDataModule",
    "ImageFolderDataModule",
    "IndexView",
    "IndexedFederatedDataModule",
    "KUHARDataModule",
    "LEAFCelebADataModule",
    "LEAFDataModule",
    "LEAFFEMNISTDataModule",
    "LEAFSent140DataModule",
    "LEAFSyntheticDataModule",
    "LabelQuantitySkewPartitioner",
    "LabelSkewPartitioner",
    "LazyClients",
    "LoaderDataModule",
    "MNISTDataModule",
    "MixtureDataModule",
    "ModalityDataset",
    "MultimodalDataModule",
    "NaturalPartitioner",
    "PTBXLDataModule",
    "PairedDigitsDataModule",
    "PartitionReport",
    "Partitioned",
    "Partitioner",
    "PathologicalPartitioner",
    "Plan",
    "PowerLawPartitioner",
    "PublicDataModule",
    "QuantitySkewPartitioner",
    "ShakespeareDataModule",
    "SVHNDataModule",
    "SharePlan",
    "ShiftedDataModule",
    "Split",
    "SpokenDigitsDataModule",
    "SurvivalTableDataModule",
    "SyntheticDataModule",
    "SyntheticDevicesDataModule",
    "TCGABRCADataModule",
    "TabularFederatedDataModule",
    "TextDataModule",
    "TextFolderDataModule",
    "TextTableDataModule",
    "TinyImageNetDataModule",
    "UCIHARDataModule",
    "UTDMHADDataModule",
    "ValidatedOnTest",
    "describe",
    "plot_partition",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)
