"""`fedlightning compare`: several methods over several seeds, with baselines."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedlightning.commands.json_output import print_json
from fedlightning.commands.report import overview_of, write_report_aside
from fedlightning.commands.study_options import CLI, INTERRUPTED, Parser, show_commands, show_failures
from fedlightning.commands.terminal import console, say, shown
from fedlightning.config.input_errors import InputError
from fedlightning.experiments.children import Main, call
from fedlightning.experiments.execute import FirstResult, Task, check_metric, refuse_unknown
from fedlightning.experiments.experiment import Experiment, StudyFile
from fedlightning.experiments.leave_one_site_out import predict_runs
from fedlightning.experiments.methods import AUTO, notes
from fedlightning.experiments.plan import Plan, Request, make_plan
from fedlightning.scores.metric_names import choose_metric
from fedlightning.study.crossing import marked, setting
from fedlightning.study.equal_terms import optimizer_states

DESCRIPTION = """\
Train several configurations over several seeds, add baselines, and write a report.

Every CONFIG is a method: the YAML file of a run, labelled by the name of the file, or NAME=FILE.
A run is `fedlightning fit` with the --config files, CONFIG, the --override files, the options that
are passed on, and the seed. Every run has a process of its own, and one that fails does not stop
the others. The same command again continues: finished runs are kept, interrupted ones resumed.

By default a seed changes the initialisation, the order of batches and the validation samples. The
samples of each client and the test data stay the same for all runs."""
EXAMPLES = """\
examples:
  fedlightning compare configs/heart_disease/*.yaml --seeds 5 --jobs 2 --out runs/heart
  fedlightning compare --config configs/quickstart.yaml configs/algorithms/fenda.yaml configs/algorithms/apfl.yaml
  fedlightning compare mild=a.yaml strong=b.yaml --seeds 0,3,7 --trainer.max_rounds=50 --baselines none
  fedlightning compare --grid configs/robust/attacks.yaml --seeds 3     # defences under attacks
  fedlightning compare my.yaml --vary data.init_args.seed     # another partition for every seed
  fedlightning compare my.yaml --leave-one-site-out --subgroup sex --seeds 3

Exit codes: 0 all runs are done, 1 some runs failed, 2 bad input (no run, or no further run, was made),
130 interrupted.
"""


def parser() -> Parser:
    """Return the parser of the command."""
    command = Parser("compare", "CONFIG [CONFIG ...]", DESCRIPTION, EXAMPLES)
    command.add_argument("configs", nargs="*", metavar="CONFIG", help="method: FILE.yaml, or NAME=FILE.yaml")
    command.add_argument(
        "--grid",
        default="",
        metavar="FILE",
        help="in place of CONFIGs: a file with methods and maybe variants, such as attacks or budgets; every method is run "
        "under every variant, without baselines unless --baselines names some, and the report has the table of all",
    )
    command.add_argument("--out", type=Path, metavar="DIR", help="folder for all files; default: runs/compare_LABELS")
    command.add_list("-c", "--config", metavar="FILE", help="file to read before every CONFIG")
    command.add_list("--override", metavar="FILE", help="file to read after every CONFIG")
    command.add_argument(
        "--baselines",
        metavar="auto|none|NAME,NAME",
        help="algorithms to add, with the data, model and budget of the first CONFIG; auto (default): Local, Central, "
        "FedAvg and LocalAdaptation, unless they are given already",
    )
    command.add_argument(
        "--optimizer-state",
        choices=["keep", "reset"],
        help="optimizers' state (momentum, moments, schedules) of all methods alike: kept from visit to visit, or reset in "
        "every visit; default: as each method wishes (Local and Central keep it)",
    )
    command.add_argument(
        "--leave-one-site-out",
        action="store_true",
        help="internal-external validation: train every method again without each site, and score it there; the report has "
        "calibration and decision curves by site",
    )
    command.add_list(
        "--subgroup",
        metavar="COLUMN",
        help="subgroups of that report: a column of the table (sex), or one of numbers and where it is cut ('age>=65')",
    )
    command.add_list(
        "--cross",
        metavar="KEY",
        help="where the variance comes from: run every value of KEY with every trainer.seed. KEY: data.init_args.seed (the "
        "split), trainer.seed.initialisation, trainer.seed.participation. --seeds says how many of each; "
        "runs are that to the power of the sources",
    )
    command.add_passed_on()
    command.add_runs("5")
    report = command.add_argument_group("report")
    report.add_argument(
        "--metric",
        help="metric to compare, on test data; default: accuracy where the runs have it (AUROC or balanced accuracy where "
        "one class is much more common), else rmse, mae, c_index, dice, iou, f1 or loss",
    )
    report.add_argument(
        "--checkpoint",
        default="deployed",
        help="models to compare: deployed (best on validation data if the run kept them, else the latest), latest, "
        "best_local, best_global; default: deployed",
    )
    report.add_argument("--no-report", action="store_true", help="write no report")
    report.add_argument("--json", action="store_true", help="print the overview as one line of JSON too, the last one")
    return command


def compare(words: Sequence[str], main: Main) -> int:
    """Carry out the command and return its exit code."""
    options, passed = parser().parse(words)
    if bool(options.grid) == bool(options.configs):
        both = "--grid FILE is in place of CONFIGs: give one of the two"
        fault_of_words = both if options.grid else "--grid FILE or the following arguments are required: CONFIG"
        raise InputError(f"{fault_of_words}. See fedlightning compare --help.")
    if options.subgroup and not options.leave_one_site_out:
        raise InputError("--subgroup is of the report of --leave-one-site-out; give that too.")
    screen, reported = console(), not options.no_report
    plan: Plan = call(make_plan, make_request(options, passed))
    seeds = options.seeds
    if options.cross:
        plan, seeds = cross_seeds(plan, list(dict.fromkeys(options.cross)), seeds)
    named = [m.name for m in plan.methods if not m.baseline and m.left_out is None]
    out: Path = options.out or default_out([Path(options.grid).stem] if options.grid else named)
    experiment = Experiment(out, screen, main, options.jobs, options.redo, options.ray)
    tasks = experiment.plan(plan.methods, seeds)
    metric: str | None = options.metric
    if metric is None and plan.metrics:
        metric = choose_metric([plan.metrics])
    if metric is not None:
        fault = "the runs will have no such score on test data. They will have"
        refuse_unknown(metric, plan.metrics, fault, "No run was made.")
    show_plan(screen, plan, seeds, options.jobs, tasks, out)
    if options.dry_run:
        show_commands(tasks, screen)
        return 0
    about = {
        "command": f"fedlightning compare {shlex.join(words)}",
        "metric": options.metric,
        "checkpoint": options.checkpoint,
        "vary": list_varied_keys(plan),
    }
    with experiment.lock(**about) as study:
        tasks = experiment.plan(plan.methods, seeds)
        watchers = [metric_watcher(metric, study, plan, seeds, tasks)] if metric is not None and reported else []
        finished = experiment.make(plan.methods, seeds, tasks, watchers, plan.gpus)
        states = study.states([method.name for method in plan.methods], seeds)
        if not finished:
            screen.print(
                f"\nInterrupted: {len(states['done'])} of {sum(map(len, states.values()))} runs are done. "
                "The same command goes on from here.",
                highlight=False,
            )
            return INTERRUPTED
        show_failures(study, states["failed"], screen)
        if options.leave_one_site_out and states["done"]:
            predict(study, states["done"], options, screen)
        if states["done"] and reported:
            write_report_aside(out, [out], options.metric, options.checkpoint, screen)
    say(screen, f"\nRuns and study.json: {shown(out)}")
    if options.json:
        content: dict[str, Any] = {"metric": metric, "checkpoint": options.checkpoint, "overview": [], "problems": []}
        if states["done"]:
            content = call(overview_of, [out], options.metric, options.checkpoint)
        page = out / "report.html" if states["done"] and reported else None
        print_json("compare", out=out, page=page, failed=len(states["failed"]), **content)
    return 1 if states["failed"] else 0


def make_request(options: Namespace, passed: Sequence[str]) -> Request:
    """Return what is to be planned."""
    baselines = options.baselines or ("none" if options.grid else "auto")
    names = [name.strip() for name in baselines.split(",") if name.strip()]
    state = [f"--trainer.optimizer_state={options.optimizer_state}"] if options.optimizer_state else []
    return Request(
        options.configs,
        CLI,
        options.config,
        options.override,
        [*passed, *state],
        [*(options.vary or []), *options.cross] if options.cross else options.vary,
        {"auto": list(AUTO), "none": []}.get(baselines, names),
        matrix=True,
        rehearse=True,
        leave_one_out=options.leave_one_site_out,
        columns=options.subgroup,
        grid=options.grid,
    )


def cross_seeds(plan: Plan, keys: list[str], seeds: Sequence[int]) -> tuple[Plan, list[int]]:
    """Return the plan in which every value of keys is run with every other, and the numbers of its runs."""
    levels = len(seeds)
    if levels < 2 or list(seeds) != list(range(levels)):
        raise InputError(f"--cross takes a number of seeds, 2 or more, as in --seeds=3; here they are {list(seeds)}.")
    methods = [replace(method, vary=marked(method.vary, keys, levels)) for method in plan.methods]
    return replace(plan, methods=methods), list(range(levels ** (1 + len(keys))))


def list_varied_keys(plan: Plan) -> list[str]:
    """Return the keys that the seed sets in any method."""
    return list(dict.fromkeys(key for method in plan.methods for key in method.vary))


def predict(study: StudyFile, done: Sequence[dict[str, Any]], options: Namespace, screen: Console) -> None:
    """Write the predictions of the runs that are done, in a process of its own."""
    folders = [study.folder / run["folder"] for run in done]
    for why in call(predict_runs, CLI, folders, options.subgroup, options.checkpoint):
        say(screen, f"No calibration: {why}.", markup=False)


def metric_watcher(
    metric: str, study: StudyFile, plan: Plan, seeds: Sequence[int], tasks: Sequence[Task]
) -> FirstResult:
    """Return a watcher that stops all runs if the first one that succeeds does not have the metric."""
    watcher = FirstResult(lambda folder: check_metric(folder, metric))
    again = {task.folder for task in tasks}
    done = filter(None, (study.find_done(method.name, seed) for method in plan.methods for seed in seeds))
    kept = next((folder for folder in done if folder not in again), None)
    if kept is not None and tasks:
        watcher.look(kept)
    return watcher


def default_out(names: Sequence[str]) -> Path:
    """Return the default folder, which is the same for the same methods."""
    return Path("runs") / re.sub(r"[^\w.+-]", "-", "compare_" + "_".join(names))[:80]


def show_plan(screen: Console, plan: Plan, seeds: Sequence[int], jobs: int, tasks: Sequence[Task], out: Path) -> None:
    """Print the runs that will be made, and what the seed changes."""
    total = len(plan.methods) * len(seeds)
    methods = [method for method in plan.methods if method.left_out is None]
    say(
        screen,
        f"{len(methods)} methods x {len(seeds)} seeds = {len(methods) * len(seeds)} runs"
        f"{_left_out_words(plan, len(seeds))}, {total - len(tasks)} of them there already; "
        f"{jobs} at a time; {shown(out)}",
    )
    table = Table.grid(padding=(0, 2))
    for method in methods:
        origin = "added as a baseline" if method.baseline else " + ".join(method.configs)
        table.add_row(f"  {escape(method.name)}", escape(origin), method.budget)
    screen.print(table, highlight=False)
    for method in methods if len(methods) < len(plan.methods) else ():
        if method.no_model is not None:
            say(screen, f"{method.name} is not trained without a site: it {method.no_model.rstrip('.')}.", markup=False)
    baselines = [method.config for method in methods if method.baseline]
    if baselines:
        text = "; ".join(
            [f"Added baselines have the data, model and budget of '{plan.methods[0].name}'", *notes(baselines)]
        )
        screen.print(f"{text}.", highlight=False)
    keys = list_varied_keys(plan)
    plain = [setting(key, 0)[0] for key in keys]
    way = "Every value of each is run with every value of the others: " if plain != keys else "The seed sets "
    screen.print(f"{way}{' and '.join(plain)}.", highlight=False)
    for text in optimizer_states({method.name: method.optimizer_state for method in methods}):
        screen.print(f"  ! {text}", markup=False, highlight=False)
    short = [method.name for method in methods if list(method.vary) == keys[:1]]
    if short:
        screen.print(
            f"The data of {', '.join(short)} are the same for every seed: they have no val_seed. "
            "Another key: --vary data.init_args.KEY.",
            highlight=False,
        )
    screen.print()


def _left_out_words(plan: Plan, seeds: int) -> str:
    """Say how many runs leave a site out."""
    left_out = [method.left_out for method in plan.methods if method.left_out is not None]
    if not left_out:
        return ""
    sites = len({site for _, site in left_out})
    return f", and {len(left_out) * seeds} without one of {sites} sites"
