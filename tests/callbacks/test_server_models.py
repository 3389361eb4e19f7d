"""What methods share that keep several models on the server."""

from __future__ import annotations

import pytest

from fedlightning.callbacks import CFL, PIFL, FedALA, FedAMP, FedAvg, FedFomo, FedLP, FedSoft, FeSEM, pFedLA
from tests.helpers import Toy, make_trainer, toy_data


@pytest.mark.parametrize("method", [FedSoft, PIFL, FedAMP, FedFomo, pFedLA])
def test_parts_of_models_are_refused_where_whole_ones_are_compared(tmp_path, method):
    with pytest.raises(ValueError, match=f"Remove FedLP or {method.__name__}"):
        make_trainer(tmp_path, [method(), FedLP()]).fit(Toy(), datamodule=toy_data())


@pytest.mark.parametrize("method", [FedAvg, FedALA, CFL, FeSEM])
def test_parts_of_models_go_into_means(tmp_path, method):
    make_trainer(tmp_path, [method(), FedLP()]).fit(Toy(), datamodule=toy_data())
