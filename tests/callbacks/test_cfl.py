"""CFL: sheet B 1.5."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from fedlightning.callbacks import CFL, FedAvg, FedGroup, FedLP, Local, LocalAdaptation
from fedlightning.callbacks.cfl import cosines, flat
from fedlightning.tensors import module_state
from fedlightning.testing.runs import same_tree
from tests.callbacks.common import Plain, fixed_data, mean_state, start_of
from tests.conformance.case import Case, Kept
from tests.helpers import NormNet, Quadratic, Toy, close, federate, global_state, quadratic_data, same, spied, toy_data

ALL = {"absent_clients": "it refuses partial participation", "resume": "its case below takes part as a whole"}
CASES = {
    "CFL": Case(CFL(), skip={"absent_clients": ALL["absent_clients"], "resume": ALL["resume"]}),
    "CFL at once": Case(
        CFL(eps1=10.0, eps2=0.0, gap=0.0),
        skip={
            "absent_clients": ALL["absent_clients"],
            "resume": ALL["resume"],
            "identical_clients": "clients whose updates are alike are split by rounding errors, since all is allowed",
        },
    ),
}
KEPT = {"CFL": Kept("CFL", server=("clusters", "first", "parents"))}

A = [[1.0, 1.0, 1.0]] * 6
B = [[5.0, 5.0, 4.0], [-5.0, -4.0, -5.0], [4.0, 5.0, 5.0], [-5.0, -5.0, -4.0], [5.0, 4.0, 5.0], [-4.0, -5.0, -5.0]]
GROUPS = (["0", "2", "4"], ["1", "3", "5"])


def parts(trainer):
    clusters = {}
    for client in trainer.server.clients:
        clusters.setdefault(trainer.server.callbacks.role("plan_round").cluster_of(trainer.server, client), []).append(
            client
        )
    return clusters


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_without_a_stationary_point_it_is_uniform_fedavg(make):
    module, data = make(), toy_data()
    plain = federate(module, data, [FedAvg("uniform")], max_rounds=3)
    ours = federate(module, data, [CFL(eps1=0.0)], max_rounds=3)
    same(global_state(ours), global_state(plain))
    for client in ours.server.clients:
        same(module_state(ours.module(client)), global_state(plain))
    same(module_state(ours.module()), global_state(plain))
    assert ours.server.costs.bytes_down == plain.server.costs.bytes_down


def test_opposed_groups_are_split_exactly_and_each_is_fedavg_on_its_own():
    trainer = federate(Quadratic(), quadratic_data(A, B), [CFL()], max_rounds=4)
    assert sorted(parts(trainer).values()) == list(GROUPS)
    together = federate(Quadratic(), quadratic_data(A, B), [FedAvg("uniform")], max_rounds=1)
    for cluster, members in parts(trainer).items():
        w = global_state(together)["w"]
        for _ in range(3):
            w = w - 0.1 * sum(w - torch.tensor(B[int(c)], dtype=torch.float64) for c in members) / 3
        close(trainer.server.models[cluster], {"w": w}, atol=1e-13)


def test_the_number_of_clusters_never_falls_and_each_client_is_in_one():
    trainer, spy = spied(
        Quadratic(), quadratic_data(A, B), [CFL(eps1=9.0, eps2=0.0, gap=0.0, min_size=1)], max_rounds=6
    )
    counts = []
    for state in spy.states:
        clusters = state["CFL"]["clusters"]
        counts.append(len(set(clusters.values())) or 1)
        assert not clusters or set(clusters) == set(trainer.server.clients)
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] > 2
    assert set(trainer.server.state["CFL"]["parents"].values()) <= set(trainer.server.models)


def best_cut(rows):
    """The cut into two with the smallest largest cosine across it, by trying all: what complete linkage aims at."""
    table = (rows @ rows.T) / np.outer(*[np.linalg.norm(rows, axis=1)] * 2)
    count = len(rows)
    cuts = [set(s) | {0} for size in range(count - 1) for s in itertools.combinations(range(1, count), size)]
    return min(cuts, key=lambda cut: max(table[i, j] for i in cut for j in set(range(count)) - cut))


@pytest.mark.parametrize("seed", range(4))
def test_two_bundles_of_updates_are_told_apart(seed):
    draw = torch.Generator().manual_seed(seed)
    axes = torch.randn(2, 8, generator=draw, dtype=torch.float64)
    rows = torch.stack([axes[i % 2] + 0.1 * torch.randn(8, generator=draw, dtype=torch.float64) for i in range(7)])
    deltas = {str(i): {"w": row} for i, row in enumerate(rows)}
    first, second = CFL().halves(deltas)
    assert {int(c) for c in first} == best_cut(rows.numpy())
    largest = max(float(torch.cosine_similarity(rows[int(a)], rows[int(b)], dim=0)) for a in first for b in second)
    assert CFL().separation(deltas, first, second) == pytest.approx(math.sqrt((1 - largest) / 2), abs=1e-12)


def test_norms_and_cosines():
    deltas = {
        "a": {"v": torch.tensor([3.0]), "w": torch.tensor([[4.0]])},
        "b": {"v": torch.zeros(1), "w": torch.zeros(1, 1)},
    }
    assert CFL().norms(deltas) == (2.5, 5.0)
    assert cosines(flat(deltas)).tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_a_newcomer_goes_where_the_client_is_that_is_most_like_it():
    """By the largest cosine, not by the mean or the least; of equal ones to the first part; lengths say nothing."""
    state = lambda *row: {"w": torch.tensor(row)}  # noqa: E731
    sides = {"one": {"a": state(0.0, 1.0), "b": state(1.0, 1.0)}, "two": {"c": state(90.0, 0.5), "d": state(-1.0, 0.0)}}
    assert CFL().side(state(1.0, 0.0), sides) == "two"
    assert CFL().side(state(3.0, 3.0), sides) == "one"
    assert CFL().side(state(0.0, 0.0), sides) == "one"


@pytest.mark.parametrize(
    ("options", "split"),
    [
        ({}, True),
        ({"start_round": 5}, False),
        ({"min_size": 6}, False),
        ({"eps2": 3.0}, False),
        ({"gap": 0.9}, True),
        ({"relative": False, "eps1": 0.2, "eps2": 0.5}, True),
        ({"relative": False, "eps1": 0.2, "eps2": 1.0}, False),
    ],
)
def test_when_a_cluster_is_split(options, split):
    trainer = federate(Quadratic(), quadratic_data(A, B), [CFL(**options)], max_rounds=2)
    assert (len(parts(trainer)) == 2) == split


def test_a_gap_that_no_pair_has_forbids_the_split():
    rows = [[5.0, 5.0, 4.0], [-5.0, -4.0, 5.0], [5.0, -4.0, 5.0]]
    assert (
        len(parts(federate(Quadratic(), quadratic_data(A[:3], rows), [CFL(eps1=9, eps2=0, gap=0)], max_rounds=2))) == 2
    )
    callback = CFL(eps1=9, eps2=0, gap=0.99)
    assert len(parts(federate(Quadratic(), quadratic_data(A[:3], rows), [callback], max_rounds=2))) == 1


def test_a_client_without_samples_does_not_stop_the_others():
    data = quadratic_data(A, B)
    data.tensors = {**data.tensors, "6": {s: tuple(t[:0] for t in p) for s, p in data.tensors["0"].items()}}
    with pytest.warns(UserWarning, match="'6' has no training samples"):
        trainer = federate(Quadratic(), data, [CFL()], max_rounds=3)
    assert sorted(parts(trainer).values()) == [*GROUPS, ["6"]]


@pytest.mark.slow
def test_a_resumed_run_is_the_same(tmp_path):
    from tests.callbacks.common import cut_and_resumed

    make = lambda: [CFL(eps1=9.0, eps2=0.0, gap=0.0)]  # noqa: E731
    whole, cut, again = cut_and_resumed(tmp_path, Toy(), toy_data([24, 16, 16, 8]), make, max_rounds=3)
    assert len(parts(again)) > 1 and len(parts(cut)) == 1
    assert same_tree(whole.server.state, again.server.state) and again.server.state["CFL"]["splits"]
    for key, model in whole.server.models.items():
        same(model, again.server.models[key])


@pytest.mark.parametrize("participation", [0.5, 2])
def test_partial_participation_is_refused(participation):
    with pytest.raises(ValueError, match=r"CFL splits a cluster by the updates of all.*participation=1.0"):
        federate(Toy(), toy_data(), [CFL()], participation=participation)


def test_a_layer_that_was_not_sent_has_not_moved():
    trainer, spy = spied(Toy(), toy_data(), [FedLP(0.4), CFL(eps1=9.0, eps2=0.0, gap=0.0)], max_rounds=3)
    assert any(len(update.state) < 4 for update in spy.updates)
    rows = flat({"a": CFL().delta(trainer.server, global_state(trainer), spy.updates[0])})
    assert rows.shape == (1, sum(value.numel() for value in global_state(trainer).values()))
    with pytest.raises(ValueError, match="Local lets no model travel, and CFL "):
        federate(Toy(), toy_data(), [Local(), CFL()])


@pytest.mark.parametrize("options", [{"eps1": -1.0}, {"gap": 1.0}, {"start_round": 0}])
def test_senseless_settings_are_refused(options):
    with pytest.raises(ValueError, match=rf"CFL got .*{next(iter(options))}="):
        CFL(**options)


# -- a whole federation by hand ----------------------------------------------------------------------------------------


def flattened(states):
    return torch.stack([torch.cat([value.flatten() for value in state.values()]) for state in states])


def bipartition(distances):
    """Two groups by complete linkage: again and again, the two with the smallest largest distance are joined."""
    groups = [[i] for i in range(len(distances))]
    while len(groups) > 2:
        pairs = [(max(distances[i][j] for i in a for j in b), a, b) for a, b in itertools.combinations(groups, 2)]
        _, a, b = min(pairs, key=lambda pair: pair[0])
        groups = [group for group in groups if group not in (a, b)] + [a + b]
    return sorted(sorted(group) for group in groups)


@pytest.mark.parametrize(
    ("options", "clusters"),
    [({}, 3), ({"gap": 0.0, "eps1": 10.0, "eps2": 0.0, "min_size": 1, "start_round": 1, "weighting": "samples"}, 6)],
    ids=["defaults", "down to single clients"],
)
def test_a_federation_by_hand(options, clusters):
    data, start = fixed_data([16, 24, 16, 8, 20, 8], worlds=2), start_of(Toy)
    algorithm = CFL(**options)
    trainer, spy = spied(start, data, [algorithm], max_rounds=6)
    where, models, first = dict.fromkeys(trainer.server.clients, "global"), {"global": module_state(start)}, None
    for number in range(6):
        for cluster in sorted(set(where.values())):
            members, before = [c for c in where if where[c] == cluster], models[cluster]
            sizes = {c: len(data.tensors[c]["train"][0]) for c in members}
            weights = {c: sizes[c] if algorithm.weighting == "samples" else 1 for c in members}
            trained = {c: Plain(before).trained(*data.tensors[c]["train"]) for c in members}
            models[cluster] = mean_state([(weights[c], trained[c]) for c in members])
            deltas = flattened(trained.values()) - flattened([before])
            first = float(deltas.norm(dim=1).max()) if first is None else first
            near = float(deltas.mean(0).norm()) < algorithm.eps1 * first
            pulled = float(deltas.norm(dim=1).max()) > algorithm.eps2 * first
            if number + 1 < algorithm.start_round or len(members) <= algorithm.min_size or not (near and pulled):
                continue
            cosines = torch.nn.functional.cosine_similarity(deltas[:, None], deltas[None], dim=-1)
            halves = bipartition((1 - cosines).tolist())
            if ((1 - max(float(cosines[i, j]) for i in halves[0] for j in halves[1])) / 2) ** 0.5 > algorithm.gap:
                for k, half in enumerate(halves, start=1):
                    child = f"cluster {k}" if cluster == "global" else f"{cluster}.{k}"
                    models[child] = mean_state([(weights[members[i]], trained[members[i]]) for i in half])
                    where |= {members[i]: child for i in half}
        found = spy.states[number]["CFL"]["clusters"]
        assert {client: found.get(client, "global") for client in where} == where
    assert len(set(where.values())) == clusters and set(models) == set(trainer.server.models)
    for cluster, state in models.items():
        close(trainer.server.models[cluster], state, atol=1e-9, rtol=0)
    for client, cluster in where.items():
        close(module_state(trainer.module(client)), models[cluster], atol=1e-9, rtol=0)


@pytest.mark.parametrize("method", [CFL(), FedGroup(alpha=20)], ids=lambda method: method.key)
def test_adaptation_after_the_last_round_answers_for_no_cluster(method):
    trainer = federate(Toy(), toy_data(), [method, LocalAdaptation()], max_rounds=1)
    assert not trainer.server.failures
