"""Under which names the state of every algorithm is kept: runs that lie on disk are read by them, so they do not change.

All names stand here as data. A class may be renamed or moved; what it keeps goes on under the key written here (which is
also part of the address of its randomness). A change of this file is a change of the format: old runs no longer resume.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fedlightning.callbacks import GlobalCheckpoint, LayerDiagnostics, LocalCheckpoint
from fedlightning.catalogue import create, list_algorithms
from tests.helpers import NormNet, federate, toy_data


@dataclass(frozen=True)
class Kept:
    """What is there after two rounds.

    Attributes:
        key: the algorithm's; server, client: its entries in ``server.state`` and in every ``client.state``.
        phases: of which Lightning keeps something at the clients; models: of the server.
        options: of the algorithm; arguments: of the trainer.
    """

    key: str
    server: tuple[str, ...] = ()
    client: tuple[str, ...] = ()
    phases: tuple[str, ...] = ("fit",)
    models: tuple[str, ...] = ("global",)
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


HEAD: dict[str, Any] = {"head": "net.3"}
MOMENTS = ("m", "step", "v")
LAYERS = ("clients", "layers", "order", "personal", "split")
CENTRES = ("global", "centre 1")

KEPT = {  # by the name in the catalogue
    "APFL": Kept("APFL", client=("alpha", "v")),
    "Central": Kept("Central", phases=()),
    "Ditto": Kept("Ditto", client=("model",), phases=("fit", "personal")),
    "FENDA": Kept("FENDA", options=HEAD),
    "FFALoRA": Kept("FFALoRA"),
    "FLIU": Kept("FLIU", client=("theta",)),
    "FedALA": Kept("FedALA", client=("W", "th")),
    "FedAMP": Kept("FedAMP", server=("models",), client=("w",)),
    "FedAdagrad": Kept("FedAdagrad", server=MOMENTS),
    "FedAdam": Kept("FedAdam", server=MOMENTS),
    "FedAvg": Kept("FedAvg"),
    "FedAvgM": Kept("FedAvgM", server=("vel",)),
    "FedBABU": Kept("FedBABU", client=("model",), phases=("adapt", "fit")),
    "FedBN": Kept("FedBN"),
    "FedFomo": Kept("FedFomo", server=("P", "models"), client=("own",)),
    "FedIT": Kept("FedIT"),
    "FedLAMA": Kept("FedLAMA", server=("averaged", "d", "participants", "seen", "tau")),
    "FedLP": Kept("FedLP"),
    "FedNova": Kept("FedNova", client=("a",)),
    "FedPer": Kept("FedPer"),
    "FedProto": Kept("FedProto", server=("classes", "prototypes"), client=("classes",), options=HEAD),
    "FedProx": Kept("FedProx"),
    "FedRep": Kept("FedRep", phases=("fit", "head")),
    "FedSGD": Kept("FedSGD"),
    "FedYogi": Kept("FedYogi", server=MOMENTS),
    "HeteroFL": Kept("HeteroFL", options=HEAD),
    "HeurFedAMP": Kept("HeurFedAMP", server=("models",), client=("w",)),
    "HeurpFedLA": Kept("HeurpFedLA", server=("models", "psi"), client=("theta",)),
    "HypCluster": Kept("HypCluster", server=("clusters",), models=CENTRES),
    "IFCA": Kept("IFCA", server=("clusters",), models=CENTRES),
    "L2GD": Kept("L2GD", server=("m",), client=("lr", "x")),
    "LGFedAvg": Kept("LGFedAvg", options={"num_layers": 1}),
    "Local": Kept("Local"),
    "LocalAdaptation": Kept("LocalAdaptation", client=("model",), phases=("adapt", "fit")),
    "MAPPER": Kept("MAPPER", client=("lam", "model"), phases=("fit", "local-0.25", "local-0.5", "local-0.75")),
    "MOON": Kept("MOON", client=("previous",), options=HEAD),
    "pFedLA": Kept("PFedLA", server=("models", "psi")),
    "pFedMe": Kept("PFedMe", client=("theta",)),
    "PLayerFL": Kept("PLayerFL", server=LAYERS),
    "PLayerFLRandom": Kept("PLayerFLRandom", server=LAYERS),
    "PerFCL": Kept("PerFCL", client=("previous",), options=HEAD),
    "PerFedAvg": Kept("PerFedAvg"),
    "SCAFFOLD": Kept("SCAFFOLD", server=("c",), client=("c",)),
}
VARIANTS = {  # options that keep more
    "APFL keep": Kept(
        "APFL",
        client=("alpha", "optimizer", "rates", "v"),
        options={"mix": "logits"},
        arguments={"optimizer_state": "keep"},
    ),
    "FedFomo start": Kept("FedFomo", server=("P", "models"), client=("own", "start"), options={"baseline": "start"}),
}


def test_every_algorithm_is_here():
    assert set(KEPT) == set(list_algorithms())
    assert len({kept.key for kept in KEPT.values()}) == len(KEPT)


@pytest.mark.filterwarnings("ignore:PLayerFLRandom. of 2 layers")
@pytest.mark.parametrize("name", [*KEPT, *VARIANTS])
def test_state_is_kept_under(name):
    kept = (KEPT | VARIANTS)[name]
    algorithm = create(name.split()[0], **kept.options)
    assert algorithm.key == kept.key
    trainer = federate(NormNet(), toy_data((8, 8)), [algorithm], local_steps=1, **kept.arguments)
    assert entries(trainer.server.state) == ({kept.key: list(kept.server)} if kept.server else {})
    assert tuple(trainer.server.models) == kept.models
    for client in trainer.server.clients:
        record = trainer.store.get(client)
        assert entries(record.state) == ({kept.key: list(kept.client)} if kept.client else {})
        assert tuple(sorted(record.lightning)) == kept.phases


def entries(state: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    return {key: sorted(own) for key, own in state.items()}


def test_a_saved_state_is_made_of(tmp_path):
    """The files of ``checkpoints/last``, and the entries of a selected model."""
    callbacks = [LocalCheckpoint(), GlobalCheckpoint(), LayerDiagnostics()]
    assert [callback.key for callback in callbacks] == ["LocalCheckpoint", "GlobalCheckpoint", "LayerDiagnostics"]
    trainer = federate(NormNet(), toy_data((8, 8)), callbacks[:2], tmp_path, max_rounds=1, local_steps=1)
    last = trainer.run.path / "checkpoints" / "last"
    manifest = json.loads((last / "manifest.json").read_text())
    assert set(manifest) == {"version", "rounds_done", "server", "clients", "extra"}
    assert set(manifest["extra"]) == {"seconds", "final", "history", "lasting"}
    server, client = (
        torch.load(last / name, weights_only=False) for name in (manifest["server"], manifest["clients"]["0"])
    )
    assert set(server) == {"models", "state", "checkpoints", "bytes_up", "bytes_down", "steps"}
    visit = {"num_samples", "steps", "lr_sum", "visits", "last_round"}
    assert set(client) == {"personal", "state", "checkpoints", "lightning"} | visit
    selected = ["model", "name", "round", "score", "stage"]
    assert entries(server["checkpoints"]) == {"GlobalCheckpoint": selected}
    assert entries(client["checkpoints"]) == {"LocalCheckpoint": selected}
