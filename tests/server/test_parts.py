"""What attaches to a federation: which parts a run has, in which order they are told what, and that the core needs none."""

from __future__ import annotations

import inspect

import pytest

from fedlightning import FederatedTrainer
from fedlightning.callbacks import FedAvg, LocalAdaptation, TopK
from fedlightning.contract.messages import Message, Update
from fedlightning.options import Evaluation
from fedlightning.server.parts import Part, Parts
from tests.helpers import Toy, make_trainer, same, toy_data

PARTS = [
    "UpdateChecks",
    "Explosions",
    "FarScores",
    "Preflight",
    "OutgoingReport",
    "HeldOutScores",
    "Timeline",
    "Saving",
]


class Told(Part):
    """Notes every event."""

    def __init__(self):
        self.events = []


def noting(event):
    """Return a method that notes an event."""
    return lambda self, *arguments: self.events.append(event)


for name in vars(Part):
    if name.startswith("on_"):
        setattr(Told, name, noting(name))


def test_the_parts_of_a_run_are_these_in_this_order():
    trainer = make_trainer(None, [FedAvg()], max_rounds=1)
    trainer.fit(Toy(), datamodule=toy_data())
    assert [type(part).__name__ for part in trainer.server.parts] == PARTS
    seen = make_trainer(None, [FedAvg()], max_rounds=1, enable_progress_bar=True)
    seen.fit(Toy(), datamodule=toy_data())
    assert [type(part).__name__ for part in seen.server.parts] == [*PARTS, "RichProgress"]


def attached(monkeypatch, *parts):
    """Let runs have these parts alone."""
    monkeypatch.setattr("fedlightning.assemble.Parts", lambda usual: Parts(parts))


def test_events_come_in_the_order_of_time(monkeypatch):
    told = Told()
    attached(monkeypatch, told)
    trainer = make_trainer(None, [LocalAdaptation(epochs=1)], max_rounds=2, evaluation=0)
    monkeypatch.setattr(FederatedTrainer, "_saved", lambda self, resumed: (0, 0))
    trainer.fit(Toy(), datamodule=toy_data())
    clients = len(trainer.client_ids)
    visits = ["on_update", "on_visit_end"] * clients
    round_of = ["on_round_start", *visits, "on_round_trained", "on_round_scored", "on_round_end"]
    assert told.events == ["on_begin", *round_of * 2, "on_rounds_over", "on_round_end", "on_end"]


@pytest.mark.parametrize("callbacks", [[FedAvg()], [FedAvg(), TopK(share=0.5)]], ids=["plain", "codes"])
def test_without_any_part_models_and_scores_are_the_same(callbacks, monkeypatch):
    module = Toy()

    def fitted():
        trainer = make_trainer(None, callbacks, max_rounds=2, evaluation=Evaluation(every=1, test_data=["local"]))
        trainer.fit(module, datamodule=toy_data())
        return trainer

    whole = fitted()
    attached(monkeypatch)
    monkeypatch.setattr(FederatedTrainer, "_saved", lambda self, resumed: (0, 0))
    bare = fitted()
    assert len(bare.server.parts) == 0
    same(bare.server.model, whole.server.model)
    assert list(bare.rows) == list(whole.rows)


def test_the_first_refusal_counts_and_the_others_are_not_asked():
    class Refuses(Part):
        def check_update(self, server, message, update):
            return Update(0, "a", error="refused")

        def check_score(self, server, row):
            return "no score"

    class Fails(Part):
        def check_update(self, server, message, update):
            raise AssertionError

    parts = Parts([Part(), Refuses(), Fails()])
    assert parts.check_update(None, Message(0, "a", {}, ()), Update(0, "a")).error == "refused"
    assert parts.check_score(None, None) == "no score"
    assert parts.find(Fails) is list(parts)[2]
    with pytest.raises(LookupError, match="No Told is attached"):
        parts.find(Told)


def test_every_event_is_told_by_the_core():
    events = {name for name, value in vars(Part).items() if inspect.isfunction(value) and name.startswith("on_")}
    assert events == {
        "on_begin", "on_restored", "on_round_start", "on_update", "on_visit_end", "on_round_trained", "on_round_scored",
        "on_round_failed", "on_rounds_over", "on_round_end", "on_end", "on_evaluate", "on_evaluated",
    }  # fmt: skip


def test_progress_prints_a_line_for_each_round_and_nothing_after(capsys):
    trainer = make_trainer(None, [LocalAdaptation(epochs=1)], max_rounds=2, enable_progress_bar=True, evaluation=1)
    trainer.fit(Toy(), datamodule=toy_data())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("round ")]
    assert [line.split("  ")[0] for line in lines] == ["round 1/2", "round 2/2"]
    assert all("G: " in line or "L1: " in line for line in lines)
