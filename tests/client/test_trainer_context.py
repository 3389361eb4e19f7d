"""`self.logger`, `trainer.datamodule` and `trainer.log_dir` inside a client, and the way of its logs to the run's loggers."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.datamodules import IIDPartitioner, Partitioned
from fedlightning.options import Processes
from tests.helpers import Toy, make_trainer, samples, toy_data

# isort: split
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, Logger


class Kept(Logger):
    """Keeps what it is given."""

    name, version = "kept", 0

    def __init__(self):
        super().__init__()
        self.rows, self.images = [], []

    @property
    def experiment(self):
        return self

    def add_image(self, tag, image, step):
        self.images.append((tag, step))

    def log_metrics(self, metrics, step=None):
        self.rows.append((dict(metrics), step))

    def log_hyperparams(self, *args, **kwargs):
        pass


class Talks(Toy):
    """Uses its logger as modules for TensorBoard do."""

    def training_step(self, batch, batch_idx):
        self.logger.experiment.add_scalar("index", batch_idx, self.global_step)
        if batch_idx == 0:
            self.logger.experiment.add_image("first", torch.zeros(3, 2, 2), self.global_step)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.logger.experiment.add_image("seen", torch.zeros(3, 2, 2), self.global_step)
        self.logger.log_hyperparams({"a": 1})
        super().validation_step(batch, batch_idx)


def logged(root, log_clients, **options):
    torch.manual_seed(0)
    logger = Kept()
    trainer = make_trainer(
        root, [LearningRateMonitor("step")], logger=logger, log_clients=log_clients, log_every_n_steps=1, **options
    )
    trainer.fit(Talks(), toy_data([30, 40]))
    return trainer, logger


def of(logger, name):
    return [(values[name], step) for values, step in logger.rows if name in values]


@pytest.mark.filterwarnings("ignore:LearningRateMonitor logs inside")
@pytest.mark.parametrize("options", [{}, pytest.param({"engine": Processes(2)}, marks=pytest.mark.slow)])
def test_the_logs_of_clients_go_to_the_loggers_under_their_names(tmp_path, options):
    silent, nothing = logged(tmp_path / "a", False, **options)
    trainer, logger = logged(tmp_path / "b", ["1"], **options)
    assert [row.value for row in trainer.rows] == [row.value for row in silent.rows]
    assert not any(name.startswith("client/") for values, _ in nothing.rows for name in values)
    assert not any(name.startswith("client/0") for values, _ in logger.rows for name in values)
    found = of(logger, "client/1/index")
    half = len(found) // 2
    assert [step for _, step in found] == list(range(len(found)))  # counted over both visits
    assert [value for value, _ in found] == [*range(half), *range(half)]
    assert [value for value, _ in of(logger, "client/1/round")][:: len(of(logger, "client/1/round")) - 1] == [1.0, 2.0]
    assert of(logger, "client/1/lr-SGD") and logger.images == [("client/1/first", 0), ("client/1/first", half)]
    losses = of(logger, "client/1/train_loss")
    assert len(losses) == 2 and losses[0][1] < losses[1][1]


def test_what_cannot_be_logged_is_refused(tmp_path):
    for options, sentence in (
        ({"logger": False, "log_clients": True}, "there is no logger"),
        ({"logger": True, "log_clients": True, "engine": "vectorized"}, "one stack"),
        ({"logger": True, "log_clients": "1"}, "Use True or False, or a list"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make_trainer(tmp_path, **options)
    with pytest.raises(ValueError, match="log_clients holds 'x', which is not a client"):
        make_trainer(tmp_path, logger=CSVLogger(tmp_path), log_clients=["x"]).fit(Toy(), toy_data([8]))
    with pytest.warns(UserWarning, match="LearningRateMonitor logs inside clients"):
        make_trainer(tmp_path, [LearningRateMonitor()])


class Data(LightningDataModule):
    def __init__(self, classes=3):
        super().__init__()
        self.save_hyperparameters()
        self.classes, self.prepared = classes, 0

    def prepare_data(self):
        self.prepared += 1

    def setup(self, stage):
        self.whole = TensorDataset(*samples("all", "train", 60))

    def train_dataloader(self):
        return DataLoader(self.whole, batch_size=5, shuffle=True)


class Looks(Toy):
    """Reads the data module in `setup`, as modules do that size a layer or a schedule by it."""

    seen: list = []

    def setup(self, stage):
        data = self.trainer.datamodule
        assert isinstance(data, Data) and data.hparams.classes == data.classes == 3
        if stage == "fit":
            self.seen.append((len(data.train_dataloader().dataset), self.trainer.log_dir, self.logger.save_dir))


@pytest.mark.parametrize("loop", ["fast", "trainer"])
def test_a_module_sees_the_data_module_with_the_clients_loaders(tmp_path, loop):
    Looks.seen = []
    data = Data()
    trainer = make_trainer(tmp_path, max_rounds=1, local_loop=loop)
    trainer.fit(Looks(), Partitioned(data, IIDPartitioner(3), labels=lambda dataset: dataset.tensors[1].numpy()))
    folders = [str(trainer.run.path / "clients" / client) for client in ("0", "1", "2")]
    sizes = [trainer.federation.server.num_samples[client] for client in ("0", "1", "2")]
    visits, run = [(size, folder, folder) for size, folder in zip(sizes, folders, strict=True)], str(trainer.run.path)
    assert [one for one in Looks.seen if one[1] != run] == visits
    assert {size for size, folder, _ in Looks.seen if folder == run} == set(sizes)  # while it is scored
    assert data.prepared == 1 and not (trainer.run.path / "clients").exists()


class Weighted(Toy):
    """Weights classes by how often they are in the client's training data, which `setup` counts."""

    stages: tuple = ("fit", "validate", "test")

    def setup(self, stage):
        if stage in self.stages:
            labels = torch.cat([batch[1] for batch in self.trainer.datamodule.train_dataloader()])
            self.weights = 1 / (1 + torch.bincount(labels, minlength=3).float())

    def score(self, batch, split):
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1], weight=self.weights, reduction="sum")
        self.log(f"{split}_loss", loss, reduce_fx="sum")
        self.log(f"{split}_weight", self.weights.sum(), reduce_fx="max")


class WeightedInFit(Weighted):
    stages = ("fit",)


@pytest.mark.parametrize("kind", [Weighted, WeightedInFit])
@pytest.mark.parametrize("loop", ["fast", "trainer"])
def test_modules_that_read_their_data_in_setup_are_scored_as_they_are_trained(kind, loop):
    torch.manual_seed(0)
    data = toy_data([30, 41], shuffle=False)
    trainer = make_trainer(None, max_rounds=1, evaluation=1, local_loop=loop, sanity_check=True)
    trainer.fit(kind(), data)
    trainer.test(verbose=False)
    counts = {client: torch.bincount(data.tensors[client]["train"][1], minlength=3).float() for client in "01"}
    counts["all"] = counts["0"] + counts["1"]
    found = [
        row for row in trainer.rows if row.metric.endswith("_weight") and (row.data == "local" or row.stage == "G")
    ]
    assert {row.stage for row in found} == {"G", "L1", "L2"} and {"0", "1", "all"} <= {row.client for row in found}
    for row in found:
        assert row.value == pytest.approx(float((1 / (1 + counts[row.client])).sum())), row
    assert not trainer.server.failures
