"""A given model at each client: its scores with the samples behind them, intervals, and calibration where it can be had."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlightning.scores.metrics import SHARES, bare
from fedlightning.storage.files import write_text_atomically
from fedlightning.study.calibration import calibration, calibration_intervals, wilson
from fedlightning.study.columns import GLOBAL, LOCAL
from fedlightning.study.data import Table
from fedlightning.study.export import as_csv, flat, plain
from fedlightning.study.samples import Predicted

FILE = "evaluation"
"""Name of the files of the table, without their endings."""
COUNTED = ("accuracy", "acc")
"""Shares of samples, which have Wilson's interval; other shares are no counts."""
ERRORS = {"rmse": 0.5, "mse": 1.0}
"""Errors whose interval is that of a variance -> power of the variance."""
CALIBRATED = ("events", "observed", "expected", "slope", "in_the_large", "brier")
"""Fields of `Calibration` in the table, of an outcome with two classes."""


def evaluation(
    results: Sequence[Mapping[str, Any]], sizes: Mapping[str, int], least: int, found: Predicted | None = None
) -> Table:
    """Return one line for each client: `client`, `samples`, every metric with `..._ci95`, and calibration.

    Intervals are over the client's samples: Wilson's of a share of samples; of `rmse` and `mse` that of a variance (of normal
    errors); of AUROC and calibration by resamples of the client's samples, where predictions are here (`found`).

    Args:
        results: Rows of `summary.json`.
        sizes: Client -> samples that it holds.
        least: Fewest samples of a client that has scores; another's line has neither scores nor its number of samples.
        found: Predicted probabilities of the samples; `None` where the data are elsewhere.
    """
    rows = {bare(row["metric"]): row["per_client"] for row in results if (row["model"], row["data"]) == (GLOBAL, LOCAL)}
    binary = found is not None and not found.reason and found.probabilities.shape[1] == 2
    lines: Table = []
    for client, samples in sizes.items():
        line: dict[str, Any] = {"client": client, "samples": samples if samples >= least else None}
        line["why"] = None if samples >= least else f"fewer than {least} samples"
        for metric, scores in rows.items():
            line |= {metric: scores.get(client), f"{metric}_ci95": _interval(metric, scores.get(client), samples)}
        if binary and found is not None:
            line |= _calibrated(found.of(client), samples >= least)
        lines.append(line)
    return lines


def _interval(metric: str, value: float | None, samples: int) -> list[float] | None:
    if value is None or samples < 2:
        return None
    if metric in COUNTED and metric in SHARES and value <= 1:
        return list(wilson(value, samples))
    if metric in ERRORS:
        from scipy.stats import chi2

        return [value * float(samples / chi2.ppf(tail, samples)) ** ERRORS[metric] for tail in (0.975, 0.025)]
    return None


def _calibrated(own: Predicted, enough: bool) -> dict[str, Any]:
    names = [*CALIBRATED, "slope_ci95", "in_the_large_ci95", "brier_ci95", "auroc_ci95"]
    if not enough or not len(own.labels):
        return dict.fromkeys(names)
    events, probabilities = (own.labels == 1).astype(float), own.probabilities[:, 1]
    told = calibration(events, probabilities)
    return {name: getattr(told, name) for name in CALIBRATED} | calibration_intervals([(events, probabilities)])


def write_evaluation(folder: Path, lines: Table, about: Mapping[str, Any]) -> list[Path]:
    """Write the table as `evaluation.csv`, and with what it is of as `evaluation.json`; return both."""
    files = [folder / f"{FILE}.csv", folder / f"{FILE}.json"]
    columns = dict.fromkeys(name for line in lines for name in line)
    write_text_atomically(files[0], as_csv([flat({name: line.get(name) for name in columns}) for line in lines]))
    write_text_atomically(files[1], json.dumps(plain({**about, "clients": lines}), indent=1, allow_nan=False))
    return files
