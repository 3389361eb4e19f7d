"""The server's models: a mapping that knows the architectures."""

from __future__ import annotations

import pytest
import torch

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.requests import LocalSettings
from fedlightning.contract import CallbackList
from fedlightning.contract.messages import GLOBAL
from fedlightning.server.model_store import ModelStore
from tests.helpers import Toy


@pytest.fixture
def models() -> ModelStore:
    return ModelStore(Blueprint(Toy(), CallbackList([]), LocalSettings(seed=0, max_rounds=1)))


def test_it_is_a_mapping_of_states(models):
    assert list(models) == [GLOBAL] and len(models) == 1
    models["mine"] = dict(models[GLOBAL])
    models.update({"yours": dict(models[GLOBAL])})
    assert list(models) == [GLOBAL, "mine", "yours"] and "mine" in models
    assert models.pop("mine").keys() == models[GLOBAL].keys() and "mine" not in models


def test_the_state_is_apart_from_the_template(models):
    name = next(iter(models[GLOBAL]))
    before = models.main.module.state_dict()[name].clone()
    models[GLOBAL][name].add_(1)
    assert torch.equal(models.main.module.state_dict()[name], before)


def test_a_copy_can_be_replaced_without_the_other(models):
    other = models.copy()
    name = next(iter(other[GLOBAL]))
    other[GLOBAL][name] = torch.zeros_like(other[GLOBAL][name])
    other["more"] = {}
    assert "more" not in models and models[GLOBAL][name] is not other[GLOBAL][name]


def test_a_model_of_another_shape_or_architecture_is_refused(models):
    models.add("same", state=models[GLOBAL])
    assert models.architecture("same") is models.main
    with pytest.raises(ValueError, match="There is no architecture 'huge' for model 'x'"):
        models.add("x", "huge")
    with pytest.raises(ValueError, match="Model 'x' is no ''"):
        models.add("x", state={"other": torch.zeros(2)})
