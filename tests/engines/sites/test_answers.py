"""A site that answers with what was not asked for, or with what no file can hold: its client has failed, and nobody else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedlightning import FederatedCallback
from fedlightning.callbacks import IFCA, FedNova, HypCluster, MaxFL
from fedlightning.messages import Update
from fedlightning.scoring.rows import Gap, Row
from fedlightning.tensors import State
from fedlightning.wire import read, write
from tests.engines.sites.helpers import Line, at_sites, changed, sites

SCORE = ("L2", "local", "val", "val_loss", 0.5, 6)
LIES: dict[str, Callable[[Update], Any]] = {
    "another stage": lambda update: update.evaluations.append(("X", *SCORE[1:])),
    "another split": lambda update: update.evaluations.append(("L2", "local", "test", *SCORE[3:])),
    "others' data": lambda update: update.evaluations.append(("L2", "pooled", *SCORE[2:])),
    "twice": lambda update: update.evaluations.extend(2 * [SCORE]),
    "no text": lambda update: update.metrics.update({"\ud800": 1.0}),
    "colours": lambda update: update.metrics.update({"\x1b[2J": 1.0}),
    "a long name": lambda update: update.metrics.update({"m" * 10**4: 1.0}),
    "a long number": lambda update: update.metrics.update({"m": 10**400}),
    "a long sum": lambda update: setattr(update, "lr_sum", 10**400),
    "a gap elsewhere": lambda update: update.gaps.append(("X", "y", "z", "because")),
}


def lied_to(
    tmp_path: Path, change: Callable[[Any, dict[str, Any]], None], algorithm: FederatedCallback | None = None
) -> tuple[list[dict[str, Any]], State]:
    """Run with a site that changes its replies about site1; return the failures, and the model."""
    line = Line(sites(tmp_path, algorithm, evaluate_every=1))

    def lie(answer: Any, part: bytes) -> bytes:
        content = read(part)
        change(content.get("answer"), content)
        return write(content)

    line.reply = lambda node, data: changed(data, lie)
    server = at_sites(line, tmp_path / "server", algorithm).federation.server
    return server.failures, server.model


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.fast_cases(5)
def test_a_lie_about_scores_is_that_clients_failure(tmp_path: Path, lie: str) -> None:
    def change(answer: Any, content: dict[str, Any]) -> None:
        if isinstance(answer, Update) and answer.client == "site1":
            LIES[lie](answer)

    assert {failure["client"] for failure in lied_to(tmp_path, change)[0]} == {"site1"}


@pytest.mark.parametrize(
    "lie",
    [{"metric": "\ud800"}, {"metric": "a\nb"}, {"value": 10**400}, {"split": "test"}, {"data": "pooled"}],
    ids=str,
)
@pytest.mark.fast_cases(3)
def test_a_lie_in_a_row_is_a_gap(tmp_path: Path, lie: dict[str, Any]) -> None:
    def change(answer: Any, content: dict[str, Any]) -> None:
        if isinstance(answer, list):
            content["answer"] = [replace(row, **lie) if row.client == "site1" else row for row in answer]

    failures, _ = lied_to(tmp_path, change)  # of a task for several clients nobody knows whose answer is bad
    assert "site1" in {failure["client"] for failure in failures} <= {"site1", "site2"}


def test_reasons_do_nothing_to_a_terminal_and_seconds_end_no_run(tmp_path: Path) -> None:
    def change(answer: Any, content: dict[str, Any]) -> None:
        content["seconds"], content["loop"] = 10**400, "\x1b[2J"
        if isinstance(answer, list) and all(isinstance(row, Row) and row.client == "site1" for row in answer):
            row = answer[0]
            content["answer"] = [Gap(**vars(row) | {"metric": "", "value": math.nan}, reason="\x1b[2J" * 10**4)]

    found = [failure["reason"] for failure in lied_to(tmp_path, change)[0]]
    assert found and all("\x1b" not in reason and len(reason) < 3000 for reason in found)


@pytest.mark.parametrize(
    ("algorithm", "name", "value"),
    [
        (FedNova(), "a", 1e-30),  # by which the change is divided
        (IFCA(), "cluster", 1e-30),
        (HypCluster(), "cluster", 1.0),
        (MaxFL(), "weight", -1e-30),  # within the slack of rounding
    ],
    ids=["FedNova", "IFCA", "HypCluster", "MaxFL"],
)
@pytest.mark.fast_cases(2)
def test_a_tiny_number_ends_no_run_and_takes_no_model_over(
    tmp_path: Path, algorithm: FederatedCallback, name: str, value: float
) -> None:
    def change(answer: Any, content: dict[str, Any]) -> None:
        if isinstance(answer, Update) and answer.client == "site1" and name in answer.extras.get(algorithm.key, {}):
            answer.extras[algorithm.key][name] = value

    failures, model = lied_to(tmp_path, change, algorithm)
    assert {failure["client"] for failure in failures} <= {"site1"}
    assert all(float(tensor.norm()) < 100 for tensor in model.values())
