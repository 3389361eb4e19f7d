import copy
import pickle

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset, default_collate

from fedlightning.datamodules import (
    AddressedSampler,
    ArrayDataset,
    DigitsDataModule,
    FederatedDataModule,
    IIDPartitioner,
    IndexedFederatedDataModule,
    IndexView,
    MixtureDataModule,
    Partitioned,
    ShiftedDataModule,
    Split,
    ValidatedOnTest,
)
from fedlightning.datamodules.held_out import ClientSubset
from fedlightning.datamodules.views import collate_rows


class Toy(IndexedFederatedDataModule):
    """Three clients; "b" has one training sample, "c" has nothing; there is no validation split."""

    builds = 0

    def build(self):
        self.builds += 1
        labels = np.arange(10) % 3
        data = TensorDataset(torch.arange(10), torch.from_numpy(labels))
        train = [np.array([0, 1, 2, 3, 4]), np.array([5]), np.array([], int)]
        test = [np.array([8, 9]), np.array([7, 6]), np.array([], int)]
        return ["a", "b", "c"], {"train": Split(data, train, labels), "test": Split(data, test, labels)}


@pytest.fixture
def toy():
    data = Toy(batch_size=2)
    data.setup("fit")
    return data


def first_column(loader):
    return [i for batch in loader for i in batch[0].tolist()]


def test_answers(toy):
    assert toy.client_ids == ["a", "b", "c"] and toy.num_classes == 3
    assert [toy.num_samples(client) for client in "abc"] == [5, 1, 0]
    assert toy.class_counts("a") == [2, 2, 1] and toy.class_counts("c") == [0, 0, 0]
    assert toy.num_samples("a", "val") == 0 and toy.class_counts("a", "val") is None
    assert toy.public_dataloader() is None


def test_setup_is_idempotent(toy):
    loader = toy.client_dataloader("a", "train")
    toy.setup("test")
    toy.setup()
    assert toy.builds == 1 and first_column(toy.client_dataloader("a", "train")) == first_column(loader)


def test_train_loaders_are_addressed(toy):
    loader = toy.client_dataloader("a", "train")
    assert isinstance(loader.sampler, AddressedSampler) and loader.sampler.client == "a"
    assert sorted(first_column(loader)) == [0, 1, 2, 3, 4] and len(loader) == 3
    before = torch.random.get_rng_state()
    list(loader), list(toy.client_dataloader("a", "test"))
    assert torch.equal(before, torch.random.get_rng_state())
    assert toy.pooled_dataloader("train").sampler.client == "pooled"
    assert sorted(first_column(toy.pooled_dataloader("train"))) == [0, 1, 2, 3, 4, 5]


def test_empty_clients_do_not_crash(toy):
    assert len(toy.client_dataloader("c", "train")) == 0 and list(toy.client_dataloader("c", "train")) == []
    assert toy.client_dataloader("c", "test") is None
    assert toy.client_dataloader("a", "val") is None and toy.pooled_dataloader("val") is None


def test_pooled_test_set_is_the_union_in_client_order(toy):
    clients = [toy.client_dataloader(client, "test") for client in toy.client_ids]
    union = [i for loader in clients if loader is not None for i in first_column(loader)]
    assert first_column(toy.pooled_dataloader("test")) == union == [8, 9, 7, 6]


def test_drop_last_is_for_training_only():
    toy = Toy(batch_size=4, drop_last=True)
    toy.setup()
    assert len(toy.client_dataloader("a", "train")) == 1 and len(toy.client_dataloader("b", "train")) == 0
    assert first_column(toy.pooled_dataloader("test")) == [8, 9, 7, 6]
    assert first_column(toy.client_dataloader("a", "test")) == [8, 9]


def test_errors_are_sentences(toy):
    with pytest.raises(ValueError, match="no client 'z'; the clients are a, b, c"):
        toy.client_dataloader("z", "train")
    with pytest.raises(ValueError, match="the splits are 'train', 'val' and 'test'"):
        toy.num_samples("a", "valid")
    with pytest.raises(RuntimeError, match=r"call prepare_data\(\) and setup\(\) first"):
        Toy().client_ids  # noqa: B018
    with pytest.raises(ValueError, match="batch_size=0"):
        Toy(batch_size=0)


def test_contract_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        FederatedDataModule()


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.steps = self.tests = 0

    def training_step(self, batch, _):
        self.steps += 1
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch, _):
        raise AssertionError("there is nothing to validate on")

    def test_step(self, batch, _):
        self.tests += len(batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_works_in_a_bare_trainer_even_without_validation_data():
    data = DigitsDataModule(IIDPartitioner(3), batch_size=200, flatten=True, val_fraction=0.0)
    model = Model()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    assert model.steps == 8 and model.tests == 359  # 1438 training samples
    assert pickle.loads(pickle.dumps(data)).trainer is None  # a Trainer stays behind
    assert copy.deepcopy(data).num_samples("0") == data.num_samples("0")


def test_digits():
    data = DigitsDataModule(seed=1)
    data.setup()
    sizes = {split: sum(data.num_samples(c, split) for c in data.client_ids) for split in ("train", "val", "test")}
    assert sizes["test"] == 359 and sizes["train"] + sizes["val"] == 1797 - 359
    x, y = next(iter(data.client_dataloader("0", "train")))
    assert x.shape[1:] == (1, 8, 8) and x.dtype == torch.float32 and y.dtype == torch.int64
    assert float(x.min()) == 0.0 and float(x.max()) == 1.0
    other = DigitsDataModule(seed=2, flatten=True)
    other.setup()
    assert next(iter(other.pooled_dataloader("test")))[0].shape == (32, 64)

    def tested(module):
        return torch.cat([x.flatten(1) for x, _ in module.pooled_dataloader("test")]).sum(dim=0)

    assert torch.equal(tested(data), tested(other))  # every seed is tested on the same samples
    assert data.class_counts("0") != other.class_counts("0")
    few = DigitsDataModule(max_train=100, max_test=20, partitioner=IIDPartitioner(2))
    few.setup()
    assert few.num_samples("0") + few.num_samples("0", "val") == 50 and few.num_samples("1", "test") == 10
    with pytest.raises(ValueError, match="max_train=0"):
        DigitsDataModule(max_train=0)
    with pytest.raises(ValueError, match=r"val_fraction=1\.5"):
        DigitsDataModule(val_fraction=1.5)


def test_views_fetch_the_same_with_and_without_the_fast_path():
    x, y = torch.randn(12, 3), torch.arange(12)
    plain = TensorDataset(x, y)
    for base in (plain, ArrayDataset(x, y), ArrayDataset(x, y, transform=torch.relu)):
        view = IndexView(Subset(base, [9, 4, 7, 1]), [2, 0, 3])
        assert view.dataset is base and view.indices.tolist() == [7, 9, 1]
        fast = next(iter(DataLoader(view, batch_size=3, collate_fn=collate_rows)))
        slow = next(iter(DataLoader(view, batch_size=3)))  # anybody's default collate function
        own = default_collate([view[i] for i in range(3)])
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(fast, slow, own, strict=True))


def test_views_of_subclasses_and_of_other_datasets_take_samples_one_by_one():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return (2 * super().__getitem__(index)[0],)

    view = IndexView(Doubled(torch.arange(5)), [3, 1])
    assert first_column(DataLoader(view, batch_size=2, collate_fn=collate_rows)) == [6, 2]

    class Batched(torch.utils.data.Dataset):
        def __getitems__(self, indices):
            return [(10 * i,) for i in indices]

    assert IndexView(Batched(), [4, 2]).__getitems__([1, 0]) == [(20,), (40,)]
    with pytest.raises(ValueError, match="3 inputs and 2 targets"):
        ArrayDataset(torch.zeros(3), torch.zeros(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda share: DigitsDataModule(IIDPartitioner(4), public_fraction=share),
        lambda share: MixtureDataModule(DigitsDataModule(public_fraction=share), 4),
        lambda share: Partitioned(
            pl.LightningDataModule.from_datasets(TensorDataset(torch.zeros(80, 2), torch.arange(80) % 4), batch_size=8),
            IIDPartitioner(4),
            public_fraction=share,
        ),
    ],
    ids=["digits", "mixture", "partitioned"],
)
def test_public_samples_are_taken_from_the_clients_training_samples_alone(make):
    plain, shared = make(0.0), make(0.25)
    for data in (plain, shared):
        data.setup()
    assert plain.public_dataloader() is None
    public = set(shared.public_dataloader().dataset.indices.tolist())
    taken = set()
    for client in plain.client_ids:
        before, after = (set(data.indices(client).tolist()) for data in (plain, shared))
        assert after < before and round(0.25 * len(before)) == len(before - after)
        taken |= before - after
        for split in ("val", "test"):
            assert shared.indices(client, split).tolist() == plain.indices(client, split).tolist()
    assert public == taken
    assert sum(len(batch[-1]) for batch in shared.public_dataloader()) == len(public)
    with pytest.raises(ValueError, match=r"public_fraction=1\.0\. Use a number in \[0, 1\)"):
        make(1.0)


def shared_by(train, val=(), other=None):
    """Data of two clients with half of their training samples public."""

    class Shared(IndexedFederatedDataModule):
        public_fraction = 0.5

        def build(self):
            samples = TensorDataset(torch.arange(12), torch.zeros(12))
            splits = {"train": Split(samples, train)}
            if val:
                splits["val"] = Split(samples if other is None else other, val)
            return ["a", "b"], splits

    data = Shared()
    data.setup()
    return data


def test_a_sample_that_is_public_is_nobodys():
    """A sample that two clients, or two splits, hold would be public and private at once."""
    apart = [[0, 1, 2, 3], [4, 5, 6, 7]]
    public = sorted(shared_by(apart, val=[[8], []]).public_dataloader().dataset.indices.tolist())
    theirs, [other] = [p for p in public if p < 4], [p for p in apart[1] if p not in public][:1]
    assert len(public) == 4 and len(theirs) == 2
    with pytest.raises(ValueError, match=rf"sample {theirs[0]} public, which client 'b' holds in its train data\."):
        shared_by([apart[0], [theirs[0]]])
    with pytest.raises(ValueError, match=rf"sample {theirs[1]} public, which client 'a' holds in its val data\. Give"):
        shared_by(apart, val=[[theirs[1]], []])
    shared_by(apart, val=[[other], []])  # in two splits, but not public
    shared_by(apart, val=[[theirs[1]], []], other=TensorDataset(torch.arange(12), torch.zeros(12)))
    assert shared_by([[], []]).public_dataloader() is None
    assert shared_by([[3], [5]]).public_dataloader() is None  # a single sample stays


@pytest.mark.parametrize("share", [-0.5, 1.0, float("nan")])
def test_a_share_of_an_own_data_module_is_checked(share):
    class Own(Toy):
        public_fraction = share

    with pytest.raises(ValueError, match=rf"Own got public_fraction={share}\. Use a share of the samples in \[0, 1\)"):
        Own().setup()


def test_without_training_data_there_are_no_public_data():
    class TestsOnly(Toy):
        public_fraction = 0.5

        def build(self):
            clients, splits = super().build()
            return clients, {"test": splits["test"]}

    data = TestsOnly()
    data.setup()
    assert data.public_dataloader() is None


class Ranked(DigitsDataModule):
    """Digits whose features are ranks among all records."""

    coupled_records = "rows are ranked."
    named_by_file = {"classes": ["0", "1"]}
    meaning = {"inputs": ["ranks"]}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda source: MixtureDataModule(source, 4),
        lambda source: ShiftedDataModule(source, features="noise", strength=0.1),
        lambda source: ValidatedOnTest(source),
        lambda source: ClientSubset(ShiftedDataModule(source, features="noise", strength=0.1), ["0"]),
        lambda source: Partitioned(source, IIDPartitioner(2), sampler=lambda rows: RandomSampler(rows)),
    ],
)
def test_what_data_say_of_their_records_holds_whatever_they_are_wrapped_in(wrap):
    """A mixture of features that depend on each other was not known to have any."""
    source = Ranked(IIDPartitioner(4))
    wrapped = wrap(source)
    for name in ("coupled_records", "coupling", "named_by_file", "meaning"):
        assert getattr(wrapped, name) == getattr(source, name), name
