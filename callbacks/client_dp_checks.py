"""What ClientDP refuses or warns of before round 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedlightning.algorithm import Change, Need, Setup, facts
from fedlightning.callbacks.secure_aggregation import LEAST, SecureAggregation
from fedlightning.callbacks.shared.fixed_point import FixedPoint
from fedlightning.callbacks.shared.sum_noise import LEAST_STD, SumNoise
from fedlightning.tensors import as_reals, tied_names

WHAT = "adds noise to one mean of changes whose lengths it bounds"
OF_SUM = Need(WHAT, ("on_reduced", "denominator", "model_of", Change.VALUES, "neighbours", "global_module", "on_build"))
"""Where SecureAggregation makes the mean, which itself does the rest, and refuses others that do."""
BOUNDED = Need(WHAT, ("reduce", *OF_SUM.without, "plan_round", "on_broadcast", "encode"))


def refuse_other_options(kept: Sequence[Any], options: Sequence[Any]) -> None:
    """Refuse a resumed run whose noise is another one than that of the rounds before.

    Raises:
        ValueError: With both.
    """
    if kept != options:
        raise ValueError(
            "ClientDP accounts for all rounds by one noise_multiplier, rate and noise_seed (quantile, shares, what clients "
            f"solve for by max_rounds): they were {kept}, and are {options} now. Resume with those, or start anew."
        )


def refuse_fixed_draws(setup: Setup) -> None:
    """Refuse rounds of a number of clients that is fixed.

    Raises:
        ValueError: With the way out.
    """
    if isinstance(setup.run.participation, int) or setup.run.participation != 1.0:
        raise ValueError(
            f"participation={setup.run.participation} draws a fixed number of clients, which ClientDP does not account for. "
            "Leave it out, and give ClientDP(rate=...)."
        )


def refuse_uncovered(setup: Setup) -> None:
    """Refuse entries that travel and are neither bounded nor covered with noise.

    Raises:
        ValueError: With their name and a way out.
    """
    travelling = set(setup.shared_names())
    loose = [name for name, kind in setup.kinds.items() if name in travelling and kind not in ("trainable", "frozen")]
    if loose:
        raise ValueError(
            f"'{loose[0]}' is a running statistic that travels, which ClientDP neither bounds nor covers with noise. "
            "Take GroupNorm instead of BatchNorm, or keep such entries with the clients: float_buffers='local'."
        )
    tied = sorted(name for name in tied_names(setup.module) if name in travelling)
    if tied:
        raise ValueError(
            f"'{tied[0]}' is one tensor under several names, each of which ClientDP would give noise of its own. "
            "Keep it with the clients, or untie it."
        )
    for name, entry in setup.module.named_parameters():
        if name in travelling and entry.requires_grad and as_reals(entry).dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"'{name}' is {entry.dtype}, and ClientDP covers float32 and float64: rounding a mean to 16 bits moves "
                "it further than the noise allows for. precision='16-mixed' or 'bf16-mixed' keeps float32."
            )


def refuse_other_sum(setup: Setup, noise: SumNoise | None) -> None:
    """Refuse SecureAggregation beside noise that is not made for its sums, and such noise where it does not fit.

    Args:
        setup: The federation.
        noise: The noise of a client, with where='masked'; else `None`.

    Raises:
        ValueError: With the way out.
    """
    secure = next((callback for callback in setup.callbacks if isinstance(callback, SecureAggregation)), None)
    if secure is None or noise is None:
        if secure is not None or noise is not None:
            raise ValueError(
                "ClientDP(where='masked', shares=...) adds its noise to the whole numbers that SecureAggregation masks, and "
                "no other ClientDP stands beside it. Take both, or leave out both SecureAggregation and where='masked'."
            )
        return
    for other in setup.callbacks:
        if other is not secure and other.claims("on_broadcast"):
            raise ValueError(
                f"ClientDP {WHAT}, and {other.key} {facts.describe_change('on_broadcast')}. Remove one of the two."
            )
    count = sum(setup.data.num_samples[client] > 0 for client in setup.run.clients)
    if noise.shares > secure.survivors(count):
        raise ValueError(
            f"ClientDP(shares={noise.shares}): SecureAggregation(threshold={secure.threshold:.3g}) opens sums of "
            f"{secure.survivors(count)} of {count} clients, with too little noise. Lower shares, or raise the threshold."
        )
    travelling = set(setup.shared_names())
    elements = sum(as_reals(value).numel() for name, value in setup.module.named_parameters() if name in travelling)
    points = [FixedPoint(secure.clip, secure.bits, clients) for clients in {count, max(noise.shares, LEAST)}]
    if secure.bits > 32 or min(noise.std(point, elements) for point in points) < LEAST_STD:
        raise ValueError(
            f"SecureAggregation(bits={secure.bits}) has too many or too few levels for whole numbers of noise, which ClientDP"
            "(where='masked') adds. Take bits=32."
        )
    least = max(noise.clip_for(point, elements) for point in points)
    if secure.clip < least:
        raise ValueError(
            f"SecureAggregation(clip={secure.clip:g}) leaves no room for the noise of ClientDP(clip={noise.length:g}, "
            f"noise_multiplier={noise.multiplier:.4g}): a sum could overflow. Take a clip of {1.1 * least:.3g} or more."
        )
