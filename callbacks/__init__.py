"""Algorithms, checkpointing and diagnostics: one file an algorithm."""

from fedlightning.callbacks.apfl import APFL
from fedlightning.callbacks.central import Central
from fedlightning.callbacks.checkpoints import GlobalCheckpoint, LocalCheckpoint
from fedlightning.callbacks.diagnostics.gradient_variance import GradientVariance
from fedlightning.callbacks.diagnostics.hessian_trace import HessianTrace
from fedlightning.callbacks.diagnostics.layer_diagnostics import LayerDiagnostics
from fedlightning.callbacks.diagnostics.layer_values import LayerValues
from fedlightning.callbacks.diagnostics.sensitivity import FederationSensitivity, Sensitivity
from fedlightning.callbacks.ditto import Ditto
from fedlightning.callbacks.fedala import FedALA
from fedlightning.callbacks.fedamp import FedAMP, HeurFedAMP
from fedlightning.callbacks.fedavg import FedAvg, FedSGD
from fedlightning.callbacks.fedavgm import FedAvgM
from fedlightning.callbacks.fedbabu import FedBABU
from fedlightning.callbacks.fedfomo import FedFomo
from fedlightning.callbacks.fedlama import FedLAMA
from fedlightning.callbacks.fedlp import FedLP
from fedlightning.callbacks.fednova import FedNova
from fedlightning.callbacks.fedopt import FedAdagrad, FedAdam, FedYogi
from fedlightning.callbacks.fedproto import FedProto
from fedlightning.callbacks.fedprox import FedProx
from fedlightning.callbacks.fedrep import FedRep
from fedlightning.callbacks.fenda import FENDA
from fedlightning.callbacks.fliu import FLIU
from fedlightning.callbacks.heterofl import HeteroFL
from fedlightning.callbacks.heurpfedla import HeurpFedLA
from fedlightning.callbacks.ifca import IFCA, HypCluster
from fedlightning.callbacks.l2gd import L2GD
from fedlightning.callbacks.local_adaptation import LocalAdaptation
from fedlightning.callbacks.lora import FedIT, FFALoRA
from fedlightning.callbacks.mapper import MAPPER
from fedlightning.callbacks.moon import MOON
from fedlightning.callbacks.partial import FedBN, FedPer, LGFedAvg, Local
from fedlightning.callbacks.per_fedavg import PerFedAvg
from fedlightning.callbacks.perfcl import PerFCL
from fedlightning.callbacks.pfedla import pFedLA
from fedlightning.callbacks.pfedme import pFedMe
from fedlightning.callbacks.player_fl import PLayerFL, PLayerFLRandom
from fedlightning.callbacks.scaffold import SCAFFOLD

__all__ = [
    "PerFCL",
    "MOON",
    "HeteroFL",
    "FedProto",
    "FedLP",
    "FedLAMA",
    "APFL",
    "FENDA",
    "FLIU",
    "IFCA",
    "L2GD",
    "MAPPER",
    "SCAFFOLD",
    "Central",
    "Ditto",
    "FFALoRA",
    "FedALA",
    "FedAMP",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedFomo",
    "FedIT",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSGD",
    "FedYogi",
    "FederationSensitivity",
    "GlobalCheckpoint",
    "GradientVariance",
    "HessianTrace",
    "HeurFedAMP",
    "HeurpFedLA",
    "HypCluster",
    "LGFedAvg",
    "LayerDiagnostics",
    "LayerValues",
    "Local",
    "LocalAdaptation",
    "LocalCheckpoint",
    "PLayerFL",
    "PLayerFLRandom",
    "PerFedAvg",
    "Sensitivity",
    "pFedLA",
    "pFedMe",
]

PFedLA, PFedMe = pFedLA, pFedMe
