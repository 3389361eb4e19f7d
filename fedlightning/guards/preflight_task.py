"""What a callback's check is told (:func:`setup_of`), and a check where a client's batch is (:class:`CheckThere`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule
from torch.utils.data import IterableDataset

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.client_errors import client_failure
from fedlightning.client.data_summary import knows_groups, take_first_batch, train_loaders
from fedlightning.client.optimizers import optimizers_of
from fedlightning.client.record import ClientRecord
from fedlightning.client.runtime import LocalRunner
from fedlightning.contract import Setup
from fedlightning.datamodules.public import first_batch, public_loader, size_of
from fedlightning.datamodules.sampling import kept
from fedlightning.engines.base import Question
from fedlightning.guards.step_trials import Tried
from fedlightning.seeding import isolated
from fedlightning.tensors import entry_kinds

if TYPE_CHECKING:
    from fedlightning.guards.preflight import Rehearsal

PLAIN = (
    *("clients", "num_samples", "max_rounds", "local_epochs", "local_steps", "optimizer_state", "trainer_arguments"),
    *("evaluate_every", "participation", "loop", "absent", "has_clock", "drifts"),
)
"""The attributes of a :class:`~fedlightning.contract.Setup` that are plain values; a check that runs elsewhere is
sent these."""


class Public:
    """What a check may ask about public data.

    Args:
        source: Gives their loader, or `None`, and the name of the data module.
        blueprint: Has the seed and the precision.
    """

    def __init__(self, source: Callable[[], tuple[Any, str]], blueprint: Blueprint) -> None:
        self._source, self._blueprint = source, blueprint

    def there(self) -> bool:
        """Return whether there are public data."""
        loader, name = self._source()
        dataset: Any = None if loader is None else loader.dataset
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                f"{name}.public_dataloader gives an iterable {type(dataset).__name__}, but clients draw public samples at "
                "random, by their index. Give a dataset with __len__ and __getitem__."
            )
        return loader is not None

    def size(self) -> int:
        """Return the number of public samples; 0 without any."""
        return size_of(*self._source())

    def batch(self) -> Any:
        """Return the first public batch."""
        loader, name = self._source()
        with isolated(self._blueprint.settings.seed, "first public batch"), kept(getattr(loader, "dataset", None)):
            return self._blueprint.precision.convert_input(first_batch(loader, name))

    def batches(self) -> Iterator[Any]:
        """Yield all public batches, in the order of the samples."""
        loader, name = self._source()
        with isolated(self._blueprint.settings.seed, "public batches"), kept(getattr(loader, "dataset", None)):
            yield from map(self._blueprint.precision.convert_input, public_loader(loader, name))


def setup_of(
    told: Rehearsal | CheckThere,
    blueprint: Blueprint,
    modules: Mapping[str, LightningModule],
    architecture: str,
    public: Public,
    **more: Any,
) -> Setup:
    """Return what callbacks see in their `check` of an architecture; what costs something is looked up when it is asked for.

    Args:
        told: Knows the plain facts, the batches of each client, and which splits there are.
        blueprint: Has the callbacks.
        modules: A built module of each architecture.
        architecture: Name of the architecture.
        public: The public data.
        more: The other functions of the `Setup`: `first_batch`, `train_loaders`, `knows_groups`, `shared_names`, `warn`.
    """
    module = modules[architecture]
    return Setup(
        module=module,
        template=blueprint.template_of(architecture),
        kinds=entry_kinds(module),
        callbacks=list(blueprint.callbacks),
        optimizers=optimizers_of(module),
        ordinary=[*blueprint.settings.callbacks, *_own_callbacks(module)],
        modules=modules if told.is_mixed else {},
        num_batches=lambda client: told.batches[client],
        has_pooled=lambda split: split in told.pooled,
        has_split=lambda split: split in told.splits,
        has_public=public.there,
        public_size=public.size,
        public_batch=public.batch,
        public_batches=public.batches,
        **more,
        **told.facts,
    )


def _own_callbacks(module: LightningModule) -> list[Callback]:
    """Return the callbacks that a module brings along; none if it needs a trainer to tell."""
    try:
        configured = module.configure_callbacks()
    except Exception:  # of the user's code
        return []
    return [configured] if isinstance(configured, Callback) else list(configured or ())


@dataclass(frozen=True)
class CheckThere(Question):
    """The check of one callback, as a task for a machine that has a client's batch.

    Attributes:
        callback: Key of the callback.
        architecture: Name of the architecture whose module is checked.
        client: The first client with a batch.
        facts: The plain attributes of the `Setup`.
        shared: The names that travel in round 1: under "", and under the key of a callback those without its choice.
        batches: Training batches in an epoch of each client.
        pooled: Splits whose union can be had.
        splits: Splits of which any client has samples.
        is_mixed: Whether clients have models of different architectures.
        has_public: Whether the server has public data; a site's own are no use without.
    """

    callback: str
    architecture: str
    client: str
    facts: Mapping[str, Any]
    shared: Mapping[str, tuple[str, ...]]
    batches: Mapping[str, int]
    pooled: tuple[str, ...]
    splits: tuple[str, ...]
    is_mixed: bool
    has_public: bool

    @property
    def address(self) -> tuple[int, str, str]:
        return 0, f"check of {self.callback}", self.client

    def run(self, runner: LocalRunner, record: ClientRecord) -> tuple[Tried, None]:
        """Make the check; its refusal and what it warns of are the answer."""
        blueprint = runner.blueprint
        names = blueprint.architectures if self.is_mixed else (self.architecture,)
        modules = {name: blueprint.build("server", name) for name in names}
        loader = runner.data.public_dataloader() if self.has_public else None
        said: list[str] = []
        setup = setup_of(
            self,
            blueprint,
            modules,
            self.architecture,
            Public(lambda: (loader, type(runner.data).__name__), blueprint),
            first_batch=partial(take_first_batch, runner),
            knows_groups=partial(knows_groups, runner),
            train_loaders=partial(train_loaders, runner),
            shared_names=lambda without=None: self.shared["" if without is None else without.key],
            warn=said.append,
        )
        owner = next(one for one in blueprint.callbacks if one.key == self.callback)
        try:
            owner.check(setup)
        except ValueError as error:
            return Tried(refusal=str(client_failure(error)), said=said), None
        return Tried(said=said), None

    def lost(self, reason: str) -> Tried:
        """An answer that refuses: the check could not be made."""
        return Tried(refusal=f"{self.callback} could not be checked at client '{self.client}': {reason}.")
