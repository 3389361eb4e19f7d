"""SIGTERM, SIGHUP and Ctrl-C end a run at once: one sentence, the right code, and it goes on bit for bit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import warnings

import pytest
import torch

from fedlightning import FederatedCallback
from fedlightning.algorithm import Facts
from fedlightning.callbacks import SCAFFOLD, LocalAdaptation
from fedlightning.cli import main
from fedlightning.codec.tree import FileWriter
from fedlightning.options import FailurePolicy, Processes
from fedlightning.resume import state_files as persistence
from fedlightning.resume import stop_requests as signals
from fedlightning.resume.stop_requests import Terminated, stop_requests
from tests.experiments.tiny import small
from tests.helpers import Toy, make_trainer, same, toy_data

pytestmark = pytest.mark.usefixtures("usual_signals")

CODES = {"SIGTERM": 143, "SIGHUP": 129, "SIGINT": None}


def send(name, times=2):
    """Send a signal twice, as a batch system does: to the process, and to its group."""
    for _ in range(times):
        os.kill(os.getpid(), getattr(signal, name))


class Sender(FederatedCallback):
    """A signal at one of the places where it may come."""

    facts = Facts(takes_part=False)

    def __init__(self, place, name="SIGTERM", round=1):
        self.place, self.name, self.at = place, name, round

    def maybe(self, place, round):
        if place == self.place and round == self.at:
            send(self.name)

    def on_federation_start(self, server):
        self.maybe("before round 1", self.at)

    def on_round_start(self, server):
        self.maybe("round start", server.round)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.client.id == "1" and batch_idx == 0:
            self.maybe("training", self.client.round)

    def on_round_end(self, server):
        self.maybe("round end", server.round)

    def on_federation_end(self, server):
        self.maybe("after the last round", self.at)


def run(root, *more, resume="auto", callbacks=None, **options):
    torch.manual_seed(0)
    algorithms = [SCAFFOLD()] if callbacks is None else callbacks
    trainer = make_trainer(root, [*algorithms, *more], max_rounds=3, name="run", version="v", **options)
    trainer.fit(Toy("sgd"), datamodule=toy_data(), resume=resume)
    return trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


def ended(root, *more, name="SIGTERM", **options):
    """Run until the signal; return the warning."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    with warnings.catch_warnings(record=True) as caught, pytest.raises(BaseException) as stop:
        warnings.simplefilter("always")
        run(root, *more, **options)
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    if name == "SIGINT":
        assert stop.type is KeyboardInterrupt
        return ""
    assert stop.type is Terminated and stop.value.code == CODES[name]
    return next(str(one.message) for one in caught if name in str(one.message))


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("local_loop", ["trainer", "fast"])
def test_during_training(tmp_path, whole, local_loop, name):
    text = ended(tmp_path, Sender("training", name), name=name, local_loop=local_loop)
    if name != "SIGINT":
        assert text == f"{name} ended the run of 3 rounds; its state after round 1 is saved. Go on with resume='last'."
    again = run(tmp_path)
    same(again.server.model, whole.server.model)
    assert again.rows == whole.rows


@pytest.mark.parametrize("local_loop", ["trainer", "fast"])
def test_ctrl_c_stays_ctrl_c_where_the_watchdog_looks_on(tmp_path, whole, local_loop):
    ended(
        tmp_path,
        Sender("training", "SIGINT"),
        name="SIGINT",
        local_loop=local_loop,
        failures=FailurePolicy(timeout=600),
    )
    assert run(tmp_path).rows == whole.rows


def test_an_ignored_ctrl_c_stays_ignored_where_the_watchdog_looks_on(tmp_path, whole):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a script
    assert run(tmp_path, Sender("training", "SIGINT"), failures=FailurePolicy(timeout=600)).rows == whole.rows
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.parametrize(("place", "saved"), [("round start", 1), ("round end", 1), ("after the last round", 3)])
def test_at_other_moments(tmp_path, whole, place, saved):
    assert f"after round {saved} is saved" in ended(tmp_path, Sender(place))
    again = run(tmp_path)
    same(again.server.model, whole.server.model)
    assert again.rows == whole.rows


def test_during_an_evaluation(tmp_path, whole, monkeypatch):
    validate, calls = Toy.validation_step, []

    def interrupted(self, batch, batch_idx):
        calls.append(batch_idx)
        if len(calls) == 8:
            send("SIGTERM")
        validate(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(Toy, "validation_step", interrupted)
        assert "SIGTERM ended the run" in ended(tmp_path)
    again = run(tmp_path)
    same(again.server.model, whole.server.model)
    assert again.rows == whole.rows


def test_before_round_1(tmp_path, whole):
    assert (
        ended(tmp_path, Sender("before round 1"))
        == "SIGTERM ended the run before it had saved a state. Start it again."
    )
    same(run(tmp_path).server.model, whole.server.model)


def test_while_a_state_is_saved(tmp_path, whole, monkeypatch):
    for owner, place in ((FileWriter, "save"), (persistence, "sync_folder")):
        original, calls = getattr(owner, place), []

        def interrupted(*given, original=original, calls=calls):
            calls.append(given)
            original(*given)
            if len(calls) == 2:
                send("SIGTERM")

        with monkeypatch.context() as patch:
            patch.setattr(owner, place, interrupted)
            ended(tmp_path / place)
        again = run(tmp_path / place)
        same(again.server.model, whole.server.model)
        assert again.rows == whole.rows


class Swallower(FederatedCallback):
    """User's code that lets nothing through."""

    facts = Facts(takes_part=False)

    def on_round_start(self, server):
        with contextlib.suppress(BaseException):
            send("SIGTERM", 1)


def test_code_that_swallows_it_ends_after_the_round(tmp_path):
    assert "after round 1 is saved" in ended(tmp_path, Swallower())


class SwallowsOne(FederatedCallback):
    """User's code that swallows a Ctrl-C; later another signal comes."""

    facts = Facts(takes_part=False)

    def on_round_start(self, server):
        with contextlib.suppress(BaseException):
            send("SIGINT", 1)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.client.id == "1" and batch_idx == 0:
            send("SIGTERM", 1)


@pytest.mark.parametrize("local_loop", ["trainer", "fast"])
def test_a_second_signal_works_where_the_first_was_swallowed(tmp_path, local_loop):
    text = ended(tmp_path, SwallowsOne(), local_loop=local_loop)
    assert text == "SIGTERM ended the run before it had saved a state. Start it again."


@pytest.fixture
def exits(monkeypatch):
    """What the process would end with, after a short time."""
    found = queue.Queue()
    monkeypatch.setattr(os, "_exit", found.put)
    monkeypatch.setattr(signals, "PATIENCE", 0.01)
    return found


def test_code_that_swallows_every_signal_is_ended_by_a_second_one(exits, capfd):
    with pytest.raises(Terminated), stop_requests(lambda: (1, 3)):
        for name in ("SIGINT", "SIGTERM"):
            with contextlib.suppress(BaseException):
                send(name, 1)
        assert exits.get(timeout=30) == 143
    assert "SIGTERM ended the process: it came twice" in capfd.readouterr().err


def test_two_at_once_are_one_and_a_later_one_ends_code_that_hangs_on_its_way_out(exits, monkeypatch):
    with pytest.raises(Terminated), stop_requests(lambda: (1, 3)) as request:
        try:
            send("SIGTERM", 1)
        finally:
            send("SIGTERM", 2)
            assert request.last_resort is None
            monkeypatch.setattr(signals, "SAME_SIGNAL_SECONDS", -1.0)
            send("SIGINT", 1)  # nothing is raised into what tidies up
            assert exits.get(timeout=30) == 143


def test_nothing_ends_a_process_whose_run_is_over(exits):
    with pytest.raises(Terminated), stop_requests(lambda: (1, 3)) as request:
        with contextlib.suppress(BaseException):
            send("SIGTERM", 1)
        request._end_soon = lambda: setattr(request, "last_resort", threading.Timer(3600, exits.put))
        send("SIGTERM", 1)
    assert request.last_resort.finished.is_set() and exits.empty()


def test_a_resumed_run_that_waits_says_that_its_state_is_safe(tmp_path, monkeypatch):
    run(tmp_path, callbacks=[SCAFFOLD()])
    monkeypatch.setattr("fedlightning.trainer.assemble", lambda *args, **options: send("SIGTERM", 1))
    said = "SIGTERM ended the run of 3 rounds; its state after round 3 is saved. Go on with resume='last'."
    assert ended(tmp_path, resume="auto") == said


class AtTheEnd(FederatedCallback):
    """The signal at the end of round 2."""

    facts = Facts(takes_part=False)
    name = "SIGTERM"

    def on_round_end(self, server):
        if server.round == 1:
            send(self.name)


class Hangup(AtTheEnd):
    """Another one."""

    name = "SIGHUP"


def test_under_the_vectorized_engine(tmp_path):
    run(tmp_path / "whole", engine="vectorized")
    assert "after round 1" in ended(tmp_path / "cut", AtTheEnd(), engine="vectorized")
    again = run(tmp_path / "cut", engine="vectorized")
    assert (tmp_path / "whole/run/v/metrics.csv").read_bytes() == again.run.metrics.path.read_bytes()


class ToAll(AtTheEnd):
    """To every process of a job, as a batch system does it."""

    def on_round_end(self, server):
        if server.round == 1:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid, signal.SIGTERM)
            send("SIGTERM")


@pytest.mark.slow
def test_workers_leave_it_to_the_main_process(tmp_path, whole):
    assert "after round 1" in ended(tmp_path, ToAll(), engine=Processes(2))
    again = run(tmp_path, engine=Processes(2))
    same(again.server.model, whole.server.model)


def test_somebody_elses_handlers_stay(tmp_path):
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        trainer = run(tmp_path, Sender("round start"), Hangup())
        assert trainer.rounds_done == 3 and got == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGHUP, ignored)


def test_the_visits_after_the_last_round(tmp_path):
    def of(root, *more):
        return run(root, *more, callbacks=[LocalAdaptation()])

    class InTheVisit(Sender):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if self.client.round == 3:
                send("SIGTERM")

    whole = of(tmp_path / "whole")
    with pytest.raises(Terminated), pytest.warns(UserWarning, match="after round 3 is saved"):
        of(tmp_path / "cut", InTheVisit(""))
    assert of(tmp_path / "cut").rows == whole.rows


@pytest.mark.parametrize("name", CODES)
def test_the_command_line_says_it_and_returns_the_code(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    config = small(tmp_path / "c.yaml", "tests.resume.test_signals_end.AtTheEnd", max_rounds=3, name="run")
    monkeypatch.setattr(AtTheEnd, "name", name)
    assert main(["fit", "--config", config]) == (CODES[name] or 130)
    assert ("Go on with" in capsys.readouterr().err) and not (tmp_path / "runs/run/version_0/.lock").exists()
