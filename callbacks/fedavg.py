"""FedAvg and FedSGD."""

from __future__ import annotations

from fedlightning.algorithm import Change, Facts, FederatedCallback, Need, Setup, WeightingName, requires


class FedAvg(FederatedCallback):
    """Federated averaging: clients train copies of one model, and the server averages them.

    McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from
    decentralized data", AISTATS 2017.

    * Client: E local epochs of training from ``w^t`` give ``w_i``.
    * Server: ``w^{t+1} = sum_i p_i w_i`` with ``p_i = n_i / sum_j n_j`` over the participants.
    * Down: ``w^t``. Up: ``w_i``. State: none.
    * Deployed: the global model ``w``.

    This is the core's default rule. Name it where a configuration should say so.

    Args:
        weighting: ``"samples"`` (the paper's ``p_i``, default), ``"uniform"`` or ``"log"``.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import WEIGHTINGS
        >>> from fedlightning.tensors import WeightedMean
        >>> from fedlightning.callbacks import FedAvg
        >>> weight, mean = WEIGHTINGS[FedAvg().weighting], WeightedMean()
        >>> mean.add({"w": torch.tensor([1.0])}, weight(30))  # a client with 30 samples
        >>> mean.add({"w": torch.tensor([5.0])}, weight(10))
        >>> mean.result()["w"]
        tensor([2.])
    """

    facts = Facts(mixes_architectures=True)

    def __init__(self, weighting: WeightingName | None = "samples") -> None:
        self.weighting = weighting


class FedSGD(FederatedCallback):
    """One gradient step per client and round, on its whole training set.

    McMahan et al., AISTATS 2017 (see :class:`FedAvg`).

    * Client: one full-batch step of plain SGD from ``w^t``.
    * Server: the mean of the models, which equals one step along the mean gradient:
      ``w^{t+1} = w^t - eta sum_i p_i grad F_i(w^t)``.
    * Down: ``w^t``. Up: ``w_i``. State: none.
    * Deployed: the global model ``w``.

    Set ``local_steps=1`` and a batch size that holds a client's whole training set; anything else is refused.

    Args:
        weighting: ``"samples"`` (the paper's ``p_i``, default), ``"uniform"`` or ``"log"``.

    Example:
        >>> from types import SimpleNamespace
        >>> from fedlightning.callbacks import FedSGD
        >>> run = SimpleNamespace(clients=["0"], trainer_arguments={})
        >>> data = SimpleNamespace(num_samples={"0": 80}, num_batches=lambda client: 2)
        >>> FedSGD().check(SimpleNamespace(run=run, data=data))
        Traceback (most recent call last):
        ValueError: FedSGD takes the gradient over ... Set a batch size of at least 80, or use FedAvg with local_steps=1.
    """

    facts = Facts(
        needs=[Need("takes one step per round", ("local_phases", Change.WORK))],
        requires=[
            requires.LocalSteps(
                "takes one step per round",
                "Set local_steps=1 and a batch size that holds a client's whole training set.",
                1,
            ),
            requires.PlainSGD("takes a step that is the gradient", "Use SGD.", "momentum"),
        ],
        mixes_architectures=True,
    )

    def __init__(self, weighting: WeightingName | None = "samples") -> None:
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse clients with several batches, and batches that are accumulated."""
        several = {client: count for client in setup.run.clients if (count := setup.data.num_batches(client)) > 1}
        if several:
            client, count = next(iter(several.items()))
            raise ValueError(
                f"FedSGD takes the gradient over a client's whole training set, but that of client '{client}' comes in "
                f"{count} batches, of which one step would see the first. Set a batch size of at least "
                f"{max(setup.data.num_samples.values())}, or use FedAvg with local_steps=1."
            )
        window = setup.run.trainer_arguments.get("accumulate_grad_batches") or 1
        if window != 1:
            raise ValueError(
                f"FedSGD takes one step on one batch, but accumulate_grad_batches={window} would divide its gradient by "
                f"{window}. Leave it out."
            )
