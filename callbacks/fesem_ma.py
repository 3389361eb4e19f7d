"""FeSEM with matched averaging."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedlightning.algorithm import Facts, Server, Setup, State, requires
from fedlightning.callbacks.fesem import FeSEM
from fedlightning.callbacks.shared.matching import check_matching, hidden_units, matched, touched
from fedlightning.tensors import ties


class FeSEMMA(FeSEM):
    r"""FeSEM that matches hidden units: before a client's model is compared with a centre or averaged, its units are sorted.

    Long, Xie, Shen, Zhou, Wang, Jiang, "Multi-center federated learning: clients clustering for better personalization",
    World Wide Web 2022; the matching is that of Wang et al., "Federated learning with matched averaging", ICLR 2020.

    Two networks can compute the same with their hidden units in another order, and then neither their distance nor their
    mean says anything. So each client's model is first put into the order of the centre, layer by layer: the assignment of
    units (Hungarian method) of least squared distance between their incoming weights and biases. Outputs of the network
    stay. E- and M-steps are then those of :class:`FeSEM`; the first groups are found on models in the order of the first
    model. A model that this would bring no nearer to the centre stays as it is, so distances are never larger than FeSEM's.

    What travels and what is kept are as in FeSEM; all is done at the server. It takes networks of linear, convolutional and
    normalisation layers in a row; others are refused. As long as all clients of a cluster start from one model and train
    little, their units hardly ever change places, and this is FeSEM.

    Args:
        num_clusters: K. Default 2 (paper: 3).
        pull: `lambda`, as in FeSEM. Default 0.
        layers: Names or prefixes of the parameters that distances are taken on. `None`: all.
        stale: Absent clients count in both steps with their last models. Default False.
        steps: Pairs of E- and M-steps in a round. Default 1.
        weighting: `"uniform"` (paper) or `"samples"`, within a cluster.
        late_start: What late clients train from, as in :class:`FeSEM`: `"centres"` (default) or `"first"`.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> FeSEMMA(num_clusters=3).hyperparameters()["num_clusters"]
        3
    """

    @property
    def facts(self) -> Facts:
        """Its matching is tried."""
        why, instead = (
            "tries its matching on the loss that training_step returns",
            "Use automatic optimization, or FeSEM.",
        )
        return super().facts.extend(requires=[requires.AutomaticOptimization(why, instead)])

    def check(self, setup: Setup) -> None:
        """Refuse networks whose hidden units cannot be sorted."""
        super().check(setup)
        cuts = hidden_units(setup.module, self.key)
        if not any(cut.leaving is not None for cut in cuts):
            setup.warn(
                f"{type(setup.template).__name__} has no hidden layer to match: {self.key} does what FeSEM does."
            )
        check_matching(setup, cuts, self.key)

    def on_federation_start(self, server: Server) -> None:
        """Refuse layers that stay with the clients, where the order of their neighbours would change without them."""
        travelling = set(server.shared_names())
        kept = [
            name for name in touched(server.module, hidden_units(server.module, self.key)) if name not in travelling
        ]
        if kept:
            raise ValueError(
                f"{self.key} changes the order of hidden units, and '{kept[0]}', which stays with the clients, would keep "
                "the old one. Share it, or use FeSEM."
            )

    def places(self, server: Server, states: Sequence[State], centres: Sequence[State]) -> list[int]:
        """Return for each model the index of the centre that is nearest once its units are matched."""
        rows = [self._row(server, centre) for centre in centres]
        found = []
        for state in states:
            views = [self._row(server, self.aligned(server, state, centre)) for centre in centres]
            squares = torch.stack([(own - row).square().sum() for own, row in zip(views, rows, strict=True)])
            found.append(
                int(ties.first_least(squares, floor=(ties.CLOSE * max(float(row.norm()) for row in rows)) ** 2))
            )
        return found

    def aligned(self, server: Server, state: State, centre: State) -> State:
        """Return a client's model with its hidden units in the order of the centre's."""
        whole = matched({**centre, **state}, centre, hidden_units(server.module, self.key))
        return {name: whole[name] for name in state}
