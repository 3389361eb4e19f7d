"""HeteroFL: the first units of every layer. `shared.partial_training` tells the way of the model through a round."""

from __future__ import annotations

from fedlightning.algorithm import WeightingName
from fedlightning.callbacks.shared.partial_training import PartialTraining, Rates
from fedlightning.ranges import make_init
from fedlightning.wrappers.submodel import Units, first_units


@make_init
class HeteroFL(PartialTraining):
    r"""Clients train the same network at the width they can afford; each entry is averaged over those that hold it.

    Diao, Ding, Tarokh, "HeteroFL: computation and communication efficient federated learning for heterogeneous
    clients", ICLR 2021.

    Down and up: the client's slice of `W`: the first `ceil(r C_l)` of the `C_l` units of every hidden layer (inputs and
    classes are never cut). No state. The global model has all units; a client deploys its slice.

    * *Scaler*: in training, outputs of hidden linear and convolutional layers are divided by `r`.
    * *Masked loss*: in training, the logits of classes that a client has no sample of are 0; rows of the head are
      averaged over the clients that have the class.
    * *Server*: every entry is the mean over the clients whose slice holds it. Held by nobody, it keeps its value.

    It is for chains of Linear, Conv and normalisation layers (and residual sums of them), registered in order; other
    modules are refused at start. Beside methods that keep a model at the client, use fixed rates. The scaler enlarges
    steps by `1/r`: clip gradients as the paper does (`gradient_clip_val=1`).

    Args:
        rates: Widths in (0, 1]: a list dealt to the clients in turn, or one for each client by id (paper: subsets of 1,
            1/2, 1/4, 1/8, 1/16; the default is its first three).
        dynamic: Every client draws a width from the list in every round (the paper's dynamic assignment).
        scaler: Divides by the rate in training (paper).
        masked_loss: Leaves out absent classes in training and in the head's mean (paper).
        static_bn: After each round the participants run the new global model over their training data, and the means of
            the batch statistics become its BatchNorm statistics; a slice is deployed with those of its client's data
            (the paper's static batch normalisation; nothing to do without BatchNorm). It costs a pass and the full
            model down. False: running statistics are averaged as all else.
        head: Path of the layer that gives the logits. `None` takes the last layer.
        weighting: Weights of the clients: `"uniform"` (paper) or `"samples"`.

    Raises:
        ValueError: If a rate is outside (0, 1], rates to draw from are a table, or `head` names several layers.

    Example:
        >>> from torch import nn
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from fedlightning.callbacks import HeteroFL
        >>> from fedlightning.wrappers.slices import take
        >>> module = BoringModel()
        >>> module.layer = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> half = take(module.state_dict(), HeteroFL().slices(module, rate=0.5))
        >>> {name: tuple(value.shape) for name, value in half.items() if name.endswith("weight")}
        {'layer.0.weight': (4, 32), 'layer.2.weight': (2, 4)}
    """

    rates: Rates = (1.0, 0.5, 0.25)
    dynamic: bool = False
    scaler: bool = True
    masked_loss: bool = True
    static_bn: bool = True
    head: str | list[str] | None = None
    weighting: WeightingName | None = "uniform"

    def units(self, rate: float, round: int, client: str, seed: int) -> Units:
        """Return the first `ceil(rate * width)` units of every layer, in every round and for every client."""
        return first_units(rate)
