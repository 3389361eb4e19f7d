"""What is saved comes back as it was, through a file that cannot run code, and the rest is refused by its place."""

from __future__ import annotations

import json
import random
import re
import tempfile
import tracemalloc
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
from fedlightning.codec.container import VERSION, layout
from fedlightning.codec.exotic_values import BY_NAME
from fedlightning.codec.modules import native
from fedlightning.codec.tree import NotPlainError, Reader, Writer, file_of, load
from fedlightning.storage.files import UnreadableError


class Pair(NamedTuple):
    left: int
    right: torch.Tensor


def through_a_file(value):
    with tempfile.TemporaryDirectory() as folder:
        file_of({"it": value}, "it").save(Path(folder) / "a.safetensors")
        return load(Path(folder) / "a.safetensors")["it"]


def decode(tree, *tensors):
    return Reader(list(tensors)).value(json.dumps(tree))


def encode(value):
    return Writer("it").node(value)


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
    b"", b"abc", bytearray(b"x"), 1 << 5000, -(1 << 3000), {(1, "a"): 2, None: 3}, {frozenset({1}): 2}, {"tuple": "no kind"},
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
        ({"Mine": {print: 1}}, "the key <built-in function print>", "builtin_function_or_method"),
    ],
)
def test_the_rest_is_refused_by_its_place(value, place, kind):
    with pytest.raises(
        NotPlainError, match=rf"What client 'a' keeps under .*{place}.* is an? .*{kind}.*cannot be saved"
    ):
        file_of(value, "client 'a'")


def test_a_value_without_end_is_refused():
    value = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(NotPlainError, match="nested too deeply"):
        file_of({"a": value}, "client 'a'")


BAD = [
    {"no such kind": 1}, {"array": ["O", [1], "C", {"tensor": 0}]}, {"array": ["<f8", [9], "C", {"tensor": 0}]}, {"array":
    3}, {"enum": ["os:system", "true"]}, {"enum": ["signal:Signals", 12345]}, {"namedtuple": ["subprocess:Popen", [1]]},
    {"defaultdict": ["eval", {"dict": []}]}, {"defaultdict": [None, [[1, 2]]]}, {"Counter": [[1, 2]]}, {"AttributeDict":
    [[1, 2]]}, {"numpy.Generator": {"dict": [["bit_generator", "__builtins__"]]}}, {"dict": 1, "list": 1}, {"object":
    ["os:x", [], None]}, {"Generator": ["cpu", {"tensor": 0}]}, {"memory_format": "x"}, {"set": [[1]]}, {"bytes":
    {"tensor": 1}}, {"Decimal": "x"}, {"dict": None}, {"dict": [[1, 2], [1, 3]]}, {"dtype": "torch.load"}, {"dtype":
    "torch.strided"}, {"device": "x"}, {"complex": {"tuple": ["x"]}}, {"ref": 99}, {"tensor": 2}, {"tensor": True},
    {"view": [0, "torch.float32", [3], [1], 0]}, {"view": [0, "torch.float32", [1], [1], 2]}, {"view": [0,
    "torch.float32", [1], [-1], 0]}, {"view": [1, "torch.float32", [1], [1], 0]}, {"view": [0, "torch.os", [1], [1], 0]},
    {"view": [2, "torch.bool", [1], [1], 0]}, {"marked": [{"tensor": 0}, True, True, {"dict": []}]}, {"marked": [3, True,
    True, 4]}, {"marked": [{"tensor": 1}, False, False, {"dict": [["a", []]]}]}, {"archive": {"tensor": 0}}, {"float":
    "1e9"}, {"StateDict": [[], {"dict": [["values", 3]]}]}, "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("tree", BAD, ids=str)
def test_what_a_writer_never_makes_is_refused(tree):
    with pytest.raises(ValueError, match=r"^(it (holds|names|has)|its tensor 1 is|a list is missing) "):
        decode([tree], torch.full((8,), 7, dtype=torch.uint8), torch.zeros(3))


def test_native_values_need_nobody_to_open_them():
    assert alike(native({"lr": np.float64(0.5), "p": Path("a"), "m": MappingProxyType({"a": {1}})}),
                 {"lr": 0.5, "p": "a", "m": {"a": {1}}})  # fmt: skip
    with pytest.raises(NotPlainError, match="Linear"):
        native({"a": nn.Linear(1, 1)})


def test_a_set_of_texts_is_written_in_one_order():
    """Hashes of texts differ between processes, and so would files."""
    names = [f"name {number}" for number in range(20)]
    for kind in (set, frozenset):
        assert encode(kind([*names, 3, 2])) == {kind.__name__: [2, 3, *sorted(names)]}


@pytest.mark.parametrize("place", [625, 10**9, -1, 0.5, "0"])
@pytest.mark.parametrize("kind", ["numpy.RandomState", "MT19937", "Philox"])
def test_a_generator_whose_place_is_outside_its_buffer_is_refused(kind, place):
    made = np.random.RandomState(0) if "." in kind else np.random.Generator(getattr(np.random, kind)(0))
    writer = Writer("it")
    text, name = writer.text(writer.node(made)), "buffer_pos" if kind == "Philox" else "pos"
    odd = re.sub(rf'\["{name}",\d+\]', json.dumps([name, place], separators=(",", ":")), text)
    assert odd != text
    with pytest.raises(NotPlainError, match="a generator's place is"):
        Reader(writer.tensors).value(odd)


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict", "OrderedDict", "Counter", "defaultdict", "StateDict"])
@pytest.mark.parametrize("wrap", ["{}", '{{"tuple": [{}, 3]}}'])
def test_keys_that_are_made_to_collide_are_refused(kind, wrap):
    keys = [json.loads(wrap.format(number * (2**61 - 1))) for number in range(1, 400)]
    pairs = [[key, 1] for key in keys]
    content = {"set": keys, "frozenset": keys, "Counter": {"dict": pairs}, "defaultdict": ["int", {"dict": pairs}]}
    with pytest.raises(NotPlainError, match="made to be slow"):
        decode({kind: content.get(kind, [pairs, {"dict": []}] if kind == "StateDict" else pairs)})


def test_a_key_holds_no_part_of_another_place():
    """A tuple that holds another twice, which does so too, and so on, has a hash that takes for ever."""
    doubled = ["x", *[{"tuple": [{"ref": number}, {"ref": number}]} for number in range(60)]]
    for key in ({"ref": 60}, {"tuple": [{"ref": 60}]}):
        with pytest.raises(NotPlainError, match="a key with a part that is somewhere else"):
            decode([{"tuple": []}, *doubled[1:], {"dict": [[key, 1]]}])


def test_keys_that_are_one_tuple_in_two_places_are_saved():
    key, weight = ("val", ("local",)), torch.ones(1)
    found = through_a_file([{key: 1}, {key: 2}, key, {weight: 3}, weight])
    assert found[:3] == [{key: 1}, {key: 2}, key]
    assert next(iter(found[3])) is found[4]


@pytest.mark.parametrize(
    "kind", ["set", "frozenset", "Counter", "deque", "array", "timedelta", "slice", "Fraction", "bytes", "Size"]
)
def test_few_bytes_do_not_become_many(kind):
    many = {"range": [0, 10**11, 1]}
    content = {"deque": [many, None], "array": ["<f4", many, "C", {"tensor": 0}], "Fraction": ["1e99999999", 1]}
    content["bytes"] = {"view": [0, "torch.uint8", [10**10], [0], 0]}
    with pytest.raises(
        NotPlainError, match=r"cannot be read \((a range is|a fraction is|bytes are not)|a list is missing"
    ):
        decode({kind: content.get(kind, many)}, torch.zeros(4, dtype=torch.uint8))


def test_what_is_more_than_the_memory_holds_is_refused(monkeypatch):
    def full(value):
        raise MemoryError

    monkeypatch.setitem(BY_NAME, "bytes", replace(BY_NAME["bytes"], whole=full))
    with pytest.raises(NotPlainError, match="more than the memory holds"):
        decode({"bytes": {"tensor": 0}}, torch.zeros(1))


def test_an_enum_whose_members_can_be_called_is_refused():
    with pytest.raises(UntrustedError, match="whose values can be called"):
        decode({"enum": ["lightning.fabric.utilities.data:_WrapAttrTag", "set"]})


def test_methods_of_a_mapping_are_not_hidden():
    tree = OrderedDict(a=1)
    tree._metadata = {"version": 1}
    assert vars(through_a_file(tree)) == {"_metadata": {"version": 1}}


# -- tensors -----------------------------------------------------------------------------------------------------------
def torch_dtypes():
    """Return the dtypes of a byte or more that numbers in memory can have."""
    kinds = {kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and kind.itemsize in (1, 2)}
    return sorted((kind for kind in kinds if _is_printed(kind)), key=str)


def _is_printed(kind):
    try:
        return bool(repr(torch.zeros(6, dtype=torch.uint8).view(kind)))
    except (RuntimeError, NotImplementedError):
        return False


def marked(tensor, **attributes):
    vars(tensor).update(attributes)
    return tensor


TENSORS = {
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last of one channel": torch.randn(8, 1, 3, 3).to(memory_format=torch.channels_last),
    "every other one": torch.arange(12).reshape(3, 4)[:, ::2],
    "expanded": torch.ones(1).expand(3, 2),
    "no numbers": torch.empty(2, 0, 3),
    "no numbers of some": torch.ones(4)[:0],
    "one number": torch.tensor(3.0),
    "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
    "half complex": torch.tensor([1 + 2j], dtype=torch.complex32),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "sparse": torch.eye(3).to_sparse(),
    "sparse rows": torch.eye(3).to_sparse_csr(),
    "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
    "with gradient": torch.ones(2, requires_grad=True),
    "with an attribute": marked(torch.ones(2), scale=0.5, kept=torch.float16),
    "meta": torch.empty(3, device="meta"),
} | {str(dtype): torch.zeros(6, dtype=torch.uint8).view(dtype) for dtype in torch_dtypes()}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_it_was(name):
    value = TENSORS[name]
    found = through_a_file([value, value])
    assert found[0] is found[1] and type(found[0]) is type(value) and found[0].requires_grad == value.requires_grad
    assert (found[0].dtype, found[0].shape, found[0].layout) == (value.dtype, value.shape, value.layout)
    assert vars(found[0]) == vars(value) and not found[0]._is_view()
    if value.layout is torch.strided:
        assert found[0].stride() == value.stride() and found[0].is_conj() == value.is_conj()
    if not value.is_meta:
        assert repr(found[0]) == repr(value)


def test_a_view_is_saved_without_the_memory_around_it(tmp_path):
    file_of({"a": torch.zeros(1_000_000)[5:8], "b": torch.zeros(1000, 1000)[::2, :3]}, "it").write(tmp_path / "a")
    assert (tmp_path / "a").stat().st_size < 4_100_000
    file_of({"a": torch.zeros(1_000_000)[5:8]}, "it").write(tmp_path / "a")
    assert (tmp_path / "a").stat().st_size < 1000


def test_tensors_of_one_memory_share_it_again():
    memory = torch.arange(8, dtype=torch.float64)
    value = {"part": memory[1:3], "bits": memory.view(torch.int32)[4:], "p": nn.Parameter(memory[2:4])}
    found = through_a_file(value)
    assert all(alike(found[name], value[name]) for name in value)
    found["bits"].zero_()
    assert not found["p"].any() and found["part"].tolist() == [1.0, 0.0]


def test_tied_weights_stay_tied():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    found = through_a_file(
        {"state": net.state_dict(), "parameters": dict(net.named_parameters(remove_duplicate=False))}
    )
    assert found["parameters"]["0.weight"] is found["parameters"]["1.weight"]
    found["state"]["0.weight"].fill_(7.0)
    assert found["parameters"]["1.weight"].eq(7).all()


def test_no_tensor_is_copied_while_a_file_is_written():
    tensors = [torch.ones(1000), torch.ones(10, 10)]
    pieces = list(layout("", tensors))[1:]
    tensors[0].fill_(2.0)
    assert any(bytes(piece) == tensors[0].numpy().tobytes() for piece in pieces)


def test_equal_values_are_equal_bytes(tmp_path):
    """A message's checksum, and what a state is made of, say nothing of the order in which memory was taken."""
    for name in ("a", "b"):
        weight = torch.ones(4)
        pair = ("val", (1, 2.5, None))
        again = pair if name == "a" else eval(repr(pair))
        value = {
            "pairs": [pair, again, {again: pair}],
            "w": weight,
            "part": weight[1:],
            "set": {"b", "a", "c"},
            "g": torch.Generator().manual_seed(3),
        }
        file_of(value, "it").write(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_file_of_a_list_is_no_file_of_named_values(tmp_path):
    (tmp_path / "a").write_bytes(b"".join(layout("[1]", [])))
    with pytest.raises(UnreadableError, match="it holds a list, not named values"):
        load(tmp_path / "a")


def test_a_file_that_claims_to_be_large_takes_no_memory(tmp_path):
    header = {"__metadata__": {"format": "fedlightning", "version": VERSION, "message": "[]"}}
    header["0"] = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    written = json.dumps(header).encode()
    for length in (len(written), 2**62):
        (tmp_path / "a").write_bytes(length.to_bytes(8, "little") + written)
        tracemalloc.start()
        with pytest.raises(UnreadableError, match=r"is said to lie at bytes|its header claims"):
            load(tmp_path / "a")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()
