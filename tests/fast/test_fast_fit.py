"""The fast local loop is Lightning's Trainer, bit for bit; where it cannot be, it says so and steps aside."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchmetrics import Accuracy

from fedlightning.assemble import CLIENT_PARTS
from fedlightning.callbacks import APFL, SCAFFOLD, Ditto, FedProx, FedRep
from fedlightning.client.blueprint import Blueprint
from fedlightning.client.requests import LocalSettings
from fedlightning.client.runtime import Scorer
from fedlightning.contract import CallbackList
from fedlightning.fast.module_copier import Copier
from tests.helpers import CLASSES, NormNet, Spy, Toy, make_trainer, samples, spied, toy_data

# isort: split
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, Timer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.types import LRSchedulerConfig

from fedlightning.datamodules import ArrayDataset
from fedlightning.datamodules.resident_batches import ResidentBatches, SampledBatches, resident_batches

CPU = torch.device("cpu")
SIZES = [22, 40, 15]  # the last batches are ragged: of 6, 8 and 7


def alike(a: Any, b: Any) -> bool:
    """Equal trees of tensors and values: names in the same order, types, bits."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and bool(torch.equal(a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)


def both(module, callbacks=(), make=dict, data=None, **options):
    """Two rounds with either loop; everything that leaves a client and everything that stays must be the same."""
    data = data or toy_data(SIZES)
    spies = []
    for loop in ("trainer", "fast"):
        mine = [copy.deepcopy(callback) for callback in callbacks]
        trainer, spy = spied(copy.deepcopy(module), data, mine, local_loop=loop, **options, **make())
        assert trainer.federation.engine.runner.loop.used.startswith(loop)
        spies.append(spy)
    slow, fast = spies
    assert len(slow.updates) == len(fast.updates) > 0
    for one, other in zip(slow.updates, fast.updates, strict=True):
        for what in ("state", "extras", "metrics", "steps", "skipped", "lr_sum", "num_samples"):
            assert alike(getattr(one, what), getattr(other, what)), f"{what} of client {one.client}, round {one.round}"
    for one, other in zip(slow.records, fast.records, strict=True):
        for client in one:
            for what in ("personal", "state", "lightning", "steps", "lr_sum"):
                assert alike(getattr(one[client], what), getattr(other[client], what)), f"{what} that {client} keeps"
    return fast


def slow(*values):
    """A case that says less than its neighbours."""
    return pytest.param(*values, marks=pytest.mark.slow)


def fp16():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


EPOCHS, STEPS = {"local_epochs": 2}, {"local_steps": 7}
FAST_PAIRS = [("sgd", EPOCHS), ("adamw", STEPS), ("steplr", EPOCHS), ("onecycle", STEPS)]
SLOW_PAIRS = [("sgd", STEPS), ("adamw", EPOCHS), ("steplr", STEPS), ("onecycle", EPOCHS)]


@pytest.mark.parametrize("optimizer, work", FAST_PAIRS + [slow(*pair) for pair in SLOW_PAIRS], ids=str)
def test_optimizers_schedulers_and_dropout(optimizer, work):
    spy = both(Toy(optimizer, dropout=0.3), **work)
    assert any((value != spy.rounds[0][name]).any() for name, value in spy.rounds[1].items())


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true", "fp16"])
def test_precisions(precision):
    make = fp16 if precision == "fp16" else lambda: {"precision": precision}
    both(NormNet("adam", dropout=0.3), make=make, local_epochs=2, gradient_clip_val=0.3)


PLANS = [
    {"accumulate_grad_batches": 2},
    {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    slow({"gradient_clip_val": 0.05}),
    {"limit_train_batches": 2},
    slow({"limit_train_batches": 0.5}),
    slow({"detect_anomaly": True, "lr_decay": 0.5}),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_trainer_arguments(plan):
    both(Toy("momentum"), local_epochs=2, **plan)
    both(Toy("momentum"), make=fp16, max_rounds=1, **plan)


class Plateau(Toy):
    """A plateau scheduler on what was logged, by epoch or by step."""

    interval = "epoch"

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("step_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        monitor = "train_loss" if self.interval == "epoch" else "step_loss"
        schedule = {"scheduler": plateau, "monitor": monitor, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class PlateauByStep(Plateau):
    interval = "step"


class Manual(Toy):
    """Two optimizers, stepped by hand, one of them scheduled by hand."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def configure_optimizers(self):
        first = torch.optim.SGD(self.net[0].parameters(), 0.1)
        second = torch.optim.Adam(self.net[3].parameters(), 0.05)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 2, 0.5)]

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = F.cross_entropy(self(x), y)
            self.manual_backward(loss)
            self.log("manual", loss, on_step=True, on_epoch=True)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()
        self.log("steps", float(self.trainer.global_step))


class LBFGS(Toy):
    """Its step calls the closure several times."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)


class Fused(Toy):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05, fused=True)


class Nothing(Toy):
    """Skips every other batch."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


class Dicts(Toy):
    """Returns more than a loss, and reads it back."""

    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "index": batch_idx}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("twice", outputs["loss"] * 2)
        self.log("most", float(outputs["index"]), on_step=False, on_epoch=True, reduce_fx="max")


class Own(Toy):
    """Overrides what Lightning lets one override."""

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        if batch_idx % 2 == 0:
            optimizer.step(closure=closure)
        else:
            closure()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def backward(self, loss):
        (loss * 1.5).backward()

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return [batch[0] * 2, batch[1]]


class Frozen(Toy):
    def on_fit_start(self):
        self.net[0].requires_grad_(False)


class Skips(Toy):
    """Leaves an epoch after two batches."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


STRANGE = [Plateau, PlateauByStep, Manual, LBFGS, Fused, Nothing, Dicts, Own, Frozen, Skips]


@pytest.mark.parametrize("kind", STRANGE, ids=lambda kind: kind.__name__)
def test_modules(kind):
    both(kind("steplr", dropout=0.2), local_epochs=3, max_rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STRANGE, ids=lambda kind: kind.__name__)
def test_modules_in_other_precisions(kind):
    both(kind("momentum", dropout=0.2), local_steps=7, precision="64-true")
    if kind not in (LBFGS, Fused):
        plan = {} if kind is Manual else {"accumulate_grad_batches": 2}
        both(kind("momentum", dropout=0.2), make=fp16, local_epochs=2, **plan)


# -- optimizers that go on -------------------------------------------------------------------------------------------
class Remembers(Toy):
    """Puts something of its own into a checkpoint, and reads it back beside its weights."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["visits"] = checkpoint.get("visits", getattr(self, "visits", 0)) + 1
        checkpoint["norm"] = checkpoint["state_dict"]["net.0.weight"].norm()

    def on_load_checkpoint(self, checkpoint):
        self.visits = checkpoint["visits"]
        checkpoint["state_dict"] = {k: v + 0.01 * self.visits for k, v in checkpoint["state_dict"].items()}

    def on_train_epoch_end(self):
        self.log("clock", float(self.trainer.global_step + 100 * self.current_epoch), on_epoch=True, on_step=False)


class Counts(Callback):
    """Has a state, and adds to the checkpoint."""

    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, *args):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["seen"] = [self.batches, trainer.global_step]

    def on_load_checkpoint(self, trainer, module, checkpoint):
        assert checkpoint["seen"][0] == checkpoint["callbacks"][self.state_key]["batches"]


class SetsUp(Toy):
    """Changes its weights before a fit: what goes on has those from before."""

    def setup(self, stage):
        if stage == "fit":
            self.net[0].weight.data.mul_(1.1)


class Asks(Toy):
    """Looks into a checkpoint without knowing what is there, and keeps the weights that it was shown."""

    seen, before = 0, torch.zeros(CLASSES)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["there"] = ["hyper_parameters" in checkpoint, "state_dict" in checkpoint, checkpoint.get("epoch")]
        checkpoint["asked"] = [checkpoint.get("global_step", -1), self.seen, self.before]

    def on_load_checkpoint(self, checkpoint):
        self.seen = [checkpoint.get("epoch", -1), len(checkpoint["loops"]["fit_loop"]), checkpoint["asked"][0]]
        self.before = checkpoint["state_dict"]["net.3.bias"]


KEPT = [
    (Toy("adamw", dropout=0.3), EPOCHS, ()),
    (SetsUp("momentum"), {"local_epochs": 1}, ()),
    (Asks("momentum"), {"local_epochs": 1}, ()),
    (Toy("onecycle"), STEPS, ()),
    (Toy("steplr"), {"local_epochs": 1, "accumulate_grad_batches": 2, "lr_decay": 0.5}, ()),
    (Manual(), {"local_steps": 5}, ()),
    (Remembers("momentum"), {"local_epochs": 1}, (Counts(),)),
    slow(Toy("momentum"), STEPS, ()),
    slow(Skips("steplr"), EPOCHS, ()),
    slow(Plateau(), {"local_epochs": 1}, ()),
    slow(PlateauByStep(), EPOCHS, ()),
    slow(LBFGS(), {"local_epochs": 1}, ()),
    slow(Toy("adam"), EPOCHS, (Ditto(),)),
    slow(Toy("adam"), EPOCHS, (APFL(),)),
    slow(Toy("adam"), EPOCHS, (FedRep(personal=["net.3"]),)),
]


@pytest.mark.parametrize("module, work, callbacks", KEPT, ids=lambda value: type(value).__name__)
def test_optimizers_schedulers_and_clocks_go_on(module, work, callbacks):
    spy = both(module, callbacks, optimizer_state="keep", max_rounds=3, **work)
    kept = spy.records[-1]["1"].lightning["fit"]
    assert kept["steps"] == sum(r["1"].steps for r in spy.records) * (2 if isinstance(module, Manual) else 1)


@pytest.mark.parametrize("kind", [Manual, LBFGS, Own], ids=lambda kind: kind.__name__)
def test_visits_that_go_on_have_as_many_steps_as_those_that_start_anew(kind):
    counts = []
    for state in ("reset", "keep"):
        _, spy = spied(
            kind("sgd"), toy_data(SIZES), optimizer_state=state, local_loop="fast", max_rounds=4, local_steps=5
        )
        counts.append([update.steps for update in spy.updates])
    assert counts[0] == counts[1]


def test_a_gradient_scaler_goes_on():
    both(NormNet("adam"), make=fp16, optimizer_state="keep", max_rounds=3, **EPOCHS)


class Leaves(Toy):
    """Asks for what only Lightning's Trainer has, from the third visit on."""

    def on_train_start(self):
        if self.trainer.current_epoch >= 4:
            assert self.trainer.fit_loop is not None


def test_either_loop_goes_on_from_what_the_other_has_kept():
    runs, module = [], Leaves("adamw", dropout=0.3)
    for loop in ("trainer", "auto"):
        options = {"optimizer_state": "keep", "max_rounds": 4, **EPOCHS}
        trainer, spy = spied(copy.deepcopy(module), toy_data(SIZES), local_loop=loop, **options)
        runs.append([(update.state, update.metrics) for update in spy.updates])
        runs[-1].append([record.lightning for record in spy.records[-1].values()])
    assert alike(*runs) and "trainer.fit_loop is used" in trainer.federation.engine.runner.loop.used


class Logs(Toy):
    """Logs in every form and from every hook that may."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.accuracy = Accuracy("multiclass", num_classes=CLASSES)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.accuracy(self(batch[0]), batch[1])
        self.log("step", loss)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"sum": loss, "number": 2}, on_epoch=True, on_step=False, reduce_fx="sum")
        self.log("least", loss, on_epoch=True, reduce_fx=min)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("half", loss.to(torch.bfloat16), on_epoch=True)
        self.log("double", loss.double(), on_epoch=True, batch_size=3)
        self.log("whole", torch.tensor([batch_idx]), on_epoch=True)
        self.log("hidden", loss, logger=False, on_epoch=True)
        return loss

    def on_train_start(self):
        self.log("start", 1.0)

    def on_train_epoch_start(self):
        self.log("epoch", float(self.current_epoch))

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", sum(p.grad.norm() for p in self.parameters()), on_epoch=True)

    def on_train_epoch_end(self):
        self.log("end", self.trainer.callback_metrics["both_epoch"] + 1)


@pytest.mark.parametrize("make", [dict, slow(fp16), slow(lambda: {"precision": "64-true"})], ids=["32", "fp16", "64"])
def test_everything_that_is_logged(make):
    spy = both(Logs(), make=make, local_epochs=2)
    assert {"step", "both", "both_step", "both_epoch", "accuracy_epoch", "norm_step", "end"} <= set(
        spy.updates[0].metrics
    )


HOOKS = [name for name in vars(Callback) if name.startswith(("on_train", "on_fit"))]
HOOKS += ["setup", "teardown", "on_before_zero_grad", "on_before_backward", "on_after_backward"]
HOOKS += ["on_before_optimizer_step"]


class Diary(Callback):
    """Notes every hook with what the trainer looks like in it. The list is shared by the copies on purpose."""

    seen: list[Any] = []


def _noting(name):
    def hook(self, trainer, module, *args, **kwargs):
        numbers = [
            float(torch.as_tensor(a).detach())
            for a in args
            if isinstance(a, int) or (isinstance(a, torch.Tensor) and a.numel() == 1)
        ]
        clocks = (trainer.global_step, trainer.current_epoch, trainer.is_last_batch, trainer.should_stop)
        limits = (trainer.max_epochs, trainer.max_steps, trainer.num_training_batches, trainer.training)
        Diary.seen.append((name, len(args), tuple(kwargs), numbers, clocks, limits, module.global_step))

    return hook


for _name in HOOKS:
    setattr(Diary, _name, _noting(_name))


@pytest.mark.parametrize("plan", [{"local_epochs": 2}, {"local_steps": 4, "accumulate_grad_batches": 2}], ids=str)
def test_callbacks_see_the_same_calls_in_the_same_order(plan):
    diaries, module = [], Toy()
    for loop in ("trainer", "fast"):
        Diary.seen.clear()
        spied(module, toy_data(SIZES), [Diary()], local_loop=loop, max_rounds=1, **plan)
        diaries.append(list(Diary.seen))
    assert diaries[0] == diaries[1]
    assert {name for name, *_ in diaries[0]} == set(HOOKS)


def test_user_callbacks_stop_and_log():
    log = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, *_: module.log("z", outputs["loss"]))
    spy = both(Toy(), [EarlyStopping("train_loss", patience=0, min_delta=1.0), log], local_epochs=5, max_rounds=1)
    assert {update.steps for update in spy.updates} == {6, 10, 4}  # two epochs, then no better
    assert "z" in spy.updates[0].metrics


@pytest.mark.parametrize(
    "callback",
    [SCAFFOLD(), FedProx(mu=0.5), slow(APFL()), FedRep(personal=["net.3"])],
    ids=lambda callback: callback.key,
)
def test_algorithms(callback):
    both(Toy("momentum", dropout=0.2) if not isinstance(callback, SCAFFOLD) else Toy("sgd"), [callback], local_epochs=2)


# -- data ------------------------------------------------------------------------------------------------------------
class Loaders(Toy):
    """Sums what it saw, to compare the order of batches too."""

    def training_step(self, batch, batch_idx):
        self.log("seen", (batch[0].sum() * (batch_idx + 1)).detach(), on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


def test_loaders_of_the_user_shuffle_alike():
    module = Loaders("momentum", dropout=0.2)
    seen = []
    for loop in ("trainer", "fast"):
        given = {c: DataLoader(TensorDataset(*samples(c, "train", 21)), batch_size=8, shuffle=True) for c in "ab"}
        spy = Spy()
        trainer = make_trainer(None, [spy], local_loop=loop, local_epochs=2)
        trainer.fit(copy.deepcopy(module), train_dataloaders=given)
        seen.append([(update.state, update.metrics) for update in spy.updates])
    assert alike(seen[0], seen[1])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_resident_batches_are_the_loaders(shuffle, drop_last):
    data = toy_data([22, 8], shuffle=shuffle, drop_last=drop_last)
    data.setup("fit")
    for client, split in (("0", "train"), ("1", "train"), ("0", "val")):
        loader = data.client_dataloader(client, split)
        mine = resident_batches(loader, CPU)
        assert mine is not None
        for epoch in range(2):
            if split == "train":
                loader.sampler.set_epoch(epoch)
            got, expected = list(mine), list(loader)
            assert [len(batch[1]) for batch in got] == [len(batch[1]) for batch in expected]
            assert alike(got, expected)


def test_only_whole_tensors_in_memory_are_resident():
    data = toy_data([22])
    data.setup("fit")
    own = data.client_dataloader("0", "train")
    plain = TensorDataset(torch.zeros(22, 3))
    assert isinstance(resident_batches(own, CPU), ResidentBatches)
    for dataset in (own.dataset, plain, Subset(plain, [3, 1]), ConcatDataset([plain, Subset(plain, [0])])):
        assert isinstance(resident_batches(DataLoader(dataset, batch_size=8), CPU), SampledBatches)
    own_class = type("Own", (TensorDataset,), {})(torch.zeros(22, 3))
    mixed = ConcatDataset([plain, TensorDataset(torch.zeros(22, 4))])
    for other in (
        DataLoader(own_class),
        DataLoader(Subset(own_class, [1])),
        DataLoader(mixed),
        DataLoader(range(22)),
        DataLoader(plain, num_workers=1),
        DataLoader(plain, collate_fn=list),
        DataLoader(plain, batch_size=None),
        type("Own", (DataLoader,), {})(plain),
    ):
        assert resident_batches(other, CPU) is None


class EveryThird(Sampler):
    """A user's sampler, which draws a number for each sample."""

    def __iter__(self):
        return (3 * int(torch.randint(5, ())) for _ in range(9))

    def __len__(self):
        return 9


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"shuffle": True, "generator": 4},
        {"sampler": WeightedRandomSampler(torch.arange(1.0, 16.0), 20)},
        {"sampler": SubsetRandomSampler([2, 7, 11, 5])},
        {"sampler": RandomSampler(range(15), replacement=True, num_samples=7)},
        {"sampler": SequentialSampler(range(5))},
        {"sampler": EveryThird()},
        {"batch_sampler": [[1, 2], [0], [14, 3, 3]]},
        {"batch_sampler": BatchSampler(RandomSampler(range(15)), 7, True)},
        {"batch_sampler": BatchSampler(range(14, -1, -1), 7, True), "generator": 4},
    ],
)
@pytest.mark.parametrize("kind", ["tensors", "subset", "union", "arrays"])
def test_sampled_batches_are_the_loaders_and_draw_the_same_numbers(kind, options, drop_last):
    x, y = torch.randn(20, 3), torch.arange(20)
    dataset = {
        "tensors": TensorDataset(x[:15], y[:15]),
        "subset": Subset(Subset(TensorDataset(x, y), range(19, 2, -1)), torch.arange(15)),
        "union": ConcatDataset([TensorDataset(x[:6], y[:6]), Subset(TensorDataset(x, y), [-1, *range(10, 18)])]),
        "arrays": ArrayDataset(x[:15], y[:15], transform=lambda x: x * 2),
    }[kind]
    found = []
    for resident in (False, True):
        torch.manual_seed(3)
        given = dict(options)
        if "generator" in given:
            given["generator"] = torch.Generator().manual_seed(given["generator"])
        if "batch_sampler" not in given:
            given |= {"batch_size": 4, "drop_last": drop_last}
        loader = DataLoader(dataset, **given)
        source = resident_batches(loader, CPU) if resident else loader
        states, batches = [], []
        for _ in range(2):
            iterator = iter(source)
            states.append(torch.get_rng_state())
            for batch in iterator:
                states.append(torch.get_rng_state())
                batches.append(batch)
        found.append((batches, states))
    (first, before), (second, after) = found
    assert type(source) is SampledBatches or (not options and type(source) is ResidentBatches)
    assert len(first) == len(second) and all(map(torch.equal, before, after))
    for one, other in zip(first, second, strict=True):
        assert type(one) is type(other) is list and all(map(torch.equal, one, other))
        assert [part.stride() for part in one] == [part.stride() for part in other]


# -- where it does not apply -----------------------------------------------------------------------------------------
class Unpicklable(Toy):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"function": lambda x: x})


class Spectator(Toy):
    """Looks at a part of the Trainer that the fast loop does not have, and would take no for an answer."""

    def on_train_epoch_end(self):
        try:
            self.batches = self.trainer.fit_loop.total_batch_idx if hasattr(self.trainer, "fit_loop") else None
        except Exception:
            self.batches = None


class Intruder(Toy):
    def on_train_start(self):
        self.trainer.limit_train_batches = 1


class BringsItsOwn(Toy):
    """Is scored by Lightning's Trainer, which then has the module's callbacks."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)

    def configure_callbacks(self):
        return [EarlyStopping("val_loss")]


class Swaps(Toy):
    """Goes on with another optimizer, or another schedule, in its second epoch."""

    def __init__(self, name="optimizers"):
        super().__init__("momentum")
        self.name = name

    def on_train_epoch_start(self):
        strategy = self.trainer.strategy
        if self.current_epoch == 1 and self.name == "optimizers":
            strategy.optimizers = [torch.optim.SGD(self.parameters(), 0.01)]
        elif self.current_epoch == 1:
            schedule = torch.optim.lr_scheduler.ExponentialLR(self.trainer.optimizers[0], 0.1)
            strategy.lr_scheduler_configs = [LRSchedulerConfig(schedule)]


REFUSALS = [
    (Swaps, {"local_epochs": 3}, "trainer.strategy.optimizers is set"),
    (partial(Swaps, "schedules"), {"local_epochs": 3}, "trainer.strategy.lr_scheduler_configs is set"),
    (BringsItsOwn, {"sanity_check": True, "evaluation": 1}, "BringsItsOwn overrides configure_callbacks"),
    (Toy, {"check_val_every_n_epoch": 1}, "check_val_every_n_epoch asks for validation"),
    (Toy, {"profiler": "simple"}, "profiler='simple' measures Lightning's own loop"),
    (Toy, {"callbacks": [Timer("00:01:00:00")]}, "the callback Timer steers Lightning's own loop"),
    (Toy, {"overfit_batches": 2}, "overfit_batches=2 is for Lightning's own loop"),
    (Unpicklable, {}, "the hyper-parameter function of Unpicklable cannot be pickled"),
    (Spectator, {}, "trainer.fit_loop is used, which the fast loop does not have"),
    (Intruder, {}, "trainer.limit_train_batches is set, which the fast loop does not have"),
]


@pytest.mark.parametrize("kind, options, reason", REFUSALS, ids=[reason[:40] for *_, reason in REFUSALS])
def test_auto_steps_aside_and_says_why(kind, options, reason, capfd):
    module, data, options = kind(), toy_data([16, 9]), dict(options)
    callbacks = options.pop("callbacks", [])
    runs = []
    for loop in ("trainer", "auto"):
        trainer, spy = spied(module, data, copy.deepcopy(callbacks), local_loop=loop, **options)
        runs.append([(update.state, update.metrics) for update in spy.updates])
    assert alike(*runs)
    assert reason in trainer.federation.engine.runner.loop.used
    with pytest.raises(Exception, match="local_loop='fast' cannot be used") as refused:
        spied(module, data, copy.deepcopy(callbacks), local_loop="fast", **options)
    assert reason in str(refused.value) and "Use local_loop='auto' or 'trainer'" in str(refused.value)


def test_unknown_loops_are_refused():
    with pytest.raises(ValueError, match=r"local_loop='quick'\. Use 'auto', 'trainer' or 'fast'"):
        spied(Toy(), toy_data([8]), local_loop="quick")


# -- copies ----------------------------------------------------------------------------------------------------------
def test_a_recorded_copy_is_a_deep_copy():
    module = Logs("adam")
    module.tied = module.net[0].weight
    module.notes = {"a": [1, {"b": torch.arange(3)}], "function": F.relu}
    module.twice = [module.notes, module.notes]
    copier = Copier(module)
    assert copier._recipe is not None
    first, second = copier.copy(), copier.copy()
    for made in (first, second):
        assert type(made) is Logs and made is not module
        assert alike(dict(made.state_dict()), dict(module.state_dict()))
        assert made.tied is made.net[0].weight and made.tied is not module.tied
        assert made.twice[0] is made.notes is made.twice[1] and made.notes is not module.notes
        assert made.notes["function"] is F.relu and torch.equal(made.notes["a"][1]["b"], torch.arange(3))
        assert made.hparams == module.hparams and made.hparams is not module.hparams
        assert vars(made).keys() == vars(copy.deepcopy(module)).keys()
    with torch.no_grad():
        first.net[0].weight.add_(1)
    assert not torch.equal(first.net[0].weight, second.net[0].weight)


def test_what_copies_itself_is_copied_by_its_own_rule():
    class Shared:
        def __deepcopy__(self, memo):
            return self

    module = Toy()
    module.shared = Shared()
    copier = Copier(module)
    assert copier._recipe is None
    assert copier.copy().shared is module.shared


# -- scores ----------------------------------------------------------------------------------------------------------
class Scores(Logs):
    """Scores with a metric object, by step and by epoch, and from the hooks of an evaluation."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)
        self.log("both", self(batch[0]).mean(), on_step=True, on_epoch=True)
        self.log("only_step", 1.0, on_step=True, on_epoch=False)
        self.log("unseen", 1.0, logger=False)

    def on_validation_epoch_end(self):
        self.log("end", self.trainer.callback_metrics["both"] + 1)


class LossOnly(Toy):
    def validation_step(self, batch):
        return {"loss": F.cross_entropy(self(batch[0]), batch[1])}


class Curious(Toy):
    """Asks for what only a Trainer has."""

    def on_validation_epoch_end(self):
        self.log("loops", float(self.trainer.validate_loop is not None))


SETTINGS = [
    {},
    slow({"precision": "bf16-mixed"}),
    {"precision": "64-true"},
    slow({"limit_val_batches": 2}),
    {"inference_mode": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_scores_are_those_of_the_trainer(settings):
    data = toy_data([8, 8], val=21)
    data.setup("fit")
    arguments = {"accelerator": "cpu", "devices": 1} | settings
    slow_blueprint, blueprint = (
        Blueprint(
            Toy(),
            CallbackList([]),
            LocalSettings(0, 1, trainer_arguments=arguments, local_loop=loop),
            parts=CLIENT_PARTS,
        )
        for loop in ("trainer", "auto")
    )
    slow, fast = Scorer(slow_blueprint), Scorer(blueprint)
    for kind in (Toy, NormNet, Scores, LossOnly, Curious):
        module = slow_blueprint.convert(kind()).train()
        for split in ("val", "test", "val"):  # the second time it is not a trial
            for client in "01":
                loader = data.client_dataloader(client, split)
                expected = slow.score(copy.deepcopy(module), loader, split)
                assert alike(fast.score(module, loader, split), expected) and expected
                assert module.training and module._trainer is None and "log" not in vars(module)
    assert set(fast.evaluators[0].refused) == {Curious}
