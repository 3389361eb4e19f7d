"""Runs of a tracking server, found again by their ids. What is in them cannot be taken back, but can be looked at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

from fedlightning.resume.stores.arguments import is_offline, name_run
from fedlightning.resume.stores.base import Store, is_known_as
from fedlightning.storage.files import Mark

ROUND = "fedlightning/round"
"""Entry of a Weights & Biases run that tells its newest round."""


class WandbStore(Store):
    """A run of Weights & Biases, found again by its id. Its history cannot be cut, but tells its newest round."""

    logger: WandbLogger

    def log(self, round: int, values: Mapping[str, float]) -> None:
        if round > self.until:
            super().log(round, {**values, ROUND: round})

    def mark(self) -> Mark:
        _ = self.logger.experiment  # the id is known when the run is there
        return super().mark()

    def reopen(self, mark: Mark | None, rounds: int, differs: bool) -> None:
        if mark is None:
            return
        name_run(self.logger, mark["version"])
        if is_offline(self.logger):  # its own files cannot be read, but they hold what it was given
            self.until = rounds
            return
        summary = self.logger.experiment.summary
        newest = max((int(summary[name]) for name in _names(summary) if is_known_as(ROUND, name)), default=0)
        self.until = min(newest, rounds) if differs else newest


class MLFlowStore(Store):
    """A run of MLflow, found again by its id. Its metrics cannot be cut, but can be looked through."""

    logger: MLFlowLogger

    def log(self, round: int, values: Mapping[str, float]) -> None:
        super().log(round, {re.sub("[^a-zA-Z0-9_/. -]+", "", name): value for name, value in values.items()})

    def reopen(self, mark: Mark | None, rounds: int, differs: bool) -> None:
        if mark is None:
            return
        name_run(self.logger, mark["version"])
        client, run = self.logger.experiment, self.logger.run_id
        for name in client.get_run(run).data.metrics:
            for metric in client.get_metric_history(run, name):
                if metric.step <= rounds or not differs:
                    self.there.setdefault(metric.step, set()).add(name)
        with suppress(AttributeError):  # MLflow before 2.1
            client.update_run(run, status="RUNNING")


def _names(summary: Any) -> list[str]:
    return [str(name) for name in summary.keys()]  # noqa: SIM118  a summary of W&B has keys, and no iterator
