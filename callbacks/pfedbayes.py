"""pFedBayes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from fedlightning.algorithm import Change, Client, Need, Phase, Server, State, WeightingName, requires
from fedlightning.callbacks.own_models import KeepsModel
from fedlightning.callbacks.shared.steps import step_to_mean
from fedlightning.ranges import NonNegativeFloat, PositiveInt, Range, make_init
from fedlightning.tensors import dense, load_state
from fedlightning.wrappers import AddedParametersMixin, mix, mixins_of


def gaussian_kl(mu: Tensor, rho: Tensor, prior_mu: Tensor, prior_rho: Tensor) -> Tensor:
    r"""Return `KL(N(mu, softplus(rho)^2) || N(prior_mu, softplus(prior_rho)^2))`, element by element.

    .. math:: \log\frac{\sigma_w}{\sigma_q} + \frac{\sigma_q^2 + (\mu_q - \mu_w)^2}{2 \sigma_w^2} - \frac{1}{2}

    Example:
        >>> import torch
        >>> gaussian_kl(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([0.0]))
        tensor([0.])
    """
    sigma, prior = F.softplus(rho), F.softplus(prior_rho)
    return (prior / sigma).log() + (sigma.square() + (mu - prior_mu).square()) / (2.0 * prior.square()) - 0.5


def kl_gradients(mu: Tensor, rho: Tensor, prior_mu: Tensor, prior_rho: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the derivatives of :func:`gaussian_kl` by its four arguments."""
    sigma, prior = F.softplus(rho), F.softplus(prior_rho)
    apart = mu - prior_mu
    by_mu = apart / prior.square()
    by_rho = (sigma / prior.square() - 1.0 / sigma) * rho.sigmoid()
    by_prior = (1.0 - (sigma.square() + apart.square()) / prior.square()) / prior * prior_rho.sigmoid()
    return by_mu, by_rho, -by_mu, by_prior


SUFFIX = "_rho"
"""What is added to the name of a mean for the name of its spread."""

ROUNDING = 64.0
"""Differences of `q_i` and `w_i` up to so many units in the last place are rounding."""


@make_init
class pFedBayes(KeepsModel):
    r"""Personalised federated learning by variational inference: every weight is a Gaussian, with a common prior.

    Zhang, Li, Li, Guo, Shao, "Personalized federated learning via variational Bayesian inference", ICML 2022.

    Each weight is `N(mu, sigma^2)` with `sigma = softplus(rho)`; the module's own parameters are the `mu`, and a `rho` of
    the same shape is added beside each. A client trains two distributions in a visit:

    * its own, `q_i`, by the module's optimizer on one sample of the weights a step (`theta = mu + sigma epsilon`), on
      `-E_q[log p(D_i | theta)] / n_i + zeta / n_i KL(q_i || w_i)`, where the first term is the module's loss;
    * its copy `w_i` of the common one, from the received `w`, by Adam on `KL(q_i || w_i)`, one step after every
      `personal_steps` steps of `q_i` and one at the end of the visit for steps that are left over.

    Server: `(mu, rho) <- (1 - b) (mu, rho) + b mean_i(mu_i, rho_i)`.

    * Down and up: `mu` and `rho` of `w`, twice FedAvg's traffic. State: `q_i` at each client, from the first `w` received.
    * Deployed: the means of `q_i`, with its running statistics. The global model is the means of `w`.

    The paper's loss is a sum over a client's samples; here it is divided by their number `n_i`, since modules average. The
    authors' code divides `KL` by its local iterations and sums the loss over a batch, and draws `epsilon` with a standard
    deviation of 0.001 where theory has 1; `noise` is that. `w_i` sees data through `q_i` only, so methods that correct the
    steps of the model that travels are refused.

    `w_i` takes no step where it differs from `q_i` by rounding alone. A bias before batch normalisation has no gradient but
    rounding, of which Adam would make steps of `global_lr`: it, its `rho` and the running mean were different then from one
    machine to the next.

    The prior has to leave its random start before it helps, so the method needs many rounds. On digits over ten clients
    (ten rounds, three seeds) the defaults, tuned there, have an accuracy of 0.817 (Local 0.813, FedAvg 0.893); `zeta=1,
    personal_steps=5, global_lr=0.01` has 0.621 (one seed), since the prior then holds every client at the start.

    Args:
        zeta: Weight of the prior (theory: 1; authors: 10, on their scale). 0: `q_i` trains alone. The prior pulls by
            `zeta / (n_i sigma^2)`, which is 420 / n_i for `zeta = 1` at the start.
        personal_steps: Steps of `q_i` for each of `w_i` (authors: 5, over some 800 rounds).
        global_lr: Learning rate of Adam for `w_i` (authors: 0.001, likewise). The larger, the more `w_i` follows `q_i`
            within a visit, and the less it pulls.
        server_lr: `b` (authors: 1). 0 leaves `w` as it is.
        rho: First `rho` of every weight (authors: -3, `sigma` 0.049).
        noise: Standard deviation of `epsilon`: 1 (theory) or 0.001 (authors' code). 0: `q_i` trains at its means.
        weighting: `"uniform"` (paper) or `"samples"`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> from fedlightning.callbacks import pFedBayes
        >>> from fedlightning.models import MLP, Classifier
        >>> module = pFedBayes().wrap_module(Classifier(MLP(4, [], 2), num_classes=2), "server")
        >>> [name for name, _ in module.named_parameters()]
        ['net.fc1.weight', 'net.fc1.bias', 'net.fc1.weight_rho', 'net.fc1.bias_rho']
    """

    facts = KeepsModel.facts.extend(
        changes={Change.ELSEWHERE},
        real_only=True,
        needs=[
            Need("trains the model that travels without data of its own", ("correct_gradient",)),
            Need("adds a spread to every parameter of the module", ("wrap_module",)),
        ],
        requires=[
            requires.AutomaticOptimization("samples the weights of every step"),
            requires.NoWeightDecay("has a prior of its own beside which every rho would go to 0"),
            requires.NoOvershoot("pulls by lr * zeta / (n sigma^2)", of="zeta", pull="_pull", warns=True),
        ],
    )

    zeta: NonNegativeFloat = 0.1
    personal_steps: PositiveInt = 1
    global_lr: Annotated[float, Range("(0, inf)", "With 0 w would never move.")] = 0.1
    server_lr: NonNegativeFloat = 1.0
    rho: Annotated[float, Range("(-inf, inf)", "softplus(rho) is a standard deviation.")] = -3.0
    noise: NonNegativeFloat = 1.0
    weighting: WeightingName | None = "uniform"

    def claims(self, role: str) -> bool:
        """Decline the server step where `b = 1`."""
        return super().claims(role) and not (role == "server_step" and self.server_lr == 1.0)

    def _pull(self, sizes: Mapping[str, int]) -> float:
        smallest = min((count for count in sizes.values() if count), default=1)
        return self.zeta / smallest / F.softplus(torch.tensor(self.rho)).item() ** 2

    def wrap_module(self, module: LightningModule, owner: str) -> LightningModule:
        """Add a `rho` beside every trainable parameter; tied parameters have one."""
        rhos: dict[int, nn.Parameter] = {}
        originals = {}
        for path, child in list(module.named_modules()):
            for name, parameter in list(child.named_parameters(recurse=False)):
                if parameter.requires_grad:
                    if id(parameter) not in rhos:
                        rhos[id(parameter)] = nn.Parameter(torch.full_like(parameter, self.rho))
                        full = f"{path}.{name}" if path else name
                        originals[full + SUFFIX] = full
                    child.register_parameter(name + SUFFIX, rhos[id(parameter)])
        mix(module, _GaussianMixin)
        vars(module)["rho_originals"] = originals
        return module

    # -- one visit -----------------------------------------------------------------------------------------------------
    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Train `q_i` and, between its steps, `w_i`; keep the one and send the other."""
        visit = client.scratch[self.key] = _Visit(start=client.model_state())
        yield Phase(start={**visit.start, **self.read_kept(client)})
        self.keep(client)
        load_state(client.module, visit.common)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set up `w_i` beside `q_i`, with its optimizer."""
        client = self.client
        visit = client.scratch[self.key]
        named = dict(pl_module.named_parameters())
        visit.noise = client.rng("posterior")
        for rho, mu in pairs(pl_module):
            posterior = (named[mu], named[rho])
            common = tuple(visit.start[name].to(named[name], copy=True) for name in (mu, rho))
            visit.weights.append(_Weight((mu, rho), posterior, common))
        visit.optimizer = torch.optim.Adam([part for weight in visit.weights for part in weight.common], self.global_lr)
        visit.handles = [optimizer.register_step_post_hook(visit.count) for optimizer in trainer.optimizers]

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Move the parameters to a sample of `q_i`. Where gradients are accumulated, a step has one sample."""
        visit = self.client.scratch[self.key]
        for weight in visit.weights:
            mu, rho = weight.posterior
            if weight.epsilon is None:
                drawn = torch.randn(mu.shape, generator=visit.noise, dtype=torch.float32)
                weight.epsilon = (self.noise * drawn).to(mu)
            weight.mean = mu.detach().clone()
            if self.noise:
                mu.add_(F.softplus(rho) * weight.epsilon)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Move the parameters back to their means; apply the chain rule, and add the gradient of the prior."""
        client = self.client
        visit = client.scratch[self.key]
        visit.restore()
        strength = self.zeta / max(client.num_samples, 1)
        for weight in visit.weights:
            mu, rho = weight.posterior
            if mu.grad is not None:
                slopes = kl_gradients(mu, rho, *weight.common)
                gradient = dense(mu.grad)
                rho.grad = gradient * weight.epsilon * rho.sigmoid() + strength * slopes[1]
                mu.grad = gradient + strength * slopes[0]
            weight.epsilon = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Move the parameters back also after a batch without a step; let `w_i` step when it is its turn."""
        visit = self.client.scratch[self.key]
        visit.restore()
        if visit.waiting >= self.personal_steps:
            visit.follow()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let `w_i` step for what is left over."""
        visit = self.client.scratch[self.key]
        visit.restore()
        if visit.waiting:
            visit.follow()
        for handle in visit.handles:
            handle.remove()
        for weight in visit.weights:
            visit.common |= dict(zip(weight.names, (part.detach().cpu() for part in weight.common), strict=True))
        visit.weights, visit.optimizer, visit.handles = [], None, []

    # -- server --------------------------------------------------------------------------------------------------------
    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """Return `(1 - b) w + b mean(w_i)` on means and spreads; every other entry is the clients' mean."""
        return step_to_mean(server, old, reduced, self.server_lr)


@dataclass
class _Weight:
    """One parameter as a Gaussian in a visit.

    Attributes:
        names: Names of its `mu` and `rho`.
        posterior: `mu` and `rho` of `q_i`, the module's parameters.
        common: Those of `w_i`.
        epsilon: The draw of the step that runs.
        mean: `mu`, while the module's parameter is a sample.
    """

    names: tuple[str, str]
    posterior: tuple[nn.Parameter, nn.Parameter]
    common: tuple[Tensor, Tensor]
    epsilon: Tensor | None = None
    mean: Tensor | None = None


@dataclass
class _Visit:
    """What a visit holds beside the module.

    Attributes:
        start: The module's state as the visit began: `w`, and what stays with the client.
        weights: The parameters as Gaussians, during the fit.
        common: `w_i` by name, after the fit.
        noise: Generator of the samples.
        optimizer: That of `w_i`.
        handles: Hooks on the optimizers of `q_i`.
        waiting: Steps of `q_i` since the last one of `w_i`.
    """

    start: State
    weights: list[_Weight] = field(default_factory=list)
    common: State = field(default_factory=dict)
    noise: torch.Generator | None = None
    optimizer: Optimizer | None = None
    handles: list[Any] = field(default_factory=list)
    waiting: int = 0

    def count(self, *ignored: Any) -> None:
        """Count a step of `q_i` that was taken."""
        self.waiting += 1

    @torch.no_grad()
    def restore(self) -> None:
        """Move the parameters from the sample back to the means, exactly."""
        for weight in self.weights:
            if weight.mean is not None:
                weight.posterior[0].copy_(weight.mean)
                weight.mean = None

    @torch.no_grad()
    def follow(self) -> None:
        """Take a step of `w_i` towards `q_i`, on `KL(q_i || w_i)`."""
        for weight in self.weights:
            _, _, *slopes = kl_gradients(*weight.posterior, *weight.common)
            for part, slope, alike in zip(weight.common, slopes, alike_parts(weight), strict=True):
                part.grad = slope.masked_fill(alike, 0.0)
        assert self.optimizer is not None
        self.optimizer.step()
        self.waiting = 0


def alike_parts(weight: _Weight) -> tuple[Tensor, Tensor]:
    """Return where `mu`, and where `mu` and `rho`, of `q_i` and `w_i` differ by rounding alone.

    The task's gradient of a bias before batch normalisation is 0, and comes out as rounding. Adam makes a step of the
    learning rate of it, whatever its size.
    """
    (mu, rho), (prior_mu, prior_rho) = weight.posterior, weight.common
    tolerance = ROUNDING * torch.finfo(mu.dtype).eps
    scale = torch.maximum(torch.maximum(mu.abs(), prior_mu.abs()), F.softplus(prior_rho))
    alike = (mu - prior_mu).abs() <= tolerance * scale
    return alike, alike & ((rho - prior_rho).abs() <= tolerance * torch.maximum(rho.abs(), prior_rho.abs()))


class _GaussianMixin(AddedParametersMixin):
    """On a module whose parameters are means: every `rho` joins the optimizer group of its `mu`."""

    rho_originals: dict[str, str]

    def added_parameters(self) -> dict[str, str]:
        return {**super().added_parameters(), **self.rho_originals}

    def on_unmix(self) -> None:
        """Take every `rho` away; the means stay."""
        for child in list(self.modules()):
            for name, _ in list(child.named_parameters(recurse=False)):
                if name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in child._parameters:
                    delattr(child, name)
        del vars(self)["rho_originals"]


def pairs(module: nn.Module) -> list[tuple[str, str]]:
    """Return the names of every `rho` and its `mu` in a module that :class:`pFedBayes` has wrapped; else none."""
    return list(vars(module)["rho_originals"].items()) if _GaussianMixin in mixins_of(module) else []
