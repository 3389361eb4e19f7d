"""Probabilities that the models of a run give to test samples, had where the data are in this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule

from fedlightning.client.probes import move_batch
from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.study.finished_runs import DEPLOYED
from fedlightning.study.samples import Predicted
from fedlightning.study.subgroups import values_of
from fedlightning.trainer import FederatedTrainer

CLOSE = 1e-3
"""Probabilities of a sample add up to 1 but for rounding in half precision."""


def predict_samples(
    trainer: FederatedTrainer,
    data: FederatedDataModule,
    clients: Sequence[str],
    columns: Iterable[str] = (),
    checkpoint: str = DEPLOYED,
) -> Predicted:
    """Return the probabilities that clients' models give to their own test samples.

    Args:
        trainer: FederatedTrainer or restored.
        data: Its data module, with those clients.
        clients: Clients that trained, or that were held out: these have the model that the method gives to newcomers.
        columns: Subgroups to keep beside, as `"sex"` or `"age>=65"`.
        checkpoint: Models of clients that trained; the deployed ones are `best_local` where a client has one.
    """
    parts: list[Predicted] = []
    ready = prepared(trainer, data)
    for client in clients:
        loader = ready.client_dataloader(client, "test")
        if loader is None or len(loader) == 0:
            continue
        try:
            p, y = class_probabilities(_module(trainer, client, checkpoint), loader)
            if not (np.isfinite(p).all() and (p >= 0).all() and (np.abs(p.sum(1) - 1) < CLOSE).all()):
                raise ValueError("predict_step gives numbers that are not probabilities: they do not add up to 1")
            if not ((y >= 0) & (y < p.shape[1])).all():
                raise ValueError(f"labels go from {y.min()} to {y.max()}, and there are {p.shape[1]} probabilities")
        except (ValueError, RuntimeError, TypeError) as error:  # of the user's predict_step, on batches with targets
            return Predicted(reason=" ".join(str(error).split())[:300], checkpoint=checkpoint)
        cells = {name: np.array(values_of(data, client, name), dtype=np.str_) for name in columns}
        parts.append(Predicted(np.full(len(y), client), y, np.clip(p, 0.0, 1.0), cells))
    if not parts:
        return Predicted(reason="there are no test samples")
    if len({part.probabilities.shape[1] for part in parts}) > 1:
        return Predicted(reason="clients' models have different classes")
    return Predicted(
        np.concatenate([part.clients for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.probabilities for part in parts]),
        {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns},
        checkpoint=checkpoint,
    )


def prepared(trainer: FederatedTrainer, data: FederatedDataModule) -> FederatedDataModule:
    """Return the data as the trainer's clients have them, with the statistics that these agreed on if there are any."""
    if data.wanted_statistics is None or trainer.federation is None:
        return data
    return trainer.federation.engine.runner.data


def members_of(trainer: FederatedTrainer, data: FederatedDataModule) -> FederatedDataModule:
    """Return :func:`prepared` data whose training samples are all members: the run has trained with them.

    Raises:
        ValueError: If the training data change from round to round.
    """
    if data.drifts:
        raise ValueError(
            "the clients' training data change from round to round, so that it is not told here which samples a run has "
            "trained with, and runs made again would train with others. Attack a run on data that stay."
        )
    return prepared(trainer, data)


def class_probabilities(module: LightningModule, loader: Iterable[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities `(n, classes)` by `predict_step`, and labels `(n,)`; one of shape `(n,)` is that of class 1.

    Raises:
        ValueError: If `predict_step` gives no probabilities, or batches have no labels in the second place.
    """
    module = module.eval()
    rows, labels = [], []
    for index, batch in enumerate(loader):
        with torch.no_grad():
            probabilities = module.predict_step(move_batch(module, batch), index)
        target = batch[1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
        if isinstance(target, torch.Tensor) and target.dim() == 2 and target.shape[1] == 2:
            raise ValueError(
                "the outcome is a time and an event: probabilities would be of a horizon, and a log hazard is none; "
                "survival is judged by its C-index at each site"
            )
        if isinstance(probabilities, torch.Tensor) and probabilities.dim() == 2 and probabilities.shape[1] == 1:
            probabilities = probabilities.squeeze(1)
        if isinstance(probabilities, torch.Tensor) and probabilities.dim() == 1:
            probabilities = torch.stack([1 - probabilities, probabilities], dim=1)
        if (
            not isinstance(probabilities, torch.Tensor)
            or probabilities.dim() != 2
            or not probabilities.is_floating_point()
        ):
            raise ValueError("predict_step gives no probabilities of shape (batch, classes)")
        if not isinstance(target, torch.Tensor) or target.dim() != 1:
            raise ValueError("batches have no labels in the second place")
        if target.is_floating_point() and not torch.equal(target, target.round()):
            raise ValueError("the outcome is a number: there are no probabilities of classes")
        rows.append(probabilities.double().cpu().numpy())
        labels.append(target.long().cpu().numpy())
    return np.concatenate(rows), np.concatenate(labels)


def _module(trainer: FederatedTrainer, client: str, checkpoint: str) -> LightningModule:
    """Return a client's deployed model: the selected one where there is one, else as it stands."""
    held_out = client in (trainer.server.held_out if trainer.server is not None else ())
    if checkpoint == "best_global":
        return trainer.module(None, checkpoint)
    if checkpoint == DEPLOYED and not held_out:
        try:
            return trainer.module(client, "best_local")
        except ValueError:  # it has selected none
            return trainer.module(client, "latest")
    return trainer.module(client, "latest" if held_out or checkpoint == DEPLOYED else checkpoint)
