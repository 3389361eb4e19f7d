"""The engine ``ray`` against ``sequential``, bit for bit; what happens when workers die, fail or are not wanted."""

from __future__ import annotations

import copy
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedlightning  # noqa: F401  before lightning

# isort: split
pytest.importorskip("ray")

from fedlightning.assemble import make_engine
from fedlightning.callbacks import FENDA, SCAFFOLD, FedAvg, FedMD, LocalCheckpoint
from fedlightning.client.blueprint import Blueprint
from fedlightning.client.requests import LocalSettings
from fedlightning.client.runtime import ClientRuntime
from fedlightning.contract import CallbackList
from fedlightning.datamodules import DigitsDataModule, DriftingDataModule, IIDPartitioner, ShiftedDataModule
from fedlightning.engines.attempts import FederationError
from fedlightning.engines.contract import ClientRecords
from fedlightning.errors import ConfigurationError
from fedlightning.models import MLP, Classifier
from fedlightning.options import Evaluation, Ray
from fedlightning.parallel import ray as ray_cluster
from fedlightning.parallel.arena import RemoteTraceback
from fedlightning.testing.toys import ToyData
from fedlightning.testing.toys import federate as federate_toy
from fedlightning.trainer import FederatedTrainer
from tests.callbacks.public import public_data, two_models
from tests.conformance.case import collect
from tests.engines.users import Holding, Interrupt, Noise, Trouble, Work
from tests.helpers import PiecesStyle, Toy, make_trainer, same, toy_data
from tests.parallel.test_processes import alive, assert_same_run, assert_same_tree, start, wait_until

RAY: dict[str, Any] = {"engine": Ray(workers=2)}
CASES = collect("CASES")


@pytest.fixture(autouse=True, scope="module")
def handlers() -> Iterator[dict[int, Any]]:
    """One Ray for the module: the first test starts it, and workers wait for the next one."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield before
    import ray

    ray.shutdown()


# name -> (module, data, callbacks, trainer's options), each made anew
RUNS: dict[str, Any] = {
    "fedavg": lambda: (
        Toy("adam", dropout=0.3),
        toy_data((24, 40, 16, 8)),
        [FedAvg()],
        {"evaluation": Evaluation(data=["local", "pooled"]), "held_out": ["3"]},
    ),
    "growing shift": lambda: (
        Classifier(MLP(64, [], 10), 10, lr=0.1),
        ShiftedDataModule(
            DigitsDataModule(IIDPartitioner(3), flatten=True, max_train=90),
            features="noise",
            strength=3.0,
            grows_over=2,
        ),
        [FedAvg()],
        {"participation": 2},
    ),
    "drift": lambda: (Toy(), DriftingDataModule(toy_data((24, 40, 16)), windows=2), [FedAvg()], {}),
    "scaffold": lambda: (Toy("momentum"), toy_data((24, 40, 16)), [SCAFFOLD()], {"participation": 2}),
    "fenda": lambda: (PiecesStyle(), toy_data((24, 40, 16)), [FENDA(head="net.head")], {"participation": 2}),
    "fedmd": lambda: (
        two_models("momentum"),
        public_data(),
        [FedMD(transfer_epochs=1, public_samples=8), LocalCheckpoint()],
        {"participation": 2},
    ),
}


def run(name: str, root: Path, **options: Any) -> FederatedTrainer:
    torch.manual_seed(0)
    module, data, callbacks, own = RUNS[name]()
    trainer = make_trainer(root, callbacks, **own | options)
    trainer.fit(module, datamodule=data)
    return trainer


def exported(trainer: FederatedTrainer) -> dict[str, Any]:
    """The contents of all checkpoint files of a run."""
    assert trainer.run is not None
    folder = trainer.run.path / "checkpoints"
    files = sorted(folder.rglob("*.ckpt"))
    assert files
    return {str(file.relative_to(folder)): torch.load(file, weights_only=False) for file in files}


@pytest.fixture(scope="module")
def engine(handlers: Any) -> Iterator[Any]:
    """One engine for all tests that give it tasks of their own."""
    data = toy_data((24, 40, 16))
    data.setup("fit")
    runner = ClientRuntime(Blueprint(Toy(), CallbackList([]), LocalSettings(seed=0, max_rounds=1)), data)
    engine = make_engine(Ray(2), runner, ClientRecords())
    yield engine
    engine.close()


# -- the same results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.fast_cases(1)
def test_bit_for_bit_as_in_sequence(name: str, tmp_path: Path, handlers: dict[int, Any]) -> None:
    first, second = run(name, tmp_path / "sequential"), run(name, tmp_path / "ray", **RAY)
    assert_same_run(first, second)
    assert first.test(verbose=False) == second.test(verbose=False)
    assert_same_tree(exported(first), exported(second), name)
    assert {number: signal.getsignal(number) for number in handlers} == handlers  # Ray replaces that of SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_algorithm(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    share = 1.0 if "absent_clients" in case.skip else 3
    options = {"evaluation": 1, "participation": share} | case.arguments
    first = federate_toy(copy.deepcopy(case.algorithm), ToyData(), tmp_path / "a", **options)
    second = federate_toy(copy.deepcopy(case.algorithm), ToyData(), tmp_path / "b", **options, **RAY)
    assert_same_run(first, second)
    assert_same_tree(exported(first), exported(second), name)


def test_workers_live_on_and_take_what_has_changed() -> None:
    trainer = make_trainer(None, [FedAvg()], **RAY)
    trainer.fit(Toy(), datamodule=toy_data())
    workers = {id(kept) for kept in ray_cluster._kept}
    other = make_trainer(None, [FedAvg()], **RAY)
    other.fit(Toy("adam"), datamodule=toy_data())
    trainer.test(verbose=False)  # the same workers have served another federation in between
    assert {id(kept) for kept in ray_cluster._kept} == workers and len(workers) == 2


def test_a_class_of_a_function_can_be_sent() -> None:
    """As one of a notebook can: it travels by value."""

    class Hidden(Toy):
        pass

    states = []
    for options in ({}, RAY):
        torch.manual_seed(0)
        trainer = make_trainer(None, [FedAvg()], **options)
        trainer.fit(Hidden(), datamodule=toy_data())
        assert trainer.server is not None
        states.append(trainer.server.models["global"])
    same(*states)
    make_trainer(None, [FedAvg()], **RAY, max_rounds=1).fit(Holding(), datamodule=toy_data())


# -- failures ------------------------------------------------------------------------------------------------------


def test_a_killed_worker_costs_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    results = []
    for name, options in (("a", {}), ("b", RAY)):
        torch.manual_seed(0)
        once = tmp_path / "killed"
        trouble = [Trouble("1", "kill", round=1, once=str(once))] if options else []
        trainer = make_trainer(tmp_path / name, [SCAFFOLD(), *trouble], **options)
        if options:
            with pytest.warns(UserWarning, match="A Ray worker ended .process .* at work on client '1', which is done"):
                trainer.fit(Toy(dropout=0.3), datamodule=toy_data())
            assert once.exists()
        else:
            trainer.fit(Toy(dropout=0.3), datamodule=toy_data())
        results.append(trainer)
    assert_same_run(*results)
    assert "raylet" not in "".join(capfd.readouterr())  # Ray says nothing of its own


@pytest.mark.slow  # workers start anew
def test_a_client_that_kills_every_worker_is_left_out(tmp_path: Path) -> None:
    results = []
    for name, how, options in (("a", "raise", {}), ("b", "kill", RAY)):
        torch.manual_seed(0)
        trainer = make_trainer(tmp_path / name, [FedAvg(), Trouble("2", how, round=0)], **options)
        match = "client '2' failed: 2 Ray workers ended" if options else "client '2' failed: TwoArguments"
        with pytest.warns(UserWarning, match=match):
            trainer.fit(Toy(), datamodule=toy_data())
        results.append(trainer)
    assert_same_run(*results)


def test_a_client_that_raises_says_the_same() -> None:
    said = []
    for options in ({}, RAY):
        torch.manual_seed(0)
        trainer = make_trainer(None, [FedAvg(), Trouble("0", "raise")], **options)
        with pytest.raises(FederationError) as caught:
            trainer.fit(Toy(), datamodule=toy_data((24,)))
        said.append(str(caught.value))
    assert said[0] == said[1] and "TwoArguments: stopped because of the test" in said[1]
    cause = caught.value.__cause__
    assert cause is not None and isinstance(cause.__cause__, RemoteTraceback)
    assert "on_train_batch_end" in str(cause.__cause__)


@pytest.mark.slow  # workers start anew
def test_ctrl_c_ends_those_at_work() -> None:
    trainer = make_trainer(None, [FedAvg(), Interrupt()], **RAY)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Toy(), datamodule=toy_data())
    again = make_trainer(None, [FedAvg()], **RAY, max_rounds=1)
    again.fit(Toy(), datamodule=toy_data())
    assert again.rounds_done == 1


def test_warnings_of_clients_reach_the_user() -> None:
    with pytest.warns(UserWarning, match="what a client has to say"):
        make_trainer(None, [FedAvg(), Noise()], **RAY, max_rounds=1).fit(Toy(), datamodule=toy_data())


# -- tasks ---------------------------------------------------------------------------------------------------------


def test_answers_come_in_order_and_clients_follow_themselves(engine: Any) -> None:
    tasks = [Work(number, client="ab"[number % 2], seconds=0.02 * (5 - number)) for number in range(6)]
    answers = list(engine.map(tasks))
    assert [name for name, _, _ in answers] == list(range(6))
    assert [visits for _, visits, _ in answers] == [0, 0, 1, 1, 2, 2]  # each found the record of the one before
    assert {threads for _, _, threads in answers} == {1}
    assert engine.store.get("a").visits == 3 and engine.store.changed == {"a", "b"}


def test_what_goes_to_several_clients_is_put_once(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    list(engine.map([Work(0), Work(1)]))
    model, puts, put = torch.arange(1000.0), [], ray.put
    monkeypatch.setattr(ray, "put", lambda value: (puts.append(value.nbytes), put(value))[1])
    assert len(list(engine.map([Work(n, value={"w": model}) for n in range(5)]))) == 5
    assert puts == [4032]  # 4000 bytes, and what fills up the last line


def test_what_a_task_raises_is_raised_and_the_engine_goes_on(engine: Any) -> None:
    with pytest.raises(ValueError, match="no good") as caught:
        list(engine.map([Work(0), Work(1, error="no good"), Work(2)]))
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert [name for name, *_ in engine.map([Work(3)])] == [3]


# -- what is refused, and how room is shared out -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"engine": "ray", "devices": [1]}, "names devices, which Ray chooses"),
        ({"engine": "ray", "strategy": "ddp"}, "engine='ray' trains each client in one"),
        ({"engine": "ray", "num_nodes": 2}, "takes the machines of its cluster"),
    ],
)
def test_refused_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make_trainer(None, **options)


def test_without_ray_one_is_told_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "installed", lambda: False)
    with pytest.raises(ConfigurationError, match=r"needs Ray, which is not installed: pip install 'ray>=2\.55'"):
        make_trainer(None, [FedAvg()], **RAY).fit(Toy(), datamodule=toy_data())


@pytest.mark.parametrize(
    ("own", "room", "given", "workers", "on_gpu", "needs"),
    [
        (True, (2, 0), {}, 2, False, (1, 0)),
        (True, (2, 0), {}, 3, False, (0.6666, 0)),  # our own CPUs are numbers
        (False, (2, 0), {}, 3, False, (1, 0)),  # as many as there is room for work
        (True, (8, 1), {}, 3, True, (1, 0.3333)),
        (True, (8, 4), {}, 2, True, (1, 1)),
        (True, (8, 3), {}, 4, True, (1, 0.5)),  # with 3/4 there would be no room for the fourth
        (False, (8, 4), {}, None, True, (1, 1)),
        (True, (8, 1), {"num_gpus": 0.25, "num_cpus": 0.5}, 3, True, (0.5, 0.25)),
    ],
)
def test_what_a_worker_is_given(
    own: bool,
    room: tuple[float, float],
    given: dict[str, Any],
    workers: int | None,
    on_gpu: bool,
    needs: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_cluster, "_own", own)
    monkeypatch.setattr(ray_cluster, "room", lambda: room)
    assert ray_cluster.needs_of(Ray(**given), workers, on_gpu) == needs


@pytest.mark.parametrize(
    ("room", "given", "on_gpu", "text"),
    [
        ((8, 2), {"num_gpus": 0}, True, "Ray's workers would have none"),
        ((8, 0), {}, True, "the cluster has 0 GPUs"),
        ((8, 0), {"num_gpus": 1}, False, "there is room for none"),
        ((2, 0), {"num_cpus": 4}, False, "there is room for none"),
    ],
)
def test_a_cluster_without_room(
    room: tuple[float, float], given: dict[str, Any], on_gpu: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_own", False)
    monkeypatch.setattr(ray_cluster, "room", lambda: room)
    with pytest.raises(ConfigurationError, match=text):
        ray_cluster.needs_of(Ray(**given), None, on_gpu)


def test_which_waiting_worker_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """That with the federation's parts; another one unless a file has changed since it started; else a new one."""
    ended = []
    monkeypatch.setattr(ray_cluster.Kept, "end", lambda kept: ended.append(kept.handle))
    monkeypatch.setattr(ray_cluster, "_newest_source", lambda: 50.0)
    mine, owner = object(), object()
    waiting = [ray_cluster.Kept(name, (1, 0), holds=holds, born=born) for name, holds, born in (
        ("old", None, 49.0), ("new", None, 51.0), ("mine", mine, 49.0))]  # fmt: skip
    monkeypatch.setattr(ray_cluster, "_kept", waiting)
    monkeypatch.setattr(
        "ray.remote", lambda kind: SimpleNamespace(options=lambda **given: SimpleNamespace(remote=dict))
    )
    taken = [ray_cluster.lease((1, 0), mine, owner) for _ in range(3)]
    assert [one.handle for one in taken] == ["mine", "new", {}] and ended == ["old"] and not waiting
    for one in taken:
        ray_cluster.keep(one)
    assert ray_cluster.lease((1, 0.5), mine, owner).handle == {} and len(ended) == 4  # other needs
    ray_cluster.keep(ray_cluster.Kept("x", (1, 0), owner=owner))
    ray_cluster.end_kept(object())
    assert len(ended) == 4
    ray_cluster.end_kept(owner)
    assert ended[4:] == ["x"]


def test_sources_that_may_change_are_looked_at() -> None:
    assert ray_cluster._newest_source() >= Path(__file__).stat().st_mtime


def test_a_closed_trainer_has_no_workers() -> None:
    with make_trainer(None, [FedAvg()], **RAY, max_rounds=1) as trainer:
        trainer.fit(Toy(), datamodule=toy_data())
        pids = [kept.about[0] for kept in ray_cluster._kept if kept.about is not None]
        assert pids
    assert not ray_cluster._kept
    wait_until(lambda: not any(alive(pid) for pid in pids), "the end of the workers")


# -- whole programs ------------------------------------------------------------------------------------------------

SCRIPT = """
import os
import sys
import fedlightning
from fedlightning.callbacks import FedAvg
from fedlightning.options import Ray
from tests.engines.users import Sleep
from tests.helpers import Toy, make_trainer, toy_data

class Mine(Toy):
    pass

callbacks = [FedAvg()] + ([Sleep(sys.argv[1])] if len(sys.argv) > 1 else [])
make_trainer(None, callbacks, engine=Ray(workers=2)).fit(Mine(), datamodule=toy_data())
print("trained", sum("RAY_AUTH" in name for name in os.environ))
"""


@pytest.mark.slow
def test_a_script_needs_no_guard_and_ray_says_nothing(tmp_path: Path) -> None:
    out, err = start(tmp_path / "script.py", SCRIPT).communicate(timeout=600)
    assert out == "trained 0\n" and "ray" not in err.lower().replace("vectorarray", ""), (out, err)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_program(how: signal.Signals, tmp_path: Path, usual_signals: None) -> None:
    (tmp_path / "pids").mkdir()
    program = start(tmp_path / "script.py", SCRIPT, str(tmp_path / "pids"))
    wait_until(lambda: len(list((tmp_path / "pids").iterdir())) == 2, "two visits")
    pids = descendants(program.pid)
    assert len(pids) > 4 and listening(pids) and all(address.startswith(LOOPBACK) for address in listening(pids))
    program.send_signal(how)
    _, err = program.communicate(timeout=600)
    assert program.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9}.get(how, program.returncode)
    assert (how == signal.SIGINT) == err.endswith("KeyboardInterrupt\n"), err
    wait_until(lambda: not any(alive(pid) for pid in pids), "the end of Ray's processes")


LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
"""127.0.0.1 and ::1, as the kernel writes them."""


def descendants(pid: int) -> list[int]:
    found = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, tasks.read_text().split()):
            found += [child, *descendants(child)]
    return found


def listening(pids: list[int]) -> list[str]:
    """The addresses on which processes wait for connections."""
    sockets = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(file.readlink().name)
            except OSError:
                continue
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]


NODES = """
import sys
import fedlightning
import ray
import torch
from ray.cluster_utils import Cluster
from fedlightning.callbacks import SCAFFOLD
from fedlightning.options import Ray
from fedlightning.parallel import ray as ray_cluster
from tests.engines.users import Lose
from tests.helpers import Toy, make_trainer, same, toy_data

def run(**options):
    torch.manual_seed(0)
    trainer = make_trainer(sys.argv[1], [SCAFFOLD(), Lose()], **options)
    trainer.fit(Toy("momentum", dropout=0.2), datamodule=toy_data((24, 40, 16, 30, 24)))
    return trainer.server.models["global"], trainer.federation.engine.width

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
options = {"engine": Ray(address=cluster.address)}
alone, _ = run()
both, width = run(**options)
nodes = {ray.get(kept.handle.hello.remote())[1] for kept in ray_cluster._kept}  # waits for one that starts late
Lose.then.append(lambda: cluster.remove_node(second))
lost, _ = run(**options)
same(alone, both)
same(alone, lost)
print("equal", width, len(nodes), len(Lose.then))
"""


@pytest.mark.slow
def test_two_nodes_of_which_one_is_lost(tmp_path: Path) -> None:
    out, err = start(tmp_path / "script.py", NODES, str(tmp_path)).communicate(timeout=600)
    assert out.endswith("equal 2 2 0\n"), (out, err)


def test_an_address_where_nobody_listens_is_refused_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match="no Ray cluster answers there"):
            ray_cluster._knock(address)
    ray_cluster._knock("auto")
