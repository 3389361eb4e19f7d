"""Incentives against the papers' formulas, written out on the rows of ``metrics.csv``; which runs are baselines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fedlightning  # noqa: F401  before lightning

# isort: split
from fedlightning.study.finished_runs import Run
from fedlightning.study.ranks import ranks
from fedlightning.study.roles import role
from fedlightning.study.study import Study
from tests.study.folders import CLIENTS, METHODS, ROUNDS, deployed, made_up_rows, raw, write_study

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def study(root):
    return Study(write_study(root, shift={"fenda": 0.15}))


def federated(root, seed, metric="test_accuracy"):
    return deployed(root, "fedavg", seed, checkpoint="best_global", metric=metric)


def test_participation_rate_is_per_seed_then_averaged(study, root):
    for method in ("fenda", "fliu"):
        rates = []
        for seed in SEEDS:
            own, silo, fed = deployed(root, method, seed), deployed(root, "silo", seed), federated(root, seed)
            rates.append(100 * sum(own[c] > max(silo[c], fed[c]) for c in CLIENTS) / 4)
        row = next(row for row in study.fairness() if row["method"] == method)
        assert row["ipr"] == pytest.approx(np.mean(rates)) and row["ipr_seeds"] == 3
        medians = [
            {c: np.median([scores[s][c] for s in SEEDS]) for c in CLIENTS}
            for scores in (
                {s: deployed(root, method, s) for s in SEEDS},
                {s: deployed(root, "silo", s) for s in SEEDS},
                {s: federated(root, s) for s in SEEDS},
            )
        ]
        better = [medians[0][c] > max(medians[1][c], medians[2][c]) for c in CLIENTS]
        assert row["ipr_of_medians"] == pytest.approx(100 * np.mean(better))
        assert row["variance_of_medians"] == pytest.approx(np.var(list(medians[0].values())))
    assert [row["ipr"] for row in study.fairness() if row["method"] in ("fedavg", "silo")] == [None, None]


def test_a_method_equal_to_its_baseline_gains_nobody(tmp_path):
    """Strictly better: what FedAvg's global model gives is no reason to take part, and none to leave."""

    def edit(method, seed, rows, summary):
        if method != "fliu":
            return None
        known = {(r.client, r.metric, r.data): r.value for r in made_up_rows("fedavg", seed, True, 0.0)
                 if (r.checkpoint, r.split) == ("best_global", "test")}  # fmt: skip
        return [
            replace(row, value=known[row.client, row.metric, row.data])
            if (row.checkpoint, row.data) == ("best_local", "local")
            else row
            for row in rows
        ]

    row = next(row for row in Study(write_study(tmp_path, edit=edit)).fairness() if row["method"] == "fliu")
    assert (row["ipr"], row["ipr_of_medians"], row["pma"], row["opt_outs"]) == (0, 0, 0, 0)


def test_appeal_and_opt_outs(study, root):
    for method in ("fenda", "silo"):
        gains = {
            seed: {c: deployed(root, method, seed)[c] - federated(root, seed)[c] for c in CLIENTS} for seed in SEEDS
        }
        row = next(row for row in study.fairness() if row["method"] == method)
        assert row["pma"] == pytest.approx(np.mean([list(gain.values()) for gain in gains.values()]))
        assert row["opt_outs"] == pytest.approx(
            100 * np.mean([[v < 0 for v in gain.values()] for gain in gains.values()])
        )
        for line in study.appeal():
            if line["method"] == method:
                assert line["pma"] == pytest.approx(np.mean([gains[s][line["client"]] for s in SEEDS]))
    assert {line["method"] for line in study.appeal()} == {"fenda", "fliu", "silo"}


def test_a_lower_loss_is_a_gain(study, root):
    losses = Study(study.data.runs, metric="loss")
    row = next(row for row in losses.fairness() if row["method"] == "fliu")
    gains = [
        [federated(root, s, "test_loss")[c] - deployed(root, "fliu", s, metric="test_loss")[c] for c in CLIENTS]
        for s in SEEDS
    ]
    assert row["pma"] == pytest.approx(np.mean(gains))
    assert row["opt_outs"] == pytest.approx(100 * np.mean(np.array(gains) < 0))
    assert not any(key.startswith("above_") for key in row)


def test_global_appeal_says_which_loss_it_used(study, root):
    where = {"round": ROUNDS, "split": "val", "metric": "val_loss", "checkpoint": "latest", "data": "local"}
    counts = []
    for seed in SEEDS:
        mine, own = raw(root, "fedavg", seed, stage="G", **where), raw(root, "silo", seed, stage="L1", **where)
        counts.append(sum(mine[c] < own[c] for c in CLIENTS))
    row = next(row for row in study.fairness() if row["method"] == "fedavg")
    assert row["gma"] == pytest.approx(np.mean(counts)) and row["gma_loss"] == "validation"
    assert next(row for row in study.fairness() if row["method"] == "fenda")["gma"] is None  # no global model


def test_thresholds_count_clients_strictly(study, root):
    level = deployed(root, "fliu", 0)["a"]
    row = next(row for row in study.fairness([level]) if row["method"] == "fliu")
    each = [list(deployed(root, "fliu", seed).values()) for seed in SEEDS]
    assert row[f"above_{level:g}"] == pytest.approx(np.mean([sum(v > level for v in values) for values in each]))
    assert row[f"below_{level:g}"] == pytest.approx(np.mean([sum(v < level for v in values) for values in each]))
    assert row[f"above_{level:g}"] + row[f"below_{level:g}"] < 4


def run(name="x", callbacks=None):
    return Run(name, 0, None, {} if callbacks is None else {"callbacks": {key: {} for key in callbacks}})


@pytest.mark.parametrize(
    ("callbacks", "expected"),
    [
        (["FedAvg"], "fedavg"),
        ([], "fedavg"),
        (["LocalCheckpoint", "GlobalCheckpoint"], "fedavg"),
        (["FedAvg", "FederationSensitivity"], "fedavg"),
        (["Local", "LocalCheckpoint"], "siloed"),
        (["Central", "GlobalCheckpoint"], "central"),
        (["LocalAdaptation"], "finetuned"),
        (["FedAvg", "LocalAdaptation"], "finetuned"),
        (["FedProx"], None),
        (["FedAvg", "FedProx"], None),
        (["FedAdam", "LocalAdaptation"], None),
        (["FedCM", "GlobalCheckpoint"], None),  # somebody's own algorithm is not FedAvg
    ],
)
def test_roles_are_told_by_callbacks(callbacks, expected):
    assert role(run(callbacks=callbacks)) == expected


def test_roles_are_told_by_names_where_a_run_says_nothing_else():
    assert role(run("FedAvg")) == "fedavg" and role(run("siloed")) == "siloed" and role(run("fliu")) is None
    assert role(run("siloed", ["FENDA"])) is None


def test_of_two_baselines_the_comparable_one_is_taken(tmp_path):
    def edit(method, seed, rows, summary):
        if method == "long":
            summary["rounds"] = 99

    methods = {"long": ["Local"], **METHODS}
    assert Study(write_study(tmp_path, methods, edit=edit)).data.baselines == {"siloed": "silo", "fedavg": "fedavg"}


def test_ranks_of_data_sets_are_those_of_the_means(tmp_path):
    studies = {name: Study(write_study(tmp_path / name, seeds=[seed])) for seed, name in enumerate("pqrs")}
    found = ranks(studies)
    table = np.array(
        [[np.mean(list(deployed(tmp_path / n, m, s).values())) for m in METHODS] for s, n in enumerate("pqrs")]
    )
    by_hand = np.array([[1 + sum(other > value for other in row) for value in row] for row in table]).mean(0)
    assert found["ranks"] == pytest.approx(dict(zip(METHODS, by_hand, strict=True)))
    assert found["names"] == list("pqrs") and found["datasets"] == 4
    assert found["methods"] == sorted(found["ranks"], key=found["ranks"].__getitem__)
    for a in METHODS:
        assert set(found["pairwise"][a]) == set(METHODS) - {a}
        assert all(found["pairwise"][b][a] == p for b, p in found["pairwise"][a].items())
