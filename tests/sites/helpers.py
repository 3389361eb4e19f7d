"""Sites in this process, which the server reaches by bytes only."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fedlightning.datamodules.held_out import exclude_clients
from fedlightning.datamodules.public_only import PublicDataModule
from fedlightning.options import Evaluation, FailurePolicy
from fedlightning.sites.engine import DataElsewhere, SitesEngine
from fedlightning.sites.link import Answer, connected
from fedlightning.sites.site import Site
from fedlightning.testing.toys import ToyData, ToyModule, federate
from fedlightning.trainer import FederatedTrainer
from fedlightning.wire import read, write

SHARES = (("site0", "site3"), ("site1", "site2"))
"""Clients of the two sites."""
REFUSED = {
    "Central": "engine='sequential'",
    "FedAsync": "engine='sequential'",
    "FedBuff": "engine='sequential'",
    "PIFL pooled": "utility='local'",
    "SecureAggregation": "Remove it, or train in one place",
    "TIFF": "Use PIFL",
    "TIFF gradient": "Use PIFL",
}
"""Cases of the conformance suite that are refused, and the way out; all others run (test_equal.py)."""
RUN = {"evaluation": Evaluation(every=1, test_data=[]), "save_state": 1, "max_rounds": 2, "local_steps": 2}


def a_site(
    root: Path,
    clients: Sequence[str],
    algorithm: Any = None,
    full: bool = False,
    export: bool = False,
    send_texts: bool = False,
    **arguments: Any,
) -> Site:
    """Return a site that has some clients of the toy data, its own module and its own callbacks."""
    torch.manual_seed(7)  # its first weights are not the server's: the server sends them
    others, size, lr = arguments.pop("others", ()), arguments.pop("batch_size", None), arguments.pop("lr", 0.1)
    given = (
        {"local_steps": 3, "max_rounds": 3} | RUN | {name: copy.deepcopy(value) for name, value in arguments.items()}
    )
    own = [] if algorithm is None else [algorithm]
    trainer = FederatedTrainer(
        callbacks=copy.deepcopy([*own, *others]), logger=False, enable_progress_bar=False, accelerator="cpu", **given
    )
    data = ToyData()
    data.batch_size = size or data.batch_size
    return Site(
        f"home of {clients[0]}",
        trainer.blueprint(ToyModule(full=full, lr=lr)),
        exclude_clients(data, [client for client in data.client_ids if client not in clients]),
        root,
        export=export,
        send_texts=send_texts,
    )


def sites(root: Path, algorithm: Any = None, **arguments: Any) -> dict[str, Site]:
    """Return both sites, by the node that the connection knows them as."""
    return {str(number): a_site(root / str(number), SHARES[number], algorithm, **arguments) for number in range(2)}


class Loopback:
    """Sites in this process. Each reply is worked out when it is waited for.

    Args:
        sites: By name.

    Attributes:
        sites: The same; one that is taken out has lost its connection, and what was sent to it is lost.
        sent: Bytes of all requests.
        received: Bytes of all replies.
    """

    def __init__(self, sites: Mapping[str, Answer]) -> None:
        self.sites = dict(sites)
        self.expected = len(sites)
        self.sent = self.received = 0
        self._numbers = itertools.count()
        self._pending: deque[tuple[str, str, bytes]] = deque()

    def nodes(self) -> list[str]:
        return list(self.sites)

    def owner(self, node: str) -> str | None:
        return None

    def missing(self) -> list[str]:
        return []

    def send(self, node: str, request: bytes) -> str:
        name = str(next(self._numbers))
        self.sent += len(request)
        self._pending.append((name, node, request))
        return name

    def receive(self, waiting: Collection[str], timeout: float) -> list[tuple[str, bytes]]:
        while self._pending:
            name, node, request = self._pending.popleft()
            if node in self.sites and name in waiting:
                reply = self.sites[node](request)
                self.received += len(reply)
                return [(name, reply)]
        return []


class Line(Loopback):
    """A connection in this process; time passes when nothing is said.

    Attributes:
        now: Seconds.
        watch: Is told of every request: node, bytes. It returns what is sent in its place, or `None` for nothing.
        reply: As `watch`, of replies.
    """

    def __init__(self, parts: dict[str, Site]) -> None:
        super().__init__({node: site.answer for node, site in parts.items()})
        self.now = 0.0
        self.watch: Callable[[str, bytes], bytes | None] = lambda node, data: data
        self.reply: Callable[[str, bytes], bytes | None] = lambda node, data: data

    def send(self, node: str, request: bytes) -> str:
        watched = self.watch(node, request)
        return super().send(node if watched is not None else "nowhere", request if watched is None else watched)

    def receive(self, waiting: Any, timeout: float) -> list[tuple[str, bytes]]:
        found = super().receive(waiting, timeout)
        if not found:
            self.now += timeout
        changed = [(name, self.reply(name, data)) for name, data in found]
        return [(name, data) for name, data in changed if data is not None]


def tasks_in(request: bytes) -> list[Any]:
    """Return the tasks that a request holds."""
    return [one["task"] for one in read(request).get("tasks", [])]


def answers_in(reply: bytes) -> list[Any]:
    """Return the answers to tasks that a reply holds; `None` in place of one that was refused or not carried out."""
    return [read(part).get("answer") for part in _parts(reply)]


def changed(reply: bytes, change: Callable[[Any, bytes], bytes]) -> bytes:
    """Return a reply in which every part is what `change` makes of its answer and its bytes."""
    parts = _parts(reply)
    return write({"answer": [change(read(part).get("answer"), part) for part in parts]}) if parts else reply


def _parts(reply: bytes) -> list[bytes]:
    parts = read(reply).get("answer")
    return parts if isinstance(parts, list) else []


@contextmanager
def without_pickle() -> Iterator[None]:
    """Let nothing unpickle bytes inside the block."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something is unpickled")

    names = ("loads", "load")  # a blueprint copies its own modules with an Unpickler
    kept = {name: getattr(pickle, name) for name in names}
    try:
        for name in names:
            setattr(pickle, name, refuse)
        yield
    finally:
        for name, value in kept.items():
            setattr(pickle, name, value)


@contextmanager
def on_clock_of(line: Line) -> Iterator[None]:
    """Let servers that are made inside the block go by the seconds of a line: an hour of patience takes no time."""
    make = SitesEngine.__init__

    def on_the_clock(engine: SitesEngine, *parts: Any) -> None:
        make(engine, *parts)
        engine.attempts.clock = lambda: line.now

    SitesEngine.__init__ = on_the_clock  # type: ignore[method-assign]
    try:
        yield
    finally:
        SitesEngine.__init__ = make  # type: ignore[method-assign]


def public_data(batch_size: int | None = None) -> PublicDataModule:
    """Return the public part of the toy data alone, as a server has it."""
    toy = ToyData()
    return PublicDataModule(toy.public_dataloader().dataset, batch_size or toy.batch_size)


def at_sites(
    line: Line,
    root: Path,
    algorithm: Any = None,
    public: bool = False,
    export: bool = False,
    allow_other_code: bool = False,
    **arguments: Any,
) -> FederatedTrainer:
    """Run a federation whose clients are at sites, and return its trainer; `public`: the server has public data."""
    with connected(line, export, allow_other_code), on_clock_of(line), without_pickle():
        given = RUN | {"failures": FailurePolicy(timeout=30.0)} | arguments
        data = public_data(given.get("batch_size")) if public else DataElsewhere()
        return federate(copy.deepcopy(algorithm), data, root, engine="flower", **given)


def together(root: Path, algorithm: Any = None, **arguments: Any) -> FederatedTrainer:
    """Run the same with all data in this process."""
    return federate(copy.deepcopy(algorithm), ToyData(), root, **RUN | arguments)


def exported(folder: Path) -> dict[str, Any]:
    """Return what exported checkpoints hold, by the client."""
    return {
        path.stem: torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        for path in sorted(folder.glob("*.ckpt"))
    }
