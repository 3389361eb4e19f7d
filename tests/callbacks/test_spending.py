"""The files that tell what ClientDP spends."""

from __future__ import annotations

import json
import math

import pytest

from fedlightning.callbacks.shared import spending
from fedlightning.callbacks.shared.spending import COLUMNS, releases_in, spent_by, write_spending

TOLD = {"epsilon": 1.5, "delta": 1e-3, "noise_multiplier": 2.0, "clip": 1.0, "rate": 0.5, "rounds": 1, "private": True}


def test_a_release_has_one_row_and_the_sum_is_written_with_it(tmp_path):
    assert releases_in(tmp_path) == releases_in(None) == []
    write_spending(tmp_path, TOLD, [], "first")
    write_spending(tmp_path, TOLD | {"epsilon": 2.5, "rounds": 2}, releases_in(tmp_path), "second")
    write_spending(tmp_path, TOLD | {"epsilon": 2.5, "rounds": 2}, releases_in(tmp_path), None)  # the same again
    rows = releases_in(tmp_path)
    assert [(row[0], row[1], row[-1]) for row in rows] == [("1", "1.5", "first"), ("2", "2.5", "second")]
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert json.loads((tmp_path / "privacy.json").read_text())["epsilon"] == 2.5
    assert not list(tmp_path.glob("*.tmp"))


def test_a_disk_that_fails_leaves_what_was_written(tmp_path, monkeypatch):
    write_spending(tmp_path, TOLD, [], "first")
    monkeypatch.setattr("os.replace", lambda path, other: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_spending(tmp_path, TOLD, releases_in(tmp_path), "second")
    assert len(releases_in(tmp_path)) == 1


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("prv", marks=pytest.mark.slow)])
def test_noise_beyond_any_use_is_counted_at_once_and_never_too_low(accountant, monkeypatch):
    """Opacus computed for ever, divided by zero, or asked for 255 TiB."""
    pytest.importorskip("opacus")
    monkeypatch.setattr(spending, "LOUDEST", 30.0)  # it takes its time with much noise

    def spent(*noises):
        return spent_by(accountant, 1e-3, tuple((noise, 0.5, 5) for noise in noises))

    for noise in (0.0, 1e-300, 1e-160):
        assert spent(noise) == spent(1.0, noise) == math.inf
    assert spent(1e-5) > spent(1e-2) > 1000 and math.isfinite(spent(1e-5))
    assert spent(math.inf) == spent(30.0) and spent(1.0) <= spent(1.0, math.inf) < 1.01 * spent(1.0)
    assert spent_by(accountant, 1e-3, ((1e-300, 0.0, 5), (1.0, 0.5, 5))) == spent(1.0)
