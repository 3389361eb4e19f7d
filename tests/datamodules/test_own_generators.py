"""Random generators of samplers and datasets: no visit goes on with those of another, and checks leave them alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import fedlightning
from fedlightning.datamodules.sampling import going_on, reseed_loader, seed_in_workers
from fedlightning.options import Processes
from tests.helpers import Toy, differs, global_state, make_trainer, mostly_slow, same

SIZE = 20


def data(client):
    torch.manual_seed(client)
    return TensorDataset(torch.randn(SIZE, 6), torch.randint(3, (SIZE,)))


def generator():
    return torch.Generator().manual_seed(5)


SAMPLERS = {
    "weighted": lambda: WeightedRandomSampler(torch.arange(1, SIZE + 1.0), SIZE, generator=generator()),
    "subset": lambda: SubsetRandomSampler(range(3, 19), generator=generator()),
    "replacement": lambda: RandomSampler(range(SIZE), replacement=True, generator=generator()),
}


class Noisy(Dataset):
    """Adds noise from a generator of its own."""

    def __init__(self, client):
        self.data, self.noise = data(client), torch.Generator().manual_seed(client)

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + torch.randn(6, generator=self.noise), y


def fitted(folder, rounds, loaders, resume=None, module=Toy, **options):
    trainer = make_trainer(folder, max_rounds=rounds, **options)
    trainer.fit(module(), train_dataloaders=loaders, resume=resume)
    return trainer


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_run_with_a_seeded_sampler_is_resumed_bit_for_bit(tmp_path, kind):
    def loaders():
        return {str(client): DataLoader(data(client), batch_size=6, sampler=SAMPLERS[kind]()) for client in range(2)}

    whole = fitted(tmp_path / "whole", 2, loaders())
    fitted(tmp_path / "parts", 1, loaders())
    same(global_state(whole), global_state(fitted(tmp_path / "parts", 2, loaders(), resume="last")))


def test_a_generator_within_a_batch_sampler_has_an_address():
    batches = BatchSampler(RandomSampler(range(SIZE), generator=generator()), 6, drop_last=True)
    loader = DataLoader(data(0), batch_sampler=batches)

    def order(visit):
        reseed_loader(loader, 0, "a", visit)
        return list(batches)

    first, second = order(1), order(2)
    assert first == order(1) != second


def test_what_no_address_reaches_is_named():
    loader = DataLoader(Noisy(0), batch_size=6, sampler=SAMPLERS["weighted"]())
    assert going_on(loader) == "Noisy.noise"
    assert going_on(DataLoader(data(0), sampler=SAMPLERS["weighted"]())) is None
    with pytest.warns(UserWarning, match=r"client 'a' draws from Noisy.noise, .* goes on from visit to visit"):
        fedlightning.datamodules.LoaderDataModule({"a": loader})


@pytest.mark.filterwarnings("ignore:The training loader of client")
def test_the_sanity_check_draws_nothing_from_a_dataset(tmp_path):
    def result(on):
        loaders = {str(client): DataLoader(Noisy(client), batch_size=6) for client in range(2)}
        return global_state(fitted(tmp_path / str(on), 1, loaders, sanity_check=on))

    same(result(True), result(False))


def test_persistent_workers_end_with_the_visit():
    given = DataLoader(data(0), batch_size=6, shuffle=True, num_workers=1, persistent_workers=True, drop_last=True)
    made = fedlightning.datamodules.LoaderDataModule({"a": given}).client_dataloader("a", "train")
    assert made is not given
    assert made.persistent_workers
    assert (made.batch_size, made.drop_last, made.sampler) == (6, True, given.sampler)


KINDS = {
    "numpy": (lambda: np.random.default_rng(0), lambda own: own.random()),
    "old numpy": (lambda: np.random.RandomState(0), lambda own: own.random_sample()),
    "torch": (lambda: torch.Generator().manual_seed(0), lambda own: float(torch.rand(1, generator=own))),
    "random": (lambda: random.Random(0), lambda own: own.random()),
}


class Augmented(Dataset):
    """Draws from a generator of its own, of one of the kinds there are, inside a transform."""

    def __init__(self, client, kind):
        self.data, self.kind, self.transforms = data(client), kind, [{"own": KINDS[kind][0]()}]

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        x, y = self.data[index]
        return torch.cat([x[:5], torch.tensor([KINDS[self.kind][1](self.transforms[0]["own"])])]), y


class Listening(Toy):
    """Notes what the data drew."""

    def training_step(self, batch, batch_idx):
        drawn.extend(batch[0][:, 5].tolist())
        return super().training_step(batch, batch_idx)


drawn = []


@pytest.mark.parametrize("kind", mostly_slow(KINDS, ["numpy"]))
def test_workers_seed_a_datasets_own_generators_by_address(tmp_path, kind):
    def run(folder, rounds, resume=None, **options):
        drawn.clear()
        loaders = {client: DataLoader(Augmented(0, kind), batch_size=5, num_workers=2) for client in "ab"}
        torch.manual_seed(0)
        trainer = fitted(tmp_path / folder, rounds, loaders, resume, Listening, local_epochs=2, evaluation=0, **options)
        return global_state(trainer), [*drawn]

    whole, draws = run("whole", 2)
    assert len(set(draws)) == len(draws) == 2 * 2 * 2 * SIZE
    same(whole, run("again", 2)[0])
    assert differs(whole, run("seed", 2, seed=1)[0])
    run("parts", 1)
    same(whole, run("parts", 2, resume="last")[0])


def test_a_loaders_own_worker_function_has_the_last_word():
    def own(worker):
        torch.utils.data.get_worker_info().dataset.transforms[0]["own"] = random.Random(7)

    loader = DataLoader(Augmented(0, "random"), batch_size=5, num_workers=1, worker_init_fn=own)
    for _ in range(2):  # once is enough
        seed_in_workers(loader)
    assert float(next(iter(loader))[0][0, 5]) == pytest.approx(random.Random(7).random())


def test_workers_of_other_loaders_stay_as_they_are():
    loader = DataLoader(data(0), num_workers=2)
    seed_in_workers(loader)
    assert loader.worker_init_fn is None


class Mixed:
    """Collates with noise from a generator of its own."""

    def __init__(self):
        self.own = random.Random(0)

    def __call__(self, samples):
        x, y = torch.utils.data.default_collate(samples)
        return x + self.own.random(), y


@pytest.mark.filterwarnings("ignore:The training loader of client")
@pytest.mark.parametrize("owner", ["dataset", "collate_fn", "sampler"])
def test_scores_of_noisy_data_do_not_depend_on_the_engine(tmp_path, owner):
    def rows(**options):
        torch.manual_seed(0)
        trainer = make_trainer(tmp_path / str(options), max_rounds=2, **options)
        trains = {client: DataLoader(data(int(client)), batch_size=6) for client in "012"}
        noisy = Augmented(0, "numpy") if owner == "dataset" else data(0)  # one for all
        options = {"collate_fn": Mixed()} if owner == "collate_fn" else {}
        options |= {"sampler": SAMPLERS["weighted"]()} if owner == "sampler" else {}
        vals = {client: DataLoader(noisy, batch_size=6, **options) for client in "012"}
        trainer.fit(Toy(), train_dataloaders=trains, val_dataloaders=vals)
        return trainer.rows

    alone = rows()
    assert [row.cells for row in alone] == [row.cells for row in rows(engine=Processes(2))]
    stacked = rows(engine="vectorized")
    assert [row.value for row in stacked] == pytest.approx([row.value for row in alone], abs=1e-5, nan_ok=True)
