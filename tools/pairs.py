"""Which methods work together: every pair, in both orders, and every method alone in many situations, asked before round 1.

    python -m tools.pairs write tests/pairs.txt      write the table anew (a few minutes on two cores)
    python -m tools.pairs compare tests/pairs.txt    say in what the code differs from it

The table has no sentences, so that they may be worded anew: a line names what is refused beside one method. A mark after a
name says which of the two the sentence names if it does not name both: `<` the first of the list, `>` the second, `-`
neither; `*` stands for all options of a class. With `--sentences FILE` every refusal and warning is written with its sentence
and its place in the code, too.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import fedlightning.callbacks as callbacks
from fedlightning.contract import FederatedCallback
from fedlightning.options import Evaluation
from fedlightning.virtual_time import Asynchronous, DrawnStaleness, WaitFree
from tests.conformance.case import collect
from tools.refusals import Answer, ask

if TYPE_CHECKING:
    from lightning.pytorch import Callback

NEUTRAL = " neutral"
OPTIONS: dict[str, dict[str, Any]] = {
    "PrivateLR": {"factor": 0.5},
    "PoissonSampling": {"rate": 0.9},
    "Budget": {"max_steps": 1000},
    "ClientDP": {"delta": 1e-3, "noise_multiplier": 1.0, "noise_seed": 0},
    "SampleDP": {"delta": 1e-3, "noise_multiplier": 1.0, "noise_seed": 0},
    "Krum": {"bad": 0},
}
"""Options of the callbacks that are not methods."""
MORE = {"SCAFFOLD server": callbacks.SCAFFOLD(server_lr=0.5), "FedProx zero": callbacks.FedProx(mu=0.0)}
"""Variants that the conformance suite does not need."""
BESIDE_NEUTRAL = (
    *("APFL", "Central", "CFL", "Dapper", "Ditto", "DSFL", "DSGD", "FedALA", "FedAMP", "FedAvgM", "FedBN", "FedBuff"),
    *("FedDF", "FedGKT", "FedKD", "FedLP", "FedNova", "FedPer", "FedProx", "FedProto", "FedSoft", "FENDA", "FLoRA"),
    *("FML", "GPFL", "HeteroFL", "HetLoRA", "IFCA", "L2GD", "MaxFL", "PerFedAvg", "pFedBayes", "PLayerFL", "SCAFFOLD"),
    *("SWIFT", "GlobalCheckpoint", "LocalCheckpoint", "PrivateLR"),
)
"""Partners of the options with which a method is plain training."""
WITH: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "participation=0.5": {"participation": 0.5},
    "Asynchronous": {"loop": Asynchronous(), "participation": 1.0},
    "DrawnStaleness": {"loop": DrawnStaleness(1), "participation": 1.0},
    "WaitFree": {"loop": WaitFree(), "participation": 1.0},
    "held_out": {"held_out": ["site3"]},
    "optimizer_state=keep": {"optimizer_state": "keep"},
    "evaluate_clients=2": {"evaluation": Evaluation(clients=2, test_data=[])},
    "evaluate_every=0": {"evaluation": Evaluation(every=0, test_data=[])},
    "max_rounds=1": {"max_rounds": 1},
    "local_steps=1": {"local_steps": 1},
    "local_epochs=2": {"local_steps": None, "local_epochs": 2},
    "lr_decay=0.9": {"lr_decay": 0.9},
    "float_buffers=local": {"float_buffers": "local"},
    "local_loop=fast": {"local_loop": "fast"},
    "engine=vectorized": {"engine": "vectorized"},
    "gradient_clip_val=1": {"gradient_clip_val": 1.0},
    "accumulate_grad_batches=2": {"accumulate_grad_batches": 2},
    "FedAvg(samples)": {"beside": callbacks.FedAvg("samples")},
    "FedAvg(uniform)": {"beside": callbacks.FedAvg("uniform")},
    "Adam": {"optimizer": torch.optim.Adam},
    "no public data": {"public": False},
    "one client": {"sizes": (12,)},
    "a client without samples": {"sizes": (12, 0, 10, 15)},
    "models of two widths": {"models": ((8, 1), (4, 1))},
    "models of two depths": {"models": ((8, 1), (8, 2))},
    "a larger model at the server": {"models": ((4, 1), (6, 1), (8, 1)), "server": "m2"},
    "sites": {"sites": True},
}
"""Situations in which every method is asked for alone, by their line in the table."""


@cache
def rows() -> dict[str, tuple[Callback, Callback, Mapping[str, Any]]]:
    """Return all callbacks as given, weighted alike, and what they need: methods, those that watch, neutral ones."""
    from lightning.pytorch import Callback  # not above: fedlightning must be the first that imports lightning

    cases = collect("CASES")
    found = {name: (case.algorithm, case.arguments) for name, case in cases.items()}
    found |= {name: (one, {}) for name, one in MORE.items()}
    known = {name.partition(" ")[0] for name in found}
    for name in callbacks.__all__:
        kind = getattr(callbacks, name)
        if name not in known and isinstance(kind, type) and issubclass(kind, Callback):
            found[name] = (kind(**OPTIONS.get(name, {})), {})
    found |= {name + NEUTRAL: (one.neutral, one.arguments) for name, one in cases.items() if one.neutral is not None}
    return {name: (one, _weighted(one), arguments) for name, (one, arguments) in found.items()}


def _weighted(callback: Callback) -> Callback:
    """Return the callback with uniform weights where it has a choice: who weights otherwise is asked in `WITH`."""
    given = callback.hyperparameters() if isinstance(callback, FederatedCallback) else {}
    return type(callback)(**copy.deepcopy(given) | {"weighting": "uniform"}) if "weighting" in given else callback


def ask_alone(name: str, situation: str) -> Answer:
    """Return what is said of one callback in a situation."""
    given, plain, arguments = rows()[name]
    return ask([given if "beside" in WITH[situation] else plain], **{**arguments, **WITH[situation]})


def ask_pair(first: str, second: str) -> Answer:
    """Return what is said of two callbacks, with what both need: in either order the same."""
    one, other = sorted((first, second))
    return ask([rows()[first][1], rows()[second][1]], **{**rows()[one][2], **rows()[other][2]})


def partners(first: str) -> list[str]:
    """Return what a callback is paired with: neutral options with some only, and a callback with itself too."""
    return [
        second
        for second in rows()
        if (NEUTRAL not in first or second in BESIDE_NEUTRAL) and (NEUTRAL not in second or first in BESIDE_NEUTRAL)
    ]


def ask_all(name: str) -> list[tuple[str, str, Answer]]:
    """Return all answers about one callback: alone in every situation, and as the first of every pair."""
    alone = [(situation, name, ask_alone(name, situation)) for situation in WITH]
    return alone + [(name, second, ask_pair(name, second)) for second in partners(name)]


def answers() -> Iterator[tuple[str, str, Answer]]:
    """Yield every answer, with the situation or the first of a pair, and the callback that is alone or second."""
    rows()  # read once, before processes are forked
    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for line in pool.imap(ask_all, rows()):
            yield from line


def marks(found: Iterable[tuple[str, str, Answer]]) -> dict[str, dict[str, str]]:
    """Return what is refused, with its mark, by the situation or the first of the pair."""
    table: dict[str, dict[str, str]] = {line: {} for line in (*WITH, *rows())}
    for line, name, answer in found:
        mark = answer.mark(name) if line in WITH else answer.mark(line, name)
        if mark is not None:
            table[line][name] = mark
    return table


def _classes(line: str) -> dict[str, list[str]]:
    """Return the names that a line can hold, by their class."""
    names: dict[str, list[str]] = {}
    for name in rows() if line in WITH else partners(line):
        names.setdefault(name.partition(" ")[0], []).append(name)
    return names


def text(table: Mapping[str, Mapping[str, str]]) -> str:
    """Return the text of a table."""
    lines = []
    for line, refused in table.items():
        said = []
        for kind, names in _classes(line).items():
            alike = {refused.get(name) for name in names}
            if len(names) > 1 and len(alike) == 1 and None not in alike:
                said.append(f"{kind}*{refused[names[0]]}")
            else:
                said += [name + refused[name] for name in names if name in refused]
        lines.append(f"{line}: {', '.join(said)}".rstrip())
    return "\n".join(lines) + "\n"


def read(path: Path) -> dict[str, dict[str, str]]:
    """Return the table in a file."""
    table: dict[str, dict[str, str]] = {}
    for whole in path.read_text().splitlines():
        line, _, refused = whole.partition(":")
        table[line] = {}
        for part in filter(None, map(str.strip, refused.split(","))):
            name, mark = re.fullmatch(r"(.+?)([<>-]?(?:\(\w+\))?)", part).groups()  # type: ignore[union-attr]
            names = _classes(line)[name[:-1]] if name.endswith("*") else [name]
            table[line] |= dict.fromkeys(names, mark)
    return table


def differences(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a sentence for everything in which two tables differ."""
    found = [f"{line}: only in one of the tables" for line in before.keys() ^ now.keys()]
    for line in before.keys() & now.keys():
        for name in before[line].keys() | now[line].keys():
            was, is_now = (f"refused{at[line][name]}" if name in at[line] else "accepted" for at in (before, now))
            if was != is_now:
                found.append(f"{line}, {name}: {was} before, {is_now} now")
    return sorted(found)


def main() -> None:
    """Write the table, or compare one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--sentences", type=Path)
    given = parser.parse_args()
    found = list(answers())
    if given.sentences is not None:
        given.sentences.write_text("".join(json.dumps([a, b, asdict(answer)]) + "\n" for a, b, answer in found))
    if given.what == "write":
        given.file.write_text(text(marks(found)))
    elif different := differences(read(given.file), marks(found)):
        sys.exit("\n".join(different))


if __name__ == "__main__":
    main()
