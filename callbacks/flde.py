"""FL+DE."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from fedlightning.algorithm import (
    Change,
    Client,
    Facts,
    FederatedCallback,
    Need,
    Setup,
    Stage,
    State,
    Update,
    WeightingName,
    isolated,
    probes,
    warn,
)
from fedlightning.callbacks.shared.representations import features_at_start, head_path, head_widths, targets_in
from fedlightning.callbacks.shared.second_model import SecondModel, refuse_closures
from fedlightning.layers import ordered_layers
from fedlightning.ranges import PositiveFloat, Range, make_init
from fedlightning.tensors import load_state, module_state
from fedlightning.wrappers import AddedParametersMixin, FeatureTap, Mixin, frozen_buffers, mix, muted, user_class
from fedlightning.wrappers.follow import follow
from fedlightning.wrappers.mixing import STEPS
from fedlightning.wrappers.muting import evaluating

EXPERT, GATE = "expert", "expert_gate"
"""Names of the expert in the module, and of the gate in the expert."""


def mix_probabilities(logits: Tensor, expert: Tensor, gate: Tensor) -> Tensor:
    """Return `log(a softmax(logits) + (1 - a) softmax(expert))` with `a = sigmoid(gate)`, or the logit of one class.

    Args:
        logits: Logits of the global model: `(batch, classes, ...)`, or `(batch,)` or `(batch, 1, ...)` of one logit.
        expert: Logits of the expert, of the same shape.
        gate: Logits of the global model's share, one a sample.

    Example:
        >>> equal = torch.tensor([2.0, -1.0])
        >>> mix_probabilities(equal, equal, torch.tensor([0.0, 9.0]))
        tensor([ 2., -1.])
    """
    logits, expert = (z.to(torch.promote_types(z.dtype, torch.float32)) for z in (logits, expert))
    gate = gate.to(logits.dtype).reshape(-1, *[1] * (logits.ndim - 1))
    share, rest = F.logsigmoid(gate), F.logsigmoid(-gate)
    if logits.ndim > 1 and logits.shape[1] > 1:
        return torch.logaddexp(share + logits.log_softmax(1), rest + expert.log_softmax(1))
    yes, no = (torch.logaddexp(share + F.logsigmoid(s * logits), rest + F.logsigmoid(s * expert)) for s in (1, -1))
    return yes - no


def mix_outputs(logits: Tensor, expert: Tensor, gate: Tensor) -> Tensor:
    """Return `a logits + (1 - a) expert` with `a = sigmoid(gate)`.

    Example:
        >>> mix_outputs(torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(2))[:, 0]
        tensor([0.5000, 0.5000])
    """
    share = gate.sigmoid().to(logits.dtype).reshape(-1, *[1] * (logits.ndim - 1))
    return share * logits + (1 - share) * expert


MIXTURES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "probabilities": mix_probabilities,
    "outputs": mix_outputs,
}


def gate_path(module: LightningModule, options: FLDE) -> str:
    """Return the path of the layer whose input the gate reads."""
    return ordered_layers(module)[0].name if options.gate_input == "input" else head_path(module, options.head)


class ExpertMixin(AddedParametersMixin):
    """On the expert: its gate joins the optimizer group of the head, and only the module around it logs."""

    def added_parameters(self) -> dict[str, str]:
        first = next(name for name, p in self.named_parameters() if p.requires_grad and not name.startswith(GATE))
        return {**super().added_parameters(), **{f"{GATE}.{name}": first for name in ("weight", "bias")}}

    def on_unmix(self) -> None:
        """Remove the gate."""
        delattr(self, GATE)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    log_dict = log


class GatedMixin(Mixin):
    """On the global model: its `forward` gives the mixture with the expert in it.

    Attributes:
        gated: Path of the layer whose input the gate reads, how outputs are mixed, and whether a step has used them.
    """

    wraps = STEPS
    gated: dict[str, Any]

    def on_unmix(self) -> None:
        """Remove the expert."""
        delattr(self, EXPERT)
        del vars(self)["gated"]

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "forward":
            self.gated["used"] = True
            return self._mixture(call, args, kwargs)
        result = call(*args, **kwargs)
        if not self.gated["used"] and (name != "training_step" or result is not None):  # None: a skipped batch
            raise RuntimeError(
                f"FLDE mixes what forward gives, and {name} of {user_class(self).__name__} never calls self(x): it would "
                "have shown the global model alone. Let it predict by self(x)."
            )
        return result

    def _mixture(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        expert: Any = self.get_submodule(EXPERT)
        with FeatureTap(self, self.gated["path"]) as tap, evaluating(self):
            logits = call(*args, **kwargs)
            features = tap.features.detach().flatten(1)
        return MIXTURES[self.gated["mix"]](logits, expert(*args, **kwargs), expert.get_submodule(GATE)(features))


class ExpertTraining(SecondModel):
    """Steps of a client's expert and gate, on the loss of the mixture with the global model as it is.

    Args:
        client: The client, whose state holds both from its last visit.
        options: The callback with its hyper-parameters.
    """

    entry = EXPERT

    def __init__(self, client: Client, options: FLDE) -> None:
        expert = client.initial_module()
        path = gate_path(expert, options)
        like: Any = expert.get_submodule(path)
        width, _ = head_widths(expert, path)
        gate = nn.Linear(width, 1, dtype=next(like.parameters()).dtype)
        nn.init.zeros_(gate.weight)
        nn.init.constant_(gate.bias, options.gate_bias)
        mix(expert, ExpertMixin).add_module(GATE, gate)
        super().__init__(client, options.key, expert)
        self.options, self.path = options, path

    def deployed(self, module: LightningModule) -> LightningModule:
        """Let the `forward` of `module`, which is the global model, give the mixture."""
        mix(module, GatedMixin).add_module(EXPERT, self.twin)
        vars(module)["gated"] = {"path": self.path, "mix": self.options.mix, "used": False}
        return module

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Put the expert beside a frozen copy of the global model."""
        super().start(trainer, module)
        self.view = self.deployed(self.client.initial_module().requires_grad_(False).to(module.device))
        self.view.trainer = trainer

    def stop(self) -> None:
        """Let go of the trainer."""
        super().stop()
        self.view.trainer = None

    def gradients_of(self, batch: Any, batch_idx: int) -> State:
        """Return the gradient of the mixture's loss by the parameters of expert and gate."""
        follow(self.module, self.twin)
        follow(self.module, self.view)
        load_state(self.view, module_state(self.module))
        _, gradients = self.client.batch_gradient(batch, self.view, update_buffers=True, batch_idx=batch_idx)
        return {name.removeprefix(f"{EXPERT}."): gradient for name, gradient in gradients.items()}

    def follow_schedule(self, main: Optimizer) -> None:
        """Take over the learning rates of the global model's optimizer, times the factor."""
        super().follow_schedule(main)
        for group in self.optimizer.param_groups:
            group["lr"] *= self.options.lr_factor


@make_init
class FLDE(FederatedCallback):
    r"""A global model and a private expert at each client, between which a gate decides for each input: FL+DE.

    Peterson, Kanani, Marathe, "Private federated learning with domain adaptation", NeurIPS 2019 workshop (arXiv:1912.06733).

    A client predicts ``a(x) M_G(x) + (1 - a(x)) M_P(x)`` with ``a(x) = sigmoid(u phi(x) + b)``, where ``phi(x)`` are features
    that `M_G` computes. On every batch:

    * `M_G` steps on the plain loss, as without FL+DE: the server's trajectory is FedAvg's bit for bit, or that of whatever
      other method trains `M_G`.
    * The private expert `M_P`, ``u`` and ``b`` step on the loss of the mixture, by a second optimizer as the module
      configures it. `M_G` is as it was before its own step, in eval mode and without a gradient.

    The paper trains all of the mixture end to end; here `M_G` never reads the expert or the gate. That is why
    :class:`SampleDP` covers all that leaves when it clips and covers the gradient of `M_G` alone, and expert and gate train
    without noise. Its epsilon is that of `M_G` then: **the deployed mixture is not private** and has to stay at the client.

    * Down and up: `M_G`. State: `M_P` with ``u`` and ``b`` (and their optimizer, with ``optimizer_state="keep"``).
    * Deployed: the mixture (stages L1 and L2); stage G is `M_G`. A client that never trained deploys `M_G`. Its expert begins
      as the model of before round 1 and its gate with ``u = 0``, whenever it first takes part.

    A mixture of probabilities is given as their logarithms (of one logit: as the logit), of which the module's own loss and
    metrics take the softmax. It acts where a step predicts through ``self(x)``; a step that does not is refused. An expert
    that diverges is not kept and does not disturb `M_G`.
    Where `M_G` explains a client's training data well while it trains there, the expert gets little gradient and stays weak.

    Args:
        mix: What is mixed. ``"probabilities"`` of classes in dimension 1 of what ``forward`` gives, or of two classes where
            that has size 1 (or is not there); ``"outputs"``, for regression.
        head: Path of the submodule whose input are the features (`"net.fc"`). `None`: the last layer.
        gate_input: What the gate reads: ``"features"`` of `M_G`, or the ``"input"`` of its first layer if that is linear
            (paper, whose gate is linear in `x`).
        gate_bias: ``b`` at the start. Default 0: equal shares. Large: `M_G` alone; very negative: the expert alone.
        lr_factor: Learning rates of expert and gate over those of `M_G`, which may need others under noise.
        weighting: Weights of the clients: ``"samples"`` (default) or ``"uniform"``.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        Two models that are both sure, of different classes: the gate has the word.

        >>> import torch
        >>> from fedlightning.callbacks.flde import mix_probabilities
        >>> one, other = torch.tensor([[900.0, 0.0]]), torch.tensor([[0.0, 900.0]])
        >>> mix_probabilities(one, other, torch.tensor([[3.0]])).softmax(1)
        tensor([[0.9526, 0.0474]])
    """

    facts = Facts(
        [Change.BESIDE],
        [
            Need("trains two models in one fit", ("local_phases",)),
            Need("puts a gate and an expert beside the user's own network", ("wrap_module",)),
        ],
        keeps=True,
    )

    mix: Literal["probabilities", "outputs"] = "probabilities"
    head: str | list[str] | None = None
    gate_input: Literal["features", "input"] = "features"
    gate_bias: Annotated[float, Range("(-inf, inf)")] = 0.0
    lr_factor: PositiveFloat = 1.0
    weighting: WeightingName | None = None

    def check(self, setup: Setup) -> None:
        """Refuse steps that do not predict by `forward`, losses of no probabilities, and features of unknown width.

        Raises:
            ValueError: With the reason and another way.
        """
        refuse_closures(setup, self.key)
        path, name = gate_path(setup.module, self), type(setup.template).__name__
        width, _ = head_widths(setup.module, path)
        seen = features_at_start(setup, lambda module: {"phi": FeatureTap(module, path)}, self.key)
        if width < 1 or (seen and seen["phi"].shape[1] != width):
            raise ValueError(
                f"The gate of {self.key} reads what goes into `{path}` of {name}, which is to be a linear layer that gets "
                "one row a sample. Set head=... to such a layer, and gate_input='features'."
            )
        batch = setup.data.first_batch()
        if batch is not None:
            self._check_outputs(setup.module, batch, name)

    def _check_outputs(self, module: LightningModule, batch: Any, name: str) -> None:
        module, outputs = copy.deepcopy(module).eval(), []
        module.register_forward_hook(lambda *call: outputs.append(call[-1]))
        with torch.enable_grad(), isolated(self.key), muted(module), frozen_buffers(module):
            loss = probes.training_loss(module, probes.move_batch(module, batch))
        if not outputs or not isinstance(outputs[0], Tensor):
            raise ValueError(
                f"{self.key} mixes what forward returns, and {name}.training_step does not call self(x), or gets no single "
                "tensor from it. Let the step predict by self(x), or use another method, such as Ditto."
            )
        if self.mix == "probabilities" and not _are_logits(loss, outputs[0], targets_in(batch)):
            raise ValueError(
                f"{self.key} mixes probabilities of classes, and the loss of {name} is not a cross entropy over dimension 1 "
                f"of what forward gives, {tuple(outputs[0].shape)}. Use mix='outputs' for regression, or give logits."
            )

    # -- one visit -----------------------------------------------------------------------------------------------------
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set up the expert, the gate and their optimizer beside the client's module."""
        training = ExpertTraining(self.client, self)
        training.start(trainer, pl_module)
        self.client.scratch[self.key] = training

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Take the gradient of the mixture before `M_G` moves; expert and gate step right after `M_G`."""
        self.client.scratch[self.key].accumulate(batch, batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let go of the optimizer of `M_G`."""
        self.client.scratch[self.key].stop()

    def on_send(self, client: Client, update: Update) -> None:
        """Keep expert and gate in the client's state, unless they have diverged."""
        training = client.scratch.pop(self.key, None)
        if training is None:
            return
        try:
            client.state[self.key] = training.state()
        except FloatingPointError as error:  # a client that failed would tell the server what no noise covers
            warn(f"Round {client.round + 1}: {error}. Client '{client.id}' keeps the expert that it had.")

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return the mixture with the `M_G` that the client's module holds at `stage`; `M_G` where no expert was trained."""
        module = client.copy_module()
        return ExpertTraining(client, self).deployed(module) if client.state.get(self.key) else module


def _are_logits(loss: Tensor, outputs: Tensor, targets: Tensor | None) -> bool:
    """Return whether a loss is a function of the probabilities that outputs give, as far as its slope tells."""
    (slope,) = torch.autograd.grad(loss, outputs, allow_unused=True)
    if slope is None or not slope.abs().max() > 0:
        return False
    if outputs.ndim > 1 and outputs.shape[1] > 1:  # the softmax stays where all logits of a sample move by the same
        slack = max(1e-3, 4 * torch.finfo(slope.dtype).eps)  # slopes of bfloat16 have three digits
        return bool(slope.float().sum(1).abs().max() <= slack * slope.abs().max())
    if targets is None or targets.numel() != slope.numel() or not bool(((targets == 0) | (targets == 1)).all()):
        return False
    return bool((slope * (0.5 - targets.to(slope).reshape(slope.shape)) >= 0).all())  # a higher logit means class 1
