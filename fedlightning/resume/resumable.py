"""What a run can go on from, by its folder: :func:`find_run` finds the one to write into."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedlightning.errors import ConfigurationError
from fedlightning.resume.lock import LOCK, RunInUseError, RunLock
from fedlightning.resume.state_files import BEFORE, MANIFEST, load
from fedlightning.run.folder import RunFolder, folder_of
from fedlightning.storage.files import is_writer, writing

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
        return folder_of(resume), False
    if arguments["fast_dev_run"]:
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
    if not is_writer():
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
    places = (Path(root) / name).glob(f"version_*/{LOCK}") if is_writer() else ()
    found = {int(place.parent.name[8:]): place.parent for place in places if place.parent.name[8:].isdigit()}
    for _, path in sorted(found.items(), reverse=True):
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
    found = sorted(folder.glob("hpc_ckpt_*.ckpt"))
    if found:
        raise ConfigurationError(
            f"{found[0]} is a checkpoint of a job that SLURM ended; Lightning would load it into every client's training. "
            "Remove it: the run's own state is in checkpoints/last."
        )
