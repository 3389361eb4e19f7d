"""The composition root: a trainer's options, a module and data become a federation that can begin.

What attaches to a federation is made and ordered here, and nowhere else: engine, server, parts, loop.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_info

from fedlightning import arguments
from fedlightning.arguments import TrainerOptions
from fedlightning.arguments.local import check_keeping
from fedlightning.client.blueprint import Blueprint, ClientParts
from fedlightning.client.fit import configured_callbacks
from fedlightning.client.requests import LocalSettings
from fedlightning.client.runtime import ClientRuntime
from fedlightning.contract import Protection
from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.datamodules.held_out import ClientSubset
from fedlightning.deployment.checkpoints import load_initial_weights, read_privacy
from fedlightning.engines.contract import ClientRecords, Engine
from fedlightning.engines.sequential import SequentialEngine
from fedlightning.errors import ConfigurationError, refuse_without_posix, warn
from fedlightning.fast.fast_evaluation import FastEvaluator, RowTable
from fedlightning.fast.fast_fit import FastFitter
from fedlightning.fast.module_copier import Copier
from fedlightning.guards.dry_run import (
    DISTINCT,
    UNSEEN_CLIENTS,
    distinct_clients,
    dry_run,
    fresh_loader,
    small_arguments,
)
from fedlightning.guards.dry_run_report import DryRun
from fedlightning.guards.explosions import Explosions, FarScores
from fedlightning.guards.lost_batches import refuse_lost_batches
from fedlightning.guards.preflight import Preflight
from fedlightning.guards.update_checks import UpdateChecks
from fedlightning.guards.watchdog import Watchdog
from fedlightning.models.client_models import ClientModels
from fedlightning.onboarding.held_out_scores import HeldOutScores
from fedlightning.options import Auto, EngineOptions, Evaluation, Flower, Processes, Ray, Vectorized
from fedlightning.options.lightning_arguments import OF_DEVICES, check_devices
from fedlightning.privacy.outgoing import OutgoingReport, refuse_private
from fedlightning.resume.config_changes import DETAILS, fingerprint
from fedlightning.resume.loggers import LoggerStates
from fedlightning.resume.resumable import refuse_requeued
from fedlightning.resume.saving import Saving
from fedlightning.run.folder import RunFolder
from fedlightning.run.recorder import Recorder
from fedlightning.seeding import preserved
from fedlightning.server.federation import Federation
from fedlightning.server.loop import Synchronous
from fedlightning.server.parts import Part, Parts
from fedlightning.server.population import Participation, Population, aggregate_data_statistics
from fedlightning.server.progress import RichProgress
from fedlightning.server.server import Server
from fedlightning.stacked.vectorized_engine import choose
from fedlightning.storage.files import is_writing_process
from fedlightning.virtual_time.clock import Timeline

CLIENT_PARTS = ClientParts(
    fitters=(FastFitter,),
    evaluators=(FastEvaluator,),
    loop_checks=(refuse_lost_batches,),
    leave_checks=(refuse_private,),
    copier=Copier,
)
"""What attaches to every client, in this process, in workers and at sites."""


def assemble(
    options: TrainerOptions,
    model: LightningModule,
    data: FederatedDataModule,
    run: RunFolder | None,
    go_on: bool = True,
    assigned: Mapping[str, str] | None = None,
) -> Federation:
    """Put a federation together; it trains nothing yet.

    Args:
        options: What the trainer was told.
        model: The module, which is copied.
        data: The data of all clients.
        run: The run's folder; `None`: nothing is written.
        go_on: Whether it will be trained; else it is only scored.
        assigned: Name of each client's model. Default: as the module says.
    """
    blueprint = make_blueprint(options, model, run)
    memory = options.arguments["client_memory_gb"]
    store = ClientRecords(limit=None if memory is None else int(memory * 1e9))
    engine = make_engine(options.arguments["engine"], ClientRuntime(blueprint, data), store)
    engine.set_up("fit" if go_on else "test")
    everybody = engine.describe()
    arguments.check_clients(everybody)
    blueprint.settings.log_clients = arguments.logged_clients(options.arguments["log_clients"], everybody)
    blueprint.assigned = arguments.assigned_models(model, everybody) if assigned is None else assigned
    held_out = arguments.held_out_clients(options.arguments["held_out"], everybody)
    engine.leave_out(held_out)
    if (wanted := engine.runner.described.statistics) is not None:
        aggregate_data_statistics(engine, wanted, blueprint.callbacks, None if run is None else run.path)
    if isinstance(options.arguments["engine"], Auto):
        engine, options = _choose_engine(engine, options)
    engine.attempts.policy, engine.attempts.watch = options.arguments["failures"], Watchdog(engine.attempts)
    evaluation: Evaluation = options.arguments["evaluation"]
    population = _list_population(engine, held_out)
    population.scored = arguments.evaluated_clients(evaluation.clients, population.clients, everybody.seed)
    server = Server(
        blueprint,
        population,
        max_rounds=options.max_rounds,
        participation=options.arguments["participation"],
        float_buffers=options.arguments["float_buffers"],
        run_dir=run.path if run is not None and is_writing_process() else None,
        parts=Parts(list_parts(options, blueprint.template, engine)),
    )
    loggers = _make_loggers(options.arguments["logger"], run) if is_writing_process() and go_on else []
    return Federation(
        server,
        engine.store,
        engine,
        Recorder(run, loggers, LoggerStates(loggers, None if run is None else run.path), RowTable()),
        stages=tuple(evaluation.stages),
        evaluate_data=tuple(evaluation.data),
        test_data=evaluation.tested,
        evaluate_every=evaluation.every,
        evaluate_seconds=evaluation.seconds,
        sanity_check=options.arguments["sanity_check"],
        loop=copy.deepcopy(options.loop),
    )


def assemble_dry_run(options: TrainerOptions, model: LightningModule, data: FederatedDataModule) -> DryRun:
    """Put two federations together, as the run will be and a small one that trains, and make a dry run of them."""
    with preserved():
        whole = assemble(options.copied(logger=False), model, data, None)
        with closing(whole.engine):
            if not whole.engine.data_here:
                raise ConfigurationError(
                    f"A dry run tries batches in this process, and the data of {type(whole.engine).__name__} are "
                    "elsewhere. Try it with engine='sequential' where the data are."
                )
            whole.check()
            server, trained = whole.server, whole.engine.describe(details=DISTINCT)
            unseen = server.held_out[:UNSEEN_CLIENTS]
            ready = data if whole.engine.statistics is None else whole.engine.runner.data
            clients = [*distinct_clients(trained, server.blueprint.architecture_of), *unseen]
            few = ClientSubset(ready, clients, fresh_loader)
            changes = small_arguments(options.arguments, unseen)
            copied = options.copied(**changes)
            for callback in copied.callbacks:
                if isinstance(callback, Protection):
                    callback.rehearse()
            small = assemble(copied, model, few, None, assigned=server.blueprint.assigned)
            return dry_run(whole, small, options.max_rounds)


def list_parts(options: TrainerOptions, model: LightningModule, engine: Engine) -> list[Part]:
    """Return what attaches to a federation, in the order in which it is told what happens.

    Args:
        options: What the trainer was told.
        model: The module from which clients' modules are built.
        engine: Carries out the visits.
    """

    def fingerprint_of(joined: Sequence[str], held_out: Sequence[str]) -> dict[str, Any]:
        callbacks = options.callbacks.callbacks, options.ordinary_callbacks
        return fingerprint(options.arguments, *callbacks, model, engine.describe(joined, DETAILS), held_out)

    return [
        UpdateChecks(options.arguments["failures"].update_limit),
        Explosions(),
        FarScores(),
        Preflight(),
        OutgoingReport(),
        HeldOutScores(),
        Timeline(),
        Saving(options.arguments["save_state"], fingerprint_of),
        *(
            [RichProgress(options.max_rounds)]
            if options.arguments["enable_progress_bar"] and is_writing_process()
            else []
        ),
    ]


def make_blueprint(options: TrainerOptions, model: LightningModule, run: RunFolder | None = None) -> Blueprint:
    """Return what clients are built from: the module, the callbacks and how clients train. No data are needed.

    Args:
        options: What the trainer was told.
        model: The module.
        run: The run's folder.
    """
    a = options.arguments
    refuse_requeued(Path.cwd() if run is None else run.path)
    for module in map(model.model, model.models) if isinstance(model, ClientModels) else [model]:
        check_keeping(configured_callbacks(module), a, options.optimizer_state)
    settings = LocalSettings(
        seed=a["seed"].run,
        max_rounds=options.max_rounds,
        local_epochs=None if a["local_steps"] is not None else (a["local_epochs"] or 1),
        local_steps=a["local_steps"],
        optimizer_state=options.optimizer_state,
        lr_decay=a["lr_decay"],
        trainer_arguments=arguments.local_trainer_arguments(a, None if run is None else run.path),
        callbacks=options.ordinary_callbacks,
        log_clients=a["log_clients"] is True,
        local_loop=a["local_loop"],
        float_buffers=a["float_buffers"],
        other_seeds=a["seed"].others(),
    )
    devices = {name: a[name] for name in OF_DEVICES if a[name] not in (None, "auto", 1, "cpu")}
    if devices:
        check_devices(devices, settings.trainer_arguments)
    if a["init_from"] is not None:
        model = load_initial_weights(model, a["init_from"])
    blueprint = Blueprint(model, options.callbacks, settings, parts=CLIENT_PARTS)
    if a["init_from"] is not None and any(isinstance(callback, Protection) for callback in options.callbacks):
        blueprint.privacy = spent = read_privacy(a["init_from"])
        if spent:
            warn(
                f"init_from={str(a['init_from'])!r} has spent epsilon={spent['epsilon']:.4g} at "
                f"delta={spent['delta']:g}. For data that were in it, that and what this run spends add up: privacy.json "
                "tells both, and their sum."
            )
    return blueprint


def make_engine(options: EngineOptions, runner: ClientRuntime, store: ClientRecords) -> Engine:
    """Make the engine of some options. What another one than the default needs is imported here.

    Args:
        options: Which engine, and how.
        runner: The client side of the federation.
        store: The clients' records; `Flower` has one of its own, of what is known of records elsewhere.
    """
    if isinstance(options, Processes | Ray):
        refuse_without_posix(f"engine='{options.name}'", "Use engine='sequential' or 'vectorized'.")
    if isinstance(options, Processes):
        from fedlightning.parallel.scheduling import ProcessesEngine

        return ProcessesEngine(runner, store, options.workers)
    if isinstance(options, Ray):
        from fedlightning.parallel.ray import RayEngine

        return RayEngine(runner, store, options)
    if isinstance(options, Vectorized):
        from fedlightning.stacked.vectorized_engine import VectorizedEngine

        return VectorizedEngine(runner, store, options.clients_per_stack)
    if isinstance(options, Flower):
        from fedlightning.sites.engine import SitesEngine
        from fedlightning.sites.link import current
        from fedlightning.sites.site_log import SiteStore

        return SitesEngine(runner, SiteStore(), *current())
    return SequentialEngine(runner, store)


def _list_population(engine: Engine, held_out: list[str]) -> Population:
    """Return the clients and what is known of their data."""
    data = engine.runner.described
    return Population(
        {client: data.num_samples(client) for client in data.client_ids},
        held_out=held_out,
        sizes=data.sizes,
        over_rounds=data.over_rounds,
        together=data.together,
        sites=dict(engine.sites),
        public_source=engine.public,
    )


def _choose_engine(engine: Engine, options: TrainerOptions) -> tuple[Engine, TrainerOptions]:
    """Return the engine that `engine="auto"` chooses, and the options with it."""
    count = Participation(options.arguments["participation"]).count(len(engine.runner.described.client_ids))
    chosen, why = choose(engine.runner, count, type(options.loop) is Synchronous)
    rank_zero_info(why)
    options = replace(options, arguments={**options.arguments, "engine": chosen})
    another = make_engine(chosen, engine.runner, engine.store)
    another.statistics = engine.statistics
    return another, options


def _make_loggers(value: Logger | Iterable[Logger] | bool | None, run: RunFolder | None) -> list[Logger]:
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
                f"logger={value!r} is not a logger. Pass True, False or instances such as CSVLogger('logs')."
            )
    return list(value)
