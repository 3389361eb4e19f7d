"""A module that its user changes after a fit, where clients keep nothing of its frozen parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedlightning.callbacks import FedAvg, FedIT, FedPer
from tests.helpers import Toy, federate, same, toy_data


class Frozen(Toy):
    """Has a frozen layer."""

    def __init__(self):
        super().__init__()
        self.back = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        return super().forward(self.back(x))


@pytest.mark.parametrize("method", [FedIT(r=2), FedPer(personal=["back"])])
def test_models_are_not_built_around_frozen_parameters_that_were_changed(method, tmp_path):
    module = Frozen()
    weights = copy.deepcopy(module.state_dict())
    trainer = federate(module, toy_data(), [method], tmp_path)
    before = copy.deepcopy(trainer.client("0").module.state_dict())
    with torch.no_grad():
        module.back.weight.add_(1.0)
    for ask in (trainer.test, lambda: trainer.client("0"), lambda: trainer.onboard(toy_data())):
        with pytest.raises(ValueError, match="parameters of Frozen have changed since"):
            ask()
    module.load_state_dict(weights)
    same(trainer.client("0").module.state_dict(), before)


def test_a_module_whose_parameters_all_train_may_be_changed(tmp_path):
    module = Frozen().requires_grad_(True)
    trainer = federate(module, toy_data(), [FedAvg()], tmp_path)
    before = copy.deepcopy(trainer.module().state_dict())
    with torch.no_grad():
        module.back.weight.add_(1.0)
    same(trainer.module().state_dict(), before)
    trainer.test(verbose=False)
