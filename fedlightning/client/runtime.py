"""The client side of a federation.

:class:`Scorer` scores one module on one loader.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.data_summary import DataSummary, Detail, describe
from fedlightning.client.fit import FitterChoice, LightningFitter
from fedlightning.client.kept import Kept
from fedlightning.client.logged_metrics import Monitor, NotOneNumberError, nan_where_undefined, numbers
from fedlightning.client.requests import LocalSettings
from fedlightning.client.trainer_context import DataModuleView
from fedlightning.compat.lightning_runs import quiet, to_device, trainer_of
from fedlightning.compat.system import preload_fork_server
from fedlightning.contract import POOLED, CallbackList, FederatedCallback
from fedlightning.contract.messages import Message
from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.datamodules.held_out import ClientSubset, exclude_clients
from fedlightning.datamodules.loaders import LoaderDataModule
from fedlightning.datamodules.sampling import read_for_scores
from fedlightning.errors import ConfigurationError
from fedlightning.wrappers import user_class


class Evaluator(Protocol):
    """Scores modules as Lightning's Trainer does, bit for bit, and refuses what it cannot."""

    def evaluate(self, module: LightningModule, loader: Any, testing: bool) -> dict[str, Any] | None:
        """Return what a module logs on a loader; `None`: only another one can say."""

    def evaluate_each(
        self,
        module: LightningModule,
        loaders: Iterable[DataLoader[Any]],
        testing: bool,
        start: Callable[[int], None],
        scores: list[dict[str, float]],
    ) -> None:
        """Append the scores of one module on each of many loaders, as :meth:`Scorer.score_each` does."""


class Scorer:
    """Scores modules by their own `validation_step` and `test_step`.

    It runs `Trainer.validate` and `Trainer.test` quietly; the one Trainer of the blueprint serves every model. Every
    process scores the whole loader on one device (no distributed sampler, hence no padding), so a score is the same on
    any number of devices.

    Args:
        blueprint: Holds the evaluating Trainer.
        source: The user's data module; `None` if there are loaders only.
        loader_of: Gives the loader of a client (empty: of any) and a split.

    Attributes:
        client: Client whose loaders modules find in `self.trainer.datamodule` while they are scored.
        fitted: Modules that a fit has set up.
        evaluators: Asked before Lightning's Trainer to score, in this order.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        source: Any = None,
        loader_of: Callable[[str, str], Any] = lambda client, split: None,
    ) -> None:
        self._blueprint, self.client = blueprint, ""
        self._datamodule = (
            None if source is None else DataModuleView(source, lambda split: loader_of(self.client, split))
        )
        self.fitted: WeakSet[LightningModule] = WeakSet()
        self.evaluators: list[Evaluator] = [make(blueprint) for make in blueprint.parts.evaluators]

    def score(self, module: LightningModule, loader: DataLoader[Any], split: str) -> dict[str, float]:
        """Return what a module logs on a loader. Afterwards its parameters, modes and device are as before.

        A module that logs nothing but returns a loss (or a single tensor) from its step is scored by the
        sample-weighted mean of it, under `loss`. A module with neither step has no scores.
        """
        testing = split == "test" and is_overridden("test_step", module)
        if not testing and not is_overridden("validation_step", module):
            return {}
        home = module.device
        before = trainer_of(module)
        losses = self._blueprint.losses
        self.set_up(module)
        with read_for_scores(loader):
            answers = (evaluator.evaluate(module, loader, testing) for evaluator in self.evaluators)
            logged = next((answer for answer in answers if answer is not None), None)
            if logged is None:
                logged = self._by_trainer(module, loader, testing)
        to_device(module, home)
        module.trainer = before
        return numbers(logged, module) or losses.result()

    def _by_trainer(self, module: LightningModule, loader: DataLoader[Any], testing: bool) -> dict[str, Any]:
        self._blueprint.losses.reset()
        trainer, kept = self._blueprint.trainer, Kept(module)
        try:
            with quiet(), nan_where_undefined(module):
                run = trainer.test if testing else trainer.validate
                results = run(module, dataloaders=loader, verbose=False)
        except ValueError as error:
            # Lightning's words of self.log, and of a metric whose name it does not tell
            if "a single element" in str(error):
                numbers(trainer.callback_metrics, module)
                text = " ".join(str(error).split()).rstrip(".")
                raise NotOneNumberError(
                    f"{user_class(module).__name__}: {text}. {NotOneNumberError.WAY_OUT}"
                ) from error
            raise
        finally:
            kept.put_back()
        step, loop = ("test_step", trainer.test_loop) if testing else ("validation_step", trainer.validate_loop)
        for check in self._blueprint.parts.loop_checks:
            check(loop, step, module, loader, sum(loop.max_batches), fitting=False)
        return {name: value for result in results for name, value in result.items()}

    def score_each(
        self,
        module: LightningModule,
        loaders: Iterable[DataLoader[Any]],
        split: str,
        start: Callable[[int], None],
        scores: list[dict[str, float]],
    ) -> None:
        """Score one module on each of many loaders, as :meth:`score` would, at less cost for each.

        It ends early, perhaps before the first loader, where the next one must be scored by :meth:`score`.
        """
        testing = split == "test" and is_overridden("test_step", module)
        for evaluator in self.evaluators:
            if not scores:
                evaluator.evaluate_each(module, loaders, testing, start, scores)

    def set_up(self, module: LightningModule) -> None:
        """Show the data module, and call the `setup` of a fit where a module may rest on it and had none.

        In Lightning the same object is trained and scored.
        """
        vars(self._blueprint.trainer)["datamodule"] = self._datamodule
        if module in self.fitted or not is_overridden("setup", module):
            return
        module.trainer = self._blueprint.trainer
        try:
            module.setup("fit")
        except Exception:  # it needs what only a fit has, and the evaluation tells of what is missing there
            return


def refuse_uncounted(callbacks: Iterable[FederatedCallback], what: str, way_out: str) -> None:
    """Refuse what tells of data before round 1, where a callback promises that nothing leaves uncovered.

    Raises:
        ConfigurationError: Naming it.
    """
    for callback in callbacks:
        if callback.facts.no_statistics:
            raise ConfigurationError(f"{what}: {callback.key} {callback.facts.no_statistics} {way_out}")


@dataclass
class ClientRuntime:
    """The client side of a federation: blueprint and data. An engine decides where it runs.

    :mod:`fedlightning.client.visit` describes one visit on it.

    Attributes:
        blueprint: Builds the clients' modules.
        data: Samples of each client.
        left_out: Clients of these data that take no part in training.
        together: Whether these are the data of all clients. A site that has its own clients only says False: the union of
            its data is not everybody's, so nothing is trained or scored on it.
        folder: Where the clients' models are written, where the run's own folder is on another machine.
        scorer: Scores modules.
        loop: Choice of who fits.
        monitor: What visits validate for; `None` if nothing asks for it.
        source: The data module that the user wrote; `None` if there are loaders only.
    """

    blueprint: Blueprint
    data: FederatedDataModule
    left_out: list[str] = field(default_factory=list)
    together: bool = True
    folder: Path | None = None
    scorer: Scorer = field(init=False)
    loop: FitterChoice = field(init=False)
    monitor: Monitor | None = field(init=False, default=None)
    source: Any = field(init=False, repr=False)
    _described: DataSummary | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        preload_fork_server()
        self._make_scorer()
        parts = self.blueprint.parts
        fitters = [make(self.blueprint) for make in parts.fitters]
        self.loop = FitterChoice(self.settings.local_loop, [*fitters, LightningFitter(parts.loop_checks)])
        if self.settings.log_clients is True:
            self.loop.give_up("log_clients=True keeps what Lightning's own loop logs")

    @property
    def callbacks(self) -> CallbackList:
        """The federated callbacks."""
        return self.blueprint.callbacks

    @property
    def settings(self) -> LocalSettings:
        """Settings of local training."""
        return self.blueprint.settings

    # -- data --------------------------------------------------------------------------------------------------------
    def set_up(self, stage: str) -> None:
        """Prepare the data and set them up, as Lightning does."""
        with quiet():
            self.data.prepare_data()
            self.data.setup(stage)
        if self.data.public_is_compared:
            what = "Public data leave out what a client holds too, so that their number tells who holds what"
            way_out = "Take a share of the clients' samples (public: 0.1), or leave public data out."
            refuse_uncounted(self.blueprint.callbacks, what, way_out)

    def leave_out(self, clients: Collection[str]) -> None:
        """Keep clients out of training from now on: they are in no list and in no union of the data any more."""
        if clients:
            self.data = exclude_clients(self.data, clients)
            self.left_out = [*self.left_out, *clients]
            self._described = None
            self._make_scorer()

    def measure(self) -> dict[str, dict[str, Any]]:
        """Return what each client that trains here gives for the statistics before round 1."""
        return {client: self.data.statistics_of(client) for client in self.data.client_ids}

    def agree(self, totals: Mapping[str, Any]) -> None:
        """Prepare the data with the totals of all clients, from now on."""
        self.data = self.data.with_statistics(totals)
        self._described = None
        self._make_scorer()

    def describe(self, leave_out: Collection[str] = (), details: Collection[Detail] = ()) -> DataSummary:
        """Describe the data; see :func:`~fedlightning.client.data_summary.describe`."""
        limit = self.settings.trainer_arguments.get("limit_train_batches")
        return describe(self.data, leave_out, details, left_out=self.left_out, limit=limit, together=self.together)

    def beside(self, blueprint: Blueprint) -> ClientRuntime:
        """Return a runner of another blueprint on the same data."""
        runtime = ClientRuntime(blueprint, self.data, self.left_out, self.together, self.folder)
        runtime._described = self._described
        return runtime

    @property
    def described(self) -> DataSummary:
        """Ids and sizes of the clients. Where the data are not here, whoever knows them has said so (:meth:`know`)."""
        if self._described is None:
            self._described = self.describe()
        return self._described

    def know(self, description: DataSummary) -> None:
        """Take ids and sizes from a description, in a process that has no data."""
        self._described = description

    def pooled_dataloader(self, split: str, round: int | None = None) -> DataLoader[Any] | None:
        """Return the loader over the union of all clients' data of a split; for training in a round, if one is given."""
        if not self.together:
            raise ValueError("the union of all clients' data is asked for, and here are only those of some clients")
        return (self.data if round is None else self.data.at_round(round)).pooled_dataloader(split)

    def loader(self, message: Message, split: str) -> DataLoader[Any] | None:
        """Return the loader of a job for a split: the client's own, or the pooled one."""
        if message.data == POOLED or message.client == POOLED:
            return self.pooled_dataloader(split, message.round)
        return self.data.at_round(message.round).client_dataloader(message.client, split)

    def validate_visits(self, monitor: Monitor) -> None:
        """Validate inside local training from now on, because something monitors a metric of the validation."""
        self.monitor = monitor
        self.loop.give_up(f"{monitor}, so visits validate")
        rank_zero_info(f"{monitor}: each visit validates on the client's own validation data.")

    def _make_scorer(self) -> None:
        data = self.data.whole if isinstance(self.data, ClientSubset) else self.data
        source = None if isinstance(data, LoaderDataModule) else getattr(data, "datamodule", data)
        self.source = source
        self.scorer = Scorer(self.blueprint, source, self._loader_of)

    def _loader_of(self, client: str, split: str) -> DataLoader[Any] | None:
        """Return the loader that a module finds while it is scored; of the first client where nobody is meant."""
        if client == POOLED:
            return self.pooled_dataloader(split)
        return self.data.client_dataloader(client or self.data.client_ids[0], split)
