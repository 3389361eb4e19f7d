"""Fusing clients' models by distillation: one model for each architecture, taught by an ensemble on public data."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    SyncBatchNorm,
)

from fedlightning.algorithm import (
    Change,
    Facts,
    Need,
    Newcomers,
    Server,
    Setup,
    State,
    Update,
    generator,
)
from fedlightning.callbacks.fednova import FedNova
from fedlightning.callbacks.shared.distillation import NoSinglePublicSample, PublicLogits, kl, logits_of
from fedlightning.callbacks.shared.representations import labels_of
from fedlightning.callbacks.shared.server_models import ModelPerArchitecture
from fedlightning.tensors import clone, module_state

Member = tuple[str, State]
"""A model of an ensemble: the key of the server's model whose architecture it has, and its entries."""
NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm, InstanceNorm1d, InstanceNorm2d, InstanceNorm3d)
"""Layers with running statistics."""
WHOLE_MODELS_ONCE = Need(
    "fuses the whole models that participants send once a round into one for each architecture",
    (Change.PARTS, "plan_round", "reduce", "global_module", "shared_names"),
)
"""Nothing else may make the server's models, or of parts of models."""
MIN_PROBABILITY = 1e-30
"""Least probability of a mean of probabilities: its logarithm must be finite."""


class EnsembleFusion(ModelPerArchitecture):
    """Base of methods in which the server distils an ensemble of the returned models into their mean.

    The server keeps one model for each architecture that clients have, under the architecture's name; that of the global
    model's architecture is the global one. When a round's mean of an architecture is there, it becomes a student, and the
    ensemble of *all* architectures its teacher: `loss = T^2 KL(softmax(t(x) / T) || softmax(f(x) / T))` on public data, where
    the teachers' outputs on all public samples are found once a round, in eval mode.

    A subclass says who is in the ensemble (:meth:`ensemble`) and how the student is trained (:meth:`distil`); it has the
    arguments `combine`, `temperature`, `validation` and `update_statistics` of :class:`~fedlightning.callbacks.FedDF`.
    """

    batch_size: int
    combine: Literal["logits", "probabilities"]
    temperature: float
    validation: float
    update_statistics: bool

    @property
    def facts(self) -> Facts:
        """Whole models come once a round; clients that join bring their architectures with them."""
        return Facts(
            needs=[WHOLE_MODELS_ONCE],
            requires=[
                PublicLogits(labels="validation", softmax="distils"),
                NoSinglePublicSample(
                    samples="_trained",
                    batch_size="batch_size",
                    instead=", or update_statistics=False",
                    when="_updates_statistics",
                ),
            ],
            mixes_architectures=True,
            newcomers=Newcomers(join=self.make_models),
        )

    @property
    def distils(self) -> bool:
        """Whether there is anything to do beside the mean."""
        raise NotImplementedError

    @property
    def _updates_statistics(self) -> bool:
        return self.distils and self.update_statistics

    def _trained(self, size: int) -> int:
        """Return how many of the public samples a student trains on."""
        return size - _count_held_out(size, self.validation)

    def ensemble(self, server: Server) -> list[Member]:
        """Return the ensemble of this round."""
        raise NotImplementedError

    def distil(self, server: Server, student: LightningModule, loader: Any, loss: Any) -> None:
        """Train a student in place."""
        raise NotImplementedError

    # -- before round 1 ------------------------------------------------------------------------------------------------
    def check(self, setup: Setup) -> None:
        """Refuse FedNova."""
        if any(isinstance(other, FedNova) for other in setup.callbacks):
            raise ValueError(
                f"FedNova rescales the mean of the updates, and {self.key} distils into it: the order of the list would "
                f"change the models. Remove FedNova or {self.key}."
            )

    def on_federation_start(self, server: Server) -> None:
        """Make the models."""
        names = {server.architecture_of(client).name for client in server.clients}
        if (server_name := server.architecture().name) not in names:
            raise ValueError(
                f"{self.key} fuses a model for each architecture that clients have, and '{server_name}' is the server's "
                "alone. Leave server=... of ClientModels out."
            )
        self.make_all_models(server)

    # -- in a round ----------------------------------------------------------------------------------------------------
    def on_update(self, server: Server, update: Update) -> None:
        """Remember a model until the round is over."""
        if self.distils and server.weight(update) > 0 and update.state:
            state = server.state.get(self.key, {})
            member = {"model": update.model, "state": update.state, "weight": server.weight(update)}
            server.state[self.key] = {**state, "members": {**state.get("members", {}), update.client: member}}

    def on_reduced(self, server: Server, state: State) -> State:
        """Return the student's entries after distillation, instead of the clients' mean."""
        members = server.state.get(self.key, {}).get("members")
        if not self.distils or not members:
            return state
        if len(members) == 1:  # it would be its own teacher; gradients of rounding would move it
            return state
        targets = self._targets(server)
        if targets is None:
            return state
        model = server.combining
        student = server.module_with({**server.models[model], **state}, model)
        still = [] if self.update_statistics else [part for part in student.modules() if isinstance(part, NORMS)]

        def loss(module: nn.Module, paired: Any) -> Tensor:
            for part in still:
                part.eval()
            return kl(paired.targets, logits_of(student, paired.batch), self.temperature)

        ids = self.ids(server)[0]
        loader = server.training.public(ids, targets=targets[ids], batch_size=self.batch_size, shuffle=True)
        self.distil(server, student, loader, loss)
        kinds = server.architecture(model).kinds
        return clone({name: value for name, value in module_state(student).items() if kinds[name] != "frozen"})

    def on_round_end(self, server: Server) -> None:
        """Forget the models that came, and the ensemble's outputs."""
        server_state = server.state.pop(self.key, {})
        if kept := {name: value for name, value in server_state.items() if name not in ("members", "targets")}:
            server.state[self.key] = kept

    # -- the ensemble --------------------------------------------------------------------------------------------------
    def _targets(self, server: Server) -> Tensor | None:
        """Return the ensemble's outputs on all public samples, as logits; `None` without a teacher. Found once a round."""
        server_state = server.state[self.key]
        if "targets" not in server_state:
            outputs = [self.outputs(server, model, entries) for model, entries in self.ensemble(server)]
            mean = None
            if outputs and self.combine == "logits":
                mean = (sum(logits.double() for logits in outputs) / len(outputs)).float()  # type: ignore[union-attr]
            elif outputs:
                total = sum((logits.double() / self.temperature).softmax(1) for logits in outputs) / len(outputs)
                assert isinstance(total, Tensor)
                mean = self.temperature * total.clamp_min(MIN_PROBABILITY).log().float()
            server.state[self.key] = {**server_state, "targets": mean}
        targets: Tensor | None = server.state[self.key]["targets"]
        return targets

    def outputs(self, server: Server, model: str, entries: State, ids: Tensor | None = None) -> Tensor:
        """Return a teacher's logits on public samples."""
        module = server.module_with({**server.models[model], **entries}, model)
        return server.training.outputs(module, server.training.public(ids), logits_of)

    # -- validation on public data -------------------------------------------------------------------------------------
    def ids(self, server: Server) -> tuple[Tensor, Tensor]:
        """Return the positions of public samples to train on and of those to validate on, the same in every round."""
        size = server.training.public_size
        count = _count_held_out(size, self.validation)
        order = torch.randperm(size, generator=generator(server.seed, self.key, "validation"))
        return order[count:].sort().values, order[:count].sort().values

    def accuracy(self, server: Server, module: LightningModule) -> tuple[float, int]:
        """Return the share of validation samples that a model predicts right, and the number of classes."""
        ids = self.ids(server)[1]
        labels = torch.cat([labels_of(batch, self.key).cpu() for batch in server.training.public(ids)])
        logits = server.training.outputs(module, server.training.public(ids), logits_of)
        return float((logits.argmax(1) == labels).double().mean()), logits.shape[1]


def _count_held_out(size: int, validation: float) -> int:
    """Return the number of public samples that are held out."""
    return min(max(1, round(validation * size)), size - 1) if validation else 0
