"""The core stands alone: with all else deleted it trains the same models and gives the same scores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedlightning import FederatedTrainer
from fedlightning.options import Evaluation
from tests.core.assemble_core import ROUNDS, digests, run, scene

ROOT = Path(__file__).parents[2]
CORE = {
    *("errors", "seeding", "tensors", "compat", "ranges", "storage", "layers", "datamodules", "topology", "options"),
    *(
        "codec",
        "wrappers",
        "models",
        "contract",
        "client",
        "scores",
        "run",
        "engines",
        "server",
        "algorithm",
        "callbacks",
    ),
}
"""What the core is: these rooms, and the algorithms that stand on them."""
METHODS = ["FedAvg", "SCAFFOLD", "FedPer"]


def whole(method: str) -> dict[str, str]:
    """Train and score with everything that a trainer attaches."""
    module, data, methods = scene(method)
    trainer = FederatedTrainer(
        max_rounds=ROUNDS,
        participation=0.5,
        callbacks=methods,
        evaluation=Evaluation(test_data=[]),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        save_state=0,
    )
    trainer.fit(module, datamodule=data)
    return digests(trainer.server.model, list(trainer.rows))


@pytest.mark.parametrize("method", METHODS)
def test_the_core_does_what_the_whole_does(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(method) == whole(method)


@pytest.fixture(scope="module")
def stripped(tmp_path_factory) -> Path:
    """A copy of the package from which everything but the core is deleted."""
    root = tmp_path_factory.mktemp("core")
    for top in ("fedlightning", "callbacks", "datamodules"):
        shutil.copytree(ROOT / top, root / top, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (root / "fedlightning").iterdir():
        if path.name.partition(".")[0] not in CORE | {"__init__", "py"}:
            path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
    (root / "tests" / "core").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "core" / "assemble_core.py", root / "tests" / "core")
    return root


def test_it_does_so_with_all_else_deleted(stripped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(stripped), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.core.assemble_core", *METHODS]
    done = subprocess.run(command, cwd=stripped, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert set(told.pop("rooms")) <= CORE
    assert told == {method: run(method) for method in METHODS}
