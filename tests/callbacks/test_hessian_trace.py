"""Hutchinson's trace against exact Hessians: sheet entry M3."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fedlightning  # noqa: F401  before lightning

# isort: split
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from fedlightning.callbacks import HessianTrace, LayerValues
from fedlightning.callbacks.diagnostics.hessian_trace import hutchinson, mean_and_error
from tests.callbacks.test_gradient_variance import Net, Plain, data, fit, leaves_no_trace
from tests.helpers import Quadratic


def exact(module: LightningModule, x: Tensor, y: Tensor) -> list[float]:
    """Trace of each layer's block of ``torch.func.hessian``, in eval mode."""
    module.eval()
    traces = {}
    for name, value in module.named_parameters():

        def loss(changed: Tensor, name: str = name) -> Tensor:
            return F.cross_entropy(functional_call(module, {name: changed}, (x,)), y)

        block = torch.func.hessian(loss)(value.detach())
        traces[name] = float(block.detach().reshape(value.numel(), value.numel()).diagonal().sum())
    return [sum(traces[f"{layer}.{kind}"] for kind in ("weight", "bias")) for layer in ("first", "last")]


def still(module: LightningModule) -> LightningModule:
    """Does not move in training: results are of the parameters given."""
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)  # type: ignore[method-assign]
    return module


def test_the_estimate_agrees_with_the_exact_trace_within_its_error():
    torch.manual_seed(0)
    module = still(Plain())
    found = HessianTrace(num_probes=200, num_batches=None)
    fit(module, [found], epochs=1)
    assert found.result is not None
    truth = exact(module, *data()[:])
    assert found.result.layers == ["first", "last"]  # as called, not as registered
    for value, error, true in zip(found.result.values, found.result.std_errors or [], truth, strict=True):
        assert 0 < error < 0.1 * max(map(abs, truth))
        assert abs(value - true) < 4 * error


def test_the_standard_error_is_that_of_the_estimator():
    """The spread of independent estimates is what each says of itself."""
    torch.manual_seed(0)
    module = Plain()
    batch = tuple(data()[:8])
    estimates, errors = [], []
    for seed in range(60):
        _, draws = hutchinson(module, [batch], Precision(), seed, num_probes=8)
        values, own = mean_and_error(draws)
        estimates.append(values)
        errors.append(own)
    spread = torch.tensor(estimates).std(dim=0)
    typical = torch.tensor(errors).square().mean(dim=0).sqrt()
    torch.testing.assert_close(spread, typical, rtol=0.35, atol=0)


def test_a_diagonal_hessian_is_exact_with_any_draw():
    module = Quadratic(size=3)
    a, b = torch.tensor([[1.0, 4.0, -2.5], [3.0, 0.0, 0.5]]).double(), torch.zeros(2, 3).double()
    _, draws = hutchinson(module, [(a, b)], Precision(), 0, num_probes=3)
    torch.testing.assert_close(draws, torch.full((3, 1), 3.0, dtype=torch.float64))


def test_batches_are_weighted_by_their_samples_and_see_the_same_signs():
    torch.manual_seed(0)
    module = Plain()
    x, y = data()[:20]
    _, whole = hutchinson(module, [(x, y)], Precision(), 5, num_probes=4)
    _, parts = hutchinson(module, [(x[:16], y[:16]), (x[16:], y[16:])], Precision(), 5, num_probes=4)
    torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-6)


def test_the_scale_of_the_loss_scales_the_trace():
    values = []
    for scale in (1.0, 8.0):
        torch.manual_seed(0)
        found = HessianTrace(num_batches=None)
        fit(still(Plain(scale)), [found], epochs=1)
        assert found.result is not None
        values.append(found.result.values)
    assert values[1] == pytest.approx([8 * value for value in values[0]], rel=1e-5)


def test_a_linear_loss_has_trace_zero_and_a_frozen_layer_counts_nothing():
    class Linear(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.last(self.first(batch[0])).sum()  # bilinear: each block is linear

    module = Linear()
    module.last.requires_grad_(False)
    found = HessianTrace()
    fit(still(module), [found], epochs=1)
    assert found.result is not None
    assert found.result.values == [0.0, 0.0]
    assert found.result.num_parameters == [25, 0]


def test_it_leaves_no_trace_in_the_run():
    leaves_no_trace(HessianTrace(num_batches=2))


@pytest.mark.parametrize("kind", ["attention", "lstm"])
def test_attention_and_recurrent_nets_have_second_derivatives(kind):
    class Sequence(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.MultiheadAttention(4, 1, batch_first=True) if kind == "attention" else nn.LSTM(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, None].repeat(1, 3, 1) * torch.arange(1, 4)[None, :, None]
            x = self.mix(x, x, x)[0] if kind == "attention" else self.mix(x)[0]
            return super().forward(x.mean(1))

    found = HessianTrace(num_probes=2)
    fit(Sequence(), [found], epochs=1)
    assert found.result is not None
    assert found.result.layers == ["mix", "first", "last"]
    assert all(map(math.isfinite, found.result.values)) and found.result.values[0] != 0


def test_an_operation_without_a_second_derivative_is_named():
    class Aligned(Plain):
        def training_step(self, batch, batch_idx):
            scores = self(batch[0])[:, None].log_softmax(-1)
            return F.ctc_loss(scores, torch.tensor([[1]]), torch.tensor([len(scores)]), torch.tensor([1]))

    with pytest.raises(ValueError, match=r"needs second derivatives.*ctc_loss.*Leave the Hessian trace out"):
        fit(Aligned(), [HessianTrace()], epochs=1)


def test_options_and_state():
    with pytest.raises(ValueError, match="num_probes=1"):
        HessianTrace(num_probes=1)
    torch.manual_seed(0)
    found, per_parameter = HessianTrace(), HessianTrace(per_parameter=True)
    fit(still(Net()), [found, per_parameter], epochs=2)
    assert [result.epoch for result in found.results] == [0, 1]
    assert found.result is not None and per_parameter.result is not None
    assert per_parameter.result.values == pytest.approx(found.result.per_parameter)
    assert per_parameter.result.quantity == "hessian_trace_per_parameter"
    again = HessianTrace()
    again.load_state_dict(found.state_dict())
    assert again.results == found.results
    assert isinstance(again.result, LayerValues)
    assert found.state_key != per_parameter.state_key


def test_the_same_seed_draws_the_same_signs_in_any_loader_order_of_calls():
    torch.manual_seed(0)
    module = Plain()
    loader = DataLoader(data(), batch_size=8)
    first, second, other = (
        hutchinson(module, [tuple(batch) for batch in loader], Precision(), seed, num_probes=3)[1] for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


SCRIPT = """
import json, sys
import fedlightning
import torch
from torch.utils.data import DataLoader
from fedlightning.callbacks import GradientVariance, HessianTrace
from tests.callbacks.test_gradient_variance import Plain, data, fit

class Still(Plain):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

torch.manual_seed(0)
devices, path = int(sys.argv[1]), sys.argv[2]
variance, trace = GradientVariance(), HessianTrace(num_probes=5, num_batches=None)
options = {"strategy": "ddp"} if devices > 1 else {}
trainer = fit(Still(), [variance, trace], DataLoader(data(), batch_size=12), devices=devices, **options)
if trainer.is_global_zero:
    json.dump([variance.results[0].to_dict(), trace.results[0].to_dict()], open(path, "w"))
"""


@pytest.mark.slow
def test_two_processes_measure_what_one_measures(tmp_path):
    """Each has half of the samples: the Hessian's draws are the same, the gradient's noise is that of two batches."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    env = {k: v for k, v in os.environ.items() if "RANK" not in k} | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    for devices in (1, 2):
        command = [sys.executable, str(script), str(devices), str(tmp_path / f"{devices}.json")]
        done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    (_, one), (variance, two) = (json.loads((tmp_path / f"{devices}.json").read_text()) for devices in (1, 2))
    assert two["values"] == pytest.approx(one["values"], rel=1e-4)
    assert two["std_errors"] == pytest.approx(one["std_errors"], rel=1e-4)
    torch.manual_seed(0)
    module = Plain()
    x, y = data()[:]
    gradients = []
    for rank in (0, 1):  # one batch of 12 each; Lightning shuffles training data under DDP
        mine = list(DistributedSampler(data(), num_replicas=2, rank=rank, seed=0))
        loss = F.cross_entropy(module(x[mine]), y[mine])
        gradients.append(torch.autograd.grad(loss, list(module.first.parameters())))
    away = [(a - b) / 2 for a, b in zip(*gradients, strict=True)]
    assert variance["values"][0] == pytest.approx(sum(float(a.square().sum()) for a in away), rel=1e-3)
