"""A module as a list of layers: what is one layer, in which order, and what names mean."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torchmetrics.classification import MulticlassAccuracy

from fedlightning.layers import (
    ForwardOrder,
    expand,
    forward_order,
    head_names,
    ordered_layers,
    pieces,
    state_names,
)


def names(module, order=None):
    return [layer.name for layer in ordered_layers(module, order)]


def in_forward_order(module, *inputs):
    return ordered_layers(module, forward_order(module, lambda: module(*inputs)))


class Net(nn.Module):
    """Registered head first, called last; a norm that is registered last belongs to the first convolution."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.conv = nn.Conv1d(1, 4, 3)
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.head(torch.relu(self.fc(torch.relu(self.norm(self.conv(x))).mean(-1))))


# -- what is one layer -----------------------------------------------------------------------------------------------


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


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.cls_token, self.position = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        self.prompts = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(2)])
        self.head = nn.Linear(4, 2)
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)
        self.register_buffer("saved", torch.zeros(2))

    def forward(self, x):
        return self.head(self.body(x + self.cls_token + self.position + sum(self.prompts)))


def test_parameters_of_a_container_are_one_layer_before_its_children():
    layers = ordered_layers(Tokens())
    assert [layer.name for layer in layers] == ["cls_token+position", "body", "prompts", "head"]
    assert layers[0].parameters == ("cls_token", "position") and layers[0].buffers == ("saved",)


def test_a_subclass_of_attention_is_one_layer_too():
    class Mine(nn.MultiheadAttention):
        pass

    assert names(nn.Sequential(Mine(4, 2), nn.Linear(4, 4))) == ["0", "1"]


def test_a_parameter_list_counts_as_used_when_a_child_of_its_owner_runs():
    """A LightningModule is never called itself where its step calls the children one by one."""
    net = Tokens()
    called = forward_order(net, lambda: net.head(net.body(torch.zeros(1, 4))))
    assert called == ["cls_token+position", "prompts", "body", "head"]


def test_a_parameter_list_counts_as_used_when_its_owner_runs():
    called = [layer.name for layer in in_forward_order(Tokens(), torch.zeros(1, 4))]
    assert called == ["cls_token+position", "prompts", "body", "head"]
    nested = nn.Sequential(nn.Linear(4, 4), Tokens())
    assert [layer.name for layer in in_forward_order(nested, torch.zeros(1, 4))] == [
        "0", "1.cls_token+position", "1.prompts", "1.body", "1.head",
    ]  # fmt: skip


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


# -- order -----------------------------------------------------------------------------------------------------------


def test_forward_order_is_not_registration_order():
    net = Net()
    assert names(net) == ["head", "conv", "fc"]
    first, second, third = in_forward_order(net, torch.randn(2, 1, 5))
    assert (first.name, second.name, third.name) == ("conv", "fc", "head")
    assert first.pieces == ("conv", "norm") and "norm.running_var" in first.buffers
    assert ordered_layers(net)[-1].pieces == ("fc", "norm")


def test_what_is_never_called_follows_in_registration_order():
    net = nn.ModuleDict({"unused": nn.Linear(2, 2), "b": nn.Linear(2, 2), "also": nn.Linear(2, 2)})
    assert forward_order(net, lambda: net["b"](torch.zeros(1, 2))) == ["b", "unused", "also"]


def test_the_first_call_counts():
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    x = torch.zeros(1, 2)
    assert forward_order(net, lambda: net["b"](net["a"](net["b"](x)))) == ["b", "a"]


def test_watching_ends_and_leaves_no_hook():
    net = Net()
    order = ForwardOrder(net)
    net(torch.randn(2, 1, 5))
    assert order.names() == ["conv", "norm", "fc", "head"]
    assert not any(child._forward_pre_hooks for child in net.modules())
    with pytest.raises(ZeroDivisionError):
        forward_order(net, lambda: 1 / 0)
    assert not any(child._forward_pre_hooks for child in net.modules())


def test_a_norm_that_an_order_leaves_out_stays_behind_its_predecessor():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2), nn.Linear(2, 2))
    first, second, third = ordered_layers(net, ["0", "4", "3"])
    assert (first.name, second.name, third.name) == ("0", "4", "3")
    assert first.pieces == ("0", "1")


def test_an_order_by_hand():
    assert names(Net(), ["conv", "norm", "fc"]) == ["conv", "fc", "head"]
    with pytest.raises(ValueError, match=r"'conf' is no layer of Net\. Close matches: 'conv'"):
        ordered_layers(Net(), ["conf"])


# -- names -----------------------------------------------------------------------------------------------------------


def test_prefixes_are_module_paths():
    available = ["layer1.weight", "layer1.bias", "layer10.weight", "layer.weight", "scale"]
    assert expand(["layer1"], available) == ["layer1.weight", "layer1.bias"]
    assert expand(["layer1."], available) == ["layer1.weight", "layer1.bias"]
    assert expand("layer", available) == ["layer.weight"]
    assert expand(["scale", "layer10", "layer10.weight"], available) == ["layer10.weight", "scale"]
    assert expand([], available) == []


@pytest.mark.parametrize(("name", "sentence"), [("layer2", "Close matches"), ("", "There are"), ("weight", "layer1")])
def test_a_name_that_matches_nothing(name, sentence):
    with pytest.raises(ValueError, match=sentence):
        expand([name], ["layer1.weight", "layer10.weight"])


def test_heads():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert head_names(net) == ["2.weight", "2.bias"]
    assert set(head_names(net, 2)) == set(net.state_dict())
    with pytest.raises(ValueError, match="A head of 3 layers cannot be cut from Sequential, which has 2: 0, 2"):
        head_names(net, 3)
