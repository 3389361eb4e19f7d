"""Phases beyond the task: public data and losses of their own, in both local loops, engines and a resumed run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedlightning.algorithm import FederatedCallback, Phase, Wire, equal
from fedlightning.callbacks.shared.distillation import kl, logits_of
from fedlightning.testing.toys import ToyData, federate
from fedlightning.visit.client import Client


class Digest(FederatedCallback):
    """FedMD-like: every client digests the mean logits of the last round on public samples, then trains."""

    def __init__(self, count: int = 6, federated: bool = False, epochs: int = 2) -> None:
        self.count, self.federated, self.epochs = count, federated, epochs

    def wire(self, module):
        return Wire(down={"ids": (-1,), "known": (-1,), "logits": (-1, -1)}, up={"logits": (-1, -1)})

    def on_broadcast(self, server, job, message):
        own = server.state.get(self.key, {})
        message.extras[self.key] = {"ids": server.public_ids(self.count), **own.get("mean", {})}

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
        server.state[self.key] = {"mean": {"known": server.public_ids(self.count), "logits": mean}}


def run(root: Path, callback: FederatedCallback | None = None, **arguments: Any) -> Any:
    return federate(callback or Digest(), ToyData(), root, **arguments).federation


def test_digest_changes_training_and_counts_as_own_steps(tmp_path: Path) -> None:
    with_digest, without = run(tmp_path / "a"), run(tmp_path / "b", Digest(epochs=1))
    assert not equal(with_digest.server.model, without.server.model)
    record = with_digest.store.get("site0")
    assert record.steps == 3  # the digest's are not the federation's
    assert with_digest.server.spent["own_steps"] == 4 * 2 * 2 * 2  # clients, rounds with logits, epochs, batches


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
@pytest.mark.parametrize("federated", [False, True])
def test_both_loops_give_the_same_bits(tmp_path: Path, arguments: dict[str, Any], federated: bool) -> None:
    fast, slow = (
        run(tmp_path / loop, Digest(federated=federated), local_loop=loop, max_rounds=2, **arguments)
        for loop in ("fast", "trainer")
    )
    assert equal(fast.server.model, slow.server.model)
    assert fast.engine.runner.loop.used == "fast"


def test_processes_give_the_bits_of_sequential(tmp_path: Path) -> None:
    one, other = run(tmp_path / "a"), run(tmp_path / "b", engine="processes", workers=2)
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
        if not client.steps:
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
