"""What a module keeps while it is scored: the next client's score knows nothing of it, on any engine."""

from __future__ import annotations

import random
from array import array
from collections import Counter, UserList, defaultdict, deque
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import Accuracy, MeanMetric, SumMetric

from fedlightning.callbacks import FedAvg
from fedlightning.client.kept import Kept
from fedlightning.errors import ConfigurationError
from fedlightning.options import Processes
from tests.helpers import CLASSES, Toy, differs, federate, global_state, make_trainer, mostly_slow, toy_data


class Meter:
    """A mean of the user's own, that nobody resets."""

    def __init__(self):
        self.sums = {"total": 0.0, "count": 0}

    def add(self, value, count):
        self.sums["total"] += value * count
        self.sums["count"] += count


class Slotted:
    __slots__ = ("number",)

    def __init__(self):
        self.number = 0


class Hits(dict):
    hits = 0


def appended(sizes):
    sizes.append(1)
    return float(len(sizes))


def closing_over_a_list():
    calls = []
    return lambda: appended(calls)


def closing_over_a_number():
    calls = 0

    def call():
        nonlocal calls
        calls += 1
        return calls

    return call


def with_a_default():
    return lambda calls=[]: appended(calls)


def with_an_attribute():
    def call():
        call.calls = getattr(call, "calls", 0) + 1
        return call.calls

    return call


def by_a_late_slot():
    class Hidden:
        __slots__ = ("__calls",)

        def __call__(self):
            self.__calls = getattr(self, "_Hidden__calls", 0) + 1
            return self.__calls

    return Hidden()


class Keeper(Toy):
    """Keeps in each of these ways what it has seen, clears nothing, and logs what follows from it."""

    of_class: ClassVar = []

    def __init__(self):
        super().__init__()
        self.outs, self.cache, self.labels, self.last = [], {}, set(), deque(maxlen=3)
        self.count, self.best, self.first = 0, float("inf"), None
        self.total, self.array = torch.zeros(()), np.zeros(1)
        self.nested = ({"sizes": [[]]}, None)
        self.classes, self.meter, self.space = Counter(), Meter(), SimpleNamespace(steps=0)
        self.by_class = defaultdict(list)
        self.draws = random.Random(0)
        self.accuracy, self.hidden, self.summed = (
            Accuracy("multiclass", num_classes=CLASSES),
            [MeanMetric()],
            SumMetric(),
        )
        self.slotted, self.hits, self.hidden_part = Slotted(), Hits(), [nn.Linear(1, 1, bias=False)]
        nn.init.zeros_(self.hidden_part[0].weight)
        self.bytes, self.numbers, self.users = bytearray(), array("d"), UserList()
        self.bound, self.of_list, self.partial = Meter().add, [].append, partial(appended, [])
        self.objects, self.frozen = np.array([[], [0]], dtype=object), frozenset([Meter()])
        self.save_hyperparameters({"scored": 0})
        self.net[0].seen = []
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def score(self, batch, split):
        x, y = batch
        logits = self.logits(x)
        loss = F.cross_entropy(logits, y)
        self.outs.append((logits.argmax(-1), y))
        self.labels |= set(y.tolist())
        self.last.append(len(y))
        self.count += len(y)
        self.best = min(self.best, loss.item())
        self.first = x[0] if self.first is None else self.first
        self.total += len(y)
        self.array += len(y)
        self.nested[0]["sizes"][0].append(len(y))
        self.classes.update(y.tolist())
        self.meter.add(loss.item(), len(y))
        self.space.steps += 1
        self.by_class[int(y[0])].append(1)
        self.accuracy.update(logits, y)
        self.hidden[0].update(loss)
        self.summed.update(loss)
        self.net[0].seen.append(x)
        self.steps += 1
        self.slotted.number += 1
        self.hits.hits += 1
        self.hidden_part[0].weight.data += 1
        self.bytes.append(1)
        self.numbers.append(1)
        self.users.append(1)
        self.bound(1, 1)
        self.of_list(1)
        self.objects[1].append(1)
        next(iter(self.frozen)).add(1, 1)
        self.of_class.append(1)
        self.hparams["scored"] += 1
        if not hasattr(self, "late"):
            self.late = SumMetric()
        self.late.update(1)
        self.log("partial", self.partial(), reduce_fx="max")
        self.log("drawn", self.draws.random())
        self.log("loss", loss)

    def validation_step(self, batch, batch_idx):
        self.cache.setdefault(batch_idx, batch)
        x, y = self.cache[batch_idx]
        self.log("cached", (self.logits(x).argmax(-1) == y).float().mean())
        self.score(batch, "val")

    def on_validation_epoch_end(self):
        found, labels = (torch.cat(parts) for parts in zip(*self.outs, strict=True))
        values = {
            "outs": (found == labels).float().mean(),
            "labels": len(self.labels),
            "last": sum(self.last),
            "count": self.count,
            "best": self.best,
            "first": self.first.sum(),
            "total": self.total,
            "array": self.array[0],
            "nested": sum(self.nested[0]["sizes"][0]),
            "classes": self.classes.most_common(1)[0][1],
            "meter": self.meter.sums["total"] / self.meter.sums["count"],
            "space": self.space.steps,
            "by_class": sum(map(len, self.by_class.values())),
            "accuracy": self.accuracy.compute(),
            "hidden": self.hidden[0].compute(),
            "summed": self.summed.compute(),
            "seen": torch.cat(self.net[0].seen).mean(),
            "steps": self.steps,
            "slotted": self.slotted.number,
            "hits": self.hits.hits,
            "hidden_part": self.hidden_part[0].weight.item(),
            "bytes": len(self.bytes),
            "numbers": len(self.numbers),
            "users": len(self.users),
            "bound": self.bound.__self__.sums["count"],
            "of_list": len(self.of_list.__self__),
            "objects": len(self.objects[1]),
            "frozen": next(iter(self.frozen)).sums["count"],
            "of_class": len(self.of_class),
            "hparams": self.hparams["scored"],
            "late": self.late.compute(),
        }
        self.log_dict({name: float(value) for name, value in values.items()})

    def on_test_epoch_end(self):
        self.on_validation_epoch_end()


class Appending(Toy):
    """Keeps what a stack can keep: the sizes of its batches, and its accuracy in every epoch."""

    def __init__(self):
        super().__init__()
        self.accuracy, self.epochs = Accuracy("multiclass", num_classes=CLASSES), []

    def validation_step(self, batch, batch_idx):
        self.accuracy.update(self.logits(batch[0]), batch[1])
        self.log("val_loss", F.cross_entropy(self.logits(batch[0]), batch[1]))

    test_step = validation_step

    def on_validation_epoch_end(self):
        self.epochs.append(float(self.accuracy.compute()))
        self.log("best", max(self.epochs))

    on_test_epoch_end = on_validation_epoch_end


def scores(folder, kind, **options):
    torch.manual_seed(0)
    module = kind()
    data = toy_data({"a": 24, "b": 16, "c": 20}, val=10, batch_size=4)
    trainer = make_trainer(folder / "-".join(map(str, options.values())), [FedAvg()], **options)
    trainer.fit(module, data)
    trainer.test(verbose=False)
    rows = {(row.round, row.stage, row.client, row.data, row.split, row.metric): row.value for row in trainer.rows}
    return {key: value for key, value in rows.items() if value == value}


@pytest.mark.parametrize("kind", [Keeper, Appending])
def test_every_engine_and_loop_gives_the_scores_of_a_client_alone(tmp_path, kind):
    found = scores(tmp_path, kind)
    assert found == scores(tmp_path, kind, engine=Processes(2))
    assert found == pytest.approx(scores(tmp_path, kind, engine="vectorized"), abs=1e-5)
    assert found == pytest.approx(scores(tmp_path, kind, local_loop="trainer"), abs=1e-5)
    if kind is Keeper:
        sizes = {key[2:4]: value for key, value in found.items() if key[4:] == ("val", "count")}
        assert {size for (_, data), size in sizes.items() if data == "local"} == {10}
        for metric in (
            *("slotted", "hits", "hidden_part", "bytes", "numbers", "users", "bound", "of_list", "objects", "frozen"),
            *("late", "of_class", "hparams", "partial"),
        ):
            values = {key[2]: value for key, value in found.items() if key[3:] == ("local", "val", metric)}
            assert len(set(values.values())) == 1, metric
        assert {key[5] for key in found} >= {"outs", "cached", "meter", "accuracy", "hidden", "summed", "drawn"}


def test_what_it_keeps_is_put_back_to_the_same_objects():
    module = Keeper()
    kept, outs, total = Kept(module), module.outs, module.total
    before = {name: repr(value) for name, value in vars(module).items()}
    batch = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    module.log = module.log_dict = lambda *args, **kwargs: None
    module.validation_step(batch, 0)
    module.added = 1
    kept.put_back()
    assert {name: repr(value) for name, value in vars(module).items()} == before
    assert module.outs is outs
    assert module.total is total


class Caching(Toy):
    """Trains on the first batch of each index that it saw."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def training_step(self, batch, batch_idx):
        return super().training_step(self.cache.setdefault(batch_idx, batch), batch_idx)


class Warming(Toy):
    """Trains by half the loss once it has seen so many batches."""

    seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return super().training_step(batch, batch_idx) * (0.5 if self.seen > 6 else 1.0)


class Centred(Toy):
    """Subtracts a running mean of its inputs, which is not a buffer."""

    def __init__(self):
        super().__init__()
        self.centre = torch.zeros(6)

    def logits(self, x):
        if self.training:
            self.centre.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().logits(x - self.centre)


@pytest.mark.parametrize("kind", mostly_slow([Caching, Warming, Centred], [Warming]))
def test_what_training_keeps_is_each_clients_own(kind):
    def trained(**options):
        torch.manual_seed(0)
        return global_state(federate(kind(), toy_data((40, 24), batch_size=4), max_rounds=2, **options))

    found = trained(local_epochs=2)
    assert not differs(found, trained(local_epochs=2, engine=Processes(2)))
    with pytest.raises(ConfigurationError, match=r"training_step .*(changes|under torch.func.vmap)"):
        trained(local_epochs=2, engine="vectorized")


def test_an_attribute_that_is_no_number_is_the_same_as_before():
    module = Toy()
    module.best = torch.tensor([float("nan"), 1.0])
    assert Kept(module).put_back() == []


@pytest.mark.parametrize(
    "counting", [closing_over_a_list, closing_over_a_number, with_a_default, with_an_attribute, by_a_late_slot]
)
def test_what_a_callable_counts_is_put_back(counting):
    module = Toy()
    module.calls = counting()
    kept = Kept(module)
    assert [module.calls() for _ in range(2)] == [1, 2]
    assert kept.put_back()
    assert module.calls() == 1


def test_what_a_hook_keeps_is_put_back():
    module, calls = Toy(), []
    module.net[0].register_forward_hook(lambda *_: calls.append(1))
    kept = Kept(module)
    module.logits(torch.zeros(1, 6))
    assert calls == [1]
    assert kept.put_back()
    assert calls == []


def test_a_scripted_part_is_put_back():
    module = Toy()
    module.norm = torch.jit.script(nn.BatchNorm1d(6))
    kept, before = Kept(module), module.norm.running_mean.clone()
    module.norm(torch.randn(8, 6))
    assert not torch.equal(module.norm.running_mean, before)
    assert kept.put_back()
    assert torch.equal(module.norm.running_mean, before)


def test_a_run_names_what_cannot_be_copied(tmp_path):
    class Numbering(Toy):
        def __init__(self):
            super().__init__()
            self.numbers = count()

    with pytest.warns(UserWarning, match=r"Numbering keeps Numbering\.numbers, which cannot be copied"):
        scores(tmp_path, Numbering)


def test_what_cannot_be_copied_is_named_once():
    class Counting(Toy):
        def __init__(self):
            super().__init__()
            self.numbers = (number for number in range(9))

    module = Counting()
    with pytest.warns(UserWarning, match=r"Counting keeps Counting\.numbers, which cannot be copied") as found:
        for _ in range(2):
            Kept(module).put_back()
    assert len(found) == 1
