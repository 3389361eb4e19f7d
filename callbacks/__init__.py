"""Algorithms, checkpointing and diagnostics: one file per algorithm.

Written by `make registry` from the rows in fedlightning/catalogue. Do not edit it.
"""

from fedlightning.callbacks.apfl import APFL
from fedlightning.callbacks.central import Central
from fedlightning.callbacks.cfl import CFL
from fedlightning.callbacks.checkpoints import GlobalCheckpoint, LocalCheckpoint
from fedlightning.callbacks.dapper import Dapper
from fedlightning.callbacks.dfedavg import DFedAvg
from fedlightning.callbacks.diagnostics.gradient_variance import GradientVariance
from fedlightning.callbacks.diagnostics.hessian_trace import HessianTrace
from fedlightning.callbacks.diagnostics.layer_diagnostics import LayerDiagnostics
from fedlightning.callbacks.diagnostics.layer_values import LayerValues
from fedlightning.callbacks.diagnostics.sensitivity import FederationSensitivity
from fedlightning.callbacks.diagnostics.sensitivity_terms import Sensitivity
from fedlightning.callbacks.ditto import Ditto
from fedlightning.callbacks.dsfl import DSFL
from fedlightning.callbacks.dsgd import DSGD
from fedlightning.callbacks.fccl import FCCL
from fedlightning.callbacks.fcclplus import FCCLPlus
from fedlightning.callbacks.fd import FD
from fedlightning.callbacks.fedala import FedALA
from fedlightning.callbacks.fedamp import FedAMP
from fedlightning.callbacks.fedasync import FedAsync
from fedlightning.callbacks.fedavg import FedAvg, FedSGD
from fedlightning.callbacks.fedavgm import FedAvgM
from fedlightning.callbacks.fedbabu import FedBABU
from fedlightning.callbacks.fedbe import FedBE
from fedlightning.callbacks.fedbuff import FedBuff
from fedlightning.callbacks.fedcovid import FedCovid
from fedlightning.callbacks.feddf import FedDF
from fedlightning.callbacks.federateddropout import FederatedDropout
from fedlightning.callbacks.fedet import FedET
from fedlightning.callbacks.fedfomo import FedFomo
from fedlightning.callbacks.fedgh import FedGH
from fedlightning.callbacks.fedgkt import FedGKT
from fedlightning.callbacks.fedgroup import FedGroup
from fedlightning.callbacks.fedkd import FedKD
from fedlightning.callbacks.fedkemf import FedKEMF
from fedlightning.callbacks.fedlama import FedLAMA
from fedlightning.callbacks.fedlp import FedLP
from fedlightning.callbacks.fedmd import FedMD
from fedlightning.callbacks.fedmultimodal import FedMultimodal
from fedlightning.callbacks.fednova import FedNova
from fedlightning.callbacks.fedopt import FedAdagrad, FedAdam, FedYogi
from fedlightning.callbacks.fedproto import FedProto
from fedlightning.callbacks.fedprox import FedProx
from fedlightning.callbacks.fedrep import FedRep
from fedlightning.callbacks.fedrolex import FedRolex
from fedlightning.callbacks.fedsoft import FedSoft
from fedlightning.callbacks.fedtype import FedType
from fedlightning.callbacks.fenda import FENDA
from fedlightning.callbacks.fesem import FeSEM
from fedlightning.callbacks.fesem_ma import FeSEMMA
from fedlightning.callbacks.fjord import FjORD
from fedlightning.callbacks.fliu import FLIU
from fedlightning.callbacks.flora import FLoRA
from fedlightning.callbacks.fml import FML
from fedlightning.callbacks.gpfl import GPFL
from fedlightning.callbacks.harmony import Harmony
from fedlightning.callbacks.heterofl import HeteroFL
from fedlightning.callbacks.hetlora import HetLoRA
from fedlightning.callbacks.heurfedamp import HeurFedAMP
from fedlightning.callbacks.heurpfedla import HeurpFedLA
from fedlightning.callbacks.ifca import IFCA, HypCluster
from fedlightning.callbacks.l2gd import L2GD
from fedlightning.callbacks.ldsgd import LDSGD
from fedlightning.callbacks.local_adaptation import LocalAdaptation
from fedlightning.callbacks.lora import FedIT, FFALoRA
from fedlightning.callbacks.mapper import MAPPER
from fedlightning.callbacks.maxfl import MaxFL
from fedlightning.callbacks.moon import MOON
from fedlightning.callbacks.partial import FedBN, FedPer, LGFedAvg, Local
from fedlightning.callbacks.per_fedavg import PerFedAvg
from fedlightning.callbacks.perfcl import PerFCL
from fedlightning.callbacks.pfedbayes import pFedBayes
from fedlightning.callbacks.pfedhr import pFedHR
from fedlightning.callbacks.pfedknow import pFedKnow
from fedlightning.callbacks.pfedla import pFedLA
from fedlightning.callbacks.pfedme import pFedMe
from fedlightning.callbacks.pi_fl import PIFL
from fedlightning.callbacks.player_fl import PLayerFL, PLayerFLRandom
from fedlightning.callbacks.poisson import PoissonSampling
from fedlightning.callbacks.private_lr import PrivateLR
from fedlightning.callbacks.scaffold import SCAFFOLD
from fedlightning.callbacks.stragglers import Stragglers
from fedlightning.callbacks.swift import SWIFT
from fedlightning.callbacks.tiff import TIFF

__all__ = [
    "APFL",
    "Central",
    "CFL",
    "Dapper",
    "DFedAvg",
    "Ditto",
    "DSFL",
    "DSGD",
    "FCCL",
    "FCCLPlus",
    "FD",
    "FedAdagrad",
    "FedAdam",
    "FedALA",
    "FedAMP",
    "FedAsync",
    "FedAvg",
    "FedAvgM",
    "FedBABU",
    "FedBE",
    "FedBN",
    "FedBuff",
    "FedCovid",
    "FedDF",
    "FederatedDropout",
    "FederationSensitivity",
    "FedET",
    "FedFomo",
    "FedGH",
    "FedGKT",
    "FedGroup",
    "FedIT",
    "FedKD",
    "FedKEMF",
    "FedLAMA",
    "FedLP",
    "FedMD",
    "FedMultimodal",
    "FedNova",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRolex",
    "FedSGD",
    "FedSoft",
    "FedType",
    "FedYogi",
    "FENDA",
    "FeSEM",
    "FeSEMMA",
    "FFALoRA",
    "FjORD",
    "FLIU",
    "FLoRA",
    "FML",
    "GlobalCheckpoint",
    "GPFL",
    "GradientVariance",
    "Harmony",
    "HessianTrace",
    "HeteroFL",
    "HetLoRA",
    "HeurFedAMP",
    "HeurpFedLA",
    "HypCluster",
    "IFCA",
    "L2GD",
    "LayerDiagnostics",
    "LayerValues",
    "LDSGD",
    "LGFedAvg",
    "Local",
    "LocalAdaptation",
    "LocalCheckpoint",
    "MAPPER",
    "MaxFL",
    "MOON",
    "PerFCL",
    "PerFedAvg",
    "pFedBayes",
    "pFedHR",
    "pFedKnow",
    "pFedLA",
    "pFedMe",
    "PIFL",
    "PLayerFL",
    "PLayerFLRandom",
    "PoissonSampling",
    "PrivateLR",
    "SCAFFOLD",
    "Sensitivity",
    "Stragglers",
    "SWIFT",
    "TIFF",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)
