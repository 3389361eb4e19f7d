"""Folders of runs: finding them, and reading their configuration."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlightning.config.input_errors import InputError
from fedlightning.resume.lock import holder_of
from fedlightning.resume.loggers import BEGINNING
from fedlightning.storage.files import is_writing_process


def find_run(path: str, file: str = "config.yaml") -> Path:
    """Return the folder of a run that has a file: `path` itself, or the newest version in it."""
    folder = Path(path).resolve()
    if (folder / file).exists():
        return folder
    versions = sorted(folder.glob(f"*/{file}"), key=lambda path: path.stat().st_mtime)
    if versions:
        return versions[-1].parent
    if any(folder.glob("metrics.csv")) or any(folder.glob("*/metrics.csv")):
        raise InputError(
            f"'{path}' has no {file}: that run was made in Python, and only its script can make its model and data again. "
            "There, trainer.restore(model, datamodule, folder) loads it; test, validate and predict follow."
        )
    what = f"has no {file}" if folder.exists() else "does not exist"
    raise InputError(f"'{path}' {what}. A run lies in a folder such as runs/quickstart/version_0.")


def with_run_config(command: str, words: list[str]) -> list[str]:
    """Return the words of a command with the `config.yaml` of its run in front, so that other words override it."""
    if any(word in ("-h", "--help") for word in words):
        return words
    reads = command in ("validate", "test", "predict", "onboard", "leakage")
    option = "--run" if reads else "--resume" if command == "fit" else None
    folder = _value_of(option, words) if option else None
    if option == "--run" and folder is None:
        raise InputError("it needs the folder of a run: --run runs/NAME/version_N.")
    if folder is None or (
        option == "--resume" and (folder in ("last", "auto", "null") or _value_of("--config", words))
    ):
        return words
    return ["--config", str(find_run(folder) / "config.yaml"), *words]


def to_resume(resume: str | None) -> str | Path | None:
    """Return the value of `--resume` for the trainer: `None`, `"last"`, `"auto"`, or the folder of a run."""
    return resume if resume in (None, "last", "auto") else find_run(str(resume))


def leave_nothing(trainer: Any) -> None:
    """Remove the folder of a run without a round, after bad input."""
    if trainer.run is None or trainer.rounds_done > 0 or not is_writing_process():
        return
    folder: Path = trainer.run.path
    ours = {Path("config.yaml"), Path("checkpoints"), Path("checkpoints", BEGINNING)}
    if folder.exists() and {path.relative_to(folder) for path in folder.rglob("*")} <= ours:
        shutil.rmtree(folder)
        for empty in (folder.parent, folder.parent.parent):
            if any(empty.iterdir()):
                break
            empty.rmdir()


def _value_of(option: str, words: Sequence[str]) -> str | None:
    for index, word in enumerate(words):
        if word.startswith(f"{option}=") or (option == "--config" and word.startswith("-c=")):
            return word.partition("=")[2]
        if (word == option or (option == "--config" and word == "-c")) and index + 1 < len(words):
            return words[index + 1]
    return None


def refuse_taken(home: Path, who: str) -> None:
    """Refuse a folder that another process works with."""
    holder = holder_of(home)
    if holder is not None:
        raise InputError(
            f"folder={home} is that of process {holder.get('pid', '?')} on {holder.get('host', '?')} since "
            f"{holder.get('since', '?')}: {who} needs a --folder of its own."
        )
