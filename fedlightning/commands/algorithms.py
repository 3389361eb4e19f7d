"""`fedlightning algorithms`: the catalogue of algorithms on the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedlightning.catalogue import FAMILIES, Algorithm, find, list_algorithms, rows
from fedlightning.commands.json_output import print_json
from fedlightning.commands.terminal import console
from fedlightning.compat.rich_tables import print_whole
from fedlightning.config.input_errors import InputError


def algorithms(words: Sequence[str]) -> int:
    """List the algorithms, or explain those that are named, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="fedlightning algorithms",
        description="List the algorithms, or explain one: what is sent, what is kept, and its options.",
        exit_on_error=False,
    )
    parser.add_argument("name", nargs="*", help="algorithm (any case), or a pattern to list: 'fed*', 'personal'")
    parser.add_argument("--json", action="store_true", help="one line of JSON, for programs")
    options = parser.parse_args(list(words))
    names = options.name
    if options.json:
        print_json("algorithms", algorithms=[as_dict(row, bool(names)) for row in _chosen(names)])
        return 0
    screen = console()
    if not names:
        show_list(screen, list_algorithms())
    for name in names:
        listed = _pattern(name)
        if listed:
            show_list(screen, listed)
        else:
            show_algorithm(screen, _find(name))
    return 0


def as_dict(row: Algorithm, with_options: bool) -> dict[str, Any]:
    """Return a row for programs.

    Args:
        row: The row.
        with_options: Whether its class is imported, for its options.
    """
    fields = asdict(row) | {"config": row.config}
    return fields | {"options": [asdict(option) for option in row.options()]} if with_options else fields


def _chosen(names: Sequence[str]) -> list[Algorithm]:
    """Return the rows that names and patterns mean, each once; all of them for none."""
    if not names:
        return list(rows())
    rows_by_name = {match: _find(match) for name in names for match in _pattern(name) or [name]}
    return list(rows_by_name.values())


def _pattern(name: str) -> list[str]:
    return list_algorithms(name) if "*" in name or name.lower() in FAMILIES else []


def _find(name: str) -> Algorithm:
    try:
        return find(name)
    except ValueError as error:
        raise InputError(str(error)) from error


def show_list(console: Console, names: Sequence[str]) -> None:
    """Print one line an algorithm, by family."""
    for family, title in FAMILIES.items():
        members = [row for row in rows() if row.family == family and row.name in names]
        if not members:
            continue
        console.print(title, style="bold")
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True, min_width=16)
        table.add_column()
        for row in members:
            table.add_row(f"  {row.name}", escape(row.sentence))
        print_whole(console, table)
        console.print()
    console.print("More about one: fedlightning algorithms NAME", highlight=False)


def show_algorithm(console: Console, row: Algorithm) -> None:
    """Print everything about one algorithm. What its row leaves empty is not printed."""
    console.print(row.name, style="bold")
    console.print(escape(row.sentence), highlight=False)
    console.print()
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column()
    for name, text in (
        ("paper", row.paper),
        ("down", row.down),
        ("up", row.up),
        ("can leave", row.leaves),
        ("client keeps", row.client_state),
        ("server keeps", row.server_state),
        ("... of each client", row.of_clients),
        ("deployed", row.deployed),
        ("weights", row.weights),
        ("composes with", row.composes),
        ("class", row.class_path),
        ("YAML", row.config),
    ):
        if text:
            facts.add_row(name, escape(text))
    console.print(facts, highlight=False)
    options = row.options()
    console.print()
    if not options:
        console.print("It has no options.\n")
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("option", "default", "values", "meaning"):
        table.add_column(column, no_wrap=column in ("option", "default"))
    for option in options:
        table.add_row(option.name, escape(option.default), escape(option.values), escape(option.help))
    print_whole(console, table)
