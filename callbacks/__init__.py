"""Algorithms, checkpointing and diagnostics: one file an algorithm."""

from fedlightning.callbacks.apfl import APFL
from fedlightning.callbacks.central import Central
from fedlightning.callbacks.checkpoints import GlobalCheckpoint, LocalCheckpoint
from fedlightning.callbacks.fedavg import FedAvg, FedSGD
from fedlightning.callbacks.fedopt import FedAdam
from fedlightning.callbacks.fedprox import FedProx
from fedlightning.callbacks.fenda import FENDA
from fedlightning.callbacks.fliu import FLIU
from fedlightning.callbacks.partial import FedBN, FedPer, Local
from fedlightning.callbacks.player_fl import PLayerFL, PLayerFLRandom
from fedlightning.callbacks.scaffold import SCAFFOLD
from fedlightning.callbacks.sensitivity import FederationSensitivity, Sensitivity

__all__ = [
    "APFL",
    "FENDA",
    "FLIU",
    "SCAFFOLD",
    "Central",
    "FedAdam",
    "FedAvg",
    "FedBN",
    "FedPer",
    "FedProx",
    "FedSGD",
    "FederationSensitivity",
    "GlobalCheckpoint",
    "Local",
    "LocalCheckpoint",
    "PLayerFL",
    "PLayerFLRandom",
    "Sensitivity",
]
