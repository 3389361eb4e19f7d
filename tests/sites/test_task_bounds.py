"""Whatever a server says in whatever field, a site goes by its own configuration: it refuses in a sentence."""

from __future__ import annotations

import copy
import itertools
import math
import os
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlightning.callbacks import DSGD, L2GD, SCAFFOLD, FedGroup, FedPer, FLoRA, MaxFL
from fedlightning.client.requests import Evaluate
from fedlightning.client.runtime import ClientRuntime
from fedlightning.contract.messages import Message, Update
from fedlightning.deployment.export import Deploy
from fedlightning.engines.contract import Visit
from fedlightning.engines.score_tasks import ScoreClient, ScoredModel, ScoreModel, ServerModel
from fedlightning.guards.preflight_task import PreflightTask
from fedlightning.guards.step_trials import StepTrial
from fedlightning.privacy.outgoing import make_outgoing_filter
from fedlightning.server.loop import ROUNDS
from fedlightning.sites.message_checks import ENVELOPES
from fedlightning.sites.site import TASKS
from fedlightning.sites.task_bounds import RULES, Here, fault
from fedlightning.tensors import module_state
from fedlightning.testing.toys import ToyModule
from fedlightning.wire import KINDS, read, write
from tests.sites.helpers import SHARES, Line, a_site, at_sites, sites

LONG = "x" * 300
NUMBERS = itertools.count()
HOSTILE: dict[type, dict[str, list[Any]]] = {
    Message: {
        "round": [3, 2**40],
        "client": ["site1", "pooled", "../site0", LONG],
        "state": [
            {"head.weight": torch.zeros(3, 8)},  # private
            {"body.0.weight": torch.zeros(80, 60)},
            {"body.0.weight": torch.zeros(8, 6, dtype=torch.int64)},
            {"body.0.weight": torch.zeros(6)},
            {"nothing": torch.zeros(1)},
        ],
        "returns": [("head.weight",), ("body.0.weight", "body.0.weight"), ("nothing",), (LONG,)],
        "extras": [{"Nobody": {}}, {"FedPer": {"state": torch.zeros(1)}}],
        "work": [3, 3000, 2**62],
        "model": [LONG],
        "data": ["pooled"],
        "tag": [LONG],
        "visit": [0, ROUNDS, 5, 2**62],
        "links": [0, 5],
    },
    Evaluate: {
        "splits": [("train",), ("val", "val"), (LONG,)],
        "data": [("pooled",), ("clients",)],
        "clients": [("site0",)],
    },
    Visit: {"message": [], "evaluate": [], "round": [3]},
    ScoredModel: {"round": [4], "stage": ["L3"], "model": ["yours"], "checkpoint": [LONG]},
    ScoreClient: {
        "message": [],
        "evaluate": [],
        "scored": [],
        "others": [[LONG]],
        "kept": [LONG],
        "shared": [{str(n): torch.zeros(0) for n in range(2)}],
        "known": [{("train", "local"): ({}, 1)}, {("val", "pooled"): ({}, 1)}],
    },
    ScoreModel: {
        "model": [
            ServerModel.of({"body.0.weight": torch.zeros(8, 6)}, ("", "")),
            ServerModel.of({}, ("other", "")),
            ServerModel.of({}, ("", "../etc")),
        ],
        "clients": [(), ("site0", "site0"), ("site1",)],
        "evaluate": [],
        "scored": [],
        "others": [[LONG]],
    },
    Deploy: {
        "message": [],
        "kept": [LONG],
        "stage": ["L3"],
        "write": [False],
        "folder": ["/etc", ".."],
        "about": [{"checkpoint": LONG}, {LONG: 1}],
        "shared": [ServerModel.of({}, ("", ""))],
        "bring": [True],
    },
    PreflightTask: {
        "callback": ["Nobody"],
        "architecture": ["other"],
        "client": ["site1"],
        "facts": [{"warn": 1}],
        "shared": [{LONG: ()}, {"": (LONG,)}],
        "batches": [{LONG: 1}],
        "pooled": [("all",)],
        "splits": [("all",)],
        "is_mixed": [],
        "has_public": [],
    },
    StepTrial: {"client": ["site1"], "split": ["all"], "listen": []},
}
"""By class and field: values that no honest server sends a site with two clients, FedPer and 2 rounds of 2 steps."""
KEPT = {"shared": 1}
"""Places in these lists of values that are allowed."""


def honest(kind: type) -> Any:
    message = Message(1, "site0", {}, (), work=0)
    evaluate, scored = Evaluate(("val",)), ScoredModel(1, "L1", "personal")
    facts: dict[str, Any] = {}
    return {
        Message: message,
        Evaluate: evaluate,
        Visit: Visit(message, evaluate),
        ScoredModel: scored,
        ScoreClient: ScoreClient(message, evaluate, scored),
        ScoreModel: ScoreModel(ServerModel.of(module_state(ToyModule()), ("", "")), ("site0",), evaluate, scored),
        Deploy: Deploy(message, write=True),
        PreflightTask: PreflightTask(
            "FedPer", "", "site0", facts, {"": ()}, {"site0": 1}, (), ("train",), False, False
        ),
        StepTrial: StepTrial("site0", "train"),
    }[kind]


def within(kind: type, field: str, value: Any) -> Any:
    """Return a task that holds an honest object of a class, with one field that is not."""
    forged = replace(honest(kind), **{field: value})
    if kind in TASKS:
        return forged
    if kind is ScoredModel:
        return replace(honest(ScoreClient), scored=forged)
    visit = {Message: "message", Evaluate: "evaluate"}[kind]
    return replace(
        honest(Visit), **{visit: replace(forged, work=None) if (kind, field) == (Message, "state") else forged}
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A site in the midst of a run, the session's name, and all requests that it was sent."""
    root, seen = tmp_path_factory.mktemp("run"), []
    line = Line(sites(root / "sites", FedPer()))
    line.watch = lambda node, data: (seen.append((node, data)), data)[1]
    at_sites(line, root / "server", FedPer())
    return line.sites["0"].__self__, read(seen[-1][1])["session"], [read(data) for node, data in seen if node == "0"]


def files(root: Path) -> set[str]:
    return {str(path) for path in root.rglob("*") if path.is_file()}


def root_of(site) -> Path:
    """The folder of this module's run: to look through all that the tests before have written takes seconds."""
    return next(folder for folder in site.records.folder.parents if folder.name == "sites").parent


def said(site, request):
    reply = read(site.answer(write(request)))
    return reply if not isinstance(reply.get("answer"), list) else read(reply["answer"][0])


def ask(site, session, task, number=None, **more):
    one = {"task": task, "number": number or f"x{next(NUMBERS)}", "version": "", **more}
    return said(site, {"do": "tasks", "session": session, "tasks": [one], "budget": 5.0})


def test_every_field_of_every_message_has_a_rule():
    classes, known = {*TASKS}, set()
    while classes:
        kind = classes.pop()
        known.add(kind)
        sent = {one.name: one for one in fields(kind) if one.name not in KINDS[kind.__name__].left}
        assert set(RULES[kind]) == set(sent) == set(HOSTILE[kind]), (
            f"bounds.RULES and this test's HOSTILE of {kind.__name__}"
        )
        parts = [KINDS[name].type for one in sent.values() for name in KINDS if name in str(one.type).split(" | ")]
        classes |= {part for part in parts if is_dataclass(part)} - known
    assert known == set(RULES)


@pytest.mark.parametrize("kind, field", [(kind, field) for kind, known in HOSTILE.items() for field in known])
def test_hostile_values_are_refused_in_a_sentence(running, capfd, kind, field):
    site, session, _ = running
    home, before = site.records.folder.parent, files(root_of(site))
    for place, value in enumerate(HOSTILE[kind][field]):
        task = within(kind, field, value)
        reply = ask(site, session, task)
        if field in KEPT and kind is ScoreClient and place < KEPT[field]:
            assert "answer" in reply
            continue
        assert "refused" in reply, f"{kind.__name__}.{field}={value!r:.80}"
        assert field in reply["refused"] or "no client" in reply["refused"] or "do not leave" in reply["refused"]
        assert "reference" not in reply["refused"] and len(reply["refused"]) < 600
    assert files(root_of(site)) == before and home.is_dir()
    assert "Traceback" not in "".join(capfd.readouterr())


HELLO: dict[str, list[Any]] = {
    "run": [
        "../../etc",
        "/tmp/x",
        "a/b",
        "..",
        "",
        "con",
        "A" * 32,
        "0" * 33,
        "0" * 31,
        "0" * 31 + "\n",
        "é" * 32,
        3,
        None,
    ],
    "agreement": [None, 3, {}],
    "assigned": [None, 3, {"site0": "other"}, {LONG: ""}],
    "stage": ["predict", None, 3],
    "left_out": [None, "site0", [LONG], [3]],
    "public": [3, {}, {"samples": 1, "batch_size": 1, "content": "x"}],
    "statistics": [3, {"moments x": 3}, {"moments x": [None]}, {LONG: [1.0]}, {"moments x": [1.0, 2.0, 3.0]}],
    "export": [True, None, "sites"],
    "template": [None, 3, {}, {"body.0.weight": torch.zeros(1)}],
    "code": [None, 3, {}, {"x": 3}, {"x": {"y": 3}}, {LONG: {}}, {"fedlightning": {"": "0"}}],
}
TASK: dict[str, list[Any]] = {
    "task": [None, 3, {}, [1]],
    "number": [None, 3, "", LONG, "../x"],
    "version": [None, 3, LONG, "../../x", "0" * 32],
    "keep": [3, "x", ["../x"], [3], ["a"] * 100],
}


def test_every_part_of_a_request_has_a_rule(running):
    assert set(ENVELOPES["hello"]) == set(HELLO) and set(ENVELOPES["task"]) == set(TASK)
    for asked in running[2]:  # an honest server's requests have these parts and no others
        assert set(asked) - {"do", "session"} == set(ENVELOPES[asked["do"]])
    assert said(running[0], {"do": "turned away", "session": "", "why": "x"}) == {"answer": None}
    for asked in running[2]:
        assert all(set(one) == set(ENVELOPES["task"]) for one in asked.get("tasks", []))


@pytest.mark.parametrize("part", HELLO)
def test_a_hostile_greeting_is_refused_and_nothing_is_written(tmp_path, running, part, capfd):
    hello = next(asked for asked in running[2] if asked["do"] == "hello")
    site = a_site(tmp_path / "in" / "site", SHARES[0], FedPer())
    before = files(tmp_path)
    for number, value in enumerate(HELLO[part]):
        reply = said(site, {**hello, "session": f"s{number}", part: value})
        assert "refused" in reply, f"{part}={value!r:.80}"
        assert "unknown" in said(site, {"do": "ping", "session": f"s{number}"})
    assert "refused" in said(site, {**hello, "more": 1, "session": "more"})
    assert files(tmp_path) == before and "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("part", TASK)
def test_a_hostile_part_of_a_task_is_refused(running, part, capfd):
    site, session, _ = running
    for value in TASK[part]:
        # A number of its own: one that `ask` has used in this session is answered as before.
        one = {"task": honest(Visit), "number": f"y{next(NUMBERS)}", "version": "", part: value}
        reply = said(site, {"do": "tasks", "session": session, "tasks": [one], "budget": 5.0})
        assert "refused" in reply, f"{part}={value!r:.80}"
    assert "refused" in ask(site, session, honest(Visit), more=1)
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "request_of",
    [
        lambda session: {"do": "tasks", "session": session, "tasks": [{}] * 1000, "budget": 1.0},
        lambda session: {"do": "tasks", "session": session, "tasks": 3, "budget": 1.0},
        *(
            lambda session, budget=budget: {"do": "tasks", "session": session, "tasks": [], "budget": budget}
            for budget in (math.nan, math.inf, -1, "x", None)
        ),
        lambda session: {"do": "describe", "session": session, "leave_out": [LONG]},
        lambda session: {"do": "describe", "session": session, "leave_out": [], "parts": ["all"]},
        lambda session: {"do": "turned away", "session": session, "why": 3},
        lambda session: {"do": "describe", "session": session, "leave_out": 3},
    ],
)
def test_other_hostile_requests_are_refused(running, request_of):
    site, session, _ = running
    assert "refused" in said(site, request_of(session))


def test_a_server_that_holds_all_keys_is_not_given_the_head(tmp_path):
    """The finding: a message without training that lists what is private was answered with it, and the record lacked it."""
    line = Line(sites(tmp_path / "sites", FedPer()))

    def ask_for_the_head(node, data):
        asked = read(data)
        for one in asked.get("tasks", []):
            if isinstance(one["task"], Visit) and one["task"].client == "site0" and one["task"].message.round == 1:
                message = replace(one["task"].message, returns=("head.weight", "head.bias"), work=0)
                one["task"] = replace(one["task"], message=message)
        return write(asked)

    line.watch = ask_for_the_head
    trainer = at_sites(line, tmp_path / "server", FedPer())
    (failed,) = trainer.summary["failures"]
    assert (failed["round"], failed["client"]) == (2, "site0") and "'head.weight' stays with the client" in failed[
        "reason"
    ]
    store, site = trainer.federation.store, line.sites["0"].__self__
    assert set(site.records.get(store.run, "site0", store.version("site0")).personal) == {"head.weight", "head.bias"}


# -- rounds ------------------------------------------------------------------------------------------------------------
def last_visit(seen, client="site0"):
    tasks = [one for asked in seen for one in asked.get("tasks", []) if isinstance(one["task"], Visit)]
    return next(one for one in reversed(tasks) if one["task"].client == client)


def trained(tmp_path, algorithm):
    seen: list[Any] = []
    line = Line(sites(tmp_path / "sites", algorithm))
    line.watch = lambda node, data: (seen.append(read(data)), data)[1]
    trainer = at_sites(line, tmp_path / "server", algorithm)
    return line.sites["0"].__self__, seen[-1]["session"], last_visit(seen), trainer.federation.store.version("site0")


def test_rounds_that_go_back_or_repeat_need_the_record_before_them(tmp_path):
    site, session, last, newest = trained(tmp_path, FedPer())
    visit, before = last["task"], last["version"]
    assert newest != before
    for round in (0, 1):
        again = replace(visit, message=replace(visit.message, round=round, visit=round))
        assert "does not follow on its record" in ask(site, session, again, f"n{round}", version=newest)["refused"]
    for number in ("retry1", "retry2"):  # the answer got lost, or the server goes on from the state before
        assert isinstance(ask(site, session, visit, number, version=before)["answer"], Update)


def test_a_method_that_plans_its_rounds_may_visit_a_client_twice_in_one(tmp_path):
    site, session, last, newest = trained(tmp_path, MaxFL())
    visit = last["task"]
    second = replace(visit, message=replace(visit.message, visit=visit.message.round + ROUNDS))
    assert isinstance(ask(site, session, second, "second", version=newest)["answer"], Update)
    back = replace(visit, message=replace(visit.message, round=0, visit=0))
    assert "does not follow" in ask(site, session, back, "back", version=newest)["refused"]


@pytest.mark.parametrize(
    "algorithm, most", [(None, 2), (MaxFL(alone=5), 5), (FedGroup(pretrain=4), 4), (FedGroup(), 2), (L2GD(p=0.5), 41)]
)
def test_work_is_at_most_what_the_method_orders(tmp_path, algorithm, most):
    site = a_site(tmp_path, SHARES[0], copy.deepcopy(algorithm))
    here = Here(runner_of(site), client="site0")
    message = Message(0, "site0", {}, ())
    assert fault(here, replace(message, work=most)) is None
    assert f"work from 0 to {most} here" in fault(here, replace(message, work=most + 1))


def runner_of(site):
    return ClientRuntime(site._blueprint, site._data, together=False)


def test_a_client_that_is_held_out_is_not_trained(tmp_path):
    runner = runner_of(a_site(tmp_path, SHARES[0]))
    runner.leave_out(["site0"])
    message = Message(0, "site0", {}, ())
    assert "takes no part" in fault(Here(runner, client="site0"), Visit(message, Evaluate()))
    scored = ScoreClient(message, Evaluate(("val",)), ScoredModel(1, "L1", "unseen"))
    assert fault(Here(runner, client="site0"), scored) is None


def test_what_a_method_declares_is_allowed(tmp_path):
    """Links where there is no server, extras that go down, and entries that replace private ones."""
    message = Message(0, "site0", {}, ())
    gossip = Here(runner_of(a_site(tmp_path / "a", SHARES[0], DSGD())), client="site0")
    assert fault(gossip, replace(message, links=2)) is None
    scaffold = Here(runner_of(a_site(tmp_path / "b", SHARES[0], SCAFFOLD())), client="site0")
    down = {
        name: torch.zeros_like(value) for name, value in module_state(scaffold.runner.blueprint.reference("")).items()
    }
    assert fault(scaffold, replace(message, extras={"SCAFFOLD": {"c": down}})) is None
    assert "declares 'c'" in fault(scaffold, replace(message, extras={"SCAFFOLD": {"c": torch.zeros(3)}}))
    lora = Here(runner_of(a_site(tmp_path / "c", SHARES[0], FLoRA())), client="site0")
    name = sorted(make_outgoing_filter(lora.runner.blueprint, "site0").private)[0]
    sent = replace(message, state={name: lora.state()[name]})
    assert fault(lora, Visit(sent, Evaluate())) is None
    lora.runner.callbacks.making = lambda change: []
    assert "is the client's own" in fault(lora, Visit(sent, Evaluate()))


def test_a_path_of_the_site_is_not_in_its_refusal(tmp_path):
    parts = sites(tmp_path / "sites")
    for value, site in zip((os.sep + "server", os.sep + "home" + os.sep + "dr-smith"), parts.values(), strict=True):
        site._blueprint.template.places = [value]
    line = Line(parts)
    said_back: list[str] = []
    line.reply = lambda name, data: (said_back.append(str(read(data).get("refused", ""))), data)[1]
    with pytest.raises(ValueError, match="is not that of site"):
        at_sites(line, tmp_path / "server")
    assert any("places" in text for text in said_back) and not any("dr-smith" in text for text in said_back)


def test_scores_of_private_entries_of_the_server_s_making_are_refused(running):
    """They would tell of the data what the method does not: a score for each head that the server makes up."""
    site, session, _ = running
    entry = {"head.weight": module_state(ToyModule())["head.weight"]}
    for kind in (ScoreClient, Visit):
        task = honest(kind)
        reply = ask(site, session, replace(task, message=replace(task.message, state=entry)))
        assert "'head.weight' is the client's own" in reply["refused"]
