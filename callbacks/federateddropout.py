"""Federated Dropout: random units. `shared.partial_training` tells the way of the model through a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedlightning.algorithm import State, WeightingName
from fedlightning.callbacks.shared.partial_training import PartialTraining
from fedlightning.wrappers.slices import ElementMean
from fedlightning.wrappers.submodel import Units
from fedlightning.wrappers.units import random_units


class FederatedDropout(PartialTraining):
    r"""Each client trains a random choice of the units, drawn anew in every round: a small dense network.

    Caldas, Konecny, McMahan, Talwalkar, "Expanding the reach of federated learning by reducing client resource
    requirements", 2018.

    Down and up: `max(1, floor(r C_l))` of the `C_l` units of every hidden layer, drawn by (seed, round, client, `C_l`):
    layers of equal width keep the same units, as residual sums ask for. Inputs and classes are never dropped. No state.

    * *Client*: trains the small network as it is; nothing is rescaled.
    * *Server*: every entry is the mean over the clients that hold it; held by nobody, it keeps its value. Or, with
      `absent="zero_delta"`, a client that does not hold an entry votes for its old value:
      `w <- w + (holders / m) (mean of holders - w)`.
    * *Deployed*: the full global model.

    With rates of 1 it is FedAvg, bit for bit. Modules as for HeteroFL. Beside methods that keep a part of the model at a
    client it is refused: the next round's units are others.

    Args:
        rates: Shares of the units to keep, in (0, 1]: a list dealt to the clients in turn, or one for each client by id
            (paper: 0.5 to 1 for all clients; 0.75 costs it next to nothing).
        per_client: Every client draws units of its own (paper's experiments). False: one draw in a round for all, so that
            the units that were dropped rest for that round.
        absent: What an entry's mean takes of clients without it: `"left_out"` (default): nothing; `"zero_delta"`: its old
            value. The paper leaves this open.
        scaler: Outputs of hidden layers are divided by the rate in training, as in HeteroFL (paper: no).
        static_bn: As in HeteroFL: the participants run the new global model over their training data, and the means of the
            batch statistics become its BatchNorm statistics. False: running statistics are averaged as all else.
        head: Path of the layer that gives the logits. `None` takes the last layer.
        weighting: Weights of the clients: `"samples"` (FedAvg's, default) or `"uniform"`.

    Raises:
        ValueError: If a rate is outside (0, 1], `absent` is unknown, or `head` names several layers.

    Example:
        >>> from fedlightning.callbacks import FederatedDropout
        >>> method = FederatedDropout()
        >>> draws = [method.units(0.75, round, client="3", seed=0)("conv1", 8).tolist() for round in (0, 0, 1)]
        >>> draws[0] == draws[1], draws[0] == draws[2], len(draws[0])
        (True, False, 6)
    """

    rolls = True
    deploys_all = True

    def __init__(
        self,
        rates: Sequence[float] | dict[str, float] = (0.75,),
        per_client: bool = True,
        absent: Literal["left_out", "zero_delta"] = "left_out",
        scaler: bool = False,
        static_bn: bool = True,
        head: str | list[str] | None = None,
        weighting: WeightingName | None = "samples",
    ) -> None:
        super().__init__(rates, scaler=scaler, static_bn=static_bn, head=head, weighting=weighting)
        self.per_client = per_client
        self.absent = absent

    def units(self, rate: float, round: int, client: str, seed: int) -> Units:
        """Return the client's draw of the round."""
        return random_units(rate, seed, round, client if self.per_client else None)

    def result(self, mean: ElementMean, old: State, total: float) -> State:
        """Return the mean over the holders of each element, or over all clients."""
        return mean.result(old, total if self.absent == "zero_delta" else None)
