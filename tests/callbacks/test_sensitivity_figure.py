"""What is drawn is what the sensitivity says."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from fedlightning.callbacks.diagnostics.sensitivity_figure import SMALLEST, draw, short
from fedlightning.callbacks.diagnostics.sensitivity_terms import Sensitivity

NAMES = ["net.body.conv1", "net.body.conv2", "net.head.0", "net.head.1", "net.head.2"]
F = (1.0, 1.2, 1.3, 4.0, 5.0)


def made(f=F, names=NAMES):
    terms = [b - a for a, b in pairwise((0.0, *f))]
    return Sensitivity(list(names), [1] * len(terms), terms)


def texts(axis):
    return [text.get_text() for text in axis.texts]


def test_the_first_panel_is_f_over_its_first_value():
    axis = draw(made(tuple(4.0 * value for value in F))).axes[0]
    (line,) = axis.lines
    assert line.get_xdata().tolist() == [1, 2, 3, 4, 5]
    assert line.get_ydata().tolist() == pytest.approx([value / F[0] for value in F])  # whatever the scale
    assert [label.get_text() for label in axis.get_xticklabels()] == [name.removeprefix("net.") for name in NAMES]


def test_the_second_panel_has_a_mark_for_each_pair_of_neighbours():
    found = made()
    axis = draw(found).axes[1]
    marks = {line.get_xdata()[0]: line.get_ydata()[0] for line in axis.lines if line.get_marker() == "o"}
    assert marks == pytest.approx({gap: ratio - 1 for gap, ratio in enumerate(found.ratios, 1)})
    assert [float(text) for text in texts(axis)] == pytest.approx(found.ratios, rel=1e-2)


def test_a_jump_from_zero_is_an_arrow_and_two_zeros_are_nothing():
    axis = draw(made((0.0, 0.0, 1.0, 1.0, 2.0))).axes[1]
    marks = {line.get_xdata()[0]: line.get_marker() for line in axis.lines if line.get_marker() not in ("None", "")}
    assert marks == {2: "^", 3: "o", 4: "o"}  # 0/0 has no mark
    assert texts(axis)[0] == "∞"
    flat = next(line for line in axis.lines if line.get_xdata()[0] == 3 and line.get_marker() == "o")
    assert flat.get_ydata()[0] == SMALLEST  # a ratio of exactly 1, on a logarithmic axis


def test_the_third_panel_is_p_of_every_threshold():
    found = made()
    (line,) = draw(found).axes[2].lines
    excess, p = line.get_xdata(), line.get_ydata()
    assert [found.transition(1 + value) for value in excess] == p.tolist()
    assert p.tolist() == sorted(p.tolist()) and set(p.tolist()) == {1, 3, 5}
    assert excess[-1] > max(found.ratios) - 1  # the whole staircase is seen


@pytest.mark.parametrize(
    ("threshold", "split", "said"),
    [
        (2.0, None, "federated up to here\np = 3: head.0"),
        (1.1, None, "federated up to here\np = 1: body.conv1"),
        (math.inf, None, "federated\np = 5: all"),
        (2.0, 2, "federated up to here\np = 2: body.conv2"),
        (None, 0, "federated\np = 0: nothing"),
    ],
)
def test_what_is_federated_is_marked_and_said(threshold, split, said):
    figure = draw(made(), threshold, split=split)
    assert texts(figure.axes[0]) == [said]
    shown = threshold is not None and math.isfinite(threshold)
    rules = [line.get_ydata()[0] for line in figure.axes[1].lines if line.get_linestyle() == "--"]
    assert rules == ([pytest.approx(threshold - 1)] if shown else [])
    legend = figure.axes[2].get_legend()
    assert ([text.get_text() for text in legend.get_texts()] if legend else []) == (
        [f"t = {threshold:g}"] if shown else []
    )


def test_names_lose_what_they_have_in_common_and_no_more():
    assert short(["net.conv1", "net.fc"]) == ["conv1", "fc"]
    assert short(["a.b.x", "a.b.y.z"]) == ["x", "y.z"]
    assert short(["a.x", "b.x"]) == ["a.x", "b.x"]
    assert short(["net.fc"]) == ["fc"]
    assert short(["net", "net.fc"]) == ["net", "net.fc"]
    assert short([]) == []
