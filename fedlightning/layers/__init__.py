"""A module as a list of layers, for algorithms that decide layer by layer what is shared.

Layer-wise and partial-sharing algorithms speak of "layer l of L". PyTorch has no such notion: it has a tree of modules
and a flat `state_dict`. This package defines one, by module types and module paths, never by parts of names:

* Every leaf module with parameters is one layer. A module that is one operation but consists of several modules is one
  layer too (`nn.MultiheadAttention` with its `out_proj`, an LSTM, a module under `torch.nn.utils.parametrize`).
* Normalisation layers and `nn.PReLU` join the layer before them, with their buffers. One that comes before everything
  else is a layer by itself.
* Parameters that a container holds directly (`cls_token`, `pos_embed`) form one layer, before its children.
* A tied parameter belongs to the layer that registered it first, under the name that `named_parameters()` gives it.
* Metrics, other modules without parameters, and buffers that are not in `state_dict` are ignored.
"""

from fedlightning.layers.leaves import Layer, pieces
from fedlightning.layers.names import as_names, expand, state_names
from fedlightning.layers.ordered import ForwardOrder, forward_order, head_names, ordered_layers, partition

__all__ = [
    "ForwardOrder",
    "Layer",
    "as_names",
    "expand",
    "forward_order",
    "head_names",
    "ordered_layers",
    "partition",
    "pieces",
    "state_names",
]
