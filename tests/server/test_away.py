"""A server that never touches data: all that a run does works where the clients are, with the numbers of `sequential`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlightning

# isort: split
from fedlightning.callbacks import (
    FENDA,
    FML,
    Central,
    FedAvg,
    FedProto,
    GlobalCheckpoint,
    LayerDiagnostics,
    LocalCheckpoint,
    PLayerFL,
)
from fedlightning.errors import ConfigurationError
from fedlightning.models import ClientModels
from fedlightning.options import Evaluation
from fedlightning.resume.saving import Saving
from fedlightning.tensors import module_state
from fedlightning.trainer import FederatedTrainer
from tests.helpers import PiecesStyle, Toy, make_trainer, part_of, same, toy_data
from tests.server.away import AwayEngine, Failing, Sealed, TouchedError

SIZES = (24, 40, 16)


def seeded(make: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    return make()


# name -> (module, callbacks, the trainer's options)
RUNS: dict[str, Any] = {
    "checkpoints, held out": lambda: (
        Toy(),
        [FedAvg(), GlobalCheckpoint(), LocalCheckpoint()],
        {"held_out": ["2"], "sanity_check": True},
    ),
    "fenda": lambda: (PiecesStyle(), [FENDA(head="net.head")], {}),
    "player_fl": lambda: (Toy(), [PLayerFL()], {}),
    "two modules": lambda: (Toy(), [FML(seeded(Toy, 3))], {}),
    "several architectures": lambda: (
        ClientModels({"small": seeded(Toy, 1), "wide": seeded(lambda: Toy(hidden=8, lr=0.2), 2)}),
        [FedProto()],
        {},
    ),
}


@pytest.fixture
def elsewhere(monkeypatch):
    monkeypatch.setattr("fedlightning.assemble.make_engine", away_engine)


def away_engine(name: str, runner: Any, store: Any, *options: Any) -> AwayEngine:
    return AwayEngine(runner, store)


def fitted(name: str, root: Path, data: Any, **more: Any) -> FederatedTrainer:
    torch.manual_seed(0)
    module, callbacks, options = RUNS[name]()
    trainer = make_trainer(root, callbacks, **options | more)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*left out: the clients' data are not in one place")
        trainer.fit(module, data, resume="auto")
    return trainer


def local(trainer: FederatedTrainer) -> list[Any]:
    return [row for row in trainer.rows if row.data == "local"]


def states(folder: Path) -> dict[str, Any]:
    return {
        path.stem: module_state(fedlightning.load(path, trust=["tests"])) for path in sorted(folder.rglob("*.ckpt"))
    }


@pytest.mark.parametrize("name", [next(iter(RUNS)), *(pytest.param(n, marks=pytest.mark.slow) for n in list(RUNS)[1:])])
def test_a_run_is_that_of_sequential(name, tmp_path, monkeypatch):
    """Rounds, a resumed run, exported files, scores afterwards, a client's model and its predictions."""
    here, away = [], []
    for rounds in (1, 2):
        here.append(fitted(name, tmp_path / "here", toy_data(SIZES), max_rounds=rounds))
    monkeypatch.setattr("fedlightning.assemble.make_engine", away_engine)
    for rounds in (1, 2):
        away.append(fitted(name, tmp_path / "away", Sealed(toy_data(SIZES)), max_rounds=rounds))
    compare(here[-1], away[-1])


def compare(here: FederatedTrainer, away: FederatedTrainer) -> None:
    assert local(away) == local(here) and away.rounds_done == 2
    assert {row.data for row in away.rows} == {"local"}
    found, expected = (states(trainer.run.path / "checkpoints") for trainer in (away, here))
    assert found.keys() == expected.keys() and len(found) >= len(away.server.clients)
    for file, state in found.items():
        same(state, expected[file])
    for trainer in (here, away):
        trainer.test(verbose=False)
        trainer.validate(verbose=False)
    assert local(away) == local(here)
    client = away.client_ids[0]
    same(module_state(away.client(client).module), module_state(here.client(client).module))
    for mine, theirs in zip(away.predict(client=client), here.predict(client=client), strict=True):
        assert torch.equal(mine, theirs)
    for entry in ("num_samples", "num_clients", "architectures"):
        assert away.summary.get(entry) == here.summary.get(entry)
    away.federation.engine.close()


def lasting_of(trainer):
    """Return what must not change when a run is resumed."""
    return part_of(trainer, Saving).lasting(trainer.federation)


@pytest.mark.slow
def test_the_summary_tells_of_data_what_sequential_tells(tmp_path, monkeypatch):
    here = fitted(
        "player_fl", tmp_path / "here", toy_data(SIZES), max_rounds=1, evaluation=Evaluation(every=0, test_data=[])
    )
    monkeypatch.setattr("fedlightning.assemble.make_engine", away_engine)
    away = fitted(
        "player_fl",
        tmp_path / "away",
        Sealed(toy_data(SIZES)),
        max_rounds=1,
        evaluation=Evaluation(every=0, test_data=[]),
    )
    assert away.summary["data"] == here.summary["data"]
    sizes = {"data (train sizes)": lasting_of(away)["data (train sizes)"]}  # of data that only their sites see
    assert lasting_of(away) == lasting_of(here) | {"engine": "one client at a time"} | sizes


@pytest.mark.parametrize(
    ("callbacks", "options", "said"),
    [
        ([Central()], {}, "cannot be had in one place"),
        ([LayerDiagnostics(quantities=["cka"])], {}, "cannot be had in one place"),
        ([FedAvg()], {"evaluation": Evaluation(data=["pooled"])}, "pooled data only"),
        ([FedProto(head="body")], {}, "no submodule"),
    ],
    ids=["pooled jobs", "pooled samples", "pooled scores", "a check that needs a batch"],
)
def test_what_needs_everybodys_data_is_refused(callbacks, options, said, tmp_path, elsewhere):
    with pytest.raises(ValueError, match=said):
        make_trainer(tmp_path, callbacks, **options).fit(Toy(), Sealed(toy_data(SIZES)))


def test_scores_on_pooled_data_are_left_out_and_said_so(tmp_path, elsewhere):
    trainer = make_trainer(
        tmp_path, [FedAvg()], max_rounds=1, evaluation=Evaluation(data=["local", "pooled"], test_data=["clients"])
    )
    with pytest.warns(UserWarning, match="Scores on pooled data and other clients' data are left out"):
        trainer.fit(Toy(), Sealed(toy_data(SIZES)))
    assert {row.data for row in trainer.rows} == {"local"}


def test_a_step_that_fails_is_named_before_round_1(tmp_path, elsewhere):
    trainer = make_trainer(tmp_path, [FedAvg()], sanity_check=True)
    with pytest.raises(ConfigurationError, match="training_step fails for client '0'"):
        trainer.fit(Failing(), Sealed(toy_data(SIZES)))


def test_who_touches_data_in_the_servers_process_is_caught(tmp_path):
    with pytest.raises(TouchedError):
        make_trainer(tmp_path, [FedAvg()]).fit(Toy(), Sealed(toy_data(SIZES)))


@pytest.mark.slow
def test_new_clients_join_where_their_data_are(tmp_path, monkeypatch):
    found = []
    for place, data in (("here", toy_data(SIZES)), ("away", Sealed(toy_data(SIZES)))):
        if place == "away":
            monkeypatch.setattr("fedlightning.assemble.make_engine", away_engine)
        trainer = make_trainer(
            tmp_path / place, [FedAvg()], max_rounds=1, held_out=["2"], evaluation=Evaluation(test_data=["local"])
        )
        trainer.fit(seeded(Toy, 0), data)
        results = trainer.onboard(verbose=False)
        found.append((results, states(trainer.run.path / "checkpoints/newcomers")["2"]))
    assert found[0][0] == found[1][0]
    same(found[0][1], found[1][1])
    with pytest.raises(ConfigurationError, match="brings data into this process"):
        trainer.onboard(toy_data({"x": 20}), verbose=False)
