"""Model selection on validation data: each client's own best, and the federation's best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from lightning.pytorch import LightningModule

from fedlightning.algorithm import Client, FederatedCallback, Server, Stage, clone, module_state


class LocalCheckpoint(FederatedCallback):
    """Each client keeps the model that is best on its own validation split ("best_local").

    FENDA-FL paper (Tavakoli et al. 2024): the only selection that fits personalised methods.

    Args:
        monitor: a metric that the module logs in validation.
        mode: ``"min"`` or ``"max"``. Ties keep the earlier model.
        stage: ``"L1"``: what the client holds after aggregation (the paper); ``"L2"``: after local training, before
            aggregation (the PLayer-FL code).
    """

    def __init__(
        self, monitor: str = "val_loss", mode: Literal["min", "max"] = "min", stage: Literal["L1", "L2"] = "L1"
    ) -> None:
        self.monitor = monitor
        self.mode = mode
        self.stage = stage

    def on_client_evaluated(
        self, client: Client, stage: Stage, split: str, metrics: Mapping[str, float], module: LightningModule
    ) -> None:
        """Keep the model if it is the client's best so far."""
        if stage != self.stage or split != "val":
            return
        score = _monitored(self, metrics)
        best = client.checkpoints.get(self.key)
        if _better(score, None if best is None else best["score"], self.mode):
            client.checkpoints[self.key] = {
                "name": "best_local",
                "stage": stage,
                "round": client.round + 1,
                "score": score,
                "model": clone(module_state(module), "cpu"),
            }


class GlobalCheckpoint(FederatedCallback):
    """The federation keeps the global model whose aggregated validation loss is best ("best_global").

    FENDA-FL paper: the clients' validation losses are averaged with their training samples as weights.

    Args:
        monitor: a metric that the module logs in validation.
        mode: ``"min"`` or ``"max"``. Ties keep the earlier model.
        stage: ``"G"``: losses of the aggregated model (the paper); ``"L2"``: losses of the clients' trained models,
            before aggregation, decide about the model they are aggregated to.
        mean: weights of the mean: ``"train"`` samples, ``"val"`` samples or ``"uniform"``.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        mode: Literal["min", "max"] = "min",
        stage: Literal["G", "L2"] = "G",
        mean: Literal["train", "val", "uniform"] = "train",
    ) -> None:
        self.monitor = monitor
        self.mode = mode
        self.stage = stage
        self.mean = mean

    def on_federation_start(self, server: Server) -> None:
        """Refuse methods without a global model."""
        self._module(server)

    def _module(self, server: Server) -> LightningModule:
        module = server.global_module(None)
        if module is None:
            raise ValueError(
                "GlobalCheckpoint needs a global model, but part of this model stays with the clients. "
                "Use LocalCheckpoint()."
            )
        return module

    def on_round_end(self, server: Server) -> None:
        """Keep the global model if it is the best so far.

        Raises:
            ValueError: if the method has no global model.
        """
        if not any(split == "val" for _, _, split, _ in server.scores):
            return
        module = self._module(server)
        found = server.score(self.monitor, stage=self.stage)
        if not found:
            wanted = (self.stage, "local", "val")
            known = {metric: 0.0 for stage, data, split, metric in server.scores if (stage, data, split) == wanted}
            _monitored(self, known)
        weights = {
            client: {"train": server.num_samples.get(client, 0), "val": size, "uniform": 1}[self.mean]
            for client, (_, size) in found.items()
        }
        defined = {client: value for client, (value, _) in found.items() if math.isfinite(value) and weights[client]}
        if not defined:
            return
        score = sum(weights[c] * value for c, value in defined.items()) / sum(weights[c] for c in defined)
        best = server.checkpoints.get(self.key)
        if _better(score, None if best is None else best["score"], self.mode):
            server.checkpoints[self.key] = {
                "name": "best_global",
                "stage": "G",
                "round": server.round + 1,
                "score": score,
                "model": clone(module_state(module), "cpu"),
            }


def _monitored(callback: Any, metrics: Mapping[str, float]) -> float:
    if callback.monitor not in metrics:
        raise ValueError(
            f"{callback.key} monitors '{callback.monitor}', but validation gives {sorted(metrics) or 'no metric'}. "
            "Log it in validation_step, or set monitor=... to one of these."
        )
    return float(metrics[callback.monitor])


def _better(score: float, best: float | None, mode: str) -> bool:
    if not math.isfinite(score):
        return False
    return best is None or (score < best if mode == "min" else score > best)
