"""The federation as callbacks check it before round 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lightning.pytorch import Callback, LightningModule
from torch.utils.data import IterableDataset

from fedlightning.datamodules.public import first_batch, public_loader, size_of
from fedlightning.datamodules.sampling import preserve_generators
from fedlightning.seeding import isolated
from fedlightning.tensors import EntryKind

if TYPE_CHECKING:
    from fedlightning.contract.callback import FederatedCallback


@dataclass(frozen=True)
class RunTerms:
    """How a run goes, in plain values.

    Attributes:
        clients: The clients' ids.
        max_rounds: Rounds of the federation.
        local_epochs: Epochs of a visit, or `None` where work is counted in steps.
        local_steps: Steps of a visit, or `None` where work is counted in epochs.
        optimizer_state: Whether optimizers begin anew in every visit (`"reset"`) or go on (`"keep"`).
        trainer_arguments: Arguments of the clients' Lightning Trainers that were set, such as `gradient_clip_val`.
        evaluate_every: Rounds between evaluations; 0: never.
        participation: Share (float) or number (int) of clients that take part in a round.
        loop: Name of the class of the loop, which says when clients are visited.
        absent: What keeps clients out of rounds, such as `participation=0.5` or a callback; empty: all take part in each.
        has_clock: Whether the loop counts virtual seconds.
        lightning_callbacks: Lightning's callbacks that run inside visits: the trainer's, and the module's where they need no
            trainer.
    """

    clients: Sequence[str]
    max_rounds: int
    local_epochs: int | None
    local_steps: int | None
    optimizer_state: Literal["reset", "keep"] = "reset"
    trainer_arguments: Mapping[str, Any] = field(default_factory=dict)
    evaluate_every: int = 1
    participation: int | float = 1.0
    loop: str = "Synchronous"
    absent: str = ""
    has_clock: bool = False
    lightning_callbacks: Sequence[Callback] = ()


@dataclass(frozen=True)
class DataView:
    """The clients' data, as far as a check may ask about them; what costs something is a function.

    Attributes:
        num_samples: Training samples of each client.
        drifts: Whether the clients' training data change from round to round.
        num_batches: Number of training batches in an epoch of a client.
        first_batch: Gives one training batch of the first client that has one; `None` if nobody has.
        train_loaders: Gives the training loaders of the clients that have a batch; of one machine's, where they are apart.
        has_pooled: Tells whether the union of the clients' data of a split can be had in one place.
        has_split: Tells whether any client has samples of a split.
        knows_groups: Tells whether the group (a patient) of every training sample is known.
        coupled_records: Says how features of a client's record depend on its other records, with a way out; empty: not.
        class_counts: Gives the training samples of a client by class; `None` where the data do not tell, or are elsewhere.
    """

    num_samples: Mapping[str, int]
    drifts: bool = False
    num_batches: Callable[[str], int] = lambda client: 1
    first_batch: Callable[[], Any] = lambda: None
    train_loaders: Callable[[], Iterable[Any]] = lambda: ()
    has_pooled: Callable[[str], bool] = lambda split: True
    has_split: Callable[[str], bool] = lambda split: True
    knows_groups: Callable[[], bool] = lambda: False
    coupled_records: Callable[[], str] = lambda: ""
    class_counts: Callable[[str], Sequence[int] | None] = lambda client: None


@dataclass(frozen=True)
class PublicDataView:
    """Public data, as far as a check may ask about them.

    Attributes:
        source: Gives their loader, or `None`, and the name of the data module.
        seed: The run's seed.
        convert: Converts a batch to the run's precision.
    """

    source: Callable[[], tuple[Any, str]]
    seed: int
    convert: Callable[[Any], Any]

    def exists(self) -> bool:
        """Return whether there are public data."""
        loader, name = self.source()
        dataset: Any = None if loader is None else loader.dataset
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                f"{name}.public_dataloader gives an iterable {type(dataset).__name__}, but clients draw public samples at "
                "random, by their index. Give a dataset with __len__ and __getitem__."
            )
        return loader is not None

    def size(self) -> int:
        """Return the number of public samples; 0 without any. Raises ValueError where they have no positions."""
        return size_of(*self.source())

    def batch(self) -> Any:
        """Return the first public batch; raises ValueError without any."""
        loader, name = self.source()
        with isolated(self.seed, "first public batch"), preserve_generators(getattr(loader, "dataset", None)):
            return self.convert(first_batch(loader, name))

    def batches(self) -> Iterator[Any]:
        """Yield all public batches, in the order of the samples."""
        loader, name = self.source()
        with isolated(self.seed, "public batches"), preserve_generators(getattr(loader, "dataset", None)):
            yield from map(self.convert, public_loader(loader, name))


class FirstStep(NamedTuple):
    """What one step of training and of validation has shown before round 1.

    Attributes:
        optimizers: Optimizers of the fit; empty where the clients' data are elsewhere, or the step failed.
        clips: Hook in which the module changes its gradients after the backward pass; empty: there is none.
        logged: Metrics that the module logs in validation; `None` if that is not known.
        is_scored: Whether models are scored on validation data during the run.
        without_gradient: Names of parameters that are to train and got no gradient in the first batch.
    """

    optimizers: tuple[Any, ...] = ()
    clips: str = ""
    logged: tuple[str, ...] | None = None
    is_scored: bool = True
    without_gradient: tuple[str, ...] = ()


@dataclass
class Setup:
    """The federation as :meth:`FederatedCallback.check` sees it before round 1.

    Attributes:
        module: A built copy of the federation's module, wrapped by every callback.
        template: The user's module as it was given.
        kinds: Kind of every state entry of `module`.
        callbacks: All federated callbacks in order.
        run: How the run goes.
        data: The clients' data.
        public: Public data.
        modules: By name, a built module of every architecture, where clients have different ones; :attr:`module` is one of
            them, and the check runs once for each.
        optimizers: The optimizers that the module configures; empty if it needs a running trainer to tell.
        shared_names: Gives the names that travel in round 1; with `without=callback`, those that would without its choice.
        first_step: Gives what one step of training and of validation shows; nothing with the trainer's `sanity_check=False`.
        warn: Warns the user of something that does not stop the run.
    """

    module: LightningModule
    template: LightningModule
    kinds: Mapping[str, EntryKind]
    callbacks: Sequence[FederatedCallback]
    run: RunTerms
    data: DataView
    public: PublicDataView
    modules: Mapping[str, LightningModule] = field(default_factory=dict)
    optimizers: Sequence[Any] = ()
    shared_names: Callable[..., Sequence[str]] = lambda without=None: ()
    first_step: Callable[[], FirstStep] = FirstStep
    warn: Callable[[str], None] = lambda text: None
