"""Fed-IXI: brains in magnetic resonance from three hospitals, as FLamby prepares them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedlightning.datamodules.csv_tables import column_of, extreme_of, read_table, whole_of
from fedlightning.datamodules.federated_data import clients_here
from fedlightning.datamodules.natural import NaturalSites, SiteSamples
from fedlightning.datamodules.views import FileSamples
from fedlightning.errors import import_package
from fedlightning.ranges import ShareBelowOne, checked

HOSPITALS = ("Guys", "HH", "IOP")
"""The clients: Guy's Hospital, Hammersmith Hospital and the Institute of Psychiatry, all in London."""
METADATA, SUBJECTS = "metadata_tiny.csv", "IXI_sample"
SHAPE = (48, 60, 48)


class IXITinyDataModule(NaturalSites):
    """Fed-IXI of FLamby: 566 T1 images of brains of three hospitals, and which voxels are brain.

    Ogier du Terrail et al. 2022 (FLamby); the IXI data are of https://brain-development.org/ixi-dataset/, CC BY-SA 3.0;
    "IXI Tiny" with masks by Perez-Garcia et al. 2021 (TorchIO). Nothing is downloaded. `root` needs `metadata_tiny.csv`
    of FLamby's `flamby/datasets/fed_ixi/metadata` and the folder `IXI_sample` of the archive that FLamby's script
    fetches, with `IXI002-Guys-0828/T1/*.nii.gz` and `IXI002-Guys-0828/label/*.nii.gz` for each person. nibabel reads
    them (the extra `clinical`).

    The clients are "Guys", "HH" and "IOP"; the publisher's split is kept: train/test 249/62, 145/36 and 59/15
    (FENDA's table 6 counts others). `x` is float32 `(batch, 1, 48, 60, 48)`, resized (trilinear) and with mean 0 and
    deviation 1 of its own; `y` is int64 `(batch, 48, 60, 48)`, 1 is brain (nearest voxel).

    Args:
        root: Folder of `metadata_tiny.csv` and `IXI_sample`.
        batch_size: Number of images in a batch (FLamby: 2).
        val_fraction: Share of the training images for validation, in [0, 1); FLamby has none.
        hospitals: The hospitals that are here, as `["HH"]` at that hospital's site. `None`: all three.
        cache: Keep images and masks in memory (1.7 MB each).
        val_seed: Seed of the validation cut alone. `None` is `seed`.
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If `hospitals` is empty, names one twice or one that does not exist.

    Example:
        >>> from fedlightning.datamodules import IXITinyDataModule
        >>> IXITinyDataModule(root="data/ixi_tiny").hospitals  # files are read by data.setup()
        ['Guys', 'HH', 'IOP']
    """

    files = (METADATA, SUBJECTS)
    way = "see flamby/datasets/fed_ixi of https://github.com/owkin/FLamby"
    address = "ixi"

    @checked
    def __init__(
        self,
        root: str = "data/ixi_tiny",
        batch_size: int = 2,
        val_fraction: ShareBelowOne = 0.2,
        *,
        hospitals: Sequence[str] | None = None,
        cache: bool = False,
        val_seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size, **options)
        self.val_fraction, self.val_seed, self.cache = val_fraction, val_seed, cache
        self.hospitals = clients_here(self, "hospitals", hospitals, HOSPITALS)

    def read(self) -> SiteSamples:
        source = self.root / METADATA
        table = read_table(source)
        numbers = whole_of(source, column_of(table, "Patient ID", "patient")).tolist()
        splits = column_of(table, "Split", "split").cells
        if len(set(numbers)) < len(numbers) or not set(splits) <= {"train", "test"}:
            raise ValueError(
                f"{source} names a patient twice, or has a Split other than train and test; it is not FLamby's file."
            )
        split_of = dict(zip(numbers, splits, strict=True))
        images: list[Path] = []
        masks: list[Path] = []
        rows: dict[str, dict[str, list[int]]] = {name: {"train": [], "test": []} for name in self.hospitals}
        seen: dict[int, str] = {}
        for folder in sorted(path for path in (self.root / SUBJECTS).iterdir() if path.is_dir()):
            number, hospital = _named(folder)
            if number not in split_of or seen.setdefault(number, folder.name) != folder.name:
                wrong = (
                    f"there already is {seen[number]}" if number in split_of else f"{METADATA} has no patient {number}"
                )
                raise ValueError(f"{folder}: {wrong}; it is not FLamby's archive.")
            if hospital in self.hospitals:
                rows[hospital][split_of[number]].append(len(images))
                images.append(_only(folder / "T1"))
                masks.append(_only(folder / "label"))
        return SiteSamples(Volumes(images, masks, SHAPE, self.cache), rows)


class Volumes(FileSamples):
    """A dataset of NIfTI images and masks, `(1, *shape)` and `(*shape)`.

    Args:
        images: Files of the images.
        masks: Files of the masks, in the same order.
        shape: Shape that both are resized to.
        cache: Keep both in memory, in each process that reads them.

    Raises:
        ValueError: From an access, if a file is damaged; the message names it.
    """

    def __init__(self, images: list[Path], masks: list[Path], shape: tuple[int, int, int], cache: bool = False) -> None:
        super().__init__(len(images), cache)
        self.images, self.masks, self.shape = images, masks, shape

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sample: tuple[Tensor, Tensor] = self.read_cached(index)
        return sample

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        image, mask = _volume(self.images[index]), _volume(self.masks[index])
        if image.shape != mask.shape:
            raise ValueError(
                f"{self.masks[index]} has shape {tuple(mask.shape)} and its image {tuple(image.shape)}; get both again."
            )
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(f"{self.masks[index]} has values other than 0 and 1; it is not a mask.")
        x = F.interpolate(image[None, None], self.shape, mode="trilinear", align_corners=False)[0]
        y = F.interpolate(mask[None, None], self.shape, mode="nearest")[0, 0].long()
        return (x - x.mean()) / x.std().clamp(min=1e-8), y


def _named(folder: Path) -> tuple[int, str]:
    """Return the number and the hospital of a person's folder, such as `IXI002-Guys-0828`."""
    parts = folder.name.split("-")
    if len(parts) != 3 or not parts[0].startswith("IXI") or not parts[0][3:].isdecimal() or parts[1] not in HOSPITALS:
        raise ValueError(
            f"{folder} is not a folder of IXI, such as IXI002-Guys-0828 with {', '.join(HOSPITALS)}; move it away."
        )
    return int(parts[0][3:]), parts[1]


def _only(folder: Path) -> Path:
    paths = sorted(folder.glob("*.nii.gz"))
    if len(paths) != 1:
        raise FileNotFoundError(f"{folder} has {len(paths)} files *.nii.gz; it must have one.")
    return paths[0]


def _volume(path: Path) -> Tensor:
    """Return the values of a NIfTI file, float32 of three dimensions."""
    nibabel = import_package("nibabel", "IXI's images are read by nibabel", "clinical")
    try:
        values = np.asarray(nibabel.load(path).get_fdata(dtype=np.float32))
    except Exception as error:  # of a damaged file: gzip's, nibabel's own, ValueError, EOFError
        raise ValueError(f"{path} cannot be read as NIfTI ({error}); get it again.") from error
    if values.ndim != 3 or not np.isfinite(values).all():
        raise ValueError(
            f"{path} has shape {values.shape} or a value that is not finite; an image has three dimensions."
        )
    if extreme_of(values.ravel()) is not None:
        raise ValueError(f"{path} has a number beyond single precision, or far from all others; get it again.")
    return torch.from_numpy(np.ascontiguousarray(values))
