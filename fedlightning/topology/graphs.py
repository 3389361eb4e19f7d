"""Graphs of nodes by name, from edges, from an adjacency, or from a file: :func:`make_graph`.

Mixing weights on a graph: how much every node takes of every neighbour's model; :func:`mixing_weights`.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import networkx as nx
import torch
from torch import Tensor

from fedlightning.ranges import number_in
from fedlightning.seeding import address

MixingWeights = str | Sequence[Sequence[float]]
"""A name of :data:`WEIGHTS`, a matrix in the order of the nodes, or a `.csv` file of one."""
WEIGHTS = ("metropolis", "uniform", "swift")
"""Weights that follow from the graph alone."""
TOLERANCE = 1e-6
"""How far given weights may be from symmetric and from sums of one; what is missing goes to the diagonal."""


def mixing_weights(weights: MixingWeights, graph: nx.Graph) -> Tensor:
    """Return a symmetric, doubly stochastic matrix in float64 that has weight on edges and the diagonal only.

    Args:
        weights: `"metropolis"`: ``W_ij = 1 / (1 + max(d_i, d_j))`` on an edge, d the degrees; `"uniform"`: 1/n, on a complete
            graph; `"swift"`: see :func:`swift_weights`; a matrix in the order of the nodes, or a `.csv` file of one.
        graph: The nodes, in order, and their edges.

    Raises:
        ValueError: If the weights are no such matrix. The sentence says where.

    Example:
        >>> graph = nx.path_graph(["a", "b", "c"])
        >>> mixing_weights("metropolis", graph)[0]
        tensor([0.6667, 0.3333, 0.0000], dtype=torch.float64)
    """
    count = len(graph)
    if isinstance(weights, str) and Path(weights).suffix.lower() == ".csv":
        return _checked(_rows_in(Path(weights)), graph)
    if not isinstance(weights, str):
        return _checked(weights, graph)
    if weights == "metropolis":
        return metropolis_weights(graph)
    if weights == "swift":
        return swift_weights(graph)
    if weights == "uniform":
        if graph.number_of_edges() < count * (count - 1) // 2:
            raise ValueError(
                "weights='uniform' gives every client 1/n of every other's model, and this topology does not connect all of "
                "them. Use topology='complete', or weights='metropolis'."
            )
        return torch.full((count, count), 1.0 / count, dtype=torch.float64)
    raise ValueError(
        f"weights={weights!r} are not known. Use one of {list(WEIGHTS)}, a matrix with a row for each client, or a .csv "
        "file of one."
    )


def metropolis_weights(graph: nx.Graph) -> Tensor:
    """Return ``W_ij = 1 / (1 + max(d_i, d_j))`` on edges, and what is left of each row on the diagonal.

    Xiao, Boyd, Kim, "Distributed average consensus with least-mean-square deviation", 2007. On a ring all are 1/3.

    Args:
        graph: The graph.
    """
    return _matrix(graph, {edge: Fraction(1, 1 + max(graph.degree[node] for node in edge)) for edge in graph.edges})


def swift_weights(graph: nx.Graph) -> Tensor:
    """Return the client-communication weights of SWIFT for clients of equal influence.

    Bornstein, Rabbani, Wang, Bedi, Huang, "SWIFT: rapid decentralized federated learning via wait-free model
    communication", ICLR 2023. Nodes are taken by falling degree. With ``s`` the weight that a node has given already
    and R its neighbours without a weight, it proposes ``(1 - s) / (|R| + 1)``. Neighbours of lower degree accept, of
    two of equal degree the smaller proposal counts, and what is left is the node's own weight.

    A node of low degree may have accepted so much that nothing, or less, is left for itself. Then the weights are
    Metropolis', with a warning.

    Args:
        graph: The graph.

    Example:
        Five leaves around a hub give it 1/6 each and keep 5/6.

        >>> [round(w, 4) for w in swift_weights(nx.star_graph(5))[:2].diagonal().tolist()]
        [0.1667, 0.8333]
    """
    weight_of: dict[frozenset[str], Fraction] = {}
    for degree in sorted(set(dict(graph.degree).values()), reverse=True):
        wave = [node for node in graph if graph.degree[node] == degree]
        proposed = {}
        for node in wave:
            edges = [frozenset((node, other)) for other in graph[node]]
            left = 1 - sum((weight_of[edge] for edge in edges if edge in weight_of), Fraction(0))
            proposed[node] = left / (sum(edge not in weight_of for edge in edges) + 1)
        wave_weights: dict[frozenset[str], Fraction] = {}
        for node in wave:
            for other in graph[node]:
                edge = frozenset((node, other))
                if edge not in weight_of:
                    wave_weights[edge] = min(proposed[node], proposed.get(other, proposed[node]))
        weight_of |= wave_weights
    weights = {(first, other): weight_of[frozenset((first, other))] for first, other in graph.edges}
    matrix = _matrix(graph, weights)
    if bool((matrix.diagonal() <= 0).any()) or any(weight < 0 for weight in weights.values()):
        node = list(graph)[int(matrix.diagonal().argmin())]
        warnings.warn(
            f"SWIFT's weights would leave client '{node}' a weight of {float(matrix.diagonal().min()):.3g} for its own "
            "model; this graph gets Metropolis weights instead.",
            stacklevel=2,
        )
        return metropolis_weights(graph)
    return matrix


def contraction(matrix: Tensor) -> float:
    """Return the second-largest absolute eigenvalue: the factor on the distance to the mean of one mixing, at most.

    It is 1 where the weights leave parts of the graph unconnected, and 0 where one mixing makes all alike.

    Args:
        matrix: Symmetric, doubly stochastic weights.

    Example:
        >>> round(contraction(mixing_weights("metropolis", nx.cycle_graph(4))), 3)
        0.333
    """
    if len(matrix) < 2:
        return 0.0
    values: list[float] = torch.linalg.eigvalsh(matrix).abs().sort(descending=True).values.tolist()
    return values[1]


def remove_nodes(matrix: Tensor, absent: Sequence[int]) -> Tensor:
    """Return the weights while some nodes are away: each end of a link that is down keeps its weight for itself.

    What is left is symmetric and doubly stochastic, so the mean over all nodes still stays as it is.

    Args:
        matrix: Symmetric, doubly stochastic weights.
        absent: Places of the nodes that are away.

    Example:
        >>> remove_nodes(torch.full((2, 2), 0.5, dtype=torch.float64), [1])
        tensor([[1., 0.],
                [0., 1.]], dtype=torch.float64)
    """
    if not absent:
        return matrix
    away = torch.zeros(len(matrix), dtype=torch.bool)
    away[list(absent)] = True
    reduced = matrix.clone()
    reduced[away] = 0.0
    reduced[:, away] = 0.0
    return _closed(reduced)


def _matrix(graph: nx.Graph, weights: dict[tuple[str, str], Fraction]) -> Tensor:
    """Return the matrix of weights on edges; what is left of each row, computed exactly, is on the diagonal."""
    place = {node: index for index, node in enumerate(graph)}
    left = dict.fromkeys(graph, Fraction(1))
    matrix = torch.zeros(len(place), len(place), dtype=torch.float64)
    for (first, other), weight in weights.items():
        matrix[place[first], place[other]] = matrix[place[other], place[first]] = float(weight)
        left[first] -= weight
        left[other] -= weight
    for node, rest in left.items():
        matrix[place[node], place[node]] = float(rest)
    return matrix


def _closed(matrix: Tensor) -> Tensor:
    """Return the matrix with what its rows lack to one on the diagonal."""
    closed = matrix.clone()
    closed.fill_diagonal_(0.0)
    return closed + torch.diag(1.0 - closed.sum(1))


def _rows_in(path: Path) -> list[list[float]]:
    """Return the rows of a file of numbers."""
    if not path.is_file():
        raise ValueError(f"weights='{path}': there is no such file.")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return [[number_in(cell) for cell in line] for line in csv.reader(file) if any(map(str.strip, line))]
    except (ValueError, csv.Error) as error:
        raise ValueError(f"weights='{path}' is not a table of numbers: {error}.") from error


def _checked(rows: Sequence[Sequence[float]], graph: nx.Graph) -> Tensor:
    """Return given weights as a matrix."""
    nodes, count = list(graph), len(graph)
    lengths = {len(row) for row in rows}
    if len(rows) != count or lengths != {count}:
        raise ValueError(
            f"weights have {len(rows)} rows of {sorted(lengths)} numbers, and there are {count} clients: give a row and "
            f"a column for each, in the order {nodes}."
        )
    matrix = torch.tensor([[float(entry) for entry in row] for row in rows], dtype=torch.float64)
    if not bool(matrix.isfinite().all()) or bool((matrix < 0).any()):
        raise ValueError("weights must be finite numbers from 0: a model is a mean of its neighbours' models.")
    for row, column in zip(
        *(where.tolist() for where in ((matrix - matrix.T).abs() > TOLERANCE).nonzero(as_tuple=True)), strict=True
    ):
        raise ValueError(
            f"weights are not symmetric: client '{nodes[row]}' takes {float(matrix[row, column]):g} of '{nodes[column]}', "
            f"which takes {float(matrix[column, row]):g} in return. Symmetric rows that sum to 1 keep the mean of all "
            "models; use weights='metropolis' for such a matrix on any graph."
        )
    for node, total in zip(nodes, matrix.sum(1).tolist(), strict=True):
        if abs(total - 1.0) > TOLERANCE:
            raise ValueError(
                f"weights are not doubly stochastic: those of client '{node}' sum to {total:g}, and must sum to 1. Use "
                "weights='metropolis' for such a matrix on any graph."
            )
    for i, j in matrix.nonzero().tolist():
        if i != j and not graph.has_edge(nodes[i], nodes[j]):
            raise ValueError(
                f"weights give client '{nodes[i]}' {float(matrix[i, j]):g} of the model of '{nodes[j]}', and the "
                "topology has no edge between them. Add the edge, or set the weight to 0."
            )
    return _closed((matrix + matrix.T) / 2)


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
            raise ValueError(f"topology={_short(topology)}: {wrong!r} is not an edge. An edge is a pair of nodes.")
        edges = pairs
    names = set(nodes)
    for edge in edges:
        first, other = map(str, edge)
        for node in (first, other):
            if node not in names:
                raise ValueError(
                    f"topology={_short(topology)} has a node '{node}', which is not a client. The clients are {nodes}."
                )
        if first == other:
            raise ValueError(
                f"topology={_short(topology)} has an edge from '{first}' to itself. What a node keeps of its own model is "
                "said by the weights; leave the edge out."
            )
        graph.add_edge(first, other)
    return graph


def _named(name: str, nodes: list[str], edge_probability: float, seed: int) -> list[tuple[str, str]]:
    """Return the edges of one of :data:`GRAPHS`."""
    count = len(nodes)
    if name == "ring":
        graph = nx.cycle_graph(count) if count > 2 else nx.path_graph(count)
    elif name == "complete":
        graph = nx.complete_graph(count)
    elif name == "star":
        graph = nx.star_graph(count - 1)
    elif name == "torus":
        rows = max(row for row in range(1, int(count**0.5) + 1) if count % row == 0)
        if rows < 2:
            raise ValueError(
                f"topology='torus' needs rows and columns, and {count} clients are not a product of two numbers from 2. Use "
                "'ring', or another number of clients."
            )
        grid = nx.grid_2d_graph(rows, count // rows, periodic=True)
        graph = nx.relabel_nodes(grid, {(row, column): row * (count // rows) + column for row, column in grid})
    elif name == "erdos_renyi":
        if not 0.0 <= edge_probability <= 1.0:
            raise ValueError(f"edge_probability={edge_probability} is not a probability: use a number from 0 to 1.")
        graph = nx.gnp_random_graph(count, edge_probability, seed=address(seed, "topology") % 2**32)
    else:
        raise ValueError(
            f"topology={name!r} is not known. Use one of {list(GRAPHS)}, a file ({', '.join(FILES)}), a list of edges, "
            "neighbours by client, or a matrix of 0 and 1."
        )
    return [(nodes[first], nodes[other]) for first, other in graph.edges if first != other]


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
        return [(first, other) for first, other in lines]
    try:
        graph = nx.read_graphml(path)
    except Exception as error:
        raise ValueError(f"topology='{path}' is not GraphML that networkx can read: {error}") from error
    if graph.is_directed():
        raise ValueError(
            f"topology='{path}' is a directed graph. Neighbours listen to each other: use an undirected one."
        )
    return [(str(first), str(other)) for first, other in graph.edges()]


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
