import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fedlightning.datamodules import AddressedSampler, LoaderDataModule
from fedlightning.datamodules.resident_batches import ResidentBatches, resident_batches
from tests.helpers import Toy, make_trainer


def data(size=20):
    return TensorDataset(torch.arange(size * 6.0).view(size, 6) / 100, torch.arange(size) % 2)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*data(12).tensors, strict=True))


class Counted(Stream):
    def __len__(self):
        return 12


def test_a_loader_with_a_generator_of_its_own_gets_an_address():
    def made(seed):
        generator = torch.Generator().manual_seed(seed)
        given = DataLoader(data(), batch_size=6, shuffle=True, generator=generator, drop_last=True)
        loader = LoaderDataModule({"a": given}).client_dataloader("a", "train")
        assert type(loader.sampler) is AddressedSampler and loader.dataset is given.dataset and loader.drop_last
        assert isinstance(resident_batches(loader, torch.device("cpu")), ResidentBatches)
        loader.sampler.start(seed=0, round=2)
        return torch.cat([x[:, 0] for x, _ in loader])

    assert len(made(1)) == 18 and torch.equal(made(1), made(1)) and not torch.equal(made(1), made(2))


@pytest.mark.parametrize("shuffle", [False, True])
def test_other_loaders_are_left_as_they_are(shuffle):
    given = DataLoader(data(), shuffle=shuffle)
    assert LoaderDataModule({"a": given}).client_dataloader("a", "train") is given


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        (CombinedLoader({"x": DataLoader(data())}, "sequential"), "is a CombinedLoader .*(mode 'seq|ConcatDataset)"),
        ({"x": DataLoader(data())}, "is a dict of several loaders"),
        ([DataLoader(data()), DataLoader(data())], "is a list of several loaders"),
        (data(), "is a TensorDataset(. A client has one torch DataLoader|, which has no batches. Pass DataLoader)"),
        (DataLoader(Stream()), "reads a Stream, which does not say how many samples it has.*__len__"),
    ],
)
def test_what_is_no_single_loader_is_refused_in_a_sentence(loader, sentence):
    with pytest.raises(ValueError, match=rf"train_dataloaders\['a'\] {sentence}"):
        LoaderDataModule({"a": loader, "b": DataLoader(data())})
    with pytest.raises(ValueError, match=rf"val_dataloaders\['a'\] {sentence}"):
        make_trainer(None).fit(Toy(), train_dataloaders={"a": DataLoader(data())}, val_dataloaders={"a": loader})


@pytest.mark.parametrize("given", [[DataLoader(data())], DataLoader(data())])
def test_a_list_where_a_mapping_is_meant(given):
    with pytest.raises(ValueError, match=r"train_dataloaders is a (list|DataLoader). Pass one loader per client"):
        make_trainer(None).fit(Toy(), train_dataloaders=given)


def test_the_union_of_loaders():
    streams = LoaderDataModule({"a": DataLoader(Counted(), batch_size=5), "b": DataLoader(Counted())})
    assert sum(len(x) for x, _ in streams.pooled_dataloader("train")) == 24 and streams.num_samples("a") == 12
    mixed = LoaderDataModule({"a": DataLoader(Counted()), "b": DataLoader(data())})
    with pytest.raises(ValueError, match="have no union"):
        mixed.pooled_dataloader("train")
    plain = LoaderDataModule(
        {"b": DataLoader(data(7), batch_size=4), "a": DataLoader(data(5)), "c": None}
    ).pooled_dataloader
    batches = resident_batches(plain("train"), torch.device("cpu"))
    assert isinstance(batches, ResidentBatches) and plain("train").dataset is plain("train").dataset
    assert sorted(torch.cat([x for x, _ in batches])[:, 0].tolist()) == sorted(
        data(7).tensors[0][:, 0].tolist() + data(5).tensors[0][:, 0].tolist()
    )


@pytest.mark.filterwarnings("error:.*failed:UserWarning")
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_samplers_and_streams_train(engine):
    loaders = {
        "weighted": DataLoader(data(), sampler=WeightedRandomSampler(torch.ones(20), 30), batch_size=5),
        "batches": DataLoader(data(), batch_sampler=BatchSampler(SequentialSampler(data()), 7, True)),
        "stream": DataLoader(Counted(), batch_size=4),
    }
    trainer = make_trainer(None, max_rounds=1, engine=engine)
    trainer.fit(Toy(), train_dataloaders=loaders)
    assert dict(trainer.federation.server.num_samples) == {"weighted": 20, "batches": 20, "stream": 12}


def test_public_data_beside_the_clients_loaders():
    public = DataLoader(TensorDataset(torch.zeros(3, 2)), batch_size=2)
    data = LoaderDataModule({"a": public, "b": public}, public=public)
    assert data.public_dataloader() is public and data.public_report() == {"samples": 3}
    assert data.exclude(["b"]).public_dataloader() is public
    assert LoaderDataModule({"a": public}).public_dataloader() is None
