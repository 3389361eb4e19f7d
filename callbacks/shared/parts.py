"""Other callbacks beside methods whose clients hold parts of the server's model."""

from __future__ import annotations

from fedlightning.algorithm import Extra, FederatedCallback, Setup


def refuse_whole_models(callback: FederatedCallback, other: FederatedCallback, setup: Setup) -> None:
    """Refuse another callback that would take a client's part of the model for the whole.

    Args:
        callback: The callback whose clients hold parts of the model, and which has a mean of its own.
        other: Another callback of the run.
        setup: The federation before round 1.

    Raises:
        ValueError: With the reason.
    """
    if whole_values(other, setup) or other.claims("plan_round"):
        why = "sends values shaped as the full model" if whole_values(other, setup) else "plans rounds of its own"
        raise ValueError(f"{other.key} {why}, but {callback.key}'s clients hold parts of it. Remove one of them.")
    if other.takes_part and other.claims("on_reduced"):
        raise ValueError(
            f"{other.key} corrects the mean of whole models, but {callback.key} has a mean of its own for every element. "
            "Remove one of them."
        )


def whole_values(other: FederatedCallback, setup: Setup) -> bool:
    """Return whether a callback sends values shaped as the model's entries, such as control variates."""
    wire = other.wire(setup.module)
    forms = [Extra.of(spec).form for spec in (*wire.down.values(), *wire.up.values())]
    specs = [form for form in forms if isinstance(form, str)]
    return bool({"parameters", "state", "states"}.intersection(specs))
