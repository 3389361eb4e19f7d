"""What reassembly decides: how alike blocks are, in which groups they fall, and which candidates are built of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from sklearn.cluster import KMeans
from torch import Tensor
from torch.nn import functional as F

from fedlightning.tensors import ties

TINY = 1e-12
TRIES = 200
"""Draws for each candidate that is wanted."""


@dataclass(frozen=True)
class Part:
    """A block of a client's network as the rules see it.

    Attributes:
        client: The client's place among those whose networks are reassembled.
        depth: The block's place in its network.
        rank: 0 up to the network's last convolution, 2 for its last block, 1 between them.
        kind: Its operation: `"conv"`, `"fc"` or `"other"`.
    """

    client: int
    depth: int
    rank: int
    kind: str


def unit_gram(rows: Tensor) -> Tensor:
    """Return the centred Gram matrix of some rows, as a vector of length 1; zeros if all rows are equal."""
    flat = rows.flatten(1).double()
    flat = flat - flat.mean(0)
    top = flat.abs().max()
    if not float(top) > 0:
        return torch.zeros(len(flat) ** 2, dtype=torch.float64)
    flat = flat / top  # fourth powers of small numbers would vanish
    gram = (flat @ flat.T).flatten()
    return gram / gram.norm()


def cka(first: Tensor, second: Tensor) -> float:
    r"""Return the linear CKA of what two blocks give for the same samples, in [0, 1].

    `<K_c, L_c>_F / (||K_c||_F ||L_c||_F)` with `K = X X^T` and the subscript for centring (Kornblith et al., 2019). Turns,
    shifts and scales do not change it. A block that gives the same for all samples has 0 with every other.

    Example:
        >>> x = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 5.0]])
        >>> round(cka(x, 3 * x.flip(1) + 7), 6)
        1.0
    """
    return float((unit_gram(first) @ unit_gram(second)).clamp(0, 1))


def similarities(into: Sequence[Tensor], out: Sequence[Tensor]) -> Tensor:
    """Return `CKA(X_a, X_b) + CKA(Y_a, Y_b)` for all pairs of blocks, `(blocks, blocks)`, fp64."""
    x, y = torch.stack(list(into)), torch.stack(list(out))
    return (x @ x.T).clamp(0, 1) + (y @ y.T).clamp(0, 1)


def grouped(alike: Tensor, count: int, how: Literal["medoids", "means"], seed: int) -> list[int]:
    """Return the group of each block, from 0: each is in exactly one, and no group is empty.

    Example:
        >>> alike = torch.tensor([[2.0, 1.9, 0.1], [1.9, 2.0, 0.1], [0.1, 0.1, 2.0]], dtype=torch.float64)
        >>> grouped(alike, 2, "medoids", 0), grouped(alike, 2, "means", 0)
        ([0, 0, 1], [0, 0, 1])
    """
    count = min(count, len(alike))
    if how == "means":
        same = ties.representatives(alike)
        each = list(dict.fromkeys(same))  # blocks that are equal stand once, with their number as weight
        values, vectors = torch.linalg.eigh(alike[each][:, each])
        rows = vectors * torch.where(values > TINY * values.max(), values, torch.zeros_like(values)).sqrt()
        means = KMeans(min(count, len(each)), n_init=10, random_state=seed % 2**32)
        groups = means.fit_predict(rows.numpy(), sample_weight=[same.count(block) for block in each]).tolist()
        found = [groups[each.index(block)] for block in same]
    else:
        found = _by_medoids(1 / alike.clamp(min=TINY), count)
    order = list(dict.fromkeys(found))
    return [order.index(group) for group in found]


def _by_medoids(apart: Tensor, count: int) -> list[int]:
    """Return the place of each row's medoid: greedy starts, then the best swap as long as one helps (PAM)."""
    apart = apart.clone().fill_diagonal_(0.0)  # a medoid is in its own group, whoever is as near

    def cost(medoids: Sequence[int]) -> float:
        return float(apart[:, list(medoids)].min(1).values.sum())

    def cheapest(choices: Sequence[list[int]]) -> list[int]:
        return choices[int(ties.first_least(torch.tensor([cost(choice) for choice in choices], dtype=torch.float64)))]

    everybody = range(len(apart))
    medoids: list[int] = []
    for _ in range(count):
        medoids = cheapest([[*medoids, new] for new in everybody if new not in medoids])
    best = cost(medoids)
    while True:
        swaps = [
            [new if it == old else it for it in medoids] for old in medoids for new in everybody if new not in medoids
        ]
        if not swaps or not (found := cheapest(swaps)) or cost(found) >= best * (1 - ties.CLOSE):
            break
        medoids, best = found, cost(found)
    medoids.sort()
    nearest = ties.first_least(apart[:, medoids], 1).tolist()
    return [medoids.index(row) if row in medoids else nearest[row] for row in everybody]


def candidates(
    parts: Sequence[Part],
    groups: Sequence[int],
    count: int,
    depths: tuple[int, int],
    required: Sequence[str],
    draw: torch.Generator,
    fits: Callable[[Sequence[int]], bool] = lambda places: True,
) -> list[list[int]]:
    """Draw different candidates: places of blocks, in the order in which they are put together.

    Rules: the number of blocks is within `depths` (of fewer blocks all may be taken); every group has one; every required
    operation is there; the order is the natural one, by rank (convolutional stages, the others, last blocks), then by depth.
    """
    members = [[place for place, group in enumerate(groups) if group == k] for k in range(max(groups) + 1)]
    least = max(min(depths[0], len(parts)), len(members))
    most = max(min(depths[1], len(parts)), least)
    found: dict[tuple[int, ...], None] = {}
    for _ in range(TRIES * count):
        if len(found) == count:
            break
        chosen = [own[int(torch.randint(len(own), (1,), generator=draw))] for own in members]
        size = int(torch.randint(least, most + 1, (1,), generator=draw))
        others = [place for place in torch.randperm(len(parts), generator=draw).tolist() if place not in chosen]
        chosen += others[: size - len(chosen)]
        places = tuple(sorted(chosen, key=lambda it: (parts[it].rank, parts[it].depth, parts[it].client)))
        if set(required) <= {parts[it].kind for it in places} and places not in found and fits(places):
            found[places] = None
    return [list(places) for places in found]


def nearest_teachers(models: Sequence[Tensor], made: Sequence[Tensor]) -> list[int]:
    """Return for each model the candidate whose outputs have the largest mean cosine with its own; the first of several.

    Example:
        >>> nearest_teachers([torch.tensor([[1.0, 0.0]])], [torch.tensor([[0.0, 2.0]]), torch.tensor([[3.0, 1.0]])])
        [1]
    """
    table = [[float(F.cosine_similarity(own.double(), other.double()).mean()) for other in made] for own in models]
    return ties.first_largest(torch.tensor(table, dtype=torch.float64), 1).tolist()


def contrastive(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Return NT-Xent: of all other samples in both views, each is told from its own other view (SimCLR, Chen et al. 2020).

    Example:
        >>> z = torch.eye(2)
        >>> round(float(contrastive(z, z, 1.0)), 4), round(float(contrastive(z, z.flip(0), 1.0)), 4)
        (0.5514, 1.5514)
    """
    z = F.normalize(torch.cat([first, second]).flatten(1).float(), dim=1)
    alike = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    partner = torch.arange(len(z), device=z.device).roll(len(first))
    return F.cross_entropy(alike, partner)


def view(x: Tensor, noise: float) -> Tensor:
    """Return an augmented view of a batch: noise of `noise` standard deviations; images are shifted besides."""
    seen = x + noise * x.std() * torch.randn_like(x)
    if x.ndim != 4:
        return seen
    high, wide = (max(1, side // 8) for side in x.shape[2:])
    padded = F.pad(seen, (wide, wide, high, high))
    down = torch.randint(2 * high + 1, (len(x),)).to(x.device)[:, None] + torch.arange(x.shape[2], device=x.device)
    along = torch.randint(2 * wide + 1, (len(x),)).to(x.device)[:, None] + torch.arange(x.shape[3], device=x.device)
    every = torch.arange(len(x), device=x.device)[:, None, None]
    return padded.transpose(1, 2).transpose(2, 3)[every, down[:, :, None], along[:, None, :]].permute(0, 3, 1, 2)
