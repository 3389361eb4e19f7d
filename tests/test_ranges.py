"""Ranges of arguments: what they hold, how sentences say it, and that every declared one is enforced."""

from __future__ import annotations

import functools
import inspect
import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import TensorDataset

from fedlightning import FederatedCallback, FederatedTrainer, callbacks, datamodules, virtual_time
from fedlightning.errors import ConfigurationError
from fedlightning.models import Classifier, Regressor
from fedlightning.ranges import (
    CountOrShare,
    Instance,
    Length,
    NonNegativeFloat,
    PositiveInt,
    Range,
    Share,
    allows,
    at_least_one,
    at_most_one,
    check_on_creation,
    checked,
    described,
    exactly_one,
    make_init,
    may_be_infinite,
    needs,
    number_in,
    ranges_of,
)
from fedlightning.ranges.annotations import _annotations_of
from fedlightning.ranges.together import fault_of
from fedlightning.server import loop
from fedlightning.virtual_time import FixedSpeed

if TYPE_CHECKING:
    from collections import Counter as Unknown

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("[0, 1]", [0, 1, 0.5, np.float32(0.5), np.int64(1)], [-1e-9, 1.1, NAN, INF, -INF]),
        ("(0, 1)", [1e-300, 0.999], [0, 1, NAN]),
        ("[0, inf)", [0, 1e300], [INF, NAN, -1]),
        ("(0, inf]", [INF, 3], [0, NAN, -INF]),
        ("(-inf, inf)", [-1e300, 0], [INF, -INF, NAN]),
    ],
)
def test_an_interval(interval, inside, outside):
    assert all(value in Range(interval) for value in inside)
    assert not any(value in Range(interval) for value in outside)


@pytest.mark.parametrize("interval", ["", "0, 1", "[0, 1", "[0; 1]", "[1, 0]", "[0, 1, 2]", "[a, b]", "[nan, 1]"])
def test_what_is_no_interval(interval):
    with pytest.raises(ValueError, match="is not an interval"):
        Range(interval)


STRICT = Annotated[int, Range("[1, inf)", strict=True)]


@pytest.mark.parametrize(
    ("annotation", "allowed", "refused"),
    [
        (Share, [0, 1, 0.3, np.float64(0.3)], [True, "0.3", None, [0.3], 1.1, np.bool_(True)]),
        (PositiveInt, [1, 3.0, np.int32(4)], [0, 2.5, True, "3", None, NAN, INF]),
        (STRICT, [1, np.int64(2)], [3.0, 0, True, "1"]),
        (CountOrShare, [0, 7, 0.5, 1.0], [-1, 2.0, 1.5, True, INF]),
        (Share | None, [None, 0.5], [2, "none"]),
        (NonNegativeFloat | Literal["random"], ["random", 0.1, 1], ["Random", -1, True, INF]),
        (Share | dict[str, Share], [0.5, {}, {"a": 1}], [2, {"a": 2}, [0.5], {"a": "b"}]),
        (list[Share] | dict[str, Share], [[], [0, 1], (0.5,), {"a": 0}], ["0", 0.5, [2], {"a": NAN}]),
        (Literal[1, 2], [1, 2, 1.0, np.int64(2)], [True, "1", 3, None]),
        (Literal["a", "b"], ["a", np.str_("b")], ["c", 1, None, ["a"]]),
        (Literal[True, "b"], [True, "b"], [1, "a"]),
        (list[Literal["a", "b"]] | None, [None, ["a"], ()], ["a", ["c"]]),
        (int | str, [1, "a"], []),  # nothing is declared
        (Annotated[list[Share], Length()], [[1], (0, 0)], [[], "a", [2], 0.5]),
        (Annotated[list[str], Length(2, different=True)] | None, [None, ["a", "b"]], [["a"], ["a", "a"], "ab"]),
        (Annotated[dict[str, Any], Length()], [{"a": 1}], [{}, None, "ab"]),
        (Annotated[nn.Module, Instance()] | None, [None, nn.Linear(1, 1)], [nn.Linear, "Linear", 3, [nn.Linear(1, 1)]]),
    ],
)
def test_annotations(annotation, allowed, refused):
    assert [value for value in allowed if not allows(annotation, value)] == []
    assert [value for value in refused if allows(annotation, value)] == []


def test_words():
    assert described(Share | None) == "a number in [0, 1], or None"
    assert described(CountOrShare) == "a whole number in [0, inf), or a number in [0, 1]"
    assert described(Annotated[dict[str, Any], Length(3)]) == "a table of at least 3"
    assert described(Annotated[list[Share], Length(different=True)]) == (
        "a list of at least one, all different, each a number in [0, 1]"
    )
    assert described(Annotated[Counter, Instance()] | None) == "a Counter, or None"
    assert described(Literal["a", "b"] | PositiveInt) == "'a' or 'b', or a whole number in [1, inf)"
    assert (
        described(list[Share] | dict[str, Share])
        == "a list, each a number in [0, 1], or a table, each a number in [0, 1]"
    )


class Together(FederatedCallback):
    @exactly_one("column", "rows", why="say who has what.")
    @at_least_one("rows", "column", "size", why="give one.")
    @at_most_one("steps", "seconds", why="leave one out.")
    @needs("limit", "column", why="nobody is limited.")
    @needs("mode", "size", value=3, why="set it.")
    def __init__(self, column=None, rows=None, steps=0, seconds=0.0, limit=None, mode="a", size=3) -> None:
        self.column, self.rows, self.steps, self.seconds = column, rows, steps, seconds
        self.limit, self.mode, self.size = limit, mode, size


def test_a_rule_above_the_check_holds_as_well_and_a_misspelt_one_is_refused():
    class Above:
        @at_most_one("steps", "seconds", why="leave one out.")
        @checked
        def __init__(self, steps: int | None = None, seconds: float | None = None) -> None: ...

    with pytest.raises(ConfigurationError, match="both steps=1 and seconds=2"):
        Above(1, 2)
    with pytest.raises(TypeError, match="no argument step, "):
        needs("seconds", "step", why="")(Above.__init__)


def test_of_several_arguments_any_two_are_too_many():
    class Three:
        @checked
        @at_most_one("one", "two", "three", why="choose.")
        def __init__(self, one: int = 0, two: int = 0, three: int = 0) -> None: ...

    for given, said in (
        ({"one": 1, "three": 3}, "one=1 and three=3"),
        ({"one": 1, "two": 2, "three": 3}, "one=1 and two=2"),
    ):
        with pytest.raises(ConfigurationError, match=f"Three got both {said}: choose"):
            Three(**given)
    assert fault_of(functools.wraps(Three.__init__, updated=())(lambda *args: None), {"one": 1, "two": 2}) is not None


def test_a_length_of_what_has_none():
    different = Annotated[list[Any], Length(1, different=True)]
    assert not allows(different, torch.tensor(3)) and not allows(different, [[1], [1]])


class FromTogether(Together):
    def __init__(self, column=None, mode="a", **rest: Any) -> None:
        super().__init__(column, mode=mode, **rest)


class WithoutDefaults(FederatedCallback):
    @at_least_one("noise", "budget", why="give one.")
    def __init__(self, noise: float | None, budget: float | None) -> None:
        self.noise, self.budget = noise, budget


class HasDefaults(WithoutDefaults):
    def __init__(self, noise: float | None = None, budget: float | None = None) -> None:
        super().__init__(noise, budget)


def test_none_is_not_given_where_a_base_has_no_defaults():
    with pytest.raises(ConfigurationError, match="HasDefaults got neither noise nor budget: give one"):
        HasDefaults()
    assert HasDefaults(budget=1.0).budget == 1.0


@pytest.mark.parametrize("kind", [Together, FromTogether])
def test_arguments_that_do_not_go_together(kind):
    for given, sentence in (
        ({}, "neither column nor rows: say who has what."),
        (
            {"column": "c", "rows": nn.Linear(2, 2)},
            "both column='c' and rows=Linear(in_features=2, out_features=2, bias=True):",
        ),
        ({"column": "c", "rows": object()}, "both column='c' and rows=<object>:"),
        ({"column": "c", "steps": 1, "seconds": 0.5}, "both steps=1 and seconds=0.5: leave one out."),
        ({"rows": 1, "limit": 3}, "limit=3 without column: nobody is limited."),
        ({"rows": 1, "mode": "b", "size": 4}, "mode='b' without size=3: set it."),
    ):
        with pytest.raises(ConfigurationError) as caught:
            kind(**given)
        assert str(caught.value).startswith(f"{kind.__name__} got {sentence}")
    for given in (
        {"column": 0, "seconds": 2.5, "mode": "".join(["a"]), "steps": 0.0},
        {"column": 0},
        {"rows": 1, "steps": 0, "seconds": 1},
        {"column": 1, "limit": 1, "mode": "b", "size": 3},
    ):
        assert kind(**given).column == given.get("column")


class Base:
    @checked
    def __init__(
        self, share: Share = 0.5, limit: Annotated[float, Range("(0, inf]", "No limit is inf.")] = 1.0
    ) -> None:
        self.share, self.limit = share, limit


class Child(Base):
    def __init__(self, kind: Literal["a", "b"] = "a", unknown: Unknown | None = None, **rest: Any) -> None:
        super().__init__(**rest)


def test_the_sentence_names_class_argument_value_and_range():
    with pytest.raises(ConfigurationError) as caught:
        Child(limit=0)
    assert str(caught.value) == "Child got limit=0. Use a number in (0, inf]. No limit is inf."
    with pytest.raises(ConfigurationError, match=r"Base has no argument 'limits'\. Did you mean limit\?"):
        Base(limits=2)
    with pytest.raises(ConfigurationError, match=r"Base got 3, and takes share, limit without a name\. Leave it out"):
        Base(0.5, 2, 3)


def test_a_subclass_has_the_ranges_of_its_base():
    assert may_be_infinite(Child, "limit") and not may_be_infinite(Child, "share")
    assert ranges_of(Base) == {"share": "a number in [0, 1]", "limit": "a number in (0, inf]"}
    assert ranges_of(Child) == {"kind": "'a' or 'b'"}
    assert may_be_infinite(callbacks.TIFF, "gamma")
    assert callbacks.TIFF(gamma=INF).gamma == INF


def test_a_dataclass_can_be_checked():
    @check_on_creation
    @dataclass
    class Options:
        share: Share = 0.5

    assert Options(1).share == 1
    with pytest.raises(ConfigurationError, match=r"Options got share=2\. Use a number in \[0, 1\]\."):
        Options(2)


def test_arguments_that_are_declared_in_the_body_are_checked_as_those_of_a_constructor():
    @at_most_one("share", "limit", why="both bound it. Leave one out.")
    @make_init
    class Options:
        share: Share = 0.5
        limit: Annotated[float, Range("(0, inf)")] | None = None

        def __post_init__(self) -> None:
            self.twice = 2 * self.share

    assert Options(0.25).twice == 0.5 and Options() != Options() and hash(Options()) is not None
    for options, fault in (({"share": 2}, r"share=2\. Use a number in \[0, 1\]"), ({"limit": 0}, "limit=0")):
        with pytest.raises(ConfigurationError, match=f"Options got {fault}"):
            Options(**options)
    with pytest.raises(ConfigurationError, match="both bound it"):
        Options(share=0.1, limit=1.0)
    with pytest.raises(ConfigurationError, match=r"Options has no argument 'shares'\. Did you mean share\?"):
        Options(shares=0.1)


def test_a_configuration_has_the_types_of_arguments_that_are_declared_in_the_body():
    """A dataclass was found there, of which jsonargparse read no type: the client "0" became a number."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(FederatedCallback, "callback")
    config = 'callback: {class_path: fedlightning.callbacks.pFedKnow, init_args: {server: "0"}}'
    assert parser.instantiate_classes(parser.parse_string(config)).callback.server == "0"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: callbacks.FedProx(mu="0.1"), r"FedProx got mu='0\.1'\. Use a number in \[0, inf\)"),
        (lambda: callbacks.FedKD(detach="yes"), r"FedKD got detach='yes'\. Use True or False"),
        (lambda: callbacks.FedKD(detach=1), "FedKD got detach=1"),
        (lambda: callbacks.FedPer(personal=3), r"personal=3\. Use a text, a list, each a text, or None"),
        (lambda: callbacks.FedPer(personal=["a", 3]), r"personal=\['a', 3\]"),
        (lambda: callbacks.LocalCheckpoint(monitor=None), "monitor=None. Use a text"),
        (lambda: datamodules.DigitsDataModule("iid"), r"partitioner='iid'\. Use a Partitioner, or None"),
        (lambda: datamodules.DigitsDataModule(batch_size="32"), r"batch_size='32'\. Use a whole number in \[1, inf\)"),
        (lambda: datamodules.DigitsDataModule(seed=0.5), r"seed=0\.5\. Use a whole number"),
    ],
)
def test_values_of_another_kind_are_refused_as_in_a_file(make, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        make()


def test_what_an_annotation_forgets_may_be_given_where_it_is_the_default():
    class Mine(FederatedCallback):
        def __init__(self, name: str = None, each: list[str] = ()) -> None:  # noqa: RUF013
            self.name, self.each = name, each

    assert Mine(name=None).name is None and Mine(each=("a",)).each == ("a",)
    with pytest.raises(ConfigurationError, match="Mine got name=3"):
        Mine(name=3)


def test_ranges_leave_hyperparameters_as_they_are():
    """Lightning reads them from the frames of the constructors."""

    class Wider(Classifier):
        def __init__(self, width: int = 4) -> None:
            super().__init__(nn.Linear(width, 2), num_classes=2, lr=0.1)

    class Wrapping(Regressor):
        def __init__(self, width: int = 4) -> None:
            super().__init__(nn.Linear(width, 1), huber_delta=2.0)

    assert Wider(8).hparams["width"] == 8 and Wider().hparams["lr"] == 0.1
    assert Wrapping(8).hparams["width"] == 8
    for wrong, sentence in (({"num_classes": 0}, "num_classes=0"), ({"class_weights": [1, NAN]}, "class_weights=")):
        with pytest.raises(ConfigurationError, match=f"Classifier got {sentence}"):
            Classifier(nn.Linear(4, 2), **{"num_classes": 2, **wrong})
    assert issubclass(Wider, LightningModule)


# -- every declared range --------------------------------------------------------------------------------------------
def _samples() -> TensorDataset:
    return TensorDataset(torch.zeros(4, 2), torch.zeros(4).long())


TEXTS = tempfile.TemporaryDirectory()


def _text_folder() -> str:
    for name in "ab":
        for number in range(4):
            file = Path(TEXTS.name, name, f"{number}.txt")
            file.parent.mkdir(exist_ok=True)
            file.write_text("text")
    return TEXTS.name


NEEDED = {
    "TextFolderDataModule": lambda: {
        "root": _text_folder(),
        "partitioner": datamodules.IIDPartitioner(2),
        "tokenizer": datamodules.ByteTokenizer(),
    },
    "PrivateLR": lambda: {"factor": 1.0},
    "ClientDP": lambda: {"delta": 1e-3, "noise_multiplier": 1.0},
    "SampleDP": lambda: {"delta": 1e-3, "noise_multiplier": 1.0},
    "GivenDataModule": lambda: {"clients": {"a": {"x": [[1.0]], "y": [1.0]}}},
    "LazyClients": lambda: {"num_clients": 2, "make": lambda number: {}, "sizes": {"train": 2}},
    "ModalityDataset": lambda: {"inputs": {"a": torch.zeros(4, 2)}, "y": torch.zeros(4).long()},
    "MixtureDataModule": lambda: {"source": datamodules.DigitsDataModule()},
    "Partitioned": lambda: {"datamodule": datamodules.DigitsDataModule(), "partitioner": datamodules.IIDPartitioner(2)},
    "PublicDataModule": lambda: {"public": _samples()},
    "ShiftedDataModule": lambda: {
        "source": datamodules.DigitsDataModule(),
        "features": "noise",
        "strength": 1.0,
    },
    "DriftingDataModule": lambda: {"source": datamodules.DigitsDataModule(), "windows": 2},
    "SurvivalTableDataModule": lambda: {"path": "table.csv", "target": "time", "event": "status", "client": "who"},
    "HuggingFaceDataModule": lambda: {"source": "folder", "inputs": "x", "client": "who"},
    "TextTableDataModule": lambda: {"path": "table.csv", "target": "y", "text": "note", "client": "who"},
    "TabularFederatedDataModule": lambda: {"path": "table.csv", "target": "y", "client": "who"},
    "AddressedSampler": lambda: {"size": 4, "client": "a"},
    "TextDataModule": lambda: {"clients": {"a": ([{"input_ids": [1, 2]}],)}},
}


ROOTED = (
    "ImageFolderDataModule",
    "ShakespeareDataModule",
    *(name for name in datamodules.__all__ if name.startswith("LEAF")),
)
NEEDED |= dict.fromkeys(ROOTED, lambda: {"root": "data"})


def _classes() -> Iterator[type]:
    for package in (callbacks, datamodules, loop, virtual_time):
        for name in package.__all__:
            kind = getattr(package, name)
            if isinstance(kind, type) and not inspect.isabstract(kind) and ranges_of(kind):
                yield kind


def _numbers(annotation: Any) -> Iterator[tuple[type, Range, Any]]:
    """Yield every range in an annotation, its type, and a function that puts a number where it belongs."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from ((inner[0], one, lambda value: value) for one in annotation.__metadata__ if isinstance(one, Range))
        yield from _numbers(inner[0])
    elif origin is dict:
        yield from ((kind, one, lambda value: {"a": value}) for kind, one, _ in _numbers(inner[1]))
    elif inner and origin is not Literal:
        one_of = isinstance(origin, type) and hasattr(origin, "__iter__")
        for each in inner:
            for kind, one, put in _numbers(each):
                yield kind, one, (lambda value: [value]) if one_of else put


def _ends(kind: type, one: Range) -> tuple[list[float], list[float]]:
    """Return the numbers just inside a range and those just outside."""
    inside, outside = [], [NAN]
    for end, closed, away in zip(
        map(float, one.interval[1:-1].split(",")),
        (one.interval[0] == "[", one.interval[-1] == "]"),
        (-1, 1),
        strict=True,
    ):
        if math.isinf(end):
            (inside if closed else outside).append(end)
            continue
        end = int(end) if kind is int else end
        beyond = end + away if kind is int else math.nextafter(end, away * INF)
        within = end - away if kind is int else math.nextafter(end, -away * INF)
        inside.append(end if closed else within)
        outside.append(beyond if closed else end)
    return inside, outside


@pytest.mark.parametrize("kind", list(_classes()), ids=lambda kind: kind.__name__)
def test_every_declared_range_is_enforced(kind):
    parameters = inspect.signature(kind).parameters
    needed = NEEDED.get(kind.__name__, dict)()
    if "num_clients" in parameters and "num_clients" not in needed:
        needed["num_clients"] = 2
    for name, annotation in _annotations_of(kind).items():
        if name not in parameters:
            continue
        refusal = rf"{kind.__name__} got {name}="
        found = [(put, one, *_ends(of, one)) for of, one, put in _numbers(annotation)]
        for put, _, inside, outside in found:
            for value in outside:
                if not any(value in other for _, other, *_ in found):
                    with pytest.raises(ConfigurationError, match=refusal):
                        kind(**{**needed, name: put(value)})
            for value in inside:
                try:
                    kind(**{**needed, name: put(value)})
                except ValueError as error:  # another argument may not go with it
                    assert not str(error).startswith(f"{kind.__name__} got {name}={put(value)!r}. Use a"), error
        if not found:
            with pytest.raises(ConfigurationError, match=refusal):
                kind(**{**needed, name: object()})


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (tuple[PositiveInt, ...], [(), (1, 2), [3]], [(0,), (1, -1), 1]),
        (tuple[PositiveInt, Share], [(5, 0.2), [1, 1]], [(0, 0.5), (1, 2), (1,), (1, 0.5, 0.5)]),
        (list[Share], [[], [0.5]], [iter([0.5]), (share for share in [0.5])]),
        (PositiveInt, [10**300], [10**400, -(10**400), 0]),
        (NonNegativeFloat, [1e300], [10**400]),
    ],
)
def test_lists_of_every_kind_and_very_large_numbers(annotation, good, bad):
    for value in good:
        assert allows(annotation, value), value
    for value in bad:
        assert not allows(annotation, value), value


class Several(FederatedCallback):
    def __init__(self, *parts: PositiveInt, **shares: Share) -> None:
        self.parts, self.shares = parts, shares


def test_what_is_said_of_each_of_several_arguments_is_checked_of_each():
    assert Several(1, 2, body=0.5).parts == (1, 2)
    for wrong in (lambda: Several(1, 0), lambda: Several(body=2)):
        with pytest.raises(ConfigurationError, match=r"Several got (parts=\(1, 0\)|shares=\{'body': 2\})"):
            wrong()


class Held:
    def __init__(self, held: PositiveInt = 1) -> None:
        self.held = held


class WithHeld(Held, FederatedCallback):
    """Its constructor is a mixin's."""


def test_a_constructor_of_a_mixin_is_checked():
    assert WithHeld(2).held == 2 and Held(0).held == 0
    with pytest.raises(ConfigurationError, match=r"WithHeld got held=0. Use a whole number in \[1, inf\)"):
        WithHeld(0)


def test_ranges_are_known_where_only_type_checkers_import_them():
    names = {"__name__": "elsewhere", "FederatedCallback": FederatedCallback}
    exec(
        "from __future__ import annotations\n"
        "class Elsewhere(FederatedCallback):\n"
        "    def __init__(self, held: PositiveInt = 1) -> None:\n"
        "        self.held = held\n",
        names,
    )
    with pytest.raises(ConfigurationError, match="Elsewhere got held=0"):
        names["Elsewhere"](0)


class Plainly(FederatedCallback):
    """Arguments of which nothing but the kind is said."""

    def __init__(self, rate: float = 0.1, count: int | None = None, rates: list[float] | None = None) -> None:
        self.rate, self.count, self.rates = rate, count, rates


@pytest.mark.parametrize("value", [INF, -INF, float("nan"), 10**400, -(10**400), 10**5000], ids=list("abcdef"))
def test_a_number_is_finite_where_only_its_kind_is_said(value):
    for options in ({"rate": value}, {"count": value}):
        with pytest.raises(
            ConfigurationError, match=r"Plainly got (rate|count)=.*Use a .*number.* It must be finite\."
        ):
            Plainly(**options)
    with pytest.raises(ConfigurationError, match=r"Plainly got rates=.*Use a list, each a number, or None\."):
        Plainly(rates=[0.1, value])
    with pytest.raises(ConfigurationError, match=r"gradient_clip_val=.*Use a number .* It must be finite"):
        FederatedTrainer(gradient_clip_val=value)
    with pytest.raises(ConfigurationError, match=r"FixedSpeed got seconds_per_visit="):
        FixedSpeed(value)
    assert not allows(Annotated[float, Range("(0, inf]")], value) or value == INF


@pytest.mark.parametrize("text", ["1_0", "１０", "٣", "", "ten"])
def test_a_number_in_a_text_has_plain_digits(text):
    with pytest.raises(ValueError, match="could not convert"):
        number_in(text)


def test_numbers_are_pythons_and_numpys():
    assert type(callbacks.FedProx(mu=np.float32(0.5)).mu) is float
    assert type(callbacks.IFCA(num_clusters=np.int64(2)).num_clusters) is int
    with pytest.raises(ConfigurationError, match=r"FedProx got mu=Fraction\(1, 10\)"):
        callbacks.FedProx(mu=Fraction(1, 10))
