"""Clients that fail: left out, tried again, or the end of the run; the same in every engine, and after a resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from unittest.mock import patch

import pytest
import torch

from fedlightning import FederatedCallback
from fedlightning.algorithm import Facts
from fedlightning.assemble import assemble
from fedlightning.callbacks import FedAvg, LocalCheckpoint
from fedlightning.engines.attempts import (
    ClientFailedError,
    ClientTimeoutError,
    FederationError,
    Retries,
    TooFewClientsError,
)
from fedlightning.errors import ConfigurationError
from fedlightning.guards import watchdog as watchdogs
from fedlightning.options import Evaluation, FailurePolicy, Processes
from fedlightning.resume.saving import LeftOutLog
from tests.helpers import Toy, make_trainer, same, toy_data
from tests.server.faulty import FailingData, FailingHook, FailingModule, Fault, Names, late

ENGINES = ("sequential", "vectorized", "processes")
pytestmark = pytest.mark.filterwarnings("ignore:Round", "ignore:A worker process ended")


def one_worker(engine):
    return Processes(1) if engine == "processes" else engine


def run(callbacks=(), module=None, data=None, root=None, clock=None, **options):
    given = (
        {"evaluation": Evaluation(stages=["G"])} | options | {"engine": one_worker(options.get("engine", "sequential"))}
    )
    trainer = make_trainer(root, [FedAvg(), *callbacks], **given)

    def with_clock(*args):
        federation = assemble(*args)
        federation.engine.attempts.clock = clock or federation.engine.attempts.clock
        return federation

    with patch("fedlightning.trainer.assemble", with_clock):
        trainer.fit(module or toy(), datamodule=data or toy_data())
    return trainer


def toy():
    torch.manual_seed(0)
    return Toy()


def failures(trainer):
    return [(one["round"], one["client"], one["where"], one["decision"]) for one in trainer.summary.get("failures", [])]


# -- retry -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ENGINES)
def test_a_second_try_that_succeeds_leaves_no_trace_but_a_note(engine, tmp_path):
    never = FailingHook(Fault(tmp_path, "ValueError", times=0), "on_send")
    usual = run([never], engine="sequential" if engine == "processes" else engine)
    trainer = run([FailingHook(Fault(tmp_path, "ValueError", times=1), "on_send")], engine=engine, failures="retry")
    assert failures(trainer) == [(1, "1", "training", "tried again (2 of 2)")]
    same(trainer.server.model, usual.server.model)
    for client in ("0", "1", "2"):
        mine, theirs = trainer.store.get(client), usual.store.get(client)
        assert (mine.visits, mine.steps, mine.num_samples) == (theirs.visits, theirs.steps, theirs.num_samples)
    assert [row.cells for row in trainer.rows] == [row.cells for row in usual.rows]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["training_step", "validation_step"])
def test_a_worker_that_dies_too_often_is_replaced_and_the_task_tried_again(where, tmp_path):
    module = FailingModule(Fault(tmp_path, "kill", times=2), where)  # two workers die of a try
    trainer = run(module=module, engine="processes", failures="retry", evaluation=Evaluation(stages=["L2"]))
    assert failures(trainer) == [(1, "1", "training", "tried again (2 of 2)")]
    same(trainer.server.model, run(module=FailingModule(Fault(tmp_path, "kill", times=0), where)).server.model)


def test_scores_are_tried_again(tmp_path):
    module = FailingModule(Fault(tmp_path, "ValueError", times=2), "validation_step")
    trainer = run(module=module, failures=FailurePolicy(on_error="retry", retries=2))
    assert [decision for *_, decision in failures(trainer)] == ["tried again (2 of 3)", "tried again (3 of 3)"]
    assert {row.client for row in trainer.rows if row.split == "val"} == {"0", "1", "2"}


def test_a_refused_update_is_tried_again_and_leaves_the_record_as_it_was(tmp_path):
    trainer = run([FailingHook(Fault(tmp_path, "ValueError"), "wrong_shape")], failures="retry")
    assert trainer.store.get("1").visits == 0
    assert trainer.store.get("0").visits == 2
    assert failures(trainer)[:2] == [(1, "1", "training", "tried again (2 of 2)"), (1, "1", "training", "left out")]


# -- stop, min_clients -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ENGINES)
def test_stop_ends_the_run_at_the_first_failure_with_the_state_intact(engine, tmp_path):
    fault = Fault(tmp_path, "ValueError", times=1, round=1)
    options = {"engine": engine, "failures": "stop", "max_rounds": 3, "name": "it", "version": "a"}
    with pytest.raises(
        ClientFailedError, match=r"^Round 2: client '1' failed: ValueError: the site's scanner\. failures\.on_e"
    ):
        run([FailingHook(fault, "on_send")], root=tmp_path, **options)
    hooks = [FedAvg(), FailingHook(fault, "on_send")]
    given = options | {"evaluation": Evaluation(stages=["G"]), "engine": one_worker(engine)}
    resumed = make_trainer(tmp_path, hooks, **given)
    resumed.fit(toy(), datamodule=toy_data(), resume=tmp_path / "it" / "a")
    assert resumed.rounds_done == 3
    whole = run([FailingHook(fault, "on_send")], **(options | {"failures": "skip"}))  # it does not fail any more
    same(resumed.server.model, whole.server.model)
    assert "failures" not in resumed.summary


def test_stop_counts_what_could_not_be_scored(tmp_path):
    with pytest.raises(
        ClientFailedError, match="Round 1: client '1' was not scored at stage L2 on local val data: Value"
    ):
        run(
            module=FailingModule(Fault(tmp_path, "ValueError"), "validation_step"),
            failures="stop",
            evaluation=Evaluation(stages=["L2"]),
        )


def test_too_few_clients_end_the_run_at_the_round_before(tmp_path):
    hook = FailingHook(Fault(tmp_path, "ValueError", round=1), "on_send")
    with pytest.raises(
        TooFewClientsError,
        match=r"Round 2: 2 of 3 clients contributed, and failures.min_clients=0.7 asks for 3; client",
    ):
        run([hook], failures=FailurePolicy(min_clients=0.7), root=tmp_path, name="it", version="a")
    state = json.loads((tmp_path / "it" / "a" / "checkpoints" / "last" / "manifest.json").read_text())
    assert state["rounds_done"] == 1
    assert run([hook], failures=FailurePolicy(min_clients=0.6)).rounds_done == 2
    assert run([hook], failures=FailurePolicy(min_clients=2)).rounds_done == 2


def test_how_many_must_contribute():
    with pytest.raises(ConfigurationError, match=r"failures\.min_clients=3, but a round visits 2 of the 3 clients"):
        run(failures=FailurePolicy(min_clients=3), participation=2)
    assert [FailurePolicy(min_clients=share).needed(10) for share in (0.7, 0.71, 1.0, 4)] == [7, 8, 10, 4]


# -- time --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("where", "told"), [("training_step", "training"), ("validation_step", "G")])
def test_a_client_that_hangs_costs_its_worker_and_nothing_else(where, told, tmp_path):
    module = FailingModule(Fault(tmp_path, "hang", times=1), where)
    trainer = run(
        module=module, engine="processes", failures=FailurePolicy(timeout=0.2), clock=late_once(tmp_path), max_rounds=1
    )
    (failure,) = trainer.summary["failures"]
    assert (failure["client"], failure["where"]) == ("1", told)
    assert failure["reason"].endswith("no answer within failures.timeout=0.2 seconds")
    assert trainer.store.get("0").visits == trainer.store.get("2").visits == 1


def late_once(folder):
    """A clock that leaps twice when a client hangs (one leap may be read as the start of its work) and then stands still."""
    leaps = 0

    def read():
        nonlocal leaps
        if leaps < 2 and (folder / "hanging").exists():
            leaps += 1
        return leaps * 1e9

    return read


@pytest.mark.parametrize(
    ("engine", "where"),
    [("sequential", "on_send"), ("sequential", "loader"), ("vectorized", "on_send"), ("vectorized", "loader")],
)
def test_without_workers_the_run_ends_and_names_the_client(engine, where, tmp_path):
    fault = Fault(tmp_path, "hang", round=1)
    data, hooks = toy_data(), [FailingHook(fault, where)]
    if where == "loader":
        data, hooks = FailingData(fault, "train"), [Arms(after=1)]
    before = threading.active_count()
    with pytest.raises(ClientTimeoutError, match=r"^Client '1' took longer than failures.timeout=0.2 seconds"):
        Arms.data = data
        run(
            hooks,
            data=data,
            engine=engine,
            failures=FailurePolicy(timeout=0.2),
            clock=late(tmp_path),
            root=tmp_path,
            name="it",
            version="a",
        )
    state = json.loads((tmp_path / "it" / "a" / "checkpoints" / "last" / "manifest.json").read_text())
    assert state["rounds_done"] == 1
    assert threading.active_count() <= before + 1  # the watchdog is gone, or on its way


class Arms(Names):
    """Lets a data module fail from a round on."""

    data = None
    facts = Facts(takes_part=False)

    def __init__(self, after):
        self.after = after

    def claims(self, role):
        return super().claims(role) and role != "on_receive"

    def on_round_start(self, server):
        self.data.armed = server.round >= self.after


@pytest.mark.slow
def test_code_that_cannot_be_interrupted_takes_the_process_with_it(tmp_path):
    code = """
import signal, threading
from fedlightning.guards import watchdog
from fedlightning.engines.attempts import Attempts
from fedlightning.assemble import assemble
from fedlightning.options import FailurePolicy
watchdog.GRACE = 0.0
times = iter([0.0])
attempts = Attempts(FailurePolicy(timeout=0.1), clock=lambda: next(times, 1e9))
dog = watchdog.Watchdog(attempts)
with dog.watching(["7"]):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Event().wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=os.getcwd(), timeout=600)
    assert done.returncode == watchdogs.EXIT_CODE
    assert "Client '7' took longer than failures.timeout=0.1 seconds" in done.stderr
    assert "Traceback" not in done.stderr


# -- decisions of the machine are replayed -----------------------------------------------------------------------------
class Killed(Exception):
    """The end of the process."""


class Dies(FailingHook):
    """The process ends at the end of a round, before its state is saved."""

    facts = Facts(takes_part=False)

    def __init__(self, round):
        self.round, self.where = round, ""

    def on_round_end(self, server):
        if server.round == self.round:
            raise Killed


def test_a_resumed_run_leaves_out_whom_the_machine_left_out(tmp_path):
    fault = Fault(tmp_path, "hang", times=1, round=1)
    options = {
        "engine": "processes",
        "failures": FailurePolicy(timeout=0.2),
        "max_rounds": 3,
        "name": "it",
        "version": "a",
    }
    with pytest.raises(Killed):  # after the decision of round 2, before its state
        run([FailingHook(fault, "on_send"), Dies(1)], root=tmp_path, clock=late_once(tmp_path), **options)
    (line,) = (tmp_path / "it" / "a" / "left_out.jsonl").read_text().splitlines()
    assert json.loads(line)["client"] == "1"
    resumed = make_trainer(
        tmp_path,
        [FedAvg(), FailingHook(fault, "on_send")],
        evaluation=Evaluation(every=1, stages=["G"]),
        **options | {"engine": "sequential"},
    )
    resumed.fit(toy(), datamodule=toy_data(), resume=tmp_path / "it" / "a")
    assert resumed.store.get("1").visits == 2  # in rounds 1 and 3
    assert failures(resumed) == [(2, "1", "training", "left out")]


def test_a_resumed_run_still_tells_of_failures_before(tmp_path):
    hook, options = FailingHook(Fault(tmp_path, "ValueError", times=1), "on_send"), {"name": "it", "version": "a"}
    run([hook], root=tmp_path, max_rounds=1, **options)
    resumed = make_trainer(
        tmp_path, [FedAvg(), hook], max_rounds=2, evaluation=Evaluation(every=1, stages=["G"]), **options
    )
    resumed.fit(toy(), datamodule=toy_data(), resume=tmp_path / "it" / "a")
    assert resumed.rounds_done == 2
    assert failures(resumed) == [(1, "1", "training", "left out")]


def test_decisions_are_read_back_and_a_round_that_ended_the_run_is_tried_again(tmp_path):
    decisions = LeftOutLog(tmp_path / "left_out.jsonl")
    decisions.add((2, "training", "a", 1), "too slow")
    decisions.add((3, "G latest", "b", 1), "too slow")
    decisions.add((4, "training", "b", 2), "killed")
    with decisions.path.open("a") as file:
        file.write('{"round": 5, "cli')  # the machine went down
    decisions.add((6, "training", "c", 1), "killed")
    decisions.undo(4)
    fresh = LeftOutLog(tmp_path / "left_out.jsonl")
    fresh.load(rounds_done=2)
    assert fresh.reasons == {(3, "G latest", "b", 1): "too slow", (6, "training", "c", 1): "killed"}


@pytest.mark.parametrize(
    "line", ["[1, 2]", '{"round": 3}', "\\xff garbage", '{"round": 1, "client": "a", "reason": "x"}']
)
def test_a_line_that_is_no_decision_is_refused_in_a_sentence(tmp_path, line):
    path = tmp_path / "left_out.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"left_out\.jsonl is damaged: .* that it was left out\. Put the file back"):
        LeftOutLog(path).load(0)


def test_all_clients_too_slow_end_the_run_and_are_tried_again_on_resume(tmp_path):
    hook = FailingHook(Fault(tmp_path, "kill", times=2, victim="0"), "on_send")
    options = {"engine": "processes", "max_rounds": 1, "name": "it", "version": "a"}
    with pytest.raises(FederationError, match="Round 1: no client could contribute; client '0' failed: 2 worker"):
        run([hook], data=toy_data((8,)), root=tmp_path, **options)
    assert "undone" in (tmp_path / "it" / "a" / "left_out.jsonl").read_text()
    given = options | {"evaluation": Evaluation(stages=["G"]), "engine": Processes(1)}
    again = make_trainer(tmp_path, [FedAvg(), hook], **given)
    again.fit(toy(), datamodule=toy_data((8,)), resume="auto")
    assert again.rounds_done == 1 and "failures" not in again.summary


# -- whose failure it is -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["StopIteration", "MemoryError", "SystemExit", "Odd", "Speechless", "quit"])
@pytest.mark.parametrize("engine", ENGINES)
def test_whatever_a_client_raises_is_its_own_failure(engine, how, tmp_path):
    trainer = run(
        [FailingHook(Fault(tmp_path, how), "on_send")], engine=engine, max_rounds=1, evaluation=Evaluation(stages=[])
    )
    (failure,) = trainer.summary["failures"]
    words = {"StopIteration": "StopIteration: no more", "SystemExit": "SystemExit: 0", "quit": "SystemExit: I am off"}
    words["Odd"] = "Odd: stopped because of the test"
    assert failure["reason"] == f"client '1' failed: {words.get(how, how)}"


@pytest.mark.parametrize("local_loop", ["fast", "trainer"])
@pytest.mark.parametrize("how", ["StopIteration", "SystemExit", "Odd"])
def test_so_it_is_inside_a_fit(how, local_loop, tmp_path):
    module = FailingModule(Fault(tmp_path, how), "training_step")
    trainer = run(module=module, max_rounds=1, evaluation=Evaluation(stages=[]), local_loop=local_loop)
    assert [one["client"] for one in trainer.summary["failures"]] == ["1"]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_interrupt_ends_the_run(engine, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run([FailingHook(Fault(tmp_path, "KeyboardInterrupt"), "on_send")], engine=engine)
    if engine == "sequential":
        with pytest.raises(SystemExit):  # what Lightning makes of it inside a fit
            run(module=FailingModule(Fault(tmp_path, "KeyboardInterrupt"), "training_step"))


def test_a_handler_of_a_signal_that_leaves_the_program_is_obeyed():
    import signal

    from fedlightning.client.client_errors import ends_run

    def leave(number, frame):
        sys.exit(0)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        signal.raise_signal(signal.SIGTERM)
    except SystemExit as stop:
        assert ends_run(stop)
    finally:
        signal.signal(signal.SIGTERM, before)
    try:
        sys.exit(0)
    except SystemExit as stop:
        assert not ends_run(stop)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_loader_that_cannot_be_made_is_the_clients_failure(engine, split, tmp_path):
    data = Arms.data = FailingData(Fault(tmp_path, "ValueError"), split)
    data.armed = engine == "processes"  # workers have a copy
    trainer = run([Arms(0)], data=data, engine=engine, max_rounds=1, evaluation=Evaluation(stages=["G", "L2"]))
    wheres = {one["where"] for one in trainer.summary["failures"]}
    assert wheres == ({"training"} if split == "train" else {"G", "L2"})
    assert {one["client"] for one in trainer.summary["failures"]} == {"1"}


def test_a_worker_that_dies_while_it_scores_costs_the_one_whose_data_killed_it(tmp_path):
    module = FailingModule(Fault(tmp_path, "kill"), "validation_step")
    trainer = run(module=module, engine="processes", max_rounds=1)
    assert failures(trainer) == [(1, "1", "G", "not scored")]
    assert {row.client for row in trainer.rows if row.stage == "G"} == {"0", "2"}


def test_failures_stand_in_one_order_whatever_the_engine(tmp_path):
    hook = FailingHook(Fault(tmp_path, "ValueError"), "on_send")
    seen = []
    for engine in ("sequential", "processes"):
        trainer = run(
            [hook, LocalCheckpoint()], engine=engine, failures="retry", evaluation=Evaluation(stages=["G", "L1"])
        )
        seen.append(trainer.summary["failures"])
    assert seen[0] == seen[1]


def test_a_run_without_failures_says_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = run(root=tmp_path, failures=FailurePolicy(on_error="retry", timeout=1e6, min_clients=1.0))
    assert not {"failures", "warnings"} & trainer.summary.keys()
    assert not list(tmp_path.rglob("left_out.jsonl"))
    same(trainer.server.model, run().server.model)


def test_attempts_are_numbered_within_a_round():
    class Task:
        address = (1, "training", "a")

    attempts = Retries()
    assert [attempts.of(Task()).address[3] for _ in range(2)] == [1, 2]
    Task.address = (2, "training", "a")
    assert attempts.of(Task()).address[3] == 1


# -- checkpoints to use ------------------------------------------------------------------------------------------------
class BreaksInTheEnd(FederatedCallback):
    """The client's code fails when its model is made for the last time."""

    facts = Facts(takes_part=False)
    over = False

    def __init__(self, times):
        self.times = times

    def on_federation_end(self, server):
        self.over = True

    def on_receive(self, client, message):
        if self.over and client.id == "1" and self.times:
            self.times -= 1
            raise OSError("a disk that fails at times")


@pytest.mark.parametrize(("policy", "times", "kept"), [("skip", 1, False), ("retry", 1, True), ("retry", 2, False)])
def test_a_client_whose_model_cannot_be_made_has_no_checkpoint_and_the_run_ends_well(tmp_path, policy, times, kept):
    trainer = run([BreaksInTheEnd(times)], root=tmp_path, failures=policy)
    clients = trainer.run.path / "checkpoints" / "clients"
    assert (clients / "1.ckpt").exists() == kept and (clients / "0.ckpt").exists()
    told = json.loads((trainer.run.path / "summary.json").read_text())["failures"]
    assert {(one["client"], one["where"]) for one in told} == {("1", "checkpoint")}
    assert (told[-1]["decision"] == "not written") == (not kept)


def test_a_client_whose_model_cannot_be_made_ends_a_run_that_is_to_stop(tmp_path):
    with pytest.raises(ClientFailedError, match="no checkpoint of client '1' could be made: OSError: a disk"):
        run([BreaksInTheEnd(1)], root=tmp_path, failures="stop")
