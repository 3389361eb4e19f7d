"""Fed-ISIC2019: dermoscopic images of skin lesions from six centres, as FLamby prepares them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedlightning.datamodules.csv_tables import column_of, read_table, refuse_twice, whole_of
from fedlightning.datamodules.federated_data import clients_here
from fedlightning.datamodules.groups import codes_of
from fedlightning.datamodules.image_files import ImageFiles, lacking_files
from fedlightning.datamodules.natural import NaturalSites, SiteSamples
from fedlightning.ranges import ShareBelowOne, checked

CENTRES = ("0", "1", "2", "3", "4", "5")
"""The clients: FLamby's numbers of the centres."""
CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
SPLIT, IMAGES, LESIONS = "train_test_split", "ISIC_2019_Training_Input_preprocessed", "ISIC_2019_Training_Metadata.csv"
SIZE, CROP = 224, 200
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ISIC2019DataModule(NaturalSites):
    """Fed-ISIC2019 of FLamby: 23247 dermoscopic images of six centres, eight kinds of lesions.

    Ogier du Terrail et al. 2022 (FLamby); Codella et al. 2017, Tschandl et al. 2018 (HAM10000), Combalia et al. 2019
    (BCN20000); CC BY-NC 4.0. Nothing is downloaded. `root` needs FLamby's `train_test_split` (of
    `flamby/datasets/fed_isic2019/dataset_creation_scripts`) and the folder `ISIC_2019_Training_Input_preprocessed` that
    its script `resize_images.py` writes from https://challenge.isic-archive.com/data/#2019 (shorter side 224).

    The clients are "0" (Barcelona, BCN), "1" (Vienna, ViDIR molemax), "2" (Vienna, ViDIR modern), "3" (Queensland,
    Rosendahl), "4" (MSK) and "5" (Vienna, ViDIR digitised). The publisher's split is kept: train/test 9930/2483,
    3163/791, 2691/672, 1807/452, 655/164, 351/88. `x` is float32 `(batch, 3, 200, 200)`, normalised as for ImageNet:
    the middle of the image; with `augment`, of training images a random part, turned, flipped and changed in brightness
    by torchvision, much as FLamby does with albumentations. `y` is int64 `(batch,)`, the place in `CLASSES`.

    The split is by image, and a lesion can have several. With ISIC's `ISIC_2019_Training_Metadata.csv` under `root` (column
    `lesion_id`) the validation cut is by lesion, and a warning says how many lesions have training and test images.

    Args:
        root: Folder of the split, the images and perhaps the metadata.
        batch_size: Number of samples in a batch (FLamby: 64).
        val_fraction: Share of the training images for validation, in [0, 1); FLamby has none.
        augment: Change training images at random. Needs torchvision (the extra `vision`).
        cache: Keep decoded images in memory (150 kB each).
        centres: The centres that are here, as `["3"]` at that centre's site. `None`: all six.
        val_seed: Seed of the validation cut alone. `None` is `seed`.
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If `centres` is empty, names one twice or one that does not exist.

    Example:
        >>> from fedlightning.datamodules import ISIC2019DataModule
        >>> data = ISIC2019DataModule(root="data/isic2019")  # files are read by data.setup()
        >>> data.batch_size, len(data.centres)
        (64, 6)
    """

    files = (SPLIT, IMAGES)
    way = "see flamby/datasets/fed_isic2019 of https://github.com/owkin/FLamby"
    address = "isic2019"
    classes = len(CLASSES)

    @checked
    def __init__(
        self,
        root: str = "data/isic2019",
        batch_size: int = 64,
        val_fraction: ShareBelowOne = 0.2,
        *,
        augment: bool = True,
        cache: bool = False,
        centres: Sequence[str] | None = None,
        val_seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size, **options)
        self.val_fraction, self.val_seed, self.augment, self.cache = val_fraction, val_seed, augment, cache
        self.centres = clients_here(self, "centres", centres, CENTRES)

    def read(self) -> SiteSamples:
        source = self.root / SPLIT
        table = read_table(source)
        names, folds = column_of(table, "image", "split").cells, column_of(table, "fold2", "split").cells
        if (again := len(names) - len(set(names))) > 0:
            raise ValueError(f"{source} has {again} images on two lines; an image belongs to one centre and one split.")
        y = whole_of(source, column_of(table, "target", "split"))
        parts = {f"{split}_{centre}" for split in ("train", "test") for centre in CENTRES}
        for line, (label, fold) in enumerate(zip(y, folds, strict=True), start=2):
            if not 0 <= label < len(CLASSES) or fold not in parts:
                raise ValueError(
                    f"{source}, line {line}: target {label} and fold2 {fold!r}; they are 0 to 7 and train_0 to test_5."
                )
        here = [row for row, fold in enumerate(folds) if fold.split("_")[1] in self.centres]
        names, folds, y = [names[row] for row in here], [folds[row] for row in here], y[here]
        lesions = self._lesions(names, np.array([fold.split("_")[0] for fold in folds]))
        where = np.array(folds)
        rows = {
            centre: {split: np.flatnonzero(where == f"{split}_{centre}") for split in ("train", "test")}
            for centre in self.centres
        }
        paths = [self.root / IMAGES / f"{name}.jpg" for name in names]
        lacking_files(self, paths, source)
        images = partial(ImageFiles, paths, y, (SIZE, SIZE), cache=self.cache, crop=True)
        return SiteSamples(images(middle), rows, y, lesions, training=images(augmentation()) if self.augment else None)

    def _lesions(self, names: Sequence[str], splits: np.ndarray) -> np.ndarray | None:
        """Return the number of each image's lesion, or `None` without metadata; an image without one is its own."""
        path = self.root / LESIONS
        if not path.is_file():
            return None
        table = read_table(path)
        images = column_of(table, "image", "metadata").cells
        refuse_twice(path, images, "image")
        lesion_by_image = dict(zip(images, column_of(table, "lesion_id", "metadata").cells, strict=True))
        lesions = np.array([lesion_by_image.get(name) or name for name in names])
        both = set(lesions[splits == "train"].tolist()) & set(lesions[splits == "test"].tolist())
        if both:
            rank_zero_warn(
                f"{type(self).__name__}: {len(both)} lesions have training and test images in FLamby's split, such as "
                f"{sorted(both)[0]}; test scores are too good by that.",
                category=UserWarning,
            )
        return codes_of(lesions, len(names), "image")


def middle(image: Tensor) -> Tensor:
    """Return the normalised middle of an image `(3, 224, 224)`, `(3, 200, 200)`.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.isic2019 import middle
        >>> middle(torch.zeros(3, 224, 224)).shape
        torch.Size([3, 200, 200])
    """
    low = (SIZE - CROP) // 2
    part = image[:, low : low + CROP, low : low + CROP]
    return (part - part.new_tensor(MEAN).view(3, 1, 1)) / part.new_tensor(STD).view(3, 1, 1)


def augmentation() -> Any:
    """Return torchvision's transforms nearest to FLamby's: scale, rotation, shear, brightness, contrast, flips, "
    "crop, erasing.
    """
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RandomAffine(50, scale=(0.93, 1.07), shear=10),
            v2.ColorJitter(brightness=0.15, contrast=0.1),
            v2.RandomHorizontalFlip(),
            v2.RandomVerticalFlip(),
            v2.RandomCrop(CROP),
            v2.RandomErasing(p=0.5, scale=(0.005, 0.05)),
            v2.Normalize(MEAN, STD),
        ]
    )
