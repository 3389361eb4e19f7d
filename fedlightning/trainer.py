"""The user-facing trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate, Literal, ParamSpec, Self, TypeVar

from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from fedlightning import arguments
from fedlightning.arguments import TrainerOptions
from fedlightning.assemble import assemble, assemble_dry_run, make_blueprint
from fedlightning.client.blueprint import Blueprint
from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.deployment.export import export
from fedlightning.engines.contract import ClientRecords
from fedlightning.errors import ConfigurationError
from fedlightning.fitted import FittedFederation
from fedlightning.guards.dry_run_report import DryRun
from fedlightning.options import EngineOptions, Evaluation, FailurePolicy, Seeds
from fedlightning.options.lightning_arguments import BatchShare, SomeBatches
from fedlightning.options.replaced import ATTRIBUTES, OF_METHODS, REPLACED, RefusesLightningCLI
from fedlightning.options.value_objects import OF_A_CLASS, VISITS, ClientShare, DecayFactor, Gigabytes, HeldOutShare
from fedlightning.ranges import Count, Natural, NonNegativeFloat, at_most_one, checked, refuse_in_words, replaced
from fedlightning.resume.lock import only_thread, only_writer
from fedlightning.resume.resumable import AUTO, find_run, refuse_used, restore, rounds_saved
from fedlightning.resume.saving import Saving
from fedlightning.resume.stop_requests import StopRequest, requeue, stop_requests
from fedlightning.run.folder import RunFolder, open_run_folder
from fedlightning.run.recorder import Recorder
from fedlightning.scores.rows import Row
from fedlightning.server.federation import Federation
from fedlightning.server.loop import Loop
from fedlightning.server.server import Server
from fedlightning.storage.files import is_writing_process

P = ParamSpec("P")
T = TypeVar("T")


def _of_fitted(method: Callable[Concatenate[FittedFederation, P], T]) -> Callable[Concatenate[FederatedTrainer, P], T]:
    """Return a method of the fitted federation as one of its trainer."""

    @wraps(method)
    @only_thread()
    def ask(self: FederatedTrainer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self.fitted, *args, **kwargs)

    return ask


@refuse_in_words(OF_METHODS, ATTRIBUTES)
class FederatedTrainer(metaclass=RefusesLightningCLI):
    """Trains one LightningModule per client, federated; used like `lightning.pytorch.Trainer`.

    Args:
        max_rounds: Rounds of the federation.
        local_epochs: Epochs a participant trains per round. Default 1, unless `local_steps` is given.
        local_steps: Optimizer steps a participant trains per round, instead of `local_epochs`.
        participation: Share (float in (0, 1]) or number (int) of clients that take part in a round, drawn uniformly.
        held_out: Clients that take no part in training and are scored as unseen clients, whenever the others are: a share
            (float in [0, 1)), a number (int), or a list of their ids. Shares and numbers are drawn with the data module's
            seed. Their scores are rows of their own (model `"unseen"`), in no mean of the others. Default: none.
        seed: Addresses all randomness of the run: initial wrapping, batches, dropout, participation.
            :class:`~fedlightning.options.Seeds` has one for each source.
        optimizer_state: "reset": every visit makes its optimizers and schedulers anew, and the module's clocks count
            within the visit; "keep": they go on over `max_rounds * local_epochs`. Default: "reset", or as an algorithm asks.
        lr_decay: Factor on all learning rates per round; survives the re-creation of the optimizers.
        float_buffers: Running statistics of normalisation layers are averaged ("average"), stay with each client
            ("local"), or are the server's ("server"). Integer buffers are never averaged.
        callbacks: Federated callbacks (algorithms, checkpoints, diagnostics) and ordinary Lightning callbacks in any
            order. Ordinary ones run inside every client's training, each client with a copy and a state of its own.
        engine: Where clients work. "sequential": one after another in this process; "processes": on worker processes of
            this machine; "ray": on Ray actors of this machine or of a cluster; with as many torch threads each, such as
            OMP_NUM_THREADS=1, these have the same results bit for bit. "vectorized": many small models as one stack, equal
            up to rounding; "auto": it where it is faster. With options: `Processes(workers=4)` (`fedlightning.options`).
        loop: When clients are visited: "synchronous", or a loop with options (`fedlightning.server.loop`).
        local_loop: What trains inside a visit. "trainer": a Lightning Trainer of the visit's own; "fast": a short loop
            that makes the same calls at a fraction of the cost per step, equal bit for bit, for one device; "auto": fast
            where it applies, else trainer, and one line says why.
        client_memory_gb: Gigabytes of client records (personal models, states) kept in memory between visits; the least
            recently visited clients beyond that lie on disk. Default: a quarter of the machine's memory.
        init_from: Checkpoint (of Lightning or of this package) or `state_dict` file whose weights the federation begins
            with. What was spent on it (SampleDP, ClientDP) a private run tells, and the sum (`together` in `privacy.json`).
        failures: What becomes of a client that fails: "skip": it is left out of the round; "retry": it is tried again first;
            "stop": it ends the run. How often, and what else counts as one: `FailurePolicy(...)` (`fedlightning.options`).
        evaluation: Rounds between evaluations on validation data (the last round is always evaluated); 0: never. Also of
            which clients, at which stages and on what: `Evaluation(every=5, ...)` (`fedlightning.options`).
        logger: Lightning loggers; True: CSV files in the run's folder. Round means go to them.
        log_clients: What modules and callbacks log inside clients (`self.log`, `self.logger`, `LearningRateMonitor`) goes to
            the loggers as `client/<id>/<name>`, at steps counted over the client's visits: `True` (every client), or
            a list of clients, which then train with Lightning's Trainer. Default: none.
        name: Name of the experiment: the run lies in default_root_dir/NAME/version_N.
        version: Fixed folder name instead of version_N.
        default_root_dir: Folder of all runs.
        save_state: Rounds between saves of the complete state of the federation, to resume from; 0: never.
        enable_progress_bar: Show rounds and clients.
        fast_dev_run: One round, one batch per client and evaluation, nothing written.
        sanity_check: Before round 1, try one batch of every step of the run on a copy of the module. Results stay the same.
        max_time: Stop at the next round boundary after this time ("DD:HH:MM:SS", timedelta or dict of its arguments).
        accelerator: As in `lightning.pytorch.Trainer`, for each client's training; so are all that follow.
        strategy: As in Trainer.
        devices: As in Trainer; devices of one client.
        num_nodes: As in Trainer.
        precision: As in Trainer.
        plugins: As in Trainer.
        accumulate_grad_batches: As in Trainer.
        gradient_clip_val: As in Trainer; after the corrections of algorithms.
        gradient_clip_algorithm: As in Trainer.
        deterministic: As in Trainer.
        benchmark: As in Trainer.
        inference_mode: As in Trainer.
        use_distributed_sampler: As in Trainer.
        profiler: As in Trainer.
        detect_anomaly: As in Trainer.
        sync_batchnorm: As in Trainer.
        limit_train_batches: As in Trainer.
        limit_val_batches: As in Trainer.
        limit_test_batches: As in Trainer.
        limit_predict_batches: As in Trainer.
        overfit_batches: As in Trainer.
        val_check_interval: As in Trainer.
        check_val_every_n_epoch: As in Trainer; None (default) runs no validation inside local training.
        log_every_n_steps: As in Trainer.
        reload_dataloaders_every_n_epochs: As in Trainer.

    Raises:
        ConfigurationError: If an argument is out of range, or two contradict each other.

    Example:
        >>> from fedlightning.callbacks import FedProx
        >>> from fedlightning.datamodules import DigitsDataModule
        >>> from fedlightning.models import MLP, Classifier
        >>> trainer = FederatedTrainer(
        ...     max_rounds=2, callbacks=[FedProx(mu=0.1)], logger=False, enable_progress_bar=False, save_state=0
        ... )
        >>> trainer.fit(Classifier(MLP(64, [16], 10), num_classes=10, lr=0.1), datamodule=DigitsDataModule(batch_size=32))
        >>> trainer.rounds_done
        2
    """

    @checked
    @at_most_one("local_epochs", "local_steps", why="a visit is counted in epochs or in steps. Leave one out.")
    @replaced(**REPLACED)
    def __init__(
        self,
        *,
        max_rounds: Count = 10,
        local_epochs: Count | None = None,
        local_steps: Count | None = None,
        participation: Count | ClientShare = 1.0,
        held_out: Natural | HeldOutShare | list[str | int] | None = None,
        seed: Annotated[Seeds, OF_A_CLASS] | int = 0,
        optimizer_state: Literal["reset", "keep"] | None = None,
        lr_decay: DecayFactor = 1.0,
        float_buffers: Literal["average", "local", "server"] = "average",
        callbacks: list[Callback] | Callback | None = None,
        engine: EngineOptions
        | Literal["sequential", "processes", "vectorized", "ray", "flower", "auto"] = "sequential",
        loop: Annotated[Loop, VISITS] | Literal["synchronous"] = "synchronous",
        local_loop: Literal["auto", "trainer", "fast"] = "auto",
        client_memory_gb: Gigabytes | None = None,
        init_from: str | Path | None = None,
        failures: Annotated[FailurePolicy, OF_A_CLASS] | Literal["skip", "retry", "stop"] = "skip",
        evaluation: Annotated[Evaluation, OF_A_CLASS] | int = 1,
        logger: Logger | Iterable[Logger] | bool | None = True,
        log_clients: bool | list[str | int] = False,
        name: str = "federation",
        version: str | None = None,
        default_root_dir: str | Path = "runs",
        save_state: Natural = 1,
        enable_progress_bar: bool = True,
        fast_dev_run: bool = False,
        sanity_check: bool = True,
        max_time: str | timedelta | dict[str, int] | None = None,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = 1,
        num_nodes: Count = 1,
        precision: str | int | None = None,
        plugins: Any = None,
        accumulate_grad_batches: Count = 1,
        gradient_clip_val: NonNegativeFloat | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        sync_batchnorm: bool = False,
        limit_train_batches: Natural | SomeBatches | None = None,
        limit_val_batches: Natural | SomeBatches | None = None,
        limit_test_batches: Natural | SomeBatches | None = None,
        limit_predict_batches: Natural | SomeBatches | None = None,
        overfit_batches: Natural | SomeBatches = 0.0,
        val_check_interval: Count | BatchShare | None = None,
        check_val_every_n_epoch: Count | None = None,
        log_every_n_steps: Natural | None = None,
        reload_dataloaders_every_n_epochs: Natural = 0,
    ) -> None:
        self.options = TrainerOptions.read({name: value for name, value in locals().items() if name != "self"})
        self.arguments = self.options.arguments
        self.callbacks, self.ordinary_callbacks = self.options.callbacks, self.options.ordinary_callbacks
        self.optimizer_state, self.loop = self.options.optimizer_state, self.options.loop
        self.max_rounds = self.options.max_rounds
        self.recorder = Recorder()
        self.federation: Federation | None = None
        self.inputs: tuple[LightningModule | None, LightningDataModule | None] = (None, None)
        self.stopped_by: StopRequest | None = None
        self.signals = StopRequest()
        self.config: str | None = None
        self._max_time = arguments.parse_time(max_time)

    # -- fit -------------------------------------------------------------------------------------------------------
    @only_thread()
    def fit(
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        *,
        train_dataloaders: Mapping[str, Any] | None = None,
        val_dataloaders: Mapping[str, Any] | None = None,
        test_dataloaders: Mapping[str, Any] | None = None,
        resume: str | Path | None = None,
        allow_config_change: bool = False,
        allow_new_clients: bool = False,
    ) -> None:
        """Run the federation.

        Args:
            model: Any LightningModule; it is copied, never trained itself.
            datamodule: A :class:`~fedlightning.datamodules.FederatedDataModule`; or
            train_dataloaders: A loader per client id.
            val_dataloaders: A loader per client id; clients may be missing.
            test_dataloaders: A loader per client id; clients may be missing.
            resume: `"last"` (the run of this name that was saved last) or a run's folder: go on at the round boundary,
                bit for bit. `"auto"`: go on if there is something to go on from, else start.
            allow_config_change: Resume although the configuration has changed; the summary lists what has.
            allow_new_clients: Resume although the data have clients that the run did not train, or `held_out` no longer
                holds some out: they take part from the next round on, and the summary lists them.

        Raises:
            ValueError: If module, data and callbacks cannot work together, or a resumed run would go on with another
                configuration; a sentence says why.
        """
        deadline = None if self._max_time is None else time.monotonic() + self._max_time.total_seconds()
        model = arguments.check_model(model, self.arguments)
        data = arguments.federated_data(datamodule, train_dataloaders, val_dataloaders, test_dataloaders)
        run, is_new = find_run(self.arguments, resume)
        self.federation, self.stopped_by = None, None
        with ExitStack() as stack:
            if run is not None and is_writing_process():
                stack.callback(run.remove_empty)
            progress = partial(self._saved, None if is_new else run)
            self.signals = request = stack.enter_context(stop_requests(progress, deadline))
            lock = None
            if run is not None and not is_new:
                lock = stack.enter_context(only_writer(run.path))
            federation = assemble(self.options, model, data, run)
            self.recorder = federation.recorder
            if is_new:
                federation.check()
                if run is not None:
                    lock = stack.enter_context(only_writer(run.path))
                    refuse_used(run, discard_unsaved=resume == AUTO)
                if self.arguments["save_state"] > 0 and self.recorder.writes:
                    self.recorder.logs.begin()
            else:
                restore(federation, True, allow_config_change, allow_new_clients)
            self.recorder.write_config(self.config)
            if is_new:
                federation.begin()
            self._hold(federation, model, datamodule)
            stack.enter_context(federation.engine.at_work())
            stack.push(lambda kind, *_: self.recorder.close("failed") if kind is not None else None)
            with federation.parts.around(federation):
                while not federation.is_over:
                    federation.round()
                    if lock is not None:
                        lock.beat()
                    if request.ends_run():
                        break
            federation.finish()
            federation.summarise(self.arguments)
            run = self.recorder.run
            if run is not None and self.recorder.writes and export(run, federation.server, federation.engine):
                federation.summarise(self.arguments)
            self.recorder.close()
            if request.name is not None and not federation.is_over:
                self.stopped_by = request
                if is_writing_process():
                    requeue(request, federation.rounds_done, self.max_rounds)

    @only_thread()
    def restore(self, model: LightningModule, datamodule: LightningDataModule, run: str | Path) -> None:
        """Load the state that a run saved last, to evaluate it or to predict with it; nothing is trained.

        Args:
            model: The module that the run was started with (the callbacks likewise).
            datamodule: The data that it was started with.
            run: The run's folder, finished or interrupted.

        Raises:
            FileNotFoundError: If the run has no saved state.
            ValueError: If the state is of another model or data.
        """
        data = arguments.federated_data(datamodule, None, None, None)
        federation = assemble(self.options, model, data, open_run_folder(run), go_on=False)
        restore(federation, go_on=False)
        self._hold(federation, model, datamodule)

    @only_thread()
    def evaluate(
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        *,
        test_dataloaders: Mapping[str, Any] | None = None,
        split: Literal["test", "val"] = "test",
        least: int = 1,
    ) -> list[dict[str, Any]]:
        """Score a model as it is given at all clients; nothing is trained. Its folder is one that `report` reads.

        Methods and `held_out` play no role; callbacks that protect what leaves clients do.

        Args:
            model: Any LightningModule, with its weights, or those of the trainer's `init_from`.
            datamodule: The clients' data, as for :meth:`fit`; or
            test_dataloaders: A loader per client id.
            split: Data to score on.
            least: Fewest samples of a client that is scored; those of fewer are not asked.

        Raises:
            ValueError: If no client has `least` samples, or clients send their scores protected.
        """
        if not isinstance(least, int) or least < 1:
            raise ConfigurationError(f"least={least!r} must be a whole number from 1 on.")
        data = arguments.federated_data(datamodule, test_dataloaders, None, test_dataloaders)
        run, _ = find_run(self.arguments, None)
        self.federation, self.stopped_by = None, None
        with ExitStack() as stack:
            if run is not None and is_writing_process():
                stack.callback(run.remove_empty)
            model = arguments.check_model(model, self.arguments)
            kept = [*self.options.callbacks.protecting, *self.options.ordinary_callbacks]
            options = self.options.copied(callbacks=kept, held_out=None)  # what methods make of a model plays no role
            federation = assemble(options, model, data, run, go_on=False)
            if run is not None:
                stack.enter_context(only_writer(run.path))
            self._hold(federation, model, datamodule)
            stack.enter_context(federation.engine.at_work())
            self.recorder.write_config(self.config)
            federation.evaluate_untrained(split, least)
            federation.summarise(self.arguments)
        return self.recorder.results

    @only_thread()
    def dry_run(
        self,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        *,
        train_dataloaders: Mapping[str, Any] | None = None,
        val_dataloaders: Mapping[str, Any] | None = None,
        test_dataloaders: Mapping[str, Any] | None = None,
    ) -> DryRun:
        """Rehearse the run: check everything, try one batch of every step for clients that differ, and say what will happen.

        It works on copies: no file is written, this trainer stays as it is, and so do the global random generators. The
        data module is set up, as `fit` would.

        Args:
            model: As in :meth:`fit`; so are all that follow.
            datamodule: As in `fit`.
            train_dataloaders: As in `fit`.
            val_dataloaders: As in `fit`.
            test_dataloaders: As in `fit`.

        Returns:
            Clients and their sizes, bytes and estimated time of a round, memory, and what every callback will do.

        Raises:
            ValueError: If module, data and callbacks cannot work together; a sentence says why.
        """
        model = arguments.check_model(model, self.arguments)
        data = arguments.federated_data(datamodule, train_dataloaders, val_dataloaders, test_dataloaders)
        return assemble_dry_run(self.options, model, data)

    def blueprint(self, model: LightningModule, run: RunFolder | None = None) -> Blueprint:
        """Return what clients are built from: the module, the callbacks and how clients train. No data are needed.

        Args:
            model: The module.
            run: The run's folder.
        """
        return make_blueprint(self.options, model, run)

    # -- what there is -----------------------------------------------------------------------------------------------
    @property
    def run(self) -> RunFolder | None:
        """The run's folder; ``None`` before ``fit`` and where nothing is written."""
        return self.recorder.run

    @property
    def rows(self) -> Sequence[Row]:
        """Every score of the run."""
        return self.recorder.rows

    @property
    def results(self) -> list[dict[str, Any]]:
        """Rows of `summary.json`: per model, stage, checkpoint, data, split and metric the statistics over clients."""
        return self.recorder.results

    @property
    def summary(self) -> dict[str, Any]:
        """All of `summary.json`."""
        return self.recorder.summary

    @property
    def loggers(self) -> list[Logger]:
        """The run's Lightning loggers."""
        return self.recorder.loggers

    @property
    def server(self) -> Server | None:
        """The server, once there is one."""
        return None if self.federation is None else self.federation.server

    @property
    def store(self) -> ClientRecords:
        """The clients' records."""
        return ClientRecords() if self.federation is None else self.federation.store

    @property
    def rounds_done(self) -> int:
        """Finished rounds."""
        return 0 if self.federation is None else self.federation.rounds_done

    def close(self) -> None:
        """End the worker processes that wait for the next call, as those of `engine="ray"` do; what was trained stays.

        It is called at the end of `with FederatedTrainer(...) as trainer:`, and workers end with the program at the latest.
        """
        if self.federation is not None:
            self.federation.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return the arguments that differ from their defaults, and how far the federation is."""
        return self.options.as_text(type(self), self._done())

    def _repr_html_(self) -> str:
        """Return the same as a table, with the newest scores and the run's folder, for notebooks."""
        scores = {name: f"{value:.4g}" for name, value in self.callback_metrics.items()}
        return self.options.as_table(
            type(self), self._done(), scores | ({} if self.run is None else {"run": str(self.run.path)})
        )

    def _done(self) -> str:
        return f"{self.rounds_done} rounds done, {len(self.client_ids)} clients" if self.federation else "not fitted"

    @property
    def client_ids(self) -> list[str]:
        """The clients' ids, in order; empty before `fit`."""
        return [] if self.server is None else list(self.server.clients)

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Newest scores by name (`val_loss`), each the mean over clients on their own data; empty before the first.

        They are scores of the latest models as received (L1), or else after aggregation (G) or local training (L2).
        """
        return {} if self.federation is None else self.fitted.callback_metrics

    @property
    def fitted(self) -> FittedFederation:
        """The federation, to be asked for scores, models and predictions.

        Raises:
            RuntimeError: If there is none yet.
        """
        if self.federation is None:
            raise RuntimeError("This FederatedTrainer has no federation yet. Call fit(), or fit(resume=...), first.")
        return FittedFederation(self.federation, self.options, *self.inputs)

    # -- what is asked of it -----------------------------------------------------------------------------------------
    def validate(
        self,
        model: LightningModule | str | None = None,
        datamodule: LightningDataModule | None = None,
        *,
        checkpoint: str = "latest",
        ckpt_path: str | Path | None = None,
        run: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, Any]]:
        """Score models of the federation on validation data, and print the table; takes the arguments of :meth:`test`."""
        return self._score("val", model, datamodule, checkpoint, ckpt_path, run, verbose)

    def test(
        self,
        model: LightningModule | str | None = None,
        datamodule: LightningDataModule | None = None,
        *,
        checkpoint: str = "all",
        ckpt_path: str | Path | None = None,
        run: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, Any]]:
        """Score models of the federation on test data, local and pooled, and print the table."""
        return self._score("test", model, datamodule, checkpoint, ckpt_path, run, verbose)

    @only_thread()
    def _score(
        self,
        split: str,
        model: LightningModule | str | None,
        datamodule: LightningDataModule | None,
        checkpoint: str,
        ckpt_path: str | Path | None,
        run: str | Path | None,
        verbose: bool,
    ) -> list[dict[str, Any]]:
        if isinstance(model, str):
            checkpoint, model = model, None
        if ckpt_path is not None and Path(ckpt_path).is_dir():
            run = ckpt_path if run is None else run
        elif ckpt_path is not None:
            checkpoint = "all" if str(ckpt_path) == "best" else str(ckpt_path)
        if run is not None:
            self._restore(
                run, model, datamodule, "score a run from its folder", "test(model=..., datamodule=..., run=...)"
            )
        self.fitted.refuse_others(model, datamodule)
        return self.fitted.score(split, checkpoint, verbose)

    @only_thread()
    def onboard(
        self,
        newcomers: FederatedDataModule | None = None,
        clients: Sequence[str | int] | None = None,
        *,
        epochs: int = 1,
        model: LightningModule | None = None,
        datamodule: LightningDataModule | None = None,
        run: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, Any]]:
        """Let new clients join the fitted federation: score them as unseen clients, fine-tune each, score them again.

        In a method with clusters that are found by updates, each first makes the visits by which it finds its cluster.

        Each new client makes one visit as the method's clients do, on its own training data, and sends nothing back: the
        federation stays as it is. The run's folder gets `onboarding.csv`, `onboarding.json` and `checkpoints/newcomers/`,
        in place of those of an earlier call; no other file changes. `docs/how-to/late_clients.md` says
        what each method does.
        """
        if run is not None:
            call = "onboard(newcomers, model=..., datamodule=..., run=...)"
            self._restore(run, model, datamodule, "onboard clients into a run from its folder", call)
        return self.fitted.onboard(newcomers, clients, epochs, verbose)

    predict = _of_fitted(FittedFederation.predict)
    client = _of_fitted(FittedFederation.client)
    module = _of_fitted(FittedFederation.module)
    save_checkpoint = _of_fitted(FittedFederation.save_checkpoint)

    # -- helpers -----------------------------------------------------------------------------------------------------
    def _restore(
        self, run: str | Path, model: Any, datamodule: LightningDataModule | None, aim: str, call: str
    ) -> None:
        if model is None or datamodule is None:
            raise ConfigurationError(f"To {aim}, give the model and the datamodule that it was started with: {call}.")
        self.restore(model, datamodule, run)

    def _hold(self, federation: Federation, model: LightningModule, datamodule: LightningDataModule | None) -> None:
        """Take a federation that nothing has refused: no models of another are scored into the folder of a run."""
        self.federation, self.recorder, self.inputs = federation, federation.recorder, (model, datamodule)

    def _saved(self, resumed: RunFolder | None) -> tuple[int, int]:
        here = 0 if self.federation is None else self.federation.parts.find(Saving).rounds_saved
        return here or (0 if resumed is None else rounds_saved(resumed)), self.max_rounds
