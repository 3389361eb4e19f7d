"""Under SLURM the run answers signals at a round boundary; no client's checkpoint is left, and none is loaded."""

from __future__ import annotations

import os
import re
import shlex
import signal

import pytest
import torch

from fedlightning import FederatedCallback
from fedlightning.algorithm import Facts, ModelSelection
from fedlightning.callbacks import SCAFFOLD
from fedlightning.cli import main
from tests.experiments.tiny import small
from tests.helpers import Toy, make_trainer, same, toy_data


class Signal(FederatedCallback):
    """SLURM's signal, in the middle of a client's training."""

    facts = Facts(takes_part=False)

    def __init__(self, round, name="SIGUSR1"):
        self.round, self.name = round, name

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.client.round == self.round and self.client.id == "1" and batch_idx == 0:
            os.kill(os.getpid(), getattr(signal, self.name))


def run(root, *more, **options):
    torch.manual_seed(0)
    trainer = make_trainer(root, [SCAFFOLD(), *more], max_rounds=4, name="run", **options)
    trainer.fit(Toy("sgd"), datamodule=toy_data(), resume="auto")
    return trainer


@pytest.fixture
def slurm(monkeypatch, tmp_path):
    """A job of one task, and a `scontrol` that writes down what it is asked."""
    for name, value in {
        "NTASKS": "1",
        "JOB_ID": "77",
        "JOB_NAME": "fit",
        "PROCID": "0",
        "LOCALID": "0",
        "NODEID": "0",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    calls = tmp_path / "bin" / "calls"
    calls.parent.mkdir()
    scontrol = calls.parent / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(calls))}\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{calls.parent}:{os.environ['PATH']}")
    return calls


@pytest.mark.parametrize("local_loop", ["trainer", "fast"])
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_the_run_stops_at_the_boundary_and_is_queued_again(tmp_path, slurm, local_loop, name):
    whole = run(tmp_path / "whole", local_loop=local_loop)
    with pytest.warns(UserWarning, match=f"{name} came from SLURM: the run stopped after round 2 of 4.* queued again"):
        cut = run(tmp_path / "cut", Signal(1, name), local_loop=local_loop)
    assert cut.rounds_done == 2
    assert slurm.read_text() == "requeue 77\n"
    assert not list(tmp_path.rglob("hpc_ckpt*"))
    assert signal.getsignal(getattr(signal, name)) is signal.SIG_DFL
    again = run(tmp_path / "cut", local_loop=local_loop)
    same(again.server.model, whole.server.model)
    assert again.rows == whole.rows


def test_a_left_over_checkpoint_of_lightning_is_refused(tmp_path):
    folder = tmp_path / "run" / "version_0"
    folder.mkdir(parents=True)
    (folder / "hpc_ckpt_1.ckpt").touch()
    with pytest.raises(ValueError, match=r"hpc_ckpt_1\.ckpt is a checkpoint of a job that SLURM ended"):
        run(tmp_path, version="version_0")


class SignalAtTheEnd(ModelSelection):
    """SLURM's signal after the last round: in the first test, or when that round ends."""

    where, number = "nowhere", signal.SIGUSR1

    def send(self, where):
        if where == SignalAtTheEnd.where:
            SignalAtTheEnd.where = "nowhere"
            os.kill(os.getpid(), SignalAtTheEnd.number)

    def on_client_evaluated(self, client, stage, split, metrics, module):
        if split == "test" and stage != "L2":  # L2 is of the rounds
            self.send("test")

    def on_round_end(self, server):
        if server.round == 1:
            self.send("end")


@pytest.mark.parametrize("where", ["test", "end"])
def test_a_signal_after_the_last_round_queues_the_job_again_too(tmp_path, slurm, monkeypatch, capsys, where):
    """In the test after the rounds it ended the process, and nobody asked SLURM to start the job again."""
    monkeypatch.chdir(tmp_path)
    config = small(tmp_path / "c.yaml", "tests.resume.test_stop_requests.SignalAtTheEnd", max_rounds=2, name="run")
    monkeypatch.setattr(SignalAtTheEnd, "where", where)
    words = ["fit", "--config", config, "--resume", "auto"]
    assert main(words) == 128 + signal.SIGUSR1
    assert "the run stopped after round 2 of 2" in " ".join(capsys.readouterr().err.split())
    assert slurm.read_text() == "requeue 77\n" and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    scores = tmp_path / "runs/run/version_0/metrics.csv"
    tested = re.compile(r"^2,(G|L1),.*,test,", re.MULTILINE)  # L2 is of the rounds
    assert not tested.search(scores.read_text())
    assert main(words) == 0 and slurm.read_text() == "requeue 77\n"
    assert tested.search(scores.read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_test_after_the_last_round_is_said(tmp_path, monkeypatch, capsys, number):
    """The process was gone without a word."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SignalAtTheEnd, "where", "test")
    monkeypatch.setattr(SignalAtTheEnd, "number", number)
    config = small(tmp_path / "c.yaml", "tests.resume.test_stop_requests.SignalAtTheEnd", max_rounds=2, name="run")
    assert main(["fit", "--config", config]) == 128 + number
    said = " ".join(capsys.readouterr().err.split())
    assert f"{number.name} ended the test after round 2, the last one; what was trained is safe." in said
    assert signal.getsignal(number) is signal.SIG_DFL
