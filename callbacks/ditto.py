"""Ditto."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from torch import Tensor

from fedlightning.algorithm import Client, GradientContext, Phase, WeightingName, requires
from fedlightning.callbacks.own_models import KeepsModel
from fedlightning.ranges import Range, make_init
from fedlightning.tensors import clone, module_state


@make_init
class Ditto(KeepsModel):
    """A personal model beside the global one, held near it by a proximal term.

    Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through personalization", ICML 2021.

    In a visit the client trains two models:

    * ``w_i`` from ``w^t`` by local training, exactly as without Ditto. For every ``lam`` the server's trajectory is
      FedAvg's, or that of whatever other method trains ``w``.
    * ``v_i <- v_i - eta (grad f_i(v_i) + lam (v_i - w^t))``, on the same batches again (as in the authors' code), by an
      optimizer of its own. The anchor is ``w^t`` as it was received, on trainable parameters that travel.

    What travels and what is kept:

    * Down: ``w^t``. Up: ``w_i``, never ``v_i``.
    * State: ``v_i`` at each client, from ``w^0``, with its own running statistics; with ``optimizer_state="keep"`` also
      its optimizer.
    * Deployed: ``v_i``, or ``w`` before a client's first visit. The global model is ``w``.

    An absent client's ``v_i`` stays as it is. A ``v_i`` that diverges is not kept and does not disturb ``w_i``. SGD
    needs ``eta lam < 2``.

    Args:
        lam: Strength of the pull. Default 1 (authors, who tune it in {0.1, 1, 2}; PLayer-FL comparison: 0.1). 0 is
            training alone.
        work: Local epochs or steps of ``v_i``, whichever the trainer counts. ``None`` (default, authors): as many as of
            ``w_i``.
        weighting: How the ``w_i`` are weighted: ``"samples"`` (default) or ``"uniform"`` (authors, who then sample
            clients by size).

    Raises:
        ValueError: If ``lam`` is negative or infinite, or ``work`` is negative.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import GradientContext
        >>> from fedlightning.callbacks import Ditto
        >>> w = {"w": torch.zeros(1)}
        >>> ctx = GradientContext(w, {}, {}, client="0", num_samples=8, lr=0.1, phase="personal")
        >>> Ditto(lam=0.5).correct_gradient(ctx, "w", torch.tensor([4.0]), torch.tensor([1.0]))
        tensor([3.])
    """

    facts = KeepsModel.facts.extend(requires=[requires.NoOvershoot("pulls by lr * lam", of="lam", warns=True)])

    lam: Annotated[float, Range("[0, inf)", "0 is training alone.")] = 1.0
    work: Annotated[int, Range("[0, inf)", "None: as much as the global model.")] | None = None
    weighting: WeightingName | None = None

    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Train ``w_i`` as without Ditto, then ``v_i`` on the same batches."""
        yield Phase()
        v = self.read_kept(client) or clone(module_state(client.initial_module()), "cpu")
        client.state[self.key] = {"model": v}
        if self.work != 0:
            keys = (self.key,)
            yield Phase(
                "personal", start=v, work=self.work, federated=False, terms_of=keys, repeats="fit", keep_as=self.keep
            )

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return ``g + lam (v - w^t)`` while ``v`` trains, and ``g`` while ``w`` does."""
        if ctx.phase != "personal" or name not in ctx.anchor or self.lam == 0.0:
            return gradient
        return gradient + self.lam * (parameter - ctx.anchor[name])
