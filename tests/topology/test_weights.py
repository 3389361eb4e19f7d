"""Graphs and mixing weights: sheet B entries 3.4 and 3.5."""

from __future__ import annotations

import networkx as nx
import pytest
import torch

from fedlightning.topology import (
    GRAPHS,
    contraction,
    make_graph,
    metropolis_weights,
    mixing_weights,
    remove_nodes,
    swift_weights,
)

NAMES = [str(i) for i in range(12)]


def star(tail=False):
    edges = [["hub", leaf] for leaf in "abcde"] + ([["a", "tail"]] if tail else [])
    return make_graph(edges, ["hub", *"abcde"] + (["tail"] if tail else []))


def weight(matrix, graph, one, other):
    place = {node: index for index, node in enumerate(graph)}
    return float(matrix[place[one], place[other]])


def proper(matrix, graph):
    """Symmetric, doubly stochastic, not negative, on edges only."""
    assert torch.equal(matrix, matrix.T)
    assert float((matrix.sum(1) - 1).abs().max()) < 1e-12
    assert float(matrix.min()) >= 0
    for i, one in enumerate(graph):
        for j, other in enumerate(graph):
            assert i == j or matrix[i, j] == 0 or graph.has_edge(one, other)


@pytest.mark.parametrize("topology", GRAPHS)
@pytest.mark.parametrize("weights", ["metropolis", "swift"])
def test_every_named_graph(topology, weights):
    graph = make_graph(topology, NAMES, edge_probability=0.6)
    assert list(graph) == NAMES
    assert nx.is_connected(graph)
    matrix = mixing_weights(weights, graph)
    proper(matrix, graph)
    assert float(matrix.diagonal().min()) > 0
    assert 0 <= contraction(matrix) < 1


def test_degrees():
    degrees = {name: dict(make_graph(name, NAMES).degree) for name in ("ring", "torus", "complete", "star")}
    assert set(degrees["ring"].values()) == {2}
    assert set(degrees["torus"].values()) == {4}
    assert set(degrees["complete"].values()) == {11}
    assert degrees["star"]["0"] == 11
    assert list(make_graph("ring", ["a", "b"]).edges) == [("a", "b")]
    assert not make_graph("ring", ["a"]).edges


def test_metropolis_by_hand():
    graph = make_graph([["a", "b"], ["b", "c"], ["b", "d"]], list("abcd"))
    expected = [[0.75, 0.25, 0, 0], [0.25, 0.25, 0.25, 0.25], [0, 0.25, 0.75, 0], [0, 0.25, 0, 0.75]]
    torch.testing.assert_close(metropolis_weights(graph), torch.tensor(expected, dtype=torch.float64))
    ring = metropolis_weights(make_graph("ring", NAMES))
    assert set(ring[ring != 0].tolist()) == {1 / 3}
    torch.testing.assert_close(
        metropolis_weights(make_graph("complete", NAMES)), torch.full((12, 12), 1 / 12, dtype=torch.float64)
    )


def test_swift_on_a_star():
    graph = star()
    matrix = swift_weights(graph)
    assert weight(matrix, graph, "hub", "a") == weight(matrix, graph, "hub", "hub") == 1 / 6
    assert weight(matrix, graph, "a", "a") == pytest.approx(5 / 6, abs=1e-15)


def test_swift_with_a_tail():
    graph = star(tail=True)
    matrix = swift_weights(graph)
    assert weight(matrix, graph, "a", "tail") == weight(matrix, graph, "a", "a") == 5 / 12
    assert weight(matrix, graph, "tail", "tail") == 7 / 12
    assert weight(matrix, graph, "hub", "a") == weight(matrix, graph, "hub", "hub") == 1 / 6
    assert weight(metropolis_weights(graph), graph, "a", "tail") == 1 / 3
    proper(matrix, graph)


def test_swift_on_a_ring_and_of_two_equals_the_smaller_proposal():
    ring = swift_weights(make_graph("ring", NAMES))
    assert set(ring[ring != 0].tolist()) == {1 / 3}
    # x and y have degree 2 each and know one another; x has accepted 1/4 of a hub, y 1/5 of another
    edges = [["h", leaf] for leaf in "abx"] + [["g", leaf] for leaf in "cdey"] + [["x", "y"]]
    graph = make_graph(edges, list("hgabcdexy"))
    matrix = swift_weights(graph)
    assert weight(matrix, graph, "h", "x") == 1 / 4
    assert weight(matrix, graph, "g", "y") == 1 / 5
    assert weight(matrix, graph, "x", "y") == min((1 - 1 / 4) / 2, (1 - 1 / 5) / 2)


def test_swift_that_leaves_nothing_for_a_node_is_metropolis():
    graph = nx.Graph()
    for one in range(3):
        graph.add_edge("low", f"middle{one}")
        for hub in range(3):
            graph.add_edge(f"middle{one}", f"hub{one}{hub}")
            graph.add_edges_from((f"hub{one}{hub}", f"leaf{one}{hub}{leaf}") for leaf in range(20))
    with pytest.warns(UserWarning, match=r"'low' a weight of -0.295 .*Metropolis"):
        matrix = swift_weights(graph)
    torch.testing.assert_close(matrix, metropolis_weights(graph))


def test_contraction_of_the_extremes():
    assert contraction(torch.eye(4, dtype=torch.float64)) == 1.0
    assert contraction(torch.full((4, 4), 0.25, dtype=torch.float64)) == pytest.approx(0.0, abs=1e-12)
    assert contraction(torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)) == 1.0


def test_links_that_are_down_keep_the_matrix_doubly_stochastic():
    graph = star(tail=True)
    matrix = remove_nodes(swift_weights(graph), [1])
    proper(matrix, graph)
    assert weight(matrix, graph, "a", "a") == weight(matrix, graph, "tail", "tail") == 1.0
    assert weight(matrix, graph, "hub", "hub") == pytest.approx(2 / 6)


def test_given_weights_sum_to_one_exactly():
    third = 0.333333333
    matrix = mixing_weights([[third] * 3] * 3, make_graph("complete", list("abc")))
    assert float((matrix.sum(1) - 1).abs().max()) < 1e-15


@pytest.mark.parametrize("kind", ["csv", "graphml", "neighbours", "matrix"])
def test_graphs_that_are_given(kind, tmp_path):
    wanted = make_graph([["a", "b"], ["b", "c"]], list("abcd"))
    if kind == "csv":
        given = str(tmp_path / "edges.csv")
        (tmp_path / "edges.csv").write_text("a, b\nb,c\n\n")
    elif kind == "graphml":
        given = str(tmp_path / "graph.graphml")
        nx.write_graphml(wanted, given)
    elif kind == "neighbours":
        given = {"b": ["a", "c"]}
    else:
        given = [[0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    found = make_graph(given, list("abcd"))
    assert set(map(frozenset, found.edges)) == set(map(frozenset, wanted.edges))
    assert list(found) == list("abcd")


def test_weights_from_a_file(tmp_path):
    (tmp_path / "weights.csv").write_text("0.5,0.5\n0.5,0.5\n")
    graph = make_graph("ring", ["a", "b"])
    assert mixing_weights(str(tmp_path / "weights.csv"), graph).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    for content in (b"a,b\n0.5,0.5\n", b"\xff,1\n", b"0_1,1\n"):
        (tmp_path / "weights.csv").write_bytes(content)
        with pytest.raises(ValueError, match=r"weights.csv' is not a table of numbers"):
            mixing_weights(str(tmp_path / "weights.csv"), graph)


@pytest.mark.parametrize(
    ("topology", "sentence"),
    [
        ([["a", "b", "c"]], "is not an edge"),
        ([["a", "a"]], "edge from 'a' to itself"),
        ([[0, 1, 0], [0, 0, 0], [0, 0, 0]], "connects client 'b' to 'a' in one direction only|in one direction only"),
        ("nowhere.csv", "there is no such file"),
        ("erdos_renyi", "edge_probability=2 is not a probability"),
    ],
)
def test_graphs_that_are_none(topology, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_graph(topology, list("abc"), edge_probability=2)


def test_files_that_are_no_graphs(tmp_path):
    (tmp_path / "three.csv").write_text("a,b\na,b,c\n")
    with pytest.raises(ValueError, match="line 2"):
        make_graph(str(tmp_path / "three.csv"), list("abc"))
    nx.write_graphml(nx.DiGraph([("a", "b")]), tmp_path / "directed.graphml")
    with pytest.raises(ValueError, match="directed graph"):
        make_graph(str(tmp_path / "directed.graphml"), list("abc"))
    (tmp_path / "broken.graphml").write_text("<graph")
    with pytest.raises(ValueError, match="not GraphML"):
        make_graph(str(tmp_path / "broken.graphml"), list("abc"))


def test_a_drawn_graph_depends_on_its_seed_alone():
    first, again, other = (make_graph("erdos_renyi", NAMES, seed=seed) for seed in (1, 1, 2))
    assert set(first.edges) == set(again.edges) != set(other.edges)
