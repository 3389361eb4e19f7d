"""Clients whose inputs or labels are shifted: turned, of other contrast, noisy, or with other names for the same classes."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.datamodules.wrapped import WrappedIndexedDataModule
from fedlightning.ranges import Instance, NonNegativeFloat, PositiveInt, checked
from fedlightning.seeding import generator


class ShiftedDataModule(WrappedIndexedDataModule):
    """The clients of another data module, each with a shift of its own, in training, validation and test data.

    *Feature shift*: client i of N has the level `s_i = strength * i / (N - 1)`, so that the first client is as it was.

    * `"noise"`: Gaussian noise of variance `s_i` is added to inputs, fixed for each sample (NIID-Bench, Li et al. 2022, whose
      levels are `sigma * i / N`).
    * `"rotation"`: images are turned by `s_i` degrees around their middle, with zeros outside.
    * `"contrast"`: inputs are `m + (1 - s_i) (x - m)`, with m the mean of the sample; strength at most 1.

    *Concept shift*: with `concepts` of 2 and more, clients are dealt to that many concepts in turn; those of concept 0
    keep their labels, others have labels permuted, `y -> p_c(y)`, so that the same input means another class (IFCA,
    FedDrift and others). `planted_groups` says who has which.

    Levels and concepts go by the clients that are here: a site that holds some of them shifts these among themselves.
    What a client holds does not change, so sizes and partition are those of the source. `difference` says how far the
    clients' data are apart.

    Args:
        source: A data module over indexed data, such as `DigitsDataModule()`.
        features: `"none"`, `"noise"`, `"rotation"` or `"contrast"`.
        strength: Level of the last client: a variance, degrees, or a share.
        concepts: Number of concepts; 1 changes no label.
        grows_over: Rounds over which the feature shift of training data grows: in round r, from 0, levels are
            `min(1, r / grows_over)` of theirs. Validation and test data have the full shift in all rounds, and so have
            training data that are asked for without a round. Methods that cannot do with data that change are
            refused. `None`: the shift stays.

    Raises:
        ValueError: If the shift does not fit its strength; at `setup`, if there is one client, labels are not classes, or
            samples are not pairs.

    Example:
        >>> from fedlightning.datamodules import DigitsDataModule, IIDPartitioner, ShiftedDataModule
        >>> data = ShiftedDataModule(DigitsDataModule(IIDPartitioner(4)), features="noise", strength=0.5, concepts=2)
        >>> data.setup()
        >>> data.planted_groups, data.difference["concepts"] > 0.3
        ({'0': 0, '1': 1, '2': 0, '3': 1}, True)
    """

    no_public = "shift of a client"
    no_statistics = (
        "so that its inputs are not known yet. Give it scale: local or none, or statistics and lists of categories."
    )

    @checked
    def __init__(
        self,
        source: Annotated[IndexedFederatedDataModule, Instance("It shifts indexed data.")],
        features: Literal["none", "noise", "rotation", "contrast"] = "none",
        strength: NonNegativeFloat = 0.0,
        concepts: PositiveInt = 1,
        grows_over: PositiveInt | None = None,
    ) -> None:
        super().__init__(source)
        if (features == "none") != (strength == 0) or (features == "contrast" and strength > 1):
            rule = (
                "contrast needs a strength in (0, 1]"
                if features == "contrast"
                else "a shift of features needs a strength above 0"
            )
            raise ValueError(
                f"ShiftedDataModule got features={features!r} and strength={strength:g}; {rule}, 'none' needs 0."
            )
        if grows_over is not None and features == "none":
            raise ValueError(
                f"ShiftedDataModule got grows_over={grows_over} and features='none'; only a feature shift grows."
            )
        self.grows_over = None if grows_over is None else int(grows_over)
        self.features, self.strength, self.concepts = features, float(strength), int(concepts)
        self._permutations: list[np.ndarray] = []

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        self.set_up_source()
        clients, count = self.source.client_ids, self.source.num_classes
        if len(clients) < 2:
            raise ValueError(
                f"ShiftedDataModule has {len(clients)} client, and the first one stays as it is: nothing would be shifted. "
                "Give it the data of all clients; a site that holds one of them makes its shift in its own data."
            )
        if self.concepts > 1 and count is None:
            raise ValueError("ShiftedDataModule permutes classes, and its source has no class labels; use concepts=1.")
        draws = [generator(self.seed, "concept", concept) for concept in range(self.concepts)]
        self._permutations = [torch.randperm(count or 1, generator=draw).numpy() for draw in draws]
        self._permutations[0] = np.arange(count or 1)
        splits = {}
        for name, split in self.source._splits.items():
            holder = np.full(len(split.dataset), -1, dtype=np.int64)  # type: ignore[arg-type]
            for place, indices in enumerate(split.indices):
                if (holder[np.asarray(indices, dtype=np.int64)] >= 0).any():
                    raise ValueError("ShiftedDataModule got a source in which two clients hold the same sample.")
                holder[np.asarray(indices, dtype=np.int64)] = place
            labels = split.labels
            if labels is not None and self.concepts > 1:
                labels = labels.copy()
                for place, indices in enumerate(split.indices):
                    labels[indices] = self._permutations[place % self.concepts][labels[indices]]
            data = _Shifted(split.dataset, holder, self, name)
            splits[name] = Split(
                data, split.indices, labels, dict(split.loader), split.shuffle, split.sampler, split.groups
            )
        return clients, splits

    @property
    def drifts(self) -> bool:
        return self.grows_over is not None

    def at_round(self, round: int) -> ShiftedDataModule:
        if self.grows_over is None:
            return self
        grown, train = copy.copy(self), self._splits["train"]
        data = cast(_Shifted, train.dataset)
        share = min(1.0, round / self.grows_over)
        grown._splits = {
            **self._splits,
            "train": replace(train, dataset=_Shifted(data.dataset, data.holder, self, "train", share)),
        }
        return grown

    @property
    def partition_name(self) -> str:
        words = [f"{self.features} up to {self.strength:g}"] if self.features != "none" else []
        words += [f"growing over {self.grows_over} rounds"] if self.grows_over is not None else []
        words += [f"{self.concepts} concepts"] if self.concepts > 1 else []
        return ", ".join([self.source.partition_name, *words])

    def fingerprint(self, split: str) -> str:
        """Return a short hash of which client holds which samples, and of the shift."""
        content = f"{super().fingerprint(split)} {self.features} {self.strength} {self.concepts}"
        content += "" if self.grows_over is None else f" {self.grows_over}"
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def planted_groups(self) -> dict[str, int] | None:
        if self.concepts == 1:
            return self.source.planted_groups
        return {client: place % self.concepts for place, client in enumerate(self.source.client_ids)}

    @property
    def difference(self) -> dict[str, float]:
        """How far the clients' data are apart, after `setup`.

        `features`: largest level of a client (the strength). `concepts`: share of classes that two clients of different
        concepts, on average over pairs of clients, call differently; 0: no concept shift; the most is about
        `1 - 1 / classes`.
        """
        names = [self._permutations[place % self.concepts] for place in range(len(self.client_ids))]
        pairs = [
            float((classes != other).mean()) for place, classes in enumerate(names) for other in names[place + 1 :]
        ]
        return {"features": self.strength, "concepts": float(np.mean(pairs)) if pairs else 0.0}

    def level(self, place: int) -> float:
        """Return a client's level of feature shift.

        Args:
            place: The client's place in `client_ids`.
        """
        return self.strength * place / max(1, len(self.source.client_ids) - 1)

    def shifted(
        self, x: Tensor, y: Tensor, place: int, rows: list[int], split: str, share: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return a client's inputs `(batch, ...)` and labels `(batch,)` after its shift.

        Args:
            x: Inputs of the source.
            y: Labels of the source.
            place: The client's place in `client_ids`.
            rows: Places of the samples in the source's dataset, which fix their noise.
            split: The split, which fixes their noise, too.
            share: Share of the client's level.
        """
        level = share * self.level(place)
        if level and self.features == "noise":
            draws = [generator(self.seed, "noise", split, row) for row in rows]
            noise = torch.stack([torch.randn(x.shape[1:], generator=draw) for draw in draws])
            x = x + math.sqrt(level) * noise.to(x.dtype)
        elif level and self.features == "rotation":
            x = rotated(x, level)
        elif level and self.features == "contrast":
            mean = x.flatten(1).mean(1).view(-1, *[1] * (x.ndim - 1))
            x = mean + (1 - level) * (x - mean)
        if self.concepts > 1:
            y = torch.from_numpy(self._permutations[place % self.concepts])[y.long()].to(y.dtype)
        return x, y


class _Shifted(Dataset[Any]):
    """The samples of a dataset, each shifted as its client's are."""

    def __init__(
        self, dataset: Any, holder: np.ndarray, owner: ShiftedDataModule, split: str, share: float = 1.0
    ) -> None:
        self.dataset, self.holder, self.owner, self.split, self.share = dataset, holder, owner, split, share

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([int(row)])[0]

    def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
        if isinstance(self.dataset, ArrayDataset):
            x, y = self.dataset.rows(torch.tensor(rows))
        else:
            samples = [self.dataset[row] for row in rows]
            if not all(
                isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], Tensor) for pair in samples
            ):
                raise ValueError("ShiftedDataModule shifts samples (x, y) whose x is a tensor; its source has others.")
            x = torch.stack([pair[0] for pair in samples])
            y = torch.stack([torch.as_tensor(pair[1]) for pair in samples])
        shifted_samples: list[Any] = [None] * len(rows)
        places = self.holder[np.asarray(rows, dtype=np.int64)]
        for place in np.unique(places).tolist():
            client_rows = np.flatnonzero(places == place)
            kept = torch.from_numpy(client_rows)
            pair = (x[kept], y[kept])
            if place >= 0:  # a sample of nobody stays as it is
                pair = self.owner.shifted(*pair, place, [rows[k] for k in client_rows], self.split, self.share)
            for k, shifted_x, label in zip(client_rows, *pair, strict=True):
                shifted_samples[k] = (shifted_x, label)
        return shifted_samples


def rotated(images: Tensor, degrees: float) -> Tensor:
    """Return images `(batch, channels, height, width)` turned counter-clockwise around their middle, zeros outside "
    "(bilinear).

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.shifted import rotated
        >>> image = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).view(1, 1, 2, 2)
        >>> rotated(image, 90).round().view(2, 2)
        tensor([[2., 4.],
                [1., 3.]])
    """
    if images.ndim != 4:
        raise ValueError(
            f"Only images (batch, channels, height, width) can be turned; these inputs have shape {tuple(images.shape)}."
        )
    angle, ratio = math.radians(degrees), images.shape[2] / images.shape[3]
    sin, cos = math.sin(angle), math.cos(angle)
    # affine_grid maps places of the result to places of the input, both in [-1, 1] whatever the sides' lengths
    matrix = torch.tensor([[cos, -sin * ratio, 0.0], [sin / ratio, cos, 0.0]]).to(images.dtype)
    grid = F.affine_grid(matrix.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)
