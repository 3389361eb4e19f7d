"""APFL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import LightningModule, Trainer

from fedlightning.algorithm import Client, FederatedCallback, Setup, Stage, Update, WeightingName
from fedlightning.callbacks.apfl_mixtures import LogitMixture, ParameterMixture
from fedlightning.wrappers import uses_forward

if TYPE_CHECKING:
    from fedlightning.callbacks.apfl_stacked import StackedMixtures


class APFL(FederatedCallback):
    r"""Adaptive personalised federated learning: each client deploys a mixture of a local and the global model.

    Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020.

    Down: ``w``. Up: ``w_i``. State: ``v_i`` (from ``w^0``) and ``a_i`` at each client. With ``vbar = a v + (1 - a) w``,
    on every batch:

    * ``w <- w - eta grad f(w)`` (exactly FedAvg: the server's trajectory is the same for every ``a``);
    * ``v <- v - eta a grad f(vbar)``, by an optimizer of the kind the module configures, ``grad`` at the ``vbar`` of
      before the step (paper) with the same clipping;
    * on the first batch of a round ``a <- clip_[0,1](a - eta_a <v - w, grad f(vbar)>)``.

    Deployed: ``vbar`` with the received ``w`` (stage L1) or the last local one (L2), and the buffers that training
    ``v`` has moved at ``vbar`` (with ``a = 0`` those of ``w``).

    FedProx, SCAFFOLD and server optimizers act on ``w`` only: they are about the model that travels, while ``v`` is
    meant to drift, held by ``a``. Layers that another callback keeps at home (FedPer, FedBN) train in ``w`` like the
    others and are mixed like the others.

    Args:
        alpha: start of ``a`` (FENDA-FL paper: 0.5; APFL paper also fixed 0.25, 0.5, 0.75).
        adaptive: whether ``a`` is learned.
        alpha_lr: ``eta_a``; ``None``: the step's ``eta`` (the authors' code). FENDA-FL paper: tuned in 1 to 1e-4.
        alpha_decay: adds ``alpha_decay * a`` to the derivative (the authors' code: 0.02; the paper: none).
        mix: ``"params"`` (paper), on any module; ``"logits"`` (FENDA-FL paper, FedTorch): ``forward`` gives ``a h_v +
            (1 - a) h_w`` and ``v`` trains on the loss of that, for modules whose steps call ``self(x)``.
        personal: another LightningModule as the local model, for ``mix="logits"`` only; its optimizer keeps its own
            learning rate and follows the relative schedule of the module's.
        weighting: ``"samples"``, or ``"uniform"`` (paper).
    """

    def __init__(
        self,
        alpha: float = 0.5,
        adaptive: bool = True,
        alpha_lr: float | None = None,
        alpha_decay: float = 0.0,
        mix: Literal["params", "logits"] = "params",
        personal: LightningModule | None = None,
        weighting: WeightingName | None = None,
    ) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"APFL got alpha={alpha}; a share of the local model must be in [0, 1].")
        if mix not in ("params", "logits"):
            raise ValueError(f"APFL got mix={mix!r}. Use 'params' (any module) or 'logits' (steps that call self(x)).")
        if personal is not None and mix != "logits":
            raise ValueError("APFL got a personal model of its own, whose parameters do not mix. Set mix='logits'.")
        if personal is not None and not isinstance(personal, LightningModule):
            raise ValueError(
                f"APFL got a {type(personal).__name__} as personal model. Pass a LightningModule: it says how v trains."
            )
        self.alpha = alpha
        self.adaptive = adaptive
        self.alpha_lr = alpha_lr
        self.alpha_decay = alpha_decay
        self.mix = mix
        self.personal = personal
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse manual optimization, and logit mixing where the step does not use ``forward``."""
        name = type(setup.template).__name__
        if not setup.module.automatic_optimization:
            raise ValueError(f"APFL trains a second model beside {name}, which optimizes manually. Use FedPer.")
        others = [callback.key for callback in setup.callbacks if callback.claims("local_phases")]
        if others:
            raise ValueError(f"APFL trains w and v in one fit, but {others[0]} splits a visit into phases. Remove one.")
        if self.mix == "logits" and not _uses_forward(setup):
            raise ValueError(
                f"APFL(mix='logits') mixes what forward returns, but {name}.training_step does not call self(x). "
                "Use APFL(mix='params')."
            )

    # -- one visit ----------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set up ``v`` and its optimizer beside the client's module."""
        mixture = self._mixture(self.client)
        mixture.start(trainer, pl_module)
        self.client.scratch[self.key] = mixture

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The mixture's gradient, before ``w`` moves."""
        self.client.scratch[self.key].accumulate(batch, batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach ``v`` from the optimizer of ``w``."""
        self.client.scratch[self.key].stop()

    def on_send(self, client: Client, update: Update) -> None:
        """Keep ``v_i`` and ``a_i``."""
        mixture = client.scratch.pop(self.key, None)
        if mixture is not None:
            client.state[self.key] = mixture.state()

    @property
    def is_stackable(self) -> bool:
        """A stack mixes parameters only."""
        return self.mix == "params"

    def stack_hooks(self, fit: Any) -> StackedMixtures:
        """The same for a stack of clients."""
        from fedlightning.callbacks.apfl_stacked import StackedMixtures

        return StackedMixtures(self, fit)

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """``vbar``, with whatever ``w`` the client's module holds at ``stage``."""
        return self._mixture(client).deployed(client.copy_module())

    def _mixture(self, client: Client) -> ParameterMixture:
        return ParameterMixture(client, self) if self.mix == "params" else LogitMixture(client, self)


def _uses_forward(setup: Setup) -> bool:
    try:
        return uses_forward(setup.module, setup.first_batch())
    except RuntimeError:  # the step wants a running trainer: the first visit will tell
        return True
