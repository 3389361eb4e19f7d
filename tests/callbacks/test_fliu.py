"""FLIU: sheet entry 22."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from fedlightning.callbacks import FLIU, FedAvg, FedPer, Local
from fedlightning.tensors import module_state, select, subtract
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Toy,
    close,
    differs,
    federate,
    global_state,
    same,
    spied,
    toy_data,
)

CASES = {"FLIU": Case(FLIU()), "FLIU fixed": Case(FLIU(gamma=0.5))}
KEPT = {"FLIU": Kept("FLIU", client=("theta",))}

NAMES = ("0", "1", "2")


def l1(trainer):
    return {client: module_state(trainer.module(client)) for client in NAMES}


def floats(state):
    return {name: value for name, value in state.items() if value.is_floating_point()}


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_without_own_share_it_is_uniform_fedavg(make):
    module, data = make(), toy_data()
    runs = [federate(module, data, [cb], max_rounds=3) for cb in (FLIU(gamma=0.0), FedAvg(weighting="uniform"))]
    same(*map(global_state, runs))
    for client in NAMES:
        same(*(module_state(run.module(client)) for run in runs))


def test_with_only_own_share_it_is_local():
    module, data = NormNet("adam"), toy_data([24, 24, 24])
    alone = federate(module, data, [Local()], max_rounds=3, optimizer_state="reset")
    ours = federate(module, data, [FLIU(gamma=1.0)], max_rounds=3)
    for client, state in l1(ours).items():
        same(floats(state), floats(module_state(alone.module(client))))


def test_the_blend_after_a_round():
    """(c): mean L1 == Theta, and theta_k(L1) - Theta == gamma (theta_k(L2) - Theta)."""
    trainer, spy = spied(NormNet("adam"), toy_data(), [FLIU(gamma=0.3)], max_rounds=2)
    theta, blended = global_state(trainer), l1(trainer)
    close(floats(theta), {n: sum(s[n].double() for s in blended.values()) / 3 for n in floats(theta)})
    for client, state in blended.items():
        trained = floats(spy.of_round(1)[client].state)
        ours = subtract(state, floats(theta))
        close(ours, {name: 0.3 * (value - theta[name]) for name, value in trained.items()}, atol=1e-6)
        assert torch.equal(state["net.1.num_batches_tracked"], theta["net.1.num_batches_tracked"])


def test_the_second_round_starts_from_the_blend():
    module, data = Toy("sgd", lr=0.0), toy_data()
    data.setup("fit")
    _trainer, spy = spied(module, data, [Shaken(), FLIU(gamma=0.25)], max_rounds=2)
    first, theta = spy.of_round(0), spy.rounds[0]
    for client, update in spy.of_round(1).items():
        blend = {n: 0.25 * first[client].state[n] + 0.75 * theta[n] for n in theta}
        close(update.state, {n: v + (1.0 + int(client)) for n, v in blend.items()}, atol=1e-5)


class Shaken(FedAvg):
    """Moves every client's model by a number of its own, in place of training."""

    def __init__(self):
        super().__init__("uniform")

    def on_train_end(self, trainer, pl_module):
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter += 1.0 + int(self.client.id)


@pytest.mark.parametrize(
    ("samples", "gamma"),
    [(50, 0.1), (51, 0.25), (100, 0.25), (101, 0.5), (500, 0.5), (501, 0.75), (1000, 0.75), (1001, 0.9)],
)
def test_the_adaptive_share_by_exact_comparisons(samples, gamma):
    """(e), with nbar = 100 in three ways."""
    for clients in (20, 100, 7):
        assert FLIU().gamma_of(samples, 100 * clients, clients) == gamma


def test_the_adaptive_share_grows_with_the_samples():
    shares = [FLIU().gamma_of(n, 100 * 12, 12) for n in range(1, 1200)]
    assert shares == sorted(shares)
    assert set(shares) == {0.1, 0.25, 0.5, 0.75, 0.9}


def test_equal_sizes_and_one_sample_more():
    assert FLIU().gamma_of(24, 72, 3) == 0.25
    assert FLIU().gamma_of(25, 73, 3) == 0.5


def test_the_adaptive_share_acts():
    """24, 40 and 16 of 80 samples: nbar = 26.67, so the shares are 0.25, 0.5 and 0.25."""
    trainer, spy = spied(Toy("adam"), toy_data(), [FLIU()], max_rounds=1)
    theta = global_state(trainer)
    for client, gamma in zip(NAMES, (0.25, 0.5, 0.25), strict=True):
        trained = spy.of_round(0)[client].state
        close(l1(trainer)[client], {n: gamma * trained[n] + (1 - gamma) * theta[n] for n in theta}, atol=1e-6)
    assert spy.messages[-1].extras["FLIU"] == {"total_samples": 80, "num_clients": 3}


def test_an_absent_client_keeps_its_model_and_blends_it_with_the_present_one():
    trainer, spy = spied(Toy("adam"), toy_data(), [FLIU(gamma=0.5)], max_rounds=4, participation=1)
    latest = {}
    for number in range(4):
        for client in NAMES:
            if client in spy.of_round(number):
                latest[client] = spy.of_round(number)[client].state
            elif client in latest:
                assert spy.records[number][client] is spy.records[number - 1][client]
    theta = global_state(trainer)
    for client in NAMES:
        own = latest.get(client, theta)
        close(l1(trainer)[client], {n: 0.5 * own[n] + 0.5 * theta[n] for n in theta}, atol=1e-6)


def test_without_a_real_step_there_is_nothing_new_to_keep():
    """Every step skipped by the gradient scaler: what the client held was Theta, not a model of its own."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    with pytest.warns(UserWarning, match="took no real step"):
        trainer, _spy = spied(Toy("sgd"), toy_data([8, 8]), [FLIU()], max_rounds=1, plugins=plugins)
    assert trainer.store.get("0").visits == 1
    assert "FLIU" not in trainer.store.get("0").state


def test_looking_at_a_client_does_not_blend_twice():
    trainer, _spy = spied(Toy("adam"), toy_data(), [FLIU(gamma=0.5)], max_rounds=2)
    record = trainer.store.get("0")
    first = l1(trainer)
    second = l1(trainer)
    for client in NAMES:
        same(first[client], second[client])
    assert trainer.store.get("0") is record


def test_under_fedavg_l1_is_the_global_model():
    trainer = federate(NormNet("adam"), toy_data(), max_rounds=2)
    for state in l1(trainer).values():
        same(state, global_state(trainer))


def test_composes_with_a_personal_head():
    trainer, spy = spied(Toy("adam"), toy_data(), [FedPer(), FLIU(gamma=0.5)], max_rounds=2)
    body = {"net.0.weight", "net.0.bias"}
    for item in (*spy.messages, *spy.updates):
        assert set(item.state) == body
    states = l1(trainer)
    assert differs(select(states["0"], body), select(states["1"], body))


@pytest.mark.parametrize("gamma", [-0.1, 1.5, "half"])
def test_a_senseless_share_is_refused(gamma):
    with pytest.raises(ValueError, match=rf"FLIU got gamma={gamma!r}. Use a number in \[0, 1\], or 'adaptive'"):
        FLIU(gamma=gamma)
