"""FedGroup: sheet B 1.5."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlightning.callbacks import Ditto, FedAvg, FedGroup, FedLP, Local
from fedlightning.callbacks.fedgroup import COLD_START, directions
from fedlightning.tensors import module_state
from tests.callbacks.common import FailsOnce, Plain, best_partition, fixed_data, flat, mean_state, start_of
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Quadratic,
    Spy,
    Toy,
    close,
    federate,
    global_state,
    make_trainer,
    quadratic_data,
    same,
    spied,
    toy_data,
)

CASES = {
    "FedGroup": Case(FedGroup(), neutral=FedGroup(1)),
    "FedGroup mixed": Case(FedGroup(alpha=1, pretrain=2, mix=0.1, mix_mean=True), neutral=FedGroup(1)),
}
KEPT = {"FedGroup": Kept("FedGroup", server=("clusters", "directions"), models=("global", "cluster 1", "cluster 2"))}

A = [[1.0, 2.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.5, 2.0], [1.5, 1.0, 1.0], [1.0, 1.0, 0.5]]
B = [[5.0, 5.0, 4.0], [-5.0, -4.0, -5.0], [4.0, 5.0, 5.0], [-5.0, -5.0, -6.0], [3.0, 4.0, 4.0], [-4.0, -4.0, -3.0]]
NAMES = {"0", "1", "2", "3", "4", "5"}
EVEN = {"0", "2", "4"}


def groups(trainer):
    found = {}
    for client, cluster in trainer.server.state["FedGroup"]["clusters"].items():
        found.setdefault(cluster, set()).add(client)
    return found


def step(i, w, lr=0.1):
    """One step of gradient descent of client i, in numpy."""
    return w - lr * np.array(A[i]) * (w - np.array(B[i]))


def test_planted_groups_are_found_and_start_as_the_plain_mean_of_their_members():
    trainer = federate(Quadratic(), quadratic_data(A, B), [FedGroup()], max_rounds=1)
    assert sorted(groups(trainer).values(), key=min) == [EVEN, NAMES - EVEN]
    assert (global_state(trainer)["w"] == 0).all()  # the first model stays what newcomers train from
    for cluster, members in groups(trainer).items():
        mean = sum(step(int(i), np.zeros(3)) for i in members) / 3
        np.testing.assert_allclose(trainer.server.models[cluster]["w"], mean, atol=1e-14)
        np.testing.assert_allclose(trainer.server.state["FedGroup"]["directions"][cluster]["w"], mean, atol=1e-14)


def test_each_group_then_is_fedavg_on_its_own():
    trainer, spy = spied(Quadratic(), quadratic_data(A, B), [FedGroup(weighting="uniform")], max_rounds=4)
    for cluster, members in groups(trainer).items():
        w = sum(step(int(i), np.zeros(3)) for i in members) / 3
        for _ in range(3):
            w = sum(step(int(i), w) for i in members) / 3
        np.testing.assert_allclose(trainer.server.models[cluster]["w"], w, atol=1e-13)
        for client in members:
            same(module_state(trainer.module(client)), trainer.server.models[cluster])
    assert COLD_START not in trainer.server.models
    assert {update.model for update in spy.of_round(0).values()} == {COLD_START}
    assert len(spy.updates) == 4 * 6 and all(list(message.state) == ["w"] for message in spy.messages)


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_one_group_is_fedavg(make):
    module, data = make(), toy_data()
    plain = federate(module, data, [FedAvg("uniform")], max_rounds=3)
    ours = federate(module, data, [FedGroup(1, weighting="uniform")], max_rounds=3)
    same(ours.server.models["cluster 1"], global_state(plain))
    for client in ours.server.clients:
        same(module_state(ours.module(client)), global_state(plain))
    assert (ours.server.costs.bytes_down, ours.server.costs.bytes_up) == (
        plain.server.costs.bytes_down,
        plain.server.costs.bytes_up,
    )


def edc(rows, count, unit):
    """The cosines with the leading eigenvectors of the updates' second moments, by numpy."""
    rows = np.asarray(rows)
    scaled = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    used = scaled if unit else rows
    _, vectors = np.linalg.eigh(used.T @ used)
    return scaled @ vectors[:, ::-1][:, :count]


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_points_are_cosines_with_the_leading_directions(seed, unit):
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ours = directions(rows, 3, unit)
    np.testing.assert_allclose(ours.abs(), np.abs(edc(rows, 3, unit)), atol=1e-10)
    assert ours.abs().max() <= 1
    scale = torch.tensor([0.1, 3.0, 1.0, 20.0, 0.5, 1.0, 2.0], dtype=torch.float64)[:, None]
    scaled = directions(rows * scale, 3, unit)
    assert torch.allclose(scaled.abs(), ours.abs(), atol=1e-10) == unit


def test_points_of_few_or_motionless_clients():
    assert directions(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), 3).abs().tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert directions(torch.zeros(2, 3), 2).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_newcomers_join_the_group_of_largest_cosine_and_train_with_it_at_once():
    options = {"max_rounds": 6, "participation": 2, "local_epochs": 1}
    _, spy = spied(Quadratic(), quadratic_data(A, B), [FedGroup(alpha=1)], **options)
    first = spy.of_round(0)
    assert len(first) == 2  # alpha m clients, from all
    known, joined = set(first), 0
    start = {c: {k: v["w"].numpy() for k, v in s["FedGroup"]["directions"].items()} for c, s in enumerate(spy.states)}
    for number in range(1, 6):
        state = spy.states[number]["FedGroup"]
        visits = [(update.client, update.model) for update in spy.updates if update.round == number]
        for client in {client for client, _ in visits} - known:
            moved = step(int(client), np.zeros(3))
            cosines = {k: moved @ path / np.linalg.norm(moved) / np.linalg.norm(path) for k, path in start[0].items()}
            assert state["clusters"][client] == max(cosines, key=cosines.get)
            assert [model for c, model in visits if c == client] == [COLD_START, state["clusters"][client]]
            joined += 1
        assert all(model == state["clusters"][c] for c, model in visits if c in known)
        known |= {client for client, _ in visits}
        np.testing.assert_equal(start[number], start[0])  # directions stay those of the cold start
    assert joined >= 2 and set(state["clusters"]) == known


@pytest.mark.parametrize("alpha", [1, 20])
def test_a_client_that_joins_a_resumed_run_is_placed_as_a_newcomer(tmp_path, alpha):
    federate(Quadratic(), quadratic_data(A[:4], B[:4]), [Spy(), FedGroup(alpha=alpha)], tmp_path, max_rounds=2)
    trainer = make_trainer(tmp_path, [spy := Spy(), FedGroup(alpha=alpha)], max_rounds=5)
    trainer.fit(Quadratic(), datamodule=quadratic_data(A, B), resume="last", allow_new_clients=True)
    paths = trainer.server.state["FedGroup"]["directions"]
    for client in ("4", "5"):
        moved = step(int(client), np.zeros(3))
        cosines = {k: moved @ path["w"].numpy() / np.linalg.norm(path["w"]) for k, path in paths.items()}
        group = trainer.server.state["FedGroup"]["clusters"][client]
        assert group == max(cosines, key=cosines.get)
        visits = [(u.round, u.model) for u in spy.updates if u.client == client]
        assert visits == [(2, COLD_START), *[(2, group)][: alpha == 1], (3, group), (4, group)]
        same(module_state(trainer.module(client)), trainer.server.models[group])


def test_the_cold_start_has_work_of_its_own():
    _, spy = spied(Quadratic(), quadratic_data(A, B), [FedGroup(pretrain=3)], max_rounds=2)
    assert {u.steps for u in spy.of_round(0).values()} == {3} and {u.steps for u in spy.of_round(1).values()} == {1}


@pytest.mark.parametrize("mean", [False, True])
def test_groups_mix_after_a_round(mean):
    rounds = [federate(Quadratic(), quadratic_data(A, B), [FedGroup()], max_rounds=2)]
    rounds += [federate(Quadratic(), quadratic_data(A, B), [FedGroup(mix=0.3, mix_mean=mean)], max_rounds=2)]
    w, ours = ({k: t.server.models[k]["w"].numpy() for k in ("cluster 1", "cluster 2")} for t in rounds)
    for own, other in (("cluster 1", "cluster 2"), ("cluster 2", "cluster 1")):
        a = 0.3 / np.linalg.norm(w[other])
        expected = (w[own] + a * w[other]) / (1 + a if mean else 1)
        np.testing.assert_allclose(ours[own], expected, atol=1e-14)


def test_layers_that_were_not_sent_have_not_moved():
    trainer = federate(Toy(), toy_data(), [FedLP(0.5), FedGroup()], max_rounds=2)
    paths = trainer.server.state["FedGroup"]["directions"]
    assert all(list(path) == list(trainer.server.trainable) for path in paths.values())
    with pytest.raises(ValueError, match="Local lets no model travel, and FedGroup "):
        federate(Toy(), toy_data(), [Local(), FedGroup()])


def test_a_layer_that_no_member_sent_is_the_first_models():
    module = Toy()
    trainer, spy = spied(module, toy_data(), [FedLP(0.2), FedGroup()], max_rounds=1)
    first, sent, missing = module_state(module), spy.of_round(0), 0
    for cluster, members in groups(trainer).items():
        for name, value in first.items():
            rows = [sent[client].state[name].double() for client in members if name in sent[client].state]
            missing += not rows
            mean = sum(rows) / len(rows) if rows else value.double()
            close({name: trainer.server.models[cluster][name]}, {name: mean}, atol=1e-7)
    assert missing


def test_equal_clients_are_one_group_and_who_has_no_samples_is_not_drawn():
    _, spy = spied(Quadratic(), quadratic_data(A[:1] * 3, B[:1] * 3), [FedGroup()], max_rounds=2)
    assert spy.states[-1]["FedGroup"]["clusters"] == dict.fromkeys("012", "cluster 1")
    trainer, spy = spied(Toy(), toy_data([16, 0, 16, 0, 16]), [FedGroup(alpha=1)], max_rounds=1)
    assert len(spy.of_round(0)) == 2 and set(spy.of_round(0)) < set("024")
    assert trainer.server.global_module(None) is None
    assert FedGroup().memberships(trainer.server) == {
        client: {cluster: 1.0} for cluster, members in groups(trainer).items() for client in sorted(members)
    }


def test_mixing_goes_by_the_length_of_the_parameters_alone():
    module = NormNet("momentum")
    trainer = federate(module, toy_data(), [FedGroup()], max_rounds=2)
    mixed = federate(module, toy_data(), [FedGroup(mix=0.3)], max_rounds=2)
    w, ours = ([t.server.models[f"cluster {k}"] for k in (1, 2)] for t in (trainer, mixed))
    names = [name for name, _ in module.named_parameters()]
    for own, other, found in ((w[0], w[1], ours[0]), (w[1], w[0], ours[1])):
        a = 0.3 / float(sum(other[name].double().square().sum() for name in names)) ** 0.5
        close(found, {n: v + a * other[n] if n in names else v for n, v in own.items()}, atol=1e-6)


def test_a_client_that_fails_in_the_cold_start_is_a_newcomer_later():
    data = quadratic_data(A, [[float("nan")] * 3, *B[1:]])
    with pytest.warns(UserWarning, match="client '0'"):
        trainer = federate(Quadratic(), data, [FedGroup()], max_rounds=2)
    assert sorted(groups(trainer).values(), key=min) == [NAMES - EVEN, EVEN - {"0"}]
    close(module_state(trainer.module("0")), {"w": torch.zeros(3, dtype=torch.float64)})


@pytest.mark.parametrize(("alpha", "participation"), [(1, 1.0), (20, 2)])
def test_moments_do_not_go_on_from_pre_training(alpha, participation):
    options = {"optimizer_state": "keep", "participation": participation}
    with pytest.raises(ValueError, match="lets a newcomer train twice in a round"):
        federate(Toy("adam"), toy_data(), [FedGroup(alpha=alpha)], **options)


def test_a_personal_model_takes_no_steps_in_pre_training_and_again_in_the_group():
    with pytest.raises(ValueError, match=r"and Ditto keeps .* use participation=1.0 and an alpha that takes all"):
        federate(Toy(), toy_data(), [FedGroup(), Ditto()], participation=2)
    _, spy = spied(Toy(), toy_data(), [FedGroup(), Ditto()], max_rounds=2)
    visits = [(update.round, update.client) for update in spy.updates]
    assert len(visits) == len(set(visits)) == 6


def test_who_fails_in_the_cold_start_does_not_train_what_it_keeps_twice_in_a_round():
    with pytest.warns(UserWarning, match="'1' failed"):
        trainer, spy = spied(Toy(), toy_data(), [FailsOnce("1", 0), FedGroup(), Ditto()], max_rounds=4)
    group = trainer.server.state["FedGroup"]["clusters"]["1"]
    visits = [(u.round, u.model) for u in spy.updates if u.client == "1" and u.steps]
    assert visits == [(1, COLD_START), (2, group), (3, group)]


@pytest.mark.parametrize("options", [{"num_clusters": 0}, {"alpha": 0}, {"pretrain": 0}, {"mix": -0.1}])
def test_senseless_settings_are_refused(options):
    with pytest.raises(ValueError, match=f"FedGroup got {next(iter(options))}="):
        FedGroup(**options)


# -- a whole federation by hand ----------------------------------------------------------------------------------------


def edc_by_hand(moved, count, unit):
    """Sheet B 1.5: the cosines of updates with the first singular vectors of all; by numpy, signs as they come."""
    lengths = np.linalg.norm(moved, axis=1, keepdims=True)
    _, _, v = np.linalg.svd(moved / lengths if unit else moved)
    return torch.from_numpy(moved / lengths @ v[:count].T)


@pytest.mark.parametrize(
    ("options", "share", "failing"),
    [
        ({"weighting": "uniform"}, 1.0, ("3", 0)),
        ({"alpha": 2, "pretrain": 2, "mix": 0.3, "mix_mean": True, "unit": False}, 5, ("5", 2, "")),
        ({"alpha": 2, "num_clusters": 3, "mix": 0.2}, 5, ("0", 1)),
    ],
    ids=["all at once", "late, mixed by mean", "three groups, mixed"],
)
def test_a_federation_by_hand(options, share, failing):
    """Cold start, newcomers, one failure, weights, mixing, from the sheet; who is visited is taken from the run."""
    data, start, callback = fixed_data([16, 24, 16, 8, 20, 8, 16], worlds=2), start_of(Toy), FedGroup(**options)
    with pytest.warns(UserWarning, match=f"'{failing[0]}' failed"):
        trainer, spy = spied(start, data, [FailsOnce(*failing), callback], max_rounds=6, participation=share)
    w0, m, rounds = module_state(start), callback.num_clusters, callback.pretrain or 1
    keys = [f"cluster {k + 1}" for k in range(m)]
    sizes = {client: len(splits["train"][0]) for client, splits in data.tensors.items()}
    where, models, paths, joined = {}, [], [], set()

    def pretrained(client):
        own = Plain(w0)
        for _ in range(rounds):
            found = own.trained(*data.tensors[client]["train"])
        return found

    def moved(state):
        return (flat(state) - flat(w0)).numpy()

    for number in range(6):
        came = dict.fromkeys(update.client for update in spy.updates if update.round == number)
        failed = {failing[0]} if number == failing[1] else set()
        came = [client for client in trainer.server.clients if client in came and client not in failed]
        if number == 0:
            assert len(came) + len(failed) == min(callback.alpha * m, 7)
            trained = {client: pretrained(client) for client in came}
            points = edc_by_hand(np.stack([moved(state) for state in trained.values()]), m, callback.unit)
            where = dict(zip(came, best_partition(points, m), strict=True))
            for k in range(m):
                members = [trained[client] for client in came if where[client] == k]
                models.append(mean_state([(1.0, state) for state in members]))
                paths.append(np.mean([moved(state) for state in members], 0))
        else:
            new = [client for client in came if client not in where]
            for client in new:
                delta = moved(pretrained(client))
                where[client] = int(np.argmax([delta @ path / np.linalg.norm(path) for path in paths]))
                joined.add(client)
            train = [client for client in came if client not in new or share != 1.0]
            for k in range(m):
                members = [client for client in train if where[client] == k]
                weights = sizes if callback.weighting == "samples" else dict.fromkeys(sizes, 1)
                parts = [(weights[c], Plain(models[k]).trained(*data.tensors[c]["train"])) for c in members]
                models[k] = mean_state(parts) if parts else models[k]
            if callback.mix:
                rates = [callback.mix / float(flat(model).norm()) for model in models]
                before = models
                models = []
                for k, own in enumerate(before):
                    others = [(rates[h], model) for h, model in enumerate(before) if h != k]
                    whole = 1 + sum(rate for rate, _ in others) if callback.mix_mean else 1
                    models.append({n: (v + sum(r * o[n] for r, o in others)) / whole for n, v in own.items()})
        assert spy.states[number]["FedGroup"]["clusters"] == {
            c: keys[where[c]] for c in trainer.server.clients if c in where
        }
    assert len(set(where.values())) == m and joined
    for key, model in zip(keys, models, strict=True):
        close(trainer.server.models[key], model, atol=1e-9, rtol=0)
    for client in trainer.server.clients:
        deployed = trainer.server.models[keys[where[client]]] if client in where else w0
        same(module_state(trainer.module(client)), deployed)
