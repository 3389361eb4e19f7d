"""FedAdam and its base: sheet entry 6."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedlightning.callbacks import FedAdagrad, FedAdam, FedYogi
from fedlightning.callbacks.fedopt import FedOpt
from fedlightning.tensors import module_state
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import NormNet, Toy, federate, global_state, mean_of, same, spied, toy_data

CASES = {
    "FedAdam": Case(FedAdam(), skip=NO_PLAIN_FORM),
    "FedYogi": Case(FedYogi(), skip=NO_PLAIN_FORM),
    "FedAdagrad": Case(FedAdagrad(), skip=NO_PLAIN_FORM),
}
KEPT = {
    "FedAdagrad": Kept("FedAdagrad", server=("m", "step", "v")),
    "FedAdam": Kept("FedAdam", server=("m", "step", "v")),
    "FedYogi": Kept("FedYogi", server=("m", "step", "v")),
}


def sequence(rounds=30, start=2.0, answer=0.1, **options):
    """A scalar whose clients always answer the same."""
    callback = FedAdam(**options)
    server = SimpleNamespace(state={}, trainable=["x"], combining="global")
    model, seen = {"x": torch.tensor([start], dtype=torch.float64)}, [start]
    for _ in range(rounds):
        model = callback.server_step(server, model, {"x": torch.tensor([answer], dtype=torch.float64)})
        seen.append(float(model["x"]))
    return seen


def first_negative(values):
    return next(number for number, value in enumerate(values) if value < 0)


SETTING = {"server_lr": 0.1, "beta1": 0.9, "beta2": 0.9, "tau": 1e-9, "v_init": 0.0}


def test_the_scalar_sequence_of_the_fenda_paper():
    seen = sequence(**SETTING)
    assert seen[-1] == pytest.approx(-0.2046, abs=5e-5)
    assert first_negative(seen) == 27
    corrected = sequence(**SETTING, bias_correction=True)
    assert corrected[-1] == pytest.approx(-0.3128, abs=5e-5)
    assert first_negative(corrected) == 22
    slow = sequence(200, **SETTING | {"beta2": 0.99})
    assert first_negative(slow) == 13
    assert min(slow) == pytest.approx(-0.499, abs=5e-4)


def test_bias_corrected_it_is_torchs_adam():
    x = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = torch.optim.Adam([x], lr=0.1, betas=(0.9, 0.99), eps=1e-30)
    seen = [2.0]
    for _ in range(10):
        x.grad = x.detach() - 0.1
        optimizer.step()
        seen.append(x.item())
    ours = sequence(10, server_lr=0.1, beta2=0.99, tau=1e-30, v_init=0.0, bias_correction=True)
    assert ours == pytest.approx(seen, abs=1e-9)


def test_without_memory_the_step_is_a_sign():
    old, reduced = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([1.5, -0.9, 0.5])
    callback = FedAdam(server_lr=0.1, beta1=0.0, beta2=0.0, tau=1e-3, v_init=0.0)
    server = SimpleNamespace(state={}, trainable=["x"], combining="global")
    new = callback.server_step(server, {"x": old}, {"x": reduced})["x"]
    delta = reduced - old
    torch.testing.assert_close(new, old + 0.1 * delta / (delta.abs() + 1e-3))


def test_no_change_is_no_step():
    assert sequence(5, start=0.1) == [0.1] * 6


def test_clients_that_stand_still_leave_the_model():
    module = NormNet("sgd", lr=0.0)
    trainer = federate(module, toy_data(), [FedAdam(server_lr=1.0)], max_rounds=3)
    for name, parameter in module.named_parameters():
        assert torch.equal(global_state(trainer)[name], parameter)


def test_first_step_from_the_papers_start():
    """m = (1 - beta1) Delta, v = beta2 tau^2 + (1 - beta2) Delta^2, on the sample-weighted mean."""
    module, data = Toy("sgd"), toy_data()
    trainer, spy = spied(module, data, [FedAdam(server_lr=0.02, tau=1e-2)], max_rounds=1)
    reduced = mean_of(spy.of_round(0), {"0": 24, "1": 40, "2": 16})
    for name, old in module_state(module).items():
        delta = reduced[name].double() - old.double()
        m, v = 0.1 * delta, 0.99 * 1e-4 + 0.01 * delta**2
        expected = (old.double() + 0.02 * m / (v.sqrt() + 1e-2)).float()
        assert torch.equal(global_state(trainer)[name], expected)
        assert bool((trainer.server.state["FedAdam"]["v"][name] >= 0).all())


def test_moments_exist_for_trainable_parameters_only():
    trainer, spy = spied(NormNet("sgd"), toy_data(), [FedAdam(server_lr=0.1)], max_rounds=3)
    names = {name for name, _ in trainer.server.module.named_parameters()}
    for moment in ("m", "v"):
        assert set(trainer.server.state["FedAdam"][moment]) == names
    reduced = mean_of(spy.of_round(2), {"0": 24, "1": 40, "2": 16})
    for name in ("net.1.running_mean", "net.1.running_var"):
        assert torch.equal(global_state(trainer)[name], reduced[name])


class Everything(FedAdam):
    """The known mistake: a server optimizer over running statistics too."""

    def server_step(self, server, old, reduced):
        names = [name for name, kind in server.kinds.items() if kind in ("trainable", "float_buffer")]
        return super().server_step(
            SimpleNamespace(state=server.state, trainable=names, combining=server.combining), old, reduced
        )


class Shrinking(NormNet):
    """Inputs get smaller as training goes on, so that running variances fall for many rounds."""

    def training_step(self, batch, batch_idx):
        return super().training_step((0.01 * batch[0], batch[1]), batch_idx)


def test_running_variances_stay_positive():
    module, data = Shrinking("sgd", lr=0.01), toy_data([8, 8], batch_size=8)
    options = {"server_lr": 0.1, "tau": 1e-9}
    good, bad = (
        [
            float(model["net.1.running_var"].min())
            for model in spied(module, data, [cls(**options)], max_rounds=30)[1].rounds
        ]
        for cls in (FedAdam, Everything)
    )
    assert min(good) > 0
    assert min(bad) < 0  # so the test above can fail


class Plain(FedOpt):
    """Server SGD with rate 1, written as a FedOpt: v so that the denominator is 1."""

    def second_moment(self, v, delta):
        return torch.full_like(delta, (1 - self.tau) ** 2)


def test_server_sgd_with_rate_one_is_fedavg():
    module, data = NormNet("sgd"), toy_data()
    runs = [federate(module, data, cb, max_rounds=2) for cb in ([], [Plain(server_lr=1.0, beta1=0.0)])]
    for name, value in global_state(runs[0]).items():
        torch.testing.assert_close(global_state(runs[1])[name], value, atol=1e-6, rtol=1e-5)


def test_partial_sharing_leaves_private_entries_alone():
    from fedlightning.callbacks import FedPer

    module = Toy("sgd")
    trainer = federate(module, toy_data(), [FedPer(personal=["net.3"]), FedAdam(server_lr=0.1)], max_rounds=2)
    assert set(trainer.server.state["FedAdam"]["m"]) == {"net.0.weight", "net.0.bias"}
    same({"w": global_state(trainer)["net.3.weight"]}, {"w": module_state(module)["net.3.weight"]})


@pytest.mark.parametrize(
    "options", [{"beta1": 1.0}, {"beta2": -0.1}, {"server_lr": 0.0}, {"tau": 0.0}], ids=lambda o: next(iter(o))
)
def test_senseless_settings_are_refused(options):
    with pytest.raises(ValueError, match=rf"FedAdam got .*{next(iter(options))}="):
        FedAdam(**options)
