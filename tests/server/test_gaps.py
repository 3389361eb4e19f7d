"""A client that fails in evaluation is a named gap in the scores, not the end of the run."""

from __future__ import annotations

import math

import pytest

from fedlightning.callbacks import LocalCheckpoint
from fedlightning.options import Evaluation
from fedlightning.server.evaluation import ScoringError
from tests.helpers import Toy, federate, make_trainer, toy_data


class Breaks(Toy):
    """A step that fails on the samples of one client, or of every client."""

    def __init__(self, client="1", step="validation_step"):
        super().__init__("sgd")
        data = toy_data()
        data.setup("fit")
        split = "val" if step == "validation_step" else "test"
        self.bad = None if client is None else float(data.tensors[client][split][0][0, 0])
        self.step = step

    def _may_fail(self, step, batch):
        if step == self.step and (self.bad is None or float(batch[0][0, 0]) == self.bad):
            raise ZeroDivisionError("this site's scanner")

    def validation_step(self, batch, batch_idx):
        self._may_fail("validation_step", batch)
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self._may_fail("test_step", batch)
        return super().test_step(batch, batch_idx)


def run(engine="sequential", module=None, **options):
    trainer = make_trainer(None, [LocalCheckpoint()], **{"evaluation": 1, "engine": engine} | options)
    trainer.fit(module or Breaks(), datamodule=toy_data())
    return trainer


@pytest.mark.parametrize("engine", ["sequential", "vectorized", "processes"])
def test_the_others_are_scored_and_the_gap_is_named(engine):
    with pytest.warns(UserWarning, match=r"Round 1: client '1' was not scored at stage L2 on local val data: Zero"):
        trainer = run(engine)
    assert {row.client for row in trainer.rows if row.split == "val"} == {"0", "2"}
    assert {row.stage for row in trainer.rows if row.split == "val"} == {"G", "L1", "L2"}
    assert trainer.server.model is not None
    assert trainer.store.get("1").visits == trainer.rounds_done  # it has trained all the same
    assert all(failure["client"] == "1" for failure in trainer.summary["failures"])
    assert {failure["round"] for failure in trainer.summary["failures"]} == {1, 2}
    with pytest.warns(UserWarning, match="client '1' was not scored"):
        assert math.isfinite(trainer.validate()[0]["mean"])


def test_a_step_that_always_fails_ends_the_run_with_its_reason():
    with pytest.raises(
        ScoringError, match=r"No model could be scored at stage L2; client '0': ZeroDivisionError: this"
    ):
        run(module=Breaks(client=None))
    trainer = run(module=Breaks(client=None, step="test_step"), evaluation=Evaluation(test_data=[]))
    trainer.federation.test_data = ("local",)
    with pytest.raises(ScoringError, match="No model could be scored at stage G"):
        trainer.test()


def test_failures_in_training_are_in_the_summary(tmp_path):
    with pytest.warns(UserWarning, match="client '1' has no training samples"):
        trainer = federate(Toy(), toy_data((24, 0, 16)), [], tmp_path, max_rounds=1)
    (failure,) = [entry for entry in trainer.summary["failures"] if "training" in entry["reason"]]
    assert failure == {
        "round": 1,
        "client": "1",
        "where": "training",
        "reason": "client '1' has no training samples",
        "decision": "left out",
    }
