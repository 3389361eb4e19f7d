"""`fedlightning sweep`: a search for the best values of options on validation data. Test data are not used."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from fedlightning.commands.json_output import print_json
from fedlightning.commands.study_options import CLI, INTERRUPTED, Parser, show_commands, show_failures
from fedlightning.commands.terminal import FOLDED, NUMBER, WHOLE, console, print_table, say, shown
from fedlightning.config.input_errors import InputError
from fedlightning.errors import count_of
from fedlightning.experiments.children import Main, call
from fedlightning.experiments.experiment import Experiment
from fedlightning.experiments.plan import Request
from fedlightning.experiments.search import Proposals, Search, Trial, combinations, name_edges, parse_grid, parse_search
from fedlightning.scores.metric_names import bare, higher_is_better

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
    command = Parser("sweep", "--config FILE", DESCRIPTION, EXAMPLES)
    command.add_list("-c", "--config", metavar="FILE", help="file of the run, as for fit")
    command.add_folder("--out", "runs/sweep", "folder for all files")
    command.add_passed_on()
    values = command.add_argument_group("values")
    command.add_list("--grid", metavar="KEY=A,B,C", help="values of an option to try", group=values)
    ranges = "range of an option: log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH or choice:A,B,C"
    command.add_list("--search", metavar="KEY=RANGE", help=ranges, group=values)
    values.add_argument("--trials", type=int, default=20, help="number of values that --search tries; default: 20")
    values.add_argument("--search-seed", type=int, default=0, help="seed of --search; default: 0")
    values.add_argument("--metric", default="loss", help="metric to optimise, on validation data; default: loss")
    values.add_argument("--test", action="store_true", help="score the best trial (only) on test data at the end")
    values.add_argument("--test-metric", default="accuracy", help="metric that --test shows; default: accuracy")
    values.add_argument("--json", action="store_true", help="print the trials as one line of JSON too, the last one")
    command.add_runs("1")
    return command


def sweep(words: Sequence[str], main: Main) -> int:
    """Carry out the command and return its exit code."""
    options, passed = parser().parse(words)
    if not options.config:
        raise InputError("--config is missing: a sweep varies options of a configuration.")
    if bool(options.grid) == bool(options.search):
        raise InputError("give either --grid KEY=A,B,C or --search KEY=RANGE, each as often as there are keys.")
    if options.trials < 1:
        raise InputError(f"--trials is {options.trials}: give 1 or more.")
    choices, ranges = parse_grid(options.grid), parse_search(options.search)
    grid = list(combinations(choices))
    seeds, screen = options.seeds, console()
    proposals = Proposals(ranges, options.search_seed, higher_is_better(options.metric)) if ranges else None
    *before, file = options.config
    request = Request([file], CLI, before, options=passed, vary=options.vary)
    experiment = Experiment(options.out, screen, main, options.jobs, options.redo, options.ray)
    search = Search(experiment, request, seeds, options.metric)
    if options.dry_run:
        _, tasks, _ = search.plan(proposals.ask(1) if proposals else grid)
        show_commands(tasks, screen)
        return 0
    with experiment.lock(command=f"fedlightning sweep {shlex.join(words)}", metric=options.metric) as study:
        size = len(grid) if choices else options.trials
        runs = count_of(range(size * len(seeds)), "run")
        trials = f"{count_of(range(size), 'trial')} x {count_of(seeds, 'seed')}"
        say(screen, f"{trials} = {runs}; {options.jobs} at a time; {shown(options.out)}\n")
        finished = search.run(grid) if proposals is None else run_proposals(search, proposals, options, screen)
        if not finished:
            screen.print("\nInterrupted. The same command goes on from here.", highlight=False)
            return INTERRUPTED
        states = study.states(list(search.trials), seeds)
        show_failures(study, states["failed"], screen)
        show_trials(search, screen)
        for sentence in search.name_other_data():
            say(screen, f"! {sentence}", markup=False)
        for sentence in name_edges(search.best.values, choices, ranges) if search.best is not None else ():
            say(screen, sentence, markup=False)
        if options.test and search.best is not None:
            test_best(search, search.best, options, screen, main)
    if options.json:
        rows = [{"name": trial.name, "values": trial.values, "objective": trial.objective} for trial in search.ranked]
        print_json("sweep", out=options.out, metric=options.metric, trials=rows)
    return 1 if states["failed"] or search.best is None else 0


def run_proposals(search: Search, proposals: Proposals, options: Namespace, screen: Console) -> bool:
    """Ask Optuna for values, run them, and report their objectives. Return False if it was interrupted.

    As many trials are asked for at once as --jobs can run beside each other with all seeds.
    """
    at_once = search.experiment.study.data.setdefault("at_once", max(1, options.jobs // len(search.seeds)))
    done = 0
    while done < options.trials:
        values = proposals.ask(min(at_once, options.trials - done))
        done += len(values)
        for value in values:
            text = ", ".join(f"{key}={value}" for key, value in value.items())
            say(screen, f"trial {done}/{options.trials}: {escape(text)}")
        if not search.run(values, options.trials - done):
            return False
        proposals.tell([search.trials[Trial(value).name].objective for value in values])
    return True


def test_best(search: Search, best: Trial, options: Namespace, screen: Console, main: Main) -> None:
    """Score the runs of the best trial on test data, write the scores to their folders, and print them."""
    from fedlightning.commands.report import show_overview

    folders = [search.experiment.study.run_folder(best.name, seed) for seed in search.seeds]
    for folder in folders:
        if call(main, ["test", "--run", str(folder), "--trainer.evaluation.test_data=[local,pooled]"]):
            raise RuntimeError(f"The test of {folder} failed; its output is above.")
    show_overview(folders, options.test_metric, "deployed", screen)


def show_trials(search: Search, screen: Console) -> None:
    """Print a table of all trials, best first."""
    keys = list(dict.fromkeys(key for trial in search.ranked for key in trial.values))
    columns = {_short(key, keys): FOLDED for key in keys} | {
        f"val_{bare(search.metric)}": NUMBER,
        "by seed": {"justify": "right", **FOLDED},
        "trial": WHOLE,
    }
    rows = []
    for trial in search.ranked:
        value = trial.objective
        by_seed = " ".join("-" if v is None else f"{v:.4f}" for v in trial.per_seed.values())
        cells = [escape(trial.values.get(key, "-")) for key in keys]
        rows.append([*cells, "failed" if value is None else f"{value:.5f}", by_seed, trial.name])
    print_table(screen, columns, rows)
    folder = search.experiment.folder
    if search.best is not None:
        say(screen, f"Best values: {shown(folder / 'best.yaml')}")
    say(screen, f"All trials: {shown(folder / 'sweep.json')}")


def _short(key: str, keys: Sequence[str]) -> str:
    """Return the end of a key that tells it apart from the others."""
    parts = key.replace(".init_args", "").split(".")
    ends = [other.replace(".init_args", "").split(".") for other in keys if other != key]
    for length in range(1, len(parts)):
        if all(other[-length:] != parts[-length:] for other in ends):
            return ".".join(parts[-length:])
    return key
