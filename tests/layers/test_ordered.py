"""A module as a list of layers: what is one layer, and in which order."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torchmetrics.classification import MulticlassAccuracy

from fedlightning.layers import head_names, ordered_layers, pieces, state_names
from tests.layers.common import Net, Tokens, in_forward_order, names


def test_normalisation_joins_what_comes_before_with_its_buffers():
    norm = nn.BatchNorm2d(2)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), norm, nn.PReLU(), nn.Flatten(), nn.Linear(2, 3), nn.LayerNorm(3))
    first, second = ordered_layers(net)
    assert (first.name, second.name) == ("0", "4")
    assert first.parameters == ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight")
    assert first.buffers == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert first.pieces == ("0", "1", "2") and second.pieces == ("4", "5")
    assert state_names(second) == ["4.weight", "4.bias", "5.weight", "5.bias"]


def test_a_norm_before_everything_stands_alone_unless_it_has_statistics_only():
    assert names(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))) == ["0", "1"]
    (only,) = ordered_layers(nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)))
    assert only.name == "1" and only.buffers[0] == "0.running_mean" and only.pieces == ("1", "0")


def test_a_module_that_is_one_operation_is_one_layer():
    net = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(4, 2),
            "recurrent": nn.LSTM(4, 3, num_layers=2),
            "normed": weight_norm(nn.Linear(3, 3)),
            "embedding": nn.Embedding(5, 4),
        }
    )
    assert names(net) == ["attention", "recurrent", "normed", "embedding"]
    attention, recurrent, normed, _ = ordered_layers(net)
    assert set(attention.parameters) == {f"attention.{name}" for name, _ in net["attention"].named_parameters()}
    assert len(recurrent.parameters) == 8
    assert len(normed.parameters) == 3 and all("normed." in name for name in normed.parameters)


def test_a_transformer_layer_is_taken_apart_in_forward_order():
    """As registered both norms follow linear2; as called the first belongs to the attention."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    assert names(layer) == ["self_attn", "linear1", "linear2"]
    called = in_forward_order(layer, torch.randn(2, 3, 4))
    assert [item.pieces for item in called] == [("self_attn", "norm1"), ("linear1",), ("linear2", "norm2")]


def test_parameters_of_a_container_are_one_layer_before_its_children():
    layers = ordered_layers(Tokens())
    assert [layer.name for layer in layers] == ["cls_token+position", "body", "prompts", "head"]
    assert layers[0].parameters == ("cls_token", "position") and layers[0].buffers == ("saved",)


def test_a_subclass_of_attention_is_one_layer_too():
    class Mine(nn.MultiheadAttention):
        pass

    assert names(nn.Sequential(Mine(4, 2), nn.Linear(4, 4))) == ["0", "1"]


def test_a_tied_parameter_belongs_to_the_first_layer_that_has_it():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    net[2].weight = net[0].weight
    assert [layer.parameters for layer in ordered_layers(net)] == [
        ("0.weight",), ("1.weight", "1.bias"), ("2.bias",),
    ]  # fmt: skip
    twice = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    twice.append(twice[0])
    assert names(twice) == ["0", "1"]


def test_metrics_and_modules_without_parameters_are_no_layers():
    net = nn.ModuleDict({"fc": nn.Linear(2, 3), "drop": nn.Dropout(), "accuracy": MulticlassAccuracy(3)})
    net["accuracy"].persistent(True)
    assert names(net) == ["fc"]


def test_a_single_layer_and_frozen_parameters():
    assert names(nn.Linear(2, 3)) == ["weight+bias"]
    net = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    assert names(net) == ["0", "1"]


def test_norms_of_others_are_recognised():
    class RMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    class FrozenBatchNorm(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("weight", "bias", "running_mean", "running_var"):
                self.register_buffer(name, torch.zeros(2))

    first, second = ordered_layers(nn.Sequential(nn.Linear(2, 2), FrozenBatchNorm(), nn.Linear(2, 2), RMSNorm()))
    assert len(first.buffers) == 4 and second.parameters[-1] == "3.weight"


def test_pieces_are_all_there_is_and_layers_partition_them():
    for net in (Net(), Tokens(), nn.TransformerEncoderLayer(4, 2)):
        layers = ordered_layers(net)
        assert sorted(p for layer in layers for p in layer.pieces) == sorted(piece.name for piece in pieces(net))
        held = [name for layer in layers for name in layer.parameters]
        assert sorted(held) == sorted(name for name, _ in net.named_parameters()) and len(set(held)) == len(held)


def test_a_norm_that_an_order_leaves_out_stays_behind_its_predecessor():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2), nn.Linear(2, 2))
    first, second, third = ordered_layers(net, ["0", "4", "3"])
    assert (first.name, second.name, third.name) == ("0", "4", "3")
    assert first.pieces == ("0", "1")


def test_an_order_by_hand():
    assert names(Net(), ["conv", "norm", "fc"]) == ["conv", "fc", "head"]
    with pytest.raises(ValueError, match=r"'conf' is not a layer of Net\. Close matches: 'conv'"):
        ordered_layers(Net(), ["conf"])


def test_heads():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert head_names(net) == ["2.weight", "2.bias"]
    assert set(head_names(net, 2)) == set(net.state_dict())
    with pytest.raises(ValueError, match="A head of 3 layers cannot be cut from Sequential, which has 2: 0, 2"):
        head_names(net, 3)
