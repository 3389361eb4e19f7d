"""Which runs are baselines: told by the callbacks they were made with, or else by their names."""

from __future__ import annotations

from fedlightning.study.runs import Run

ROLES = {"siloed": "Local", "fedavg": "FedAvg", "finetuned": "LocalAdaptation", "central": "Central"}
"""Role in a comparison -> the catalogue's algorithm that plays it."""
_OTHER_NAMES = {
    "siloed": ("local", "siloed", "silo"),
    "fedavg": ("fedavg",),
    "finetuned": ("localadaptation", "finetuning", "finetuned"),
    "central": ("central", "centralised", "centralized"),
}


def role(run: Run) -> str | None:
    """``"siloed"``, ``"fedavg"``, ``"finetuned"`` (FedAvg, then local adaptation), ``"central"``, or ``None``.

    A run plays a role if its algorithm is that one alone: FedAvg with a proximal term is no FedAvg baseline. Callbacks
    that only watch or select (checkpoints, diagnostics) do not count, a callback that is not ours does.
    """
    if "callbacks" not in run.summary:
        plain = run.name.lower().replace("-", "").replace("_", "").replace(" ", "")
        return next((name for name, words in _OTHER_NAMES.items() if plain in words), None)
    acting = {key for key in run.summary["callbacks"] if key not in _onlookers()}
    if acting <= {ROLES["fedavg"]}:
        return "fedavg"  # with no algorithm named, the core's own round is FedAvg
    acting -= {ROLES["fedavg"]}
    return next((name for name, algorithm in ROLES.items() if acting == {algorithm}), None)


def _onlookers() -> set[str]:
    """Callbacks of ours that are no algorithm: checkpoints and diagnostics."""
    from fedlightning import callbacks
    from fedlightning.catalogue import ALGORITHMS

    return set(callbacks.__all__) - {row.name for row in ALGORITHMS}
