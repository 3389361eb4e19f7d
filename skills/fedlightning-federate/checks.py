"""Ten checks of a federated project, each decided by a script.

    python checks.py --config run.yaml [--config more.yaml] --compare runs/compare

Prints a line for each and exits with 0 if all pass.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

SPOILT = ("failed", "nan", "different_splits", "missing_score")
"""Kinds of problems after which a comparison says nothing."""


class Project:
    """What is checked: the files of a run, and the folder of a comparison.

    Args:
        configs: YAML files, later ones override.
        compare: The `--out` folder of `fedlightning compare`.
    """

    def __init__(self, configs: list[Path], compare: Path) -> None:
        self.configs, self.compare = configs, compare

    @cached_property
    def merged(self) -> dict[str, Any]:
        """The sections of all files."""
        found: dict[str, Any] = {}
        for path in self.configs:
            found |= yaml.safe_load(path.read_text()) or {}
        return found

    @cached_property
    def rehearsal(self) -> subprocess.CompletedProcess[str]:
        """A dry run, as JSON."""
        words = [word for path in self.configs for word in ("--config", str(path))]
        return fedlightning("fit", *words, "--dry-run=json")

    @cached_property
    def study(self) -> dict[str, Any]:
        """`comparison.json`."""
        found: dict[str, Any] = json.loads((self.compare / "comparison.json").read_text())
        return found

    @cached_property
    def summaries(self) -> list[dict[str, Any]]:
        """`summary.json` of every run."""
        return [json.loads(path.read_text()) for path in sorted(self.compare.glob("**/summary.json"))]


def fedlightning(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the package."""
    return subprocess.run([sys.executable, "-m", "fedlightning", *words], capture_output=True, text=True, check=False)


def schema_errors(project: Project) -> list[str]:
    """Return what is wrong with the files by the schema."""
    import jsonschema

    schema = json.loads(fedlightning("configs", "schema").stdout)
    checker = jsonschema.Draft202012Validator(schema)
    return [e.message for path in project.configs for e in checker.iter_errors(yaml.safe_load(path.read_text()))]


def rehearsed(project: Project) -> dict[str, Any]:
    """Return what the dry run has found."""
    text = project.rehearsal.stdout
    found: dict[str, Any] = json.loads(text[text.index("{") :])
    return found


def rounds_agree(project: Project) -> bool:
    """Return True if all federated runs were given the same rounds."""
    return len({summary["rounds"] for summary in project.summaries}) == 1


CHECKS: dict[str, Callable[[Project], bool]] = {
    "the configuration has a model and data": lambda p: {"model", "data"} <= set(p.merged),
    "every file matches the schema": lambda p: not schema_errors(p),
    "the dry run ends with exit code 0": lambda p: p.rehearsal.returncode == 0,
    "no client fails in the dry run": lambda p: not rehearsed(p)["problems"],
    "the report was written": lambda p: (p.compare / "report.html").exists(),
    "each client alone and FedAvg are among the methods": lambda p: (
        {"siloed", "fedavg"} <= {row.get("role") for row in p.study["overview"]}
    ),
    "every method has three seeds or more": lambda p: all(row["n_seeds"] >= 3 for row in p.study["overview"]),
    "all runs have the same rounds": rounds_agree,
    "no client failed in any run": lambda p: (
        bool(p.summaries) and not any(summary.get("failures") for summary in p.summaries)
    ),
    "no problem spoils the comparison": lambda p: not any(one["kind"] in SPOILT for one in p.study["problems"]),
}
"""What is held to account -> whether a project has it."""


def main() -> int:
    """Print a line for each check; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", action="append", type=Path, required=True)
    parser.add_argument("--compare", type=Path, required=True)
    options = parser.parse_args()
    project, failed = Project(options.config, options.compare), 0
    for name, check in CHECKS.items():
        try:
            passed, why = check(project), ""
        except Exception as error:  # a file that is missing or broken is a failed check, not the end
            passed, why = False, f" ({type(error).__name__}: {error})"
        failed += not passed
        print(f"{'pass' if passed else 'FAIL'}  {name}{why}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
