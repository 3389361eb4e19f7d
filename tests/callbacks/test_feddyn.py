"""FedDyn: sheet entry C1."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from fedlightning.callbacks import (
    MOON,
    SCAFFOLD,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedLP,
    FedNova,
    FedPer,
    FedProx,
    PoissonSampling,
    TrimmedMean,
)
from fedlightning.callbacks.client_dp import ClientDP
from fedlightning.tensors import module_state
from fedlightning.testing.pairs import check_pair
from tests.callbacks.common import FailsOnce, absent_clients_rest, batches, cut_and_resumed
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    ToyData,
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
    "FedDyn": Case(FedDyn(), skip={"one_client": "with one client it extrapolates"}),
    "FedDyn scaled": Case(
        FedDyn(size_scaled=True, report="average"), skip={"one_client": "with one client it extrapolates"}
    ),
}
KEPT = {"FedDyn": Kept("FedDyn", server=("h",), client=("g",))}

A = [[1.0, 2.0, 0.5], [3.0, 0.4, 1.0], [0.5, 1.5, 2.0], [0.3, 1.0, 0.7], [2.0, 0.6, 1.1], [1.2, 0.9, 2.5]]
B = [[1.0, -1.0, 2.0], [-2.0, 3.0, 0.5], [0.5, 2.0, -1.0], [0.0, 1.0, 1.5], [-1.0, 0.5, 0.3], [1.7, -0.4, 0.8]]


def pooled(a, b):
    """The minimiser of the mean of all clients' objectives."""
    a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return (a * b).sum(0) / a.sum(0)


def gs(spy, number=-1):
    """``g_k`` of every client that has one, after a round."""
    return {client: r.state["FedDyn"]["g"] for client, r in spy.records[number].items() if "FedDyn" in r.state}


def by_hand(module, data, spy, alpha, scaled=False):
    """FedDyn in plain torch, of which only who takes part is the run's: the server's models, ``h`` and the ``g_k``."""
    theta = {name: p.detach().double() for name, p in module.named_parameters()}
    everybody = list(data.tensors)
    sizes = {k: len(data.tensors[k]["train"][0]) for k in everybody}
    strength = {k: alpha * sum(sizes.values()) / len(sizes) / sizes[k] if scaled else alpha for k in everybody}
    g = {k: {name: torch.zeros_like(p) for name, p in theta.items()} for k in everybody}
    h, models = {name: torch.zeros_like(p) for name, p in theta.items()}, []
    for number in range(len(spy.rounds)):
        ends = {}
        for k in sorted(spy.of_round(number)):
            model = copy.deepcopy(module)
            model.load_state_dict({name: p.float() for name, p in theta.items()})
            parameters = dict(model.named_parameters())
            for x, y in batches(data, k, round=number, epochs=2):
                loss = F.cross_entropy(model(x), y)
                for name, p in parameters.items():
                    pull = 0.5 * strength[k] * (p - theta[name].float()).square().sum()
                    loss = loss - (g[k][name].float() * p).sum() + pull
                gradients = torch.autograd.grad(loss, list(parameters.values()))
                with torch.no_grad():
                    for p, gradient in zip(parameters.values(), gradients, strict=True):
                        p -= module.lr * gradient
            ends[k] = {name: p.detach().double() for name, p in parameters.items()}
        for name in theta:
            h[name] = h[name] - alpha / len(everybody) * sum(end[name] - theta[name] for end in ends.values())
            for k, end in ends.items():
                g[k][name] = g[k][name] - strength[k] * (end[name] - theta[name])
        theta = {name: sum(end[name] for end in ends.values()) / len(ends) - h[name] / alpha for name in theta}
        models.append(theta)
    return models, h, g


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("scaled", [False, True])
def test_training_is_what_the_formulas_say(scaled, engine):
    module, data = Toy("sgd"), toy_data((24, 40, 16, 8))
    options = {"max_rounds": 3, "local_epochs": 2, "participation": 2, "engine": engine}
    trainer, spy = spied(module, data, [FedDyn(alpha=0.5, size_scaled=scaled)], **options)
    assert len({frozenset(spy.of_round(number)) for number in range(3)}) > 1
    models, h, g = by_hand(module, data, spy, 0.5, scaled)
    for found, expected in zip(spy.rounds, models, strict=True):
        close(found, expected, atol=5e-6)
    close(trainer.server.state["FedDyn"]["h"], h, atol=5e-6)
    for client, found in gs(spy).items():
        close(found, g[client], atol=5e-6)


@pytest.mark.parametrize("participation", [1.0, 2])
def test_h_is_the_mean_of_all_clients_g_after_every_round(participation):
    """(a): also of clients that were never there, whose ``g_k`` is 0."""
    module, data = NormNet("sgd"), toy_data((24, 40, 16, 8))
    _, spy = spied(module, data, [FedDyn(alpha=0.3)], max_rounds=4, participation=participation)
    for number, state in enumerate(spy.states):
        h, own = state["FedDyn"]["h"], gs(spy, number)
        assert set(h) == {name for name, _ in module.named_parameters()}
        close(h, {name: sum(g[name].double() for g in own.values()) / 4 for name in h}, atol=1e-6)
        assert any(float(value.abs().max()) > 0 for value in h.values())


def test_round_1_is_uniform_fedprox_before_the_correction():
    """(b): ``theta + h / alpha`` is the mean of the proximal models; ``report="average"`` gives it as stage G."""
    module, data = NormNet("sgd"), toy_data()
    prox = federate(module, data, [FedProx(mu=0.5, weighting="uniform")], max_rounds=1, local_epochs=2)
    dyn = federate(module, data, [FedDyn(alpha=0.5, report="average")], max_rounds=1, local_epochs=2)
    found, h = global_state(dyn), dyn.server.state["FedDyn"]["h"]
    mean = global_state(prox)
    close({name: found[name] + h[name].float() / 0.5 for name in h}, {name: mean[name] for name in h}, atol=1e-6)
    close(module_state(dyn.server.global_module()), mean, atol=1e-6)
    close(module_state(dyn.module("0")), mean, atol=1e-6)  # what a client deploys
    same({n: v for n, v in found.items() if n not in h}, {n: v for n, v in mean.items() if n not in h})  # buffers


def test_reporting_the_average_does_not_change_training():
    module, data = Toy("sgd"), toy_data()
    same(*(global_state(federate(module, data, [FedDyn(report=r)], max_rounds=3)) for r in ("model", "average")))


@pytest.mark.slow
def test_exact_solves_reach_the_pooled_minimiser_where_fedavg_stalls():
    """(c), (d): three of six clients a round; every ``g_k`` becomes the gradient there, and they add up to 0."""
    options = {"max_rounds": 120, "local_epochs": 40, "participation": 3}
    best = pooled(A, B)
    trainer, spy = spied(Quadratic(lr=0.25), quadratic_data(A, B), [FedDyn(alpha=2.0)], **options)
    torch.testing.assert_close(global_state(trainer)["w"], best, atol=1e-10, rtol=0)
    total = 0.0
    for client, g in gs(spy).items():
        a, b = (torch.tensor(rows[int(client)], dtype=torch.float64) for rows in (A, B))
        slope = a * (best - b)
        torch.testing.assert_close(g["w"], slope, atol=1e-9, rtol=0)
        total = total + g["w"]
    assert float(total.abs().max()) < 1e-9
    plain = federate(
        Quadratic(lr=0.3), quadratic_data(A, B), [FedAvg(weighting="uniform")], max_rounds=20, local_epochs=60
    )
    assert float((global_state(plain)["w"] - best).abs().max()) > 0.05


def test_a_round_in_which_nobody_takes_part_changes_nothing():
    module, data = Toy("sgd"), toy_data()
    _, spy = spied(module, data, [FedDyn(), PoissonSampling(0.4)], max_rounds=8)
    empty = [number for number in range(1, 8) if not spy.of_round(number)]
    assert empty and any(spy.of_round(number) for number in range(empty[-1]))
    for number in empty:
        same(spy.rounds[number], spy.rounds[number - 1])
        same(*(spy.states[n].get("FedDyn", {}).get("h", {}) for n in (number, number - 1)))


def test_absent_clients_keep_what_they_have():
    _, spy = spied(Toy("sgd"), toy_data(), [FedDyn()], max_rounds=4, participation=1)
    absent_clients_rest(spy)


def test_a_client_that_fails_keeps_its_g_and_adds_nothing_to_h():
    with pytest.warns(UserWarning, match="the line is cut"):
        _, spy = spied(Toy("sgd"), toy_data(), [FedDyn(), FailsOnce("1", 1)], max_rounds=3)
    same(gs(spy, 0)["1"], gs(spy, 1)["1"])
    for number, state in enumerate(spy.states):
        own = gs(spy, number)
        mean = {name: sum(g[name].double() for g in own.values()) / 3 for name in own["0"]}
        close(state["FedDyn"]["h"], mean, atol=1e-6)


@pytest.mark.slow
def test_a_cut_run_goes_on_bit_for_bit(tmp_path):
    options = {"max_rounds": 3, "participation": 2}
    whole, _, again = cut_and_resumed(tmp_path, Toy("sgd"), toy_data(), lambda: [FedDyn()], **options)
    same(global_state(whole), global_state(again))
    same(whole.server.state["FedDyn"]["h"], again.server.state["FedDyn"]["h"])


def test_a_client_that_joins_leaves_h_the_mean():
    trainer, spy = spied(Toy("sgd"), toy_data(), [FedDyn()], max_rounds=2)
    server, method = trainer.server, trainer.server.callbacks.find(FedDyn)
    server.num_samples["new"] = 5
    method.facts.newcomers.join(server, ["new"])
    own = gs(spy)
    for name, value in server.state["FedDyn"]["h"].items():
        close({name: value}, {name: sum(g[name].double() for g in own.values()) / 4}, atol=1e-6)
    assert FedDyn(size_scaled=True).facts.newcomers.join is False  # strengths go by the mean size


def test_private_parameters_are_neither_pulled_nor_counted():
    trainer, spy = spied(Toy("sgd"), toy_data(), [FedPer(personal=["net.3"]), FedDyn()], max_rounds=2)
    names = {"net.0.weight", "net.0.bias"}
    assert set(trainer.server.state["FedDyn"]["h"]) == names
    assert all(set(g) == names for g in gs(spy).values())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_what_is_kept_is_not_in_half_precision(precision):
    trainer, spy = spied(Toy("sgd"), toy_data(), [FedDyn()], max_rounds=2, precision=precision)
    assert all(g.dtype == torch.float32 for own in gs(spy).values() for g in own.values())
    assert all(h.dtype == torch.float64 for h in trainer.server.state["FedDyn"]["h"].values())
    start = module_state(trainer.server.module)
    assert all(value.dtype == start[name].dtype for name, value in global_state(trainer).items())


def test_what_travels_is_fedavgs_and_a_strength_where_clients_have_their_own():
    _, spy = spied(Toy("sgd"), toy_data(), [FedDyn()], max_rounds=1)
    assert not any(item.extras for item in (*spy.messages, *spy.updates))
    _, spy = spied(Toy("sgd"), toy_data(), [FedDyn(alpha=0.6, size_scaled=True)], max_rounds=1)
    sent = {message.client: message.extras["FedDyn"]["alpha"] for message in spy.messages}
    assert sent == pytest.approx({"0": 0.6 * 80 / 3 / 24, "1": 0.6 * 80 / 3 / 40, "2": 0.6 * 80 / 3 / 16})
    assert not any(update.extras for update in spy.updates)


@pytest.mark.parametrize("other", [FedProx(mu=0.2), MOON()], ids=lambda callback: callback.key)
def test_the_order_of_the_list_says_nothing(other):
    check_pair(FedDyn(), other)


@pytest.mark.parametrize(
    "other",
    [SCAFFOLD(), FedNova(), FedLP(), TrimmedMean(trim=0.4), FedAvgM(), FedAvg(weighting="samples"),
     ClientDP(delta=1e-3, noise_multiplier=1.0, noise_seed=0)],
    ids=lambda callback: callback.key,
)  # fmt: skip
def test_what_h_would_not_see_is_refused(other):
    with pytest.raises(ValueError, match=r"FedDyn"):
        federate(Toy("sgd"), toy_data(), [FedDyn(), other], max_rounds=1)


def test_wrong_use_is_refused_or_warned_of():
    with pytest.raises(ValueError, match=r"FedDyn got alpha=0.*Use FedAvg"):
        FedDyn(alpha=0)
    with pytest.raises(ValueError, match=r"lr \* alpha = 3 of its way.*below 0.2"):
        federate(Toy("sgd", lr=0.3), toy_data(), [FedDyn(alpha=10.0)])
    for module, options, words in (
        (Toy("adam"), {}, "optimizer is Adam. Another rescales"),
        (Toy("momentum"), {}, "SGD with momentum. Another rescales"),
        (Toy("sgd"), {"gradient_clip_val": 1.0}, "gradient_clip_val=1.0 cuts a step"),
    ):
        with pytest.warns(UserWarning, match=words):
            federate(module, toy_data([8]), [FedDyn()], max_rounds=1, **options)


def test_clients_of_unequal_samples_count_once():
    """The mean is uniform, whatever the sizes."""
    rows = [[torch.tensor([table[i]] * (5 if i else 1), dtype=torch.float64) for table in (A, B)] for i in range(2)]
    data = ToyData({str(i): dict.fromkeys(("train", "val", "test"), own) for i, own in enumerate(rows)})
    trained = federate(Quadratic(lr=0.3), data, [FedDyn(alpha=1.0)], max_rounds=60, local_steps=40)
    torch.testing.assert_close(global_state(trained)["w"], pooled(A[:2], B[:2]), atol=1e-8, rtol=0)


def test_a_client_that_joins_a_resumed_run_leaves_h_the_mean(tmp_path):
    module, options = Toy("sgd"), {"max_rounds": 4, "participation": 2}
    cut = make_trainer(tmp_path, [FedDyn()], max_time={"seconds": 0}, **options)
    cut.fit(module, datamodule=toy_data((24, 40, 16)))
    again = make_trainer(tmp_path, [FedDyn()], **options)
    again.fit(module, datamodule=toy_data((24, 40, 16, 8)), resume="last", allow_new_clients=True)
    own = [again.store.get(client).state.get("FedDyn", {}).get("g") for client in "0123"]
    for name, value in again.server.state["FedDyn"]["h"].items():
        mean = sum(g[name].double() for g in own if g) / 4
        close({name: value}, {name: mean}, atol=1e-6)
