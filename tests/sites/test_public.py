"""Public data at the server and at the sites: the same, or refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.callbacks import DSFL, Dapper, FedDF, FedKEMF, FedMD
from fedlightning.errors import ConfigurationError
from tests.sites.helpers import Line, at_sites, sites
from tests.sites.test_equal import assert_equal


@pytest.mark.parametrize(
    "algorithm", [FedMD(transfer_epochs=1), FedDF(steps=3, batch_size=5)], ids=["at clients", "at the server"]
)
def test_equal_to_one_process(tmp_path, algorithm):
    assert_equal(tmp_path, algorithm, public=True)


@pytest.mark.parametrize("algorithm", [DSFL(), Dapper(), FedKEMF()], ids=lambda algorithm: algorithm.key)
def test_a_server_without_public_data_is_told_how_to_have_some(tmp_path, algorithm):
    """The data of the sites have some, and a server that has none begins no round."""
    line = Line(sites(tmp_path / "sites", algorithm))
    with pytest.raises(
        ConfigurationError,
        match=rf"{algorithm.key} trains on public data, and the server has none.*"
        "PublicDataModule",
    ):
        at_sites(line, tmp_path / "server", algorithm)


def other_inputs(data):
    x, y = data.dataset.tensors
    return DataLoader(TensorDataset(x + torch.eye(*x.shape) * 1e-6, y), data.batch_size)


def other_order(data):
    x, y = data.dataset.tensors
    return DataLoader(TensorDataset(x.flip(0), y.flip(0)), data.batch_size)


def other_batches(data):
    return DataLoader(data.dataset, 4)


def none_at_all(data):
    return None


@pytest.mark.parametrize("change", [other_inputs, other_order, other_batches, none_at_all])
def test_other_public_data_at_a_site_are_refused_before_round_1(tmp_path, change):
    parts = sites(tmp_path / "sites", FedDF())
    data = parts["1"]._data
    changed = change(data.public_dataloader())
    data.public_dataloader = lambda: changed
    with pytest.raises(ConfigurationError, match=r"public data are 10 samples in batches of 5 .*home of site1' has "):
        at_sites(Line(parts), tmp_path / "server", FedDF(), public=True)
