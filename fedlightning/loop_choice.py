"""Which local loop a visit uses, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from fedlightning.fast import refusals as fast_refusals

if TYPE_CHECKING:
    from fedlightning.evaluation.scoring import Scorer
    from fedlightning.fit import LocalSettings
    from fedlightning.hooks import CallbackList


class LoopChoice:
    """Chooses between the loops ``fast`` and ``trainer`` before training; ``auto`` says once why it is not fast.

    Args:
        settings: the run's settings; callbacks: its federated callbacks.
        scorer: holds a Trainer made with the run's arguments.
    """

    def __init__(self, settings: LocalSettings, callbacks: CallbackList, scorer: Scorer) -> None:
        self._settings, self._callbacks, self._scorer = settings, callbacks, scorer
        self._of_run: str | None = None
        self._asked = False
        self.reason: str | None = "local_loop='trainer'" if settings.local_loop == "trainer" else None

    def kit(self, module: LightningModule, loader: Any) -> Trainer | None:
        """What the fast loop needs for a fit of ``module`` on ``loader``; ``None``: use Lightning's Trainer.

        Raises:
            ValueError: where ``local_loop="fast"`` does not apply; it says why.
        """
        settings = self._settings
        if settings.local_loop == "trainer":
            return None
        if not self._asked:
            everything = [*self._callbacks, *settings.callbacks]
            self._of_run = fast_refusals.of_run(settings.trainer_arguments, everything, self._scorer.trainer)
            self._asked = True
        limit, keeps = settings.trainer_arguments.get("limit_train_batches"), settings.optimizer_state == "keep"
        reason = self._of_run or fast_refusals.of_visit(module, loader, limit, keeps)
        if reason is None:
            return self._scorer.trainer
        self._explain(reason)
        return None

    def give_up(self, reason: str) -> None:
        """The fast loop met ``reason`` while it ran: the rest of the run does without it."""
        self._of_run, self._asked = reason, True
        self._explain(reason)

    @property
    def used(self) -> str:
        """For a run's summary: the loop that trained, and why it was not the fast one."""
        return "fast" if self.reason is None else f"trainer ({self.reason})"

    def _explain(self, reason: str) -> None:
        if self._settings.local_loop == "fast":
            raise ValueError(f"local_loop='fast' cannot be used: {reason}. Use local_loop='auto' or 'trainer'.")
        if self.reason is None:
            rank_zero_info(f"Local training uses Lightning's Trainer, not the fast loop: {reason}.")
            self.reason = reason
