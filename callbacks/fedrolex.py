"""FedRolex: a window of units that rolls. `shared.partial_training` tells the way of the model through a round."""

from __future__ import annotations

from collections.abc import Sequence

from fedlightning.algorithm import WeightingName
from fedlightning.callbacks.shared.partial_training import PartialTraining
from fedlightning.ranges import NonNegativeInt
from fedlightning.wrappers.submodel import Units
from fedlightning.wrappers.units import rolling_units


class FedRolex(PartialTraining):
    r"""Clients train a window of units that moves on in every round, so that all units are trained alike.

    Alam, Liu, Yan, Zhang, "FedRolex: model-heterogeneous federated learning with rolling sub-model extraction", NeurIPS
    2022.

    Down and up: in round `j` (from 0) the units `{s, ..., s + k - 1} mod C_l` of every hidden layer of `C_l` units, with
    `s = j mod C_l` and `k = max(1, floor(r C_l))`. Inputs and classes are never cut. No state. The window starts at the same
    unit for all clients; its length is the client's. Over `C_l` rounds a client trains every unit `k` times, so the global
    model may be wider than any client's part.

    * *Server*: every entry is the mean over the clients whose window holds it. Held by nobody, it keeps its value.
    * *Deployed*: the full global model, as the paper evaluates it. A window by itself is trained in one round of `C_l` only.

    Units are kept in ascending order, so that with rates of 1 it is FedAvg with uniform weights, bit for bit. The authors'
    code rolls the other way round and rounds up: the same by symmetry, but for one unit. Modules as for HeteroFL. Beside
    methods that keep a part of the model at a client it is refused: the next window has other units.

    Args:
        rates: Widths in (0, 1]: a list dealt to the clients in turn, or one for each client by id (paper: 1, 1/2, 1/4, 1/8,
            1/16; the default is its first three).
        dynamic: Every client draws a width from the list in every round (authors' code).
        stride: Units by which the window moves on in a round (paper: 1). 0: it stands still, as HeteroFL's.
        scaler: Outputs of hidden layers are divided by the rate in training (authors' code, from HeteroFL; not in the
            paper's algorithm). It enlarges steps by `1/r`: clip gradients (`gradient_clip_val=1`). Off by default: on digits
            (three seeds) it gave an accuracy of 0.641, clipped, against 0.825 without.
        masked_loss: Leaves out classes that a client has no sample of, in training and in the head's mean (authors' code,
            from HeteroFL; not in the paper's algorithm).
        static_bn: As in HeteroFL: the participants run the new global model over their training data, and the means of the
            batch statistics become its BatchNorm statistics. False: running statistics are averaged as all else.
        head: Path of the layer that gives the logits. `None` takes the last layer.
        weighting: Weights of the clients: `"uniform"` (paper) or `"samples"`.

    Raises:
        ValueError: If a rate is outside (0, 1], rates to draw from are a table, `stride` is negative, or `head` names
            several layers.

    Example:
        >>> from fedlightning.callbacks import FedRolex
        >>> windows = [FedRolex().units(0.5, round, client="any", seed=0) for round in range(3)]
        >>> [window("conv1", 4).tolist() for window in windows]
        [[0, 1], [1, 2], [2, 3]]
    """

    rolls = True
    deploys_all = True

    def __init__(
        self,
        rates: Sequence[float] | dict[str, float] = (1.0, 0.5, 0.25),
        dynamic: bool = False,
        stride: NonNegativeInt = 1,
        scaler: bool = False,
        masked_loss: bool = False,
        static_bn: bool = True,
        head: str | list[str] | None = None,
        weighting: WeightingName | None = "uniform",
    ) -> None:
        super().__init__(rates, dynamic, scaler, masked_loss, static_bn, head, weighting)
        self.stride = stride

    def units(self, rate: float, round: int, client: str, seed: int) -> Units:
        """Return the window of the round: the same start for all clients."""
        return rolling_units(rate, start=self.stride * round)
