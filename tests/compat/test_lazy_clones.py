"""Lazy clones: one memory until somebody writes, whoever it is."""

from __future__ import annotations

import ctypes
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from fedlightning.compat.lazy_clones import LEAST_SHARED, copy_module, lazy_clone

LARGE = LEAST_SHARED // 4
WRITERS = {
    "operation": lambda tensor: tensor.add_(1),
    "view": lambda tensor: tensor.view(-1, 2).add_(1),
    "numpy": lambda tensor: tensor.numpy().__iadd__(1),
    "array": lambda tensor: np.asarray(tensor).__setitem__(slice(None), 1.0),
    "dlpack": lambda tensor: torch.utils.dlpack.from_dlpack(tensor).fill_(1),
    "pointer": lambda tensor: ctypes.memset(tensor.data_ptr(), 1, 4),
    "shared memory": lambda tensor: tensor.share_memory_().fill_(1),
}


@pytest.mark.parametrize("side", ["copy", "original"])
@pytest.mark.parametrize("writer", WRITERS)
def test_whoever_writes_writes_to_one_of_the_two(writer, side):
    original = torch.zeros(LARGE)
    copied = lazy_clone(original)
    written, other = (copied, original) if side == "copy" else (original, copied)
    WRITERS[writer](written)
    assert written[0] != 0 and not other.any()


def test_what_is_small_or_a_part_is_copied_at_once():
    whole = torch.zeros(2 * LARGE)
    for tensor in (torch.zeros(3), whole[:LARGE], whole.view(2, -1).T):
        copied = lazy_clone(tensor)
        assert copied.equal(tensor) and copied.untyped_storage().nbytes() == tensor.nbytes


def test_a_copied_module_trains_alone():
    layer = nn.Linear(256, 256)
    copied, before = copy_module(layer), layer.weight.detach().clone()
    copied(torch.ones(1, 256)).sum().backward()
    torch.optim.SGD(copied.parameters(), lr=1.0).step()
    assert torch.equal(layer.weight, before) and not torch.equal(copied.weight, before) and layer.weight.grad is None


def test_what_a_step_has_left_with_its_graph_is_copied_without_it():
    layer = nn.Sequential(nn.Linear(2, 2))
    result = layer(torch.ones(1, 2))
    layer.image, layer[0].states, layer.seen = result, [{"last": (result, result + 1)}], [result.detach()]
    copied = copy_module(layer)
    ((last, later),) = [state["last"] for state in copied[0].states]
    assert copied.image is last and torch.equal(later, result + 1) and not (last.requires_grad or later.requires_grad)
    assert layer.image is result and result.requires_grad and layer[0].states[0]["last"][0] is result


def test_what_cannot_be_copied_is_said_by_who_cannot():
    layer = nn.Linear(2, 2)
    layer.stream = iter(map(str, range(3))), (value for value in range(3))
    with pytest.raises(TypeError, match="generator"):
        copy_module(layer)


def test_copies_of_a_scripted_part_train():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is told to be old
        module = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))), nn.Linear(2, 1))
    module[0][0].bias.requires_grad_(False)
    copied, before = copy_module(module), {name: value.clone() for name, value in module.state_dict().items()}
    trained = [entry for entry in copied.parameters() if entry.requires_grad]
    assert len(trained) == 5
    copied(torch.randn(4, 3)).pow(3).sum().backward()
    torch.optim.SGD(trained, lr=1.0).step()
    moved = {name for name, value in copied.state_dict().items() if not torch.equal(value, before[name])}
    assert "1.weight" in moved and "0.1.running_mean" in moved and "0.0.bias" not in moved and "0.1.bias" in moved
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
