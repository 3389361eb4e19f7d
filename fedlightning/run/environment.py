"""What a run is carried out with: versions of what its numbers depend on."""

from __future__ import annotations

import platform
from functools import cache
from importlib import metadata


def versions() -> dict[str, str]:
    """Versions of what numbers depend on."""
    packages = ("fedlightning", "torch", "lightning", "torchmetrics", "numpy")
    found = {package: _version(package) for package in packages}
    return {"python": platform.python_version(), **{name: version for name, version in found.items() if version}}


@cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
