"""The order in which the parts of a module are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedlightning.layers import ForwardOrder, forward_order, ordered_layers
from tests.layers.common import Net, Tokens, in_forward_order, names


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
