"""What only a step shows is asked before round 1: optimizers, sparse gradients, batches of one sample, metrics."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks import (
    IFCA,
    PIFL,
    SCAFFOLD,
    TIFF,
    FedAvg,
    FedDF,
    FederatedEarlyStopping,
    FedPer,
    FedProx,
    FedSAM,
    FedSoft,
    GlobalCheckpoint,
    LocalCheckpoint,
    PerFedAvg,
    pFedBayes,
    pFedMe,
)
from fedlightning.server import federation
from tests.callbacks.public import public_data
from tests.helpers import NormNet, Toy, close, make_trainer, toy_data


@pytest.fixture
def nothing_runs(monkeypatch):
    """A round fails the test."""

    def round(*args, **options):
        raise AssertionError("a round has begun")

    monkeypatch.setattr(federation.Federation, "round", round)


def start(module, *callbacks, sizes=(24, 16), **options):
    trainer = make_trainer(None, callbacks, sanity_check=True, **options)
    trainer.fit(module, toy_data(sizes))
    return trainer


class NeedsTrainer(Toy):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]


class MadeInSetup(Toy):
    def setup(self, stage):
        self.make_optimizer = partial(torch.optim.AdamW, lr=0.01)

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


class Sparse(Toy):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6, sparse=True)

    def logits(self, x):
        return self.net(x + self.embedding((x[:, 0].abs() * 3).long().clamp(0, 9)))


class SparseOnly(Sparse):
    def __init__(self):
        super().__init__()
        self.net.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SparseAdam(self.embedding.parameters(), 0.01)


class Dense(Sparse):
    def __init__(self):
        super().__init__()
        self.embedding.sparse = False


@pytest.mark.parametrize(
    "callback",
    [
        *(SCAFFOLD(option=1), FedProx(mu=0.1), FedSoft(), FedSAM(), pFedMe(), pFedBayes(), IFCA(option=1)),
        *(PerFedAvg(), FedDF(steps=2)),
    ],
    ids=lambda one: one.key,
)
def test_sparse_gradients_do_as_dense_ones(callback):
    models = []
    for kind in (Sparse, Dense):
        torch.manual_seed(0)
        trainer = make_trainer(None, [copy.deepcopy(callback)], sanity_check=True, max_rounds=1, local_steps=2)
        trainer.fit(kind(), public_data((24, 16)))
        models.append(trainer.server.model)
    close(*models)


@pytest.mark.parametrize(
    ("module", "callback", "sentence"),
    [
        (NeedsTrainer, SCAFFOLD(), r"AdamW's movement is not a sum of gradients\. Use SCAFFOLD\(option=1\)"),
        (MadeInSetup, SCAFFOLD(), r"AdamW's movement is not a sum of gradients\. Use SCAFFOLD\(option=1\)"),
        (SparseOnly, FedProx(mu=0.1), r"'embedding\.weight' of SparseOnly are sparse, FedProx adds"),
        (SparseOnly, FedSAM(), r"'embedding\.weight' of SparseOnly are sparse, FedSAM adds"),
    ],
)
def test_what_cannot_work_is_refused(nothing_runs, module, callback, sentence):
    with pytest.raises(ValueError, match=sentence):
        start(module(), callback, local_steps=2)


def test_what_works_is_left_alone():
    start(MadeInSetup(), FedAvg(), max_rounds=1)
    start(Sparse(), FedAvg(), max_rounds=1)
    start(Sparse(), FedPer(personal=["embedding"]), FedProx(mu=0.1), max_rounds=1)


class Clips(Toy):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


def test_a_module_that_clips_its_own_gradients_is_said():
    with pytest.warns(UserWarning, match=r"where Clips\.configure_gradient_clipping changes gradients"):
        start(Clips(), SCAFFOLD(), max_rounds=1, local_steps=2)


# -- batches of one sample ---------------------------------------------------------------------------------------------
class Images(NormNet):
    """A single image has many pixels to normalise."""

    def logits(self, x):
        return self.net[3](nn.functional.relu(self.net[1](self.net[0](x).unsqueeze(-1).repeat(1, 1, 4)).mean(-1)))


@pytest.mark.parametrize(
    ("module", "sizes", "said"), [(NormNet, (17, 16), True), (NormNet, (18, 16), False), (Images, (17, 16), False)]
)
def test_a_last_batch_of_one_sample_is_told_where_it_fails(module, sizes, said):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start(module(), FedAvg(), sizes=sizes, max_rounds=1)
    texts = [str(one.message) for one in caught if "BatchNorm" in str(one.message)]
    assert bool(texts) == said
    if said:
        assert "The last batch of 1 of 2 clients (0) is a single sample" in texts[0] and "drop_last=True" in texts[0]


def test_a_client_of_one_sample_is_not_told_to_drop_it():
    with pytest.warns(UserWarning, match="has 1 training sample in batches of 8. .* leave the client out"):
        start(NormNet(), FedAvg(), sizes=(1, 16), max_rounds=1)


# -- monitors ----------------------------------------------------------------------------------------------------------
class Other(Toy):
    names: tuple = ("val/loss", "val/acc")

    def score(self, batch, split):
        loss = F.cross_entropy(self.logits(batch[0]), batch[1])
        for name in self.names:
            self.log(name, loss)


class Accuracy(Other):
    names = ("val_acc",)


class TwoLosses(Other):
    names = ("loss_a", "loss_b")


@pytest.mark.parametrize(
    "callback", [LocalCheckpoint(), GlobalCheckpoint(), FederatedEarlyStopping()], ids=lambda one: one.key
)
@pytest.mark.parametrize("module", [Accuracy, TwoLosses])
def test_a_metric_that_nobody_logs_is_refused(nothing_runs, callback, module):
    with pytest.raises(
        ValueError, match=rf"monitors 'val_loss', but validation gives .*{module.names[0]}.*set monitor="
    ):
        start(module(), callback, evaluation=1)


class Silent(Toy):
    def validation_step(self, batch, batch_idx):
        pass


@pytest.mark.parametrize("callback", [LocalCheckpoint(), GlobalCheckpoint()], ids=lambda one: one.key)
def test_a_module_that_logs_nothing_is_refused(nothing_runs, callback):
    with pytest.raises(ValueError, match=r"gives no metric\. Log one in validation_step, or remove \w+Checkpoint\."):
        start(Silent(), callback, evaluation=1)


@pytest.mark.parametrize("evaluate_every", [0, 1])
@pytest.mark.parametrize("callback", [PIFL(), TIFF(), PIFL(utility="gradient", incentive=False)], ids=repr)
def test_a_metric_that_pays_is_asked_for(nothing_runs, callback, evaluate_every):
    with pytest.raises(
        ValueError, match=r"needs the metric 'val_accuracy', but validation gives \['val_acc', 'val_loss'\]"
    ):
        start(Toy(), callback, evaluation=evaluate_every)


def test_the_only_loss_is_monitored_by_default():
    trainer = start(Other(), LocalCheckpoint(), GlobalCheckpoint(), evaluation=1)
    losses = [row.value for row in trainer.rows if (row.stage, row.metric, row.client) == ("L1", "val/loss", "0")]
    assert trainer.store.get("0").checkpoints["LocalCheckpoint"]["score"] == pytest.approx(sum(losses) / len(losses))
    assert trainer.server.checkpoints["GlobalCheckpoint"]["round"] in (1, 2)


def test_early_stopping_takes_the_only_loss_too():
    stopping = FederatedEarlyStopping(stage="G", patience=1, min_delta=9.0)
    trainer = start(Other(), stopping, GlobalCheckpoint(), evaluation=1, max_rounds=5)
    assert trainer.rounds_done == 3 and "val/loss (G) has not improved in 1 evaluation;" in str(
        trainer.summary["stopped"]
    )


def test_nothing_is_asked_where_nothing_is_validated():
    start(Accuracy(), LocalCheckpoint(), evaluation=0, max_rounds=1)


@pytest.mark.parametrize("local_loop", ["fast", "trainer", "auto"])
def test_the_look_at_a_step_leaves_the_choice_of_the_loop_alone(local_loop):
    trainer = make_trainer(
        None, [FedProx(mu=0.1), GlobalCheckpoint()], max_rounds=1, local_loop=local_loop, evaluation=1
    )
    trainer.fit(Toy(), datamodule=toy_data((8, 8)))
    assert trainer.summary["local_loop"].startswith("trainer" if local_loop == "trainer" else "fast")
