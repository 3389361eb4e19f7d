"""LEAF's FEMNIST (writers) and Synthetic."""

from __future__ import annotations

from torch import Tensor

from fedlightning.datamodules.leaf.base import LEAFDataModule, numbers
from fedlightning.datamodules.leaf.reader import LEAFUser


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
        found = numbers(user, 28 * 28).reshape(-1, 1, 28, 28)
        if len(found) and not 0 <= found.min() <= found.max() <= 1:
            raise ValueError(f"{user.path}: user {user.name!r} has a pixel outside of 0 ... 1, ink and paper.")
        return found


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
