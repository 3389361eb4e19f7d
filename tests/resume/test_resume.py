"""Interrupted and resumed in a new process: the same tensors, files and results as without the interruption."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from fedlightning import FederatedCallback
from fedlightning.algorithm import Facts
from fedlightning.callbacks import (
    FLIU,
    SCAFFOLD,
    Central,
    FedAdam,
    FedAvg,
    FedBN,
    FedIT,
    FedPer,
    FedProx,
    GlobalCheckpoint,
    Local,
    LocalAdaptation,
    LocalCheckpoint,
)
from fedlightning.codec.tree import FileWriter
from fedlightning.options import Evaluation
from fedlightning.resume import state_files as persistence
from fedlightning.resume.resumable import find_last
from fedlightning.tensors import module_state
from tests.helpers import NormNet, Toy, federate, global_state, make_trainer, same, toy_data
from tests.processes import forked

ROUNDS, STOPPED_IN = 4, 2


class Memory(Callback):
    """An ordinary callback with a state: how many batches this client has seen."""

    def __init__(self):
        self.batches = 0

    def on_train_batch_start(self, *args):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def fp16():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


# name -> (module, callbacks, trainer's options), each made anew
RUNS = {
    "fedavg_keep": lambda: (Toy("onecycle", dropout=0.3), [FedAvg()], {"optimizer_state": "keep", "participation": 2}),
    "steps_keep": lambda: (Toy("adam"), [FedProx()], {"optimizer_state": "keep", "local_steps": 4, "lr_decay": 0.9}),
    "lr_decay": lambda: (Toy("steplr"), [Memory()], {"lr_decay": 0.5, "evaluation": 2}),
    "fp16": lambda: (Toy("momentum"), [FedProx()], fp16()),
    "scaffold_1": lambda: (Toy("momentum"), [SCAFFOLD(option=1)], {"participation": 2}),
    "scaffold_2": lambda: (NormNet("sgd"), [SCAFFOLD()], {"participation": 2, "save_state": 2}),
    "fedadam": lambda: (NormNet("sgd"), [FedAdam(server_lr=0.1), SCAFFOLD(server_lr=1.0)], {}),
    "fliu": lambda: (NormNet("adam"), [FLIU()], {"participation": 2}),
    "fedper": lambda: (
        Toy("momentum"),
        [FedPer()],
        {"participation": 2, "evaluation": Evaluation(data=["local", "pooled"])},
    ),
    "fedbn": lambda: (NormNet("adam"), [FedBN()], {"float_buffers": "local"}),
    "local": lambda: (Toy("adam"), [Local()], {}),
    "central": lambda: (Toy("adam"), [Central()], {}),
    "checkpoints": lambda: (
        Toy("sgd"),
        [GlobalCheckpoint(mode="max"), LocalCheckpoint(mode="max", smooth=1), FedAdam()],
        {},
    ),
}


class Stop(FederatedCallback):
    """The user's Ctrl-C, in the middle of a round."""

    facts = Facts(takes_part=False)

    def __init__(self, round, after=1):
        self.round, self.after, self.visits = round, after, 0

    def on_visit_start(self, client):
        if client.round == self.round:
            self.visits += 1
            if self.visits > self.after or client.id == "pooled":
                raise KeyboardInterrupt


def trainer_of(name, root, extra=(), seed=0):
    torch.manual_seed(seed)
    module, callbacks, options = RUNS[name]()
    trainer = make_trainer(root, [*callbacks, *extra], max_rounds=ROUNDS, name=name, **options)
    return trainer, module, toy_data()


def resume_all(root, *names):
    """What the new process does."""
    torch.set_num_threads(1)
    for name in names:
        trainer, module, data = trainer_of(name, root)
        trainer.fit(module, datamodule=data, resume="last")
        trainer.test()
        torch.save(everything(trainer), Path(root) / f"{name}.pt")


def everything(trainer):
    """All that a federation is, as one tree."""
    server = trainer.server
    return {
        "models": server.models,
        "state": server.state,
        "checkpoints": server.checkpoints,
        "bytes": (server.costs.bytes_up, server.costs.bytes_down, server.costs.steps),
        "clients": {client: vars(trainer.store.get(client)) for client in server.clients},
        "results": trainer.results,
        "rows": [vars(row) for row in trainer.rows],
    }


def equal_trees(a, b, where=""):
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert list(map(str, a)) == list(map(str, b)), where
        for key in a:
            equal_trees(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            equal_trees(x, y, f"{where}/{i}")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    else:
        assert a == b or a != a, f"{where}: {a} and {b}"


def files(run):
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


def summary(run):
    found = json.loads((run / "summary.json").read_text())
    rounds = [{key: value for key, value in entry.items() if key != "seconds"} for entry in found["per_round"]]
    return {k: v for k, v in found.items() if k not in ("seconds", "evaluation_seconds", "peak_memory_mb")} | {
        "per_round": rounds
    }


FAST = ("fedavg_keep", "lr_decay", "fp16", "scaffold_2", "fedper", "checkpoints")
"""The conformance suite resumes every method; these are the kinds of things that a state holds."""


@pytest.fixture(scope="module")
def root(tmp_path_factory, request):
    """The runs asked for, uninterrupted under ``whole`` and cut under ``cut``; one new process has resumed the latter.

    Among the slow tests that process is started, so that not even its hashes are those of this one.
    """
    root = tmp_path_factory.mktemp("resume")
    torch.set_num_threads(1)
    ours = [item for item in request.session.items if item.path == request.path and "root" in item.fixturenames]
    asked = {item.callspec.params["name"] for item in ours}
    names = [name for name in RUNS if name in asked]
    for name in names:
        trainer, module, data = trainer_of(name, root / "cut", [Stop(STOPPED_IN)])
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(module, datamodule=data)
    if {*names} <= {*FAST}:
        done = forked(functools.partial(resume_all, str(root / "cut"), *names), Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
        finish(root, names)
        return root
    command = "import sys, fedlightning; from tests.resume.test_resume import resume_all; resume_all(*sys.argv[1:])"
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.Popen(
        [sys.executable, "-c", command, str(root / "cut"), *names],
        cwd=Path(__file__).parents[2],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    finish(root, names)
    output, _ = done.communicate(timeout=400)
    assert done.returncode == 0, output
    return root


def finish(root, names):
    """The same runs without interruption."""
    for name in names:
        trainer, module, data = trainer_of(name, root / "whole")
        trainer.fit(module, datamodule=data)
        trainer.test()
        torch.save(everything(trainer), root / "whole" / f"{name}.pt")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_the_same_as_without_interruption(root, name):
    cut, whole = root / "cut" / name / "version_0", root / "whole" / name / "version_0"
    a = torch.load(root / "whole" / f"{name}.pt", weights_only=False)
    b = torch.load(root / "cut" / f"{name}.pt", weights_only=False)
    equal_trees(a, b)
    assert a["rows"]
    if name == "checkpoints":  # selected before the interruption, so that losing it would be seen
        assert a["checkpoints"]["GlobalCheckpoint"]["round"] <= STOPPED_IN
        assert min(c["checkpoints"]["LocalCheckpoint"]["round"] for c in a["clients"].values()) <= STOPPED_IN
    assert (whole / "metrics.csv").read_bytes() == (cut / "metrics.csv").read_bytes()
    assert summary(whole) == summary(cut)
    assert files(whole) == files(cut)
    for path in (whole / "checkpoints").rglob("*.ckpt"):
        other = cut / path.relative_to(whole)
        same(*(torch.load(p, weights_only=False)["state_dict"] for p in (path, other)))


def interrupted(tmp_path, name="fedavg_keep", stop=STOPPED_IN):
    trainer, module, data = trainer_of(name, tmp_path, [Stop(stop)])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(module, datamodule=data)
    return tmp_path / name / "version_0"


def whole(tmp_path, name="fedavg_keep"):
    trainer, module, data = trainer_of(name, tmp_path / "whole")
    trainer.fit(module, datamodule=data)
    return trainer


def resumed(tmp_path, name="fedavg_keep", resume="last"):
    trainer, module, data = trainer_of(name, tmp_path)
    trainer.fit(module, datamodule=data, resume=resume)
    return trainer


def test_interrupted_before_the_first_save_there_is_nothing_to_resume(tmp_path):
    interrupted(tmp_path, stop=0)
    with pytest.raises(FileNotFoundError, match=r"nothing to resume.*Start without resume"):
        resumed(tmp_path)


def test_interrupted_twice_and_by_the_folder(tmp_path):
    run = interrupted(tmp_path, stop=1)
    trainer, module, data = trainer_of("fedavg_keep", tmp_path, [Stop(3)])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(module, datamodule=data, resume="last")
    ours = resumed(tmp_path, resume=run)
    equal_trees(everything(whole(tmp_path)), everything(ours))
    assert len(list((tmp_path / "fedavg_keep").iterdir())) == 1


@pytest.mark.parametrize("owner, failing", [(persistence, "write_text_atomically"), (FileWriter, "save")])
def test_killed_while_saving(tmp_path, monkeypatch, owner, failing):
    """Files of the new round may lie there; the manifest still names the old ones."""
    trainer, module, data = trainer_of("fedavg_keep", tmp_path)
    original, calls = getattr(owner, failing), []

    def dies(*given):
        path = next(value for value in given if isinstance(value, Path))
        calls.append(path)
        if len(calls) == (5 if failing == "write_text_atomically" else 6):  # of the third round
            path.with_name(path.name + ".tmp").write_bytes(b"half")
            raise KeyboardInterrupt
        original(*given)

    monkeypatch.setattr(owner, failing, dies)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(module, datamodule=data)
    monkeypatch.undo()
    last = tmp_path / "fedavg_keep" / "version_0" / "checkpoints" / "last"
    assert json.loads((last / "manifest.json").read_text())["rounds_done"] == 2
    equal_trees(everything(whole(tmp_path)), everything(resumed(tmp_path)))
    assert not list(last.glob("*.tmp"))


def test_killed_while_saving_the_visits_after_the_last_round(tmp_path, monkeypatch):
    """The state before them stays whole until the one after them is; that one is not taken for the one before."""

    def trainer_in(folder):
        return make_trainer(tmp_path / folder, [LocalAdaptation()], optimizer_state="keep", name="run")

    module, data, replace = Toy("momentum"), toy_data(), os.replace

    def dies(source, target):
        if Path(target).name == "manifest.json" and json.loads(Path(source).read_text())["extra"]["final"]:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        trainer_in("cut").fit(module, datamodule=data)
    monkeypatch.undo()
    whole, again, once_more = trainer_in("whole"), trainer_in("cut"), trainer_in("cut")
    whole.fit(module, datamodule=data)
    assert all(whole.store.get(client).state["LocalAdaptation"] for client in whole.server.clients)
    for resumed in (again, once_more):  # from before the visits, and from after them
        resumed.fit(module, datamodule=data, resume="last")
        equal_trees(everything(whole), everything(resumed))


def test_killed_while_writing_metrics(tmp_path):
    run = interrupted(tmp_path)
    csv = run / "metrics.csv"
    csv.write_bytes(csv.read_bytes() + b"3,L2,personal,latest,local,train,1,train_lo")
    ours = resumed(tmp_path)
    theirs = whole(tmp_path)
    assert csv.read_bytes() == (theirs.run.path / "metrics.csv").read_bytes()
    assert [vars(row) for row in ours.rows] == [vars(row) for row in theirs.rows]


def test_the_saved_state_holds_what_changed_once(tmp_path):
    """The records of those that have taken part, the server, a manifest; this state and the one before, nothing older."""
    trainer, module, data = trainer_of("fedavg_keep", tmp_path)
    trainer.fit(module, datamodule=data)
    last = trainer.run.path / "checkpoints" / "last"
    manifest = json.loads((last / "manifest.json").read_text())
    took_part = {client for client in trainer.server.clients if trainer.store.get(client).visits}
    assert set(manifest["clients"]) == took_part
    before = json.loads((last / "manifest-before.json").read_text())
    named = {m[key] for m in (manifest, before) for key in ("server",)} | {
        name for m in (manifest, before) for name in m["clients"].values()
    }
    assert {path.name for path in last.iterdir()} == {
        "manifest.json",
        "manifest-before.json",
        "template.safetensors",
        *named,
    }
    for client in took_part:
        assert f"-{trainer.store.get(client).last_round + 1:06d}" in manifest["clients"][client]


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    first = whole(tmp_path)
    before = everything(first)
    again, module, data = trainer_of("fedavg_keep", tmp_path / "whole")
    again.fit(module, datamodule=data, resume="last")
    equal_trees(before, everything(again))


def test_more_rounds_can_be_added(tmp_path):
    first, module, data = trainer_of("scaffold_2", tmp_path)
    first.fit(module, datamodule=data)
    longer = make_trainer(tmp_path, [SCAFFOLD()], max_rounds=ROUNDS + 2, name="scaffold_2", participation=2)
    longer.fit(NormNet("sgd"), datamodule=toy_data(), resume="last")
    assert longer.rounds_done == ROUNDS + 2
    assert sorted({row.round for row in longer.rows}) == list(range(1, ROUNDS + 3))


@pytest.mark.parametrize(
    ("module", "sizes", "sentence"),
    [
        (Toy("onecycle", hidden=4), (24, 40, 16), "different model.*net.0"),
        (Toy("onecycle"), (24,), "knows client '1'"),
    ],
)
def test_a_state_of_something_else_is_refused(tmp_path, module, sizes, sentence):
    interrupted(tmp_path)
    trainer, _, _ = trainer_of("fedavg_keep", tmp_path)
    with pytest.raises(ValueError, match=sentence):
        trainer.fit(module, datamodule=toy_data(sizes), resume="last")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"seed": 5}, "seed was 0 and is 5"),
        ({"local_epochs": 3}, "local_epochs was .* and is 3"),
        ({"participation": 1.0}, "participation was 2 and is 1.0"),
    ],
)
def test_another_configuration_is_refused(tmp_path, changed, sentence):
    """Its rounds would be half of one run and half of another."""
    first, module, data = trainer_of("scaffold_2", tmp_path)
    first.fit(module, datamodule=data)
    again = make_trainer(
        tmp_path, [SCAFFOLD()], name="scaffold_2", **{"participation": 2, "max_rounds": ROUNDS + 1} | changed
    )
    with pytest.raises(ValueError, match=sentence):
        again.fit(NormNet("sgd"), datamodule=toy_data(), resume="last")


def test_another_option_of_an_algorithm_is_refused(tmp_path):
    make_trainer(tmp_path, [FLIU(gamma=0.5)], max_rounds=1, name="r").fit(NormNet("sgd"), datamodule=toy_data())
    again = make_trainer(tmp_path, [FLIU(gamma=0.25)], max_rounds=2, name="r")
    with pytest.raises(ValueError, match=r"gamma was 0\.5 and is 0\.25"):
        again.fit(NormNet("sgd"), datamodule=toy_data(), resume="last")


def test_the_initial_weights_of_the_resuming_module_do_not_matter(tmp_path):
    """Not even for the head of a client that is visited for the first time after the interruption."""
    run = interrupted(tmp_path, "fedper", stop=1)
    first = set(json.loads((run / "checkpoints" / "last" / "manifest.json").read_text())["clients"])
    assert first != {"0", "1", "2"}
    trainer, module, data = trainer_of("fedper", tmp_path, seed=1)
    given = copy.deepcopy(module_state(module))
    trainer.fit(module, datamodule=data, resume="last")
    equal_trees(everything(whole(tmp_path, "fedper")), everything(trainer))
    same(given, module_state(module))


class StopInside(Stop):
    """Ctrl-C while Lightning is training: it ends the process there."""

    def on_visit_start(self, client):
        pass

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.client.round == self.round and batch_idx == 1:
            raise KeyboardInterrupt


def test_interrupted_inside_a_training_step(tmp_path):
    trainer, module, data = trainer_of("scaffold_1", tmp_path, [StopInside(STOPPED_IN)])
    with pytest.raises(SystemExit):
        trainer.fit(module, datamodule=data)
    equal_trees(everything(whole(tmp_path, "scaffold_1")), everything(resumed(tmp_path, "scaffold_1")))


def test_the_last_of_several_runs_is_resumed(tmp_path):
    interrupted(tmp_path)
    second = interrupted(tmp_path).parent / "version_1"
    assert find_last(tmp_path, "fedavg_keep") == second


class FrozenInside(Toy):
    """Has a frozen layer that `configure_model` makes, as one that reads a pretrained file: the template does not hold it."""

    value = 1.0

    def configure_model(self):
        if not hasattr(self, "back"):
            self.back = nn.Linear(6, 6)
            nn.init.constant_(self.back.weight, self.value)
            self.back.requires_grad_(False)

    def forward(self, x):
        return self.net(self.back(x) * 0.1)


def test_a_state_knows_the_frozen_parameters_that_it_does_not_hold(tmp_path, monkeypatch):
    """Nobody keeps what every module is built with: with others the run went on and said nothing."""
    options = {"name": "a", "save_state": 1}
    federate(FrozenInside(), toy_data(), [FedAvg()], tmp_path, max_rounds=1, **options)
    monkeypatch.setattr(FrozenInside, "value", 2.0)
    with pytest.raises(ValueError, match="belongs to frozen parameters with the hash"):
        federate(FrozenInside(), toy_data(), [FedAvg()], tmp_path, max_rounds=2, resume="last", **options)
    monkeypatch.setattr(FrozenInside, "value", 1.0)
    resumed = federate(FrozenInside(), toy_data(), [FedAvg()], tmp_path, max_rounds=2, resume="last", **options)
    assert global_state(resumed)["back.weight"].mean() == 1.0


class EditsFrozen(FederatedCallback):
    """Writes into a frozen entry of the server's model in place, after round 1."""

    def on_round_end(self, server):
        if server.round == 0:
            server.model["net.0.base_layer.weight"].add_(1.0)


def test_a_frozen_entry_that_was_edited_in_place_is_saved(tmp_path):
    """It shares its memory with what modules are built with, which then counts as another's and is worked out anew."""
    pytest.importorskip("peft")
    module, options = Toy(), {"name": "a", "save_state": 1}
    federate(module, toy_data(), [FedIT(r=2), EditsFrozen()], tmp_path, max_rounds=1, **options)
    resumed = federate(
        module, toy_data(), [FedIT(r=2), EditsFrozen()], tmp_path, max_rounds=2, resume="last", **options
    )
    whole = federate(module, toy_data(), [FedIT(r=2), EditsFrozen()], max_rounds=2)
    same(global_state(resumed), global_state(whole))
    assert torch.equal(global_state(whole)["net.0.base_layer.weight"], module_state(module)["net.0.weight"] + 1.0)
    assert torch.equal(whole.server.blueprint.base("")["net.0.base_layer.weight"], module_state(module)["net.0.weight"])


class EditsAtStart(FederatedCallback):
    """Writes into a frozen entry of the server's model in place, before round 1."""

    def on_federation_start(self, server):
        server.model["net.0.weight"].add_(1.0)


def test_an_edit_of_the_servers_model_does_not_reach_the_users_module():
    module = Toy()
    module.net[0].weight.requires_grad_(False)
    before = module.net[0].weight.clone()
    trainer = federate(module, toy_data(), [FedAvg(), EditsAtStart()], max_rounds=1)
    assert torch.equal(module.net[0].weight, before) and torch.equal(
        global_state(trainer)["net.0.weight"], before + 1.0
    )


class OwnFrozen(FederatedCallback):
    """Gives every client a frozen layer of its own, which takes the server's values in round 1."""

    def __init__(self):
        self.seen = []

    def wrap_module(self, module, owner):
        module.back = nn.Linear(6, 6)
        nn.init.constant_(module.back.weight, float(len(owner)))
        module.back.requires_grad_(False)
        return module

    def on_visit_start(self, client):
        if client.round == 0:
            nn.init.constant_(client.module.back.weight, float(len("server")))
        self.seen.append(float(client.module.back.weight.mean()))


def test_a_frozen_entry_that_becomes_the_servers_is_kept_where_the_client_is_built_with_another():
    method = OwnFrozen()
    federate(Toy(), toy_data(), [FedPer(personal=["back"]), method], max_rounds=2)
    assert method.seen == [6.0] * 6
