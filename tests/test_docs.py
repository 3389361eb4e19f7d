"""What the pages say is there: rooms, hooks, imports, links, versions, and code that readers are to copy."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml

import fedlightning
import fedlightning.contract

# isort: split
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.catalogue import ALGORITHMS
from fedlightning.commands import COMMANDS
from fedlightning.config.schema import config_schema
from fedlightning.contract import FederatedCallback
from fedlightning.testing.toys import ToyModule
from tests.helpers import samples, toy_data
from tests.processes import forked
from tests.test_rooms import ORDER

ROOT = Path(__file__).resolve().parents[1]
OWN = ("README", "CONTRIBUTING", "SECURITY", "AGENTS", "CHANGELOG")
WRITTEN = sorted(path for path in ROOT.glob("docs/**/*.md") if not {"_build", "tutorials"} & set(path.parts))
PAGES = [*(ROOT / f"{name}.md" for name in OWN), *sorted(ROOT.glob("skills/**/*.md")), *WRITTEN]
GUIDE = (ROOT / "docs/how-to/write_an_algorithm.md").read_text()
SCHEMA = config_schema()
RUNS = (
    "index",
    "start/your_module",
    "explanation/time",
    "explanation/no_server",
    "explanation/multimodal",
    "how-to/many_clients",
    "reference/wire_format",
)
"""Pages whose code runs as it stands. That of others is parsed and its imports are tried: it needs runs or accounts."""
GENERATED = ("methods.md", "results/reproduce.md", "results/league.md", "results/sources.md")
"""Pages that tools write."""
NO_NAMES = {"fedlightning.callbacks.FedCM", "fedlightning.algorithms"}
"""What is not a name of the package: the guide's example, and the group of entry points."""
WIDE = {**os.environ, "COLUMNS": "100"}
"""The terminal that pages show."""


class OwnData(LightningDataModule):
    """The reader's own data."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*samples("0", "train", 300)), 8, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*samples("0", "val", 60)), 8)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*samples("0", "test", 60)), 8)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix("").as_posix()


def test_contributing_lists_the_rooms_in_their_order() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("| rooms | what is in them |")[2].partition("\n\n")[0]
    lines = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in text.splitlines()[2:]]
    assert [set(line) for line in lines] == [set(rooms) for rooms in ORDER]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_of_the_package_exist(page: Path) -> None:
    for path in sorted(set(re.findall(r"\bfedlightning(?:\.\w+)+", page.read_text())) - NO_NAMES):
        module, _, name = path.rpartition(".")
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), name), path


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_files_that_pages_name_are_there(page: Path) -> None:
    rooms = [ROOT / folder for folder in ("", "fedlightning", "configs")]
    for path in re.findall(r"`((?:\w+/)+\w+\.(?:py|yaml|toml|txt))`", page.read_text()):
        assert "fedcm" in path or any((room / path).exists() for room in rooms), path


def test_the_files_to_read_first_are_named_once() -> None:
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    paths = re.findall(r"`(\w+(?:/\w+)*\.py)`", page.partition("## Files to read first")[2].partition("\n## ")[0])
    assert len(paths) == len(set(paths)) > 15


def test_every_page_is_in_the_contents() -> None:
    """A page that no list of contents names is found by nobody."""
    for page in WRITTEN:
        contents = page.parent / "index.md" if page.stem != "index" else ROOT / "docs/index.md"
        entry = page.stem if page.stem != "index" else f"{page.parent.name}/index"
        assert page == ROOT / "docs/index.md" or re.search(rf"^{entry}$", contents.read_text(), re.MULTILINE), page


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_code_in_pages_parses_and_imports(page: Path) -> None:
    for block in re.findall(r"^```py(?:thon)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(textwrap.dedent(block))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedlightning"):
                module = importlib.import_module(str(node.module))
                for one in node.names:  # or a module of the package, which nobody has imported yet
                    assert hasattr(module, one.name) or importlib.util.find_spec(f"{node.module}.{one.name}"), one.name


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_code_in_pages_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, with a tiny module and tiny data for the reader's own."""
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {"torch": torch, "MyModule": ToyModule, "MyDataModule": OwnData, "my_clients": toy_data()}
    known |= {"client": None}
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / f"{name}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block.replace('FENDA(head="net.fc")', 'FENDA(head="head")'), known)


@pytest.mark.parametrize("page", [*WRITTEN, ROOT / "README.md"], ids=name_of)
def test_commands_in_pages_exist(page: Path) -> None:
    for block in re.findall(r"^```(?:bash)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for command in re.findall(r"^(?:\$ |\S*/)?fedlightning (\w+)", block, re.MULTILINE):
            assert command in COMMANDS or command == "COMMAND", command
        for path in re.findall(r"--config (configs/[\w./-]+\.yaml)", block):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", [*WRITTEN, ROOT / "README.md", *sorted(ROOT.glob("skills/**/*.md"))], ids=name_of)
def test_yaml_in_pages_matches_the_schema(page: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        if "{...}" in block or "services:" in block:  # what is left out cannot be read
            continue
        config = yaml.safe_load(block)
        if isinstance(config, dict) and {"trainer", "model", "data"} & set(config) and "cells" not in config:
            jsonschema.Draft202012Validator(SCHEMA).validate(config)


def test_hand_written_pages_are_short() -> None:
    """Readers come for an answer: cut before you raise this. Results that a tool writes are apart."""
    words = sum(len(page.read_text().split()) for page in WRITTEN if not page.as_posix().endswith(GENERATED))
    assert words <= 28_000


def test_files_for_agents_are_short_and_true() -> None:
    agents, (skill,) = (ROOT / "AGENTS.md").read_text(), ROOT.glob("skills/*/SKILL.md")
    assert len(agents.splitlines()) < 60 and len(skill.read_text().splitlines()) < 150
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in re.findall(r"^make ([a-z -]+?)(?: PYTEST_ARGS|  |$)", agents, re.MULTILINE):
        assert set(line.split()) <= set(targets), line


def test_the_picture_of_a_round_is_the_one_that_is_drawn() -> None:
    spec = importlib.util.spec_from_file_location("diagrams", ROOT / "docs/_ext/diagrams.py")
    assert spec is not None and spec.loader is not None
    diagrams = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(diagrams)
    assert (ROOT / "docs/images/round.svg").read_text() == diagrams.of_a_round(alone=True)


def test_the_guide_has_the_contract_and_every_hook_has_words() -> None:
    nine = GUIDE.partition("## The contract: nine hooks")[2].partition("## ")[0]
    assert len(re.findall(r"^\| `(\w+)\(", nine, re.MULTILINE)) == 9
    for base in vars(fedlightning.contract).values():
        for name, value in vars(base).items() if inspect.isclass(base) and issubclass(base, FederatedCallback) else ():
            if inspect.isfunction(value) and not name.startswith("_"):
                assert value.__doc__, (
                    f"{base.__name__}.{name} has no docstring, of which its entry in the reference is made"
                )


def test_the_guide_says_where_each_name_is() -> None:
    table = GUIDE.partition("## Where each name is")[2].partition("**Exercise")[0]
    named: dict[str, set[str]] = {}
    for places, names in re.findall(r"^\| (.*?) \| (.*) \|$", table, re.MULTILINE)[1:]:
        modules = re.findall(r"`(fedlightning(?:\.\w+)*)`", places) or ["fedlightning.algorithm"]
        for module, part in zip(modules, names.split("; "), strict=True):
            named.setdefault(module, set()).update(re.findall(r"`(\w+)`", part))
    for module, names in named.items():
        assert not [name for name in names if not hasattr(importlib.import_module(module), name)], module
    for module in ("fedlightning.algorithm", "fedlightning.callbacks.shared"):
        assert named[module] == set(importlib.import_module(module).__all__)


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


def test_the_installation_names_every_extra() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/start/install.md").read_text(), re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", "".join(rows)))
    assert named == set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def shown(name: str) -> list[str]:
    """Return what a file of a page on starting shows: commands, each before what it printed."""
    return re.split(
        r"^\$ fedlightning (.*)\n", (ROOT / f"docs/start/outputs/{name}.txt").read_text(), flags=re.MULTILINE
    )[1:]


@pytest.mark.slow
def test_commands_print_what_the_first_page_shows(tmp_path: Path) -> None:
    """But for the numbers, whose last digits are the machine's."""
    commands = shown("fit")
    for words, printed in zip(commands[::2], commands[1::2], strict=True):
        command = [sys.executable, "-m", "fedlightning", *shlex.split(words)]
        done = subprocess.run(command, cwd=tmp_path, env=WIDE, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        masked, expected = (re.sub(r"\d", "0", text).split() for text in (done.stdout, printed))
        assert masked == expected


@pytest.mark.slow
def test_a_table_goes_from_file_to_report(tmp_path: Path) -> None:
    """The commands of the page about one's own data, as they stand; of the runs those of one seed and round."""
    lines = (ROOT / "docs/start/your_table.sh").read_text().replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True)[1:] for line in lines]
    assert [words[0] for words in commands] == ["configs", "partition", "compare"]
    commands[2] += ["--seeds=0,", "--trainer.max_rounds=1", "--baselines=none"]
    for words in commands:  # by programs of their own: compare's workers are not a children of a fork
        command = [sys.executable, "-m", "fedlightning", *words]
        done = subprocess.run(command, cwd=tmp_path, env=WIDE, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert words[0] != "partition" or done.stdout.split() == shown("partition")[-1].split()
    page = (tmp_path / "runs/table/report.html").read_text()
    assert "RMSE is in the units of progression; metrics.csv has it in standard deviations (75)." in page


def test_numbers_agree() -> None:
    found = re.search(r"More than (\d+) algorithms and baselines", (ROOT / "README.md").read_text())
    assert found and len(ALGORITHMS) > int(found[1])
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == fedlightning.__version__
    workflow = (ROOT / ".github/workflows/checks.yml").read_text()
    assert "run: .ci/run" in workflow
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"].split()[0] for hook in hooks] == [".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/mypy"]
