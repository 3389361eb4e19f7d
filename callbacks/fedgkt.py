"""FedGKT: small networks at clients, a large head at the server, and knowledge in both directions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.algorithm import (
    Client,
    Extra,
    Job,
    Message,
    Phase,
    Plan,
    Server,
    Setup,
    Stage,
    Update,
    Wire,
    isolated,
    probes,
    requires,
)
from fedlightning.callbacks.shared.distillation import inputs_of, kl, logits_of
from fedlightning.callbacks.shared.representations import (
    features_at_start,
    head_path,
    head_widths,
    labels_of,
    looked_at,
    of_one_width,
    refuse_logits,
    refuse_other_widths,
    rows,
)
from fedlightning.callbacks.shared.server_models import SharesPredictions
from fedlightning.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, make_init
from fedlightning.tensors import clone
from fedlightning.wrappers import FeatureTap

TRAIN = "train"
"""Tag of the visits of a round; others only evaluate."""


@make_init
class FedGKT(SharesPredictions):
    """Clients train a small extractor and head; the server trains a large head on their features; each teaches the other.

    He, Annavaram, Avestimehr, "Group knowledge transfer: federated learning of large CNNs at the edge", NeurIPS 2020.

    **Privacy: the features, the logits and the label of every training sample leave the client, in every round.** From
    features inputs can often be reconstructed. The server never sees inputs, but this is not a method for data that may not
    leave.

    * Client: `loss = CE(z_c, y) + alpha T^2 KL(softmax(z_s / T) || softmax(z_c / T))`, where `z_s` are the server's logits of
      the same sample; without any (first round) the task's own loss. Then one pass in eval mode over its samples.
    * Up: of each sample the features (input of the head), the logits `z_c` and the label. Down: of each sample `z_s`.
    * Server: its head `g` on the features that came this round, by
      `CE(g(h), y) + server_alpha T^2 KL(softmax(z_c / T) || softmax(g(h) / T))`; then its logits of these samples.
    * State: the whole small network at each client; the head and its newest logits by client at the server.
    * Deployed (stage L1): the client's extractor below the server's head. Stage L2 scores the small network. There is no
      global model.

    Samples are known by their numbers in the training dataset, so this must give the same sample under a number every time:
    no random augmentation (refused where a batch shows it). The server's head is a perceptron on flattened features;
    the paper's is the larger part of a ResNet. Features of test samples, which the authors' code sends in training, do not
    travel here: to score L1 the head comes to the client, and that is not counted, as no evaluation is. The optimizer of the
    head is new in every round. An absent client keeps the logits that were found for it last (`max_age`).

    Args:
        alpha: Weight of the server's logits in a client's loss. Default 1 (authors).
        server_alpha: Weight of the client's logits in the server's loss. Default 1.
        temperature: `T`. Default 3 (authors).
        server_hidden: Widths of the hidden layers of the server's head. Default 256, 256.
        server_lr: Learning rate of the server's Adam. Default 1e-3.
        server_epochs: Passes over the features of a round. Default 5 (authors: up to 40).
        server_batch_size: Features of a step. Default 64.
        max_age: Rounds after which logits are too old to be sent. `None`: never.
        deploy: `"server"`: the extractor below the server's head. `"edge"`: the small network.
        head: Path of the client's small head (`"net.fc"`). `None`: the last layer.

    Raises:
        ValueError: If a number is negative, or 0 where it cannot be, or `deploy` is unknown.

    Example:
        >>> from torch import nn
        >>> from fedlightning.callbacks import FedGKT
        >>> list(FedGKT().wire(nn.Linear(2, 3)).up)
        ['features', 'logits', 'labels']
    """

    facts = SharesPredictions.facts.extend(
        requires=[
            requires.SteadyData("gives a client's samples the logits that the server found in the round before"),
            requires.NumberedSamples("keeps logits of training samples"),
        ]
    )

    alpha: NonNegativeFloat = 1.0
    server_alpha: NonNegativeFloat = 1.0
    temperature: PositiveFloat = 3.0
    server_hidden: Sequence[PositiveInt] = (256, 256)
    server_lr: PositiveFloat = 1e-3
    server_epochs: PositiveInt = 5
    server_batch_size: PositiveInt = 64
    max_age: PositiveInt | None = None
    deploy: Literal["server", "edge"] = "server"
    head: str | list[str] | None = None

    def __post_init__(self) -> None:
        self.server_hidden = list(self.server_hidden)

    def claims(self, role: str) -> bool:
        """Decline the personal model and the phase where the options do not use them."""
        unused = {"personal_module": self.deploy == "edge", "local_phases": self.alpha == 0.0}
        return super().claims(role) and not unused.get(role, False)

    def check(self, setup: Setup) -> None:
        """Refuse tasks that are not classification by cross entropy, and samples that differ from one reading to the next.

        Raises:
            ValueError: If a batch has no labels, `forward` gives no logits of the head, `training_step` is not their cross
                entropy (with `alpha`), batches are augmented at random, or features differ in width between architectures.
                Also if another callback works on a model that travels, or keeps something beside one: here none does.
        """
        name = type(setup.template).__name__
        features_at_start(setup, lambda module: {"z": FeatureTap(module, head_path(module, self.head))}, self.key)
        refuse_other_widths(setup, lambda module: {"z": FeatureTap(module, head_path(module, self.head))}, self.key)
        batch = setup.data.first_batch()
        if batch is None:
            return
        labels = labels_of(batch, self.key)
        with isolated("another reading"):
            again = setup.data.first_batch()
        if not torch.equal(inputs_of(batch, self.key), inputs_of(again, self.key)):
            raise ValueError(
                "FedGKT keeps the server's logits of each training sample until the next visit, but the data give another "
                "sample every time they are read. Remove random augmentation."
            )
        failure = f"FedGKT cannot read features and logits of {name}"
        with looked_at(setup.module, failure, "Set head=... to the client's small head.") as module:
            batch = probes.move_batch(module, batch)
            features = self._predict(module, batch)
            logits, loss = logits_of(module, batch), probes.training_loss(module, batch)
        refuse_logits(self.key, name, logits[: len(features)], labels)
        entropy = F.cross_entropy(logits, labels)
        if self.alpha and not torch.allclose(loss, entropy.to(loss), rtol=1e-3, atol=1e-4):
            raise ValueError(
                f"FedGKT trains clients by the cross entropy of forward's logits, and training_step of {name} has another "
                f"loss ({float(loss):.4g}, not {float(entropy):.4g}). Use alpha=0, or a task of that kind."
            )

    def wire(self, module: nn.Module) -> Wire:
        """Declare logits of samples and the server's head down; features, logits and labels of samples up."""
        classes = head_widths(module, self.head)[1]
        return Wire(
            down={"logits": (-1, -1), "head": "tensors"},
            up={
                "features": Extra(("samples", -1)),
                "logits": Extra(("samples", classes)),
                "labels": Extra(("samples",), whole=True),
            },
        )

    # -- server --------------------------------------------------------------------------------------------------------
    def plan_round(self, server: Server) -> Plan:
        """Let clients train and send; train the head; keep its logits of what came."""
        answers = yield [Job(client, tag=TRAIN, keep=True) for client in server.participants()]
        sent = {a.client: a.extras[self.key] for a in answers if a.error is None and a.extras.get(self.key)}
        if not sent:
            return
        sent, server_state = of_one_width(server, sent, "features", "logits"), server.state.get(self.key, {})
        features, logits, labels = (
            torch.cat([payload[part] for payload in sent.values()]) for part in ("features", "logits", "labels")
        )
        width, classes = features.shape[1], logits.shape[1]
        head = make_head(width, self.server_hidden, classes, server.seed_of("initialisation"), self.key).to(
            features.dtype
        )
        if "head" in server_state:
            head.load_state_dict(server_state["head"])
        loader = DataLoader(
            TensorDataset(features, logits, labels.long()),
            self.server_batch_size,
            shuffle=True,
            generator=torch.Generator(),
        )
        server.training.fit(
            head,
            loader,
            self._server_loss,
            epochs=self.server_epochs,
            optimizer=partial(Adam, lr=self.server_lr),
            purpose=f"{self.key} head",
        )
        logits_by_client = dict(server_state.get("logits", {}))
        ages = dict(server_state.get("rounds", {}))
        for client, payload in sent.items() if self.alpha else ():
            plain = DataLoader(TensorDataset(payload["features"]), self.server_batch_size)
            logits_by_client[client] = server.training.outputs(head, plain, lambda head, batch: head(batch[0]))
            ages[client] = server.round
        order = [client for client in server.clients if client in logits_by_client]
        server.state[self.key] = {
            "head": clone(head.state_dict()),
            "logits": {client: logits_by_client[client] for client in order},
            "rounds": {client: ages[client] for client in order},
        }

    def _server_loss(self, head: nn.Module, batch: Any) -> Tensor:
        """Return the loss of the server's head."""
        features, logits, labels = batch
        outputs = head(features)
        return F.cross_entropy(outputs, labels) + self.server_alpha * kl(logits, outputs, self.temperature)

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send the logits of the client's samples to train with, or the head to score with."""
        server_state = server.state.get(self.key, {})
        if job.tag != TRAIN:
            if "head" in server_state and self.deploy == "server":
                message.extras[self.key] = {"head": server_state["head"]}
        elif job.client in server_state.get("logits", {}):
            age = server.round - server_state["rounds"][job.client]
            if self.max_age is None or age <= self.max_age:
                message.extras[self.key] = {"logits": server_state["logits"][job.client]}

    # -- client --------------------------------------------------------------------------------------------------------
    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Train with the server's logits, if there are any."""
        logits = client.message.extras.get(self.key, {}).get("logits")
        if logits is None:
            return [Phase()]
        return [Phase(data=client.samples(logits), loss=self._loss)]

    def _loss(self, client: Client, module: LightningModule, paired: Any, batch_idx: int) -> Tensor:
        """Return the loss of a client."""
        logits = logits_of(module, paired.batch)
        labels = labels_of(paired.batch, self.key)
        return F.cross_entropy(logits, labels) + self.alpha * kl(paired.targets.to(logits), logits, self.temperature)

    def on_send(self, client: Client, update: Update) -> None:
        """Send features, logits and labels of all training samples, in the order of their numbers.

        Raises:
            FloatingPointError: If a feature or logit is not finite. The core then drops the update.
        """
        if client.message.tag != TRAIN or not client.contributed:
            return
        labels = torch.cat([labels_of(batch, self.key) for batch in client.samples()])
        classes = 0

        def predict(module: LightningModule, batch: Any) -> Tensor:
            nonlocal classes
            classes = logits_of(module, batch).shape[1]
            return self._predict(module, batch)

        outputs = client.outputs(client.samples(), predict)
        if not torch.isfinite(outputs).all():
            raise FloatingPointError("its features or logits hold NaN or infinite values; lower the learning rate")
        update.extras[self.key] = {
            "features": outputs[:, :-classes].contiguous(),
            "logits": outputs[:, -classes:].contiguous(),
            "labels": labels,
        }

    def _predict(self, module: LightningModule, batch: Any) -> Tensor:
        """Return features and logits of a batch, side by side."""
        with FeatureTap(module, head_path(module, self.head)) as tap:
            logits = logits_of(module, batch)
            return torch.cat([rows(tap.features), logits], 1)

    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse labels that the logits do not have."""
        if (extras := update.extras.get(self.key)) and int(extras["labels"].max()) >= extras["logits"].shape[1]:
            raise ValueError(
                f"it has a label {int(extras['labels'].max())}, and logits of {extras['logits'].shape[1]} classes"
            )

    # -- evaluation ----------------------------------------------------------------------------------------------------
    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return the extractor below the server's head; the small network before there is one, and at stage L2."""
        entries = client.message.extras.get(self.key, {}).get("head")
        if entries is None:
            return client.module
        module = client.copy_module()
        outer, _, inner = head_path(module, self.head).rpartition(".")
        sizes = [value.shape for name, value in entries.items() if name.endswith("weight")]
        head = make_head(sizes[0][1], [size[0] for size in sizes[:-1]], sizes[-1][0], 0, self.key)
        head = head.to(next(iter(entries.values())).dtype)
        head.load_state_dict(entries)
        setattr(module.get_submodule(outer), inner, head.to(module.device))
        return module


def make_head(width: int, hidden: Sequence[int], classes: int, seed: int, key: str) -> nn.Sequential:
    """Return the server's head as it begins: a perceptron on flattened features, of the run's seed.

    Example:
        >>> make_head(8, [4], 3, 0, "FedGKT")(torch.zeros(2, 2, 4)).shape
        torch.Size([2, 3])
    """
    sizes = [width, *hidden, classes]
    layers: list[nn.Module] = [nn.Flatten()]
    with isolated(seed, key, "head"):
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
