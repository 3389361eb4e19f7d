"""FedAvg and FedSGD."""

from __future__ import annotations

from fedlightning.algorithm import FederatedCallback, Setup, WeightingName


class FedAvg(FederatedCallback):
    """Federated averaging: the default rule of the core, to be named where a configuration should say so.

    McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from
    decentralized data", AISTATS 2017.

    Down: ``w^t``. Up: ``w_i``. Each participant trains E epochs from ``w^t``; the server takes
    ``w^{t+1} = sum_i p_i w_i`` with ``p_i = n_i / sum_j n_j`` over the participants.

    Args:
        weighting: ``"samples"`` (the paper's ``p_i``), ``"uniform"`` or ``"log"``.
    """

    def __init__(self, weighting: WeightingName = "samples") -> None:
        self.weighting = weighting


class FedSGD(FederatedCallback):
    """One gradient step per client and round, on its whole training set.

    McMahan et al., AISTATS 2017. Averaging models after one full-batch step of plain SGD is the same as averaging
    gradients and stepping on the server: ``w^{t+1} = w^t - eta sum_i p_i grad F_i(w^t)``.

    It needs ``local_steps=1`` and batches that hold a client's whole training set.

    Args:
        weighting: as in :class:`FedAvg`.
    """

    def __init__(self, weighting: WeightingName = "samples") -> None:
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse more than one local step, and optimizers with a memory."""
        if setup.local_steps != 1:
            raise ValueError(
                f"FedSGD takes one step per round, but local_steps={setup.local_steps} and local_epochs="
                f"{setup.local_epochs}. Set local_steps=1 and a batch size of at least {max(setup.num_samples.values())}."
            )
        names = [type(optimizer).__name__ for optimizer in setup.optimizers if type(optimizer).__name__ != "SGD"]
        if names:
            setup.warn(
                f"FedSGD is defined for plain SGD; {names[0]} rescales the step, which is then no longer the gradient."
            )
