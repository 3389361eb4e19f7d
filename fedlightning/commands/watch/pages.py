"""A page on the loopback that shows a run, or the folder of `compare`, `sweep` or `league` while it fills."""

from __future__ import annotations

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedlightning.commands.watch.reading import RunFiles, in_importance, written
from fedlightning.config.input_errors import InputError
from fedlightning.experiments.execute import LOG
from fedlightning.storage.files import UnreadableError
from fedlightning.study.finished_runs import STUDY_FILE, read_study_file
from fedlightning.study.target_units import describe_units

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
            folders = {folder for _, folder, _ in self._entries(studies)}
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
        studies = []
        for path in sorted(path for level in LEVELS for path in self.folder.glob(f"{level}{STUDY_FILE}")):
            try:
                studies.append((path.parent.relative_to(self.folder).as_posix(), read_study_file(path)))
            except (OSError, UnreadableError):  # it is being replaced, or is somebody else's
                continue
        return studies

    def _entries(self, studies: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str, dict[str, Any]]]:
        return [
            (place, (Path(place) / run["folder"]).as_posix(), run) for place, study in studies for run in study["runs"]
        ]

    def _grid(self, studies: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        runs, targets = [], []
        # a command writes it as it begins
        begun = {place: written(self.folder / place / ".lock") for place, _ in studies}
        for place, folder, entry in self._entries(studies):
            files = self._files(self.folder / folder)
            files.scores.read()
            targets.append(files.scores.target())
            rounds, state = files.rounds(), entry["state"]
            started = written(self.folder / folder / LOG) >= begun[place] > 0
            going = state == "pending" and (rounds > 0 or started)
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
        going = [run["rounds"] / (run["max_rounds"] or 1) for run in runs if run["state"] == "running"]
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
            "metrics": (metrics := in_importance({name for run in runs for name in run["metrics"]})),
            "units": {metric: describe_units(targets, metric) for metric in metrics},
            "left": None if each is None or not left or grows else each * left / max(len(going), 1),
        }


HOST = "127.0.0.1"
PAGE = Path(__file__).with_name("page.html")
POLICY = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Nothing is fetched from elsewhere, whatever a file of a run says."""


class PageServer(ThreadingHTTPServer):
    """Serves the page and its data, to this machine only.

    Args:
        folder: What is looked at.
        port: Port; 0 takes a free one.

    Raises:
        InputError: If the port is taken.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.watched, self.page, self.one_at_a_time = Watched(folder), PAGE.read_bytes(), Lock()
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise InputError(f"port={port} cannot be had ({error}). Use --port 0: it takes a free one.") from None
        self.address = f"http://{HOST}:{self.server_port}/"

    def data(self, run: str) -> bytes | None:
        """Return the state as JSON; requests wait for each other, since files are read on."""
        try:
            with self.one_at_a_time:
                state = self.watched.state(run)
            return None if state is None else json.dumps(state, allow_nan=False).encode()
        except (
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:  # a file holds something else than runs write
            return json.dumps({"kind": "damaged", "folder": str(self.watched.folder), "error": str(error)}).encode()


class Handler(BaseHTTPRequestHandler):
    """Answers a browser on this machine. A page of elsewhere that comes by another name of it gets nothing."""

    server: PageServer

    def do_GET(self) -> None:
        """Answer."""
        url = urlsplit(self.path)
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._answer(403, b"This page is for this machine.", "text/plain")
        elif url.path == "/":
            self._answer(200, self.server.page, "text/html; charset=utf-8")
        elif url.path == "/data":
            data = self.server.data(parse_qs(url.query).get("run", [""])[0])
            self._answer(404, b"There is no such run.", "text/plain") if data is None else self._answer(
                200, data, "application/json"
            )
        else:
            self._answer(404, b"There is nothing here.", "text/plain")

    def _answer(self, code: int, content: bytes, kind: str) -> None:
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        same = code == 200 and self.headers.get("If-None-Match") == tag
        self.send_response(304 if same else code)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", "0" if same else str(len(content))),
            ("Content-Security-Policy", POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Cache-Control", "no-cache"),
            ("ETag", tag),
        ):
            self.send_header(name, value)
        self.end_headers()
        if not same:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests."""
