"""FLTrust: clients are trusted as far as they go where the server's own small data set goes."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD

from fedlightning.algorithm import Change, Facts, Need, Server, Setup, isolated, probes, requires
from fedlightning.callbacks.shared.distillation import NoSinglePublicSample
from fedlightning.callbacks.shared.robust_rules import Combine, RobustRule
from fedlightning.ranges import PositiveFloat, PositiveInt
from fedlightning.tensors import module_state, to_row
from fedlightning.wrappers import muted

AS_A_WHOLE = Need(
    "compares what clients have learnt with what the server has, over all entries of the model",
    (Change.PARTS, Change.SMALLER, "on_build", "shared_names"),
)


class FLTrust(RobustRule):
    """Mean of changes of one length, weighted by how far each goes the way of the server's own.

    Cao, Fang, Liu, Gong, "FLTrust: Byzantine-robust federated learning via trust bootstrapping", NDSS 2021
    (arXiv:2012.13995):

    * Server: trains the model that it has sent, on its own *root data*, which is the data module's public data with labels
      (`public=...`): a change ``u_0``. With ``t_i = max(0, cos(u_i, u_0))`` it steps by
      ``sum_i t_i u_i ||u_0|| / ||u_i|| / sum_i t_i``.
    * Clients: as in FedAvg.

    Weights of clients are not used, and most of the clients may be bad. Nobody trusted: the model stays. The step is no
    longer than the server's own change, so train there about as long as clients do. Root data have to be clean and of the
    clients' task (the paper: 100 samples): with `public=0.1` they are taken from the clients, bad ones among them.

    Args:
        lr: Learning rate of the server's SGD. Default 0.1; take that of the clients.
        epochs: Epochs of the server over its root data. Default 1.
        batch_size: Root samples of a step. Default 32.

    Example:
        >>> changes, own = torch.tensor([[2.0, 0.0], [0.0, 9.0], [-50.0, 0.0]]), torch.tensor([1.0, 1.0])
        >>> trusted(changes, own)  # the third goes the other way
        tensor([0.7071, 0.7071])
    """

    def __init__(self, lr: PositiveFloat = 0.1, epochs: PositiveInt = 1, batch_size: PositiveInt = 32) -> None:
        super().__init__()
        self.lr = lr
        self.epochs = epochs
        self.batch_size = batch_size

    @property
    def facts(self) -> Facts:
        """It judges whole updates."""
        why = "trains at the server on data of its own"
        required = [
            requires.PublicData(why),
            requires.AutomaticOptimization(why, "Take another rule."),
            NoSinglePublicSample(batch_size="batch_size"),
        ]
        return super().facts.extend(needs=[AS_A_WHOLE], requires=required)

    def check(self, setup: Setup) -> None:
        """Refuse root data on which the module cannot train."""
        super().check(setup)
        name = type(setup.template).__name__
        module = copy.deepcopy(setup.module).eval()
        try:
            with torch.no_grad(), isolated(self.key), muted(module):
                loss = probes.training_loss(module, probes.move_batch(module, setup.public.batch()))
        except Exception as error:
            raise ValueError(
                f"FLTrust needs public samples with labels, like those of the clients, and {name}.training_step fails on "
                f"them: {type(error).__name__}: {str(error).rstrip('.')}. Give such public data, or take another rule."
            ) from error
        if not bool(torch.isfinite(loss)):
            raise ValueError(f"FLTrust: the loss of {name} on public data is {float(loss)}. Leave bad samples out.")

    def rule_of(self, server: Server, model: str, names: Sequence[str]) -> Combine:
        """Return the rule with the change that the server's own training makes."""
        module, old = server.module_with(server.models[model], model), server.models[model]
        server.training.fit(
            module,
            server.training.public(batch_size=self.batch_size, shuffle=True),
            probes.training_loss,
            epochs=self.epochs,
            optimizer=lambda parameters: SGD(parameters, lr=self.lr),
            purpose=f"{self.key} {model}",
        )
        new = module_state(module)
        own_change = to_row(new, names) - to_row(old, names)
        return lambda changes, weights: trusted(changes, own_change)

    def combine(self, changes: Tensor, weights: Tensor) -> Tensor:
        """Return nothing: without the server's own change there is no rule."""
        raise NotImplementedError("FLTrust combines by the server's own change: see rule_of.")


def trusted(changes: Tensor, row: Tensor) -> Tensor:
    """Return the mean of changes of the server's length, weighted by trust; zeros if nobody is trusted.

    Args:
        changes: A row a client, `(m, d)`.
        row: The server's own change, `(d,)`.
    """
    trust = F.cosine_similarity(changes, row[None], dim=1, eps=1e-300 if row.dtype == torch.float64 else 1e-30).relu()
    if not float(trust.sum()) > 0:
        return torch.zeros_like(row)
    lengths = changes.norm(dim=1).clamp_min(torch.finfo(row.dtype).tiny)
    return (trust / lengths) @ changes * (row.norm() / trust.sum())
