"""An experiment: methods with seeds as runs in a folder, what is made of them, and their record in `study.json`."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from rich.console import Console

from fedlightning.compat.system import lock_file
from fedlightning.config.input_errors import InputError
from fedlightning.experiments.children import Main, Outcome
from fedlightning.experiments.execute import Task, View, Watcher, execute, rounds_begun
from fedlightning.experiments.methods import Method, differences
from fedlightning.experiments.ray_runner import RayRuns, refuse_ray_within
from fedlightning.resume.stop_requests import ENDINGS, SIGNALS, under_slurm
from fedlightning.storage.files import read_mapping, write_text_atomically
from fedlightning.study.crossing import setting
from fedlightning.study.finished_runs import STUDY_FILE, read_study_file

if TYPE_CHECKING:
    from fedlightning.options import Ray

FORMAT = 1
"""Version of the file's content."""
Redo = Literal["failed", "all"]


class StudyFile(Watcher):
    """The states of all runs of an experiment. It is also a watcher that records them.

    Args:
        folder: Folder of the experiment. Its `study.json` is read if it exists.

    Attributes:
        data: Content of the file: `methods`, `runs`, `seeds`, and options of the command line.

    Raises:
        InputError: If the file was written by a version with another format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / STUDY_FILE
        self.data: dict[str, Any] = {"format": FORMAT, "methods": [], "runs": [], "seeds": []}
        if self.path.exists():
            self.data = read_study_file(self.path)
            if self.data.get("format") != FORMAT:
                raise InputError(
                    f"{self.path} is of format {self.data.get('format')}, this version reads {FORMAT}. "
                    "Choose another --out."
                )

    def save(self) -> None:
        """Replace the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(self.path, json.dumps(self.data, indent=1))

    # -- runs ----------------------------------------------------------------------------------------------------
    def entry(self, name: str, seed: int) -> dict[str, Any] | None:
        """Return the entry of a run, or `None`."""
        entries = (run for run in self.data["runs"] if (run["run"], run["seed"]) == (name, seed))
        return next(entries, None)

    def run_folder(self, name: str, seed: int) -> Path:
        """Return the folder of a run."""
        return self.folder / "runs" / name / f"seed_{seed}"

    def find_done(self, name: str, seed: int) -> Path | None:
        """Return the folder of a run if it is done, else `None`."""
        entry = self.entry(name, seed)
        return self.run_folder(name, seed) if entry is not None and entry["state"] == "done" else None

    @property
    def begun(self) -> int:
        """Number of runs that have come to a round, whatever became of them."""
        runs = self.data["runs"]
        return sum(run["state"] == "done" or rounds_begun(self.run_folder(run["run"], run["seed"])) > 0 for run in runs)

    def config_file(self, name: str) -> Path:
        """Return the file with the complete configuration of a method."""
        return self.folder / "configs" / f"{name}.yaml"

    def plan(self, methods: Sequence[Method], seeds: Sequence[int], redo: Redo | None) -> list[Task]:
        """Return the runs that are still to be made, seed by seed. Nothing is written.

        Finished runs are left out, and so are failed ones unless `redo` includes them. Interrupted runs are resumed.
        """
        tasks = []
        for seed in seeds:
            for method in methods:
                if self._is_open(method, seed, redo):
                    words = ["fit", "--config", str(self.config_file(method.name))]
                    words += ["--{}={}".format(*setting(key, seed)) for key in method.vary]
                    tasks.append(Task(method.name, seed, self.run_folder(method.name, seed), words, method.rounds))
        return tasks

    def _is_open(self, method: Method, seed: int, redo: Redo | None) -> bool:
        """Return True if a run is still to be made."""
        entry, folder = self.entry(method.name, seed), self.run_folder(method.name, seed)
        has_metrics = (folder / "metrics.csv").exists()
        if redo == "all" or (entry is None and not has_metrics):
            return True
        if entry is None or not self._same(entry, method):
            if has_metrics and (entry is None or entry["state"] != "failed"):
                raise InputError(self._refusal(method, seed, entry))
            return True
        if entry["state"] == "failed":
            return redo == "failed"
        return entry["state"] != "done" or not (folder / "summary.json").exists()

    def _same(self, entry: Mapping[str, Any], method: Method) -> bool:
        """Return True if a run has this configuration; arguments that a newer version added count if not at default."""
        seed, file = entry["seed"], self.config_file(method.name)
        if entry["config"] == method.fingerprint(seed) or not file.exists():
            return bool(entry["config"] == method.fingerprint(seed))
        old = replace(method, config=read_mapping(file))
        same = entry["config"] == old.fingerprint(seed)  # otherwise the file belongs to another run
        return same and not differences(old.config, method.config)

    def _refusal(self, method: Method, seed: int, entry: Mapping[str, Any] | None) -> str:
        what = "a run that study.json does not know"
        if entry is not None:
            recorded = next(m for m in self.data["methods"] if m["name"] == method.name)
            file = self.config_file(method.name)
            if list(recorded["vary"]) != list(method.vary):
                changed = [f"the seed sets {' and '.join(method.vary)}, it set {' and '.join(recorded['vary'])}"]
            else:
                old = read_mapping(file) if file.exists() else {"trainer": {}}
                changed = differences(old, method.config)
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            what = f"a run of another configuration ({'; '.join(changed[:3])}{more})"
        return (
            f"{self.run_folder(method.name, seed)} holds {what}. Choose another --out, give this one a name of its own "
            f"(NAME=FILE), or start its runs anew with --redo all."
        )

    def begin(self, methods: Sequence[Method], seeds: Sequence[int], tasks: Sequence[Task], redo: Redo | None) -> None:
        """Write the configurations and add the runs. Entries of other methods and seeds stay.

        The folder of a run that starts again from the beginning is removed.
        """
        (self.folder / "configs").mkdir(parents=True, exist_ok=True)
        methods_by_name = {method["name"]: method for method in self.data["methods"]}
        for method in methods:
            for entry in self.data["runs"]:
                if entry["run"] == method.name and self._same(entry, method):
                    entry["config"] = method.fingerprint(entry["seed"])
            text = yaml.safe_dump(method.config, sort_keys=False)
            self.config_file(method.name).write_text(text)
            plain = {name: getattr(method, name) for name in ("name", "configs", "baseline")}
            pairs = {"vary": method.vary, "left_out": method.left_out, "cell": method.cell}
            methods_by_name[method.name] = plain | {
                name: list(pair) for name, pair in pairs.items() if pair is not None
            }
        self.data["methods"] = sorted(methods_by_name.values(), key=lambda method: bool(method["baseline"]))
        self.data["seeds"] = sorted({*self.data["seeds"], *seeds})
        by_name = {method.name: method for method in methods}
        for task in tasks:
            fingerprint = by_name[task.name].fingerprint(task.seed)
            entry = self.entry(task.name, task.seed)
            if entry is None:
                entry = {"run": task.name, "seed": task.seed}
                self.data["runs"].append(entry)
            if task.folder.exists() and (redo == "all" or entry.get("config") != fingerprint):
                shutil.rmtree(task.folder)
            kept = entry.get("seconds", 0.0) if task.resumable else 0.0
            folder = task.folder.relative_to(self.folder).as_posix()
            entry |= {"folder": folder, "state": "pending", "error": None, "seconds": kept, "config": fingerprint}
        order = {name: position for position, name in enumerate(methods_by_name)}
        self.data["runs"].sort(key=lambda run: (order.get(run["run"], len(order)), run["seed"]))
        self.save()

    # -- as a watcher --------------------------------------------------------------------------------------------
    def ended(self, task: Task, outcome: Outcome) -> None:
        """Record how a run ended."""
        entry = self.entry(task.name, task.seed)
        assert entry is not None
        entry["state"] = "done" if outcome.error is None else "failed"
        entry["error"] = outcome.error
        entry["seconds"] = round(entry["seconds"] + outcome.seconds, 3)
        self.save()

    def states(self, methods: Sequence[str], seeds: Sequence[int]) -> dict[str, list[dict[str, Any]]]:
        """Return the entries of these methods and seeds, by state."""
        runs_by_state: dict[str, list[dict[str, Any]]] = {"done": [], "failed": [], "pending": []}
        for run in self.data["runs"]:
            if run["run"] in methods and run["seed"] in seeds:
                runs_by_state[run["state"]].append(run)
        return runs_by_state


# -- making runs -------------------------------------------------------------------------------------------------------
@dataclass
class Experiment:
    """Methods with seeds, whose runs lie in a folder. The same methods again make only what is missing.

    Attributes:
        folder: The folder.
        screen: Terminal to print to.
        main: Command line that makes a run.
        jobs: Number of runs at a time.
        redo: Which runs to make again.
        ray: What Ray is to be, to make the runs with it. `None`: they are processes of this machine.
        study: The record.
    """

    folder: Path
    screen: Console
    main: Main
    jobs: int = 1
    redo: Redo | None = None
    ray: Ray | None = None
    study: StudyFile = field(init=False)

    def __post_init__(self) -> None:
        self.study = StudyFile(self.folder)

    @contextmanager
    def lock(self, **about: Any) -> Iterator[StudyFile]:
        """Lock the folder against other processes, and read the record anew; `about`: what it is to say of the command."""
        with only_one(self.folder):
            self.study = StudyFile(self.folder)
            self.study.data |= about
            yield self.study

    def plan(self, methods: Sequence[Method], seeds: Sequence[int]) -> list[Task]:
        """Return the runs that are still to be made."""
        for method in methods if self.ray is not None else ():
            refuse_ray_within(method)
        return self.study.plan(methods, seeds, self.redo)

    def make(
        self,
        methods: Sequence[Method],
        seeds: Sequence[int],
        tasks: Sequence[Task],
        watchers: Sequence[Watcher] = (),
        gpus: int = 0,
    ) -> bool:
        """Make planned runs and keep the record up to date. Return False if it was interrupted."""
        self.study.begin(methods, seeds, tasks, self.redo)
        seconds_by_name: dict[str, list[float]] = {}
        for run in self.study.data["runs"]:
            if run["state"] == "done":
                seconds_by_name.setdefault(run["run"], []).append(run["seconds"])
        try:
            at_once = min(self.jobs, max(1, len(tasks)))
            with _terminable():
                start = RayRuns(self.ray, at_once, self.main) if self.ray is not None and tasks else None
                with View(tasks, self.jobs, seconds_by_name, self.screen) as view:
                    execute(tasks, at_once, gpus_to_share(gpus), [self.study, view, *watchers], self.main, start)
        except KeyboardInterrupt:
            self.study.save()
            return False
        return True


def gpus_to_share(count: int) -> list[str]:
    """Return values for the `CUDA_VISIBLE_DEVICES` of runs: the GPUs that are visible here."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (visible or [str(index) for index in range(count)])[:count]


@contextmanager
def _terminable() -> Iterator[None]:
    """Treat what asks a process to end like Ctrl-C."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    numbers = (*ENDINGS, *(SIGNALS if under_slurm() else ()))
    before = {number: signal.signal(number, stop) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            let_go = lock_file(file.fileno(), folder / ".lock")
        except OSError as error:
            raise InputError(f"Another process works in {folder}. Wait for it, or choose another --out.") from error
        try:
            yield
        finally:
            if let_go is not None:
                let_go()
