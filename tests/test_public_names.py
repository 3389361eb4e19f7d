"""`dir` of the packages that users import from shows what is public, and nothing else."""

from __future__ import annotations

import importlib

import pytest

PACKAGES = {
    "fedlightning": {"__version__"},
    "fedlightning.algorithm": set(),
    "fedlightning.callbacks": set(),
    "fedlightning.callbacks.shared": set(),
    "fedlightning.datamodules": set(),
    "fedlightning.models": set(),
    "fedlightning.wrappers": set(),
}
"""Package: names that it shows beside `__all__`."""


@pytest.mark.parametrize("name", PACKAGES)
def test_dir_shows_what_is_public(name: str) -> None:
    package = importlib.import_module(name)
    assert set(dir(package)) == {*package.__all__, *PACKAGES[name]}
    assert all(hasattr(package, shown) for shown in dir(package))
