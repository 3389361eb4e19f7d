"""Shakespeare: the next character of what a role says, each speaking role a client."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedlightning.datamodules.base import in_order
from fedlightning.datamodules.indexed import Split
from fedlightning.datamodules.leaf.base import LEAFDataModule
from fedlightning.datamodules.leaf.reader import LEAFUser
from fedlightning.datamodules.tables import text_of
from fedlightning.datamodules.views import ArrayDataset
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

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        if not self.root.is_file():
            return super().build()
        said = roles_of(self.root)
        kept = [name for name in in_order(said) if len(said[name]) >= max(self.min_chars, LENGTH + 1)]
        kept = in_order(sorted(kept, key=lambda name: -len(said[name]))[: self.largest])
        if len(kept) < len(said):
            rank_zero_warn(
                f"{self.root.name}: {len(said) - len(kept)} of {len(said)} roles are left out: they say less than min_chars="
                f"{self.min_chars} characters, or are not among the largest.",
                category=UserWarning,
            )
        if not kept:
            raise ValueError(f"{self.root}: no role says min_chars={self.min_chars} characters; use a smaller number.")
        codes = torch.from_numpy(codes_of("".join(said[name] for name in kept), self.root))
        parts: dict[str, list[np.ndarray]] = {"train": [], "val": [], "test": []}
        start = 0
        for name in kept:
            end = start + len(said[name])
            tested = end - int(self.test_fraction * (end - start))
            validated = tested - int(self.val_fraction * (tested - start))
            for split, low, high in (("train", start, validated), ("val", validated, tested), ("test", tested, end)):
                parts[split].append(np.arange(low, high - LENGTH, self.step if split == "train" else 1))
            start = end
        # Windows are views of one text; a copy would take 80 times its size.
        data = ArrayDataset(codes.unfold(0, LENGTH, 1)[:-1], codes[LENGTH:].long(), transform=Tensor.long)
        labels = codes[LENGTH:].numpy().astype(np.int64)
        return kept, {split: Split(data, rows, labels) for split, rows in parts.items()}

    def cut_validation(self, name: str, rows: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size = int(self.val_fraction * len(rows))
        if not size or size + LENGTH >= len(rows):  # too few to tell apart: all of them train
            return rows, rows[:0]
        # Samples follow each other by one character; those that overlap with a validation sample are left out.
        return rows[: len(rows) - size - LENGTH], rows[-size:]

    def inputs(self, user: LEAFUser) -> Tensor:
        strange = [text for text in user.x if not isinstance(text, str) or len(text) != LENGTH]
        if strange:
            raise ValueError(
                f"{user.path}: user {user.name!r} has an input {str(strange[0])[:20]!r} that is no text of {LENGTH} "
                "characters."
            )
        return torch.from_numpy(codes_of("".join(user.x), user.path)).long().reshape(-1, LENGTH)

    def targets(self, user: LEAFUser) -> np.ndarray:
        strange = [text for text in user.y if not isinstance(text, str) or len(text) != 1]
        if strange:
            raise ValueError(f"{user.path}: user {user.name!r} has a target {strange[0]!r} that is no character.")
        return codes_of("".join(user.y), user.path).astype(np.int64)


def roles_of(path: Path) -> dict[str, str]:
    """Return what each role says, in order, from a text with names before speeches.

    Raises:
        ValueError: If the text is no UTF-8, or no line names a role.
    """
    blocks = re.split(r"\n[ \t]*\n", text_of(path).replace("\r\n", "\n"))
    found: dict[str, list[str]] = {}
    role = None
    for block in blocks:
        first, _, rest = block.strip("\n").partition("\n")
        named = _ROLE.fullmatch(first.strip())
        if named is not None:
            role, block = named.group(1), rest
        if role is not None and block:  # a speech may go on after an empty line
            found.setdefault(role, []).append(block)
    if not found:
        raise ValueError(
            f"{path} names no role; a role speaks after an empty line and a line of its name with a colon, such as 'ROMEO:'."
        )
    return {name: "\n".join(speeches) + "\n" for name, speeches in found.items()}


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
