"""Objects through shared memory: what comes out is what went in, bit for bit, and nothing is shared by accident."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import fedlightning  # noqa: F401  before lightning

# isort: split
from fedlightning.parallel.arena import ALIGNMENT, Arena, Broadcast, RemoteTraceback, pack, unpack
from tests.engines.users import TwoArguments

TENSORS = {
    "float32": torch.tensor([[1.0, float("nan")], [-0.0, float("inf")]]),
    "bfloat16": torch.arange(5).to(torch.bfloat16),
    "float64 number": torch.tensor(0.1, dtype=torch.float64),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor([2**62, -1]),
    "complex": torch.tensor([1 + 2j]),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "channels last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": torch.ones(1, 4).expand(3, 4),
    "slice": torch.arange(100.0)[10:20],
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "gradient wanted": torch.ones(2, requires_grad=True),
    "sparse": torch.eye(3).to_sparse(),
}


def through(value, broadcast=None):
    """What a receiver with descriptors of its own makes of ``value``."""
    arena = Arena()
    header = pack(value, arena, broadcast)
    common = None if broadcast is None else Arena(os.dup(broadcast.arena.descriptor))
    return unpack(header, Arena(os.dup(arena.descriptor)), common)


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8)


def test_every_sort_of_tensor():
    for label, after in through(TENSORS).items():
        before = TENSORS[label]
        assert type(after) is type(before) and after.dtype == before.dtype and after.shape == before.shape, label
        assert after.requires_grad == before.requires_grad, label
        if before.layout is torch.strided:
            assert after.stride() == before.stride(), label
            assert torch.equal(bits(after), bits(before)), label
        else:
            assert torch.equal(after.to_dense(), before.to_dense())


def test_an_empty_tensor_may_come_first():
    """It takes no memory, and there is none yet; a record without its frozen network has such."""
    arena = Arena()
    assert unpack(pack({"frozen": torch.empty(0), "w": torch.ones(2)}, arena), arena)["frozen"].shape == (0,)


def test_arrays_strings_and_numbers():
    value = {"array": np.arange(12.0).reshape(3, 4), "rest": [1, "text", None, (2.5, {"a": {1, 2}})]}
    after = through(value)
    assert np.array_equal(after["array"], value["array"]) and after["rest"] == value["rest"]
    after["array"][0, 0] = 7.0  # it can be written
    assert value["array"][0, 0] == 0.0


def test_one_tensor_stays_one_and_two_stay_two():
    one, empty = torch.ones(2), torch.empty(0)
    after = through({"a": one, "b": [one], "c": torch.ones(2), "d": empty, "e": torch.empty(0)})
    assert after["a"] is after["b"][0] and after["a"] is not after["c"]
    assert after["d"] is not after["e"]
    after["a"].add_(1.0)
    assert torch.equal(one, torch.ones(2))


def test_an_arena_is_used_again_and_grows():
    arena, reader = Arena(), None
    for size in (10, 100_000, 3, 1_000_000):
        value = {"x": torch.arange(float(size)), "y": torch.full((size,), -1, dtype=torch.int8)}
        header = pack(value, arena)
        reader = reader or Arena(os.dup(arena.descriptor))
        after = unpack(header, reader)
        assert torch.equal(after["x"], value["x"]) and torch.equal(after["y"], value["y"])
    kept = after["x"]
    pack(torch.zeros(1_000_000), arena)
    assert kept[-1] == 999_999.0  # what was received is a copy


def test_what_goes_to_many_is_written_once():
    broadcast, model = Broadcast(Arena()), {"w": torch.randn(1000), "b": torch.randn(10)}
    sizes = []
    for own in range(4):
        after = through({"state": dict(model), "own": torch.full((3,), float(own))}, broadcast)
        assert torch.equal(after["state"]["w"], model["w"]) and after["own"].tolist() == [float(own)] * 3
        sizes.append(broadcast.arena.end)
    at_least = sum(tensor.nbytes for tensor in model.values())
    assert sizes[0] == 0 and at_least <= sizes[1] < at_least + 2 * ALIGNMENT
    assert sizes[1:] == [sizes[1]] * 3  # the receivers' own tensors never got there
    broadcast.clear()
    through(dict(model), broadcast)
    assert broadcast.arena.end == 0


def test_a_tensor_in_the_place_of_one_that_is_gone():
    broadcast = Broadcast(Arena())
    for number in range(50):  # Python gives ids of dead objects again
        assert through([torch.full((4,), float(number))], broadcast)[0].tolist() == [float(number)] * 4


def test_mapped_data_is_private():
    arena = Arena()
    data = {"x": torch.arange(1000.0), "y": np.arange(1000)}
    header = pack(data, arena)
    views = [unpack(header, Arena(os.dup(arena.descriptor), private=True), copy=False) for _ in range(2)]
    assert views[0]["x"].data_ptr() % ALIGNMENT == 0
    views[0]["x"].zero_()
    views[0]["y"][:] = 0
    assert torch.equal(views[1]["x"], data["x"]) and np.array_equal(views[1]["y"], data["y"])


@pytest.mark.parametrize("error", [ValueError("plain"), TwoArguments("not", "pickled"), KeyError("key")])
def test_exceptions_keep_their_text_and_traceback(error):
    try:
        raise error
    except Exception as raised:
        after = through({"error": raised})["error"]
    assert str(error).strip("'") in str(after)
    assert type(after) is type(error) or type(after) is RuntimeError
    assert isinstance(after.__cause__, RemoteTraceback) and "raise error" in str(after.__cause__)
