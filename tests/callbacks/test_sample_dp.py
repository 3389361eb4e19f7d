"""SampleDP: the private gradient, Poisson batches, the budget, the secret, a plain Trainer, and what is refused."""

from __future__ import annotations

import copy
import json
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("opacus", reason="SampleDP counts with Opacus: pip install opacus cryptography")

from fedlightning.algorithm import Facts, FederatedCallback, OutgoingItem
from fedlightning.callbacks import (
    MOON,
    SCAFFOLD,
    ClientDP,
    Ditto,
    FedAdam,
    FedALA,
    FedAsync,
    FedAvg,
    FedPer,
    FedProx,
    FedRep,
    GlobalCheckpoint,
    Local,
    SampleDP,
)
from fedlightning.callbacks.shared.ledger import Ledger
from fedlightning.callbacks.shared.poisson_batches import PoissonBatches
from fedlightning.callbacks.shared.record_gradients import RecordGradients
from fedlightning.client.visit import carry_out
from fedlightning.contract.messages import Message
from fedlightning.engines.attempts import FederationError
from fedlightning.engines.contract import Evaluate
from fedlightning.errors import ConfigurationError
from fedlightning.virtual_time import Asynchronous, FixedSpeed, VirtualClock
from tests.conformance.case import collect
from tests.helpers import NormNet, Toy, ToyData, federate, global_state, make_trainer, same, toy_data

pytestmark = [
    pytest.mark.filterwarnings("ignore:SampleDP"),
    pytest.mark.filterwarnings("ignore:Optimal order"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]
SIZES = {"0": 24, "1": 40, "2": 16}
TINY = 1e-9


def module(kind=Toy):
    torch.manual_seed(0)
    return kind()


def dp(**options):
    return SampleDP(**{"delta": 1e-3, "noise_multiplier": 1.0, "noise_seed": 3} | options)


class Plain(LightningModule):
    """A linear classifier, whose gradients are easy to write down."""

    def __init__(self, loss="mean"):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.loss = nn.Linear(4, 3), loss
        self.scale = nn.Parameter(torch.ones(1)) if loss == "loose" else None

    def training_step(self, batch, batch_idx):
        logits = self.layer(batch[0])
        if self.loss == "loose":
            logits = logits * self.scale
        if self.loss == "pairs":
            logits = logits - logits.mean(0)
        loss = F.cross_entropy(logits, batch[1], reduction="sum" if self.loss == "sum" else "mean")
        return loss + self.layer.weight.square().sum() if self.loss == "penalty" else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def records(count=20, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 4, generator=draw), torch.randint(0, 3, (count,), generator=draw))


def plain_trainer(*callbacks, **options):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(callbacks=list(callbacks), accelerator="cpu", **quiet | {"max_epochs": 1} | options)


# -- one step ----------------------------------------------------------------------------------------------------------
def private_gradient(net, data, chosen, clip, expected):
    """Return the clipped sum over records one by one, over the expected size of a batch."""
    total = [torch.zeros_like(parameter) for parameter in net.parameters()]
    for place in chosen:
        x, y = data[place]
        loss = F.cross_entropy(net(x[None]), y[None])
        gradient = torch.autograd.grad(loss, list(net.parameters()))
        norm = float(torch.cat([one.flatten() for one in gradient]).norm())
        total = [sum_ + one * min(1.0, clip / norm) for sum_, one in zip(total, gradient, strict=True)]
    return [sum_ / expected for sum_ in total]


@pytest.mark.parametrize("clip", [0.1, 0.7, 100.0])
def test_steps_are_those_of_clipped_records_over_the_expected_size(clip):
    data, reference = records(), Plain()
    batches = PoissonBatches(20, 4, "seed 3", "batches")
    with torch.enable_grad():
        for chosen, size in ((drawn, batches.sizes[-1]) for drawn in batches):
            gradient = private_gradient(reference.layer, data, chosen if size else [], clip, expected=5.0)
            with torch.no_grad():
                for parameter, one in zip(reference.layer.parameters(), gradient, strict=True):
                    parameter -= 0.1 * one
    trained = Plain()
    plain_trainer(dp(clip=clip, noise_multiplier=TINY)).fit(trained, DataLoader(data, batch_size=5))
    for one, other in zip(trained.layer.parameters(), reference.layer.parameters(), strict=True):
        assert torch.allclose(one, other, atol=2e-6)


def test_a_batch_of_nobody_is_noise_and_so_is_a_record_whose_gradient_is_not_finite():
    net = Plain()
    sampler = PoissonBatches(1, 1, "s", "a")
    fit = RecordGradients(net, sampler, clip=2.0, noise_multiplier=3.0, secret="s", address="a", room=9)
    optimizer, found = net.configure_optimizers(), []
    for sizes, value in (([0], 1.0), ([1], float("inf"))):
        sampler.sizes, sampler.epoch = sizes, sampler.epoch + 1
        fit.begin()
        net.training_step((torch.full((1, 4), value), torch.zeros(1, dtype=torch.long)), 0).backward()
        fit.steps = 1  # the first step would look for parts of no record
        fit.privatise(optimizer)
        found.append(copy.deepcopy([parameter.grad for parameter in net.parameters()]))
    fit.close()
    assert all(one.abs().min() > 0 and one.abs().max() < 6 * 2.0 * 3.0 for pair in found for one in pair)


def test_the_record_that_stands_in_for_nobody_has_no_part_in_the_step():
    net, sampler = Plain(), PoissonBatches(1, 1, "s", "a")
    fit = RecordGradients(net, sampler, clip=2.0, noise_multiplier=TINY, secret="s", address="a", room=9)
    sampler.sizes, sampler.epoch = [0], 1
    fit.begin()
    net.training_step((torch.ones(1, 4), torch.zeros(1, dtype=torch.long)), 0).backward()
    assert net.layer.weight.grad.norm() > 0.1
    fit.privatise(net.configure_optimizers())
    fit.close()
    assert net.layer.weight.grad.norm() < 1e-6


def test_the_noise_has_its_variance_and_is_another_one_for_another_sum():
    net = Plain()
    sampler = PoissonBatches(8, 2, "s", "a")
    fit = RecordGradients(net, sampler, clip=0.5, noise_multiplier=3.0, secret="s", address="a", room=10**6)
    optimizer, drawn = net.configure_optimizers(), []
    sampler.sizes = [0]
    for sampler.epoch in range(1, 701):
        fit.begin()
        fit.privatise(optimizer)
        drawn.append(torch.cat([parameter.grad.flatten() for parameter in net.parameters()]))
    values = torch.stack(drawn).double()
    expected = (3.0 * 0.5 / 4.0) ** 2
    assert values.numel() > 10_000 and abs(float(values.var()) / expected - 1.0) < 4 * (2 / values.numel()) ** 0.5
    fit.close()


def test_hooks_leave_no_trace():
    net = Plain()
    before = {name: set(vars(one)) for name, one in net.named_modules()}
    plain_trainer(dp()).fit(net, DataLoader(records(), batch_size=5))
    after = {name: set(vars(one)) for name, one in net.named_modules()}
    left = {"activations", "_trainer", "_hparams"}  # an empty list of Opacus', and what Lightning leaves
    assert all(after[name] - before[name] <= left for name in after)
    assert not net.layer._forward_hooks and not net.layer._backward_hooks
    assert not hasattr(net.layer.weight, "grad_sample")


# -- batches -----------------------------------------------------------------------------------------------------------
def test_every_record_is_in_every_batch_with_the_same_probability():
    sampler = PoissonBatches(40, 8, "secret", "a")
    counts, sizes = np.zeros(40), []
    for _ in range(150):
        for batch in sampler:
            if sampler.sizes[-1]:
                counts[batch] += 1
            sizes.append(sampler.sizes[-1])
    draws = 150 * 8
    assert abs(counts / draws - 1 / 8).max() < 5 * (1 / 8 * 7 / 8 / draws) ** 0.5
    assert abs(np.var(sizes) / (40 / 8 * 7 / 8) - 1) < 0.2  # Poisson's batches differ in size


def test_other_secrets_and_addresses_draw_other_batches():
    pairs = (("a", "x"), ("a", "x"), ("b", "x"), ("a", "y"))
    drawn = [list(PoissonBatches(50, 5, secret, address)) for secret, address in pairs]
    assert drawn[0] == drawn[1] and drawn[0] != drawn[2] and drawn[0] != drawn[3]


# -- the budget --------------------------------------------------------------------------------------------------------
def test_epsilon_is_the_accountants_and_the_largest_of_the_clients(tmp_path):
    from opacus.accountants import RDPAccountant

    trainer = make_trainer(tmp_path, [FedAvg(), dp(noise_seed=None)], max_rounds=3)
    trainer.fit(module(), datamodule=toy_data(SIZES))
    told = json.loads((trainer.run.path / "privacy.json").read_text())
    expected, data = {}, toy_data(SIZES)
    data.setup("fit")
    for client in SIZES:
        counted, steps = RDPAccountant(), trainer.store.get(client).state["SampleDP"]["history"]
        batches = len(data.client_dataloader(client, "train"))
        assert steps == [[1.0, 1 / batches, steps[0][2]]]
        for _ in range(steps[0][2]):
            counted.step(noise_multiplier=1.0, sample_rate=1 / batches)
        expected[client] = counted.get_epsilon(delta=1e-3)
    assert told["epsilon_by_client"] == pytest.approx(expected, rel=1e-5)
    assert told["epsilon"] == max(told["epsilon_by_client"].values()) and told["private"]


@pytest.mark.slow
def test_noise_is_solved_for_all_rounds_and_a_longer_run_ends_in_time(tmp_path):
    def trainer(rounds):
        return make_trainer(
            tmp_path, [dp(noise_multiplier=None, epsilon=5.0, noise_seed=None)], max_rounds=rounds, name="a"
        )

    first = trainer(3)
    first.fit(module(), datamodule=toy_data(SIZES))
    told = json.loads((first.run.path / "privacy.json").read_text())
    assert all(4.8 < one <= 5.0 for one in told["epsilon_by_client"].values())
    assert first.rounds_done == 3
    longer = trainer(6)
    longer.fit(module(), datamodule=toy_data(SIZES), resume="last")
    assert longer.rounds_done == 3 and "would exceed epsilon=5" in longer.summary["stopped"]["reason"]


def test_noise_is_solved_for_all_visits_of_a_run():
    callback = dp(noise_multiplier=None, epsilon=8.0)
    trainer = federate(module(), toy_data({"0": 24, "1": 24}), [callback], max_rounds=3)
    ((noise, rate, steps),) = trainer.store.get("0").state["SampleDP"]["history"]
    assert trainer.rounds_done == 3 and steps == 9
    assert 6.0 < callback.epsilon_of([(noise, rate, steps)]) <= 8.0


def test_the_room_that_is_left():
    for limit in range(1, 6):
        budget = dp(epsilon=dp().epsilon_of([(1.0, 0.1, limit)]))
        assert budget.room_for([], (1.0, 0.1), 4) == min(limit, 4)
        assert budget.room_for([(1.0, 0.1, 1)], (1.0, 0.1), 4) == min(limit - 1, 4)
    assert dp(epsilon=1e-3).room_for([], (1.0, 0.1), 1) == 0


def test_models_and_means_are_told_as_noised():
    kinds = {"entries": "noised", "models": "noised", "means": "noised", "extra": "in the clear", "logged": "withheld"}
    assert {kind: dp().covers(OutgoingItem(kind, owner="Other")) for kind in kinds} == kinds


@pytest.mark.slow
def test_a_run_ends_before_a_client_exceeds_the_budget(tmp_path):
    trainer = make_trainer(tmp_path, [dp(epsilon=8.0)], max_rounds=30)
    trainer.fit(module(), datamodule=toy_data(SIZES))
    told = trainer.server.state["SampleDP"]["epsilon"]
    assert max(told.values()) <= 8.0 and trainer.rounds_done < 30
    assert "would exceed epsilon=8 in another visit" in trainer.summary["stopped"]["reason"]


# -- the secret --------------------------------------------------------------------------------------------------------
def test_noise_does_not_follow_from_the_seed_and_is_nowhere_but_in_what_clients_keep(tmp_path):
    trainers = [make_trainer(tmp_path / name, [dp(noise_seed=None)], max_rounds=1, seed=0) for name in "ab"]
    for trainer in trainers:
        trainer.fit(module(), datamodule=toy_data(SIZES))
    one, other = (global_state(trainer) for trainer in trainers)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    secret = trainers[0].store.get("0").state["SampleDP"]["secret"]
    holding = [p for p in trainers[0].run.path.rglob("*") if p.is_file() and secret.encode() in p.read_bytes()]
    assert all("checkpoints/last" in path.as_posix() for path in holding)


def test_engines_and_loops_draw_the_same(tmp_path):
    found = [
        global_state(federate(module(), toy_data(SIZES), [dp()], max_rounds=2, **options))
        for options in ({}, {"local_loop": "trainer"})
    ]
    same(*found)


def test_a_resumed_run_gives_the_same_bits(tmp_path):
    whole = make_trainer(tmp_path, [dp()], max_rounds=3, name="whole")
    whole.fit(module(), datamodule=toy_data(SIZES))
    make_trainer(tmp_path, [dp()], max_rounds=1, name="cut").fit(module(), datamodule=toy_data(SIZES))
    again = make_trainer(tmp_path, [dp()], max_rounds=3, name="cut")
    again.fit(module(), datamodule=toy_data(SIZES), resume="last")
    same(global_state(again), global_state(whole))
    assert again.server.state["SampleDP"] == whole.server.state["SampleDP"]


@pytest.mark.parametrize("changed", ["noise_multiplier", "clip"])
def test_a_round_that_is_done_again_with_other_options_has_other_noise(tmp_path, changed, monkeypatch):
    """Of one draw at two lengths anybody could solve for the gradient: three lengths would be on one line.

    A resumed run refuses other options; a site whose own configuration changed has this alone.
    """
    monkeypatch.setattr(SampleDP, "check_changes", lambda *_: None)
    came = []

    class Ends(FederatedCallback):
        facts = Facts(takes_part=False)

        def on_reduced(self, server, state):
            if server.round == 1:
                came.append({name: value.double() for name, value in state.items()})
                raise KeyboardInterrupt
            return state

    options = {"noise_multiplier": 1.0, "clip": 100.0, "noise_seed": None}  # so long that nobody's gradient is cut
    for scale in (0, 1, 2, 3):
        given = options | {changed: options[changed] * max(scale, 1)}
        trainer = make_trainer(
            tmp_path,
            [Ends(), SampleDP(delta=1e-3, **given)],
            max_rounds=1 + (scale > 0),
            local_epochs=None,
            local_steps=1,
            name="a",
        )
        again = {"resume": "last", "allow_config_change": True} if scale else {}
        with pytest.raises(KeyboardInterrupt) if scale else nullcontext():
            trainer.fit(module(), datamodule=toy_data({"0": 16, "1": 24}), **again)
    one, two, three = came
    assert all((three[name] - 2 * two[name] + one[name]).abs().max() > 1e-3 for name in one)


class Shaken(ToyData):
    """Features that are other ones whenever they are read, which no seed repeats."""

    def build(self):
        ids, splits = super().build()
        draw = torch.Generator()

        class Shakes(torch.utils.data.TensorDataset):
            def __getitem__(self, index):
                draw.seed()
                x, y = super().__getitem__(index)
                return x + 0.1 * torch.randn(x.shape, generator=draw), y

        dataset = splits["train"].dataset
        splits["train"] = replace(splits["train"], dataset=Shakes(*dataset.tensors))
        return ids, splits


class Cut(FederatedCallback):
    """Ends the process when the updates of round 2 are there."""

    facts = Facts(takes_part=False)

    def on_round_end(self, server):
        if server.round == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", [ToyData, Shaken])
@pytest.mark.parametrize("ledger", [True, False])
def test_a_visit_that_is_done_again_and_comes_out_differently_counts_twice(tmp_path, kind, ledger):
    """Two releases of one draw with two noises have half the noise together; the same bits again tell nothing."""
    data, options = kind(toy_data({"0": 16, "1": 24}).tensors), {"ledger": str(tmp_path / "ledger")} if ledger else {}

    def fit(rounds, cut, epsilon=None):
        callbacks = [dp(noise_seed=None, epsilon=epsilon, **options), *([Cut()] if cut else [])]
        trainer = make_trainer(tmp_path, callbacks, max_rounds=rounds, local_steps=2, local_epochs=None, name="a")
        with pytest.raises(KeyboardInterrupt) if cut else nullcontext():
            trainer.fit(module(), datamodule=data, resume="last" if rounds > 1 else None)
        return trainer

    fit(1, cut=False)
    for _ in range(2):
        fit(2, cut=True)
    trainer = fit(2, cut=False)
    file = tmp_path / "ledger" / "0.json" if ledger else next((trainer.run.path / "clients").rglob("privacy.json"))
    visits = [steps for (steps,) in json.loads(file.read_text())["runs"].values()]
    assert visits == [[1.0, 0.5, 2]] * (2 if kind is ToyData else 4)
    told = json.loads((trainer.run.path / "privacy.json").read_text())["epsilon_by_client"]
    assert told["0"] == pytest.approx(trainer.callbacks.callbacks[0].epsilon_of(visits), rel=1e-5)


def test_visits_under_way_when_a_run_ends_are_told(tmp_path):
    """Their updates have left the clients, whether the server waits for them or not."""
    loop = Asynchronous(VirtualClock(FixedSpeed(1.0, slowdown={"2": 10})))
    callback = dp(noise_seed=None, ledger=str(tmp_path / "ledger"))
    trainer = make_trainer(tmp_path, [FedAsync(), callback], max_rounds=6, loop=loop, name="a")
    trainer.fit(module(), datamodule=toy_data(SIZES))
    files = {path.stem: json.loads(path.read_text())["runs"] for path in (tmp_path / "ledger").glob("*.json")}
    assert "2" in files
    spent = {
        name: callback.epsilon_of([one for steps in runs.values() for one in steps]) for name, runs in files.items()
    }
    told = json.loads((trainer.run.path / "privacy.json").read_text())
    assert told["epsilon_by_client"] == pytest.approx(spent, rel=1e-5)
    assert told["epsilon"] == pytest.approx(max(spent.values()), rel=1e-5)


def test_a_run_does_not_go_on_with_another_configuration(tmp_path):
    """A round that was cut off would release other updates of the batches that it drew, and count them once."""
    for rounds in (1, 2):  # more rounds are not a change
        trainer = make_trainer(tmp_path, [dp(noise_seed=None)], max_rounds=rounds, name="a")
        trainer.fit(module(), datamodule=toy_data(SIZES), resume="last" if rounds > 1 else None)
    again = make_trainer(tmp_path, [dp(noise_seed=None)], max_rounds=3, name="a", local_steps=1)
    with pytest.raises(ValueError, match=r"SampleDP cannot go on with another configuration \(.*count them once"):
        again.fit(module(), datamodule=toy_data(SIZES), resume="last", allow_config_change=True)


# -- a plain Trainer ---------------------------------------------------------------------------------------------------
def test_a_plain_trainer_spends_its_budget_and_goes_on_counting(tmp_path):
    callback, net = dp(noise_multiplier=None, epsilon=6.0, noise_seed=None), Plain()
    trainer = plain_trainer(callback, max_epochs=2)
    trainer.fit(net, DataLoader(records(), batch_size=5))
    (noise, rate, steps), *others = callback.state_dict()["history"]
    assert (rate, steps, others) == (0.25, 8, []) and 5.5 < callback.epsilon_of([(noise, rate, steps)]) <= 6.0
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="would exceed epsilon=6"):
        plain_trainer(dp(noise_multiplier=None, epsilon=6.0), max_epochs=4).fit(
            Plain(), DataLoader(records(), batch_size=5), ckpt_path=tmp_path / "a.ckpt", weights_only=False
        )
    assert "secret" not in (tmp_path / "a.ckpt").read_bytes().decode("latin1")


def test_a_checkpoint_in_the_middle_counts_the_steps_so_far():
    callback, seen = dp(), []
    net = Plain()
    net.on_train_epoch_end = lambda: seen.append(callback.state_dict()["history"])
    plain_trainer(callback, max_epochs=2).fit(net, DataLoader(records(), batch_size=5))
    assert seen == [[[1.0, 0.25, 4]], [[1.0, 0.25, 8]]]


def test_a_trainer_that_fits_again_goes_on_counting():
    callback = dp()
    trainer, data = plain_trainer(callback, max_epochs=1), DataLoader(records(), batch_size=5)
    trainer.fit(Plain(), data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Plain(), data)
    assert callback.state_dict()["history"] == [[1.0, 0.25, 12]]


@pytest.mark.parametrize("resumed", [False, True])
def test_one_callback_does_not_count_the_fits_of_two_trainers(resumed, tmp_path):
    """What one has counted would stand for steps of the other's checkpoint that nobody has covered."""
    callback, data = dp(), DataLoader(records(), batch_size=5)
    plain_trainer(callback).fit(Plain(), data)
    other = plain_trainer(dp() if resumed else FedAvg())
    other.fit(Plain(), data)
    other.save_checkpoint(tmp_path / "a.ckpt")
    for path in (None, tmp_path / "a.ckpt"):
        with pytest.raises(ValueError, match="counted 4 steps of another fit"):
            plain_trainer(callback, max_epochs=2).fit(Plain(), data, ckpt_path=path, weights_only=False)


def test_two_federations_with_one_callback_are_those_with_two():
    one, steps = dp(), [dp(), dp()]
    shared, apart = (
        [global_state(federate(module(), toy_data(SIZES), [each], max_rounds=1)) for each in callbacks]
        for callbacks in ([one, one], steps)
    )
    same(shared[1], apart[1])
    plain_trainer(one).fit(Plain(), DataLoader(records(), batch_size=5))
    same(global_state(federate(module(), toy_data(SIZES), [one], max_rounds=1)), apart[0])


def test_the_modules_own_loader_is_given_back():
    net, loader = Plain(), DataLoader(records(), batch_size=5)
    net.train_dataloader = lambda: loader
    plain_trainer(dp()).fit(net)
    assert net.train_dataloader() is loader


@pytest.mark.parametrize(
    ("options", "loss", "reason"),
    [
        ({"accumulate_grad_batches": 2}, "mean", "accumulate_grad_batches=1"),
        ({"max_epochs": -1}, "mean", "max_epochs or max_steps"),
        ({}, "sum", "another gradient in a batch than alone"),
        ({}, "pairs", "another gradient in a batch than alone"),
        ({}, "penalty", "of no single record"),
        ({}, "loose", "in layers of torch.nn|of no single record"),
    ],
)
def test_what_a_plain_trainer_refuses(options, loss, reason):
    with pytest.raises(ValueError, match=reason):
        plain_trainer(dp(), **options).fit(Plain(loss), DataLoader(records(), batch_size=5))


# -- beside others -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "other", [FedProx(mu=0.1), FedAdam(), FedPer(), FedRep(), Ditto(), Local()], ids=lambda one: one.key
)
@pytest.mark.fast_cases(3)
def test_methods_that_it_covers(other):
    trainer = federate(module(), toy_data(SIZES), [other, dp()], max_rounds=2)
    assert set(trainer.server.state["SampleDP"]["epsilon"]) == set(SIZES)


@pytest.mark.parametrize(
    ("other", "kind", "reason"),
    [
        (SCAFFOLD(), Toy, "SCAFFOLD takes delta_c from clients"),
        (MOON(), Toy, "MOON adds a term to the loss"),
        (FedALA(), Toy, "reads a client's samples"),
        (GlobalCheckpoint(), Toy, "selects models"),
        (FedAvg(), NormNet, "BatchNorm"),
    ],
    ids=lambda one: getattr(one, "key", None),
)
def test_what_is_refused_before_round_1(other, kind, reason):
    with pytest.raises(ValueError, match=reason):
        federate(module(kind), toy_data(SIZES), [other, dp()], max_rounds=1)


def test_nobody_reads_samples_otherwise():
    class Curious(FedAvg):
        def on_send(self, client, update):
            client.loss()

    with pytest.raises(FederationError, match="gives its samples to the steps of training only"):
        federate(module(), toy_data(SIZES), [Curious(), dp()], max_rounds=1)


def test_neither_noise_nor_epsilon():
    with pytest.raises(ValueError, match="neither noise_multiplier nor epsilon"):
        SampleDP(delta=1e-3)
    with pytest.raises(ValueError, match="visits have several"):
        federate(module(), toy_data(SIZES), [FedRep(), dp(noise_multiplier=None, epsilon=3.0)], max_rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(collect("CASES")))
def test_every_method_is_covered_or_refused_before_round_1(name, tmp_path):
    """Nothing fails later: who reads samples beside the steps of training says so in its facts."""
    from fedlightning.testing.toys import ToyData, ToyModule

    case = collect("CASES")[name]
    wanted = ("participation", "loop", "engine", "optimizer_state")
    options = {"local_steps": 3} | {
        key: value for key, value in case.arguments.items() if key in (*wanted, "local_epochs")
    }
    if "local_epochs" in options:
        del options["local_steps"]
    trainer = make_trainer(tmp_path, [copy.deepcopy(case.algorithm), dp()], max_rounds=2, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            trainer.fit(ToyModule(), ToyData())
        except FederationError as error:
            pytest.fail(f"{name} was let in, and failed: {error}")
        except ValueError:
            return
    assert [str(one.message) for one in said if " failed: " in str(one.message)] == []
    own = [callback for callback in trainer.callbacks.callbacks if callback.key == "SampleDP"]
    clear = [item for item in trainer.server.outgoing if own[0].covers(item) == "in the clear"]
    assert {item.owner for item in clear} <= {"", "SampleDP"}


# -- the ledger --------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_ledger_counts_all_runs_on_the_same_data(tmp_path):
    def run(name, rounds=2, **options):
        callback = dp(noise_seed=None, ledger=str(tmp_path / "ledger"), **options)
        trainer = make_trainer(tmp_path, [callback], max_rounds=rounds, name=name)
        trainer.fit(module(), datamodule=toy_data(SIZES))
        return json.loads((trainer.run.path / "privacy.json").read_text())

    alone, second = run("first"), run("second")
    visits = json.loads((tmp_path / "ledger" / "0.json").read_text())["runs"]
    first, *others = visits.values()
    assert len(visits) == 4 and all(one == first for one in others)  # two visits of two runs
    both = SampleDP(delta=1e-3, noise_multiplier=1.0).epsilon_of([one for steps in visits.values() for one in steps])
    assert second["epsilon_by_client"]["0"] == pytest.approx(both, rel=1e-5) and both > alone["epsilon_by_client"]["0"]
    with pytest.raises(FederationError, match="since others of the ledger have spent"):
        run("third", epsilon=alone["epsilon"] * 1.01)
    (tmp_path / "ledger" / "0.json").write_text("{}")
    with pytest.warns(UserWarning, match="is not a ledger"):
        run("fourth", epsilon=50.0)


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_text('{"runs": {}}')], ids=["gone", "edited"])
def test_a_ledger_that_forgets_during_a_run_ends_it(change, tmp_path):
    """What other runs have spent is gone with it: epsilon would be less than that of this run alone."""

    class Between(FedAvg):
        def on_round_start(self, server):
            if server.round == 1:
                change(tmp_path / "0.json")

    with pytest.raises(FederationError, match=r"has lost what this run has spent before: .* restore it"):
        federate(module(), toy_data({"0": 24}), [Between(), dp(ledger=str(tmp_path))], max_rounds=2)


def test_runs_are_refused_before_they_begin_where_others_have_spent_their_ledger(tmp_path):
    """A sweep began all the same, and its first trial ended at the first visit or had half of its rounds."""
    ledger, steps = Ledger(str(tmp_path), "a site/1", "of another run"), [(1.0, 1.0, 10)]
    ledger.note(steps)
    spent = dp().epsilon_of(steps)
    options = {"ledger": str(tmp_path)}
    for one in (dp(epsilon=spent / 2, **options), dp(noise_multiplier=None, epsilon=3 * spent, **options)):
        with pytest.raises(ValueError, match=r"1 runs would make epsilon .* more than the budget of"):
            one.check_runs([(one, 2)])
    for one in (
        dp(epsilon=3 * spent, **options),
        dp(noise_multiplier=None, epsilon=spent, ledger=str(tmp_path / "new")),
    ):
        one.check_runs([(one, 2)])


def test_steps_are_in_the_ledger_before_they_are_taken(tmp_path):
    callback, net = dp(ledger=str(tmp_path)), Plain()

    def look():
        steps = json.loads((tmp_path / "data.json").read_text())["runs"]
        assert list(steps.values()) == [[[1.0, 0.25, 8]]]
        raise KeyboardInterrupt

    net.on_train_batch_end = lambda *args: look()
    with pytest.raises(SystemExit):
        plain_trainer(callback, max_epochs=2).fit(net, DataLoader(records(), batch_size=5))
    assert len(json.loads((tmp_path / "data.json").read_text())["runs"]) == 1


def test_what_a_module_logs_in_training_does_not_leave():
    class Look(FedAvg):
        seen = []

        def on_update(self, server, update):
            self.seen.append((dict(update.metrics), list(update.logs)))

    federate(module(), toy_data(SIZES), [Look(), dp()], max_rounds=1)
    assert Look.seen == [({}, [])] * 3


def test_a_visit_from_an_earlier_record_is_counted_beside_the_one_it_replaces(tmp_path):
    """As a server may ask of a site, or where it has refused what came; the same visit again is the same release."""
    trainer = make_trainer(tmp_path, [dp(ledger=str(tmp_path / "ledger"))], max_rounds=2)
    trainer.fit(module(), datamodule=toy_data(SIZES))
    engine, server = trainer.federation.engine, trainer.server
    record = trainer.store.get("0")

    def visit(scale):
        model = {name: value * scale for name, value in server.model.items()}
        message = Message(round=7, client="0", state=model, returns=tuple(model))
        update, _ = carry_out(engine.runner, message, record, Evaluate())
        return update, len(json.loads((tmp_path / "ledger" / "0.json").read_text())["runs"])

    (first, one), (again, same_one), (other, two) = visit(1.0), visit(1.0), visit(0.5)
    assert (one, same_one, two) == (3, 3, 4)
    same(first.state, again.state)
    assert float(other.extras["SampleDP"]["epsilon"]) > float(first.extras["SampleDP"]["epsilon"])


@pytest.mark.parametrize("noise", [5e-4, 1e-300])
def test_a_large_epsilon_is_no_update_that_explodes(noise):
    trainer = federate(module(), toy_data(SIZES), [dp(noise_multiplier=noise)], max_rounds=2)
    assert not trainer.server.failures and min(trainer.server.state["SampleDP"]["epsilon"].values()) > 1e6


@pytest.mark.parametrize("given", [{"noise_multiplier": 1e300}, {"clip": 1e-300}, {"clip": 1e300}])
def test_noise_and_clips_that_single_precision_does_not_hold_are_refused(given):
    """The first and last ended the run in its rounds; with the second nothing trained."""
    for kind in (SampleDP, ClientDP):
        with pytest.raises(ConfigurationError, match=rf"{kind.__name__} got {next(iter(given))}=.*Use a number in "):
            kind(**{"delta": 1e-3, "noise_multiplier": 1.0} | given)


class BringsFinder(Toy):
    def configure_callbacks(self):
        return LearningRateFinder()


@pytest.mark.parametrize("module", [Toy(), BringsFinder()], ids=["trainer", "module"])
def test_finders_are_refused_before_round_1(module):
    ordinary = [] if isinstance(module, BringsFinder) else [LearningRateFinder()]
    with pytest.raises(
        ValueError, match="LearningRateFinder takes steps on training data that SampleDP neither covers"
    ):
        federate(module, toy_data(), [SampleDP(delta=1e-3, noise_multiplier=1.0), *ordinary])


def test_lightnings_tuner_is_refused():
    trainer = plain_trainer(SampleDP(delta=1e-3, noise_multiplier=1.0))
    with pytest.raises(ValueError, match="LearningRateFinder takes steps on training data that SampleDP"):
        Tuner(trainer).lr_find(Toy(), DataLoader(TensorDataset(torch.zeros(8, 6), torch.zeros(8).long()), 4))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SampleDP(delta=1e-3, noise_multiplier=2.0),
        lambda: ClientDP(delta=1e-3, noise_multiplier=2.0, clip=1.0),
    ],
    ids=["SampleDP", "ClientDP"],
)
def test_what_a_model_has_spent_goes_on_with_it(make, tmp_path):
    """From export to init_from: what both runs spend is told, and the next export carries the sum."""
    spent, start = [], None
    for number in range(3):
        trainer = make_trainer(tmp_path / str(number), [make()], max_rounds=1, init_from=start)
        told = pytest.warns(UserWarning, match=r"has spent epsilon=.* at delta=0.00\d") if start else nullcontext()
        with told:
            trainer.fit(module(), datamodule=toy_data(SIZES))
        spent.append(json.loads((trainer.recorder.run.path / "privacy.json").read_text()))
        start = trainer.recorder.run.path / "checkpoints" / "global.ckpt"
        carried = torch.load(start, weights_only=True)["fedlightning"]["privacy"]
        assert carried["epsilon"] == pytest.approx(sum(one["epsilon"] for one in spent))
        assert carried["delta"] == pytest.approx(1e-3 * (number + 1))
    assert "together" not in spent[0]
    assert spent[2]["begins_with"]["epsilon"] == pytest.approx(spent[0]["epsilon"] + spent[1]["epsilon"])
