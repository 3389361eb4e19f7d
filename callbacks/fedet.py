"""Fed-ET: small models of clients teach a large model of the server."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam

from fedlightning.algorithm import (
    GLOBAL,
    Change,
    Facts,
    Need,
    Newcomers,
    Plan,
    Server,
    WeightingName,
    contributors,
)
from fedlightning.callbacks.shared.distillation import PublicLogits, logits_of
from fedlightning.callbacks.shared.server_models import ModelPerArchitecture
from fedlightning.layers import as_names, expand
from fedlightning.ranges import NonNegativeFloat, NonNegativeInt, PositiveInt, Range, make_init
from fedlightning.tensors import clone, module_state

LARGE = "server"
"""Key of the server's model where clients have its architecture too."""

OWN_ENSEMBLE = Need(
    "averages whole models for each architecture and teaches a large one by them",
    (Change.PARTS, "reduce", "shared_names", "global_module", "personal_module"),
)
OWN_STAGE_G = Need("has a large model of its own for stage G", (Change.GLOBAL_SELECTION,), "use LocalCheckpoint()")


@make_init
class FedET(ModelPerArchitecture):
    """Clients train small models of differing architectures; on public data they teach a large model of the server's own.

    Cho, Manoel, Joshi, Sim, Dimitriadis, "Heterogeneous ensemble knowledge transfer for training large models in federated
    learning", IJCAI 2022.

    * Client: local training of the model of its architecture.
    * Server, small models: for each architecture the weighted mean of its clients' models, as in FedAvg.
    * Server, large model, on public data without labels: each returned model weighs
      `a_i(x) = Var_c z_i(x) / sum_j Var_c z_j(x)`, the variance of its logits over the classes (its confidence);
      `z = sum_i a_i z_i`, pseudo-label `y = argmax z`. Models whose own argmax is not `y` are the diverse ones: `z_div` is
      their mean by the same weights. `steps` times, on a batch:
      `loss = CE(f(x), y) + diversity KL(softmax(z_div) || softmax(f(x)))`; a sample on which all agree has no second term.
    * Down: the model of the client's architecture. Up: `w_i`. State: one model for each architecture, and the large one.
    * Deployed: the large model at the server (stage G); each client deploys the mean of its architecture (L1).

    Give the large model as `ClientModels(..., server="large")`. Where clients have that architecture too, or all have one,
    the server's model is one more of it, which begins as theirs and is never averaged.

    The paper lets the representation layers of the large model go back to the small ones, which it designs to have them in
    common. `transfer` names such entries; they must be in all models under one name and in one shape, and replace the means
    after the large model has trained. The layers above have been trained on the means' representations, and have the next
    visit to get used to the new ones. `None`: the means stay. Optimizer and number of steps of the large model are options
    here; its teachers are the round's models, in eval mode, on samples without augmentation.

    Args:
        steps: Steps of the large model in a round. Default 200. 0: FedAvg for each architecture.
        lr: Adam's learning rate. Default 1e-3.
        batch_size: Public samples of a step. Default 128.
        public_samples: Public samples of a round; all (`None`, default) or a drawn subset.
        diversity: Weight of the second term, lambda. Default 0.05 (paper).
        transfer: Names or prefixes of entries that go from the large model to all others.
        weighting: Weights of the means: `"samples"` (default) or `"uniform"`.

    Raises:
        ValueError: If a number is negative, or 0 where it cannot be.

    Example:
        >>> from fedlightning.callbacks import FedET
        >>> FedET(diversity=0.1, transfer=["net.features"]).transfer
        ['net.features']
    """

    @property
    def facts(self) -> Facts:
        """Whole models make the ensemble, and the large one is FedET's; clients that join bring their architectures."""
        needs, required = [OWN_ENSEMBLE, OWN_STAGE_G], [PublicLogits(softmax="steps")]
        return Facts(
            needs=needs, requires=required, mixes_architectures=True, newcomers=Newcomers(join=self.make_models)
        )

    steps: NonNegativeInt = 200
    lr: Annotated[float, Range("(0, inf)", "steps=0 leaves the large model as it is.")] = 1e-3
    batch_size: PositiveInt = 128
    public_samples: NonNegativeInt | None = None
    diversity: NonNegativeFloat = 0.05
    transfer: str | list[str] | None = None
    weighting: WeightingName | None = None

    def on_federation_start(self, server: Server) -> None:
        """Make the models.

        Raises:
            ValueError: If parts of models stay with the clients, or `transfer` names entries that not all models have.
        """
        self.make_all_models(server)
        large = self.large(server)
        if large not in server.models:
            server.models.add(large, server.architecture().name)
        self._transferred(server)

    def large(self, server: Server) -> str:
        """Return the key of the server's own model."""
        architecture = server.architecture()
        return LARGE if any(server.architecture_of(client) is architecture for client in server.clients) else GLOBAL

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the large model."""
        key = self.large(server)
        return server.module_with(server.models[key], key)

    def _transferred(self, server: Server) -> list[str]:
        """Return the names of the entries that go from the large model to the others."""
        if self.transfer is None:
            return []
        large = server.architecture(self.large(server))
        names = expand(as_names(self.transfer), large.kinds)
        for key in server.models:
            architecture = server.architecture(key)
            differing = architecture.first_difference(large, tuple(names))
            if differing is not None:
                have = tuple(architecture.shapes[differing]) if differing in architecture.shapes else "missing"
                raise ValueError(
                    f"FedET(transfer={self.transfer!r}): '{differing}' is {tuple(large.shapes[differing])} in the server's "
                    f"model and {have} in '{architecture.name}'. Transfer entries that all models have in one shape, or "
                    "transfer=None."
                )
        return names

    # -- a round -------------------------------------------------------------------------------------------------------
    def plan_round(self, server: Server) -> Plan:
        """Let clients train; average; then let what came teach the large model."""
        answers = yield [server.job(client, keep=bool(self.steps)) for client in server.participants()]
        yield []  # the means
        members = [(a.model, a.state) for a in contributors(answers) if a.state]
        if not self.steps or not members:
            return
        ids = (
            torch.arange(server.training.public_size)
            if self.public_samples is None
            else server.training.public_ids(self.public_samples)
        )
        logits = []
        for model, state in members:
            teacher = server.module_with({**server.models[model], **state}, model)
            logits.append(server.training.outputs(teacher, server.training.public(ids), logits_of))
        key = self.large(server)
        student = server.module_with(server.models[key], key)
        server.training.fit(
            student,
            server.training.public(ids, targets=lessons(torch.stack(logits)), batch_size=self.batch_size, shuffle=True),
            self._loss,
            steps=self.steps,
            optimizer=partial(Adam, lr=self.lr),
            purpose=f"{self.key} large",
        )
        kinds = server.architecture(key).kinds
        trained = {name: value for name, value in module_state(student).items() if kinds[name] != "frozen"}
        server.models[key] = {**server.models[key], **clone(trained)}
        names = self._transferred(server)
        for model in server.models if names else ():
            moved = {name: server.models[key][name].clone() for name in names}
            server.models[model] = {**server.models[model], **moved}

    def _loss(self, module: LightningModule, paired: Any) -> Tensor:
        """Return the loss of the large model on a batch."""
        logits = logits_of(module, paired.batch)
        labels, diverse, z = paired.targets[:, 0].long(), paired.targets[:, 1], paired.targets[:, 2:].to(logits)
        loss = F.cross_entropy(logits, labels)
        if self.diversity == 0.0:
            return loss
        apart = F.kl_div(logits.log_softmax(1), z.log_softmax(1), reduction="none", log_target=True).sum(1)
        return loss + self.diversity * (apart * diverse).mean()


def confidence(logits: Tensor) -> Tensor:
    """Return each model's weight for each sample, `(models, n)`: the variance of its logits over the sum of all models'.

    Where all variances are 0 the weights are uniform.

    Example:
        >>> confidence(torch.tensor([[[3.0, -3.0]], [[0.0, 2.0]]])).tolist()
        [[0.8999999761581421], [0.10000000149011612]]
    """
    variance = logits.double().var(2, correction=0)
    total = variance.sum(0)
    weights = torch.where(total > 0, variance / total.clamp_min(1e-300), 1.0 / len(logits))
    return weights.to(logits.dtype)


def lessons(logits: Tensor) -> Tensor:
    """Return what the models teach for each sample: label, 1 where models disagree, and the diverse logits.

    Example:
        >>> lessons(torch.tensor([[[3.0, -3.0]], [[0.0, 2.0]]])).tolist()
        [[0.0, 1.0, 0.0, 2.0]]
    """
    weights = confidence(logits).double()
    labels = (weights[:, :, None] * logits.double()).sum(0).argmax(1)
    others = (logits.argmax(2) != labels).double()  # (models, n)
    weighted = weights * others
    weighted = torch.where(weighted.sum(0) > 0, weighted, others)  # those that differ may all have variance 0
    total = weighted.sum(0).clamp_min(1e-300)[:, None]
    z = (weighted[:, :, None] * logits.double()).sum(0) / total
    return torch.cat([labels[:, None].double(), others.any(0).double()[:, None], z], 1).to(logits.dtype)
