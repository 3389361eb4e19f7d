from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedlightning.wrappers import mix_logits, mixer_branch, own_state_names, personal_gradients, unmix, uses_forward
from tests.wrappers.modules import STYLES, Base, ThroughForward, ThroughNet, batch_for, fit


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))


@pytest.mark.parametrize("personal", [ThroughForward, Other])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_mixture(personal: type[nn.Module], alpha: float) -> None:
    own, other = ThroughForward().eval(), personal().eval()
    x = batch_for(own)[0]
    h_w, h_v = own(x), other(x)
    names = list(own.state_dict())
    module = mix_logits(own, other, alpha)
    torch.testing.assert_close(module(x), alpha * h_v + (1 - alpha) * h_w)
    with mixer_branch(module, "own"):
        assert torch.equal(module(x), h_w)
        with mixer_branch(module, "personal"):
            assert torch.equal(module(x), h_v)
    assert own_state_names(module) == names
    assert module.personal_alpha.shape == () and module.personal_alpha.dtype == torch.float32
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(x), module(x))
    assert torch.equal(unmix(module)(x), h_w) and list(module.state_dict()) == names and type(other) is personal


@pytest.mark.parametrize("personal", [ThroughForward, Other])
@pytest.mark.parametrize("optim", ["all", "named", "pair", "groups"])
def test_it_trains_in_a_trainer(personal: type[nn.Module], optim: str) -> None:
    module = mix_logits(ThroughForward(optim=optim), personal(), 0.5)
    before = copy.deepcopy(module.state_dict())
    trainer = fit(module, 2)
    assert {"train_loss", "train_acc", "val_loss", "val_acc"} == set(trainer.callback_metrics)
    assert all(not torch.equal(before[n], p) for n, p in module.named_parameters())
    assert torch.equal(before["personal_alpha"], module.get_buffer("personal_alpha"))


def test_gradients_of_alpha_and_the_personal_model() -> None:
    module = mix_logits(ThroughForward().double().eval(), ThroughForward().double().eval(), 0.3)
    x, y = batch_for(module)
    x = x.double()

    def loss() -> Tensor:
        return F.cross_entropy(module(x), y)

    grads, slope, value = personal_gradients(module, loss)
    # alpha is kept in float32, so the reference mixes by hand in double
    with mixer_branch(module, "own"):
        h_w = module(x).detach()
    with mixer_branch(module, "personal"):
        h_v = module(x)
    alpha, step = module.get_buffer("personal_alpha").double(), 1e-5

    def at(a: Tensor) -> Tensor:
        return F.cross_entropy(a * h_v + (1 - a) * h_w, y)

    central = (at(alpha + step) - at(alpha - step)) / (2 * step)
    torch.testing.assert_close(slope.double(), central, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(value, at(alpha))
    parameters = dict(module.get_submodule("personal_model").named_parameters())
    expected = torch.autograd.grad(at(alpha), list(parameters.values()))
    for (name, _), gradient in zip(parameters.items(), expected, strict=True):
        torch.testing.assert_close(grads[name], gradient)
    assert all(p.grad is None for p in module.parameters())


def test_equal_models_give_alpha_no_slope_and_the_own_model_stays() -> None:
    own = ThroughForward()
    own.net.drop.p = 0.0
    module = mix_logits(own, copy.deepcopy(own), 0.4)
    own_before = {n: module.state_dict()[n].clone() for n in own_state_names(module)}
    personal_before = module.get_buffer("personal_model.net.norm.running_mean").clone()
    _, slope, _ = personal_gradients(module, lambda: module.training_step(batch_for(module), 0))
    assert abs(float(slope)) < 1e-8
    assert all(torch.equal(value, module.state_dict()[n]) for n, value in own_before.items())
    assert not torch.equal(personal_before, module.get_buffer("personal_model.net.norm.running_mean"))
    assert module.accuracy.update_count == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("style", STYLES)
def test_uses_forward(style: type[Base]) -> None:
    if style.__name__ == "ThroughParameters":
        pytest.skip("its step needs a Trainer")
    module = style()
    batch = batch_for(module)
    state, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    assert uses_forward(module, batch) is (style is ThroughForward)
    assert all(torch.equal(state[n], v) for n, v in module.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()) and type(module) is style
    assert module.accuracy.update_count == 0


def test_a_step_without_forward_is_noticed() -> None:
    class Own(ThroughNet):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    module = mix_logits(Own(), Other(), 0.5)
    with pytest.raises(RuntimeError, match="does not depend on the mixed output"):
        personal_gradients(module, lambda: module.training_step(batch_for(module), 0))


def test_refusals() -> None:
    module = ThroughForward()
    with pytest.raises(ValueError, match="alpha=2"):
        mix_logits(module, Other(), 2)
    with pytest.raises(ValueError, match="another object"):
        mix_logits(module, module)
    with pytest.raises(TypeError, match="no forward"):
        mix_logits(ThroughNet(), Other())
    with pytest.raises(TypeError, match="does not mix logits"):
        own_state_names(module)
    with pytest.raises(ValueError, match="already"):
        mix_logits(mix_logits(module, Other()), Other())
    with pytest.raises(ValueError, match="shapes are equal"):
        mix_logits(ThroughForward(), nn.Flatten())(batch_for(module)[0])


def test_structured_outputs() -> None:
    class Pair(ThroughForward):
        def forward(self, x: Tensor) -> Any:
            logits = self.net(x)
            return {"logits": logits, "more": (logits * 2, [x.flatten(1).argmax(1)], None)}

    own, other = Pair().eval(), Pair().eval()
    x = batch_for(own)[0]
    h_w, h_v = own(x)["logits"], other(x)["logits"]
    mixed = mix_logits(own, other, 0.25)(x)
    torch.testing.assert_close(mixed["logits"], 0.25 * h_v + 0.75 * h_w)
    torch.testing.assert_close(mixed["more"][0], 2 * mixed["logits"])
    assert mixed["more"][2] is None
