"""Runs that are killed at any write: `SIGKILL` from inside, at the n-th time that a process touches a file of the run.

A victim is forked from this process, which has imported everything, so a kill costs what a tiny run costs. Which files there
are and what is in them does not matter: an audit hook sees them opened, renamed, linked, cut and removed; `fsync` counts too.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from fedlightning.callbacks import (
    APFL,
    FENDA,
    FLIU,
    IFCA,
    SCAFFOLD,
    Ditto,
    FedAdam,
    FedAvg,
    FedPer,
    GlobalCheckpoint,
    LocalAdaptation,
    LocalCheckpoint,
    PLayerFL,
)
from fedlightning.options import Processes
from tests.helpers import NormNet, Toy, make_trainer, toy_data
from tests.processes import fork, wait
from tests.resume.test_loggers import events
from tests.resume.test_resume import equal_trees, everything, summary

ROUNDS = 3

# name -> (module, callbacks, trainer's options), each made anew
KINDS: dict[str, Callable[[], tuple[Any, list[Any], dict[str, Any]]]] = {
    "everything": lambda: (
        NormNet("adam"),
        [GlobalCheckpoint(), LocalCheckpoint(), FedAdam(server_lr=0.1)],
        {"participation": 2, "evaluation": 2, "optimizer_state": "keep", "logger": "both"},
    ),
    "FedAvg": lambda: (Toy("momentum", dropout=0.3), [FedAvg()], {"logger": True}),
    "participation": lambda: (Toy("sgd"), [FedPer()], {"participation": 1, "logger": "both", "save_state": 2}),
    "SCAFFOLD": lambda: (Toy("sgd"), [SCAFFOLD(), LocalCheckpoint()], {"participation": 2}),
    "FENDA": lambda: (Toy("adam"), [FENDA("net.3"), LocalCheckpoint()], {}),
    "APFL": lambda: (Toy("sgd"), [APFL()], {}),
    "Ditto": lambda: (Toy("sgd"), [Ditto()], {}),
    "PLayer-FL": lambda: (Toy("sgd"), [PLayerFL(threshold=1.1)], {}),
    "IFCA": lambda: (NormNet("sgd"), [IFCA()], {"logger": True}),
    "FLIU": lambda: (NormNet("adam"), [FLIU(), LocalCheckpoint()], {"participation": 2}),
    "final visits": lambda: (Toy("sgd"), [LocalAdaptation()], {"logger": "both"}),
    "vectorized": lambda: (Toy("momentum"), [FedAvg(), LocalCheckpoint()], {"engine": "vectorized"}),
    "processes": lambda: (Toy("momentum"), [SCAFFOLD()], {"engine": Processes(2), "logger": True}),
}


def fit(kind: str, root: Path) -> None:
    """What the one command of a job does that may be killed and started again: go on or start, then test."""
    torch.manual_seed(0)
    module, callbacks, options = KINDS[kind]()
    if options.get("logger") == "both":
        options["logger"] = [CSVLogger(root / "logs", "csv"), TensorBoardLogger(root / "logs", "tb")]
    trainer = make_trainer(root, callbacks, max_rounds=ROUNDS, name="run", version="v", **options)
    trainer.fit(module, datamodule=toy_data(), resume="auto")
    trainer.test()
    torch.save(everything(trainer), root / "everything.pt")


def same_runs(one: Path, other: Path) -> None:
    """Assert that two runs left the same: state, scores, checkpoints, logs, and no file more.

    A run killed after its last state was put in place may leave files of an older state in its folder.
    """
    equal_trees(*(torch.load(root / "everything.pt", weights_only=False) for root in (one, other)))
    assert summary(one / "run/v") == summary(other / "run/v")
    found = [sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()) for root in (one, other)]
    names, others = ([name for name in side if "tfevents" not in name and "/last/" not in name] for side in found)
    assert names == others
    for name in names:
        if name.endswith(".csv"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
        elif name.endswith(".ckpt"):
            states = [torch.load(root / name, weights_only=False)["state_dict"] for root in (one, other)]
            equal_trees(dict(states[0]), dict(states[1]))
    if (one / "logs/tb").exists():
        assert events(one / "logs/tb/version_0") == events(other / "logs/tb/version_0") != []


# -- killing -----------------------------------------------------------------------------------------------------------
class Bomb:
    """Counts what this process does to files under a folder, and kills it before the n-th.

    Args:
        root: The folder.
        at: n, from 1; 0 only counts.
        loses: What a process wrote and had not yet brought to the disk is half lost, as after a power cut.
    """

    SEEN = ("open", "os.rename", "os.link", "os.remove", "os.truncate", "os.mkdir", "os.rmdir", "shutil.rmtree")

    def __init__(self, root: Path, at: int, loses: bool = False) -> None:
        self.root, self.at, self.loses, self.count, self.on = str(root), at, loses, 0, True
        fsync = os.fsync

        def counted(file: Any) -> None:
            descriptor = file if isinstance(file, int) else file.fileno()
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.startswith(self.root):
                if self.loses and self.count + 1 == self.at and name.endswith(".tmp"):
                    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
                self.step()
            fsync(file)

        os.fsync = counted
        sys.addaudithook(self.hook)

    def hook(self, event: str, given: tuple[Any, ...]) -> None:
        """See an audited event."""
        if not self.on or event not in self.SEEN or isinstance(given[0], int):
            return
        if event == "open" and not (given[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return
        if os.path.abspath(os.fsdecode(given[0])).startswith(self.root):
            self.step()

    def step(self) -> None:
        """Count one."""
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def ends(pid: int) -> bool:
    """Wait for a process. Return True if it ended well, False if it was killed; anything else is an error."""
    code = wait(pid)
    assert code in (0, -signal.SIGKILL), f"a victim ended with {code}; its traceback is above"
    return code == 0


def count_writes(kind: str, root: Path) -> int:
    """Make the whole run; return how often it touches its files."""

    def work() -> None:
        bomb = Bomb(root, 0)
        fit(kind, root)
        bomb.on = False
        (root.parent / f"{root.name}.count").write_text(str(bomb.count))

    root.mkdir(parents=True)
    assert ends(fork(work))
    return int((root.parent / f"{root.name}.count").read_text())


def killed_at(kind: str, root: Path, *at: int, loses: bool = False) -> int:
    """Kill a run at its n-th write, the resumed one at its own n-th, and so on; then let it end. Return the kills."""
    root.mkdir(parents=True)
    kills = 0
    for number in (*at, 0):

        def work(number: int = number) -> None:
            bomb = Bomb(root, number, loses)
            fit(kind, root)
            bomb.on = False

        if ends(fork(work)):
            break
        kills += 1
    assert (root / "everything.pt").exists()
    return kills


def killed_after(kind: str, root: Path, seconds: list[float]) -> int:
    """Kill a run after some time, the resumed one likewise, and so on; then let it end. Return the kills."""
    root.mkdir(parents=True)
    kills = 0
    for delay in (*seconds, None):
        pid = fork(lambda: fit(kind, root))
        if delay is not None:
            time.sleep(delay)
            os.kill(pid, signal.SIGKILL)
        if ends(pid):
            break
        kills += 1
    return kills
