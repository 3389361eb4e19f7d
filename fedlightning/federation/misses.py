"""What clients missed in a round, told once: failures, visits without a real step, models that could not be scored."""

from __future__ import annotations

from fedlightning.errors import warn
from fedlightning.federation.failures import FailurePolicy
from fedlightning.federation.server import Server
from fedlightning.federation.stages import ScoringError
from fedlightning.messages import Update
from fedlightning.scoring.rows import not_scored


def tell_of_misses(server: Server, updates: list[Update], policy: FailurePolicy) -> None:
    """Warn of clients that contributed nothing, or could not be evaluated, with the reason."""
    for update in updates:
        if update.left_out:
            continue
        if update.error is not None:
            server.note_failure(update.client, update.error)
        elif update.steps == 0 and update.skipped:
            warn(
                f"Round {server.round + 1}: client '{update.client}' took no real step, so its weight is 0: "
                f"{update.skipped} had no gradient, or were skipped by the gradient scaler."
            )
        for stage, data, split, reason in update.gaps:
            missed = not_scored(update.client, stage, data, split, reason)
            policy.stop_at(update.client, missed, f"Round {server.round + 1}")
            server.note_failure(update.client, missed, stage)
    gaps = [(update.client, gap) for update in updates for gap in update.gaps if gap[2] != "train"]
    if gaps and not any(update.evaluations for update in updates):
        client, (stage, _, _, reason) = gaps[0]
        raise ScoringError(f"No model could be scored at stage {stage}; client '{client}': {reason}")
