"""LEAF's CelebA: smiling or not, each celebrity a client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedlightning.datamodules.image_files import ImageFiles, lacking_files
from fedlightning.datamodules.leaf.base import LEAFDataModule
from fedlightning.datamodules.leaf.reader import LEAFUser
from fedlightning.ranges import checked

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
                f"{user.path}: user {user.name!r} has an input {strange[0]!r} that is no name of an image file."
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
