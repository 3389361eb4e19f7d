"""The contract between the core and every algorithm: :class:`FederatedCallback`.

Two sorts of methods. **Events** run for every callback in list order; where they return a value, they chain. **Roles**
are answered by at most one callback; two that claim one are refused at start, by name. An ordinary Lightning hook on
a federated callback runs inside each client's local training.

A callback object holds hyper-parameters only, each under the name of its ``__init__`` argument. What lives from round
to round lives in ``server.state[key]`` and ``client.state[key]`` as tensors and plain values: the core checkpoints it,
moves it between processes and restores it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from fedlightning.messages import Message, Update, Wire
from fedlightning.tensors import EntryKind, State
from fedlightning.wrappers.features import FeatureTap

if TYPE_CHECKING:
    from fedlightning.federation.server import Server
    from fedlightning.visit.client import Client

Owner = str
"""Whose module is being built: ``"server"`` or a client's id."""

Stage = Literal["G", "L1", "L2"]
WeightingName = Literal["samples", "uniform", "log"]
"""Weight of an update by its training samples n: n, 1 or log(1 + n)."""
Weighting = WeightingName | Callable[["Server", Update], float]
"""Weight of an update before normalisation over the participants: by name, or a function of the server and the update."""
POOLED = "pooled"
"""Id of the virtual client that trains on the union of all clients' data (central baselines)."""


@dataclass(frozen=True)
class Job:
    """One visit that a plan asks for.

    Attributes:
        client: the client's id (:data:`POOLED` for the union of the data).
        model: which of the server's models goes down.
        data: ``"train"``: its own loader; ``"pooled"``: the union.
        work: local epochs or steps; ``None``: the trainer's default; 0: no training (a probe).
        down: names sent down; ``None``: all that the client does not keep to itself.
        returns: names to send back; ``None``: the shared names.
        tag: the algorithm's own mark, seen in ``message.tag`` and ``update.tag``.
    """

    client: str
    model: str = "global"
    data: Literal["train", "pooled"] = "train"
    work: int | None = None
    down: tuple[str, ...] | None = None
    returns: tuple[str, ...] | None = None
    tag: str = ""


Plan = Generator[list[Job], list[Update], None]


@dataclass(frozen=True)
class Phase:
    """One of several fits in a visit.

    Attributes:
        name: unique in the visit; it is part of the address of the phase's randomness.
        train: state names or module prefixes that train in this phase; the rest is frozen, and modules none of whose
            entries are named stay in eval mode (name the buffers too). ``None``: everything.
        start: loads the parameters to start from; ``None``: go on from where the last phase ended.
        work: local epochs or steps; ``None``: the message's.
        unit: what ``work`` counts; ``None``: what the trainer counts.
        lr_factor: factor on the learning rates of this phase's optimizers when they are made.
        repeats: name of the phase whose batches and randomness this one sees again; ``None``: its own.
        federated: corrections and loss terms of callbacks act, and steps are counted, only in federated phases.
        terms_of: keys of callbacks whose corrections and loss terms act although the phase is not federated.
        keep_as: called with the client when the phase ends (to store its result); the module's parameters are then
            put back to what they were before the phase unless this is ``None``.
    """

    name: str = "fit"
    train: tuple[str, ...] | None = None
    start: State | None = None
    work: int | None = None
    unit: Literal["epochs", "steps"] | None = None
    lr_factor: float = 1.0
    repeats: str | None = None
    federated: bool = True
    terms_of: tuple[str, ...] = ()
    keep_as: Callable[[Client], None] | None = None


@dataclass(frozen=True)
class GradientContext:
    """What :meth:`FederatedCallback.correct_gradient` may look at: per-client values as tensors.

    Attributes:
        anchor: the server's model as it was sent (fp32 at least), on the parameter's device; only names that travel.
        payload: what the callback sent down (``message.extras[key]``).
        state: the callback's ``client.state[key]``.
        client: the client's id; num_samples: its training samples.
        lr: learning rate of the parameter's group.
        phase: name of the phase (``"fit"`` unless the visit has several).
    """

    anchor: Mapping[str, Tensor]
    payload: Mapping[str, Any]
    state: Mapping[str, Any]
    client: str
    num_samples: int
    lr: float
    phase: str = "fit"


@dataclass
class Setup:
    """What :meth:`FederatedCallback.check` may look at before round 1.

    Attributes:
        module: a built copy of the federation's module, wrapped by every callback.
        template: the user's module as it was given.
        kinds: kind of every state entry of ``module``.
        callbacks: all federated callbacks in order.
        optimizer_names: class names of the optimizers that the module configures; empty if it needs a running
            trainer to tell.
        clients: the clients' ids; num_samples: training samples of each.
        local_epochs, local_steps, max_rounds: the trainer's work plan.
        first_batch: gives one training batch of the first client that has one.
        has_pooled: whether the union of the clients' data of a split can be had in one place.
    """

    module: LightningModule
    template: LightningModule
    kinds: Mapping[str, EntryKind]
    callbacks: Sequence[FederatedCallback]
    clients: Sequence[str]
    num_samples: Mapping[str, int]
    max_rounds: int
    local_epochs: int | None
    local_steps: int | None
    optimizers: Sequence[Any] = ()
    first_batch: Callable[[], Any] = lambda: None
    has_pooled: Callable[[str], bool] = lambda split: True
    warn: Callable[[str], None] = lambda text: None


class FederatedCallback(Callback):
    """Base of every algorithm, checkpoint and diagnostic that takes part in a federation."""

    weighting: Weighting | None = None
    """How clients are weighted in the mean: by `"samples"`, `"uniform"`, by the `"log"` of their samples, or by a function
    of the server and the update. `None` leaves it to the other callbacks (default: samples)."""
    saved_as: str | None = None
    """Name under which a class's state, extras and randomness go, where that is not the class's name: what runs have saved
    stays readable when a class is renamed. Not inherited."""

    _client: Client | None = None

    @property
    def key(self) -> str:
        """Name under which state, extras and error messages of this callback go: :attr:`saved_as`, or the class's name."""
        kind = type(self)
        return vars(kind).get("saved_as") or kind.__name__

    @property
    def client(self) -> Client:
        """The client being visited; bound by the core for the time of a visit."""
        if self._client is None:
            raise RuntimeError(f"{self.key}.client is only there while a client is being visited.")
        return self._client

    def hyperparameters(self) -> dict[str, Any]:
        """The arguments this callback was made with, read from the attributes of the same names."""
        names = [name for name in inspect.signature(type(self).__init__).parameters if name not in ("self", "kwargs")]
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def claims(self, role: str) -> bool:
        """Whether this callback answers ``role``; by default when it overrides it. Override to decline by option."""
        return getattr(type(self), role) is not getattr(FederatedCallback, role)

    # -- events, server side -------------------------------------------------------------------------------------
    def check(self, setup: Setup) -> None:
        """Before round 1: refuse what cannot work, with ``ValueError`` and a sentence."""

    def wrap_module(self, module: LightningModule, owner: Owner) -> LightningModule:
        """Turn a fresh copy of the module into the one that ``owner`` trains. Chains; must be deterministic."""
        return module

    def shared_names(self, server: Server, module: nn.Module) -> Iterable[str] | None:
        """Exact names or module prefixes that travel, decided anew each round; answers are intersected.

        ``None``: no opinion. An empty list: nothing travels.
        """
        return None

    def wire(self, module: nn.Module) -> Wire:
        """The extras this callback may send down and up, under its key."""
        return Wire()

    def on_federation_start(self, server: Server) -> None:
        """Before the first round of a new federation (not when one is resumed)."""

    def on_federation_end(self, server: Server) -> None:
        """After the last round."""

    def on_round_start(self, server: Server) -> None:
        """Before the round is planned."""

    def on_round_end(self, server: Server) -> None:
        """After aggregation and evaluation, before the state is saved."""

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """A message is about to leave: add extras, swap the state. Must not change ``server``."""

    def on_update(self, server: Server, update: Update) -> None:
        """An update without error is folded in, in client order."""

    def on_reduced(self, server: Server, state: State) -> State:
        """The mean is there, the server step is not done yet. Chains."""
        return state

    # -- events, client side -------------------------------------------------------------------------------------
    def on_build(self, client: Client, message: Message) -> None:
        """``client.module`` is as it was built and nothing is loaded yet: give it the shape of what came (a sub-model).
        Also runs for evaluation.
        """

    def on_receive(self, client: Client, message: Message) -> None:
        """Edit what came (``message.state``) before the core loads it over what stayed. Also runs for evaluation, on
        a copy of the client's state.
        """

    def on_visit_start(self, client: Client) -> None:
        """The merged model (stage L1) is loaded and training is about to start."""

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """A gradient-form term: after unscaling, before clipping, once per optimizer step. Chains."""
        return gradient

    def feature_taps(self, module: LightningModule) -> Mapping[str, FeatureTap]:
        """The features that :meth:`training_loss` wants to see, by label: taps on submodules, not attached."""
        return {}

    def training_loss(
        self, client: Client, module: LightningModule, batch: Any, loss: Tensor, features: Mapping[str, Tensor]
    ) -> Tensor:
        """A loss-form term: the loss that ``training_step`` returned for ``batch`` in, the one to train on out. Chains.

        ``features`` holds what the taps caught in this step, with its graph. What the module logged stays the task's.
        """
        return loss

    def on_send(self, client: Client, update: Update) -> None:
        """The update is about to leave: add extras, drop or encode entries, store client state."""

    def on_client_evaluated(
        self, client: Client, stage: Stage, split: str, metrics: Mapping[str, float], module: LightningModule
    ) -> None:
        """The client's model was scored on its own ``split`` data at ``stage``. May write ``client.checkpoints``."""

    # -- roles ---------------------------------------------------------------------------------------------------
    def plan_round(self, server: Server) -> Plan:
        """The round as a generator of job lists: ``updates = yield jobs`` as often as it needs.

        The updates that come back are light: their model entries have been folded in already.
        An empty list makes the new models out of what has come so far, for jobs that are to see them.
        """
        raise NotImplementedError

    def final_jobs(self, server: Server) -> list[Job]:
        """Visits after the last round whose results stay with the clients."""
        raise NotImplementedError

    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Several fits in one visit, in order; a generator may look at what the last one left before it yields."""
        raise NotImplementedError

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Combine all updates of one model."""
        raise NotImplementedError

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """From the old global entries and the reduced ones (same names) to the new ones."""
        raise NotImplementedError

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """The model of stage G for ``client`` (``None``: for all); ``None`` if the method has none."""
        raise NotImplementedError

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """The model this client deploys and is evaluated on; ``client.module`` unless the method mixes."""
        raise NotImplementedError


ROLES = (
    "plan_round",
    "final_jobs",
    "local_phases",
    "reduce",
    "server_step",
    "global_module",
    "personal_module",
)

T = TypeVar("T")


@dataclass
class CallbackList:
    """The federated callbacks of a run: runs events, finds who answers a role, refuses double claims."""

    callbacks: list[FederatedCallback] = field(default_factory=list)

    def __post_init__(self) -> None:
        keys = [callback.key for callback in self.callbacks]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"{key} is in the list of callbacks {keys.count(key)} times. Keep one of them.")
        for role in ROLES:
            claimants = [callback.key for callback in self.callbacks if callback.claims(role)]
            if len(claimants) > 1:
                raise ValueError(
                    f"{' and '.join(claimants)} both claim '{role}', which only one callback can answer. "
                    "Remove one of them."
                )
        wishes = {callback.key: callback.weighting for callback in self.callbacks if callback.weighting is not None}
        if len(set(wishes.values())) > 1:
            raise ValueError(
                f"Callbacks ask for different weightings: {wishes}. A mean has one: set the same `weighting` on them."
            )
        for key, wish in wishes.items():
            if not callable(wish) and wish not in WEIGHTINGS:
                raise ValueError(
                    f"{key} has weighting={wish!r}. Known weightings: {sorted(WEIGHTINGS)}, or a function of the server "
                    "and the update."
                )

    def __iter__(self) -> Any:
        return iter(self.callbacks)

    def role(self, name: str) -> FederatedCallback | None:
        """The callback that answers role ``name``, or ``None`` for the core's default."""
        return next((callback for callback in self.callbacks if callback.claims(name)), None)

    def weight(self, server: Server, update: Update) -> float:
        """Return an update's weight before normalisation, by the weighting that the callbacks agree on."""
        wishes = (callback.weighting for callback in self.callbacks if callback.weighting is not None)
        weighting = next(wishes, "samples")
        return weighting(server, update) if callable(weighting) else WEIGHTINGS[weighting](update.num_samples)

    def event(self, name: str, *args: Any) -> None:
        """Run an event on every callback, in list order."""
        for callback in self.callbacks:
            getattr(callback, name)(*args)

    def correctors(self) -> list[FederatedCallback]:
        """The callbacks that have a gradient-form term."""
        return [callback for callback in self.callbacks if callback.claims("correct_gradient")]

    def loss_terms(self) -> list[FederatedCallback]:
        """The callbacks that have a loss-form term."""
        return [callback for callback in self.callbacks if callback.claims("training_loss")]

    def find(self, kind: type[T]) -> T | None:
        """The first callback of a class, or ``None``."""
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)


WEIGHTINGS: dict[str, Callable[[int], float]] = {
    "samples": float,
    "uniform": lambda num_samples: 1.0,
    "log": lambda num_samples: math.log1p(num_samples),
}
