"""The files of a figure."""

from __future__ import annotations

from fedlightning.report.drawing import _LOOK, look, panel, save, settle, svg


def test_a_figure_is_there_for_pages_screens_and_publishers(tmp_path, readers_fonts, monkeypatch):
    monkeypatch.setitem(_LOOK, "pdf.fonttype", readers_fonts)
    with look():
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
