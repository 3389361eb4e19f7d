"""The rule of the rooms: imports run one way. Lazy and type-only ones count."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORDER = (
    ("errors", "seeding", "tensors", "compat"),
    ("ranges", "storage"),
    ("layers", "messages", "datamodules", "topology", "options"),
    ("wrappers", "models"),
    ("codec",),
    ("hooks",),
    ("blueprint",),
    ("visit",),
    ("scoring",),
    ("run",),
    ("federation",),
    ("virtual_time",),
    ("wire",),
    ("engines", "arguments", "algorithm"),
    ("fitted", "assemble"),
    ("trainer", "callbacks"),
    ("catalogue",),
    ("study", "config", "testing"),
    ("experiments",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
"""A room imports rooms of the lines above it, and itself."""
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
ALONE = {
    "datamodules": {"seeding", "errors", "ranges"},
    "callbacks": {"algorithm", "ranges", "layers", "tensors", "topology", "wrappers"},
    "models": {"errors", "ranges"},
}
"""Rooms that stand on less than what is above them."""
EXCEPTIONS = {
    # the contract names the two roles in its annotations
    ("hooks", "visit.client"),
    ("hooks", "federation.server"),
    # callbacks that bring their own work for a stack of clients
    ("callbacks.apfl_stacked", "engines.stacked"),
    ("callbacks.player_fl_stacked", "engines.stacked"),
}
"""Imports that break the rule, by name. This list may only shrink."""


def modules() -> dict[str, Path]:
    """Every module of the package, by its name without `fedlightning.`."""
    found = {}
    for top in ("fedlightning", "callbacks", "datamodules"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT if top != "fedlightning" else ROOT / top).with_suffix("").parts
            if top != "fedlightning" or parts[0] not in ("callbacks", "datamodules"):  # these are links
                found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("fedlightning.")
                names.add(f"fedlightning.{inner}" if inner in known else node.module)
    return {name.removeprefix("fedlightning.") for name in names if name.startswith("fedlightning.")}


@cache
def edges() -> list[tuple[str, str]]:
    known = modules()
    return [(module, name) for module, path in known.items() if module for name in sorted(imported(path, known))]


def breaks(module: str, name: str) -> bool:
    here, there = module.partition(".")[0], name.partition(".")[0]
    if here == there:
        return False
    return RANK[there] >= RANK[here] or there not in ALONE.get(here, {there})


def within(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place}.")


def exceptions_for(module: str, name: str) -> set[tuple[str, str]]:
    return {(here, there) for here, there in EXCEPTIONS if within(module, here) and within(name, there)}


def test_imports_run_one_way():
    broken = [edge for edge in edges() if breaks(*edge) and not exceptions_for(*edge)]
    assert not broken, f"The rule of the rooms (ORDER) is broken by these imports: {broken}"


def test_every_exception_is_still_needed():
    used = {exception for edge in edges() if breaks(*edge) for exception in exceptions_for(*edge)}
    assert used == EXCEPTIONS, f"Take out of EXCEPTIONS: {sorted(EXCEPTIONS - used)}"


def test_every_room_has_a_place():
    rooms = {module.partition(".")[0] for module in modules() if module}
    assert rooms == set(RANK), "Give a new room its place in ORDER."


CORE = [
    f"federation.{name}"
    for name in (
        "federation",
        "server",
        "parts",
        "intake",
        "aggregation",
        "engine",
        "attempts",
        "models",
        "stages",
        "store",
    )
] + [
    *(
        f"visit.{name}"
        for name in (
            "client",
            "fit",
            "fitters",
            "lightning_loop",
            "local_data",
            "requests",
            "runner",
            "scorer",
            "session",
            "visit",
        )
    ),
    *("blueprint.blueprint", "blueprint.client_parts", "run.recorder", "scoring.rows", "engines.sequential"),
]
"""What trains and scores; all else attaches to it (`federation/parts.py`, `blueprint/client_parts.py`)."""
ATTACHED = (
    *(
        f"federation.{name}"
        for name in ("update_checks", "norms", "explosions", "rehearsal", "trial", "checks", "outgoing")
    ),
    *(f"federation.{name}" for name in ("saving", "state", "restore", "changes", "unseen", "onboarding")),
    *(f"federation.{name}" for name in ("progress", "dry_run", "dry_run_report", "brought", "deploy", "deployed")),
    *(f"run.{name}" for name in ("persistence", "lock", "signals", "resumable", "fingerprint", "manifest")),
    *(f"visit.fast.{name}" for name in ("errors", "evaluation", "fit", "hooks", "log", "refusals", "step")),
    *("visit.leaving", "visit.log_rules", "visit.lost_batches", "blueprint.copier", "scoring.row_table"),
    "engines.watchdog",
)
"""What a federation can be without, in a run that succeeds."""


def test_the_core_imports_nothing_that_attaches_to_it():
    known = modules()
    assert known.keys() >= {*CORE, *ATTACHED}
    broken = [edge for edge in edges() if edge[0] in CORE and edge[1] in ATTACHED]
    assert not broken, f"Make it a part, made in assemble.py: {broken}"
