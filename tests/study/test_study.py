"""The tables of a study against numbers computed anew from the text of ``metrics.csv``."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
from scipy import stats

import fedlightning  # noqa: F401  before lightning

# isort: split
from fedlightning.scores.metric_names import summarise
from fedlightning.scores.rows import Row
from fedlightning.study.comparison import Comparison
from fedlightning.study.comparison_files import write_comparison
from fedlightning.study.finished_runs import Run
from fedlightning.study.significance import mean_interval
from fedlightning.study.study import Study
from tests.study.folders import CLIENTS, METHODS, ROUNDS, TEST_SIZES, deployed, raw, write_study

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def study(root):
    return Study(write_study(root, shift={"fenda": 0.15}))


def line(table, **wanted):
    (found,) = [row for row in table if all(row[key] == value for key, value in wanted.items())]
    return found


def seed_means(root, method, **other):
    return np.array([np.mean(list(deployed(root, method, seed, **other).values())) for seed in SEEDS])


def t_interval(values, confidence=0.95):
    """By hand: mean and t quantile times the standard error."""
    n = len(values)
    error = math.sqrt(sum((v - sum(values) / n) ** 2 for v in values) / (n - 1) / n)
    radius = -stats.t.ppf((1 - confidence) / 2, n - 1) * error
    return [sum(values) / n - radius, sum(values) / n + radius]


def test_overview_is_one_line_a_method(study, root):
    table = study.overview()
    assert [row["method"] for row in table] == list(METHODS)
    assert len({tuple(row) for row in table}) == 1
    for method in METHODS:
        row, scores = line(table, method=method), [list(deployed(root, method, seed).values()) for seed in SEEDS]
        assert row["mean"] == pytest.approx(np.mean(scores))
        assert row["ci95"] == pytest.approx(t_interval([np.mean(s) for s in scores]))
        assert row["ci95_radius"] == pytest.approx((row["ci95"][1] - row["ci95"][0]) / 2)
        assert row["median"] == pytest.approx(np.mean([np.median(s) for s in scores]))
        assert row["worst"] == pytest.approx(np.mean([min(s) for s in scores]))
        assert row["tenth_percentile"] == pytest.approx(np.mean([np.quantile(s, 0.1) for s in scores]))
        weights = list(TEST_SIZES.values())
        assert row["weighted_mean"] == pytest.approx(np.mean([np.average(s, weights=weights) for s in scores]))
        pooled = seed_means(root, method, data="pooled")
        assert row["pooled"] == pytest.approx(pooled.mean())
        assert row["sum"] == pytest.approx(np.mean(pooled) + np.mean(scores))
        assert (row["checkpoint"], row["stage"], row["n_seeds"], row["seeds"]) == ("best_local", "L1", 3, 3)
        prices = [row[name] for name in ("mb_up", "mb_down", "mb_total", "local_steps", "seconds")]
        assert prices == pytest.approx([0.006, 0.0015, 0.0075, 120, 4.5])
    shared = [np.mean(list(deployed(root, "fedavg", seed, checkpoint="best_global").values())) for seed in SEEDS]
    assert line(table, method="fedavg")["global"] == pytest.approx(np.mean(shared))
    assert line(table, method="fenda")["global"] is None


def test_the_gap_is_paired_with_the_best(study, root):
    table = study.overview()
    means = {method: seed_means(root, method) for method in METHODS}
    best = max(METHODS, key=lambda method: means[method].mean())
    assert [row["method"] for row in table if row["best"]] == [best]
    for method in METHODS:
        row = line(table, method=method)
        if method == best:
            assert row["gap"] is None and row["gap_n"] == 0
            continue
        difference = means[method] - means[best]
        assert row["gap"] == pytest.approx(difference.mean())
        assert row["gap_ci95"] == pytest.approx(t_interval(difference))
        assert row["gap_p"] == pytest.approx(stats.ttest_1samp(difference, 0).pvalue)


def test_differences_against_siloed_with_holm(study, root):
    table = study.differences()
    assert {row["reference"] for row in table} == {"silo"} and len(table) == 3
    raw_p = {}
    for row in table:
        difference = seed_means(root, row["method"]) - seed_means(root, "silo")
        assert row["mean"] == pytest.approx(difference.mean())
        assert list(row["per_seed"].values()) == pytest.approx(list(difference))
        raw_p[row["method"]] = stats.ttest_1samp(difference, 0).pvalue
        assert row["p"] == pytest.approx(raw_p[row["method"]])
        assert row["p_wilcoxon"] == pytest.approx(stats.wilcoxon(difference).pvalue)
        assert row["better"] == (difference.mean() > 0)
    low, middle, high = sorted(raw_p, key=raw_p.__getitem__)
    first = min(1, 3 * raw_p[low])
    second = max(first, min(1, 2 * raw_p[middle]))
    expected = {low: first, middle: second, high: max(second, raw_p[high])}
    assert {row["method"]: row["p_holm"] for row in table} == pytest.approx(expected)
    assert {row["reference"] for row in study.differences("fliu")} == {"fliu"}
    with pytest.raises(ValueError, match="no method 'x'"):
        study.differences("x")


def test_results_cover_every_row_of_the_summaries(study, root):
    table = study.results()
    assert len({tuple(row) for row in table}) == 1
    keys = [tuple(row[k] for k in ("run", "model", "stage", "checkpoint", "data", "split", "metric")) for row in table]
    assert len(set(keys)) == len(keys)
    for run in study.data.runs:
        for row in run.results:
            mine = tuple(row[k] for k in ("model", "stage", "checkpoint", "data", "split", "metric"))
            assert (run.name, *mine) in keys
    for row in table:
        wanted = {key: row[key] for key in ("model", "stage", "checkpoint", "data", "split", "metric")}
        extra = {"round": ROUNDS} if row["checkpoint"] == "latest" else {}
        each = [raw(root, row["run"], seed, **wanted, **extra) for seed in SEEDS]
        assert row["mean"] == pytest.approx(np.mean([list(scores.values()) for scores in each]))
        assert list(row["per_seed"].values()) == pytest.approx([np.mean(list(scores.values())) for scores in each])
        assert row["per_client"] == pytest.approx({c: np.mean([scores[c] for scores in each]) for c in each[0]})
        assert row["variance"] == pytest.approx(np.mean([np.var(list(scores.values())) for scores in each]))
        bad = max if row["metric"].endswith("loss") else min
        assert row["worst"] == pytest.approx(np.mean([bad(scores.values()) for scores in each]))


def test_stages_are_never_mixed(study, root):
    table = study.stages()
    assert [row["stage"] for row in table if row["method"] == "fedavg"] == ["G", "L1", "L2"]
    assert [row["stage"] for row in table if row["method"] == "silo"] == ["L1", "L2"]
    for row in table:
        where = {"stage": row["stage"], "checkpoint": "latest"}
        local = seed_means(root, row["method"], **where)
        pooled = seed_means(root, row["method"], data="pooled", **where)
        assert row["local"] == pytest.approx(local.mean())
        assert row["pooled"] == pytest.approx(pooled.mean())
        assert row["sum"] == pytest.approx((local + pooled).mean())
        assert row["sum_ci95"] == pytest.approx(t_interval(local + pooled))


def test_checkpoints_side_by_side(study, root):
    table = study.checkpoints()
    row = line(table, method="fedavg")
    for name, where in {
        "latest": {"checkpoint": "latest", "stage": "L1"},
        "latest_global": {"checkpoint": "latest", "stage": "G"},
        "best_global": {"checkpoint": "best_global"},
        "best_local": {"checkpoint": "best_local"},
    }.items():
        assert row[name] == pytest.approx(seed_means(root, "fedavg", **where).mean())
    assert line(table, method="fliu")["best_global"] is None
    assert row["deployed"] == "best_local"
    gain = seed_means(root, "fedavg", checkpoint="best_local") - seed_means(
        root, "fedavg", checkpoint="latest", stage="L1"
    )
    assert row["selection"] == pytest.approx(gain.mean()) and row["selection_ci95"] == pytest.approx(t_interval(gain))
    latest = Study(study.data.runs, checkpoint="latest").checkpoints()
    assert all(row["selection"] is None for row in latest)


def test_a_client_that_has_selected_no_model_deploys_its_latest(tmp_path):
    def edit(method, seed, rows, summary):
        return [row for row in rows if row.client != "c" or row.checkpoint != "best_local"]

    study = Study(write_study(tmp_path, {"fliu": METHODS["fliu"]}, seeds=[0], edit=edit))
    (score,) = study.data.deployed("fliu").values()
    own = deployed(tmp_path, "fliu", 0) | {"c": deployed(tmp_path, "fliu", 0, checkpoint="latest", stage="L1")["c"]}
    assert score.per_client == pytest.approx(own)
    assert score.mean == pytest.approx(np.mean(list(own.values())))
    assert score.weighted_mean == pytest.approx(np.average(list(own.values()), weights=[TEST_SIZES[c] for c in own]))


def test_another_checkpoint_rule_moves_every_deployed_number(root, study):
    for rule, where in {
        "latest": {"checkpoint": "latest", "stage": "L1"},
        "best_global": {"checkpoint": "best_global"},
    }.items():
        row = line(Study(study.data.runs, checkpoint=rule).overview(), method="fedavg")
        assert row["mean"] == pytest.approx(seed_means(root, "fedavg", **where).mean())
        assert row["checkpoint"] == rule


def test_each_client_against_its_siloed_model(study, root):
    table = study.clients()
    assert len(table) == len(CLIENTS) * len(METHODS)
    for row in table:
        own = [deployed(root, row["method"], seed)[row["client"]] for seed in SEEDS]
        silo = [deployed(root, "silo", seed)[row["client"]] for seed in SEEDS]
        assert row["score"] == pytest.approx(np.mean(own))
        assert row["gain"] == pytest.approx(np.mean(own) - np.mean(silo))
        assert row["gain_ci95"] == pytest.approx(t_interval(np.subtract(own, silo)))
        assert (row["train"], row["test"]) == (32, TEST_SIZES[row["client"]])


def test_a_loss_turns_every_direction(root, study):
    losses = Study(study.data.runs, metric="test_loss")
    assert losses.data.metric == "loss" and not losses.data.higher_is_better
    row = line(losses.overview(), method="fliu")
    each = [list(deployed(root, "fliu", seed, metric="test_loss").values()) for seed in SEEDS]
    assert row["worst"] == pytest.approx(np.mean([max(values) for values in each]))
    means = {m: row["mean"] for m in METHODS for row in [line(losses.overview(), method=m)]}
    assert [row["method"] for row in losses.overview() if row["best"]] == [min(means, key=means.__getitem__)]
    entry = line(losses.clients(), client="b", method="fliu")
    mine, silo = ([deployed(root, m, s, metric="test_loss")["b"] for s in SEEDS] for m in ("fliu", "silo"))
    assert entry["gain"] == pytest.approx(np.mean(silo) - np.mean(mine))


def test_matrix_has_models_in_rows(study, root):
    found = study.matrix("fliu")
    assert found["clients"] == list(CLIENTS)
    for i, source in enumerate(CLIENTS):
        for j, target in enumerate(CLIENTS):
            data = "local" if source == target else f"client:{target}"
            expected = np.mean([deployed(root, "fliu", seed, data=data)[source] for seed in SEEDS])
            assert found["values"][i][j] == pytest.approx(expected)
        assert found["row_means"][i] == pytest.approx(np.mean(found["values"][i]))
    assert found["diagonal_mean"] == pytest.approx(line(study.overview(), method="fliu")["mean"])


def test_a_matrix_that_was_not_scored_has_its_diagonal(tmp_path):
    def edit(method, seed, rows, summary):
        return [row for row in rows if not row.data.startswith("client:")]

    found = Study(write_study(tmp_path, seeds=[0], edit=edit)).matrix("fliu")
    assert found["values"][0][1] is None and found["row_means"][0] is None
    assert found["values"][0][0] == deployed(tmp_path, "fliu", 0)["a"]


def test_curves_and_what_they_cost(study, root):
    table = study.curves()
    for method, stages in {"fedavg": 3, "silo": 2}.items():
        assert len([row for row in table if row["method"] == method]) == stages * ROUNDS
    for row in table:
        where = {"stage": row["stage"], "checkpoint": "latest", "split": "val", "metric": "val_accuracy"}
        each = [np.mean(list(raw(root, row["method"], s, round=row["round"], **where).values())) for s in SEEDS]
        assert row["mean"] == pytest.approx(np.mean(each))
        assert row["ci95"] == pytest.approx(t_interval(each))
        rounds = range(1, row["round"] + 1)
        assert row["bytes_up"] == sum(1000 * number for number in rounds)
        assert row["mb"] == pytest.approx((sum(1000 * number for number in rounds) + 500 * row["round"]) / 1e6)
        assert row["local_steps"] == 40 * row["round"]
        assert row["seconds"] == pytest.approx(1.5 * row["round"])
    assert study.curves("loss")[0]["mean"] != table[0]["mean"]


def test_costs_end_where_the_curve_first_reaches_the_target(study):
    curve = {
        method: [r["mean"] for r in study.curves() if (r["method"], r["stage"]) == (method, "L1")] for method in METHODS
    }
    table = study.costs()
    assert {row["share"] for row in table} == {0.9, 0.95, 1.0} and {row["of"] for row in table} == {"fedavg"}
    for row in table:
        assert row["target"] == pytest.approx(row["share"] * max(curve["fedavg"]))
        reached = [n for n, value in enumerate(curve[row["method"]], start=1) if value >= row["target"]]
        assert row["rounds"] == (reached[0] if reached else None)
        assert row["local_steps"] == (40 * reached[0] if reached else None)
        assert row["reached"] == bool(reached)
    assert all(row["rounds"] is None and row["mb"] is None for row in study.costs(target=2.0))


def test_partition_and_the_seeds_text(study):
    table = study.partition()
    assert line(table, client="b", split="train") == {
        "client": "b",
        "split": "train",
        "samples": 32,
        "classes": [4] * 8,
    }
    assert line(table, client="b", split="test")["samples"] == TEST_SIZES["b"]
    assert study.data.seed_text == (
        "3 seeds (0, 1, 2): they change the initialisation and batch order, the training split and the validation "
        "split; the test split stays the same. Intervals and p-values (paired t-test) are for this test set."
    )


def other_splits(method, seed, rows, summary):
    summary["data"]["splits"]["test"] = f"test{seed}"


def test_overlapping_splits_take_the_corrected_test(tmp_path):
    study = Study(write_study(tmp_path, edit=other_splits, shift={"fenda": 0.15}))
    assert study.data.sampling == "splits" and "test sets overlap" in study.data.seed_text
    share = sum(TEST_SIZES.values()) / (4 * 40)  # to those that training and validation had
    found = line(study.differences(), method="fenda")
    d = seed_means(tmp_path, "fenda") - seed_means(tmp_path, "silo")
    t = d.mean() / math.sqrt((1 / 3 + share) * d.var(ddof=1))
    assert found["p"] == pytest.approx(2 * stats.t.sf(abs(t), 2)) and found["test"] == "resampled t"
    row, means = line(study.overview(), method="fenda"), seed_means(tmp_path, "fenda")
    radius = stats.t.ppf(0.975, 2) * math.sqrt((1 / 3 + share) * means.var(ddof=1))
    assert row["ci95"] == pytest.approx([max(0, means.mean() - radius), min(1, means.mean() + radius)])


def test_folds_are_told_by_their_option(tmp_path):
    runs = write_study(tmp_path, edit=other_splits)
    for run in runs:
        run.config["data"] = {"init_args": {"fold": run.seed}}
        for held in run.summary["data"]["clients"].values():
            held |= {"train": 100, "test": 5}
    study = Study(runs)
    assert study.data.sampling == "folds" and study.data.test_share == 0 and "disjoint folds" in study.data.seed_text
    assert line(study.differences(), method="fenda")["test"] == "t"
    for run in runs:  # more tested than there is: no folds
        for held in run.summary["data"]["clients"].values():
            held |= {"test": 200}
    assert Study(runs).data.sampling == "splits"


def test_the_test_over_clients_stands_beside_that_over_seeds(study, root):
    means = [
        np.mean([list(deployed(root, name, seed).values()) for seed in SEEDS], axis=0) for name in ("fenda", "silo")
    ]
    assert line(study.differences(), method="fenda")["p_clients"] == pytest.approx(stats.wilcoxon(*means).pvalue)


def test_files_have_no_nan_and_no_nesting(study, tmp_path):
    written = write_comparison(study, tmp_path / "out")
    text = (tmp_path / "out/comparison.json").read_text()

    def refuse(word):
        raise AssertionError(word)

    back = json.loads(text, parse_constant=refuse)
    assert back == written
    assert back["methods"] == list(METHODS) and back["seeds"] == list(SEEDS)
    with (tmp_path / "out/comparison.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(back["results"])
    for csv_line, row in zip(lines, back["results"], strict=True):
        assert csv_line["run"] == row["run"]
        assert float(csv_line["mean"]) == row["mean"]
        assert [float(csv_line["ci95_low"]), float(csv_line["ci95_high"])] == row["ci95"]
        assert not any(value.startswith(("{", "[")) for value in csv_line.values())


def test_the_overview_as_a_table_of_latex(study, tmp_path):
    write_comparison(study, tmp_path)
    text = (tmp_path / "comparison.tex").read_text()
    row = line(study.overview(), method="fenda")
    assert (
        rf"fenda & {{\boldmath${row['mean']:.3f} \pm {row['ci95_radius']:.3f}$}} & ${row['worst']:.3f}$ & best" in text
    )
    assert text.count(r"\\") == 1 + len(METHODS) and r"\toprule" in text and "for this test set" in text


def test_several_data_sets_in_one_file(study, tmp_path):
    found = write_comparison({"one": study, "two": study}, tmp_path)
    assert [row["dataset"] for row in found["overview"]] == ["one"] * 4 + ["two"] * 4
    assert set(found["datasets"]) == {"one", "two"}


def test_wrong_questions_are_answered_with_a_sentence(study):
    with pytest.raises(ValueError, match=r"no run to compare"):
        Study([])
    with pytest.raises(ValueError, match=r"No run has a score 'dice'.*accuracy, loss"):
        Study(study.data.runs, metric="dice")


def test_bootstrap_intervals(study):
    table = Study(study.data.runs, interval="bootstrap").overview()
    again = Study(study.data.runs, interval="bootstrap").overview()
    wide = study.overview()
    for row, same, t in zip(table, again, wide, strict=True):
        assert row["mean"] == t["mean"] and row["ci95"] == same["ci95"]
        assert row["ci95_radius"] < t["ci95_radius"]  # percentiles of three values stay inside them
    assert Study(study.data.runs, confidence=0.5).overview()[0]["ci95_radius"] < wide[0]["ci95_radius"]


def test_a_comparison_is_a_study_of_this_session(study, tmp_path):
    found = Comparison()
    for run in study.data.runs:
        if run.name in ("silo", "fedavg"):
            found.add(run.name, run.summary)
    table = found.table()
    means = {row["method"]: row["mean"] for row in study.overview()}
    assert list(table.columns[0].cells) == ["fedavg", "silo"]
    for name, cell in zip(("fedavg", "silo"), table.columns[1].cells, strict=True):
        assert f"{means[name]:.3f}" in cell
        assert ("[bold]" in cell) == (means[name] == max(means["silo"], means["fedavg"]))
    assert table.columns[4].cells and list(table.columns[4].cells)[1] == "-"
    (radius,) = {row["ci95_radius"] for row in study.overview() if row["method"] == "silo"}
    assert list(table.columns[1].cells)[1].endswith(f"± {radius:.3f}")  # over seeds
    found.write(tmp_path)
    found.plot_clients(tmp_path / "clients.png")
    assert {path.name for path in tmp_path.iterdir()} == {
        *("comparison.json", "comparison.csv", "comparison.tex", "clients.png"),
    }


def test_of_one_seed_the_interval_is_over_clients(study):
    found = Comparison()
    (run,) = (run for run in study.data.runs if run.name == "silo" and run.seed == 0)
    found.add("silo", run.summary)
    (score,) = found.study.data.deployed("silo").values()
    (cell,) = found.table().columns[1].cells
    assert cell.endswith(f"± {mean_interval(list(score.defined.values())).radius:.3f}")
    assert found.table().title.endswith("over clients")


def test_a_comparison_says_what_is_wrong(study, capsys):
    found = Comparison()
    for run in study.data.runs:
        if run.seed == 0:
            data = run.summary["data"] | {"splits": {"train": "x", "val": "x", "test": run.name == "fliu"}}
            found.add(run.name, run.summary | {"data": data})
    found.print()
    assert "fliu, seed 0, was tested on other data than" in " ".join(capsys.readouterr().out.split())


def test_a_difference_of_shares_is_at_most_one():
    def run(method, seed, accuracy):
        row = Row(5, "L1", "personal", "latest", "local", "test", "a", "test_accuracy", accuracy, 10)
        return Run(method, seed, None, {"num_samples": {"a": 10}, "results": summarise([row])})

    runs = [run("local", 0, 0.1), run("local", 1, 0.9), run("apfl", 0, 0.9), run("apfl", 1, 0.2)]
    (row,) = Study(runs).differences("local")
    assert mean_interval([0.8, -0.7]).high > 1  # which no difference of accuracies is
    assert row["ci95"] == [-1.0, 1.0] and row["ci95_radius"] is None and row["mean"] == pytest.approx(0.05)
