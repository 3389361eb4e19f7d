"""The budget of concepts and words of the package: what a reader must learn. Every number here may only shrink."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import fedlightning
from fedlightning import FederatedTrainer
from fedlightning.contract.capabilities import Change
from fedlightning.contract.setup import Setup

ROOT = Path(__file__).parents[1]
PRONOUNS = frozenset(
    ["found", "one", "own", "known", "held", "made", "given", "said", "brought", "terms", "leaves", "marks", "told"]
)
"""Words that say nothing of what a variable holds: call it by its type or role."""


@cache
def sources() -> dict[str, str]:
    """Return the text of each file of the package, by its path."""
    tops = [ROOT / top for top in ("fedlightning", "callbacks", "datamodules")]
    files = sorted(path for top in tops for path in top.rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in files if not _is_linked(path)}


def _is_linked(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent != ROOT and ROOT in parent.parents)


def _bound_names(text: str) -> list[str]:
    nodes = list(ast.walk(ast.parse(text)))
    names = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return names + [node.arg for node in nodes if isinstance(node, ast.arg)]


def pronouns() -> int:
    """Count variables and parameters that are called by a pronoun."""
    return sum(name in PRONOUNS for text in sources().values() for name in _bound_names(text))


def idiom(pattern: str) -> int:
    """Count a way to write that is not plain English."""
    return sum(len(re.findall(pattern, text, re.IGNORECASE)) for text in sources().values())


def doubled_names() -> int:
    """Count names of files that are there more than once."""
    names = Counter(Path(path).name for path in sources() if not path.endswith("__init__.py"))
    return sum(count > 1 for count in names.values())


BUDGET = {
    "arguments of FederatedTrainer": (lambda: len(inspect.signature(FederatedTrainer).parameters), 52),
    "members of Change": (lambda: len(Change), 17),
    "fields of Setup": (lambda: sum(field.init for field in dataclasses.fields(Setup)), 12),
    "names of the package": (lambda: len(fedlightning.__all__), 4),
    "pronouns as names": (pronouns, 8),
    "is no X, instead of: is not an X": (lambda: idiom(r"(?<!there )\b(?:is|are) no [a-z']"), 12),
    "in the place of, instead of: in place of": (lambda: idiom("in the place of"), 0),
    "names of files that are there twice": (doubled_names, 0),
}
"""What is counted: how, and the most that there may be."""


@pytest.mark.parametrize("what", BUDGET)
def test_the_budget_may_only_shrink(what):
    count, most = BUDGET[what]
    assert count() <= most, f"{what}: {count()}, and the budget is {most}. Take one away, or find another way."
    assert count() >= most - 3, f"{what}: {count()} now. Write that number into BUDGET, so that it stays."
