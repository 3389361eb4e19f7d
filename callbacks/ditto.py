"""Ditto."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fedlightning.algorithm import Client, GradientContext, Phase, Setup, WeightingName, clone, module_state
from fedlightning.callbacks.own_models import KeepsModel


class Ditto(KeepsModel):
    r"""A personal model beside the global one, held near it.

    Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through personalization", ICML 2021.

    Down: ``w^t``. Up: ``w_i`` (never ``v_i``). State: ``v_i`` at each client, with its own running statistics, from
    ``w^0``; with ``optimizer_state="keep"`` also its optimizer. In a visit

    * ``w_i`` from ``w^t`` by local training, exactly as without Ditto: the server's trajectory is FedAvg's, or that of
      whatever other method trains ``w``, for every ``lam``;
    * ``v_i <- v_i - eta (grad f_i(v_i) + lam (v_i - w^t))``, on the same batches again (as in the authors' code), by an
      optimizer of its own. The anchor is ``w^t`` as it was received, on trainable parameters that travel.

    Deployed: ``v_i``; the global model is ``w``. An absent client's ``v_i`` rests; before its first visit a client
    deploys ``w``. A ``v_i`` that diverges is not kept and does not disturb ``w_i``. SGD needs ``eta lam < 2``.

    Args:
        lam: strength (authors: 1, grid 0.1, 1, 2; PLayer-FL comparison: 0.1). 0: training alone.
        work: local epochs or steps of ``v_i`` (what the trainer counts); ``None``: as many as of ``w_i`` (authors).
        weighting: of the ``w_i``: ``"samples"`` or ``"uniform"`` (authors, who then sample clients by size).
    """

    def __init__(self, lam: float = 1.0, work: int | None = None, weighting: WeightingName | None = None) -> None:
        if not 0.0 <= lam < float("inf"):
            raise ValueError(f"Ditto got lam={lam}; a strength is a finite number from 0. Use 0 for training alone.")
        if work is not None and work < 0:
            raise ValueError(f"Ditto got work={work}; use None for as much as the global model trains, or 0 for none.")
        self.lam = lam
        self.work = work
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Warn where the pull overshoots."""
        for optimizer in setup.optimizers:
            step = self.lam * max(float(group["lr"]) for group in optimizer.param_groups)
            if type(optimizer).__name__ == "SGD" and step >= 2.0:
                setup.warn(
                    f"Ditto(lam={self.lam}) pulls by lr * lam = {step:.3g} of the distance in each step, and 2 or more "
                    f"diverges. Use lam below {2.0 * self.lam / step:.3g}, or a smaller learning rate."
                )

    def local_phases(self, client: Client) -> Iterable[Phase]:
        """``w_i`` as ever, then ``v_i``."""
        yield Phase()
        v = self.kept(client) or clone(module_state(client.initial_module()), "cpu")
        client.state[self.key] = {"model": v}
        if self.work != 0:
            terms = (self.key,)
            yield Phase(
                "personal", start=v, work=self.work, federated=False, terms_of=terms, repeats="fit", keep_as=self.keep
            )

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """``g + lam (v - w^t)`` for ``v``; ``g`` for ``w``."""
        if ctx.phase != "personal" or name not in ctx.anchor or self.lam == 0.0:
            return gradient
        return gradient + self.lam * (parameter - ctx.anchor[name])
