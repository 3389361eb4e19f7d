"""What `fedlightning evaluate`, and `serve --evaluate`, show of a model at each client."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedlightning.commands.json_output import print_json
from fedlightning.commands.terminal import say, shown
from fedlightning.compat.rich_tables import print_whole
from fedlightning.datamodules import FederatedDataModule
from fedlightning.study.evaluation import evaluation, write_evaluation
from fedlightning.trainer import FederatedTrainer

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
MOST = 5
INTERVALS = "[95 % interval] over a client's samples: they do not hold what another training would change."
MEANINGS = {
    "slope": " slope: 1 is perfect, less is too extreme.",
    "in_the_large": " in_the_large: above 0 risks are too low.",
}
"""Column -> how it is read."""


def show_evaluation(
    trainer: FederatedTrainer, data: FederatedDataModule | None, split: str, least: int, screen: Console, as_json: bool
) -> None:
    """Print the table of the clients and write it into the run's folder; `data` is `None` where they are at sites."""
    from fedlightning.study.predicted import predict_samples

    federation = trainer.federation
    assert federation is not None
    known = federation.engine.runner.described
    sizes = {client: known.num_samples(client, split) for client in known.client_ids}
    found = None
    if data is not None and split == "test":
        found = predict_samples(trainer, data, [client for client, samples in sizes.items() if samples >= least])
    lines = evaluation(trainer.results, sizes, least, found)
    scored = [line for line in lines if line["why"] is None]
    names = [name for name in SHOWN if any(line.get(name) is not None for line in scored)]
    names = names or [name for name in (scored[0] if scored else {}) if f"{name}_ci95" in scored[0]]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("client", "samples", *names[:MOST]):
        table.add_column(name, justify="left" if name == "client" else "right", no_wrap=name != "client")
    for line in lines:
        cells = (
            [line["why"], *[""] * (len(names[:MOST]) - 1)] if line["why"] else [_cell(line, n) for n in names[:MOST]]
        )
        table.add_row(line["client"], "" if line["samples"] is None else str(line["samples"]), *cells)
    print_whole(screen, table)
    meanings = "".join(meaning for name, meaning in MEANINGS.items() if name in names[:MOST])
    screen.print(f"{INTERVALS}{meanings} All columns are in the files.", highlight=False, markup=False)
    if found is not None and found.reason:
        say(screen, f"No calibration slope: {found.reason}.", markup=False)
    files = []
    if trainer.run is not None:
        about = {"init_from": trainer.arguments["init_from"], "split": split, "least": least}
        files = write_evaluation(trainer.run.path, lines, {k: v if v is None else str(v) for k, v in about.items()})
        say(screen, f"\nFiles: {', '.join(str(shown(file)) for file in files)}")
    if as_json:
        print_json("evaluate", split=split, least=least, clients=lines, files=files)


def _cell(line: dict[str, Any], name: str) -> str:
    value, ends = line.get(name), line.get(f"{name}_ci95")
    if value is None:
        return "-"
    return f"{value:.3f}" + (f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else "")
