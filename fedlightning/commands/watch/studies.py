"""Folders of `compare`, `sweep` and `league` while they fill: which runs there are, and how far each is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedlightning.commands.watch.reading import RunFiles, in_importance
from fedlightning.storage.files import UnreadableError
from fedlightning.study.runs import STUDY_FILE, read_study_file

LEVELS = ("", "*/", "*/*/", "*/*/*/")
"""Where lists of runs are below a folder: `league` has one for each task."""


class Watched:
    """What somebody looks at: a run, a folder of runs (the newest is shown), or experiments with a grid of runs.

    Args:
        folder: The folder; it need not be there yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[Path, RunFiles] = {}

    def state(self, run: str = "") -> dict[str, Any] | None:
        """Return what a page shows: of one of the runs, or of all; `None` where there is no such run."""
        studies = self._studies()
        if run:
            folders = {place for place, _ in self._entries(studies)}
            return self._files(self.folder / run).state() | {"kind": "run"} if run in folders else None
        if studies:
            return self._grid(studies)
        folder = self._newest()
        return (
            self._files(folder).state() | {"kind": "run"} if folder else {"kind": "nothing", "folder": str(self.folder)}
        )

    def _files(self, folder: Path) -> RunFiles:
        return self._runs.setdefault(folder, RunFiles(folder))

    def _newest(self) -> Path | None:
        """Return the folder of the run itself, or of the newest in it."""
        for levels in ((LEVELS[0],), LEVELS[1:3]):  # `runs/NAME/version_0`: of `runs`, too
            places = [f"{level}{name}" for level in levels for name in ("metrics.csv", "config.yaml")]
            folders = [path.parent for place in places for path in self.folder.glob(place)]
            folders = [folder for folder in folders if not (folder / "evaluation.json").exists()]  # nothing was trained
            if folders:
                return max(folders, key=lambda path: path.stat().st_mtime)
        return None

    def _studies(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the lists of runs here, each with its place."""
        found = []
        for path in sorted(path for level in LEVELS for path in self.folder.glob(f"{level}{STUDY_FILE}")):
            try:
                found.append((path.parent.relative_to(self.folder).as_posix(), read_study_file(path)))
            except (OSError, UnreadableError):  # it is being replaced, or is somebody else's
                continue
        return found

    def _entries(self, studies: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
        return [((Path(place) / run["folder"]).as_posix(), run) for place, study in studies for run in study["runs"]]

    def _grid(self, studies: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        runs = []
        for folder, entry in self._entries(studies):
            files = self._files(self.folder / folder)
            files.scores.read()
            rounds, state = files.rounds(), entry["state"]
            going = state == "pending" and rounds > 0
            runs.append(
                {
                    "id": folder,
                    "method": (Path(folder).parts[0] + ": " if len(studies) > 1 else "") + entry["run"],
                    "seed": entry["seed"],
                    "state": "running" if going else state,
                    "rounds": rounds,
                    "max_rounds": files.max_rounds() if rounds else None,
                    "seconds": entry.get("seconds"),
                    "error": entry.get("error"),
                    "metrics": {metric: files.scores.newest(metric) for metric in files.scores.curves},
                }
            )
        done = [run["seconds"] for run in runs if run["state"] == "done" and run["seconds"]]
        going = [run["rounds"] / run["max_rounds"] for run in runs if run["state"] == "running"]
        left = sum(run["state"] == "pending" for run in runs) + sum(1 - min(share, 1) for share in going)
        each = sum(done) / len(done) if done else None
        command = next((study.get("command") for _, study in studies if study.get("command")), None)
        grows = str(command).split()[1:2] == ["league"]  # which lists the runs of a method as it comes to it
        return {
            "kind": "grid",
            "folder": str(self.folder),
            "title": self.folder.name,
            "command": command,
            "grows": grows,
            "runs": runs,
            "metrics": in_importance({name for run in runs for name in run["metrics"]}),
            "left": None if each is None or not left or grows else each * left / max(len(going), 1),
        }
