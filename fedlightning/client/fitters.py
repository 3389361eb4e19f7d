"""Who trains a client's module: a :class:`Fitter`. Lightning's Trainer is one, and others attach that give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import rank_zero_info

from fedlightning.client.client import Client
from fedlightning.client.settings import LocalSettings
from fedlightning.client.trainer_context import TrainerContext
from fedlightning.client.visit_callback import VisitCallback
from fedlightning.contract import Phase


@dataclass(frozen=True)
class FitJob:
    """What a fitter needs for one fit.

    Attributes:
        client: Its module is trained in place.
        visit: Counts epochs and steps, and ends the fit.
        callbacks: All callbacks of the fit in Lightning's order, `visit` among them.
        settings: How every client trains.
        loader: Training batches.
        start_sampler: Called before the first batch, with the epochs before, the rank and the number of ranks.
        inside: What the trainer shows.
        phase: The part of the visit.
        val_loader: Batches to validate on; `None`: the visit does not.
    """

    client: Client
    visit: VisitCallback
    callbacks: list[Callback]
    settings: LocalSettings
    loader: Any
    start_sampler: Callable[[int, int, int], None]
    inside: TrainerContext
    phase: Phase
    val_loader: Any


class Fitter(Protocol):
    """A local loop. It does what Lightning's Trainer does, bit for bit, and refuses what it cannot."""

    @property
    def name(self) -> str:
        """Its name in `local_loop` and in the summary of a run."""

    def refusal(self, module: LightningModule, loader: Any) -> str | None:
        """Return why it cannot train a module on a loader; `None`: it can."""

    def fit(self, job: FitJob) -> Any:
        """Train, and return the Trainer that did it, or what stands for it."""

    def release(self, trainer: Any) -> None:
        """Cut the references of a finished Trainer to the client's model."""


class FitterChoice:
    """Chooses the fitter of each fit, and reports once why it is not the first.

    Args:
        asked: `local_loop`: the name of a fitter, or `"auto"`.
        fitters: In the order in which they are asked; the last is Lightning's Trainer, which takes everything.

    Attributes:
        reason: Why the first one is not used; `None` if it is.
    """

    def __init__(self, asked: str, fitters: Sequence[Fitter]) -> None:
        names = [fitter.name for fitter in fitters]
        if asked not in ("auto", *names):
            raise ValueError(f"local_loop={asked!r} cannot be used: no such loop is attached, only {', '.join(names)}.")
        self._asked, self.last = asked, fitters[-1]
        self._fitters = [fitter for fitter in fitters if asked in ("auto", fitter.name) or fitter is self.last]
        self.reason: str | None = f"local_loop={asked!r}" if asked == self.last.name else None

    def choose(self, module: LightningModule, loader: Any) -> Fitter:
        """Return who fits a module on a loader."""
        reasons = []
        for fitter in self._fitters[:-1]:
            reason = fitter.refusal(module, loader)
            if reason is None:
                return fitter
            reasons.append(reason)
        if reasons:
            self._explain(reasons[0])
        return self.last

    def give_up(self, reason: str) -> None:
        """Train by Lightning's Trainer for the rest of the run, because another fitter met `reason` while it ran."""
        self._explain(reason)
        self._fitters = [self.last]

    @property
    def used(self) -> str:
        """Fitter that trained, with the reason if it was not the first one; for the run's summary."""
        return self._fitters[0].name if self.reason is None else f"{self.last.name} ({self.reason})"

    def _explain(self, reason: str) -> None:
        first = self._fitters[0]
        if first is self.last:
            return
        if self._asked == first.name:
            raise ValueError(
                f"local_loop={first.name!r} cannot be used: {reason}. Use local_loop='auto' or {self.last.name!r}."
            )
        if self.reason is None:
            rank_zero_info(f"Local training uses Lightning's Trainer, not the {first.name} loop: {reason}.")
            self.reason = reason
