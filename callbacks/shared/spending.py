"""What ClientDP and SampleDP spend: the accountant, and the files of a run's folder that tell of every release."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedlightning.algorithm import missing_package, sheets, write_text_atomically
from fedlightning.callbacks.shared.ledger import Steps

ROWS, TOLD = "privacy.csv", "privacy.json"
FAINTEST, LOUDEST = 1e-6, 1e3
"""Noise multipliers that are told apart."""
LARGEST = 1e3
"""Epsilon up to which `"prv"` counts better than `"rdp"`."""
KNOWN = "epsilon_participants_known"
"""Name of the epsilon against whoever knows who took part in which round, as readers of a run's folder do."""
COLUMNS = ("round", "epsilon", KNOWN, "delta", "noise_multiplier", "clip", "rate", "release")


def accountant_of(name: str) -> Any:
    """Return an accountant of Opacus.

    Raises:
        ValueError: If Opacus is not installed.
    """
    try:
        from opacus.accountants import create_accountant
    except ImportError as error:
        raise ValueError(missing_package("Epsilon is counted by Opacus", "privacy")) from error
    return create_accountant(name)


@lru_cache(maxsize=4096)
def spent_by(
    accountant: str, delta: float, history: tuple[tuple[float, float, int], ...], orders: tuple[float, ...] = ()
) -> float:
    """Return the epsilon of steps: noise multiplier, rate and number of each kind. Clients of one size ask alike.

    Opacus computes for ever, divides by zero or asks for terabytes where noise is beyond any use. So more than `LOUDEST`
    counts as that, less than `FAINTEST` as none, and `"prv"` as `"rdp"` where that is beyond `LARGEST`: never too little.
    Rényi `orders` are Opacus' own unless they are given.
    """
    if any(noise < FAINTEST and rate > 0 for noise, rate, count in history):
        return math.inf
    if accountant == "prv" and (bound := spent_by("rdp", delta, history)) > LARGEST:
        return bound
    counted = accountant_of(accountant)
    counted.history = [(min(noise, LOUDEST), rate, count) for noise, rate, count in history if rate > 0]
    if not counted.history:
        return 0.0
    options = {"alphas": list(orders)} if orders and accountant == "rdp" else {}
    return float(counted.get_epsilon(delta=delta, **options))


@lru_cache(maxsize=1024)
def solved_noise(epsilon: float, delta: float, rate: float, rounds: int, accountant: str) -> float:
    """Return the noise multiplier with which a number of rounds spends `epsilon`."""
    from opacus.accountants.utils import get_noise_multiplier

    target: dict[str, Any] = {"target_epsilon": epsilon, "target_delta": delta, "sample_rate": rate}
    return float(get_noise_multiplier(**target, steps=rounds, accountant=accountant))


def merged(history: Steps) -> tuple[tuple[float, float, int], ...]:
    """Return the steps of a history, those of one noise and rate together: so many visits are counted as fast as one."""
    counted: dict[tuple[float, float], int] = {}
    for noise, rate, count in history:
        counted[float(noise), float(rate)] = counted.get((float(noise), float(rate)), 0) + int(count)
    return tuple((*kind, count) for kind, count in counted.items() if count)


def most_that(fit: Callable[[int], bool], most: int) -> int:
    """Return how many of `most` rounds or steps fit; none is 0, and is not tried."""
    if fit(most):
        return most
    low, high = 0, max(most - 1, 0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fit(middle) else (low, middle - 1)
    return low


def releases_in(folder: Path | None) -> list[list[str]]:
    """Return the rows of `privacy.csv`: a row a release, also of rounds that were done again and came out differently."""
    if folder is None or not (folder / ROWS).exists():
        return []
    return list(sheets.read_lines(io.StringIO((folder / ROWS).read_text(encoding="utf-8"))))[1:]


def write_spending(folder: Path, report: Mapping[str, Any], rows: Sequence[Sequence[Any]], release: str | None) -> None:
    """Write both files, each as a whole: first the row of a new release, then the sum of all.

    Args:
        folder: The run's folder.
        report: What `privacy.json` says.
        rows: The rows so far.
        release: Name of the new release; `None`: it has a row.
    """
    if release is not None:
        row = {**report, "round": report["rounds"]}
        row |= {name: math.nan if report.get(name) is None else report[name] for name in ("epsilon", KNOWN)}
        text = io.StringIO()
        new = [row.get(column, release) for column in COLUMNS]
        sheets.Writer(text, lineterminator="\n").writerows([COLUMNS, *rows, new])
        write_text_atomically(folder / ROWS, text.getvalue())
    write_told(folder, report)


def write_told(folder: Path, report: Mapping[str, Any]) -> None:
    """Write `privacy.json` as a whole; what the model that a run begins with has spent is added up with its own.

    For data that were in both, that is by basic composition: epsilons and deltas are summed.
    """
    before = report.get("begins_with")
    if before is not None and report["epsilon"] is not None:
        report = {**report, "together": {name: report[name] + before[name] for name in ("epsilon", "delta")}}
    write_text_atomically(folder / TOLD, json.dumps(report, indent=1) + "\n")
