"""`fedlightning partition`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedlightning.commands.json_output import print_json
from fedlightning.commands.terminal import console, say
from fedlightning.compat import sheets
from fedlightning.compat.rich_tables import print_whole
from fedlightning.config.parsing import CommandLine
from fedlightning.errors import count_of, listed


class PartitionCommand(CommandLine):
    """The command that needs data only. The docstring of its method is the text of `--help`."""

    needs_model = False

    def instantiate_classes(self) -> None:
        """Make only the data, so that a whole training configuration may be given."""
        self.config.model, self.config.trainer.callbacks, self.config.trainer.logger = None, None, None
        super().instantiate_classes()

    def partition(
        self,
        out: str = "partition",
        split: Literal["train", "val", "test"] = "train",
        images: int = 0,
        json: bool = False,
    ) -> None:
        """Show the samples of each client: a table, a picture and a CSV file; of a table also how its columns differ.

        Data that drift (DriftingDataModule) are shown by window, too: how labels and inputs change over the rounds.
        With images=8 it draws the first 8 images of each client side by side.

        Args:
            out: Folder for the picture and the CSV file.
            split: Data to show: train, val or test.
            images: Number of images to draw of each client.
            json: Print the results as one line of JSON too, the last one.
        """
        from fedlightning.arguments import federated_data
        from fedlightning.datamodules import describe, plot_partition
        from fedlightning.datamodules.by_inputs import input_separation
        from fedlightning.datamodules.partition_report import find_duplicates, plot_images
        from fedlightning.datamodules.public import public_in_words

        data = federated_data(self.datamodule, None, None, None)
        data.prepare_data()
        data.setup("fit")
        report = describe(data, split=split)
        screen = console()
        by_class = len(report.classes) > 1
        screen.print(f"Samples of each client{' by class' if by_class else ''} ({split} split)", style="bold")
        print_whole(screen, partition_table(report, screen.width))
        clients = count_of(report.client_ids, "client")
        text = f"{clients}, {int(report.sizes.sum())} samples, the smallest has {report.min_size}."
        if by_class:
            text += (
                "\nTV: total variation between a client's labels and all labels, 0 equal to 1 disjoint; mean "
                f"{report.mean_total_variation:.3f}."
            )
            if len(report.classes) == 2 and report.classes not in (["0", "1"], ["censored", "event"]):
                text += (
                    f"\nThe event of calibration and decision curves is the second class, '{report.classes[1]}'; a table's "
                    "`classes` gives them another order."
                )
        elif (target := getattr(data, "target", None)) is not None:
            text += f"\n'{target}' is a measurement, so there are no classes; it is among the columns below."
        screen.print(text, highlight=False)
        names = getattr(data, "feature_names", None)
        if names:
            screen.print(
                f"A sample has {len(names)} features, in_features={len(names)} of its network: {listed(names, most=30)}.",
                highlight=False,
            )
        compared = len(report.client_ids) > 1 and data.wanted_statistics is None
        inputs = input_separation(data, split) if compared else None
        if inputs is not None:
            scaled = getattr(data, "scale", None) == "local"
            screen.print(inputs_in_words(inputs, "clients") + (LOCAL if scaled else ""), highlight=False)
        equal = find_duplicates(data)
        if equal is not None:
            screen.print(str(equal), highlight=False, style="yellow" if equal.leaked or equal.shared else "")
        public = data.public_report()
        if public is not None:
            screen.print(f"Public: {public_in_words(public)}.", highlight=False)
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        plot_partition(report).savefig(folder / "partition.png", dpi=150)
        splits = ("train", "val", "test")
        rows = [{"split": name} | row for name in splits for row in describe(data, split=name).rows()]
        _write(folder / "partition.csv", rows)
        files = [folder / "partition.csv", folder / "partition.png"]
        windows = data.by_window() if hasattr(data, "by_window") else None
        if data.drifts and windows is None:
            screen.print(f"Training data change by the round ({data.partition_name}); shown is their last state.")
        changes = None if windows is None else input_separation(windows)
        if windows is not None:
            over_time = describe(windows)
            screen.print("\nTraining samples of all clients by window, in the order of time", style="bold")
            print_whole(screen, partition_table(over_time, screen.width, "window"))
            if changes is not None:
                screen.print(inputs_in_words(changes, "windows"), highlight=False)
            files.append(folder / "windows.png")
            plot_partition(over_time, axis="window").savefig(files[-1], dpi=150)
        columns = columns_of(data, split)
        if columns:
            screen.print("\nColumns, the smallest p-value first", style="bold")
            print_whole(screen, columns_table(columns))
            screen.print(COLUMNS, highlight=False)
            files.append(folder / "columns.csv")
            _write(
                files[-1],
                [
                    {"column": column.name, "test": column.test, "effect": column.effect, "p": column.p} | line
                    for column in columns
                    for line in column.clients
                ],
            )
        picture = plot_images(data, split, images) if images > 0 else None
        if picture is not None:
            files.append(folder / "images.png")
            picture.savefig(files[-1], dpi=150)
        elif images > 0:
            screen.print("images: the samples are not images (channels, height, width).", highlight=False)
        say(screen, f"\nFiles: {', '.join(map(str, files))}")
        if json:
            more: dict[str, Any] = {"columns": [asdict(column) for column in columns]} if columns else {}
            more |= {} if windows is None else {"windows": over_time.rows(), "inputs_by_window": changes}
            print_json(
                "partition", split=split, clients=report.rows(), inputs=inputs, public=public, files=files, **more
            )


def inputs_in_words(shares: tuple[float, float], of: str) -> str:
    """Return how far apart the inputs are."""
    return f"Inputs: {shares[0]:.1%} of their variance is between {of}; of a random split about {shares[1]:.1%}."


LOCAL = (
    " Each client's features are standardised by its own rows (scale: local), which takes their differences away; the "
    "columns below are in the file's units."
)
COLUMNS = (
    "Effect: 0 alike to 1 apart; epsilon squared of Kruskal-Wallis for numbers, Cramer's V for categories. p: that all "
    "clients have one distribution, not adjusted for several columns; of many samples it is small for differences that do "
    "not matter."
)


def columns_of(data: Any, split: str) -> list[Any]:
    """Return what is known of the columns of a table; nothing of other data."""
    from fedlightning.datamodules.partition_report import describe_columns

    names = getattr(data, "columns", None)
    return describe_columns(data, names, split, getattr(data, "group", None) or None) if isinstance(names, list) else []


def columns_table(columns: list[Any]) -> Table:
    """Return a table of columns: effect, p, and the lowest and highest client's missing share and median."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for title in ("column", "test", "effect", "p", "missing", "median, or commonest word, by client"):
        table.add_column(title, justify="right" if title in ("effect", "p", "missing") else "left")
    for column in columns:
        gaps = [line["missing"] for line in column.clients if line["samples"]]
        middle = [line["median"] for line in column.clients if line.get("median") is not None]
        words = list(dict.fromkeys(line["most"] for line in column.clients if line.get("most")))
        low, high = (min(gaps), max(gaps)) if gaps else (0.0, 0.0)
        table.add_row(
            column.name,
            column.test or "none: one value, or texts",
            "-" if column.effect is None else f"{column.effect:.3f}",
            "-" if column.p is None else f"{column.p:.2g}",
            f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}",
            f"{min(middle):.4g} to {max(middle):.4g}" if middle else ", ".join(words[:5]),
        )
    return table


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        sheets.write_table(file, list(dict.fromkeys(key for row in rows for key in row)), rows)


def partition_table(report: Any, width: int, rows: str = "client") -> Table:
    """Return a table of clients or windows with samples, distance to all labels and (if they fit) classes as columns."""
    cells = max(len(str(report.counts.max())), *(len(name) for name in report.classes)) + 2
    fits = 30 + cells * len(report.classes) <= max(width, 80) and len(report.classes) > 1
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0) if fits else (0, 1))
    table.add_column(rows, no_wrap=True)
    table.add_column("samples", justify="right")
    by_class = len(report.classes) > 1
    for name in ("TV", *(report.classes if fits else ["classes held", "largest class"])) if by_class else ():
        table.add_column(name, justify="right")
    for client, size, distance, counts in zip(
        report.client_ids, report.sizes.tolist(), report.total_variation.tolist(), report.counts, strict=True
    ):
        largest = report.classes[int(counts.argmax())]
        cells_of_client = [str(count) if count else "." for count in counts.tolist()]
        brief = [str(int((counts > 0).sum())), f"{largest} ({counts.max() / max(1, size):.0%})"]
        table.add_row(
            client, str(size), *([f"{distance:.3f}", *(cells_of_client if fits else brief)] if by_class else [])
        )
    return table
