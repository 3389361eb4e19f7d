"""Clipping of clients' changes: to a given length, or to one that follows a quantile of the lengths (Andrew et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedlightning.algorithm import Message, Update
from fedlightning.tensors import State, as_reals, narrow, widen
from fedlightning.tensors.memory import PIECE

SHARE = 1 / 20
"""Standard deviation of the count's noise over the expected number of participants, as the authors have it."""


def _pieces(value: Tensor) -> tuple[Tensor, ...]:
    """Return an entry in pieces that fit into a cache; on other devices whole."""
    flat = as_reals(value.detach()).reshape(-1)
    return flat.split(PIECE) if value.device.type == "cpu" else (flat,)


def length_of_change(moved: Iterable[str], sent: State, state: State) -> float:
    """Return the length of the changes of some entries as one vector, in float64."""
    pairs = ((now, then) for name in moved for now, then in zip(_pieces(state[name]), _pieces(sent[name]), strict=True))
    return _length(widen(now) - widen(then) for now, then in pairs)


def _length(pieces: Iterable[Tensor]) -> float:
    """Return the length of pieces as one vector."""
    return math.sqrt(math.fsum(float(piece.square().sum()) for piece in pieces))


def factor_of(moved: Sequence[str], sent: State, state: State, clip: float) -> tuple[float, bool]:
    """Return by what to multiply the changes of some entries to clip them, and whether they were no longer before.

    Raises:
        ValueError: If that length is too short for the precision of the model.
    """
    limit = clip - _rounding_of(clip, [sent[name] for name in moved])
    if limit <= 0.0:
        raise ValueError(f"ClientDP: a clip of {clip:g} is within the rounding of the model's entries. Raise clip.")
    length = length_of_change(moved, sent, state)
    return (1.0 if length <= limit else limit / length), length <= clip


def clipped(sent: Tensor, state: Tensor, factor: float) -> Tensor:
    """Return an entry with its change times a factor, computed in float64."""
    pairs = zip(_pieces(state), _pieces(sent), strict=True)
    parts = [narrow(widen(then) + factor * (widen(now) - widen(then)), then) for now, then in pairs]
    return narrow(torch.cat(parts), sent)


def _rounding_of(clip: float, sent: list[Tensor]) -> float:
    """Return by how much a change that was cut may grow when it is added: to zeros (a new layer) it is rounded itself."""
    coarsest = max((torch.finfo(value.dtype).eps for value in sent), default=0.0)
    of_lengths = 16 * torch.finfo(torch.float64).eps  # both sides add up many squares
    of_sums = sum(
        2 * torch.finfo(value.dtype).eps * _length(widen(piece) for piece in _pieces(value)) for value in sent
    )
    return max(of_sums, clip * (coarsest + of_lengths))


def refuse_longer(trainable: set[str], message: Message, update: Update, clip: float) -> None:
    """Refuse an update whose change is longer than `clip`, or that changes what is not trained.

    Raises:
        ValueError: With both lengths, or the name.
    """
    same = (name for name in update.state if name not in trainable)
    other = [
        name for name in same if not torch.equal(update.state[name], message.state[name].to(update.state[name].dtype))
    ]
    norm = length_of_change((name for name in update.state if name in trainable), message.state, update.state)
    if other or norm > clip:
        length = f"its change has the length {norm:.4g}, more than clip={clip:g}"
        what = f"'{other[0]}' has changed" if other else length
        raise ValueError(f"{what}; ClientDP takes in what its client side has clipped, and nothing else")


def noise_of_count(noise_multiplier: float, expected: float) -> float:
    """Return the standard deviation of the noise on the count of short changes.

    At least the noise multiplier: with few clients the authors' choice would be smaller, and the count would take all of the
    budget. So the noise on the changes grows by 2 / sqrt(3) at most.
    """
    return max(SHARE * expected, noise_multiplier)


def noise_of_changes(noise_multiplier: float, of_count: float) -> float:
    """Return the noise multiplier of the changes, so that changes and count together spend as `noise_multiplier` alone.

    ``z_u = (z^-2 - (2 s)^-2)^(-1/2)``: the count is of ``b_i - 1/2``, so that one client moves it by 1/2 (theorem 1).

    Example:
        >>> round(noise_of_changes(1.0, 5.0), 4)
        1.005
    """
    return (noise_multiplier**-2 - (2.0 * of_count) ** -2) ** -0.5


def next_clip(clip: float, count: float, expected: float, quantile: float, rate: float) -> float:
    """Return the length to clip to in the next round: ``C exp(-rate (b - quantile))``.

    Args:
        clip: That of this round.
        count: Sum of ``b_i - 1/2`` over those who came, with its noise; ``b_i`` is 1 where a change was no longer.
        expected: Expected number of participants.
        quantile: Share of changes that are to be no longer.
        rate: Step.
    """
    return clip * math.exp(-rate * (0.5 + count / expected - quantile))
