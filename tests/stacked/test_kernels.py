"""Linear layers and losses of a stack are those of each client alone, whatever their options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedlightning  # noqa: F401  before lightning

# isort: split
from fedlightning.stacked import map as stacked_map
from fedlightning.stacked import step as stacked_kernels
from fedlightning.stacked.map import over_clients
from fedlightning.stacked.step import RULES, StackKernels

CLIENTS, BATCH = 3, 20
Function = Callable[..., Tensor]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Of all clients, in double precision."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(CLIENTS, *shape, dtype=torch.float64, generator=generator)


def classes(count: int, *shape: int, ignored: int | None = None) -> Tensor:
    """Class numbers; where ``ignored`` is given, some of them and all of the first client's last sample."""
    found = torch.randint(0, count, (CLIENTS, *shape), generator=torch.Generator().manual_seed(1))
    if ignored is not None:
        found[torch.rand(found.shape, generator=torch.Generator().manual_seed(2)) < 0.3] = ignored
        found[0, -1] = ignored
    return found


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Function]:
    """The functions whose rules have taken a call."""
    taken: list[Function] = []

    def noting(function: Function, rule: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = rule(*args, **kwargs)
            if result is not None:
                taken.append(function)
            return result

        return call

    monkeypatch.setattr(stacked_kernels, "RULES", {f: noting(f, rule) for f, rule in RULES.items()})
    return taken


def together(function: Function, tensors: Sequence[Tensor]) -> Tensor:
    with StackKernels():
        return over_clients(lambda own: [function(*own)], tensors)[0]


def apart(function: Function, tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([function(*(tensor[client] for tensor in tensors)) for client in range(CLIENTS)])


def derivatives(run: Any, function: Function, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Values, gradients, and gradients of a function of the gradients."""
    own = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    trained = [t for t in own if t.requires_grad]
    values = run(function, own)
    weights = torch.linspace(0.5, 2.0, values.numel(), dtype=values.dtype).view(values.shape)
    first = torch.autograd.grad((values * weights).sum(), trained, create_graph=True)
    second = torch.autograd.grad(sum((g**3).sum() for g in first), trained, allow_unused=True)
    return [values, *first, *(g for g in second if g is not None)]


def assert_same(function: Function, *tensors: Tensor) -> None:
    stacked, single = (derivatives(run, function, tensors) for run in (together, apart))
    assert len(stacked) == len(single)
    for one, other in zip(stacked, single, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("features", [(3,), (16,), (2, 40)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(features: tuple[int, ...], bias: bool, used: list[Function]) -> None:
    """Few outputs and many, which lie in memory differently; more than one axis before the features."""
    *extra, outputs = features
    tensors = [numbers(BATCH, *extra, 5), numbers(outputs, 5, seed=1), numbers(outputs, seed=2)]
    assert_same(F.linear, *tensors[: 3 if bias else 2])
    assert used == [F.linear]


def test_a_linear_layer_on_data_takes_no_gradient_of_the_data(used: list[Function]) -> None:
    x, weight = numbers(BATCH, 5), numbers(4, 5).requires_grad_()
    out = together(F.linear, (x, weight))
    (gradient,) = torch.autograd.grad(out.sum(), weight)
    torch.testing.assert_close(gradient, x.sum(1, keepdim=True).expand_as(gradient))
    assert gradient.is_contiguous(), "the gradient lies in memory as the weight does"
    assert used == [F.linear]


WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0], dtype=torch.float64)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weight": {"weight": WEIGHT},
    "ignore": {"ignore_index": 2},
    "ignore-below": {"ignore_index": -100},
    "smooth": {"label_smoothing": 0.2},
    "all": {"weight": WEIGHT, "ignore_index": -1, "label_smoothing": 0.1},
    "all-none": {"weight": WEIGHT, "ignore_index": 1, "label_smoothing": 0.1, "reduction": "none"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)], ids=str)
def test_cross_entropy(options: dict[str, Any], shape: tuple[int, ...], used: list[Function]) -> None:
    target = classes(5, BATCH, *shape, ignored=options.get("ignore_index"))
    assert_same(lambda x, y: F.cross_entropy(x, y, **options), numbers(BATCH, 5, *shape), target)
    assert used == [F.cross_entropy]


@pytest.mark.parametrize("options", [OPTIONS[name] for name in ("plain", "none", "weight", "ignore")])
def test_nll_loss(options: dict[str, Any], used: list[Function]) -> None:
    """On log-softmax of few classes, and of many, whose rows are long enough to be left alone."""
    target = classes(5, BATCH, ignored=options.get("ignore_index"))
    assert_same(lambda x, y: F.nll_loss(F.log_softmax(x, dim=1), y, **options), numbers(BATCH, 5), target)
    assert used == [F.log_softmax, F.nll_loss]
    used.clear()
    many = {key: value for key, value in options.items() if key != "weight"}
    assert_same(lambda x, y: F.nll_loss(F.log_softmax(x, dim=-1), y, **many), numbers(BATCH, 30), target)
    assert used == [F.nll_loss]


def test_many_classes(used: list[Function]) -> None:
    assert_same(F.cross_entropy, numbers(BATCH, 30), classes(30, BATCH))
    assert used == [F.cross_entropy]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_binary_cross_entropy_with_logits(reduction: str, used: list[Function]) -> None:
    function = F.binary_cross_entropy_with_logits
    assert_same(
        lambda x, y: function(x, y.sigmoid(), reduction=reduction), numbers(BATCH, 2), numbers(BATCH, 2, seed=1)
    )
    assert used == [function]


def test_a_client_without_a_sample_that_counts_has_no_mean() -> None:
    target = classes(5, BATCH)
    target[1] = -100
    losses = together(F.cross_entropy, (numbers(BATCH, 5), target))
    assert losses.isnan().tolist() == [False, True, False]


LEFT: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "probabilities": (lambda x, p: F.cross_entropy(x, p.softmax(1)), (numbers(BATCH, 5), numbers(BATCH, 5, seed=1))),
    "own-weights": (
        lambda x, y, w: F.cross_entropy(x, y, weight=w.exp().detach()),
        (numbers(BATCH, 5), classes(5, BATCH), numbers(5, seed=1)),
    ),
    "single-sample": (lambda x, y: F.cross_entropy(x, y), (numbers(5), classes(5))),
    "single-row": (F.linear, (numbers(5), numbers(4, 5, seed=1))),
    "shared-weight": (lambda x: F.linear(x, WEIGHT.view(1, 5)), (numbers(BATCH, 5),)),
    "pos-weight": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=WEIGHT),
        (numbers(BATCH, 5), numbers(BATCH, 5, seed=1)),
    ),
    "dtype": (lambda x: F.log_softmax(x, dim=1, dtype=torch.float64), (numbers(BATCH, 5),)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", LEFT)
def test_what_no_rule_covers_is_left_to_the_map(name: str, used: list[Function]) -> None:
    function, tensors = LEFT[name]
    own = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    torch.testing.assert_close(together(function, own), apart(function, own))
    assert used == []


def test_a_gradient_inside_the_step_is_taken_inside(used: list[Function]) -> None:
    """``torch.func.grad`` within a map: two layers, and rules know of one."""

    def slope(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.grad(lambda w: F.linear(x, w).square().sum())(weight)

    tensors = numbers(BATCH, 5), numbers(4, 5, seed=1)
    torch.testing.assert_close(together(slope, tensors), apart(slope, tensors))
    assert used == []


def test_autocast_is_left_to_torch(used: list[Function]) -> None:
    tensors = [tensor.float() for tensor in (numbers(BATCH, 5), numbers(4, 5, seed=1))]
    target = classes(4, BATCH)

    def step(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), y)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        ruled = together(step, (*tensors, target))
        plain = over_clients(lambda own: [step(*own)], (*tensors, target))[0]
    assert torch.equal(ruled, plain) and used == []


def test_a_class_that_is_not_there_is_an_error() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        together(F.cross_entropy, (numbers(BATCH, 5), classes(5, BATCH) + 1))
    assert together(F.cross_entropy, (numbers(BATCH, 5), classes(5, BATCH))).shape == (CLIENTS,)


def test_without_the_private_parts_of_torch_all_is_left_to_vmap(
    monkeypatch: pytest.MonkeyPatch, used: list[Function]
) -> None:
    tensors = numbers(BATCH, 5), numbers(4, 5, seed=1), classes(4, BATCH)

    def step(x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), y)

    expected = together(step, tensors)
    assert used == [F.linear, F.cross_entropy]
    monkeypatch.setattr(stacked_map, "complete", False)
    torch.testing.assert_close(together(step, tensors), expected)
    assert len(used) == 2


def test_over_clients_refuses_what_a_map_refuses() -> None:
    with pytest.raises(RuntimeError, match="random"):
        over_clients(lambda own: [own[0] + torch.randn(2)], [numbers(2)])
    with pytest.raises(RuntimeError, match="item"):
        over_clients(lambda own: [own[0] * own[0].sum().item()], [numbers(2)])
    (constant,) = over_clients(lambda own: [torch.ones(2)], [numbers(2)])
    assert torch.equal(constant, torch.ones(CLIENTS, 2)), "what no client has is the same for all"
