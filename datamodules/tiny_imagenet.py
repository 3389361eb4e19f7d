"""Tiny ImageNet: 200 classes of images of 64 x 64, in the publisher's folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedlightning.datamodules.arrays import federate, keys_for, some_rows
from fedlightning.datamodules.csv_tables import refuse_twice, text_of
from fedlightning.datamodules.download import refuse_absent
from fedlightning.datamodules.image_files import ImageFiles, lacking_files
from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.datamodules.plans import Partitioner
from fedlightning.datamodules.skew import DirichletPartitioner
from fedlightning.ranges import PositiveInt, ShareBelowOne, checked

ANNOTATIONS = Path("val", "val_annotations.txt")


class TinyImageNetDataModule(IndexedFederatedDataModule):
    """Tiny ImageNet (Le, Yang 2015): 100000 + 10000 colour images of 64 x 64, 200 classes. Research and teaching only.

    Nothing is downloaded: unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip and give the folder `tiny-imagenet-200`
    (with `wnids.txt`, `train` and `val`) as root. The publisher's validation part is the test data, since the labels of its
    test part are not public. Images are read by Pillow when they are asked for (`num_workers` reads them in parallel), or
    once with `cache`.

    `x` is float32 `(batch, 3, 64, 64)` in [0, 1], after `transform` if there is one; `y` int64 `(batch,)`, the place of the
    class in `wnids.txt` (`class_names`).

    Args:
        root: Folder `tiny-imagenet-200`.
        partitioner: Divides the samples among clients. `None` is `DirichletPartitioner(num_clients=10, alpha=0.5)`.
        batch_size: Number of samples in a batch.
        val_fraction: Share of every client's training samples for validation, in [0, 1).
        transform: Maps an image to the model's input.
        cache: Keep decoded images in memory: 12 kB each, in each process that reads them.
        max_train: Use only this many training samples, chosen by `seed`.
        max_test: Use only this many test samples, chosen by `seed`.
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If a number is out of its range; from `setup`, if a table is damaged.
        FileNotFoundError: If files are missing.

    Example:
        >>> from fedlightning.datamodules import TinyImageNetDataModule
        >>> TinyImageNetDataModule("data/tiny-imagenet-200").cache  # files are read by data.setup()
        False
    """

    @checked
    def __init__(
        self,
        root: str = "data/tiny-imagenet-200",
        partitioner: Partitioner | None = None,
        batch_size: int = 64,
        val_fraction: ShareBelowOne = 0.2,
        *,
        transform: Callable[[Tensor], Tensor] | None = None,
        cache: bool = False,
        max_train: PositiveInt | None = None,
        max_test: PositiveInt | None = None,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, **options)
        self.root, self.val_fraction = Path(root), val_fraction
        self.partitioner = DirichletPartitioner(10, 0.5) if partitioner is None else partitioner
        self.transform, self.cache, self.max_train, self.max_test = transform, cache, max_train, max_test
        self.class_names: list[str] = []

    @property
    def partition_name(self) -> str:
        return self.partitioner.describe()

    def prepare_data(self) -> None:
        """Check that the files are there (Lightning's hook)."""
        lacking = [str(name) for name in ("wnids.txt", "train", ANNOTATIONS) if not (self.root / name).exists()]
        way = "unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip and give its folder tiny-imagenet-200"
        refuse_absent(self, lacking, self.root, way)

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        self.prepare_data()
        self.class_names = text_of(self.root / "wnids.txt").split()
        refuse_twice(self.root / "wnids.txt", self.class_names, "class")
        number = {name: place for place, name in enumerate(self.class_names)}
        datasets: dict[str, Any] = {}
        labels: dict[str, np.ndarray | None] = {}
        for split, (paths, y), limit in (
            ("train", self._training(number), self.max_train),
            ("test", self._validation(number), self.max_test),
        ):
            rows = some_rows(len(paths), limit, self.seed, split)
            if rows is not None:
                paths, y = [paths[int(row)] for row in rows], y[rows.numpy()]
            datasets[split], labels[split] = ImageFiles(paths, y, (64, 64), self.transform, cache=self.cache), y
        keys = keys_for(self.partitioner, datasets, labels, self._no_groups)
        return federate(self.partitioner, datasets, labels, keys, self.seed, self.val_fraction)

    def _no_groups(self, split: str, dataset: Any) -> Any:
        raise ValueError(
            "TinyImageNetDataModule has no natural groups; use a partitioner that divides by label or size."
        )

    def _training(self, number: Mapping[str, int]) -> tuple[list[Path], np.ndarray]:
        """Return the training images and their classes."""
        paths: list[Path] = []
        labels: list[int] = []
        for name, place in number.items():
            folder = self.root / "train" / name / "images"
            images = sorted(folder.glob("*.JPEG")) if os.path.isdir(folder) else []
            if not images:
                raise FileNotFoundError(f"There are no images in {folder}, a class of wnids.txt; unpack all.")
            paths += images
            labels += [place] * len(images)
        return paths, np.array(labels, dtype=np.int64)

    def _validation(self, number: Mapping[str, int]) -> tuple[list[Path], np.ndarray]:
        """Return the images of the publisher's validation part and their classes."""
        source = self.root / ANNOTATIONS
        paths: list[Path] = []
        labels: list[int] = []
        for line, text in enumerate(text_of(source).splitlines(), start=1):
            cells = text.split("\t")
            if len(cells) != 6 or cells[1] not in number:
                raise ValueError(
                    f"{source}, line {line}: not a file, a class of wnids.txt and four numbers between tabs."
                )
            paths.append(self.root / "val" / "images" / cells[0])
            labels.append(number[cells[1]])
        if not paths:
            raise ValueError(f"{source} is empty; unpack the archive again.")
        refuse_twice(source, [path.name for path in paths], "image")
        lacking_files(self, paths, source)
        return paths, np.array(labels, dtype=np.int64)
