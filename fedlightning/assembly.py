"""From what a trainer was told, a module and data to a federation that can begin: :class:`Assembly`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info

from fedlightning import arguments
from fedlightning.blueprint.blueprint import Blueprint
from fedlightning.blueprint.settings import LocalSettings
from fedlightning.blueprint.trainer_arguments import check_devices
from fedlightning.blueprint.warm_start import warm_started
from fedlightning.datamodules.base import FederatedDataModule
from fedlightning.engines import make_engine
from fedlightning.engines.choice import choose
from fedlightning.errors import ConfigurationError
from fedlightning.federation.engine import Engine
from fedlightning.federation.federation import Federation
from fedlightning.federation.loops import Synchronous
from fedlightning.federation.server import Server
from fedlightning.federation.store import ClientStore
from fedlightning.federation.terms import optimizer_state_of
from fedlightning.fitted import Fitted
from fedlightning.hooks import POOLED
from fedlightning.run.files import is_writer
from fedlightning.run.fingerprint import PARTS, fingerprint
from fedlightning.run.folder import AUTO, RunFolder, find_last, find_resumable, folder_of, killed_version
from fedlightning.run.recorder import Recorder
from fedlightning.scoring.tasks import LOCAL
from fedlightning.visit.runner import LocalRunner


class Assembly(Fitted):
    """The part of :class:`~fedlightning.trainer.FederatedTrainer` that puts a federation together and trains nothing.

    Attributes:
        max_rounds: Rounds of the federation.
        fast_dev_run: Whether one round is tried, and nothing written.
        stages: Stages that are scored.
        evaluate_data: Data that they are scored on.
    """

    max_rounds: int
    fast_dev_run: bool
    stages: tuple[str, ...]
    evaluate_data: tuple[str, ...]
    _logger_argument: Logger | Iterable[Logger] | bool | None

    def _find_run(self, resume: str | Path | None) -> tuple[RunFolder | None, bool]:
        """Return the folder to write into, and whether a new run begins there."""
        if not isinstance(resume, str | Path | None):
            raise ConfigurationError(f"resume={resume!r} must be 'last', 'auto' or the folder of a run.")
        a, auto = self.arguments, str(resume) == AUTO
        if auto:
            resume = find_resumable(a["default_root_dir"], a["name"], a["version"])
        elif str(resume) == "last":
            resume = find_last(a["default_root_dir"], a["name"])
        if resume is not None:
            return folder_of(resume), False
        if self.fast_dev_run:
            return None, True
        version = a["version"]
        if auto and version is None:
            version = killed_version(a["default_root_dir"], a["name"])
        run = RunFolder(a["default_root_dir"], a["name"], version)
        if not auto:
            run.refuse_used()
        return run, True

    def blueprint(self, model: LightningModule, run: RunFolder | None = None) -> Blueprint:
        """Return what clients are built from: the module, the callbacks and how clients train. No data are needed.

        Args:
            model: The module.
            run: The run's folder.
        """
        a = self.arguments
        arguments.check_folder(Path.cwd() if run is None else run.path)
        settings = LocalSettings(
            seed=a["seed"],
            max_rounds=self.max_rounds,
            local_epochs=None if a["local_steps"] is not None else (a["local_epochs"] or 1),
            local_steps=a["local_steps"],
            optimizer_state=optimizer_state_of(self.callbacks.callbacks, a["optimizer_state"]),
            lr_decay=a["lr_decay"],
            trainer_arguments=arguments.local_trainer(a, run),
            callbacks=self.ordinary_callbacks,
            log_clients=a["log_clients"] is True,
            local_loop=a["local_loop"],
            float_buffers=a["float_buffers"],
        )
        check_devices(settings.trainer_arguments)
        model = warm_started(model, a["init_from"])
        arguments.check_keeping(self.ordinary_callbacks, settings.optimizer_state)
        return Blueprint(model, self.callbacks, settings)

    def _assemble(
        self,
        model: LightningModule,
        data: FederatedDataModule,
        run: RunFolder | None,
        go_on: bool = True,
        assigned: Mapping[str, str] | None = None,
    ) -> Federation:
        a = self.arguments
        given, blueprint = model, self.blueprint(model, run)
        model, settings = blueprint.template, blueprint.settings
        memory = a["client_memory_gb"]
        store = ClientStore(limit=None if memory is None else int(memory * 1e9))
        options = [a[name] for name in ("workers", "clients_per_stack", "ray")]
        engine = make_engine(a["engine"], LocalRunner(blueprint, data), store, *options)
        engine.set_up("fit" if go_on else "test")
        everybody = engine.describe()
        arguments.check_clients(everybody)
        settings.log_clients = arguments.logged_clients(a["log_clients"], everybody)
        blueprint.assigned = arguments.assigned_models(given, everybody) if assigned is None else assigned
        held_out = arguments.held_out_clients(a["held_out"], everybody)
        engine.leave_out(held_out)
        known = engine.runner.described
        if a["engine"] == "auto":
            engine, a = self._chosen(engine, len(known.client_ids))
        server = Server(
            blueprint,
            {client: known.num_samples(client) for client in known.client_ids},
            max_rounds=self.max_rounds,
            participation=a["participation"],
            float_buffers=a["float_buffers"],
            run_dir=run.path if run is not None and is_writer() else None,
            held_out=held_out,
        )
        server.evaluated = arguments.evaluated_clients(a["evaluate_clients"], server.clients, everybody.seed)
        server.public_source, server.together = engine.public, known.together
        server.sizes, server.norms.factor = known.sizes, a["update_limit"]
        engine.attempts.policy = arguments.failure_policy(a)
        loggers = arguments.loggers(self._logger_argument, run) if is_writer() and go_on else []
        self.recorder = Recorder(run, loggers)
        self.federation = Federation(
            server,
            engine.store,
            engine,
            self.recorder,
            stages=self.stages,
            evaluate_data=self.evaluate_data,
            test_data=tuple(a["test_data"] if a["test_data"] is not None else (LOCAL, POOLED)),
            evaluate_every=a["evaluate_every"],
            evaluate_seconds=a["evaluate_seconds"],
            save_every=a["save_state"],
            sanity_check=bool(a["sanity_check"]),
            loop=arguments.loop_of(a["loop"]),
            fingerprint=lambda joined, held_out: fingerprint(
                a, self.callbacks.callbacks, self.ordinary_callbacks, model, engine.describe(joined, PARTS), held_out
            ),
        )
        return self.federation

    def _chosen(self, engine: Engine, clients: int) -> tuple[Engine, dict[str, Any]]:
        """Return the engine that `engine="auto"` chooses, and the arguments with its name."""
        share = self.arguments["participation"]
        count = share if isinstance(share, int) else max(round(share * clients), 1)
        loop = arguments.loop_of(self.arguments["loop"])
        name, why = choose(engine.runner, min(count, clients), type(loop) is Synchronous)
        rank_zero_info(why)
        return make_engine(name, engine.runner, engine.store), {**self.arguments, "engine": name}
