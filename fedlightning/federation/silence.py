"""Steps that keep their scores to themselves: said, where a user would look for numbers."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.utilities.model_helpers import is_overridden

from fedlightning.errors import warn
from fedlightning.federation.engine import Engine
from fedlightning.federation.server import Server
from fedlightning.scoring.rows import Row
from fedlightning.wrappers import user_class


def tell_of_silence(server: Server, engine: Engine, split: str, rows: Sequence[Row], asked: bool = True) -> None:
    """Warn of a step that gives no score, though models were evaluated with it.

    Args:
        server: Has the clients and the template.
        engine: Knows their data.
        split: Split that was evaluated.
        rows: What was found.
        asked: Whether the user has asked for scores, so that a module without the step is told of as well.
    """
    known = engine.runner.described
    has_data = any(known.num_samples(client, split) for client in server.evaluated)
    if not has_data or any(row.split == split for row in rows):
        return
    template = server.blueprint.template
    tests = split == "test" and is_overridden("test_step", template)
    step, name = "test_step" if tests else "validation_step", user_class(template).__name__
    if not asked and not is_overridden(step, template):
        return
    why = (
        f"{name}.{step} logs nothing and returns no loss"
        if is_overridden(step, template)
        else f"{name} has neither test_step nor validation_step"
    )
    warn(
        f"There are no scores on {split} data: {why}. Log them in {step} or on_{step.removesuffix('_step')}_epoch_end by "
        "self.log(name, value); what a module keeps to itself, prints or logs with logger=False cannot be seen."
    )
