"""The catalogue is complete and true."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import fedlightning.callbacks as callbacks
from fedlightning.catalogue import ALGORITHMS, Algorithm, create, find, list_algorithms
from fedlightning.hooks import FederatedCallback

ROOT = Path(__file__).parents[1]
NOT_ALGORITHMS = {"LocalCheckpoint", "GlobalCheckpoint", "LayerDiagnostics"}


@pytest.mark.parametrize("row", ALGORITHMS, ids=lambda row: row.name)
def test_rows_are_true(row: Algorithm) -> None:
    cls = row.load()
    assert issubclass(cls, FederatedCallback)
    assert cls.__name__ == row.name
    assert row.family in ("global", "personal", "baseline")
    options = row.options()
    assert [option.name for option in options] == list(inspect.signature(cls).parameters)
    for option in options:
        assert option.help, f"{row.name} says nothing about {option.name}"
    assert (ROOT / row.config).exists()


def test_every_algorithm_has_a_row() -> None:
    exported = {
        name
        for name in callbacks.__all__
        if inspect.isclass(getattr(callbacks, name)) and issubclass(getattr(callbacks, name), FederatedCallback)
    }
    assert exported - NOT_ALGORITHMS == {row.name for row in ALGORITHMS}


def test_create_and_find() -> None:
    made = create("fedprox", mu=0.25)
    assert type(made).__name__ == "FedProx"
    assert made.hyperparameters()["mu"] == 0.25
    assert find("player-fl_random").name == "PLayerFLRandom"
    with pytest.raises(ValueError, match="Did you mean FedProx"):
        create("fedprx")
    with pytest.raises(ValueError, match=r"FedProx has no option 'nu'\. It has mu, weighting"):
        create("FedProx", nu=1)


def test_list() -> None:
    assert list_algorithms() == [row.name for row in ALGORITHMS]
    assert "FedAdam" in list_algorithms("fed*")
    assert "APFL" not in list_algorithms("fed*")
    assert set(list_algorithms("baseline")) >= {"Local", "Central"}


def test_listing_imports_no_lightning() -> None:
    code = (
        "import sys, fedlightning.cli as cli; cli.main(['algorithms']); cli.main(['--help']);"
        "sys.exit(any(name in sys.modules for name in ('lightning', 'torchmetrics', 'jsonargparse')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "FedProx" in done.stdout
