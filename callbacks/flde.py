"""FL+DE."""

from __future__ import annotations

import copy
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fedlightning.algorithm import (
    Change,
    Client,
    Facts,
    FederatedCallback,
    Need,
    Setup,
    Stage,
    Update,
    WeightingName,
    isolated,
    probes,
    warn,
)
from fedlightning.callbacks.flde_mixture import ExpertTraining, gate_path
from fedlightning.callbacks.shared.representations import features_at_start, head_widths, targets_in
from fedlightning.callbacks.shared.second_model import refuse_closures
from fedlightning.ranges import PositiveFloat, Range
from fedlightning.wrappers import FeatureTap, frozen_buffers, muted


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
        >>> from fedlightning.callbacks.flde_mixture import mix_probabilities
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

    def __init__(
        self,
        mix: Literal["probabilities", "outputs"] = "probabilities",
        head: str | list[str] | None = None,
        gate_input: Literal["features", "input"] = "features",
        gate_bias: Annotated[float, Range("(-inf, inf)")] = 0.0,
        lr_factor: PositiveFloat = 1.0,
        weighting: WeightingName | None = None,
    ) -> None:
        self.mix = mix
        self.head = head
        self.gate_input = gate_input
        self.gate_bias = gate_bias
        self.lr_factor = lr_factor
        self.weighting = weighting

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
                f"{self.key} mixes probabilities of classes, and the loss of {name} is no cross entropy over dimension 1 of "
                f"what forward gives, {tuple(outputs[0].shape)}. Use mix='outputs' for regression, or give logits."
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
