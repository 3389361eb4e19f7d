"""What lets a single client into the server's state past a rule for all of them."""

from __future__ import annotations

from fedlightning.algorithm import FederatedCallback, Setup, UpdateCodec


def refuse_other_ways(owner: FederatedCallback, setup: Setup, why: str, sums: bool = False) -> None:
    """Refuse callbacks that take something else from clients than the model, or look at single updates.

    Args:
        owner: The callback that holds for all that comes from clients.
        setup: The federation.
        why: What it does not do with such things, as the end of a sentence after its name.
        sums: Whether it sums the model's entries only, so that what holds nothing of them may stand beside it.

    Raises:
        ValueError: Naming the other callback.
    """
    for other in (part for part in setup.callbacks if part is not owner and not (sums and part.facts.beside_sums)):
        extras = [] if isinstance(other, UpdateCodec) else sorted(other.wire(setup.module).up)  # decoded before
        if extras:
            raise ValueError(
                f"{other.key} takes {', '.join(extras)} from clients, which {owner.key} {why}. Remove one of the two."
            )
        if other.claims("on_update") or (other.claims("check_update") and not isinstance(other, UpdateCodec)):
            raise ValueError(f"{other.key} goes by single updates, which {owner.key} {why}. Remove one of the two.")
