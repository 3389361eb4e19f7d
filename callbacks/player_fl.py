"""PLayer-FL and PLayer-FL-Random: what travels, the plan of round 1, the decision."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from fedlightning.algorithm import (
    Change,
    Client,
    Extra,
    Facts,
    Job,
    Message,
    Need,
    Plan,
    Server,
    Setup,
    Stackable,
    Update,
    WeightingName,
    Wire,
)
from fedlightning.callbacks.diagnostics.sensitivity import (
    Sensitivity,
    SensitivityAccumulator,
    scale_of,
    write_sensitivity,
)
from fedlightning.callbacks.diagnostics.sensitivity_terms import layers_sent
from fedlightning.callbacks.shared.representations import refuse_classes
from fedlightning.layers import ordered_layers, pieces, state_names
from fedlightning.ranges import Range, make_init

if TYPE_CHECKING:
    from fedlightning.callbacks.player_fl_stacked import StackedSensitivities

PROBE, COLLECT = "sensitivity", "federated layers"


@make_init
class PLayerFL(Stackable):
    r"""Layer-wise federation: the layers before the sensitivity's jump are shared, the others are personal.

    Elhussein, Gürsoy, "PLayer-FL: a principled approach to personalized layer-wise cross-silo federated learning",
    2025.

    For layers k = 1..L: `I_k = (1/n_k) sum_{p in k} (theta_p grad_p)^2`, `F_l = sum_{k<=l} I_k`, summed over the
    clients; `p = min{l : F_{l+1} / F_l > t}`, or L if there is none (equations 2-3). Layers 1..p are federated, the
    others stay with each client.

    Round 1: every participant trains from the common start and records F from the gradients that training computes anyway
    in its first epoch; only F goes up. The server fixes p; the clients then send layers 1..p of that same training and
    keep the others. From then on layers 1..p travel, and clients train all layers jointly.

    Down: layers <= p. Up: F once; layers <= p. State: layers > p at each client. No global model unless p = L.

    Gradient corrections and server optimizers act on what travels. In round 1, before p is known, FedProx and SCAFFOLD
    see the whole model, and SCAFFOLD's control variates of all layers go up. Layers that another callback keeps at home
    (FedPer, FedBN) stay there.

    Args:
        threshold: The threshold `t > 1`. The paper gives no value; 1.05 is calibrated in
            `docs/results/playerfl_threshold.md`. Each run
            writes the ratio of every layer and p as a function of t to `figures/sensitivity.png`.
        split: Fixes p instead. 0 shares nothing; L is FedAvg.
        shift: Federates so many layers more (+1) or fewer (-1) than p: the paper's variants.
        clamp: Keeps p within [1, L-1].
        weights_only: Leaves biases out of F (the authors' code).
        order: Names of the layers in order. `None` takes them as a forward pass meets them.
        weighting: Weights of the clients in the mean: `"samples"` or `"uniform"`.

    Raises:
        ValueError: If `threshold` is not above 1.

    Example:
        >>> from fedlightning.callbacks import PLayerFL, Sensitivity
        >>> measured = Sensitivity(["conv1", "conv2", "fc"], [10, 20, 30], [1.0, 0.01, 2.0])
        >>> measured.transition(PLayerFL().threshold)  # conv1 and conv2 are shared, fc is personal
        2
    """

    rank = -1  # gradients are measured before others replace or correct them

    threshold: Annotated[float, Range("(1, inf]", "F is cumulative, so every ratio is at least 1.")] = 1.05
    split: int | None = None
    shift: int = 0
    clamp: bool = False
    weights_only: bool = False
    order: list[str] | None = None
    weighting: WeightingName | None = None

    @property
    def facts(self) -> Facts:
        """Layers stay with the clients, unless the options share them all."""
        why, instead = "keeps layers with the clients", "use LocalCheckpoint()"
        return Facts(needs=[Need(why, (Change.GLOBAL_SELECTION,), instead, self._keeps_layers)])

    def check(self, setup: Setup) -> None:
        """Refuse models of one layer, and a split that the model does not have."""
        name, count = type(setup.template).__name__, len(ordered_layers(setup.module, self.order))
        if count < 2:
            raise ValueError(
                f"{self.key} decides layer by layer, but {name} has {count} layer. Use FedAvg() or Local()."
            )
        if self.split is not None and not 0 <= self.split <= count:
            raise ValueError(f"{self.key} got split={self.split}; {name} has {count} layers: use 0 to {count}.")

    def _keeps_layers(self, setup: Setup) -> bool:
        return not self._shares_all(len(ordered_layers(setup.module, self.order)))

    def _shares_all(self, count: int) -> bool:
        everything = self.threshold == math.inf if self.split is None else self.split + self.shift >= count
        return everything and self.shift >= 0 and not self.clamp

    # -- what travels ------------------------------------------------------------------------------------------------
    def wire(self, module: nn.Module) -> Wire:
        """Declare F's terms and the order of the layers, which go up once. Until p is known, every layer may be shared."""
        up = {"sensitivity": Extra(("pieces",)), "order": Extra(("pieces",), whole=True, low=0)}
        return Wire(up=up, entries="all")

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str] | None:
        """Return all entries outside the personal layers; everything travels before p is known."""
        server_state = server.state.get(self.key, {})
        if "personal" not in server_state:
            return None
        personal = set(server_state["personal"])
        return [name for name in server.kinds if name not in personal]

    def plan_round(self, server: Server) -> Plan:
        """In round 1 ask for F, decide, then ask for the federated layers; later rounds are ordinary."""
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

    # -- the decision ------------------------------------------------------------------------------------------------
    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse another number of sensitivities than the model has pieces."""
        if extras := update.extras.get(self.key):
            refuse_classes(extras["order"], count := len(pieces(server.module)), "piece")
            if len(extras["order"]) != count:
                raise ValueError(f"it has sensitivities of {len(extras['order'])} pieces, and the model has {count}")

    def on_update(self, server: Server, update: Update) -> None:
        """Collect F's terms. If clients meet the layers in different orders, the first client's order holds."""
        extras = update.extras.get(self.key)
        if extras:
            state = server.state.get(self.key, {"clients": {}, "order": extras["order"]})
            server.state[self.key] = {**state, "clients": {**state["clients"], update.client: extras["sensitivity"]}}

    def sensitivities(self, server: Server) -> dict[str, Sensitivity]:
        """Return F of each client that took part in round 1."""
        server_state, module = server.state[self.key], server.module
        return {
            client: Sensitivity.of_sent(module, piece_sums, server_state["order"], weights_only=self.weights_only)
            for client, piece_sums in server_state["clients"].items()
        }

    def sensitivity(self, server: Server) -> Sensitivity:
        """Return F summed over the clients, without weights."""
        return Sensitivity.sum(list(self.sensitivities(server).values()))

    def choose(self, server: Server, total: Sensitivity) -> int:
        """Return p, the number of federated layers, given F summed over the clients."""
        p = total.transition(self.threshold) if self.split is None else self.split
        low, high = (1, len(total.layers) - 1) if self.clamp else (0, len(total.layers))
        return min(max(p + self.shift, low), high)

    def _decide(self, server: Server) -> None:
        if self.key not in server.state:
            raise ValueError(f"{self.key} got no sensitivity in round 1: no client took a step with finite gradients.")
        p = self.choose(server, self.sensitivity(server))
        layers = layers_sent(server.module, server.state[self.key]["order"])
        personal = [name for layer in layers[p:] for name in state_names(layer)]
        server.state[self.key] |= {
            "split": p,
            "layers": [layer.name for layer in layers],
            "personal": personal if p else list(server.kinds),  # also buffers that are in no layer
        }

    def on_round_end(self, server: Server) -> None:
        """Write F, the ratio curve and p(t), once."""
        p = server.state.get(self.key, {}).get("split")
        if server.run_dir is not None and p is not None and not (server.run_dir / "sensitivity.json").exists():
            write_sensitivity(server.run_dir, self.sensitivity(server), self.sensitivities(server), self.threshold, p)

    # -- a client in round 1 -----------------------------------------------------------------------------------------
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Watch in which order the first batch of round 1 meets the layers."""
        if self.client.message.tag == PROBE and self.key not in self.client.scratch:
            self.client.scratch[self.key] = SensitivityAccumulator(pl_module, self.weights_only, self.order)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Add a step of the first epoch, before any correction (gradients are unscaled here)."""
        if self.client.message.tag == PROBE and trainer.current_epoch == 0:
            self.client.scratch[self.key].add_step(optimizer, scale_of(optimizer, trainer))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Stop watching: the order of the layers is known."""
        if self.key in self.client.scratch:
            self.client.scratch[self.key].stop_watching()

    def stack_hooks(self, fit: Any) -> StackedSensitivities:
        """Return the same measurement for a stack of clients."""
        from fedlightning.callbacks.player_fl_stacked import StackedSensitivities

        return StackedSensitivities(self, fit)

    def on_send(self, client: Client, update: Update) -> None:
        """Send F's terms, if the client took a step with finite gradients."""
        recorded = client.scratch.get(self.key)
        if recorded is not None and any(recorded.steps.values()):
            update.extras[self.key] = recorded.to_send()


class PLayerFLRandom(PLayerFL):
    """PLayer-FL with a prefix of random length: the control that shows what the choice of layers is worth.

    Elhussein, Gürsoy, 2025. p is drawn uniformly from 1..L-1 without PLayer-FL's own p, once per run, from its seed.
    Arguments are those of :class:`PLayerFL`.

    Example:
        >>> from fedlightning.callbacks import PLayerFLRandom
        >>> PLayerFLRandom().key
        'PLayerFLRandom'
    """

    def choose(self, server: Server, total: Sensitivity) -> int:
        """Return a random p, never PLayer-FL's nor L; PLayer-FL's, with a warning, if no other is left."""
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
