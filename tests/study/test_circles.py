"""No file of these rooms imports itself by way of others. Lazy and type-only imports count."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import pytest

from tests.test_rooms import edges

ROOMS = ("study", "experiments", "commands", "config", "testing", "cli")


def test_no_import_circles():
    graph: dict[str, set[str]] = {}
    for module, name in edges():
        if module.partition(".")[0] in ROOMS and module != name:
            graph.setdefault(module, set()).add(name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"These files import each other: {' <- '.join(error.args[1])}")
