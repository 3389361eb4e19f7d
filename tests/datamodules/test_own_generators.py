"""Random generators of samplers and datasets: no visit goes on with those of another, and checks leave them alone."""

from __future__ import annotations

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
from fedlightning.datamodules.own_generators import going_on, readdress
from tests.helpers import Toy, global_state, make_trainer, same

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


def fitted(folder, rounds, loaders, resume=None, **options):
    trainer = make_trainer(folder, max_rounds=rounds, **options)
    trainer.fit(Toy(), train_dataloaders=loaders, resume=resume)
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
        readdress(loader, 0, "a", visit)
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
