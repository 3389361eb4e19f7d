"""What pFedHR does at the server with the networks that came: blocks, groups, candidates, and who gets which."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fedlightning.algorithm import Server, State, address, probes
from fedlightning.callbacks.shared.blocks import cut
from fedlightning.callbacks.shared.distillation import inputs_of, logits_of
from fedlightning.callbacks.shared.reassembly import (
    Part,
    candidates,
    contrastive,
    grouped,
    nearest_teachers,
    similarities,
    unit_gram,
    view,
)
from fedlightning.callbacks.shared.representations import labels_of
from fedlightning.callbacks.shared.stitching import Stitched, assembled, describe, row_of, stitch_sizes
from fedlightning.tensors import load_state

if TYPE_CHECKING:
    from fedlightning.callbacks.pfedhr import pFedHR


class Reassembly:
    """The candidates of one round.

    Args:
        algorithm: Gives the options.
        server: The server.
        models: By client, the state that it sent.

    Attributes:
        candidates: By key, the description of each (:func:`~fedlightning.callbacks.shared.stitching.describe`).
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
        self.given: dict[str, str] = {}
        outputs = [self._build(number, places) for number, places in enumerate(self._drawn())]
        if not outputs:
            return
        for client, net in zip(models, self.nets, strict=True):
            if algorithm.tune_models:
                self._tune(net, f"model {client}")
        best = nearest_teachers([server.training.outputs(net, self.loader, logits_of) for net in self.nets], outputs)
        keys = list(self.candidates)
        self.given = {client: keys[place] for client, place in zip(models, best, strict=True)}

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
