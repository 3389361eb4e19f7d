"""Gradient inversion: images made again from the gradient of one training step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from fedlightning.client.probes import probing, training_loss
from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.seeding import generator
from fedlightning.trainer import FederatedTrainer

MAX_IMAGES = 4
"""Images of a step at most: of larger batches little can be told."""
KEPT = 3 * 64 * 64
"""Numbers of an image up to which it is kept in the result, for the report."""


@dataclass(frozen=True)
class Inversion:
    """How much of the images of one training step its gradient gives away.

    Geiping, Bauermeister, Droege, Moeller, "Inverting gradients: how easy is it to break privacy in federated learning?",
    NeurIPS 2020 (arXiv:2003.14053): images are searched by Adam on the signs of the gradient of ``1 - cos(g(x'), g(x))``
    plus a total variation, in the range of the data; or by the squared distance of the gradients (DLG, Zhu, Liu, Han,
    NeurIPS 2019, arXiv:1906.08935). The attacker knows the model, the labels and the range.

    Attributes:
        client: Whose images.
        batch: Images of the step.
        matching: `"cosine"` or `"squared"`.
        steps: Steps of the search.
        mse: Mean squared error of the images, each beside the true one that it is most like.
        psnr: Peak signal-to-noise ratio in decibels, by the range of the data.
        psnr_of_mean: That of a guess without gradient: the mean of the client's images.
        images: True images and those that were found, `(2, batch, channels, height, width)` scaled to 0..1, as lists;
            `None` if they are large.
    """

    client: str
    batch: int
    matching: str
    steps: int
    mse: float
    psnr: float
    psnr_of_mean: float
    images: list[Any] | None


def inversion(
    trainer: FederatedTrainer,
    data: FederatedDataModule,
    batch: int = 1,
    steps: int = 1000,
    matching: Literal["cosine", "squared"] = "cosine",
    variation: float = 1e-3,
    client: str | None = None,
    seed: int = 0,
    picture: Path | None = None,
) -> dict[str, Any]:
    """Try to make images of a client again from the gradient of one step at the model that the federation began with.

    That model gives most away: gradients are small later. Dropout and running statistics are as in evaluation.

    Args:
        trainer: The trainer, fitted or restored.
        data: Its data; they have to be here.
        batch: Images of the step, from 1 to 4, drawn at random.
        steps: Steps of the search.
        matching: How gradients are compared.
        variation: Weight of the total variation.
        client: Whose images. `None`: the first client's.
        seed: Of the draw and of the images that the search begins with.
        picture: Where a picture is written, true images above those found; `None`: nowhere.

    Returns:
        An :class:`Inversion` as a dict.

    Raises:
        ValueError: If there are no images, or more than 4 are asked for.
    """
    if not 1 <= batch <= MAX_IMAGES:
        raise ValueError(f"{batch} images of a step are asked for. Give 1 to {MAX_IMAGES}.")
    server, client = trainer.server, data.client_ids[0] if client is None else client
    if server is None or client not in data.client_ids:
        raise ValueError(f"there is no client '{client}', or no run")
    module = server.blueprint.build("server").to(server.blueprint.device).eval()
    whole, images, labels = _images(data, client, batch, seed)
    low, high = float(whole.min()), float(whole.max())
    images, labels = images.to(module.device), labels.to(module.device)
    with torch.enable_grad(), probing(module, Precision(), seed, "inversion"):
        wanted = [gradient.detach() for gradient in _gradient(module, images, labels)]
        guessed = _searched(module, wanted, images.shape, labels, (low, high), (steps, matching, variation), seed)
    guessed, errors = _nearest(images.cpu().double(), guessed.cpu().double())
    mse, guess = float(errors.mean()), float((images.cpu().double() - whole.double().mean(dim=0)).square().mean())
    scaled = ((torch.stack([images.cpu().double(), guessed]) - low) / max(high - low, 1e-12)).clamp(0, 1)
    scaled = scaled if scaled.dim() == 5 else scaled.unsqueeze(2)
    if picture is not None:
        from fedlightning.report.drawing import use_style
        from fedlightning.report.figures.images import side_by_side

        with use_style():
            side_by_side(scaled.tolist()).savefig(picture)
    kept = scaled.numpy().round(3).tolist() if scaled[0, 0].numel() <= KEPT else None
    ranges = (high - low) ** 2
    ratios = psnr(mse, ranges), psnr(guess, ranges)
    return asdict(Inversion(client, batch, matching, steps, mse, *ratios, kept))


def psnr(mse: float, squared_range: float) -> float:
    """Return ``10 log10(range^2 / mse)``, no more than 99.

    Example:
        >>> psnr(0.01, 1.0)
        20.0
    """
    return 99.0 if mse <= squared_range * 10**-9.9 else 10 * math.log10(squared_range / mse)


def _images(data: FederatedDataModule, client: str, batch: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return all of a client's images (1000 at most), and some of them with their labels."""
    loader: Any = data.client_dataloader(client, "train")
    if loader is None or not hasattr(loader.dataset, "__getitem__") or len(loader.dataset) < batch:
        raise ValueError(f"client '{client}' has fewer than {batch} training samples with positions")
    order = torch.randperm(len(loader.dataset), generator=generator(seed, "inversion", client)).tolist()
    collated = next(
        iter(DataLoader(Subset(loader.dataset, order[:1000]), batch_size=1000, collate_fn=loader.collate_fn))
    )
    images, labels = collated[:2] if isinstance(collated, tuple | list) and len(collated) > 1 else (None, None)
    if not isinstance(images, Tensor) or images.dim() not in (3, 4) or not images.is_floating_point():
        raise ValueError("inversion needs batches (x, y) of images (batch, channels, height, width)")
    assert isinstance(labels, Tensor)
    return images, images[:batch], labels[:batch]


def _gradient(module: LightningModule, images: Tensor, labels: Tensor) -> list[Tensor]:
    loss = training_loss(module, [images, labels])
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True, materialize_grads=True)
    return list(gradients)


def distance(gradients: Sequence[Tensor], wanted: Sequence[Tensor], matching: str) -> Tensor:
    """Return how far gradients are apart: ``1 - cos`` of all of them as one vector, or the squared distance."""
    if matching == "squared":
        return torch.stack([(a - b).square().sum() for a, b in zip(gradients, wanted, strict=True)]).sum()
    dot = torch.stack([(a * b).sum() for a, b in zip(gradients, wanted, strict=True)]).sum()
    lengths = [
        torch.stack([gradient.square().sum() for gradient in many]).sum().clamp_min(1e-30).sqrt()
        for many in (gradients, wanted)
    ]
    return 1 - dot / (lengths[0] * lengths[1])


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels, both ways.

    Example:
        >>> float(total_variation(torch.tensor([[[0.0, 1.0], [0.0, 1.0]]])))
        1.0
    """
    return images.diff(dim=-1).abs().mean() + images.diff(dim=-2).abs().mean()


def _searched(
    module: LightningModule,
    wanted: Sequence[Tensor],
    shape: Sequence[int],
    labels: Tensor,
    range_of: tuple[float, float],
    options: tuple[int, str, float],
    seed: int,
) -> Tensor:
    """Return the images that the search ends with: those of the smallest distance on the way."""
    (low, high), (steps, matching, variation) = range_of, options
    start = torch.rand(shape, generator=generator(seed, "inversion start")) * (high - low) + low
    images = start.to(labels.device).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=0.05 * (high - low))
    milestones = [max(1, round(steps * share)) for share in (3 / 8, 5 / 8, 7 / 8)]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
    best, least = images.detach().clone(), math.inf
    for _ in range(steps):
        apart = distance(_gradient(module, images, labels), wanted, matching)
        loss = apart + variation * total_variation(images) / (high - low)
        (slope,) = torch.autograd.grad(loss, images)
        if float(loss.detach()) < least:
            best, least = images.detach().clone(), float(loss.detach())
        images.grad = slope.sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(low, high)
    return best


def _nearest(true: Tensor, guessed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the found images in the order of the true ones that they are like, and their squared errors."""
    from scipy.optimize import linear_sum_assignment

    errors = (true[:, None] - guessed[None]).square().flatten(2).mean(dim=2)
    rows, columns = linear_sum_assignment(errors.numpy())
    return guessed[torch.as_tensor(columns)], errors[rows, columns]
