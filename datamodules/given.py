"""Samples that are written in the configuration: a few numbers for each client, for runs whose result is known on paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import torch

from fedlightning.datamodules.indexed import IndexedFederatedDataModule, Split
from fedlightning.datamodules.views import ArrayDataset
from fedlightning.ranges import Length, checked


class GivenDataModule(IndexedFederatedDataModule):
    """Clients whose samples are given as numbers, for a regression.

    With a linear model and squared errors every client has a quadratic objective, so fixed points and whole trajectories of
    federated methods can be computed by hand. Training, validation and test samples are the same ones. `x` is float32
    `(batch, features)`, `y` float32 `(batch,)`.

    Args:
        clients: Name of a client -> its samples: `x` (a list of rows), `y` (a number each), and perhaps `copies`, how often
            each of them is there (default 1). Equal samples make every batch the same, whatever its order.
        batch_size: Number of samples in a batch.
        options: The other arguments of `IndexedFederatedDataModule`, by name.

    Raises:
        ValueError: If there is no client, or a client's `x` and `y` do not fit together.

    Example:
        >>> from fedlightning.datamodules import GivenDataModule
        >>> clients = {"a": {"x": [[1.0]], "y": [2.0], "copies": 3}, "b": {"x": [[1.0]], "y": [0.0]}}
        >>> data = GivenDataModule(clients, batch_size=1)
        >>> data.setup()
        >>> data.client_ids, data.num_samples("a"), data.num_samples("b", "test")
        (['a', 'b'], 3, 1)
    """

    @checked
    def __init__(
        self,
        clients: Annotated[dict[str, dict[str, Any]], Length(note="Names with their x and y.")],
        batch_size: int = 32,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, **options)
        widths = set()
        for name, held in clients.items():
            unknown = sorted(set(held) - {"x", "y", "copies"})
            copies = held.get("copies", 1)
            if unknown or "x" not in held or "y" not in held:
                raise ValueError(
                    f"GivenDataModule got {sorted(held)} for client '{name}'; give x, y and perhaps copies."
                )
            if isinstance(copies, bool) or not isinstance(copies, int) or copies < 1:
                raise ValueError(
                    f"GivenDataModule got copies={copies!r} for client '{name}'; give a whole number from 1 up."
                )
            if len(held["x"]) != len(held["y"]) or not held["x"]:
                raise ValueError(
                    f"GivenDataModule got {len(held['x'])} rows of x and {len(held['y'])} numbers of y for client '{name}'; "
                    "give as many of both, and at least one."
                )
            widths |= {len(row) for row in held["x"]}
        if len(widths) > 1:
            raise ValueError(
                f"GivenDataModule got rows of {sorted(widths)} numbers; all rows of x have the same length."
            )
        self.clients = {str(name): dict(held) for name, held in clients.items()}

    def build(self) -> tuple[list[str], Mapping[str, Split]]:
        x: list[list[float]] = []
        y: list[float] = []
        indices = []
        for held in self.clients.values():
            start, copies = len(y), held.get("copies", 1)
            x += [list(row) for row in held["x"]] * copies
            y += list(held["y"]) * copies
            indices.append(np.arange(start, len(y)))
        data = ArrayDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32))
        return list(self.clients), {split: Split(data, indices) for split in ("train", "val", "test")}
