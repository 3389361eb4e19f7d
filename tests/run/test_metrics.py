"""The file of a run's scores: what a saved state knows of it, also where rows were cut off."""

from __future__ import annotations

from fedlightning.run.folder import MetricsFile
from fedlightning.scores.rows import Row


def row(round):
    return Row(round, "G", "global", "latest", "local", "val", "a", "loss", round / 7, 10)


def test_what_is_known_after_a_cut_is_of_what_is_there(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.csv")
    metrics.append([row(1)])
    first = metrics.mark()
    metrics.append([row(2)])
    metrics.mark()
    metrics.cut(first)
    assert metrics.rows() == [row(1)]
    metrics.append([row(3), row(4)])
    now = metrics.mark()
    assert metrics.fault(now) is None and metrics.fault(first) is None
    assert now == MetricsFile(metrics.path).mark()
