"""What a module keeps while it is scored: the next client's score knows nothing of it, on any engine."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torchmetrics import Accuracy, MeanMetric, SumMetric

from fedlightning.callbacks import FedAvg
from fedlightning.errors import ConfigurationError
from fedlightning.visit.kept import Kept
from tests.helpers import CLASSES, Toy, differs, federate, global_state, make_trainer, mostly_slow, toy_data


class Meter:
    """A mean of the user's own, that nobody resets."""

    def __init__(self):
        self.sums = {"total": 0.0, "count": 0}

    def add(self, value, count):
        self.sums["total"] += value * count
        self.sums["count"] += count


class Keeper(Toy):
    """Keeps in each of these ways what it has seen, clears nothing, and logs what follows from it."""

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
        self.best = min(self.best, float(loss))
        self.first = x[0] if self.first is None else self.first
        self.total += len(y)
        self.array += len(y)
        self.nested[0]["sizes"][0].append(len(y))
        self.classes.update(y.tolist())
        self.meter.add(float(loss), len(y))
        self.space.steps += 1
        self.by_class[int(y[0])].append(1)
        self.accuracy.update(logits, y)
        self.hidden[0].update(loss)
        self.summed.update(loss)
        self.net[0].seen.append(x)
        self.steps += 1
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
    assert found == scores(tmp_path, kind, engine="processes", workers=2)
    assert found == pytest.approx(scores(tmp_path, kind, engine="vectorized"), abs=1e-5)
    assert found == pytest.approx(scores(tmp_path, kind, local_loop="trainer"), abs=1e-5)
    if kind is Keeper:
        sizes = {key[2:4]: value for key, value in found.items() if key[4:] == ("val", "count")}
        assert {size for (_, data), size in sizes.items() if data == "local"} == {10}
        assert {key[5] for key in found} >= {"outs", "cached", "meter", "accuracy", "hidden", "summed", "drawn"}


def test_what_it_keeps_is_put_back_to_the_same_objects():
    module = Keeper()
    kept, outs, total = Kept(module), module.outs, module.total
    before = {name: repr(value) for name, value in vars(module).items()}
    batch = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    module.log = module.log_dict = lambda *args, **kwargs: None
    module.validation_step(batch, 0)
    module.late = 1
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
    """Subtracts a running mean of its inputs, which is no buffer."""

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
    assert not differs(found, trained(local_epochs=2, engine="processes", workers=2))
    with pytest.raises(ConfigurationError, match=r"training_step .*(changes|under torch.func.vmap)"):
        trained(local_epochs=2, engine="vectorized")


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
