"""The model that APFL trains beside a client's: its gradients, its rates and what is deployed."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from fedlightning.callbacks import APFL
from fedlightning.callbacks.apfl import LogitMixture, ParameterMixture
from fedlightning.tensors import module_state
from tests.helpers import NormNet, Toy, close


def gradient(batch, module, **_):
    """What `Client.batch_gradient` gives, by hand."""
    with torch.enable_grad():
        loss = F.cross_entropy(module(batch[0]), batch[1])
        found = torch.autograd.grad(loss, list(module.parameters()))
    return loss, dict(zip(dict(module.named_parameters()), found, strict=True))


def mixture(kind=ParameterMixture, make=Toy, alpha=0.25, **options):
    torch.manual_seed(0)
    start, v = make(), make()
    kept = {"APFL": {"v": module_state(v), "alpha": alpha}}
    client = SimpleNamespace(
        state=kept, initial_module=lambda: copy.deepcopy(start), batch_gradient=gradient, keeps_optimizers=False,
        module=start,
    )  # fmt: skip
    return kind(client, APFL(alpha=0.5, **options)), v


def samples():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(9, 6, generator=draw), torch.randint(3, (9,), generator=draw)


def test_gradients_are_taken_at_the_mixture_and_v_is_back_afterwards():
    ours, v = mixture()
    ours.module = w = Toy()
    ours.parameters = dict(ours.twin.named_parameters())
    between = {n: (0.25 * v.get_parameter(n) + 0.75 * p).detach() for n, p in w.named_parameters()}
    x, y = samples()
    leaves = {n: value.requires_grad_() for n, value in between.items()}
    loss = F.cross_entropy(torch.func.functional_call(w, leaves, (x,)), y)
    at = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    with torch.no_grad():
        gradients, slope = ours.mixture_gradient((x, y), 0)
    close(gradients, {n: 0.25 * g for n, g in at.items()})
    expected = sum(float(((v.get_parameter(n) - p).detach() * at[n]).sum()) for n, p in w.named_parameters())
    assert float(slope) == pytest.approx(expected, abs=1e-6)
    close(module_state(ours.twin), module_state(v), atol=0, rtol=0)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_the_mixture_is_deployed_with_the_buffers_of_v(alpha):
    ours, v = mixture(make=NormNet, alpha=alpha)
    ours.twin.net[1].running_mean.fill_(7.0)
    w = NormNet()
    before = module_state(copy.deepcopy(w))
    found = module_state(ours.deployed(w))
    for name, p in v.named_parameters():
        torch.testing.assert_close(found[name], alpha * p.detach() + (1 - alpha) * before[name])
    assert float(found["net.1.running_mean"][0]) == (7.0 if alpha else 0.0)


def test_mixed_outputs_are_deployed():
    ours, v = mixture(LogitMixture, mix="logits")
    w, (x, _) = Toy(), samples()
    expected = 0.25 * v(x) + 0.75 * w(x)
    torch.testing.assert_close(ours.deployed(w)(x), expected)


def optimizer(lr, momentum=0.0):
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr, momentum=momentum)


def test_rates_follow_those_of_w():
    ours, _ = mixture()
    ours.optimizer = optimizer(0.1)
    ours.follow_schedule(optimizer(0.03, momentum=0.5))
    assert (ours.optimizer.param_groups[0]["lr"], ours.optimizer.param_groups[0]["momentum"]) == (0.03, 0.5)
    other, _ = mixture(LogitMixture, mix="logits", personal_model=Toy())
    other.optimizer, other.rates = optimizer(1.0), [0.1, 1.0]  # w began with 0.1, v with 1
    other.follow_schedule(optimizer(0.02))
    assert other.optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def test_a_personal_model_that_diverged_is_named():
    ours, _ = mixture()
    ours.parameters = dict(ours.twin.named_parameters())
    assert set(ours.state()) == {"v", "alpha"}
    with torch.no_grad():
        ours.twin.net[0].bias[0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"'net.0.bias' of the personal model holds NaN"):
        ours.state()
