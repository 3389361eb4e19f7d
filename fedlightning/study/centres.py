"""Every model of the server on every source group's hold-out data: the table of FedSoft and PI-FL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from scipy.optimize import linear_sum_assignment

from fedlightning.callbacks.shared.memberships import Clusters
from fedlightning.compat import sheets

COLUMNS = ("model", "group", "matched", "metric", "value")


def score_centres(
    trainer: Any, data: Any, metric: str = "test_accuracy", path: Path | None = None
) -> list[dict[str, Any]]:
    """Score each cluster's model on each group's hold-out data.

    Khan et al., "PI-FL", 2023, Table 1, and Ruan, Joe-Wong, "FedSoft", AAAI 2022. Centres are matched to groups so that the
    sum of the matched scores is largest (Hungarian method).
    """
    if not hasattr(data, "group_dataloader"):
        raise ValueError(f"{type(data).__name__} has no group_dataloader(group); use MixtureDataModule.")
    server = getattr(trainer, "server", None)
    if server is None:
        raise ValueError("score_centres needs a trainer that has fitted something.")
    methods = [callback for callback in server.callbacks if isinstance(callback, Clusters)]
    keys = methods[0].models_in_use(server) if methods else list(server.models)
    models = {key: server.models[key] for key in keys}
    if len(server.shared_names()) < len(server.kinds):
        raise ValueError("score_centres scores whole models, and here some entries stay with the clients.")
    tester = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    table = np.zeros((len(models), data.num_groups))
    for row, state in enumerate(models.values()):
        for group in range(data.num_groups):
            scores = tester.test(server.module_with(state), data.group_dataloader(group), verbose=False)[0]
            if metric not in scores:
                raise ValueError(f"score_centres got metric='{metric}', but testing gives {sorted(scores)}.")
            table[row, group] = scores[metric]
    pairs = set(zip(*(places.tolist() for places in linear_sum_assignment(-table)), strict=True))
    rows = [
        {
            "model": key,
            "group": group,
            "matched": (row, group) in pairs,
            "metric": metric,
            "value": float(table[row, group]),
        }
        for row, key in enumerate(models)
        for group in range(data.num_groups)
    ]
    if path is not None:
        with path.open("w", newline="") as file:
            sheets.write_table(file, COLUMNS, rows)
    return rows
