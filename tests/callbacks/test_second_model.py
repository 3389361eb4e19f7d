"""A second model that trains beside a client's module."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from fedlightning.callbacks import APFL
from fedlightning.callbacks.shared.second_model import SecondModel, refuse_closures
from fedlightning.engines.attempts import FederationError
from fedlightning.tensors import module_state
from tests.helpers import Toy, federate, same, toy_data


class Ones(SecondModel):
    """Its gradient is one everywhere."""

    def gradients_of(self, batch, batch_idx):
        return {name: torch.full_like(value, float(batch)) for name, value in self.parameters.items()}


def started(keeps=False, state=None, scale=1.0, window=1):
    module = Toy()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    client = SimpleNamespace(state=state or {}, keeps_optimizers=keeps, loss_scale=scale)
    trainer = SimpleNamespace(
        optimizers=[optimizer],
        accumulate_grad_batches=window,
        gradient_clip_val=None,
        gradient_clip_algorithm=None,
        strategy=SimpleNamespace(reduce=lambda value, reduce_op: value),
    )
    second = Ones(client, "key", Toy())
    second.twin.configure_gradient_clipping = lambda *args: None
    second.start(trainer, module)
    return second, optimizer


def test_it_steps_when_the_module_does_at_its_learning_rate_and_leaves_it_alone():
    second, optimizer = started(window=2)
    before, own = module_state(second.module), module_state(second.twin)
    before, own = ({name: value.clone() for name, value in one.items()} for one in (before, own))
    second.accumulate(1.0, 0)
    second.accumulate(3.0, 1)
    same(module_state(second.twin), own)
    optimizer.step()  # no gradients: the module stays
    same(module_state(second.module), before)
    for name, value in second.parameters.items():
        torch.testing.assert_close(value.detach(), own[name] - 0.5 * 2.0)
    optimizer.step()  # nothing was accumulated since
    for name, value in second.parameters.items():
        torch.testing.assert_close(value.detach(), own[name] - 0.5 * 2.0)
    second.stop()
    assert second.twin._trainer is None and not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_overflow_under_a_scaler_is_no_step_and_without_one_is_an_error(scale):
    second, optimizer = started(scale=scale)
    own = {name: value.clone() for name, value in module_state(second.twin).items()}
    second.accumulate(float("inf"), 0)
    optimizer.step()
    if scale != 1.0:
        same(second.state()["v"], own)
    else:
        with pytest.raises(FloatingPointError, match="of the personal model holds NaN or infinite"):
            second.state()


@pytest.mark.parametrize("keeps", [False, True])
def test_a_client_keeps_it_and_goes_on_from_there(keeps):
    second, optimizer = started(keeps)
    second.accumulate(1.0, 0)
    optimizer.step()
    kept = second.state()
    assert set(kept) == ({"v", "optimizer"} if keeps else {"v"})
    again, _ = started(keeps, {"key": kept})
    same(module_state(again.twin), kept["v"])


def test_optimizers_that_ask_again_are_refused():
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    refuse_closures(SimpleNamespace(optimizers=[torch.optim.SGD(parameters, 0.1)]), "FLDE")
    with pytest.raises(ValueError, match="FLDE trains a second model by a second LBFGS"):
        refuse_closures(SimpleNamespace(optimizers=[torch.optim.LBFGS(parameters)]), "FLDE")


class Teacher(Toy):
    """Has a mean teacher."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if self.in_step:
            self.move()
        return super().training_step(batch, batch_idx) + (self.net(batch[0]) - self.teacher(batch[0])).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if not self.in_step:
            self.move()

    def move(self):
        with torch.no_grad():
            for followed, follower in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                follower.lerp_(followed, 0.5)


class MovedInStep(Teacher):
    in_step = True


class MovedByAHook(Teacher):
    in_step = False


def test_what_only_hooks_move_would_stand_still_in_it():
    with pytest.raises(
        FederationError, match=r"'teacher\.0\.bias' of MovedByAHook.* APFL trains a second model beside"
    ):
        federate(MovedByAHook(), toy_data([8]), [APFL()], max_rounds=1)


def test_a_second_model_that_never_steps_may_stand_still():
    federate(MovedByAHook(), toy_data([8]), [APFL(alpha=0.0, adaptive=False)], max_rounds=1)


def test_what_a_step_moves_is_deployed_with_the_model_that_moved_it():
    trainer = federate(MovedInStep(), toy_data([24, 16]), [APFL(alpha=0.5, adaptive=False)], max_rounds=2)
    deployed = module_state(trainer.module("0"))
    assert not torch.equal(deployed["teacher.0.weight"], trainer.server.model["teacher.0.weight"])
