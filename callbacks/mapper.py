"""MAPPER: the local models, the choice, the global step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlightning.algorithm import Change, Client, Phase, Stage, State, WeightingName, requires
from fedlightning.callbacks.own_models import KeepsModel
from fedlightning.ranges import Length, PositiveInt, RoundCountOrShare, Share, make_init
from fedlightning.tensors import clone, entry_kinds, interpolate, load_state, module_state, select, ties


@make_init
class MAPPER(KeepsModel):
    r"""Model interpolation: each client deploys its best mixture of a local model and the global one.

    Mansour, Mohri, Ro, Suresh, "Three approaches for personalization with applications to federated learning", 2020.

    Down: `h_c`. Up: `h_c` after the client's step (never `h_l` or `lam`). State: `h_l` and `lam` at each client, `h_l`
    from the first `h_c` received. In a visit, with `h(lam) = lam h_l + (1 - lam) h_c`:

    1. For each `lam` of the grid, `h_c` fixed: `h_l <- h_l - eta lam grad f_i(h(lam))`, from the `h_l` of the last visit
       and over the visit's local work.
    2. The `(h_l, lam)` with the least loss of `h(lam)` is kept.
    3. `h_l` fixed: `h_c <- h_c - eta (1 - lam) grad f_i(h(lam))`, for `global_steps` steps; this goes up.

    Server: `h_c = mean_i(h_c,i)`. Deployed: `h(lam)` with the received `h_c` (stage L1) or the client's own (L2), with
    the running statistics that `h(lam)` has seen; the global model is `h_c`. Optimizers are the module's; corrections of
    other methods (FedProx, SCAFFOLD) act on the step of `h_c`.

    `h_c` learns only from the part of the loss that `h_l` has left, so from a random start it stays weak for long. So the
    first rounds are FedAvg's: `h_c` trains alone and is deployed, and `h_l` begins from what it has become. Validation
    accuracy on digits (a CNN) and FashionMNIST (an MLP) over ten clients by Dirichlet(0.5), ten rounds, three seeds: 0.821
    and 0.821 with half of the rounds, 0.736 and 0.822 with none (Local: 0.787 and 0.797).

    Args:
        grid: Values of `lam` in [0, 1] (the Ditto paper's comparison: 0.25, 0.5, 0.75). A visit costs one local training
            for each that is not 0.
        global_steps: Steps of `h_c` in a visit (paper: 1). `None` takes the visit's local work, as in FedAvg, since one
            step a round would need thousands of rounds.
        choose_on: Split whose mean training loss decides: `"train"` (paper) or `"val"`.
        warmup: Rounds at the beginning in which `h_c` trains alone, as in FedAvg: a share of all rounds (float, default 0.5,
            measured) or a number (int). 0: none (paper).
        weighting: Weights of the clients: `"uniform"` (paper) or `"samples"`.

    Raises:
        ValueError: If `grid` is empty or holds other values than different shares, or another argument is out of range.

    Example:
        >>> from fedlightning.callbacks import MAPPER
        >>> MAPPER(grid=[0.0, 0.5, 1.0]).global_steps is None
        True
    """

    facts = KeepsModel.facts.extend(
        changes={Change.READS, Change.ELSEWHERE},
        requires=[requires.AutomaticOptimization("takes gradients at a mixture", "Use Ditto.")],
    )

    grid: Annotated[Sequence[Share], Length(different=True, note="Shares of the local model.")] = (0.25, 0.5, 0.75)
    global_steps: PositiveInt | None = None
    choose_on: Literal["train", "val"] = "train"
    warmup: RoundCountOrShare = 0.5
    weighting: WeightingName | None = "uniform"

    # -- one visit -----------------------------------------------------------------------------------------------------
    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Train `h_l` for each `lam`, choose, then train `h_c`; in rounds of the warm-up, `h_c` alone.

        A client that has an `h_l` does not go back to a warm-up, which a share of more rounds would make longer.
        """
        h_c = client.model_state()
        rounds = self.warmup if isinstance(self.warmup, int) else round(self.warmup * client.max_rounds)
        if client.round < rounds and not self.read_kept(client):
            client.scratch[self.key] = _Visit(fixed=h_c)
            yield Phase()
            return
        h_l = {**h_c, **self.read_kept(client)}
        visit = client.scratch[self.key] = _Visit(fixed=h_c)
        for lam in self.grid:
            if lam == 0.0:  # h_l has no gradient, and weight decay must not move it
                self._weigh(client, lam, h_l)
                continue
            visit.share = lam
            yield Phase(
                f"local-{lam}",
                start=h_l,
                federated=False,
                terms_of=(self.key,),
                repeats="fit",
                keep_as=lambda client, lam=lam: self._weigh(client, lam, client.model_state()),  # type: ignore[misc]
            )
        if visit.best is None:
            raise FloatingPointError(
                f"the loss is not finite at any lam of {list(self.grid)}. Lower the learning rate or clip gradients"
            )
        lam, h_l = visit.best
        client.state[self.key] = {"model": h_l, "lam": lam}
        visit.share, visit.fixed = 1.0 - lam, h_l
        yield Phase(work=self.global_steps, unit=None if self.global_steps is None else "steps")
        if lam == 1.0:  # h_c had no part in it: neither weight decay nor the statistics of h_l may move it
            load_state(client.module, h_c)

    def _weigh(self, client: Client, lam: float, h_l: State) -> None:
        """Keep `(lam, h_l)` if the mixture's loss is the least so far."""
        visit = client.scratch[self.key]
        split = self.choose_on if client.loader(self.choose_on) else "train"
        loss = client.loss(mixture(client.module, h_l, visit.fixed, lam), split)
        if ties.better_than_rounding(-loss, -visit.least):
            visit.least, visit.best = loss, (lam, h_l)

    # -- one step at the mixture ---------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring the fixed half to the device, beside the half that trains."""
        visit = self.client.scratch[self.key]
        visit.pairs = [(p, visit.fixed[n].to(p.device)) for n, p in pl_module.named_parameters() if p.requires_grad]

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Move the parameters to `h(lam)`, where the loss and its gradient are taken."""
        visit = self.client.scratch[self.key]
        visit.trained = [parameter.detach().clone() for parameter, _ in visit.pairs]
        if visit.share < 1.0:
            for parameter, fixed in visit.pairs:
                parameter.mul_(visit.share).add_(fixed, alpha=1.0 - visit.share)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Move the parameters back, since the optimizer steps from the half that trains, and apply the chain rule.

        The gradient is `lam grad f` for `h_l`, `(1 - lam) grad f` for `h_c`. Corrections of other callbacks come after
        this, wherever they stand in the list: what they add is a gradient with respect to `h_c` already.
        """
        visit = self.client.scratch[self.key]
        visit.restore()
        if visit.share != 1.0:
            for parameter in {id(p): p for group in optimizer.param_groups for p in group["params"]}.values():
                if parameter.grad is not None:
                    parameter.grad = visit.share * parameter.grad

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Move the parameters back also after a batch without a step (accumulated gradients)."""
        self.client.scratch[self.key].restore()

    # -- deployed ------------------------------------------------------------------------------------------------------
    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return `h(lam)` with the `h_c` that the client's module holds at `stage`."""
        module, client_state = client.copy_module(), client.state.get(self.key)
        if client_state is not None:
            load_state(module, mixture(module, client_state["model"], clone(module_state(module)), client_state["lam"]))
        return module


@dataclass
class _Visit:
    """The choice so far in one visit, and the mixture that is being trained.

    Attributes:
        fixed: The half that is fixed.
        share: The share of the half that trains.
        pairs: Each parameter that trains and its fixed counterpart.
        trained: The half that trains, while the parameters hold the mixture.
        least: The least loss so far.
        best: Its `lam` and `h_l`.
    """

    fixed: State
    share: float = 1.0
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    trained: list[Tensor] = field(default_factory=list)
    least: float = math.inf
    best: tuple[float, State] | None = None

    @torch.no_grad()
    def restore(self) -> None:
        """Move the parameters from the mixture back to the half that trains, exactly."""
        for (parameter, _), trained in zip(self.pairs, self.trained, strict=False):
            parameter.copy_(trained)
        self.trained = []


def mixture(module: nn.Module, h_l: State, h_c: State, lam: float) -> State:
    """Return `lam h_l + (1 - lam) h_c` on trainable parameters; the rest is `h_l`'s, or `h_c`'s at `lam = 0`.

    Example:
        >>> h_l, h_c = {"weight": torch.tensor([[4.0]])}, {"weight": torch.tensor([[0.0]])}
        >>> mixture(nn.Linear(1, 1, bias=False), h_l, h_c, lam=0.25)
        {'weight': tensor([[1.]])}
    """
    names = [name for name, kind in entry_kinds(module).items() if kind == "trainable"]
    return {**h_l, **interpolate(select(h_l, names), select(h_c, names), lam)} if lam else h_c
