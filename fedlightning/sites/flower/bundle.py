"""The app bundle that Flower wants for a run: fixed, without content, and known to every site by its hash."""

from __future__ import annotations

import hashlib

PYPROJECT = """\
[build-system]
requires = []

[project]
name = "fedlightning"
version = "1.0.0"
description = "Messages of FedLightning"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedlightning"

[tool.flwr.app.components]
serverapp = "shim:server"
clientapp = "shim:client"

[tool.flwr.app.config]
"""
SHIM = """\
raise RuntimeError(
    "This app only carries messages of FedLightning, and is executed nowhere. See `fedlightning serve`."
)
"""


def bundle() -> tuple[bytes, str]:
    """Return the bundle and its hash."""
    from flwr.cli.build import build_fab_from_files

    content, _ = build_fab_from_files({"pyproject.toml": PYPROJECT.encode(), "shim.py": SHIM.encode()})
    return content, hashlib.sha256(content).hexdigest()
