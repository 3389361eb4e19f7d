"""What SecureAggregation refuses before round 1 of the clients, and of the entries that they send."""

from __future__ import annotations

from fedlightning.algorithm import Setup
from fedlightning.callbacks.shared.fixed_point import FixedPoint


def refuse_unfit(setup: Setup, clip: float, bits: int, least: int) -> None:
    """Refuse rounds of too few clients, sums that could overflow, and entries that are no numbers to add up.

    Args:
        setup: The federation.
        clip: Bound of an element's change.
        bits: Bits of an integer.
        least: Clients whose sum may be opened.

    Raises:
        ValueError: With the way out.
    """
    share, count = setup.run.participation, len(setup.run.clients)
    drawn = share if isinstance(share, int) and not isinstance(share, bool) else round(share * count)
    if min(drawn, count) < least:
        raise ValueError(
            f"{min(drawn, count)} clients take part in a round, and SecureAggregation opens sums of {least} at least: of "
            "fewer, one would know the other's."
        )
    if FixedPoint(clip, bits, count).levels < 100 * count:
        raise ValueError(
            f"SecureAggregation(bits={bits}) leaves fewer than a hundred levels for each of {count} clients, if the "
            "sum is not to overflow. Take more bits."
        )
    travelling = set(setup.shared_names())
    for name, layer in setup.module.named_modules():
        if f"{name}.num_batches_tracked" in travelling and getattr(layer, "momentum", 0) is None:
            raise ValueError(
                f"'{name}' averages over all batches that it has counted (momentum=None), and SecureAggregation leaves "
                "integer buffers as they are. Give it a momentum, or keep such entries with the clients: "
                "float_buffers='local'."
            )
