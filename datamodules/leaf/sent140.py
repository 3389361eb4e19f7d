"""LEAF's Sentiment140: tweets, each user a client."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlightning.datamodules.leaf.base import LEAFDataModule
from fedlightning.datamodules.leaf.reader import LEAFUser
from fedlightning.datamodules.words import WordNumbers
from fedlightning.ranges import PositiveInt, checked

_TEXT = 4  # LEAF keeps the columns of Sentiment140's table: id, date, query, user, text


class LEAFSent140DataModule(LEAFDataModule):
    """Sentiment140: tweets with positive or negative mood, each user a client; two classes.

    Go, Bhayani, Huang 2009; Caldas et al. 2018 (LEAF). Twitter's terms apply to the tweets. PLayer-FL takes the 15
    largest users (`largest: 15`). `x` is int64 `(batch, max_words)`: words as numbers from 1, 0 is padding; `y` int64
    `(batch,)`: 1 is positive (4 in the source). Words are told apart as in LEAF: runs of letters, digits and
    apostrophes, and marks.

    Without a vocabulary a word's number is a hash of it, so that no list of words has to be agreed between users; a few words
    then share a number. A vocabulary made from the users' own tweets would tell who writes which rare word.

    Args:
        root: Folder that holds `train` and `test`.
        vocabulary: A public list of words: LEAF's `embs.json` (its key `vocab`), or a text with a word a line. Other
            words have the number after the last one. `None` hashes.
        buckets: Numbers of hashed words.
        max_words: Words of a tweet that are kept (LEAF: 25).
        options: The other arguments of `LEAFDataModule`, by name.

    Attributes:
        numbers_of: Function from a text to the numbers of its words, `max_words` of them.

    Raises:
        ValueError: If a number is out of its range.

    Example:
        >>> from fedlightning.datamodules import LEAFSent140DataModule
        >>> data = LEAFSent140DataModule("data/sent140", buckets=100)
        >>> data.vocabulary_size, data.numbers_of("so happy, so good!")[:5] == data.numbers_of("so happy, so sad")[:5]
        (101, False)
    """

    classes = 2

    @checked
    def __init__(
        self,
        root: str,
        batch_size: int = 10,
        *,
        vocabulary: str | None = None,
        buckets: PositiveInt = 10_000,
        max_words: PositiveInt = 25,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size, **options)
        self.vocabulary, self.buckets, self.max_words = vocabulary, int(buckets), int(max_words)
        self.numbers_of = WordNumbers(vocabulary, buckets, max_words)

    @property
    def vocabulary_size(self) -> int:
        """Numbers that a word can have, padding included: `vocab_size` of a network."""
        return self.numbers_of.size

    def inputs(self, user: LEAFUser) -> Tensor:
        for sample, row in enumerate(user.x, start=1):
            if not isinstance(row, list) or len(row) <= _TEXT or not isinstance(row[_TEXT], str):
                raise ValueError(
                    f"{user.path}: sample {sample} of user {user.name!r} has no text in column {_TEXT + 1} (id, date, query, "
                    "user, text); it is no file of Sentiment140."
                )
        rows = [self.numbers_of(row[_TEXT]) for row in user.x]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, self.max_words)

    def targets(self, user: LEAFUser) -> np.ndarray:
        source = LEAFUser(
            user.split, user.name, user.x, [1 if value in (4, "4") else value for value in user.y], user.path
        )
        return super().targets(source)
