"""Scores of a run: in memory, in `metrics.csv`, and in loggers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.loggers import Logger

from fedlightning.messages import Update
from fedlightning.run.files import is_writer
from fedlightning.run.folder import RunFolder
from fedlightning.scoring.results import Row, RowTable, summarise


@dataclass
class Recorder:
    """Keeps a run's scores in memory and, in the process that writes, on disk and in loggers.

    Attributes:
        run: The run's folder; `None` where nothing is written.
        loggers: Lightning loggers of the writing process.
        rows: Every score so far.
        results: Rows of `summary.json`, brought up to date by :meth:`choose_results`.
        summary: All of `summary.json`, brought up to date by :meth:`write_summary`.
    """

    run: RunFolder | None = None
    loggers: list[Logger] = field(default_factory=list)
    rows: RowTable = field(default_factory=RowTable)
    results: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    _known: set[tuple[int | str, ...]] = field(default_factory=set, repr=False)  # addresses that may come again
    _before: set[tuple[int | str, ...]] = field(default_factory=set, repr=False)
    _newest: int = field(default=0, repr=False)

    @property
    def writes(self) -> bool:
        """Whether this process writes files."""
        return self.run is not None and is_writer()

    def start_with(self, rows: list[Row]) -> None:
        """Take over the scores of a run that goes on, or that is evaluated again."""
        self.rows.extend(rows)
        self._known = {row.address for row in rows}
        self._newest = max((row.round for row in rows), default=0)

    def record(self, rows: list[Row]) -> None:
        """Add scores; those that are there already (a repeated test) are not added twice."""
        if rows and min(row.round for row in rows) > self._newest:  # a new round: only the one before may come again
            self._before, self._known = self._known, set()
        rows = [row for row in rows if row.address not in self._known and row.address not in self._before]
        self._known.update(row.address for row in rows)
        self._newest = max((row.round for row in rows), default=self._newest)
        self.rows.extend(rows)
        if self.run is not None and is_writer():
            self.run.write_rows(rows)
        means = {
            f"{row['split']}/{row['stage']}/{row['data']}/{row['metric']}": row["mean"]
            for row in summarise(row for row in rows if row.split != "test")
            if row["mean"] is not None
        }
        for logger in self.loggers if means else ():
            logger.log_metrics(means, step=rows[0].round)

    def log_clients(self, updates: Iterable[Update]) -> None:
        """Write what was logged inside clients to the loggers, as `client/<id>/<name>` at the client's own steps."""
        for update in updates if self.loggers else ():
            place = f"client/{update.client}/"
            for log in update.logs:
                values = {f"{place}{name}": value for name, value in log.values.items()}
                for logger in self.loggers:
                    if log.method == "metrics":
                        logger.log_metrics(values | {f"{place}round": float(update.round)}, step=log.step)
                    elif (call := getattr(getattr(logger, "experiment", None), log.method, None)) is not None:
                        for name, value in values.items():
                            call(name, value, log.step)

    def choose_results(self, rounds: int) -> list[dict[str, Any]]:
        """Summarise the newest scores of every stage, and all scores of selected models.

        Args:
            rounds: Finished rounds.
        """
        latest = [row for row in self.rows if row.checkpoint == "latest" and row.round >= rounds]
        newest = {row.stage: row.round for row in sorted(latest, key=lambda row: row.round)}
        chosen = [row for row in latest if row.round == newest[row.stage]]
        chosen += [row for row in self.rows if row.checkpoint != "latest"]
        self.results = summarise(row for row in chosen if row.split != "train")
        return self.results

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Keep the summary, and write `summary.json`."""
        self.summary = summary
        if self.run is not None and is_writer():
            self.run.write_summary(summary)

    def close(self) -> None:
        """Let the loggers write what they hold."""
        for logger in self.loggers:
            logger.finalize("success")
