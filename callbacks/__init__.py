"""Algorithms, checkpointing and diagnostics: one file an algorithm."""

from fedlightning.callbacks.apfl import APFL
from fedlightning.callbacks.central import Central
from fedlightning.callbacks.checkpoints import GlobalCheckpoint, LocalCheckpoint
from fedlightning.callbacks.fedala import FedALA
from fedlightning.callbacks.fedamp import FedAMP, HeurFedAMP
from fedlightning.callbacks.fedavg import FedAvg, FedSGD
from fedlightning.callbacks.fedavgm import FedAvgM
from fedlightning.callbacks.fedfomo import FedFomo
from fedlightning.callbacks.fednova import FedNova
from fedlightning.callbacks.fedopt import FedAdagrad, FedAdam, FedYogi
from fedlightning.callbacks.fedprox import FedProx
from fedlightning.callbacks.fenda import FENDA
from fedlightning.callbacks.fliu import FLIU
from fedlightning.callbacks.heurpfedla import HeurpFedLA
from fedlightning.callbacks.ifca import IFCA, HypCluster
from fedlightning.callbacks.l2gd import L2GD
from fedlightning.callbacks.partial import FedBN, FedPer, Local
from fedlightning.callbacks.per_fedavg import PerFedAvg
from fedlightning.callbacks.pfedla import PFedLA
from fedlightning.callbacks.pfedme import PFedMe
from fedlightning.callbacks.player_fl import PLayerFL, PLayerFLRandom
from fedlightning.callbacks.scaffold import SCAFFOLD
from fedlightning.callbacks.sensitivity import FederationSensitivity, Sensitivity

__all__ = [
    "APFL",
    "Central",
    "FENDA",
    "FLIU",
    "FedALA",
    "FedAMP",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBN",
    "FedFomo",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedSGD",
    "FedYogi",
    "FederationSensitivity",
    "GlobalCheckpoint",
    "HeurFedAMP",
    "HeurpFedLA",
    "HypCluster",
    "IFCA",
    "L2GD",
    "Local",
    "LocalCheckpoint",
    "PFedLA",
    "PFedMe",
    "PLayerFL",
    "PLayerFLRandom",
    "PerFedAvg",
    "SCAFFOLD",
    "Sensitivity",
]
