"""What a request to a site may say: for each field of each message a rule, by the site's own configuration.

The wire has checked types already (:mod:`fedlightning.wire.objects`). A server that holds every key may still ask for more than
the configuration gives, so nothing here is taken from the request that is judged. Tests walk all fields: one without a rule is red.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedlightning.engines.sites.window import MOST
from fedlightning.federation.checks import PLAIN, CheckThere
from fedlightning.federation.deploy import Deploy
from fedlightning.federation.engine import Visit
from fedlightning.federation.loops.synchronous import ROUNDS
from fedlightning.federation.sanity import TryStep
from fedlightning.messages import Message, check_extras
from fedlightning.scoring.rows import UNSEEN
from fedlightning.scoring.server_model import ServerModel
from fedlightning.scoring.tasks import LOCAL, ScoreClient, ScoredModel, ScoreModel
from fedlightning.tensors import module_state
from fedlightning.visit.record import ClientRecord
from fedlightning.visit.requests import Evaluate
from fedlightning.visit.runner import LocalRunner

TEXT = 256
"""Characters of a name in a request, such as a tag or a model's key."""
NAMES = 2**20
"""Names in a list, such as all clients of a federation."""
REPEATS = 1000
"""Trainings from one version of a client's record: each is a try of a visit whose answer the server has not kept."""
A_ROUND = 2**16
"""Visits of a client in a round, in a method that plans its rounds."""
SPLITS, STAGES, MODELS = ("val", "test"), ("G", "L1", "L2"), ("global", "personal", UNSEEN)


@dataclass(frozen=True)
class Here:
    """What a site knows of itself: what its rules go by.

    Attributes:
        runner: Its clients, module, callbacks and settings.
        exports: Whether it gives clients' models away.
        client: The client that the request is about.
    """

    runner: LocalRunner
    exports: bool = False
    client: str = ""

    @property
    def last(self) -> int:
        """The number of the last round, which visits after it have."""
        return self.runner.settings.max_rounds

    @property
    def work(self) -> int:
        """The most local epochs or steps that a method may ask for."""
        usual = self.runner.settings.work
        return max([usual, *(callback.most_work(usual) for callback in self.runner.callbacks)])

    def claims(self, name: str) -> bool:
        """Whether any callback has a method."""
        return any(callback.claims(name) for callback in self.runner.callbacks)

    def state(self, owner: tuple[str, str] | None = None) -> Mapping[str, Tensor]:
        """Return the entries of the client's model, or of a model of the server."""
        blueprint = self.runner.blueprint
        architecture, path = owner or (blueprint.architecture_of(self.client), "")
        return module_state(blueprint.reference(architecture).get_submodule(path))


Rule = Callable[[Here, Any], str | None]
"""Says why a value is not allowed, as the end of a sentence; `None`: it is."""


def _when(fits: Callable[[Here, Any], bool], words: str | Callable[[Here], str]) -> Rule:
    return lambda here, value: None if fits(here, value) else words if isinstance(words, str) else words(here)


def _count(most: Callable[[Here], int], what: str) -> Rule:
    return _when(
        lambda here, value: type(value) is int and 0 <= value <= most(here),
        lambda here: f"it is {what} from 0 to {most(here)} here",
    )


def _one_of(*words: Any) -> Rule:
    return _when(lambda here, value: value in words, f"it is one of {', '.join(map(repr, words))}")


def _all_in(words: Callable[[Here], Collection[str]], what: str) -> Rule:
    return _when(
        lambda here, value: len(value) <= NAMES and len(set(value)) == len(value) and set(value) <= set(words(here)), what
    )


def _is_text(value: Any) -> bool:
    return type(value) is str and len(value) <= TEXT


def _within(here: Here, value: Any) -> str | None:
    return fault(here, value)


_TEXT = _when(lambda here, value: _is_text(value), f"it is a text of at most {TEXT} characters")
_TEXTS = _when(
    lambda here, value: type(value) in (list, tuple) and len(value) <= NAMES and all(map(_is_text, value)),
    f"it is a list of at most {NAMES} names of at most {TEXT} characters",
)
_BOOL = _when(lambda here, value: type(value) is bool, "it is yes or no")
_SPLITS = _all_in(lambda here: SPLITS, f"splits to score are {' and '.join(SPLITS)}, each once")
_ROUND = _count(lambda here: here.last, "a round")
_OWN = _when(lambda here, value: value in here.runner.data.client_ids, "no client of this site that trains has that name")
_PLAIN = _when(
    lambda here, value: (
        len(value) <= NAMES and all(_is_text(k) and (not isinstance(v, str) or _is_text(v)) for k, v in value.items())
    ),
    "it holds plain values by name",
)


def _state(here: Here, value: Mapping[str, Tensor]) -> str | None:
    own = here.state()
    for name, tensor in value.items():
        if name not in own:
            return f"the client's model has no '{name:.80}'"
        known = own[name]
        smaller = tensor.dim() == known.dim() and all(a <= b for a, b in zip(tensor.shape, known.shape, strict=True))
        if not smaller or tensor.is_floating_point() != known.is_floating_point():
            return f"'{name}' is {tuple(tensor.shape)} of {tensor.dtype}, and the model's is {tuple(known.shape)} of {known.dtype}"
    return None


def _returns(here: Here, value: Collection[str]) -> str | None:
    if len(set(value)) != len(value):
        return "it names an entry twice"
    return here.runner.leaving(here.client).fault(value)


def _extras(here: Here, value: Mapping[str, Any]) -> str | None:
    shapes = {name: tensor.shape for name, tensor in here.state().items()}
    module = here.runner.blueprint.reference(here.runner.blueprint.architecture_of(here.client))
    wires = {callback.key: callback.wire(module).down for callback in here.runner.callbacks}
    for key, extras in value.items():
        if key not in wires:
            return f"no callback of this site has the key '{key:.80}'"
        try:
            check_extras(key, extras, wires[key], shapes)
        except ValueError as error:
            return str(error)
    return None


def _model(here: Here, value: ServerModel) -> str | None:
    try:
        own = here.state(value.owner)
    except (AttributeError, KeyError):
        return "no architecture of this site has such a model"
    shapes = {name: tensor.shape for name, tensor in value.state.items()}
    return None if shapes == {name: tensor.shape for name, tensor in own.items()} else "its entries are not that model's"


def _visit_number(here: Here, value: int) -> bool:
    return value % ROUNDS <= here.last and value // ROUNDS <= (A_ROUND if here.claims("plan_round") else 0)


RULES: dict[type, dict[str, Rule]] = {
    Message: {
        "round": _ROUND,
        "client": _when(lambda here, value: value == here.client, "it is about another client than its task"),
        "state": _state,
        "returns": _returns,
        "extras": _extras,
        "work": lambda here, value: None if value is None else _count(lambda one: one.work, "work")(here, value),
        "model": _TEXT,
        "data": _one_of("train"),
        "tag": _TEXT,
        "visit": _when(_visit_number, "it is the number of no visit that the method plans"),
        "links": _when(
            lambda here, value: value is None or (here.claims("neighbours") and value < NAMES),
            "only a method without a server has links",
        ),
    },
    Evaluate: {
        "splits": _SPLITS,
        "data": _all_in(lambda here: (LOCAL,), "a site scores on its clients' own data"),
        "clients": _one_of(None),
    },
    Visit: {
        "message": _within,
        "evaluate": _within,
        "round": lambda here, value: None if value is None else _ROUND(here, value),
    },
    ScoredModel: {
        "round": _count(lambda here: here.last + 1, "a round"),
        "stage": _one_of(*STAGES),
        "model": _one_of(*MODELS),
        "checkpoint": _TEXT,
    },
    ScoreClient: {
        "message": _within,
        "evaluate": _within,
        "scored": _within,
        "others": _TEXTS,
        "kept": _TEXT,
        "shared": _when(lambda here, value: value is None or len(value) <= NAMES, "it has too many entries"),
        "known": _when(
            lambda here, value: all(split in SPLITS and data == LOCAL and len(found[0]) <= NAMES for (split, data), found in value.items()),
            "scores are known by split, on the clients' own data",
        ),
    },
    ScoreModel: {
        "model": _model,
        "clients": _when(lambda here, value: 0 < len(value) == len(set(value)) <= NAMES, "it names clients, each once"),
        "evaluate": _within,
        "scored": _within,
        "others": _TEXTS,
    },
    Deploy: {
        "message": _within,
        "kept": _TEXT,
        "stage": _one_of(*STAGES),
        "write": _one_of(True),
        "folder": _one_of(None),
        "about": _PLAIN,
        "shared": _one_of(None),
        "bring": _when(lambda here, value: not value or here.exports, "models of clients do not leave this site"),
    },
    CheckThere: {
        "callback": _when(lambda here, value: value in {one.key for one in here.runner.callbacks}, "there is no such callback"),
        "architecture": _when(lambda here, value: value in here.runner.blueprint.architectures, "there is no such model"),
        "client": _OWN,
        "facts": _all_in(lambda here: PLAIN, "it holds other facts than a check is told"),
        "shared": _when(
            lambda here, value: all(map(_is_text, value)) and all(_TEXTS(here, names) is None for names in value.values()),
            "it holds names by callback",
        ),
        "batches": _PLAIN,
        "pooled": _all_in(lambda here: ("train", *SPLITS), "there is no such split"),
        "splits": _all_in(lambda here: ("train", *SPLITS), "there is no such split"),
        "is_mixed": _BOOL,
        "has_public": _BOOL,
    },
    TryStep: {"client": _OWN, "split": _one_of("train", *SPLITS), "listen": _BOOL},
}
"""By class and field of what a server sends."""

_NUMBER = _when(lambda here, value: _is_word(value), "it is a name of letters and digits")
ENVELOPES: dict[str, dict[str, Rule]] = {
    "hello": {
        "run": _when(
            lambda here, value: isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None,
            "the name of a run is 32 of the digits 0-9 and a-f",
        ),
        "agreement": _when(lambda here, value: isinstance(value, dict), "it says how the server is configured"),
        "assigned": _when(
            lambda here, value: (
                isinstance(value, dict)
                and len(value) <= NAMES
                and all(_is_text(word) for pair in value.items() for word in pair)
            ),
            "it says who has which model",
        ),
        "stage": _one_of("fit", "test"),
        "left_out": _TEXTS,
        "public": _when(
            lambda here, value: value is None or (isinstance(value, dict) and set(value) == {"samples", "batch_size", "content"}),
            "it says which public data the server has",
        ),
        "export": _BOOL,
        "template": _when(lambda here, value: isinstance(value, dict), "it holds the weights that the run begins with"),
        "parts": _TEXTS,
    },
    "tasks": {
        "tasks": _when(lambda here, value: isinstance(value, list) and len(value) <= MOST, f"it is a list of at most {MOST}"),
        "budget": _when(
            lambda here, value: isinstance(value, int | float) and 0 <= value < math.inf, "it is a number of seconds"
        ),
    },
    "describe": {"leave_out": _TEXTS, "parts": _TEXTS},
    "ping": {},
    "task": {
        "task": lambda here, value: None,  # the site looks at its kind, and RULES at the rest
        "number": _NUMBER,
        "version": _when(lambda here, value: value == "" or _is_word(value), "such are no names of a run or of a version"),
        "keep": _when(
            lambda here, value: value is None or (isinstance(value, list) and len(value) <= MOST and all(map(_is_word, value))),
            "it names the versions of a record that stay",
        ),
    },
}
"""By what is asked for, what a request holds beside `do` and `session`, all of it; `"task"`: a part of `"tasks"`."""


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isalnum() and len(value) <= TEXT


def fault(here: Here, value: Any) -> str | None:
    """Return what is wrong with an object that a server has sent, as a sentence; `None` if nothing is."""
    fields = {name: (rule, getattr(value, name)) for name, rule in RULES[type(value)].items()}
    return _first(fields, here, type(value).__name__)


def fault_of_request(do: str, asked: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a request, tasks apart, as a sentence; `None` if nothing is."""
    rules = ENVELOPES[do]
    unknown = next((name for name in asked if name not in (*rules, "do", "session")), None)
    if unknown is not None:
        return f"'{unknown!s:.40}' is not part of it"
    return _first({name: (rule, asked.get(name)) for name, rule in rules.items()}, None, do)


def _first(found: Mapping[str, tuple[Rule, Any]], here: Any, what: str) -> str | None:
    for name, (rule, value) in found.items():
        try:
            reason = rule(here, value)
        except (TypeError, ValueError, AttributeError):  # of a kind that the rule does not foresee
            reason = "it is of another kind"
        if reason is not None:
            if rule is _within:
                return reason
            said = f" is {value!r:.60}" if isinstance(value, int | float | str) else ""
            return f"{name} of its {what}{said}: {reason}"
    return None


def out_of_turn(here: Here, task: Any, record: ClientRecord) -> str | None:
    """Return why a visit does not follow on the record that it starts from; `None` if it does.

    A retry, a restart and a run that goes back to an earlier state all name an earlier version of the record: its round is earlier
    too. So a round that has been is trained again from the record before it, or not at all; but a method that plans its rounds may
    visit a client several times in one.
    """
    if not isinstance(task, Visit) or task.message.work == 0:
        return None
    now, last = task.message.round, record.last_round
    if now > last or (now == last and here.claims("plan_round")):
        return None
    return (
        f"round {now + 1} of client '{here.client}' does not follow on its record, which has trained in round {last + 1}: a server "
        "that goes back names an earlier version of the record"
    )
