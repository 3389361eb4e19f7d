"""HeteroFL. The way of the model through a round, and where each step is:

1. The server cuts the client's slice out of the model (`on_broadcast`). `wrappers.submodel` finds which units of which
   layers belong together (`plan_cuts`) and from them the kept indices of every entry (`entry_slices`);
   `wrappers.slices.take` indexes.
2. The client shrinks its module to the same indices (`on_build`, `wrappers.submodel.shrink`) and puts the scaler and the
   masked loss on it (`shared.submodels`). It trains and sends its slice and its classes (`on_send`).
3. The server averages each element over the clients that hold it (`reduce`, `wrappers.slices.ElementMean`).
4. With static batch normalisation it then asks for the new model's statistics (`plan_round`, `personal_module`).

Before round 1 `wrappers.submodel_check.verify` tries that the module has sub-models at all (`check`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule

from fedlightning.algorithm import (
    GLOBAL,
    NEWCOMER,
    POOLED,
    Client,
    FederatedCallback,
    Job,
    Message,
    Plan,
    Server,
    Setup,
    Stage,
    State,
    Update,
    WeightingName,
    Wire,
    as_names,
    load_state,
    training_loss,
)
from fedlightning.callbacks.checkpoints import LocalCheckpoint
from fedlightning.callbacks.shared.representations import head_path
from fedlightning.callbacks.shared.submodels import limit_labels, narrow_to_labels, scale_in_training
from fedlightning.wrappers.slices import ElementMean, Slices, take
from fedlightning.wrappers.submodel import entry_slices, first_units, plan_cuts, shrink
from fedlightning.wrappers.submodel_check import verify

STATISTICS = "statistics"


class HeteroFL(FederatedCallback):
    r"""Clients train the same network at the width they can afford; each entry is averaged over those that hold it.

    Diao, Ding, Tarokh, "HeteroFL: computation and communication efficient federated learning for heterogeneous
    clients", ICLR 2021.

    Down and up: the client's slice of `W`: the first `ceil(r C_l)` of the `C_l` units of every hidden layer (inputs and
    classes are never cut). No state. The global model has all units; a client deploys its slice.

    * *Scaler*: in training, outputs of hidden linear and convolutional layers are divided by `r`.
    * *Masked loss*: in training, the logits of classes that a client has no sample of are 0; rows of the head are
      averaged over the clients that have the class.
    * *Server*: every entry is the mean over the clients whose slice holds it. Held by nobody, it keeps its value.

    It is for chains of Linear, Conv and normalisation layers (and residual sums of them), registered in order; other
    modules are refused at start. Beside methods that keep a model at the client, use fixed rates. The scaler enlarges
    steps by `1/r`: clip gradients as the paper does (`gradient_clip_val=1`).

    Args:
        rates: Widths in (0, 1]: a list dealt to the clients in turn, or one for each client by id (paper: subsets of 1,
            1/2, 1/4, 1/8, 1/16; the default is its first three).
        dynamic: Every client draws a width from the list in every round (the paper's dynamic assignment).
        scaler: Divides by the rate in training (paper).
        masked_loss: Leaves out absent classes in training and in the head's mean (paper).
        static_bn: After each round the participants run the new global model over their training data, and the means of
            the batch statistics become its BatchNorm statistics; a slice is deployed with those of its client's data
            (the paper's static batch normalisation; nothing to do without BatchNorm). It costs a pass and the full
            model down. False: running statistics are averaged as all else.
        head: Path of the layer that gives the logits. `None` takes the last layer.
        weighting: Weights of the clients: `"uniform"` (paper) or `"samples"`.

    Raises:
        ValueError: If a rate is outside (0, 1], rates to draw from are a table, or `head` names several layers.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from fedlightning.callbacks import HeteroFL
        >>> module = BoringModel()
        >>> module.layer = torch.nn.Sequential(torch.nn.Linear(32, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> half = take(module.state_dict(), HeteroFL().slices(module, rate=0.5))
        >>> {name: tuple(value.shape) for name, value in half.items() if name.endswith("weight")}
        {'layer.0.weight': (4, 32), 'layer.2.weight': (2, 4)}
    """

    def __init__(
        self,
        rates: Sequence[float] | dict[str, float] = (1.0, 0.5, 0.25),
        dynamic: bool = False,
        scaler: bool = True,
        masked_loss: bool = True,
        static_bn: bool = True,
        head: str | list[str] | None = None,
        weighting: WeightingName = "uniform",
    ) -> None:
        values = list(rates.values()) if isinstance(rates, dict) else list(rates)
        if not values or not all(0.0 < rate <= 1.0 for rate in values):
            raise ValueError(f"HeteroFL got rates={rates}; widths are shares of the full model in (0, 1].")
        if dynamic and isinstance(rates, dict):
            raise ValueError("HeteroFL(dynamic=True) draws widths from a list, but rates is a table by client.")
        if len(as_names(head)) > 1:
            raise ValueError(f"HeteroFL got head={head}, but one layer gives the logits. Name that one.")
        self.rates = rates
        self.dynamic = dynamic
        self.scaler = scaler
        self.masked_loss = masked_loss
        self.static_bn = static_bn
        self.head = head
        self.weighting = weighting

    def claims(self, role: str) -> bool:
        """Return True if this callback answers `role`: without `static_bn` no plan and no other deployed model."""
        return super().claims(role) and not (role in ("plan_round", "personal_module") and not self.static_bn)

    def check(self, setup: Setup) -> None:
        """Refuse modules without sub-models, and callbacks that need all clients' models to have one shape.

        Raises:
            ValueError: With the reason and another way.
        """
        if not setup.module.automatic_optimization:
            raise ValueError(
                f"HeteroFL tries a training step of every sub-model, but {type(setup.template).__name__} optimizes manually. "
                "Use automatic optimization, or FedAvg."
            )
        missing = [c for c in setup.clients if isinstance(self.rates, dict) and c not in self.rates]
        if missing:
            raise ValueError(f"HeteroFL got no rate for client '{missing[0]}'. Give a list, or one for each client.")
        try:
            cuts, batch = plan_cuts(setup.module, self._head(setup.module)), setup.first_batch()
        except ValueError as error:
            wrapping = [other.key for other in setup.callbacks if other.claims("wrap_module")]
            if not wrapping:
                raise
            raise ValueError(
                f"HeteroFL cannot cut what {wrapping[0]} made of the module: {error} Remove one of them."
            ) from error
        for rate in sorted(set(self.rates.values() if isinstance(self.rates, dict) else self.rates)):
            if batch is not None and rate < 1.0:
                verify(setup.module, cuts, first_units(rate), lambda module: training_loss(module, batch))
        for other in setup.callbacks:
            wire = other.wire(setup.module)
            whole = {"parameters", "state", "states"}.intersection(
                spec for spec in (*wire.down.values(), *wire.up.values()) if isinstance(spec, str)
            )
            if other is not self and (whole or other.claims("plan_round")):
                why = "sends values shaped as the full model" if whole else "plans rounds of its own"
                raise ValueError(f"{other.key} {why}, but HeteroFL's clients hold parts of it. Remove one of them.")
            if self.dynamic and isinstance(other, LocalCheckpoint):
                raise ValueError(
                    "LocalCheckpoint keeps a client's best model, but under HeteroFL(dynamic=True) its width changes. "
                    "Use GlobalCheckpoint, or dynamic=False."
                )

    def wire(self, module: Any) -> Wire:
        """Declare the rate down; the classes of a client and, for static batch normalisation, statistics up."""
        return Wire(down={"rate": "scalar"}, up={"classes": (-1,), "statistics": "state", "batches": "scalar"})

    # -- 1. the server cuts --------------------------------------------------------------------------------------------
    def rate_of(self, server: Server, client: str) -> float:
        """Return the client's width in this round."""
        if isinstance(self.rates, dict):
            return self.rates[client]
        number = server.clients.index(client)
        if not self.dynamic:
            return float(self.rates[number % len(self.rates)])
        drawn = torch.randint(len(self.rates), (len(server.clients),), generator=server.rng("rates"))
        return float(self.rates[int(drawn[number])])

    def slices(self, module: LightningModule, rate: float) -> Slices:
        """Return the indices that a client of this rate holds, for every entry of `module` that is cut.

        Args:
            module: The full module.
            rate: The client's width, in (0, 1].
        """
        return entry_slices(module, plan_cuts(module, self._head(module)), first_units(rate)) if rate < 1.0 else {}

    def _head(self, module: LightningModule) -> str:
        return head_path(module, next(iter(as_names(self.head)), None))

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Cut the client's slice out of the message's state; who takes no part in training and has no rate gets all."""
        listed = isinstance(self.rates, dict) and job.client in self.rates
        whole = job.tag == STATISTICS or job.client == POOLED or (job.tag == NEWCOMER and not listed)
        rate = 1.0 if whole else self.rate_of(server, job.client)
        message.extras[self.key] = {"rate": rate}
        message.state = take(message.state, self.slices(server.module, rate))

    # -- 2. the client shrinks, trains and sends -----------------------------------------------------------------------
    def on_build(self, client: Client, message: Message) -> None:
        """Shrink the module to the client's width; put the scaler and the mask on it, which act in training only."""
        rate = message.extras[self.key]["rate"]
        if self.dynamic and client.keeps_optimizers:
            raise ValueError("HeteroFL(dynamic=True) changes a client's shapes: optimizers cannot be kept. Use 'reset'")
        head, slices = self._head(client.module), self.slices(client.module, rate)
        shrink(client.module, slices)
        if self.scaler and slices:
            scale_in_training(client.module, head, rate)
        counts = client.class_counts if self.masked_loss and client.id != POOLED else None
        owned = None if counts is None else limit_labels(client.module, head, counts)
        if owned is not None:
            client.scratch[self.key] = owned

    def on_send(self, client: Client, update: Update) -> None:
        """Send the classes of the client, or the statistics if the server asked for them."""
        if client.message.tag == STATISTICS:
            statistics, batches = client.normalisation_statistics()
            update.extras[self.key] = {"statistics": statistics, "batches": batches}
        elif client.steps and self.key in client.scratch:
            update.extras[self.key] = {"classes": client.scratch[self.key]}

    # -- 3. the server averages ----------------------------------------------------------------------------------------
    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Return the mean of every element over its holders; of rows of the head, over those who have the class."""
        mean, model = ElementMean(), server.models[updates[0].model]
        for update in updates:
            state, slices = update.state, self.slices(server.module, self.rate_of(server, update.client))
            classes = update.extras.get(self.key, {}).get("classes")
            if classes is not None:
                state, slices = narrow_to_labels(state, slices, self._head(server.module), classes)
            mean.add(state, model, slices, server.weight(update))
        return mean.result(model)

    # -- 4. static batch normalisation ---------------------------------------------------------------------------------
    def plan_round(self, server: Server) -> Plan:
        """Train, make the new model, and collect the statistics of its BatchNorm layers."""
        clients = server.participants()
        yield [Job(client) for client in clients]
        whole = len(server.shared_names()) == len(server.kinds)  # else there is no full model to run
        if not whole or not any(name.endswith("running_mean") for name in server.kinds):
            return
        yield []
        sums: State = {}
        batches = 0
        for update in (yield [Job(client, work=0, returns=(), tag=STATISTICS) for client in clients]):
            extras = update.extras.get(self.key, {})
            batches += extras.get("batches", 0)
            for name, value in extras.get("statistics", {}).items():
                sums[name] = sums.get(name, torch.zeros_like(value).double()) + extras["batches"] * value.double()
        if batches:
            means = {name: (total / batches).to(server.model[name].dtype) for name, total in sums.items()}
            server.models[GLOBAL] = {**server.model, **means}

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return the client's slice with the statistics of its own training data: those of the full model differ."""
        if client.message.extras[self.key]["rate"] == 1.0:
            return client.module
        statistics, batches = client.normalisation_statistics()
        if batches == 0:
            return client.module
        module = client.copy_module()
        load_state(module, statistics)
        return module
