"""What child processes import in these tests: callbacks, models and data that misbehave on purpose; a small config."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import yaml

import fedlightning  # noqa: F401  before lightning

# isort: split
from lightning.pytorch import Callback, LightningModule, Trainer

from fedlightning import FederatedCallback
from fedlightning.callbacks import LocalCheckpoint
from fedlightning.commands.study_options import CLI
from fedlightning.datamodules import DigitsDataModule
from fedlightning.experiments.methods import AUTO
from fedlightning.experiments.plan import Request
from fedlightning.models import Classifier

HERE = "tests.experiments.tiny"
QUICKSTART = str(Path(__file__).parents[2] / "configs/quickstart.yaml")
CALLBACKS = "fedlightning.callbacks"


class Kill(Callback):
    """The process gets SIGKILL at the beginning of the visit number ``visit`` that this file has counted.

    Visits of a dry run, which writes nothing, are not counted.
    """

    def __init__(self, counter: str, visit: int) -> None:
        self.counter, self.visit = counter, visit

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.log_dir is None:
            return
        with Path(self.counter).open("a") as file:
            file.write("x")
        if Path(self.counter).stat().st_size == self.visit:
            os.kill(os.getpid(), signal.SIGKILL)


class Crash(Classifier):
    """Fails in a run, and not in a dry run, which writes nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.log_dir is not None:
            raise KeyError("boom")
        return super().training_step(batch, batch_idx)


class Wrong(Classifier):
    """Fails at once."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise KeyError("no such column")


def surroundings() -> dict[str, Any]:
    """What a process that was forked for a run finds."""
    import gc
    import sys

    import torch

    threads = [path.read_text().strip() for path in Path(f"/proc/{os.getppid()}/task").glob("*/comm")]
    return {
        "imported": {"fedlightning.trainer", "fedlightning.report.build", "torch._dynamo"} <= set(sys.modules),
        "frozen": gc.get_freeze_count() > 100_000,
        "threads of the server": sum(name != "jemalloc_bg_thd" for name in threads),
        "cuda": torch.cuda.is_initialized(),
    }


def is_the_same_library() -> bool:
    """Whether code that imports `pytorch_lightning` gets the classes that federations are made of."""
    import pytorch_lightning

    return pytorch_lightning.LightningModule is LightningModule


class MyAlgorithm(FederatedCallback):
    """Somebody's own."""


class MyCheckpoint(LocalCheckpoint):
    """Somebody's own."""


class SealedTests(DigitsDataModule):
    """Whoever asks for test data gets an error."""

    def client_dataloader(self, client: str, split: str) -> Any:
        self.refuse(split)
        return super().client_dataloader(client, split)

    def pooled_dataloader(self, split: str) -> Any:
        self.refuse(split)
        return super().pooled_dataloader(split)

    def refuse(self, split: str) -> None:
        if split == "test":
            raise RuntimeError("test data were asked for")


def request(files: list[str], **options: Any) -> Request:
    """What was asked for, by the classes of our own command line."""
    return Request(files, CLI, **{"baselines": list(AUTO), "matrix": True, **options})


def small(path: Path, *callbacks: str, model: str = "fedlightning.models.Classifier", **trainer: Any) -> str:
    """Write a configuration of a federation that takes a moment: 3 clients, 90 digits, one layer."""
    names = [name if "." in name else f"{CALLBACKS}.{name}" for name in ("LocalCheckpoint", *callbacks)]
    config = {
        "trainer": {
            "max_rounds": 1,
            "logger": False,
            "enable_progress_bar": False,
            "callbacks": [{"class_path": name} for name in names],
            **trainer,
        },
        "model": {
            "class_path": model,
            "init_args": {
                "net": {
                    "class_path": "fedlightning.models.MLP",
                    "init_args": {"in_features": 64, "hidden": [4], "num_classes": 10},
                },
                "num_classes": 10,
                "lr": 0.1,
            },
        },
        "data": {
            "class_path": "fedlightning.datamodules.DigitsDataModule",
            "init_args": {
                "partitioner": {
                    "class_path": "fedlightning.datamodules.IIDPartitioner",
                    "init_args": {"num_clients": 3},
                },
                "flatten": True,
                "max_train": 90,
                "max_test": 30,
                "batch_size": 16,
            },
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config))
    return str(path)
