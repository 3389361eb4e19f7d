"""Which callbacks cannot work together: :func:`refuse_combinations` derives it from what each says of itself."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedlightning.contract.callback import FederatedCallback
from fedlightning.contract.capabilities import METHODS, Change, describe_change
from fedlightning.contract.messages import Extra
from fedlightning.contract.setup import Setup
from fedlightning.errors import ConfigurationError


def changes_of(callback: FederatedCallback) -> set[str]:
    """Return what a callback changes: members of `Change` that it declares, and names of what it has."""
    facts = callback.facts
    changes = set(facts.changes) | {name for name in METHODS if callback.claims(name)}
    keeps = bool(changes & {Change.START, "shared_names"}) if facts.keeps is None else facts.keeps
    also = {
        Change.KEEPS: keeps,
        "keeps": facts.keeps,
        "not by_record": bool(changes & {"training_loss", "feature_taps"}) and not facts.by_record,
        "place": facts.newcomers.place is not None,
        "weighting": callback.weighting is not None,
        "ModelSelection": callback.is_of("ModelSelection"),
    }
    return changes | {change for change, holds in also.items() if holds}


def changes_in(callback: FederatedCallback, module: nn.Module) -> set[str]:
    """Return what a callback changes in a federation of `module`; one that only watches changes nothing."""
    if not callback.facts.takes_part:
        return set()
    wire = callback.wire(module)
    forms = {Extra.of(spec).form for spec in (*wire.down.values(), *wire.up.values())}
    whole = not forms.isdisjoint(("parameters", "state", "states"))
    return changes_of(callback) | ({Change.VALUES} if whole else set())


def refuse_combinations(callbacks: Sequence[FederatedCallback], setup: Setup) -> None:
    """Refuse a callback that breaks what another one needs, or that is for real numbers where parameters are complex.

    Args:
        callbacks: All of the run.
        setup: The federation before round 1.

    Raises:
        ConfigurationError: Naming both, the need and the change.
    """
    odd = next((name for name, parameter in setup.module.named_parameters() if parameter.is_complex()), "")
    for callback in callbacks:
        if odd and callback.facts.real_only:
            raise ConfigurationError(
                f"'{odd}' is complex, and {callback.key} is for real numbers. Hold it as two real ones (torch.view_as_real), "
                "or take another method."
            )
    changes = {callback.key: changes_in(callback, setup.module) for callback in callbacks}
    for callback in callbacks:
        for need in callback.facts.needs:
            for other in callbacks if need.when(setup) else ():
                broken = None if other is callback else need.broken_by(changes[other.key])
                if broken is not None:
                    instead = f", or {need.instead}" if need.instead else ""
                    raise ConfigurationError(
                        f"{callback.key} {need.what}, and {other.key} {describe_change(broken)}. Remove {callback.key} or "
                        f"{other.key}{instead}."
                    )
