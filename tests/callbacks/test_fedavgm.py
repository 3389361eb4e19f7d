"""FedAvgM: sheet entry 7."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedlightning.callbacks import FedAdam, FedAvgM, FedPer, FedProx
from fedlightning.tensors import module_state
from tests.conformance.case import Case, Kept
from tests.helpers import NormNet, Toy, differs, federate, global_state, mean_of, same, spied, toy_data

CASES = {"FedAvgM": Case(FedAvgM(), neutral=FedAvgM(beta=0.0))}
KEPT = {"FedAvgM": Kept("FedAvgM", server=("vel",))}

SIZES = {"0": 24, "1": 40, "2": 16}


def server_of(names=("x",)):
    return SimpleNamespace(state={}, trainable=list(names), combining="global")


@pytest.mark.parametrize("make", [lambda: Toy("momentum", dropout=0.2), lambda: NormNet("sgd")])
def test_without_momentum_it_is_fedavg(make):
    module, data = make(), toy_data()
    same(*(global_state(federate(module, data, cb, max_rounds=3)) for cb in ([], [FedAvgM(beta=0.0)])))
    assert differs(*(global_state(federate(module, data, cb, max_rounds=3)) for cb in ([], [FedAvgM()])))


def test_it_is_torchs_sgd_on_the_pseudo_gradient():
    callback, server = FedAvgM(beta=0.7, server_lr=0.5), server_of()
    model = {"x": torch.tensor([2.0, -1.0], dtype=torch.float64)}
    x = torch.nn.Parameter(model["x"].clone())
    optimizer = torch.optim.SGD([x], lr=0.5, momentum=0.7, dampening=0)
    for number in range(12):
        answer = torch.tensor([0.1 * number, 3.0 - number], dtype=torch.float64)
        x.grad = x.detach() - answer
        optimizer.step()
        model = callback.server_step(server, model, {"x": answer})
        torch.testing.assert_close(model["x"], x.detach(), atol=1e-12, rtol=0)


def test_a_constant_change_is_amplified():
    """vel -> q / (1 - beta)."""
    callback, server = FedAvgM(beta=0.8), server_of()
    model = {"x": torch.zeros(1, dtype=torch.float64)}
    for _ in range(150):
        model = callback.server_step(server, model, {"x": model["x"] - 0.3})
    assert server.state["FedAvgM"]["vel"]["x"].item() == pytest.approx(0.3 / 0.2, abs=1e-12)


def test_exponential_averages_are_heavy_ball_with_a_smaller_rate():
    """vel <- beta vel + (1 - beta) q, w <- w - eta vel  is ours with eta (1 - beta)."""
    beta, eta = 0.9, 0.7
    callback, server = FedAvgM(beta=beta, server_lr=eta * (1 - beta)), server_of()
    model, x, average = {"x": torch.tensor([1.0], dtype=torch.float64)}, 1.0, 0.0
    for answer in (0.0, 4.0, -2.0, 1.0, 1.0, 1.0):
        average = beta * average + (1 - beta) * (x - answer)
        x -= eta * average
        model = callback.server_step(server, model, {"x": torch.tensor([answer], dtype=torch.float64)})
        assert model["x"].item() == pytest.approx(x, abs=1e-12)


def test_two_rounds_by_hand():
    module, data = NormNet("sgd"), toy_data()
    trainer, spy = spied(module, data, [FedAvgM(beta=0.6, server_lr=0.8)], max_rounds=2)
    old, vel = module_state(module), {}
    for number in range(2):
        reduced = mean_of(spy.of_round(number), SIZES)
        for name, value in reduced.items():
            if "running" in name:
                assert torch.equal(spy.rounds[number][name], value)
                continue
            vel[name] = 0.6 * vel.get(name, 0.0) + (old[name].double() - value.double())
            torch.testing.assert_close(spy.rounds[number][name], (old[name].double() - 0.8 * vel[name]).float())
        old = spy.rounds[number]
    assert set(trainer.server.state["FedAvgM"]["vel"]) == {name for name, _ in module.named_parameters()}


def test_running_variances_stay_positive():
    _, spy = spied(NormNet("sgd", lr=0.01), toy_data([8, 8]), [FedAvgM(beta=0.95)], max_rounds=25)
    assert min(float(state["net.1.running_var"].min()) for state in spy.rounds) > 0


def test_composes_with_client_side_methods_and_partial_sharing():
    module = Toy("sgd")
    trainer = federate(module, toy_data(), [FedPer(personal=["net.3"]), FedProx(0.1), FedAvgM()], max_rounds=2)
    assert set(trainer.server.state["FedAvgM"]["vel"]) == {"net.0.weight", "net.0.bias"}
    same({"w": global_state(trainer)["net.3.weight"]}, {"w": module_state(module)["net.3.weight"]})


def test_one_server_optimizer_only_but_fedavg_by_another_name_is_none():
    with pytest.raises(ValueError, match="FedAvgM and FedAdam both claim 'server_step'"):
        federate(Toy(), toy_data(), [FedAvgM(), FedAdam()], max_rounds=1)
    module = Toy()
    runs = [federate(module, toy_data(), cb, max_rounds=2) for cb in ([FedAdam()], [FedAvgM(beta=0.0), FedAdam()])]
    same(*map(global_state, runs))


@pytest.mark.parametrize(("options", "text"), [({"beta": 1.0}, "beta=1.0"), ({"server_lr": 0.0}, "server_lr=0.0")])
def test_senseless_settings_are_refused(options, text):
    with pytest.raises(ValueError, match=f"FedAvgM got {text}"):
        FedAvgM(**options)
