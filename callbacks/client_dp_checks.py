"""What ClientDP refuses or warns of before round 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedlightning.algorithm import Change, Need, Setup, facts
from fedlightning.callbacks.secure_aggregation import LEAST, SecureAggregation
from fedlightning.callbacks.shared.fixed_point import FixedPoint
from fedlightning.callbacks.shared.sum_noise import LEAST_STD, SumNoise
from fedlightning.tensors import as_reals, tied_names

BOUNDED = Need(
    "adds noise to one mean of changes whose lengths it bounds",
    (
        *("reduce", "on_reduced", "denominator", "plan_round", "on_broadcast", "model_of"),
        *(Change.VALUES, "encode", "neighbours", "global_module", "on_build"),
    ),
)
OF_A_SUM = Need(
    BOUNDED.what,
    tuple(one for one in BOUNDED.without if one not in ("reduce", "plan_round", "on_broadcast", "encode")),
)
"""The same but for what SecureAggregation itself does; it refuses others that do."""


def refuse_contradictions(where: str, shares: int | None, rate: float, quantile: float | None, accountant: str) -> None:
    """Refuse options that contradict each other.

    Raises:
        ValueError: With the way out.
    """
    if (where == "masked") != (shares is not None):
        raise ValueError(
            f"ClientDP got where={where!r} and shares={shares}: shares is the number of clients whose noise together is that "
            "of the mean, for where='masked' only."
        )
    if where == "masked" and (rate < 1.0 or quantile is not None):
        raise ValueError(
            "ClientDP(where='masked') shows how many took part, by how much noise there is, so that drawing them hides "
            "nothing; and nobody covers a count for quantile. Leave out rate and quantile, or take where='server'."
        )
    if where == "masked" and accountant != "rdp":
        raise ValueError(
            f"ClientDP(where='masked', accountant={accountant!r}): its noise is bounded by Rényi divergences. "
            "Take accountant='rdp'."
        )


def refuse_other_rounds(kept: Mapping[str, Any], given: Sequence[Any], solved: float | None, max_rounds: int) -> None:
    """Refuse a resumed run whose noise is another one than that of the rounds before.

    Args:
        kept: What the run keeps from round to round.
        given: The options of now.
        solved: The noise multiplier that clients solve for, where they add the noise.
        max_rounds: For how many rounds they solve.

    Raises:
        ValueError: With both.
    """
    if kept["given"] != given:
        raise ValueError(
            "ClientDP accounts for all rounds by one noise_multiplier, rate and noise_seed (and quantile, shares): they "
            f"were {kept['given']}, and are {given} now. Resume with those of before, or start a new run."
        )
    if solved is not None and solved != kept["noise_multiplier"]:
        raise ValueError(
            f"Clients of ClientDP(where='masked') add the noise, and solve for noise_multiplier={solved:.4g} with max_rounds="
            f"{max_rounds}; the rounds of this run are accounted with {kept['noise_multiplier']:.4g}. Resume with the "
            "max_rounds of before, or start a new run."
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
            "Take GroupNorm in the place of BatchNorm, or keep such entries with the clients: float_buffers='local'."
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
    secure = next((one for one in setup.callbacks if isinstance(one, SecureAggregation)), None)
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
                f"ClientDP {BOUNDED.what}, and {other.key} {facts.describe_change('on_broadcast')}. Remove one of the two."
            )
    count = sum(setup.data.num_samples[client] > 0 for client in setup.run.clients)
    if noise.shares > secure.survivors(count):
        raise ValueError(
            f"ClientDP(shares={noise.shares}): SecureAggregation(threshold={secure.threshold:.3g}) opens sums of "
            f"{secure.survivors(count)} of {count} clients, which would have too little noise. Lower shares, or raise the "
            "threshold."
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
