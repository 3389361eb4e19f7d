"""What ClientDP and SampleDP have in common: types of arguments, what they withhold, and what they say of the rest."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fedlightning.algorithm import Cover, Outgoing, Range

Delta = Annotated[float, Range("(0, 1)")]
Accountant = Literal["rdp", "prv"]
Scores = Literal["withheld", "in the clear"]
UNCOUNTED = "accounts for updates only: sums before round 1 would leave without noise and stand in no ledger."
"""Why statistics before round 1 are refused."""


def refuse_no_noise(owner: str, noise_multiplier: float | None, epsilon: float | None) -> None:
    """Refuse options from which no noise follows.

    Raises:
        ValueError: If neither is given.
    """
    if noise_multiplier is None and epsilon is None:
        raise ValueError(f"{owner} has neither noise_multiplier nor epsilon. Give one of them, or both.")


def new_secret(noise_seed: int | None, whose: str = "") -> str:
    """Return a secret of the operating system's, or for tests one that anybody can know."""
    return secrets.token_hex(16) if noise_seed is None else f"seed {noise_seed}{f' {whose}' if whose else ''}"


def known_noise(owner: str) -> str:
    """Return the warning that a run with a fixed seed is not private."""
    return f"{owner}(noise_seed=...): whoever knows the seed can subtract the noise. This run is not private."


def cover_of(item: Outgoing, noised: Sequence[str], scores: Scores) -> Cover:
    """Return how an item is covered.

    Args:
        item: What leaves.
        noised: Kinds of items that get noise, or keys of callbacks whose extras do.
        scores: The option of the callback.
    """
    if item.kind in noised or item.owner in noised:
        return "noised"
    return scores if item.kind == "scores" else "withheld" if item.kind == "logged" else "in the clear"


def told_of_items(owner: Any, items: Sequence[Outgoing]) -> dict[str, list[str]]:
    """Return by cover what leaves clients in a run, for `privacy.json`."""
    found: dict[str, list[str]] = {"noised": [], "withheld": [], "in the clear": []}
    for item in items:
        found[owner.covers(item)].append(str(item))
    return {name.replace(" ", "_"): texts for name, texts in found.items()}


def clear_in_words(owner: Any, items: Sequence[Outgoing]) -> str:
    """Return the end of the sentence that says what a run has spent: what epsilon does not count."""
    clear = told_of_items(owner, items)["in_the_clear"]
    return f"Epsilon does not count what is in the clear: {', '.join(clear)}." if clear else ""
