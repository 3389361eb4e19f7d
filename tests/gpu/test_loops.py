"""Local training on a GPU: the fast loop is Lightning's Trainer; precisions, scalers, layouts, compiled networks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedlightning  # noqa: F401  before lightning
from fedlightning.callbacks import APFL, SCAFFOLD, FedAvg, FedProx
from fedlightning.datamodules import DigitsDataModule, IIDPartitioner
from fedlightning.models import Classifier
from tests.fast.test_fast_fit import both
from tests.gpu.on import ACCELERATOR, HERE, REAL, near, tf32
from tests.helpers import NormNet, Toy, close, differs, federate, same, spied, toy_data
from tests.test_precision import Overflows, WithTerm, fp16

pytestmark = pytest.mark.gpu

HALF: dict[str, Any] = {"precision": "16-mixed"} if REAL else fp16()
"""Half precision with a gradient scaler; on a CPU Lightning has it only as a plugin."""


class Images(nn.Module):
    """Two convolutions with a normalisation between them and a linear layer: images (n, 1, 8, 8) of 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.second, self.last = nn.Conv2d(8, 16, 3, stride=2), nn.Linear(16 * 9, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x.view(-1, 1, 8, 8)).relu())
        logits: torch.Tensor = self.last(self.second(x).relu().flatten(1))
        return logits


def digits(compiled: bool = False, seed: int = 0, channels_last: bool = False, **options: Any) -> Any:
    """Federate the network over three clients with 60 images of digits each: 2 rounds of 3 steps."""
    torch.manual_seed(seed)
    net = Images()
    if compiled:
        net.compile(backend="inductor" if REAL else "eager")
    data = DigitsDataModule(partitioner=IIDPartitioner(3), max_train=180, batch_size=16)
    module = Classifier(net, 10, lr=0.05, channels_last=channels_last)
    return federate(module, data, [FedAvg()], local_steps=3, **HERE | options)


PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "half": HALF,
    "bf16": {"precision": "bf16-mixed"},
    "clip": {"gradient_clip_val": 0.05},
    "accumulate": {"accumulate_grad_batches": 2},
}


@pytest.mark.parametrize("plan", PLANS)
def test_the_fast_loop_is_lightnings_trainer_bit_for_bit(plan: str) -> None:
    both(NormNet("adam", dropout=0.3), [FedProx(mu=0.1)], deterministic=True, **HERE | PLANS[plan])


def test_the_fast_loop_is_the_trainer_with_methods_that_train_twice() -> None:
    both(Toy("momentum"), [APFL()], deterministic=True, **HERE)


def test_steps_that_the_scaler_skips_are_no_steps() -> None:
    _, spy = spied(Overflows("sgd"), toy_data([32, 24]), [SCAFFOLD(), FedProx(0.1)], **HERE | HALF)
    for update in spy.updates:
        attempts = {"0": 4, "1": 3}[update.client]
        assert (update.steps, update.skipped) == (attempts - 1, 1)
        assert all(bool(value.isfinite().all()) for value in update.state.values())


@pytest.mark.parametrize(
    ("options", "tolerance"), [(HALF, 5e-5), ({"precision": "bf16-mixed"}, 5e-6), ({}, 5e-6)], ids="hbs"
)
def test_corrections_act_on_unscaled_gradients(options: dict[str, Any], tolerance: float) -> None:
    """FedProx's correction is the gradient of the same term in the loss."""
    reference, data = WithTerm(mu=2.0), toy_data([32])
    module = Toy("momentum")
    module.load_state_dict(reference.state_dict())
    arguments = {"max_rounds": 1, "local_epochs": 3, "gradient_clip_val": 0.2} | HERE | options
    ours, by_loss = (
        spied(each, data, callbacks, **arguments)[1].updates[0].state
        for each, callbacks in ((module, [FedProx(mu=2.0)]), (reference, []))
    )
    close(ours, by_loss, atol=tolerance)
    assert differs(ours, spied(module, data, [], **arguments)[1].updates[0].state)


def test_convolutions_end_where_they_do_on_a_cpu() -> None:
    near(digits(precision="64-true"), digits(precision="64-true", accelerator="cpu"), 1e-9)
    near(digits(), digits(accelerator="cpu"), 1e-4)


def test_channels_last_changes_the_layout_and_nothing_else() -> None:
    near(digits(channels_last=True), digits(), 1e-3)


def test_tf32_rounds_and_nothing_else() -> None:
    exact = digits()
    tf32(True)
    try:
        near(digits(), exact, 1e-2)
    finally:
        tf32(False)


@pytest.mark.timeout(150)
def test_a_compiled_network_trains_as_it_would_otherwise() -> None:
    near(digits(compiled=True), digits(), 1e-3)


def test_one_run_after_another_has_the_same_bits() -> None:
    first, second = (digits(deterministic=True, precision="bf16-mixed") for _ in range(2))
    same(first.server.model, second.server.model)
    assert first.federation.engine.runner.blueprint.device.type == ACCELERATOR
