"""FD: federated distillation without data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from fedlightning.algorithm import Client, Extra, Job, Message, Plan, Server, Setup, Update, Wire
from fedlightning.callbacks.shared.distillation import both_classes
from fedlightning.callbacks.shared.prototypes import refuse_unprotected
from fedlightning.callbacks.shared.representations import (
    features_at_start,
    head_path,
    head_widths,
    labels_of,
    refuse_classes,
    refuse_logits,
)
from fedlightning.callbacks.shared.server_models import SharesPredictions
from fedlightning.ranges import Range, make_init
from fedlightning.wrappers import FeatureTap


@make_init
class FD(SharesPredictions):
    """Mean predictions per class travel, models do not: a client learns from what the others predict for a label.

    Jeong, Oh, Kim, Park, Bennis, Kim, "Communication-efficient on-device machine learning: federated distillation and
    augmentation under non-IID private data", arXiv 1811.11479, 2018. Without FAug, its augmentation by a generator.

    * Client, every step: `loss = task + gamma (1/B) sum_b CE(t_{y_b}, softmax(f(x_b)))`, where `t_l` is what came for
      label `l`. Samples of a label without one contribute 0, so the first round has no term.
    * Client, over the visit: `F_i[l]`, the mean of `softmax(f(x))` over its samples of label `l`.
    * Server: `t_l` of client `i` is the mean of `F_j[l]` over the *other* clients that have label `l`. If there is none,
      nothing is sent for the label. A client that did not take part counts with what it sent last, and so does a label
      that it did not meet in this visit.
    * Down and up: a row of `C` probabilities per label, at most `C * C` numbers. No weight of a model ever travels, so
      clients may have models of their own, with the same classes.
    * State: the whole model at each client, every client's last rows at the server.
    * Deployed: the client's model. There is no global model.

    With `gamma=0`, or one client, it is local training. The paper's "logit vectors" are outputs after the softmax.
    HtFLlib's code averages raw logits over all clients, the client's own too, and takes them as targets of the cross
    entropy though they are not a distribution; here `exchange="logits"` puts the softmax on the mean, and `loo=False` keeps
    the client's own. One logit is read as that of class 1 beside 0 for class 0.

    Args:
        gamma: Weight of the distillation term. Default 0.1.
        loo: Leave a client's own rows out of its targets (paper). `False`: one mean for all (HtFLlib).
        exchange: What is averaged: `"probabilities"` (paper) or `"logits"`, with a softmax on the mean.
        output_pass: `"during"`: outputs of the visit's training steps (paper). `"after"`: one more pass in eval mode over
            the training data.
        head: Path of the submodule that gives the logits (`"net.fc"`). `None`: the last layer.
        weighting: `"uniform"` over the clients that have a label (paper) or `"samples"` (counts go up too).

    Raises:
        ValueError: If `gamma` is negative, or `exchange`, `output_pass` or `weighting` is unknown.

    Example:
        >>> from torch import nn
        >>> from fedlightning.callbacks import FD
        >>> module = nn.Linear(2, 3)
        >>> FD().shared_names(None, module), list(FD().wire(module).up)
        ([], ['outputs', 'classes'])
    """

    facts = SharesPredictions.facts.extend(by_record=True)

    gamma: Annotated[float, Range("[0, inf)", "0 is local training.")] = 0.1
    loo: bool = True
    exchange: Literal["probabilities", "logits"] = "probabilities"
    output_pass: Literal["during", "after"] = "during"
    head: str | list[str] | None = None
    weighting: Literal["uniform", "samples"] = "uniform"

    def claims(self, role: str) -> bool:
        """Decline the loss term where it is 0 and no step's outputs are needed."""
        unused = role == "training_loss" and self.gamma == 0.0 and self.output_pass == "after"
        return super().claims(role) and not unused

    def check(self, setup: Setup) -> None:
        """Refuse batches without labels, heads that do not give one logit for each class, and callbacks on a model.

        Raises:
            ValueError: If a batch has no labels or labels that the head has no logit for, or `head` is not there, not
                called exactly once a step or gives no rows of logits. Also if another callback works on a model that
                travels, or keeps something beside one: here none does.
        """
        during = "output_pass='during'" if self.output_pass == "during" else ""
        refuse_unprotected(setup, self.key, during, head_widths(setup.module, self.head)[1])
        seen = features_at_start(setup, self.feature_taps, self.key)
        if not seen:
            return
        path = head_path(setup.module, self.head)
        is_layer = any(True for _ in setup.module.get_submodule(path).parameters(recurse=False))
        if is_layer and any(callback.claims("class_means") for callback in setup.callbacks):
            raise ValueError(
                f"FD reads the output of `{path}`, of which gradients of single records are taken, and its term would pass "
                "them by. Name the nn.Sequential that ends with this layer as head."
            )
        labels, where = labels_of(setup.data.first_batch(), self.key), f"`{path}` of {type(setup.template).__name__}"
        refuse_logits(self.key, where, both_classes(seen["logits"]), labels)

    def wire(self, module: nn.Module) -> Wire:
        """Declare a row of outputs per class, and which class it is of, down and up."""
        width = head_widths(module, self.head)[1]
        table: dict[str, Extra] = {
            "outputs": Extra(("rows", width), by_class=True),
            "classes": Extra(("rows",), whole=True, low=0, by_class=True),
        }
        counts = {"counts": Extra(("rows",), counts="seen", whole=True)} if self.weighting == "samples" else {}
        return Wire(down={"outputs": (-1, -1), "classes": (-1,)}, up=table | counts)

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Tap the logits: the output of the head."""
        return {"logits": FeatureTap(module, head_path(module, self.head), at="output")}

    # -- server --------------------------------------------------------------------------------------------------------
    def plan_round(self, server: Server) -> Plan:
        """Plan ordinary visits. When all are back, what they sent replaces what they sent before."""
        yield [Job(client) for client in server.participants()]
        server_state = server.state.get(self.key, {})
        if arrived := server_state.get("arrived"):
            kept = {**server_state.get("tables", {}), **arrived}
            tables = {client: kept[client] for client in server.clients if client in kept}  # one order of summing
            server.state[self.key] = {
                "tables": tables,
                "total": sum(table["weights"][:, None] * table["outputs"].double() for table in tables.values()),
                "weight": sum(table["weights"] for table in tables.values()),
            }

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send the mean rows of the last round, without the client's own."""
        server_state = server.state.get(self.key, {})
        if "total" not in server_state:
            return
        total, weight, table = server_state["total"], server_state["weight"], server_state["tables"].get(job.client)
        if self.loo and table is not None:
            total = total - table["weights"][:, None] * table["outputs"].double()
            weight = weight - table["weights"]
        has_outputs = weight > 0  # sums of whole numbers: exact
        if not has_outputs.any():
            return
        message.extras[self.key] = {
            "outputs": (total[has_outputs] / weight[has_outputs, None]).float(),
            "classes": has_outputs.nonzero()[:, 0].int(),
        }

    # -- client --------------------------------------------------------------------------------------------------------
    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return `task + gamma CE(t_y, softmax(f(x)))`."""
        logits, labels = both_classes(features["logits"]), labels_of(batch, self.key)
        if self.output_pass == "during":
            self._note(client, logits.detach(), labels)
        payload = client.message.extras.get(self.key)
        if payload is None or self.gamma == 0.0:
            return loss
        hit = labels[:, None] == payload["classes"].to(labels.device)  # (B, rows), at most one in a row
        outputs = payload["outputs"].to(logits)
        if self.exchange == "logits":
            outputs = outputs.softmax(1)
        # by index: a product would be in half precision under autocast. Zeros where there is no row contribute 0
        targets = outputs[hit.int().argmax(1)] * hit.any(1, keepdim=True)
        return loss + self.gamma * F.cross_entropy(logits, targets)

    def on_send(self, client: Client, update: Update) -> None:
        """Send the mean output of each label.

        Raises:
            FloatingPointError: If an output is not finite. The core then drops the update.
        """
        if not client.contributed:
            return
        if (protection := client.protection) is not None:
            width = head_widths(client.module, self.head)[1]
            covered = protection.class_means(client, update, lambda: self._vectors(client), width)
            outputs = torch.stack(list(covered.values())).float() if covered else torch.zeros(0, width)
            update.extras[self.key] = {"outputs": outputs, "classes": torch.tensor(list(covered), dtype=torch.int32)}
            return
        if self.output_pass == "after":
            client.scratch.pop(self.key, None)
            for batch, features in client.feature_pass(self.feature_taps):
                self._note(client, both_classes(features["logits"]), labels_of(batch, self.key))
        sums, counts = (tensor.cpu() for tensor in client.scratch[self.key])
        if not torch.isfinite(sums).all():
            raise FloatingPointError("its mean outputs hold NaN or infinite values; lower the learning rate or gamma")
        has_samples = counts > 0
        payload = {
            "outputs": (sums[has_samples] / counts[has_samples, None]).float(),
            "classes": has_samples.nonzero()[:, 0].int(),
        }
        if self.weighting == "samples":
            payload["counts"] = counts[has_samples].int()
        update.extras[self.key] = payload

    def _vectors(self, client: Client) -> Iterator[tuple[Tensor, Tensor]]:
        for batch, features in client.feature_pass(self.feature_taps):
            logits = both_classes(features["logits"])
            yield (logits if self.exchange == "logits" else logits.softmax(1)), labels_of(batch, self.key)

    def _note(self, client: Client, logits: Tensor, labels: Tensor) -> None:
        """Add a batch to the sums by label in fp64. Labels out of range (an `ignore_index`) belong to no class."""
        outputs = (logits if self.exchange == "logits" else logits.softmax(1)).double()
        classes = torch.arange(outputs.shape[1], device=labels.device)
        of_class = (labels == classes[:, None]).to(outputs)  # (C, B); a product, since index_add varies on GPUs
        sums, counts = of_class @ outputs, of_class.sum(1)
        if (before := client.scratch.get(self.key)) is not None:
            sums, counts = before[0] + sums, before[1] + counts
        client.scratch[self.key] = (sums, counts)

    # -- server, after the visits --------------------------------------------------------------------------------------
    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse classes that the outputs do not have."""
        if extras := update.extras.get(self.key):
            refuse_classes(extras["classes"], extras["outputs"].shape[1])

    def on_update(self, server: Server, update: Update) -> None:
        """Note the client's rows. What it sent before stays for labels that it did not meet this time.

        Raises:
            ValueError: If two clients differ in their number of classes.
        """
        extras = update.extras.get(self.key)
        if not extras:
            return
        server_state = server.state.get(self.key, {})
        outputs, rows_of = extras["outputs"], extras["classes"].long()
        width = outputs.shape[1]
        arrived = server_state.get("arrived", {})
        other = next((table for tables in (arrived, server_state.get("tables", {})) for table in tables.values()), None)
        if other is not None and other["outputs"].shape[1] != width:
            raise ValueError(
                f"Client '{update.client}' has {width} classes, others {other['outputs'].shape[1]}. FD needs the same "
                "classes for all; set head=... so that it gives their logits."
            )
        before = server_state.get("tables", {}).get(update.client)
        table = torch.zeros(width, width) if before is None else before["outputs"].clone()
        weights = torch.zeros(width, dtype=torch.float64) if before is None else before["weights"].clone()
        table[rows_of] = outputs
        weights[rows_of] = extras.get("counts", torch.ones(len(rows_of))).double()
        server.state[self.key] = {
            **server_state,
            "arrived": {**arrived, update.client: {"outputs": table, "weights": weights}},
        }
