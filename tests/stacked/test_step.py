"""A step of many clients borrows one module, and gives it back as it was."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedlightning  # noqa: F401  before lightning

# isort: split
from lightning.pytorch import LightningModule

from fedlightning.stacked import map as stacked_map
from fedlightning.stacked.stack import Stack
from fedlightning.stacked.step import Place, StackedStep, gradients

CLIENTS = 3


class Tied(LightningModule):
    """A layer under two names, a weight that two layers share, buffers that move in place and anew."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen = self.seen + x.sum()
        out = self.last(self.norm(self.again(self.first(x))))
        self.log("loss", out.mean())
        return F.cross_entropy(out, y)


def made() -> tuple[Tied, Stack, list[Tensor], list[Tensor]]:
    """A module, a stack of others, its tensors ready to train, and a batch."""
    torch.manual_seed(0)
    module, stack = Tied(), Stack(Tied(), CLIENTS, torch.device("cpu"))
    for row in range(CLIENTS):
        stack.pull(row, Tied())
    tensors = [value.requires_grad_(name in stack.parameters) for name, value in stack.tensors.items()]
    return module, stack, tensors, [torch.randn(CLIENTS, 6, 4), torch.randint(0, 4, (CLIENTS, 6))]


@pytest.mark.parametrize("complete", [True, False])
def test_each_client_has_the_loss_the_gradient_and_the_buffers_that_it_has_alone(
    complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacked_map, "complete", complete)
    module, stack, tensors, batch = made()
    clients = [Tied() for _ in range(CLIENTS)]
    for row, client in enumerate(clients):
        stack.push(row, client)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    step = StackedStep(module, nullcontext)
    result = step(tensors, batch, Place())
    found = dict(zip(stack.parameters, gradients(result.losses, tensors[: len(stack.parameters)]), strict=True))
    for row, client in enumerate(clients):
        logged: dict[str, Tensor] = {}
        client.log = lambda name, value, logged=logged: logged.update({name: value})  # type: ignore[assignment,misc]
        loss = client.training_step([tensor[row] for tensor in batch], 0)
        loss.backward()
        torch.testing.assert_close(result.losses[row], loss)
        torch.testing.assert_close(result.logged["loss"][row], logged["loss"].detach())
        own = dict(client.named_parameters(remove_duplicate=False))
        for name, gradient in found.items():
            torch.testing.assert_close(gradient[row], own[name].grad)
        for name, buffer in client.named_buffers():
            torch.testing.assert_close(stack.tensors[name][row], buffer)
    after = module.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items()), "the lent module is untouched"
    assert module.last.weight is module.first.weight and isinstance(module.first.weight, nn.Parameter)


def test_a_step_that_fails_gives_the_module_back() -> None:
    module, _, tensors, batch = made()
    weight, seen = module.first.weight, module.seen
    step = StackedStep(module, nullcontext)
    with pytest.raises(IndexError):
        step(tensors, [batch[0], batch[1] + 4], Place())
    assert module.first.weight is weight and module.last.weight is weight and module.seen is seen
    assert step(tensors, batch, Place()).losses.shape == (CLIENTS,), "and the map is left"
