"""Results of one run as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedlightning.compat.rich_tables import print_whole
from fedlightning.contract import POOLED
from fedlightning.errors import listed
from fedlightning.scores.metric_names import DEFAULTS
from fedlightning.scores.rows import LOCAL, UNSEEN

STAGES = {"G": "G: server's model", "L1": "L1: as received", "L2": "L2: after local training"}
_LABEL_COLUMNS = ("checkpoint", "stage", "data")
_CELL = len("0.0000 ± 0.0000")
MAX_CLIENT_ROWS = 20
"""Clients that have a row each in the terminal."""
MANY_CLIENTS = 200
"""Clients from which on a run is told how to score fewer of them, if scoring takes longer than training."""
_ORDER = {"latest": 0, "best_global": 1, "best_local": 2}
_LABELS = {"balanced_accuracy": "balanced acc.", "f1_macro": "macro F1", "auroc": "AUROC"}

DEPLOYED = (("latest", "L1", LOCAL), ("best_local", "L1", LOCAL))
"""Row of the models that clients would use, the last one that there is."""

Result = dict[str, Any]
"""A row of `summary.json`: see :func:`fedlightning.scores.metric_names.summarise`."""


def important_metrics(results: Sequence[Result], limit: int | None = None, headline: str | None = None) -> list[str]:
    """Return the metrics in `results` without their split, the most important first; others follow in the module's order.

    Both `test_loss` and `test/loss` are `loss`. A headline among them comes before all others.

    Example:
        >>> rows = [{"metric": f"test_{name}", "split": "test"} for name in ("loss", "dice", "accuracy")]
        >>> important_metrics(rows)
        ['accuracy', 'dice', 'loss']
    """
    metrics = list(dict.fromkeys(bare(row) for row in results))
    defaults = [name for name in dict.fromkeys([headline, *DEFAULTS]) if name in metrics]
    return (defaults + [name for name in metrics if name not in defaults])[:limit]


def bare(row: Result) -> str:
    """Return the name of a row's metric without its split."""
    name: str = row["metric"]
    return name.removeprefix(f"{row['split']}_").removeprefix(f"{row['split']}/")


def results_table(
    results: Sequence[Result],
    split: str = "test",
    width: int = 80,
    unseen: bool = False,
    headline: str | None = None,
) -> Table:
    """Return a table with models as rows and metrics as columns: mean ± standard deviation over clients."""
    rows = [
        row
        for row in results
        if row["split"] == split and row["data"] in (LOCAL, POOLED) and (row["model"] == UNSEEN) == unseen
    ]
    groups: dict[tuple[str, str, str], dict[str, Result]] = {}
    for row in rows:
        groups.setdefault((row["checkpoint"], row["stage"], row["data"]), {})[bare(row)] = row
    order = sorted((key for key in groups if not _is_repeated(groups, key)), key=lambda key: (*_rank(key), key[2]))
    deployed = next((key for key in reversed(order) if key in DEPLOYED), None)
    label_width = sum(3 + max(len(text), *(len(key[i]) for key in order)) for i, text in enumerate(_LABEL_COLUMNS))
    cell = max((len(_mean_std(row)) for row in rows), default=_CELL)
    metrics = important_metrics(rows, max(1, (width - label_width) // (max(cell, _CELL) + 3)), headline)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in _LABEL_COLUMNS:
        table.add_column(column, no_wrap=True)
    for metric in metrics:
        table.add_column(_LABELS.get(metric, metric), justify="right", no_wrap=True)
    for index, key in enumerate(order):
        table.add_row(
            *key[:2],
            f"{key[2]} *" if key == deployed else key[2],
            *(_mean_std(groups[key].get(metric)) for metric in metrics),
            end_section=index + 1 < len(order) and order[index + 1][0] != key[0],
        )
    return table


def _is_repeated(groups: Mapping[tuple[str, str, str], Mapping[str, Result]], key: tuple[str, str, str]) -> bool:
    """Return whether the row of all clients' models on the pooled data says no more than that of the server's model."""
    checkpoint, stage, data = key
    server = groups.get((checkpoint, "G", data), {})
    return (stage, data) == ("L1", POOLED) and all(
        metric in server and row["mean"] == server[metric]["mean"] and not row["std"]
        for metric, row in groups[key].items()
    )


def client_table(
    results: Sequence[Result],
    split: str = "test",
    width: int = 80,
    unseen: bool = False,
    headline: str | None = None,
) -> Table | None:
    """Return a table with clients as rows and models as columns: one metric on each client's own data."""
    rows = [row for row in results if row["split"] == split and row["data"] == LOCAL]
    rows = [row for row in rows if (row["model"] == UNSEEN) == unseen]
    metric = next(iter(important_metrics(rows, headline=headline)), None)
    columns = {(row["checkpoint"], row["stage"]): row for row in rows if bare(row) == metric}
    if not columns:
        return None
    order = sorted(columns, key=_rank)
    clients = list(dict.fromkeys(client for key in order for client in columns[key]["per_client"]))
    taken = 2 + max(len("client"), *map(len, clients))
    ends = list(accumulate((3 + max(len(" ".join(key)), len("0.0000")) for key in order), initial=taken))[1:]
    order = order[: max(1, sum(end <= width for end in ends))]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("client", no_wrap=True)
    for checkpoint, stage in order:
        table.add_column(f"{checkpoint} {stage}", justify="right", no_wrap=True)
    for client in clients:
        table.add_row(client, *(_number(columns[key]["per_client"].get(client)) for key in order))
    return table


def print_results(
    results: Sequence[Result], split: str = "test", console: Console | None = None, headline: str | None = None
) -> None:
    """Print the results of a run, and those of each client if there are at most :data:`MAX_CLIENT_ROWS`.

    Args:
        results: The rows.
        split: Which of them.
        console: Where to.
        headline: Metric that comes first and is shown for each client; by default the first of `DEFAULTS` that is there.
    """
    console = console or Console()
    if not any(row["split"] == split for row in results):
        console.print(f"There are no results on the '{split}' split.")
        return
    words = {"test": "test data", "val": "validation data"}[split]
    of_split = [row for row in results if row["split"] == split]
    for unseen in (False, True):
        rows = [row for row in of_split if (row["model"] == UNSEEN) == unseen]
        if not rows:
            continue
        whose = "Unseen clients, which took no part in training: results" if unseen else "Results"
        console.print(f"{whose} on {words} (mean ± standard deviation over clients)", style="bold")
        table = results_table(results, split, console.width, unseen, headline)
        print_whole(console, table)
        console.print(_caption(rows), highlight=False)
        if left := important_metrics(rows, headline=headline)[len(table.columns) - len(_LABEL_COLUMNS) :]:
            console.print(f"No room for {listed(left)}; the results have them.", highlight=False)
        ids = {client for row in rows if row["data"] == LOCAL for client in row["per_client"]}
        by_client = client_table(results, split, console.width, unseen, headline)
        if by_client is not None and 1 < len(ids) <= MAX_CLIENT_ROWS:
            metric = important_metrics(rows, headline=headline)[0]
            each = "Each unseen client" if unseen else "Each client"
            console.print(f"\n{each} on its own {words}: {_LABELS.get(metric, metric)}", style="bold")
            print_whole(console, by_client)


def evaluation_line(summary: Mapping[str, Any]) -> str | None:
    """Say in a line how many clients were scored, and what that cost; `None` if it was all and cost less than training.

    Example:
        >>> print(evaluation_line({"evaluation": {"clients": 9, "of": 50}, "evaluation_seconds": 2.0, "seconds": 10.0}))
        Scored: 9 of 50 clients (evaluation.clients), in 2 of the 10 s of the run.
    """
    evaluation, spent, whole = (
        summary.get("evaluation", {}),
        summary.get("evaluation_seconds", 0.0),
        summary.get("seconds", 0.0),
    )
    count, total = evaluation.get("clients", 0), evaluation.get("of", 0)
    if (before := evaluation.get("in_training")) is not None:
        return f"Scored: {count} of {total} clients on test data, {before['clients']} in training and at stage L2."
    if count < total:
        return (
            f"Scored: {count} of {total} clients (evaluation.clients), in {spent:.0f} of the {whole:.0f} s of the run."
        )
    if total >= MANY_CLIENTS and 2 * spent > whole:
        return (
            f"Scoring all {total} clients took {spent:.0f} of the {whole:.0f} s of the run: evaluation.clients=100 scores "
            "100 of them, evaluation.every=10 every tenth round."
        )
    return None


def _rank(key: tuple[str, ...]) -> tuple[int, str, int]:
    checkpoint, stage = key[:2]
    return (_ORDER.get(checkpoint, 9), checkpoint, list(STAGES).index(stage))


def _caption(rows: Sequence[Result]) -> str:
    stages = [text for stage, text in STAGES.items() if any(row["stage"] == stage for row in rows)]
    pooled = "; pooled: all clients' data" if any(row["data"] == POOLED for row in rows) else ""
    gaps = [row for row in rows if row["mean"] is not None and _defined(row) < len(row["per_client"])]
    example = f"({_defined(gaps[0])}/{len(gaps[0]['per_client'])})" if gaps else ""
    undefined = (
        f" {example}: mean over so many of the clients; on the data of the others it is not defined." if gaps else ""
    )
    star = " *: what clients deploy." if any(row["stage"] == "L1" and row["data"] == LOCAL for row in rows) else ""
    return "; ".join(stages) + ". local: a client's own data" + pooled + "." + star + undefined


def _mean_std(row: Result | None) -> str:
    if row is None or row["mean"] is None:
        return "-"
    mean, count = _number(row["mean"]), len(row["per_client"])
    text = f"{mean} ± {_number(row['std'])}" if count > 1 else f"{mean}{' ' * 9}"
    some = _defined(row)
    return text if some == count else f"{text} ({some}/{count})"


def _defined(row: Result) -> int:
    """Return the number of clients for which a metric is defined."""
    return sum(value is not None for value in row["per_client"].values())


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"
