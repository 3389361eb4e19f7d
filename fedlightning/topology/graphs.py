"""Graphs of nodes by name, from edges, from an adjacency, or from a file: :func:`make_graph`."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import networkx as nx

from fedlightning.seeding import address

Topology = str | Sequence[Sequence[Any]] | Mapping[str, Sequence[Any]]
"""A name of :data:`GRAPHS`, a file, edges as pairs of nodes, neighbours by node, or a square matrix of 0 and 1."""
GRAPHS = ("ring", "torus", "complete", "star", "erdos_renyi")
"""Graphs that are made from the list of nodes alone."""
FILES = (".csv", ".graphml")
"""Files that a graph is read from: two nodes a line, or what networkx and others write."""


def make_graph(topology: Topology, nodes: Sequence[str], *, edge_probability: float = 0.5, seed: int = 0) -> nx.Graph:
    """Return an undirected graph without loops, its nodes in the order given.

    Args:
        topology: What connects them. `"ring"`: each node and the next; `"torus"`: rows and columns as near to a square as
            possible, both closed to rings; `"complete"`: all pairs; `"star"`: the first node and every other;
            `"erdos_renyi"`: each pair with `edge_probability`. Or a `.csv` file of edges (two nodes a line), a
            `.graphml` file, a list of edges, neighbours by node, or a symmetric matrix of 0 and 1 in the order of the nodes.
        nodes: The nodes.
        edge_probability: For `"erdos_renyi"`.
        seed: For `"erdos_renyi"`: the same seed and nodes give the same graph.

    Raises:
        ValueError: If there is no such graph of these nodes.

    Example:
        >>> sorted(make_graph("ring", ["a", "b", "c", "d"]).edges)
        [('a', 'b'), ('a', 'd'), ('b', 'c'), ('c', 'd')]
        >>> make_graph([["a", "b"], ["b", "c"]], ["a", "b", "c"]).degree["b"]
        2
    """
    nodes = list(nodes)
    graph = nx.Graph()
    graph.add_nodes_from(nodes)
    if isinstance(topology, str) and Path(topology).suffix.lower() in FILES:
        edges = _edges_in(Path(topology))
    elif isinstance(topology, str):
        edges = _named(topology, nodes, edge_probability, seed)
    elif isinstance(topology, Mapping):
        edges = [(node, other) for node, others in topology.items() for other in others]
    elif _is_matrix(topology, len(nodes)):
        edges = _edges_of_matrix(topology, nodes)
    else:
        pairs = [tuple(pair) for pair in topology]
        wrong = next((pair for pair in pairs if len(pair) != 2), None)
        if wrong is not None:
            raise ValueError(f"topology={_short(topology)}: {wrong!r} is no edge. An edge is a pair of nodes.")
        edges = pairs
    known = set(nodes)
    for edge in edges:
        one, other = map(str, edge)
        for node in (one, other):
            if node not in known:
                raise ValueError(
                    f"topology={_short(topology)} has a node '{node}', which is no client. The clients are {nodes}."
                )
        if one == other:
            raise ValueError(
                f"topology={_short(topology)} has an edge from '{one}' to itself. What a node keeps of its own model is "
                "said by the weights; leave the edge out."
            )
        graph.add_edge(one, other)
    return graph


def _named(name: str, nodes: list[str], edge_probability: float, seed: int) -> list[tuple[str, str]]:
    """Return the edges of one of :data:`GRAPHS`."""
    count = len(nodes)
    if name == "ring":
        found = nx.cycle_graph(count) if count > 2 else nx.path_graph(count)
    elif name == "complete":
        found = nx.complete_graph(count)
    elif name == "star":
        found = nx.star_graph(count - 1)
    elif name == "torus":
        rows = max(row for row in range(1, int(count**0.5) + 1) if count % row == 0)
        if rows < 2:
            raise ValueError(
                f"topology='torus' needs rows and columns, and {count} clients are no product of two numbers from 2. Use "
                "'ring', or another number of clients."
            )
        grid = nx.grid_2d_graph(rows, count // rows, periodic=True)
        found = nx.relabel_nodes(grid, {(row, column): row * (count // rows) + column for row, column in grid})
    elif name == "erdos_renyi":
        if not 0.0 <= edge_probability <= 1.0:
            raise ValueError(f"edge_probability={edge_probability} is no probability: use a number from 0 to 1.")
        found = nx.gnp_random_graph(count, edge_probability, seed=address(seed, "topology") % 2**32)
    else:
        raise ValueError(
            f"topology={name!r} is not known. Use one of {list(GRAPHS)}, a file ({', '.join(FILES)}), a list of edges, "
            "neighbours by client, or a matrix of 0 and 1."
        )
    return [(nodes[one], nodes[other]) for one, other in found.edges if one != other]


def _edges_in(path: Path) -> list[tuple[str, str]]:
    """Return the edges in a file."""
    if not path.is_file():
        raise ValueError(f"topology='{path}': there is no such file.")
    if path.suffix.lower() == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            lines = [[cell.strip() for cell in line] for line in csv.reader(file) if any(map(str.strip, line))]
        wrong = next((number for number, line in enumerate(lines, 1) if len(line) != 2), None)
        if wrong is not None:
            raise ValueError(
                f"topology='{path}': line {wrong} is {lines[wrong - 1]}. A line names the two clients of an edge, with "
                "a comma between them, and there is no line of headings."
            )
        return [(one, other) for one, other in lines]
    try:
        found = nx.read_graphml(path)
    except Exception as error:
        raise ValueError(f"topology='{path}' is no GraphML that networkx can read: {error}") from error
    if found.is_directed():
        raise ValueError(
            f"topology='{path}' is a directed graph. Neighbours listen to each other: use an undirected one."
        )
    return [(str(one), str(other)) for one, other in found.edges()]


def _is_matrix(rows: Sequence[Sequence[Any]], count: int) -> bool:
    """Whether these are rows of a square matrix of 0 and 1, and not pairs of nodes."""
    return len(rows) == count and all(
        len(row) == count and all(isinstance(entry, int | float) and entry in (0, 1) for entry in row) for row in rows
    )


def _edges_of_matrix(rows: Sequence[Sequence[Any]], nodes: list[str]) -> list[tuple[str, str]]:
    """Return the edges of an adjacency matrix; its diagonal says nothing."""
    places = range(len(nodes))
    for i in places:
        for j in range(i):
            if rows[i][j] != rows[j][i]:
                raise ValueError(
                    f"topology is a matrix that connects client '{nodes[i]}' to '{nodes[j]}' in one direction only. "
                    "Neighbours listen to each other: make it symmetric."
                )
    return [(nodes[i], nodes[j]) for i in places for j in range(i) if rows[i][j]]


def _short(topology: Any) -> str:
    text = repr(topology)
    return text if len(text) <= 60 else f"{text[:57]}..."
