"""`fedlightning compare`: methods side by side, over several seeds, with the baselines they must beat."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedlightning.commands.report import write_report
from fedlightning.commands.study import (
    CLI,
    INTERRUPTED,
    Parser,
    check_jobs,
    console,
    gpus_to_share,
    make_runs,
    parse_seeds,
    show_failures,
    shown,
)
from fedlightning.experiments.baselines import AUTO, notes
from fedlightning.experiments.children import Main, call
from fedlightning.experiments.execute import Task
from fedlightning.experiments.first_result import FirstResult, check_metric
from fedlightning.experiments.plan import Plan, Request, make_plan
from fedlightning.experiments.study_file import StudyFile, only_one

DESCRIPTION = """\
Train several configurations over several seeds, add the baselines, and write a report.

Every CONFIG is a method: the YAML file of a run, labelled by its name, or NAME=FILE. One run is
`fedlightning fit` on --config files, CONFIG, --override files and passed-on options, with the
seed set. Each runs in a process of its own, one that fails does not stop the others, and the
same command again goes on where it was: finished runs are kept, interrupted ones resumed.

By default a seed changes the initialisation, the order of batches and which samples validate;
who holds which samples, and what is tested on, stay the same for all runs."""
EXAMPLES = """\
examples:
  fedlightning compare configs/heart_disease/*.yaml --seeds 5 --jobs 2 --out runs/heart
  fedlightning compare --config configs/quickstart.yaml configs/algorithms/fenda.yaml configs/algorithms/apfl.yaml
  fedlightning compare mild=a.yaml strong=b.yaml --seeds 0,3,7 --trainer.max_rounds=50 --baselines none
  fedlightning compare my.yaml --vary data.init_args.seed     # another partition for every seed

Exit codes: 0 all runs are done, 1 some failed, 2 bad input (nothing was run, or no further run was),
130 interrupted.
"""


def parser() -> Parser:
    """The command's options."""
    made = Parser(
        "compare", description=DESCRIPTION, epilog=EXAMPLES, usage="fedlightning compare CONFIG [CONFIG ...] [OPTIONS]"
    )
    made.add_argument("configs", nargs="+", metavar="CONFIG", help="a method: FILE.yaml, or NAME=FILE.yaml")
    made.add_argument("--out", type=Path, metavar="DIR", help="folder for everything; default: runs/compare_LABELS")
    made.add_argument("-c", "--config", action="append", default=[], metavar="FILE", help="read before every CONFIG")
    made.add_argument("--override", action="append", default=[], metavar="FILE", help="read after every CONFIG")
    made.add_argument(
        "--baselines",
        default="auto",
        metavar="auto|none|NAME,NAME",
        help="algorithms to add, on the first CONFIG's data, model and budget; auto: Local, Central, FedAvg and "
        "LocalAdaptation, those left out that are given already",
    )
    made.add_argument("--trainer.KEY=..., --model.KEY=..., --data.KEY=...", dest="_", metavar="", help="for every run")
    made.add_runs("5")
    report = made.add_argument_group("report")
    report.add_argument("--metric", default="accuracy", help="what is compared, on test data; default: accuracy")
    report.add_argument(
        "--checkpoint",
        default="deployed",
        help="which models: deployed (best on validation data where they were kept, else the latest), latest, "
        "best_local, best_global; default: deployed",
    )
    report.add_argument("--no-report", action="store_true", help="leave the report out")
    return made


def compare(words: Sequence[str], main: Main) -> int:
    """Carry out the command; its exit code.

    Args:
        words: what follows `compare` on the command line.
        main: the command line that makes a run.
    """
    options, passed = parser().parse(words)
    seeds, jobs = parse_seeds(options.seeds), check_jobs(options.jobs)
    names = [name.strip() for name in options.baselines.split(",") if name.strip()]
    names = {"auto": list(AUTO), "none": []}.get(options.baselines, names)
    request = Request(options.configs, CLI, options.config, options.override, passed, options.vary, names)
    screen = console()
    plan: Plan = call(make_plan, request)
    out: Path = options.out or default_out([method.name for method in plan.methods if not method.baseline])
    study = StudyFile(out)
    tasks = study.plan(plan.methods, seeds, plan.vary, options.redo)
    show_plan(screen, plan, seeds, jobs, tasks, out)
    if options.dry_run:
        for task in tasks:
            screen.print(
                f"fedlightning {shlex.join(task.commands()[0])}", soft_wrap=True, highlight=False, markup=False
            )
        return 0
    with only_one(out):
        study = StudyFile(out)
        tasks = study.plan(plan.methods, seeds, plan.vary, options.redo)
        watchers = [] if options.no_report else [metric_watcher(options.metric, study, plan, seeds, tasks)]
        study.data |= {
            "command": f"fedlightning compare {shlex.join(words)}",
            "metric": options.metric,
            "checkpoint": options.checkpoint,
            "vary": list(dict.fromkeys(key for keys in plan.vary.values() for key in keys)),
        }
        study.begin(plan.methods, seeds, plan.vary, tasks, options.redo)
        finished = make_runs(study, tasks, jobs, gpus_to_share(plan.gpus), screen, main, watchers)
        states = study.states([method.name for method in plan.methods], seeds)
        if not finished:
            screen.print(
                f"\nInterrupted: {len(states['done'])} of {sum(map(len, states.values()))} runs are done. "
                "The same command goes on from here.",
                highlight=False,
            )
            return INTERRUPTED
        show_failures(study, states["failed"], screen)
        if states["done"] and not options.no_report:
            write_report(out, [out], options.metric, options.checkpoint, screen)
    screen.print(f"\nRuns and study.json: {shown(out)}", soft_wrap=True, highlight=False)
    return 1 if states["failed"] else 0


def metric_watcher(
    metric: str, study: StudyFile, plan: Plan, seeds: Sequence[int], tasks: Sequence[Task]
) -> FirstResult:
    """Stops everything at the first run that has no such metric.

    Raises:
        InputError: that is so of a run that is there already, and there are more to make.
    """
    watcher = FirstResult(lambda folder: check_metric(folder, metric))
    again = {task.folder for task in tasks}
    folders = [study.folder / run["folder"] for run in study.states([m.name for m in plan.methods], seeds)["done"]]
    kept = [folder for folder in folders if folder not in again]
    if kept and tasks:
        watcher.look(kept[0])
    return watcher


def default_out(names: Sequence[str]) -> Path:
    """A folder that the same methods find again."""
    return Path("runs") / re.sub(r"[^\w.+-]", "-", "compare_" + "_".join(names))[:80]


def show_plan(screen: Console, plan: Plan, seeds: Sequence[int], jobs: int, tasks: Sequence[Task], out: Path) -> None:
    """What will be run, and what changes with the seed."""
    total = len(plan.methods) * len(seeds)
    screen.print(
        f"{len(plan.methods)} methods x {len(seeds)} seeds = {total} runs, {total - len(tasks)} of them there already; "
        f"{jobs} at a time; {shown(out)}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table.grid(padding=(0, 2))
    for method in plan.methods:
        made = "added as a baseline" if method.baseline else " + ".join(method.configs)
        table.add_row(f"  {escape(method.name)}", escape(made), method.budget)
    screen.print(table, highlight=False)
    baselines = [method.config for method in plan.methods if method.baseline]
    if baselines:
        text = "; ".join(
            [f"Added baselines have the data, model and budget of '{plan.methods[0].name}'", *notes(baselines)]
        )
        screen.print(f"{text}.", highlight=False)
    keys = list(dict.fromkeys(key for keys in plan.vary.values() for key in keys))
    screen.print(f"The seed sets {' and '.join(keys)}.", highlight=False)
    short = [name for name, found in plan.vary.items() if found == keys[:1]]
    if short:
        screen.print(
            f"The data of {', '.join(short)} are the same for every seed: they have no val_seed. "
            "Another key: --vary data.init_args.KEY.",
            highlight=False,
        )
    screen.print()
