"""Clients that are made when they are asked for: nobody else is, and a run is that of the same clients as loaders."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedlightning import FederatedTrainer
from fedlightning.callbacks import Central, FedAvg, FedPer, GlobalCheckpoint
from fedlightning.datamodules import AddressedSampler, LazyClients, LoaderDataModule, SyntheticDataModule
from fedlightning.datamodules.held_out import exclude_clients
from fedlightning.deployment import export as deployed
from fedlightning.errors import DamagedStateError
from fedlightning.options import Evaluation
from fedlightning.resume import state_files as persistence
from fedlightning.tensors import equal
from tests.helpers import Toy


def points(number):
    drawn = torch.Generator().manual_seed(number)

    def part(count):
        return TensorDataset(torch.randn(count, 6, generator=drawn), torch.randint(0, 3, (count,), generator=drawn))

    return {"train": part(8), "val": part(4)}


class Counting(LazyClients):
    """Says who was made."""

    def __init__(self, num_clients, **options):
        super().__init__(num_clients, points, {"train": 8, "val": 4}, batch_size=4, **options)
        self.made = Counter()

    def client(self, number):
        self.made[number] += 1
        return super().client(number)


def fit(data, tmp_path, *callbacks, every=0, **options):
    options = {
        "max_rounds": 2,
        "participation": 3,
        "evaluation": Evaluation(every=every, test_data=[]),
        "save_state": 1,
        **options,
    }
    resume = options.pop("resume", None)
    trainer = FederatedTrainer(
        callbacks=list(callbacks) or [FedAvg()],
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        accelerator="cpu",
        **options,
    )
    torch.manual_seed(0)
    trainer.fit(Toy(), data, resume=resume)
    return trainer


def test_a_hundred_thousand_clients_cost_what_takes_part(tmp_path):
    data = Counting(100_000)
    trainer = fit(data, tmp_path)
    checked = 1 + 1  # one batch of the steps before round 1
    assert sum(data.made.values()) <= 2 * 3 + checked
    assert len(list(trainer.store)) == 6
    run = trainer.run.path
    assert [path.name for path in (run / "checkpoints").rglob("*.ckpt")] == ["global.ckpt"]
    assert len(json.loads((run / "summary.json").read_text())["data"]["clients"]) == 6
    assert trainer.summary["num_clients"] == 100_000
    assert (run / "checkpoints/last/manifest.json").stat().st_size < 20_000


def test_bit_equal_to_the_same_clients_from_loaders(tmp_path):
    def loader(number):
        dataset = points(number)["train"]
        sampler = AddressedSampler(8, str(number))
        return DataLoader(dataset, batch_size=4, sampler=sampler, generator=sampler.generator)

    loaders = LoaderDataModule({str(number): loader(number) for number in range(20)})
    one = fit(Counting(20, keep=1), tmp_path / "lazy", max_rounds=3)
    other = fit(loaders, tmp_path / "loaders", max_rounds=3)
    assert equal(one.server.model, other.server.model)


def test_long_lists_lie_beside_the_manifest_and_the_run_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(persistence, "LONG", 10)
    whole = fit(Counting(30), tmp_path / "whole", max_rounds=3)
    half = fit(Counting(30), tmp_path / "half", max_rounds=3, max_time={"seconds": 0})
    assert half.rounds_done == 1
    last = half.run.last
    manifest = json.loads((last / "manifest.json").read_text())
    name = manifest["extra"]["elsewhere"]["clients"]
    assert "clients" not in manifest["extra"] and json.loads((last / name).read_text())[-1] == "29"
    with pytest.raises(ValueError, match=r"which the run in .* did not train"):
        fit(Counting(31), tmp_path / "half", max_rounds=3, resume="last")
    again = fit(Counting(30), tmp_path / "half", max_rounds=3, resume="last")
    assert again.rounds_done == 3 and equal(again.server.model, whole.server.model)
    (last / name).write_text("[]")
    with pytest.raises(DamagedStateError, match=name):
        fit(Counting(30), tmp_path / "half", max_rounds=4, resume="last")


def test_only_models_of_their_own_have_files_where_clients_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr(deployed, "LINKED", 5)
    plain = fit(Counting(6), tmp_path / "plain").run.path / "checkpoints"
    assert (plain / "global.ckpt").exists() and not list((plain / "clients").iterdir())
    trainer = fit(Counting(6), tmp_path / "own", FedPer(personal=["net.3"]), max_rounds=1)
    assert {path.stem for path in (trainer.run.path / "checkpoints/clients").iterdir()} == set(trainer.store)
    few = fit(Counting(5), tmp_path / "few").run.path / "checkpoints"
    assert len(list((few / "clients").iterdir())) == 5


def test_held_out_clients(tmp_path):
    data = Counting(2000)
    trainer = fit(data, tmp_path, held_out=0.5)
    assert len(trainer.client_ids) == 1000 and len(data.made) <= 6 + 2
    assert exclude_clients(data, ["3"]).common_batches == {"batch_size": 4, "drop_last": False, "shuffle": True}


def test_the_same_samples_again_and_in_another_process():
    data = SyntheticDataModule(num_clients=1000)
    x, y = data.client_dataloader("7", "train").dataset[0]
    other = pickle.loads(pickle.dumps(data))
    assert torch.equal(other.client_dataloader("7", "train").dataset[0][0], x)
    assert not torch.equal(data.client_dataloader("8", "train").dataset[0][0], x) and 0 <= int(y) < 10
    assert data.fingerprint("train") == other.fingerprint("train") != SyntheticDataModule(999).fingerprint("train")
    assert data.fingerprint("train") != SyntheticDataModule(1000, seed=1).fingerprint("train")


def test_other_samples_have_another_fingerprint():
    few, many = SyntheticDataModule(10, samples=20), SyntheticDataModule(10, samples=40)
    assert not torch.equal(few.client(0)["test"].x, many.client(0)["test"].x)  # drawn after the training samples
    assert all(few.fingerprint(split) != many.fingerprint(split) for split in ("train", "val", "test"))
    more = SyntheticDataModule(10, samples=20, test_samples=9)
    assert [few.fingerprint(split) == more.fingerprint(split) for split in ("train", "val", "test")] == [1, 1, 0]


def test_partial_functions_with_other_arguments_are_other_data():
    def data(*args, **options):
        return LazyClients(3, partial(points, *args, **options), {"train": 8})

    prints = [one.fingerprint("train") for one in (data(), data(1), data(shift=1), data(shift=2.0))]
    assert (
        len(set(prints)) == 4
        and data(shift=[0] * 99).name.startswith("points(shift=[0, 0")
        and len(data(shift="a" * 999).name) < 99
    )
    assert data(object()).name == "points(object)"


def test_synthetic_clients_are_as_the_paper_says():
    alike = SyntheticDataModule(50, iid=True, samples=100)
    apart = SyntheticDataModule(50, 1.0, 1.0, samples=100)
    spread = {}
    for name, data in (("alike", alike), ("apart", apart)):
        found = [data.client(number)["train"] for number in range(50)]
        spread[name] = torch.stack([one.x.mean(0) for one in found]).var(0).mean()
        deviation = torch.cat([one.x - one.x.mean(0) for one in found]).std(0)
        assert torch.allclose(deviation, torch.arange(1, 61) ** -0.6, rtol=0.1)
    assert spread["apart"] > 20 * spread["alike"]  # B_k + N(0, 1) beside the mean of 100 points
    assert len({tuple(torch.bincount(alike.client(k)["train"].y, minlength=10).tolist()) for k in range(3)}) == 3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "does not know its clients' data"),
        ({"make": points}, "does not know how many samples"),
        ({"make": points, "sizes": {"train": [1, 2]}}, "3 clients and 2 sizes"),
        ({"make": points, "sizes": {"training": 8}}, "no split 'training'"),
        ({"make": points, "sizes": {"train": 8}, "num_clients": 0}, "num_clients=0"),
        ({"make": points, "sizes": {"train": 8}, "keep": 0}, "keep=0"),
    ],
)
def test_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        LazyClients(**({"num_clients": 3} | options))


def test_what_client_returns_is_checked():
    data = LazyClients(3, points, {"train": 9})
    with pytest.raises(ValueError, match="has 8 samples in its train split, and its size was given as 9"):
        data.client_dataloader("0", "train")
    with pytest.raises(ValueError, match="has 4 samples in its val split, and its size was given as 0"):
        LazyClients(3, points, {"train": 8}).client_dataloader("0", "train")  # else nobody would ever be scored
    with pytest.raises(ValueError, match="Client '1' of LazyClients is a list"):
        LazyClients(3, lambda number: [], {"train": 9}).client_dataloader("1", "train")
    for name in ("3", "-1", "01", "a"):
        with pytest.raises(ValueError, match="the clients are '0' to '2'"):
            data.num_samples(name)


def test_a_method_on_pooled_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Central trains one model on the union"):
        fit(Counting(4), tmp_path, Central())


def test_selection_works_without_a_union(tmp_path, recwarn):
    trainer = fit(Counting(4), tmp_path, GlobalCheckpoint(), every=1)
    assert {row.checkpoint for row in trainer.rows} == {"latest"} and trainer.server.checkpoints
    assert not [warning for warning in recwarn if "GlobalCheckpoint" in str(warning.message)]
