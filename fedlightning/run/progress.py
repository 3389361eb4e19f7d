"""What a person sees while a federation runs: rounds, clients, the latest scores, the time left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedlightning.messages import Update
from fedlightning.scoring.rows import Row


class NoProgress:
    """Shows nothing."""

    def __enter__(self) -> NoProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def round_started(self, round: int, participants: int) -> None:
        """A round begins."""

    def client_done(self, update: Update) -> None:
        """A client has answered."""

    def round_ended(self, round: int, rows: Sequence[Row]) -> None:
        """A round is over."""


class RichProgress(NoProgress):
    """Two bars, rounds and the visits of the present round, with the last validation score beside them.

    Without a terminal (a log file, CI) it prints one line for a round instead.
    """

    def __init__(self, max_rounds: int) -> None:
        self.console = Console(stderr=True)
        self.max_rounds = max_rounds
        self.bars: Progress | None = None
        self.rounds: Any = None
        self.visits: Any = None

    def __enter__(self) -> RichProgress:
        if self.console.is_terminal:
            self.bars = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[scores]}"),
                console=self.console,
                transient=True,
            )
            self.bars.start()
            self.rounds = self.bars.add_task("rounds", total=self.max_rounds, scores="")
            self.visits = self.bars.add_task("clients", total=None, scores="")
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bars is not None:
            self.bars.stop()

    def round_started(self, round: int, participants: int) -> None:
        """Start the visits' bar anew."""
        if self.bars is not None:
            self.bars.update(self.rounds, completed=round)
            self.bars.reset(self.visits, total=participants, scores="")

    def client_done(self, update: Update) -> None:
        """Advance the visits' bar."""
        if self.bars is not None:
            self.bars.update(self.visits, advance=1, scores=f"client {update.client}")

    def round_ended(self, round: int, rows: Sequence[Row]) -> None:
        """Show the round's mean validation scores."""
        text = score_line(round, rows)
        if self.bars is not None:
            self.bars.update(self.rounds, completed=round + 1, scores=text)
        else:
            self.console.print(f"round {round + 1}/{self.max_rounds}  {text}", highlight=False, soft_wrap=True)


def score_line(round: int, rows: Sequence[Row], limit: int = 2) -> str:
    """Mean local validation scores of the round, at the first stage that has them."""
    now = [row for row in rows if row.round == round + 1 and row.data == "local" and row.split == "val"]
    for stage in ("G", "L1", "L2"):
        metrics: dict[str, list[float]] = {}
        for row in now:
            if row.stage == stage:
                metrics.setdefault(row.metric, []).append(row.value)
        shown = [text for name, values in metrics.items() if (text := _mean_text(name, values))][:limit]
        if shown:
            return f"{stage}: " + "  ".join(shown)
    return ""


def _mean_text(name: str, values: Sequence[float]) -> str:
    """Return a metric with its mean over the clients that have one; empty if none has."""
    defined = [value for value in values if value == value]
    if not defined:
        return ""
    of = "" if len(defined) == len(values) else f" ({len(defined)} of {len(values)} clients)"
    return f"{name} {sum(defined) / len(defined):.4f}{of}"
