"""What attaches to the client side of a federation from outside: :class:`ClientParts`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedlightning.client.deep_copier import DeepCopier, ModuleCopier


@dataclass(frozen=True)
class ClientParts:
    """What trains and scores clients faster, or guards them; a client without any gets the same models and scores.

    A blueprint carries them, so they are wherever its clients are. They are classes and functions, which a worker process can
    be sent.

    Attributes:
        fitters: Made from the blueprint, and asked before Lightning's Trainer to train
            (:class:`~fedlightning.client.fitters.Fitter`), in this order.
        evaluators: The same for scores (:class:`~fedlightning.client.scorer.Evaluator`).
        loop_checks: Called with each loop of a Trainer that has ended: with the loop, the name of its step, the module, its
            batches, their number if it is known, and `fitting=False` for a loop that scores.
        leave_checks: Called with the blueprint, a client and its update as the last thing of a visit; what one refuses stays.
        copier: Makes the copies of a template (:class:`~fedlightning.client.deep_copier.ModuleCopier`).
    """

    fitters: tuple[Callable[[Any], Any], ...] = ()
    evaluators: tuple[Callable[[Any], Any], ...] = ()
    loop_checks: tuple[Callable[..., None], ...] = ()
    leave_checks: tuple[Callable[[Any, Any, Any], None], ...] = ()
    copier: Callable[[nn.Module], ModuleCopier] = DeepCopier
