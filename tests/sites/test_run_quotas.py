"""A server that asks without end, and invents runs: each has an end that no request resets, and so has the disk."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace

import pytest

from fedlightning.callbacks import FedPer, MaxFL
from fedlightning.client.requests import Evaluate
from fedlightning.deployment.export import Deploy
from fedlightning.engines.contract import Visit
from fedlightning.engines.score_tasks import ScoreClient, ScoredModel, ScoreModel, ServerModel
from fedlightning.guards.preflight_task import PreflightTask
from fedlightning.guards.step_trials import StepTrial
from fedlightning.sites import run_quotas, site
from fedlightning.sites import task_bounds as bounds
from fedlightning.sites.site import Site
from fedlightning.tensors import module_state
from fedlightning.testing.toys import ToyModule
from fedlightning.wire import read, write
from tests.sites.helpers import SHARES, Line, a_site, at_sites, sites

NUMBERS = itertools.count()


class Liar:
    """A server with all keys: what an honest one has sent, changed and sent again."""

    def __init__(self, root, algorithm=None) -> None:
        self.root, self.algorithm, seen = root, algorithm, []
        line = Line(sites(root / "sites", algorithm))
        line.watch = lambda node, data: (seen.append((node, read(data))), data)[1]
        at_sites(line, root / "server", algorithm)
        self.site: Site = line.sites["0"].__self__
        own = [asked for node, asked in seen if node == "0"]
        self.hello = next(asked for asked in own if asked["do"] == "hello")
        visits = [one for asked in own for one in asked.get("tasks", []) if isinstance(one["task"], Visit)]
        self.visit = next(one["task"] for one in visits if one["task"].client == "site0")  # of round 1: from no record
        self.session = own[-1]["session"]

    def greet(self, **more):
        self.session = f"s{next(NUMBERS)}"
        return read(self.site.answer(write({**self.hello, "session": self.session, **more})))

    def ask(self, task, **more):
        one = {"task": task, "number": f"n{next(NUMBERS)}", "version": "", "keep": None, **more}
        asked = {"do": "tasks", "session": self.session, "tasks": [one], "budget": 99.0}
        return read(read(self.site.answer(write(asked)))["answer"][0])

    def start_again(self):
        """Let the site's process end and begin anew, with its folder."""
        self.site = a_site(self.site.records.folder.parent, SHARES[0], self.algorithm)


@pytest.fixture(scope="module")
def liar(tmp_path_factory):
    return Liar(tmp_path_factory.mktemp("liar"), FedPer())


def tasks(liar):
    nothing = replace(liar.visit.message, state={}, returns=(), work=0)
    evaluate, scored = Evaluate(("val",)), ScoredModel(1, "L1", "personal")
    model = ServerModel.of(module_state(ToyModule()), ("", ""))
    return {
        "training": liar.visit,
        "visits": Visit(nothing, evaluate),
        "scores of a client": ScoreClient(nothing, evaluate, scored),
        "scores of a model": ScoreModel(model, ("site0",), evaluate, scored),
        "models": Deploy(nothing, write=True),
        "trials": StepTrial("site0", "train"),
        "checks": PreflightTask("FedPer", "", "site0", {}, {"": ()}, {"site0": 1}, (), ("train",), False, False),
    }


@pytest.mark.parametrize(
    "what", ["training", "visits", "scores of a client", "scores of a model", "models", "trials", "checks"]
)
def test_whatever_is_asked_has_an_end_that_no_greeting_and_no_new_start_resets(liar, what, monkeypatch):
    monkeypatch.setattr(bounds, "REPEATS_A_ROUND", 8)
    task, done = tasks(liar)[what], 0
    for number in range(30):
        if number % 3 == 2:
            liar.start_again()
        if number % 3:
            liar.greet()
        reply = liar.ask(task)
        done += "times in round" not in reply.get("refused", "")
    assert 0 < done <= 8
    assert f"times in round {task.address[0] or 2}" in reply["refused"]
    assert "the most by the site's configuration" in reply["refused"]


def test_each_round_and_each_client_has_a_number_of_its_own(liar):
    counted = run_quotas.RequestCounts(liar.root, "c" * 32)
    for round, client in ((0, "a"), (1, "a"), (0, "b")):
        counted.count("training", round, [client], 1)
    counted.count("trial", -1, ["a"], 1)  # of the newest round
    for again in (counted, run_quotas.RequestCounts(liar.root, "c" * 32)):
        for what, round, number in (("training", 0, 1), ("trial", -1, 2), ("trial", 1, 2)):
            with pytest.raises(run_quotas.TooMuchError, match=f"'a' was asked for {what} 1 times in round {number}"):
                again.count(what, round, ["a"], 1)


def test_a_method_that_plans_its_rounds_trains_more_often(tmp_path):
    planned, plain = (
        bounds.Here(liar.site._session.runner, client="site0")
        for liar in (Liar(tmp_path / "a", MaxFL()), Liar(tmp_path / "b"))
    )
    task = Liar(tmp_path / "c").visit
    assert bounds.kind_of(planned, task) == ("training", bounds.VISITS_A_ROUND + bounds.REPEATS_A_ROUND)
    assert bounds.kind_of(plain, task) == ("training", bounds.REPEATS_A_ROUND)


def test_what_cannot_be_counted_is_not_carried_out(tmp_path):
    liar = Liar(tmp_path)
    folder = tmp_path / "sites" / "0" / run_quotas.ASKED
    (path,) = folder.iterdir()
    path.unlink()
    path.mkdir()
    assert "refused" in liar.ask(liar.visit)


# -- runs --------------------------------------------------------------------------------------------------------------
def test_invented_runs_do_not_fill_the_disk(tmp_path):
    liar = Liar(tmp_path)
    home, taken = tmp_path / "sites" / "0", 0
    for number in range(run_quotas.MAX_RUNS + 10):
        reply = liar.greet(run=f"{number:032x}")
        if "answer" in reply:
            taken += 1
            first = liar.ask(liar.visit)
            liar.ask(
                Deploy(replace(liar.visit.message, round=1, visit=1, work=0), write=True), version=first["version"]
            )
    assert (
        taken == run_quotas.MAX_RUNS - 1 and len(run_quotas.kept_runs(home)) == run_quotas.MAX_RUNS
    )  # its first run is one of them
    for word in (f"keeps {run_quotas.MAX_RUNS} runs", "--runs", "--prune 30", "--most_runs"):
        assert word in reply["refused"]
    assert "answer" in liar.greet()  # the runs that are there go on
    for part in run_quotas.PARTS:
        assert len(list((home / part).glob("*"))) <= run_quotas.MAX_RUNS


def test_old_runs_without_models_make_room_and_others_stay(tmp_path):
    home = tmp_path / "site"
    for number in range(4):
        for part in run_quotas.PARTS[: 2 if number % 2 else 3]:
            (home / part / f"{number:032x}").mkdir(parents=True)
            (home / part / f"{number:032x}" / "a.ckpt").touch()
    (home / "models" / "my own notes").mkdir()
    now = time.time()
    for path in home.rglob("*"):
        os.utime(path, (now - 40 * run_quotas.DAY,) * 2)
    for part in ("asked", "records"):
        (home / part / f"{1:032x}" / "a.ckpt").unlink()
        (home / part / f"{3:032x}" / "a.ckpt").unlink()
        os.utime(home / part / f"{3:032x}", (now, now))
        os.utime(home / part / f"{1:032x}", (now - 40 * run_quotas.DAY,) * 2)
    run_quotas.make_room(home, "f" * 32, 4)
    assert [int(run.name, 16) for run in run_quotas.kept_runs(home)] in ([0, 2, 3], [2, 0, 3])
    run_quotas.make_room(home, f"{3:032x}", 1)  # it is there already
    with pytest.raises(run_quotas.TooMuchError):
        run_quotas.make_room(home, "f" * 32, 3)
    assert len(run_quotas.kept_runs(home)) == 3 and (home / "models" / "my own notes").is_dir()


def test_versions_of_a_record_have_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "VERSIONS", 3)
    liar = Liar(tmp_path)
    replies = [liar.ask(liar.visit) for _ in range(5)]
    home = tmp_path / "sites" / "0"
    assert len(liar.site.records.versions(liar.hello["run"], "site0")) == 3
    assert "save_state" in replies[-1]["refused"] and not list(home.rglob("*.tmp"))


@pytest.mark.parametrize("save_state", [1, 0])
def test_a_run_that_saves_no_state_leaves_few_records(tmp_path, save_state):
    """It never comes back to an earlier one."""
    parts = sites(tmp_path / "sites", FedPer(), max_rounds=6)
    trainer = at_sites(Line(parts), tmp_path / "server", FedPer(), max_rounds=6, save_state=save_state)
    assert len(parts["0"].records.versions(trainer.federation.store.run, "site0")) <= 4
