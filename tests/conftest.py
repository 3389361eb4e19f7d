"""What every test stands on: one thread, no display, no network, the same seed, a quiet Lightning."""

from __future__ import annotations

import os

# Before torch, numpy and matplotlib are imported: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "Agg"
os.environ["HF_HUB_OFFLINE"] = "1"

import gc
import ipaddress
import logging
import random
import re
import signal
import socket
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if "FEDLIGHTNING_TEST_CLOCK" in os.environ:  # make test-anywhere; before anything reads the clock
    import time_machine

    time_machine.travel(datetime.fromisoformat(os.environ["FEDLIGHTNING_TEST_CLOCK"]).astimezone(), tick=True).start()

import pytest

SEED = 20260
gc.disable()  # until all tests are collected: it would look through a million objects again and again, and find nothing
LONG = Path(__file__).with_name("long.txt")
"""Tests that take long, by `make measure-tests`. Without them `make test` takes a third of its time; CI runs both parts."""
WITHOUT_SLOW = ("not slow", "not slow and not long", "long")
"""What is given to `-m`."""
SLOW_MODULE = re.compile(r"^pytestmark = pytest\.mark\.slow$", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    """Import what the tests import; the process that only hands tests to workers (xdist) needs none of it."""
    import fedlightning  # noqa: F401  before lightning: repairs torchvision beside a CPU build of torch

    # isort: split
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import hypothesis
    import lightning.pytorch  # noqa: F401
    import torch

    torch.set_num_threads(1)
    # After the import of lightning, which sets its own levels. The level of quiet(), which then has nothing to change.
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    hypothesis.settings.register_profile("fedlightning", deadline=None, derandomize=True, print_blob=True)
    hypothesis.settings.load_profile("fedlightning")


@pytest.hookimpl(tryfirst=True)
def pytest_warning_recorded(warning_message: warnings.WarningMessage) -> None:
    """Give warnings away as what every process knows: else that which hands out tests imports Lightning for its classes."""
    if "PYTEST_XDIST_WORKER" in os.environ and warning_message.category.__module__ != "builtins":
        warning_message.message = UserWarning(f"{warning_message.category.__name__}: {warning_message.message}")
        warning_message.category = UserWarning


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import modules of slow tests where these are deselected."""
    if config.option.markexpr not in WITHOUT_SLOW or collection_path.suffix != ".py":
        return None
    return True if SLOW_MODULE.search(collection_path.read_text()) else None


def pytest_collection_finish() -> None:
    """Keep the garbage collector out of what lives to the end: modules and thousands of tests."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before the slow ones are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run products of parameters in part; give slow tests more time; refuse names that differ between processes.

    Whoever names files or words wants all tests of these: long ones are left out of the whole alone.
    """
    for chosen in (beyond_every_value_once, beyond_fast_cases):
        for item in list(chosen(items)):
            item.add_marker(pytest.mark.slow)
    whole = not config.option.keyword and [Path(place).name for place in config.args] == ["tests"]
    long = {*LONG.read_text().splitlines()} if whole else set()
    for item in items:
        if item.nodeid in long and not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.long)
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid} is named by an address: give its parameters ids")
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1500))


def beyond_every_value_once(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases of tests with several `parametrize` that have no parameter which other cases do not have.

    A test over 4 precisions and 5 plans so runs 5 times, with each of the 9, and the other 15 times among the slow ones.
    """
    cases: dict[tuple[Path, str], dict[pytest.Item, set[Any]]] = {}
    for item in items:
        marks = [mark.args[0] for mark in item.iter_markers("parametrize")]
        if len(marks) > 1 and isinstance(item, pytest.Function) and not item.get_closest_marker("slow"):
            groups = [names.replace(" ", "").split(",") if isinstance(names, str) else names for names in marks]
            values = {(*group, *(id(item.callspec.params[name]) for name in group)) for group in groups}
            cases.setdefault((item.path, item.nodeid.partition("[")[0]), {})[item] = values
    for product in cases.values():
        missing = set().union(*product.values())
        while missing:
            chosen = max(product, key=lambda case: len(missing & product[case]))
            missing -= product.pop(chosen)
        yield from product


def beyond_fast_cases(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases of tests marked `fast_cases(n)` after the first n that are not slow anyway."""
    seen: Counter[tuple[Path, str]] = Counter()
    for item in items:
        mark = item.get_closest_marker("fast_cases")
        if mark is not None and not item.get_closest_marker("slow"):
            name = (item.path, item.nodeid.partition("[")[0])
            seen[name] += 1
            if seen[name] > mark.args[0]:
                yield item


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Seed the global generators before each test and undo the global switches that tests like to flip."""
    import numpy as np
    import torch

    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)


def _is_local(host: object) -> bool:
    """Whether ``host`` is this machine or its private network (where gloo and Ray meet their own processes)."""
    if isinstance(host, bytes):
        host = host.decode()
    if host in (None, "", "localhost", socket.gethostname()):
        return True
    try:
        return not ipaddress.ip_address(str(host).split("%")[0]).is_global
    except ValueError:
        return False  # a name that only a name server knows


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """Refuse connections out of this machine: a test that downloads is a test that fails elsewhere."""
    connect, connect_ex, getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def check(host: object) -> None:
        if not _is_local(host):
            raise RuntimeError(f"tests have no network: refused to reach {host!r}")

    def check_address(sock: socket.socket, address: Any) -> None:
        # A datagram socket sends nothing on connect: that is how libraries learn their own address.
        if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type != socket.SOCK_DGRAM:
            check(address[0])

    def guarded_connect(self: socket.socket, address: Any) -> None:
        check_address(self, address)
        connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        check_address(self, address)
        return connect_ex(self, address)

    def guarded_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        check(host)
        return getaddrinfo(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket.socket, "connect_ex", guarded_connect_ex)
        patch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)
        yield


@pytest.fixture(autouse=True, scope="session")
def _entry_points_once() -> Iterator[None]:
    """Read the installed packages' entry points once: each Trainer asks, a seventh of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning.fabric.utilities.registry.entry_points", cache(entry_points))
        yield


@pytest.fixture(autouse=True, scope="session")
def _nobody_pulls_the_plug() -> Iterator[None]:
    """Do not wait for the disk: a killed process loses nothing that it has written, and no test loses the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def timelines_are_drawn() -> Iterator[Callable[..., None]]:
    """Leave out the picture at the end of a run with a clock. Gives the function that draws it."""
    from fedlightning.virtual_time import clock

    with pytest.MonkeyPatch.context() as patch:
        real = clock.draw_timeline
        patch.setattr(clock, "draw_timeline", lambda folder, rounds: None)
        yield real


@pytest.fixture(autouse=True, scope="session")
def _nobody_scripts() -> Iterator[None]:
    """Spare `load_from_checkpoint` the look at all source files by which Lightning finds out whether TorchScript calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning.pytorch.utilities.model_helpers.inspect", SimpleNamespace(stack=lambda: ()))
        yield


@pytest.fixture
def usual_signals():
    """Signals as in a terminal: under nohup, or in the background of a script, some are ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def figures_for_print() -> Iterator[Callable[..., None]]:
    """Write the SVG files of a report alone. Gives the function that writes all."""

    def save(figure: Any, text: str, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")

    from fedlightning.report import context

    with pytest.MonkeyPatch.context() as patch:
        real = context.save
        patch.setattr(context, "save", save)
        yield real


@pytest.fixture(scope="session")
def readers_fonts() -> Iterator[int]:
    """Embed fonts in PDFs in the quick way, which saves a third of a report. Gives the way that readers get."""
    from fedlightning.report import drawing

    with pytest.MonkeyPatch.context() as patch:
        kind: int = drawing._LOOK["pdf.fonttype"]
        patch.setitem(drawing._LOOK, "pdf.fonttype", 3)
        yield kind
