"""Plain trees: what is saved comes back as it was, through a file that cannot run code, and the rest is refused by name."""

from __future__ import annotations

import io
import random
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from signal import SIGTERM
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedlightning.codec.allowed import UntrustedError
from fedlightning.codec.plain import TAG, NotPlainError, decode, encode, native
from fedlightning.codec.values import BY_NAME


class Pair(NamedTuple):
    left: int
    right: torch.Tensor


def through_a_file(value):
    file = io.BytesIO()
    torch.save(encode(value, "it"), file)
    file.seek(0)
    return decode(torch.load(file, weights_only=True))


def alike(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict | MappingProxyType):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other or (one != one and other != other)


VALUES = [
    b"", b"abc", bytearray(b"x"), 1 << 5000, -(1 << 3000), {(1, "a"): 2, None: 3}, {frozenset({1}): 2}, {TAG: "no tag"},
    OrderedDict(b=1, a=2), {1, 2}, frozenset(), deque([1, 2], 3), Counter("aab"), MappingProxyType({"a": 1}), range(3), ...,
    slice(1, None), Decimal("1.10"), Fraction(1, 3), datetime(2026, 1, 2, 3, 4, 5, 6, UTC), date(2026, 1, 2),
    time(1, 2, fold=1), timedelta(1, 2, 3), Path("a/b"), SIGTERM, Namespace(a=1), SimpleNamespace(b=[2]), np.float32(0.1),
    np.float64("nan"), np.bool_(True), np.str_("x"), np.arange(6.0).reshape(2, 3).T, np.array(["a", "bc"]), np.array(3),
    np.array([1], dtype=">i4"), np.datetime64("2020-01-01"), torch.float16, torch.Size([1]), torch.channels_last, "\ud800",
    torch.arange(6).reshape(2, 3).T, nn.Parameter(torch.ones(2)), Pair(1, torch.ones(1)), -0.0, float("nan"), 1j,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_it_was(value):
    assert alike(through_a_file({"a": [value]})["a"][0], value)


def test_a_defaultdict_keeps_its_factory():
    found = through_a_file(defaultdict(list, {"a": [1]}))
    assert found["b"] == [] and found["a"] == [1]


@pytest.mark.parametrize(
    "made", [np.random.default_rng(1), np.random.RandomState(2), random.Random(3)], ids=lambda made: type(made).__name__
)
def test_generators_go_on_where_they_were(made):
    made.random()
    again = through_a_file(made)
    assert [again.random() for _ in range(3)] == [made.random() for _ in range(3)]


def test_a_torch_generator_goes_on_where_it_was():
    made = torch.Generator()
    made.manual_seed(5)
    torch.rand(3, generator=made)
    assert torch.equal(torch.rand(9, generator=through_a_file(made)), torch.rand(9, generator=made))


def test_what_is_one_thing_stays_one_thing():
    weight, shared = torch.zeros(4), [1]
    value = {"a": weight, "part": weight[1:], "x": shared, "y": shared}
    value["self"] = value
    found = through_a_file(value)
    found["a"][1] = 7.0
    assert found["part"][0] == 7.0
    assert found["x"] is found["y"]
    assert found["self"] is found


def test_the_metadata_of_a_state_dict_stay():
    state = nn.Sequential(nn.BatchNorm1d(2)).state_dict()
    assert through_a_file(state)._metadata == state._metadata


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(plain)
def test_any_tree_comes_back_as_it_was(value):
    assert alike(through_a_file(value), value)


def local():
    class Local:
        pass

    return Local()


@pytest.mark.parametrize(
    ("value", "place", "kind"),
    [
        ({"Mine": {"best": [1, print]}}, r"\['Mine'\]\['best'\]\[1\]", "builtin_function_or_method"),
        ({"Mine": nn.Linear(1, 1)}, r"\['Mine'\]", "Linear"),
        ({"Mine": (0, local())}, r"\['Mine'\]\[1\]", "Local"),
        ({"Mine": np.array([print])}, r"\['Mine'\]", "array of dtype object"),
        ({"Mine": defaultdict(lambda: 1)}, r"\['Mine'\]", "defaultdict with the factory"),
        ({"Mine": Path}, r"\['Mine'\]", "type"),
        ({print: 1}, "the key <built-in function print>", "builtin_function_or_method"),
    ],
)
def test_the_rest_is_refused_by_its_place(value, place, kind):
    with pytest.raises(
        NotPlainError, match=rf"What client 'a' keeps under .*{place}.* is an? .*{kind}.*cannot be saved"
    ):
        encode(value, "client 'a'")


def test_a_value_without_end_is_refused():
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(NotPlainError, match="nested too deeply"):
        encode(value, "client 'a'")


BAD = [
    {TAG: "no such kind", "value": 1}, {TAG: "array", "value": ["O", [1], "C", torch.zeros(8, dtype=torch.uint8)]},
    {TAG: "array", "value": ["<f8", [9], "C", torch.zeros(8, dtype=torch.uint8)]}, {TAG: "array", "value": 3},
    {TAG: "enum", "value": ["os:system", "true"]}, {TAG: "enum", "value": ["signal:Signals", 12345]},
    {TAG: "namedtuple", "value": ["subprocess:Popen", [1]]}, {TAG: "defaultdict", "value": ["eval", []]},
    {TAG: "numpy.Generator", "value": {"bit_generator": "__builtins__"}}, {TAG: [1], "value": 1},
    {TAG: "object", "class": "os:x"},
    {TAG: "Generator", "value": ["cpu", torch.zeros(3)]}, {TAG: "memory_format", "value": "x"}, {TAG: "set", "value": [[1]]},
    {TAG: "bytes", "value": torch.zeros(3)}, {TAG: "Decimal", "value": "x"}, {TAG: "dict"},
]  # fmt: skip


@pytest.mark.parametrize("tree", BAD, ids=str)
def test_what_encode_never_makes_is_refused(tree):
    with pytest.raises(ValueError, match=r"^it (holds|names) "):
        decode({"a": tree})


def test_native_values_need_nobody_to_open_them():
    assert alike(native({"lr": np.float64(0.5), "p": Path("a"), "m": MappingProxyType({"a": {1}})}),
                 {"lr": 0.5, "p": "a", "m": {"a": {1}}})  # fmt: skip
    with pytest.raises(NotPlainError, match="Linear"):
        native({"a": nn.Linear(1, 1)})


def test_a_set_of_texts_is_written_in_one_order():
    """Hashes of texts differ between processes, and so would files."""
    names = [f"name {number}" for number in range(20)]
    for kind in (set, frozenset):
        assert encode(kind([*names, 3, 2]), "a file")["value"] == [2, 3, *sorted(names)]


@pytest.mark.parametrize("place", [625, 10**9, -1, 0.5, "0"])
@pytest.mark.parametrize("kind", ["numpy.RandomState", "MT19937", "Philox"])
def test_a_generator_whose_place_is_outside_its_buffer_is_refused(kind, place):
    made = np.random.RandomState(0) if "." in kind else np.random.Generator(getattr(np.random, kind)(0))
    tree = encode(made, "it")
    state = tree["value"]
    (state if kind == "Philox" else state["state"])["buffer_pos" if kind == "Philox" else "pos"] = place
    with pytest.raises(NotPlainError, match="a generator's place is"):
        decode(tree)


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict", "OrderedDict", "Counter", "defaultdict"])
def test_keys_that_are_made_to_collide_are_refused(kind):
    keys = [{TAG: "int", "value": hex(number * (2**61 - 1))} for number in range(200)]
    value = keys if "set" in kind else [(key, 1) for key in keys]
    with pytest.raises(NotPlainError, match="made to be slow"):
        decode({TAG: kind, "value": ["int", value] if kind == "defaultdict" else value})


MANY = {TAG: "range", "value": [0, 10**11, 1]}
BOMBS = {
    "set": MANY,
    "frozenset": MANY,
    "Counter": MANY,
    "deque": [MANY, None],
    "array": ["<f4", MANY, "C", torch.zeros(4, dtype=torch.uint8)],
    "timedelta": MANY,
    "slice": MANY,
    "Fraction": ["1e99999999", 1],
    "bytes": torch.zeros(1, dtype=torch.uint8).expand(10**10),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_few_bytes_do_not_become_many(kind):
    with pytest.raises(NotPlainError, match=r"cannot be read \((a range is no list|a fraction is|bytes are not)"):
        decode({TAG: kind, "value": BOMBS[kind]})


def test_what_is_more_than_the_memory_holds_is_refused(monkeypatch):
    def full(value):
        raise MemoryError

    monkeypatch.setitem(BY_NAME, "bytes", replace(BY_NAME["bytes"], whole=full))
    with pytest.raises(NotPlainError, match="more than the memory holds"):
        decode({TAG: "bytes", "value": torch.zeros(1)})


def test_an_enum_whose_members_can_be_called_is_refused():
    with pytest.raises(UntrustedError, match="whose values can be called"):
        decode({TAG: "enum", "value": ["lightning.fabric.utilities.data:_WrapAttrTag", "set"]})


def test_methods_of_a_mapping_are_not_hidden():
    tree = OrderedDict(a=1)
    tree._metadata = {"version": 1}
    assert vars(decode(tree)) == {"_metadata": {"version": 1}}
    tree.values = 3
    with pytest.raises(NotPlainError, match="would hide a method"):
        decode(tree)
