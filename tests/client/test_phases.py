"""Phases beyond the task: public data and losses of their own, in both local loops, engines and a resumed run."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, IterableDataset

from fedlightning import FederatedTrainer
from fedlightning.algorithm import FederatedCallback, Phase, Wire
from fedlightning.callbacks.shared.distillation import kl, logits_of
from fedlightning.client.client import Client
from fedlightning.datamodules.public import public_loader
from fedlightning.engines.attempts import FederationError
from fedlightning.options import Processes
from fedlightning.tensors import equal
from fedlightning.testing.toys import ToyData, ToyModule, federate


class Digest(FederatedCallback):
    """FedMD-like: every client digests the mean logits of the last round on public samples, then trains."""

    def __init__(self, count: int = 6, federated: bool = False, epochs: int = 2) -> None:
        self.count, self.federated, self.epochs = count, federated, epochs

    def wire(self, module):
        return Wire(down={"ids": (-1,), "known": (-1,), "logits": (-1, -1)}, up={"logits": (-1, -1)})

    def on_broadcast(self, server, job, message):
        own = server.state.get(self.key, {})
        message.extras[self.key] = {"ids": server.training.public_ids(self.count), **own.get("mean", {})}

    def local_phases(self, client):
        extras = client.message.extras[self.key]
        if "logits" in extras:
            loader = client.public(extras["known"], targets=extras["logits"], batch_size=4, shuffle=True)
            yield Phase(
                "digest", data=loader, loss=self._loss, work=self.epochs, unit="epochs", federated=self.federated
            )
        yield Phase()

    def _loss(self, client, module, batch, batch_idx):
        samples, targets = batch
        assert targets.device == module.device and module.training
        return kl(targets, logits_of(module, samples), 2.0)

    def on_send(self, client, update):
        ids = client.message.extras[self.key]["ids"]
        update.extras[self.key] = {"logits": client.outputs(client.public(ids), logits_of)}

    def on_update(self, server, update):
        own = server.state.get(self.key, {})
        arrived = {**own.get("arrived", {}), update.client: update.extras[self.key]["logits"]}
        server.state[self.key] = {**own, "arrived": arrived}

    def on_round_end(self, server):
        arrived = server.state[self.key]["arrived"]
        mean = torch.stack([arrived[client] for client in sorted(arrived)]).mean(0)
        server.state[self.key] = {"mean": {"known": server.training.public_ids(self.count), "logits": mean}}


def run(root: Path, callback: FederatedCallback | None = None, **arguments: Any) -> Any:
    return federate(callback or Digest(), ToyData(), root, **arguments).federation


def test_digest_changes_training_and_counts_as_own_steps(tmp_path: Path) -> None:
    with_digest, without = run(tmp_path / "a"), run(tmp_path / "b", Digest(epochs=1))
    assert not equal(with_digest.server.model, without.server.model)
    record = with_digest.store.get("site0")
    assert record.steps == 3  # the digest's are not the federation's
    assert (
        with_digest.server.costs.extra_work["own_steps"] == 4 * 2 * 2 * 2
    )  # clients, rounds with logits, epochs, batches


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"local_steps": None, "local_epochs": 1},
    ],
    ids=str,
)
def test_both_loops_give_the_same_bits(tmp_path: Path, arguments: dict[str, Any]) -> None:
    fast, slow = (
        run(
            tmp_path / loop,
            Digest(federated="gradient_clip_val" in arguments),
            local_loop=loop,
            max_rounds=2,
            **arguments,
        )
        for loop in ("fast", "trainer")
    )
    assert equal(fast.server.model, slow.server.model)
    assert fast.engine.runner.loop.used == "fast"


@pytest.mark.slow
def test_processes_give_the_bits_of_sequential(tmp_path: Path) -> None:
    one, other = run(tmp_path / "a"), run(tmp_path / "b", engine=Processes(2))
    assert equal(one.server.model, other.server.model)


def test_vectorized_digests_client_by_client(tmp_path: Path) -> None:
    one, other = run(tmp_path / "a"), run(tmp_path / "b", engine="vectorized")
    for name, value in one.server.model.items():
        torch.testing.assert_close(other.server.model[name], value)


@pytest.mark.parametrize("optimizer_state", ["reset", "keep"])
def test_resumed_in_the_middle_bit_for_bit(tmp_path: Path, optimizer_state: str) -> None:
    whole = run(tmp_path / "a", max_rounds=4, save_state=1, optimizer_state=optimizer_state)
    run(tmp_path / "b", max_rounds=2, save_state=1, optimizer_state=optimizer_state)
    resumed = run(tmp_path / "b", max_rounds=4, save_state=1, optimizer_state=optimizer_state, resume=True)
    assert equal(whole.server.model, resumed.server.model)


# -- what a phase sees -------------------------------------------------------------------------------------------------
class Phases(FederatedCallback):
    """Yields the phases that a function makes, and notes what a loss sees."""

    def __init__(self, make: Any) -> None:
        self.make = make

    def local_phases(self, client):
        yield from self.make(client)


class Hooked(ToyModule):
    """Has transfer hooks of its own, which know a batch as `(x, y)`."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x + 1, y

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        assert y.dtype == torch.long
        return 2 * x, y


def fitted(root: Path, make: Any, module: LightningModule | None = None, **arguments: Any) -> FederatedTrainer:
    how = {"max_rounds": 1, "local_steps": 2, "evaluation": 0, "save_state": 0, "logger": False, "sanity_check": False}
    how |= arguments
    trainer = FederatedTrainer(
        callbacks=[Phases(make)], default_root_dir=root, enable_progress_bar=False, accelerator="cpu", **how
    )
    trainer.fit(module or ToyModule(), ToyData((12, 7)))
    return trainer


@pytest.mark.parametrize("loop", ["fast", "trainer"])
def test_transfer_hooks_see_the_plain_batch(tmp_path: Path, loop: str) -> None:
    seen = []

    def loss(client, module, batch, batch_idx):
        seen.append((client.id, batch_idx, batch.batch[0], batch.targets))
        return module(batch.batch[0]).square().mean()

    def make(client):
        loader = client.public(torch.tensor([3, 1]), targets=torch.tensor([[3.0], [1.0]]))
        yield Phase("public", data=loader, loss=loss, work=1, federated=False)
        assert client.outputs(loader, lambda module, pair: pair.batch[0][:, :1]).equal(2 * (x[[3, 1], :1] + 1))

    x = ToyData().public_dataloader().dataset.tensors[0]  # type: ignore[attr-defined]
    fitted(tmp_path, make, Hooked(), local_loop=loop)
    assert [(client, index) for client, index, *_ in seen] == [("site0", 0), ("site1", 0)]
    for _, _, inputs, targets in seen:
        assert torch.equal(inputs, 2 * (x[[3, 1]] + 1)) and targets.tolist() == [[3.0], [1.0]]


@pytest.mark.parametrize("loop", ["fast", "trainer"])
def test_training_step_is_not_called_and_nothing_of_the_task_is_logged(tmp_path: Path, loop: str) -> None:
    class Task(ToyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("the task's step")

        def on_train_epoch_end(self) -> None:
            self.log("task", 1.0)

    def make(client):
        yield Phase(data="public", loss=lambda client, module, batch, index: module(batch[0]).square().mean())

    trainer = fitted(tmp_path, make, Task(), local_loop=loop)
    assert not trainer.federation.server.failures and trainer.federation.server.costs.steps == 4


def test_public_data_train_the_task_in_an_addressed_order_of_each_client(tmp_path: Path) -> None:
    def orders(seed: int, loop: str = "fast") -> dict[str, list[list[float]]]:
        found: dict[str, list[list[float]]] = {}

        class Watched(ToyModule):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                found.setdefault(phase[0].id, []).append(batch[0][:, 0].tolist())
                return super().training_step(batch, batch_idx)

        phase: list[Any] = [None]

        def make(client):
            phase[0] = client
            yield Phase(data="public", work=2, unit="epochs")

        fitted(tmp_path / f"{seed}{loop}{len(found)}", make, Watched(), seed=seed, local_loop=loop)
        return found

    one = orders(0)
    assert one == orders(0, "trainer")
    first, second = one["site0"][:2], one["site0"][2:]
    assert sorted(chain(*first)) == sorted(chain(*second)) and len(list(chain(*first))) == 10
    assert first != second  # epochs draw orders of their own
    assert one["site0"] != one["site1"] and one != orders(1)


def test_outside_a_fit_the_order_is_addressed_and_the_global_generator_is_left_alone(tmp_path: Path) -> None:
    found: dict[tuple[str, int], list[float]] = {}

    def make(client):
        before = torch.get_rng_state()
        loaders = [client.public(shuffle=True) for _ in range(2)]
        one, other = ([value for x, _ in loader for value in x[:, 0].tolist()] for loader in loaders)
        client.outputs(loaders[0], lambda module, batch: module(batch[0]) + torch.rand(()))
        assert one == other and client.public_size == 10
        assert torch.equal(torch.get_rng_state(), before)
        found[client.id, client.round] = one
        yield Phase()

    fitted(tmp_path, make, max_rounds=2)
    assert len({tuple(order) for order in found.values()}) == 4


def test_weights_are_those_of_the_own_samples(tmp_path: Path) -> None:
    def make(client):
        yield Phase("public", data="public", federated=False)
        yield Phase()

    sizes = {}

    class Sizes(FederatedCallback):
        def on_update(self, server, update):
            sizes[update.client] = update.num_samples

    trainer = FederatedTrainer(
        callbacks=[Phases(make), Sizes()],
        default_root_dir=tmp_path,
        max_rounds=1,
        local_steps=2,
        logger=False,
        enable_progress_bar=False,
        accelerator="cpu",
        save_state=0,
        evaluation=0,
    )
    trainer.fit(ToyModule(), ToyData((12, 7)))
    assert sizes == {"site0": 12, "site1": 7}


class Manual(ToyModule):
    """Optimizes inside `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("phase", "module", "words"),
    [
        ({"loss": lambda client, module, batch, index: module(batch[0])}, ToyModule, "return a tensor with one number"),
        ({"loss": lambda client, module, batch, index: None}, ToyModule, "is a NoneType"),
        ({"loss": lambda client, module, batch, index: None}, Manual, "Manual optimizes manually"),
        ({"data": DataLoader([])}, ToyModule, "has no batch to train on"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, phase: dict[str, Any], module: Any, words: str) -> None:
    with pytest.raises(FederationError, match=words):
        fitted(tmp_path, lambda client: iter([Phase(**phase)]), module(), failures="stop")


def test_a_phase_says_what_it_takes() -> None:
    with pytest.raises(ValueError, match="use 'train', 'public', or a DataLoader"):
        Phase(data="val")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give a function"):
        Phase(loss=0.5)  # type: ignore[arg-type]


def test_iterable_public_data_are_refused_at_the_door(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(torch.zeros(3, 6))

    class Streaming(ToyData):
        def public_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Stream(), batch_size=2)

    with pytest.raises(ValueError, match="public data of Streaming are a Stream, whose samples have no position"):
        public_loader(Streaming().public_dataloader(), "Streaming")
    told = []

    def make(client):
        for ask in (client.public, client.public_batches):
            with pytest.raises(ValueError, match="no position"):
                ask()
            told.append(client.id)
        yield Phase()

    trainer = FederatedTrainer(
        callbacks=[Phases(make)], default_root_dir=tmp_path, max_rounds=1, logger=False, enable_progress_bar=False
    )
    trainer.fit(ToyModule(), Streaming((12,)))
    assert told == ["site0", "site0"]


class Weighs(FederatedCallback):
    """Trains on a row for each sample of its own."""

    def wire(self, module):
        return Wire(up={"seen": (-1,), "net": "tensors"})

    def local_phases(self, client):
        yield Phase(data=client.samples(torch.arange(client.num_samples).float()[:, None]), loss=self._loss)

    def _loss(self, client, module, paired, batch_idx):
        client.scratch.setdefault("rows", []).append(paired.targets[:, 0])
        client.scratch.setdefault("x", []).append(paired.batch[0])
        return module(paired.batch[0]).square().mean()

    def on_send(self, client, update):
        if not client.contributed:
            return
        x = torch.cat([batch[0] for batch in client.samples()])
        numbers = torch.cat(client.scratch["rows"]).long()
        assert torch.equal(x[numbers], torch.cat(client.scratch["x"]))
        update.extras[self.key] = {"seen": numbers, "net": {"any": torch.zeros(2, 2), "shape": torch.zeros(1)}}

    def on_update(self, server, update):
        own = server.state.get(self.key, {})
        server.state[self.key] = {**own, update.client: update.extras[self.key]["seen"]}


def test_own_samples_keep_their_numbers_and_rows_follow_them(tmp_path: Path) -> None:
    federation = run(tmp_path, Weighs(), max_rounds=1, local_steps=None, local_epochs=2)
    seen = federation.server.state["Weighs"]["site0"].tolist()
    assert sorted(seen[:12]) == sorted(seen[12:]) == list(range(12)) != seen[:12] != seen[12:]


def test_tensors_of_an_extra_are_tensors(tmp_path: Path) -> None:
    class Wrong(Weighs):
        def on_send(self, client, update):
            update.extras[self.key] = {"net": {"any": 3.0}}

    with pytest.raises(Exception, match=r"declares 'net' as 'tensors' but sends dict"):
        run(tmp_path, Wrong(), max_rounds=1)


def test_own_samples_without_numbers_are_refused() -> None:
    client = SimpleNamespace(id="a", loader=lambda split: None)
    with pytest.raises(ValueError, match=r"client.samples\(split='val'\): client 'a' has no samples"):
        Client.samples(client, split="val")  # type: ignore[arg-type]
    client.loader = lambda split: iter([1])
    with pytest.raises(ValueError, match=r"client 'a' has samples without a number"):
        Client.samples(client)  # type: ignore[arg-type]


def test_two_phases_of_a_name_are_refused():
    """The name is the address of their batches, and of what covers these."""

    class Twice(FederatedCallback):
        def local_phases(self, client):
            yield Phase("one", work=1)
            yield Phase("one", work=1)

    with pytest.raises(FederationError, match="two phases of the visit are named 'one'"):
        federate(Twice(), ToyData(), None, max_rounds=1)
