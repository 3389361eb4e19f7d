"""APFL: the callback, and its update rule as three functions (`mix`, `alpha_slope`, `next_alpha`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fedlightning.algorithm import (
    NEWCOMER,
    Change,
    Client,
    Facts,
    Need,
    Setup,
    Stackable,
    Stage,
    Update,
    WeightingName,
)
from fedlightning.callbacks.shared.second_model import refuse_closures
from fedlightning.ranges import Instance, NonNegativeFloat, Share, needs
from fedlightning.tensors import widen
from fedlightning.wrappers import uses_forward

if TYPE_CHECKING:
    from fedlightning.callbacks.apfl_mixtures import ParameterMixture
    from fedlightning.callbacks.apfl_stacked import StackedMixtures


class APFL(Stackable):
    r"""Adaptive personalized federated learning: each client deploys a mixture of a local and the global model.

    Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020.

    Down: `w`. Up: `w_i`. State: `v_i` (from `w^0`) and `a_i` at each client. With `vbar = a v + (1 - a) w`, on every
    batch:

    * `w <- w - eta grad f(w)`. This is exactly FedAvg: the server's trajectory is the same for every `a`.
    * `v <- v - eta a grad f(vbar)`, by a second optimizer as the module configures it. The gradient is taken at the
      `vbar` of before the step (as in the paper) and clipped like that of `w`.
    * On the first batch of a round, `a <- clip_[0,1](a - eta_a <v - w, grad f(vbar)>)`.

    Deployed: `vbar` with the received `w` (stage L1) or the last local one (L2), and the buffers that training `v` has
    moved at `vbar` (with `a = 0` those of `w`).

    FedProx, SCAFFOLD and server optimizers act on `w` only: they are about the model that travels, while `v` is meant to
    drift, held by `a`. Layers that another callback keeps at home (FedPer, FedBN) train in `w` like the others and are
    mixed like the others.

    Args:
        alpha: Initial share `a` of the local model (FENDA-FL paper: 0.5; the APFL paper also fixed 0.25, 0.5 and 0.75).
        adaptive: Whether `a` is learned.
        alpha_lr: Learning rate `eta_a` of the share. `None` uses the learning rate of the step (the authors' code). The
            FENDA-FL paper tuned it in 1 to 1e-4.
        alpha_decay: Adds `alpha_decay * a` to the slope (the authors' code: 0.02; the paper: none).
        mix: `"params"` (paper) mixes parameters, of any module. `"logits"` (FENDA-FL paper, FedTorch) mixes outputs:
            `forward` gives `a h_v + (1 - a) h_w` and `v` trains on the loss of that. It needs a module whose steps call
            `self(x)`.
        personal_model: Another LightningModule as the local model, for `mix="logits"` only. Its optimizer keeps its own
            learning rate and follows the relative schedule of the module's. `None` uses a copy of the module.
        weighting: Weights of the clients: `"samples"` or `"uniform"` (paper).

    Raises:
        ValueError: If `alpha` is outside [0, 1], `mix` is unknown, or `personal_model` cannot be mixed.

    Example:
        >>> from fedlightning.callbacks import APFL
        >>> APFL(alpha=0.25).alpha
        0.25
    """

    facts = Facts([Change.BESIDE], [Need("trains two models in one fit", ("local_phases",))], keeps=True)

    @needs("personal_model", "mix", value="logits", why="parameters of two models do not mix. Set mix='logits'.")
    def __init__(
        self,
        alpha: Share = 0.5,
        adaptive: bool = True,
        alpha_lr: NonNegativeFloat | None = None,
        alpha_decay: NonNegativeFloat = 0.0,
        mix: Literal["params", "logits"] = "params",
        personal_model: Annotated[LightningModule, Instance("It says how v trains.")] | None = None,
        weighting: WeightingName | None = None,
    ) -> None:
        self.alpha = alpha
        self.adaptive = adaptive
        self.alpha_lr = alpha_lr
        self.alpha_decay = alpha_decay
        self.mix = mix
        self.personal_model = personal_model
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse manual optimization, visits in several phases, and logit mixing where the step skips `forward`."""
        name = type(setup.template).__name__
        if not setup.module.automatic_optimization:
            raise ValueError(f"APFL trains a second model beside {name}, which optimizes manually. Use FedPer.")
        refuse_closures(setup, "APFL")
        if self.mix == "logits" and not _uses_forward(setup):
            raise ValueError(
                f"APFL(mix='logits') mixes what forward returns, but {name}.training_step does not call self(x). "
                "Use APFL(mix='params')."
            )

    # -- one visit ----------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set up `v` and its optimizer beside the client's module."""
        mixture = self._mixture(self.client)
        mixture.start(trainer, pl_module)
        self.client.scratch[self.key] = mixture

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Take the gradient at the mixture before `w` moves; `v` and `a` move right after `w`."""
        self.client.scratch[self.key].accumulate(batch, batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach `v` from the optimizer of `w`."""
        self.client.scratch[self.key].stop()

    def on_send(self, client: Client, update: Update) -> None:
        """Keep `v_i` and `a_i` in the client's state."""
        mixture = client.scratch.pop(self.key, None)
        if mixture is not None:
            client.state[self.key] = mixture.state()

    @property
    def is_stackable(self) -> bool:
        """Whether clients can train in a stack: mixtures of parameters can, mixtures of logits cannot."""
        return self.mix == "params"

    def stack_hooks(self, fit: Any) -> StackedMixtures:
        """Return the same steps for a stack of clients."""
        from fedlightning.callbacks.apfl_stacked import StackedMixtures

        return StackedMixtures(self, fit)

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return `vbar`, with the `w` that the client's module holds at `stage`; `w` where no `v` was ever trained for it."""
        if client.message.tag == NEWCOMER and self.key not in client.state and not client.contributed:
            return client.copy_module()
        return self._mixture(client).deployed(client.copy_module())

    def _mixture(self, client: Client) -> ParameterMixture:
        from fedlightning.callbacks.apfl_mixtures import LogitMixture, ParameterMixture

        return ParameterMixture(client, self) if self.mix == "params" else LogitMixture(client, self)


# -- the update rule -------------------------------------------------------------------------------------------------


def mix(v: Tensor, w: Tensor, alpha: float | Tensor) -> Tensor:
    """Return the mixture `vbar = a v + (1 - a) w`.

    Example:
        >>> mix(torch.tensor([4.0]), torch.tensor([0.0]), alpha=0.25)
        tensor([1.])
    """
    return alpha * v + (1 - alpha) * w


@torch.no_grad()
def alpha_slope(
    v: Mapping[str, Tensor], w: Mapping[str, Tensor], gradients: Mapping[str, Tensor], stacked: bool = False
) -> Tensor:
    """Return `df/da = <v - w, grad f(vbar)>`, the derivative of the mixture's loss by the share `a`.

    Example:
        >>> v, w = {"layer": torch.tensor([3.0, 1.0])}, {"layer": torch.tensor([1.0, 1.0])}
        >>> alpha_slope(v, w, {"layer": torch.tensor([0.5, 9.0])}).item()
        1.0
    """
    sums = []
    for name, gradient in gradients.items():
        term = widen(v[name] - w[name]) * widen(gradient)
        sums.append(term.flatten(1).sum(1) if stacked else term.sum())
    return torch.stack(sums).sum(0)


def next_alpha(alpha: float, slope: float, lr: float, decay: float = 0.0) -> float:
    """Return `clip_[0,1](a - eta_a (df/da + decay a))`, the share after one step.

    Example:
        >>> next_alpha(0.5, slope=1.0, lr=0.1), next_alpha(0.5, slope=-1.0, lr=10.0)
        (0.4, 1.0)
    """
    return min(max(alpha - lr * (slope + decay * alpha), 0.0), 1.0)


def _uses_forward(setup: Setup) -> bool:
    try:
        return uses_forward(setup.module, setup.data.first_batch())
    except RuntimeError:  # the step needs a running trainer: the first visit will tell
        return True
