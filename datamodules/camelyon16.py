"""Fed-Camelyon16: slides of lymph nodes as bags of features, from two hospitals, as FLamby prepares them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedlightning.datamodules.csv_tables import column_of, read_table, refuse_twice, whole_of
from fedlightning.datamodules.natural import NaturalSites, SiteSamples
from fedlightning.ranges import NonNegativeInt, PositiveInt, ShareBelowOne, checked
from fedlightning.seeding import generator

HOSPITALS = ("0", "1")
"""The clients: Radboud (0) and Utrecht (1)."""
METADATA = "metadata.csv"
LARGEST_FEATURE = 1e3
"""Features of a ResNet are means after a ReLU, of a few units."""


class Camelyon16DataModule(NaturalSites):
    """Fed-Camelyon16 of FLamby: 399 slides of two hospitals, each a bag of tiles' features; class 1 has a metastasis.

    Ogier du Terrail et al. 2022 (FLamby); Ehteshami Bejnordi et al. 2017 (Camelyon16); CC0. Nothing is downloaded.
    `root` needs `metadata.csv` of FLamby's `flamby/datasets/fed_camelyon16/metadata` and the files
    `normal_001.tif.npy`, ... that its script `tiling_slides.py` writes: float arrays `(tiles, features)`, features of
    an ImageNet ResNet-50 (2048), in older versions with three columns of places before them.

    The clients are "0" and "1" (`hospital_corrected`); train/test are the challenge's, 169/74 and 101/55 slides. `x` is
    float32 `(batch, max_tiles, features)`: `max_tiles` tiles of each slide, chosen by `seed` if it has more (`DeepMIL`
    leaves out rows of zeros, which fill up bags); `y` int64 `(batch,)`. Files are memory maps, read when they are asked
    for.

    Args:
        root: Folder of `metadata.csv` and the features.
        batch_size: Number of slides in a batch (FLamby: 16).
        val_fraction: Share of the training slides for validation, in [0, 1); FLamby has none.
        max_tiles: Tiles of a slide that are used (FLamby: 10000, 80 MB a slide).
        skip: Columns to leave out at the beginning of each row: 3 for features with places.
        val_seed: Seed of the validation cut alone. `None` is `seed`.
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Example:
        >>> from fedlightning.datamodules import Camelyon16DataModule
        >>> Camelyon16DataModule(root="data/camelyon16").max_tiles  # files are read by data.setup()
        10000
    """

    files = (METADATA,)
    way = "see flamby/datasets/fed_camelyon16 of https://github.com/owkin/FLamby"
    address = "camelyon16"

    @checked
    def __init__(
        self,
        root: str = "data/camelyon16",
        batch_size: int = 16,
        val_fraction: ShareBelowOne = 0.2,
        *,
        max_tiles: PositiveInt = 10_000,
        skip: NonNegativeInt = 0,
        val_seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size, **options)
        self.val_fraction, self.val_seed = val_fraction, val_seed
        self.max_tiles, self.skip = int(max_tiles), int(skip)

    def read(self) -> SiteSamples:
        source = self.root / METADATA
        table = read_table(source)
        slides = column_of(table, "slide_name", "metadata").cells
        y = whole_of(source, column_of(table, "label", "metadata"))
        hospitals = whole_of(source, column_of(table, "hospital_corrected", "metadata"))
        for line, (slide, label, hospital) in enumerate(zip(slides, y, hospitals, strict=True), start=2):
            kind = slide.partition("_")[0]
            labels = {"normal": (0,), "tumor": (1,), "test": (0, 1)}.get(kind, ())
            if label not in labels or str(hospital) not in HOSPITALS:
                raise ValueError(
                    f"{source}, line {line}: slide {slide!r}, label {label}, hospital {hospital}; it is not FLamby's file."
                )
        refuse_twice(source, slides, "slide")
        paths = [self.root / f"{slide}.npy" for slide in slides]
        absent = [path.name for path in paths if not os.path.isfile(path)]
        if absent:
            raise FileNotFoundError(
                f"{type(self).__name__}: {len(absent)} of {len(paths)} slides' features are not in {self.root}, such "
                f"as {absent[0]}; write all of them, or take their lines out of metadata.csv."
            )
        testing = np.array([slide.startswith("test_") for slide in slides])
        rows = {
            hospital: {
                "train": np.flatnonzero((hospitals == int(hospital)) & ~testing),
                "test": np.flatnonzero((hospitals == int(hospital)) & testing),
            }
            for hospital in HOSPITALS
        }
        return SiteSamples(Bags(paths, y, self.max_tiles, self.skip, self.seed), rows, y)


class Bags(Dataset[Any]):
    """A dataset of bags `(max_tiles, features)` from numpy files, filled up with zeros.

    Args:
        paths: Files of float arrays `(tiles, features)`.
        labels: The class of each bag, int64 `(samples,)`.
        max_tiles: Rows of a bag.
        skip: Columns to leave out at the beginning.
        seed: Seed of the choice of tiles of a slide that has more.

    Raises:
        ValueError: From an access, if a file is not such an array; the message names it.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from fedlightning.datamodules.camelyon16 import Bags
        >>> with TemporaryDirectory() as folder:
        ...     np.save(Path(folder, "a.npy"), np.ones((2, 5)))
        ...     bag, label = Bags([Path(folder, "a.npy")], np.array([1]), max_tiles=3)[0]
        >>> bag.sum(1), label
        (tensor([5., 5., 0.]), tensor(1))
    """

    def __init__(self, paths: list[Path], labels: np.ndarray, max_tiles: int, skip: int = 0, seed: int = 0) -> None:
        self.paths, self.targets = paths, torch.from_numpy(labels)
        self.max_tiles, self.skip, self.seed = max_tiles, skip, seed
        self._width = 0

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path = self.paths[index]
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # numpy evaluates the head of a file, which may raise anything
            raise ValueError(f"{path} is not a numpy file of numbers ({error}); write it again.") from error
        shape = getattr(array, "shape", None)  # None: an archive of arrays
        if shape is None or len(shape) != 2 or array.dtype.kind != "f" or shape[1] <= self.skip or not len(array):
            kind = getattr(array, "dtype", type(array).__name__)
            raise ValueError(f"{path} has shape {shape} of {kind}; it must be (tiles, features) of floats.")
        self._width = self._width or shape[1]
        if shape[1] != self._width:
            raise ValueError(f"{path} has {shape[1]} features and others {self._width}; write all by one network.")
        rows = np.arange(len(array))
        if len(rows) > self.max_tiles:
            chosen = torch.randperm(len(rows), generator=generator(self.seed, "tiles", path.name))[: self.max_tiles]
            rows = np.sort(chosen.numpy())
        bag = torch.zeros(self.max_tiles, array.shape[1] - self.skip)
        bag[: len(rows)] = torch.from_numpy(np.array(array[rows, self.skip :], dtype=np.float32))
        if not bool((bag.abs() <= LARGEST_FEATURE).all()):
            raise ValueError(
                f"{path} has a NaN or a feature beyond {LARGEST_FEATURE:g}: leave columns of places out by skip=3, or "
                "write it again."
            )
        return bag, self.targets[index]
