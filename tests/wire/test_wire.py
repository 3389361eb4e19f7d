"""What crosses to or from a site comes back as it was, and bytes of any other kind end in a sentence."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

from fedlightning.client.requests import Evaluate
from fedlightning.codec.container import DTYPES, VERSION, layout
from fedlightning.contract.messages import ClientLog, Message, Update
from fedlightning.engines.contract import Visit
from fedlightning.engines.score_tasks import Lost, ScoreClient, ScoredModel
from fedlightning.scores.rows import Gap, Row
from fedlightning.wire import KINDS, Limits, WireError, read, write
from fedlightning.wire.objects import Whole, check_of

NAN = float("nan")
ROW = (3, "L1", "personal", "latest", "local", "val", "a", "val_loss", 0.1, 7)
MESSAGE = Message(
    round=2,
    client="Köln",
    state={"w": torch.randn(3, 2), "n": torch.tensor(5)},
    returns=("w",),
    extras={"SCAFFOLD": {"c": {"w": torch.zeros(3, 2, dtype=torch.bfloat16)}, "steps": 3}},
)
UPDATE = Update(
    round=2,
    client="Köln",
    state={"w": torch.randn(3, 2).half()},
    extras={"SCAFFOLD": {"delta_c": {"w": torch.ones(3, 2)}, "flag": torch.tensor(True)}},
    num_samples=10,
    lr_sum=0.30000000000000004,
    metrics={"loss": NAN},
    evaluations=[("L2", "local", "val", "acc", 1 / 3, 9)],
    gaps=[("L2", "local", "test", "no loader")],
    logs=[ClientLog({"loss": 1e-320}, 4)],
)
SCORE = ScoreClient(
    MESSAGE,
    Evaluate(("val", "test")),
    ScoredModel(3, "L1", "personal"),
    others=["a"],
    shared=MESSAGE.state,
    known={("val", "local"): ({"acc": 0.5}, 3)},
)
VALUES = {
    "numbers": [0, -0.0, 1 / 3, NAN, float("inf"), -float("inf"), 10**30, True, False, None, "", '\ud7ff\0"\\é'],
    "containers": [
        [],
        (),
        {},
        ([1], (2,)),
        {"a": {1: (None,)}, ("x", 2): b"\x00\xff", None: b""},
        OrderedDict(b=1, a=2),
    ],
    "arrays": [
        *(np.float32(0.1), np.float64(0.1), np.int64(3), np.bool_(True), np.arange(6).reshape(2, 3)),
        *(
            np.arange(6).reshape(2, 3).T,
            np.arange(6)[::-2],
            np.array(["a", "bc"]),
            np.array([1], ">i4"),
            np.empty((0, 2)),
        ),
    ],
    "values of torch": [
        torch.float16,
        torch.device("cpu"),
        torch.Size([2, 3]),
        2j,
        complex(-0.0, NAN),
        {1, "b", (2,)},
        set(),
    ],
    "strange tensors": [
        torch.empty(0),
        torch.empty(2, 0, 3, dtype=torch.bfloat16),
        torch.tensor(NAN),
        torch.arange(12).reshape(3, 4)[:, ::2],
        torch.randn(4, 3).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(1).expand(3),
        torch.tensor([1 + 2j], dtype=torch.complex128),
        torch.tensor([1 + 2j]).conj(),
        torch.randn(8, 1, 3, 3).to(memory_format=torch.channels_last),
    ],
    "tasks": [Visit(MESSAGE, Evaluate(("val",))), SCORE],
    "answers": [UPDATE, [Row(*ROW), Gap(*ROW[:7], "", NAN, 0, "it broke")], Lost([Gap(*ROW[:7], "", NAN, 0, "gone")])],
}


def same(one: object, two: object) -> bool:
    """Compare types, bits and the order of entries."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        dense = one.is_contiguous() or one.is_contiguous(memory_format=torch.channels_last) if one.ndim == 4 else False
        alike = (one.dtype, one.shape) == (two.dtype, two.shape) and (not dense or one.stride() == two.stride())
        flat, other = (t.resolve_conj().contiguous().reshape(-1) for t in (one, two))
        return alike and torch.equal(flat.view(torch.uint8), other.view(torch.uint8))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, set):  # its order is that of hashes and of insertion
        return sorted(map(repr, one)) == sorted(map(repr, two))
    if type(one).__name__ in KINDS:
        return all(same(getattr(one, field.name), getattr(two, field.name)) for field in fields(one))
    return repr(one) == repr(two)


@pytest.fixture(autouse=True)
def no_pickle(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something pickles")

    for module, names in ((pickle, ("loads", "load", "dumps", "dump", "Unpickler")), (torch, ("load", "save"))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_bit_for_bit(name):
    for value in VALUES[name]:
        assert same(read(write(value)), value), value


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name):
    bits = torch.randint(0, 2 if name == "BOOL" else 256, (24,), dtype=torch.uint8).view(DTYPES[name])
    value = {"whole": bits, "one": bits[:1].reshape(()), "none": bits[:0], "odd": torch.ones(3, dtype=torch.bool)}
    assert same(read(write(value)), value)


def test_one_tensor_in_two_places_is_sent_once_and_is_one_again():
    tensor = torch.randn(1000)
    message = write({"a": tensor, "b": [tensor]})
    found = read(message)
    assert len(message) < 5000 and found["a"] is found["b"][0]


def test_all_fields_of_a_class_travel_but_those_that_are_left():
    for name, kind in KINDS.items():
        if is_dataclass(kind.type):
            assert kind.left <= {field.name for field in fields(kind.type)}, name
            assert set(kind.fields) == {field.name for field in fields(kind.type) if field.init} - kind.left, name


@pytest.mark.parametrize(
    "hint, good, bad",
    [
        (int, [0, 2**63 - 1], [-1, 2**63, True, 1.0, "1"]),
        (Whole, [-1, 0], [2**63, True]),
        (float, [0.5, NAN, -3], [2**63, True, "x"]),
        (str, ["x"], [b"x", None]),
        (bool, [True], [1]),
        (str | None, ["x", None], [1]),
        (Literal["a", "b"], ["a"], ["c", 1]),
        (tuple[str, ...], [(), ("a",)], [["a"], (1,)]),
        (tuple[str, int], [("a", 1)], [("a",), ("a", -1), ["a", 1]]),
        (list[int], [[], [1]], [(1,), [-1]]),
        (Sequence[str], [["a"], ("a",)], ["a", {"a"}]),
        (Mapping[str, tuple[int, ...]], [{"a": (1,)}, OrderedDict(a=())], [{1: (1,)}, {"a": [1]}, []]),
        (dict[str, torch.Tensor], [{"a": torch.ones(1)}], [{"a": 1}, {1: torch.ones(1)}]),
        (Message, [MESSAGE], [UPDATE, None]),
    ],
)
def test_a_field_is_what_its_annotation_says(hint, good, bad):
    assert all(map(check_of(hint), good)) and not any(map(check_of(hint), bad))


def test_a_message_holds_nothing_of_the_memory_around_a_view():
    """Records of others may lie beside a view: only what is seen of it leaves."""
    memory = torch.frombuffer(bytearray(b"secret" * 100), dtype=torch.uint8)
    memory[60:70] = 0
    views = [
        memory[60:70],
        memory[60:70:2],
        memory[60:70].view(5, 2).t(),
        memory[64:68].view(torch.float32),
        nn.Parameter(memory[60:64].view(torch.float32)),
    ]
    for view in (*views, memory[60:62].numpy(), memory[60:70].view(5, 2).numpy().T, [memory[60:66], memory[64:70]]):
        assert b"secret" not in write(view) and b"s" not in write(view)[-10:]


def test_the_exception_behind_an_update_stays():
    update = Update(1, "a", error="it broke", cause=ValueError("secret"))
    assert read(write(update)).cause is None and b"secret" not in write(update)


def test_wide_tensors_lie_first_and_each_at_a_multiple_of_its_size():
    """So a reader may map the bytes. Of one width the first comes first."""
    sizes = [(torch.uint8, 3), (torch.float64, 1), (torch.bfloat16, 3), (torch.int64, 2), (torch.bool, 1)]
    data = b"".join(layout("", [torch.ones(count, dtype=dtype) for dtype, count in sizes]))
    length = int.from_bytes(data[:8], "little")
    places = {name: of["data_offsets"] for name, of in json.loads(data[8 : 8 + length]).items() if name.isdecimal()}
    assert length % 8 == 0
    assert all(places[str(number)][0] % dtype.itemsize == 0 for number, (dtype, _) in enumerate(sizes))
    assert sorted(places, key=lambda name: places[name]) == [*places] == ["1", "3", "2", "0", "4"]


def test_any_reader_of_safetensors_opens_a_message(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    wide, flags = torch.randn(3, dtype=torch.float64), torch.tensor([True, False, True])
    found = safetensors.load(write([flags, wide, torch.tensor(2.0, dtype=torch.bfloat16)]))
    assert torch.equal(found["0"], flags) and torch.equal(found["1"], wide) and found["2"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    "value, place",
    [
        ({"a": [1, print]}, "at ['a'][1]"),
        ({"a": frozenset()}, "at ['a']"),
        ({"a": Message}, "hold a type"),
        ({"a": {print: 1}}, "the key <built-in function print>"),
        (Message(0, "a", {}, (), extras={"X": {"f": object()}}), "at .extras['X']['f']"),
        (torch.zeros(2).to_sparse(), "not dense"),
        (np.array([print]), "array of dtype object"),
        ({"n": 1 << 20_000}, "hold a int (at ['n'])"),
    ],
    ids=["function", "frozenset", "type", "key", "extra", "sparse", "objects", "digits"],
)
def test_what_is_no_value_is_refused_when_it_is_written(value, place):
    with pytest.raises(WireError, match="A message cannot") as refused:
        write(value)
    assert place in str(refused.value)


def test_values_in_a_circle_are_refused():
    circle: list = []
    circle.append(circle)
    with pytest.raises(WireError, match="too deeply"):
        write(circle)


# -- bytes from anywhere -----------------------------------------------------------------------------------------------
def attempt(data: bytes) -> bool:
    """Return whether bytes are a message; any exception but a sentence is a failure of the test."""
    try:
        read(data)
    except WireError as error:
        assert str(error).startswith("A message") and str(error).endswith(".")
        return False
    return True


def test_every_truncation_is_refused():
    message = write([Visit(MESSAGE, Evaluate()), UPDATE])
    assert attempt(message)
    assert not any(attempt(message[:length]) for length in range(len(message)))
    assert not attempt(message + b"\0")


def test_no_flipped_byte_of_the_header_ends_in_another_exception():
    message = write([Visit(MESSAGE, Evaluate()), Lost([Gap(*ROW[:7], "", NAN, 0, "gone")]), b"ab"])
    header = 8 + struct.unpack("<Q", message[:8])[0]
    tracemalloc.start()
    for place in range(header):
        for mask in (0x01, 0x04, 0x10, 0x80):
            changed = bytearray(message)
            changed[place] ^= mask
            attempt(bytes(changed))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2**24


def forged(text: object = 0, version: object = VERSION, data: bytes = b"", **tensors: object) -> bytes:
    metadata = {"format": "fedlightning", "version": version, "message": json.dumps(text)}
    header = json.dumps({"__metadata__": metadata, **{name[1:]: entry for name, entry in tensors.items()}}).encode()
    return struct.pack("<Q", len(header)) + header + data


def place(dtype: str = "U8", shape: object = (0,), start: object = 0, end: object = 0) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}  # type: ignore[call-overload]


DEEP: object = 0
for _ in range(80):
    DEEP = [DEEP]

FORGED = {
    "not one byte": b"",
    "a header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "no JSON": struct.pack("<Q", 2) + b"{]",
    "a list": struct.pack("<Q", 2) + b"[]",
    "brackets": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "a name twice": struct.pack("<Q", 13) + b'{"a":1,"a":2}',
    "another format": struct.pack("<Q", 2) + b"{}",
    "another version": forged(version="1"),
    "a tensor larger than the message": forged(_0=place("F32", (2**40,), 0, 2**42)),
    "a shape that overflows": forged(_0=place("F32", (2**33, 2**33, 0), 0, 0)),
    "a negative shape": forged(_0=place("U8", (-1,), 0, -1)),
    "a shape of numbers that are none": forged(_0=place("U8", (True,), 0, 1), data=b"a"),
    "an unknown dtype": forged(_0=place("Q4", (1,), 0, 1), data=b"a"),
    "overlap": forged(_0=place("U8", (2,), 0, 2), _1=place("U8", (2,), 1, 3), data=b"abc"),
    "a gap": forged(_0=place("U8", (1,), 1, 2), data=b"ab"),
    "bytes too many": forged(data=b"ab"),
    "a name that is not a number": forged(_w=place()),
    "a truth value of 2": forged(_0=place("BOOL", (1,), 0, 1), data=b"\2"),
    "a tensor that is not there": forged({"tensor": 0}),
    "a tensor of truth": forged({"tensor": False}, _0=place()),
    "deep values": forged(DEEP),
    "an unknown kind": forged({"module": "os"}),
    "two kinds": forged({"tuple": [], "list": []}),
    "a key that is a list": forged({"dict": [[[], 1]]}),
    "a key twice": forged({"dict": [[1, 1], [1, 2]]}),
    "half a pair": forged({"dict": [[1]]}),
    "no list": forged({"tuple": 3}),
    "an unknown object": forged({"object": ["Popen", []]}),
    "an object without fields": forged({"object": ["Message", []]}),
    "a number in words": forged({"float": "1e9"}),
    "few numbers that are many": forged(
        {"view": [0, "torch.uint8", [10**10], [0], 0]}, _0=place("U8", (1,), 0, 1), data=b"a"
    ),
    "a view of numbers that are not there": forged(
        {"view": [0, "torch.uint8", [9], [1], 0]}, _0=place("U8", (1,), 0, 1), data=b"a"
    ),
    "a view of a part": forged({"view": [0, "torch.uint8", [1], [1], 1]}, _0=place("U8", (2,), 0, 2), data=b"ab"),
    "a view of a truth value of 2": forged(
        {"view": [0, "torch.bool", [1], [1], 0]}, _0=place("U8", (1,), 0, 1), data=b"\2"
    ),
    "a view that is none": forged({"view": [0]}, _0=place()),
    "one thing in two places": forged([[], {"ref": 1}]),
    "a circle": forged([{"ref": 0}]),
    "a class": forged({"enum": ["signal:Signals", 15]}),
    "a pickle": forged({"archive": {"tensor": 0}}, _0=place()),
    "a parameter": forged({"marked": [{"tensor": 0}, True, True, {"dict": []}]}, _0=place()),
    "half of a surrogate pair": forged("\ud800"),
    "many numbers": forged({"set": {"range": [0, 10**11, 1]}}),
    "bytes of floats": forged({"bytes": {"tensor": 0}}, _0=place("F32")),
    "an array of a dtype that numpy lacks": forged({"array": {"tensor": 0}}, _0=place("BF16")),
    "a number with many digits": struct.pack("<Q", 10_002) + b'{"a":' + b"1" * 9996 + b"}",
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_bytes_end_in_a_sentence(name):
    assert not attempt(FORGED[name])


@pytest.mark.parametrize(
    "field, value",
    [
        ("round", -1),
        ("round", 2**70),
        ("round", True),
        ("client", 3),
        ("returns", ["w"]),
        ("state", {"w": 1}),
        ("data", "x"),
    ],
)
def test_a_field_of_another_kind_is_refused(field, value):
    message = Message(0, "a", {}, ())
    setattr(message, field, value)
    with pytest.raises(WireError, match=f"{field} of its Message"):
        read(write(message))


def test_naming_one_entry_a_million_times_is_no_million_copies():
    message = forged([{"bytes": {"tensor": 0}}] * 200, _0=place("U8", (10**6,), 0, 10**6), data=bytes(10**6))
    found = read(message)
    assert all(one is found[0] for one in found)


@pytest.mark.parametrize(
    "limits", [Limits(num_bytes=100), Limits(header_bytes=50), Limits(tensors=1), Limits(values=3), Limits(depth=1)]
)
def test_limits_are_kept(limits):
    message = write([torch.ones(2), [[torch.ones(3)]]])
    assert len(read(message)) == 2
    with pytest.raises(WireError, match="refused"):
        read(message, limits)


COLLIDING = {
    "integers": [[number * (2**61 - 1), 0] for number in range(1, 400)],
    "both signs": [[sign * number * (2**61 - 1), 0] for number in range(1, 200) for sign in (1, -1)],
    "in tuples": [[{"tuple": [number * (2**61 - 1), 3]}, 0] for number in range(1, 400)],
}


@pytest.mark.parametrize("kind", ["dict", "OrderedDict", "set"])
@pytest.mark.parametrize("pairs", COLLIDING.values(), ids=COLLIDING)
def test_keys_that_are_made_to_collide_are_refused(kind, pairs):
    with pytest.raises(WireError, match="made to be slow"):
        read(forged({kind: pairs if kind != "set" else [key for key, _ in pairs]}))


def test_keys_that_happen_to_collide_are_taken():
    honest = {(a, b): a for a in range(-30, 30) for b in (-1, 0, 1)} | dict.fromkeys(range(-1000, 1000), 0.5)
    assert read(write(honest)) == honest
