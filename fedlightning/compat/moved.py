"""Old import paths of this package: they work until version 0.3 and warn. New code uses the new ones."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "fedlightning"
ROOMS = {
    "compat": "attached quiet",
    "blueprint": "fast.copier",
    "visit": "client fit freezing lightning_loop loop_choice loss_terms probes requests",
    "visit.fast": "fast.evaluation fast.fit fast.hooks fast.log fast.refusals fast.sgd fast.step fast.trainer",
    "scoring": "evaluation.metrics evaluation.results evaluation.table evaluation.tasks",
    "run": "checkpoints persistence progress recorder",
    "federation": "server evaluation.stages engines.store",
    "federation.loops": "loops.synchronous",
    "callbacks.diagnostics": "callbacks.gradient_variance callbacks.hessian_trace callbacks.layer_diagnostics "
    "callbacks.layer_similarity callbacks.layer_tables callbacks.layer_values callbacks.sensitivity "
    "callbacks.sensitivity_figure callbacks.sensitivity_terms evaluation.layer_figures evaluation.layer_rows "
    "evaluation.layers evaluation.similarity",
    "callbacks.shared": "callbacks.prototypes callbacks.representations callbacks.server_models callbacks.submodels",
    "study": "evaluation.baselines evaluation.comparison evaluation.costs evaluation.curves evaluation.differences "
    "evaluation.export evaluation.fairness evaluation.incentives "
    "evaluation.measures evaluation.overview evaluation.problems evaluation.ranks evaluation.report evaluation.roles "
    "evaluation.runs evaluation.scores evaluation.statistics evaluation.study",
    "config": "commands.errors commands.parsing",
}
"""Room: the modules that moved into it under their own (last) name."""
RENAMED = {
    "local": "visit.runner",
    "run_folder": "run.folder",
    "engines.base": "federation.engine",
    "evaluation": "study",
    "evaluation.scoring": "visit.scorer",
    "evaluation.wanted": "visit.requests",
    "fast": "visit.fast",
    "loops": "federation.loops",
    "study.table": "scoring.table",
}
"""Modules that have another name, too."""
NAMES = {
    "arguments": {
        "ConfigurationError": "errors",
        "warn": "errors",
        "optimizers_in": "blueprint.optimizers",
        "optimizers_of": "blueprint.optimizers",
    },
    "client": {"ClientRecord": "visit.record"},
    "fit": {"LocalSettings": "blueprint.settings"},
    "persistence": {"write_atomically": "run.files", "write_text_atomically": "run.files"},
    "run_folder": {"is_writer": "run.files", "config_hash": "run.environment", "versions": "run.environment"},
    "scoring.results": {
        "Row": "scoring.rows",
        "COLUMNS": "scoring.rows",
        "ADDRESS": "scoring.rows",
        "CELLS": "scoring.rows",
        "KIND": "scoring.rows",
        "UNSEEN": "scoring.rows",
        "LATEST": "scoring.rows",
        "Gap": "scoring.rows",
        "not_scored": "scoring.rows",
        "Spilled": "scoring.row_table",
        "RowTable": "scoring.row_table",
        "LARGEST": "scoring.row_files",
        "DamagedMetricsError": "scoring.row_files",
        "write_rows": "scoring.row_files",
        "read_rows": "scoring.row_files",
        "read_part": "scoring.row_files",
    },
    "server": {"Aggregation": "federation.aggregation"},
}
"""Names that did not go with the rest of their module."""
MOVED = {old: f"{room}.{old.rpartition('.')[2]}" for room, names in ROOMS.items() for old in names.split()} | RENAMED


def new_path(old: str) -> str | None:
    """Return where the module `old` is now; `None` if it has not moved.

    >>> new_path("fedlightning.local"), new_path("fedlightning.hooks")
    ('fedlightning.visit.runner', None)
    """
    package, _, name = old.partition(".")
    if package != PACKAGE:
        return None
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        found = MOVED.get(".".join(parts[:count]))
        if found is not None:
            return ".".join([PACKAGE, found, *parts[count:]])
    return None


class OldPaths(MetaPathFinder, Loader):
    """Finds modules under their old names; what is in them is that of the new ones."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for an old name, `None` for all others."""
        if new_path(fullname) is None:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Let the old module answer with what the new one holds."""
        old, new = module.__name__, str(new_path(module.__name__))
        warnings.warn(f"{old} is {new} now; the old path works until version 0.3.", DeprecationWarning, stacklevel=2)
        now = importlib.import_module(new)
        elsewhere = NAMES.get(old.partition(".")[2], {})

        def find(name: str) -> Any:
            if name in elsewhere:
                return getattr(importlib.import_module(f"{PACKAGE}.{elsewhere[name]}"), name)
            return getattr(now, name)

        module.__dict__["__getattr__"] = find


def serve_old_paths() -> None:
    """Let old import paths work. They are asked for before the files: `study` also answers as `evaluation`."""
    if not any(isinstance(finder, OldPaths) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldPaths())


def moved_name(module: str, name: str) -> Any:
    """Return what the present module `module` held as `name` before.

    Raises:
        AttributeError: If it never held such a name.
    """
    where = NAMES.get(module.partition(".")[2], {}).get(name)
    if where is None:
        raise AttributeError(f"module '{module}' has no attribute '{name}'")
    warnings.warn(
        f"{module}.{name} is {PACKAGE}.{where}.{name} now; the old path works until version 0.3.",
        DeprecationWarning,
        stacklevel=3,
    )
    return getattr(importlib.import_module(f"{PACKAGE}.{where}"), name)
