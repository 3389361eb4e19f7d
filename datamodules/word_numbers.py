"""Texts as numbers of words, without a vocabulary that clients would have to agree on."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from fedlightning.datamodules.csv_tables import read_json, text_of

_WORDS = re.compile(r"[\w']+|[.,!?;]")


class WordNumbers:
    """The words of a text as numbers from 1; 0 is padding. Words are runs of letters, digits and apostrophes, and marks.

    Without a vocabulary a word's number is a hash of it (case does not count); a few words then share a number. A
    vocabulary made from clients' own texts would tell who writes which rare word, so a list has to be public.

    Args:
        vocabulary: A public list of words: LEAF's `embs.json` (its key `vocab`), or a text with a word a line. Other
            words have the number after the last one. `None` hashes.
        buckets: Numbers of hashed words.
        max_words: Words of a text that are kept.

    Example:
        >>> from fedlightning.datamodules.word_numbers import WordNumbers
        >>> words = WordNumbers(buckets=100, max_words=5)
        >>> words.size, words("so happy, so good!")[:4] == words("So happy, so sad")[:4], words("so")[1:]
        (101, True, [0, 0, 0, 0])
    """

    def __init__(self, vocabulary: str | None = None, buckets: int = 10_000, max_words: int = 25) -> None:
        self.vocabulary, self.buckets, self.max_words = vocabulary, int(buckets), int(max_words)
        self._number_by_word: dict[str, int] | None = None

    @property
    def size(self) -> int:
        """Numbers that a word can have, padding included: `vocab_size` of a network."""
        return self.buckets + 1 if self.vocabulary is None else len(self._numbers()) + 2

    @property
    def meaning(self) -> list[str]:
        """What numbers stand for: the words in their order, or how many numbers hashes have."""
        return [f"{self.buckets} hashes"] if self.vocabulary is None else list(self._numbers())

    def __call__(self, text: str) -> list[int]:
        words = _WORDS.findall(text)[: self.max_words]
        if self.vocabulary is None:
            numbers = [1 + zlib.crc32(word.lower().encode()) % self.buckets for word in words]
        else:
            number_by_word = self._numbers()
            numbers = [number_by_word.get(word, len(number_by_word) + 1) for word in words]
        return numbers + [0] * (self.max_words - len(numbers))

    def _numbers(self) -> dict[str, int]:
        if self._number_by_word is None:
            assert self.vocabulary is not None
            path = Path(self.vocabulary)
            words = read_json(path) if path.suffix == ".json" else text_of(path).split()
            words = words.get("vocab") if isinstance(words, dict) else words
            if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
                raise ValueError(f"{path} is not a vocabulary: a word a line, or JSON with a list of words as 'vocab'.")
            self._number_by_word = {word: number for number, word in enumerate(dict.fromkeys(words), start=1)}
        return self._number_by_word
