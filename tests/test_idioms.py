"""Ways to write a LightningModule that nobody here chose: both loops train them alike, and the file opens again."""

from __future__ import annotations

import copy
import threading
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Accuracy, MetricCollection

import fedlightning
from fedlightning.callbacks import APFL, Ditto, pFedMe
from fedlightning.errors import ConfigurationError
from tests.helpers import CLASSES, FEATURES, Toy, make_trainer, mostly_slow, same, toy_data

# isort: split
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, EMAWeightAveraging, RichProgressBar, StochasticWeightAveraging


class Gan(LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.g, self.d = nn.Linear(2, FEATURES), nn.Linear(FEATURES, 1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.g.parameters(), 0.01), torch.optim.Adam(self.d.parameters(), 0.01)

    def training_step(self, batch, batch_idx):
        x = batch[0]
        fake = self.g(torch.randn(len(x), 2))
        for optimizer, loss in zip(
            self.optimizers(),
            (
                lambda: F.softplus(-self.d(fake)).mean(),
                lambda: (F.softplus(-self.d(x)) + F.softplus(self.d(fake.detach()))).mean(),
            ),
            strict=True,
        ):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def validation_step(self, batch, batch_idx):
        self.log("val_real", self.d(batch[0]).mean())


class Metrics(Toy):
    """A MetricCollection in a ModuleDict."""

    def __init__(self):
        super().__init__()
        collection = MetricCollection([Accuracy("multiclass", num_classes=CLASSES)])
        self.of = nn.ModuleDict({name: collection.clone(f"{name}_") for name in ("fit", "val")})

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.log_dict(self.of["fit"](logits, batch[1]), on_step=False, on_epoch=True)
        return {"loss": F.cross_entropy(logits, batch[1]), "more": 1}

    def validation_step(self, batch, batch_idx):
        self.of["val"].update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self):
        self.log_dict(self.of["val"].compute())
        self.of["val"].reset()


class Warmup(Toy):
    """Its own `optimizer_step`, and batches changed on their way."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 3)
        optimizer.step(closure=optimizer_closure)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return (batch[0] + (0.1 if self.trainer.training else 0.0), batch[1])


class Horizon(Toy):
    """A schedule by steps over the length of the fit."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps), "interval": "step"}
        ]


class Late(Toy):
    """Layers made in `configure_model`, with a normalised weight."""

    def make(self, hidden, dropout):
        return None

    def configure_model(self):
        if self.net is None:
            first = nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 8))
            self.net = nn.Sequential(first, nn.ReLU(), nn.Linear(8, CLASSES))


class Spectral(Toy):
    """A matrix of norm 1."""

    def make(self, hidden, dropout):
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 8)), nn.Linear(8, CLASSES))


class Shared(Toy):
    """Tied weights, and one parameter held by two submodules."""

    def make(self, hidden, dropout):
        net = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES))
        net[1].weight = net[0].weight
        net[2].register_parameter("scale", nn.Parameter(torch.ones(1)))
        net[0].register_parameter("scale", net[2].scale)
        return net

    def forward(self, x):
        return self.net(x) * self.net[0].scale


class Buffers(Toy):
    """Complex, integer and temporary buffers; a frozen layer; a step that skips a batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("turn", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.net[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.turn, self.seen = self.turn * 1j, self.seen + 1
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class Clips(Toy):
    """Clips its own gradients."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class Scripted(Toy):
    """A part compiled by torch.jit.script."""

    def make(self, hidden, dropout):
        first = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU())
        return nn.Sequential(torch.jit.script(first), nn.Linear(8, CLASSES))


class Unrolled(Toy):
    """Keeps its hidden state with its graph, and cuts it off in the next step."""

    hidden = None

    def training_step(self, batch, batch_idx):
        before = 0.0 if self.hidden is None else self.hidden[0].detach()
        logits = self(batch[0] + before)
        self.hidden = (logits.mean() * batch[0].mean(0), {"logits": logits})
        return F.cross_entropy(logits, batch[1])


IDIOMS = [Scripted, Unrolled, Gan, Metrics, Warmup, Horizon, Late, Spectral, Shared, Buffers, Clips]


@pytest.mark.parametrize(
    "kind", mostly_slow(IDIOMS, (Scripted, Gan, Warmup, Buffers, Shared)), ids=lambda kind: kind.__name__
)
def test_both_loops_and_the_checkpoint_agree(kind, tmp_path):
    torch.manual_seed(0)
    module, found = kind(), {}
    for loop in ("fast", "trainer"):
        trainer = make_trainer(tmp_path, name=loop, local_loop=loop, local_epochs=2)
        trainer.fit(copy.deepcopy(module), toy_data([20, 28]))
        found[loop] = [(row.metric, row.value) for row in trainer.rows]
    assert found["fast"] == found["trainer"] and found["fast"]
    module.configure_model()
    opened = fedlightning.load(trainer.run.path / "checkpoints" / "global.ckpt", module)
    for name, value in trainer.module().state_dict().items():
        assert torch.equal(opened.state_dict()[name], value), name


@pytest.mark.parametrize("callback", [Ditto(), APFL(), pFedMe()], ids=lambda one: one.key)
def test_what_steps_keep_with_its_graph_hinders_no_method_that_copies_the_module(callback):
    trainer = make_trainer(None, [callback], max_rounds=2)
    trainer.fit(Unrolled(), toy_data([20, 28]))
    assert trainer.rounds_done == 2 and trainer.rows and not trainer.server.failures


class Sample(NamedTuple):
    """A batch with names."""

    x: Tensor
    y: Tensor


class Pairs(Dataset):
    def __init__(self, count: int, form) -> None:
        draw = torch.Generator().manual_seed(count)
        self.x, self.form = torch.randn(count, FEATURES, generator=draw), form

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.form(x=self.x[index], y=(self.x[index].sum() > 0).long())


class Named(Toy):
    def loss(self, batch):
        x, y = (batch.x, batch.y) if isinstance(batch, Sample) else (batch["x"], batch["y"])
        return F.cross_entropy(self(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))


def test_batches_may_be_dicts_or_named_tuples():
    values = []
    for form in (dict, Sample):
        torch.manual_seed(0)
        loaders = {client: DataLoader(Pairs(count, form), batch_size=8) for client, count in (("a", 20), ("b", 28))}
        trainer = make_trainer(None, evaluation=1)
        trainer.fit(Named(), train_dataloaders=loaders, val_dataloaders=loaders)
        values.append([row.value for row in trainer.rows])
    assert values[0] == values[1] and values[0]


class Brings(Toy):
    """Brings its own callback."""

    def __init__(self, callback):
        super().__init__()
        self.callback = callback

    def configure_callbacks(self):
        return self.callback


@pytest.mark.parametrize("average", [StochasticWeightAveraging(0.05, swa_epoch_start=1), EMAWeightAveraging(decay=0.5)])
def test_averages_of_weights_begin_anew_with_the_clocks_of_a_visit(average):
    trainer = make_trainer(None, [average], max_rounds=3, local_epochs=3, evaluation=1)
    trainer.fit(Toy(), toy_data([20]))
    losses = [row.value for row in trainer.rows if (row.stage, row.metric) == ("G", "val_loss")]
    with pytest.raises(ValueError, match="averages the weights of one fit"):
        make_trainer(None, [average], optimizer_state="keep").fit(Toy(), toy_data([8]))
    with pytest.raises(ValueError, match="averages the weights of one fit"):  # one that the module brings along, too
        make_trainer(None, optimizer_state="keep").fit(Brings(average), toy_data([8]))
    assert len(set(losses)) == 3  # an average that goes on by the old clock would undo what each visit trains


class Early(LightningModule):
    """Makes its layers in `setup`."""

    def setup(self, stage):
        self.net = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).sum()


def replaced(layer):
    module = Toy()
    module.net[0] = layer
    return module


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize(
    "make, sentence",
    [
        (Early, r"Early has no parameters.*make them in __init__ or configure_model"),
        (lambda: replaced(nn.LazyLinear(8)), r"layers without a size .'net\.0\.weight'"),
        (lambda: replaced(nn.utils.weight_norm(nn.Linear(FEATURES, 8))), r"'net\.0\.weight' of Toy is computed"),
        (lambda: replaced(nn.utils.spectral_norm(nn.Linear(FEATURES, 8))), r"'net\.0\.weight' of Toy is computed"),
    ],
)
def test_modules_that_cannot_be_copied_are_refused_before_round_1(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_trainer(None).fit(make(), toy_data([8]))


def test_callbacks_of_a_single_fit_are_refused_or_left_out():
    with pytest.raises(ValueError, match="BatchSizeFinder would search"):
        make_trainer(None, [BatchSizeFinder()])
    with pytest.warns(UserWarning, match="RichProgressBar is left out"):
        assert not make_trainer(None, [RichProgressBar()]).ordinary_callbacks


# -- modules that cannot be copied, and models that are made late ------------------------------------------------------
class Locked(Toy):
    """Holds what `copy.deepcopy` cannot take."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Unlocked(Locked):
    """The way out that the refusal names."""

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state):
        vars(self).update(state, lock=threading.Lock())


class LockedLater(Toy):
    """The other way out."""

    def training_step(self, batch, batch_idx):
        self.lock = threading.Lock()
        return super().training_step(batch, batch_idx)


def test_what_cannot_be_copied_is_named_with_ways_out_that_work():
    with pytest.raises(
        ConfigurationError, match=r"Locked cannot be copied for each client: 'lock' is a lock .*__getstate__"
    ):
        make_trainer(None, []).fit(Locked(), datamodule=toy_data())
    models = []
    for kind in (Toy, Unlocked, LockedLater):
        torch.manual_seed(0)
        trainer = make_trainer(None, [], evaluation=1, sanity_check=True)
        trainer.fit(kind(), datamodule=toy_data())
        assert not trainer.server.failures
        models.append(trainer.server.model)
    same(models[0], models[1])
    same(models[0], models[2])


class MadeLate(LightningModule):
    """Its layers depend on its trainer, or on data that there are not yet."""

    def __init__(self, data):
        super().__init__()
        self.data, self.net = data, None

    def configure_model(self):
        if self.net is None:
            source = self.trainer.datamodule.train_dataloader() if self.data else None
            self.net = nn.Linear(FEATURES * self.trainer.world_size, CLASSES if source is None else 1)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_model_that_asks_its_trainer():
    trainer = make_trainer(None, [])
    trainer.fit(MadeLate(data=False), datamodule=toy_data())
    assert trainer.module().net.weight.shape == (CLASSES, FEATURES) and trainer.module()._trainer is None
    with pytest.raises(ConfigurationError, match=r"MadeLate\.configure_model fails .*Give what it needs to __init__"):
        make_trainer(None, []).fit(MadeLate(data=True), datamodule=toy_data())
