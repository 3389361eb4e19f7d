"""What the methods of a federated callback are given and give back: jobs, phases, contexts, weightings."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from fedlightning.contract.messages import GLOBAL, Update
from fedlightning.tensors import State

if TYPE_CHECKING:
    from fedlightning.client.client import Client
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
