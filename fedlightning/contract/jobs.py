"""What the methods of a federated callback are given and give back: jobs, phases, contexts, weightings."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from fedlightning.contract.messages import GLOBAL, Update
from fedlightning.datamodules.public import has_positions
from fedlightning.errors import listed
from fedlightning.tensors import EntryKind, State

if TYPE_CHECKING:
    from fedlightning.client.client import Client
    from fedlightning.contract.callback import FederatedCallback
    from fedlightning.server.server import Server

Owner = str
"""Whose module is being built: `"server"` or a client's id."""
Stage = Literal["G", "L1", "L2"]
"""When a model is evaluated: G after aggregation, L1 after receiving, L2 after local training."""
POOLED: Final = "pooled"
"""Id of the virtual client that trains on the union of all clients' data (central baselines)."""

NEWCOMER: Final = "newcomer"
"""Tag of a job, and of its message, for a client that has taken no part in training: it is to get what it deploys."""

WeightingName = Literal["samples", "uniform", "log"]
"""Weight of an update by its training samples n: n, 1 or log(1 + n)."""
Weighting = WeightingName | Callable[["Server", Update], float]
"""Weight of an update before normalisation over the participants: by name, or a function of the server and the update."""
WEIGHTINGS: dict[str, Callable[[int], float]] = {
    "samples": float,
    "uniform": lambda num_samples: 1.0,
    "log": lambda num_samples: math.log1p(num_samples),
}
"""The weight that each name stands for, as a function of the training samples."""


@dataclass(frozen=True)
class Arrivals:
    """How an asynchronous loop takes updates in, for an algorithm.

    Attributes:
        count: Updates that make a round, which is a step of the server's models.
        models: True where an update is taken as the model that came; else as the client's change since its message.
        max_staleness: Older updates are dropped; `None`: none is.

    Example:
        >>> Arrivals(count=10).models
        False
    """

    count: int = 1
    models: bool = False
    max_staleness: int | None = None


@dataclass(frozen=True)
class Job:
    """One visit that a plan asks for.

    Attributes:
        client: The client's id (:data:`POOLED` for the union of the data).
        model: Which of the server's models goes down.
        data: `"train"`: the client's own loader; `"pooled"`: the union.
        work: Local epochs or steps; `None`: the trainer's default; 0: no training.
        down: Names sent down; `None`: all that the client does not keep to itself.
        returns: Names to send back; `None`: the shared names.
        tag: The algorithm's own label, seen in `message.tag` and `update.tag`.
        keep: Give the plan this job's update with its model entries and extras, also after they have been folded in.
            They stay in memory as long as the plan holds them.

    Example:
        >>> Job("hospital-1", work=0, tag="probe").returns is None
        True
    """

    client: str
    model: str = GLOBAL
    data: Literal["train", "pooled"] = "train"
    work: int | None = None
    down: tuple[str, ...] | None = None
    returns: tuple[str, ...] | None = None
    tag: str = ""
    keep: bool = False


PhaseLoss = Callable[["Client", LightningModule, Any, int], Tensor]
"""A loss of a phase's own: of the client, its module, a batch on the device, and the batch's index."""
Plan = Generator[list[Job], list[Update], None]
"""A round as a generator: yields lists of jobs, is sent their updates."""
Placing = Generator[list[Job], list[Update], Mapping[str, str]]
"""As a plan, for clients that join a fitted federation: returns in a word or two where each belongs."""


@dataclass(frozen=True)
class Phase:
    """One of several fits in a visit.

    Attributes:
        name: Unique in the visit. It is part of the address of the phase's randomness.
        train: State names or module prefixes that train in this phase. The rest is frozen, and modules none of whose
            entries are named stay in eval mode (name the buffers too). `None`: everything trains.
        start: Parameters to start from; `None`: go on from where the last phase ended.
        work: Local epochs or steps; `None`: the message's.
        unit: Unit of `work`; `None`: the trainer's.
        lr_factor: Factor on the learning rates of this phase's optimizers when they are made.
        repeats: Name of the phase whose batches and randomness this one sees again; `None`: its own.
        federated: Corrections and loss terms of callbacks act, and steps are counted, only in federated phases.
        terms_of: Keys of callbacks whose corrections and loss terms act although the phase is not federated.
        keep_as: Called with the client when the phase ends, to store its result. The module's parameters are then put
            back to what they were before the phase.
        data: `"train"`: the job's training data; `"public"`: all public data, in an addressed order; or a loader, such as
            `client.public(ids, targets=...)` gives. Public samples do not count in the client's weight.
        loss: Function of client, module, batch (on the device) and its index that returns the loss to minimise. It takes
            the place of `training_step`, which is not called; optimizers are those of `configure_optimizers`. `None`: the
            task's own loss. Needs automatic optimization.

    Raises:
        ValueError: If `data` or `loss` is something else.
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
    data: Literal["train", "public"] | DataLoader[Any] = "train"
    loss: PhaseLoss | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.data, DataLoader) or self.data in ("train", "public")):
            raise ValueError(
                f"Phase(data={self.data!r}): use 'train', 'public', or a DataLoader such as client.public(...)."
            )
        if self.loss is not None and not callable(self.loss):
            raise ValueError(
                f"Phase(loss={self.loss!r}): give a function of client, module, batch and batch_idx that returns the loss."
            )

    @property
    def is_task(self) -> bool:
        """Whether it trains the task: `training_step` on the job's training data."""
        return self.loss is None and isinstance(self.data, str) and self.data == "train"


@dataclass(frozen=True)
class GradientContext:
    """The values of one client that :meth:`FederatedCallback.correct_gradient` may use.

    Attributes:
        anchor: The server's model as it was sent (fp32 at least), on the parameter's device; only names that travel.
        payload: What the callback sent down (`message.extras[key]`).
        state: The callback's `client.state[key]`.
        client: The client's id.
        num_samples: The client's training samples.
        lr: Learning rate of the parameter's group.
        phase: Name of the phase (`"fit"` unless the visit has several).
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
    """The federation as :meth:`FederatedCallback.check` sees it before round 1.

    Attributes:
        module: A built copy of the federation's module, wrapped by every callback.
        template: The user's module as it was given.
        modules: By name, a built module of every architecture, where clients have different ones; :attr:`module` is one of
            them, and the check runs once for each.
        kinds: Kind of every state entry of `module`.
        callbacks: All federated callbacks in order.
        clients: The clients' ids.
        num_samples: Training samples of each client.
        max_rounds: Rounds of the federation.
        local_epochs: Epochs of a visit, or `None` where work is counted in steps.
        local_steps: Steps of a visit, or `None` where work is counted in epochs.
        optimizers: The optimizers that the module configures; empty if it needs a running trainer to tell.
        optimizer_state: Whether optimizers begin anew in every visit (`"reset"`) or go on (`"keep"`).
        trainer_arguments: Arguments of the clients' Lightning Trainers that were set, such as `gradient_clip_val`.
        num_batches: Number of training batches in an epoch of a client.
        first_batch: Gives one training batch of the first client that has one.
        train_loaders: Gives the training loaders of the clients that have a batch; of one machine's, where they are apart.
        evaluate_every: Rounds between evaluations; 0: never.
        participation: Share (float) or number (int) of clients that take part in a round.
        has_pooled: Tells whether the union of the clients' data of a split can be had in one place.
        has_split: Tells whether any client has samples of a split.
        has_public: Tells whether there are public data.
        knows_groups: Tells whether the group (a patient) of every training sample is known.
        coupled_records: Says how features of a client's record depend on its other records, with a way out; empty: not.
        shared_names: Gives the names that travel in round 1; with `without=callback`, those that would without its choice.
        public_size: Gives the number of public samples; 0 without any. Raises ValueError where they have no positions.
        public_batch: Gives the first batch of public data; raises ValueError without any.
        public_batches: Gives all batches of public data, in the order of their samples.
        warn: Warns the user of something that does not stop the run.
        loop: Name of the class of the loop, which says when clients are visited.
        absent: What keeps clients out of rounds, such as `participation=0.5` or a callback; empty: all take part in each.
        has_clock: Whether the loop counts virtual seconds.
        drifts: Whether the clients' training data change from round to round.
        class_counts: Gives the training samples of a client by class; `None` where the data do not tell, or are elsewhere.
        ordinary: Lightning's callbacks that run inside visits: the trainer's, and the module's where they need no trainer.
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
    optimizer_state: Literal["reset", "keep"] = "reset"
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    num_batches: Callable[[str], int] = lambda client: 1
    first_batch: Callable[[], Any] = lambda: None
    train_loaders: Callable[[], Iterable[Any]] = lambda: ()
    evaluate_every: int = 1
    participation: int | float = 1.0
    has_pooled: Callable[[str], bool] = lambda split: True
    has_split: Callable[[str], bool] = lambda split: True
    has_public: Callable[[], bool] = lambda: False
    knows_groups: Callable[[], bool] = lambda: False
    coupled_records: Callable[[], str] = lambda: ""
    shared_names: Callable[..., Sequence[str]] = lambda without=None: ()
    modules: Mapping[str, LightningModule] = field(default_factory=dict)
    public_size: Callable[[], int] = lambda: 0
    public_batch: Callable[[], Any] = lambda: None
    public_batches: Callable[[], Iterable[Any]] = lambda: ()
    warn: Callable[[str], None] = lambda text: None
    loop: str = "Synchronous"
    absent: str = ""
    has_clock: bool = False
    drifts: bool = False
    class_counts: Callable[[str], Sequence[int] | None] = lambda client: None
    ordinary: Sequence[Callback] = ()

    def refuse_drift(self, owner: str, why: str) -> None:
        """Refuse training data that change from round to round.

        Args:
            owner: The callback that cannot do with it.
            why: What it does, as the middle of a sentence.

        Raises:
            ValueError: If they change.
        """
        if self.drifts:
            raise ValueError(
                f"{owner} {why}, and here the clients' training data change from round to round. Remove {owner}, or "
                "give data that stay."
            )

    def refuse_unnumbered(self, owner: str, why: str) -> None:
        """Refuse training samples that cannot be had one by one: those of streams and of ready batches.

        Args:
            owner: The callback that cannot do with it.
            why: What it does, as the middle of a sentence.

        Raises:
            ValueError: If a client has such samples.
        """
        other = next((loader for loader in self.train_loaders() if not has_positions(loader)), None)
        if other is not None:
            raise ValueError(
                f"{owner} {why}, and those of {type(getattr(other, 'dataset', other)).__name__} have no position: it gives a "
                "stream or ready batches. Use a map-style dataset of samples, and a batch_size."
            )

    def refuse_frozen(self, owner: str, names: Sequence[str], instead: str) -> None:
        """Refuse a part of the module that is to train by itself, and in which nothing does.

        Args:
            owner: The callback that trains it.
            names: Names of the part's entries.
            instead: The way out.

        Raises:
            ValueError: If no parameter among them trains.
        """
        if not any(self.kinds[name] == "trainable" for name in names):
            raise ValueError(
                f"{owner} trains a part of {type(self.template).__name__} by itself ({listed(map(repr, names))}), and no "
                f"parameter of it trains. {instead}"
            )

    def refuse_manual(self, owner: str, why: str, instead: str = "Use automatic optimization.") -> None:
        """Refuse a module that optimizes manually.

        Args:
            owner: The callback that cannot do with it.
            why: What it does, as the middle of a sentence.
            instead: The way out.

        Raises:
            ValueError: If it does.
        """
        if not self.module.automatic_optimization:
            raise ValueError(f"{owner} {why}, but {type(self.template).__name__} optimizes manually. {instead}")


class FirstStep(NamedTuple):
    """What one step of training and of validation has shown before round 1.

    Attributes:
        module: Name of the user's class.
        optimizers: Optimizers of the fit; empty where the clients' data are elsewhere.
        clips: Hook in which the module changes its gradients after the backward pass; empty: there is none.
        optimizer_state: Whether optimizers begin anew in every visit (`"reset"`) or go on (`"keep"`).
        logged: Metrics that the module logs in validation; `None` if that is not known.
        is_scored: Whether models are scored on validation data during the run.
    """

    module: str
    optimizers: tuple[Any, ...] = ()
    clips: str = ""
    optimizer_state: str = "reset"
    logged: tuple[str, ...] | None = None
    is_scored: bool = True
