"""Updates are checked on arrival: one that breaks a rule is a client that failed, and the round goes on without it."""

from __future__ import annotations

import math

import pytest
import torch

from fedlightning import FederatedCallback
from fedlightning.algorithm import Change, Facts
from fedlightning.callbacks import HeteroFL
from fedlightning.contract import Job
from fedlightning.contract.messages import ClientLog, Extra, Update, Wire
from tests.helpers import Toy, federate, same, spied, toy_data

NAME = "net.0.weight"
FAULTS = {
    "NaN": (lambda u: u.state.update({NAME: u.state[NAME] * float("nan")}), "'net.0.weight' holds NaN"),
    "infinity": (lambda u: u.state[NAME].view(-1)[0].fill_(float("inf")), "'net.0.weight' holds NaN or infinite"),
    "shape": (lambda u: u.state.update({NAME: u.state[NAME][:1]}), r"has shape \(1, \d+\), the model's is"),
    "int": (
        lambda u: u.state.update({NAME: u.state[NAME].long()}),
        r"has dtype torch.int64, the model's is torch.float32",
    ),
    "no tensor": (lambda u: u.state.update({NAME: 3.0}), "is a float, not a tensor"),
    "stale": (lambda u: setattr(u, "round", u.round - 1), r"it says round=-1, but answers the message with round=0"),
    "somebody else": (
        lambda u: setattr(u, "client", "0"),
        "it says client='0', but answers the message with client='1'",
    ),
    "another job": (
        lambda u: setattr(u, "tag", "probe"),
        "it says tag='probe', but answers the message with tag=''",
    ),
    "another model": (lambda u: setattr(u, "model", "mine"), "it is for model 'mine'; the server has"),
    "too many samples": (
        lambda u: setattr(u, "num_samples", 10**12),
        "num_samples is 1000000000000, but the client has",
    ),
    "negative samples": (lambda u: setattr(u, "num_samples", -5), "num_samples is -5, which is not a count"),
    "sparse": (lambda u: u.state.update({NAME: u.state[NAME].to_sparse()}), "is not a dense tensor with values"),
    "no values": (lambda u: u.state.update({NAME: u.state[NAME].to("meta")}), "is not a dense tensor with values"),
    "no arithmetic": (lambda u: u.state.update({NAME: u.state[NAME].to(torch.float8_e4m3fn)}), "it cannot be checked"),
    "rates": (lambda u: setattr(u, "lr_sum", float("nan")), "lr_sum is nan"),
    "metrics": (lambda u: setattr(u, "metrics", {"train_loss": "low"}), "its metrics are not numbers by name"),
    "origin": (lambda u: setattr(u, "origin", ["global"]), r"its origin is \['global'\]"),
    "gaps": (lambda u: setattr(u, "gaps", [3]), "its gaps are not a list of 4 values each"),
    "half a step": (lambda u: setattr(u, "steps", 1.5), "steps is 1.5, which is not a count"),
}


class Faulty(FederatedCallback):
    """Client 1 sends what it should not."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def on_send(self, client, update):
        if client.id == "1":
            FAULTS[self.fault][0](update)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_update_is_a_failed_client(fault):
    with pytest.warns(UserWarning, match=f"client '1' was refused: .*{FAULTS[fault][1]}"):
        trainer, spy = spied(Toy(), toy_data(), [Faulty(fault)], max_rounds=1)
    kept = spy.of_round(0)
    same(trainer.server.model, federate_without_client_1(spy))
    assert kept


def federate_without_client_1(spy):
    others = {client: update for client, update in spy.of_round(0).items() if client != "1"}
    total = sum(update.num_samples for update in others.values())
    first = next(iter(others.values()))
    return {
        name: sum(update.num_samples * update.state[name].double() for update in others.values())
        .div(total)
        .to(value.dtype)
        for name, value in first.state.items()
    }


def test_a_good_update_passes_untouched_and_a_missing_entry_does_not():
    trainer = federate(Toy(), toy_data(), [], max_rounds=1)
    server = trainer.server
    message = server.message(Job("0"))
    update = Update(
        message.round, "0", state={name: value.clone() for name, value in server.model.items()}, num_samples=3
    )
    assert server.accept(message, update) is update
    del update.state[NAME]
    assert "'net.0.weight' was asked for and is missing" in str(server.accept(message, update).error)


def test_a_mask_of_infinities_may_stay_one():
    trainer = federate(Toy(), toy_data(), [], max_rounds=1)
    server = trainer.server
    message = server.message(Job("0"))
    server.models["global"] = {**server.model, NAME: torch.full_like(server.model[NAME], float("-inf"))}
    update = Update(message.round, "0", state=dict(server.model), num_samples=3)
    assert server.accept(message, update) is update


# -- extras, by their declaration -----------------------------------------------------------------------------------------
class Sends(FederatedCallback):
    """Client 1 sends what a table says, and nobody looks when it is taken in."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def wire(self, module):
        return Wire(up=BAD_EXTRAS[self.fault][1])

    def on_send(self, client, update):
        up, _, change, _ = BAD_EXTRAS[self.fault]
        good = {name: value() for name, value in up.items()}
        update.extras[self.key] = change(good) if client.id == "1" else good

    def on_update(self, server, update):
        assert update.client != "1" or self.fault == "gaps"


ROWS = {"rows": lambda: torch.ones(2, 3), "classes": lambda: torch.tensor([0, 2])}
TABLE = {"rows": Extra(("n", -1)), "classes": Extra(("n",), whole=True, low=0, high=2)}
BAD_EXTRAS = {
    "NaN": (ROWS, TABLE, lambda x: {**x, "rows": x["rows"] * math.nan}, "'rows' holds NaN or infinite values"),
    "another size": (ROWS, TABLE, lambda x: {**x, "rows": torch.ones(3, 3)}, "declares 'classes' as .* but sends"),
    "no class": (ROWS, TABLE, lambda x: {**x, "classes": torch.tensor([0, 3])}, r"'classes' is not in \[0, 2\]"),
    "half a class": (
        ROWS,
        TABLE,
        lambda x: {**x, "classes": torch.ones(2)},
        "has dtype torch.float32, and is of whole",
    ),
    "one of two": (ROWS, TABLE, lambda x: {"rows": x["rows"]}, "'rows' comes without 'classes'"),
    "unknown": (ROWS, TABLE, lambda x: {**x, "more": 1.0}, "puts 'more' on the wire but declares only"),
    "complex": (ROWS, TABLE, lambda x: {**x, "rows": x["rows"] * 1j}, "'rows' is not dense and real"),
    "sparse": (ROWS, TABLE, lambda x: {**x, "rows": x["rows"].to_sparse()}, "'rows' is not dense and real"),
    "huge": (ROWS, TABLE, lambda x: {**x, "rows": x["rows"] * 1e30}, r"'rows' has the norm 2.45e\+30"),
    "missing": ({"a": lambda: 1.0}, {"a": Extra("scalar", due=("",))}, lambda x: {}, "'a' is missing"),
    "share": (
        {"a": lambda: 1.0},
        {"a": Extra("scalar", low=0.0, high=1.0)},
        lambda x: {"a": 7.0},
        r"'a' is not in \[0, 1\]",
    ),
    "number": ({"a": lambda: 1.0}, {"a": "scalar"}, lambda x: {"a": math.inf}, "'a' holds NaN or infinite"),
    "counts": (
        {"a": lambda: torch.tensor([1, 2])},
        {"a": Extra((-1,), counts=True)},
        lambda x: {"a": torch.tensor([1, 10**9])},
        "'a' counts more samples than the 40 of client '1'",
    ),
    "negative counts": (
        {"a": lambda: torch.tensor([1, 2])},
        {"a": Extra((-1,), counts=True)},
        lambda x: {"a": torch.tensor([-1, 2])},
        r"'a' is not in \[0, inf\]",
    ),
    "dtype": (
        {"a": lambda: {NAME: torch.zeros(8, 6)}},
        {"a": "parameters"},
        lambda x: {"a": {NAME: torch.zeros(8, 6).long()}},
        "has dtype torch.int64, the model's is torch.float32",
    ),
    "no numbers": (
        {"a": lambda: {"x": torch.ones(1)}},
        {"a": "tensors"},
        lambda x: {"a": {"x": "text"}},
        "declares 'a' as",
    ),
}


@pytest.mark.parametrize("fault", BAD_EXTRAS)
def test_a_bad_extra_is_that_clients_failure_and_nobody_elses(fault, monkeypatch):
    said = BAD_EXTRAS[fault][3]
    monkeypatch.setattr("fedlightning.client.visit.leave", lambda *given: None)  # a site need not look
    with pytest.warns(UserWarning, match=f"client '1' was refused: .*{said}"):
        trainer = federate(Toy(), toy_data(), [Sends(fault)], max_rounds=1)
    assert [entry["client"] for entry in trainer.server.failures] == ["1"]


def test_gaps_may_be_there_where_they_are_declared(monkeypatch):
    numbers = torch.tensor([1.0, math.nan, math.inf])
    monkeypatch.setitem(BAD_EXTRAS, "gaps", ({"a": numbers.clone}, {"a": Extra((-1,), gaps=True)}, dict, ""))
    assert not federate(Toy(), toy_data(), [Sends("gaps")], max_rounds=1).server.failures


# -- entries that are missing, or of another shape ------------------------------------------------------------------------
class Drops(FederatedCallback):
    def __init__(self, says: bool) -> None:
        self.says = says

    @property
    def facts(self):
        return Facts(changes={Change.PARTS} if self.says else ())

    def on_send(self, client, update):
        if client.id == "1":
            update.state = {name: value for name, value in update.state.items() if name != NAME}


@pytest.mark.filterwarnings("ignore:Round")
@pytest.mark.parametrize("says", [True, False])
def test_entries_are_missing_only_where_a_method_says_so(says):
    trainer = federate(Toy(), toy_data(), [Drops(says)], max_rounds=1)
    assert [entry["client"] for entry in trainer.server.failures] == ([] if says else ["1"])
    assert says or "Change.PARTS" in trainer.server.failures[0]["reason"]


class Crops(FederatedCallback):
    def on_send(self, client, update):
        if client.id == "1":
            update.state = {**update.state, NAME: update.state[NAME][:1]}


@pytest.mark.filterwarnings("ignore:Round")
def test_a_part_has_the_shape_in_which_it_was_sent():
    """A mean of parts would take the wrong elements, or end the run under another name."""
    trainer = federate(Toy(), toy_data(), [HeteroFL(), Crops()], max_rounds=1)
    assert [entry["client"] for entry in trainer.server.failures] == ["1"]
    assert "has shape (1, " in trainer.server.failures[0]["reason"]


# -- scores, logs -----------------------------------------------------------------------------------------------------------
def scored(**changes):
    server = federate(Toy(), toy_data(), [], max_rounds=1).server
    update = Update(server.round, "0", state=dict(server.model), num_samples=3)
    for name, value in changes.items():
        setattr(update, name, value)
    return server.accept(server.message(Job("0")), update)


def row(metric, value, size=1, split="val"):
    return ("L2", "local", split, metric, value, size)


def test_scores_that_cannot_be_are_gaps():
    rows = [
        row("val_loss", 0.5),
        row("val_acc", 700),
        row("val_f1", -1.0),
        row("val_auroc", math.nan),
        row("val_loss", 1.0, 10**9),
    ]
    update = scored(evaluations=list(rows), metrics={"train_acc": -3.0, "train_loss": -1.0})
    assert update.error is None
    assert [one[3] for one in update.evaluations] == ["val_loss", "val_auroc"] and update.metrics == {
        "train_loss": -1.0
    }
    assert {(split, reason.split(",")[0]) for _, _, split, reason in update.gaps} == {
        ("train", "train_acc is -3"),
        ("val", "val_acc is 700"),
        ("val", "val_f1 is -1"),
        ("val", "val_loss is said to be of 1000000000 samples"),
    }


def test_what_metrics_can_be_is_said_by_modules():
    from fedlightning.models import MLP, Classifier
    from fedlightning.scores.metric_names import bounds_of, outside

    bounds = bounds_of(Classifier(MLP(4, [], 2), num_classes=2).modules())
    assert outside(bounds, "val_accuracy", 7.0) == "[0, 1]" and outside(bounds, "val_accuracy", 1.0000001) is None
    assert outside(bounds_of([]), "accuracy", 87.0) is None  # percents, of somebody who logs these
    assert outside(bounds, "test_kappa", -0.5) is None and outside(bounds, "my_score", 1e9) is None


@pytest.mark.parametrize(
    "change",
    [
        {"evaluations": [row("val_loss", "low")]},
        {"evaluations": [row("val_loss", 1.0, -1)]},
        {"evaluations": [row(3, 1.0)]},
        {"logs": [ClientLog({"a": 1.0}, 0, "close")]},
        {"logs": [ClientLog({"a": "text"}, 0)]},
        {"logs": [3]},
        {"own_steps": -1},
        {"selections": "many"},
        {"steps": 10**400},
        {"links": 3},
    ],
)
def test_nonsense_about_scores_logs_and_counts_is_refused(change):
    assert "was refused" in str(scored(**change).error)
