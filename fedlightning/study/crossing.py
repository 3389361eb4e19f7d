"""Crossed seeds: which part of the variance of a score comes from where, such as the data's split or the training.

Where seeds are crossed, every value of a key is run with every value of the others. A run's number holds them as digits:
the key `data.init_args.seed@1/3` is set to digit 1 of the number to the base 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedlightning.errors import join_words

SEED = "trainer.seed"
SOURCES = {
    f"{SEED}.initialisation": "initialisation",
    f"{SEED}.participation": "participation",
    SEED: "order of batches",
}
"""Key -> what it addresses; the last one has what no key of its own is crossed for."""


def marked(keys: Sequence[str], crossed: Sequence[str], levels: int) -> list[str]:
    """Return keys with their digits: those that are crossed have one each, the others share the first.

    Example:
        >>> marked(["trainer.seed", "data.seed"], ["data.seed"], 3)
        ['trainer.seed@0/3', 'data.seed@1/3']
    """
    return [f"{key}@{crossed.index(key) + 1 if key in crossed else 0}/{levels}" for key in keys]


def setting(key: str, number: int) -> tuple[str, int]:
    """Return the key without its digit and what a run of a number sets it to.

    Example:
        >>> setting("data.seed@1/3", 5), setting("trainer.seed", 5)
        (('data.seed', 1), ('trainer.seed', 5))
    """
    name, _, digit = key.partition("@")
    if not digit:
        return key, number
    place, levels = map(int, digit.split("/"))
    return name, number // levels**place % levels


def sources_of(keys: Sequence[str]) -> tuple[int, dict[int, str]]:
    """Return the number of values of each source, and the sources by their digits; 0 and none where nothing is crossed.

    Example:
        >>> sources_of(["trainer.seed@0/3", "trainer.seed.initialisation@1/3", "data.init_args.seed@2/3"])
        (3, {0: 'order of batches and participation', 1: 'initialisation', 2: 'data.init_args.seed'})
        >>> sources_of(["trainer.seed"])
        (0, {})
    """
    crossed = [key.partition("@") for key in keys]
    digits: dict[int, list[str]] = {}
    for name, sign, digit in crossed:
        words = [SOURCES.get(name, name)]
        if name == SEED:
            apart = {key for key, *_ in crossed} - {SEED}
            words = [word for key, word in reversed(SOURCES.items()) if key not in apart]
        if sign:
            digits.setdefault(int(digit.partition("/")[0]), []).extend(words)
    if len(digits) < 2:
        return 0, {}
    listed = {place: join_words(words) for place, words in digits.items()}
    return int(keys[0].rpartition("/")[2]), dict(sorted(listed.items()))
