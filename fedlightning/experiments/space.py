"""Values that a sweep tries: all combinations of a grid, or values within ranges for Optuna."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fedlightning.config.errors import InputError

Values = dict[str, str]
"""Keys of options -> values, as they would be written on the command line."""

_FORMS = "log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH or choice:A,B,C"


def split_values(text: str) -> list[str]:
    """Split at commas that are not in brackets, braces or quotes.

    Example:
        >>> split_values("0.1,[8,4],relu")
        ['0.1', '[8,4]', 'relu']
    """
    found, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "[{(":
            depth += 1
        elif sign in ")}]":
            depth -= 1
        elif sign == "," and depth == 0:
            found.append("")
            continue
        found[-1] += sign
    return [value.strip() for value in found]


def parse_grid(words: Sequence[str]) -> dict[str, list[str]]:
    """Parse the words of `--grid`.

    Example:
        >>> parse_grid(["trainer.callbacks.mu=0.1,1"])
        {'trainer.callbacks.mu': ['0.1', '1']}
    """
    grid: dict[str, list[str]] = {}
    for word in words:
        key, text = _key("--grid", word, "KEY=VALUE,VALUE,...", grid)
        values = list(dict.fromkeys(split_values(text)))
        if not all(values):
            raise InputError(f"--grid {word}: a value is missing; write KEY=VALUE,VALUE,... .")
        grid[key] = values
    return grid


def combinations(grid: dict[str, list[str]]) -> Iterator[Values]:
    """Yield all combinations of a grid. The values of the last key change fastest."""
    for chosen in itertools.product(*grid.values()):
        yield dict(zip(grid, chosen, strict=True))


@dataclass(frozen=True)
class Range:
    """A range in which the value of one option is searched.

    Attributes:
        key: Key of the option.
        kind: `"log"` (uniform in the logarithm), `"uniform"`, `"int"` (bounds included) or `"choice"`.
        low: Lower bound.
        high: Upper bound.
        choices: Values of a choice.
    """

    key: str
    kind: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()

    def propose(self, trial: Any) -> str:
        """Return a value from an Optuna trial, as it would be written on the command line."""
        if self.kind == "choice":
            return str(trial.suggest_categorical(self.key, self.choices))
        if self.kind == "int":
            return str(trial.suggest_int(self.key, int(self.low), int(self.high)))
        return repr(float(trial.suggest_float(self.key, self.low, self.high, log=self.kind == "log")))

    def at(self, share: float) -> str:
        """Return the value at a share of the range, from 0 to below 1, to four digits.

        Example:
            >>> Range("model.init_args.lr", "log", 0.01, 1.0).at(0.5), Range("k", "int", 1, 4).at(0.99)
            ('0.1', '4')
        """
        if self.kind == "choice":
            return self.choices[int(share * len(self.choices))]
        if self.kind == "int":
            return str(int(self.low + share * (self.high - self.low + 1)))
        if self.kind == "log":
            return f"{self.low * (self.high / self.low) ** share:.4g}"
        return f"{self.low + share * (self.high - self.low):.4g}"


def parse_search(words: Sequence[str]) -> list[Range]:
    """Parse the words of `--search`.

    Example:
        >>> parse_search(["model.init_args.lr=log:1e-5:1e-1"])
        [Range(key='model.init_args.lr', kind='log', low=1e-05, high=0.1, choices=())]
    """
    ranges: dict[str, Range] = {}
    for word in words:
        key, text = _key("--search", word, f"KEY={_FORMS}", ranges)
        kind, _, rest = text.partition(":")
        if kind == "choice":
            choices = tuple(dict.fromkeys(split_values(rest)))
            if not all(choices):
                raise InputError(f"--search {word}: a choice is missing; write choice:A,B,C.")
            ranges[key] = Range(key, kind, choices=choices)
            continue
        try:
            if kind not in ("log", "uniform", "int"):
                raise ValueError
            low, high = (int(v) if kind == "int" else float(v) for v in rest.split(":"))
        except ValueError:
            raise InputError(f"--search {word}: the range must be {_FORMS}.") from None
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise InputError(f"--search {word}: the lower bound must be below the upper one.")
        if kind == "log" and low <= 0:
            raise InputError(f"--search {word}: a logarithmic range must begin above 0.")
        ranges[key] = Range(key, kind, low, high)
    return list(ranges.values())


def _key(option: str, word: str, form: str, known: Any) -> tuple[str, str]:
    key, sign, text = word.partition("=")
    key = key.removeprefix("--")
    if not sign or not text or key.partition(".")[0] not in ("trainer", "model", "data"):
        raise InputError(
            f"{option} {word}: write {form} with a key of trainer, model or data, as in model.init_args.lr."
        )
    if key in known:
        raise InputError(f"{option} {word}: {key} is given twice. Put all its values in one.")
    return key, text
