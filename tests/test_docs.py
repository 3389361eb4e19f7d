"""What the pages say is there: rooms, hooks, imports, links, versions, and code that readers are to copy."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
import yaml

import fedlightning
from fedlightning.catalogue import ALGORITHMS
from fedlightning.hooks import FederatedCallback
from tests.processes import forked
from tests.test_rooms import ORDER

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")), *sorted(ROOT.glob("docs/*.md"))]
GUIDE = (ROOT / "docs/how-to/write_an_algorithm.md").read_text()
NO_NAMES = {"fedlightning.callbacks.FedDyn", "fedlightning.algorithms"}
"""What is no name of the package: the guide's example, and the group of entry points."""


def test_contributing_lists_the_rooms_in_their_order() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("| rooms | what is in them |")[2].partition("\n\n")[0]
    lines = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in text.splitlines()[2:]]
    assert [set(line) for line in lines] == [set(rooms) for rooms in ORDER]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_of_the_package_exist(page: Path) -> None:
    for path in sorted(set(re.findall(r"\bfedlightning(?:\.\w+)+", page.read_text())) - NO_NAMES):
        module, _, name = path.rpartition(".")
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), name), path


def test_the_guide_has_every_hook() -> None:
    common = {"key", "client", "hyperparameters"}
    for name, value in vars(FederatedCallback).items():
        if (inspect.isfunction(value) and not name.startswith("_")) or name == "weighting":
            assert name in common or f"`{name}" in GUIDE, name
    nine = GUIDE.partition("## The contract: nine hooks")[2].partition("## ")[0]
    assert len(re.findall(r"^\| `(\w+)\(", nine, re.MULTILINE)) == 9


def test_the_reader_s_own_files_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```py\n(# (\w+\.py)\n.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    for text, name in blocks:
        (tmp_path / name).write_text(text)
    assert {name for _, name in blocks} == {"my_algorithm.py", "test_my_algorithm.py", "test_by_hand.py"}
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", "arguments or trains or momentum", "."]

    def work() -> int:
        sys.path[0:0] = [str(tmp_path), str(ROOT)]
        return pytest.main(words)

    done = forked(work, tmp_path)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr


def test_numbers_agree() -> None:
    found = re.search(r"More than (\d+) algorithms and baselines", (ROOT / "README.md").read_text())
    assert found and len(ALGORITHMS) > int(found[1])
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == fedlightning.__version__
    workflow = (ROOT / ".github/workflows/checks.yml").read_text()
    assert "run: .ci/run" in workflow
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"].split()[0] for hook in hooks] == [".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/mypy"]
