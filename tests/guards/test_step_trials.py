"""What only a later step would raise shows before round 1, and a good module does not notice."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import F1Score

from fedlightning.algorithm import Facts, FederatedCallback
from fedlightning.callbacks import FENDA, SCAFFOLD, FedPer, FedProx, Local
from fedlightning.errors import ConfigurationError
from fedlightning.guards.step_trials import spread
from tests.helpers import CLASSES, FEATURES, NormNet, Toy, federate, global_state, make_trainer, same, toy_data


class BadTest(Toy):
    def test_step(self, batch, batch_idx):
        raise KeyError("age")


class BadValidation(Toy):
    def validation_step(self, batch, batch_idx):
        return batch["x"]


class LateLayers(Toy):
    def setup(self, stage):
        self.head = nn.Linear(3, 3)


class Monitors(Toy):
    def configure_optimizers(self):
        sgd = torch.optim.SGD(self.parameters(), 0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": plateau, "monitor": "val_los"}}


class Lazy(Toy):
    def make(self, hidden, dropout):
        return nn.Sequential(nn.LazyLinear(hidden), nn.ReLU(), nn.Linear(hidden, 3))


class HoldsGraph(Toy):
    def __init__(self):
        super().__init__()
        self.last = self.net[0].weight * 2


class NegativeRate(Toy):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=-0.1)


class NanRate(Toy):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=float("nan"))


REFUSED = [
    (
        BadTest(),
        r"BadTest.test_step fails for client '0' on a batch of test data.*KeyError: 'age' \(test_step_trials.py, line",
    ),
    (BadValidation(), r"BadValidation.validation_step fails .* batch of val data, tried before round 1: TypeError"),
    (LateLayers(), r"LateLayers.setup makes 'head.weight'.*Make layers in __init__ or configure_model"),
    (Monitors(), r"A learning-rate scheduler monitors 'val_los', which Monitors does not log. It logs .*train_loss"),
    (Lazy(), r"Lazy has layers without a size \('net.0.weight'\)"),
    (HoldsGraph(), r"'last' of HoldsGraph is computed from other tensors.*detached"),
    (NegativeRate(), r"NegativeRate.configure_optimizers fails: Invalid learning rate: -0.1"),
    (NanRate(), r"SGD of NanRate has lr=nan; it must be finite"),
]


@pytest.mark.parametrize(("module", "sentence"), REFUSED, ids=[type(module).__name__ for module, _ in REFUSED])
def test_refused_before_round_1(module, sentence, tmp_path):
    with pytest.raises(ConfigurationError, match=sentence):
        federate(module, toy_data(), root=tmp_path, sanity_check=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("callback", [EarlyStopping("val_los"), ModelCheckpoint(monitor="val_los")])
def test_a_callback_that_monitors_nothing_is_refused(callback, tmp_path):
    with pytest.raises(
        ConfigurationError, match=f"{type(callback).__name__} monitors 'val_los', which Toy does not log"
    ):
        federate(Toy(), toy_data(), [callback], root=tmp_path, sanity_check=True)


class LogsAtTheEnd(Toy):
    def on_train_epoch_end(self):
        self.log("at_end", 1.0)


class Gap(Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        pl_module.log("gap", 1.0)


def test_a_monitor_is_known_of_an_epochs_end_and_left_to_round_1_beside_a_callback_that_may_log_it(tmp_path):
    """The end of an epoch was not tried; what a user's callback logs was refused."""
    with pytest.raises(ConfigurationError, match=r"monitors 'at_en', which LogsAtTheEnd does not log. It logs at_end"):
        federate(LogsAtTheEnd(), toy_data(), [ModelCheckpoint(monitor="at_en")], root=tmp_path, sanity_check=True)
    for module, callbacks in (
        (LogsAtTheEnd(), [ModelCheckpoint(monitor="at_end")]),
        (Toy(), [Gap(), ModelCheckpoint(monitor="gap")]),
    ):
        trainer = federate(module, toy_data(), callbacks, root=tmp_path, sanity_check=True, max_rounds=1)
        assert trainer.rounds_done == 1 and not trainer.summary.get("failures")


def test_a_compiled_network_is_told_of_and_compiled_once_for_all_clients(tmp_path, monkeypatch):
    graphs, said = [], []
    monkeypatch.setattr("fedlightning.guards.preflight.rank_zero_info", said.append)

    class Compiled(Toy):
        def __init__(self):
            super().__init__()
            self.net = torch.compile(self.net, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)

    federate(Compiled(), toy_data([8, 8]), root=tmp_path, sanity_check=True, max_rounds=1)
    once = len(graphs)
    assert "Compiled compiles 'net' (torch.compile)" in said[0] and once > 0
    federate(Compiled(), toy_data([8, 8, 8, 8]), root=tmp_path / "more", max_rounds=3)
    assert len(graphs) <= 2 * once


def test_one_bad_client_is_left_to_the_rounds(tmp_path):
    """Its data may be bad, which is no reason to refuse the others."""

    class Picky(Toy):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) == 7:
                raise RuntimeError("seven")
            return super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning, match="Round 1: client '0' failed: RuntimeError: seven"):
        trainer = federate(Picky(), toy_data([7, 8]), root=tmp_path, sanity_check=True, max_rounds=1)
    assert trainer.rounds_done == 1


@pytest.mark.parametrize(
    ("callbacks", "loop"),
    [([], "auto"), ([lambda: SCAFFOLD(option=1)], "trainer"), ([lambda: FENDA(head="net.3")], "auto")],
    ids=["FedAvg", "SCAFFOLD", "FENDA"],
)
def test_results_do_not_depend_on_it(callbacks, loop, tmp_path):
    runs, draws = [], []
    for sanity in (False, True):
        torch.manual_seed(3)
        module = Toy("adam", dropout=0.3)
        trainer = make_trainer(
            tmp_path / str(sanity), [make() for make in callbacks], sanity_check=sanity, local_loop=loop
        )
        trainer.fit(module, datamodule=toy_data())
        runs.append(trainer)
        draws.append((random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()))
    same(*map(global_state, runs))
    assert draws[0] == draws[1]
    assert runs[0].rows == runs[1].rows


class Watches(Toy):
    """Its steps need what a callback has put into the module, and see the end of an epoch."""

    ended = before = 0

    def training_step(self, batch, batch_idx):
        assert (
            self.trainer.fit_loop is not None
        )  # the fast loop has none: the step is tried again with Lightning's Trainer
        return super().training_step(batch, batch_idx) + 0.0 * self.extra.sum()

    def on_validation_epoch_end(self):
        Watches.ended += 1


class AddsToTheModule(FederatedCallback):
    def wrap_module(self, module, owner):
        module.extra = nn.Parameter(torch.zeros(2))
        return module

    def on_federation_start(self, server):
        Watches.before = Watches.ended


@pytest.mark.parametrize("loop", ["auto", "trainer"])
def test_a_try_ends_after_its_batch(loop, tmp_path):
    """The end of an epoch of one batch is seen, as in Lightning's sanity check."""
    Watches.ended, Watches.before = 0, 0
    trainer = make_trainer(tmp_path, [AddsToTheModule()], sanity_check=True, local_loop=loop, max_rounds=1)
    trainer.fit(Watches(), datamodule=toy_data())
    assert Watches.before == 1 < Watches.ended
    assert "add" not in vars(trainer.federation.engine.runner.blueprint.losses)


class ByClass(Toy):
    """Logs a number for each class, in one of the ways in which that goes wrong."""

    def __init__(self, way):
        super().__init__()
        self.way, self.metric = way, F1Score("multiclass", num_classes=CLASSES, average="none")

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.metric.update(self.logits(batch[0]), batch[1])
        if self.way == "metric":
            self.log("val_f1", self.metric)
        if self.way == "step":
            self.log("val_f1", torch.zeros(CLASSES))

    def on_validation_epoch_end(self):
        if self.way == "end":
            self.log("val_f1", self.metric.compute())
        if self.way == "fails":
            assert self.global_step, "of one batch there is too little"


@pytest.mark.parametrize("loop", ["auto", "trainer"])
@pytest.mark.parametrize("way", ["metric", "end", "step"])
def test_what_is_no_single_number_is_named(way, loop):
    with pytest.raises(ConfigurationError, match="val_f1"):
        federate(ByClass(way), toy_data(), [NoRounds()], sanity_check=True, evaluation=1, local_loop=loop)


def test_what_fails_at_the_end_of_one_batch_may_be_right_at_the_end_of_all():
    with pytest.raises(AssertionError, match="a round has begun"):
        federate(ByClass("fails"), toy_data(), [NoRounds()], sanity_check=True, evaluation=1)


class NoRounds(FederatedCallback):
    facts = Facts(takes_part=False)

    def on_round_start(self, server):
        raise AssertionError("a round has begun")


def test_the_users_loaders_are_not_touched():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    loader = DataLoader(
        TensorDataset(torch.arange(10.0)), batch_size=4, shuffle=True, generator=generator, drop_last=True
    )
    whole, one = spread(loader), spread(loader, whole=False)
    assert [len(batch[0]) for batch in whole] == [4, 4]
    assert [len(batch[0]) for batch in one] == [4]
    assert torch.equal(generator.get_state(), before)
    assert next(iter(whole))[0].tolist() == [0, 2, 4, 6]
    ready = DataLoader([torch.ones(3), torch.zeros(3)], batch_size=None, shuffle=True, generator=generator)
    assert [batch.tolist() for batch in spread(ready)] == [[1.0] * 3, [0.0] * 3]
    assert torch.equal(generator.get_state(), before)


class Counts(NormNet):
    """Buffers that count, beside those of batch normalisation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("fixed", torch.ones(2))
        self.register_buffer("passing", torch.zeros(()), persistent=False)

    def training_step(self, batch, batch_idx):
        self.seen += len(batch[0])
        self.steps += 1
        self.passing += 1
        return super().training_step(batch, batch_idx)


class Weighted(Toy):
    """A loss with weights of the client's own classes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.ones(CLASSES))

    def on_train_start(self):
        labels = torch.cat([y for _, y in self.trainer.train_dataloader])
        self.weights.copy_(torch.bincount(labels, minlength=CLASSES) / len(labels))


COUNTED = (
    r"Counts: after each round 'seen' is averaged over the clients and 'steps' is taken from the first client, and sent"
)


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Counts, COUNTED),
        (Weighted, "Weighted: after each round 'weights' is averaged over the clients, and sent to all"),
    ],
)
@pytest.mark.parametrize("loop", ["fast", "trainer"])
def test_buffers_that_training_changes_are_told_once(module, sentence, loop):
    with pytest.warns(UserWarning, match=sentence) as told:
        federate(module(), toy_data((8, 16)), sanity_check=True, local_loop="auto" if module is Weighted else loop)
    assert sum("Training changes buffers" in str(one.message) for one in told) == 1


@pytest.mark.parametrize(
    ("module", "callbacks", "options"),
    [
        (NormNet, [], {}),
        (Counts, [FedPer(personal=["seen", "steps"])], {}),
        (Counts, [], {"float_buffers": "local"}),
        (Counts, [Local()], {}),
    ],
)
def test_of_other_buffers_nothing_is_said(module, callbacks, options):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        federate(module(), toy_data((8, 16)), callbacks, sanity_check=True, **options)
    assert not [one for one in told if "Training changes buffers" in str(one.message)]


class Anneals(Toy):
    """A weight that grows from step to step, and a baseline that follows the loss, both plain attributes."""

    def __init__(self):
        super().__init__()
        self.beta, self.net.baseline = 0.0, torch.zeros(())

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.beta = min(1.0, self.beta + 0.1)
        self.net.baseline = 0.9 * self.net.baseline + 0.1 * loss.detach()
        return loss


class Sums(Toy):
    """Sums of an epoch, the last loss with dropout, and a call that counts in a part's class."""

    def __init__(self):
        super().__init__(dropout=0.5)
        self.total, self.last, self.seen = 0.0, torch.zeros(()), 0

    def on_train_epoch_start(self):
        self.total = 0.0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.total, self.last, self.seen, self.noise = (
            self.total + loss.item(),
            loss.detach(),
            len(batch[0]),
            random.random(),
        )
        return loss


@pytest.mark.parametrize("loop", ["auto", "trainer"])
def test_attributes_that_begin_anew_in_every_visit_are_told_once(loop):
    with pytest.warns(UserWarning, match=r"Steps of Anneals take 'beta', 'net.baseline' up where") as told:
        federate(Anneals(), toy_data((8, 16)), sanity_check=True, local_loop=loop)
    assert sum("begins with the first value" in str(one.message) for one in told) == 1


def test_of_attributes_that_a_visit_makes_itself_nothing_is_said():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        federate(Sums(), toy_data((8, 16)), sanity_check=True)
    assert not [one for one in told if "begins with the first value" in str(one.message)]


class AnnealsByEpoch(Toy):
    """An attribute that the end of an epoch changes, which goes on with what the last one left."""

    def __init__(self):
        super().__init__()
        self.beta = 0.0

    def training_step(self, batch, batch_idx):
        return (1 + self.beta) * super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.beta += 0.1


@pytest.mark.parametrize("loop", ["auto", "trainer"])
def test_what_the_end_of_an_epoch_takes_up_is_told(loop):
    with pytest.warns(UserWarning, match=r"Steps of AnnealsByEpoch take 'beta' up where"):
        federate(AnnealsByEpoch(), toy_data((8, 16)), sanity_check=True, local_loop=loop)


class SumsByEpoch(Toy):
    """Sums that the end of an epoch empties, and a buffer that holds all samples of one."""

    def __init__(self):
        super().__init__()
        self.total, self.outputs = 0.0, []
        self.register_buffer("bank", torch.zeros(8, FEATURES))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.total += loss.item()
        self.outputs.append(batch[0])
        return loss

    def on_train_epoch_end(self):
        self.bank = torch.cat(self.outputs)
        self.total = 0.0
        self.outputs.clear()


@pytest.mark.parametrize("loop", ["auto", "trainer"])
def test_what_the_end_of_an_epoch_begins_anew_is_not_taken_up(loop):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        federate(SumsByEpoch(), toy_data((8, 8)), sanity_check=True, local_loop=loop)
    messages = [str(one.message) for one in told]
    assert not [text for text in messages if "begins with the first value" in text]
    assert [text for text in messages if "'bank' is averaged over the clients" in text]


class NeedsWholeEpoch(Toy):
    """Its end of an epoch cannot do with one batch."""

    def on_train_epoch_start(self):
        self.batches = 0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.batches += 1

    def on_train_epoch_end(self):
        if self.batches < 2:
            raise RuntimeError("one batch")


def test_an_end_of_an_epoch_that_one_batch_fails_is_no_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federate(NeedsWholeEpoch(), toy_data((16, 16)), sanity_check=True)


def test_trying_an_attribute_changes_no_bit():
    def trained(sanity):
        torch.manual_seed(0)
        trainer = federate(Anneals(), toy_data((8, 16)), sanity_check=sanity)
        return global_state(trainer)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(trained(False), trained(True))


class Bank(Toy):
    """A memory bank that grows with what it has seen."""

    def __init__(self, persistent):
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, FEATURES), persistent=persistent)

    def training_step(self, batch, batch_idx):
        self.bank = torch.cat([self.bank, batch[0]])
        return super().training_step(batch, batch_idx)


def test_a_buffer_that_grows():
    with pytest.raises(
        ConfigurationError, match=r"the shape of 'bank' of Bank, from \(0, 6\) to \(\d+, 6\).*persistent=False"
    ):
        federate(Bank(True), toy_data(), [NoRounds()], sanity_check=True)
    models = []
    for make in (lambda: Bank(False), Toy):
        torch.manual_seed(0)
        models.append(federate(make(), toy_data(), [FedProx(mu=0.1)], sanity_check=True, evaluation=1).server.model)
    same(*models)


class Growing(Toy):
    """A parameter that is made in training."""

    def training_step(self, batch, batch_idx):
        self.late = nn.Parameter(torch.zeros(2))
        return super().training_step(batch, batch_idx)


def test_an_entry_that_training_adds():
    with pytest.raises(ConfigurationError, match=r"Training adds or removes 'late' of Growing, .*configure_model"):
        federate(Growing(), toy_data(), [NoRounds()], sanity_check=True)
