"""Programs of test_catalogue.py: a server that tries methods one after another, and its two sites.

Each is a process of its own. A server starts a SuperLink as `fedlightning serve` does, with TLS and keys, and two sites, each
of which starts a SuperNode as `fedlightning site` does. All of them live as long as there are methods to try: a site makes
itself anew for each. Several servers share the work; the result of every method is a file in the folder `results`.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import fedlightning  # noqa: F401

# isort: split
import torch

from fedlightning.config.input_errors import explain
from fedlightning.contract.messages import Update, tree_bytes
from fedlightning.engines.contract import Visit
from fedlightning.options import FailurePolicy
from fedlightning.sites.flower import certificate_files
from fedlightning.sites.flower.programs import free_port, prepare, superlink, supernode
from fedlightning.sites.link import Link, connected
from fedlightning.sites.site import Site
from fedlightning.testing.runs import same_tree
from fedlightning.testing.toys import federate
from fedlightning.trainer import FederatedTrainer
from fedlightning.wire import read
from tests.conformance.case import Case, collect
from tests.sites.helpers import RUN, SHARES, a_site, exported, public_data, together, without_pickle

SITES = [f"s{number}" for number in range(len(SHARES))]
POLL = 0.5
"""Seconds between looks for messages: several servers share a machine."""
LONGEST = 1200
"""Seconds that a method may take."""
EQUAL, REFUSED, FAILED = "equal", "refused", "failed"


def arguments_of(case: Case) -> dict[str, Any]:
    return {key: value for key, value in case.arguments.items() if key not in ("max_rounds", "evaluation")}


# -- the server --------------------------------------------------------------------------------------------------------
class Counted:
    """A connection, and the payloads of visits in the bytes that it carries.

    Attributes:
        down: Bytes of payloads to sites.
        up: Bytes of payloads from sites.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.down = self.up = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def send(self, node: str, request: bytes) -> str:
        self.down += sum(tree_bytes(one.message.state) + tree_bytes(one.message.extras) for one in of(Visit, request))
        return self._link.send(node, request)

    def receive(self, waiting: Collection[str], timeout: float) -> list[tuple[str, bytes]]:
        found = self._link.receive(waiting, timeout)
        for _, reply in found:
            self.up += sum(tree_bytes(one.state) + tree_bytes(one.extras) for one in of(Update, reply))
        return found


def of(kind: type, data: bytes) -> list[Any]:
    """Return the objects of a kind that a message holds, also in messages within it."""
    waiting: list[Any] = [data]
    found = []
    while waiting:
        one = waiting.pop()
        if isinstance(one, kind):
            found.append(one)
        elif isinstance(one, bytes):
            waiting.append(read(one))
        elif isinstance(one, dict | list | tuple):
            waiting += one.values() if isinstance(one, dict) else one
    return found


def rows(trainer: FederatedTrainer) -> list[str]:
    return sorted(str(row) for row in trainer.rows if row.data != "pooled")


def tried(link: Link, case: Case, folder: Path) -> tuple[str, str]:
    """Run a case in this process and at the sites; return what came of it."""
    arguments = arguments_of(case)
    alone = together(folder / "alone", case.algorithm, **arguments)
    line = Counted(link)
    with connected(line), without_pickle():
        try:
            given = RUN | {"failures": FailurePolicy(timeout=300.0)} | arguments
            data = public_data(given.get("batch_size"))
            there = federate(copy.deepcopy(case.algorithm), data, folder / "server", engine="flower", **given)
        except ValueError as error:
            sentence = explain(error)
            if sentence is None:
                raise
            return REFUSED, sentence
    exports: dict[str, Any] = {}
    for name in SITES:
        for models in (folder / name / "models").glob("*"):
            exports |= exported(models)
    traffic = (there.summary["bytes_down"], there.summary["bytes_up"])
    links = hasattr(case.algorithm, "topology")  # the summary counts links between clients, here by way of the server
    differing = [
        what
        for what, same in {
            "models": same_tree(alone.server.models, there.server.models),
            "server.state": same_tree(alone.server.state, there.server.state),
            "rows": rows(alone) == rows(there) and bool(rows(alone)),
            "exported files": same_tree(exported(alone.run.path / "checkpoints" / "clients"), exports),
            f"bytes {(line.down, line.up)} but {traffic} in the summary": links or (line.down, line.up) == traffic,
            "traffic": traffic == (alone.summary["bytes_down"], alone.summary["bytes_up"]),
            f"failures {there.summary.get('failures')}": not there.summary.get("failures"),
            "checkpoints of clients at the server": not list(there.run.path.glob("checkpoints/clients/*.ckpt")),
        }.items()
        if not same
    ]
    return (FAILED, "; ".join(differing)) if differing else (EQUAL, f"{line.down} bytes down, {line.up} up")


def server(cases: dict[str, Case], folder: Path, number: int) -> None:
    """Try the methods that no other server has begun."""
    home = folder / "servers" / str(number)
    own, port = certificate_files.make(home / "certificates", ["127.0.0.1"], SITES)[0], free_port()
    sites = [forked(home / f"{name}.out", site, cases, home, name, port) for name in SITES]
    prepare(home / "flower")
    from fedlightning.sites.flower import server_link

    server_link.POLL = POLL
    with superlink(home, "127.0.0.1", port, own, len(SITES)) as link:
        for name in json.loads((folder / "names.json").read_text()):
            if not begun(folder, name):
                continue
            place, since = home / name.replace(" ", "-"), time.monotonic()
            for one in SITES:
                written(home / f"{one}.json", {"case": name, "folder": str(place / one)})
            try:
                with in_time():
                    what, why = tried(link, cases[name], place)
            except Exception:
                what, why = FAILED, traceback.format_exc()
            result = {"name": name, "what": what, "why": why, "seconds": round(time.monotonic() - since)}
            written(folder / "results" / f"{name}.json", result)
            print({**result, "why": why[-200:]}, flush=True)
    for process in sites:
        process.kill()
        process.join()


def begun(folder: Path, name: str) -> bool:
    """Begin a method, unless it is done or another server has begun it."""
    try:
        os.close(os.open(folder / "begun" / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def written(path: Path, content: Any) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content))
    new.replace(path)


@contextmanager
def in_time() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"not done after {LONGEST} seconds")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST)
    try:
        yield
    finally:
        signal.alarm(0)


# -- a site ------------------------------------------------------------------------------------------------------------
def site(cases: dict[str, Case], home: Path, name: str, port: int) -> None:
    """Answer what the server asks for, as the site that the method wants."""
    told = home / f"{name}.json"
    now: tuple[dict[str, str], Callable[[bytes], bytes]] = ({}, lambda request: b"")

    def answer(request: bytes) -> bytes:
        nonlocal now
        wanted = json.loads(told.read_text())
        if now[0] != wanted:
            now = wanted, made(cases[wanted["case"]], Path(wanted["folder"]), name).answer
        return now[1](request)

    prepare(home / name / "flower")
    from fedlightning.sites.flower import node

    node.POLL = POLL
    while True:  # a SuperNode ends where the SuperLink does not know it yet
        with (
            supernode(home / name, f"127.0.0.1:{port}", home / "certificates" / name, name) as take_part,
            without_pickle(),
        ):
            take_part(answer, lambda: True)


def made(case: Case, folder: Path, name: str) -> Site:
    own = {key: value for key, value in arguments_of(case).items() if key != "evaluation"}
    found = a_site(folder, SHARES[SITES.index(name)], case.algorithm, **own)
    found.name = name  # that of its key
    return found


# -- processes ---------------------------------------------------------------------------------------------------------
def forked(log: Path, work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Do some work in another process, which begins with all that is imported here, and ends with this one."""
    log.parent.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=_begin, args=(log, os.getpid(), work, *arguments))
    process.start()
    return process


def _begin(log: Path, parent: int, work: Callable[..., None], *arguments: Any) -> None:
    with log.open("ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    end_with(parent)
    work(*arguments)


def end_with(parent: int) -> None:
    """End this process when another, that has started it, is no more."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(folder: Path, servers: int) -> None:
    cases = collect("CASES")  # before processes are forked: it takes long
    started = [forked(folder / "servers" / f"{number}.out", server, cases, folder, number) for number in range(servers)]
    end_with(os.getppid())
    for process in started:
        process.join()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
