"""LightningModules in the styles that users write; importable, so that wrapped ones can be pickled."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

IN, HIDDEN, CLASSES = (1, 6, 6), 8, 3


def network() -> nn.Sequential:
    net = nn.Sequential()
    net.add_module("conv", nn.Conv2d(1, 4, 3, bias=False))
    net.add_module("norm", nn.BatchNorm2d(4))
    net.add_module("relu", nn.ReLU())
    net.add_module("flatten", nn.Flatten())
    net.add_module("hidden", nn.Linear(4 * 16, HIDDEN))
    net.add_module("drop", nn.Dropout(0.1))
    net.add_module("fc", nn.Linear(HIDDEN, CLASSES))
    return net


class Base(LightningModule):
    HEAD = "net.fc"

    def __init__(self, lr: float = 0.05, optim: str = "all") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build()
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.val_accuracy = MulticlassAccuracy(CLASSES)

    def build(self) -> None:
        self.net = network()

    def predict(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def step(self, batch: Any, name: str) -> Tensor:
        x, y = batch
        logits = self.predict(x)
        loss = F.cross_entropy(logits, y)
        accuracy = self.accuracy if name == "train" else self.val_accuracy
        accuracy(logits, y)
        self.log(f"{name}_loss", loss, on_step=False, on_epoch=True)
        self.log(f"{name}_acc", accuracy, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch, "val")

    def body_parameters(self) -> list[nn.Parameter]:
        return [p for n, p in self.named_parameters() if not n.startswith((self.HEAD, "local_extractor"))]

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.get_submodule(self.HEAD).parameters())

    def configure_optimizers(self) -> Any:
        make = lambda params: torch.optim.SGD(params, lr=self.hparams["lr"], momentum=0.9)  # noqa: E731
        match self.hparams["optim"]:
            case "all":
                return make(self.parameters())
            case "list":
                return [make(self.body_parameters() + self.head_parameters())]
            case "groups":
                return make([{"params": self.body_parameters()}, {"params": self.head_parameters(), "lr": 0.01}])
            case "pair":
                optimizer = make(self.body_parameters() + self.head_parameters())
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
            case "dict":
                optimizer = make([*self.body_parameters(), *self.head_parameters()])
                return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
            case "dicts":
                optimizer = make([*self.body_parameters(), *self.head_parameters()])
                return [{"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}]
            case "named":
                return make([(n, p) for n, p in self.named_parameters() if not n.startswith("local_extractor")])
            case "none":
                return None
            case _:  # "head"
                return make(self.head_parameters())


class ThroughForward(Base):
    """Style 1: ``self(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def predict(self, x: Tensor) -> Tensor:
        return self(x)


class ThroughNet(Base):
    """Style 2: ``self.net(x)``, optimizer over ``self.net.parameters()``."""

    def predict(self, x: Tensor) -> Tensor:
        return self.net(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=self.hparams["lr"], momentum=0.9)


class ThroughLayers(Base):
    """Style 3: layer by layer with functional operations between; dict batches; optimizer over body and head."""

    HEAD = "fc"

    def build(self) -> None:
        self.conv1 = nn.Conv2d(1, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.fc = nn.Sequential(nn.Dropout(0.1), nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))

    def predict(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(x.view(x.size(0), -1))

    def step(self, batch: Any, name: str) -> Tensor:
        return super().step((batch["image"], batch["label"]), name)

    def configure_optimizers(self) -> Any:
        body = [*self.conv1.parameters(), *self.bn1.parameters()]
        return torch.optim.SGD([*body, *self.fc.parameters()], lr=self.hparams["lr"], momentum=0.9)


class ThroughParameters(Base):
    """Style 4: functional calls with parameters, a state set in a hook, steps without ``batch_idx``."""

    HEAD = "out"

    def build(self) -> None:
        self.weight = nn.Parameter(torch.randn(HIDDEN, 36) * 0.2)
        self.bias = nn.Parameter(torch.zeros(HIDDEN))
        self.out = nn.Linear(HIDDEN, CLASSES)

    def on_train_start(self) -> None:
        self.scale = torch.tensor(1.0)

    def predict(self, x: Tensor) -> Tensor:
        scale = self.scale if self.training else 1.0
        self.log("scale", float(scale), on_step=False, on_epoch=True)
        assert self.trainer.max_epochs and self.current_epoch < self.trainer.max_epochs
        return self.out(F.relu(F.linear(x.flatten(1), self.weight, self.bias)) * scale)

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return self.step(batch, "train")


class WithCollection(ThroughForward):
    """Metrics in a collection and under two names."""

    def build(self) -> None:
        super().build()
        self.metrics = MetricCollection({"a": MulticlassAccuracy(CLASSES), "b": MulticlassAccuracy(CLASSES)})
        self.alias = self.metrics

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.step(batch, "train")
        self.metrics.update(self.net(batch[0]), batch[1])
        return loss


STYLES: list[type[Base]] = [ThroughForward, ThroughNet, ThroughLayers, ThroughParameters]


class Points(Dataset[Any]):
    def __init__(self, size: int = 48, as_dict: bool = False, sigma: float = 0.3) -> None:
        generator = torch.Generator().manual_seed(3)
        centres = torch.randn(CLASSES, *IN, generator=generator)
        self.y = torch.arange(size) % CLASSES
        self.x = centres[self.y] + sigma * torch.randn(size, *IN, generator=generator)
        self.as_dict = as_dict

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        return {"image": self.x[index], "label": self.y[index]} if self.as_dict else (self.x[index], self.y[index])


def loader(module: LightningModule | type) -> DataLoader[Any]:
    cls = module if isinstance(module, type) else type(module)
    return DataLoader(Points(as_dict=issubclass(cls, ThroughLayers)), batch_size=16)


def batch_for(module: LightningModule) -> Any:
    return next(iter(loader(module)))


def fit(module: LightningModule, epochs: int = 2, validate: bool = True, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"max_epochs": epochs, "accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0}
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(**{**settings, **dict.fromkeys(quiet, False), **options})
    trainer.fit(module, loader(module), loader(module) if validate else None)
    return trainer
