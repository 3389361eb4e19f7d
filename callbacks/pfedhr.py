"""pFedHR: clients' networks are taken apart at the server and put together anew, to teach them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fedlightning.algorithm import Client, Job, Message, Plan, Server, Setup, State, Update, Wire, address, probes, warn
from fedlightning.callbacks.shared.blocks import (
    BLOCKS,
    Part,
    Stitched,
    assembled,
    candidates,
    check_cut,
    contrastive,
    cut,
    describe,
    grouped,
    nearest_teachers,
    rebuild,
    row_of,
    similarities,
    stitch_sizes,
    unit_gram,
    view,
)
from fedlightning.callbacks.shared.distillation import PublicLogits, both_classes, inputs_of, kl, logits_of
from fedlightning.callbacks.shared.representations import features_at_start, head_path, labels_of
from fedlightning.callbacks.shared.server_models import SharesPredictions
from fedlightning.ranges import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    idle_with,
    make_init,
)
from fedlightning.tensors import first_nonfinite, load_state
from fedlightning.wrappers import FeatureTap


class Reassembly:
    """The candidates of one round.

    Args:
        algorithm: Gives the options.
        server: The server.
        models: By client, the state that it sent.

    Attributes:
        candidates: By key, the description of each (:func:`~fedlightning.callbacks.shared.blocks.describe`).
        given: By client, the key of its candidate.
    """

    def __init__(self, algorithm: pFedHR, server: Server, models: Mapping[str, State]) -> None:
        self.algorithm, self.server, self.key = algorithm, server, algorithm.key
        self.loader = server.training.public()
        self.labelled = self._has_labels() if algorithm.labels is None else algorithm.labels
        self.nets = [self._row(client, state) for client, state in models.items()]
        self.parts = [
            Part(place, block.depth, block.rank, block.kind)
            for place, net in enumerate(self.nets)
            for block in net.parts
        ]
        names = list(server.models.architectures)
        self.indices = [names.index(server.architecture_of(client).name) for client in models]
        self.candidates: dict[str, State] = {}
        self.choice_by_client: dict[str, str] = {}
        outputs = [self._build(number, places) for number, places in enumerate(self._drawn())]
        if not outputs:
            return
        for client, net in zip(models, self.nets, strict=True):
            if algorithm.tune_models:
                self._tune(net, f"model {client}")
        best = nearest_teachers([server.training.outputs(net, self.loader, logits_of) for net in self.nets], outputs)
        keys = list(self.candidates)
        self.choice_by_client = {client: keys[place] for client, place in zip(models, best, strict=True)}

    def _has_labels(self) -> bool:
        """Return whether public data have labels."""
        try:
            return len(labels_of(next(iter(self.loader)), self.key)) > 0
        except ValueError:
            return False

    def _row(self, client: str, state: State) -> Stitched:
        """Return a client's network as a row of its blocks."""
        module = self.server.blueprint.build(client)
        load_state(module, state)
        batch = probes.move_batch(module, next(iter(self.loader)))
        x = inputs_of(batch, self.key)[:2].to(next(module.parameters()).dtype)
        return row_of(module, cut(module, x), self.algorithm.relu)

    def groups(self) -> list[int]:
        """Return the group of each block by what goes in and comes out on public data."""
        server, algorithm = self.server, self.algorithm
        loader = server.training.public(server.training.public_ids(algorithm.cka_samples))
        into, out = [], []
        for net in self.nets:
            shapes = [net.whole, *(block.out for block in net.parts)]
            rows = server.training.outputs(net, loader, _activations).split(
                [math.prod(shape) for shape in shapes], dim=1
            )
            grams = [unit_gram(part) for part in rows]
            into += grams[:-1]
            out += grams[1:]
        seed = address(server.seed, server.round, self.key)
        return grouped(similarities(into, out), algorithm.num_groups, algorithm.grouping, seed)

    def _drawn(self) -> list[list[int]]:
        """Return the places of the candidates' blocks."""
        algorithm = self.algorithm

        def fits(places: Sequence[int]) -> bool:
            chosen = [self.nets[self.parts[place].client].parts[self.parts[place].depth] for place in places]
            sizes = stitch_sizes(chosen, self.nets[0].whole).values()
            # without labels nothing teaches a new classifier what its outputs mean
            return (self.labelled or chosen[-1].is_last) and all(m * n <= algorithm.max_stitch for m, n in sizes)

        kinds = {part.kind for part in self.parts}
        required = [kind for kind in ("conv", "fc") if kind in kinds]
        draw = self.server.rng("candidates")
        return candidates(self.parts, self.groups(), algorithm.num_candidates, algorithm.depths, required, draw, fits)

    def _build(self, number: int, places: Sequence[int]) -> Tensor:
        """Build and fine-tune a candidate; note its description and return its logits on the public data."""
        rows = [(self.parts[place].client, self.parts[place].depth) for place in places]
        net = assembled(self.nets, rows, self.server.seed, self.server.round, self.key, number)
        self._tune(net, f"candidate {number}")
        table = [(self.indices[row], depth) for row, depth in rows]
        self.candidates[f"{self.server.round}.{number}"] = describe(table, net)
        return self.server.training.outputs(net, self.loader, logits_of)

    def _tune(self, net: Stitched, purpose: str) -> None:
        """Train a network on the public data."""
        algorithm = self.algorithm
        if algorithm.fine_tune_epochs and any(parameter.requires_grad for parameter in net.parameters()):
            self.server.training.fit(
                net,
                self._batches(),
                self._labels_loss if self.labelled else self._views_loss,
                epochs=algorithm.fine_tune_epochs,
                optimizer=partial(torch.optim.Adam, lr=algorithm.fine_tune_lr),
                purpose=purpose,
            )

    def _batches(self) -> DataLoader[Any]:
        """Return the public data in batches of which none is a single sample: batch normalisation could not train on it."""
        server, size = self.server, self.algorithm.batch_size
        loader = server.training.public(batch_size=size, shuffle=True)
        if server.training.public_size % (loader.batch_size or 1) != 1:
            return loader
        return server.training.public(torch.arange(server.training.public_size - 1), batch_size=size, shuffle=True)

    def _labels_loss(self, net: Stitched, batch: Any) -> Tensor:
        """Return the cross entropy of a public batch."""
        return F.cross_entropy(logits_of(net, batch), labels_of(batch, self.key))

    def _views_loss(self, net: Stitched, batch: Any) -> Tensor:
        """Return NT-Xent of two views of a public batch."""
        x, noise = inputs_of(batch, self.key), self.algorithm.noise
        return contrastive(net(view(x, noise)), net(view(x, noise)), self.algorithm.temperature)


def _activations(net: nn.Module, batch: Any) -> Tensor:
    """Return the input of the network and the output of each of its blocks, a row for each sample."""
    assert isinstance(net, Stitched)
    return torch.cat([part.flatten(1) for part in net.activations(inputs_of(batch))], dim=1)


@idle_with("temperature", "labels", True, "NT-Xent is for data without labels. Leave it out, or use labels=False.")
@idle_with("noise", "labels", True, "views are for data without labels. Leave it out, or use labels=False.")
@make_init
class pFedHR(SharesPredictions):
    """Heterogeneous model reassembly: parts of all clients' networks make each client a teacher.

    Wang (J.), Yang, Cui, Che, Lyu, Xu, Ma, "Towards personalized federated learning via heterogeneous model reassembly",
    NeurIPS 2023. The authors' code is JackqqWang/pfedHR.

    Clients send their whole networks, of any architecture. On public data the server then

    * takes each apart into blocks, a layer with what follows it, and records what goes in and comes out (`X`, `Y`);
    * groups all blocks by function: `dis(a, b) = 1 / (CKA(X_a, X_b) + CKA(Y_a, Y_b))`, into `num_groups`;
    * draws `num_candidates` networks: with a block of every group, all operations (`conv`, `fc`) that there are, a number of
      blocks within `depths`, in natural order (convolutions first, each kind by depth);
    * puts a linear layer with ReLU where shapes do not fit, and a new classifier at the end if there is none;
    * fine-tunes them: cross entropy where public data have labels; else NT-Xent of two augmented views;
    * gives each client the candidate with the largest mean cosine of logits with its own network.

    Client, from its next visit on: `loss = task + lam KL( softmax(candidate) || softmax(f) )`, the candidate frozen. It
    keeps the candidate that it was given last until it takes part again. Its first visit has no term, and with `lam=0`
    nothing travels: local training.

    * Down: the candidate, as a table (which blocks of which architectures) and its tensors. Up: the client's network.
    * State: the whole model at each client; each client's candidate at the server.
    * Deployed: the client's model. There is no global model.

    The server sees every client's network: this method does not go with secret sums.

    A network must be a chain of layers, or have a method `blocks()` that returns its parts in order. The authors' code sorts
    layers by the last digit of their names, pools activations to one width to take means of them, and takes the cross entropy
    to raw logits; here depth is counted, CKA compares any widths, and the divergence is between distributions.

    Args:
        lam: Weight of the distillation term. Default 0.1 (authors' code).
        num_groups: `K`. Default 2 (authors' code; paper: 4).
        num_candidates: `M`. Default 4.
        depths: Least and most blocks of a candidate. Default 4 and 6 (authors' code); all blocks, if there are fewer.
        fine_tune_epochs: Epochs over the public data. 0: stitches stay as they were drawn. Default 3.
        fine_tune_lr: Learning rate of Adam. Default 1e-3.
        batch_size: Batch size of the fine-tuning. `None`: that of the public data. Default 8 (authors' code).
        labels: Whether the labels of public data are used. `None` (default): if there are any.
        temperature: Of NT-Xent. Default 0.5.
        noise: Noise of the augmented views, over the standard deviation of the batch. Images are shifted besides.
        grouping: `"medoids"` (k-medoids) or `"means"` (k-means in the space where products are CKA).
        relu: Stitches end with ReLU (paper); `False`: linear (authors' code).
        tune_models: Fine-tune copies of the clients' networks too before they are compared (authors' code).
        cka_samples: Public samples on which blocks are compared; all, if there are not more.
        max_stitch: Most weights of one stitch. Candidates that need larger ones are not built.
        head: Path of the submodule that gives the logits (`"net.fc"`). `None`: the last layer.

    Raises:
        ValueError: If an argument is outside its range.

    Example:
        >>> from torch import nn
        >>> from fedlightning.callbacks import pFedHR
        >>> module = nn.Linear(2, 3)
        >>> pFedHR().shared_names(None, module), pFedHR().wire(module).down
        ([], {'candidate': 'tensors'})
    """

    facts = SharesPredictions.facts.extend(requires=[PublicLogits(labels="labels")])

    lam: NonNegativeFloat = 0.1
    num_groups: PositiveInt = 2
    num_candidates: PositiveInt = 4
    depths: tuple[int, int] = (4, 6)
    fine_tune_epochs: NonNegativeInt = 3
    fine_tune_lr: PositiveFloat = 1e-3
    batch_size: Annotated[int, Range("[2, inf)")] | None = 8
    labels: bool | None = None
    temperature: PositiveFloat = 0.5
    noise: NonNegativeFloat = 0.1
    grouping: Literal["medoids", "means"] = "medoids"
    relu: bool = True
    tune_models: bool = False
    cka_samples: Annotated[int, Range("[2, inf)")] = 128
    max_stitch: PositiveInt = 10_000_000
    head: str | None = None

    def __post_init__(self) -> None:
        least, most = self.depths if len(self.depths) == 2 else (0, 0)
        if not 1 <= least <= most or most < self.num_groups:
            raise ValueError(
                f"pFedHR got depths={self.depths} with num_groups={self.num_groups}. Give the least and the most blocks of a "
                "candidate; it has one of every group at least."
            )

    def claims(self, role: str) -> bool:
        """Decline the loss term where it is 0."""
        return super().claims(role) and not (role == "training_loss" and self.lam == 0)

    def check(self, setup: Setup) -> None:
        """Refuse missing public data, networks that cannot be taken apart, and callbacks on a model that travels.

        Raises:
            ValueError: If public data are missing, have no labels where `labels=True`, or inputs that are not numbers to
                calculate with; if `forward` gives no logits; if a network is not a chain of layers and has no `blocks()`.
                Also if another callback works on a model that travels, or keeps something beside one.
        """
        features_at_start(setup, self.feature_taps, self.key)
        x = inputs_of(probes.move_batch(setup.module, setup.public.batch()), self.key)
        if not x.is_floating_point():
            raise ValueError(
                f"{self.key} puts linear layers between blocks, and needs inputs that are floating-point numbers; those of "
                f"public data are {x.dtype}."
            )
        if setup.public.size() < 2:
            raise ValueError(f"{self.key} compares blocks on public data, and needs two samples or more.")
        check_cut(self.key, setup.module, x.to(next(setup.module.parameters()).dtype)[:8])

    def wire(self, module: nn.Module) -> Wire:
        """Declare the candidate down, the client's model up."""
        return Wire(down={"candidate": "tensors"}, up={"model": "state"}, entries="all")

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """Tap the logits: the output of the head."""
        return {"logits": FeatureTap(module, head_path(module, self.head), at="output")}

    # -- client --------------------------------------------------------------------------------------------------------
    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """Return `task + lam KL(candidate || model)`."""
        payload = client.message.extras.get(self.key)
        if payload is None:
            return loss
        x = inputs_of(batch, self.key)
        if self.key not in client.scratch:
            client.scratch[self.key] = self._teacher(client, payload["candidate"], x)
        with torch.no_grad():
            target = both_classes(client.scratch[self.key](x))
        return loss + self.lam * kl(target, both_classes(features["logits"]))

    def _teacher(self, client: Client, described: Mapping[str, Tensor], x: Tensor) -> Stitched:
        """Return the candidate, frozen, on the device of the inputs."""
        needed = {int(index) for index, _ in described[BLOCKS]}
        parts = {}
        for index in needed:
            module = client.module_of(client.architectures[index])
            parts[index] = cut(module, x[:2].to("cpu", next(module.parameters()).dtype))
        return rebuild(described, parts, self.relu).to(x.device).eval().requires_grad_(False)

    def on_send(self, client: Client, update: Update) -> None:
        """Send the whole model.

        Raises:
            FloatingPointError: If an entry is not finite. The core then drops the update.
        """
        if not client.contributed or self.lam == 0:
            return
        state = client.model_state()
        if (bad := first_nonfinite(state)) is not None:
            raise FloatingPointError(f"'{bad}' of its model holds NaN or infinite values; lower the learning rate")
        update.extras[self.key] = {"model": state}

    # -- server --------------------------------------------------------------------------------------------------------
    def plan_round(self, server: Server) -> Plan:
        """Plan ordinary visits. When all are back, each of these clients is given a candidate."""
        sent = yield [Job(client, keep=self.lam > 0) for client in server.participants()]
        models = {
            update.client: update.extras[self.key]["model"]
            for update in sent
            if update.error is None and self.key in update.extras
        }
        if models:
            self._reassemble(server, models)

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send the candidate that the client was given last. Evaluation needs none."""
        server_state = server.state.get(self.key)
        if server_state is not None and job.client in server_state["given"] and job.work != 0:
            message.extras[self.key] = {"candidate": server_state["candidates"][server_state["given"][job.client]]}

    def _reassemble(self, server: Server, models: Mapping[str, State]) -> None:
        """Make candidates out of the models that came, and note which one each of these clients gets."""
        reassembly = Reassembly(self, server, models)
        if not reassembly.candidates:
            warn(
                f"Round {server.round + 1}: {self.key} found no candidate that keeps the rules with depths={self.depths} and "
                f"max_stitch={self.max_stitch}; clients keep the ones they have. Allow other depths, or larger stitches."
            )
            return
        server_state = server.state.get(self.key, {"candidates": {}, "given": {}})
        choices = {**server_state["given"], **reassembly.choice_by_client}
        choices = {client: choices[client] for client in server.clients if client in choices}
        every = server_state["candidates"] | reassembly.candidates
        server.state[self.key] = {
            "candidates": {key: every[key] for key in sorted(set(choices.values()))},
            "given": choices,
        }
