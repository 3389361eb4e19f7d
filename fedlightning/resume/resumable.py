"""What a run can go on from, by its folder: :func:`find_run` finds the one to write into.

A federation goes on from a saved state: :func:`restore`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedlightning.contract.families import Protection
from fedlightning.errors import ConfigurationError
from fedlightning.resume.config_changes import (
    ConfigChanges,
    changes_since,
    check_rescored,
    check_scored,
    join_clients,
    keep_architectures,
    scored_before,
)
from fedlightning.resume.lock import LOCK, RunInUseError, RunLock
from fedlightning.resume.saving import MARKS, Saving, check_extra, restore_state
from fedlightning.resume.state_files import BEFORE, MANIFEST, UNDONE, load, restore_previous_state
from fedlightning.run.folder import RunFolder, open_run_folder
from fedlightning.server.federation import Federation
from fedlightning.storage.files import is_writing_process, writing


def restore(federation: Federation, go_on: bool, allow_changes: bool = False, allow_new_clients: bool = False) -> None:
    """Load the state that the run's folder holds.

    Args:
        federation: A federation as it was assembled, before any round.
        go_on: The run will be trained further, so scores of rounds that are not in the state are cut off.
        allow_changes: Go on although the configuration has changed; the summary lists what has.
        allow_new_clients: Go on although there are clients that the run did not have; the summary lists them.

    Raises:
        ValueError: If the run would go on with another configuration than it was started with, or with clients that it may
            not have or that a callback has no place for, or be scored with others than it trained.
    """
    run, saving = federation.recorder.run, federation.parts.find(Saving)
    assert run is not None
    federation.rounds_done, extra, in_flight = restore_state(run.last, federation.server, federation.store, go_on)
    check_extra(run.last, extra, federation.parts.keys)
    federation.server.stopped = extra["stopped"]
    if go_on:
        federation.loop.load(in_flight)
    saving.rounds_saved = federation.rounds_done
    keep_architectures(extra, federation.server.blueprint, run.path)
    changes = ConfigChanges()
    if not go_on:
        check_scored(extra, federation.server, run.path)
    else:
        changes = changes_since(
            extra,
            federation.server,
            saving.fingerprint,
            run.path,
            rounds_done=federation.rounds_done,
            allow_changes=allow_changes,
            allow_new_clients=allow_new_clients,
        )
        for callback in federation.server.callbacks:
            if changes.configuration and isinstance(callback, Protection):
                callback.check_changes(changes.configuration)
    saving.scored = scored_before(extra, federation.server, federation.engine.runner.described.seed)
    if not changes.joined:
        check_rescored(saving.scored, federation.server, run.path, go_on)
    saving.changes = [*extra.get("changes", []), *changes.told(federation.rounds_done + 1)]
    if changes.joined:
        federation.server.round = federation.rounds_done
        join_clients(federation.server, changes.joined)
    federation.costs.load(extra)
    federation.server.failures[:] = extra["failures"]
    federation.parts.load(extra)
    # a run that is over trains no more, and tells all the same
    federation.engine.runner.loop.adopt(extra["local_loop"])
    federation.final_done = bool(extra["final"]) and federation.is_over
    if go_on and extra["final"] and not federation.final_done:
        federation.costs.forget_final_visits(federation.rounds_done)
    scored = federation.rounds_done + federation.final_done
    recorder_marks = (
        extra if federation.final_done else {name: extra.get(earlier, extra[name]) for name, earlier in MARKS.items()}
    )
    mark = recorder_marks["metrics"]
    if go_on:
        if UNDONE in extra:
            restore_previous_state(run.last)
        rows = run.truncate_rows(mark)
        federation.recorder.start_with(rows, run.metrics.place() if federation.recorder.writes else None)
        more = (bool(extra["final"]) and not federation.final_done) or UNDONE in extra
        federation.recorder.reopen_logs(recorder_marks, scored, differs=more or changes != ConfigChanges())
    else:
        federation.recorder.start_with(run.read_rows(scored, mark))
    federation.server.round = federation.last_round
    if go_on:
        saving.remember_left_out(federation)
    if changes.joined:
        federation.check()
    federation.parts.tell("on_restored", federation)


AUTO = "auto"
"""Value of `resume`: go on if there is something to go on from, else start."""


def find_run(arguments: Mapping[str, Any], resume: str | Path | None) -> tuple[RunFolder | None, bool]:
    """Return the folder to write into (`None`: nothing is written), and whether a new run begins there.

    Args:
        arguments: The trainer's.
        resume: As in `FederatedTrainer.fit`.
    """
    if not isinstance(resume, str | Path | None):
        raise ConfigurationError(f"resume={resume!r} must be 'last', 'auto' or the folder of a run.")
    root, name, version = (arguments[key] for key in ("default_root_dir", "name", "version"))
    is_auto = str(resume) == AUTO
    if is_auto:
        resume = find_resumable(root, name, version)
    elif str(resume) == "last":
        resume = find_last(root, name)
    if resume is not None:
        return open_run_folder(resume), False
    if arguments["fast_dev_run"] or root is None:
        return None, True
    if is_auto and version is None:
        version = killed_version(root, name)
    run = RunFolder(root, name, version)
    if not is_auto:
        refuse_used(run)
    return run, True


def rounds_saved(run: RunFolder) -> int:
    """Return the rounds of the state on disk; 0 if there is none that can be read."""
    with suppress(OSError, ValueError):
        return load(run.last).rounds_done
    return 0


def refuse_used(run: RunFolder, discard_unsaved: bool = False) -> None:
    """Refuse to start a new run in a folder that holds one.

    Args:
        run: The folder.
        discard_unsaved: Remove what a run left that was killed before it had saved a state. One that came to its end
            without states (`save_state: 0`) has a summary, and is not touched.
    """
    if not is_writing_process():
        return
    if discard_unsaved and not has_state(run.path) and not (run.path / "summary.json").exists():
        with writing(run.path):
            for path in (run.path / "metrics.csv", *run.path.glob("logs*")):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if (run.path / "metrics.csv").exists():
        way_out = f", or resume it with resume='auto' or resume='{run.path}'" if has_state(run.path) else ""
        raise ValueError(
            f"There is a run in {run.path} already. Choose another version, or leave version out{way_out}."
        )


def has_state(run: Path) -> bool:
    """Return True if a run has a saved state, if only the one before the newest."""
    return any((run / "checkpoints" / "last" / name).exists() for name in (MANIFEST, BEFORE))


def find_resumable(root: str | Path, name: str, version: str | None) -> Path | None:
    """Return the run to go on with, or `None` if there is nothing to go on from: one command for a requeued job."""
    if version is not None:
        path = Path(root) / name / version
        return path if has_state(path) else None
    try:
        return find_last(root, name)
    except FileNotFoundError:
        return None


def killed_version(root: str | Path, name: str) -> str | None:
    """Return the newest `version_N` whose run was killed before it had saved a state, to start again there; `None`: none.

    Its lock still lies there, and nobody holds it: a run that ends, be it with an error, takes its lock away.
    """
    places = (Path(root) / name).glob(f"version_*/{LOCK}") if is_writing_process() else ()
    folders = {int(place.parent.name[8:]): place.parent for place in places if place.parent.name[8:].isdigit()}
    for _, path in sorted(folders.items(), reverse=True):
        if not has_state(path) and not (path / "summary.json").exists():
            with suppress(RunInUseError), RunLock(path):
                return path.name
    return None


def find_last(root: str | Path, name: str) -> Path:
    """Return the run that wrote its state last."""
    manifests = list((Path(root) / name).glob("*/checkpoints/last/manifest*.json"))  # the newest may be lost
    if not manifests:
        raise FileNotFoundError(
            f"There is nothing to resume: no run under {Path(root) / name} has checkpoints/last/manifest.json. "
            "Start without resume, give resume='auto' to start or to go on, whichever there is, or the run's folder."
        )
    return max(manifests, key=lambda path: path.stat().st_mtime).parents[2]


def refuse_requeued(folder: Path) -> None:
    """Refuse a folder in which Lightning would find a checkpoint of a requeued job and load it into every client."""
    files = sorted(folder.glob("hpc_ckpt_*.ckpt"))
    if files:
        raise ConfigurationError(
            f"{files[0]} is a checkpoint of a job that SLURM ended; Lightning would load it into every client's training. "
            "Remove it: the run's own state is in checkpoints/last."
        )
