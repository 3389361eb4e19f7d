"""Modules whose layers are known, and short ways to ask for them."""

from __future__ import annotations

import torch
from torch import nn

from fedlightning.layers import forward_order, ordered_layers


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


def names(module, order=None):
    return [layer.name for layer in ordered_layers(module, order)]


def in_forward_order(module, *inputs):
    return ordered_layers(module, forward_order(module, lambda: module(*inputs)))
