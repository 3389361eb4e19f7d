"""A StopIteration in a client's code is its failure in both loops, not the end of its data."""

from __future__ import annotations

import warnings

import pytest

from fedlightning.options import Evaluation
from tests.helpers import Toy, federate, toy_data

WHERE = ("training_step", "validation_step", "test_step", "on_validation_batch_end", "on_before_batch_transfer")


class Exhausted(Toy):
    """Raises StopIteration in one place, at a batch with a sample of 99."""

    where = ""

    def stop(self, where, batch):
        if where == self.where and batch[0].max() > 50:
            next(iter(()))

    def training_step(self, batch, batch_idx):
        self.stop("training_step", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.stop("validation_step", batch)
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.stop("test_step", batch)
        return super().test_step(batch, batch_idx)

    def on_validation_batch_end(self, outputs, batch, *args):
        self.stop("on_validation_batch_end", batch)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.stop("on_before_batch_transfer", batch)
        return batch


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("loop", ["auto", "trainer"])
def test_a_stop_iteration_is_a_failure_of_its_client(tmp_path, where, loop):
    module, data = Exhausted(), toy_data([16, 24])
    module.where = where
    for x, _ in data.tensors["1"].values():
        x[-1] = 99
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = federate(
            module, data, root=tmp_path, max_rounds=1, local_loop=loop, evaluation=Evaluation(test_data=["local"])
        )
        trainer.test()
    failures = trainer.summary["failures"]
    assert failures and {failure["client"] for failure in failures} == {"1"}
    assert all("StopIteration" in failure["reason"] for failure in failures)
