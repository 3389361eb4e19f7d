"""Image files as a dataset: decoded when they are asked for, or once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlightning.datamodules.views import FileSamples

DEEPEST = {"F": 1, "I;16": 65535, "I;16L": 65535, "I;16B": 65535, "I;16N": 65535}
"""Mode of grey images that 8 bits do not hold -> its white."""


def shown(image: Any, mode: str) -> Any:
    """Return an image of Pillow as a module sees it: in 8 bits, or of deeper grey ones floats with black 0 and white 1.

    Pillow's own conversion cuts 16 bits off at 255, which makes all but the darkest white, and of NaN it makes black.

    Args:
        image: The image, of any mode.
        mode: `"L"` or `"RGB"`, for those of 8 bits.

    Raises:
        ValueError: If nothing says which of its values is white.

    Example:
        >>> from PIL import Image
        >>> shown(Image.fromarray(np.array([[0, 65535]], dtype=np.uint16)), "L").getextrema()
        (0.0, 1.0)
    """
    from PIL import Image

    white = 65535 if image.mode == "I" and image.format in ("PNG", "PPM") else DEEPEST.get(image.mode)
    if white is None and image.mode != "I":
        return image.convert(mode)
    values = np.asarray(image, dtype=np.float32) / (white or 1)
    if white is None or not ((values >= 0) & (values <= 1)).all():
        what = f"whole numbers up to {values.max():g}" if white is None else "a value that is NaN or outside of 0 ... 1"
        raise ValueError(f"it has {what}, and nothing says which is white")
    return Image.fromarray(values)


def pixels_of(image: Any, channels: int) -> Tensor:
    """Return a :func:`shown` image as bytes or floats `(channels, height, width)`."""
    pixels = np.array(image)
    pixels = np.repeat(pixels[..., None], channels, axis=2) if image.mode == "F" else pixels
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], channels)).permute(2, 0, 1).contiguous()


def floats_of(pixels: Tensor) -> Tensor:
    """Return pixels as floats in [0, 1]; bytes are divided by 255."""
    return pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels


class ImageFiles(FileSamples):
    """A dataset of image files `(image, class)`, read by Pillow. Grey ones of 16 bits, and of floats, keep their depth.

    Args:
        paths: The files.
        labels: The class of each file, int64 `(samples,)`.
        size: Height and width that images are resized to (bilinear).
        transform: Maps a float image `(channels, height, width)` in [0, 1] to the model's input (augmentation, scaling).
        channels: 3 for colour, 1 for grey.
        cache: Keep decoded and resized images in memory, in each process that reads them.
        crop: Resize the shorter side and keep the middle, instead of changing the shape of the image.

    Raises:
        ValueError: From an access, if a file is not an image; the message names it.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from PIL import Image
        >>> from fedlightning.datamodules.image_files import ImageFiles
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.png")
        ...     Image.fromarray(np.full((9, 7, 3), 255, dtype=np.uint8)).save(path)
        ...     image, label = ImageFiles([path], np.array([2]), size=(4, 4))[0]
        >>> image.shape, image.max().item(), label.item()
        (torch.Size([3, 4, 4]), 1.0, 2)
    """

    def __init__(
        self,
        paths: Sequence[Path],
        labels: np.ndarray,
        size: tuple[int, int],
        transform: Callable[[Tensor], Tensor] | None = None,
        channels: int = 3,
        cache: bool = False,
        crop: bool = False,
    ) -> None:
        super().__init__(len(paths), cache)
        self.paths, self.targets = list(paths), torch.from_numpy(np.asarray(labels, dtype=np.int64))
        self.size, self.transform, self.channels, self.crop = size, transform, channels, crop

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = floats_of(self.read_cached(index))
        return (image if self.transform is None else self.transform(image)), self.targets[index]

    def read(self, index: int) -> Tensor:
        from PIL import Image, ImageOps

        path = self.paths[index]
        try:
            with Image.open(path) as file:
                image = shown(file, "RGB" if self.channels == 3 else "L")
                method = Image.Resampling.BILINEAR
                fitted = (
                    ImageOps.fit(image, self.size[::-1], method) if self.crop else image.resize(self.size[::-1], method)
                )
        except Exception as error:  # Pillow raises many kinds at damaged files
            raise ValueError(
                f"{path} cannot be read as an image ({error}); get it again, or save it with 8 or 16 bits."
            ) from error
        return pixels_of(fitted, self.channels)


def lacking_files(owner: object, paths: Sequence[Path], source: Path) -> None:
    """Refuse files that are named in a table and not there.

    Example:
        >>> from pathlib import Path
        >>> from fedlightning.datamodules.image_files import lacking_files
        >>> lacking_files("mine", [Path("no/1.jpg")], Path("table.csv"))
        Traceback (most recent call last):
        FileNotFoundError: str: 1 of 1 images that table.csv names are not there, such as no/1.jpg. ...
    """
    absent = [path for path in paths if not os.path.isfile(path)]  # is_file() raises where a name is too long
    if absent:
        raise FileNotFoundError(
            f"{type(owner).__name__}: {len(absent)} of {len(paths)} images that {source} names are not there, such as "
            f"{absent[0]}. Unpack all of them, or take them out of the table."
        )
