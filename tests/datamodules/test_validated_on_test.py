"""Validation data that are test data."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import TensorDataset

from fedlightning.datamodules import DigitsDataModule, IIDPartitioner, Partitioned, ValidatedOnTest


def samples(loader):
    return torch.cat([y for _, y in loader]).tolist()


def test_validation_is_on_test_data_and_the_rest_is_as_it_was():
    inner = DigitsDataModule(IIDPartitioner(3), val_fraction=0.2, public=0.1)
    data = ValidatedOnTest(inner)
    data.prepare_data()
    data.setup()
    assert data.client_ids == inner.client_ids and data.num_classes == 10
    for client in data.client_ids:
        test = samples(inner.client_dataloader(client, "test"))
        assert samples(data.client_dataloader(client, "val")) == samples(data.client_dataloader(client, "test")) == test
        assert data.num_samples(client) == inner.num_samples(client)
        assert data.class_counts(client, "val") == inner.class_counts(client, "test")
        assert data.sizes_of([client])[client] == (inner.num_samples(client), len(test), len(test))
    assert samples(data.pooled_dataloader("val")) == samples(inner.pooled_dataloader("test"))
    assert data.fingerprint("val") == inner.fingerprint("test") != inner.fingerprint("val")
    assert data.fingerprint("train") == inner.fingerprint("train")
    assert (data.seed, data.partition_name, data.common_batches) == (
        inner.seed,
        inner.partition_name,
        inner.common_batches,
    )
    assert data.public_report() == inner.public_report() is not None


def test_patients_are_those_of_the_data():
    draw = torch.randn(24, 3), torch.arange(24) % 2
    data = Partitioned.from_datasets(
        TensorDataset(*draw), partitioner=IIDPartitioner(2), group=np.arange(24) // 2, test_fraction=0.25
    )
    wrapped = ValidatedOnTest(data)
    wrapped.setup()
    for split, source in (("train", "train"), ("val", "test"), ("test", "test")):
        assert wrapped.sample_groups("0", split).tolist() == data.sample_groups("0", source).tolist()
