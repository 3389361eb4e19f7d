"""FeSEM with matched averaging."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedlightning.algorithm import Facts, Server, Setup, State, isolated, probes, requires
from fedlightning.callbacks.fesem import FeSEM
from fedlightning.tensors import entry_kinds, has_mean, load_state, module_state, ties, widen
from fedlightning.wrappers.heads import Convolution
from fedlightning.wrappers.muting import muted
from fedlightning.wrappers.submodel import Cut, plan_cuts


def hidden_units(module: LightningModule, owner: str) -> list[Cut]:
    """Return which layer's units arrive at each layer and leave it."""
    if not any(isinstance(layer, (nn.Linear, *Convolution)) for layer in module.modules()):
        return []
    try:
        return plan_cuts(module)
    except ValueError as error:
        raise ValueError(
            f"{owner} matches the hidden units of Linear and Conv layers in a row, and {type(module).__name__} has others "
            f"({str(error).partition(':')[0].rstrip('.')}). Use FeSEM."
        ) from error


def permuted(state: Mapping[str, Tensor], cuts: Sequence[Cut], layer: str, order: Tensor) -> State:
    """Return a state whose hidden units of one layer stand in another order. The network computes what it did.

    Rows of the layer and of its normalisation are moved, and columns of whatever takes its outputs: for a feature map that
    is flattened, all columns of one channel.

    Example:
        >>> state = {"fc1.bias": torch.tensor([1.0, 2.0]), "fc2.weight": torch.tensor([[3.0, 4.0]])}
        >>> cuts = [Cut("fc1", None, "fc1"), Cut("fc2", "fc1", None)]
        >>> permuted(state, cuts, "fc1", torch.tensor([1, 0]))
        {'fc1.bias': tensor([2., 1.]), 'fc2.weight': tensor([[4., 3.]])}
    """
    moved = dict(state)
    for cut in cuts:
        for name, value in state.items():
            if name.rpartition(".")[0] != cut.path or value.ndim == 0:
                continue
            if cut.leaving == layer and value.shape[0] == len(order):
                moved[name] = moved[name][order]
            if cut.arriving == layer and value.ndim > 1 and value.shape[1] == len(order) * cut.block:
                columns = (order[:, None] * cut.block + torch.arange(cut.block)).flatten()
                moved[name] = moved[name][:, columns]
    return moved


def matched(state: State, reference: State, cuts: Sequence[Cut]) -> State:
    r"""Return a network with its hidden units in the order of those of a reference that they resemble most.

    Wang et al., "Federated learning with matched averaging", ICLR 2020, in its simplest form: layer by layer, with the inputs
    in their new order already, the assignment of units a to places b of least `sum ||(W_a, bias_a) - (C_b, c_b)||^2`. The
    classes stay. Where all this brings the network no nearer to the reference, it stays as it is.
    """
    permuted_state = state
    for layer in dict.fromkeys(cut.leaving for cut in cuts if cut.leaving is not None):
        names = [name for name in (f"{layer}.weight", f"{layer}.bias") if name in state]
        own_rows, other = (torch.cat([widen(s[name]).flatten(1) if s[name].ndim > 1 else widen(s[name])[:, None]
                                 for name in names], dim=1) for s in (permuted_state, reference))  # fmt: skip
        cost = (
            (own_rows[:, None] - other).square().sum(-1)
            if own_rows.numel() * len(other) < 2**24
            else torch.cdist(own_rows, other) ** 2
        )
        units, places = linear_sum_assignment(cost.numpy())
        order = torch.empty(len(own_rows), dtype=torch.int64)
        order[torch.from_numpy(places)] = torch.from_numpy(units)
        permuted_state = permuted(permuted_state, cuts, layer, order)
    return permuted_state if squares(permuted_state, reference) < squares(state, reference) else state


def squares(state: State, reference: State) -> float:
    """Return the squared distance over all entries that are not integers."""
    return sum(
        float((widen(value) - widen(reference[name])).square().sum())
        for name, value in state.items()
        if name in reference and has_mean(value)
    )


def check_matching(setup: Setup, cuts: Sequence[Cut], owner: str) -> None:
    """Check on a batch that a network with its hidden units in another order computes the same."""
    batch = setup.data.first_batch()
    if batch is None:
        return
    module = copy.deepcopy(setup.module).eval()
    losses = []
    with torch.no_grad(), isolated("matching"), muted(module):
        for parameter in module.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.1
            parameter.copy_(torch.randn_like(parameter) * scale)
        shuffled = module_state(module)
        for layer in dict.fromkeys(cut.leaving for cut in cuts if cut.leaving is not None):
            width = shuffled[f"{layer}.weight"].shape[0]
            shuffled = permuted(shuffled, cuts, layer, torch.randperm(width))
        for entries in (None, shuffled):
            if entries is not None:
                load_state(module, entries)
            with isolated("matching batch"):
                losses.append(probes.training_loss(module, batch))
    if not torch.allclose(losses[0], losses[1], rtol=1e-3, atol=1e-4):
        raise ValueError(
            f"{owner} puts hidden units of {type(setup.template).__name__} into another order, and then it computes "
            "something else: its layers do not follow one another as they are registered. Use FeSEM."
        )


def touched(module: LightningModule, cuts: Sequence[Cut]) -> list[str]:
    """Return the entries that :func:`permuted` may change, without integers."""
    paths = {cut.path for cut in cuts if cut.arriving is not None or cut.leaving is not None}
    return [
        name for name, kind in entry_kinds(module).items() if name.rpartition(".")[0] in paths and kind != "int_buffer"
    ]


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
        nearest_places = []
        for state in states:
            views = [self._row(server, self.aligned(server, state, centre)) for centre in centres]
            squares = torch.stack([(view - row).square().sum() for view, row in zip(views, rows, strict=True)])
            nearest_places.append(
                int(ties.first_least(squares, floor=(ties.CLOSE * max(float(row.norm()) for row in rows)) ** 2))
            )
        return nearest_places

    def aligned(self, server: Server, state: State, centre: State) -> State:
        """Return a client's model with its hidden units in the order of the centre's."""
        whole = matched({**centre, **state}, centre, hidden_units(server.module, self.key))
        return {name: whole[name] for name in state}
