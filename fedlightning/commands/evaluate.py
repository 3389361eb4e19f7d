"""What `fedlightning evaluate`, and `serve --evaluate`, show of a given model at each client.

These are scores with the samples behind them, intervals, and calibration where it can be had.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable

from fedlightning.commands.json_output import print_json
from fedlightning.commands.terminal import say, shown
from fedlightning.compat.rich_tables import print_whole
from fedlightning.datamodules import FederatedDataModule
from fedlightning.datamodules.federated_data import sort_clients
from fedlightning.datamodules.partition_report import class_names_of
from fedlightning.scores.metric_names import ACCURACY, SHARES, bare, metric_label
from fedlightning.storage.files import write_text_atomically
from fedlightning.study.calibration import calibration, calibration_intervals, wilson
from fedlightning.study.columns import GLOBAL, LOCAL
from fedlightning.study.comparison_files import as_csv, flat, plain
from fedlightning.study.data import Table
from fedlightning.study.finished_runs import read_config
from fedlightning.study.samples import Predicted
from fedlightning.study.target_units import Target, target_of
from fedlightning.trainer import FederatedTrainer

FILE = "evaluation"
"""Name of the files of the table, without their endings."""
"""Shares of samples, which have Wilson's interval; other shares are not counts."""
ERRORS = {"rmse": 0.5, "mse": 1.0}
"""Errors whose interval is that of a variance -> power of the variance."""
CALIBRATED = ("events", "observed", "expected", "slope", "in_the_large", "brier")
"""Fields of `Calibration` in the table, of an outcome with two classes."""


def evaluation(
    results: Sequence[Mapping[str, Any]], sizes: Mapping[str, int], least: int, predicted: Predicted | None = None
) -> Table:
    """Return one line for each client: `client`, `samples`, every metric with `..._ci95`, and calibration.

    Intervals are over the client's samples: Wilson's of a share of samples; of `rmse` and `mse` that of a variance (of normal
    errors); of AUROC and calibration by resamples of the client's samples, where predictions are here (`predicted`).

    Args:
        results: Rows of `summary.json`.
        sizes: Client -> samples that it holds.
        least: Fewest samples of a client that has scores; another's line has neither scores nor its number of samples.
        predicted: Predicted probabilities of the samples; `None` where the data are elsewhere.
    """
    rows = {bare(row["metric"]): row["per_client"] for row in results if (row["model"], row["data"]) == (GLOBAL, LOCAL)}
    binary = predicted is not None and not predicted.reason and predicted.probabilities.shape[1] == 2
    lines: Table = []
    for client, samples in sizes.items():
        line: dict[str, Any] = {"client": client, "samples": samples if samples >= least else None}
        line["why"] = None if samples >= least else f"fewer than {least} samples"
        for metric, scores in rows.items():
            line |= {metric: scores.get(client), f"{metric}_ci95": _interval(metric, scores.get(client), samples)}
        if binary and predicted is not None:
            line |= _calibrated(predicted.of(client), samples >= least)
        lines.append(line)
    return lines


def _interval(metric: str, value: float | None, samples: int) -> list[float] | None:
    if value is None or samples < 2:
        return None
    if metric in ACCURACY and metric in SHARES and value <= 1:
        return list(wilson(value, samples))
    if metric in ERRORS:
        from scipy.stats import chi2

        return [value * float(samples / chi2.ppf(tail, samples)) ** ERRORS[metric] for tail in (0.975, 0.025)]
    return None


def _calibrated(predicted: Predicted, enough: bool) -> dict[str, Any]:
    names = [*CALIBRATED, "slope_ci95", "in_the_large_ci95", "brier_ci95", "auroc_ci95"]
    if not enough or not len(predicted.labels):
        return dict.fromkeys(names)
    events, probabilities = (predicted.labels == 1).astype(float), predicted.probabilities[:, 1]
    calibrated = calibration(events, probabilities)
    return {name: getattr(calibrated, name) for name in CALIBRATED} | calibration_intervals([(events, probabilities)])


def write_evaluation(folder: Path, lines: Table, about: Mapping[str, Any]) -> list[Path]:
    """Write the table as `evaluation.csv`, and with what it is of as `evaluation.json`; return both."""
    files = [folder / f"{FILE}.csv", folder / f"{FILE}.json"]
    columns = dict.fromkeys(name for line in lines for name in line)
    write_text_atomically(files[0], as_csv([flat({name: line.get(name) for name in columns}) for line in lines]))
    write_text_atomically(files[1], json.dumps(plain({**about, "clients": lines}), indent=1, allow_nan=False))
    return files


SHOWN = (
    "accuracy",
    "auroc",
    "balanced_accuracy",
    "rmse",
    "mae",
    "r2",
    "c_index",
    "ece",
    "slope",
    "in_the_large",
    "brier",
)
"""Columns on the terminal, the first of those there are; the files have all."""
MAX_LISTED = 5
INTERVALS = "[95 % interval] over a client's samples: they do not hold what another training would change."
MEANINGS = {
    "slope": " slope: 1 is perfect, below it risks are too extreme, above it too close to one another.",
    "in_the_large": " in the large: above 0 risks are too low.",
}
"""Column -> how it is read."""


def show_evaluation(
    trainer: FederatedTrainer, data: FederatedDataModule | None, split: str, least: int, screen: Console, as_json: bool
) -> None:
    """Print the table of the clients and write it into the run's folder; `data` is `None` where they are at sites."""
    from fedlightning.study.predicted import predict_samples

    federation = trainer.federation
    assert federation is not None
    described = federation.engine.runner.described
    sizes = {client: described.num_samples(client, split) for client in sort_clients(described.client_ids)}
    predicted = None
    if data is not None and split == "test":
        predicted = predict_samples(trainer, data, [client for client, samples in sizes.items() if samples >= least])
    target = Target() if trainer.run is None else target_of(read_config(trainer.run.path))
    lines = evaluation(target.results(trainer.results), sizes, least, predicted)
    scored = [line for line in lines if line["why"] is None]
    names = [name for name in SHOWN if any(line.get(name) is not None for line in scored)]
    names = names or [name for name in (scored[0] if scored else {}) if f"{name}_ci95" in scored[0]]
    table = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("client", "samples", *names[:MAX_LISTED]):
        table.add_column(metric_label(name), justify="left" if name == "client" else "right", no_wrap=name != "client")
    for line in lines:
        cells = (
            [line["why"], *[""] * (len(names[:MAX_LISTED]) - 1)]
            if line["why"]
            else [_cell(line, n) for n in names[:MAX_LISTED]]
        )
        table.add_row(line["client"], "" if line["samples"] is None else str(line["samples"]), *cells)
    print_whole(screen, table)
    has_intervals = any(line.get(f"{name}_ci95") for line in scored for name in names[:MAX_LISTED])
    meanings = INTERVALS if has_intervals else ""
    meanings += "".join(meaning for name, meaning in MEANINGS.items() if name in names[:MAX_LISTED])
    classes = [] if data is None else class_names_of(data)
    event = classes[1] if len(classes) == 2 else None  # of two classes the second is the event
    meanings += f" Events are of class {event}." if event not in (None, "event") else ""
    meanings += "".join(f" {units}" for name in names[:MAX_LISTED] if (units := target.in_words(name)))
    screen.print(f"{meanings} All columns are in the files.".strip(), highlight=False, markup=False)
    if predicted is not None and predicted.reason:
        say(screen, f"No calibration slope: {predicted.reason}.", markup=False)
    files = []
    if trainer.run is not None:
        about = {"init_from": trainer.arguments["init_from"], "split": split, "least": least}
        about |= {} if event is None else {"event": event}
        files = write_evaluation(trainer.run.path, lines, {k: v if v is None else str(v) for k, v in about.items()})
        say(screen, f"\nFiles: {', '.join(str(shown(file)) for file in files)}")
    if as_json:
        print_json("evaluate", split=split, least=least, clients=lines, files=files)


def _cell(line: dict[str, Any], name: str) -> str:
    value, ends = line.get(name), line.get(f"{name}_ci95")
    if value is None:
        return "-"
    return f"{value:.3f}" + (f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else "")
