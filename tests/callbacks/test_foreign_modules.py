"""Modules that nobody here wrote, with every algorithm: Lightning's demos, a tutorial in three styles, timm."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel, DemoModel, RandomDataset
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from fedlightning.callbacks import (
    APFL,
    FENDA,
    FLIU,
    SCAFFOLD,
    Central,
    FedAdam,
    FedAvg,
    FedBN,
    FedPer,
    FedProx,
    Local,
    PLayerFL,
    PLayerFLRandom,
)
from fedlightning.catalogue import list_algorithms
from fedlightning.tensors import module_state, select
from tests.helpers import FEATURES, ToyData, differs, make_trainer, mean_of, same, samples, spied

# -- a tutorial's classifier, as three people would write it ----------------------------------------------------------


class Tutorial(LightningModule):
    """What all three have in common. The metric is a submodule; the optimizer is theirs."""

    HEAD = "net.fc"

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build(nn.BatchNorm1d(8) if norm else nn.Identity())
        self.accuracy = MulticlassAccuracy(3)

    def build(self, norm):
        self.net = nn.Sequential()
        for name, part in (
            ("conv", nn.Linear(FEATURES, 8)),
            ("norm", norm),
            ("act", nn.ReLU()),
            ("fc", nn.Linear(8, 3)),
        ):
            self.net.add_module(name, part)

    def predict(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.predict(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.predict(x)
        self.accuracy(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


class ThroughSelf(Tutorial):
    def forward(self, x):
        return self.net(x)

    def predict(self, x):
        return self(x)


class ThroughNet(Tutorial):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


class ThroughLayers(Tutorial):
    HEAD = "classifier"

    def build(self, norm):
        self.classifier = nn.Linear(8, 3)
        self.bn = norm
        self.embed = nn.Linear(FEATURES, 8)

    def predict(self, x):
        return self.classifier(F.relu(self.bn(self.embed(x))))

    def configure_optimizers(self):
        groups = [
            {"params": self.embed.parameters()},
            {"params": [*self.bn.parameters(), *self.classifier.parameters()]},
        ]
        return [torch.optim.AdamW(groups, lr=0.02)]


class Timm(Tutorial):
    """``self.model`` is timm's, called as ``self.model(x)``."""

    def __init__(self, name: str, head: str, size: int) -> None:
        self.name, self.HEAD, self.size = name, f"model.{head}", size
        super().__init__()

    def build(self, norm):
        import timm

        self.model = timm.create_model(self.name, pretrained=False, num_classes=3, in_chans=1)

    def predict(self, x):
        return self.model(x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.01)


SIZES = {"a": 12, "b": 20}


def data_of(module):
    tensors = {}
    for client, size in SIZES.items():
        counts = {"train": size, "val": 6, "test": 4}
        tensors[client] = {split: samples(client, split, count) for split, count in counts.items()}
        if isinstance(module, Timm):
            for split, (x, y) in tensors[client].items():
                images = x.repeat(1, module.size * module.size // FEATURES + 1)[:, : module.size**2]
                tensors[client][split] = (images.reshape(-1, 1, module.size, module.size), y)
    return ToyData(tensors, batch_size=4)


ALGORITHMS = {
    "FedAvg": lambda module: FedAvg(),
    "FedProx": lambda module: FedProx(),
    "SCAFFOLD": lambda module: SCAFFOLD(option=1),
    "FedAdam": lambda module: FedAdam(),
    "FedPer": lambda module: FedPer(personal=[module.HEAD]),
    "FedBN": lambda module: FedBN(),
    "APFL": lambda module: APFL(),
    "APFL by logits": lambda module: APFL(mix="logits"),
    "FENDA": lambda module: FENDA(module.HEAD),
    "FLIU": lambda module: FLIU(),
    "PLayerFL": lambda module: PLayerFL(clamp=True),
    "PLayerFLRandom": lambda module: PLayerFLRandom(),
    "Local": lambda module: Local(),
    "Central": lambda module: Central(),
}


def has_batch_norm(module):
    return any(name.endswith("running_var") for name in module.state_dict())


def expected_on_the_wire(name, module, trainer):
    """What may go up in the last round."""
    everything = list(trainer.server.kinds)
    norms = [path for path, child in module.named_modules() if isinstance(child, nn.modules.batchnorm._BatchNorm)]
    private = {
        "FedPer": (module.HEAD,),
        "FedBN": tuple(norms),
        "FENDA": (module.HEAD, "local_extractor"),
        "PLayerFL": tuple(trainer.server.state.get("PLayerFL", {}).get("personal", ())),
        "PLayerFLRandom": tuple(trainer.server.state.get("PLayerFLRandom", {}).get("personal", ())),
        "Local": tuple(everything),
    }.get(name, ())
    return {entry for entry in everything if not any(entry == p or entry.startswith(f"{p}.") for p in private)}


def check(name, module, rounds=2):
    """One run: it trains, it is scored, it sends what it may, and running statistics stay sane."""
    algorithm = ALGORITHMS[name](module)
    refused = {
        "FedBN": None if has_batch_norm(module) else "has no BatchNorm layer. Remove FedBN",
        "APFL by logits": None if isinstance(module, ThroughSelf) else r"training_step does not call self\(x\)",
    }.get(name)
    if refused:
        with pytest.raises(ValueError, match=refused):
            spied(module, data_of(module), [algorithm], max_rounds=rounds)
        return
    trainer, spy = spied(module, data_of(module), [algorithm], max_rounds=rounds, evaluation=rounds)
    server = trainer.server
    wire = expected_on_the_wire(name, module, trainer)
    last = [update for update in spy.updates if update.round == rounds - 1]
    assert len(last) == (1 if name == "Central" else 2) and all(update.steps > 0 for update in last)
    assert all(set(update.state) == wire for update in last)
    assert bool(wire) == (name != "Local") and (name in ("FedPer", "FedBN", "FENDA", "PLayerFL", "PLayerFLRandom")) == (
        0 < len(wire) < len(server.kinds)
    )
    start = module_state(server.blueprint.build("server"))
    trainable = set(server.trainable)
    for client in SIZES:
        state = module_state(trainer.module(client))
        moved = [entry for entry in trainable if entry in state and not torch.equal(state[entry], start[entry])]
        assert len(moved) >= 0.5 * len(trainable)
        assert module.HEAD + ".weight" in moved
        for entry, value in state.items():
            assert not entry.endswith("running_var") or bool((value > 0).all()), entry
    shared_buffers = {entry for entry in wire if server.kinds[entry] == "float_buffer"}
    if shared_buffers and name != "Central":
        weights = {u.client: 1.0 if name in ("SCAFFOLD", "FLIU") else SIZES[u.client] for u in last}
        mean = select(mean_of({u.client: u for u in last}, weights), shared_buffers)
        same(select(server.model, shared_buffers), mean)
        assert differs(mean, start)
    if name == "FedBN":
        assert not shared_buffers
        a, b = (module_state(trainer.module(client)) for client in SIZES)
        kept = [entry for entry in a if entry.endswith("running_mean")]
        assert kept and all(not torch.equal(a[entry], b[entry]) for entry in kept)
    rows = {(row.stage, row.client, row.metric) for row in trainer.rows if row.split == "val"}
    personal = name in ("FedPer", "FedBN", "FENDA", "PLayerFL", "PLayerFLRandom", "Local")
    for client in SIZES:
        for metric in ("val_loss", "val_acc"):
            assert ("L1", client, metric) in rows
            assert (("G", client, metric) in rows) != personal
            assert ("L2", client, metric) in rows or name == "Central"
    assert all(row.value == row.value for row in trainer.rows)


@pytest.mark.parametrize(
    "norm", [pytest.param(False, id="plain", marks=pytest.mark.slow), pytest.param(True, id="batch norm")]
)
@pytest.mark.parametrize("style", [ThroughSelf, ThroughNet, ThroughLayers], ids=lambda style: style.__name__)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_tutorial_in_three_styles(name, style, norm):
    check(name, style(norm))


needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")


@needs_timm
@pytest.mark.parametrize(
    "name",
    [name if name == "FENDA" else pytest.param(name, marks=pytest.mark.slow) for name in ALGORITHMS],
)
def test_a_small_timm_model(name):
    check(name, Timm("test_resnet", "fc", 16), rounds=2 if "PLayerFL" in name else 1)


@needs_timm
@pytest.mark.slow
@pytest.mark.parametrize(("model", "head"), [("resnet18", "fc"), ("mobilenetv3_small_050", "classifier")])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_timm_models(name, model, head):
    check(name, Timm(model, head, 32))


# -- Lightning's own demos ---------------------------------------------------------------------------------------------

DEMOS = {
    "BoringModel": (BoringModel, 32),
    "DemoModel": (DemoModel, 32),
}


class OfTensors(RandomDataset):
    """Batches are bare tensors, as these modules want them."""


def run_demo(kind, callbacks):
    module, width = DEMOS[kind][0](), DEMOS[kind][1]
    trainer = make_trainer(None, callbacks, max_rounds=2, evaluation=2)
    loaders = {
        split: {client: DataLoader(OfTensors(width, size), batch_size=4) for client, size in SIZES.items()}
        for split in ("train", "val")
    }
    trainer.fit(module, train_dataloaders=loaders["train"], val_dataloaders=loaders["val"])
    return module, trainer


@pytest.mark.parametrize("kind", DEMOS)
@pytest.mark.parametrize(
    "callback",
    [FedAvg(), FedProx(), SCAFFOLD(option=1), FedAdam(), APFL(), APFL(mix="logits"), FLIU(), Local(), Central()],
    ids=["FedAvg", "FedProx", "SCAFFOLD", "FedAdam", "APFL", "APFL by logits", "FLIU", "Local", "Central"],
)
def test_demos(kind, callback):
    module, trainer = run_demo(kind, [callback])
    for client in SIZES:
        assert differs(module_state(trainer.module(client)), module_state(module))
    if kind == "BoringModel":  # DemoModel has no validation_step
        assert {row.client for row in trainer.rows if row.split == "val"} >= set(SIZES)


@pytest.mark.parametrize("kind", DEMOS)
@pytest.mark.parametrize(
    ("callback", "sentence"),
    [
        (PLayerFL(), r"PLayerFL decides layer by layer, but \w+Model has 1 layer. Use FedAvg"),
        (PLayerFLRandom(), r"PLayerFLRandom decides layer by layer, but \w+Model has 1 layer"),
        (FedPer(), "FedPer leaves nothing to share"),
        (FedBN(), "has no BatchNorm layer"),
        (FENDA(), r"FENDA needs to know the head of \w+Model. Set head="),
    ],
    ids=lambda value: value.key if isinstance(value, FedAvg.__mro__[1]) else "",
)
def test_demos_have_one_layer(kind, callback, sentence):
    with pytest.raises(ValueError, match=sentence):
        run_demo(kind, [callback])


@pytest.mark.parametrize(("kind", "head"), [("BoringModel", "layer"), ("DemoModel", "l1")])
def test_demos_have_no_extractor(kind, head):
    with pytest.raises(ValueError, match=rf"FENDA needs an extractor and a head, but all parameters of {kind} are in"):
        run_demo(kind, [FENDA(head)])


def test_every_algorithm_of_the_first_catalogue_is_here():
    here = {name.partition(" ")[0] for name in ALGORITHMS} | {"FedSGD"}
    assert here <= set(list_algorithms())
