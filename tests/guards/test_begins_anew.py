"""What steps go by that begins anew in every visit: attributes (test_step_trials.py) and clocks."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, EMAWeightAveraging, GradientAccumulationScheduler

from fedlightning.guards.begins_anew import watch_clock
from tests.helpers import Toy, federate, global_state, make_trainer, same, toy_data


class Anneals(Toy):
    """A term whose weight grows with the steps, as of a VAE."""

    def training_step(self, batch, batch_idx):
        weight = min(1.0, self.global_step / 100)
        return super().training_step(batch, batch_idx) + weight * self.net[0].weight.square().sum()


class Thaws(Toy):
    """A layer that trains from an epoch on."""

    def on_train_epoch_start(self):
        self.net[0].requires_grad_(self.current_epoch >= 3)


class DrivesItself(Toy):
    """A rate by hand, with manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * 0.9**self.current_epoch
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Logs(Toy):
    """Reads its clocks for the log alone; with dropout, whose draws are the same in both tries."""

    def __init__(self):
        super().__init__(dropout=0.5)

    def training_step(self, batch, batch_idx):
        self.log("epoch", float(self.current_epoch))
        self.log("step", float(self.global_step))
        return super().training_step(batch, batch_idx)


class Restless(Logs):
    """No two steps are the same, of which neither its clock nor an attribute is the cause."""

    count = itertools.count()

    def training_step(self, batch, batch_idx):
        self.number = next(self.count)
        return (1 + self.number) * super().training_step(batch, batch_idx)


class Table(Anneals):
    """Weights in a table that ends."""

    def training_step(self, batch, batch_idx):
        return [1.0, 0.5, 0.2, 0.1][self.current_epoch] * Toy.training_step(self, batch, batch_idx)


def told(module, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = federate(module, toy_data((8, 16)), sanity_check=True, **options)
    texts = ("clocks begin at 0", "begins with the first value")
    return trainer, [str(one.message) for one in caught if any(text in str(one.message) for text in texts)]


@pytest.mark.parametrize("loop", ["auto", "trainer"])
@pytest.mark.parametrize(
    ("module", "clock"), [(Anneals, "global_step"), (Thaws, "current_epoch"), (DrivesItself, "current_epoch")]
)
def test_a_clock_by_which_steps_go_is_told_of_once(module, clock, loop):
    _, texts = told(module(), local_loop=loop)
    assert len(texts) == 1 and texts[0].startswith(f"Steps of {module.__name__} go by self.{clock}, and with")


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Anneals, {"optimizer_state": "keep"}),
        (Anneals, {"max_rounds": 1}),
        (Logs, {}),
        (Logs, {"local_loop": "trainer"}),
        (Toy, {}),
        (Restless, {}),
        (Table, {}),  # it fails with another clock, which says nothing of what it does
    ],
)
def test_of_a_clock_that_goes_on_or_decides_nothing_nothing_is_said(module, options):
    _, texts = told(module(), **options)
    assert not texts


def test_the_advice_is_right():
    """With optimizer_state='keep' the clocks of a visit begin where the last one ended."""
    steps = []

    class Reads(Toy):
        def training_step(self, batch, batch_idx):
            steps.append((self.current_epoch, self.global_step))
            return super().training_step(batch, batch_idx)

    federate(Reads(), toy_data((8,)), max_rounds=3, optimizer_state="keep")
    assert steps == [(0, 0), (1, 1), (2, 2)]
    steps.clear()
    federate(Reads(), toy_data((8,)), max_rounds=3)
    assert steps == [(0, 0)] * 3


@pytest.mark.parametrize("module", [Anneals, Thaws, Logs])
def test_trying_a_clock_changes_no_bit(module):
    def trained(sanity):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return global_state(federate(module(), toy_data((8, 16)), sanity_check=sanity))

    same(trained(False), trained(True))


def test_a_watched_module_reads_its_clock_as_before():
    module = Toy()
    clock = watch_clock(module)
    assert (module.current_epoch, module.global_step, clock.reads) == (0, 0, {"current_epoch", "global_step"})
    clock.ahead = 5
    assert (module.current_epoch, module.global_step) == (5, 5)


class Records(Callback):
    """Somebody's own."""

    def __init__(self, every_n_epochs=1, last_epoch=None):
        self.every_n_epochs, self.last_epoch = every_n_epochs, last_epoch


@pytest.mark.parametrize(
    ("callback", "options", "text"),
    [
        (BackboneFinetuning(2), {}, "BackboneFinetuning has unfreeze_backbone_at_epoch=2"),
        (GradientAccumulationScheduler({0: 1, 1: 2}), {}, "GradientAccumulationScheduler has epochs=1"),
        (EMAWeightAveraging(update_starting_at_epoch=3), {"local_epochs": 3}, "has update_starting_at_epoch=3"),
        (Records(every_n_epochs=3), {"local_epochs": 2}, "Records has every_n_epochs=3"),
        (BackboneFinetuning(2), {"local_epochs": 3}, None),
        (BackboneFinetuning(2), {"max_rounds": 1}, None),
        (BackboneFinetuning(2), {"optimizer_state": "keep"}, None),
        (BackboneFinetuning(2), {"local_steps": 3}, None),  # epochs are not known
        (GradientAccumulationScheduler({0: 2}), {}, None),
        (Records(), {}, None),
    ],
)
def test_an_epoch_that_no_visit_has_is_told_of(callback, options, text):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(None, [callback], **{"max_rounds": 2} | options)
    texts = [str(warning.message) for warning in caught if "never comes" in str(warning.message)]
    assert len(texts) == (text is not None) and all(text in one for one in texts)
