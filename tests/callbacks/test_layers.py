"""Tables of layers: reading, the transition and its stability, rank correlation, figures."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedlightning.callbacks import Sensitivity
from fedlightning.callbacks.diagnostics import layer_figures, layer_values, layers
from fedlightning.callbacks.diagnostics.layer_values import LayerRow

EXAMPLE = (1.0, 0.2, 0.1, 2.7, 1.0)  # F = 1, 1.2, 1.3, 4, 5: the sheet's example
NAMES = [f"net.l{k}" for k in range(1, 6)]


def rows_of(
    values: object, quantity: str = "sensitivity_online", client: str = "all", number: int = 1, stage: str = "L2"
) -> list[LayerRow]:
    return [
        LayerRow(number, stage, client, index, NAMES[index - 1], quantity, float(value))
        for index, value in enumerate(values, 1)  # type: ignore[call-overload]
    ]


def random_runs(seed: int = 0, noise: float = 1.0) -> dict[str, list[LayerRow]]:
    """Three runs of two rounds and three clients; quantity b follows a, with noise."""
    draw = np.random.default_rng(seed)
    runs: dict[str, list[LayerRow]] = {}
    for run in "xyz":
        for number in (1, 2):
            for client in "012":
                a = draw.normal(size=5)
                b = a + noise * draw.normal(size=5)
                runs.setdefault(run, []).extend(rows_of(a, "a", client, number) + rows_of(b, "b", client, number))
    return runs


# -- the table ---------------------------------------------------------------------------------------------------------


def test_a_table_survives_the_disk(tmp_path):
    path = tmp_path / "run" / "layers.csv"
    rows = [LayerRow(1, "L2", "a,b", 1, "net.0", "x", 1 / 3, 0.1), LayerRow(2, "L1", "all", 2, "n", "y", math.inf)]
    assert layer_values.read_layers(path) == []
    layer_values.write_layers(path, rows[:1])
    layer_values.write_layers(path, rows[1:])
    assert repr(layer_values.read_layers(path)) == repr(rows)  # NaN is not equal to itself
    assert repr(layer_values.read_layers(path.parent)) == repr(rows)
    layer_values.write_layers(path, rows[:1])  # of a run that goes on from its beginning
    assert repr(layer_values.read_layers(path)) == repr(rows[:1])


def test_a_line_that_was_cut_off_is_left_out_and_removed(tmp_path):
    path = tmp_path / "layers.csv"
    layer_values.write_layers(path, rows_of(EXAMPLE))
    whole = path.read_text()
    path.write_text(whole + "2,L2,all,1,net.l1,sensi")
    assert len(layer_values.read_layers(path)) == 5
    layer_values.write_layers(path, rows_of(EXAMPLE, number=2))
    assert path.read_text().startswith(whole)
    assert len(layer_values.read_layers(path)) == 10


# -- the transition ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threshold", "p"), [(2.0, 3), (1.15, 1), (5.0, 5), (math.inf, 5)])
def test_the_rule_is_that_of_the_sensitivity(threshold, p):
    assert layers.transition(EXAMPLE, threshold) == p
    with pytest.raises(ValueError, match="above 1"):
        layers.transition(EXAMPLE, 1.0)


def test_frozen_layers_are_no_jump_where_the_table_knows_them():
    values = (0.0, 1.0, 0.1, 8.0, 0.0)
    assert layers.transition(values, 2.0) == 1
    assert layers.transition(values, 2.0, [0, 4, 4, 4, 4]) == 3
    runs = {"": rows_of(values) + rows_of([0, 4, 4, 4, 4], "num_parameters")}
    assert [row["p"] for row in layers.transition_curve(runs, [2.0])] == [3]


def test_the_curve_of_every_run_and_round():
    runs = {"a": rows_of(EXAMPLE) + rows_of((1, 5, 1, 1, 1), number=2), "b": rows_of(EXAMPLE, number=4)}
    found = layers.transition_curve(runs, [1.15, 2.0])
    assert [(row["run"], row["round"], row["threshold"], row["p"]) for row in found] == [
        ("a", 1, 1.15, 1),
        ("a", 1, 2.0, 3),
        ("a", 2, 1.15, 1),
        ("a", 2, 2.0, 1),
        ("b", 4, 1.15, 1),
        ("b", 4, 2.0, 3),
    ]
    assert found[1]["layer"] == "net.l3"


@pytest.mark.parametrize("seed", range(5))
def test_the_exact_ranges_are_where_the_rule_gives_that_p(seed):
    values = np.random.default_rng(seed).lognormal(sigma=2, size=5)
    found = layers.transition_ranges({"": rows_of(values)})
    assert found[0]["low"] == 1.0 and found[-1]["high"] == math.inf
    rule = Sensitivity(NAMES, [1] * 5, values.tolist())
    for row, following in zip(found, [*found[1:], None], strict=True):
        if following is not None:
            assert row["high"] == following["low"] and row["p"] < following["p"]
        inside = [row["low"] * (1 + 1e-12), (row["low"] + min(row["high"], 1e3)) / 2, row["high"] * (1 - 1e-12)]
        assert {rule.transition(t) for t in inside} == {row["p"]}
        assert row["layer"] == NAMES[row["p"] - 1]


def test_the_common_range_holds_in_every_run_and_round():
    runs = {"a": rows_of(EXAMPLE), "b": rows_of((1.0, 0.15, 0.1, 1.5, 1.0), number=3)}
    ranges = layers.transition_ranges(runs)
    low, high = layers.common_range(ranges, 3) or (0, 0)
    assert (low, high) == pytest.approx((1.2, 2.75 / 1.25))
    assert layers.common_range(ranges, 4) is None  # in no run
    other = layers.transition_ranges(runs | {"c": rows_of((1.0, 9.0, 0.0, 0.0, 0.0))})
    assert layers.common_range(other, 3) is None  # not in c
    apart = {"a": rows_of((1.0, 0.5, 0.0, 0.0, 0.0)), "b": rows_of((1.0, 1.0, 0.0, 0.0, 0.0))}
    assert layers.common_range(layers.transition_ranges(apart), 1) == pytest.approx((1.0, 1.5))
    assert layers.common_range(layers.transition_ranges(apart), 5) == pytest.approx((2.0, math.inf))


def test_ratios_as_rows():
    found = layers.ratio_rows({"a": rows_of(EXAMPLE)})
    assert [row["ratio"] for row in found] == pytest.approx([1.2, 1.3 / 1.2, 4 / 1.3, 5 / 4])
    assert (found[2]["layer"], found[2]["next"], found[2]["layer_index"]) == ("net.l3", "net.l4", 3)


# -- rank correlation --------------------------------------------------------------------------------------------------


def test_the_correlation_is_the_mean_of_scipys_over_the_groups():
    runs = random_runs()
    found = layers.rank_correlation(runs, "a", "b")
    expected = []
    for rows in runs.values():
        for number in (1, 2):
            for client in "012":
                here = [row for row in rows if (row.round, row.client) == (number, client)]
                a, b = ([row.value for row in here if row.quantity == q] for q in "ab")
                expected.append(stats.spearmanr(a, b).statistic)
    assert found.rho == pytest.approx(np.mean(expected))
    assert found.positive == pytest.approx(np.mean(np.array(expected) > 0))
    assert (found.groups, found.runs, found.left_out) == (18, 3, 0)
    percentiles = stats.bootstrap((expected,), np.mean, n_resamples=4000, method="percentile", rng=1)
    low, high = percentiles.confidence_interval
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.03)


def test_monotone_maps_change_nothing_and_reversing_turns_the_sign():
    runs = random_runs()
    found = layers.rank_correlation(runs, "a", "b")

    def mapped(function: object) -> dict[str, list[LayerRow]]:
        return {
            run: [LayerRow(**{**vars(r), "value": function(r.value)}) if r.quantity == "b" else r for r in rows]  # type: ignore[operator]
            for run, rows in runs.items()
        }

    assert layers.rank_correlation(mapped(math.exp), "a", "b") == found
    turned = layers.rank_correlation(mapped(lambda value: -value), "a", "b")
    assert turned.rho == pytest.approx(-found.rho)
    assert layers.rank_correlation(runs, "a", "a").rho == pytest.approx(1.0)
    assert layers.rank_correlation(runs, "a", "b") == found  # seeded


def test_whole_runs_are_resampled_where_groups_of_a_run_agree():
    """Within a run all groups are equal: only runs are independent, and the interval must say so."""
    orders = {"x": (1, 2, 3, 4, 5), "y": (5, 4, 3, 2, 1), "z": (1, 3, 2, 5, 4)}
    runs = {
        run: [
            row
            for number in range(1, 11)
            for row in rows_of(range(5), "a", "0", number) + rows_of(order, "b", "0", number)
        ]
        for run, order in orders.items()
    }
    of_groups = layers.rank_correlation(runs, "a", "b")
    of_runs = layers.rank_correlation(runs, "a", "b", unit="run")
    assert of_groups.rho == pytest.approx(of_runs.rho)
    assert (of_runs.low, of_runs.high) == pytest.approx((-1.0, 1.0))
    assert of_groups.high - of_groups.low < 1.0


def test_groups_without_a_rank_order_are_left_out_and_counted():
    runs = {
        "": rows_of(EXAMPLE, "a", "0")
        + rows_of(EXAMPLE, "b", "0")
        + rows_of(EXAMPLE, "a", "1")
        + rows_of([2.0] * 5, "b", "1")
        + rows_of(EXAMPLE, "a", "2")
        + rows_of([math.nan, math.nan, math.nan, 1, 2], "b", "2")
        + rows_of(EXAMPLE, "a", "all")
        + rows_of(EXAMPLE, "b", "all")  # no client
    }
    found = layers.rank_correlation(runs, "a", "b")
    assert (found.groups, found.left_out, found.rho) == (1, 2, pytest.approx(1.0))
    with pytest.raises(ValueError, match=r"No group .* has 'a' and 'c'.*There are: a, b"):
        layers.rank_correlation(runs, "a", "c")
    with pytest.raises(ValueError, match="unit='seed'"):
        layers.rank_correlation(runs, "a", "b", unit="seed")  # type: ignore[arg-type]


def test_correlations_as_rows():
    found = layers.correlation_rows(random_runs(), "a", ["b", "not there"])
    assert [row["b"] for row in found] == ["b"]
    assert set(found[0]) >= {"a", "rho", "low", "high", "groups"}


# -- figures -----------------------------------------------------------------------------------------------------------


def full_rows() -> list[LayerRow]:
    rows = rows_of(EXAMPLE) + rows_of([10] * 5, "num_parameters")
    for shift, client in enumerate("01"):
        rows += rows_of(np.cumsum(EXAMPLE) + shift, "sensitivity_online_cumulative", client)
        rows += rows_of([0.1, -0.2, 3.0, 0.0, 5.0], "hessian_trace_per_parameter", client)
        rows += rows_of([1.0, 0.9, 0.8, 0.5 + 0.2 * shift, 0.2], "cka", client)
    return rows


def test_the_numbers_of_the_figure_are_over_the_clients():
    found = layer_figures.layer_numbers(full_rows())
    cka = {row["layer"]: row for row in found if row["quantity"] == "cka"}
    assert cka["net.l4"]["mean"] == pytest.approx(0.6)
    assert (cka["net.l4"]["min"], cka["net.l4"]["max"], cka["net.l4"]["clients"]) == pytest.approx((0.5, 0.7, 2))
    assert len(found) == 15
    errors = [LayerRow(1, "L2", c, 1, "a", "hessian_trace_per_parameter", 1.0, e) for c, e in (("0", 3.0), ("1", 4.0))]
    assert layer_figures.layer_numbers(errors)[0]["std_error"] == pytest.approx(2.5)  # of a mean of two


def test_the_figure_has_a_panel_a_quantity_and_marks_the_transition():
    figure = layer_figures.plot_layers(full_rows(), threshold=2.0)
    shown = [axis for axis in figure.axes if axis.get_visible()]
    assert [axis.get_yscale() for axis in shown] == ["log", "symlog", "linear"]
    for axis in shown:
        assert 3.5 in [line.get_xdata()[0] for line in axis.lines]  # after layer 3
        assert [label.get_text() for label in axis.get_xticklabels()] == [f"l{k}" for k in range(1, 6)]
    assert "p = 3" in figure.get_suptitle()
    assert "p =" not in layer_figures.plot_layers(full_rows()).get_suptitle()
    with pytest.raises(ValueError, match="no row of round 7"):
        layer_figures.plot_layers(full_rows(), round=7)


def test_the_figure_of_the_transition_has_a_row_a_run(tmp_path):
    runs = {"seed 0": rows_of(EXAMPLE) + rows_of((0.0, 1.0, 0.1, 2.7, 1.0), number=2), "seed 1": rows_of(EXAMPLE)}
    figure = layer_figures.plot_transition(runs, threshold=1.15)
    assert len(figure.axes) == 4
    labels = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert labels == ["1: l1", "3: l3", "5: l5"]
    figure.savefig(tmp_path / "transition.png")
    with pytest.raises(ValueError, match="No run has 'sensitivity'"):
        layer_figures.plot_transition({"": rows_of(EXAMPLE, "cka")})
