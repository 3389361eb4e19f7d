"""DFedAvg: sheet B entry 3.4; what all gossip shares is tested here."""

from __future__ import annotations

import pytest
import torch

from fedlightning.callbacks import (
    FENDA,
    SCAFFOLD,
    DFedAvg,
    Ditto,
    FedALA,
    FedAvg,
    FedBN,
    FedLP,
    FedPer,
    GlobalCheckpoint,
    Local,
    LocalAdaptation,
)
from fedlightning.contract.messages import Update
from fedlightning.server.loop import Synchronous
from fedlightning.tensors import module_state, select
from fedlightning.topology import contraction
from fedlightning.virtual_time import FixedLink, FixedSpeed, VirtualClock
from tests.conformance.case import Case, Kept
from tests.helpers import NormNet, Quadratic, Toy, close, federate, quadratic_data, same, spied, toy_data

CASES = {
    "DFedAvg": Case(DFedAvg()),
    "DFedAvg star": Case(DFedAvg("star", "swift", mixings=2)),
}
KEPT = {"DFedAvg": Kept("DFedAvg", server=("models",))}

A = [[1.0, 2.0, 0.5], [2.0, 1.0, 1.0], [0.5, 0.5, 2.0], [1.0, 1.0, 1.0], [1.5, 0.7, 0.3]]
B = [[1.0, 0.0, -1.0], [1.2, 0.1, -0.8], [-3.0, 2.0, 4.0], [0.0, 5.0, 1.0], [2.0, 2.0, -2.0]]
NAMES = ("0", "1", "2", "3", "4")


def nodes(trainer, names=None):
    """The models that the nodes deploy, as rows."""
    return torch.stack([module_state(trainer.module(client))["w"] for client in names or NAMES])


def by_hand(matrix, rounds, steps, lr, mixings=1, away=()):
    """Local gradient steps, then averages, with plain numbers; in round t the nodes of `away[t]` neither train nor talk."""
    a, b = (torch.tensor(rows, dtype=torch.float64) for rows in (A, B))
    w = torch.zeros_like(a)
    for number in range(rounds):
        gone = set(away[number]) if away else set()
        y = w.clone()
        for i in range(5):
            for _ in range(0 if i in gone else steps):
                y[i] = y[i] - lr * a[i] * (y[i] - b[i])
        for _ in range(mixings):
            x = torch.zeros_like(y)
            for i in range(5):
                for j in range(5):
                    down = i != j and (i in gone or j in gone)
                    x[i] += matrix[i][j] * y[i if down else j]
            y = x
        w = y
    return w


RING = [[1 / 3 if (i - j) % 5 in (0, 1, 4) else 0.0 for j in range(5)] for i in range(5)]


@pytest.mark.parametrize("mixings", [1, 3])
def test_rounds_by_hand(mixings):
    trainer = federate(Quadratic(), quadratic_data(A, B), [DFedAvg(mixings=mixings)], max_rounds=4, local_epochs=2)
    expected = by_hand(RING, 4, 2, 0.1, mixings)
    torch.testing.assert_close(nodes(trainer), expected, atol=1e-14, rtol=0)
    torch.testing.assert_close(trainer.server.model["w"], expected.mean(0), atol=1e-14, rtol=0)


def test_nodes_that_are_away_keep_their_model_and_both_ends_their_weight():
    trainer, spy = spied(Quadratic(), quadratic_data(A, B), [DFedAvg()], max_rounds=5, participation=3)
    away = [[i for i in range(5) if NAMES[i] not in spy.of_round(number)] for number in range(5)]
    assert all(len(gone) == 2 for gone in away)
    torch.testing.assert_close(nodes(trainer), by_hand(RING, 5, 1, 0.1, away=away), atol=1e-14, rtol=0)


@pytest.mark.parametrize("topology", ["ring", "star", "complete", [["0", "1"], ["1", "2"], ["2", "3"], ["3", "4"]]])
def test_without_learning_the_mean_stays_and_the_distance_to_it_shrinks(topology):
    """At the rate of the second-largest absolute eigenvalue: never slower, and in its eigenvector's direction no faster."""
    callback = DFedAvg(topology)
    trainer = federate(Quadratic(lr=0.0), quadratic_data(A, B), [callback], max_rounds=1, precision="64-true")
    matrix = callback.matrix(trainer.server)
    draw = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values, vectors = torch.linalg.eigh(matrix)
    slowest = vectors[:, values.abs().argsort()[-2]][:, None] * torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    for start in (draw, slowest + 3.0):
        _set(trainer, start)
        after = nodes(_one_more_round(trainer, callback, start))
        assert float((after.mean(0) - start.mean(0)).abs().max()) < 1e-12
        far, near = (float((rows - rows.mean(0)).norm()) for rows in (start, after))
        assert near <= contraction(matrix) * far + 1e-12
    assert near == pytest.approx(contraction(matrix) * far, abs=1e-12)


def _set(trainer, rows):
    """Give every node a model."""
    trainer.server.state["DFedAvg"] = {"models": {name: {"w": row} for name, row in zip(NAMES, rows, strict=True)}}


def _one_more_round(trainer, callback, rows):
    """Mix what the nodes hold, as after a round of training that changed nothing."""
    updates = [
        Update(1, name, {"w": row}, num_samples=1, contributed=True) for name, row in zip(NAMES, rows, strict=True)
    ]
    trainer.server.models["global"] = callback.reduce(trainer.server, updates)
    return trainer


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_on_a_complete_graph_it_is_uniform_fedavg(make):
    module, data = make(), toy_data()
    plain = federate(module, data, [FedAvg("uniform")], max_rounds=3)
    for weights in ("uniform", "metropolis"):
        ours = federate(module, data, [DFedAvg("complete", weights)], max_rounds=3)
        for client in ("0", "1", "2"):
            mine = module_state(ours.module(client))
            floats = [name for name, value in mine.items() if value.is_floating_point()]
            close(select(mine, floats), select(plain.server.model, floats))
        close(select(ours.server.model, floats), select(plain.server.model, floats))


def test_without_edges_it_is_training_alone():
    module, data = NormNet("momentum"), toy_data()
    alone = federate(module, data, [Local()], max_rounds=3, optimizer_state="reset")
    with pytest.warns(UserWarning, match=r"is not connected.*never come together"):
        ours = federate(module, data, [DFedAvg([])], max_rounds=3)
    for client in ("0", "1", "2"):
        same(module_state(ours.module(client)), module_state(alone.module(client)))
    assert ours.server.costs.bytes_up == 0


def test_names_of_nodes_do_not_matter():
    """The same clients in another order on the same edges have the same models, each under its new name."""
    turn = {"0": "3", "1": "0", "2": "4", "3": "1", "4": "2"}
    edges = [["0", "1"], ["1", "2"], ["2", "3"], ["3", "4"], ["0", "2"]]
    first = federate(Quadratic(), quadratic_data(A, B), [DFedAvg(edges)], max_rounds=3)
    order = [int(old) for new in NAMES for old, name in turn.items() if name == new]
    rows = [[values[i] for i in order] for values in (A, B)]
    turned = [[turn[one], turn[other]] for one, other in edges]
    second = federate(Quadratic(), quadratic_data(*rows), [DFedAvg(turned)], max_rounds=3)
    torch.testing.assert_close(nodes(first), nodes(second, [turn[name] for name in NAMES]), atol=1e-14, rtol=0)


def test_bytes_are_counted_on_the_links():
    size = sum(4 * value.numel() for value in Toy().state_dict().values())
    for topology, links in (("ring", 10), ("star", 8), ("complete", 20)):
        trainer = federate(Toy(), toy_data([9] * 5), [DFedAvg(topology, mixings=2)], max_rounds=3)
        assert (trainer.server.costs.bytes_up, trainer.server.costs.bytes_down) == (3 * 2 * links * size, 0)
    part = federate(Toy(), toy_data([9] * 5), [DFedAvg(), FedPer()], max_rounds=1)
    shared = sum(4 * part.server.model[name].numel() for name in part.server.shared_names())
    assert part.server.costs.bytes_up == 10 * shared < 10 * size


def test_what_stays_at_a_node_is_not_mixed():
    _, spy = spied(NormNet(), toy_data(), [DFedAvg(), FedBN(), Ditto(0.5)], max_rounds=2)
    for item in (*spy.messages, *spy.updates):
        assert set(item.state) == {"net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias"}


def test_statistics_are_averaged_and_integers_are_the_nodes_own():
    trainer, spy = spied(NormNet(), toy_data(), [DFedAvg("complete")], max_rounds=1)
    updates = spy.of_round(0)
    for client in ("0", "1", "2"):
        mine = module_state(trainer.module(client))
        mean = sum(update.state["net.1.running_var"].double() for update in updates.values()) / 3
        torch.testing.assert_close(mine["net.1.running_var"].double(), mean, atol=1e-6, rtol=1e-5)
        assert mine["net.1.num_batches_tracked"] == updates[client].state["net.1.num_batches_tracked"]


@pytest.mark.parametrize("engine", ["processes", "vectorized"])
@pytest.mark.slow
def test_every_engine(engine):
    module, data = Toy(), toy_data()
    first = federate(module, data, [DFedAvg(), FedPer()], max_rounds=2)
    second = federate(module, data, [DFedAvg(), FedPer()], max_rounds=2, engine=engine)
    for client in ("0", "1", "2"):
        close(module_state(first.module(client)), module_state(second.module(client)), atol=1e-6)
    assert first.server.costs.bytes_up == second.server.costs.bytes_up


def test_clients_that_join_begin_at_the_average(tmp_path):
    data = toy_data({"a": 16, "b": 16, "c": 16})
    first = federate(Toy(), data, [DFedAvg()], tmp_path, max_rounds=2, evaluation=0)
    server = first.server
    server.clients.append("d")
    first.server.callbacks.find(DFedAvg).facts.newcomers.join(server, ["d"])
    same(server.state["DFedAvg"]["models"]["d"], server.model)
    with pytest.raises(ValueError, match=r"3 rows of .*there are 4 clients"):
        DFedAvg("complete", [[1 / 3] * 3] * 3).facts.newcomers.join(server, ["d"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"weights": [[0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.4, 0.6]]}, "not symmetric: client '1' takes 0.5 of '2'"),
        (
            {"weights": [[0.5, 0.5, 0], [0.5, 0.4, 0], [0, 0, 1]]},
            "not doubly stochastic: those of client '1' sum to 0.9",
        ),
        ({"topology": [["0", "1"]], "weights": [[0, 0, 1], [0, 1, 0], [1, 0, 0]]}, "no edge between them"),
        ({"topology": "wheel"}, "'wheel' is not known"),
        ({"topology": [["0", "7"]]}, "'7', which is not a client"),
        ({"topology": "torus"}, "3 clients are not a product"),
        ({"topology": "star", "weights": "uniform"}, "does not connect all"),
    ],
)
def test_graphs_and_weights_that_are_wrong_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        federate(Toy(), toy_data(), [DFedAvg(**options)])


@pytest.mark.parametrize("other", [SCAFFOLD(), FedALA(), FedLP()])
def test_what_needs_a_server_is_refused(other):
    with pytest.raises(ValueError, match=rf"DFedAvg .*, and {other.key} .*Remove"):
        federate(Toy(), toy_data(), [DFedAvg(), other])


def test_an_adaptation_of_the_selected_average_is_refused(tmp_path):
    callbacks = [DFedAvg(), LocalAdaptation(), GlobalCheckpoint(monitor="val_loss", mode="min")]
    with pytest.raises(
        ValueError, match=r"LocalAdaptation adapts the model that GlobalCheckpoint selects.*no client holds"
    ):
        federate(Toy(), toy_data(), callbacks, tmp_path)
    trainer, spy = spied(Toy(), toy_data(), callbacks[:2], max_rounds=2)
    last = [message for message in spy.messages if message.round == 2]
    for message in last:
        same(message.state, trainer.server.state["DFedAvg"]["models"][message.client])
    assert last


def test_entries_that_a_node_does_not_send_are_not_mixed_with_it():
    """As an encoder of a modality that it lacks: its links are down for these entries alone."""
    trainer = federate(Quadratic(), quadratic_data(A, B), [callback := DFedAvg("complete")], max_rounds=1)
    rows = torch.arange(15, dtype=torch.float64).reshape(5, 3)
    _set(trainer, rows)
    updates = [Update(1, name, {"w": rows[int(name)]}, num_samples=1, contributed=True) for name in NAMES[1:]]
    callback.reduce(trainer.server, [Update(1, "0", {}, num_samples=1, contributed=True), *updates])
    found = nodes(trainer)
    assert torch.equal(found[0], rows[0])
    torch.testing.assert_close(found[2], (2 * rows[2] + rows[1] + rows[3] + rows[4]) / 5)


def test_senseless_settings_are_refused():
    with pytest.raises(ValueError, match="DFedAvg got mixings=0"):
        DFedAvg(mixings=0)


def test_composes_with_fenda():
    trainer, spy = spied(Toy(), toy_data(), [DFedAvg(), FENDA(head="net.3")], max_rounds=2)
    sent = spy.updates[0].state
    assert 0 < len(sent) < len(module_state(trainer.client("0").module))


def test_a_node_that_is_late_is_away_for_the_round():
    loop = Synchronous(VirtualClock(FixedSpeed(1.0, slowdown={"1": 10.0}), FixedLink(up=24.0)), deadline=5.0)
    trainer = federate(Quadratic(), quadratic_data(A, B), [DFedAvg()], max_rounds=3, loop=loop)
    torch.testing.assert_close(nodes(trainer), by_hand(RING, 3, 1, 0.1, away=[[1]] * 3), atol=1e-14, rtol=0)
    assert trainer.server.costs.virtual_time == 15.0


def test_a_round_lasts_as_long_as_the_node_with_most_to_send():
    """One copy of 24 bytes for each neighbour, over a link of 24 bytes a second."""
    loop = Synchronous(VirtualClock(FixedSpeed(1.0), FixedLink(up=24.0)))
    trainer = federate(Quadratic(), quadratic_data(A, B), [DFedAvg("star")], max_rounds=2, loop=loop)
    assert trainer.server.costs.virtual_time == 2 * (1.0 + 4.0)
