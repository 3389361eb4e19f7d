"""Model selection on validation data: the best model of each client and of the federation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info

from fedlightning.algorithm import (
    GLOBAL,
    Change,
    Client,
    Facts,
    ModelSelection,
    Newcomers,
    Server,
    Setup,
    Stage,
    facts,
    requires,
    warn,
)
from fedlightning.ranges import NonNegativeInt, PositiveInt, make_init
from fedlightning.tensors import clone, module_state, ties

DEFAULT = "val_loss"
"""Metric that is monitored unless a user says another: where the module logs no such, its only loss."""
MORE_IS_BETTER = frozenset({"accuracy", "acc", "auroc", "auc", "f1"})
"""Words of metrics whose lowest value nobody looks for: `mode="min"` with one of these is an oversight."""


@make_init
class LocalCheckpoint(ModelSelection):
    """Selection of each client's best model on its own validation split ("best_local").

    FENDA-FL paper (Tavakoli et al., 2024): the only selection that fits personalised methods. The paper takes the round with
    the lowest loss: ``smooth=1, min_samples=0``. On few validation samples that is the luckiest round rather than the best
    model, so that by default a round is judged by the mean of the last evaluations. ``docs/results/measured.md`` has what was
    measured.

    A score that is not finite is left out. Until there are as many scores as ``smooth`` says, the latest model is kept.

    Args:
        monitor: Metric that the module logs in validation. Default ``"val_loss"``, or the only loss that it logs.
        mode: ``"min"`` (default) or ``"max"``. A tie keeps the earlier model.
        smooth: Evaluations, the round's own and those before it, whose mean score judges a round. Default 5.
        min_samples: Validation samples below which a client keeps its latest model. Default 10.
        stage: ``"L1"`` (the paper, default): the model that the client holds after aggregation. ``"L2"`` (the PLayer-FL
            code): the model after local training, before aggregation.

    Example:
        >>> from types import SimpleNamespace
        >>> from torch import nn
        >>> from fedlightning.callbacks import LocalCheckpoint
        >>> client, checkpoint = SimpleNamespace(checkpoints={}), LocalCheckpoint(smooth=2, min_samples=0)
        >>> for client.round, loss in enumerate((0.7, 0.3, 0.4, 0.8)):
        ...     checkpoint.on_client_evaluated(client, "L1", "val", {"val_loss": loss}, nn.Linear(1, 1))
        >>> client.checkpoints["LocalCheckpoint"]["round"]
        3
    """

    @property
    def facts(self) -> Facts:
        """Each client's best model is kept, by every client's scores."""
        return super().facts.extend(changes={Change.LOCAL_SELECTION}, needs=[facts.EVERY_SCORE], requires=TO_SELECT)

    monitor: str = "val_loss"
    mode: Literal["min", "max"] = "min"
    stage: Literal["L1", "L2"] = "L1"
    smooth: PositiveInt = 5
    min_samples: NonNegativeInt = 10

    def check(self, setup: Setup) -> None:
        """Warn where there is too little for a mean."""
        count = setup.run.max_rounds // setup.run.evaluate_every if setup.run.evaluate_every else 0
        if setup.data.has_split("val") and 1 < count < self.smooth:
            setup.warn(
                f"{self.key} judges a round by the mean of {self.smooth} evaluations, and the run has {count}: every client "
                f"keeps its latest model. Set smooth to at most {count}; 1 takes the best single evaluation."
            )

    def on_client_evaluated(
        self, client: Client, stage: Stage, split: str, metrics: Mapping[str, float], module: LightningModule
    ) -> None:
        """Keep the model if it is the client's best so far.

        Raises:
            ValueError: If validation does not give the monitored metric.
        """
        if stage != self.stage or split != "val":
            return
        before, score = client.checkpoints.get(self.key, {}), monitored(self, metrics)
        recent, now = before.get("recent", []), [client.round + 1, score]
        if not math.isfinite(score) or recent[-1:] == [now]:  # the second: the same model, scored again
            return
        best = before["score"] if len(recent) == self.smooth else None
        recent = [*recent, now][-self.smooth :]
        mean = sum(score for _, score in recent) / len(recent)
        few = self.min_samples > 0 and client.size("val") < self.min_samples
        if few or best is None or is_better(mean, best, self.mode):
            model = clone(module_state(module), "cpu")
            kept = {"name": "best_local", "stage": stage, "round": client.round + 1, "score": mean}
            client.checkpoints[self.key] = {**kept, "recent": recent, "model": model}
        else:
            client.checkpoints[self.key] = {**before, "recent": recent}


@make_init
class GlobalCheckpoint(ModelSelection):
    """Selection of the global model whose mean validation score over the clients is best ("best_global").

    Where the server keeps a model for each architecture, each is selected by the scores of the clients that have it.

    FENDA-FL paper (Tavakoli et al., 2024): the clients' validation losses are averaged with their training samples as
    weights. A round in which a client's loss is infinite or NaN, or a client could not be scored, is not selected: a model
    that breaks on one client must not win. With ``stage="L2"`` neither is one in which a client failed in training. An
    undefined metric (AUROC of one class) is a gap: with ``mode="max"`` clients whose value is NaN are left out of the mean,
    which is said once, and rounds are compared by the clients that have a value in both.

    Args:
        monitor: Metric that the module logs in validation. Default ``"val_loss"``, or the only loss that it logs.
        mode: ``"min"`` (default) or ``"max"``. A tie keeps the earlier model.
        stage: ``"G"`` (the paper, default): scores of the aggregated model. ``"L2"``: scores of the clients' trained
            models, before aggregation, decide about the model they are aggregated to.
        mean: Weights of the mean: ``"train"`` samples (the paper, default), ``"val"`` samples or ``"uniform"``.

    Example:
        >>> from fedlightning.callbacks import GlobalCheckpoint
        >>> GlobalCheckpoint(monitor="val_accuracy", mode="max").hyperparameters()
        {'monitor': 'val_accuracy', 'mode': 'max', 'stage': 'G', 'mean': 'train'}
    """

    @property
    def facts(self) -> Facts:
        """One model is selected by the mean of scores, in any loop; with clients that join, anew."""
        all_train = requires.EveryClient(
            "compares the losses of the clients that trained", "Use stage='G', or let all take part."
        )
        return super().facts.extend(
            changes={Change.GLOBAL_SELECTION},
            requires=[*TO_SELECT, *([all_train] if self.stage == "L2" else [])],
            asynchronous=True,
            newcomers=Newcomers(join=self._select_anew),
        )

    monitor: str = "val_loss"
    mode: Literal["min", "max"] = "min"
    stage: Literal["G", "L2"] = "G"
    mean: Literal["train", "val", "uniform"] = "train"

    def on_federation_start(self, server: Server) -> None:
        """Refuse methods without a global model.

        Raises:
            ValueError: If the method has no global model.
        """
        for _, client in self._models(server):
            self._module(server, client)

    def _select_anew(self, server: Server, clients: Sequence[str]) -> None:
        """Select anew: scores of a model on other clients cannot be compared with those before."""
        keys = [key for key in server.checkpoints if key.split(" ")[0] == self.key]
        if [server.checkpoints.pop(key) for key in keys]:
            warn("GlobalCheckpoint selects anew: its best score so far is of other clients than the next ones will be.")

    def _models(self, server: Server) -> list[tuple[str, str | None]]:
        """Return the keys of the models to select from, each with a client that has it; `None`: all have it."""
        if server.callbacks.role("model_of") is None:
            return [(GLOBAL, None)]
        client_by_model: dict[str, str | None] = {}
        for client in server.clients:
            client_by_model.setdefault(server.model_of(client), client)
        return list(client_by_model.items())

    def _module(self, server: Server, client: str | None) -> LightningModule:
        """Return the global model, or raise `ValueError` if the method has none."""
        module = server.global_module(client)
        owner = server.callbacks.role("global_module")
        if module is None:
            why = "part of this model stays with the clients"
            if owner is not None and len(server.shared_names()) == len(server.kinds):
                why = f"{owner.key}'s server keeps several"
            raise ValueError(f"GlobalCheckpoint needs a global model, but {why}. Use LocalCheckpoint().")
        return module

    def on_round_end(self, server: Server) -> None:
        """Keep the global model if it is the best so far.

        Raises:
            ValueError: If the method has no global model, or validation does not give the monitored metric.
        """
        if not any(split == "val" for _, _, _, split, _ in server.scores):
            return
        for model, client in self._models(server):
            self._select(server, model, self._module(server, client))

    def _select(self, server: Server, model: str, module: LightningModule) -> None:
        several = server.callbacks.role("model_of") is not None
        scores = server.score(self.monitor, stage=self.stage)
        if not scores:
            where = (None, self.stage, "local", "val")
            metrics = [metric for *place, metric in server.scores if tuple(place) == where]
            scores = server.score(monitor_of(self, metrics), stage=self.stage)
        if several:
            scores = {client: score for client, score in scores.items() if server.model_of(client) == model}
        weights = {
            client: {"train": server.num_samples.get(client, 0), "val": size, "uniform": 1}[self.mean]
            for client, (_, size) in scores.items()
        }
        missed = any(map(partial(self._missed, server), server.failures))
        values = {client: value for client, (value, _) in scores.items() if weights[client]}
        broken = [value for value in values.values() if math.isinf(value) or (self.mode == "min" and math.isnan(value))]
        defined = {client: value for client, value in values.items() if math.isfinite(value)}
        if missed or broken or not defined:
            return
        key, address = (f"{self.key} {model}", {"of": model}) if several else (self.key, {})
        before = server.checkpoints.get(key, {}).get("values", {})
        gaps = [client for client in values if client not in defined or (before and client not in before)]
        both = [client for client in defined if client in before]
        if gaps and before:  # means over different clients cannot be compared
            if not both or not is_better(_mean(defined, weights, both), _mean(before, weights, both), self.mode):
                return
            server.checkpoints.pop(key)
        scores_to_keep = {"values": defined} if self.mode == "max" else {}
        score = _mean(defined, weights, defined)
        _keep_best(self, server, score, module, key, name="best_global", stage="G", **address, **scores_to_keep)
        if gaps and not before:
            text = f"{len(defined)} of {len(values)} clients"
            warn(
                f"{self.key} selects by the mean {self.monitor} of {text}: it is not defined for {', '.join(gaps[:5])}."
            )

    def _missed(self, server: Server, failure: Mapping[str, Any]) -> bool:
        """Whether a client lacks a score of this round that it has in others, because it failed.

        Held-out clients do not choose; a client without training samples has no trained model in any round; and what was
        tried again has a failure of its own if the last try failed.
        """
        trains = server.num_samples.get(failure["client"])
        places = {self.stage: trains is not None} | ({"training": bool(trains)} if self.stage == "L2" else {})
        again = failure.get("decision", "").startswith("tried again")
        return not again and failure["round"] == server.round + 1 and places.get(failure["where"], False)


def _mean(values: Mapping[str, float], weights: Mapping[str, float], clients: Iterable[str]) -> float:
    """Return the weighted mean over some clients."""
    some = list(clients)
    return sum(weights[client] * values[client] for client in some) / sum(weights[client] for client in some)


def monitored(callback: Any, metrics: Mapping[str, float]) -> float:
    """Return the metric that a callback monitors."""
    return float(metrics[monitor_of(callback, metrics)])


def monitor_of(callback: Any, metrics: Iterable[str]) -> str:
    """Return the name of the metric that a callback monitors: its `monitor`, or for the default the only loss there is.

    Example:
        >>> monitor_of(LocalCheckpoint(), ["val/loss", "val/acc"])
        'val/loss'
    """
    names, monitor = list(metrics), str(callback.monitor)
    if monitor in names:
        return monitor
    losses = [name for name in names if "loss" in _words(name)]
    if (monitor, callback.mode) == (DEFAULT, "min") and len(losses) == 1:
        return losses[0]
    there = f"{sorted(names)}. Log it in validation_step, or set monitor=... to one of these, with mode='max' where more is "
    there += "better"
    none = f"no metric. Log one in validation_step, or remove {callback.key}"
    raise ValueError(f"{callback.key} monitors '{monitor}', but validation gives {there if names else none}.")


def _words(metric: str) -> list[str]:
    return re.split(r"[^a-z0-9]+|_", metric.lower())


class ValidationScores(requires.Requirement):
    """There are validation scores to go by, of a metric that validation logs; the default stands for the only loss."""

    def fault(self, owner: Any, setup: Setup) -> str:
        every = setup.run.evaluate_every
        if every == 0 or not setup.data.has_split("val"):
            why = "evaluation.every is 0" if every == 0 else "no client has validation data"
            return f"has nothing to select by: {why}"
        step = setup.first_step()
        if step.logged is None or not step.is_scored:
            return ""
        metric = monitor_of(owner, step.logged)
        if metric != owner.monitor:
            rank_zero_info(
                f"{owner.key} monitors '{metric}': {type(setup.template).__name__} logs no '{owner.monitor}' in validation, "
                "and this is its only loss."
            )
        if owner.mode == "min" and MORE_IS_BETTER & set(_words(metric)):
            setup.warn(
                f"{owner.key} monitors '{metric}' with mode='min', so its lowest value is the best. Set mode='max'."
            )
        return ""


TO_SELECT = [ValidationScores(instead="It will keep no model.", warns=True)]


def is_better(score: float, best: float | None, mode: str) -> bool:
    """Return True if ``score`` is finite and better than ``best`` by more than rounding; ``None`` is worse than any.

    Example:
        >>> is_better(0.4, best=0.5, mode="min"), is_better(0.5, 0.5, "min"), is_better(float("nan"), None, "min")
        (True, False, False)
    """
    if not math.isfinite(score):
        return False
    sign = -1.0 if mode == "min" else 1.0
    return best is None or ties.better_than_rounding(sign * score, sign * best)


def _keep_best(
    callback: Any, owner: Client | Server, score: float, module: LightningModule, key: str | None = None, **values: Any
) -> None:
    """Store ``module`` among the owner's checkpoints if ``score`` is the best so far."""
    key = callback.key if key is None else key
    best = owner.checkpoints.get(key)
    if is_better(score, None if best is None else best["score"], callback.mode):
        model = clone(module_state(module), "cpu")
        owner.checkpoints[key] = {**values, "round": owner.round + 1, "score": score, "model": model}
