"""Lazy clones: one memory until somebody writes, whoever it is."""

from __future__ import annotations

import ctypes

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
