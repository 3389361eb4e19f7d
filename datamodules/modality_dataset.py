"""Samples of several modalities: the dataset, pairs by class, and labels that are wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedlightning.datamodules.views import Rows
from fedlightning.ranges import Length, checked


class ModalityDataset(Dataset[Any]):
    """A dataset of samples `({modality: input}, label)`, held in one tensor for each modality.

    **A modality that a sample lacks is NaN in all its values.** A network that does not know of missing modalities then
    has a loss of NaN, which stops the run, and does not learn from made-up zeros in silence.

    Args:
        inputs: By modality, floating-point tensors `(samples, ...)`.
        y: Labels, int64 `(samples,)`.
        present: By modality, which samples have it, bool `(samples,)`. A modality that is not named is there always.

    Raises:
        ValueError: If the sizes differ, or inputs are not floating-point numbers.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules import ModalityDataset
        >>> there = {"audio": torch.tensor([True, False])}
        >>> data = ModalityDataset({"image": torch.zeros(2, 4), "audio": torch.ones(2, 1)}, torch.tensor([3, 1]), there)
        >>> x, y = data[1]
        >>> x["audio"], y
        (tensor([nan]), tensor(1))
    """

    @checked
    def __init__(
        self,
        inputs: Annotated[Mapping[str, Tensor], Length(note="One tensor of each modality.")],
        y: Tensor,
        present: Mapping[str, Tensor] | None = None,
    ) -> None:
        for name, values in inputs.items():
            if len(values) != len(y):
                raise ValueError(f"ModalityDataset got {len(values)} inputs of {name!r} and {len(y)} labels.")
            if not values.is_floating_point():
                raise ValueError(
                    f"ModalityDataset got {name!r} as {values.dtype}; a missing modality is NaN, so convert to float."
                )
        self.inputs, self.y = dict(inputs), y
        self.present = {name: values for name, values in (present or {}).items() if not bool(values.all())}

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names of the modalities."""
        return tuple(self.inputs)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        x, y = self.rows(torch.tensor([int(index)]))
        return {name: values[0] for name, values in x.items()}, y[0]

    def __getitems__(self, positions: list[int]) -> ModalityRows:
        return ModalityRows(self, torch.tensor(positions, dtype=torch.int64))

    def rows(self, indices: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return the batch of the given int64 indices.

        Args:
            indices: Rows, `(batch,)`.
        """
        return {name: self._inputs(name, indices) for name in self.inputs}, self.y[indices]

    def _inputs(self, name: str, indices: Tensor) -> Tensor:
        values = self.inputs[name][indices]
        if name in self.present:
            values[~self.present[name][indices]] = float("nan")
        return values

    def subset(self, indices: Tensor) -> ModalityDataset:
        """Return a dataset of some of the samples.

        Args:
            indices: Rows, `(samples,)`.
        """
        inputs = {name: values[indices] for name, values in self.inputs.items()}
        return ModalityDataset(inputs, self.y[indices], {name: there[indices] for name, there in self.present.items()})


class ModalityRows(Rows):
    """The samples of a batch of a `ModalityDataset` before they are read."""

    def batch(self) -> list[Any]:
        """Return the whole batch at once."""
        return list(self.dataset.rows(self.indices))  # type: ignore[attr-defined]


def pair_by_class(labels: Sequence[np.ndarray], generator: torch.Generator) -> list[np.ndarray]:
    """Return, for each source, the samples that make pairs (or larger tuples) of one class; none is used twice.

    As many as the source with the fewest samples of a class allows, class after class.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from fedlightning.datamodules.modality_dataset import pair_by_class
        >>> images, sounds = np.array([0, 1, 1, 0]), np.array([1, 0, 2])
        >>> a, b = pair_by_class([images, sounds], torch.Generator())
        >>> images[a].tolist(), sounds[b].tolist()
        ([0, 1], [0, 1])
    """
    classes = sorted(set.intersection(*(set(np.unique(array).tolist()) for array in labels)))
    chosen: list[list[np.ndarray]] = [[] for _ in labels]
    for each in classes:
        of_class = [np.flatnonzero(array == each) for array in labels]
        count = min(map(len, of_class))
        for part, rows in zip(chosen, of_class, strict=True):
            part.append(rows[torch.randperm(len(rows), generator=generator)[:count].numpy()])
    return [np.concatenate(part) if part else np.zeros(0, np.int64) for part in chosen]


def transition_matrix(num_classes: int, level: float, sparsity: float, generator: torch.Generator) -> np.ndarray:
    """Return the probability that a sample of class i (row) is labelled j (column), float64 `(classes, classes)`.

    A label is right with probability `1 - level`. A share `sparsity` of the wrong classes of each row has probability 0;
    the others, at least one, share `level` evenly.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.modality_dataset import transition_matrix
        >>> transition_matrix(2, 0.3, 0.4, torch.Generator())
        array([[0.7, 0.3],
               [0.3, 0.7]])
    """
    matrix = np.zeros((num_classes, num_classes))
    taken = max(1, num_classes - 1 - round(sparsity * (num_classes - 1)))
    for row in range(num_classes):
        others = np.delete(np.arange(num_classes), row)
        chosen = others[torch.randperm(num_classes - 1, generator=generator)[:taken].numpy()]
        matrix[row, chosen] = level / taken
        matrix[row, row] = 1.0 - level
    return matrix
