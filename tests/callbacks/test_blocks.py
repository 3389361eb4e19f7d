"""Networks taken apart into blocks, and put together anew."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedlightning.callbacks.shared.blocks import assembled, check_cut, cut, describe, rebuild, row_of, stitch_sizes
from fedlightning.models import MLP, Classifier, DigitsCNN, MnistCNN
from fedlightning.tensors import module_state
from tests.callbacks.public import Deep
from tests.helpers import CLASSES, FEATURES, NormNet, Toy, same

IMAGES = (5, 1, 8, 8)
NETS = {
    "Toy": (lambda: Toy(dropout=0.3), (5, FEATURES), ["fc", "fc"]),
    "Deep": (Deep, (5, FEATURES), ["fc", "fc", "fc"]),
    "norm": (NormNet, (5, FEATURES), ["fc", "fc"]),
    "mlp": (lambda: Classifier(MLP(64, [7], 10), num_classes=10), IMAGES, ["fc", "fc"]),
    "cnn": (lambda: Classifier(MnistCNN(input_size=8, hidden=6, channels=[2, 3]), num_classes=10), IMAGES,
            ["conv", "conv", "fc", "fc"]),
    "normed cnn": (lambda: Classifier(DigitsCNN(norm="batch"), num_classes=10), (5, 64), ["conv", "conv", "fc"]),
}  # fmt: skip


def made(name):
    make, shape, kinds = NETS[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make(), torch.randn(shape), kinds


@pytest.mark.parametrize("name", NETS)
def test_blocks_put_together_again_are_the_network(name):
    """Outputs, gradients, and running statistics in training."""
    module, x, kinds = made(name)
    blocks = cut(module, x)
    row = row_of(module, blocks)
    assert [block.kind for block in blocks] == kinds and not row.stitches and row.head is None
    assert [block.depth for block in blocks] == list(range(len(kinds)))
    last = max((i for i, kind in enumerate(kinds) if kind == "conv"), default=-1)
    assert [block.rank for block in blocks] == [0 if i <= last else 1 for i in range(len(kinds) - 1)] + [2]
    assert torch.equal(row.eval()(x), module.eval()(x))
    results = []
    for net in (row.train(), module.train()):
        torch.manual_seed(0)
        net(x).square().sum().backward()
        gradients = [parameter.grad for parameter in net.parameters()]
        results.append((gradients, [b for n, b in net.named_buffers() if "running" in n]))
    for mine, wanted in zip(*results, strict=True):
        assert len(mine) == len(wanted) and all(map(torch.equal, mine, wanted))


@pytest.mark.parametrize("name", ["norm", "normed cnn"])
def test_taking_apart_leaves_no_trace_and_shares_no_parameter(name):
    module, x, _ = made(name)
    before, generator = copy.deepcopy(module_state(module)), torch.get_rng_state()
    blocks = check_cut("X", module, x) and cut(module, x)
    assert torch.equal(torch.get_rng_state(), generator) and module.training
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    same(module_state(module), before)
    own = {parameter.data_ptr() for parameter in module.parameters()}
    assert not own & {parameter.data_ptr() for block in blocks for parameter in block.parameters()}


def test_a_block_carries_its_own_layer_only():
    module, x, _ = made("normed cnn")
    sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in cut(module, x)]
    assert sizes == [16 * 9 + 16 + 32, 32 * 16 * 9 + 32 + 64, 32 * 4 * 10 + 10]


class Residual(Toy):
    """The second layer's output is added to its input; at the start it is zero."""

    def __init__(self, given=False):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.net = None
        self.given = given
        nn.init.zeros_(self.third.weight)

    def forward(self, x):
        x = self.first(x)
        return self.third(x + self.second(x))


class Added(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return x + self.layer(x)


class Given(Residual):
    """Says its blocks itself."""

    def blocks(self):
        return [self.first, Added(self.second), self.third]


class Wrong(Residual):
    def blocks(self):
        return [self.first, self.second, self.third]


class Nothing(Residual):
    def blocks(self):
        return ["first"]


class Twice(Residual):
    def forward(self, x):
        return self.third(self.second(self.second(self.first(x))))


class Held(Residual):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        return self.third(self.second(self.first(x) + self.shift))


class Recurrent(Residual):
    def __init__(self):
        super().__init__()
        self.first = nn.LSTM(FEATURES, 8, batch_first=True)

    def forward(self, x):
        return self.third(self.second(self.first(x[:, None])[0][:, 0]))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Residual, "depends on more than the layer before it"),
        (Wrong, "depends on more than the layer before it"),
        (Nothing, r"Nothing.blocks\(\) must return modules"),
        (Twice, "'second' is called twice"),
        (Held, r"parameters are held outside of layers \('shift'\)"),
        (Recurrent, "'first' does not turn one tensor into another"),
    ],
)
def test_networks_that_are_no_chain_are_refused(make, reason):
    with pytest.raises(ValueError, match=rf"X cannot take {make.__name__} apart into blocks: .*{reason}") as caught:
        check_cut("X", make(), torch.randn(4, FEATURES))
    assert "blocks()" in str(caught.value)


def test_a_network_that_says_its_blocks_is_not_looked_into():
    module, x = Given(), torch.randn(4, FEATURES)
    blocks = check_cut("X", module, x)
    assert [block.kind for block in blocks] == ["fc"] * 3
    module.third.reset_parameters()
    assert torch.equal(row_of(module, cut(module, x)).eval()(x), module.eval()(x))


# -- stitches ----------------------------------------------------------------------------------------------------------
def rows():
    """Two networks of different architectures for the same images."""
    modules = [made(name)[0] for name in ("mlp", "cnn")]
    return [row_of(module, cut(module, torch.randn(IMAGES))) for module in modules]


@pytest.mark.parametrize(
    ("places", "stitches", "head"),
    [
        ([(1, 0), (0, 0), (0, 1)], {1: (64, 2 * 16)}, False),
        ([(1, 1), (1, 2), (0, 1)], {0: (2 * 16, 64), 2: (7, 6)}, False),
        ([(1, 0), (0, 0)], {1: (64, 2 * 16)}, True),
        ([(0, 1), (1, 3)], {0: (7, 64), 1: (6, 10)}, False),
    ],
)
@pytest.mark.parametrize("relu", [True, False])
def test_stitches_are_where_shapes_do_not_fit(places, stitches, head, relu):
    own = rows()
    own[places[0][0]].relu = relu
    net, x = assembled(own, places, 1, "stitches"), torch.randn(IMAGES)
    assert stitch_sizes(net.parts, (1, 8, 8)) == stitches
    assert {int(place): tuple(layer.weight.shape) for place, layer in net.stitches.items()} == stitches
    assert (net.head is not None) == head and net(x).shape == (5, 10)
    seen, wanted = net.eval().activations(x), x
    for place, (row, depth) in enumerate(places):
        block = own[row].parts[depth].eval()
        if place in stitches:
            wanted = net.stitches[str(place)](wanted.flatten(1))
            wanted = (wanted.clamp(min=0) if relu else wanted).reshape(5, *block.into)
        wanted = block(wanted)
        assert torch.equal(seen[place + 1], wanted)
    again = assembled(own, places, 1, "stitches")
    same(module_state(again), module_state(net))  # addressed


def test_a_description_gives_the_same_network_elsewhere():
    own, x = rows(), torch.randn(IMAGES)
    net = assembled(own, [(1, 0), (0, 0)], 5)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1
    described = describe([(1, 0), (0, 0)], net)
    assert all(isinstance(value, torch.Tensor) for value in described.values())
    fresh = {index: cut(made(name)[0], x[:2]) for index, name in enumerate(("mlp", "cnn"))}
    generator = torch.get_rng_state()
    again = rebuild(described, fresh, relu=True)
    assert torch.equal(generator, torch.get_rng_state())
    assert torch.equal(again.eval()(x), net.eval()(x))
    numbers = sum(value.numel() for name, value in described.items() if name != "blocks")
    assert numbers == (2 * 25 + 2) + (32 * 64 + 64) + (64 * 7 + 7) + (7 * 10 + 10)


class Hosted(Deep):
    """Scales its inputs where batches are moved."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [10 * batch[0], batch[1]]


def test_a_stitched_network_sees_batches_as_its_first_network_does():
    from fedlightning.algorithm import probes

    module = Hosted()
    row = row_of(module, cut(module, torch.randn(2, FEATURES)))
    x, _ = probes.move_batch(row, [torch.ones(2, FEATURES), torch.zeros(2)])
    assert torch.equal(x, torch.full((2, FEATURES), 10.0))
