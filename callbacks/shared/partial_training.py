"""Base of the methods that train sub-models of one network. The way of the model through a round, and where each step is:

1. The server cuts the client's part out of the model (`on_broadcast`). The method says which units a client has in a round
   (`units`); `wrappers.submodel` finds which units of which layers belong together (`plan_cuts`) and from both the kept
   indices of every entry (`entry_slices`); `wrappers.slices.take` indexes.
2. The client shrinks its module to the same indices (`on_build`, `wrappers.submodel.shrink`) and puts the scaler and the
   masked loss on it, if the method has them. It trains and sends its part (`on_send`).
3. The server averages each element over the clients that hold it (`reduce`, `wrappers.slices.ElementMean`). It works out the
   parts again from the round and the client that the update names, so an update may be late.
4. With static batch normalisation it then asks for the new model's statistics (`plan_round`, `personal_module`).

Before round 1 `wrappers.submodel.verify` tries that the module has sub-models at all (`check`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.algorithm import (
    GLOBAL,
    NEWCOMER,
    POOLED,
    Change,
    Client,
    Extra,
    Facts,
    Job,
    Message,
    Need,
    Newcomers,
    Plan,
    Server,
    Setup,
    Stage,
    State,
    SubModels,
    Update,
    WeightingName,
    Wire,
    facts,
    generator,
    probes,
    requires,
)
from fedlightning.callbacks.shared.representations import head_path, refuse_classes
from fedlightning.callbacks.shared.values_by_turn import dealt_to, refuse_new_deal
from fedlightning.layers import as_names
from fedlightning.ranges import Length, PositiveShare, make_init
from fedlightning.tensors import load_state, module_state, narrow, widen
from fedlightning.wrappers import Mixin, mix
from fedlightning.wrappers.heads import Convolution
from fedlightning.wrappers.slices import ElementMean, Slices, take
from fedlightning.wrappers.submodel import Units, entry_slices, plan_cuts, shrink, verify


class ScaledMixin(Mixin):
    """On a layer: its outputs are divided by the rate in training, so that sums keep their size."""

    wraps = ("forward",)

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = call(*args, **kwargs)
        return output / vars(self)["submodel_rate"] if self.training else output


class MaskedMixin(Mixin):
    """On a head: in training the logits of classes that the client does not have are 0."""

    wraps = ("forward",)

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        logits = call(*args, **kwargs)
        absent: Tensor = vars(self)["submodel_absent"]
        return logits.index_fill(-1, absent.to(logits.device), 0.0) if self.training else logits


def scale_in_training(module: LightningModule, head: str, rate: float) -> None:
    """Put the scaler on every linear and convolutional layer but the head, in place.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> module = BoringModel()
        >>> module.layer = nn.Sequential(nn.Linear(32, 1), nn.Linear(1, 2))
        >>> before = module.layer[0](torch.ones(32))
        >>> scale_in_training(module, head="layer.1", rate=0.5)
        >>> (module.layer[0](torch.ones(32)) / before).item()
        2.0
    """
    last = module.get_submodule(head)
    for layer in list(module.modules()):
        if isinstance(layer, (nn.Linear, *Convolution)) and layer is not last:
            vars(mix(layer, ScaledMixin))["submodel_rate"] = rate


def limit_labels(module: LightningModule, head: str, counts: Sequence[int]) -> Tensor | None:
    """Mask the head's outputs for classes without samples, in place.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> module = BoringModel()
        >>> limit_labels(module, "layer", counts=[0, 7])
        tensor([1])
        >>> module.layer(torch.ones(32))[0].item()
        0.0
    """
    layer = module.get_submodule(head)
    if not isinstance(layer, nn.Linear) or layer.out_features < max(2, len(counts)):
        return None
    padded = torch.zeros(layer.out_features, dtype=torch.long)
    padded[: len(counts)] = torch.tensor(counts)
    absent = torch.nonzero(padded == 0).flatten()
    if len(absent):
        vars(mix(layer, MaskedMixin))["submodel_absent"] = absent
    return torch.nonzero(padded).flatten()


def narrow_to_labels(state: Mapping[str, Tensor], slices: Slices, head: str, labels: Tensor) -> tuple[State, Slices]:
    """Keep only the head's rows of some classes, in a state and in the indices that it holds.

    Example:
        >>> state, slices = narrow_to_labels({"fc.bias": torch.tensor([5.0, 6.0])}, {}, "fc", torch.tensor([1]))
        >>> state["fc.bias"], slices
        (tensor([6.]), {'fc.bias': (tensor([1]),)})
    """
    narrow, narrowed_slices = dict(state), dict(slices)
    for name, value in state.items():
        if name.rpartition(".")[0] == head:
            narrow[name] = value[labels]
            narrowed_slices[name] = (labels, *slices.get(name, (None,) * value.ndim)[1:])
    return narrow, narrowed_slices


STATISTICS = "statistics"
"""Tag of the jobs in which clients run the new global model over their data."""


Rates = (
    Annotated[Sequence[PositiveShare], Length(note="Shares of the full model.")]
    | Annotated[dict[str, PositiveShare], Length()]
)


@make_init
class PartialTraining(SubModels):
    """Base of methods in which each client trains some units of every hidden layer of one network.

    A subclass gives :meth:`units`. Where they change from round to round, it sets :attr:`rolls`.

    Args:
        rates: Widths in (0, 1]: a list dealt to the clients in turn, or one for each client by id.
        dynamic: Every client draws a width from the list in every round.
        scaler: Outputs of hidden layers are divided by the rate in training.
        masked_loss: Leaves out absent classes in training and in the head's mean.
        static_bn: BatchNorm statistics are those of the new global model over the participants' training data.
        head: Path of the layer that gives the logits. `None` takes the last layer.
        weighting: Weights of the clients.

    Attributes:
        rolls: True where a client has other units in every round. Nothing that a client keeps would fit the next ones.
        deploys_all: True where clients deploy the full model, whatever part they train.

    Raises:
        ValueError: If a rate is outside (0, 1], rates to draw from are a table, or `head` names several layers.
    """

    rolls = False
    deploys_all = False

    rates: Rates
    dynamic: bool = False
    scaler: bool = False
    masked_loss: bool = False
    static_bn: bool = True
    head: str | list[str] | None = None
    weighting: WeightingName | None = "uniform"

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.dynamic and isinstance(self.rates, dict):
            raise ValueError(f"{name}(dynamic=True) draws widths from a list, but rates is a table by client.")
        if len(as_names(self.head)) > 1:
            raise ValueError(f"{name} got head={self.head}, but one layer gives the logits. Name that one.")

    def units(self, rate: float, round: int, client: str, seed: int) -> Units:
        """Return the units that a client has in a round: the same for the same arguments, wherever it is asked."""
        raise NotImplementedError

    def claims(self, role: str) -> bool:
        """Return True if this callback answers `role`: without `static_bn` no plan and no other deployed model."""
        return super().claims(role) and not (role in ("plan_round", "personal_module") and not self.static_bn)

    # -- before round 1 ------------------------------------------------------------------------------------------------
    def check(self, setup: Setup) -> None:
        """Refuse modules without sub-models, and callbacks that need all clients' models to have one shape."""
        try:
            cuts, batch = plan_cuts(setup.module, self._head(setup.module)), setup.data.first_batch()
        except ValueError as error:
            wrapping = [other.key for other in setup.callbacks if other.claims("wrap_module")]
            if not wrapping:
                raise
            raise ValueError(
                f"{self.key} cannot cut what {wrapping[0]} made of the module: {error} Remove one of them."
            ) from error
        for rate in sorted(self._computed()):
            if batch is not None and rate < 1.0:
                units = self.units(rate, 1, setup.run.clients[0], 0)
                verify(setup.module, cuts, units, lambda module: probes.training_loss(module, batch))

    def _computed(self) -> set[float]:
        """The widths at which some client computes."""
        return set(self.rates.values() if isinstance(self.rates, dict) else self.rates)

    @property
    def _changing(self) -> str:
        """How the method is called where a client's sub-model changes from round to round; else empty."""
        return self.key if self.rolls else f"{self.key}(dynamic=True)" if self.dynamic else ""

    @property
    def facts(self) -> Facts:
        """Clients hold parts of the model; where these change, nothing that a client keeps fits the next ones."""
        needs = [facts.WHOLE_MODELS_OF_CLIENTS]
        if self._changing:
            what = f"gives a client other units in every round (under {self._changing})"
            kept = (Change.LOCAL_SELECTION, Change.KEEPS, "final_jobs")
            needs.append(Need(what, kept, "use GlobalCheckpoint, or HeteroFL with fixed rates"))
        return Facts(
            needs=needs,
            requires=[
                requires.AutomaticOptimization(
                    "tries a training step of every sub-model", "Use automatic optimization, or FedAvg."
                ),
                requires.ForEveryClient(of=("rates",)),
                requires.FreshOptimizers(f"changes what a client trains (by {self._changing})", when="_changing"),
            ],
            newcomers=Newcomers(join=self._join),
        )

    def on_federation_start(self, server: Server) -> None:
        """Refuse running statistics that stay at a client whose units change."""
        if self._changing and server.models.float_buffers == "local" and "float_buffer" in server.kinds.values():
            raise ValueError(
                f"float_buffers='local' keeps running statistics at each client, but under {self._changing} the next "
                "round's units are others. Use float_buffers='average'."
            )

    def _join(self, server: Server, clients: Sequence[str]) -> None:
        """Refuse to change the widths of the clients that are there, which come from a list in turn."""
        if not isinstance(self.rates, dict) and not self.dynamic:
            refuse_new_deal(self, server, clients, "rates", self.rates)

    def wire(self, module: Any) -> Wire:
        """Declare the rate down; the classes of a client and, for static batch normalisation, statistics up."""
        return Wire(
            down={"rate": "scalar"},
            up={
                "classes": Extra((-1,), whole=True, low=0),
                "statistics": "state",
                "batches": Extra("scalar", whole=True, low=0),
            },
        )

    # -- 1. the server cuts --------------------------------------------------------------------------------------------
    def rate_of(self, server: Server, client: str, round: int | None = None) -> float:
        """Return the client's width in a round; default: the server's present one."""
        if isinstance(self.rates, dict) or not self.dynamic:
            return float(dealt_to(self.rates, server.clients, client))
        number = server.clients.index(client)
        address = (server.seed, server.round if round is None else round, "server", "rates")
        drawn = torch.randint(len(self.rates), (len(server.clients),), generator=generator(*address))
        return float(self.rates[int(drawn[number])])

    def slices(self, module: LightningModule, rate: float, round: int = 0, client: str = "", seed: int = 0) -> Slices:
        """Return the indices that a client holds in a round, for every entry of `module` that is cut."""
        if rate == 1.0:
            return {}
        return entry_slices(module, plan_cuts(module, self._head(module)), self.units(rate, round, client, seed))

    def submodel(
        self, module: LightningModule, rate: float, round: int = 0, client: str = "", seed: int = 0
    ) -> LightningModule:
        """Return a smaller copy of a trained module: the part of a width, to deploy or to score.

        BatchNorm statistics are those of the full module, which do not fit a part of it: estimate them anew.
        """
        return shrink(copy.deepcopy(module), self.slices(module, rate, round, client, seed))

    def _head(self, module: LightningModule) -> str:
        return head_path(module, next(iter(as_names(self.head)), None))

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Cut the client's part out of the message's state; who takes no part in training and has no rate gets all."""
        listed = isinstance(self.rates, dict) and job.client in self.rates
        whole = job.tag == STATISTICS or job.client == POOLED or (job.tag == NEWCOMER and not listed)
        whole = whole or (self.deploys_all and job.work == 0)
        rate = 1.0 if whole else self.rate_of(server, job.client, message.round)
        message.extras[self.key] = {"rate": rate}
        message.state = take(message.state, self.slices(server.module, rate, message.round, job.client, server.seed))

    # -- 2. the client shrinks, trains and sends -----------------------------------------------------------------------
    def on_build(self, client: Client, message: Message) -> None:
        """Shrink the module to the client's part; put the scaler and the mask on it, which act in training only."""
        rate = message.extras[self.key]["rate"]
        head = self._head(client.module)
        slices = self.slices(client.module, rate, message.round, client.id, client.seed)
        shrink(client.module, slices)
        if self.scaler and slices:
            scale_in_training(client.module, head, rate)
        counts = client.class_counts if self.masked_loss and client.id != POOLED else None
        owned = None if counts is None else limit_labels(client.module, head, counts)
        if owned is not None:
            client.scratch[f"{self.key} classes"] = owned

    def on_send(self, client: Client, update: Update) -> None:
        """Send the classes of the client, or the statistics if the server asked for them."""
        if client.message.tag == STATISTICS:
            statistics, batches = client.normalisation_statistics()
            update.extras[self.key] = {"statistics": statistics, "batches": batches}
        elif client.contributed and f"{self.key} classes" in client.scratch:
            update.extras[self.key] = {"classes": client.scratch[f"{self.key} classes"]}

    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse classes that the head does not have."""
        classes = update.extras.get(self.key, {}).get("classes")
        if classes is not None:
            rows = server.architecture(update.model).shapes[f"{self._head(server.module)}.weight"][0]
            refuse_classes(classes, rows)

    # -- 3. the server averages ----------------------------------------------------------------------------------------
    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Return the mean of every element over its holders; of rows of the head, over those who have the class."""
        mean, model = ElementMean(), server.models[updates[0].model]
        for update in updates:
            rate = self.rate_of(server, update.client, update.round)
            slices = self.slices(server.module, rate, update.round, update.client, server.seed)
            state, classes = update.state, update.extras.get(self.key, {}).get("classes")
            if classes is not None:
                state, slices = narrow_to_labels(state, slices, self._head(server.module), classes)
            mean.add(state, model, slices, server.weight(update))
        return self.result(mean, model, sum(map(server.weight, updates)))

    def result(self, mean: ElementMean, old: State, total: float) -> State:
        """Return the new entries."""
        return mean.result(old)

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
                sums[name] = sums.get(name, widen(torch.zeros_like(value))) + extras["batches"] * widen(value)
        if batches:
            means = {name: narrow(total / batches, server.model[name]) for name, total in sums.items()}
            server.models[GLOBAL] = {**server.model, **means}

    def _fits(self, client: Client, stage: Stage) -> bool:
        """Whether a full model's statistics are of its own width: those of its training, or the server's for the full one.

        Where a part of the model stays at the clients, the server has made none, and sends a mean over the widths.
        """
        came = client.message.state
        mixed = self._computed() != {1.0} and any(name.endswith("running_mean") for name in came)
        return stage == "L2" or not mixed or came.keys() >= module_state(client.module).keys()

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return the client's part with the statistics of its own training data: those of the full model differ."""
        if client.message.extras[self.key]["rate"] == 1.0 and self._fits(client, stage):
            return client.module
        statistics, batches = client.normalisation_statistics()
        if batches == 0:
            return client.module
        module = client.copy_module()
        load_state(module, statistics)
        return module
