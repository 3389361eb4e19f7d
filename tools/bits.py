"""The record of bits: what several hundred small federations compute, as digests, to refactor against.

A change that should leave all results as they are is made between a record and a comparison:

    OMP_NUM_THREADS=1 python -m tools.bits record /tmp/bits.jsonl -j 2     # before the change
    OMP_NUM_THREADS=1 python -m tools.bits compare /tmp/bits.jsonl -j 2    # after it: prints what differs, exit status 1

Every case (tools/bits_cases.py) gives parts: the server's models, the deployed models, the clients' records, the server's
state, counts, metric rows. Of each the file keeps a SHA-256 digest over names, types, shapes and bytes, so that a difference
is located. No part holds files, pickles or paths of classes. An error is kept as its sentence, in words. A record that was
stopped goes on where it ended when it is started again. `--only` takes a part of a case's name and can be repeated.

Digests hold on the machine and with the versions of torch and Lightning that they were made with.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import argparse
import gc
import hashlib
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

SENTENCE = "sentence"
"""The part that is kept in words: the error with which a case ends, if it ends with one."""
LIMIT = 180
"""Seconds after which a case is given up."""
Entry = dict[str, Any]
"""A case's name (`case`), digests by part (`parts`), `sentence` (`None`: no error), and the `seconds` of its process."""


def digest(value: Any) -> str:
    """Return the SHA-256 digest of a nested value of tensors, arrays, numbers and words."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        found.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        found.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    elif isinstance(value, np.ndarray) and value.dtype != object:
        found.update(f"array {value.dtype} {value.shape};".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, np.generic):
        _feed(found, value.item())
    elif isinstance(value, Mapping):
        found.update(f"dict {len(value)};".encode())
        for key in sorted(value, key=repr):
            found.update(f"{key!r}:".encode())
            _feed(found, value[key])
    elif isinstance(value, list | tuple | np.ndarray):
        found.update(f"list {len(value)};".encode())
        for item in value:
            _feed(found, item)
    elif isinstance(value, set | frozenset):
        _feed(found, sorted(value, key=repr))
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        found.update(f"{type(value).__name__} {value!r};".encode())
    elif hasattr(value, "__dict__"):  # an object counts by what it holds, whatever its class is called
        _feed(found, vars(value))
    else:
        raise TypeError(f"A part holds a {type(value).__name__}, for which there is no digest.")


def entry_of(name: str, parts: Mapping[str, Any]) -> Entry:
    """Return a case's line of the record."""
    sentence = parts.get(SENTENCE)
    return {
        "case": name,
        "parts": {part: digest(value) for part, value in parts.items() if part != SENTENCE},
        SENTENCE: sentence,
    }


def differing(before: Entry, now: Entry) -> list[str]:
    """Return the parts in which two lines of one case differ."""
    first, second = before["parts"], now["parts"]
    parts = [part for part in {**first, **second} if first.get(part) != second.get(part)]
    return [*parts, *([SENTENCE] if before[SENTENCE] != now[SENTENCE] else [])]


# -- running -------------------------------------------------------------------------------------------------------


def _work(name: str, run: Any, folder: Path, out: Path) -> None:
    """Run a case in a process of its own and write its line."""
    signal.alarm(LIMIT)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    warnings.simplefilter("ignore")
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    folder.mkdir()
    parts: dict[str, Any] = {}
    try:
        run(folder, parts)
    except Exception as error:
        parts[SENTENCE] = f"{type(error).__name__}: {error}"
    if parts.get(SENTENCE):
        text = parts[SENTENCE].replace(str(folder), "FOLDER")
        parts[SENTENCE] = re.sub(r" at 0x[0-9a-f]+", "", text)
    out.write_text(json.dumps(entry_of(name, parts) | {"seconds": round(time.process_time(), 2)}))


def run_cases(cases: Mapping[str, Any], jobs: int) -> Iterator[Entry]:
    """Run cases in forked processes, so that each begins with the same fresh imports, and yield lines as they come.

    Args:
        cases: By name, functions of a scratch folder and of the dict of parts that they fill.
        jobs: Number of processes at a time.
    """
    waiting = list(cases.items())[::-1]
    at_work: dict[Any, tuple[Any, str, Path, Path]] = {}
    root = Path(tempfile.mkdtemp(prefix="bits"))
    try:
        while waiting or at_work:
            while waiting and len(at_work) < jobs:
                name, run = waiting.pop()
                folder = root / str(len(waiting))
                out = folder.with_suffix(".json")
                process = get_context("fork").Process(target=_work, args=(name, run, folder, out))
                process.start()
                at_work[process.sentinel] = process, name, folder, out
            ended = wait(list(at_work))[0]  # of these processes alone: whoever called has others, perhaps
            process, name, folder, out = at_work.pop(ended)
            process.join()
            crashed = {"case": name, "parts": {}, SENTENCE: f"The process ended with status {process.exitcode}."}
            yield json.loads(out.read_text()) if out.exists() else crashed
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        for process, *_ in at_work.values():
            process.kill()
        shutil.rmtree(root, ignore_errors=True)


def chosen(names: Iterable[str], only: Iterable[str]) -> list[str]:
    """Return the names that hold one of the words of `only`; all of them if there is none."""
    words = list(only)
    return [name for name in names if not words or any(word in name for word in words)]


def read_record(path: Path) -> dict[str, Entry]:
    """Return the lines of a record by case; a last line that was cut is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    return {entry["case"]: entry for entry in entries}


def record(path: Path, cases: Mapping[str, Any], only: Iterable[str] = (), jobs: int = 1) -> int:
    """Run the cases that the file does not have yet, and add their lines to it.

    Returns:
        The number of lines that were added.
    """
    known = read_record(path)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in known.values()))
    missing = {name: cases[name] for name in chosen(cases, only) if name not in known}
    with path.open("a") as file:
        for entry in run_cases(missing, jobs):
            file.write(json.dumps(entry) + "\n")
            file.flush()
    return len(missing)


def compare(path: Path, cases: Mapping[str, Any], only: Iterable[str] = (), jobs: int = 1) -> dict[str, list[str]]:
    """Run the cases of a record again, and print which differ.

    Returns:
        By case that differs, its parts that do.
    """
    before = read_record(path)
    names = chosen(before, only)
    found = {name: ["there is no such case any more"] for name in names if name not in cases}
    for entry in run_cases({name: cases[name] for name in names if name in cases}, jobs):
        old = before[entry["case"]]
        if parts := differing(old, entry):
            found[entry["case"]] = parts
            print(f"{entry['case']}: {', '.join(parts)}", flush=True)
            if SENTENCE in parts:
                print(f"    before: {old[SENTENCE]}\n    now:    {entry[SENTENCE]}", flush=True)
    for name in names:
        if name not in cases:
            print(f"{name}: {found[name][0]}")
    in_words = sum(parts == [SENTENCE] for parts in found.values())
    print(f"{len(names)} cases: {len(found) - in_words} differ in results, {in_words} in their sentence alone.")
    if new := chosen([name for name in cases if name not in before], only):
        print(f"{len(new)} cases are not in the record: {', '.join(new[:5])}{', ...' if len(new) > 5 else ''}")
    return found


def main(words: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bits", description="Record results, or compare with a record."
    )
    parser.add_argument("command", choices=["record", "compare", "list"])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument(
        "--only", action="append", default=[], metavar="SUBSTRING", help="of names of cases; repeatable"
    )
    parser.add_argument("-j", "--jobs", type=int, default=1, help="processes at a time (default 1)")
    given = parser.parse_args(words)
    from tools.bits_cases import all_cases  # imports torch, Lightning and the package once, for all forks
    from tools.bits_runs import warm_up

    torch.set_num_threads(1)
    cases, began = all_cases(), time.monotonic()
    if given.command == "list":
        print("\n".join(chosen(cases, given.only)))
        return 0
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warm_up(Path(folder))
    gc.collect()
    gc.freeze()  # the collector of a fork then writes to no page that it shares
    if given.file is None:
        parser.error("give the file of the record")
    if given.command == "record":
        added = record(given.file, cases, given.only, given.jobs)
        print(f"{added} cases recorded in {time.monotonic() - began:.0f} s.")
        return 0
    found = compare(given.file, cases, given.only, given.jobs)
    print(f"{time.monotonic() - began:.0f} s.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
