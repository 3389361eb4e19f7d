"""New clients join a fitted federation: served as unseen clients, trained by themselves, and nothing else changes."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch

import fedlightning
from fedlightning.callbacks import FML, FedAMP, FedAvg, FedKD, FedKEMF, FedPer, FedRep, FedType, LocalAdaptation
from fedlightning.cli import main
from fedlightning.contract import FederatedCallback
from fedlightning.errors import ConfigurationError
from fedlightning.options import Evaluation, Processes
from fedlightning.scores.rows import read_rows
from fedlightning.tensors import module_state
from fedlightning.testing.runs import assert_same, same_tree
from fedlightning.testing.toys import ToyData as CheckData
from fedlightning.testing.toys import federate as checked
from tests.conformance.case import collect
from tests.helpers import Toy, federate, make_trainer, plain_fit, toy_data
from tests.server.test_evaluation import score_by_hand

CASES = collect("CASES")
TRAINED, NEW = {"a": 24, "b": 40}, {"x": 16, "y": 20}


def test_they_are_scored_trained_and_scored_again(tmp_path):
    trainer, new = federate(Toy(), toy_data(TRAINED), root=tmp_path, max_rounds=1), toy_data(NEW)
    start = {name: value.clone() for name, value in trainer.server.model.items()}
    results = trainer.onboard(new, epochs=3, verbose=False)
    rows = read_rows(trainer.run.path / "onboarding.csv")
    assert {(row.model, row.data, row.round) for row in rows} == {("unseen", "local", 1)}
    expected = {("latest", "G"), ("latest", "L1"), ("onboarded", "L2"), ("onboarded", "L1")}
    assert {(row["checkpoint"], row["stage"]) for row in results} == expected
    module = Toy()
    module.load_state_dict(start)
    for client in "xy":
        alone = plain_fit(module, new, client, epochs_per_round=3, max_epochs=3)
        kept = fedlightning.load(trainer.run.path / f"checkpoints/newcomers/{client}.ckpt", trust=["tests"])
        assert same_tree(module_state(kept), alone)
        for (checkpoint, stage), state in {("latest", "L1"): start, ("onboarded", "L2"): alone}.items():
            by_hand = score_by_hand(state, new, client, "test")
            found = [
                r for r in rows if (r.checkpoint, r.stage, r.client, r.split) == (checkpoint, stage, client, "test")
            ]
            assert {row.metric: row.value for row in found} == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("method", [None, FedPer(personal="head")], ids=["FedAvg", "FedPer"])
def test_nothing_of_the_run_changes(method, tmp_path):
    trainer = checked(method, CheckData(), tmp_path / "a", save_state=1, evaluation=1)
    other = checked(method, CheckData(), tmp_path / "b", save_state=1, evaluation=1)
    files = {p: p.read_bytes() for p in trainer.run.path.rglob("*") if p.is_file()}
    noise = torch.get_rng_state()
    trainer.onboard(renamed(), epochs=1, verbose=False)
    assert torch.equal(noise, torch.get_rng_state())
    assert_same(trainer, other, "onboarding changes the federation")
    assert all(path.read_bytes() == content for path, content in files.items())
    assert {p.name for p in trainer.run.path.iterdir()} - {p.relative_to(trainer.run.path).parts[0] for p in files} == {
        "onboarding.csv",
        "onboarding.json",
    }
    resumed = checked(method, CheckData(), tmp_path / "a", resume=True, max_rounds=4, save_state=1, evaluation=1)
    whole = checked(method, CheckData(), tmp_path / "c", max_rounds=4, save_state=1, evaluation=1)
    assert_same(resumed, whole, "resumed after an onboarding", rows=False)


def renamed():
    """Data of clients that have other names."""
    data = CheckData(sizes=(9, 11))
    data.data = {(f"new {client}", split): held for (client, split), held in data.data.items()}
    data.names = data.listed = [f"new {name}" for name in data.names]
    return data


def test_held_out_clients_join_by_default(tmp_path):
    trainer = federate(Toy(), toy_data(TRAINED | NEW), root=tmp_path, held_out=["x", "y"], max_rounds=1)
    results = trainer.onboard(clients=["y"], epochs=np.int64(0), verbose=False)
    assert {client for row in results for client in row["per_client"]} == {"y"}
    assert {row["checkpoint"] for row in results} == {"latest"}
    known = {(r.stage, r.metric): r.value for r in trainer.rows if (r.model, r.client) == ("unseen", "y")}
    assert {(r["stage"], r["metric"]): r["mean"] for r in results if r["split"] == "val"} == known


def test_methods_train_them_in_their_own_way(tmp_path):
    """FedRep trains the head of a newcomer only; LocalAdaptation adapts a copy, which it then deploys."""
    rep = federate(
        Toy(),
        toy_data(TRAINED),
        [FedRep(personal="net.3")],
        tmp_path / "1",
        max_rounds=1,
        evaluation=Evaluation(stages=["L1"]),
    )
    rep.onboard(toy_data(NEW), epochs=2, verbose=False)
    state = module_state(fedlightning.load(rep.run.path / "checkpoints/newcomers/x.ckpt", trust=["tests"]))
    for name, value in state.items():
        start = rep.server.model if name.startswith("net.0") else module_state(rep.server.module)
        assert torch.equal(value, start[name]) == name.startswith("net.0")
    adapt = federate(Toy(), toy_data(TRAINED), [LocalAdaptation()], tmp_path / "2", max_rounds=1)
    results = adapt.onboard(toy_data(NEW), epochs=2, verbose=False)
    means = {(r["checkpoint"], r["stage"]): r["mean"] for r in results if r["metric"] == "test_loss"}
    assert means["onboarded", "L2"] == means["onboarded", "L1"] != means["latest", "L1"]


def test_a_run_from_its_folder(tmp_path):
    data = toy_data(TRAINED)
    module = Toy()
    first = federate(module, data, root=tmp_path, max_rounds=1)
    results = first.onboard(toy_data(NEW), verbose=False)
    other = make_trainer(tmp_path, max_rounds=1)
    with pytest.raises(ConfigurationError, match="give the model and the datamodule"):
        other.onboard(toy_data(NEW), run=first.run.path)
    again = other.onboard(toy_data(NEW), model=module, datamodule=data, run=first.run.path, verbose=False)
    assert again == results


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "this run held none out"),
        ({"newcomers": toy_data({"a": 5})}, "a have names of clients that trained"),
        ({"newcomers": toy_data({"a": 5} | NEW), "clients": ["a"]}, "Client 'a' has trained.*x, y"),
        ({"newcomers": toy_data(NEW), "clients": ["z"]}, "no new client 'z'"),
        ({"newcomers": toy_data(NEW), "clients": []}, "names no client"),
        ({"newcomers": toy_data(NEW), "clients": "xy"}, "must be a list"),
        ({"newcomers": toy_data(NEW), "epochs": -1}, "must be a whole number"),
        ({"newcomers": [1, 2]}, "does not say which client"),
        ({"newcomers": toy_data({"x": 0}, val=0, test=0)}, r"None of the new clients \(x\) has a sample"),
        ({"newcomers": toy_data(NEW, val=0, test=0), "epochs": 0}, "none of x, y has validation or test data"),
    ],
)
def test_what_cannot_join_is_refused(given, text):
    trainer = federate(Toy(), toy_data(TRAINED), max_rounds=1)
    with pytest.raises(ConfigurationError, match=text):
        trainer.onboard(**given)


def test_methods_without_a_model_for_them_are_refused():
    trainer = federate(Toy(), toy_data(TRAINED), [FedAMP()], max_rounds=1)
    with pytest.raises(ConfigurationError, match="FedAMP makes a client's model"):
        trainer.onboard(toy_data(NEW))


class Fails(FederatedCallback):
    """Lets one client's visit fail."""

    def on_visit_start(self, client):
        if client.id == "x":
            raise RuntimeError("no")


def test_one_that_fails_is_noted_and_the_others_join(tmp_path):
    trainer = federate(Toy(), toy_data(TRAINED), [Fails()], tmp_path, max_rounds=1)
    with pytest.warns(UserWarning, match="Onboarding: new client 'x' failed: RuntimeError: no"):
        trainer.onboard(toy_data(NEW), verbose=False)
    summary = json.loads((trainer.run.path / "onboarding.json").read_text())
    assert summary["trained"] == ["y"] and [one["client"] for one in summary["failures"]] == ["x"]
    assert "failures" not in trainer.summary
    assert [path.stem for path in (trainer.run.path / "checkpoints/newcomers").iterdir()] == ["y"]


class Fussy(FederatedCallback):
    """An algorithm of a user that knows one of the new clients, and whose model is made of data."""

    def on_broadcast(self, server, job, message):
        if job.client == "x":
            raise KeyError("x is new")

    def personal_module(self, client, stage):
        if client.id == "y" and stage == "L1":
            raise RuntimeError("no model for y")
        return client.module


@pytest.mark.parametrize("epochs", [0, 1])
def test_an_algorithm_that_cannot_serve_one_of_them_ends_nothing(epochs, tmp_path):
    """Messages, scores and models are made for each of them: what fails there is noted, and the files are whole."""
    trainer = federate(Toy(), toy_data(TRAINED), [Fussy()], tmp_path, max_rounds=1, evaluation=Evaluation(stages=["G"]))
    with pytest.warns(UserWarning, match="Onboarding: new client 'x' .*x is new"):
        trainer.onboard(toy_data(NEW | {"z": 12}), epochs=epochs, verbose=False)
    summary = json.loads((trainer.run.path / "onboarding.json").read_text())
    told = {(one["client"], one["where"], one["decision"]) for one in summary["failures"]}
    written = {path.stem for path in (trainer.run.path / "checkpoints/newcomers").iterdir()}
    unscored = {("x", "L1", "not scored"), ("y", "L1", "not scored")}
    if epochs:
        assert summary["trained"] == ["y", "z"] and written == {"y", "z"}
        assert told == unscored | {("x", "training", "left out")}
    else:
        assert summary["trained"] == [] and written == {"z"}
        assert told == unscored | {("x", "checkpoint", "not written"), ("y", "checkpoint", "not written")}


class Killed(BaseException):
    """Stands for a signal."""


def test_a_call_that_is_cut_off_leaves_what_was_there(tmp_path, monkeypatch):
    """While models are made nothing of the earlier onboarding goes; the summary is missing while files are replaced."""
    trainer = federate(Toy(), toy_data(TRAINED), root=tmp_path, max_rounds=1)
    trainer.onboard(toy_data(NEW), verbose=False)
    files = [trainer.run.path / "onboarding.csv", trainer.run.path / "onboarding.json"]
    files += sorted((trainer.run.path / "checkpoints/newcomers").iterdir())
    before = {path: path.read_bytes() for path in files}

    def killed(*given, **options):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("fedlightning.deployment.export.Exporter.save", killed)
        trainer.onboard(toy_data(NEW), epochs=2, verbose=False)
    assert all(path.read_bytes() == content for path, content in before.items())
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("fedlightning.onboarding.onboarding.write_rows", killed)
        trainer.onboard(toy_data(NEW), epochs=2, verbose=False)
    assert not (trainer.run.path / "onboarding.json").exists()
    trainer.onboard(toy_data(NEW), epochs=1, verbose=False)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert {path.name for path in (trainer.run.path / "checkpoints").iterdir()} >= {"newcomers"}
    assert not list((trainer.run.path / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize("engine", ["vectorized", pytest.param("processes", marks=pytest.mark.slow)])
def test_engines_agree(engine, tmp_path):
    found = []
    for name in ("sequential", engine):
        options = Processes(2) if name == "processes" else name
        trainer = checked(FedAvg(), CheckData(), tmp_path / name, engine=options, max_rounds=1)
        results = trainer.onboard(renamed(), epochs=2, verbose=False)
        found.append({(r["checkpoint"], r["stage"], r["metric"]): r["mean"] for r in results})
    assert found[1] == (pytest.approx(found[0], abs=1e-5) if engine == "vectorized" else found[0])


@pytest.mark.slow
def test_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--data.partitioner.num_clients=4", "--data.max_train=150", "--data.max_test=60", "--trainer.logger=false"]
    quick = str(fedlightning.__path__[0]) + "/../configs/unseen_clients.yaml"
    assert (
        main(["fit", "--config", quick, *words, "--trainer.max_rounds=1", "--trainer.enable_progress_bar=false"]) == 0
    )
    folder = "runs/unseen_clients"
    failure = {"client": "7", "round": 1, "where": "training", "reason": "its disk is full", "decision": "left out"}
    with monkeypatch.context() as patch:
        patch.setattr("fedlightning.onboarding.onboarding.Onboarding.failures", [failure])
        assert main(["onboard", "--run", folder, "--epochs", "1"]) == 0
    summary = json.loads((tmp_path / folder / "version_0/onboarding.json").read_text())
    assert len(summary["clients"]) == 1 and summary["epochs"] == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "Unseen clients" in told and "client '7' (training, 1x, left out): its disk is full. All are in onb" in told
    assert main(["onboard", "--run", folder, "--newcomers", "nowhere.yaml"]) == 2
    assert main(["onboard", "--run", folder, "--newcomers", quick]) == 0  # two of its ten clients bear new names
    assert "is not a YAML file" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if " " not in name])
def test_every_method_lets_them_join_or_says_why_not(name, tmp_path):
    case = CASES[name]
    given = {"held_out": ["site3"], "max_rounds": 2} | case.arguments
    trainer = checked(copy.deepcopy(case.algorithm), CheckData(), tmp_path, **given)
    models = {
        key: {entry: value.clone() for entry, value in state.items()} for key, state in trainer.server.models.items()
    }
    state = copy.deepcopy(trainer.server.state)
    newcomers = case.algorithm.facts.newcomers
    if newcomers.no_model and newcomers.place is None:
        with pytest.raises(ConfigurationError, match="cannot be onboarded"):
            trainer.onboard(verbose=False)
        return
    means = {(row["checkpoint"], row["stage"]): row["mean"] for row in trainer.onboard(epochs=4, verbose=False)}
    assert means["onboarded", "L2"] != means["latest", "L1"]
    assert "failures" not in json.loads((trainer.run.path / "onboarding.json").read_text())
    assert same_tree([models, state], [trainer.server.models, trainer.server.state])
    assert set(trainer.store) <= {"site0", "site1", "site2", "pooled"}


@pytest.mark.slow
@pytest.mark.parametrize("method", [FML, FedKD, lambda shared: FedKEMF(shared, steps=0), FedType])
def test_a_random_private_model_does_not_take_the_place_of_a_trained_shared_one(method, tmp_path):
    """One epoch trains a private model less than the federation has trained the shared one; many epochs train it more."""
    torch.manual_seed(5)
    callback = method(Toy("sgd", lr=0.3, hidden=5))
    data = toy_data({"a": 60, "b": 60, "c": 60})
    trainer = federate(Toy("sgd", lr=0.3), data, [callback], root=tmp_path, max_rounds=6, local_epochs=5)
    new = toy_data({"x": 24, "y": 24}, val=20)
    new.tensors["y"] = {split: (x, 2 - y) for split, (x, y) in new.tensors["y"].items()}  # unlike all others
    for epochs in (1, 60):
        trainer.onboard(new, epochs=epochs, verbose=False)
        rows = read_rows(trainer.run.path / "onboarding.csv")
        losses = {
            (row.client, row.checkpoint): row.value
            for row in rows
            if (row.stage, row.split, row.metric) == ("L1", "val", "val_loss")
        }
        assert losses["x", "onboarded"] <= losses["x", "latest"] * (1 + 1e-6)
        assert losses["y", "onboarded"] <= losses["y", "latest"] * (1 + 1e-6)
    assert losses["y", "onboarded"] < 0.7 * losses["y", "latest"]  # its private model
