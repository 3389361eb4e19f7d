"""A site that answers with what was not asked for, or with what no file can hold: its client has failed, and nobody else."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedlightning import FederatedCallback
from fedlightning.callbacks import IFCA, FedNova, HypCluster, MaxFL
from fedlightning.client.data_summary import DataSummary
from fedlightning.contract.messages import Update
from fedlightning.errors import ConfigurationError
from fedlightning.scores.rows import Gap, Row
from fedlightning.sites.message_checks import check_shares
from fedlightning.tensors import State
from fedlightning.wire import read, write
from tests.sites.helpers import Line, at_sites, changed, sites

SCORE = ("L2", "local", "val", "val_loss", 0.5, 6)
LIES: dict[str, Callable[[Update], Any]] = {
    "another stage": lambda update: update.evaluations.append(("X", *SCORE[1:])),
    "another split": lambda update: update.evaluations.append(("L2", "local", "test", *SCORE[3:])),
    "others' data": lambda update: update.evaluations.append(("L2", "pooled", *SCORE[2:])),
    "twice": lambda update: update.evaluations.extend(2 * [SCORE]),
    "no text": lambda update: update.metrics.update({"\ud800": 1.0}),
    "colours": lambda update: update.metrics.update({"\x1b[2J": 1.0}),
    "a formula": lambda update: update.metrics.update({"=HYPERLINK(1)": 1.0}),
    "a long name": lambda update: update.metrics.update({"m" * 10**4: 1.0}),
    "a long number": lambda update: update.metrics.update({"m": 10**400}),
    "a long sum": lambda update: setattr(update, "lr_sum", 10**400),
    "a gap elsewhere": lambda update: update.gaps.append(("X", "y", "z", "because")),
}


def lied_to(
    tmp_path: Path, change: Callable[[Any, dict[str, Any]], None], algorithm: FederatedCallback | None = None
) -> tuple[list[dict[str, Any]], State]:
    """Run with a site that changes its replies about site1; return the failures, and the model."""
    line = Line(sites(tmp_path, algorithm, evaluation=1))

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


# -- what a site says of itself ------------------------------------------------------------------------------------------
def told(**counts: int) -> dict[str, DataSummary]:
    return {name: DataSummary("", [name], {name: (count, 0, 0)}) for name, count in counts.items()}


def test_a_site_that_claims_most_samples_is_named_or_refused() -> None:
    """The mean would be its model."""
    with pytest.warns(UserWarning, match=r"Site 'b' says that it has 1000000000 of all 1000000010 .*--max_share"):
        check_shares(told(a=10, b=10**9), 1.0)
    with pytest.raises(ConfigurationError, match=r"Site 'b' says .* more than max_share=0\.5.*uniform weights"):
        check_shares(told(a=10, b=11), 0.5)
    later = told(a=10, b=1) | {"b": DataSummary("", ["b"], {"b": (1, 0, 0)}, over_rounds={"b": [1, 10**9]})}
    with pytest.raises(ConfigurationError, match="Site 'b' says"):
        check_shares(later, 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fine in (told(a=10, b=90), told(a=10), told(a=0, b=0), told(a=0)):
            check_shares(fine, 1.0)
        check_shares(told(a=10, b=10), 0.5)
        held_out = DataSummary("", [], {"b": (10**9, 0, 0)})  # trains nothing
        check_shares(told(a=10) | {"b": held_out}, 1.0)


@pytest.mark.parametrize("count", [-1, 2**53, 2**200])
def test_a_number_of_samples_that_is_none_is_refused(count: int) -> None:
    for odd in (told(b=count), {"b": DataSummary("", [], {"b": (1, 1, count)})}):
        with pytest.raises(ConfigurationError, match="no such number"):
            check_shares(told(a=10) | odd, 1.0)


def test_the_server_compares_what_sites_say(tmp_path: Path) -> None:
    line = Line(sites(tmp_path / "sites"))

    def claim(node: str, data: bytes) -> bytes:
        content = read(data)
        answer = content.get("answer")
        if isinstance(answer, dict) and "site1" in answer.get("clients", ()):
            answer["data"] = replace(answer["data"], sizes=dict.fromkeys(answer["data"].sizes, (10**9, 6, 6)))
        return write(content)

    line.reply = claim
    with pytest.warns(UserWarning, match=r"Site 'home of site1' says that it has 2000000000 of all"):
        at_sites(line, tmp_path / "server")


@pytest.mark.parametrize(
    "value, named", [(-1e300, True), (-math.inf, True), (-1e7, True), (1e300, False), (-3.0, False)]
)
def test_a_score_far_better_than_others_is_named_once(tmp_path: Path, value: float, named: bool) -> None:
    def change(answer: Any, content: dict[str, Any]) -> None:
        for row in answer if isinstance(answer, list) else ():
            if isinstance(row, Row) and row.client == "site1":
                object.__setattr__(row, "value", value)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        lied_to(tmp_path, change)
    texts = [str(one.message) for one in found if "metric_bounds" in str(one.message)]
    assert len(texts) == named and all("val_loss of client 'site1' at site 'home of site1'" in text for text in texts)
