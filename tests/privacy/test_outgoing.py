"""The one list of what leaves clients: complete, told before round 1, and held to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.utils.data import TensorDataset

from fedlightning.algorithm import FederatedCallback, OutgoingItem, Protection, Wire
from fedlightning.callbacks import (
    SCAFFOLD,
    ClientDP,
    FedAvg,
    FedPer,
    Local,
    SampleDP,
    SecureAggregation,
    TopK,
)
from fedlightning.client.visit import carry_out
from fedlightning.datamodules import IIDPartitioner, Partitioned
from fedlightning.engines.contract import Evaluate
from fedlightning.options import Evaluation
from fedlightning.study.baselines import odd_splits
from fedlightning.study.finished_runs import load_run
from tests.helpers import Toy, federate, make_trainer, samples, toy_data
from tests.server.test_architectures import data, models

KINDS = {"sizes", "classes", "entries", "counts", "logged", "scores", "tests", "texts"}


class Quiet(Protection):
    """Withholds what the core can withhold, and notes what it was asked."""

    def __init__(self, withholds: tuple[str, ...] = ("scores", "logged")) -> None:
        self.withholds = withholds

    def covers(self, item: OutgoingItem) -> str:
        return "withheld" if item.kind in self.withholds else "noised" if item.kind == "entries" else "in the clear"


class Sends(FederatedCallback):
    def wire(self, module):
        return Wire(up={"mine": "scalar"})


def run(callbacks, folder=None, sizes=(24, 16), **options):
    trainer = make_trainer(folder, callbacks, **{"max_rounds": 2, "evaluation": 1} | options)
    trainer.fit(Toy(), datamodule=toy_data(list(sizes)))
    return trainer


def test_it_has_what_callbacks_declare_and_what_the_core_sends(tmp_path):
    server = run([FedPer(personal=["net.3"]), SCAFFOLD(), Sends()], tmp_path).server
    assert {item.kind for item in server.outgoing} == KINDS | {"extra", "models"}
    assert [(item.owner, str(item)) for item in server.outgoing if item.kind == "extra"] == [
        ("SCAFFOLD", "'delta_c' of SCAFFOLD (in each visit)"),
        ("Sends", "'mine' of Sends (in each visit)"),
    ]
    assert "2 of 4 entries of the model (in each visit)" in map(str, server.outgoing)
    silent = run([FedAvg()], evaluation=Evaluation(every=0, test_data=[])).server
    assert {item.kind for item in silent.outgoing} == KINDS - {"scores", "tests"}


def test_a_code_is_covered_as_the_entries_that_it_stands_for():
    told = {one["what"]: one["cover"] for one in run([TopK(share=0.5), Quiet()]).summary["leaves"]}
    codes = {what: cover for what, cover in told.items() if what.endswith("of TopK")}
    assert codes and set(codes.values()) == {"noised"}


def test_validation_scores_and_logged_values_that_are_withheld_do_not_leave():
    open_rows, rows = (
        {(row.stage, row.split) for row in run(callbacks).rows} for callbacks in ([FedAvg()], [FedAvg(), Quiet()])
    )
    assert {split for _, split in open_rows} >= {"train", "val"}
    assert not [one for one in rows if one[1] in ("train", "val")]


def test_the_client_holds_to_it_whoever_asks():
    trainer = run([Quiet()])
    engine, server = trainer.federation.engine, trainer.server
    message = server.message(server.job("0"))
    update, _ = carry_out(engine.runner, message, trainer.store.get("0"), Evaluate(("val", "test")))
    assert {entry[2] for entry in update.evaluations} == {"test"} and not update.metrics
    with pytest.raises(ValueError, match="Quiet withholds scores on validation data"):
        trainer.validate()


def test_a_dry_run_the_log_and_the_summary_show_how_it_is_covered(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("fedlightning.privacy.outgoing.rank_zero_info", said.append)
    trainer = make_trainer(tmp_path, [FedAvg(), Quiet()], max_rounds=1)
    text = str(trainer.dry_run(Toy(), toy_data([24, 16])))
    assert "what leaves clients" in text and "withheld      validation scores of stages G, L1, L2" in text
    trainer.fit(Toy(), datamodule=toy_data([24, 16]))
    assert "in the clear: numbers of samples" in said[-1]
    leaves = json.loads((trainer.run.path / "summary.json").read_text())["leaves"]
    assert {"what": "4 of 4 entries of the model", "when": "in each visit", "cover": "noised"} in leaves
    assert "leaves" not in run([FedAvg()]).summary


def test_what_a_protection_does_not_know_is_told_as_in_the_clear():
    trainer = run([SCAFFOLD(), Quiet(withholds=())])
    told = {one["what"]: one["cover"] for one in trainer.summary["leaves"]}
    assert (
        told["'delta_c' of SCAFFOLD"] == "in the clear" and Protection().covers(OutgoingItem("extra")) == "in the clear"
    )


def test_scores_of_some_rounds_are_told_as_such():
    def told(every):
        server = run([FedAvg()], evaluation=every).server
        return next(item.when for item in server.outgoing if item.kind == "scores")

    assert told(2) == "every 2 rounds" and told(1) == "in every round"


class Loud(Quiet):
    def covers(self, item: OutgoingItem) -> str:
        return "in the clear"


def test_every_protection_says_how_it_covers_an_item():
    told = {one["what"]: one["cover"] for one in run([Quiet(()), Loud()]).summary["leaves"]}
    assert told["4 of 4 entries of the model"] == "noised (Quiet), in the clear (Loud)"


def test_every_architecture_is_told():
    server = federate(models(), data(), [Local()], max_rounds=1).server
    told = next(item.what for item in server.outgoing if item.kind == "entries")
    assert "of model small" in told and "of model deep" in told


def test_classes_of_training_samples_and_who_holds_which_are_withheld_where_a_callback_says_so(tmp_path):
    """The exact histogram of labels and a hash of the partition stood in the folder of a run that hides single records."""
    told = run([FedAvg()], tmp_path / "open").summary["data"]
    quiet = run([FedAvg(), Quiet(("classes",))], tmp_path / "quiet").summary["data"]
    assert all(isinstance(held["classes"], list) for held in told["clients"].values()) and "train" in told["splits"]
    assert all(held["classes"] is None for held in quiet["clients"].values())
    assert quiet["splits"] == {split: told["splits"][split] for split in ("val", "test")}
    quieter = run([FedAvg(), Quiet(("classes", "scores"))], tmp_path / "quieter").summary["data"]
    assert quieter["splits"] == {"test": told["splits"]["test"]}
    runs = [load_run(next((tmp_path / name).rglob("summary.json")).parent) for name in ("open", "quiet")]
    assert not odd_splits(runs, "train") and not odd_splits(runs, "test")


def test_the_page_and_the_summary_say_who_cannot_learn_what():
    pytest.importorskip("opacus")
    masked = ClientDP(delta=1e-3, noise_multiplier=1.0, where="masked", shares=3)
    ones = [
        ClientDP(delta=1e-3, noise_multiplier=1.0),
        masked,
        SampleDP(delta=1e-3, noise_multiplier=1.0),
        SecureAggregation(),
    ]
    page = (Path(__file__).parents[2] / "docs/explanation/who_learns_what.md").read_text(encoding="utf-8")
    for promise in (promise for one in ones for promise in one.promises):
        assert f"| {promise.who} | {promise.cannot_learn} | {promise.provided} | {promise.left} |" in page
    told = run([FedAvg(), SecureAggregation()], sizes=[24, 16, 16]).summary["promises"]
    assert [(row["callback"], row["who"]) for row in told] == [("SecureAggregation", "the server")]
    assert "promises" not in run([FedAvg()]).summary


@pytest.mark.parametrize("where", ["server", "masked"])
def test_who_reads_the_folder_may_read_no_model_that_clients_keep_without_noise(where):
    """`checkpoints/clients` holds heads of FedPer and experts of FLDE as they are; the promise forgot them."""
    pytest.importorskip("opacus")
    options = {"delta": 1e-3, "noise_multiplier": 1.0}
    hidden = ClientDP(**options, where=where, shares=3 if where == "masked" else None)
    for one in (hidden, SampleDP(**options)):
        assert one.covers(OutgoingItem("own models")) == "in the clear"
        readers = [promise for promise in one.promises if promise.who not in ("who reads models", "the server")]
        assert readers and all("models stay secret" in promise.provided for promise in readers)


@pytest.mark.parametrize("callback", [SampleDP, ClientDP], ids=lambda one: one.__name__)
def test_public_data_without_what_clients_hold_are_refused(callback):
    """The summary said how many of them a client trains on: with one such sample, whether that is there."""
    x, y = samples("0", "train", 40)
    options = {"val_fraction": 0.0, "test_fraction": 0.0, "batch_size": 8, "partitioner": IIDPartitioner(2)}
    protection = callback(delta=1e-3, noise_multiplier=1.0, noise_seed=3)
    other = Partitioned.from_datasets(TensorDataset(x, y), public=TensorDataset(x[:1] + 1.0, y[:1]), **options)
    with pytest.raises(
        ValueError, match=f"tells who holds what: {protection.key} accounts for .* a share of the clients"
    ):
        federate(Toy(), other, [protection], max_rounds=1)
    share = Partitioned.from_datasets(TensorDataset(x, y), public=0.2, **options)
    assert federate(Toy(), share, [protection], max_rounds=1).rounds_done == 1
