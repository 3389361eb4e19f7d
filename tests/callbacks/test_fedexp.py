"""FedExP: sheet entry C5."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedlightning.callbacks import (
    FedAvg,
    FedAvgM,
    FedExP,
    FedLP,
    FedNova,
    FedPer,
    FedProx,
    PoissonSampling,
    TrimmedMean,
)
from fedlightning.callbacks.client_dp import ClientDP
from fedlightning.contract.messages import Update
from fedlightning.tensors import module_state
from fedlightning.testing.pairs import check_pair
from tests.callbacks.common import cut_and_resumed
from tests.conformance.case import Case, Kept
from tests.helpers import (
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

CASES = {"FedExP": Case(FedExP(), neutral=FedExP(eps=1e30, average_last=1))}
KEPT = {"FedExP": Kept("FedExP", server=("eta", "previous"))}

A = [[1.0, 2.0, 0.5], [3.0, 0.4, 1.0], [0.5, 1.5, 2.0]]
B = [[1.0, -1.0, 2.0], [-2.0, 3.0, 0.5], [0.5, 2.0, -1.0]]


def stepped(changes, eps=0.0, weights=None, **options):
    """The server's step from 0 along some clients' changes: what it returns, and ``eta_g``."""
    changes = torch.tensor(changes, dtype=torch.float64)
    weights = weights or [1.0] * len(changes)
    server = SimpleNamespace(
        state={}, trainable=["w"], model={"w": torch.zeros(changes.shape[1]).double()}, round=0,
        weight=lambda update: weights[int(update.client)],
    )  # fmt: skip
    method = FedExP(eps=eps, **options)
    for number, change in enumerate(changes):
        method.on_update(server, Update(0, str(number), state={"w": change}))
    mean = sum(p * c for p, c in zip(weights, changes, strict=True)) / sum(weights)
    return method.server_step(server, server.model, {"w": mean})["w"], server.state["FedExP"]["eta"]


def test_alike_changes_are_fedavgs():
    """(a)."""
    w, eta = stepped([[1.0, 2.0]] * 4)
    assert eta == 1.0 and w.tolist() == [1.0, 2.0]


def test_orthogonal_changes_of_one_length():
    """(b)."""
    w, eta = stepped(torch.eye(5).tolist())
    assert eta == pytest.approx(2.5, abs=1e-12) and w.tolist() == pytest.approx([0.5] * 5, abs=1e-12)
    assert stepped([[1.0, 0.0], [0.0, 1.0]])[1] == 1.0


@pytest.mark.parametrize("seed", range(4))
def test_the_step_is_never_shorter_than_the_mean_and_has_no_scale(seed):
    """(c), (e)."""
    changes = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)).double()
    eta = stepped(changes.tolist())[1]
    assert eta >= 1.0
    assert stepped((1e-3 * changes).tolist())[1] == pytest.approx(eta, rel=1e-9)
    assert stepped(changes.tolist(), eps=1e30)[1] == 1.0


def test_changes_that_cancel_out():
    """(d), and the pitfall: ``eps`` bounds the step, and without it a mean of 0 stays where it is."""
    assert stepped([[0.0, 0.0]] * 3)[0].tolist() == [0.0, 0.0]
    w, eta = stepped([[1.0, 0.0], [-1.0, 0.0]])
    assert eta == 1.0 and w.tolist() == [0.0, 0.0]
    assert stepped([[1.0, 0.0], [-1.0, 0.0]], eps=0.01)[1] == pytest.approx(1.0 / (2 * 2 * 0.01))
    assert stepped([[1.0, 0.0], [-1.0, 0.0]], eps=0.01, eps_per_client=False)[1] == pytest.approx(1.0 / (2 * 0.01))


def test_weights_are_those_of_the_mean():
    """``sum p_i ||Delta_i||^2 / (2 (||Dbar||^2 + m eps))`` by hand."""
    changes = torch.tensor([[3.0, 0.0], [0.0, 4.0], [-3.0, -4.0]]).double()
    p = torch.tensor([5.0, 2.0, 3.0]).double() / 10
    mean = p @ changes
    expected = float((p * changes.square().sum(1)).sum() / (2 * (mean.square().sum() + 3 * 0.1)))
    w, eta = stepped(changes.tolist(), eps=0.1, weights=[5.0, 2.0, 3.0])
    assert eta == pytest.approx(expected, rel=1e-12) and eta > 1.0
    close({"w": w}, {"w": expected * mean}, atol=1e-12)


def test_eps_decays_from_round_to_round():
    method = FedExP(eps=0.4, eps_decay=0.5, eps_per_client=False)
    assert [method.extrapolation(1.0, 0.0, 3, round=t) for t in range(3)] == pytest.approx([1.25, 2.5, 5.0])


def by_hand(a, b, spy, sizes, eps, lr, steps):
    """FedExP on quadratics, of which only who takes part is the run's."""
    w, models, etas = torch.zeros(len(a[0])).double(), [], []
    for number in range(len(spy.rounds)):
        ends, p = [], []
        for k in sorted(spy.of_round(number)):
            x, (slope, best) = w.clone(), (torch.tensor(rows[int(k)], dtype=torch.float64) for rows in (a, b))
            for _ in range(steps):
                x = x - lr * slope * (x - best)
            ends.append(w - x)
            p.append(sizes[k])
        total = sum(p)
        mean = sum(share * delta for share, delta in zip(p, ends, strict=True)) / total
        squares = sum(share * float(delta @ delta) for share, delta in zip(p, ends, strict=True)) / total
        etas.append(max(1.0, squares / (2 * (float(mean @ mean) + len(p) * eps))))
        w = w - etas[-1] * mean
        models.append(w)
    return models, etas


def test_training_is_what_the_formulas_say():
    sizes = {"0": 1, "1": 1, "2": 1}
    options = {"max_rounds": 5, "local_epochs": 8, "participation": 2}
    trainer, spy = spied(Quadratic(lr=0.2), quadratic_data(A, B), [FedExP(eps=1e-4)], **options)
    models, etas = by_hand(A, B, spy, sizes, 1e-4, 0.2, 8)
    assert max(etas) > 1.0
    for found, expected, state, eta in zip(spy.rounds, models, spy.states, etas, strict=True):
        close(found, {"w": expected}, atol=1e-10)
        assert state["FedExP"]["eta"] == pytest.approx(eta, rel=1e-9)
    close(module_state(trainer.server.global_module()), {"w": (models[-1] + models[-2]) / 2}, atol=1e-6)


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_with_a_large_eps_it_is_fedavg(make):
    module, data = make(), toy_data()
    runs = [federate(module, data, [cb], max_rounds=3) for cb in (FedAvg(), FedExP(eps=1e30))]
    same(*map(global_state, runs))


def test_buffers_are_averaged():
    """An extrapolated variance would be negative sooner or later."""
    data = toy_data()
    trainer, spy = spied(NormNet("sgd"), data, [FedExP(eps=0.0, weighting="uniform")], max_rounds=3, local_epochs=3)
    assert trainer.server.state["FedExP"]["eta"] > 1.0
    for name in ("net.1.running_var", "net.1.running_mean"):
        sent = [update.state[name].double() for update in spy.of_round(2).values()]
        close({name: global_state(trainer)[name]}, {name: sum(sent) / 3}, atol=1e-6)


def test_the_mean_of_the_last_two_models_is_deployed_and_training_goes_on_from_the_last():
    module, data = NormNet("sgd"), toy_data()
    trainer, spy = spied(module, data, [FedExP(eps=0.0)], max_rounds=3)
    alone = federate(module, data, [FedExP(eps=0.0, average_last=1)], max_rounds=3)
    same(global_state(trainer), global_state(alone))
    assert "previous" not in alone.server.state["FedExP"]
    names = {name for name, _ in module.named_parameters()}
    found = module_state(trainer.server.global_module())
    mean = {
        n: (spy.rounds[2][n].double() + spy.rounds[1][n].double()) / 2 if n in names else v for n, v in found.items()
    }
    close(found, mean, atol=1e-6)
    same(found, module_state(trainer.module("1")))
    assert differs(found, global_state(trainer))
    same(
        {n: v for n, v in found.items() if n not in names},
        {n: global_state(trainer)[n] for n in found if n not in names},
    )


def test_in_round_1_there_is_no_mean_with_the_untrained_model():
    trainer = federate(Toy("sgd"), toy_data(), [FedExP()], max_rounds=1)
    same(module_state(trainer.server.global_module()), global_state(trainer))


def test_stage_g_and_l1_score_the_deployed_model(tmp_path):
    trainer = federate(Toy("sgd"), toy_data(), [FedExP(eps=0.0)], tmp_path, max_rounds=3)
    rows = trainer.test(verbose=False)
    means = {row["stage"]: row["mean"] for row in rows if row["metric"] == "test_loss" and row["data"] == "local"}
    assert means["G"] == pytest.approx(means["L1"], abs=1e-6)


def test_a_round_in_which_nobody_takes_part_changes_nothing():
    _, spy = spied(Toy("sgd"), toy_data(), [FedExP(eps=0.0), PoissonSampling(0.4)], max_rounds=8)
    empty = [number for number in range(1, 8) if not spy.of_round(number)]
    assert empty and any(spy.of_round(number) for number in range(empty[-1]))
    for number in empty:
        same(spy.rounds[number], spy.rounds[number - 1])


def test_a_layer_that_stays_counts_in_no_norm():
    trainer, spy = spied(Toy("sgd"), toy_data(), [FedPer(personal=["net.3"]), FedExP(eps=0.0)], max_rounds=3)
    assert set(trainer.server.state["FedExP"]["previous"]) == {"net.0.weight", "net.0.bias"}
    assert trainer.server.global_module() is None
    assert not any(item.extras for item in (*spy.messages, *spy.updates))


@pytest.mark.slow
def test_a_cut_run_goes_on_bit_for_bit(tmp_path):
    options = {"max_rounds": 4, "participation": 2}
    whole, _, again = cut_and_resumed(tmp_path, Toy("sgd"), toy_data(), lambda: [FedExP(eps=0.0)], **options)
    same(*(module_state(trainer.server.global_module()) for trainer in (whole, again)))


def test_half_precision_stays_what_it_is():
    trainer = federate(Toy("sgd"), toy_data(), [FedExP(eps=0.0)], max_rounds=3, precision="bf16-true")
    assert {value.dtype for value in module_state(trainer.server.global_module()).values()} == {torch.bfloat16}


def test_the_order_of_the_list_says_nothing():
    check_pair(FedExP(), FedProx(mu=0.2))


@pytest.mark.parametrize(
    "other",
    [FedNova(), FedLP(), TrimmedMean(trim=0.4), FedAvgM(), ClientDP(delta=1e-3, noise_multiplier=1.0, noise_seed=0)],
    ids=lambda callback: callback.key,
)
def test_what_its_norms_would_not_see_is_refused(other):
    with pytest.raises(ValueError, match="FedExP"):
        federate(Toy("sgd"), toy_data(), [FedExP(), other], max_rounds=1)


@pytest.mark.parametrize(
    "options", [{"eps": -1.0}, {"eps_decay": 0.0}, {"average_last": 3}], ids=lambda o: next(iter(o))
)
def test_senseless_settings_are_refused(options):
    with pytest.raises(ValueError, match=f"FedExP got {next(iter(options))}="):
        FedExP(**options)
