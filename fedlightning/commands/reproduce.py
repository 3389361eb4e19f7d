"""`fedlightning reproduce`: published tables run again, each cell beside what was published, with a verdict."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from fedlightning.commands.configs import FOLDER
from fedlightning.commands.json_output import print_json
from fedlightning.commands.study_options import CLI, INTERRUPTED, Parser, show_commands
from fedlightning.commands.terminal import FOLDED, NUMBER, WHOLE, console, print_table, say, shown
from fedlightning.config.input_errors import InputError, suggestion
from fedlightning.experiments.children import Main, call
from fedlightning.experiments.execute import Task
from fedlightning.experiments.experiment import Experiment, StudyFile
from fedlightning.experiments.reproduce.page import write_page
from fedlightning.experiments.reproduce.published_tables import ALL, Table, read_table
from fedlightning.experiments.reproduce.results import (
    BAD,
    GOOD,
    Chance,
    Line,
    Place,
    TableRun,
    left_out,
    list_headings,
    measure_tables,
    reasons,
    row_of,
    times,
    verdict_counts,
)
from fedlightning.experiments.reproduce.table_runs import obstacle, plan_runs
from fedlightning.experiments.reproduce.verdict_files import (
    as_json,
    check_look,
    find_new_disagreements,
    lost,
    moved_goals,
    read_record,
    write_json,
    write_record,
)

_COLOURS = {**dict.fromkeys(GOOD, "green"), **dict.fromkeys(BAD, "bold red"), "inconclusive": "yellow"}
_KINDS = {"name": FOLDED, "published": NUMBER, "ours": NUMBER, "verdict": WHOLE}
TABLES = FOLDER / "reproduce"
"""The tables that come with the package."""
DISAGREEMENT = 3
"""Exit code where all runs were made, and a verdict is worse than the recorded one."""
DESCRIPTION = """\
Run published tables again. Each cell is printed beside the published value, with its 95 % interval
over seeds and a verdict against a tolerance that was fixed before the table was run.

Without a name the tables are listed. NAME is one of them, or a file of your own (my_table.yaml).
Runs are kept in --out by all that decides their numbers: the complete configuration, the seed, the
versions of the packages that compute, and this package's code. The same command again makes only
what is missing, and goes on with what was interrupted; a run that two tables ask for is made once.

  agrees         the interval lies inside published ± tolerance
  disagrees      it lies entirely outside
  inconclusive   between: more seeds would tell
  order agrees   the published order holds, by the paired differences over seeds
  not run        data or a package are missing, or a run failed"""
EXAMPLES = """\
examples:
  fedlightning reproduce
  fedlightning reproduce closed_forms
  fedlightning reproduce fenda_heart --data-root data --jobs 2
  fedlightning reproduce --set cpu --data-root data --jobs 2
  fedlightning reproduce my_table.yaml --seeds 3

Exit codes: 0 all is as it was recorded, or better (or could not be run here), 1 a run failed, 2 bad input,
3 all runs were made, and a cell or order that once agreed does not, or one disagrees that never did,
130 interrupted.
"""


def parser() -> Parser:
    """Return the parser of the command."""
    why = "a table's runs are as its file says. Copy the file, and change it."
    command = Parser("reproduce", "[NAME ...]", DESCRIPTION, EXAMPLES, why)
    command.add_argument("names", nargs="*", metavar="NAME", help="table, or YAML file of your own; none: list all")
    command.add_argument("--set", metavar="SET", help="runs of one set only, as cpu; without a NAME, of all tables")
    command.add_folder("--data-root", "data", "folder of the data")
    command.add_folder("--out", "runs/reproduce", "folder for all files")
    command.add_argument(
        "--record", action="store_true", help="keep the verdicts beside the tables (recorded/NAME.json)"
    )
    command.add_argument("--json", action="store_true", help="print the results as one line of JSON too, the last one")
    command.add_making(None, "as each table says")
    return command


def reproduce(words: Sequence[str], main: Main) -> int:
    """Carry out the command and return its exit code."""
    options, _ = parser().parse(words)
    screen = console()
    tables = find_tables(options.names)
    if not options.names and options.set is None:
        if options.json:
            print_json("reproduce", out=None, page=None, tables=listed(tables), chance=None, lost=[])
        else:
            list_tables(tables, screen)
        return 0
    asked = ask_for(tables, options)
    if any(table_run.runs and not table_run.obstacle for table_run in asked):
        for table_run, methods in zip(
            asked, call(plan_runs, asked, str(options.data_root.resolve()), CLI), strict=True
        ):
            table_run.methods = methods
    wanted = {
        (m.name, seed): (m, seed) for table_run in asked for m in table_run.methods.values() for seed in table_run.seeds
    }
    experiment = Experiment(options.out, screen, main, options.jobs, options.redo, options.ray)

    def plan() -> list[Task]:
        """Return the runs that are missing; one that several tables ask for is there once."""
        return [task for method, seed in wanted.values() for task in experiment.plan([method], [seed])]

    if options.dry_run:
        show_commands(plan(), screen)
        return 0
    with experiment.lock(command="fedlightning reproduce") as study:
        tasks = plan()
        show_plan(asked, len(wanted), len(tasks), options, screen)
        methods = {method.name: method for method, _ in wanted.values()}
        if not experiment.make(list(methods.values()), sorted({seed for _, seed in wanted}), tasks):
            say(screen, "\nInterrupted. The same command goes on from here.")
            return INTERRUPTED
    measured = call(
        measure_tables,
        [(table_run.table, _places(study, table_run), table_run.seeds, table_run.obstacle) for table_run in asked],
    )
    for table_run, lines in zip(asked, measured, strict=True):
        table_run.lines = lines
    return tell(asked, options, screen)


def find_tables(names: Sequence[str]) -> list[Table]:
    """Return the tables that are named, or all that come with the package.

    Raises:
        InputError: If there is no such table, or something in one cannot work.
    """
    package_files = {path.stem: path for path in sorted(TABLES.glob("*.yaml"))}
    files: dict[str, Path] = {}
    for name in names:
        path = package_files.get(name, Path(name))
        if not path.is_file():
            hint = (
                suggestion(name, package_files)
                or "fedlightning reproduce lists all; a table of your own is a YAML file."
            )
            raise InputError(f"There is no table '{name}'. {hint}")
        if files.setdefault(path.stem, path) != path:
            raise InputError(f"Two tables are called '{path.stem}'. Name one of the files otherwise.")
    return [read_table(path, FOLDER) for path in (files or package_files).values()]


def ask_for(tables: Sequence[Table], options: Namespace) -> list[TableRun]:
    """Return what is to be run of tables.

    Raises:
        InputError: If it is nothing.
    """
    asked = []
    for table in tables:
        runs = [name for name, run in table.runs.items() if options.set is None or options.set in run.sets]
        if runs or options.set is None or options.set in table.sets:
            seeds = options.seeds or table.seeds
            if options.record:
                check_look(table, seeds)
            asked.append(TableRun(table, runs, seeds, obstacle(table, options.data_root)))
    if not asked:
        sets = sorted({name for table in tables for run in table.runs.values() for name in (*run.sets, *table.sets)})
        hint = suggestion(options.set, sets) or f"Sets: {', '.join(sets)}; without --set all runs are made."
        raise InputError(f"No table is in the set '{options.set}'. {hint}")
    return asked


def _places(study: StudyFile, table_run: TableRun) -> dict[str, dict[int, Place]]:
    """Return where the runs of a table lie, by name and seed."""
    places: dict[str, dict[int, Place]] = {}
    for run, method in table_run.methods.items():
        for seed in table_run.seeds:
            folder, entry = study.find_done(method.name, seed), study.entry(method.name, seed)
            why = f"run {run}, seed {seed}, failed: {'it was not made' if entry is None else entry['error']}"
            place = Place(None, why, failed=True) if folder is None else Place(str(folder))
            places.setdefault(run, {})[seed] = place
    return places


def tell(asked: Sequence[TableRun], options: Namespace, screen: Console) -> int:
    """Print and write the results, keep them if asked to, and return the exit code."""
    for table_run in asked:
        show_table(table_run.table, table_run.lines, screen)
    lost_verdicts = [text for table_run in asked for text in lost(table_run.table, table_run.lines, table_run.seeds)]
    moved = [text for table_run in asked for text in moved_goals(table_run.table)]
    new = [text for table_run in asked for text in find_new_disagreements(table_run.table, table_run.lines)]
    content = as_json(asked, lost_verdicts, moved)
    write_json(options.out, content)
    page = call(write_page, options.out, asked, lost_verdicts, moved)
    show_summary(asked, Chance(**content["chance"]), [*moved, *lost_verdicts, *new], screen)
    for table_run in asked if options.record else ():
        say(screen, f"Recorded: {shown(write_record(table_run.table, table_run.lines))}")
    say(screen, f"Page: {shown(page)}; results: {shown(options.out / 'reproduce.json')}")
    if options.json:
        about = {name: content[name] for name in ("tables", "chance", "lost")}
        print_json("reproduce", out=options.out, page=page, **about)
    if any(line.failed for table_run in asked for line in table_run.lines):
        return 1
    return DISAGREEMENT if lost_verdicts or new else 0


# -- on the terminal ---------------------------------------------------------------------------------------------------
def list_recorded_words(table: Table) -> list[str]:
    """Return the last verdicts of a table."""
    return [line["verdict"] for line in read_record(table.path).values()]


def listed(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Return the tables with their last verdicts, for programs."""
    return [
        {
            "name": table.name,
            "title": table.title,
            "paper": table.source.paper,
            "sets": list(table.sets),
            "minutes": dict(table.minutes),
            "counts": dict(Counter(list_recorded_words(table))),
        }
        for table in tables
    ]


def show_plan(asked: Sequence[TableRun], total: int, missing: int, options: Namespace, screen: Console) -> None:
    """Print how many runs there are, and how long they take."""
    minutes_of_tables = [minutes_by_set.table.minutes for minutes_by_set in asked if not minutes_by_set.obstacle]
    wanted = options.set or ALL
    minutes = sum(
        minutes_by_set.get(wanted, 0.0 if options.set else sum(minutes_by_set.values()))
        for minutes_by_set in minutes_of_tables
    )
    word = "about" if all(wanted in minutes_by_set for minutes_by_set in minutes_of_tables) else "more than"
    about = f"{word} {minutes:g} minutes if none was; " if minutes else ""
    say(
        screen,
        f"{len(asked)} table{'s' if len(asked) > 1 else ''}: {total} runs, {total - missing} of them there already; "
        f"{options.jobs} at a time; {about}{shown(options.out)}",
    )


def list_tables(tables: Sequence[Table], screen: Console) -> None:
    """Print the tables that can be run."""
    rows = []
    for table in tables:
        last = verdict_counts(list_recorded_words(table)) or "none yet"
        paper = table.source.paper.partition(",")[0]
        rows.append([table.name, escape(paper), escape(table.title), times(table), last])
    columns = dict.fromkeys(("paper", "about", "sets: minutes", "last verdicts"), FOLDED)
    print_table(screen, {"table": WHOLE, **columns}, rows)
    say(
        screen,
        "Run one: fedlightning reproduce NAME --data-root DIR --jobs 2. A table of your own: docs/how-to/reproduce.md.",
    )


def show_table(table: Table, lines: Sequence[Line], screen: Console) -> None:
    """Print a table with its verdicts, and why cells disagree."""
    say(screen, f"\n{table.name}: {table.title}", style="bold", markup=False)
    say(screen, f"{table.source.paper}, {table.source.table}. {table.source.link}".strip(), markup=False)
    if table.tuned_on_test:
        say(screen, "The paper chose on test data; its numbers are too good by what that gains.", markup=False)
    shown = [line for line in lines if line.asked]
    for orders in (False, True):
        rows = [row_of(line) for line in shown if line.is_order == orders]
        titles = list_headings(orders)
        cells = [[_coloured(row[key]) if key == "verdict" else escape(row[key]) for key in titles] for row in rows]
        if cells:
            print_table(screen, {title: _KINDS[key] for key, title in titles.items()}, cells)
    for text in (*reasons(shown), *left_out(lines)):
        say(screen, f"  {text}", markup=False)


def _coloured(verdict: str) -> str:
    return f"[{_COLOURS.get(verdict, 'dim')}]{verdict}[/]"


def show_summary(asked: Sequence[TableRun], expected: Chance, changes: Sequence[str], screen: Console) -> None:
    """Print how many cells agree, how many verdicts may be chance, and what was lost or moved since the last record."""
    words = [line.verdict.word for table_run in asked for line in table_run.lines if line.asked]
    say(screen, f"\nAll: {verdict_counts(words) or 'nothing was asked for'}.")
    say(screen, str(expected))
    for text in changes:
        say(screen, f"! {text}", style="bold red", markup=False)
