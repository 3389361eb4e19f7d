"""The relation of lr_decay: with lr_decay=g the rate at every step of round r is g**r times that with lr_decay=1."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from fedlightning import FederatedCallback
from fedlightning.algorithm import Phase
from fedlightning.client.learning_rates import check_schedulers, scale_learning_rates
from tests.helpers import Toy, federate, toy_data
from tests.server.test_synchronous import Chosen

timm = pytest.importorskip("timm.scheduler")

SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 1 / (n + 1), lambda n: min(1.0, n / 3)]),  # from 0
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.3, total_iters=3),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5, power=2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=3, eta_min=0.01),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2, eta_min=0.01),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, [0.01, 0.02], [0.2, 0.3], step_size_up=2, mode="triangular2"),
    "cyclic, exp": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2, mode="exp_range", gamma=0.9),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.2, 0.3], total_steps=99, pct_start=0.03),
    "one cycle, three": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=99, three_phase=True, pct_start=0.02),
    "swa": lambda o: swa_utils.SWALR(o, swa_lr=[0.05, 0.02], anneal_epochs=3),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.3, patience=0, min_lr=[0.004, 0.03]),
    "plateau, smallest change": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.3, patience=0, eps=0.03),
    "chained": lambda o: lr_scheduler.ChainedScheduler([
        lr_scheduler.ConstantLR(o, 0.3, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)
    ]),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 3, 0.01)], milestones=[2]
    ),
    "a chain in a sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [
            lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o, 0.1, total_iters=2)]),
            lr_scheduler.CosineAnnealingWarmRestarts(o, 2, eta_min=0.01),
        ],
        milestones=[2],
    ),
    "timm cosine": lambda o: timm.CosineLRScheduler(o, 3, lr_min=0.01, warmup_t=2, warmup_lr_init=0.02, cycle_limit=2),
    "timm cosine, no warm-up": lambda o: timm.CosineLRScheduler(o, 3, lr_min=0.01, noise_range_t=1),
    "timm tanh": lambda o: timm.TanhLRScheduler(o, 3, lr_min=0.01, warmup_t=2),
    "timm poly": lambda o: timm.PolyLRScheduler(o, 4, lr_min=0.01, warmup_t=2, warmup_lr_init=0.02),
    "timm step": lambda o: timm.StepLRScheduler(o, 2, decay_rate=0.5, warmup_t=2, warmup_lr_init=0.02),
    "timm multi-step": lambda o: timm.MultiStepLRScheduler(o, [2, 4], decay_rate=0.5),
}  # fmt: skip


def advance(scheduler, number):
    """Step as Lightning does; timm's count by themselves."""
    if isinstance(scheduler, timm.scheduler.Scheduler):
        scheduler.step(number)
    elif isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


class Scheduled(Toy):
    """Two parameter groups under a schedule, which it returns or steps by itself; writes down the rates of every step."""

    def __init__(self, make, interval, returns=True, rates=(0.1, 0.04)):
        super().__init__()
        self.make_scheduler, self.interval, self.returns, self.rates = make, interval, returns, rates

    def configure_optimizers(self):
        layers = [list(self.net[index].parameters()) for index in (0, -1)]
        groups = [{"params": layer, "lr": rate} for layer, rate in zip(layers, self.rates, strict=True)]
        sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        self.schedule = self.make_scheduler(sgd)
        if not self.returns:
            return sgd
        plan = {"scheduler": self.schedule, "interval": self.interval, "monitor": "same"}
        return {
            "optimizer": sgd,
            "lr_scheduler": plan | {"reduce_on_plateau": "Plateau" in type(self.schedule).__name__},
        }

    def lr_scheduler_step(self, scheduler, metric):
        advance(scheduler, self.trainer.global_step if self.interval == "step" else self.current_epoch + 1)

    def training_step(self, batch, batch_idx):
        self.seen.append([float(group["lr"]) for group in self.optimizers().param_groups])
        self.log("same", 1.0)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if not self.returns:
            advance(self.schedule, self.trainer.global_step)


def rates_of(decay, state="reset", sanity_check=False, **options):
    """Return the rates of two groups, by round and step."""
    Scheduled.seen = []
    runs = {
        "max_rounds": 3,
        "local_epochs": 2,
        "optimizer_state": state,
        "lr_decay": decay,
        "sanity_check": sanity_check,
    }
    federate(Scheduled(**options), toy_data([16]), **runs)
    return torch.tensor(Scheduled.seen).reshape(3, -1, 2)


def decays(*arguments, **options):
    """Assert the relation of a schedule that does anything."""
    whole = rates_of(1.0, *arguments, **options)
    torch.testing.assert_close(
        rates_of(0.5, *arguments, **options), whole * torch.tensor([1.0, 0.5, 0.25])[:, None, None]
    )
    assert len(whole[..., 0].unique()) > 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize(("interval", "state"), [("step", "reset"), ("step", "keep"), ("epoch", "keep")])
def test_the_rate_of_every_step_decays(name, interval, state):
    decays(state, make=SCHEDULERS[name], interval=interval)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("state", ["reset", "keep"])
@pytest.mark.parametrize("name", ["cosine", "plateau", "one cycle"])
def test_rates_that_are_tensors_decay(name, state):
    decays(state, make=SCHEDULERS[name], interval="step", rates=[torch.tensor(0.1), torch.tensor(0.04)])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "state"), [("timm cosine", "reset"), ("cosine", "reset"), ("timm poly", "keep")])
def test_a_schedule_that_the_module_steps_by_itself_decays(name, state):
    decays(state, make=SCHEDULERS[name], interval="step", returns=False)


class Floored(lr_scheduler.LRScheduler):
    """A user's own, whose rates end in a constant that is called as it likes."""

    def __init__(self, optimizer, name="lowest"):
        vars(self)[name] = 0.03
        self.name = name
        super().__init__(optimizer)

    def get_lr(self):
        return [max(vars(self)[self.name], base * 0.9**self.last_epoch) for base in self.base_lrs]


class Forgets(Floored):
    """Keeps nothing of its rates."""

    def state_dict(self):
        return {"last_epoch": self.last_epoch}


class Odd(lr_scheduler.ExponentialLR):
    """Cannot be stepped without its user."""

    def step(self, epoch=None, where=None):
        if where is None and self.last_epoch >= 0:
            raise RuntimeError("where?")
        super().step(epoch)


def plateau_of_timm(optimizer):
    return timm.PlateauLRScheduler(optimizer, decay_rate=0.3, patience_t=0, lr_min=0.004, warmup_t=2, mode="min")


def is_refused(make, state):
    for sanity_check in (False, True):
        with pytest.raises(Exception, match=r"lr_decay=0\.5 multiplies every .* does not follow: by a half"):
            rates_of(0.5, state, sanity_check, make=make, interval="step")
    rates_of(1.0, state, make=make, interval="step")


def test_a_schedule_of_the_users_own_that_does_not_follow_is_refused():
    decays(make=lambda sgd: Floored(sgd, "floor_lr"), interval="step")
    decays("keep", make=lambda sgd: Floored(sgd, "lr_min"), interval="step")
    is_refused(Floored, "reset")
    is_refused(Forgets, "keep")


@pytest.mark.filterwarnings("ignore:PlateauLR", "ignore:LightningModule")
def test_a_plateau_of_timm_that_keeps_nothing_of_its_floor_is_refused():
    try:
        plateau_of_timm(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    except TypeError as error:
        pytest.skip(f"this timm is older than this torch: {error}")
    is_refused(plateau_of_timm, "keep")


class HalvesDecay(timm.scheduler.Scheduler):
    """A schedule of something else than a rate."""

    def _get_lr(self, t):
        return [value * 0.5**t for value in self.base_values]


def test_what_else_timm_schedules_is_left_as_it_is():
    def scheduled(factor):
        sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, weight_decay=0.4)
        plan = HalvesDecay(sgd, "weight_decay")
        scale_learning_rates([sgd], [plan], factor)
        plan.step(1)
        return sgd.param_groups[0]

    whole, half = scheduled(1.0), scheduled(0.5)
    assert half["weight_decay"] == whole["weight_decay"] < 0.4 and half["lr"] == 0.5 * whole["lr"]


def test_a_schedule_that_cannot_be_tried_is_told_of():
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.warns(UserWarning, match=r"whether those of Odd follow could not be tried: RuntimeError: where\?"):
        check_schedulers([sgd], [Odd(sgd, 0.9)], "lr_decay=0.5")


class WithoutRounds(FederatedCallback):
    """Every record is as one of before the round of a fit was noted, and the fit has a rate of its own."""

    def on_visit_start(self, client):
        client.record.lightning.get("fit", {}).pop("round", None)

    def local_phases(self, client):
        yield Phase(lr_factor=0.5)


def test_kept_rates_have_a_phases_factor_once_and_decay_from_the_last_visit_in_an_older_record():
    class Rates(Toy):
        seen: list = []

        def training_step(self, batch, batch_idx):
            self.seen.append(self.optimizers().param_groups[0]["lr"])
            return super().training_step(batch, batch_idx)

    callbacks, options = (
        [WithoutRounds(), Chosen([["0"], ["1"], ["0"], ["0"]])],
        {"max_rounds": 4, "optimizer_state": "keep"},
    )
    federate(Rates(lr=0.8), toy_data([8, 8]), callbacks, lr_decay=0.5, **options)
    assert Rates.seen == pytest.approx([0.4, 0.2, 0.1, 0.05])
