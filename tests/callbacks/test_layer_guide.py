"""The code in docs/how-to/layer_diagnostics.md runs as it stands, and the configuration stacks on a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
import yaml

import fedlightning  # noqa: F401  before lightning

# isort: split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.callbacks.diagnostics.layer_values import read_layers
from fedlightning.cli import main
from tests.helpers import CLASSES, FEATURES, Toy, samples

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/how-to/layer_diagnostics.md").read_text()
PLAIN, QUESTIONS = re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)
CONFIG = ROOT / "configs/diagnostics/layers.yaml"


class Deep(Toy):
    """Three layers: enough for ranks."""

    def make(self, hidden: int, dropout: float) -> nn.Module:
        body = [nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
        return nn.Sequential(*body, nn.Linear(hidden, CLASSES))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    return tmp_path


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*logger")
def test_the_plain_trainer_s_example(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    known: dict[str, Any] = {"module": Deep(), "train_loader": DataLoader(TensorDataset(*samples("0", "train", 24)), 8)}
    exec(PLAIN, known)
    printed = [line for line in capsys.readouterr().out.splitlines() if "±" in line]
    assert [line.partition(":")[0] for line in printed] == known["curvature"].result.layers
    assert known["sensitivity"].result.layers == known["noise"].result.layers
    assert (here / "layers.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_configuration_and_the_questions(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "-c", str(ROOT / "configs/quickstart.yaml"), "-c", str(ROOT / "configs/algorithms/fedprox.yaml")]
    words += ["-c", str(CONFIG), "--trainer.max_rounds=1", "--trainer.local_epochs=1", "--trainer.logger=false"]
    words += ["--data.partitioner.num_clients=2", "--data.max_train=100", "--data.max_test=40"]
    assert main([*words, "--trainer.enable_progress_bar=false", "--trainer.callbacks.hessian_probes=2"]) == 0
    run = here / "runs/quickstart/version_0"
    config = yaml.safe_load((run / "config.yaml").read_text())
    names = [entry["class_path"].rpartition(".")[2] for entry in config["trainer"]["callbacks"]]
    assert names == ["LocalCheckpoint", "GlobalCheckpoint", "FedProx", "LayerDiagnostics"]
    assert {row.client for row in read_layers(run)} == {"0", "1", "all"}
    known: dict[str, Any] = {"run_0": run, "run_1": run}
    exec(QUESTIONS, known)
    assert "'rho'" in capsys.readouterr().out
    assert (here / "transition.png").stat().st_size > 10_000


def test_every_quantity_that_is_written_is_in_the_guide() -> None:
    from fedlightning.callbacks.diagnostics.layer_diagnostics import QUANTITIES

    assert all(f"`{name}`" in GUIDE for name in (*QUANTITIES, "num_parameters"))
    assert CONFIG.read_text().startswith("# ")
