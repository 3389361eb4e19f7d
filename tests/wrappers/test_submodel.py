"""Sub-models: which modules have them, what they hold, and the way back."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.client.probes import training_loss
from fedlightning.models import DigitsCNN
from fedlightning.tensors import load_state, module_state
from fedlightning.wrappers.slices import ElementMean, take
from fedlightning.wrappers.submodel import entry_slices, first_units, plan_cuts, shrink, verify
from tests.helpers import CLASSES, FEATURES, Toy, same

IMAGES = (torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(6) % CLASSES)
ROWS = (torch.randn(6, FEATURES, generator=torch.Generator().manual_seed(1)), torch.arange(6) % CLASSES)


class Holder(Toy):
    """A Toy around any network."""

    def __init__(self, net):
        super().__init__()
        self.net = net


class Block(nn.Module):
    """A residual block that widens, with its shortcut registered last."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x):
        return F.relu(self.shortcut(x) + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def mlp():
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 10), nn.BatchNorm1d(10), nn.Linear(10, CLASSES)
    )


def residual():
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.GroupNorm(3, 6), Block(6, 6), Block(6, 11), *pool, nn.Linear(11, CLASSES)
    )


def depthwise():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, CLASSES)
    )


NETS = {
    "mlp": (mlp, ROWS),
    "digits": (lambda: DigitsCNN(CLASSES), IMAGES),
    "digits bn": (lambda: DigitsCNN(CLASSES, norm="batch"), IMAGES),
    "digits gn": (lambda: DigitsCNN(CLASSES, norm="group"), IMAGES),
    "residual": (residual, IMAGES),
    "depthwise": (depthwise, IMAGES),
}


@pytest.fixture(params=NETS)
def net(request):
    torch.manual_seed(0)
    make, batch = NETS[request.param]
    return Holder(make()), batch


def cut(module, rate):
    slices = entry_slices(module, plan_cuts(module), first_units(rate))
    return shrink(copy.deepcopy(module), slices), slices


@pytest.mark.parametrize("rate", [0.5, 0.3, 0.07])
def test_the_submodel_runs_trains_and_holds_its_part_of_the_state(net, rate):
    module, batch = net
    small, slices = cut(module, rate)
    same(module_state(small), take(module_state(module), slices))
    verify(module, plan_cuts(module), first_units(rate), lambda model: training_loss(model, batch))
    training_loss(small, batch).backward()
    assert all(parameter.grad is not None for parameter in small.parameters())
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in module.parameters())
    again = pickle.loads(pickle.dumps(small))
    same(module_state(again), module_state(small))


def test_layers_know_their_new_sizes(net):
    small, _ = cut(net[0], 0.5)
    for layer in small.modules():
        if isinstance(layer, nn.Linear):
            assert (layer.out_features, layer.in_features) == tuple(layer.weight.shape)
        elif isinstance(layer, nn.Conv2d):
            assert (layer.out_channels, layer.in_channels // layer.groups) == tuple(layer.weight.shape[:2])
        elif isinstance(layer, nn.BatchNorm2d | nn.BatchNorm1d):
            assert layer.num_features == len(layer.weight) == len(layer.running_mean)


def test_full_width_cuts_nothing(net):
    module, _ = net
    small, slices = cut(module, 1.0)
    assert slices == {} and type(small) is type(module)
    same(module_state(small), module_state(module))


def test_slices_are_nested(net):
    """slice(slice(W, a), b) == slice(W, ab) where the sizes agree, as with halves of even widths."""
    module = Holder(DigitsCNN(CLASSES, norm="batch"))
    half, _ = cut(module, 0.5)
    quarter, _ = cut(module, 0.25)
    same(module_state(cut(half, 0.5)[0]), module_state(quarter))


def test_extracting_and_combining_gives_the_model_back(net):
    module, _ = net
    state, mean = module_state(module), ElementMean()
    for rate, weight in ((0.3, 3.0), (1.0, 7.0), (0.5, 11.0)):
        small, slices = cut(module, rate)
        mean.add(module_state(small), state, slices, weight)
    same(mean.result(state), state)


def test_elements_outside_every_slice_stay():
    module = Holder(mlp())
    old, mean = module_state(module), ElementMean()
    small, slices = cut(module, 0.5)
    mean.add({n: v + 1 for n, v in module_state(small).items()}, old, slices, 1.0)
    new = mean.result(old)
    assert torch.equal(new["net.0.weight"][4:], old["net.0.weight"][4:])
    assert torch.equal(new["net.0.weight"][:4], old["net.0.weight"][:4] + 1)
    assert torch.equal(new["net.3.weight"][:5, 4:], old["net.3.weight"][:5, 4:])
    assert torch.equal(new["net.5.bias"], old["net.5.bias"] + 1)


def test_any_choice_of_units_can_be_cut():
    """A rolling window over a network without normalisation: the cut of the rolled network."""
    torch.manual_seed(0)
    module = Holder(DigitsCNN(CLASSES))
    window = lambda path, width: (torch.arange(width // 2) + 3) % width  # noqa: E731
    cuts = plan_cuts(module)
    verify(module, cuts, window, lambda model: training_loss(model, IMAGES))
    slices = entry_slices(module, cuts, window)
    small, state = shrink(copy.deepcopy(module), slices), module_state(module)
    assert torch.equal(small.net.conv1.weight, state["net.conv1.weight"][3:11])
    block = state["net.fc.weight"].view(CLASSES, 32, 4)[:, 3:19].flatten(1)
    assert torch.equal(small.net.fc.weight, block)


class Tied(Toy):
    """Tied and frozen parameters, a scale and a buffer."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)])
        self.net[2].weight = self.net[1].weight
        self.net[0].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("code", torch.arange(3))

    def logits(self, x):
        for layer in self.net[:-1]:
            x = torch.tanh(layer(x))
        return self.scale * self.net[-1](x)


def test_tied_and_frozen_parameters_stay_so():
    module = Tied()
    small, slices = cut(module, 0.5)
    verify(module, plan_cuts(module), first_units(0.5), lambda model: training_loss(model, ROWS))
    assert small.net[1].weight is small.net[2].weight and small.net[1].weight.shape == (4, 4)
    assert not small.net[0].bias.requires_grad
    assert small.code.tolist() == [0, 1, 2]
    fresh = cut(Tied(), 0.5)[0]
    load_state(fresh, take(module_state(module), slices))
    same(module_state(fresh), module_state(small))


# -- what has no sub-models --------------------------------------------------------------------------------------------


class Concat(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(16, CLASSES)

    def forward(self, x):
        a = torch.relu(self.a(x))
        return self.head(torch.cat([a, torch.relu(self.b(a))], 1))


class Dense(nn.Module):
    """Concatenated widths that an earlier layer happens to have: every size fits, the meaning does not."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(FEATURES, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        a = torch.relu(self.a(x))
        return self.head(torch.cat([torch.relu(self.b(a)), torch.relu(self.c(a))], 1))


class Shuffled(nn.Module):
    """Units that change places between layers."""

    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(torch.relu(self.a(x)).flip(1))


class Averaged(nn.Module):
    """A mean over the units: what is left out changes it."""

    def __init__(self):
        super().__init__()
        self.a, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        a = self.a(x)
        return self.head(a - a.mean(1, keepdim=True))


class FixedSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, CLASSES)

    def forward(self, x):
        return self.head(self.conv(x).view(-1, 144))


@pytest.mark.parametrize(
    ("make", "batch", "words"),
    [
        (Concat, ROWS, r"`net.head` of Holder takes 16 inputs, and no layer before it gives as many"),
        (Dense, ROWS, r"does not compute what its units do"),
        (Shuffled, ROWS, r"does not compute what its units do"),
        (Averaged, ROWS, r"does not compute what its units do"),
        (FixedSize, IMAGES, r"A sub-model of Holder does not run"),
        (lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.PReLU(8), nn.Linear(8, 3)), ROWS, r"`net.1` \(PReLU\)"),
        (lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(128, 3)),
         IMAGES, r"in 2 groups; only depthwise"),
        (lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Unflatten(1, (2, 4)), nn.LayerNorm((2, 4)), nn.Linear(8, 3)),
         ROWS, r"normalises over \(2, 4\)"),
    ],
)  # fmt: skip
def test_other_architectures_are_refused(make, batch, words):
    module = Holder(make())
    before = {name: value.clone() for name, value in module_state(module).items()}
    with pytest.raises(ValueError, match=words):
        verify(module, plan_cuts(module), first_units(0.5), lambda model: training_loss(model, batch))
    same(module_state(module), before)


def test_the_head_can_be_named_where_it_is_not_the_last():
    class HeadFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.more = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), nn.Linear(8, 8)

        def forward(self, x):
            return self.head(torch.relu(self.more(torch.relu(self.body(x)))))

    module = Holder(HeadFirst())
    run = lambda model: training_loss(model, ROWS)  # noqa: E731
    verify(module, plan_cuts(module, "net.head"), first_units(0.5), run)
    with pytest.raises(ValueError, match=r"A sub-model of Holder does not"):
        verify(module, plan_cuts(module), first_units(0.3), run)
    with pytest.raises(ValueError, match=r"The head `net` of Holder is not a Linear"):
        plan_cuts(module, "net")
