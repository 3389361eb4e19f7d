"""What commands print for programs: with `--json` the last line of standard output is one JSON object.

It has `command`, `schema` (the number of this description; it grows when a field changes its meaning) and the fields
below. What is not a number (NaN, infinity) is null. `fedlightning sites --json` has its own form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

SCHEMA = 1
"""Number of the description below."""
SCORES = "rows of summary.json (model, stage, checkpoint, data, split, metric, mean, worst, per_client, ...)"
FIELDS: dict[str, dict[str, str]] = {
    "fit": {
        "run": "folder of the run; null if it has none",
        "rounds": "rounds that are done",
        "results": SCORES,
        "failures": "failures of clients (round, client, where, reason, decision)",
        "bytes_up": "bytes that clients have sent",
        "bytes_down": "bytes that clients were sent",
        "seconds": "wall time of training",
    },
    "validate": {"run": "folder of the run", "rounds": "rounds that are done", "results": SCORES},
    "test": {"run": "folder of the run", "rounds": "rounds that are done", "results": SCORES},
    "evaluate": {
        "split": "the split that was scored",
        "least": "fewest samples of a client that has scores",
        "clients": "a row for each client: client, samples, why it has no scores, metrics and calibration with ..._ci95",
        "files": "files that were written",
    },
    "leakage": {
        "run": "folder of the run",
        "membership": "a row for each model (model, members, others, auc, low, high, hits, chance)",
        "sites": "whose a sample is (samples, clients, accuracy, chance, p); null if it could not be tried",
        "missing": "what could not be tried, in sentences",
        "likelihood_ratio": "of --attack ratio (shadows, members, others, auc, low, high, hits, chance); null if never made",
        "canaries": "of --attack canaries (unit, canaries, guesses, right, confidence, delta, epsilon, most, accounted, "
        "leak, power); null if never made",
        "inversion": "of --attack inversion (client, batch, matching, steps, mse, psnr, psnr_of_mean); null if never made",
    },
    "partition": {
        "split": "the split that the table is of",
        "clients": "a row for each client: client, size, total_variation, class counts",
        "inputs": "share of the inputs' variance that is between clients, and that of a random split; null if not known",
        "public": "what public samples there are; null if none",
        "files": "files that were written",
    },
    "compare": {
        "out": "folder of all files",
        "page": "the report; null if none was written",
        "metric": "metric that is compared",
        "checkpoint": "models that are compared",
        "overview": "a row for each method (method, mean, ci95, worst, pooled, global, gap, mb_total, n_seeds, ...)",
        "problems": "what is wrong with the runs, in sentences",
        "failed": "number of runs that failed",
    },
    "report": {
        "page": "the report",
        "metric": "metric that is compared",
        "checkpoint": "models that are compared",
        "overview": "a row for each method, as of compare",
        "problems": "what is wrong with the runs, in sentences",
    },
    "sweep": {
        "out": "folder of all files",
        "metric": "what was optimised",
        "trials": "a row for each trial, best first",
    },
    "reproduce": {
        "out": "folder of all files; null for the list of tables",
        "page": "the report; null for the list of tables",
        "tables": "a row for each table: what it is and the number of each verdict; of a run also its cells and orders",
        "chance": "verdicts that chance alone would turn to disagrees, at most; null for the list of tables",
        "lost": "cells that once agreed and do not now, in sentences",
    },
    "algorithms": {
        "algorithms": "a row for each algorithm (name, family, sentence, paper, down, up, leaves, client_state, "
        "server_state, of_clients, deployed, weights, composes, class_path, config); options for those that were named"
    },
    "configs": {"configs": "a row for each configuration (name, file, about)"},
    "card": {"out": "folder of the card", "files": "files in it"},
}
"""Command -> field -> what it holds."""


def plain(value: Any) -> Any:
    """Return a value as JSON has it: null for what is not finite, text for what is not a value of JSON.

    Example:
        >>> plain({"a": float("nan"), "b": (1, 2)})
        {'a': None, 'b': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def print_json(command: str, **values: Any) -> None:
    """Print the line of a command.

    Args:
        command: Its name.
        **values: Its fields, those of :data:`FIELDS`.

    Raises:
        KeyError: If the fields are not those that are described.
    """
    if set(values) != set(FIELDS[command]):
        raise KeyError(f"{command} --json has the fields {sorted(FIELDS[command])}, not {sorted(values)}.")
    print(json.dumps({"command": command, "schema": SCHEMA, **plain(values)}, allow_nan=False), flush=True)
