"""A page on the loopback that shows what :class:`~fedlightning.commands.watch.studies.Watched` reads. It asks nobody else."""

from __future__ import annotations

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, urlsplit

from fedlightning.commands.watch.studies import Watched
from fedlightning.config.errors import InputError

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
