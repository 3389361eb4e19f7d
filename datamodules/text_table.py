"""Tables of texts: a CSV file with a text, a class, and a column that names the client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedlightning.datamodules.csv_tables import Column, column_of
from fedlightning.datamodules.indexed import Split
from fedlightning.datamodules.plans import Partitioner
from fedlightning.datamodules.tabular import TabularFederatedDataModule
from fedlightning.datamodules.word_numbers import WordNumbers
from fedlightning.ranges import PositiveInt, checked


class TextTableDataModule(TabularFederatedDataModule):
    r"""A CSV file with a header, one text a row, and a column that names the client, or a partitioner.

    Everything but the inputs is as in `TabularFederatedDataModule`. `x` is int64 `(batch, max_words)`, words as numbers from
    1 with 0 as padding, as `SmallTransformer` and `TextLSTM` take them (`vocab_size` is `vocabulary_size`).

    So are the admission notes of MIMIC-III read, which PLayer-FL divides by the diagnosis at admission: join
    `NOTEEVENTS.csv` (`TEXT`) and `ADMISSIONS.csv` (`DIAGNOSIS`, `HOSPITAL_EXPIRE_FLAG`) into one
    file, one admission a row, and give `group="SUBJECT_ID"`, since patients come again. MIMIC-III is for credentialed users
    of PhysioNet; nothing is downloaded, and its texts must not leave the machine that they may be on.

    Args:
        path: The file, in UTF-8.
        target: Column to predict.
        text: Column of the texts. A row without one is refused.
        client: Column that names each row's client. It is not an input.
        partitioner: Divides the rows if no column does.
        vocabulary: A public list of words, a word a line. Other words have the number after the last one. `None` hashes.
        buckets: Numbers of hashed words.
        max_words: Words of a text that are kept, the first ones.
        options: The other arguments of `TabularFederatedDataModule`, by name.

    Raises:
        ValueError: If a number is out of its range; from `setup`, if a text is missing.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedlightning.datamodules import TextTableDataModule
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "notes.csv")
        ...     rows = [f"{'AB'[i % 2]},fever and pain,{i // 2 % 2}" for i in range(20)]
        ...     _ = path.write_text("\n".join(["ward,note,died", *rows]))
        ...     data = TextTableDataModule(path, "died", "note", client="ward", buckets=100, max_words=4)
        ...     data.setup()
        >>> x, y = next(iter(data.client_dataloader("A", "test")))
        >>> data.client_ids, data.vocabulary_size, x.dtype, x.shape
        (['A', 'B'], 101, torch.int64, torch.Size([2, 4]))
    """

    @checked
    def __init__(
        self,
        path: str | Path,
        target: str,
        text: str,
        client: str | None = None,
        partitioner: Partitioner | None = None,
        *,
        vocabulary: str | None = None,
        buckets: PositiveInt = 10_000,
        max_words: PositiveInt = 128,
        **options: Any,
    ) -> None:
        super().__init__(path, target, client, partitioner, **options)
        if self.categorical or self.statistics or self.categories or self.ranges or self.scale == "federated":
            raise ValueError(
                "TextTableDataModule got categorical, categories, statistics, ranges or scale: federated; its only input is "
                "a text. Leave them out."
            )
        self.text, self.numbers_of = text, WordNumbers(vocabulary, buckets, max_words)

    @property
    def vocabulary_size(self) -> int:
        """Numbers that a word can have, padding included: `vocab_size` of a network."""
        return self.numbers_of.size

    @property
    def meaning(self) -> dict[str, list[str]]:
        return super().meaning | {"inputs": self.numbers_of.meaning}

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        ids, splits = super().build()
        data: Any = splits["train"].dataset  # one for all splits
        data.x = data.x.long()
        return ids, splits

    def _features(
        self, table: Mapping[str, Column], kept: np.ndarray, own_rows: Sequence[np.ndarray], rows: Sequence[np.ndarray]
    ) -> np.ndarray:
        cells = [
            cell for cell, there in zip(column_of(dict(table), self.text, "text").cells, kept, strict=True) if there
        ]
        if "" in cells:
            raise ValueError(f"{self.path}: sample {cells.index('') + 1} has no {self.text!r}; leave such rows out.")
        self.feature_names = [self.text]
        return np.array([self.numbers_of(cell) for cell in cells], dtype=np.float64)  # exact below 2^24 as float32, too
