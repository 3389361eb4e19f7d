"""The page: complete, self-contained, escaped, honest about problems, and the same for the same runs."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.text import Text

from fedlightning.datamodules import PartitionReport
from fedlightning.report import build, build_report
from fedlightning.report.build import make_page
from fedlightning.report.cells import Column, layout
from fedlightning.report.context import Context
from fedlightning.report.figures.client_maps import client_map
from fedlightning.report.figures.curves import curves
from fedlightning.report.figures.dots import SHAPES
from fedlightning.report.html import Gallery, breakable, render
from fedlightning.report.sections import layer_quantities, scores, training
from fedlightning.report.sections.setting import partition, total_variation
from fedlightning.report.sections.statistics import differences, rank_section
from fedlightning.report.sections.training import lines_of
from fedlightning.report.sentences import answers
from fedlightning.report.styles import BAD, COLOURS, GREYS, INK, MUTED, WARN, in_dark, styles
from fedlightning.study.finished_runs import load_study
from fedlightning.study.learning_curves import seed_curves
from fedlightning.study.ranks import ranks
from fedlightning.study.study import Study
from tests.report.made_up import add_layers, make_study
from tests.report.reader import Reader

EVIL = 'a <b>bold</b> & "quoted" $x_1$ method with a name as long as a whole line of this page would be'


BLANK = '<svg xmlns="http://www.w3.org/2000/svg" width="1pt" height="1pt" viewBox="0 0 1 1"></svg>'


def page_of(folder, drawn=False, **options):
    """A report without files, its sections, and the study. If not `drawn`, figures are made and then left blank."""
    study = Study(load_study([folder]), **options)
    with pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr("fedlightning.report.context.settle", lambda figure: None)
            patch.setattr("fedlightning.report.context.svg", lambda figure: BLANK)
        page = make_page({"": study})
    return Reader(render(page)), page, study


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A report of three methods, as ``report`` writes it."""
    folder = make_study(tmp_path_factory.mktemp("study"))
    out = tmp_path_factory.mktemp("out")
    path = build_report(out, [folder])
    return path, Study(load_study([folder]))


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A page of runs with everything wrong, one of them with an evil name."""
    folder = make_study(
        tmp_path_factory.mktemp("broken"),
        methods=("fedavg", EVIL, "apfl", "siloed"),
        nan=("apfl", 2, "3"),
        without=[("siloed", 1)],
        other_split=("fedavg", 0),
        failed={(EVIL, 1): "RuntimeError: it <broke>."},
        matrix=False,
    )
    return page_of(folder, drawn=True)


@pytest.mark.parametrize("which", ["built", "broken"])
@pytest.mark.fast_cases(1)
def test_html_is_sound_and_needs_nothing_else(which, request):
    found = request.getfixturevalue(which)
    html = found[0].read_text() if which == "built" else render(found[1])
    reader = Reader(html)
    assert reader.errors == []
    assert len(reader.ids) == len(set(reader.ids))
    for tag, name, value in reader.links:
        assert value.startswith(("#", "data:image/png;base64,")), f"<{tag} {name}={value!r}>"
        assert not value.startswith("#") or value[1:] in reader.ids
    assert set(re.findall(r"url\(#([^)]+)\)", html)) <= set(reader.ids)
    assert not re.search(r"@import|@font-face|url\((?!#)|https?://|//cdn|<link|<iframe", html)
    assert [tag for tag, _ in reader.tags].count("script") == 1  # sorting, inline
    assert len(html) < 5e6


def test_every_figure_has_an_alternative_text_and_a_table(built):
    reader = Reader(built[0].read_text())
    figures = [given for tag, given in reader.tags if tag == "figure"]
    pictures = [given for tag, given in reader.tags if tag == "svg" and given.get("role") == "img"]
    assert len(figures) == len(pictures) > 15
    assert all(reader.tables[given["data-table"]] for given in figures)
    assert all(re.search(r"\d", given["aria-label"]) for given in pictures), "an alternative text tells numbers"


def test_figures_are_written_with_their_numbers(built):
    path, _ = built
    reader = Reader(path.read_text())
    names = [given["id"].removeprefix("figure-") for tag, given in reader.tags if tag == "figure"]
    folder = path.parent / "figures"
    for name in names:
        assert (folder / f"{name}.svg").read_bytes().startswith(b"<?xml")
    tables = {given["data-table"].removeprefix("table-") for tag, given in reader.tags if tag == "figure"}
    assert {file.stem for file in folder.glob("*.csv")} == tables
    assert json.loads((path.parent / "comparison.json").read_text())["results"]


def test_figures_are_written_for_print(tmp_path, monkeypatch, figures_for_print):
    monkeypatch.setattr("fedlightning.report.context.save", figures_for_print)
    study = Study(load_study([make_study(tmp_path, methods=("fedavg", "siloed"), matrix=False)]))
    context = Context(study, styles(study.data.methods), figures=tmp_path / "figures")
    context.picture("bars", "Bars", "1", lambda: client_map({"m": {"0": 0.5}}, gains=False))
    for kind, start in (("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")):
        assert (tmp_path / "figures" / f"bars.{kind}").read_bytes().startswith(start)


def test_tables_hold_the_study_s_numbers(built):
    reader, study = Reader(built[0].read_text()), built[1]
    shown = {row[0][0].strip(): [value for _, value in row] for row in reader.tables["table-overview"]}
    rows = {row["method"]: row for row in study.overview()}
    assert list(shown) == sorted(rows, key=lambda name: -rows[name]["mean"])
    for name, values in shown.items():
        for key in ("mean", "median", "tenth_percentile", "worst", "pooled", "sum", "local_steps"):
            assert repr(rows[name][key]) in values, (name, key)
    stages = [(row[0][0].strip(), row[1][0], row[2][1]) for row in reader.tables["table-stages"]]
    expected = {(row["method"], row["stage"], repr(row["local"])) for row in study.stages()}
    assert set(stages) == expected
    clients = {row[0][0]: [value for _, value in row[1:]] for row in reader.tables["table-clients"]}
    for row in study.clients():
        assert repr(row["score"]) in clients[row["client"]]
    curves = [value for row in reader.tables["table-curves"] for _, value in row]
    assert all(repr(row["mean"]) in curves for row in study.curves())
    references = [study.differences(name) for name in ("siloed", "fedavg")]
    differences = [value for row in reader.tables["table-differences"] for _, value in row]
    assert all(repr(row[key]) in differences for of in references for row in of for key in ("mean", "p", "p_holm"))
    for matrix in (study.matrix(method) for method in study.data.methods):
        values = [value for row in reader.tables["table-matrix"] for _, value in row]
        assert all(repr(value) in values for line in matrix["values"] for value in line)


def test_shown_numbers_are_the_rounded_ones(built):
    reader = Reader(built[0].read_text())
    for rows in reader.tables.values():
        for text, value in (cell for row in rows for cell in row):
            match = re.match(r"^[−+]?[\d\u2009]+(\.\d+)?(?=\s|$)", text.strip())
            if value and match and " " not in value:
                decimals = len((match[1] or ".")[1:])
                number = float(match[0].replace("−", "-").replace("\u2009", ""))
                assert abs(number - float(value)) <= 0.5001 * 10**-decimals, (text, value)


def test_problems_are_said_and_stand_where_the_number_would(broken):
    reader, _, study = broken
    kinds = {problem.kind for problem in study.problems}
    assert {"failed", "missing_seed", "different_splits", "nan"} <= kinds
    for problem in study.problems:
        assert problem.text.removeprefix(f"{problem.run} ") in reader.text  # said once for several methods
    row = next(row for row in reader.tables["table-overview"] if row[0][0].strip() == "apfl")
    assert row[1] == ("undefined: NaN at seed 2, client 3", None)
    assert "0." not in " ".join(text for text, _ in row[1:5])
    client = reader.tables["table-clients"][3]
    assert any("undefined" in text for text, _ in client)


def test_names_are_escaped(broken):
    reader, page, _ = broken
    html = render(page)
    assert "<b>bold" not in html and "it <broke>" not in html
    assert EVIL in reader.text and "it <broke>" in reader.text


@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes(built):
    html, study = built[0].read_text(), built[1]
    context = Context(Study(study.data.runs), styles(study.data.methods, ["siloed"]))
    for section in (scores.overview(context), training.learning_curves(context)):
        gallery = section.parts[0]
        for picture in gallery.pictures:
            assert picture.svg in html
    assert "generated" not in html.lower() and not re.search(r"\b20\d\d-\d\d-\d\d", html)


def told(folder, **options):
    """The answers at the top, by question, and the study."""
    study = Study(load_study([folder]), **options)
    return {a.question: a for a in answers(Context(study, styles(study.data.methods)))}, study


def test_the_kindest_method_is_said_to_be_one_of_the_federated(tmp_path):
    """Siloed training may serve the worst client better, and is not among those that are asked."""
    found, _ = told(make_study(tmp_path, seeds=(4,), shift=0.2, matrix=False))
    assert "Among the federated methods, the worst-served client" in found["For whom?"].sentence


def test_one_seed_is_never_called_a_difference(tmp_path):
    found, study = told(make_study(tmp_path, seeds=(4,), shift=0.2, matrix=False))
    answer = found["Is the difference real?"]
    assert answer.answer == "One seed: cannot be said"
    assert "p =" not in answer.sentence
    section = differences(Context(study, styles(study.data.methods)))
    gallery = next(part for part in section.parts if isinstance(part, Gallery))
    assert gallery.table.rows and not any(column.key == "p" for column in gallery.table.columns)


def test_no_method_is_the_best_of_two_targets(tmp_path):
    folder = make_study(tmp_path, methods=("fedavg", "apfl"), shift=0.2, matrix=False)
    for path in folder.glob("runs/*/*/summary.json"):
        target = {"run_0": "ill", "run_1": "died"}[path.parts[-3]]
        (path.parent / "config.yaml").write_text(f"data: {{init_args: {{target: {target}}}}}")
    found, _ = told(folder)
    (answer,) = found.values()
    assert answer.answer == "Cannot be said" and answer.method is None
    assert "accuracy is of ill in fedavg; of died in apfl: give all runs the same target" in answer.sentence


@pytest.mark.parametrize(("shift", "expected"), [(0.2, "Yes, for this test set"), (0.0, "Not distinguishable")])
def test_a_difference_is_called_real_only_beyond_the_variation_of_seeds(tmp_path, shift, expected):
    folder = make_study(tmp_path, methods=("fedavg", "apfl"), shift=shift, offset=0.0, matrix=False)
    found, study = told(folder)
    best = found["Which method is best on average?"].method
    (line,) = study.differences(best)
    assert (line["p"] < 0.05) == (shift > 0)
    answer = found["Is the difference real?"]
    assert answer.answer == expected
    assert f"{best} is {abs(line['mean']):.3f} ahead of the second" in answer.sentence
    assert found["At what price?"].sentence.startswith(f"{best} sends ")
    least = ("No other federated method sends less.", "The least is sent by ")  # local training sends nothing
    assert any(words in found["At what price?"].sentence for words in least)


def test_seeds_that_change_nothing_say_nothing_about_chance(tmp_path):
    folder = make_study(tmp_path, methods=("fedavg", "apfl"), shift=0.2, matrix=False)
    for method in (0, 1):
        for seed in (1, 2):
            first, other = (folder / f"runs/run_{method}/seed_{s}/summary.json" for s in (0, seed))
            other.write_text(json.dumps(json.loads(first.read_text()) | {"seed": seed}))
    found, _ = told(folder)
    assert found["Is the difference real?"].answer == "Cannot be said"
    assert "p =" not in found["Is the difference real?"].sentence


def test_for_a_loss_less_is_better_everywhere(tmp_path):
    reader, _, study = page_of(make_study(tmp_path, matrix=False), metric="loss")
    rows = {row["method"]: row for row in study.overview()}
    shown = [row[0][0].strip() for row in reader.tables["table-overview"]]
    assert shown == sorted(rows, key=lambda name: rows[name]["mean"])
    gains = {(row["client"], row["method"]): row["gain"] for row in study.clients()}
    assert "Siloed’s loss minus own" in reader.text
    for line in reader.tables["table-clients-gain"]:
        values = {value for _, value in line[1:]}
        assert values == {repr(gains[line[0][0], m]) for m in rows if m != "siloed"}


def test_curves_have_their_intervals_and_prices_as_numbers(built):
    reader, study = Reader(built[0].read_text()), built[1]
    curve = study.curves()[0]
    row = reader.tables["table-curves"][0]
    assert f"{curve['ci95_radius']:.4f}" in " ".join(text for text, _ in row)
    values = [value for _, value in row]
    assert repr(curve["local_steps"]) in values and repr(curve["seconds"]) in values


def test_a_method_on_other_data_is_never_bold():
    rows = [{"x": 1.0}, {"x": 2.0}, {"x": 9.0, "comparable": False}, {"x": 8.0, "n_seeds": 1, "seeds": 3}]
    states = [line[0].state for line in layout([Column("x", "x", better="high")], rows)]
    assert states == ["", "best", "", ""]


def test_across_a_row_the_best_of_the_columns_that_take_part_is_bold():
    columns = [Column("client", "client", "text"), Column("a", "a", better="low"), Column("b", "b", better="low")]
    columns.append(Column("c", "c"))  # on other data: shown, not compared
    rows = [{"client": "0", "a": 2.0, "b": 1.0, "c": 0.0}, {"client": "1", "a": 3.0, "b": 3.5, "c": 0.0}, {"a": 1.0}]
    states = [[cell.state for cell in line[1:]] for line in layout(columns, rows, across=True)]
    assert states == [["", "best", ""], ["best", "", ""], ["", "none", "none"]]  # one value alone is not the best


def bold(page: str, table: str) -> list[list[bool]]:
    """Which cells of a table are bold, row by row."""
    body = page.partition(f'<table id="{table}"')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    return [["best" in kinds.split() for kinds in re.findall(r'<td class="([^"]*)"', row)] for row in rows]


def test_every_client_has_its_best_method_in_bold(tmp_path):
    study = make_study(tmp_path, methods=("fedavg", "siloed", "apfl"), other_split=("apfl", 1), shift=0.02, offset=0.0)
    reader, made, _ = page_of(study)
    shown, page = reader.tables["table-clients"], render(made)
    names = re.findall(r'<th scope="col"[^>]*>([^<]*)', page.partition('<table id="table-clients"')[2])[1:4]
    ranked = [name != "apfl" for name in names]  # it is ahead, but a seed of it is on other data
    for cells, marks in zip(shown, bold(page, "table-clients"), strict=True):
        values = [float(value) for _, value in cells[1:]]
        best = max(value for value, asked in zip(values, ranked, strict=True) if asked)
        assert marks == [asked and value == best for value, asked in zip(values, ranked, strict=True)]
    assert "bold: the best of these methods for that client" in page


def test_classes_have_their_names(tmp_path):
    study = Study(load_study([make_study(tmp_path, methods=("fedavg",), classes=3, matrix=False)]))
    for given, shown in ((["cat", "a dog", "owl"], ["cat", "a dog", "owl"]), (["cat"], ["0", "1", "2"])):
        for found in study.data.finished.values():
            found.run.summary["data"]["class_names"] = given
        (gallery,) = partition(Context(study, styles(study.data.methods))).parts
        columns = [column.title for column in gallery.table.columns if column.group == "training samples of class"]
        assert columns == shown


def test_the_reader_is_told_why_central_training_is_not_the_best(tmp_path):
    sentence = "central moves all data to one place, so it is not asked who is best"
    for second in ("central", "apfl"):
        study = Study(load_study([make_study(tmp_path / second, methods=("fedavg", second), shift=0.2, matrix=False)]))
        (exhibit,) = scores.overview(Context(study, styles(study.data.methods))).parts
        assert any(sentence in note for note in exhibit.table.notes) == (second == "central")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("localadaptation", ["localadaptation"]),
        ("PLayerFLRandom", ["PLayer", "FLRandom"]),
        ("fedprox_mu=0.001", ["fedprox_", "mu=", "0.001"]),
        ("a.b/<c>", ["a.", "b/&lt;c&gt;"]),
    ],
)
def test_long_names_break_at_their_joints_and_stay_escaped(name, parts):
    assert breakable(name) == "<wbr>".join(parts)


def test_methods_with_fewer_seeds_are_not_ranked(tmp_path):
    found, _ = told(make_study(tmp_path, methods=("fedavg", "apfl"), without=[("apfl", 1)], shift=0.2, matrix=False))
    best = found["Which method is best on average?"]
    assert best.method == "fedavg"
    assert "Not ranked" in best.sentence and best.sentence.endswith("apfl.")


def test_one_method_alone_is_compared_with_nothing(tmp_path):
    """No empty figure of differences."""
    study = Study(load_study([make_study(tmp_path, methods=("fedavg",), seeds=(0,), matrix=False)]))
    assert differences(Context(study, styles(study.data.methods))) is None


def test_layers_of_the_last_round_and_where_they_part(tmp_path):
    folder = make_study(tmp_path, methods=("fedavg",), seeds=(0,), matrix=False)
    study = Study(load_study([folder]))
    context = Context(study, styles(study.data.methods))
    assert layer_quantities.layers(context) is None
    add_layers(folder / "runs/run_0/seed_0")
    section = layer_quantities.layers(context)
    gallery, transitions, correlations = section.parts
    shown = {row["layer"]: row["hessian_trace_per_parameter"] for row in gallery.table.rows}
    assert shown == {f"{layer}": 5.0 * 2**layer * 3 for layer in (1, 2, 3)}
    assert {row["round"] for row in transitions.rows} == {3}
    assert [row["rho"] for row in correlations.rows] == [1.0]


def test_layers_in_the_current_folder_are_of_no_run_of_this_session(tmp_path, monkeypatch):
    folder = make_study(tmp_path, methods=("fedavg",), seeds=(0,), matrix=False)
    add_layers(folder / "runs/run_0/seed_0")
    monkeypatch.chdir(folder / "runs/run_0/seed_0")
    (run,) = load_study([folder])
    study = Study([replace(run, path=None)])
    assert layer_quantities.layers(Context(study, styles(study.data.methods))) is None


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A report of two data sets, with the overview alone of each."""
    names = ("fedavg", "apfl", "siloed")
    folders = [make_study(tmp_path_factory.mktemp(f"data<{i}>") / "x", names, clients=3 + i, shift=0.1) for i in (0, 1)]
    out = tmp_path_factory.mktemp("several")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "PARTS", (scores.overview,))
        return build_report(out, folders, title="Two & more"), [Study(load_study([folder])) for folder in folders]


def test_data_sets_that_agree_are_judged_by_chi_square(tmp_path):
    folders = [make_study(tmp_path / name, seeds=(0,), shift=0.1, matrix=False) for name in "ab"]
    studies = {folder.name: Study(load_study([folder])) for folder in folders}
    found = ranks(studies)
    assert found["iman_davenport"] == float("inf") and found["p_value"] > 0.05  # 3 methods, 2 data sets
    section = rank_section(Context(studies["a"], styles(studies["a"].data.methods)), studies)
    assert "does not tell the methods apart" in section.parts[0].paragraphs[0]


def test_several_data_sets_are_ranked_and_kept_apart(several):
    path, studies = several
    reader = Reader(path.read_text())
    assert reader.errors == [] and len(reader.ids) == len(set(reader.ids))
    assert "Two & more" in reader.text
    overviews = [name for name in reader.tables if name.endswith("-overview")]
    assert len(overviews) == 2
    for name, study in zip(overviews, studies, strict=True):
        values = [value for row in reader.tables[name] for _, value in row]
        assert all(repr(row["mean"]) in values for row in study.overview())
    found = ranks(dict(enumerate(studies)))
    shown = {row[0][0].strip(): float(row[1][1]) for row in reader.tables["table-ranks"]}
    assert shown == found["ranks"]
    content = json.loads((path.parent / "comparison.json").read_text())
    assert len({row["dataset"] for row in content["results"]}) == 2
    assert content["ranks"]["ranks"] == found["ranks"]


def test_without_the_extra_the_report_says_what_to_install(several, monkeypatch):
    monkeypatch.setattr("fedlightning.report.sections.statistics.find_spec", lambda name: None)
    studies = {str(i): study for i, study in enumerate(several[1])}
    section = rank_section(Context(several[1][0], styles(several[1][0].data.methods)), studies)
    assert "pip install 'scikit-posthocs>=" in " ".join(section.parts[0].paragraphs)
    assert section.parts[-1].rows, "the ranks are there as a table"


@pytest.mark.slow
def test_many_clients_and_methods_stay_readable_and_small(tmp_path):
    methods = [f"method-{i}" for i in range(10)] + ["fedavg", "siloed"]
    folder = make_study(tmp_path, methods=methods, seeds=(0, 1), clients=100, rounds=2)
    reader, page, _ = page_of(folder)
    assert reader.errors == []
    assert len(render(page)) < 5e6
    pictures = [p for s in page.sections for part in s.parts if isinstance(part, Gallery) for p in part.pictures]
    assert max(picture.svg.count("<text") for picture in pictures) < 60, "clients are not labelled one by one"


def test_every_method_of_many_looks_its_own():
    names = [f"method-{i}" for i in range(40)]
    found = styles(names, names[:3])
    assert len({(style.colour, style.marker) for style in found.values()}) == len(names)
    assert len({found[name].colour for name in names[3:15]}) == 12


def test_many_clients_are_a_row_of_colour_each_without_their_names():
    values = {f"client {i}": (7 * i % 100) / 100 for i in range(100)}
    axes, _ = client_map({"m": values, "n": values}, gains=False).axes
    assert axes.images[0].get_array().shape == (100, 2) and not axes.texts
    assert len(axes.get_yticks()) == 0 and "100 clients" in axes.get_ylabel()


def test_gains_are_a_map_around_0_of_clients_by_methods_and_say_where_there_is_none():
    gains = {"m": {"a": -0.1, "b": 0.3, "c": None}, "n": {"a": 0.2, "b": 0.0, "c": 0.1}}
    axes, _ = client_map(gains, gains=True).axes
    assert axes.images[0].get_clim() == (-0.3, 0.3)
    assert [text.get_text() for text in axes.texts] == ["−0.100", "+0.200", "+0.300", "+0.000", "?", "+0.100"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["m", "n"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]


def test_nothing_that_a_map_of_few_clients_says_is_cut():
    figure = client_map({"m": {"a": -0.1}, "n": {"a": 0.2}}, gains=True)
    figure.draw_without_rendering()
    for text in figure.findobj(Text):
        box = text.get_window_extent()
        assert not text.get_text() or (figure.bbox.contains(*box.min) and figure.bbox.contains(*box.max)), text


@pytest.mark.parametrize(("seeds", "thin", "bands"), [(2, 2, 0), (5, 0, 1)])
def test_few_seeds_are_lines_and_many_are_bands(tmp_path, seeds, thin, bands):
    study = Study(load_study([make_study(tmp_path, methods=("fedavg",), seeds=range(seeds), matrix=False)]))
    context = Context(study, styles(study.data.methods))
    assert context.few_seeds == bool(thin)
    runs = seed_curves(study.data) if context.few_seeds else None
    rows = [row for row in study.curves() if row["stage"] == "G" and row["data"] == "local"]
    found = None if runs is None else {"fedavg": runs["fedavg", "G", "local"]}
    (axes,) = curves(lines_of(context, rows, "round"), context.styles, "round", "accuracy", runs=found).axes
    assert len([line for line in axes.lines if line.get_linewidth() < 1]) == thin
    assert len(axes.collections) == bands
    if runs is not None:
        by_seed = np.array([[value for _, value in points] for points in found["fedavg"]])
        assert by_seed.mean(axis=0) == pytest.approx([row["mean"] for row in rows])


def test_every_colour_of_figures_has_one_for_dark_pages_that_can_be_seen(built):
    page = built[0].read_text()
    assert "prefers-color-scheme: dark" in page and "/* figures */" not in page
    drawn = set(re.findall(r"var\(--c-([0-9a-f]{6}), #\1\)", page))
    assert drawn and all(f"--c-{colour}: {in_dark('#' + colour)};" in page for colour in drawn)
    paper = luminance(in_dark("#ffffff"))
    for colour in (*COLOURS, *GREYS, INK, MUTED, BAD, WARN):
        assert (luminance(in_dark(colour)) + 0.05) / (paper + 0.05) >= 3, colour
    assert len({in_dark(colour) for colour in (*COLOURS, *GREYS)}) == len({*COLOURS, *GREYS})


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_one_kind_of_model_has_one_symbol():
    kinds = [shape for name, shape in SHAPES.items() if name not in ("latest (G)", "latest (L1)")]
    assert len(set(kinds)) == len(kinds)
    assert SHAPES["latest (G)"] == SHAPES["G"] and SHAPES["latest (L1)"] == SHAPES["L1"]


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LOOK = """<script>addEventListener("load", () => { document.title = JSON.stringify({
  over: document.documentElement.scrollWidth - innerWidth,
  wide: [...document.querySelectorAll("figure svg")].filter(one => one.getBoundingClientRect().right > innerWidth + 1).length,
  figures: document.querySelectorAll("figure svg").length,
  small: Math.min(...[...document.querySelectorAll("figure svg text")].map(one => one.getBoundingClientRect().height)),
  paper: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.querySelector("figure svg text")).fill,
}) })</script></head>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1440, 390])
def test_a_browser_shows_the_page(built, tmp_path, width, dark):
    """Opened at the width of a desk and of a telephone (in a frame: a window has a least width), light and dark."""
    (tmp_path / "page.html").write_text(built[0].read_text().replace("</head>", LOOK))
    frame = f"<iframe src='page.html' style='width:{width}px;height:900px;border:0' onload='document.title = "
    (tmp_path / "frame.html").write_text(frame + "this.contentDocument.title'></iframe>")
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
         f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--window-size=1500,1000",
         "--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path / 'frame.html'}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title, done.stderr[-500:]
    seen = json.loads(html.unescape(title[1]))
    assert seen["figures"] > 5 and seen["over"] <= 0 and seen["wide"] == 0
    assert seen["small"] >= 6  # pixels
    assert (seen["paper"], seen["ink"]) == (
        ("rgb(20, 24, 29)", "rgb(228, 232, 236)") if dark else ("rgb(255, 255, 255)", "rgb(28, 33, 38)")
    )


def test_distances_between_labels_are_those_of_the_partition():
    counts = np.random.default_rng(0).integers(0, 9, (6, 4)) * np.array([[1], [1], [0], [1], [1], [1]])
    expected = PartitionReport(list("abcdef"), list("wxyz"), counts).total_variation
    assert np.array_equal(total_variation(counts), expected, equal_nan=True) and np.isnan(expected[2])


def test_a_report_does_not_wait_for_lightning(tmp_path):
    """Its import takes longer than the report of a few runs."""
    words = ["report", str(make_study(tmp_path / "study")), "--out", str(tmp_path / "page")]
    code = f"import sys, fedlightning.cli as cli; print(cli.main({words!r})); print('lightning' in sys.modules)"
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.splitlines()
    assert lines[-2:] == ["0", "False"]
