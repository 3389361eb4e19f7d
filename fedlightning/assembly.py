"""From what a trainer was told, a module and data to a federation that can begin: :class:`Assembly`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_info

from fedlightning import arguments
from fedlightning.blueprint.blueprint import Blueprint
from fedlightning.blueprint.client_parts import ClientParts
from fedlightning.blueprint.copier import Copier
from fedlightning.blueprint.settings import LocalSettings
from fedlightning.blueprint.trainer_arguments import FORWARDED, OF_DEVICES, check_devices
from fedlightning.blueprint.warm_start import read_privacy, warm_started
from fedlightning.datamodules.base import FederatedDataModule
from fedlightning.engines.choice import choose, make_engine
from fedlightning.engines.watchdog import Watchdog
from fedlightning.errors import ConfigurationError, warn
from fedlightning.federation.dry_run import DISTINCT, SMALL, UNSEEN_CLIENTS, FewClients, distinct_clients, dry_run
from fedlightning.federation.dry_run_report import DryRun
from fedlightning.federation.engine import Engine
from fedlightning.federation.explosions import Explosions, FarScores
from fedlightning.federation.federation import Federation
from fedlightning.federation.loops import Loop, Synchronous
from fedlightning.federation.outgoing import OutgoingReport
from fedlightning.federation.parts import Parts
from fedlightning.federation.population import Participation, Population
from fedlightning.federation.progress import RichProgress
from fedlightning.federation.rehearsal import Preflight
from fedlightning.federation.saving import Saving
from fedlightning.federation.server import Server
from fedlightning.federation.statistics import agree_on_statistics
from fedlightning.federation.store import ClientStore
from fedlightning.federation.unseen import HeldOutScores
from fedlightning.federation.update_checks import UpdateChecks
from fedlightning.fitted import Fitted
from fedlightning.hooks import Protection
from fedlightning.options import Auto, Evaluation, FailurePolicy
from fedlightning.run.fingerprint import PARTS, fingerprint
from fedlightning.run.folder import RunFolder
from fedlightning.run.lock import only_thread
from fedlightning.run.logs import Logs
from fedlightning.run.recorder import Recorder
from fedlightning.run.resumable import refuse_requeued
from fedlightning.scoring.row_table import RowTable
from fedlightning.seeding import preserved
from fedlightning.storage.files import is_writer
from fedlightning.virtual_time.timeline import Timeline
from fedlightning.visit.description import Description
from fedlightning.visit.fast.evaluation import FastEvaluator
from fedlightning.visit.fast.fit import FastFitter
from fedlightning.visit.leaving import refuse_private
from fedlightning.visit.lost_batches import refuse_lost_batches
from fedlightning.visit.runner import LocalRunner

CLIENT_PARTS = ClientParts(
    fitters=(FastFitter,),
    evaluators=(FastEvaluator,),
    loop_checks=(refuse_lost_batches,),
    leave_checks=(refuse_private,),
    copier=Copier,
)
"""What attaches to every client, in this process, in workers and at sites."""


class Assembly(Fitted):
    """The part of :class:`~fedlightning.trainer.FederatedTrainer` that puts a federation together and trains nothing.

    Attributes:
        max_rounds: Rounds of the federation.
        fast_dev_run: Whether one round is tried, and nothing written.
        optimizer_state: What becomes of optimizers between visits.
        loop: The loop; every run has a copy.
    """

    max_rounds: int
    fast_dev_run: bool
    optimizer_state: Literal["reset", "keep"]
    loop: Loop
    _logger_argument: Logger | Iterable[Logger] | bool | None

    def blueprint(self, model: LightningModule, run: RunFolder | None = None) -> Blueprint:
        """Return what clients are built from: the module, the callbacks and how clients train. No data are needed.

        Args:
            model: The module.
            run: The run's folder.
        """
        a = self.arguments
        refuse_requeued(Path.cwd() if run is None else run.path)
        settings = LocalSettings(
            seed=a["seed"],
            max_rounds=self.max_rounds,
            local_epochs=None if a["local_steps"] is not None else (a["local_epochs"] or 1),
            local_steps=a["local_steps"],
            optimizer_state=self.optimizer_state,
            lr_decay=a["lr_decay"],
            trainer_arguments=_local_trainer(a, run),
            callbacks=self.ordinary_callbacks,
            log_clients=a["log_clients"] is True,
            local_loop=a["local_loop"],
            float_buffers=a["float_buffers"],
        )
        devices = {name: a[name] for name in OF_DEVICES if a[name] not in (None, "auto", 1, "cpu")}
        if devices:
            check_devices(devices, settings.trainer_arguments)
        if a["init_from"] is not None:
            model = warm_started(model, a["init_from"])
        blueprint = Blueprint(model, self.callbacks, settings, parts=CLIENT_PARTS)
        if a["init_from"] is not None and any(isinstance(one, Protection) for one in self.callbacks):
            blueprint.privacy = spent = read_privacy(a["init_from"])
            if spent:
                warn(
                    f"init_from={str(a['init_from'])!r} has spent epsilon={spent['epsilon']:.4g} at "
                    f"delta={spent['delta']:g}. For data that were in it, that and what this run spends add up: privacy.json "
                    "tells both, and their sum."
                )
        return blueprint

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
        evaluation: Evaluation = a["evaluation"]
        engine = make_engine(a["engine"], LocalRunner(blueprint, data), store)
        engine.set_up("fit" if go_on else "test")
        everybody = engine.describe()
        arguments.check_clients(everybody)
        settings.log_clients = _logged_clients(a["log_clients"], everybody)
        blueprint.assigned = arguments.assigned_models(given, everybody) if assigned is None else assigned
        held_out = arguments.held_out_clients(a["held_out"], everybody)
        engine.leave_out(held_out)
        if (wanted := engine.runner.described.statistics) is not None:
            agree_on_statistics(engine, wanted, blueprint.callbacks, None if run is None else run.path)
        known = engine.runner.described
        if isinstance(a["engine"], Auto):
            engine, a = self._chosen(engine, len(known.client_ids))
        population = Population(
            {client: known.num_samples(client) for client in known.client_ids},
            held_out=held_out,
            sizes=known.sizes,
            over_rounds=known.over_rounds,
            together=known.together,
            sites=dict(engine.sites),
            public_source=engine.public,
        )
        population.scored = arguments.evaluated_clients(evaluation.clients, population.clients, everybody.seed)

        def fingerprint_of(joined: Sequence[str], held_out: Sequence[str]) -> dict[str, Any]:
            described = engine.describe(joined, PARTS)
            return fingerprint(a, self.callbacks.callbacks, self.ordinary_callbacks, model, described, held_out)

        parts = Parts(
            [
                UpdateChecks(a["failures"].update_limit),
                Explosions(),
                FarScores(),
                Preflight(),
                OutgoingReport(),
                HeldOutScores(),
                Timeline(),
                Saving(a["save_state"], fingerprint_of),
                *([RichProgress(self.max_rounds)] if a["enable_progress_bar"] and is_writer() else []),
            ]
        )
        server = Server(
            blueprint,
            population,
            max_rounds=self.max_rounds,
            participation=a["participation"],
            float_buffers=a["float_buffers"],
            run_dir=run.path if run is not None and is_writer() else None,
            parts=parts,
        )
        engine.attempts.policy = a["failures"]
        engine.attempts.watch = Watchdog(engine.attempts)

        loggers = _loggers(self._logger_argument, run) if is_writer() and go_on else []
        logs = Logs(loggers, None if run is None else run.path)
        self.recorder = Recorder(run, loggers, logs, RowTable())
        self.federation = Federation(
            server,
            engine.store,
            engine,
            self.recorder,
            stages=tuple(evaluation.stages),
            evaluate_data=tuple(evaluation.data),
            test_data=evaluation.tested,
            evaluate_every=evaluation.every,
            evaluate_seconds=evaluation.seconds,
            sanity_check=bool(a["sanity_check"]),
            loop=copy.deepcopy(self.loop),
        )
        return self.federation

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
        model = arguments.check_model(model)
        data = arguments.federated_data(datamodule, train_dataloaders, val_dataloaders, test_dataloaders)
        with preserved():
            whole = self._copy({"logger": False})._assemble(model, data, None)
            with closing(whole.engine):
                if not whole.engine.data_here:
                    raise ConfigurationError(
                        f"A dry run tries batches in this process, and the data of {type(whole.engine).__name__} are "
                        "elsewhere. Try it with engine='sequential' where the data are."
                    )
                whole.check()
                server, trained = whole.server, whole.engine.describe(parts=DISTINCT)
                unseen = server.held_out[:UNSEEN_CLIENTS]
                ready = data if whole.engine.statistics is None else whole.engine.runner.data
                few = FewClients(ready, [*distinct_clients(trained, server.blueprint.architecture_of), *unseen])
                assigned = server.blueprint.assigned
                small = self._copy(self._small(unseen))._assemble(model, few, None, assigned=assigned)
                return dry_run(whole, small, self.max_rounds)

    def _small(self, held_out: Sequence[str]) -> dict[str, Any]:
        """Return the arguments that are others in the two rounds of a dry run."""
        a = self.arguments
        return SMALL | {
            "local_steps" if a["local_steps"] is not None else "local_epochs": 1,
            "held_out": held_out,
            "evaluation": replace(a["evaluation"], every=1, seconds=None, clients=None),
            "failures": FailurePolicy(update_limit=a["failures"].update_limit),
        }

    def _copy(self, changes: Mapping[str, Any]) -> Assembly:
        """Return a trainer with copies of the callbacks and some other arguments."""
        raise NotImplementedError

    def _chosen(self, engine: Engine, clients: int) -> tuple[Engine, dict[str, Any]]:
        """Return the engine that `engine="auto"` chooses, and the arguments with it."""
        count = Participation(self.arguments["participation"]).count(clients)
        options, why = choose(engine.runner, count, type(self.loop) is Synchronous)
        rank_zero_info(why)
        return make_engine(options, engine.runner, engine.store), {**self.arguments, "engine": options}


def _logged_clients(asked: bool | Iterable[str | int], data: Description) -> bool | list[str]:
    """Return `log_clients` with the clients by name."""
    if isinstance(asked, bool):
        return asked
    names = [str(client) for client in asked]
    unknown = [name for name in names if name not in data.client_ids]
    if unknown:
        raise ConfigurationError(
            f"log_clients holds '{unknown[0]}', which is no client. They are {list(data.client_ids)[:20]}."
        )
    return names


def _local_trainer(given: Mapping[str, Any], run: RunFolder | None) -> dict[str, Any]:
    """Return the arguments of the clients' Lightning Trainers."""
    out = {name: given[name] for name in FORWARDED if given[name] is not None}
    out["check_val_every_n_epoch"] = given["check_val_every_n_epoch"]
    if given["check_val_every_n_epoch"] is None:
        out.pop("check_val_every_n_epoch")
    if given["fast_dev_run"]:
        out |= {f"limit_{split}_batches": 1 for split in ("train", "val", "test", "predict")}
    if run is not None:
        out["default_root_dir"] = str(run.path)
    return out


def _loggers(value: Logger | Iterable[Logger] | bool | None, run: RunFolder | None) -> list[Logger]:
    """Return the run's Lightning loggers: CSV in the run's folder by default."""
    if isinstance(value, Logger):
        return [value]
    if isinstance(value, bool) or value is None:
        if not value or run is None:
            return []
        return [CSVLogger(run.path, name="", version="logs")]
    for item in value:
        if not isinstance(item, Logger):
            raise ConfigurationError(
                f"logger={value!r} is no logger. Pass True, False or instances such as CSVLogger('logs')."
            )
    return list(value)
