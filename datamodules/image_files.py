"""Image files as a dataset: decoded when they are asked for, or once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class ImageFiles(Dataset[Any]):
    """A dataset of image files `(image, class)`, read by Pillow.

    Args:
        paths: The files.
        labels: The class of each file, int64 `(samples,)`.
        size: Height and width that images are resized to (bilinear).
        transform: Maps a float image `(channels, height, width)` in [0, 1] to the model's input (augmentation, scaling).
        channels: 3 for colour, 1 for grey.
        cache: Keep decoded and resized images as bytes in memory, in each process that reads them.
        crop: Resize the shorter side and keep the middle, instead of changing the shape of the image.

    Raises:
        ValueError: From an access, if a file is no image; the message names it.

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
        self.paths, self.targets = list(paths), torch.from_numpy(np.asarray(labels, dtype=np.int64))
        self.size, self.transform, self.channels, self.crop = size, transform, channels, crop
        self._decoded: dict[int, Tensor] | None = {} if cache else None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        held = None if self._decoded is None else self._decoded.get(index)
        pixels = self._read(self.paths[index]) if held is None else held
        if self._decoded is not None:
            self._decoded[index] = pixels
        image = pixels.float() / 255
        return (image if self.transform is None else self.transform(image)), self.targets[index]

    def _read(self, path: Path) -> Tensor:
        from PIL import Image, ImageOps

        try:
            with Image.open(path) as file:
                image = file.convert("RGB" if self.channels == 3 else "L")
                method = Image.Resampling.BILINEAR
                fitted = (
                    ImageOps.fit(image, self.size[::-1], method) if self.crop else image.resize(self.size[::-1], method)
                )
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"{path} cannot be read as an image ({error}); get it again.") from error
        return torch.from_numpy(np.array(fitted).reshape(*self.size, self.channels)).permute(2, 0, 1).contiguous()


def lacking_files(owner: object, paths: Sequence[Path], source: Path) -> None:
    """Refuse files that are named in a table and not there.

    Example:
        >>> from pathlib import Path
        >>> from fedlightning.datamodules.image_files import lacking_files
        >>> lacking_files("mine", [Path("no/1.jpg")], Path("table.csv"))
        Traceback (most recent call last):
        FileNotFoundError: str: 1 of 1 images that table.csv names are not there, such as no/1.jpg. ...
    """
    absent = [path for path in paths if not path.is_file()]
    if absent:
        raise FileNotFoundError(
            f"{type(owner).__name__}: {len(absent)} of {len(paths)} images that {source} names are not there, such as "
            f"{absent[0]}. Unpack all of them, or take them out of the table."
        )
