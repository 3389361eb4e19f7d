"""`fedlightning sweep`: a search for the best values of options on validation data. Test data are not used."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedlightning.commands.json_output import print_json
from fedlightning.commands.study import INTERRUPTED, Parser, check_jobs, parse_seeds, show_commands, show_failures
from fedlightning.commands.terminal import console, say, shown
from fedlightning.commands.trials import Sweep
from fedlightning.compat.rich_tables import print_whole
from fedlightning.config.errors import InputError
from fedlightning.experiments.children import Main, call
from fedlightning.experiments.ray_runner import ray_options
from fedlightning.experiments.space import combinations, parse_grid, parse_search
from fedlightning.experiments.study_file import StudyFile, only_one
from fedlightning.experiments.sweep import Proposals, Trial
from fedlightning.scores.metrics import bare, higher_is_better

DESCRIPTION = """\
Try values of options and choose the best on validation data.

A trial is `fedlightning fit` with these values, over all seeds. The best trial has the lowest
validation loss of the models that a run deploys: the mean over clients, weighted by their
validation samples, then over seeds. No trial is scored on test data.

--grid tries all combinations. --search lets Optuna propose --trials values within ranges. The same
command again continues an interrupted sweep."""
EXAMPLES = """\
examples:
  fedlightning sweep --config configs/quickstart.yaml --config configs/algorithms/fedprox.yaml --seeds 3 \\
      --grid trainer.callbacks.mu=0.01,0.1,1 --grid model.init_args.lr=0.1,0.01 --out runs/sweep
  fedlightning sweep --config my.yaml --search model.init_args.lr=log:1e-5:1e-1 --trials 20 --jobs 2
  fedlightning compare tuned=my.yaml --override runs/sweep/best.yaml       # use what was found

Writes DIR/sweep.json (all trials) and DIR/best.yaml (the best values, to be read after the same files).
"""


def parser() -> Parser:
    """Return the parser of the command."""
    made = Parser("sweep", "--config FILE", DESCRIPTION, EXAMPLES)
    made.add_list("-c", "--config", metavar="FILE", help="file of the run, as for fit")
    out = Path("runs/sweep")
    made.add_argument("--out", type=Path, default=out, metavar="DIR", help=f"folder for all files; default: {out}")
    made.add_passed_on()
    values = made.add_argument_group("values")
    made.add_list("--grid", metavar="KEY=A,B,C", help="values of an option to try", group=values)
    ranges = "range of an option: log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH or choice:A,B,C"
    made.add_list("--search", metavar="KEY=RANGE", help=ranges, group=values)
    values.add_argument("--trials", type=int, default=20, help="number of values that --search tries; default: 20")
    values.add_argument("--search-seed", type=int, default=0, help="seed of --search; default: 0")
    values.add_argument("--metric", default="loss", help="metric to optimise, on validation data; default: loss")
    values.add_argument("--test", action="store_true", help="score the best trial (only) on test data at the end")
    values.add_argument("--test-metric", default="accuracy", help="metric that --test shows; default: accuracy")
    values.add_argument("--json", action="store_true", help="print the trials as one line of JSON too, the last one")
    made.add_runs("1")
    return made


def sweep(words: Sequence[str], main: Main) -> int:
    """Carry out the command and return its exit code."""
    options, passed = parser().parse(words)
    if not options.config:
        raise InputError("--config is missing: a sweep varies options of a configuration.")
    if bool(options.grid) == bool(options.search):
        raise InputError("give either --grid KEY=A,B,C or --search KEY=RANGE, each as often as there are keys.")
    if options.trials < 1:
        raise InputError(f"--trials is {options.trials}: give 1 or more.")
    check_jobs(options.jobs)
    ray = ray_options(options.runner, options.ray_address, options.ray_cpus)
    grid, ranges = list(combinations(parse_grid(options.grid))), parse_search(options.search)
    seeds, screen = parse_seeds(options.seeds), console()
    proposals = Proposals(ranges, options.search_seed, higher_is_better(options.metric)) if ranges else None
    going = Sweep(options, passed, seeds, StudyFile(options.out), screen, main, ray)
    if options.dry_run:
        shown_first = proposals.ask(1) if proposals else grid
        _, tasks, _, _ = going.plan(shown_first)
        show_commands(tasks, screen)
        return 0
    with only_one(options.out):
        going.study = StudyFile(options.out)
        going.study.data |= {"command": f"fedlightning sweep {shlex.join(words)}", "metric": options.metric}
        size = len(grid) or options.trials
        say(
            screen,
            f"{size} trials x {len(seeds)} seeds = {size * len(seeds)} runs; {options.jobs} at a time; "
            f"{shown(options.out)}\n",
        )
        finished = going.run(grid) if proposals is None else search(going, proposals)
        if not finished:
            screen.print("\nInterrupted. The same command goes on from here.", highlight=False)
            return INTERRUPTED
        states = going.study.states([trial.name for trial in going.trials], seeds)
        show_failures(going.study, states["failed"], screen)
        show_trials(going, screen)
        if options.test and going.best is not None:
            test_best(going, going.best)
    if options.json:
        trials = [{"name": one.name, "values": one.values, "objective": one.objective} for one in going.ranked]
        print_json("sweep", out=options.out, metric=options.metric, trials=trials)
    return 1 if states["failed"] or going.best is None else 0


def search(going: Sweep, proposals: Proposals) -> bool:
    """Ask Optuna for values, run them, and report their objectives. Return False if it was interrupted.

    As many trials are asked for at once as --jobs can run beside each other with all seeds.
    """
    at_once = going.study.data.setdefault("at_once", max(1, going.options.jobs // len(going.seeds)))
    done = 0
    while done < going.options.trials:
        values = proposals.ask(min(at_once, going.options.trials - done))
        done += len(values)
        for value in values:
            text = ", ".join(f"{key}={value}" for key, value in value.items())
            say(going.screen, f"trial {done}/{going.options.trials}: {escape(text)}")
        if not going.run(values, going.options.trials - done):
            return False
        proposals.tell(going.objectives(values))
    return True


def test_best(going: Sweep, best: Trial) -> None:
    """Score the runs of the best trial on test data, write the scores to their folders, and print them."""
    from fedlightning.commands.report import show_overview

    folders = [going.study.run_folder(best.name, seed) for seed in going.seeds]
    for folder in folders:
        if call(going.main, ["test", "--run", str(folder), "--trainer.evaluation.test_data=[local,pooled]"]):
            raise RuntimeError(f"The test of {folder} failed; its output is above.")
    show_overview(folders, going.options.test_metric, "deployed", going.screen)


def show_trials(going: Sweep, screen: Console) -> None:
    """Print a table of all trials, best first."""
    metric = f"val_{bare(going.options.metric)}"
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    keys = list(dict.fromkeys(key for trial in going.trials for key in trial.values))
    for key in keys:
        table.add_column(_short(key, keys), overflow="fold")
    table.add_column(metric, justify="right", no_wrap=True)
    table.add_column("by seed", justify="right", overflow="fold")
    table.add_column("trial", no_wrap=True)
    for trial in going.ranked:
        value = trial.objective
        by_seed = " ".join("-" if v is None else f"{v:.4f}" for v in trial.per_seed.values())
        cells = [escape(trial.values.get(key, "-")) for key in keys]
        table.add_row(*cells, "failed" if value is None else f"{value:.5f}", by_seed, trial.name)
    print_whole(screen, table)
    if going.best is not None:
        say(screen, f"Best values: {shown(going.out / 'best.yaml')}")
    say(screen, f"All trials: {shown(going.out / 'sweep.json')}")


def _short(key: str, keys: Sequence[str]) -> str:
    """Return the end of a key that tells it apart from the others."""
    parts = key.replace(".init_args", "").split(".")
    ends = [other.replace(".init_args", "").split(".") for other in keys if other != key]
    for length in range(1, len(parts)):
        if all(other[-length:] != parts[-length:] for other in ends):
            return ".".join(parts[-length:])
    return key
