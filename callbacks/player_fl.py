"""PLayer-FL and PLayer-FL-Random."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlightning.algorithm import (
    Client,
    FederatedCallback,
    Job,
    Layer,
    Plan,
    Server,
    Setup,
    Update,
    WeightingName,
    Wire,
    ordered_layers,
    pieces,
    state_names,
)
from fedlightning.callbacks.checkpoints import GlobalCheckpoint
from fedlightning.callbacks.diagnostics.sensitivity import (
    Sensitivity,
    SensitivityAccumulator,
    counted_parameters,
    scale_of,
)

if TYPE_CHECKING:
    from fedlightning.callbacks.player_fl_stacked import StackedSensitivities

PROBE, COLLECT = "sensitivity", "federated layers"


class PLayerFL(FederatedCallback):
    r"""Layer-wise federation: the layers before the sensitivity's jump are shared, the others are personal.

    Elhussein, Gürsoy, "PLayer-FL: a principled approach to personalized layer-wise cross-silo federated learning",
    2025.

    For layers k = 1..L: ``I_k = (1/n_k) sum_{p in k} (theta_p grad_p)^2``, ``F_l = sum_{k<=l} I_k``, summed over the
    clients; ``p = min{l : F_{l+1} / F_l > t}``, or L if there is none (equations 2-3). Layers 1..p are federated, the
    others stay with each client.

    Round 1: every participant trains from the common start and records F from the gradients training computes anyway in
    its first epoch; only F goes up. The server fixes p; the clients then send layers 1..p of that same training, and
    keep the others. From then on layers 1..p travel, and clients train all layers jointly.

    Down: layers <= p. Up: F once; layers <= p. State: layers > p at each client. No global model unless p = L.

    Gradient corrections and server optimizers act on what travels; in round 1, before p is known, FedProx and SCAFFOLD
    see the whole model, and SCAFFOLD's control variates of all layers go up. Layers that another callback keeps at home
    (FedPer, FedBN) stay there.

    Args:
        threshold: ``t > 1``. The paper gives no value; 1.05 is calibrated in ``docs/player_fl.md``. Each run writes the
            ratio of every layer and p as a function of t to ``figures/sensitivity.png``.
        split: fixes p instead (0: nothing is shared; L: FedAvg).
        shift: federate so many layers more (+1) or fewer (-1) than p: the paper's variants.
        clamp: keep p within [1, L-1].
        weights_only: leave biases out of F (the authors' code).
        order: layer names in order, by default as a forward pass meets them.
        weighting: ``"samples"`` or ``"uniform"``.
    """

    def __init__(
        self,
        threshold: float = 1.05,
        split: int | None = None,
        shift: int = 0,
        clamp: bool = False,
        weights_only: bool = False,
        order: list[str] | None = None,
        weighting: WeightingName | None = None,
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
        """Refuse one-layer models, a split that is not there, and the selection of a global model."""
        name, count = type(setup.template).__name__, len(ordered_layers(setup.module, self.order))
        if count < 2:
            raise ValueError(
                f"{self.key} decides layer by layer, but {name} has {count} layer. Use FedAvg() or Local()."
            )
        if self.split is not None and not 0 <= self.split <= count:
            raise ValueError(f"{self.key} got split={self.split}; {name} has {count} layers: use 0 to {count}.")
        if any(isinstance(other, GlobalCheckpoint) for other in setup.callbacks) and not self._shares_all(count):
            raise ValueError(
                f"GlobalCheckpoint needs a global model, but {self.key} keeps layers with the clients. "
                "Use LocalCheckpoint()."
            )

    def _shares_all(self, count: int) -> bool:
        wanted = self.threshold == math.inf if self.split is None else self.split + self.shift >= count
        return wanted and self.shift >= 0 and not self.clamp

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
        shared = server.returned_names()
        if shared:
            yield [Job(client, work=0, down=(), returns=shared, tag=COLLECT) for client in answered]

    # -- client --------------------------------------------------------------------------------------------------------
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The first batch of the probing round shows the order in which a forward pass meets the layers."""
        if self.client.message.tag == PROBE and self.key not in self.client.scratch:
            self.client.scratch[self.key] = SensitivityAccumulator(pl_module, self.weights_only, self.order)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """One more step of the first epoch, before any correction (gradients are unscaled here)."""
        if self.client.message.tag == PROBE and trainer.current_epoch == 0:
            self.client.scratch[self.key].add_step(optimizer, scale_of(optimizer, trainer))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """The order of the layers is known."""
        if self.key in self.client.scratch:
            self.client.scratch[self.key].stop_watching()

    @property
    def is_stackable(self) -> bool:
        """Clients in a stack are probed as others are."""
        return True

    def stack_hooks(self, fit: Any) -> StackedSensitivities:
        """The same for clients that train in a stack."""
        from fedlightning.callbacks.player_fl_stacked import StackedSensitivities

        return StackedSensitivities(self, fit)

    def on_send(self, client: Client, update: Update) -> None:
        """``sum_p (theta_p grad_p)^2`` of every piece of the model as registered, and their order as called."""
        recorded = client.scratch.get(self.key)
        if recorded is None or not any(recorded.steps.values()):
            return
        terms, names = recorded.of_pieces(), [piece.name for piece in pieces(client.module)]
        update.extras[self.key] = {
            "sensitivity": torch.tensor([terms[name] for name in names], dtype=torch.float64),
            "order": torch.tensor([names.index(name) for name in dict.fromkeys([*recorded.order, *names])]),
        }

    # -- server --------------------------------------------------------------------------------------------------------
    def on_update(self, server: Server, update: Update) -> None:
        """Collect F's terms. Should clients meet the layers in different orders, the first one's holds."""
        extras = update.extras.get(self.key)
        if extras:
            own = server.state.get(self.key, {"clients": {}, "order": extras["order"]})
            server.state[self.key] = {**own, "clients": {**own["clients"], update.client: extras["sensitivity"]}}

    def _decide(self, server: Server) -> None:
        if self.key not in server.state:
            raise ValueError(f"{self.key} got no sensitivity in round 1: no client took a step with finite gradients.")
        split = self.choose(server, self.sensitivity(server))
        layers = self._layers(server)
        personal = [name for layer in layers[split:] for name in state_names(layer)]
        server.state[self.key] |= {
            "split": split,
            "layers": [layer.name for layer in layers],
            "personal": personal if split else list(server.kinds),  # also buffers that are in no layer
        }

    def _layers(self, server: Server) -> list[Layer]:
        names = [piece.name for piece in pieces(server.module)]
        return ordered_layers(server.module, [names[index] for index in server.state[self.key]["order"].tolist()])

    def _of_client(self, server: Server, terms: Tensor) -> Sensitivity:
        of_pieces = dict(zip((piece.name for piece in pieces(server.module)), terms.tolist(), strict=True))
        counted = counted_parameters(server.module, self.weights_only)
        return Sensitivity.of(self._layers(server), of_pieces, counted, "online", self.weights_only)

    def sensitivity(self, server: Server) -> Sensitivity:
        """F summed over the clients (unweighted)."""
        return Sensitivity.sum([self._of_client(server, terms) for terms in server.state[self.key]["clients"].values()])

    def choose(self, server: Server, total: Sensitivity) -> int:
        """p: how many layers are federated."""
        split = total.transition(self.threshold) if self.split is None else self.split
        low, high = (1, len(total.layers) - 1) if self.clamp else (0, len(total.layers))
        return min(max(split + self.shift, low), high)

    def on_round_end(self, server: Server) -> None:
        """Write F, the ratio curve and p(t), once."""
        own = server.state.get(self.key, {})
        if server.run_dir is None or "split" not in own or (server.run_dir / "sensitivity.json").exists():
            return
        total = self.sensitivity(server)
        found = total.to_dict() | {
            "threshold": self.threshold if math.isfinite(self.threshold) else None,
            "split": own["split"],
            "clients": {client: self._of_client(server, t).sensitivity for client, t in own["clients"].items()},
        }
        figures = server.run_dir / "figures"
        figures.mkdir(parents=True, exist_ok=True)
        total.plot(threshold=self.threshold, path=figures / "sensitivity.png", split=own["split"])
        (server.run_dir / "sensitivity.json").write_text(json.dumps(found, indent=1))


class PLayerFLRandom(PLayerFL):
    """PLayer-FL with a prefix of random length: the control that shows what the choice of layers is worth.

    Elhussein, Gürsoy, 2025. p is drawn uniformly from 1..L-1 without the principled one, once per run, from its seed.
    """

    def choose(self, server: Server, total: Sensitivity) -> int:
        """A random prefix, never the principled one nor the whole model; the principled one where no other is left."""
        principled = super().choose(server, total)
        others = [length for length in range(1, len(total.layers)) if length != principled]
        if not others:
            warnings.warn(
                f"{self.key}: of {len(total.layers)} layers no other prefix is left than PLayer-FL's ({principled}), "
                "so that one is federated.",
                stacklevel=2,
            )
            return principled
        return others[int(torch.randint(len(others), (), generator=server.rng("random prefix")))]

    def _shares_all(self, count: int) -> bool:
        return False
