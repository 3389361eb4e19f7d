"""Means by class of a client's samples under SampleDP: clipped sums and counts with noise, one release of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fedlightning.callbacks.shared.secret_noise import digest_of, with_noise

SURE = 3.0
"""Standard deviations of noise that a class's count has to exceed for its mean to be sent: else it would be noise alone."""


def sums_by_class(vectors: Iterable[tuple[Tensor, Tensor]], classes: int, clip: float) -> dict[str, Tensor]:
    """Return sums over samples of vectors that are cut to length 1 (in units of `clip`), and counts, by class, in float64.

    One sample moves both together by the square root of two at most. One whose vector is not finite has no part.

    Raises:
        ValueError: If a label has no class.
    """
    sums, counts = torch.zeros(0), torch.zeros(classes, dtype=torch.float64)
    for batch, labels in vectors:
        chosen = (labels >= 0).cpu() & batch.isfinite().all(1).cpu()  # -100: a sample that losses ignore
        rows, of_class = batch.detach().cpu().double()[chosen], labels.cpu()[chosen].long()
        if len(of_class) and int(of_class.max()) >= classes:
            raise ValueError(f"A label is {int(of_class.max())}, and the model has {classes} classes.")
        rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=clip)
        sums = torch.zeros(classes, rows.shape[1], dtype=torch.float64) if sums.dim() == 1 else sums
        sums = sums.index_add(0, of_class, rows)
        counts = counts + torch.bincount(of_class, minlength=classes)
    return {"sums": sums, "counts": counts}


def released_means(exact: dict[str, Tensor], clip: float, noise: float, secret: str, address: str) -> dict[int, Tensor]:
    """Return the means of the classes whose noisy count says that they are there.

    Args:
        exact: Sums and counts.
        clip: Length to which vectors were cut.
        noise: Noise multiplier of the release.
        secret: What nobody else knows.
        address: What the noise is for.
    """
    std = noise * math.sqrt(2.0)
    noisy = with_noise(exact, std, secret, f"{address}|{digest_of('means', exact)}")
    there = (noisy["counts"] > max(SURE * std, 1.0)).nonzero()[:, 0].tolist()
    return {label: clip * noisy["sums"][label] / noisy["counts"][label] for label in there}
