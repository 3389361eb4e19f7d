"""A spectral norm's vectors are of its matrix, whatever was averaged, and stay where nothing was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fedlightning.tensors import load_state, module_state
from fedlightning.tensors.entries import settle
from tests.helpers import CLASSES, FEATURES, Toy, federate, global_state, plain_fit, same, toy_data

SIZES = {"a": 24, "b": 40, "c": 16}


class Spectral(Toy):
    """Two layers with a spectral norm; training leaves their vectors apart from client to client."""

    def make(self, hidden: int, dropout: float) -> nn.Module:
        norm = parametrizations.spectral_norm
        return nn.Sequential(norm(nn.Linear(FEATURES, hidden)), nn.Tanh(), norm(nn.Linear(hidden, CLASSES)))


def made() -> Spectral:
    torch.manual_seed(0)
    return Spectral(lr=0.5)


def largest(module: nn.Module) -> list[float]:
    """The norms of the matrices that a module in evaluation mode computes with."""
    module.eval()
    return [float(torch.linalg.matrix_norm(module.net[place].weight.detach(), 2)) for place in (0, 2)]


@pytest.mark.parametrize("float_buffers", ["average", "local", "server"])
def test_the_global_model_computes_with_matrices_of_norm_1(float_buffers: str) -> None:
    trainer = federate(made(), toy_data(SIZES), float_buffers=float_buffers, max_rounds=3, local_epochs=3)
    module = trainer.server.module_with(trainer.server.model)
    assert largest(module) == pytest.approx([1.0, 1.0], abs=1e-4)
    vectors = [value for name, value in global_state(trainer).items() if name.endswith(("_u", "_v"))]
    assert [float(vector.norm()) for vector in vectors] == pytest.approx([1.0] * 4)


def test_one_client_trains_as_without_a_federation() -> None:
    data = toy_data({"a": 24})
    trainer = federate(made(), data, max_rounds=3)
    same(global_state(trainer), plain_fit(made(), toy_data({"a": 24}), "a", max_epochs=3))


def test_mixtures_are_worked_out_when_they_are_loaded_and_others_stay() -> None:
    a, b = made(), made()
    states = []
    for module, seed in ((a, 1), (b, 2)):
        torch.manual_seed(seed)
        for _ in range(4):
            module.train()(torch.randn(5, FEATURES))
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
        states.append(copy.deepcopy(module_state(module)))
    target = made()
    load_state(target, states[0])
    same(module_state(target), states[0])
    mixture: dict[str, Tensor] = {name: (value + states[1][name]) / 2 for name, value in states[0].items()}
    load_state(target, mixture)
    assert largest(target) == pytest.approx([1.0, 1.0], abs=1e-4)
    load_state(target, {name: value for name, value in states[0].items() if name.endswith("original")})
    settle(target, [name for name in states[0] if name.endswith("original")])
    assert largest(target) == pytest.approx([1.0, 1.0], abs=1e-4)
