"""What SampleDP refuses, check by check; whole runs are in test_sample_dp.py."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

pytest.importorskip("opacus", reason="SampleDP counts with Opacus: pip install opacus cryptography")

from fedlightning.callbacks import Central, FedAvg, SampleDP
from fedlightning.callbacks import sample_dp_checks as checks
from fedlightning.callbacks.shared.poisson_batches import refuse_undrawable
from fedlightning.datamodules import IIDPartitioner, Partitioned, TabularFederatedDataModule
from fedlightning.datamodules.views import IndexView
from fedlightning.datamodules.wrapped import ValidatedOnTest
from tests.helpers import Toy, federate

HISTORY = [[1.0, 0.1, 5], [2.0, 0.1, 3]]


def test_a_count_goes_on_where_it_was_only():
    with pytest.raises(ValueError, match="has counted 8 steps of another fit"):
        checks.refuse_another_fit(HISTORY, goes_on=False)
    checks.refuse_another_fit(HISTORY, goes_on=True)
    checks.refuse_another_fit([], goes_on=False)
    checks.refuse_steps_before(8, HISTORY)
    with pytest.raises(ValueError, match="goes on from 9 steps, of which it has counted 8"):
        checks.refuse_steps_before(9, HISTORY)


@pytest.mark.parametrize(
    ("argument", "optimizers", "reason"),
    [
        ({"accumulate_grad_batches": 2}, 1, "accumulate_grad_batches=1"),
        ({"precision": "bf16-true"}, 1, "gradients of single records in float32"),
        ({"precision": "16-mixed"}, 1, "in float32, unscaled"),
        ({}, 2, "Toy optimizes in another way"),
    ],
)
def test_a_step_is_one_gradient_of_one_batch(argument, optimizers, reason):
    with pytest.raises(ValueError, match=reason):
        checks.refuse_trainer(Toy(), argument.get, optimizers)
    checks.refuse_trainer(Toy(), {"precision": "bf16-mixed"}.get, 1)


def test_sites_that_forget():
    checks.refuse_forgetting("folder", None)
    with pytest.raises(ValueError, match="needs ledger=FOLDER"):
        checks.refuse_forgetting(None, None)


def test_a_ledger_by_client_does_not_count_what_is_spent_on_the_union(tmp_path):
    """Central's steps stood in a file of their own, and the same records had the whole budget again as a client's."""
    options = {"delta": 1e-3, "noise_multiplier": 1.0, "noise_seed": 3}
    data = Partitioned.from_datasets(
        TensorDataset(torch.randn(60, 6), torch.arange(60) % 3), partitioner=IIDPartitioner(2)
    )
    federate(Toy(), data, [Central(), SampleDP(**options)], max_rounds=1)
    with pytest.raises(ValueError, match=r"Central trains on all clients' data as those of one, .* Leave ledger out"):
        federate(Toy(), data, [Central(), SampleDP(**options, ledger=str(tmp_path / "ledger"))], max_rounds=1)


def table(folder, **options):
    rows = [f"{place % 7},{'ab'[place % 2]},{'yn'[place % 3 > 0]}" for place in range(80)]
    path = folder / "rows.csv"
    path.write_text("\n".join(["x,who,y", *rows]))
    return TabularFederatedDataModule(path, target="y", client="who", group=False, batch_size=8, **options)


class OfATable(Toy):
    def make(self, hidden, dropout):
        return nn.Linear(1, 2)


class OfALightningModule(LightningDataModule):
    coupled_records = "rows are ranked. Give ranks of a public sample."

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(8, 6), torch.zeros(8, dtype=torch.long)), batch_size=4)


def test_features_that_depend_on_other_records_are_refused(tmp_path):
    """One row far away moves the features of all others, which the clip of its own gradient does not bound."""
    dp = SampleDP(delta=1e-3, noise_multiplier=1.0, noise_seed=3)
    refused = "one moves others' features: "
    local = table(tmp_path)
    for data in (local, ValidatedOnTest(local)):
        with pytest.raises(ValueError, match=f"{refused}'x' is scaled by the mean and deviation of all rows"):
            federate(OfATable(), data, [FedAvg(), dp], max_rounds=1)
    named = {"classes": ["n", "y"]}
    for options, what in (({}, "classes"), ({"categorical": ["x"], **named}, "categories")):
        with pytest.raises(ValueError, match=f"{refused}which words and classes have a number .* Give {what}, which"):
            federate(OfATable(), table(tmp_path, scale="none", **options), [FedAvg(), dp], max_rounds=1)
    for options in ({"scale": "none", **named}, {"statistics": {"x": [3.0, 2.0]}, **named}):
        federate(OfATable(), table(tmp_path, **options), [FedAvg(), dp], max_rounds=1)
    with pytest.raises(ValueError, match=f"{refused}rows are ranked"):
        federate(Toy(), Partitioned(OfALightningModule(), IIDPartitioner(2)), [FedAvg(), dp], max_rounds=1)
    trainer = Trainer(callbacks=[dp], accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=f"{refused}rows are ranked"):
        trainer.fit(Toy(), datamodule=OfALightningModule())


class Augmented(Dataset):
    """Changes each record of a data set; it takes all of them."""

    indices = None

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, place):
        return self.dataset[place]


def test_a_record_that_the_data_have_several_times_is_refused():
    """Oversampled, it was drawn as often, and moved the sum of a step by twice its share and more."""
    whole = TensorDataset(torch.arange(6.0))
    twice = (
        Subset(whole, [0, 1, 2, 0]),
        Subset(whole, [5, 0, -1]),
        Subset(Subset(whole, [3, 3]), [0, 1]),
        ConcatDataset([whole, Subset(whole, [4])]),
        IndexView(whole, [2, 2]),
        Augmented(Subset(whole, [4, 1, 4])),
        ConcatDataset([Augmented(whole), Subset(Augmented(whole), [5])]),
        [whole[0], whole[1]] * 2,
    )
    for data in twice:
        with pytest.raises(
            ValueError, match="SampleDP hides a record that is drawn once, and the training data have one 2"
        ):
            refuse_undrawable(DataLoader(data, batch_size=2), "SampleDP", grouped=False)
        refuse_undrawable(DataLoader(data, batch_size=2), "SampleDP", grouped=True)  # all copies are of one patient
    parts = [Subset(whole, [0, 5]), Subset(whole, [1, 2, 3]), TensorDataset(torch.arange(6.0))]
    for data in (
        whole,
        Augmented(Subset(whole, [4, 1])),
        *parts,
        ConcatDataset(parts),
        Subset(ConcatDataset(parts), [8, 3, 0]),
    ):
        refuse_undrawable(DataLoader(data, batch_size=2), "SampleDP", grouped=False)


class Counts(nn.Module):
    """Keeps a statistic of its inputs where a checkpoint has it."""

    def get_extra_state(self):
        return self.seen


def test_a_checkpoint_of_a_plain_trainer_holds_nothing_else_that_training_writes():
    net = Toy()
    net.counts = Counts()
    trainer = Trainer(
        callbacks=[SampleDP(delta=1e-3, noise_multiplier=1.0)], accelerator="cpu", max_epochs=1, logger=False
    )
    net.counts.seen = torch.zeros(1)
    with pytest.raises(ValueError, match=r"Checkpoints would hold 'counts\._extra_state'"):
        trainer.fit(net, DataLoader(TensorDataset(torch.zeros(8, 6), torch.zeros(8, dtype=torch.long)), batch_size=4))
