"""Results of a run: statistics over clients of the rows of one model, stage, checkpoint, data, split and metric."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedlightning.scores.metrics import higher_is_better
from fedlightning.scores.rows import KIND, Row


def summarise(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows of ``summary.json``: per model, stage, checkpoint, data, split and metric the statistics over clients.

    ``mean`` is uniform over clients, ``weighted_mean`` by evaluated samples, ``std`` and ``variance`` those of the
    population, ``worst`` and ``tenth_percentile`` taken from the bad end (the top for a loss). A value that is not
    defined for a client (AUROC with one class) is ``null`` there and left out of the statistics, which are over
    ``clients`` clients.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(KIND(row), []).append(row)
    out = []
    for key, members in groups.items():
        found = np.array([row.value for row in members], dtype=float)
        defined = np.isfinite(found)
        values = found[defined]
        weights = np.array([row.num_samples for row in members], dtype=float)[defined]
        some = len(values) > 0
        good = higher_is_better(key[-1])
        out.append(
            dict(zip(("model", "stage", "checkpoint", "data", "split", "metric"), key, strict=True))
            | {
                "mean": float(values.mean()) if some else None,
                "weighted_mean": float((values * weights).sum() / weights.sum()) if some else None,
                "std": float(values.std()) if some else None,
                "variance": float(values.var()) if some else None,
                "median": float(np.median(values)) if some else None,
                "worst": float(values.min() if good else values.max()) if some else None,
                "tenth_percentile": float(np.percentile(values, 10 if good else 90)) if some else None,
                "clients": len(values),
                "per_client": {
                    row.client: row.value if finite else None
                    for row, finite in zip(members, defined.tolist(), strict=True)
                },
            }
        )
    return out
