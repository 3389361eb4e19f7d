"""Under which names the state of every algorithm is kept: runs that lie on disk are read by them, so they do not change.

All names stand as data in the `KEPT` of the algorithms' tests. A class may be renamed or moved; what it keeps goes on under
the key written there (which is also part of the address of its randomness). A change of a `KEPT` is a change of the
format: old runs no longer resume.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from fedlightning.callbacks import GlobalCheckpoint, LayerDiagnostics, LocalCheckpoint
from fedlightning.catalogue import ALGORITHMS, create
from fedlightning.codec.tree import load
from tests.callbacks.public import public_data
from tests.conformance.case import Kept, collect, missing
from tests.helpers import NormNet, federate, toy_data

KEPT: dict[str, Kept] = collect("KEPT")


def test_every_algorithm_is_here():
    without = missing([row.name for row in ALGORITHMS], KEPT)
    assert not without, (
        f"Nobody says under which names {', '.join(without)} keeps its state. "
        "Add KEPT = {'Name': Kept('Name')} to the algorithm's module in tests/callbacks."
    )
    keys = {name.partition(" ")[0]: kept.key for name, kept in KEPT.items()}
    assert set(keys) == {row.name for row in ALGORITHMS}
    assert len(set(keys.values())) == len(keys)


@pytest.mark.filterwarnings("ignore:PLayerFLRandom. of 2 layers")
@pytest.mark.parametrize("name", KEPT)
def test_state_is_kept_under(name):
    kept = KEPT[name]
    algorithm = create(name.split()[0], **kept.options)
    assert algorithm.key == kept.key
    data = public_data((8, 8), batch_size=8) if kept.public else toy_data((8, 8))
    trainer = federate(NormNet(), data, [algorithm], local_steps=1, **kept.arguments)
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
    assert set(manifest) == {"version", "rounds_done", "server", "clients", "packs", "sha256", "extra", "check"}
    marks = {
        "metrics",
        "loggers",
        "local_loop",
        "spent",
        "spent_of_rounds",
        "clients",
        "held_out",
        "evaluation_seconds",
        "stopped",
    }
    assert (
        set(manifest["extra"]) == {"seconds", "final", "history", "lasting", "failures", "explosions", "norms"} | marks
    )
    server, client = (load(last / name) for name in (manifest["server"], manifest["clients"]["0"]))
    client = client["0"]  # one file holds the records of several clients
    costs = {"bytes_up", "bytes_down", "steps", "time"}
    assert set(server) == {"models", "state", "checkpoints", "model_architectures", "frozen", "loop"} | costs
    visit = {"num_samples", "contributed", "steps", "lr_sum", "visits", "last_round"}
    assert set(client) == {"personal", "state", "checkpoints", "lightning"} | visit
    selected = ["model", "name", "round", "score", "stage"]
    assert entries(server["checkpoints"]) == {"GlobalCheckpoint": selected}
    assert entries(client["checkpoints"]) == {"LocalCheckpoint": sorted(["recent", *selected])}
