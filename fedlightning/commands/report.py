"""`fedlightning report`: the report of finished runs."""

from __future__ import annotations

import io
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedlightning.commands.json_output import print_json
from fedlightning.commands.study_options import Parser
from fedlightning.commands.terminal import console, say, shown
from fedlightning.compat.rich_tables import print_whole
from fedlightning.config.input_errors import InputError, explain
from fedlightning.experiments.children import ChildCrash, call
from fedlightning.study.columns import interval_text

DESCRIPTION = """\
Compare finished runs: tables, figures and one HTML page.

RUN is the folder of a run (runs/NAME/version_N), a folder of runs (runs/quickstart), or the --out
folder of `fedlightning compare`. They may be given together. Nothing is trained or scored again."""
EXAMPLES = """\
examples:
  fedlightning report runs/heart
  fedlightning report runs/quickstart/version_0 runs/fenda/version_2 --out runs/report --metric f1_macro
"""


MOST_SITES = 6
"""Up to this many held-out sites have columns on the terminal."""


def parser() -> Parser:
    """Return the parser of the command."""
    command = Parser("report", "RUN [RUN ...]", DESCRIPTION, EXAMPLES)
    command.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, of several, or of a compare"
    )
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write to; default: RUN, if it is one folder of several runs"
    )
    command.add_argument(
        "--metric", help="metric to compare; default: that of the compare, else accuracy, rmse or loss"
    )
    command.add_argument("--checkpoint", help="models to compare: deployed, latest, best_local, best_global")
    command.add_argument("--title", help="title of the page")
    command.add_argument("--json", action="store_true", help="print the overview as one line of JSON too, the last one")
    return command


def report(words: Sequence[str]) -> int:
    """Carry out the command and return its exit code."""
    from fedlightning.report.build import build_report
    from fedlightning.study.finished_runs import STUDY_FILE, load_study, read_study_file, runs_below

    options = parser().parse_args(list(words))
    runs: list[Path] = options.runs
    studies = [path / STUDY_FILE for path in runs if (path / STUDY_FILE).exists()]
    if options.out is None and not (len(runs) == 1 and (studies or runs_below(runs[0]))):
        load_study(runs)  # raises if a folder is not a run
        raise InputError("--out is missing: say where the report of these runs is to go.")
    study = read_study_file(studies[0]) if studies else {}
    metric, checkpoint = (
        options.metric or study.get("metric"),
        options.checkpoint or study.get("checkpoint", "deployed"),
    )
    page = build_report(options.out or runs[0], runs, metric=metric, checkpoint=checkpoint, title=options.title)
    say(console(), f"Report: {shown(page)}")
    if options.json:
        print_json("report", page=page, **overview_of(runs, metric, checkpoint))
    return 0


def overview_of(runs: Sequence[Path], metric: str | None, checkpoint: str) -> dict[str, Any]:
    """Return the fields of `--json` that the runs tell, with the metric that was chosen."""
    from fedlightning.study.finished_runs import load_study
    from fedlightning.study.study import Study

    study = Study(load_study(runs), metric=metric, checkpoint=checkpoint)
    problems = list(dict.fromkeys(problem.text for problem in study.problems))
    return {"metric": study.data.metric, "checkpoint": checkpoint, "overview": study.overview(), "problems": problems}


def write_report(out: Path, runs: Sequence[Path], metric: str | None, checkpoint: str, screen: Console) -> None:
    """Print the overview and write the report. Errors are printed but not raised, since the runs are done."""
    try:
        show_overview(runs, metric, checkpoint, screen)
        from fedlightning.report.build import build_report

        page = build_report(out, runs, metric=metric, checkpoint=checkpoint)
        say(screen, f"\nReport: {shown(page)}")
    except Exception as error:
        sentence = explain(error)
        if sentence is None:
            traceback.print_exception(error)
        say(
            screen,
            f"The report could not be written: {sentence or repr(error)}\nThe runs are there. Try again: "
            f"fedlightning report {shown(out)}",
            style="yellow",
            markup=False,
        )


def write_report_aside(out: Path, runs: Sequence[Path], metric: str | None, checkpoint: str, screen: Console) -> None:
    """Do as :func:`write_report` in a process forked from one that has imported what figures and statistics need.

    This process, which has watched the runs, would import it all (seconds, and hundreds of MB) for one page.
    """
    try:
        text = call(_written, out, runs, metric, checkpoint, screen.width, screen.color_system)
    except ChildCrash as error:
        text = f"The report could not be written: {error} Try again: fedlightning report {shown(out)}\n"
    screen.file.write(text)
    screen.file.flush()


def _written(out: Path, runs: Sequence[Path], metric: str | None, checkpoint: str, width: int, colors: Any) -> str:
    """Write the report and return what a terminal of this width and these colours would have shown."""
    text = io.StringIO()
    screen = Console(file=text, width=width, color_system=colors, force_terminal=colors is not None)
    write_report(out, runs, metric, checkpoint, screen)
    return text.getvalue()


def show_overview(runs: Sequence[Path], metric: str | None, checkpoint: str, screen: Console) -> None:
    """Print one line a method, and the problems of the runs."""
    from fedlightning.study.columns import GLOBAL, POOLED
    from fedlightning.study.evidence import word_of_best
    from fedlightning.study.external_validation import sites_of
    from fedlightning.study.finished_runs import load_study
    from fedlightning.study.study import Study
    from fedlightning.study.target_units import describe_units, target_of

    study = Study(load_study(runs), metric=metric, checkpoint=checkpoint)
    table = _by_method("own data", "worst", "all data", "global", "to the best", "MB", "seeds")
    word = word_of_best(study.data)
    for line in study.overview():
        table.add_row(
            escape(line["method"]),
            _cell(line["mean"], line["ci95"]),
            _cell(line["worst"]),
            _cell(line[POOLED]),
            _cell(line[GLOBAL]),
            word if line["best"] else _cell(line["gap"], line["gap_ci95"], "+"),
            _megabytes(line["mb_total"]),
            str(line["n_seeds"]) if line["n_seeds"] == line["seeds"] else f"{line['n_seeds']} of {line['seeds']}",
        )
    screen.print(
        f"\n{study.data.metric} on test data, {checkpoint} models: mean over clients, then over seeds", highlight=False
    )
    print_whole(screen, table)
    central = study.data.baselines.get("central")
    means = "by sources of variance" if study.data.grid_size else "t"
    not_asked = f" ({central}, which moves all data, is not asked)" if central else ""
    screen.print(
        f"own data: each client's model on its own test data, ± 95 % ({means}) over seeds; worst: client; all data: on "
        f"everybody's; global: the server's model; to the best: paired over seeds{escape(not_asked)}; MB: up and down, all "
        "clients.",
        highlight=False,
    )
    for text in describe_units((target_of(run.config) for run in study.data.runs), study.data.metric):
        screen.print(text, highlight=False, markup=False)
    show_unseen(study.unseen(), screen)
    show_external(sites_of(study.data), study.external(), screen)
    for text in dict.fromkeys(problem.text for problem in study.problems):
        screen.print(f"  ! {text}", markup=False, highlight=False)


def show_unseen(lines: Sequence[Mapping[str, Any]], screen: Console) -> None:
    """Print the scores of clients that took no part in training, if there are any."""
    if not lines:
        return
    table = _by_method("unseen clients", "worst", "global model", "minus trained")
    for line in lines:
        cells = (line["mean"], line["ci95"]), (line["worst"],), (line["global"],), (line["gap"], line["gap_ci95"], "+")
        table.add_row(escape(line["method"]), *(_cell(*cell) for cell in cells))
    screen.print("\nHeld-out clients, which took no part in training, on their own test data", highlight=False)
    print_whole(screen, table)
    for text in dict.fromkeys(line["refused"] for line in lines if line["refused"]):
        screen.print(f"  - {text}", markup=False, highlight=False)


def show_external(methods: Sequence[Mapping[str, Any]], sites: Sequence[Mapping[str, Any]], screen: Console) -> None:
    """Print the scores at sites that were held out one by one, if there are any."""
    if not methods:
        return
    names = list(dict.fromkeys(line["site"] for line in sites))
    table = _by_method(*(names if len(names) <= MOST_SITES else ()), "lowest", "highest", "as members")
    for line in methods:
        line_by_site = {site_line["site"]: site_line for site_line in sites if site_line["method"] == line["method"]}
        cells = [
            _cell(line_by_site[name]["unseen"]) if name in line_by_site else "-"
            for name in names
            if len(names) <= MOST_SITES
        ]
        table.add_row(
            escape(line["method"]), *cells, _cell(line["lowest"]), _cell(line["highest"]), _cell(line["member"])
        )
    screen.print("\nEach site held out once, trained by the others: test score there, mean over seeds", highlight=False)
    print_whole(screen, table)
    for text in dict.fromkeys(line["refused"] for line in methods if line["refused"]):
        screen.print(f"  - {text}", markup=False, highlight=False)


def _by_method(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold", min_width=12)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cell(value: float | None, interval: Sequence[float] | None = None, sign: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:{sign}.4f}{interval_text(value, interval)}"


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}" if value < 100 else f"{value:.0f}"
