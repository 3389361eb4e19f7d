"""The short form of SGD gives torch's bits."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import fedlightning  # noqa: F401

# isort: split
from fedlightning.fast.optimizer_steps import is_plain_sgd, unrecorded_step, update_by_sgd

OPTIONS = [
    {"momentum": momentum, "weight_decay": decay, "nesterov": nesterov, "dampening": dampening, "maximize": maximize}
    for momentum, decay, nesterov, dampening, maximize in itertools.product(
        (0.0, 0.9), (0.0, 0.1), (False, True), (0.0, 0.3), (False, True)
    )
    if not nesterov or (momentum and not dampening)
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 2).requires_grad_(False))


def backward(net: nn.Module, seed: int) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    for parameter in net.parameters():
        parameter.grad = None
    net(x).square().sum().backward()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_same_bits_as_torch(options: dict[str, float]) -> None:
    mine, theirs = network(), network()
    own = SGD([{"params": mine[0].parameters(), "lr": 0.01}, {"params": mine[2:].parameters()}], lr=0.1, **options)  # type: ignore[index]
    reference = SGD(
        [{"params": theirs[0].parameters(), "lr": 0.01}, {"params": theirs[2:].parameters()}], lr=0.1, **options
    )  # type: ignore[index]
    assert is_plain_sgd(own)
    for step in range(4):
        backward(mine, step)
        backward(theirs, step)
        own.param_groups[1]["lr"] = reference.param_groups[1]["lr"] = 0.1 / (step + 1)
        update_by_sgd(own)
        reference.step()
        for left, right in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(left, right)
    assert str(own.state_dict()) == str(reference.state_dict())


class Subclass(SGD):
    """Somebody's own."""


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Subclass(p, lr=0.1),
        lambda p: Adam(p, lr=0.1),
        lambda p: SGD(p, lr=torch.tensor(0.1)),
        lambda p: SGD(p, lr=0.1, foreach=True),
        lambda p: SGD(p, lr=0.1, fused=True),
        lambda p: SGD(p, lr=0.1, differentiable=True),
    ],
    ids=["subclass", "Adam", "tensor as lr", "foreach", "fused", "differentiable"],
)
def test_leaves_the_rest_to_torch(make: object) -> None:
    assert not is_plain_sgd(make(list(network().parameters())))  # type: ignore[operator]


@pytest.mark.parametrize("kind", [SGD, Adam, Subclass])
def test_hooks_run_around_a_step(kind: type[Optimizer]) -> None:
    net = network()
    twin = copy.deepcopy(net)
    optimizer, reference = kind(net.parameters(), lr=0.1), kind(twin.parameters(), lr=0.1)  # type: ignore[call-arg]
    seen: list[str] = []
    optimizer.register_step_post_hook(lambda *given: seen.append("after"))
    step = unrecorded_step(optimizer)

    def closure() -> None:
        seen.append("closure")
        with torch.enable_grad():
            backward(net, 0)

    step(closure)
    optimizer.register_step_pre_hook(lambda *given: seen.append("before"))
    step(closure)
    assert seen == ["closure", "after", "before", "closure", "after"]
    for _ in range(2):
        backward(twin, 0)
        reference.step()
    for left, right in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(left, right)


def counted(step: Any, seen: list[str]) -> Any:
    @functools.wraps(step)
    def own(*args: Any, **kwargs: Any) -> Any:
        seen.append("own")
        return step(*args, **kwargs)

    return own


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_step_that_somebody_replaced_is_called(kind: type[Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    net = network()
    optimizer = kind(net.parameters(), lr=0.1)  # type: ignore[call-arg]
    seen: list[str] = []
    step = unrecorded_step(optimizer)
    optimizer.step = counted(optimizer.step, seen)  # type: ignore[method-assign]
    step(lambda: None)
    assert seen == ["own"]
    del optimizer.step
    step(lambda: None)
    assert seen == ["own"]
    monkeypatch.setattr(kind, "step", counted(kind.step, seen))
    step(lambda: None)
    unrecorded_step(optimizer)(lambda: None)
    assert seen == ["own"] * 3
