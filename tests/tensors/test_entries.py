"""The tensors of a module, and new values into it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedlightning.tensors import entry_kinds, load_state, module_state
from tests.helpers import NormNet, Toy, same


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.b.bias.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(1, dtype=torch.bool))
        self.register_buffer("hidden", torch.ones(1), persistent=False)


def test_four_kinds_of_entries():
    assert entry_kinds(Mixed()) == {
        "a.weight": "trainable",
        "a.bias": "trainable",
        "b.weight": "trainable",
        "b.bias": "frozen",
        "mean": "float_buffer",
        "wave": "float_buffer",
        "count": "int_buffer",
        "mask": "int_buffer",
    }


def test_loading_copies_into_what_is_named():
    module, other = NormNet(), NormNet()
    kept = module_state(module)["net.0.bias"].clone()
    given_state = {name: value for name, value in module_state(other).items() if name != "net.0.bias"}
    load_state(module, given_state)
    same({n: v for n, v in module_state(module).items() if n != "net.0.bias"}, given_state)
    assert torch.equal(module_state(module)["net.0.bias"], kept)
    assert module.net[0].weight.data_ptr() != other.net[0].weight.data_ptr()


def test_loading_refuses_unknown_names_and_shapes():
    with pytest.raises(ValueError, match=r"'net.9.bias' is not in Toy"):
        load_state(Toy(), {"net.9.bias": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"'net.0.bias' has shape \(1,\), but Toy holds \(8,\)"):
        load_state(Toy(), {"net.0.bias": torch.zeros(1)})
