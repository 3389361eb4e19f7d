"""`engine="auto"`: what it chooses and why, from the configuration alone."""

from __future__ import annotations

import pytest
import torch

from fedlightning.callbacks import MOON, FedAvg
from fedlightning.engines.sequential import SequentialEngine
from fedlightning.stacked import vectorizable, vectorized_engine
from fedlightning.stacked.vectorized_engine import VectorizedEngine
from tests.helpers import Toy, federate, global_state, make_trainer, same, toy_data


def fit(engine="auto", callback=None, root=None, **options):
    torch.manual_seed(0)
    return federate(Toy(), toy_data((16,) * 5), [callback or FedAvg()], root, engine=engine, **options)


def test_small_models_are_stacked(monkeypatch):
    tried, once = [], vectorizable._try_step
    monkeypatch.setattr(vectorizable, "_try_step", lambda *args: tried.append(args) or once(*args))
    found = fit()
    assert type(found.federation.engine) is VectorizedEngine
    assert len(tried) == 1, "what was found as the engine was chosen holds in the rehearsal and in the rounds"
    same(global_state(found), global_state(fit("vectorized")))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"participation": 3}, "3 clients a round are too few"),
        ({"participation": 0.4}, "2 clients a round are too few"),
        ({"optimizer_state": "keep"}, "no stack, since optimizer_state='keep'"),
        ({"local_loop": "trainer"}, "local_loop='trainer'"),
        ({"callback": MOON()}, "no stack, since MOON"),
    ],
)
def test_else_one_after_another_with_the_same_bits(options, why, monkeypatch):
    said = []
    monkeypatch.setattr("fedlightning.assemble.rank_zero_info", said.append)
    found = fit(**options)
    assert type(found.federation.engine) is SequentialEngine
    assert len(said) == 1 and said[0].startswith("engine='auto' takes 'sequential': ") and why in said[0]
    same(global_state(found), global_state(fit("sequential", **options)))


def test_large_models_are_not_stacked(monkeypatch):
    monkeypatch.setattr(vectorized_engine, "PARAMETERS", 50)
    assert type(fit().federation.engine) is SequentialEngine


def test_a_run_goes_on_with_what_was_chosen(tmp_path):
    fit(root=tmp_path, max_rounds=3, max_time={"seconds": 0})
    again = make_trainer(tmp_path, [FedAvg()], engine="vectorized", max_rounds=3)
    again.fit(Toy(), toy_data((16,) * 5), resume="last")
    same(global_state(again), global_state(fit(max_rounds=3)))
    other = make_trainer(tmp_path, [FedAvg()], engine="sequential", max_rounds=4)
    with pytest.raises(ValueError, match="engine was 'vectorized'"):
        other.fit(Toy(), toy_data((16,) * 5), resume="last")
