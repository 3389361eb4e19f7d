import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.demos.boring_classes import BoringDataModule
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from fedlightning.datamodules import (
    DirichletPartitioner,
    FederatedDataModule,
    IIDPartitioner,
    NaturalPartitioner,
    Partitioned,
    PathologicalPartitioner,
)
from fedlightning.datamodules.labels import encode, read_keys

LABELS = torch.arange(200) % 4


def tensors(first=0, count=200):
    return TensorDataset(torch.arange(first, first + count), LABELS[:count])


class Plain(pl.LightningDataModule):
    """An ordinary data module: nothing federated about it."""

    def __init__(self, batch_size: int = 8, shuffle: bool = True) -> None:
        super().__init__()
        self.batch_size, self.shuffle = batch_size, shuffle
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)
        self.train, self.val = random_split(tensors(), [160, 40])  # drawn from the global generator
        self.test = tensors(1000, 100)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=self.shuffle, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=16)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=32)


class TrainOnly(pl.LightningDataModule):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def train_dataloader(self):
        return self.make()


def ready(*args, **kwargs):
    data = Partitioned(*args, **kwargs)
    data.prepare_data()
    data.setup("fit")
    return data


def samples(data, client, split):
    return set(ids(data.client_dataloader(client, split)))


def ids(loader):
    return [] if loader is None else [i for batch in loader for i in batch[0].tolist()]


def test_federates_a_plain_datamodule():
    plain = Plain()
    data = ready(plain, PathologicalPartitioner(4, 2))
    data.setup("test")
    assert isinstance(data, FederatedDataModule) and plain.calls == ["prepare", "fit", "test"]
    train = data.client_dataloader("0", "train")
    assert train.batch_size == 8 and train.drop_last and train.sampler.shuffle
    assert data.client_dataloader("0", "val").batch_size == 16 and data.pooled_dataloader("test").batch_size == 32
    assert not data.client_dataloader("0", "val").drop_last
    for split, count in (("train", 160), ("val", 40), ("test", 100)):
        held = [data.indices(client, split) for client in data.client_ids]
        assert sorted(np.concatenate(held)) == list(range(count))
        # The same plan for every split: a client is tested on the classes it trains on.
        for client in data.client_ids:
            assert (
                np.flatnonzero(data.class_counts(client, split)).tolist()
                == np.flatnonzero(data.class_counts(client)).tolist()
            )
    assert set(ids(data.pooled_dataloader("test"))) == set(range(1000, 1100))


def test_the_wrapped_random_split_is_seeded_and_leaves_the_global_state():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = samples(ready(Plain(), IIDPartitioner(2)), "0", "val")
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    assert samples(ready(Plain(), IIDPartitioner(2)), "0", "val") == first
    assert samples(ready(Plain(), IIDPartitioner(2), seed=1), "0", "val") != first


def test_unshuffled_loaders_stay_unshuffled():
    data = ready(Plain(shuffle=False), IIDPartitioner(2))
    loader = data.client_dataloader("1", "train")
    expected = [int(loader.dataset[position][0]) for position in range(len(loader) * 8)]
    assert ids(loader) == expected and not loader.sampler.shuffle


def test_validation_and_test_are_cut_from_each_client():
    with pytest.warns(UserWarning, match=r"TrainOnly has no test data: 20% .* are cut off for testing"):
        data = ready(TrainOnly(lambda: DataLoader(tensors(), batch_size=5, shuffle=True)), IIDPartitioner(4), seed=3)
    for client in data.client_ids:
        sizes = [data.num_samples(client, split) for split in ("train", "val", "test")]
        assert sizes == [32, 8, 10]  # 50: a fifth for testing, then a fifth of 40 for validation
        assert data.class_counts(client, "val") == [2, 2, 2, 2]  # stratified
        parts = [samples(data, client, split) for split in ("train", "val", "test")]
        assert len(set.union(*parts)) == 50
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked = ready(
            TrainOnly(lambda: DataLoader(tensors(), batch_size=5)), IIDPartitioner(4), test_fraction=0.2, seed=3
        )
        other = ready(TrainOnly(lambda: DataLoader(tensors(), batch_size=5)), IIDPartitioner(4), test_fraction=0.0)
    assert samples(asked, "0", "test") == samples(data, "0", "test")
    assert other.client_dataloader("0", "test") is None and other.num_samples("0") == 40
    no_val = ready(TrainOnly(lambda: DataLoader(tensors())), IIDPartitioner(4), val_fraction=0.0, test_fraction=0.0)
    assert no_val.pooled_dataloader("val") is None and no_val.val_dataloader() == []


class Words(Dataset):
    """Samples of unequal length; needs its own collate function."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return {"text": [index] * (index % 3 + 1), "label": torch.tensor(index % 2), "speaker": f"s{index % 3}"}


def words_collate(samples):
    return {"length": [len(s["text"]) for s in samples], "first": [s["text"][0] for s in samples]}


def words_loader():
    return DataLoader(Words(), batch_size=4, shuffle=True, collate_fn=words_collate)


def test_custom_dataset_and_collate_function():
    data = ready(TrainOnly(words_loader), DirichletPartitioner(2, 1.0))
    loader = data.client_dataloader("0", "train")
    assert loader.collate_fn is words_collate
    seen = [i for batch in loader for i in batch["first"]]
    assert sorted(seen) == sorted(data.indices("0").tolist())
    assert sum(data.class_counts("0")) == data.num_samples("0")


def test_natural_partition_by_column():
    data = ready(TrainOnly(words_loader), NaturalPartitioner("speaker"))
    assert data.client_ids == ["s0", "s1", "s2"]
    held = [i for split in ("train", "val", "test") for i in data.indices("s1", split).tolist()]
    assert sorted(held) == list(range(1, 30, 3))
    given = ready(Plain(), NaturalPartitioner(groups=lambda data: np.arange(len(data)) % 2))
    assert given.client_ids == ["0", "1"] and given.num_samples("1", "test") == 50
    with pytest.raises(ValueError, match="no attribute 'hospital'"):
        ready(Plain(), NaturalPartitioner("hospital"))


def test_from_datasets():
    data = Partitioned.from_datasets(
        tensors(), test=tensors(1000, 40), partitioner=IIDPartitioner(4), batch_size=6, drop_last=True, shuffle=False
    )
    data.prepare_data()
    data.setup()
    assert data.num_samples("0") == 40 and data.num_samples("0", "val") == 10 and data.num_samples("0", "test") == 10
    loader = data.client_dataloader("0", "train")
    assert loader.batch_size == 6 and len(loader) == 6 and not loader.sampler.shuffle
    with pytest.raises(ValueError, match="out of 0"):
        Partitioned.from_datasets(tensors(0, 0), partitioner=IIDPartitioner(2)).setup()


def test_lightnings_own_from_datasets_can_be_wrapped():
    plain = pl.LightningDataModule.from_datasets(tensors(), test_dataset=tensors(1000, 20), batch_size=4)
    data = ready(plain, IIDPartitioner(2), batch_size=10)
    assert data.client_dataloader("0", "train").batch_size == 10 == data.batch_size
    assert data.num_samples("0", "test") == 10 and data.num_samples("0", "val") == 20


def test_batch_hooks_of_the_wrapped_module_are_kept():
    class Hooked(Plain):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return "mine"

    assert Partitioned(Hooked(), IIDPartitioner(2)).on_after_batch_transfer(None, 0) == "mine"
    plain = Partitioned(Plain(), IIDPartitioner(2))
    assert plain.on_after_batch_transfer.__func__ is pl.LightningDataModule.on_after_batch_transfer


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: DataLoader(Stream()), "IterableDataset"),
        (lambda: DataLoader(tensors(), sampler=WeightedRandomSampler(torch.ones(200), 200)), "WeightedRandomSampler"),
        (lambda: DataLoader(tensors(), sampler=torch.utils.data.RandomSampler(tensors(), replacement=True)), "Random"),
        (lambda: DataLoader(tensors(), batch_size=None), "batch_size=None"),
        (
            lambda: DataLoader(tensors(), batch_sampler=type("Own", (BatchSampler,), {})(range(200), 4, False)),
            "batches by Own",
        ),
        (lambda: [DataLoader(tensors()), DataLoader(tensors())], "is a list"),
        (lambda: None, "no train_dataloader"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        ready(TrainOnly(make), IIDPartitioner(2))


@pytest.mark.parametrize(
    "theirs",
    [
        {"sampler": WeightedRandomSampler(torch.ones(200), 200), "batch_size": 8},
        {"batch_sampler": BatchSampler(range(200), 8, False)},
        {"shuffle": True, "batch_size": 8},
    ],
)
def test_a_sampler_is_made_for_each_client(theirs):
    def weighted(data):
        labels = torch.tensor([label for _, label in data])
        return WeightedRandomSampler((labels == 3).double(), 2 * len(data))

    wrapped = TrainOnly(lambda: DataLoader(tensors(), **theirs))
    data = ready(wrapped, IIDPartitioner(2), sampler=weighted)
    loader = data.client_dataloader("1", "train")
    seen = torch.cat([x for x, y in loader if (y == 3).all()])
    assert len(seen) == 2 * data.num_samples("1") and loader.batch_size == 8
    assert set(seen.tolist()) <= set(tensors().tensors[0][data.indices("1")].tolist())
    assert type(data.client_dataloader("1", "test").sampler) is SequentialSampler

    data = ready(wrapped, IIDPartitioner(2), sampler=lambda data: BatchSampler(range(len(data)), 50, False))
    assert [len(x) for x, _ in data.client_dataloader("0", "train")] == [50, 14]
    with pytest.raises(ValueError, match="sampler made for client '0' is a int"):
        ready(wrapped, IIDPartitioner(2), sampler=len).client_dataloader("0", "train")
    with pytest.raises(ValueError, match=r"client '0' cannot be made: .* no attribute 'starts'\. It is given a view"):
        ready(wrapped, IIDPartitioner(2), sampler=lambda data: data.starts).client_dataloader("0", "train")


def test_unlabelled_data_are_cut_at_random_and_it_is_said():
    with pytest.warns(
        UserWarning, match="BoringDataModule have no class labels, so IIDPartitioner cuts them at random"
    ):
        data = ready(BoringDataModule(), IIDPartitioner(3))
    assert [data.num_samples(client) for client in data.client_ids] == [22, 21, 21]
    assert data.num_classes is None and "stratified=False" in data.partition_name
    with pytest.raises(ValueError, match="DirichletPartitioner divides samples by label, and the train data of Boring"):
        ready(BoringDataModule(), DirichletPartitioner(3, 0.5))
    labelled = Partitioned.from_datasets(tensors(), partitioner=IIDPartitioner(2), labels=False)
    with pytest.warns(UserWarning, match="no class labels"):
        labelled.setup()
    assert labelled.num_classes is None


def test_partitioners_without_labels_need_none():
    data = ready(
        TrainOnly(lambda: DataLoader(TensorDataset(torch.arange(9), torch.rand(9)))),
        IIDPartitioner(2, stratified=False),
    )
    assert data.num_classes is None and data.class_counts("0") is None
    assert sum(data.num_samples(c, s) for c in data.client_ids for s in ("train", "val", "test")) == 9


def test_a_pass_over_the_samples_is_made_only_when_needed():
    class Slow(Dataset):
        reads = 0

        def __len__(self):
            return 10

        def __getitem__(self, index):
            Slow.reads += 1
            return index, index % 2

    ready(TrainOnly(lambda: DataLoader(Slow())), IIDPartitioner(2, stratified=False))
    assert Slow.reads == 0
    data = ready(TrainOnly(lambda: DataLoader(Slow())), IIDPartitioner(2))
    assert Slow.reads == 10 and data.num_classes == 2


class Targets(Dataset):
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise AssertionError("labels must not be read one by one")


@pytest.mark.parametrize(
    ("dataset", "source", "expected"),
    [
        (Targets(targets=[3, 1, 2, 0]), None, [3, 1, 2, 0]),
        (Targets(labels=torch.tensor([[1], [0], [1], [1]])), None, [1, 0, 1, 1]),
        (Targets(), np.array([0.0, 1.0, 1.0, 0.0]), [0, 1, 1, 0]),
        (Targets(), lambda data: [len(data)] * 4, [4, 4, 4, 4]),
        (Targets(), {"train": [1, 2, 3, 4]}, [1, 2, 3, 4]),
        (Targets(site=["a", "b", "a", "b"]), "site", ["a", "b", "a", "b"]),
        (TensorDataset(torch.zeros(4, 2), torch.tensor([5, 6, 7, 8])), None, [5, 6, 7, 8]),
        (Subset(Targets(targets=[3, 1, 2, 0]), [2, 2, 0]), None, [2, 2, 3]),
        (ConcatDataset([Targets(targets=[3, 1, 2, 0]), Targets(labels=[0, 0, 0, 9])]), None, [3, 1, 2, 0, 0, 0, 0, 9]),
        ([("x", 1), ("y", torch.tensor(0)), ("z", np.int64(2))], None, [1, 0, 2]),
        ([{"x": 1, "y": 5}, {"x": 2, "y": np.array([6])}], None, [5, 6]),
        ([{"x": 1}], None, None),
        ([("x", torch.zeros(2))], None, None),
        ([1, 2], None, None),
    ],
)
def test_where_labels_are_found(dataset, source, expected):
    found = read_keys(dataset, "train", source)
    assert (found if found is None else found.tolist()) == expected


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ([1, 2, 3], "3 values for 4 samples"),
        ({"val": [1]}, "no entry for the train data"),
        ([0.5, 1.0, 2.0, 3.0], "no array for 4 samples"),
    ],
)
def test_labels_that_do_not_fit_are_refused(source, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_keys(Targets(), "train", source)


def test_labels_become_classes():
    coded = encode({"train": np.array(["b", "a"]), "test": np.array(["c", "a"]), "val": None})
    assert coded["train"].tolist() == [1, 0] and coded["test"].tolist() == [2, 0] and coded["val"] is None
    assert encode({"train": np.array([-1, 1])})["train"].tolist() == [0, 1]
    assert encode({"train": np.array([3, 7])})["train"].tolist() == [3, 7]


def test_from_a_configuration():
    parser = ArgumentParser()
    parser.add_subclass_arguments(FederatedDataModule, "data")
    config = parser.parse_object(
        {
            "data": {
                "class_path": "fedlightning.datamodules.Partitioned",
                "init_args": {
                    "datamodule": {"class_path": f"{__name__}.Plain", "init_args": {"batch_size": 3}},
                    "partitioner": {
                        "class_path": "fedlightning.datamodules.DirichletPartitioner",
                        "init_args": {"num_clients": 3, "alpha": 0.3, "by": "client"},
                    },
                    "val_fraction": 0.1,
                },
            }
        }
    )
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # its name before 4.49
    data = instantiate(config).data
    data.setup()
    assert data.client_ids == ["0", "1", "2"] and data.client_dataloader("0", "train").batch_size == 3
    assert data.partitioner.alpha == 0.3 and data.val_fraction == 0.1


def test_it_goes_by_the_name_of_what_it_divides():
    class Clinic(BoringDataModule):
        pass

    from fedlightning.client.data_summary import describe

    divided = Partitioned(Clinic(), IIDPartitioner(2), labels=False)
    own = Partitioned.from_datasets(
        train=TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64)), partitioner=IIDPartitioner(2)
    )
    for data, name in ((divided, "Clinic"), (own, "Partitioned")):
        data.prepare_data()
        data.setup()
        assert describe(data).module == name


@pytest.mark.parametrize("value", [IIDPartitioner(2), tensors()])
def test_what_is_no_data_module_is_refused_by_name(value):
    with pytest.raises(ValueError, match=f"got {type(value).__name__} as datamodule. Pass a LightningDataModule, then"):
        Partitioned(value, IIDPartitioner(2))
