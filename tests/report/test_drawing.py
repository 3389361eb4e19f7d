"""The files of a figure."""

from __future__ import annotations

from fedlightning.report.drawing import _LOOK, panel, save, settle, svg, use_style
from fedlightning.report.figures.curves import curves
from fedlightning.report.figures.spread import against
from fedlightning.report.styles import styles


def test_a_figure_is_there_for_pages_screens_and_publishers(tmp_path, readers_fonts, monkeypatch):
    monkeypatch.setitem(_LOOK, "pdf.fonttype", readers_fonts)
    with use_style():
        figure, axes = panel()
        axes.set_title("Accuracy")
        settle(figure)
        save(figure, svg(figure), tmp_path, "bars")
    files = {path.suffix: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(files) == {".svg", ".png", ".pdf"}
    assert b"Accuracy</text>" in files[".svg"]
    assert files[".png"].startswith(b"\x89PNG")
    assert b"/FontFile2" in files[".pdf"], "publishers want fonts embedded as TrueType"
    assert b"/CreationDate" not in files[".pdf"]


def test_a_marker_under_another_one_is_larger_than_it():
    points = {"fedavg": (1.0, 0.5), "local": (0.0, 0.9), "fedprox": (1.0, 0.5001)}
    lines = against(points, styles(points), "MB", "accuracy").axes[0].get_lines()
    sizes = {line.get_label(): line.get_markersize() for line in lines}
    assert sizes["fedavg"] > sizes["fedprox"] == sizes["local"]


def test_rounds_are_whole_numbers_also_where_there_is_one():
    for rounds in (1, 2, 30):
        points = [(float(number), 0.1 * number, None) for number in range(1, rounds + 1)]
        figure = curves({"a": points}, styles(["a"]), "round", "accuracy", whole=True)
        settle(figure)
        ticks = figure.axes[0].get_xticks()
        assert len(ticks) and all(float(tick).is_integer() for tick in ticks)
