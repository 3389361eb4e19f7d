"""PLayer-FL and PLayer-FL-Random."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from fedlightning.callbacks.sensitivity import Sensitivity, SensitivityAccumulator
from fedlightning.client import Client
from fedlightning.hooks import FederatedCallback, Job, Plan, Setup
from fedlightning.layers import forward_order, ordered_layers, state_names
from fedlightning.messages import Update, Wire
from fedlightning.server import Server

PROBE, COLLECT = "sensitivity", "federated layers"


class PLayerFL(FederatedCallback):
    r"""Layer-wise federation: the layers before the sensitivity's jump are shared, the others are personal.

    Elhussein, Gürsoy, "PLayer-FL: a principled approach to personalized layer-wise cross-silo federated learning", 2025.

    For layers k = 1..L: ``I_k = (1/n_k) sum_{p in k} (theta_p grad_p)^2``, ``F_l = sum_{k<=l} I_k``, summed over the
    clients; ``p = min{l : F_{l+1} / F_l > t}``, or L if there is none (equations 2-3). Layers 1..p are federated, the
    others stay with each client.

    Round 1: every participant trains from the common start and records F from the gradients training computes anyway in
    its first epoch; only F goes up. The server fixes p; the clients then send layers 1..p of that same training, and
    keep the others. From then on layers 1..p travel, and clients train all layers jointly.

    Down: layers <= p. Up: F once; layers <= p. State: layers > p at each client. No global model unless p = L.

    Args:
        threshold: ``t > 1``. The paper gives no value; see ``docs/player_fl.md`` for how the default was calibrated. Each
            run writes the ratio of every layer and p as a function of t to ``figures/sensitivity.png``.
        split: fixes p instead (0: nothing is shared; L: FedAvg).
        shift: federate so many layers more (+1) or fewer (-1) than p: the paper's variants.
        clamp: keep p within [1, L-1].
        weights_only: leave biases and normalisation out of F (the authors' code).
        order: layer names in order, by default as a forward pass meets them.
        weighting: ``"samples"`` or ``"uniform"``.
    """

    def __init__(
        self,
        threshold: float = 2.0,
        split: int | None = None,
        shift: int = 0,
        clamp: bool = False,
        weights_only: bool = False,
        order: list[str] | None = None,
        weighting: str | None = None,
    ) -> None:
        if not threshold > 1.0:
            raise ValueError(
                f"{self.key} got threshold={threshold}. F is cumulative, so every ratio is at least 1: use t > 1."
            )
        self.threshold = threshold
        self.split = split
        self.shift = shift
        self.clamp = clamp
        self.weights_only = weights_only
        self.order = order
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Refuse one-layer models, and a split that is not there."""
        count = len(ordered_layers(setup.module))
        if count < 2:
            raise ValueError(
                f"{self.key} decides layer by layer, but {type(setup.template).__name__} has {count} layer. "
                "Use FedAvg() or Local()."
            )
        if self.split is not None and not 0 <= self.split <= count:
            raise ValueError(f"{self.key} got split={self.split}; {type(setup.template).__name__} has {count} layers.")
        if self.order is not None:
            ordered_layers(setup.module, self.order)

    def wire(self, module: nn.Module) -> Wire:
        """F's terms and the order of the layers, once."""
        return Wire(up={"sensitivity": (-1,), "order": (-1,)})

    # -- what travels ------------------------------------------------------------------------------------------------
    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str] | None:
        """Everything outside the personal layers; everything before p is known."""
        own = server.state.get(self.key, {})
        if "personal" not in own:
            return None
        private = set(own["personal"])
        return [name for name in server.kinds if name not in private]

    def plan_round(self, server: Server) -> Plan:
        """Round 1 asks for F, decides, then asks for the federated layers; later rounds are ordinary."""
        clients = server.participants()
        if "personal" in server.state.get(self.key, {}):
            yield [Job(client) for client in clients]
            return
        updates = yield [Job(client, returns=(), tag=PROBE) for client in clients]
        answered = [update.client for update in updates if update.error is None]
        self._decide(server)
        shared = server.shared_names()
        if shared:
            yield [Job(client, work=0, down=(), returns=shared, tag=COLLECT) for client in answered]

    # -- client --------------------------------------------------------------------------------------------------------
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """On the first batch of the probing round: the order in which a forward pass meets the layers."""
        client = self.client
        if client.message.tag != PROBE or self.key in client.scratch:
            return
        order = self.order or forward_order(pl_module, lambda: client.batch_loss(batch))
        layers = ordered_layers(pl_module, order)
        client.scratch[self.key] = SensitivityAccumulator(pl_module, layers, weights_only=self.weights_only)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """One more step of the first epoch."""
        if self.client.message.tag == PROBE and trainer.current_epoch == 0:
            self.client.scratch[self.key].add_step(optimizer)

    def on_send(self, client: Client, update: Update) -> None:
        """F's terms in the order of the layers, and that order."""
        recorded = client.scratch.get(self.key)
        if recorded is None:
            return
        result = recorded.result()
        registered = [layer.name for layer in ordered_layers(client.module)]
        update.extras[self.key] = {
            "sensitivity": torch.tensor(result.sensitivity, dtype=torch.float64),
            "order": torch.tensor([registered.index(name) for name in result.layers]),
        }

    # -- server --------------------------------------------------------------------------------------------------------
    def on_update(self, server: Server, update: Update) -> None:
        """Collect F."""
        extras = update.extras.get(self.key)
        if extras:
            own = server.state.setdefault(self.key, {"clients": {}})
            own["clients"] = {**own["clients"], update.client: extras["sensitivity"]}
            own.setdefault("order", extras["order"])

    def _decide(self, server: Server) -> None:
        own = server.state[self.key]
        registered = ordered_layers(server.module)
        layers = [registered[index] for index in own["order"].tolist()]
        total = self.sensitivity(server)
        split = self.choose(server, total)
        personal = [name for layer in layers[split:] for name in state_names(layer)]
        server.state[self.key] = {**own, "split": split, "layers": [layer.name for layer in layers], "personal": personal}

    def sensitivity(self, server: Server) -> Sensitivity:
        """F summed over the clients (unweighted)."""
        own = server.state[self.key]
        registered = ordered_layers(server.module)
        layers = [registered[index] for index in own["order"].tolist()]
        sizes = {name: value.numel() for name, value in server.model.items()}
        counts = [sum(sizes[name] for name in layer.parameters) for layer in layers]
        parts = [
            Sensitivity([layer.name for layer in layers], counts, terms.tolist(), "online", self.weights_only)
            for terms in own["clients"].values()
        ]
        return Sensitivity.sum(parts)

    def choose(self, server: Server, total: Sensitivity) -> int:
        """p: how many layers are federated."""
        split = total.transition(self.threshold) if self.split is None else self.split
        split += self.shift
        low, high = (1, len(total.layers) - 1) if self.clamp else (0, len(total.layers))
        return min(max(split, low), high)

    def on_federation_end(self, server: Server) -> None:
        """Write the ratio curve and p(t)."""
        if server.run_dir is None or "split" not in server.state.get(self.key, {}):
            return
        total = self.sensitivity(server)
        own = server.state[self.key]
        clients = {client: terms.tolist() for client, terms in own["clients"].items()}
        found = total.to_dict() | {"threshold": self.threshold, "split": own["split"], "clients": clients}
        (server.run_dir / "sensitivity.json").write_text(json.dumps(found, indent=1))
        figures = server.run_dir / "figures"
        figures.mkdir(exist_ok=True)
        total.plot(threshold=self.threshold, path=figures / "sensitivity.png")


class PLayerFLRandom(PLayerFL):
    """PLayer-FL with a prefix of random length: the control that shows what the choice of layers is worth.

    Elhussein, Gürsoy, 2025. p is drawn uniformly from 1..L-1 without the principled one, once per run, from its seed.
    """

    def choose(self, server: Server, total: Sensitivity) -> int:
        """A random prefix, never the principled one nor the whole model; the principled one where no other is left."""
        principled = super().choose(server, total)
        others = [length for length in range(1, len(total.layers)) if length != principled]
        if not others:
            return principled
        return others[int(torch.randint(len(others), (), generator=server.rng("random prefix")))]
