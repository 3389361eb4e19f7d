"""Modules that keep their scores to themselves are told of where a user looks for numbers."""

from __future__ import annotations

import warnings

import pytest

from fedlightning.callbacks import FedAvg
from tests.helpers import Toy, make_trainer, toy_data


class Silent(Toy):
    """Collects and prints, as some packages' modules do."""

    def test_step(self, batch, batch_idx):
        self.found = float(self(batch[0]).mean())

    def on_test_epoch_end(self):
        self.log("hidden", self.found, logger=False)


class SilentInValidation(Toy):
    def validation_step(self, batch, batch_idx):
        self(batch[0])


def told(module, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(None, [FedAvg()], max_rounds=2, **{"evaluation": 0, **options})
        trainer.fit(module, toy_data([10, 12]))
        trainer.test(verbose=False)
    return [str(one.message) for one in caught if "There are no scores" in str(one.message)]


@pytest.mark.parametrize("loop", ["fast", "trainer"])
def test_a_test_step_without_scores_is_told_of(loop):
    (text,) = told(Silent(), local_loop=loop)
    assert "no scores on test data: Silent.test_step logs nothing and returns no loss. Log them in test_step" in text


def test_a_validation_step_without_scores_is_told_of_once():
    (text,) = told(SilentInValidation(), evaluation=1)
    assert "no scores on val data: SilentInValidation.validation_step" in text


def test_what_is_scored_is_not():
    assert told(Toy(), evaluation=1) == []
