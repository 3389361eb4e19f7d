"""What a person sees while a federation runs: rounds, clients, the latest scores, the time left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedlightning.contract.messages import Update
from fedlightning.scores.rows import Row
from fedlightning.server.parts import Part

if TYPE_CHECKING:
    from fedlightning.server.federation import Federation


class RichProgress(Part):
    """Two bars, rounds and the visits of the present round, with the last validation score beside them.

    Without a terminal (a log file, CI) it prints one line for a round instead. Outside of :meth:`around` it shows nothing.

    Args:
        max_rounds: Rounds of the run.
    """

    def __init__(self, max_rounds: int) -> None:
        self.max_rounds = max_rounds
        self.console: Console | None = None
        self.bars: Progress | None = None
        self.rounds: Any = None
        self.visits: Any = None
        self._rows: Sequence[Row] = ()

    @contextmanager
    def around(self, federation: Federation) -> Iterator[None]:
        self.console = Console(stderr=True)
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
        try:
            yield
        finally:
            if self.bars is not None:
                self.bars.stop()
            self.bars = self.console = None

    def on_round_start(self, federation: Federation) -> None:
        if self.bars is not None:
            self.bars.update(self.rounds, completed=federation.server.round)
            self.bars.reset(self.visits, total=federation.loop.visits(federation.server), scores="")

    def on_visit_end(self, update: Update) -> None:
        if self.bars is not None:
            self.bars.update(self.visits, advance=1, scores=f"client {update.client}")

    def on_round_scored(self, federation: Federation, rows: Sequence[Row], updates: Sequence[Update]) -> None:
        self._rows = rows

    def on_round_end(self, federation: Federation) -> None:
        round = federation.server.round
        text = score_line(round, self._rows)
        if self.bars is not None:
            self.bars.update(self.rounds, completed=round + 1, scores=text)
        elif self.console is not None:
            self.console.print(f"round {round + 1}/{self.max_rounds}  {text}", highlight=False, soft_wrap=True)


def score_line(round: int, rows: Sequence[Row]) -> str:
    """Two mean local validation scores of the round, at the first stage that has them."""
    now = [row for row in rows if row.round == round + 1 and row.data == "local" and row.split == "val"]
    for stage in ("G", "L1", "L2"):
        metrics: dict[str, list[float]] = {}
        for row in now:
            if row.stage == stage:
                metrics.setdefault(row.metric, []).append(row.value)
        shown = [text for name, values in metrics.items() if (text := _mean_text(name, values))][:2]
        if shown:
            return f"{stage}: " + "  ".join(shown)
    return ""


def _mean_text(name: str, values: Sequence[float]) -> str:
    """Return a metric with its mean over the clients that have one; empty if none has."""
    defined = [value for value in values if value == value]
    if not defined:
        return ""
    suffix = "" if len(defined) == len(values) else f" ({len(defined)} of {len(values)} clients)"
    return f"{name} {sum(defined) / len(defined):.4f}{suffix}"
