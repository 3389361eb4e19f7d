"""Image folders: a folder for each client, in it a folder for each class."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from torch import Tensor

from fedlightning.datamodules.federated_data import SPLITS, sort_clients
from fedlightning.datamodules.groups import codes_of
from fedlightning.datamodules.image_files import ImageFiles
from fedlightning.datamodules.labels import check_classes, refuse_other_folders
from fedlightning.datamodules.natural import NaturalSites, SiteSamples
from fedlightning.ranges import Length, ShareBelowOne, checked

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".gif"})
_IGNORED = frozenset({"thumbs.db", "desktop.ini"})


class ImageFolderDataModule(NaturalSites):
    """Images in folders, `root/<client>/<class>/...` or `root/<client>/<split>/<class>/...`, as torchvision's
    `ImageFolder` reads them.

    Each folder of `root` is a client. Where a client has folders `train`, `val` or `test`, these are its splits; what
    it lacks of `val` and `test` is cut from its training images, stratified by class. Classes are the names of the
    folders of all clients in ascending order (`class_names`); a client may lack some. `x` is float32 `(batch, channels,
    *size)` in [0, 1], after `transform` if there is one, `y` int64 `(batch,)`. Images are read by Pillow when they are
    asked for (`num_workers` reads them in parallel).

    Args:
        root: Folder of the clients' folders.
        size: Height and width that images are resized to.
        batch_size: Number of samples in a batch.
        val_fraction: Share of the training images for validation, in [0, 1).
        test_fraction: Share of a client's images for testing, in [0, 1), where it has no folder `test`.
        group: Regular expression whose first group in a file's name is what the image belongs to (a patient, a lesion):
            no group is in two splits of a client, and one that is at two clients is refused.
        channels: 3 for colour, 1 for grey.
        transform: Maps an image to the model's input.
        cache: Keep decoded images in memory.
        val_seed: Seed of the validation cut alone. `None` is `seed`.
        class_names: The folders of classes in their order, where a site may lack some of them.
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If a number is out of its range; from `setup`, if a file is not an image by its name or matches no
            `group`.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> from PIL import Image
        >>> from fedlightning.datamodules import ImageFolderDataModule
        >>> with TemporaryDirectory() as root:
        ...     for number in range(20):
        ...         path = Path(root, "ab"[number % 2], ("cat", "dog")[number // 2 % 2], f"{number}.png")
        ...         path.parent.mkdir(parents=True, exist_ok=True)
        ...         Image.fromarray(np.zeros((5, 5, 3), dtype=np.uint8)).save(path)
        ...     data = ImageFolderDataModule(root, size=(4, 4))
        ...     data.setup()
        >>> data.client_ids, data.class_names, data.num_samples("a")
        (['a', 'b'], ['cat', 'dog'], 6)
    """

    common_options = ("size", "channels")

    @checked
    def __init__(
        self,
        root: str,
        size: tuple[int, int] = (224, 224),
        batch_size: int = 32,
        val_fraction: ShareBelowOne = 0.2,
        test_fraction: ShareBelowOne = 0.2,
        *,
        group: str | None = None,
        channels: Literal[1, 3] = 3,
        transform: Callable[[Tensor], Tensor] | None = None,
        cache: bool = False,
        val_seed: int | None = None,
        class_names: Annotated[Sequence[str], Length(2, different=True)] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, batch_size, **options)
        self.size, self.val_seed = (int(size[0]), int(size[1])), val_seed
        self.val_fraction, self.test_fraction, self.group = val_fraction, test_fraction, group
        self.channels, self.transform, self.cache = channels, transform, cache
        self.class_names: list[str] = list(class_names or [])
        self.classes = len(self.class_names) or None
        try:
            re.compile(group or "")
        except re.error as error:
            raise ValueError(f"ImageFolderDataModule got group={group!r}, no regular expression ({error}).") from error

    def prepare_data(self) -> None:
        """Check that there are folders of clients (Lightning's hook)."""
        if not self.root.is_dir() or not any(path.is_dir() for path in self.root.iterdir()):
            raise FileNotFoundError(
                f"There are no folders of clients in {self.root}; write root/<client>/<class>/<image>."
            )

    def read(self) -> SiteSamples:
        clients = sort_clients(
            path.name for path in self.root.iterdir() if path.is_dir() and not path.name.startswith(".")
        )
        by_client = {client: _images(self.root / client) for client in clients}
        here = sorted({name for splits in by_client.values() for images in splits.values() for name, _ in images})
        if self.classes is None:
            self.class_names = here
        refuse_other_folders(self.root, here, self.class_names)
        number = {name: place for place, name in enumerate(self.class_names)}
        paths: list[Path] = []
        labels: list[int] = []
        rows: dict[str, dict[str, np.ndarray]] = {}
        for client, splits in by_client.items():
            rows[client] = {}
            for split, images in splits.items():
                rows[client][split] = np.arange(len(paths), len(paths) + len(images))
                paths += [path for _, path in images]
                labels += [number[name] for name, _ in images]
        y, groups = np.array(labels, dtype=np.int64), self._groups(paths, rows)
        check_classes(np.array(self.class_names)[y], str(self.root), "take other folders away")
        return SiteSamples(ImageFiles(paths, y, self.size, self.transform, self.channels, self.cache), rows, y, groups)

    @property
    def named_by_file(self) -> dict[str, Any]:
        return {"class_names": self.class_names} if self.classes is None else {}

    def _groups(self, paths: list[Path], rows_by_client: Mapping[str, Mapping[str, np.ndarray]]) -> np.ndarray | None:
        """Return the group of each image, or `None`; refuse groups at two clients or in two given splits."""
        if self.group is None:
            return None
        matches = [re.search(self.group, path.name) for path in paths]
        names = [match.group(1) if match and match.groups() else None for match in matches]
        if None in names:
            raise ValueError(
                f"{paths[names.index(None)]}: the name does not match group={self.group!r} with a group in brackets."
            )
        home: dict[Any, tuple[str, str]] = {}
        for client, splits in rows_by_client.items():
            for split, rows in splits.items():
                for row in rows:
                    other = home.setdefault(names[row], (client, split))
                    if other != (client, split):
                        raise ValueError(
                            f"{paths[row]}: group {names[row]!r} is in the {other[1]} data of client {other[0]!r}, "
                            "too; all images of a group belong to one client and one split."
                        )
        return codes_of(names, len(paths), "image")


def _images(folder: Path) -> dict[str, list[tuple[str, Path]]]:
    """Return a client's images by split: the class and the file of each, in ascending order."""
    split_folders = [split for split in SPLITS if (folder / split).is_dir()]
    if split_folders and "train" not in split_folders:
        raise ValueError(
            f"{folder} has a folder {split_folders[0]!r} and no folder 'train'; write all images of it into splits, or none."
        )
    images_by_split: dict[str, list[tuple[str, Path]]] = {}
    for split in split_folders or ["train"]:
        base = folder / split if split_folders else folder
        images_by_split[split] = []
        for kind in sorted(path for path in base.iterdir() if path.is_dir() and not path.name.startswith(".")):
            for path in sorted(path for path in kind.rglob("*") if path.is_file()):
                if path.name.startswith(".") or path.name.lower() in _IGNORED:
                    continue
                if path.suffix.lower() not in SUFFIXES:
                    raise ValueError(f"{path} is not an image by its name; move it away, or give it its suffix.")
                images_by_split[split].append((kind.name, path))
    if not images_by_split["train"]:
        raise ValueError(f"{folder} has no images in folders of classes; write root/<client>/<class>/<image>.")
    return images_by_split
