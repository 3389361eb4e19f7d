"""What lets a single client into the server's state past a rule for all of them."""

from __future__ import annotations

from fedlightning.algorithm import FederatedCallback, Setup


def refuse_other_ways(owner: FederatedCallback, setup: Setup, why: str) -> None:
    """Refuse callbacks that take something else from clients than the model, or look at single updates.

    Args:
        owner: The callback that holds for all that comes from clients.
        setup: The federation.
        why: What it does not do with such things, as the end of a sentence after its name.

    Raises:
        ValueError: Naming the other callback.
    """
    for other in setup.callbacks:
        extras = sorted(other.wire(setup.module).up)
        if extras:
            raise ValueError(
                f"{other.key} takes {', '.join(extras)} from clients, which {owner.key} {why}. Remove one of the two."
            )
        if other.claims("on_update"):
            raise ValueError(f"{other.key} goes by single updates, which {owner.key} {why}. Remove one of the two.")
