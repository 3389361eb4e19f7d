"""The catalogue is complete and true; algorithms of other packages are listed beside ours."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import fedlightning.callbacks as callbacks
from fedlightning.catalogue import ALGORITHMS, Algorithm, create, find, installed, list_algorithms
from fedlightning.config.class_names import class_names
from fedlightning.contract import FederatedCallback
from fedlightning.testing import check_algorithm
from tools.registry import generated

ROOT = Path(__file__).parents[1]
NOT_ALGORITHMS = {
    "Budget",
    "CenteredClipping",
    "ClientDP",
    "SampleDP",
    "SecureAggregation",
    "TopK",
    "RandomK",
    "QSGD",
    "CoordinateMedian",
    "FederatedEarlyStopping",
    "FLTrust",
    "GeometricMedian",
    "GlobalCheckpoint",
    "Krum",
    "LayerDiagnostics",
    "LocalCheckpoint",
    "NormClippedMean",
    "PoissonSampling",
    "PrivateLR",
    "Stragglers",
    "TokenWeighting",
    "TrimmedMean",
}


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


def test_every_config_has_a_row() -> None:
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("configs/algorithms/*.yaml")}
    without = sorted(files - {row.config for row in ALGORITHMS})
    assert not without, f"No row of fedlightning/catalogue belongs to {', '.join(without)}."


def test_what_follows_from_the_catalogue_is_up_to_date() -> None:
    stale = [str(path.relative_to(ROOT)) for path, text in generated().items() if path.read_text() != text]
    assert not stale, f"Not what fedlightning/catalogue says: {' and '.join(stale)}. Run `make registry`."


def test_a_variant_names_its_own_file() -> None:
    row = Algorithm("One", "global", "A sentence.", "A paper", class_path="acme.One")
    assert (row.class_path, row.config) == ("acme.One", "")
    other = row.variant("Other", "Another sentence.")
    assert other.class_path == "fedlightning.callbacks.Other"
    assert other.config == "configs/algorithms/other.yaml"


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
    assert list_algorithms()[: len(ALGORITHMS)] == [row.name for row in ALGORITHMS]
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


# -- algorithms of other packages ----------------------------------------------------------------------------------

ENTRIES = """
[fedlightning.algorithms]
Anchor = acme_fl.rows:ANCHOR
Gentle = acme_fl:Gentle
FedProx = acme_fl.never_imported:FedProx
Gone = acme_fl.nowhere:Gone
Homeless = acme_fl.rows:HOMELESS
Misnamed = acme_fl:Gentle
NoAlgorithm = acme_fl:NoAlgorithm
Strange = acme_fl.rows:STRANGE
Vanished = acme_fl.rows:VANISHED
"""
ROWS = """
from fedlightning.catalogue import Algorithm

ANCHOR = Algorithm(
    "Anchor", "personal", "Holds each client near its first model.", "Acme, 2031", class_path="acme_fl.Anchor"
)
HOMELESS = Algorithm("Homeless", "personal", "Has no class path.", "Acme, 2031")
STRANGE = ANCHOR.variant("Strange", "Of no family.", family="strange", class_path="acme_fl.Strange")
VANISHED = ANCHOR.variant("Vanished", "Whose class is gone.", class_path="acme_fl.Vanished")
"""
CODE = """
from fedlightning.callbacks import FedProx

class Anchor(FedProx):
    pass

class Gentle(FedProx):
    '''FedProx with a tenth
    of the strength.

    Args:
        mu: Ten times the strength.
    '''

class NoAlgorithm:
    pass
"""
LEFT_OUT = {
    "FedProx": "'fedlightning' has one of that name already",
    "Gone": "ModuleNotFoundError: No module named 'acme_fl.nowhere'",
    "Homeless": "ValueError: its row has no class_path, such as 'acme_fl.rows.Homeless'",
    "Misnamed": "ValueError: entry, row and class have different names: 'Misnamed', 'Gentle', 'acme_fl.Gentle'",
    "NoAlgorithm": "TypeError: acme_fl.NoAlgorithm is neither a FederatedCallback class nor a row",
    "Strange": "ValueError: its family is 'strange', not one of global, personal",
}


def forget() -> None:
    installed.cache_clear()
    class_names.cache_clear()


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with good and bad entries, installed."""
    for name, text in {
        "acme_fl/__init__.py": CODE,
        "acme_fl/rows.py": ROWS,
        "acme_fl-1.0.dist-info/entry_points.txt": ENTRIES,
        "acme_fl-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: acme-fl\nVersion: 1.0\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield tmp_path
    forget()
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_fl"]:
        del sys.modules[name]


def test_algorithms_of_other_packages(acme: Path) -> None:
    with pytest.warns(UserWarning, match="of the package 'acme-fl' is left out") as caught:
        listed = list_algorithms()
    assert listed[len(ALGORITHMS) :] == ["Anchor", "Gentle", "Vanished"]
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == len(LEFT_OUT)
    for name, reason in LEFT_OUT.items():
        assert any(f"The algorithm '{name}' " in text and reason in text for text in texts), name
    assert "Anchor" in list_algorithms("personal")
    assert list_algorithms("other") == ["Gentle"]
    assert find("anchor").paper == "Acme, 2031"
    gentle = find("gentle")
    assert (gentle.sentence, gentle.paper) == ("FedProx with a tenth of the strength.", "")
    helps = {option.name: option.help for option in gentle.options()}
    assert helps["mu"] == "Ten times the strength." and helps["weighting"]  # the latter from FedProx
    made = create("Gentle", mu=0.25)
    assert made.hyperparameters()["mu"] == 0.25
    assert check_algorithm(made, only=["copies"]) == check_algorithm("gentle", only=["copies"]) == ["copies"]
    with pytest.warns(UserWarning, match=r"Vanished cannot be used: acme_fl\.Vanished cannot be loaded"):
        names = class_names()
    assert (names["Anchor"], names["Gentle"]) == ("acme_fl.Anchor", "acme_fl.Gentle")
    assert "Vanished" not in names and names["FedProx"] == "fedlightning.callbacks.FedProx"


def run(code: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_other_packages_on_the_command_line(acme: Path) -> None:
    (acme / "own.yaml").write_text("trainer: {callbacks: [{class_path: Anchor, init_args: {mu: 0.5}}]}")
    done = run(
        "import sys; from fedlightning.cli import main\n"
        "codes = [main(['algorithms', 'personal']), main(['algorithms', 'gentle'])]\n"
        "fit = ['fit', '-c', sys.argv[1], '-c', 'own.yaml', '--trainer.callbacks+=Gentle', '--trainer.callbacks.mu=0.7']\n"
        "sys.exit(any([*codes, main([*fit, '--print_config'])]))",
        acme,
        str(ROOT / "configs/quickstart.yaml"),
    )
    assert "Holds each client near its first model." in done.stdout
    assert "Ten times the strength." in done.stdout
    printed = yaml.safe_load(done.stdout[done.stdout.index("# fedlightning==") :])
    added = [(item["class_path"], item["init_args"]["mu"]) for item in printed["trainer"]["callbacks"][-2:]]
    assert added == [("acme_fl.Anchor", 0.5), ("acme_fl.Gentle", 0.7)]
    assert done.stderr.count("The algorithm 'Gone' of the package 'acme-fl' is left out") == 1


def test_listing_rows_of_other_packages_imports_no_lightning(acme: Path) -> None:
    (acme / "acme_fl-1.0.dist-info/entry_points.txt").write_text("[fedlightning.algorithms]\nAnchor = acme_rows:ANCHOR")
    (acme / "acme_rows.py").write_text(ROWS)
    done = run(
        "import sys, fedlightning.cli as cli; cli.main(['algorithms']); sys.exit('lightning' in sys.modules)", acme
    )
    assert "Anchor" in done.stdout and "FedProx" in done.stdout
