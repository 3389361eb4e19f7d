from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from fedlightning.wrappers import FeatureTap, frozen_buffers, muted
from fedlightning.wrappers import muting as muting_module
from tests.wrappers.modules import HIDDEN, ThroughForward, ThroughLayers, WithCollection, batch_for, fit


class TwiceAs(Callback):
    """Runs every training step once more, muted, before the real one."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        with torch.random.fork_rng(), muted(pl_module), frozen_buffers(pl_module):
            pl_module.training_step(batch, batch_idx).backward()
        pl_module.zero_grad()


@pytest.mark.parametrize("cls", [ThroughForward, ThroughLayers, WithCollection])
def test_muted_steps_leave_no_trace_in_a_fit(cls: type[Any]) -> None:
    torch.manual_seed(0)
    plain = cls()
    again = copy.deepcopy(plain)
    torch.manual_seed(1)
    first = fit(plain, 2)
    torch.manual_seed(1)
    second = fit(again, 2, callbacks=[TwiceAs()])
    assert first.callback_metrics == second.callback_metrics
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), again.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), again.buffers(), strict=True))


def test_metrics_are_put_back_and_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = WithCollection()
    made: list[Any] = []
    monkeypatch.setattr(muting_module, "deepcopy", lambda metric: made.append(metric) or copy.deepcopy(metric))
    accuracy, collection = module.accuracy, module.metrics
    names = list(module.state_dict()), [name for name, _ in module.named_modules()]
    for _ in range(3):
        with muted(module):
            assert module.accuracy is not accuracy and module.metrics is not collection
            assert module.alias is module.metrics
            with muted(module):
                module.training_step(batch_for(module), 0)
            module.training_step(batch_for(module), 0)
            assert module.accuracy.update_count > 0
    assert module.accuracy is accuracy and module.metrics is collection and module.alias is collection
    assert accuracy.update_count == 0 and all(metric.update_count == 0 for metric in collection.values())
    assert len(made) == 3
    assert names == (list(module.state_dict()), [name for name, _ in module.named_modules()])
    assert "log" not in vars(module) and "log_dict" not in vars(module)


def test_an_error_inside_still_restores() -> None:
    module = ThroughForward()
    accuracy, buffer = module.accuracy, module.net.norm.running_mean
    with pytest.raises(KeyError), muted(module), frozen_buffers(module):
        raise KeyError
    assert module.accuracy is accuracy and module.net.norm.running_mean is buffer and "log" not in vars(module)


def test_frozen_buffers_survive_a_later_backward() -> None:
    module = ThroughForward()
    before = {name: (buffer, buffer.clone()) for name, buffer in module.named_buffers()}
    for mode in (True, False):
        module.train(mode)
        with frozen_buffers(module):
            loss = module.training_step(batch_for(module), 0)
            if mode:
                assert module.net.norm.num_batches_tracked == 1
        loss.backward()
    for name, buffer in module.named_buffers():
        assert buffer is before[name][0] and torch.equal(buffer, before[name][1])
    module.train()
    with frozen_buffers(module, only=lambda name: name.endswith("running_mean")):
        module.training_step(batch_for(module), 0)
    assert module.net.norm.num_batches_tracked == 1 and torch.equal(module.net.norm.running_mean, torch.zeros(4))


def test_a_tap_catches_the_features_with_their_graph() -> None:
    module = ThroughForward()
    with FeatureTap(module, "net.fc") as tap:
        with pytest.raises(RuntimeError, match="it was not called"):
            _ = tap.features
        loss = module.training_step(batch_for(module), 0)
        assert tap.features.shape == (16, HIDDEN) and tap.calls == 1
        (loss + tap.take().square().mean()).backward()
        module.training_step(batch_for(module), 0)
        module.training_step(batch_for(module), 0)
        with pytest.raises(RuntimeError, match="called 2 times"):
            _ = tap.features
        tap.clear()
        module.training_step(batch_for(module), 0)
        copied = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
        for other in copied:
            other.training_step(batch_for(module), 0)
        assert tap.calls == 1
    with pytest.raises(RuntimeError, match="not attached"):
        _ = tap.features
    assert not module.net.fc._forward_pre_hooks


def test_a_tap_on_outputs_and_its_errors() -> None:
    module = nn.ModuleDict({"lstm": nn.LSTM(2, 3)})
    with FeatureTap(module, "lstm", at="output") as tap:
        module["lstm"](torch.zeros(4, 1, 2))
        with pytest.raises(RuntimeError, match="is tuple, not a tensor"):
            _ = tap.features
        assert tap.values[0][0].shape == (4, 1, 3)
    with pytest.raises(ValueError, match="Did you mean `lstm`"):
        FeatureTap(module, "lstn")
    with pytest.raises(ValueError, match="at='middle'"):
        FeatureTap(module, "lstm", at="middle")  # type: ignore[arg-type]
