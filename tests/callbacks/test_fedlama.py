"""FedLAMA: sheet entry 26."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from torch.nn import functional as F

from fedlightning import FederatedCallback
from fedlightning.callbacks import FedAvg, FedLAMA, FedPer, FedProx, GlobalCheckpoint, LocalCheckpoint
from fedlightning.callbacks.fedlama import less_critical
from fedlightning.tensors import module_state
from fedlightning.testing.runs import assert_same
from tests.callbacks.common import MAKES, SIZES, A, B, deployed
from tests.conformance.case import Case, Kept
from tests.helpers import (
    CLASSES,
    FEATURES,
    NormNet,
    Quadratic,
    Toy,
    close,
    differs,
    federate,
    global_state,
    quadratic_data,
    same,
    spied,
    toy_data,
)

CASES = {"FedLAMA": Case(FedLAMA()), "FedLAMA slow": Case(FedLAMA(phi=2, tau=2))}
KEPT = {"FedLAMA": Kept("FedLAMA", server=("averaged", "d", "participants", "seen", "tau"))}


class Three(Toy):
    """Three layers of different sizes: net.0, net.2 and net.4."""

    def make(self, hidden, dropout):
        layers = [(FEATURES, hidden), (hidden, 5), (5, CLASSES)]
        parts = [part for i, o in layers for part in (torch.nn.Linear(i, o), torch.nn.Tanh())]
        return torch.nn.Sequential(*parts[:-1])


LAYERS = {f"net.{i}": [f"net.{i}.weight", f"net.{i}.bias"] for i in (0, 2, 4)}


def l1(trainer):
    return [deployed(trainer, client) for client in trainer.server.clients]


# -- reductions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MAKES)
def test_with_factor_one_it_is_fedavg(make):
    module, data = make(), toy_data()
    same(*(global_state(federate(module, data, [cb], max_rounds=3)) for cb in (FedAvg(), FedLAMA(phi=1))))


@pytest.mark.parametrize("rounds", [4, 5])
def test_with_factor_one_and_interval_two_it_is_fedavg_of_twice_the_work(rounds):
    """No local step is lost between the averages, nor in the last round that comes too early."""
    data = quadratic_data(A, B)
    ours = global_state(federate(Quadratic(), data, [FedLAMA(phi=1, tau=2)], max_rounds=rounds, local_steps=3))
    work = [6] * (rounds // 2) + [3] * (rounds % 2)
    w = torch.zeros(3, dtype=torch.float64)
    a, b = (torch.tensor(rows, dtype=torch.float64) for rows in (A, B))
    for steps in work:
        w = torch.stack([b[i] + (1 - 0.1 * a[i]) ** steps * (w - b[i]) for i in (0, 1)]).mean(0)
    torch.testing.assert_close(ours["w"], w, atol=1e-12, rtol=0)


def by_hand(module, data, intervals, rounds, period):
    """Full-batch SGD, a step a round; layer ``l`` is averaged as the table of its interval says and else left alone."""
    models = {client: copy.deepcopy(module) for client in data.tensors}
    sizes = {client: len(data.tensors[client]["train"][0]) for client in models}
    for number in range(1, rounds + 1):
        for client, model in models.items():
            x, y = data.tensors[client]["train"]
            gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= module.lr * gradient
        for layer, names in LAYERS.items():
            if number % intervals[number][layer] == 0 or number % period == 0 or number == rounds:
                for name in names:
                    mean = sum(sizes[c] * m.state_dict()[name] for c, m in models.items()) / sum(sizes.values())
                    for model in models.values():
                        model.state_dict()[name].copy_(mean)
    return {client: module_state(model) for client, model in models.items()}


@pytest.mark.parametrize(("phi", "tau", "rounds"), [(2, 1, 8), (3, 2, 15), (4, 1, 10)])
def test_training_is_what_the_interval_table_says(phi, tau, rounds):
    module, data = Three(lr=0.5), toy_data(SIZES, batch_size=64)
    trainer, spy = spied(module, data, [FedLAMA(phi=phi, tau=tau)], max_rounds=rounds)
    start = dict.fromkeys(LAYERS, tau)
    tables = [start] + [state["FedLAMA"]["tau"] for state in spy.states]
    assert any(len(set(table.values())) == 2 for table in tables), "intervals never differ"
    wanted = by_hand(module, data, {n: tables[n - 1] for n in range(1, rounds + 1)}, rounds, phi * tau)
    for client, state in wanted.items():
        close(module_state(trainer.module(client)), state, atol=2e-6)
    close(global_state(trainer), wanted["0"], atol=2e-6)


# -- what travels ------------------------------------------------------------------------------------------------------


def test_due_layers_travel_and_others_stand_still_at_the_server():
    trainer, spy = spied(Three("adam"), toy_data(SIZES), [FedLAMA(phi=3)], max_rounds=11)
    size = {layer: sum(global_state(trainer)[n].numel() for n in names) for layer, names in LAYERS.items()}
    tau, up, before = dict.fromkeys(LAYERS, 1), 0, set(LAYERS)
    old = module_state(trainer.server.blueprint.build("server"))
    for number in range(11):
        due = {name for name in LAYERS if (number + 1) % tau[name] == 0 or (number + 1) % 3 == 0 or number == 10}
        for update in spy.of_round(number).values():
            assert set(update.state) == {name for layer in due for name in LAYERS[layer]}
        for message in [m for m in spy.messages if m.round == number and m.work != 0]:
            assert set(message.state) == {name for layer in before for name in LAYERS[layer]}
        up += 4 * 3 * sum(size[layer] for layer in due)
        for layer, names in LAYERS.items():
            for name in names:
                assert torch.equal(old[name], spy.rounds[number][name]) == (layer not in due)
        old, before, tau = spy.rounds[number], due, spy.states[number]["FedLAMA"]["tau"]
    assert trainer.server.costs.bytes_up == up


@pytest.mark.parametrize("rounds", [4, 8, 5, 7])
def test_all_clients_are_equal_when_all_is_averaged_and_at_the_end(rounds):
    trainer = federate(NormNet("adam"), toy_data(SIZES), [FedLAMA(phi=2, tau=2)], max_rounds=rounds)
    for state in l1(trainer):
        same(state, global_state(trainer))


def test_between_averages_clients_keep_their_own_layers():
    _, spy = spied(Three("adam"), toy_data(SIZES), [FedLAMA(phi=2, tau=2)], max_rounds=3)
    assert all(not update.state for update in spy.of_round(0).values())
    kept = [record.personal for record in spy.records[0].values()]
    assert set(kept[0]) == {name for names in LAYERS.values() for name in names}
    assert differs(kept[0], kept[1])


def test_participants_change_only_after_a_full_average():
    _, spy = spied(Toy("adam"), toy_data([16] * 6), [FedLAMA(phi=2, tau=2)], max_rounds=12, participation=2)
    groups = [frozenset(spy.of_round(number)) for number in range(12)]
    assert all(groups[n] == groups[4 * (n // 4)] for n in range(12))
    assert len({groups[0], groups[4], groups[8]}) > 1


class Fails(FederatedCallback):
    """Client 1 does not get through round ``round``."""

    def __init__(self, round):
        self.round = round

    def on_visit_start(self, client):
        if client.id == "1" and client.round == self.round:
            raise RuntimeError("gone")


@pytest.mark.filterwarnings("ignore:Round")
@pytest.mark.parametrize("failure", [0, 1, 2, 3, 4])
def test_a_client_that_failed_gets_what_it_missed(failure):
    """Its next message holds every layer averaged since; when all is averaged it is like the others."""
    trainer, spy = spied(Three("adam"), toy_data(SIZES), [FedLAMA(phi=4), Fails(failure)], max_rounds=8)
    for number in range(8):
        own = spy.of_round(number)
        assert ("1" in own) == (number != failure)
    got, other = ({m.round: set(m.state) for m in spy.messages if m.client == c and m.work != 0} for c in ("1", "0"))
    assert got[failure + 1] >= other[failure] | other[failure + 1]
    for state in l1(trainer):
        same(state, global_state(trainer))


# -- discrepancy and intervals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("make", [lambda: Three("adam"), lambda: NormNet("momentum")])
def test_the_discrepancy_is_the_definition(make, weighting):
    """d_l = mean_i ||u_l - x_il||^2 / (tau_l dim_l), over parameters, from what came up."""
    trainer, spy = spied(make(), toy_data(SIZES), [FedLAMA(phi=2, weighting=weighting)], max_rounds=6)
    parameters = {name for name, _ in trainer.server.module.named_parameters()}
    weights = SIZES if weighting == "samples" else dict.fromkeys(SIZES, 1)
    for number in range(6):
        tau = (
            dict.fromkeys(spy.states[0]["FedLAMA"]["tau"], 1)
            if number == 0
            else spy.states[number - 1]["FedLAMA"]["tau"]
        )
        for layer, d in spy.states[number]["FedLAMA"]["d"].items():
            names = [n for n in parameters if n.startswith(layer) or (layer == "net.0" and n.startswith("net.1."))]
            updates = spy.of_round(number)
            if not set(names) <= set(updates["0"].state):
                assert d == spy.states[number - 1]["FedLAMA"]["d"][layer]
                continue
            total = size = 0.0
            for name in names:
                x = {c: u.state[name].double() for c, u in updates.items()}
                u = sum(weights[c] * value for c, value in x.items()) / sum(weights.values())
                total += sum(weights[c] * float((value - u).square().sum()) for c, value in x.items())
                size += u.numel()
            assert d == pytest.approx(total / sum(weights.values()) / (tau[layer] * size), rel=1e-4)


def brute_cut(d, sizes):
    """The authors' loop, with exact sums over every prefix."""
    order = sorted(range(len(d)), key=lambda i: (d[i], i))
    for count in range(1, len(order) + 1):
        delta = sum(d[i] * sizes[i] for i in order[:count]) / sum(d[i] * sizes[i] for i in order)
        if 1 - sum(sizes[i] for i in order[:count]) / sum(sizes) < delta:
            return order[:count]
    return order


def test_the_cut_is_where_the_curves_cross():
    torch.manual_seed(0)
    for count in (1, 2, 3, 5, 9):
        for _ in range(20):
            d, sizes = torch.rand(count).tolist(), torch.randint(1, 100, (count,)).tolist()
            assert less_critical(d, sizes, "crossing") == brute_cut(d, sizes)
            nearest, crossing = (less_critical(d, sizes, cut) for cut in ("nearest", "crossing"))
            assert nearest == crossing[: len(nearest)] and len(crossing) - len(nearest) <= 1


def test_equal_discrepancies_give_half_the_mass_the_long_interval_by_index():
    for d in (0.0, 2.5):
        assert less_critical([d] * 6, [4] * 6, "nearest") == [0, 1, 2]
        assert less_critical([d] * 5, [4] * 5, "crossing") == [0, 1, 2]


def test_small_discrepancies_go_first_and_large_ones_stay_short():
    assert less_critical([9.0, 0.1, 0.1, 9.0], [10, 10, 10, 10], "crossing") == [1, 2, 0]
    assert less_critical([9.0, 0.1, 0.1, 9.0], [10, 10, 10, 10], "nearest") in ([1, 2], [1, 2, 0])
    assert less_critical([100.0, 0.001], [1, 1000], "crossing") == [1]


# -- around it ---------------------------------------------------------------------------------------------------------


def test_there_is_a_global_model_in_every_round(tmp_path):
    trainer = federate(
        Toy("adam"), toy_data(SIZES), [GlobalCheckpoint(), FedLAMA(phi=3), LocalCheckpoint()], tmp_path, max_rounds=4
    )
    assert {row.round for row in trainer.rows if row.stage == "G"} == {1, 2, 3, 4}


@pytest.mark.parametrize(("phi", "again"), [(4, True), (3, False)])
def test_a_run_made_longer_is_the_longer_run(tmp_path, phi, again):
    """Its last round averaged everything before its time, and is done again; where it was time for that, it is not."""
    module, data = Three(), toy_data(SIZES)

    def run(name, rounds, **options):
        return federate(
            module, data, [FedLAMA(phi=phi)], tmp_path / name, max_rounds=rounds, save_state=1, evaluation=1, **options
        )

    whole, path = run("whole", 5), run("short", 3).run.path
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        longer = run("short", 5, resume=path)
    told = (
        "Round 3 is the next one: the run in .* after round 3, which averaged all layers \\(FedLAMA\\), and in a longer"
    )
    assert any(re.match(told, str(warning.message)) for warning in caught) == again
    assert_same(whole, longer, f"phi={phi}", rows=again)  # else it has the test scores of round 3 too


def test_composes_with_a_private_head_and_a_proximal_term():
    trainer, spy = spied(Three("adam"), toy_data(SIZES), [FedLAMA(), FedPer(), FedProx()], max_rounds=4, evaluation=1)
    assert not any(name.startswith("net.4") for item in (*spy.messages, *spy.updates) for name in item.state)
    assert trainer.server.global_module() is None


def test_wrong_use_is_refused():
    for arguments, words in (({"phi": 0}, "phi=0"), ({"tau": 1.5}, "tau=1.5"), ({"cut": "half"}, "cut='half'")):
        with pytest.raises(ValueError, match=words):
            FedLAMA(**arguments)
