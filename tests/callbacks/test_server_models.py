"""What methods share that keep several models on the server."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from fedlightning.callbacks import (
    CFL,
    FCCL,
    FD,
    PIFL,
    FedALA,
    FedAMP,
    FedAvg,
    FedFomo,
    FedGH,
    FedGKT,
    FedLP,
    FedMultimodal,
    FedSGD,
    FedSoft,
    FeSEM,
    HeurFedAMP,
    HeurpFedLA,
    Local,
    LocalCheckpoint,
    pFedLA,
)
from fedlightning.guards.composition import refuse_combinations
from tests.helpers import Toy, federate, make_trainer, toy_data


@pytest.mark.parametrize(
    "method",
    [lambda: FD(weighting="samples"), FCCL, FedGH, FedGKT, Local],
    ids=["FD", "FCCL", "FedGH", "FedGKT", "Local"],
)
def test_a_mean_of_models_that_nobody_sends_is_refused(method):
    for averaging in (FedAvg(), FedSGD(), FedMultimodal(encoders={"x": ["net.0"]})):
        callbacks = [method(), LocalCheckpoint(), averaging]
        with pytest.raises(ValueError, match=f", and {averaging.key} "):
            refuse_combinations(callbacks, SimpleNamespace(module=Toy()))
    with pytest.raises(ValueError, match="Local lets no model travel, and FedAvg weighs"):
        federate(Toy(), toy_data(), [Local(), FedAvg()])


@pytest.mark.parametrize("method", [FedSoft, PIFL, FedAMP, FedFomo, pFedLA])
def test_parts_of_models_are_refused_where_whole_ones_are_compared(tmp_path, method):
    with pytest.raises(ValueError, match=f"(?i)Remove {method.__name__} or FedLP"):
        make_trainer(tmp_path, [method(), FedLP()]).fit(Toy(), datamodule=toy_data())


@pytest.mark.parametrize("method", [FedAvg, FedALA, CFL, FeSEM])
def test_parts_of_models_go_into_means(tmp_path, method):
    make_trainer(tmp_path, [method(), FedLP()]).fit(Toy(), datamodule=toy_data())


@pytest.mark.parametrize(
    "method", [FedAMP(), HeurFedAMP(), FedFomo(), pFedLA(), HeurpFedLA(), FedSoft()], ids=lambda m: m.key
)
def test_a_weighting_that_does_nothing_is_said(method):
    with pytest.warns(UserWarning, match=rf"{method.key} combines .*weighting='uniform' of FedAvg does nothing"):
        federate(Toy(), toy_data(), [method, FedAvg(weighting="uniform")], max_rounds=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federate(Toy(), toy_data(), [method, FedAvg(weighting=None)], max_rounds=1)
    assert not any("does nothing" in str(one.message) for one in caught)
