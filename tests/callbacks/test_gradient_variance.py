"""Both gradient variances against brute force: sheet entry M2."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import fedlightning  # noqa: F401  before lightning

# isort: split
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

from fedlightning.callbacks import GradientVariance
from fedlightning.callbacks.diagnostics.gradient_variance import GradientMoments, gradient_moments
from fedlightning.callbacks.diagnostics.layer_values import LayerValues


class Plain(LightningModule):
    """Two layers, registered in the reverse of the order in which they are called."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.last, self.first = nn.Linear(5, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return self.scale * loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Net(Plain):
    """With batch statistics, dropout, a submodule in eval mode and a metric: what a pass may leave traces in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.fixed = nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Dropout(0.5)
        self.accuracy = Accuracy(task="multiclass", num_classes=3)

    def on_train_epoch_start(self) -> None:
        self.fixed.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fixed(self.drop(torch.tanh(self.norm(self.first(x))))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.accuracy.update(logits.detach(), y)
        self.log("train_acc", self.accuracy, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y)


def data(count: int = 24) -> TensorDataset:
    draw = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 4, generator=draw), torch.randint(3, (count,), generator=draw))


def fit(module: LightningModule, callbacks: list[Callback], loader: Any = None, epochs: int = 1, **options: Any) -> Any:
    options = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"} | options
    trainer = Trainer(
        max_epochs=epochs, callbacks=callbacks, enable_model_summary=False, enable_progress_bar=False, **options
    )
    trainer.fit(module, DataLoader(data(), batch_size=6) if loader is None else loader)
    return trainer


def leaves_no_trace(callback: Callback) -> None:
    """State, generators, gradients, metrics, modes and what was logged are the same with and without ``callback``."""

    class Look(Callback):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.seen += [p.grad.clone() for p in pl_module.parameters() if p.grad is not None]
            self.seen += [torch.tensor([child.training for child in pl_module.modules()]), torch.get_rng_state()]

    runs = []
    for callbacks in ([], [callback]):
        torch.manual_seed(11)
        module, look = Net(), Look()
        draw = torch.Generator().manual_seed(6)
        loader = DataLoader(data(), batch_size=6, shuffle=True, generator=draw)
        trainer = fit(module, [*callbacks, look], loader, epochs=3)
        runs.append((module.state_dict(), look.seen, torch.get_rng_state(), dict(trainer.callback_metrics)))
        assert not any(child._forward_pre_hooks or child._forward_hooks for child in module.modules())
    (state, seen, rng, metrics), (state_2, seen_2, rng_2, metrics_2) = runs
    assert all(torch.equal(state[name], state_2[name]) for name in state)
    assert len(seen) == len(seen_2) > 0
    assert all(map(torch.equal, seen, seen_2))
    assert torch.equal(rng, rng_2)
    assert metrics.keys() == metrics_2.keys()
    assert all(torch.equal(metrics[name], metrics_2[name]) for name in metrics)


def batch_gradients(module: LightningModule, sizes: list[int]) -> list[dict[str, Tensor]]:
    """Brute force: ``.backward()`` per batch."""
    found, start = [], 0
    for size in sizes:
        x, y = data()[start : start + size]
        module.zero_grad()
        (F.cross_entropy(module(x), y) * module.scale).backward()
        found.append({name: p.grad.double().clone() for name, p in module.named_parameters()})
        start += size
    module.zero_grad()
    return found


def of_layer(gradients: dict[str, Tensor], layer: str) -> Tensor:
    return torch.cat([gradients[f"{layer}.{kind}"].flatten() for kind in ("weight", "bias")])


def measured(definition: Any, **options: Any) -> tuple[LayerValues, Plain]:
    """What the callback finds of a module that does not move."""
    torch.manual_seed(0)
    module = Plain(options.pop("scale", 1.0))
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)  # type: ignore[method-assign]
    found = GradientVariance(definition, **options)
    fit(module, [found])
    assert found.result is not None
    return found.result, module


def test_over_samples_is_the_mean_squared_distance_of_batch_gradients():
    found, module = measured("grad_var_samples")
    gradients = batch_gradients(module, [6] * 4)
    for layer, value in zip(found.layers, found.values, strict=True):
        stacked = torch.stack([of_layer(g, layer) for g in gradients])
        assert value == pytest.approx(float((stacked - stacked.mean(0)).square().sum(1).mean()), rel=1e-5)
    assert found.layers == ["first", "last"]  # as called, not as registered
    assert found.num_parameters == [25, 18]
    per_parameter, _ = measured("grad_var_samples", per_parameter=True)
    assert per_parameter.values == pytest.approx([found.values[0] / 25, found.values[1] / 18])


def test_over_params_is_the_population_variance_of_the_mean_gradient():
    found, module = measured("grad_var_params")
    (whole,) = batch_gradients(module, [24])
    for layer, value, n in zip(found.layers, found.values, found.num_parameters, strict=True):
        entries = of_layer(whole, layer)
        assert value == pytest.approx(float(entries.var(correction=0)), rel=1e-5)
        assert value == pytest.approx((n - 1) / n * float(entries.var(correction=1)), rel=1e-5)
    one_batch, _ = measured("grad_var_params", num_batches=1)
    (first,) = batch_gradients(module, [6])
    assert one_batch.values[0] == pytest.approx(float(of_layer(first, "first").var(correction=0)), rel=1e-5)


@pytest.mark.parametrize("definition", ["grad_var_samples", "grad_var_params"])
def test_the_scale_of_the_loss_scales_it_by_its_square(definition):
    one, eight = (measured(definition, scale=scale)[0].values for scale in (1.0, 8.0))
    assert eight == pytest.approx([64 * value for value in one], rel=1e-5)


def test_equal_batches_have_no_spread_at_all():
    torch.manual_seed(0)
    module = Plain()
    batch = tuple(data()[:6])
    found = gradient_moments(module, [batch] * 3, Precision(), 0)
    assert [float(value) for value in found.spread.values()] == [0.0] * 4
    assert found.batches == 3


def test_a_constant_gradient_has_no_variance_over_parameters():
    class Sum(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return sum(p.sum() for p in self.parameters()) + 0.0 * self(batch[0]).sum()

    found = GradientVariance("grad_var_params")
    fit(Sum(), [found])
    assert found.result is not None
    assert found.result.values == [0.0, 0.0]


def test_unequal_batches_are_weighted_by_their_samples():
    torch.manual_seed(0)
    module = Plain()
    sizes = [10, 10, 4]
    parts = torch.utils.data.DataLoader(data(), batch_size=10)
    found = gradient_moments(module, [tuple(batch) for batch in parts], Precision(), 0)
    gradients = batch_gradients(module, sizes)
    (whole,) = batch_gradients(module, [24])
    for name, mean in found.mean.items():
        torch.testing.assert_close(mean, whole[name], rtol=1e-4, atol=1e-7)
        spread = sum(n * (g[name] - mean).square().sum() for n, g in zip(sizes, gradients, strict=True)) / 24
        torch.testing.assert_close(found.spread[name], spread, rtol=1e-4, atol=1e-9)


def test_processes_that_share_the_batches_find_what_one_finds():
    torch.manual_seed(0)
    module = Plain()
    batches = [tuple(data()[start : start + 6]) for start in range(0, 24, 6)]
    whole = gradient_moments(module, batches, Precision(), 0)
    halves = [gradient_moments(module, batches[start::2], Precision(), 0) for start in (0, 1)]
    means = {name: (halves[0].mean[name] + halves[1].mean[name]) / 2 for name in whole.mean}
    spreads = {}
    for name in whole.spread:  # by the formula, for both processes, then their mean
        spreads[name] = sum(h.spread[name] + (h.mean[name] - means[name]).square().sum() for h in halves) / 2
    asked: list[Tensor] = []

    def reduce(value: Tensor) -> Tensor:
        asked.append(value)
        return answers[len(asked) - 1]

    answers = [*means.values(), *spreads.values()]
    found: GradientMoments = halves[0].over(reduce)
    for name in whole.mean:
        torch.testing.assert_close(found.mean[name], whole.mean[name])
        torch.testing.assert_close(found.spread[name], whole.spread[name])
    for index, name in enumerate(whole.mean):  # what the first process brings to the second reduction
        between = (halves[0].mean[name] - means[name]).square().sum()
        torch.testing.assert_close(asked[len(whole.mean) + index], halves[0].spread[name] + between)


@pytest.mark.parametrize("definition", ["grad_var_samples", "grad_var_params"])
def test_it_leaves_no_trace_in_the_run(definition):
    leaves_no_trace(GradientVariance(definition))


def test_weights_only_and_frozen_layers():
    torch.manual_seed(0)
    module = Plain()
    module.first.requires_grad_(False)
    found = GradientVariance(weights_only=True)
    fit(module, [found])
    assert found.result is not None
    assert found.result.num_parameters == [0, 15]
    assert found.result.values[0] == 0.0 < found.result.values[1]


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precision_of_the_pass_is_the_parameters_own(precision):
    """Under autocast the pass is in float32; in double precision all is double."""
    seen = set()

    class Look(Plain):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            if not self.training:
                seen.add(logits.dtype)
            return logits

    found = GradientVariance()
    fit(Look(), [found], precision=precision)
    assert seen == {torch.float64 if precision == "64-true" else torch.float32}
    assert found.result is not None and min(found.result.values) > 0


def test_what_cannot_be_measured_is_refused():
    class Manual(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ValueError, match="manual optimization"):
        fit(Manual(), [GradientVariance()])
    with pytest.raises(ValueError, match=r"'last.weight' of Plain is torch.bfloat16"):
        fit(Plain(), [GradientVariance()], precision="bf16-true")
    with pytest.raises(ValueError, match=r"definition='variance'. Use 'grad_var_samples' or"):
        GradientVariance("variance")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_batches=0"):
        GradientVariance(num_batches=0)


def test_epochs_limits_and_state():
    every, limited = GradientVariance(every_n_epochs=2), GradientVariance(num_batches=3)
    fit(Plain(), [every, limited], epochs=4, limit_train_batches=2)
    assert [found.epoch for found in every.results] == [1, 3]
    assert limited.result is not None and limited.result.settings["batches"] == 2
    again = GradientVariance()
    again.load_state_dict(json.loads(json.dumps(every.state_dict())))
    assert again.results == every.results
    rows = every.results[0].rows("me")
    assert [(row.round, row.client, row.layer_index, row.layer) for row in rows] == [
        (2, "me", 1, "first"),
        (2, "me", 2, "last"),
    ]
