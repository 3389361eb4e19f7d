"""The rule of the rooms: imports run one way. Lazy and type-only ones count."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ORDER = (
    ("errors", "seeding", "tensors", "compat"),
    ("ranges", "storage"),
    ("layers", "datamodules", "topology", "options"),
    ("wrappers", "models"),
    ("codec",),
    ("contract",),
    ("scores",),
    ("client",),
    ("run",),
    ("engines",),
    ("server",),
    ("privacy", "fast"),
    ("deployment",),
    ("onboarding", "resume"),
    ("guards", "virtual_time"),
    ("stacked", "parallel", "wire"),
    ("sites",),
    ("arguments", "algorithm"),
    ("fitted", "assemble"),
    ("trainer", "callbacks"),
    ("catalogue",),
    ("study", "config", "testing"),
    ("report",),
    ("leakage",),
    ("experiments",),
    ("commands",),
    ("cli",),
    ("project",),
    ("__main__",),
)
"""A room imports rooms of the lines above it, and itself."""
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
ALONE = {
    "datamodules": {"seeding", "errors", "ranges"},
    "callbacks": {"algorithm", "privacy", "ranges", "layers", "tensors", "topology", "wrappers"},
    "models": {"errors", "ranges"},
}
"""Rooms that stand on less than what is above them."""
EXCEPTIONS = {
    # the contract names the two roles in its annotations
    ("contract", "client.client"),
    ("contract", "server.server"),
    # callbacks that bring their own work for a stack of clients
    ("callbacks.apfl_stacked", "stacked"),
    ("callbacks.player_fl_stacked", "stacked"),
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


def test_the_core_comes_first():
    core = {room for rooms in ORDER[: RANK["server"] + 1] for room in rooms}
    assert not core & {
        "guards",
        "resume",
        "fast",
        "stacked",
        "privacy",
        "virtual_time",
        "deployment",
        "onboarding",
        "sites",
    }
