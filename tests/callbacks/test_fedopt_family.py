"""FedYogi and FedAdagrad: sheet entry 6 (FedAdam and their base are in test_fedopt.py)."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from fedlightning.callbacks import FedAdagrad, FedAvgM, FedYogi
from fedlightning.tensors import module_state
from tests.helpers import NormNet, Toy, federate, global_state, mean_of, same, spied, toy_data

BOTH = [FedYogi, FedAdagrad]


def steps(callback, answers, start=2.0):
    """The scalar's values and the second moments, by clients that answer so in turn."""
    server = SimpleNamespace(state={}, trainable=["x"], combining="global")
    model, xs, vs = {"x": torch.tensor([start], dtype=torch.float64)}, [start], []
    for answer in answers:
        model = callback.server_step(server, model, {"x": torch.tensor([answer], dtype=torch.float64)})
        xs.append(float(model["x"]))
        vs.append(float(server.state[callback.key]["v"]["x"]))
    return xs, vs


def by_hand(rule, answers, *, eta, beta1, tau, x=2.0):
    """The paper's loop over plain numbers."""
    m, v, xs, vs = 0.0, tau**2, [x], []
    for answer in answers:
        delta = answer - x
        m = beta1 * m + (1 - beta1) * delta
        v = rule(v, delta**2)
        x += eta * m / (math.sqrt(v) + tau)
        xs.append(x)
        vs.append(v)
    return xs, vs


ANSWERS = [0.1, 3.0, 2.0, -4.0, 1.0, 1.0, 0.0, 5.0] * 3


def test_yogi_follows_the_papers_rule():
    def rule(v, square):
        sign = (v > square) - (v < square)
        return v - 0.2 * square * sign

    xs, vs = steps(FedYogi(server_lr=0.3, beta1=0.6, beta2=0.8, tau=1e-2), ANSWERS)
    expected = by_hand(rule, ANSWERS, eta=0.3, beta1=0.6, tau=1e-2)
    assert xs == pytest.approx(expected[0], abs=1e-12)
    assert vs == pytest.approx(expected[1], abs=1e-12)


def test_adagrad_follows_the_papers_rule():
    xs, vs = steps(FedAdagrad(server_lr=0.3, beta1=0.5, tau=1e-2), ANSWERS)
    expected = by_hand(lambda v, square: v + square, ANSWERS, eta=0.3, beta1=0.5, tau=1e-2)
    assert xs == pytest.approx(expected[0], abs=1e-12)
    assert vs == pytest.approx(expected[1], abs=1e-12)


def test_adagrad_is_torchs_without_momentum():
    xs, _ = steps(FedAdagrad(server_lr=0.4, tau=1e-10, v_init=0.25), ANSWERS)
    x = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = torch.optim.Adagrad([x], lr=0.4, initial_accumulator_value=0.25, eps=1e-10)
    seen = [2.0]
    for answer in ANSWERS:
        x.grad = x.detach() - answer
        optimizer.step()
        seen.append(x.item())
    assert xs == pytest.approx(seen, abs=1e-9)


def test_second_moments_move_as_the_sheet_says():
    """(c): never negative; Adagrad's never falls; Yogi's moves by (1 - beta2) Delta^2 exactly, or not at all."""
    xs, vs = steps(FedAdagrad(), ANSWERS)
    assert vs == sorted(vs)
    beta2 = 0.7
    xs, vs = steps(FedYogi(server_lr=0.3, beta2=beta2), ANSWERS)
    assert min(vs) >= 0
    before = [1e-6, *vs[:-1]]
    falls = 0
    for x, answer, old, new in zip(xs, ANSWERS, before, vs, strict=False):
        assert abs(new - old) == pytest.approx((1 - beta2) * (answer - x) ** 2, rel=1e-9, abs=1e-15)
        falls += new < old
    assert falls > 2  # both signs were seen
    equal, delta = torch.tensor([4.0]), torch.tensor([-2.0])
    assert torch.equal(FedYogi().second_moment(equal, delta), equal)


def test_yogi_without_memory_is_a_sign():
    """(d): beta1 = beta2 = 0 and v0 = 0."""
    callback = FedYogi(server_lr=0.1, beta1=0.0, beta2=0.0, tau=1e-3, v_init=0.0)
    old, reduced = torch.tensor([2.0, -1.0, 0.5]).double(), torch.tensor([1.5, -0.9, 0.5]).double()
    new = callback.server_step(
        SimpleNamespace(state={}, trainable=["x"], combining="global"), {"x": old}, {"x": reduced}
    )["x"]
    delta = reduced - old
    torch.testing.assert_close(new, old + 0.1 * delta / (delta.abs() + 1e-3), atol=1e-12, rtol=0)


@pytest.mark.parametrize("cls", BOTH)
def test_no_change_leaves_the_model(cls):
    xs, _ = steps(cls(), [2.0] * 5)
    assert set(xs) == {2.0}
    module = Toy("sgd", lr=0.0)
    same(global_state(federate(module, toy_data(), [cls()], max_rounds=2)), module_state(module))


@pytest.mark.parametrize("cls", BOTH)
def test_moments_are_for_trainable_parameters_and_buffers_are_averaged(cls):
    trainer, spy = spied(NormNet("sgd"), toy_data(), [cls(server_lr=0.3)], max_rounds=4)
    names = {name for name, _ in trainer.server.module.named_parameters()}
    for moment in ("m", "v"):
        assert set(trainer.server.state[cls.__name__][moment]) == names
    reduced = mean_of(spy.of_round(3), {"0": 24, "1": 40, "2": 16})
    for name in ("net.1.running_mean", "net.1.running_var"):
        assert torch.equal(global_state(trainer)[name], reduced[name])


@pytest.mark.parametrize("cls", BOTH)
def test_a_server_optimizer_is_alone(cls):
    with pytest.raises(ValueError, match=f"{cls.__name__} and FedAvgM both claim 'server_step'"):
        federate(Toy(), toy_data(), [cls(), FedAvgM()], max_rounds=1)


def test_adagrad_has_no_beta2_and_says_its_options():
    assert set(FedAdagrad().hyperparameters()) == {"server_lr", "beta1", "tau", "v_init", "weighting"}
    with pytest.raises(ValueError, match=r"FedAdagrad got beta1=1\.0"):
        FedAdagrad(beta1=1.0)
    with pytest.raises(ValueError, match=r"FedYogi got server_lr=-1"):
        FedYogi(server_lr=-1)


@pytest.mark.parametrize("cls", BOTH)
def test_defaults_train(cls):
    data = toy_data()
    start = Toy("sgd")
    trainer = federate(start, data, [cls()], max_rounds=6)
    losses = []
    for state in (module_state(start), global_state(trainer)):
        model = Toy("sgd")
        model.load_state_dict(state)
        parts = [data.tensors[c]["train"] for c in "012"]
        losses.append(sum(torch.nn.functional.cross_entropy(model(x), y).item() for x, y in parts) / 3)
    assert losses[1] < 0.9 * losses[0]
