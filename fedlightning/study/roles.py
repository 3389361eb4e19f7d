"""Baseline roles of runs, known by the callbacks of a run, or else by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlightning.study.finished_runs import Run

ROLES = {"siloed": "Local", "fedavg": "FedAvg", "finetuned": "LocalAdaptation", "central": "Central"}
"""Role in a comparison -> name of the catalogue's algorithm that plays it."""
NEEDED = ("siloed", "fedavg")
"""Roles that incentive measures are taken against."""
_OTHER_NAMES = {
    "siloed": ("local", "siloed", "silo"),
    "fedavg": ("fedavg",),
    "finetuned": ("localadaptation", "finetuning", "finetuned"),
    "central": ("central", "centralised", "centralized"),
}


def role(run: Run) -> str | None:
    """Return the baseline role of a run, or `None`.

    The roles are `"siloed"`, `"fedavg"`, `"finetuned"` (FedAvg, then local adaptation) and `"central"`. A run has a role
    if it uses that algorithm alone: FedAvg with a proximal term is not a FedAvg baseline. Checkpoints and diagnostics of
    this package do not count as algorithms; every callback from elsewhere does.

    Example:
        >>> role(Run("mine", 0, None, {"callbacks": {"FedAvg": {}, "LocalCheckpoint": {}}}))
        'fedavg'
        >>> role(Run("mine", 0, None, {"callbacks": {"FedProx": {"mu": 0.1}}})) is None
        True
    """
    if "callbacks" not in run.summary:
        plain = run.name.lower().replace("-", "").replace("_", "").replace(" ", "")
        return next((name for name, words in _OTHER_NAMES.items() if plain in words), None)
    acting = set(acting_callbacks(run.summary))
    if acting <= {ROLES["fedavg"]}:
        return "fedavg"  # with no algorithm named, the core's own round is FedAvg
    acting -= {ROLES["fedavg"]}
    return next((name for name, algorithm in ROLES.items() if acting == {algorithm}), None)


def acting_callbacks(summary: Mapping[str, Any]) -> list[str]:
    """Return the callbacks of a run that are algorithms: all but our checkpoints and diagnostics."""
    from fedlightning import callbacks
    from fedlightning.catalogue import ALGORITHMS

    onlookers = set(callbacks.__all__) - {row.name for row in ALGORITHMS}
    return [key for key in summary.get("callbacks", {}) if key not in onlookers]
