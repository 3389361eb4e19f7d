"""Scores of a run: in memory, in `metrics.csv`, and in loggers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from fedlightning.contract.messages import Update
from fedlightning.run.folder import METRICS_MARK, RunFolder
from fedlightning.scores.metric_names import summarise
from fedlightning.scores.rows import ADDRESS, LATEST, UNSEEN, Row, RowList, Rows, of_clients, read_part
from fedlightning.storage.files import is_writing_process, writing


class RoundLogs:
    """What loggers are given of a run's rounds. This one is of a run that has no logger."""

    def begin(self) -> None:
        """Note where the loggers stand before round 1."""

    def begun(self) -> None:
        """Forget where they stood before round 1: a saved state tells where they stand now."""

    def log(self, rows: Sequence[Row]) -> None:
        """Give every logger what it has not got of a round."""

    def mark(self) -> list[Any]:
        """Return where the loggers stand, for a saved state."""
        return []

    def reopen(self, logger_marks: list[Any], rows: Iterable[Row], rounds: int, differs: bool = False) -> None:
        """Go on from a saved state."""

    def close(self, status: str) -> None:
        """End the loggers."""


@dataclass
class Recorder:
    """Keeps a run's scores in memory and, in the process that writes, on disk and in loggers.

    Attributes:
        run: The run's folder; `None` where nothing is written.
        loggers: Lightning loggers of the writing process.
        logs: Gives the loggers every round once, over interruptions.
        rows: Every score so far.
        results: Rows of `summary.json`, brought up to date by :meth:`choose_results`.
        summary: All of `summary.json`, brought up to date by :meth:`write_summary`.
    """

    run: RunFolder | None = None
    loggers: list[Logger] = field(default_factory=list)
    logs: RoundLogs = field(default_factory=lambda: RoundLogs())
    rows: Rows = field(default_factory=RowList)
    results: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    _addresses: set[tuple[int | str, ...]] = field(default_factory=set, repr=False)  # addresses that may come again
    _before: set[tuple[int | str, ...]] = field(default_factory=set, repr=False)
    _newest: int = field(default=0, repr=False)

    @property
    def writes(self) -> bool:
        """Whether this process writes files."""
        return self.run is not None and is_writing_process()

    def start_with(self, rows: list[Row], where: tuple[int, int] | None = None) -> None:
        """Take over the scores of a run that goes on, or that is evaluated again.

        Args:
            rows: The scores.
            where: Bytes of `metrics.csv` that hold exactly these; `None` where that is not known.
        """
        self.rows.extend(rows)
        self._newest = max((row.round for row in rows), default=0)
        # only the newest rounds and selected models are scored again
        self._addresses = {row.address for row in rows if row.round >= self._newest - 1 or row.checkpoint != LATEST}
        if where is not None and rows:
            self._note_written(len(rows), where)

    def record(self, rows: list[Row]) -> None:
        """Add scores; those that are there already (a repeated test) are not added twice."""
        if rows and min(row.round for row in rows) > self._newest:  # a new round: only the one before may come again
            self._before, self._addresses = self._addresses, set()
        addresses = list(map(ADDRESS, rows))
        again = {address for address in addresses if address in self._addresses or address in self._before}
        if again:
            rows = [row for row, address in zip(rows, addresses, strict=True) if address not in again]
            addresses = [address for address in addresses if address not in again]
        self._addresses.update(addresses)
        self._newest = max((row.round for row in rows), default=self._newest)
        self.rows.extend(rows)
        if self.run is not None and is_writing_process():
            where = self.run.write_rows(rows)
            if rows:
                self._note_written(len(rows), where)
        with writing(self._log_path):
            self.logs.log(rows)

    def _note_written(self, count: int, place: tuple[int, int]) -> None:
        assert self.run is not None
        self.rows.written(count, place, partial(read_part, self.run.metrics.path))

    def log_clients(self, updates: Iterable[Update]) -> None:
        """Write what was logged inside clients to the loggers, as `client/<id>/<name>` at the client's own steps."""
        for update in updates if self.loggers else ():
            place = f"client/{update.client}/"
            for log in update.logs:
                values = {f"{place}{name}": value for name, value in log.values.items()}
                for logger in self.loggers:
                    if log.method == "metrics":
                        logger.log_metrics(values | {f"{place}round": float(update.round + 1)}, step=log.step)
                    elif (call := getattr(getattr(logger, "experiment", None), log.method, None)) is not None:
                        for name, value in values.items():
                            call(name, value, log.step)

    def choose_results(self, rounds: int, clients: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Summarise the newest scores of every stage, and all scores of selected models.

        Args:
            rounds: Finished rounds.
            clients: Clients that are scored, where it is not all: a run can have scores of more, if it was scored twice.
        """
        latest = self.rows.where(lambda model, stage, checkpoint, *rest: checkpoint == LATEST, since=rounds)
        newest: dict[tuple[str, bool], int] = {}
        for row in latest:
            kind = row.stage, row.model == UNSEEN
            newest[kind] = max(row.round, newest.get(kind, row.round))
        chosen = [row for row in latest if row.round == newest[row.stage, row.model == UNSEEN]]
        chosen += self.rows.where(lambda model, stage, checkpoint, *rest: checkpoint != LATEST)
        if clients is not None:
            chosen = of_clients(chosen, clients)
        self.results = summarise(row for row in chosen if row.split != "train")
        return self.results

    def write_config(self, text: str | None) -> None:
        """Write `config.yaml`, if there is a configuration."""
        if text is not None and self.run is not None and is_writing_process():
            self.run.write_config(text)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Keep the summary, and write `summary.json`, which says beside which `metrics.csv` it stands."""
        self.summary = summary
        if self.run is not None and is_writing_process():
            self.summary = summary | {METRICS_MARK: self.run.metrics.mark()}
            self.run.write_summary(self.summary)

    @property
    def _log_path(self) -> Path:
        return Path("a logger's file") if self.run is None else self.run.path / "logs"

    def mark(self) -> dict[str, Any]:
        """Bring scores and loggers to the disk; return how far they are, for a saved state."""
        assert self.run is not None
        with writing(self._log_path):
            return {"metrics": self.run.metrics.mark(), "loggers": self.logs.mark()}

    def reopen_logs(self, recorder_marks: Mapping[str, Any], rounds: int, differs: bool) -> None:
        """Take the loggers back to a saved state; give them the rounds that they lack.

        Args:
            recorder_marks: What :meth:`mark` returned.
            rounds: Rounds that have scores.
            differs: The next rounds will not be those that the loggers may have seen already.
        """
        if self.writes:
            with writing(self._log_path):
                self.logs.reopen(recorder_marks["loggers"], self.rows, rounds, differs)

    def close(self, status: str = "success") -> None:
        """End the loggers."""
        with writing(self._log_path):
            self.logs.close(status)
