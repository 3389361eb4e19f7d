"""Each algorithm as the conformance suite sees it: instances to check, and what cannot hold by definition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedlightning import callbacks as c
from fedlightning.hooks import FederatedCallback


@dataclass(frozen=True)
class Case:
    """An algorithm's instance, its neutral form, skipped checks with the reason, and what the toy run needs."""

    algorithm: FederatedCallback
    neutral: FederatedCallback | None = None
    skip: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


NO_PLAIN_FORM = {"one_client": "its deployed model is another one by definition"}
ADAPTERS = {"one_client": "it equals plain training of adapters, which tests/callbacks/test_lora.py compares"}

CASES: dict[str, Case] = {
    "FedAvg": Case(c.FedAvg()),
    "FedAvg uniform": Case(c.FedAvg(weighting="uniform")),
    "FedSGD": Case(c.FedSGD(), arguments={"local_steps": 1}),
    "FedProx": Case(c.FedProx(mu=0.1), neutral=c.FedProx(mu=0.0)),
    "SCAFFOLD": Case(c.SCAFFOLD()),
    "SCAFFOLD option 1": Case(c.SCAFFOLD(option=1, server_lr=0.9), neutral=c.SCAFFOLD(option=1)),
    "FedAdam": Case(c.FedAdam(), skip=NO_PLAIN_FORM),
    "FedYogi": Case(c.FedYogi(), skip=NO_PLAIN_FORM),
    "FedAdagrad": Case(c.FedAdagrad(), skip=NO_PLAIN_FORM),
    "FedAvgM": Case(c.FedAvgM(), neutral=c.FedAvgM(beta=0.0)),
    "FedNova": Case(c.FedNova()),
    "PerFedAvg": Case(c.PerFedAvg(alpha=0.1), neutral=c.PerFedAvg(alpha=0.0)),
    "PerFedAvg FO": Case(c.PerFedAvg(alpha=0.1, variant="FO"), neutral=c.PerFedAvg(alpha=0.0, variant="FO")),
    "PerFedAvg exact": Case(c.PerFedAvg(alpha=0.1, variant="exact"), neutral=c.PerFedAvg(alpha=0.0, variant="exact")),
    "pFedMe": Case(c.pFedMe(), skip=NO_PLAIN_FORM),
    "pFedMe all": Case(c.pFedMe(all_clients=True, server_lr=0.5), skip=NO_PLAIN_FORM),
    "L2GD": Case(
        c.L2GD(), skip={"one_client": "the coin decides how many steps there are"}, arguments={"local_steps": 1}
    ),
    "FedPer": Case(c.FedPer(personal=["head"])),
    "LGFedAvg": Case(c.LGFedAvg(shared=["head"])),
    "FedRep": Case(c.FedRep(personal=["head"], head_epochs=2), neutral=c.FedRep(personal=[])),
    "FedBABU": Case(c.FedBABU(head=["head"], epochs=1), neutral=c.FedBABU(head=[], epochs=0)),
    "LocalAdaptation": Case(c.LocalAdaptation(), neutral=c.LocalAdaptation(epochs=0)),
    "LocalAdaptation head": Case(
        c.LocalAdaptation(part="head", head=["head"], keep_if_better=True), neutral=c.LocalAdaptation(epochs=0)
    ),
    "Ditto": Case(c.Ditto(), neutral=c.Ditto(lam=0.0)),
    "MAPPER": Case(c.MAPPER(), neutral=c.MAPPER(grid=[0.0])),
    "FedBN": Case(c.FedBN(), arguments={"full": True}),
    "Local": Case(c.Local(), skip={"one_client": "its optimizers go on from round to round"}),
    "Central": Case(
        c.Central(),
        skip={
            "one_client": "its batches are addressed as the pooled client's",
            "nan_client": "it trains on everybody's samples, so nobody can be left out",
        },
    ),
    "APFL": Case(c.APFL(), neutral=c.APFL(alpha=0.0, adaptive=False)),
    "APFL logits": Case(c.APFL(mix="logits"), neutral=c.APFL(alpha=0.0, adaptive=False, mix="logits")),
    "FENDA": Case(c.FENDA(head="head"), skip=NO_PLAIN_FORM),
    "FedIT": Case(c.FedIT(), skip=ADAPTERS),
    "FedIT head": Case(c.FedIT(r=2, head=["head"]), skip=ADAPTERS, arguments={"full": True}),
    "FFALoRA": Case(c.FFALoRA(), skip=ADAPTERS),
    "FLIU": Case(c.FLIU()),
    "FLIU fixed": Case(c.FLIU(gamma=0.5)),
    "PLayerFL": Case(c.PLayerFL(threshold=1.1)),
    "PLayerFLRandom": Case(c.PLayerFLRandom(threshold=1.1)),
    "FedFomo": Case(c.FedFomo(num_models=2)),
    "FedFomo start": Case(c.FedFomo(num_models=2, epsilon=0.0, baseline="start"), skip=NO_PLAIN_FORM),
    "FedAMP": Case(c.FedAMP(sigma=1.0), neutral=c.FedAMP(lam=0.0)),
    "FedAMP own": Case(c.FedAMP(sigma=1.0, start="own"), neutral=c.FedAMP(lam=0.0, start="own")),
    "HeurFedAMP": Case(c.HeurFedAMP(alpha=10.0), neutral=c.HeurFedAMP(lam=0.0)),
    "FedALA": Case(c.FedALA(num_layers=2)),
    "pFedLA": Case(c.pFedLA()),
    "pFedLA relu": Case(c.pFedLA(hn_lr=0.1, normalise="relu")),
    "HeurpFedLA": Case(c.HeurpFedLA()),
    "IFCA": Case(c.IFCA(), neutral=c.IFCA(num_clusters=1)),
    "IFCA option 1": Case(c.IFCA(option=1), skip=NO_PLAIN_FORM),
    "HypCluster": Case(c.HypCluster(), neutral=c.HypCluster(num_clusters=1)),
    "MOON": Case(c.MOON(head="head"), neutral=c.MOON(mu=0.0)),
    "FedProto": Case(c.FedProto(head="head"), neutral=c.FedProto(lam=0.0, head="head")),
    "FedProto nearest": Case(c.FedProto(head="head", predictor="nearest", weighting="samples"), skip=NO_PLAIN_FORM),
    "FedProto during": Case(c.FedProto(head="head", proto_pass="during"), skip=NO_PLAIN_FORM),
    "PerFCL": Case(c.PerFCL(head="head", init="fresh"), skip=NO_PLAIN_FORM),
    "FedLP": Case(c.FedLP(q=0.5), neutral=c.FedLP(q=1.0)),
    "FedLAMA": Case(c.FedLAMA()),
    "FedLAMA slow": Case(c.FedLAMA(phi=2, tau=2)),
    "HeteroFL": Case(
        c.HeteroFL(head="head"),
        neutral=c.HeteroFL(rates=[1.0], masked_loss=False, head="head"),
        skip={"identical_clients": "its clients differ in width"},
    ),
    "HeteroFL one width": Case(c.HeteroFL(rates=[0.5], head="head"), skip=NO_PLAIN_FORM),
    "HeteroFL dynamic": Case(
        c.HeteroFL(dynamic=True, static_bn=False, head="head"),
        skip={**NO_PLAIN_FORM, "identical_clients": "its clients differ in width"},
    ),
}
