"""The private names of other packages that FedLightning touches: each is there, and there are no others."""

from __future__ import annotations

import argparse
import ast
import re
import tomllib
from collections import defaultdict
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import fedlightning  # noqa: F401

# isort: split
import lightning.pytorch.loggers
import torch
import torchmetrics
from lightning.pytorch.core.optimizer import LightningOptimizer

ROOT = Path(__file__).parents[2]
TABLE = tomllib.loads(Path(__file__).with_name("private_names.toml").read_text())
ROWS = TABLE["name"]
PRIVATE = re.compile(r"_[a-z]\w*$", re.IGNORECASE)
OBJECTS = {
    "argparse": argparse, "lightning": lightning, "torch": torch, "torchmetrics": torchmetrics,
    "LightningOptimizer": LightningOptimizer,
}  # fmt: skip
"""What the expressions of the table name."""
_OPTIMIZER = torch.optim.SGD([torch.zeros(1)], 0.1)
OBJECTS["SEQUENCE"] = torch.optim.lr_scheduler.SequentialLR(
    _OPTIMIZER, [torch.optim.lr_scheduler.ConstantLR(_OPTIMIZER)], []
)
AFFIXES = {
    "_batch_", "_bias", "_ci95", "_cumulative", "_dataloaders", "_high", "_low", "_per_parameter", "_range", "_ratio",
    "_radius", "_rho", "_with_warmup", "_step_context", "_arguments_together", "_replaced_arguments", "_strategy",
    "_a", "_orig",
}  # fmt: skip
"""Strings that are our own names, or parts of them."""
PUBLIC = {"_exit", "_missing_", "_fields", "_codecs", "_reconstruct", "_frombuffer", "_class_path", "_instantiator"}
"""Documented names of the standard library, and names in files of numpy and Lightning."""


@cache
def read_trees() -> dict[str, ast.Module]:
    """The syntax tree of each file of the package."""
    links = {ROOT / "fedlightning" / "callbacks", ROOT / "fedlightning" / "datamodules"}
    paths = [
        path for top in ("fedlightning", "callbacks", "datamodules") for path in sorted((ROOT / top).rglob("*.py"))
    ]
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for path in paths
        if not links & {path, *path.parents}
    }


def list_names(node: ast.AST) -> list[str]:
    """The names that a node uses which look private."""
    if isinstance(node, ast.Attribute):
        names = [node.attr]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        names = [node.value]
    elif isinstance(node, ast.Import | ast.ImportFrom):
        module = getattr(node, "module", None) or ""
        paths = [alias.name for alias in node.names] + [module]
        names = [] if module.startswith("fedlightning") else [part for path in paths for part in path.split(".")]
    else:
        names = []
    return [name for name in names if PRIVATE.match(name) and not name.startswith("__")]


@cache
def list_uses() -> dict[str, set[str]]:
    """The files that use each private name of somebody else.

    A name that we define somewhere is ours, unless the table has it and it is asked of another object than `self`.
    """
    ours, table = set(), {row["name"] for row in ROWS}
    for tree in read_trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.arg):
                ours.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node):
                ours.add(node.attr)
    uses = defaultdict(set)
    for path, tree in read_trees().items():
        for node in ast.walk(tree):
            for name in list_names(node):
                if name not in ours or (name in table and not is_self(node)):
                    uses[name].add(path)
    return uses


def is_self(node: ast.AST) -> bool:
    """Return True for `self.name` and `cls.name`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_no_other_private_name_is_touched():
    listed = {row["name"] for row in ROWS}
    unlisted = {name: sorted(paths) for name, paths in list_uses().items() if name not in listed | AFFIXES | PUBLIC}
    assert not unlisted, "list them in private_names.toml, or do without"


def test_the_table_tells_who_touches_each():
    table = defaultdict(set)
    for row in ROWS:
        table[row["name"]] |= set(row["files"])
    assert {name: sorted(paths) for name, paths in table.items()} == {name: sorted(list_uses()[name]) for name in table}


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if "package" not in row],
    ids=lambda row: row["name"],
)
def test_the_name_is_there(row, tmp_path, monkeypatch):
    """In these versions; where it is not, the message says who used it, for what, and where it was last."""
    monkeypatch.chdir(tmp_path)  # a logger makes a folder
    if "module" in row:
        package = row["module"].partition(".")[0]
        owner = pytest.importorskip(row["module"]) if package == "ray" else import_module(row["module"])
    else:
        trainer = lightning.pytorch.Trainer(accelerator="cpu", logger=False) if "TRAINER" in row["owner"] else None
        owner = eval(row["owner"], OBJECTS | {"TRAINER": trainer})
        package = type(owner).__module__.partition(".")[0]
    assert hasattr(owner, row["name"]), (
        f"{row['name']} is gone from {package}, where it was seen in {TABLE['seen'].get(package)}. It is needed for "
        f"{row['why']} ({', '.join(row['files'])})."
    )
