import copy
import pickle

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.datamodules import AddressedSampler


def epochs(sampler, first, count):
    orders = []
    for epoch in range(first, first + count):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return orders


def test_order_is_a_permutation_and_depends_on_every_part_of_the_address():
    def order(client="a", seed=0, round=0, epoch=0):
        sampler = AddressedSampler(50, client)
        sampler.start(seed=seed, round=round)
        sampler.set_epoch(epoch)
        return list(sampler)

    base = order()
    assert sorted(base) == list(range(50)) and base == order()
    others = [order(client="b"), order(seed=1), order(round=1)]
    assert all(other != base for other in others)
    # One epoch a round is the default: the next epoch is the next round's first.
    assert order(epoch=1) == order(round=1)


def test_rounds_of_epochs_equal_one_long_fit():
    rounds, per_round = 3, 2
    plain = AddressedSampler(31, "c")
    plain.start(seed=5, round=0, epochs_per_round=per_round)
    federated = []
    for round in range(rounds):
        visit = AddressedSampler(31, "c")
        # A re-used Trainer goes on counting: its first epoch of this visit is round * per_round.
        visit.start(seed=5, round=round, epochs_per_round=per_round, epoch_offset=round * per_round)
        federated += epochs(visit, round * per_round, per_round)
    assert epochs(plain, 0, rounds * per_round) == federated
    assert len({tuple(order) for order in federated}) == rounds * per_round


def test_start_alone_is_epoch_zero_of_the_visit():
    sampler = AddressedSampler(20, "c")
    sampler.start(seed=1, round=4, epoch_offset=9)
    before = list(sampler)
    sampler.set_epoch(9)
    assert list(sampler) == before
    with pytest.raises(ValueError, match="before the visit's first epoch 9"):
        sampler.set_epoch(8)


@pytest.mark.parametrize(("size", "world"), [(24, 2), (23, 2), (10, 4), (1, 3), (0, 2)])
def test_ranks_share_the_doubled_batch(size, world):
    one = AddressedSampler(size, "c", seed=3)
    whole = list(one)
    batch = 3
    ranks = []
    for rank in range(world):
        sampler = AddressedSampler(size, "c")
        sampler.start(seed=3, round=0, rank=rank, world_size=world)
        ranks.append(list(sampler))
        assert len(ranks[-1]) == len(sampler)
    assert len({len(order) for order in ranks}) == 1
    assert {i for order in ranks for i in order} == set(range(size))
    for k in range(size // (batch * world)):
        together = {i for order in ranks for i in order[k * batch : (k + 1) * batch]}
        assert together == set(whole[k * batch * world : (k + 1) * batch * world])


def test_no_shuffle_is_the_identity():
    assert list(AddressedSampler(7, "c", shuffle=False, seed=9)) == list(range(7))


def test_leaves_the_global_generator_alone_and_addresses_worker_seeds():
    data = TensorDataset(torch.arange(8))
    sampler = AddressedSampler(8, "c", seed=2)
    loader = DataLoader(data, batch_size=2, sampler=sampler, generator=sampler.generator)
    before = torch.random.get_rng_state()
    seeds = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        seeds.append(iter(loader)._base_seed)
    assert torch.equal(before, torch.random.get_rng_state())
    assert seeds[0] == seeds[2] != seeds[1]


def test_lightning_calls_set_epoch():
    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen = []

        def training_step(self, batch, _):
            self.seen += batch[0].tolist()
            return self.layer(batch[0].float().unsqueeze(1)).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.0)

    sampler = AddressedSampler(6, "c", seed=4)
    model = Model()
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=4, sampler=sampler)
    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    expected = epochs(AddressedSampler(6, "c", seed=4), 0, 3)
    assert model.seen == [i for order in expected for i in order]


def test_copies_keep_the_address():
    sampler = AddressedSampler(9, "c", seed=1)
    sampler.set_epoch(3)
    for other in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert list(other) == list(sampler)
        assert torch.equal(other.generator.get_state(), sampler.generator.get_state())


def test_bad_arguments():
    sampler = AddressedSampler(3, "c")
    with pytest.raises(ValueError, match="size=-1"):
        AddressedSampler(-1, "c")
    with pytest.raises(ValueError, match="epochs_per_round=0"):
        sampler.start(seed=0, round=0, epochs_per_round=0)
    with pytest.raises(ValueError, match="rank=2"):
        sampler.start(seed=0, round=0, rank=2, world_size=2)
