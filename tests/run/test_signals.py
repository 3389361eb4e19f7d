"""Under SLURM the run answers signals at a round boundary; no client's checkpoint is left, and none is loaded."""

from __future__ import annotations

import os
import shlex
import signal

import pytest
import torch

from fedlightning import FederatedCallback
from fedlightning.algorithm import Facts
from fedlightning.callbacks import SCAFFOLD
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
