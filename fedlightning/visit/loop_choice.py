"""Choice of the local loop: :class:`LoopChoice`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from fedlightning.blueprint.blueprint import Blueprint
from fedlightning.visit.fast import refusals as fast_refusals


class LoopChoice:
    """Chooses the loop `fast` or `trainer` before training; `auto` reports once why it does not choose `fast`.

    Args:
        blueprint: Settings and callbacks of the run, and a Trainer made with its arguments.

    Attributes:
        reason: Reason why the fast loop is not used; `None` if it is.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint, self._settings = blueprint, blueprint.settings
        self._of_run: str | None = None
        self._asked = False
        self.reason: str | None = "local_loop='trainer'" if self._settings.local_loop == "trainer" else None

    def fast_trainer(self, module: LightningModule, loader: Any) -> Trainer | None:
        """Return the Trainer that the fast loop needs for a fit, or `None` if Lightning's loop must be used."""
        settings = self._settings
        if settings.local_loop == "trainer":
            return None
        if not self._asked:
            everything = [*self._blueprint.callbacks, *settings.callbacks]
            self._of_run = fast_refusals.of_run(settings.trainer_arguments, everything, self._blueprint.trainer)
            self._asked = True
        limit, keeps = settings.trainer_arguments.get("limit_train_batches"), settings.optimizer_state == "keep"
        reason = self._of_run or fast_refusals.of_visit(module, loader, limit, keeps)
        if reason is None:
            return self._blueprint.trainer
        self._explain(reason)
        return None

    def give_up(self, reason: str) -> None:
        """Leave the fast loop for the rest of the run, because it met `reason` while it ran."""
        self._of_run, self._asked = reason, True
        self._explain(reason)

    @property
    def used(self) -> str:
        """Loop that trained, with the reason if it was not the fast one; for the run's summary."""
        return "fast" if self.reason is None else f"trainer ({self.reason})"

    def _explain(self, reason: str) -> None:
        if self._settings.local_loop == "fast":
            raise ValueError(f"local_loop='fast' cannot be used: {reason}. Use local_loop='auto' or 'trainer'.")
        if self.reason is None:
            rank_zero_info(f"Local training uses Lightning's Trainer, not the fast loop: {reason}.")
            self.reason = reason
