"""Tiny modules, tiny data and a short way to federate them, for tests all over the tree."""

from __future__ import annotations

import copy
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fedlightning  # noqa: F401  before lightning
from fedlightning.algorithm import Facts

# isort: split
from lightning.pytorch import Callback, LightningModule, Trainer

from fedlightning import FederatedCallback, FederatedTrainer
from fedlightning.client.record import ClientRecord
from fedlightning.contract import Job
from fedlightning.contract.messages import Message, Update
from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.seeding import generator, seed_all
from fedlightning.server.server import Server
from fedlightning.tensors import State, clone, module_state

FEATURES, CLASSES = 6, 3


# -- cases ---------------------------------------------------------------------------------------------------------


def mostly_slow(values: Iterable[Any], always: Container[Any]) -> list[Any]:
    """Parameters of a test of which few run always, and the others, which say the same of another case, if asked for.

    Args:
        values: One parameter each; a tuple holds several.
        always: Those that run always; for paths, their stems.
    """
    return [
        value
        if getattr(value, "stem", value) in always
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]


# -- modules -------------------------------------------------------------------------------------------------------


class Toy(LightningModule):
    """A classifier of six numbers into three classes that calls ``self(x)``.

    ``optimizer``: sgd | momentum | adam | adamw | steplr | onecycle; ``dropout`` between the layers.
    """

    def __init__(self, optimizer: str = "sgd", lr: float = 0.1, dropout: float = 0.0, hidden: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.optimizer_name, self.lr = optimizer, lr
        self.net = self.make(hidden, dropout)

    def make(self, hidden: int, dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def logits(self, x: Tensor) -> Tensor:
        return self(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.logits(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.score(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.score(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.logits(batch[0]).argmax(-1)

    def score(self, batch: Any, split: str) -> None:
        x, y = batch
        logits = self.logits(x)
        self.log(f"{split}_loss", F.cross_entropy(logits, y))
        self.log(f"{split}_acc", (logits.argmax(-1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "adam":
            return torch.optim.Adam(self.parameters(), self.lr)
        if self.optimizer_name == "adamw":
            return torch.optim.AdamW(self.parameters(), self.lr, weight_decay=0.1)
        momentum = 0.0 if self.optimizer_name == "sgd" else 0.9
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=momentum)
        if self.optimizer_name == "steplr":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)]
        if self.optimizer_name == "onecycle":
            steps = int(self.trainer.estimated_stepping_batches)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
        return optimizer


class NetStyle(Toy):
    """Steps call ``self.net(x)``, not ``self(x)``."""

    def logits(self, x: Tensor) -> Tensor:
        return self.net(x)


class PiecesStyle(Toy):
    """Steps call the submodules one by one; there is no useful ``forward``."""

    def make(self, hidden: int, dropout: float) -> nn.Module:
        return nn.ModuleDict({"body": nn.Linear(FEATURES, hidden), "head": nn.Linear(hidden, CLASSES)})

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("forward is not what this module uses")

    def logits(self, x: Tensor) -> Tensor:
        return self.net["head"](torch.relu(self.net["body"](x)))


class NormNet(Toy):
    """With batch normalisation: float and integer buffers."""

    def make(self, hidden: int, dropout: float) -> nn.Module:
        activation = nn.Sequential(nn.ReLU(), nn.Dropout(dropout))
        return nn.Sequential(
            nn.Linear(FEATURES, hidden), nn.BatchNorm1d(hidden), activation, nn.Linear(hidden, CLASSES)
        )


class Quadratic(LightningModule):
    """``1/2 sum_j a_j (w_j - b_j)^2`` in float64; a batch holds rows ``(a, b)``. Everything has a closed form."""

    def __init__(self, lr: float = 0.1, size: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b = batch
        return 0.5 * (a * (self.w - b).square()).sum(-1).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


STYLES = (Toy, NetStyle, PiecesStyle)


# -- data ----------------------------------------------------------------------------------------------------------


class ToyData(IndexedFederatedDataModule):
    """Clients of given sizes; each one's samples depend on its id only, whatever the order of the clients.

    Args:
        tensors: per client id and split, the arrays of its samples.
        shuffle: whether training batches are shuffled.
    """

    def __init__(
        self,
        tensors: Mapping[str, Mapping[str, Sequence[Tensor]]],
        batch_size: int = 8,
        drop_last: bool = False,
        shuffle: bool = True,
    ) -> None:
        super().__init__(batch_size=batch_size, drop_last=drop_last)
        self.tensors, self.shuffle = tensors, shuffle

    def build(self) -> tuple[list[str], dict[str, Split]]:
        splits = {}
        for split in ("train", "val", "test"):
            parts = [client[split] for client in self.tensors.values()]
            joined = [torch.cat(arrays) for arrays in zip(*parts, strict=True)]
            ends = torch.tensor([len(part[0]) for part in parts]).cumsum(0).tolist()
            indices = [torch.arange(end - len(part[0]), end).numpy() for end, part in zip(ends, parts, strict=True)]
            labels = joined[-1].numpy() if joined[-1].dtype == torch.int64 else None
            splits[split] = Split(TensorDataset(*joined), indices, labels, shuffle=self.shuffle)
        return list(self.tensors), splits


def samples(client: str, split: str, count: int, skew: float = 1.0) -> tuple[Tensor, Tensor]:
    """``count`` learnable samples of a client; clients differ in where their inputs lie."""
    draw = generator("toy", client, split)
    shift = skew * torch.randn(FEATURES, generator=generator("toy", client))
    x = torch.randn(count, FEATURES, generator=draw) + shift
    weights = torch.randn(FEATURES, CLASSES, generator=generator("toy"))
    return x, (x @ weights).argmax(-1)


def toy_data(
    sizes: Sequence[int] | Mapping[str, int] = (24, 40, 16), *, val: int = 10, test: int = 12, **options: Any
) -> ToyData:
    """Data of ``len(sizes)`` clients with so many training samples; ids ``"0"``, ``"1"``, ... unless named."""
    named = dict(sizes) if isinstance(sizes, Mapping) else {str(i): size for i, size in enumerate(sizes)}
    counts = {"train": 0, "val": val, "test": test}
    tensors = {
        client: {split: samples(client, split, size if split == "train" else count) for split, count in counts.items()}
        for client, size in named.items()
    }
    return ToyData(tensors, **options)


def quadratic_data(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], **options: Any) -> ToyData:
    """One sample ``(a_i, b_i)`` per client: its objective is ``1/2 sum_j a_ij (w_j - b_ij)^2``."""
    rows = {
        str(i): tuple(torch.tensor([values], dtype=torch.float64) for values in pair)
        for i, pair in enumerate(zip(a, b, strict=True))
    }
    empty = {i: tuple(t[:0] for t in pair) for i, pair in rows.items()}
    return ToyData({i: {"train": pair, "val": empty[i], "test": empty[i]} for i, pair in rows.items()}, **options)


# -- running -------------------------------------------------------------------------------------------------------

QUIET = {"enable_progress_bar": False, "logger": False}
ACCELERATOR = os.environ.get("FEDLIGHTNING_TEST_ACCELERATOR", "cpu")
"""Where tests train that say nothing of it."""


one_clock = pytest.mark.skipif(
    "FEDLIGHTNING_TEST_CLOCK" in os.environ, reason="OpenSSL reads the machine's clock, which stays as it is"
)
"""Of tests whose TLS reads the machine's clock while Python reads another one."""


def make_trainer(root: str | Path | None, callbacks: Sequence[Callback] = (), **options: Any) -> FederatedTrainer:
    """A trainer without display and loggers; with ``root=None`` nothing is written (and nothing evaluated).

    Without the sanity check, since modules of tests count the calls of their steps.
    """
    given = {"max_rounds": 2, "accelerator": ACCELERATOR, "sanity_check": False} | QUIET | options
    if root is None:
        given = {"evaluation": 0} | given
    trainer = FederatedTrainer(callbacks=list(callbacks), default_root_dir=root or "unused", **given)
    if root is None:  # most tests look at tensors only
        trainer.arguments = {**trainer.arguments, "default_root_dir": None}
    return trainer


def federate(
    module: LightningModule,
    data: Any,
    callbacks: Sequence[Callback] = (),
    root: str | Path | None = None,
    **options: Any,
) -> FederatedTrainer:
    """Fit and return the trainer."""
    resume = options.pop("resume", None)
    trainer = make_trainer(root, callbacks, **options)
    trainer.fit(module, datamodule=data, resume=resume)
    return trainer


def global_state(trainer: FederatedTrainer) -> State:
    """The global model's tensors."""
    assert trainer.server is not None
    return trainer.server.model


class AddressedSeeds(Callback):
    """Gives a plain Lightning Trainer the seeds that a client's visits have."""

    def __init__(self, seed: int, client: str, epochs_per_round: int) -> None:
        self.seed, self.client_id, self.epochs_per_round = seed, client, epochs_per_round

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        round, epoch = divmod(trainer.current_epoch, self.epochs_per_round)
        seed_all(self.seed, round, self.client_id, "fit", epoch)


def plain_fit(
    module: LightningModule, data: Any, client: str, *, epochs_per_round: int = 1, seed: int = 0, **options: Any
) -> State:
    """What ``lightning.Trainer.fit`` makes of a copy of ``module`` with the client's own loader and addressed seeds."""
    data.setup("fit")
    module = copy.deepcopy(module)
    loader = data.client_dataloader(client, "train")
    loader.sampler.start(seed=seed, round=0, epochs_per_round=epochs_per_round)
    trainer = Trainer(
        accelerator=ACCELERATOR,
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[AddressedSeeds(seed, client, epochs_per_round), *options.pop("callbacks", [])],
        **options,
    )
    trainer.fit(module, loader)
    return clone(module_state(module))


T = TypeVar("T")


def part_of(trainer: FederatedTrainer, kind: type[T]) -> T:
    """Return what of a kind is attached to a trainer's federation."""
    assert trainer.server is not None
    return next(part for part in trainer.server.parts if isinstance(part, kind))


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """Assert equality bit for bit, and say where it fails."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype, f"{name}: {value.dtype} and {b[name].dtype}"
        assert torch.equal(value, b[name]), f"{name} differs by {(value.double() - b[name].double()).abs().max():.3g}"


def close(a: Mapping[str, Tensor], b: Mapping[str, Tensor], atol: float = 1e-6, rtol: float = 1e-5) -> None:
    """Assert equality within a tolerance."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(
            value.double(), b[name].double(), atol=atol, rtol=rtol, msg=lambda m, n=name: f"{n}: {m}"
        )


def differs(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """True if any common entry differs."""
    return any(not torch.equal(value, b[name]) for name, value in a.items() if name in b)


class Spy(FederatedCallback):
    """Notes every message and update, and with ``trainer`` set every client's record after each round."""

    facts = Facts(mixes_architectures=True)

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.updates: list[Update] = []
        self.rounds: list[State] = []
        self.records: list[dict[str, ClientRecord]] = []
        self.states: list[dict[str, dict[str, Any]]] = []
        self.trainer: FederatedTrainer | None = None

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        self.messages.append(message)

    def on_update(self, server: Server, update: Update) -> None:
        self.updates.append(update)

    def on_round_end(self, server: Server) -> None:
        self.rounds.append(server.model)
        self.states.append(dict(server.state))
        if self.trainer is not None:
            self.records.append({client: self.trainer.store.get(client) for client in server.clients})

    def of_round(self, number: int) -> dict[str, Update]:
        """The updates of a round by client."""
        return {update.client: update for update in self.updates if update.round == number}


def spied(
    module: LightningModule, data: Any, callbacks: Sequence[Callback] = (), root: Any = None, **options: Any
) -> tuple[FederatedTrainer, Spy]:
    """Fit with a :class:`Spy` in front of the callbacks."""
    spy = Spy()
    trainer = make_trainer(root, [spy, *callbacks], **options)
    spy.trainer = trainer
    trainer.fit(module, datamodule=data)
    return trainer, spy


def mean_of(updates: Mapping[str, Update], weights: Mapping[str, float]) -> State:
    """The weighted mean by hand: float64 sums in the order of the updates, one division, float32."""
    total = sum(weights[client] for client in updates)
    names = next(iter(updates.values())).state
    return {
        name: (sum(update.state[name].double() * weights[c] for c, update in updates.items()) / total).to(like.dtype)
        for name, like in names.items()
        if like.is_floating_point()
    }
