"""Shapes, published parameter counts, heads and recipes of the reference networks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from fedlightning.models import (
    MLP,
    CifarCNN,
    DeepMIL,
    DigitsCNN,
    FendaNet,
    LogisticRegression,
    MnistCNN,
    PLayerCifarNet,
    PLayerConvNet,
    ResNet1d,
    SignalCNN,
    SmallTransformer,
    TextCNN,
    TextLSTM,
    TinyNet,
    head_name,
)
from fedlightning.models.recipes import module_recipe

# network, shape of one input, number of outputs, number of parameters, where the number comes from
CASES: list[tuple[nn.Module, tuple[int, ...], int, int]] = [
    (MLP(784, [200, 200], 10), (1, 28, 28), 10, 199_210),  # McMahan et al., section 3
    (MLP(4, [], 3), (4,), 3, 15),
    (MLP(784, [64], 10, dropout=0.5), (1, 28, 28), 10, 785 * 64 + 650),
    (MnistCNN(), (1, 28, 28), 10, 1_663_370),  # McMahan et al., section 3
    (MnistCNN(hidden=None), (1, 28, 28), 10, 32 * 26 + 64 * 801 + 3137 * 10),  # by hand: two convolutions and one layer
    (CifarCNN(input_size=24), (3, 24, 24), 10, 1_068_298),  # "about 10^6"
    (CifarCNN(), (3, 32, 32), 10, 1_756_426),
    (PLayerConvNet(), (1, 28, 28), 10, 64 * 26 + 128 * (64 * 25 + 1) + 256 * (128 * 25 + 1) + 257 * 100 + 1010),
    (PLayerConvNet(in_channels=3, num_classes=47), (3, 32, 32), 47, 1_052_758 + 2 * 64 * 25 + 37 * 101),
    (PLayerCifarNet(), (3, 16, 16), 10, 3_963_094),
    (LogisticRegression(), (13,), 1, 14),  # FENDA-FL paper
    (TinyNet(), (13,), 1, 76),  # APFL there: two of them, 152
    (FendaNet(), (13,), 1, 151),  # FENDA-FL paper
    (SignalCNN(9, 6), (9, 128), 6, 32 * 46 + 64 * 161 + 64 * 321 + 65 * 6),
    (DeepMIL(16, 8), (30, 16), 1, 8 * 17 + 2 * 8 * 9 + 9 + 128 * 9 + 64 * 129 + 65),
    (ResNet1d(12, 5, width=8, blocks=1), (12, 200), 5, 8 * 181 + 2 * (8 * 57 + 16) + 72 + 45),
    (DigitsCNN(), (64,), 10, 6_090),
    (DigitsCNN(norm="batch"), (1, 8, 8), 10, 6_186),
    (DigitsCNN(norm="group", in_channels=3, input_size=9), (3, 9, 9), 10, 6_186 + 2 * 144),
]


def parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def name_of(value: Any) -> str | None:
    return type(value).__name__ if isinstance(value, nn.Module) else None


@pytest.mark.parametrize(("net", "shape", "outputs", "count"), CASES, ids=name_of)
def test_shape_count_head_and_gradients(net: nn.Module, shape: tuple[int, ...], outputs: int, count: int) -> None:
    assert parameters(net) == count
    logits = net(torch.randn(3, *shape))
    assert logits.shape == (3, outputs)
    head = net.get_submodule(head_name(net))
    assert isinstance(head, nn.Linear) and head.out_features == outputs
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


@pytest.mark.parametrize(("net", "shape", "outputs", "count"), CASES, ids=name_of)
def test_recipe_pickle_and_copy(net: nn.Module, shape: tuple[int, ...], outputs: int, count: int) -> None:
    recipe = module_recipe(net)
    assert recipe is not None
    again = type(net)(**recipe["init_args"])
    again.load_state_dict(net.state_dict())
    x = torch.randn(2, *shape)
    wanted = net.eval()(x)
    for other in (again, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(other.eval()(x), wanted)
        assert module_recipe(other) == recipe


def test_layer_names_of_player_fl() -> None:
    assert [name for name, _ in PLayerConvNet().named_parameters() if name.endswith("weight")] == [
        f"{layer}.weight" for layer in ("conv1", "conv2", "conv3", "fc1", "fc2")
    ]
    assert {name for name, _ in PLayerConvNet(norm="batch").named_buffers()} >= {"norm1.running_mean"}
    assert not list(PLayerConvNet(norm="group").named_buffers())


def test_unknown_norm() -> None:
    with pytest.raises(ValueError, match=r"norm='layer'\. Use 'none', 'batch' or 'group'"):
        DigitsCNN(norm="layer")  # type: ignore[arg-type]


def test_fenda_net_is_two_extractors_and_a_head() -> None:
    net, x = FendaNet(num_classes=2), torch.randn(4, 13)
    changed = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in changed.local_extractor.parameters():
            parameter.add_(1.0)
    assert not torch.equal(changed(x), net(x))
    for one in (net, changed):  # local features come first
        one.head.weight.data[:, :5] = 0.0
    assert torch.equal(changed(x), net(x))


def transformer(**kwargs: Any) -> SmallTransformer:
    return SmallTransformer(vocab_size=11, num_classes=3, max_length=8, dim=16, num_heads=2, **kwargs).eval()


def test_transformer_ignores_padding() -> None:
    net = transformer()
    tokens = torch.tensor([[3, 5, 7], [4, 0, 0]])
    longer = torch.cat([tokens, torch.zeros(2, 4, dtype=torch.long)], dim=1)
    logits = net(tokens)
    assert logits.shape == (2, 3)
    torch.testing.assert_close(net(longer), logits)
    assert not torch.equal(net(tokens[:, :2])[0], logits[0])  # a real token counts
    assert not torch.allclose(net(tokens.flip(1))[0], logits[0])  # and so does its place


def test_transformer_with_padding_alone_and_too_long() -> None:
    net = transformer(num_layers=1)
    net.train()
    logits = net(torch.zeros(2, 4, dtype=torch.long))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    with pytest.raises(ValueError, match=r"max_length=8\) got sequences of 9 tokens"):
        net(torch.ones(2, 9, dtype=torch.long))


def test_transformer_layers_and_recipe() -> None:
    net = transformer(num_layers=3, padding_idx=1)
    assert [name for name, _ in net.named_children()] == [
        "embedding", "position", "block1", "block2", "block3", "projection", "fc",
    ]  # fmt: skip
    recipe = module_recipe(net)
    assert recipe is not None and recipe["init_args"]["padding_idx"] == 1
    again = SmallTransformer(**recipe["init_args"])
    again.load_state_dict(net.state_dict())


def test_head_name_of_a_stranger() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"Sequential does not say which submodule is its head.* of: 0, 1"):
        head_name(net)
    net.head_name = "1"  # type: ignore[assignment]
    assert head_name(net) == "1"


@pytest.mark.parametrize(
    ("net", "count"),
    [
        # LEAF, with torch's second bias of each layer: 4 * 256 more in each
        (TextLSTM(80, 80), 640 + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (512 + 2) + 257 * 80),
        (TextLSTM(80, 2, embedding=4, hidden=8, layers=1, cell="gru"), 320 + 3 * 8 * (4 + 8 + 2) + 18),
        (TextCNN(50, 3, embedding=4, filters=2), 200 + 2 * (4 * 12 + 3) + 7 * 3),
    ],
    ids=["lstm", "gru", "cnn"],
)
def test_texts(net: nn.Module, count: int) -> None:
    assert parameters(net) == count
    tokens = torch.randint(1, 50, (4, 25))
    logits = net.eval()(tokens)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    assert torch.equal(net(tokens[2:3]).round(decimals=5), logits[2:3].round(decimals=5))
    recipe = module_recipe(net)
    assert recipe is not None and type(net)(**recipe["init_args"]).state_dict().keys() == net.state_dict().keys()
    assert head_name(net) == "fc"
