"""What a task for a site may say: for each field of each message a rule, by the site's own configuration.

The wire has checked types already (:mod:`fedlightning.wire.objects`). A server that holds every key may still ask for more
than the configuration gives, so nothing here is taken from the request that is judged. Tests walk all fields: one without a
rule is red.

What a task is, in words for people.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedlightning.client.record import ClientRecord
from fedlightning.client.requests import Evaluate
from fedlightning.client.runtime import ClientRuntime
from fedlightning.contract import Change
from fedlightning.contract.messages import Message, check_extras
from fedlightning.deployment.export import Deploy
from fedlightning.engines.contract import Visit
from fedlightning.engines.score_tasks import ScoreClient, ScoredModel, ScoreModel, ServerModel
from fedlightning.guards.preflight_task import FACTS, PreflightTask
from fedlightning.guards.step_trials import StepTrial
from fedlightning.privacy.outgoing import make_outgoing_filter
from fedlightning.scores.rows import LOCAL, UNSEEN
from fedlightning.server.loop import ROUNDS
from fedlightning.sites.message_checks import (
    A_TEXT,
    NAMES,
    TEXT,
    TEXTS,
    YES_OR_NO,
    Rule,
    all_in,
    count,
    first_fault,
    is_small,
    one_of,
    small,
    when,
)
from fedlightning.sites.status import of_clients
from fedlightning.tensors import module_state

VERBS = {Visit: "trains", ScoreClient: "scores", ScoreModel: "scores", Deploy: "writes the model of"}


def describe_task(task: Any) -> str:
    """Return what a site does that carries out a task, such as "trains client a"."""
    verb = next((word for kind, word in VERBS.items() if isinstance(task, kind)), "checks")
    clients = [task.client] if task.client is not None else list(getattr(task, "clients", ()))
    return f"{verb} {of_clients(clients)}"


VISITS_A_ROUND = 100
"""Visits of a client in a round, at most, in a method that plans its rounds."""
REPEATS_A_ROUND = 100
"""How often else a client is asked for anything in a round: once or twice, and again after failures and new starts."""
GREETED = 1000
"""Greetings in a round that begin something new at a site, and questions about its data."""
AT_HOME = "models of clients do not leave this site"
SPLITS, STAGES, MODELS = ("val", "test"), ("G", "L1", "L2"), ("global", "personal", UNSEEN)


@dataclass(frozen=True)
class Here:
    """What a site knows of itself: what its rules go by.

    Attributes:
        runner: Its clients, module, callbacks and settings.
        exports: Whether it gives clients' models away.
        client: The client that the request is about.
    """

    runner: ClientRuntime
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
        asked = (callback.facts.most_work for callback in self.runner.callbacks)
        return max([usual, *(most(usual) for most in asked if most is not None)])

    def claims(self, name: str) -> bool:
        """Whether any callback has a method."""
        return any(callback.claims(name) for callback in self.runner.callbacks)

    def state(self, owner: tuple[str, str] | None = None) -> Mapping[str, Tensor]:
        """Return the entries of the client's model, or of a model of the server."""
        blueprint = self.runner.blueprint
        architecture, path = owner or (blueprint.architecture_of(self.client), "")
        return module_state(blueprint.reference(architecture).get_submodule(path))


SMALL = when(
    lambda here, value: is_small(value), f"its texts have at most {TEXT} characters, and its lists {NAMES} entries"
)


def _within(here: Here, value: Any) -> str | None:
    return fault(here, value)


_SPLITS = all_in(lambda here: SPLITS, f"splits to score are {' and '.join(SPLITS)}, each once")
_ROUND = count(lambda here: here.last, "a round")
_OWN = when(
    lambda here, value: value in here.runner.data.client_ids, "no client of this site that trains has that name"
)


def _state(here: Here, value: Mapping[str, Tensor]) -> str | None:
    state = here.state()
    for name, tensor in value.items():
        if name not in state:
            return f"the client's model has no '{name:.80}'"
        entry = state[name]
        smaller = tensor.dim() == entry.dim() and all(a <= b for a, b in zip(tensor.shape, entry.shape, strict=True))
        if not smaller or tensor.is_floating_point() != entry.is_floating_point():
            model = f"{tuple(entry.shape)} of {entry.dtype}"
            return f"'{name}' is {tuple(tensor.shape)} of {tensor.dtype}, and the model's is {model}"
    return None


def _kept_private(here: Here, value: Message) -> str | None:
    """Refuse a message that brings entries instead of the client's own: their scores would tell of the data alone."""
    reason = fault(here, value)
    private = next(
        (name for name in value.state if name in make_outgoing_filter(here.runner.blueprint, here.client).private), None
    )
    if reason is None and private is not None and not here.runner.callbacks.making(Change.PRIVATE):
        return f"state of its Message: '{private}' is the client's own, and no method here replaces it"
    return reason


def _trained(here: Here, value: Message) -> str | None:
    """Of a message whose visit changes the client's record, also refuse what would replace private entries, for one."""
    reason = _kept_private(here, value)
    if reason is not None:
        return reason
    if value.visit % ROUNDS != value.round:  # its noise would be that of another round
        return f"visit of its Message is {value.visit}: it is the number of no visit in round {value.round + 1}"
    return None if value.client in here.runner.data.client_ids else "client of its Message takes no part in training"


def _returns(here: Here, value: Collection[str]) -> str | None:
    if len(set(value)) != len(value):
        return "it names an entry twice"
    return make_outgoing_filter(here.runner.blueprint, here.client).fault(value)


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
        state = here.state(value.owner)
    except (AttributeError, KeyError):
        return "no architecture of this site has such a model"
    shapes = {name: tensor.shape for name, tensor in value.state.items()}
    return (
        None if shapes == {name: tensor.shape for name, tensor in state.items()} else "its entries are not that model's"
    )


def _visit_number(here: Here, value: int) -> bool:
    return value % ROUNDS <= here.last and value // ROUNDS <= (VISITS_A_ROUND if here.claims("plan_round") else 0)


RULES: dict[type, dict[str, Rule]] = {
    Message: {
        "round": _ROUND,
        "client": when(lambda here, value: value == here.client, "it is about another client than its task"),
        "state": _state,
        "returns": _returns,
        "extras": _extras,
        "work": lambda here, value: None if value is None else count(lambda update: update.work, "work")(here, value),
        "model": A_TEXT,
        "data": one_of("train"),
        "tag": A_TEXT,
        "visit": when(_visit_number, "it is the number of no visit that the method plans"),
        "links": when(
            lambda here, value: value is None or (here.claims("neighbours") and value < NAMES),
            "only a method without a server has links",
        ),
    },
    Evaluate: {
        "splits": _SPLITS,
        "data": all_in(lambda here: (LOCAL,), "a site scores on its clients' own data"),
        "clients": one_of(None),
    },
    Visit: {
        "message": _trained,
        "evaluate": _within,
        "round": lambda here, value: None if value is None else _ROUND(here, value),
    },
    ScoredModel: {
        "round": count(lambda here: here.last + 1, "a round"),
        "stage": one_of(*STAGES),
        "model": one_of(*MODELS),
        "checkpoint": A_TEXT,
    },
    ScoreClient: {
        "message": _kept_private,
        "evaluate": _within,
        "scored": _within,
        "others": TEXTS,
        "kept": A_TEXT,
        "shared": when(lambda here, value: value is None or len(value) <= NAMES, "it has too many entries"),
        "known": when(
            lambda here, value: all(
                split in SPLITS and data == LOCAL and len(table[0]) <= NAMES for (split, data), table in value.items()
            ),
            "scores are known by split, on the clients' own data",
        ),
    },
    ScoreModel: {
        "model": _model,
        "clients": when(lambda here, value: 0 < len(value) == len(set(value)) <= NAMES, "it names clients, each once"),
        "evaluate": _within,
        "scored": _within,
        "others": TEXTS,
    },
    Deploy: {
        "message": _within,
        "kept": A_TEXT,
        "stage": one_of(*STAGES),
        "write": when(lambda here, value: value, AT_HOME),
        "folder": when(lambda here, value: value is None, AT_HOME),
        "about": small(dict[str, Any], "it holds plain values by name"),
        "shared": when(lambda here, value: value is None, AT_HOME),
        "bring": when(lambda here, value: not value or here.exports, AT_HOME),
    },
    PreflightTask: {
        "callback": when(
            lambda here, value: value in {callback.key for callback in here.runner.callbacks},
            "there is no such callback",
        ),
        "architecture": when(
            lambda here, value: value in here.runner.blueprint.architectures, "there is no such model"
        ),
        "client": _OWN,
        "facts": all_in(lambda here: tuple(FACTS), "it holds other facts than a check is told"),
        "shared": SMALL,
        "batches": SMALL,
        "pooled": all_in(lambda here: ("train", *SPLITS), "there is no such split"),
        "splits": all_in(lambda here: ("train", *SPLITS), "there is no such split"),
        "is_mixed": YES_OR_NO,
        "has_public": YES_OR_NO,
    },
    StepTrial: {"client": _OWN, "split": one_of("train", *SPLITS), "listen": YES_OR_NO},
}
"""By class and field of what a server sends."""


def fault(here: Here, value: Any) -> str | None:
    """Return what is wrong with an object that a server has sent, as a sentence; `None` if nothing is."""
    fields = {name: (rule, getattr(value, name)) for name, rule in RULES[type(value)].items()}
    return first_fault(fields, here, type(value).__name__)


def out_of_turn(here: Here, task: Any, record: ClientRecord) -> str | None:
    """Return why a visit does not follow on the record that it starts from; `None` if it does.

    A retry, a restart and a run that goes back to an earlier state all name an earlier version of the record: its round is
    earlier too. So a round that has been is trained again from the record before it, or not at all; but a method that plans
    its rounds may visit a client several times in one.
    """
    if not isinstance(task, Visit) or task.message.work == 0:
        return None
    now, last = task.message.round, record.last_round
    if now > last or (now == last and here.claims("plan_round")):
        return None
    return (
        f"round {now + 1} of client '{here.client}' does not follow on its record, which has trained in round {last + 1}: a "
        "server that goes back names an earlier version of the record"
    )


def kind_of(here: Here, task: Any) -> tuple[str, int]:
    """Return what a task asks for, and how often a client may be asked for that in a round."""
    what = "training" if isinstance(task, Visit) and task.message.work != 0 else type(task).__name__
    return what, REPEATS_A_ROUND + (VISITS_A_ROUND if here.claims("plan_round") else 0)
