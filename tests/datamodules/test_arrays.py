import numpy as np
import pytest
import torch

from fedlightning.datamodules import (
    ArrayDataset,
    ArrayFederatedDataModule,
    DirichletPartitioner,
    IIDPartitioner,
    LabelQuantitySkewPartitioner,
    LabelSkewPartitioner,
    NaturalPartitioner,
    PathologicalPartitioner,
    QuantitySkewPartitioner,
    describe,
    plot_partition,
)


class Prices(ArrayFederatedDataModule):
    """120 training and 30 test samples whose targets are `target(x)`."""

    target = staticmethod(lambda x: x[:, :1] * 2.5)

    def load(self):
        x = torch.randn(150, 3, generator=torch.Generator().manual_seed(0))
        y = self.target(x)
        return ArrayDataset(x[:120], y[:120]), ArrayDataset(x[120:], y[120:])


def ready(partitioner, kind=Prices):
    data = kind(partitioner, batch_size=16)
    data.setup()
    return data


def all_targets(data, split):
    return torch.cat([y for client in data.client_ids for _, y in data.client_dataloader(client, split)])


@pytest.mark.parametrize("shape", ["column", "flat", "several"])
@pytest.mark.filterwarnings("ignore:The train data of Prices have no class labels")
def test_regression_data_are_divided_without_loss(monkeypatch, shape):
    targets = {"column": lambda x: x[:, :1] / 3, "flat": lambda x: x[:, 0] / 3, "several": lambda x: x / 3}
    monkeypatch.setattr(Prices, "target", staticmethod(targets[shape]))
    for partitioner in (IIDPartitioner(4), QuantitySkewPartitioner(4), IIDPartitioner(4, stratified=False)):
        data = ready(partitioner)
        assert data.num_classes is None and data.class_counts("0") is None
        assert sum(data.num_samples(c, s) for c in data.client_ids for s in ("train", "val", "test")) == 150
        given = data.load()[1].y
        got = all_targets(data, "test")
        assert torch.equal(got.flatten().sort().values, given.flatten().sort().values) and got.dtype == torch.float32
        report = describe(data)
        assert report.classes == ["all"] and report.sizes.sum() == sum(map(data.num_samples, data.client_ids))
        assert len(plot_partition(data).axes[0].patches) == 4
        assert data.fingerprint("train") != data.fingerprint("test")


def test_the_partition_is_named_as_it_is_and_the_change_is_said():
    with pytest.warns(UserWarning, match="Prices have no class labels, so IIDPartitioner cuts them at random"):
        data = ready(IIDPartitioner(4))
    assert data.partition_name == "IIDPartitioner(num_clients=4, stratified=False)"
    assert [data.num_samples(client) for client in data.client_ids] == [24] * 4


@pytest.mark.parametrize(
    "partitioner",
    [
        DirichletPartitioner(4, 0.5),
        LabelSkewPartitioner(4),
        LabelQuantitySkewPartitioner(4),
        PathologicalPartitioner(4),
    ],
)
def test_partitions_by_label_refuse_continuous_targets(partitioner):
    with pytest.raises(ValueError, match=f"{type(partitioner).__name__} divides samples by label, and the train data"):
        ready(partitioner)


def test_samples_can_be_grouped_by_a_feature():
    groups = {True: "high", False: "low"}
    by_feature = NaturalPartitioner(groups=lambda data: [groups[bool(x > 0)] for x in data.x[:, 0]])
    data = ready(by_feature)
    assert data.client_ids == ["high", "low"]
    for client in data.client_ids:
        for split in ("train", "val", "test"):
            for x, _ in data.client_dataloader(client, split):
                assert {groups[bool(value > 0)] for value in x[:, 0]} == {client}
    with pytest.raises(ValueError, match="Prices has no natural groups"):
        ready(NaturalPartitioner())


def test_few_whole_floats_are_classes_and_many_are_measurements(monkeypatch):
    monkeypatch.setattr(Prices, "target", staticmethod(lambda x: (x[:, :1] > 0).float()))
    data = ready(IIDPartitioner(4))
    assert data.num_classes == 2 and np.ptp([data.class_counts(client)[0] for client in data.client_ids]) <= 2
    monkeypatch.setattr(Prices, "target", staticmethod(lambda x: torch.arange(150.0)))
    with pytest.warns(UserWarning, match="no class labels"):
        assert ready(IIDPartitioner(4)).num_classes is None
    monkeypatch.setattr(Prices, "labels", lambda *ignored: None, raising=False)
    monkeypatch.setattr(Prices, "target", staticmethod(lambda x: (x[:, :1] > 0).float()))
    with pytest.warns(UserWarning, match="no class labels"):
        assert ready(IIDPartitioner(4)).num_classes is None
