"""Who pays, earns and profits, against values worked out by hand; a ledger that loses tokens is a problem."""

from __future__ import annotations

import math

import pytest

from fedlightning.report.build import PARTS
from fedlightning.report.context import Context
from fedlightning.report.html import Page, render
from fedlightning.report.sections.tokens import tokens
from fedlightning.report.styles import styles
from fedlightning.study.comparison_files import write_comparison
from fedlightning.study.finished_runs import load_study
from fedlightning.study.study import Study
from fedlightning.study.token_tables import balances, by_seed
from tests.report.made_up import add_ledger, make_study
from tests.report.reader import Reader

SEEDS = (0, 1)


def made(path, methods=("fedavg", "pifl", "siloed"), lost=0.0):
    out = make_study(path / "study", methods=methods, seeds=SEEDS, matrix=False, rounds=2)
    for seed in SEEDS:
        add_ledger(out / f"runs/run_1/seed_{seed}", lost if seed else 0.0)
    return out


def page_of(study):
    section = tokens(Context(study, styles(study.data.methods)))
    return Reader(render(Page("tokens", "", {}, sections=[section])))


@pytest.fixture
def study(tmp_path):
    return Study(load_study([made(tmp_path)]))


def test_accounts_of_each_client(study):
    rows = {row["client"]: row for row in study.tokens()}
    assert list(rows) == ["0", "1", "2", "3"] and {row["method"] for row in rows.values()} == {"pifl"}
    assert [rows[c]["paid"] for c in rows] == [2.0, 2.0, 2.0, 0.0]
    assert [rows[c]["refunded"] for c in rows] == pytest.approx([0.2, 0.2, 1.1, 0.0])
    assert [rows[c]["rewarded"] for c in rows] == pytest.approx([0.6, 2.1, 1.8, 0.0])
    assert [rows[c]["balance"] for c in rows] == pytest.approx([-1.2, 0.3, 0.9, 0.0])
    assert [rows[c]["rounds"] for c in rows] == [2.0, 2.0, 1.0, 0.0], "who did not answer did not train"
    assert [rows[c]["contribution"] for c in rows] == pytest.approx([-0.03, 0.02, 0.04, None])
    # s / sqrt(2) of two values that differ by 0.02 is 0.01; two seeds alike: / sqrt(2)
    assert [rows[c]["contribution_se"] for c in rows] == pytest.approx([0.01 / math.sqrt(2)] * 2 + [None, None])
    assert rows["0"]["sampling_error"] == pytest.approx(0.003 / 2 / math.sqrt(2)) and rows["2"]["sampling_error"] == 0


def test_gain_is_that_of_the_appeal(study):
    appeal = {line["client"]: line["pma"] for line in study.appeal() if line["method"] == "pifl"}
    assert {row["client"]: row["pma"] for row in study.tokens()} == appeal
    assert all(value is not None for value in appeal.values())


def test_all_together(study):
    (line,) = study.ledgers()
    assert [line[name] for name in ("paid", "refunded", "rewarded")] == pytest.approx([6.0, 1.5, 4.5])
    assert line["conserved"] and line["missing"] < 1e-12 and (line["earners"], line["clients"]) == (2, 4)
    assert line["contribution_balance"] == pytest.approx(1.0), (
        "of the three that contributed: the more, the more tokens"
    )
    gains = [row["pma"] for row in study.tokens()]
    assert line["gainers"] == sum(gain > 0 for gain in gains) and line["compared"] == 4


def test_balances_by_round_begin_at_0(study):
    entries = by_seed(study.data, "pifl")[0]
    found = balances(entries, ["0", "1", "2", "3"])
    assert found["2"] == pytest.approx([0, 0.9, 0.9]) and found["3"] == [0, 0, 0]
    assert [sum(found[c][r] for c in found) for r in range(3)] == pytest.approx([0, 0, 0])


def test_page_and_files(study, tmp_path):
    found = write_comparison(study, tmp_path / "out")
    assert len(found["tokens"]) == 4 and found["ledgers"][0]["conserved"] is True
    reader = page_of(study)
    assert reader.errors == [] and {"figure-balances-pifl", "figure-profits-pifl"} <= set(reader.ids)
    assert "in every round and cluster, paid = refunded + rewarded" in reader.text
    assert (
        "pifl: tokens over rounds, seed 0" in reader.text
        and "Pictures of balances are of the first seed" in reader.text
    )
    assert tokens in PARTS, "a report shows it"
    shown = {row[0][0]: [value for _, value in row] for row in reader.tables["table-tokens"]}
    for row in study.tokens():
        for key in ("paid", "balance", "pma"):
            assert repr(row[key]) in shown[row["client"]], key


def test_without_fedavg_there_are_accounts_and_no_gains(tmp_path):
    study = Study(load_study([made(tmp_path, methods=("other", "pifl"))]))
    (line,) = study.ledgers()
    assert line["gainers"] is None and line["contribution_gain"] is None and line["contribution_balance"] is not None
    reader = page_of(study)
    assert "Gains are empty: they need a FedAvg run" in reader.text and "figure-profits-pifl" not in reader.ids


@pytest.mark.parametrize(("lost", "told"), [(1e-10, False), (1e-8, True), (0.5, True)])
def test_tokens_that_are_lost_are_a_problem(tmp_path, lost, told):
    study = Study(load_study([made(tmp_path, lost=lost)]))
    problems = [problem for problem in study.problems if problem.kind == "tokens_lost"]
    assert [(problem.run, problem.seed, problem.severity) for problem in problems] == [("pifl", 1, "problem")] * told
    (line,) = study.ledgers()
    assert line["conserved"] is not told and line["missing"] == pytest.approx(lost, rel=1e-4)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0.6", "-0.6", "an amount of -0.6 tokens"),
        ("0.6", "inf", "rewarded is 'inf'"),
        ("-0.04", "much", "contribution is 'much'"),
        ("error", "mistake", "no column 'error'"),
    ],
)
def test_a_damaged_ledger_is_a_problem(tmp_path, old, new, said):
    folder = made(tmp_path)
    path = folder / "runs/run_1/seed_0/ledger.csv"
    path.write_text(path.read_text().replace(old, new, 1))
    study = Study(load_study([folder]))
    (problem,) = [problem for problem in study.problems if problem.kind == "damaged_table"]
    assert said in problem.text and (problem.run, problem.seed) == ("pifl", 0)
    assert {row["n_seeds"] for row in study.tokens()} == {1}
