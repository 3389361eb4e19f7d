"""`fedlightning fit | validate | test | predict | partition`."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedlightning.config.errors import InputError, explain
from fedlightning.config.parsing import FederatedCLI
from fedlightning.run.files import is_writer
from fedlightning.study.table import print_results
from fedlightning.trainer import FederatedTrainer


def run(command: str, words: Sequence[str]) -> int:
    """Parse and carry out one command."""
    words = with_run_config(command, list(words))
    cli = cli_class(command)(command, words)
    getattr(cli, command)(**cli.options())
    return 0


def cli_class(command: str) -> type[Commands]:
    """The class that has `command` as a method."""
    return PartitionCommand if command == "partition" else Commands


class Commands(FederatedCLI):
    """What can be done with a model, data and a trainer."""

    trainer: FederatedTrainer  # type: ignore[assignment]

    def fit(self, resume: str | None = None, test_after_fit: bool = True) -> None:
        """Train a federation, test it and show the results.

        The run's files go to <default_root_dir>/<name>/version_N (by default runs/federation/version_0): config.yaml,
        metrics.csv, summary.json and checkpoints.

        Args:
            resume: go on with an interrupted run: "last" (the run of this name that was saved last) or a run's folder,
                whose config.yaml is then read unless --config is given.
            test_after_fit: score all models on test data in the end, where the data has any.
        """
        console = _console()
        try:
            self.trainer.fit(self.model, self.datamodule, resume=_absolute(resume))
        except Exception as error:
            if explain(error) is not None:
                _leave_nothing(self.trainer)
            raise
        results = self.trainer.results
        has_tests = any(self.datamodule.num_samples(client, "test") for client in self.datamodule.client_ids)
        if test_after_fit and has_tests:
            self.trainer.test(checkpoint="all")
            results = self.trainer.results
        if not is_writer():
            return
        splits = {row["split"] for row in results}
        print_results(results, "test" if "test" in splits else "val", console)
        if self.trainer.run is not None:
            console.print(f"\nRun: {_shown(self.trainer.run.path)}", soft_wrap=True, highlight=False)

    def validate(self, run: str, checkpoint: str = "all") -> None:
        """Score a finished or interrupted run on validation data.

        Args:
            run: the run's folder, or the folder of its name (then the newest version).
            checkpoint: which models: "latest", "best_local", "best_global" or "all".
        """
        self._evaluate(run, checkpoint, "val")

    def test(self, run: str, checkpoint: str = "all") -> None:
        """Score a finished or interrupted run on test data. The scores go to its metrics.csv and summary.json.

        Args:
            run: the run's folder, or the folder of its name (then the newest version).
            checkpoint: which models: "latest", "best_local", "best_global" or "all".
        """
        self._evaluate(run, checkpoint, "test")

    def predict(
        self, run: str, client: str | None = None, checkpoint: str = "latest", out: str = "predictions.pt"
    ) -> None:
        """Write the predictions of one client's model on its test data, or of the global model on everybody's.

        Args:
            run: the run's folder, or the folder of its name (then the newest version).
            client: whose model; default: the global one.
            checkpoint: which model: "latest", "best_local" or "best_global".
            out: file for torch.load: what predict_step returned for every batch, concatenated where it is a tensor.
        """
        import torch

        self.trainer.restore(self.model, self.datamodule, find_run(run))
        if client is not None and client not in self.datamodule.client_ids:
            raise InputError(f"There is no client '{client}'. Clients: {', '.join(self.datamodule.client_ids[:20])}.")
        batches: Any = self.trainer.predict(client=client, checkpoint=checkpoint)
        if batches and all(isinstance(batch, torch.Tensor) for batch in batches):
            batches = torch.cat(batches)
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        torch.save(batches, out)
        shape = f" of shape {tuple(batches.shape)}" if isinstance(batches, torch.Tensor) else ""
        _console().print(f"Predictions{shape}: {out}", soft_wrap=True, highlight=False)

    def _evaluate(self, run: str, checkpoint: str, split: Literal["val", "test"]) -> None:
        folder = find_run(run)
        self.trainer.restore(self.model, self.datamodule, folder)
        score = self.trainer.test if split == "test" else self.trainer.validate
        results = score(checkpoint=checkpoint)
        if is_writer():
            console = _console()
            print_results(results, split, console)
            rounds = f"after {self.trainer.rounds_done} of {self.trainer.max_rounds} rounds"
            console.print(f"\nRun: {_shown(folder)} ({rounds})", soft_wrap=True, highlight=False)


class PartitionCommand(Commands):
    """Needs data only."""

    needs_model = False

    def instantiate_classes(self) -> None:
        """Make the data alone: a whole training configuration may be given."""
        self.config.model, self.config.trainer.callbacks, self.config.trainer.logger = None, None, None
        super().instantiate_classes()

    def partition(self, out: str = "partition", split: Literal["train", "val", "test"] = "train") -> None:
        """Show which client gets which samples: a table, a picture and a CSV file.

        Args:
            out: folder for partition.csv (all splits) and partition.png (the split shown).
            split: which samples to show.
        """
        from fedlightning.arguments import federated_data
        from fedlightning.datamodules import describe, plot_partition

        data = federated_data(self.datamodule, None, None, None)
        data.prepare_data()
        data.setup("fit")
        report = describe(data, split=split)
        console = _console()
        console.print(f"Samples of each client by class ({split} split)", style="bold")
        console.print(partition_table(report, console.width))
        console.print(
            f"{len(report.client_ids)} clients, {int(report.sizes.sum())} samples, the smallest client has "
            f"{report.min_size}.\nTV: total variation between a client's labels and all labels, 0 equal to 1 disjoint; "
            f"mean {report.mean_total_variation:.3f}.",
            highlight=False,
        )
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        plot_partition(report).savefig(folder / "partition.png", dpi=150)
        with (folder / "partition.csv").open("w", newline="") as file:
            rows = [
                {"split": name} | row for name in ("train", "val", "test") for row in describe(data, split=name).rows()
            ]
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
        console.print(
            f"\nFiles: {folder / 'partition.csv'}, {folder / 'partition.png'}", soft_wrap=True, highlight=False
        )


def partition_table(report: Any, width: int) -> Table:
    """Clients as rows; samples, distance to all labels and, where they fit, classes as columns."""
    cells = max(len(str(report.counts.max())), *(len(name) for name in report.classes)) + 2
    fits = 30 + cells * len(report.classes) <= max(width, 80) and len(report.classes) > 1
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0) if fits else (0, 1))
    table.add_column("client", no_wrap=True)
    table.add_column("samples", justify="right")
    table.add_column("TV", justify="right")
    for name in report.classes if fits else ["classes held", "largest class"]:
        table.add_column(name, justify="right")
    for client, size, distance, counts in zip(
        report.client_ids, report.sizes.tolist(), report.total_variation.tolist(), report.counts, strict=True
    ):
        largest = report.classes[int(counts.argmax())]
        by_class = [str(count) if count else "." for count in counts.tolist()]
        table.add_row(
            client,
            str(size),
            f"{distance:.3f}",
            *(by_class if fits else [str(int((counts > 0).sum())), f"{largest} ({counts.max() / max(1, size):.0%})"]),
        )
    return table


# -- runs on disk ------------------------------------------------------------------------------------------------------
def with_run_config(command: str, words: list[str]) -> list[str]:
    """Read the run's own `config.yaml` first; other words and files override it."""
    if any(word in ("-h", "--help") for word in words):
        return words
    option = "--run" if command in ("validate", "test", "predict") else "--resume" if command == "fit" else None
    given = _value_of(option, words) if option else None
    if option == "--run" and given is None:
        raise InputError("it needs the folder of a run: --run runs/NAME/version_N.")
    if given is None or (option == "--resume" and (given in ("last", "null") or _value_of("--config", words))):
        return words
    return ["--config", str(find_run(given) / "config.yaml"), *words]


def find_run(path: str) -> Path:
    """The folder of a run: `path` itself, or the newest version in it.

    Raises:
        InputError: there is no run.
    """
    folder = Path(path).resolve()
    if (folder / "config.yaml").exists():
        return folder
    versions = sorted(folder.glob("*/config.yaml"), key=lambda file: file.stat().st_mtime)
    if versions:
        return versions[-1].parent
    what = "has no config.yaml" if folder.exists() else "does not exist"
    raise InputError(f"'{path}' {what}. A run lies in a folder such as runs/quickstart/version_0.")


def _value_of(option: str, words: Sequence[str]) -> str | None:
    for index, word in enumerate(words):
        if word.startswith(f"{option}=") or (option == "--config" and word.startswith("-c=")):
            return word.partition("=")[2]
        if (word == option or (option == "--config" and word == "-c")) and index + 1 < len(words):
            return words[index + 1]
    return None


def _absolute(resume: str | None) -> str | Path | None:
    return resume if resume in (None, "last") else find_run(str(resume))


def _leave_nothing(trainer: Any) -> None:
    """After bad input: remove the folder of a run that holds no round."""
    if trainer.run is None or trainer.rounds_done > 0 or not is_writer():
        return
    folder: Path = trainer.run.path
    if folder.exists() and {path.name for path in folder.iterdir()} <= {"config.yaml"}:
        (folder / "config.yaml").unlink(missing_ok=True)
        for empty in (folder, folder.parent, folder.parent.parent):
            if any(empty.iterdir()):
                break
            empty.rmdir()


def _shown(path: Path) -> Path:
    return path.resolve().relative_to(Path.cwd()) if path.resolve().is_relative_to(Path.cwd()) else path


def _console() -> Console:
    """The terminal; 100 columns where there is none to ask."""
    return Console() if sys.stdout.isatty() else Console(width=100)
