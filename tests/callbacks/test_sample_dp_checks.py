"""What SampleDP refuses, check by check; whole runs are in test_sample_dp.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedlightning.callbacks import sample_dp_checks as checks
from tests.helpers import Toy

HISTORY = [[1.0, 0.1, 5], [2.0, 0.1, 3]]


def test_a_count_goes_on_where_it_was_only():
    def trainer(step, path=None):
        return SimpleNamespace(global_step=step, ckpt_path=path)

    for step in (8, 7):
        with pytest.raises(ValueError, match="has counted 8 steps of another fit"):
            checks.refuse_another_fit(trainer(step, "last.ckpt"), HISTORY)
        checks.refuse_another_fit(trainer(step), HISTORY)
    with pytest.raises(ValueError, match="another fit"):
        checks.refuse_another_fit(trainer(6), HISTORY)
    checks.refuse_steps_before(8, HISTORY)
    with pytest.raises(ValueError, match="goes on from 9 steps, of which it has counted 8"):
        checks.refuse_steps_before(9, HISTORY)


@pytest.mark.parametrize(
    ("argument", "optimizers", "reason"),
    [
        ({"accumulate_grad_batches": 2}, 1, "accumulate_grad_batches=1"),
        ({"precision": "bf16-true"}, 1, "gradients of single records in float32"),
        ({"precision": "16-mixed"}, 1, "a scaler has scaled"),
        ({}, 2, "Toy optimizes in another way"),
    ],
)
def test_a_step_is_one_gradient_of_one_batch(argument, optimizers, reason):
    with pytest.raises(ValueError, match=reason):
        checks.refuse_trainer(Toy(), argument.get, optimizers)
    checks.refuse_trainer(Toy(), {"precision": "bf16-mixed"}.get, 1)


def test_rounds_without_or_with_other_noise_and_sites_that_forget():
    now = {"noise_seed": None, "unit": "record"}
    checks.refuse_other_rounds(0, now, now)
    with pytest.raises(ValueError, match="2 rounds of this run were without SampleDP"):
        checks.refuse_other_rounds(2, now, now)
    with pytest.raises(ValueError, match="noise_seed was 3, and is None now"):
        checks.refuse_other_rounds(0, now | {"noise_seed": 3}, now)
    checks.refuse_forgetting("folder", None)
    with pytest.raises(ValueError, match="needs ledger=FOLDER"):
        checks.refuse_forgetting(None, None)
