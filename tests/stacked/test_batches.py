"""Batches of a stack are those of the clients' own loaders, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import fedlightning  # noqa: F401  before lightning

# isort: split
from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.datamodules.views import ArrayDataset, IndexView
from fedlightning.seeding import address
from fedlightning.stacked import batches as stacked_batches
from fedlightning.stacked.batches import Gatherer, LoaderSource, ResidentSource, resident

SIZES, BATCH = (22, 16, 19), 4
"""In batches of 4: five whole ones and two samples; exactly four; four and three samples."""


def loaders(shared: bool) -> list[DataLoader[Any]]:
    """One for each client: views of one data set, or data of its own."""
    made = []
    for client, size in enumerate(SIZES):
        if shared:
            x, y = POOL
            held = torch.arange(client, client + 3 * size, 3)
            data: Any = IndexView(POOL_SET, held)
        else:
            generator = torch.Generator().manual_seed(client)
            x, y = torch.randn(size, 2, 3, generator=generator), torch.arange(size)
            data = ArrayDataset(x, y)
        sampler = AddressedSampler(size, client=str(client), seed=7)
        made.append(DataLoader(data, batch_size=BATCH, sampler=sampler))
    return made


POOL = torch.randn(80, 2, 3, generator=torch.Generator().manual_seed(9)), torch.arange(80)
POOL_SET = ArrayDataset(*POOL)


def sources(made: Sequence[DataLoader[Any]]) -> list[ResidentSource]:
    found = [resident(loader, len(loader), lambda epoch: (7, epoch)) for loader in made]
    assert all(source is not None for source in found)
    return [source for source in found if source is not None]


def expected(made: Sequence[DataLoader[Any]], epoch: int) -> list[list[list[Tensor]]]:
    """Per client its batches, by its loader."""
    for loader in made:
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    return [[list(batch) for batch in loader] for loader in made]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("block", [1, 2**20])
def test_rows_in_memory_are_gathered_as_the_loaders_would(
    shared: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked_batches, "BLOCK", block)
    made = loaders(shared)
    own, gatherer = sources(made), Gatherer(torch.device("cpu"), lambda batch: batch)
    for epoch in (0, 1):
        correct = expected(made, epoch)
        for source in own:
            source.start_epoch(epoch)
        assert [source.ahead() for source in own] == [5, 4, 4]
        turns = 0
        for batch in gatherer.batches(own, 4):
            for client, batches in enumerate(correct):
                for stacked, single in zip(batch, batches[turns], strict=True):
                    assert torch.equal(stacked[client], single)
            turns += 1
        assert turns == 4
        assert [own[place].peek()[0] for place in (0, 2)] == [4, 3], "each goes on where it is"
        assert own[0].ahead() == own[2].ahead() == 1
        (last,) = gatherer.batches([own[2]], 1)
        assert torch.equal(last[0][0], correct[2][4][0])


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_not_taken_is_still_there(shared: bool) -> None:
    """A stack may stop in the middle of turns that are alike."""
    made = loaders(shared)
    own, gatherer = sources(made), Gatherer(torch.device("cpu"), lambda batch: batch)
    correct = expected(made, 0)
    for source in own:
        source.start_epoch(0)
    with closing(gatherer.batches(own, 4)) as batches:
        for _ in range(2):
            next(batches)
    (third,) = gatherer.batches(own, 1)
    for client, alone in enumerate(correct):
        assert torch.equal(third[1][client], alone[2][1])
    assert torch.equal(Gatherer.one(third, 1)[0], third[0][1:2])


def test_the_generator_of_a_step_has_its_epochs_address() -> None:
    source = sources(loaders(shared=True))[0]
    source.start_epoch(1)
    plain = torch.Generator().manual_seed(address(7, 1))
    torch.empty((), dtype=torch.int64).random_(generator=plain)  # what iterating the loader draws first
    first = torch.rand(3, generator=source.generator)
    assert torch.equal(first, torch.rand(3, generator=plain))
    assert torch.equal(torch.rand(3, generator=source.generator), torch.rand(3, generator=plain)), "it goes on"
    source.start_epoch(0)
    assert torch.equal(torch.rand(2, generator=source.generator), torch.rand(2, generator=_seeded(7, 0)))


def _seeded(*where: object) -> torch.Generator:
    return torch.Generator().manual_seed(address(*where))


def test_a_loader_of_the_users_own_gives_one_batch_at_a_time() -> None:
    made = [DataLoader(ArrayDataset(torch.arange(6.0), torch.arange(6)), batch_size=4) for _ in range(2)]
    own = [LoaderSource(loader, lambda batch: batch, lambda epoch: (7, epoch)) for loader in made]
    for source in own:
        source.start_epoch(0)
    gatherer = Gatherer(torch.device("cpu"), lambda batch: batch)
    assert [source.peek()[0] for source in own] == [4, 4] and own[0].ahead() == 1
    (first,) = gatherer.batches(own, 1)
    assert first[0].tolist() == [[0.0, 1.0, 2.0, 3.0]] * 2
    assert [source.peek()[0] for source in own] == [2, 2]
