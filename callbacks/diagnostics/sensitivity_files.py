"""The files that a run of PLayer-FL writes about its decision."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from fedlightning.callbacks.diagnostics.sensitivity_terms import Sensitivity


def write_sensitivity(
    folder: Path, total: Sensitivity, clients: Mapping[str, Sensitivity], threshold: float, split: int
) -> None:
    """Write `sensitivity.json` and `figures/sensitivity.png`.

    Example:
        >>> one = Sensitivity(["body", "head"], [10, 5], [1.0, 3.0])
        >>> write_sensitivity(Path("run"), one, {"0": one}, threshold=1.05, split=1)
        >>> json.loads(Path("run/sensitivity.json").read_text())["cumulative"]
        [1.0, 4.0]
    """
    found = total.to_dict() | {
        "threshold": threshold if math.isfinite(threshold) else None,
        "split": split,
        "clients": {client: own.sensitivity for client, own in clients.items()},
    }
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    total.plot(threshold=threshold, path=figures / "sensitivity.png", split=split)
    (folder / "sensitivity.json").write_text(json.dumps(found, indent=1))
