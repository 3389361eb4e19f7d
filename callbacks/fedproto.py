"""FedProto."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from fedlightning.algorithm import Client, Extra, Job, Message, Newcomers, Plan, Server, Setup, Stage, Update, Wire
from fedlightning.callbacks.shared.prototypes import ClassMeans, fill_head, pack, refuse_unprotected, unpack
from fedlightning.callbacks.shared.representations import (
    Features,
    Labels,
    head_path,
    head_widths,
    labels_of,
    refuse_classes,
    refuse_width,
    rows,
)
from fedlightning.callbacks.shared.server_models import SharesPredictions
from fedlightning.ranges import Range, make_init
from fedlightning.wrappers import FeatureTap


@make_init
class FedProto(SharesPredictions):
    """Prototypes travel, models do not: clients agree on where the classes lie in the space of representations.

    Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: federated prototype learning across heterogeneous clients", AAAI
    2022.

    * Client: ``loss = task + lam R`` with ``R = (1/(B d)) sum_b ||z_b - C_{y_b}||^2``. Samples of a class without a
      global prototype contribute 0, so the first round has no term.
    * Client, after training: ``C_ij``, the mean of ``z`` over its samples of class ``j``.
    * Server: ``C_j``, the mean over the clients that reported ``j``. A class that nobody reported keeps its prototype.
    * Down: one vector per class, the mean representation ``C_j``. Up: one per class of the client. No weight of a model
      ever travels, so clients may have models of their own with one width of representation.
    * State: the whole model at each client, the global prototypes at the server.
    * Deployed: the client's model. There is no global model.

    Args:
        lam: Weight of R. Default 1 (paper).
        head: Path of the submodule that turns representations into predictions (``"net.fc"``). ``None`` (default): the
            last layer.
        proto_pass: ``"after"`` (default): one more pass in eval mode after training. ``"during"``: representations of
            the last epoch's training steps (the authors' code).
        predictor: ``"head"`` (default): the model's own predictions. ``"nearest"``: the class with the nearest global
            prototype. The head must then be an ``nn.Linear`` with bias: it is given the prototypes as its weights.
        restrict: Predict only the client's own classes with ``predictor="nearest"``. Default: yes.
        weighting: ``"uniform"`` over the owners of a class (the authors' code, default) or ``"samples"`` (counts go up
            too).

    Raises:
        ValueError: If ``lam`` is negative, or ``proto_pass`` or ``predictor`` is unknown.

    Example:
        >>> from torch import nn
        >>> from fedlightning.callbacks import FedProto
        >>> module = nn.Linear(2, 3)
        >>> FedProto().shared_names(None, module), list(FedProto().wire(module).up)
        ([], ['prototypes', 'classes'])
    """

    facts = SharesPredictions.facts.extend(
        newcomers=Newcomers(
            no_model="shares prototypes and no model, and has no model for a client that never trained"
        ),
        requires=[Features(of="one width"), Labels()],
        by_record=True,
    )

    lam: Annotated[float, Range("[0, inf)", "0 is local training.")] = 1.0
    head: str | list[str] | None = None
    proto_pass: Literal["after", "during"] = "after"
    predictor: Literal["head", "nearest"] = "head"
    restrict: bool = True
    weighting: Literal["uniform", "samples"] = "uniform"

    def claims(self, role: str) -> bool:
        """Decline the loss term and the personal model where the options do not use them."""
        unused = {
            "training_loss": self.lam == 0.0 and self.proto_pass == "after",
            "personal_module": self.predictor == "head",
        }
        return super().claims(role) and not unused.get(role, False)

    def check(self, setup: Setup) -> None:
        """Refuse batches without labels, and heads that cannot be tapped or filled with prototypes.

        Raises:
            ValueError: If a batch has no labels, ``head`` is not there or not called exactly once a step, or it is no
                linear layer with bias where ``predictor="nearest"``. Also if another callback works on a model that
                travels, or keeps something beside one (here none does), or if clients' models have representations of
            different widths.
        """
        during = "proto_pass='during'" if self.proto_pass == "during" else ""
        refuse_unprotected(setup, self.key, during, head_widths(setup.module, self.head)[1])
        path = head_path(setup.module, self.head)
        head = setup.module.get_submodule(path)
        if self.predictor == "nearest" and not (isinstance(head, nn.Linear) and head.bias is not None):
            raise ValueError(
                f"FedProto(predictor='nearest') writes prototypes into an nn.Linear with bias, but `{path}` of "
                f"{type(setup.template).__name__} is a {type(head).__name__}. Name the last linear layer as head, or "
                "use predictor='head'."
            )

    def wire(self, module: nn.Module) -> Wire:
        """Declare one vector per class, and which class it is of, down and up."""
        prototypes: dict[str, Extra] = {
            "prototypes": Extra(("classes", -1), by_class=True),
            "classes": Extra(("classes",), whole=True, by_class=True),
        }
        counts = {"counts": Extra(("classes",), counts="samples", whole=True)} if self.weighting == "samples" else {}
        return Wire(down={"prototypes": (-1, -1), "classes": (-1,)}, up=prototypes | counts)

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Tap the representation: the input of the head."""
        return {"z": FeatureTap(module, head_path(module, self.head))}

    # -- server --------------------------------------------------------------------------------------------------------
    def plan_round(self, server: Server) -> Plan:
        """Plan ordinary visits. When all are back, the new prototypes replace the old ones."""
        yield [Job(client) for client in server.participants()]
        server_state = server.state.get(self.key, {})
        if "sums" in server_state:
            new = {label: total / weight for label, (total, weight) in server_state["sums"].items()}
            server.state[self.key] = pack(unpack(server_state) | new)

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send the prototypes of the last round."""
        server_state = server.state.get(self.key, {})
        if len(server_state.get("classes", ())):
            message.extras[self.key] = {"prototypes": server_state["prototypes"], "classes": server_state["classes"]}

    # -- client --------------------------------------------------------------------------------------------------------
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the means of an epoch anew. Those of the last epoch remain."""
        self.client.scratch[self.key] = ClassMeans()

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return ``task + lam R``."""
        z, labels = rows(features["z"]), labels_of(batch, self.key)
        if self.proto_pass == "during":
            client.scratch[self.key].add(z.detach(), labels)
        payload = client.message.extras.get(self.key)
        if payload is None or self.lam == 0.0:
            return loss
        hit = labels[:, None] == payload["classes"].to(z.device)  # (B, classes), at most one in a row
        of_label = payload["prototypes"].to(z)[hit.int().argmax(1)]
        target = torch.where(hit.any(1, keepdim=True), of_label, z.detach())
        return loss + self.lam * (z - target).square().mean()

    def on_send(self, client: Client, update: Update) -> None:
        """Send the client's own prototypes.

        Raises:
            FloatingPointError: If a prototype is not finite. The core then drops the update.
        """
        if not client.contributed:
            return
        if (protection := client.protection) is not None:
            classes = head_widths(client.module, self.head)[1]
            covered = protection.class_means(client, update, lambda: self._vectors(client), classes)
            update.extras[self.key] = pack(covered)
            client.state[self.key] = {"classes": sorted(covered)}
            return
        means = client.scratch[self.key]
        if self.proto_pass == "after":
            means = ClassMeans()
            for z, labels in self._vectors(client):
                means.add(z, labels)
        payload = pack(means.result())
        if not torch.isfinite(payload["prototypes"]).all():
            raise FloatingPointError("its prototypes hold NaN or infinite values; lower the learning rate or lam")
        if self.weighting == "samples":
            payload["counts"] = torch.tensor([means.sums[label][1] for label in sorted(means.sums)], dtype=torch.int32)
        update.extras[self.key] = payload
        client.state[self.key] = {"classes": sorted(means.sums)}

    def _vectors(self, client: Client) -> Iterator[tuple[Tensor, Tensor]]:
        for batch, features in client.feature_pass(self.feature_taps):
            yield rows(features["z"]), labels_of(batch, self.key)

    # -- server, after the visits --------------------------------------------------------------------------------------
    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse a class that comes twice, and prototypes of another width."""
        if extras := update.extras.get(self.key):
            refuse_classes(extras["classes"])
            width = head_widths(server.architecture_of(update.client).module, self.head)[0]
            before = server.state.get(self.key, {}).get("prototypes")
            if before is not None and len(before):
                width = before.shape[1]
            elif width > 0 and extras["prototypes"].shape[1] % width == 0:
                width = -1  # the head may see several places of a sample, whose features are one row here
            refuse_width("prototypes", extras["prototypes"], width)

    def on_update(self, server: Server, update: Update) -> None:
        """Add the client's prototypes to the sums of their classes.

        Raises:
            ValueError: If representations of two clients differ in width.
        """
        extras = update.extras.get(self.key)
        if not extras:
            return
        server_state = server.state.get(self.key, {})
        sums = dict(server_state.get("sums", {}))
        counts = extras.get("counts", torch.ones_like(extras["classes"])).tolist()
        for (label, vector), weight in zip(unpack(extras).items(), counts, strict=True):
            total, weights = sums.get(label, (torch.zeros_like(vector, dtype=torch.float64), 0))
            if total.shape != vector.shape:
                raise ValueError(
                    f"Client '{update.client}' has representations of {len(vector)} numbers, others of {len(total)}. "
                    "FedProto needs one width for all; set head=... so that it is."
                )
            sums[label] = [total + weight * vector, weights + weight]
        server.state[self.key] = {**server_state, "sums": sums}

    # -- evaluation ----------------------------------------------------------------------------------------------------
    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return the model with its own head or, with ``predictor="nearest"``, one that predicts the nearest prototype.

        ``argmin_j ||z - C_j||^2 = argmax_j 2 C_j z - ||C_j||^2`` is a linear head.
        """
        payload = client.message.extras.get(self.key)
        classes = client.state.get(self.key, {}).get("classes")
        if payload is None or classes is None:
            return client.module
        prototypes = {label: c for label, c in unpack(payload).items() if not self.restrict or label in classes}
        module = client.copy_module()
        fill_head(module.get_submodule(head_path(module, self.head)), prototypes)
        return module
