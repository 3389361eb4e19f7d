"""Whole runs on a GPU: scores, a killed process, what lies in the memory of the device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlightning.algorithm import Facts, FederatedCallback
from fedlightning.callbacks import SCAFFOLD, FedAvg, FedPer, LocalCheckpoint
from fedlightning.options import Evaluation
from fedlightning.testing.runs import tensors_in
from tests.gpu.on import ACCELERATOR, HERE, REAL
from tests.helpers import NormNet, Toy, federate, global_state, same, toy_data

pytestmark = pytest.mark.gpu
REPOSITORY = Path(__file__).parents[2]


def seeded(**options: Any) -> Toy:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Toy("momentum", **options)


def scored(root: Path, **options: Any) -> Any:
    trainer = federate(
        seeded(),
        toy_data(),
        [FedAvg(), LocalCheckpoint()],
        root,
        evaluation=Evaluation(data=["local", "pooled"]),
        **options,
    )
    trainer.test()
    return trainer


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_scores_are_those_of_the_cpu(engine: Any, tmp_path: Path) -> None:
    here, there = (
        scored(tmp_path / folder, engine=engine, accelerator=where)
        for folder, where in (("here", ACCELERATOR), ("there", "cpu"))
    )
    assert len(here.rows) == len(there.rows) > 0
    for a, b in zip(here.rows, there.rows, strict=True):
        assert str(a).partition("value")[0] == str(b).partition("value")[0]
        assert a.value == pytest.approx(b.value, abs=2e-4)


class Killed(FederatedCallback):
    """Kills its process at the start of the second round."""

    facts = Facts(takes_part=False)

    def on_round_start(self, server: Any) -> None:
        if server.round == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(root: Path, *callbacks: Any, resume: Any = None) -> Any:
    data = toy_data([16, 24, 32])
    return federate(
        seeded(dropout=0.3),
        data,
        [SCAFFOLD(), *callbacks],
        root,
        resume=resume,
        max_rounds=3,
        deterministic=True,
        **HERE,
    )


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    root = tmp_path / "killed"
    program = f"from tests.gpu.test_runs import Killed, Path, train; train(Path({str(root)!r}), Killed())"
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, timeout=200, check=False)
    assert done.returncode == -signal.SIGKILL
    same(global_state(whole), global_state(train(root, resume="last")))


class Allocated(FederatedCallback):
    """Notes the bytes that are taken on the device at the end of each round."""

    facts = Facts(takes_part=False)
    bytes: list[int] = []  # of the class: the trainer works with a copy

    def on_round_end(self, server: Any) -> None:
        self.bytes.append(torch.cuda.memory_allocated() if REAL else 0)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_what_a_thousand_clients_keep_is_not_on_the_device(engine: Any) -> None:
    """Every round visits others: after ten all have a personal layer and SCAFFOLD's or nobody's state, and none is there."""
    Allocated.bytes.clear()
    module = NormNet("momentum", hidden=256)
    trainer = federate(
        module,
        toy_data([8] * 1000, val=0, test=0),
        [FedPer(personal=["net.0", "net.1"]), Allocated()],
        max_rounds=10 if REAL else 2,
        participation=200 if REAL else 20,
        engine=engine,
        **HERE,
    )
    records = [trainer.store.get(client) for client in trainer.server.clients]
    tensors = tensors_in([[each.personal, each.state, each.lightning] for each in records])
    assert len(tensors) >= 40 and {tensor.device.type for tensor in tensors} == {"cpu"}
    one = sum(tensor.numel() * tensor.element_size() for tensor in trainer.server.model.values())
    assert Allocated.bytes[-1] - Allocated.bytes[1 if REAL else 0] < 20 * one


@pytest.mark.alone
def test_the_size_of_stacks_follows_the_free_memory() -> None:
    """With 3 GB left, 400 clients of 4 MB a sample's batch are trained in stacks that fit."""
    ballast = None
    if REAL:
        torch.cuda.empty_cache()
        ballast = torch.empty(max(0, torch.cuda.mem_get_info()[0] - 3 * 2**30), dtype=torch.uint8, device="cuda")
    hidden, clients = (200_000, 400) if REAL else (2_000, 6)
    trainer = federate(
        Toy(hidden=hidden), toy_data([16] * clients, val=0, test=0), max_rounds=1, engine="vectorized", **HERE
    )
    assert not trainer.server.failures
    assert 1 <= trainer.federation.engine.size <= 400
    del ballast
