"""Examples in docstrings run, each in a fraction of a second and without leaving files behind."""

from __future__ import annotations

import doctest
import importlib
import warnings
from pathlib import Path

import pytest

from tests.test_rooms import modules

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
WITH_EXAMPLES = sorted(name for name, path in modules().items() if ">>>" in path.read_text())


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f"fedlightning.{name}" if name else "fedlightning")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = doctest.testmod(module, optionflags=FLAGS)
    assert result.attempted > 0
    assert result.failed == 0, "see the captured output"
