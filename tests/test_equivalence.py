"""One client is plain Lightning: the federation adds nothing, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch

from fedlightning.callbacks import SCAFFOLD, Central, FedAvg, FedProx, Local
from fedlightning.tensors import module_state
from tests.helpers import NormNet, Toy, differs, federate, global_state, mostly_slow, plain_fit, same, toy_data


def federated(module, data, callbacks=(), **options):
    trainer = federate(module, data, callbacks, **options)
    return global_state(trainer)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "steplr", "onecycle"])
def test_one_client_kept_state_is_one_plain_fit(optimizer, epochs):
    module, data, rounds = Toy(optimizer), toy_data([22]), 3
    ours = federated(module, data, max_rounds=rounds, local_epochs=epochs, optimizer_state="keep", seed=5)
    plain = plain_fit(module, data, "0", epochs_per_round=epochs, seed=5, max_epochs=rounds * epochs)
    same(ours, plain)
    assert differs(ours, module_state(module))


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "onecycle"])
def test_one_round_with_new_optimizers_is_one_plain_fit(optimizer):
    module, data = Toy(optimizer), toy_data([22])
    ours = federated(module, data, max_rounds=1, local_epochs=3, optimizer_state="reset")
    same(ours, plain_fit(module, data, "0", epochs_per_round=3, max_epochs=3))


def test_new_optimizers_every_round_are_not_kept_ones():
    module, data = Toy("momentum"), toy_data([22])
    reset = federated(module, data, max_rounds=2, optimizer_state="reset")
    first = plain_fit(module, data, "0", max_epochs=1)
    again = Toy("momentum")
    again.load_state_dict(first)
    data.setup("fit")
    loader = data.client_dataloader("0", "train")
    loader.sampler.start(seed=0, round=1)
    # the second round by hand: fresh momentum, the second round's batches
    optimizer = again.configure_optimizers()
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(again(x), y).backward()
        optimizer.step()
    same(reset, module_state(again))
    assert differs(reset, federated(module, data, max_rounds=2, optimizer_state="keep"))


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 3},
        {"limit_train_batches": 2},
        {"precision": "bf16-mixed"},
        *mostly_slow(
            [
                {"accumulate_grad_batches": 2},
                {"limit_train_batches": 0.5},
                {"precision": "64-true"},
                {"precision": "bf16-true"},
                {"deterministic": True, "detect_anomaly": True},
            ],
            [],
        ),
    ],
    ids=str,
)
def test_trainer_arguments_act_as_in_a_plain_fit(options):
    module, data = Toy("momentum"), toy_data([44])
    ours = federated(module, data, max_rounds=2, local_epochs=2, optimizer_state="keep", **options)
    plain = plain_fit(module, data, "0", epochs_per_round=2, max_epochs=4, **options)
    same(ours, plain)
    if "deterministic" not in options:
        assert differs(ours, plain_fit(module, data, "0", epochs_per_round=2, max_epochs=4))


def test_dropout_has_addressed_seeds():
    module, data = Toy("adam", dropout=0.5), toy_data([22])
    ours = federated(module, data, max_rounds=2, local_epochs=2, optimizer_state="keep", seed=3)
    same(ours, plain_fit(module, data, "0", epochs_per_round=2, seed=3, max_epochs=4))
    assert differs(ours, plain_fit(module, data, "0", epochs_per_round=2, seed=4, max_epochs=4))


def test_batch_norm_buffers_are_those_of_a_plain_fit():
    module, data = NormNet("adam"), toy_data([24])
    ours = federated(module, data, max_rounds=3, optimizer_state="keep")
    same(ours, plain_fit(module, data, "0", max_epochs=3))
    assert int(ours["net.1.num_batches_tracked"]) == 9


@pytest.mark.parametrize("per_epoch", [1, 2])
@pytest.mark.parametrize("optimizer", ["adam", "onecycle"])
def test_local_steps_go_on_under_keep(optimizer, per_epoch):
    """Whole epochs of three batches a visit: optimizers, clocks and the horizon in steps are those of one fit."""
    module, data, rounds = Toy(optimizer), toy_data([24]), 3
    steps = 3 * per_epoch
    ours = federated(module, data, max_rounds=rounds, local_steps=steps, optimizer_state="keep")
    plain = plain_fit(module, data, "0", epochs_per_round=per_epoch, max_epochs=-1, max_steps=rounds * steps)
    same(ours, plain)


class Clocks(Toy):
    """Notes what a training step sees of the Trainer's clocks."""

    seen: list = []  # shared by the copies on purpose

    def training_step(self, batch, batch_idx):
        rate = self.optimizers().param_groups[0]["lr"]
        horizon = int(self.trainer.estimated_stepping_batches)
        Clocks.seen.append((self.trainer.global_step, self.trainer.current_epoch, horizon, rate))
        return super().training_step(batch, batch_idx)


def test_local_steps_that_end_inside_an_epoch_keep_optimizer_state_and_horizon():
    data, rounds, steps = toy_data([24]), 4, 2  # three batches an epoch
    Clocks.seen = []
    federated(Clocks("onecycle"), data, max_rounds=rounds, local_steps=steps, optimizer_state="keep")
    ours, Clocks.seen = Clocks.seen, []
    plain_fit(Clocks("onecycle"), data, "0", max_epochs=-1, max_steps=rounds * steps)
    assert [step for step, *_ in ours] == list(range(8))
    assert [(step, horizon, rate) for step, _, horizon, rate in ours] == [(s, h, r) for s, _, h, r in Clocks.seen]


@pytest.mark.parametrize("epochs", [{"local_epochs": 2}, {"local_steps": 4}])
def test_new_clocks_count_within_the_visit(epochs):
    Clocks.seen = []
    federated(Clocks("onecycle"), toy_data([16]), max_rounds=2, optimizer_state="reset", **epochs)
    first, second = Clocks.seen[:4], Clocks.seen[4:]
    assert first == second
    assert [step for step, *_ in first] == [0, 1, 2, 3]
    assert {horizon for _, _, horizon, _ in first} == {4}


def test_local_steps_of_a_visit_never_repeat_an_order_of_another():
    """More than an epoch of steps: epoch 1 of a visit is not epoch 0 of the next."""

    class Batches(Toy):
        seen: list = []

        def training_step(self, batch, batch_idx):
            Batches.seen.append(batch[0].clone())
            return super().training_step(batch, batch_idx)

    federated(Batches(), toy_data([24]), max_rounds=2, local_steps=6)
    epochs = [torch.cat(Batches.seen[start : start + 3]) for start in (0, 3, 6, 9)]
    for i, one in enumerate(epochs):
        for other in epochs[:i]:
            assert not torch.equal(one, other)
            assert torch.equal(one.sort(0).values, other.sort(0).values)


def test_plateau_scheduler_sees_the_clients_own_validation():
    class Plateau(Toy):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.5)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    module, data = Plateau(), toy_data([24])
    ours = federated(module, data, max_rounds=3, optimizer_state="keep", check_val_every_n_epoch=1)
    assert differs(ours, federated(Toy("sgd", lr=0.5), data, max_rounds=3, optimizer_state="keep"))


def test_one_client_is_silo_is_federation():
    """Sheet entry 3 (c), with the baselines' kept optimizers."""
    module, data = Toy("adam"), toy_data([22])
    ours = federated(module, data, max_rounds=3, optimizer_state="keep")
    silo = federate(module, data, [Local()], max_rounds=3)
    same(ours, module_state(silo.module("0")))


def test_central_is_a_plain_fit_on_the_pooled_data():
    module, data = Toy("adam"), toy_data([22, 15, 9])
    ours = federated(module, data, [Central()], max_rounds=3, local_epochs=2)
    data.setup("fit")
    loader = data.pooled_dataloader("train")
    assert len(loader.dataset) == 46

    class Pooled:
        def setup(self, stage):
            pass

        def client_dataloader(self, client, split):
            return loader

    same(ours, plain_fit(module, Pooled(), "pooled", epochs_per_round=2, max_epochs=6))


@pytest.mark.parametrize("callbacks", [[FedAvg()], [FedProx(mu=0.0)]], ids=lambda c: c[0].key)
def test_naming_the_default_changes_nothing(callbacks):
    module, data = Toy("momentum"), toy_data()
    same(federated(module, data), federated(module, data, callbacks))


def test_one_client_feels_no_control_variate():
    """Sheet entry 5 (f): the correction is identically zero."""
    module, data = Toy("sgd"), toy_data([22])
    same(federated(module, data, max_rounds=1), federated(module, data, [SCAFFOLD()], max_rounds=1))


def test_the_given_module_is_never_trained():
    module, data = NormNet("adam"), toy_data()
    before = copy.deepcopy(module.state_dict())
    federate(module, data)
    same(before, module.state_dict())
    assert module._trainer is None
