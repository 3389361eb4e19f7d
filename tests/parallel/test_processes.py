"""The engine ``processes`` against ``sequential``, bit for bit; what happens when workers die, fail or are not wanted."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlightning  # noqa: F401  before lightning

# isort: split
from fedlightning.assemble import make_engine
from fedlightning.callbacks import (
    APFL,
    FENDA,
    SCAFFOLD,
    Ditto,
    FedAvg,
    FedBABU,
    GlobalCheckpoint,
    LocalCheckpoint,
    PLayerFL,
)
from fedlightning.client.blueprint import Blueprint
from fedlightning.client.requests import LocalSettings
from fedlightning.client.runtime import ClientRuntime
from fedlightning.contract import CallbackList
from fedlightning.engines.attempts import FederationError
from fedlightning.engines.contract import ClientRecords
from fedlightning.errors import ConfigurationError
from fedlightning.options import Evaluation, Processes
from fedlightning.parallel import scheduling
from fedlightning.parallel.arena import RemoteTraceback
from fedlightning.parallel.pool import UnpicklableError, own_gpu
from fedlightning.testing.toys import ToyData
from fedlightning.testing.toys import federate as federate_toy
from fedlightning.trainer import FederatedTrainer
from tests.conformance.case import collect
from tests.engines.users import Holding, Interrupt, Noise, ReadsTrainer, Trouble, TwoVisits, Unsendable, Work
from tests.helpers import NormNet, PiecesStyle, Toy, make_trainer, same, toy_data

REPOSITORY = Path(__file__).parents[2]
PROCESSES: dict[str, Any] = {"engine": Processes(2)}

# name -> (module, callbacks, trainer's options), each made anew
RUNS: dict[str, Any] = {
    "fedavg": lambda: (Toy("adam", dropout=0.3), [FedAvg()], {"evaluation": Evaluation(data=["local", "pooled"])}),
    "keep": lambda: (Toy("onecycle", dropout=0.3), [FedAvg()], {"optimizer_state": "keep", "participation": 2}),
    "scaffold": lambda: (Toy("momentum"), [SCAFFOLD()], {"participation": 2}),
    "ditto": lambda: (Toy("sgd", dropout=0.3), [Ditto()], {}),
    "fenda": lambda: (PiecesStyle(), [FENDA(head="net.head")], {}),
    "apfl": lambda: (Toy(), [APFL()], {"local_steps": 3}),
    "player_fl": lambda: (Toy(), [PLayerFL()], {}),
    "fedbabu": lambda: (Toy(), [FedBABU(epochs=1)], {}),
    "local_statistics": lambda: (NormNet("adam"), [FedAvg()], {"float_buffers": "local"}),
    "checkpoints": lambda: (
        NormNet(),
        [GlobalCheckpoint(mode="max"), LocalCheckpoint()],
        {"evaluation": Evaluation(test_data=["local", "clients"])},
    ),
}

CASES = collect("CASES")
LONGER = ("keep", "checkpoints")


def run(name: str, root: Path, resume: str | None = None, **options: Any) -> FederatedTrainer:
    torch.manual_seed(0)
    module, callbacks, own = RUNS[name]()
    trainer = make_trainer(root, callbacks, **own | options)
    trainer.fit(module, datamodule=toy_data((24, 40, 16)), resume=resume)
    return trainer


def assert_same_run(first: FederatedTrainer, second: FederatedTrainer) -> None:
    assert first.server is not None and second.server is not None
    for model in first.server.models:
        same(first.server.models[model], second.server.models[model])
    assert_same_tree(first.server.state, second.server.state, "server.state")
    assert_same_tree(first.server.checkpoints, second.server.checkpoints, "server.checkpoints")
    assert list(first.store) and set(first.store) == set(second.store)
    for client in first.store:
        assert_same_tree(vars(first.store.get(client)), vars(second.store.get(client)), f"client {client}")
    assert first.results == second.results
    assert first.run is not None and second.run is not None
    assert (first.run.path / "metrics.csv").read_bytes() == (second.run.path / "metrics.csv").read_bytes()


def assert_same_tree(a: Any, b: Any, where: str) -> None:
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key, value in a.items():
            assert_same_tree(value, b[key], f"{where}[{key!r}]")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_tree(x, y, f"{where}[{index}]")
    else:
        assert a == b or (a != a and b != b), where


def own_processes() -> list[Any]:
    """The workers that the test has started."""
    children = multiprocessing.active_children()
    return [child for child in children if child.name == "fedlightning-worker" and child.pid not in OTHERS]


OTHERS: set[int | None] = set()
"""Processes of the module's engine, or of another test's."""


@pytest.fixture(autouse=True)
def _processes_of_others() -> None:
    OTHERS.clear()
    OTHERS.update(child.pid for child in multiprocessing.active_children())


@pytest.fixture(scope="module")
def engine() -> Any:
    """One engine for all tests that give it tasks of their own."""
    runner = ClientRuntime(
        Blueprint(Toy(), CallbackList([]), LocalSettings(seed=0, max_rounds=1)), _ready(toy_data((24, 40, 16)))
    )
    engine = make_engine(Processes(2), runner, ClientRecords())
    yield engine
    engine.close()


def _ready(data: Any) -> Any:
    data.setup("fit")
    return data


# -- the same results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONGER else n for n in RUNS])
@pytest.mark.fast_cases(4)
def test_bit_for_bit_as_in_sequence(name: str, tmp_path: Path) -> None:
    first = run(name, tmp_path / "sequential")
    second = run(name, tmp_path / "processes", **PROCESSES)
    assert_same_run(first, second)
    assert own_processes() == []


@pytest.mark.slow
def test_evaluation_after_training(tmp_path: Path) -> None:
    first = run("checkpoints", tmp_path / "sequential")
    second = run("checkpoints", tmp_path / "processes", **PROCESSES)
    assert first.test() == second.test()
    assert {"best_global", "best_local", "latest"} == {row["checkpoint"] for row in second.results}
    assert_same_run(first, second)
    assert own_processes() == []


@pytest.mark.slow
def test_resume_with_another_engine(tmp_path: Path) -> None:
    whole = run("scaffold", tmp_path / "whole", max_rounds=3)
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "parts")
    resumed = run("scaffold", tmp_path / "parts", resume="last", max_rounds=3, **PROCESSES)
    assert_same_run(whole, resumed)


def interrupted(root: Path) -> None:
    torch.manual_seed(0)
    module, callbacks, own = RUNS["scaffold"]()
    trainer = make_trainer(root, callbacks, **own, max_rounds=3)
    trainer.callbacks.callbacks[0].on_round_start = stop_in_round_2  # type: ignore[method-assign]
    trainer.fit(module, datamodule=toy_data((24, 40, 16)))


def stop_in_round_2(server: Any) -> None:
    if server.round == 1:
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_algorithm(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    share = 1.0 if "absent_clients" in case.skip else 3
    options = {"evaluation": 1, "participation": share} | case.arguments
    first = federate_toy(copy.deepcopy(case.algorithm), ToyData(), tmp_path / "a", **options)
    second = federate_toy(copy.deepcopy(case.algorithm), ToyData(), tmp_path / "b", **options, **PROCESSES)
    assert_same_run(first, second)


@pytest.fixture
def start_method() -> Iterator[Callable[[str], None]]:
    """Sets how this program starts processes unless it says otherwise; Python 3.14's default is the fork server."""
    before = multiprocessing.get_start_method()
    yield lambda name: multiprocessing.set_start_method(name, force=True)
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("method", "engine"),
    [
        ("forkserver", "sequential"),
        ("spawn", "sequential"),
        ("fork", "processes"),
        ("forkserver", "processes"),
        ("spawn", "processes"),
    ],
)
def test_loaders_with_workers_of_their_own(method: str, engine: str, tmp_path: Path, start_method: Any) -> None:
    trained = []
    for name, options in (("fork", {}), (method, PROCESSES if engine == "processes" else {})):
        start_method(name)
        torch.manual_seed(0)
        trainer = make_trainer(tmp_path / f"{name} {len(trained)}", [FedAvg()], **options, max_rounds=1)
        data = toy_data((12, 12))
        data.num_workers = 1
        trainer.fit(Toy(dropout=0.3), datamodule=data)
        trained.append(trainer)
    assert_same_run(*trained)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_however_the_program_starts_processes(method: str, tmp_path: Path, start_method: Any) -> None:
    trained = []
    for name, options in (("fork", {}), (method, PROCESSES)):
        start_method(name)
        torch.manual_seed(0)
        trained.append(make_trainer(tmp_path / f"{name} {len(trained)}", [SCAFFOLD()], **options))
        trained[-1].fit(Toy(dropout=0.3), datamodule=toy_data())
    assert_same_run(*trained)


# -- failures ------------------------------------------------------------------------------------------------------


def test_a_killed_worker_costs_nothing(tmp_path: Path) -> None:
    results = []
    for name, options in (("a", {}), ("b", PROCESSES)):
        torch.manual_seed(0)
        once = tmp_path / "killed"
        trouble = [Trouble("1", "kill", round=1, once=str(once))] if options else []
        trainer = make_trainer(tmp_path / name, [SCAFFOLD(), *trouble], **options)
        if options:
            with pytest.warns(UserWarning, match="ended .signal SIGKILL. at work on client '1', which is done again"):
                trainer.fit(Toy(dropout=0.3), datamodule=toy_data())
            assert once.exists()
        else:
            trainer.fit(Toy(dropout=0.3), datamodule=toy_data())
        results.append(trainer)
    assert_same_run(*results)


def test_a_client_that_kills_every_worker_is_left_out(tmp_path: Path) -> None:
    results = []
    for name, how, options in (("a", "raise", {}), ("b", "kill", PROCESSES)):
        torch.manual_seed(0)
        trainer = make_trainer(tmp_path / name, [FedAvg(), Trouble("2", how, round=0)], **options)
        match = "client '2' failed: 2 worker processes ended" if options else "client '2' failed: TwoArguments"
        with pytest.warns(UserWarning, match=match):
            trainer.fit(Toy(), datamodule=toy_data())
        results.append(trainer)
    assert_same_run(*results)


def test_a_client_that_raises_says_the_same(tmp_path: Path) -> None:
    said = []
    for options in ({}, PROCESSES):
        torch.manual_seed(0)
        trainer = make_trainer(None, [FedAvg(), Trouble("0", "raise")], **options)
        with pytest.raises(FederationError) as caught:
            trainer.fit(Toy(), datamodule=toy_data((24,)))
        said.append(str(caught.value))
    assert said[0] == said[1] and "TwoArguments: stopped because of the test" in said[1]
    cause = caught.value.__cause__
    assert cause is not None and isinstance(cause.__cause__, RemoteTraceback)
    assert "on_train_batch_end" in str(cause.__cause__)
    assert own_processes() == []


def test_ctrl_c_leaves_no_process() -> None:
    trainer = make_trainer(None, [FedAvg(), Interrupt()], **PROCESSES)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Toy(), datamodule=toy_data())
    assert own_processes() == []


def test_warnings_of_clients_reach_the_user() -> None:
    with pytest.warns(UserWarning, match="what a client has to say"):
        make_trainer(None, [FedAvg(), Noise()], **PROCESSES, max_rounds=1).fit(Toy(), datamodule=toy_data())


class Hidden(FedAvg):
    def __init__(self) -> None:
        super().__init__()
        self.function = lambda x: x


def test_the_summary_says_who_trained_in_the_workers(tmp_path: Path) -> None:
    said = []
    for place, engine in (("here", "sequential"), ("there", Processes(workers=1))):
        trainer = make_trainer(tmp_path / place, [FedAvg()], engine=engine, max_rounds=1)
        trainer.fit(ReadsTrainer(), datamodule=toy_data((8, 6)))
        said.append(json.loads((trainer.run.path / "summary.json").read_text())["local_loop"])
    assert said[0] == said[1] and said[0].startswith("trainer (trainer.fit_loop is used")


@pytest.mark.parametrize(
    ("module", "callback", "named"), [(Holding, FedAvg, "The model Holding"), (Toy, Hidden, "The callback Hidden")]
)
def test_what_cannot_be_sent_is_named(module: Any, callback: Any, named: str) -> None:
    trainer = make_trainer(None, [callback()], **PROCESSES)
    with pytest.raises(UnpicklableError, match=f"{named} cannot be sent to a worker process: .*engine='sequential'"):
        trainer.fit(module(), datamodule=toy_data())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"engine": "processes", "devices": 2}, "devices=2 shares one client among devices"),
        ({"engine": "processes", "strategy": "ddp"}, "strategy='ddp' may share one client among processes"),
        (
            {"engine": "processes", "num_nodes": 2},
            "num_nodes=2, but the workers of engine='processes' are on one machine",
        ),
    ],
)
def test_refused_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make_trainer(None, **options)


# -- tasks ---------------------------------------------------------------------------------------------------------


def test_answers_come_in_order_and_clients_follow_themselves(engine: Any) -> None:
    tasks = [Work(number, client="ab"[number % 2], seconds=0.02 * (5 - number)) for number in range(6)]
    answers = list(engine.map(tasks))
    assert [name for name, _, _ in answers] == list(range(6))
    assert [visits for _, visits, _ in answers] == [0, 0, 1, 1, 2, 2]  # each found the record of the one before
    assert {threads for _, _, threads in answers} == {1}
    assert engine.store.get("a").visits == 3 and engine.store.changed == {"a", "b"}


@pytest.mark.parametrize("largest", [1, scheduling.HELD_BYTES])
def test_tasks_are_drawn_as_far_ahead_as_answers_may_be_held(engine: Any, largest: int) -> None:
    drawn = []

    def source() -> Any:
        for number in range(12):
            drawn.append(number)
            yield Work(number, num_bytes=largest)

    answers = engine.map(source())
    assert next(answers)[0] == 0
    assert len(drawn) == (12 if largest == 1 else 2 * engine.width)
    assert [name for name, _, _ in answers] == list(range(1, 12))


def test_the_longest_start_first_once_all_are_seen(engine: Any) -> None:
    list(engine.map([Work(0), Work(1)]))  # both workers are there
    given = []
    give = scheduling.Worker.give
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            scheduling.Worker, "give", lambda self, task, *rest: (given.append(task.name), give(self, task, *rest))[1]
        )
        seconds = [0.0, 0.01, 0.2, 0.1]
        answers = [name for name, *_ in engine.map(Work(n, seconds=s) for n, s in enumerate(seconds))]
    assert given[:2] == [2, 3] and answers == [0, 1, 2, 3]


def test_what_a_task_raises_is_raised_and_the_engine_goes_on(engine: Any) -> None:
    with pytest.raises(ValueError, match="no good") as caught:
        list(engine.map([Work(0), Work(1, error="no good"), Work(2, seconds=30.0)]))
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert [name for name, *_ in engine.map([Work(3)])] == [3]


def test_an_engine_that_nobody_listens_to_any_more(engine: Any) -> None:
    started = time.monotonic()
    answers = engine.map([Work(0), Work(1, seconds=300.0)])
    next(answers)
    answers.close()
    assert [name for name, *_ in engine.map([Work(2), Work(3)])] == [2, 3]
    assert time.monotonic() - started < 200.0  # the long task was not waited for


def test_new_tasks_end_those_that_were_left_unfinished(engine: Any) -> None:
    left = engine.map([Work(0), Work(1, seconds=300.0)])
    next(left)
    answers = engine.map([Work(3), Work(4)])
    assert next(answers)[0] == 3
    with pytest.raises(RuntimeError, match="has been given other tasks"):
        next(left)
    assert next(answers)[0] == 4


def test_a_task_that_cannot_be_sent_is_done_here(engine: Any) -> None:
    with pytest.warns(UserWarning, match="done in the main process, for it cannot be sent"):
        assert [name for name, *_ in engine.map([Work(0), Unsendable(1), Work(2)])] == [0, 1, 2]


@pytest.mark.slow
def test_two_visits_in_one_list_of_jobs(tmp_path: Path) -> None:
    runs = []
    for name, options in (("a", {}), ("b", PROCESSES)):
        torch.manual_seed(0)
        trainer = make_trainer(tmp_path / name, [FedAvg(), TwoVisits()], **options)
        trainer.fit(NormNet(), datamodule=toy_data())
        assert trainer.store.get("1").state["TwoVisits"] == {"visits": 4}
        runs.append(trainer)
    assert_same_run(*runs)


def test_gpus_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [own_gpu(i, "auto")["CUDA_VISIBLE_DEVICES"] for i in range(4)] == ["0", "1", "2", "0"]
    assert own_gpu(1, 1) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert own_gpu(2, "auto") == {"CUDA_VISIBLE_DEVICES": "7"}


# -- whole programs ------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import fedlightning
from fedlightning.callbacks import FedAvg
from fedlightning.options import Processes
from tests.engines.users import Sleep
from tests.helpers import Toy, make_trainer, toy_data

class Mine(Toy):
    pass

def main():
    callbacks = [FedAvg()] + ([Sleep(sys.argv[1])] if len(sys.argv) > 1 else [])
    make_trainer(None, callbacks, engine=Processes(workers=2)).fit(Mine(), datamodule=toy_data())
    print("trained")

"""
GUARDED = SCRIPT + 'if __name__ == "__main__":\n    main()\n'


def start(path: Path, text: str, *arguments: str) -> subprocess.Popen[str]:
    path.write_text(text)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(path), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_script_with_classes_of_its_own(tmp_path: Path) -> None:
    out, err = start(tmp_path / "script.py", GUARDED).communicate(timeout=600)
    assert "trained" in out, err


@pytest.mark.slow
def test_a_script_without_a_guard_is_told(tmp_path: Path) -> None:
    out, err = start(tmp_path / "script.py", SCRIPT + "main()\n").communicate(timeout=600)
    assert "trained" not in out
    assert 'put what starts the training under `if __name__ == "__main__":`' in err


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_the_program(how: signal.Signals, tmp_path: Path, usual_signals: None) -> None:
    (tmp_path / "pids").mkdir()
    program = start(tmp_path / "script.py", GUARDED, str(tmp_path / "pids"))
    wait_until(lambda: len(list((tmp_path / "pids").iterdir())) == 2, "two visits")
    pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    program.send_signal(how)
    program.communicate(timeout=600)
    wait_until(lambda: not any(alive(pid) for pid in pids), "the end of the workers")


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until(condition: Any, what: str, seconds: float = 600.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.1)
