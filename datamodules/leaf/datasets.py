"""LEAF's data sets: CelebA (celebrities), FEMNIST (writers), Sentiment140 (users), Shakespeare (roles), Synthetic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from fedlightning.datamodules.csv_tables import text_of
from fedlightning.datamodules.federated_data import sort_clients
from fedlightning.datamodules.image_files import ImageFiles, lacking_files
from fedlightning.datamodules.leaf.leaf_users import LEAFDataModule, LEAFUser, numbers
from fedlightning.datamodules.natural import SiteSamples
from fedlightning.datamodules.views import ArrayDataset, Indices
from fedlightning.datamodules.word_numbers import WordNumbers
from fedlightning.ranges import NonNegativeInt, PositiveInt, ShareBelowOne, checked

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The characters that LEAF numbers from 0, in its order."""
LENGTH = 80
"""Characters of an input."""
_ROLE = re.compile(r"([A-Z][^\n:]{0,60}):")
_CODES = {letter: code for code, letter in enumerate(LETTERS)}


class ShakespeareDataModule(LEAFDataModule):
    r"""Shakespeare's plays: 80 characters that a role says, and the next one; each speaking role a client, 80 classes.

    McMahan et al. 2017; Caldas et al. 2018 (LEAF). The text is in the public domain. `root` is one of two things:

    * a folder with LEAF's `train/*.json` and `test/*.json`, read as they are (1129 roles, of a play each); validation samples
      are the last ones of a role, and the 80 before them, which overlap with them, are left out;
    * a text file, in which a role speaks after a line of its name with a colon (`ROMEO:`) and an empty line before it, as in
      Karpathy's `input.txt` ("Tiny Shakespeare", 1.1 MB, https://github.com/karpathy/char-rnn). A role is then a name,
      whatever the play. What it says is joined in order; the last `test_fraction` of its characters is for testing, the
      last `val_fraction` of the rest for validation, and no sample reaches across such a cut, as no sample of LEAF's
      files does.

    `x` is int64 `(batch, 80)`, `y` int64 `(batch,)`: the place of a character among LEAF's 80 (`LETTERS`). Another
    character is read as a space, with a warning. `TextLSTM(80, 80)` is LEAF's network.

    Args:
        root: Folder of LEAF's files, or a text file.
        batch_size: Number of samples in a batch (LEAF: 10).
        val_fraction: Share of the training samples for validation, in [0, 1).
        test_fraction: Share of a role's characters for testing, of a text file (LEAF: 0.1).
        min_chars: Roles of a text file that say less than this many characters are left out, with a warning.
        step: Characters from the beginning of one training sample to the next, of a text file. LEAF: 1, every character is
            predicted once; 80 makes samples that do not overlap, for a quick trial.
        options: The other arguments of `LEAFDataModule`, by name.

    Raises:
        ValueError: If a number is out of its range; from `setup`, if the file has no roles.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedlightning.datamodules import ShakespeareDataModule
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "play.txt")
        ...     _ = path.write_text("ROMEO:\n" + 300 * "Ay me! " + "\n\nJULIET:\n" + 200 * "O Romeo! ")
        ...     data = ShakespeareDataModule(str(path))
        ...     data.setup()
        >>> data.client_ids, data.num_samples("ROMEO")
        (['JULIET', 'ROMEO'], 1433)
    """

    classes = len(LETTERS)

    @checked
    def __init__(
        self,
        root: str,
        batch_size: int = 10,
        val_fraction: ShareBelowOne = 0.2,
        *,
        test_fraction: ShareBelowOne = 0.1,
        min_chars: NonNegativeInt = 1000,
        step: PositiveInt = 1,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size, val_fraction, **options)
        self.test_fraction, self.min_chars, self.step = test_fraction, int(min_chars), int(step)

    def prepare_data(self) -> None:
        if not self.root.is_file():
            super().prepare_data()

    def read(self) -> SiteSamples:
        if not self.root.is_file():
            return super().read()
        texts = roles_of(self.root)
        kept = [name for name in sort_clients(texts) if len(texts[name]) >= max(self.min_chars, LENGTH + 1)]
        kept = sort_clients(sorted(kept, key=lambda name: -len(texts[name]))[: self.largest])
        if len(kept) < len(texts):
            rank_zero_warn(
                f"{self.root.name}: {len(texts) - len(kept)} of {len(texts)} roles are left out: they say less "
                f"than min_chars={self.min_chars} characters, or are not among the largest.",
                category=UserWarning,
            )
        if not kept:
            raise ValueError(f"{self.root}: no role says min_chars={self.min_chars} characters; use a smaller number.")
        codes = torch.from_numpy(codes_of("".join(texts[name] for name in kept), self.root))
        rows = {}
        start = 0
        for name in kept:
            end = start + len(texts[name])
            tested = end - int(self.test_fraction * (end - start))
            validated = tested - int(self.val_fraction * (tested - start))
            rows[name] = {
                "train": np.arange(start, validated - LENGTH, self.step),
                "val": np.arange(validated, tested - LENGTH),
                "test": np.arange(tested, end - LENGTH),
            }
            start = end
        # Windows are views of one text; a copy would take 80 times its size.
        data = ArrayDataset(codes.unfold(0, LENGTH, 1)[:-1], codes[LENGTH:].long(), transform=Tensor.long)
        return SiteSamples(data, rows, codes[LENGTH:].numpy().astype(np.int64))

    def cut(
        self, rows: Indices, fraction: float, draw: torch.Generator, samples: SiteSamples
    ) -> tuple[Indices, Indices]:
        size = int(fraction * len(rows))
        if not size or size + LENGTH >= len(rows):  # too few to tell apart: all of them train
            return rows, rows[:0]
        # Samples follow each other by one character; those that overlap with a validation sample are left out.
        return rows[: len(rows) - size - LENGTH], rows[-size:]

    def inputs(self, user: LEAFUser) -> Tensor:
        strange = [text for text in user.x if not isinstance(text, str) or len(text) != LENGTH]
        if strange:
            raise ValueError(
                f"{user.path}: user {user.name!r} has an input {str(strange[0])[:20]!r} that is not a text of {LENGTH} "
                "characters."
            )
        return torch.from_numpy(codes_of("".join(user.x), user.path)).long().reshape(-1, LENGTH)

    def targets(self, user: LEAFUser) -> np.ndarray:
        strange = [text for text in user.y if not isinstance(text, str) or len(text) != 1]
        if strange:
            raise ValueError(f"{user.path}: user {user.name!r} has a target {strange[0]!r} that is not a character.")
        return codes_of("".join(user.y), user.path).astype(np.int64)


def roles_of(path: Path) -> dict[str, str]:
    """Return what each role says, in order, from a text with names before speeches.

    Raises:
        ValueError: If the text is not UTF-8, or no line names a role.
    """
    blocks = re.split(r"\n[ \t]*\n", text_of(path).replace("\r\n", "\n"))
    speeches_by_role: dict[str, list[str]] = {}
    role = None
    for block in blocks:
        first, _, rest = block.strip("\n").partition("\n")
        named = _ROLE.fullmatch(first.strip())
        if named is not None:
            role, block = named.group(1), rest
        if role is not None and block:  # a speech may go on after an empty line
            speeches_by_role.setdefault(role, []).append(block)
    if not speeches_by_role:
        raise ValueError(
            f"{path} names no role; a role speaks after an empty line and a line of its name with a colon, such as 'ROMEO:'."
        )
    return {name: "\n".join(speeches) + "\n" for name, speeches in speeches_by_role.items()}


def codes_of(text: str, path: Path) -> np.ndarray:
    """Return the places of characters in `LETTERS`, uint8; others are read as a space, with a warning."""
    other = sorted(set(text) - set(LETTERS))
    if other:
        count = sum(map(text.count, other))
        rank_zero_warn(
            f"{path.name}: {count} characters are none of LEAF's 80, such as {other[0]!r}, and are read as spaces.",
            category=UserWarning,
        )
    space = _CODES[" "]
    table = {letter: _CODES.get(letter, space) for letter in set(text)}
    return np.fromiter((table[letter] for letter in text), dtype=np.uint8, count=len(text))


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

    @property
    def meaning(self) -> dict[str, list[str]]:
        return super().meaning | {"inputs": self.numbers_of.meaning}

    def inputs(self, user: LEAFUser) -> Tensor:
        for sample, row in enumerate(user.x, start=1):
            if not isinstance(row, list) or len(row) <= _TEXT or not isinstance(row[_TEXT], str):
                raise ValueError(
                    f"{user.path}: sample {sample} of user {user.name!r} has no text in column {_TEXT + 1} (id, date, query, "
                    "user, text); it is not a file of Sentiment140."
                )
        rows = [self.numbers_of(row[_TEXT]) for row in user.x]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, self.max_words)

    def targets(self, user: LEAFUser) -> np.ndarray:
        source = LEAFUser(
            user.split, user.name, user.x, [1 if value in (4, "4") else value for value in user.y], user.path
        )
        return super().targets(source)


class LEAFFEMNISTDataModule(LEAFDataModule):
    """FEMNIST: handwritten digits and letters of EMNIST byclass, each writer a client; 62 classes.

    Caldas et al. 2018 (LEAF); the images are NIST's Special Database 19, public domain, by Cohen et al. 2017 (EMNIST). The
    arguments are those of `LEAFDataModule`. `x` is float32 `(batch, 1, 28, 28)` as in the files, where 1 is paper and 0 is
    ink; `y` int64 `(batch,)`: 0-9 digits, 10-35 upper case, 36-61 lower case.

    Example:
        >>> from fedlightning.datamodules import LEAFFEMNISTDataModule
        >>> data = LEAFFEMNISTDataModule("data/femnist")  # files are read by data.setup()
        >>> data.classes, data.batch_size
        (62, 10)
    """

    classes = 62

    def inputs(self, user: LEAFUser) -> Tensor:
        images = numbers(user, 28 * 28).reshape(-1, 1, 28, 28)
        if len(images) and not 0 <= images.min() <= images.max() <= 1:
            raise ValueError(f"{user.path}: user {user.name!r} has a pixel outside of 0 ... 1, ink and paper.")
        return images


class LEAFSyntheticDataModule(LEAFDataModule):
    """Synthetic(alpha, beta) as LEAF and FedProx write it: 60 features, 10 classes (`SyntheticDevicesDataModule` draws it).

    The arguments are those of `LEAFDataModule`, and `features` and `classes`. `x` is float32 `(batch, features)`, `y` int64
    `(batch,)`.

    Attributes:
        features: Numbers of a sample. LEAF's own script can write other numbers: set it, and `classes`, on a subclass.

    Example:
        >>> from fedlightning.datamodules import LEAFSyntheticDataModule
        >>> LEAFSyntheticDataModule("data/synthetic").features
        60
    """

    classes = 10
    features = 60

    def inputs(self, user: LEAFUser) -> Tensor:
        return numbers(user, self.features)


SIZE = (84, 84)
"""Height and width of LEAF's images."""


class LEAFCelebADataModule(LEAFDataModule):
    """CelebA: photographs of celebrities, each of them a client; class 1 is a smile.

    Liu et al. 2015, for non-commercial research only; Caldas et al. 2018 (LEAF). `train` and `test` name the files; the
    images themselves (`img_align_celeba.zip` of https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html) must be unpacked.
    `x` is float32 `(batch, 3, 84, 84)` in [0, 1], resized as in LEAF; `y` int64 `(batch,)`. Images are read when they
    are asked for.

    Args:
        root: Folder that holds `train` and `test`.
        batch_size: Number of samples in a batch.
        images: Folder of the image files. `None`: `raw/img_align_celeba` beside `train`.
        cache: Keep decoded images in memory (21 kB each).
        options: The other arguments of `LEAFDataModule`, by name.

    Example:
        >>> from fedlightning.datamodules import LEAFCelebADataModule
        >>> LEAFCelebADataModule("data/celeba").classes
        2
    """

    classes = 2

    @checked
    def __init__(
        self, root: str, batch_size: int = 10, *, images: str | None = None, cache: bool = False, **options: Any
    ) -> None:
        super().__init__(root, batch_size, **options)
        self.images, self.cache = images, cache
        self._names: list[str] = []

    def inputs(self, user: LEAFUser) -> Tensor:
        strange = [value for value in user.x if not isinstance(value, str) or Path(value).name != value]
        if strange:
            raise ValueError(
                f"{user.path}: user {user.name!r} has an input {strange[0]!r} that is not a name of an image file."
            )
        start = len(self._names)
        self._names += user.x
        return torch.arange(start, len(self._names))

    def dataset(self, x: Tensor, y: np.ndarray) -> Dataset[Any]:
        places = [self.root / "raw", self.root / "data" / "raw"]
        folder = (
            Path(self.images)
            if self.images is not None
            else next(
                (place / "img_align_celeba" for place in places if place.is_dir()), places[0] / "img_align_celeba"
            )
        )
        paths = [folder / name for name in self._names]
        lacking_files(self, paths, self.root)
        return ImageFiles(paths, y, SIZE, cache=self.cache)
