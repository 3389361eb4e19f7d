"""What a user holds: :class:`FederatedTrainer`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy

from fedlightning import arguments, checkpoints, persistence
from fedlightning.datamodules.base import FederatedDataModule
from fedlightning.engines.sequential import ClientStore, SequentialEngine
from fedlightning.evaluation import stages as stage_scores
from fedlightning.evaluation.results import Row, summarise
from fedlightning.fit import LocalSettings
from fedlightning.hooks import CallbackList, FederatedCallback, Job, Setup
from fedlightning.local import Evaluate, LocalRunner
from fedlightning.loops.synchronous import run_round
from fedlightning.messages import Update
from fedlightning.quiet import quiet
from fedlightning.run_folder import RunFolder, config_hash, find_last, is_writer, peak_memory_mb, versions
from fedlightning.server import Server


@dataclass
class ClientView:
    """One client as a user sees it: the module it would deploy now, and its size."""

    id: str
    module: LightningModule
    num_samples: int


class FederatedTrainer:
    """Trains one LightningModule per client, federated; used like ``lightning.pytorch.Trainer``.

    ``trainer.fit(MyModule(), datamodule=Partitioned(MyDataModule(), DirichletPartitioner(10, 0.5)))``

    Args:
        max_rounds: rounds of the federation.
        local_epochs: epochs a participant trains per round (default 1); or
        local_steps: optimizer steps a participant trains per round.
        participation: share (float in (0, 1]) or number (int) of clients that take part in a round, drawn uniformly.
        seed: addresses all randomness of the run: initial wrapping, batches, dropout, participation.
        optimizer_state: ``"reset"``: every visit makes its optimizers and schedulers anew, and the module's clocks
            count within the visit; ``"keep"``: they go on with the horizon ``max_rounds * local_epochs``. Default:
            ``"reset"``, unless an algorithm asks for the other.
        lr_decay: factor on all learning rates per round; survives the re-creation of the optimizers.
        float_buffers: running statistics of normalisation layers are averaged (``"average"``), stay with each client
            (``"local"``), or are the server's (``"server"``). Integer buffers are never averaged.
        callbacks: federated callbacks (algorithms, checkpoints, diagnostics) and ordinary Lightning callbacks in any
            order. Ordinary ones run inside every client's training, each client with a copy and a state of its own.
        engine: where clients work: ``"sequential"``, one after another in this process.
        evaluate_every: rounds between evaluations on validation data (the last round is always evaluated); 0: never.
        stages: what is evaluated: ``"G"`` the server's model, ``"L1"`` what each client holds after receiving,
            ``"L2"`` after local training.
        evaluate_data: ``"local"``: each client's own data; ``"pooled"``: the union over clients.
        logger: Lightning loggers; ``True``: CSV files in the run's folder. Round means go to them.
        name: experiment name: the run lies in ``default_root_dir/<name>/version_N``.
        version: fixed folder name instead of ``version_N``.
        default_root_dir: where runs lie (default ``runs``).
        save_state: write the complete state of the federation every so many rounds, to resume from; 0: never.
        enable_progress_bar: show rounds and clients.
        fast_dev_run: one round, one batch per client and evaluation, nothing written.
        max_time: stop at the next round boundary after this time ("DD:HH:MM:SS", timedelta or dict of its arguments).
        accelerator, strategy, devices, num_nodes, precision, plugins, accumulate_grad_batches, gradient_clip_val,
            gradient_clip_algorithm, deterministic, benchmark, inference_mode, use_distributed_sampler, profiler,
            detect_anomaly, sync_batchnorm, limit_train_batches, limit_val_batches, limit_test_batches,
            limit_predict_batches, overfit_batches, val_check_interval, check_val_every_n_epoch, log_every_n_steps,
            reload_dataloaders_every_n_epochs: forwarded to each client's ``lightning.pytorch.Trainer``.
            ``check_val_every_n_epoch=None`` (default) runs no validation inside local training.
        max_epochs, min_epochs, max_steps, min_steps, enable_checkpointing: refused, with their replacement named.

    Attributes:
        results: rows of ``summary.json`` (a list of dicts); summary: all of it; rows: every score of the run.
        config: text that the run's folder gets as ``config.yaml`` when training starts (the command line sets it).
    """

    def __init__(
        self,
        *,
        max_rounds: int = 10,
        local_epochs: int | None = None,
        local_steps: int | None = None,
        participation: float | int = 1.0,
        seed: int = 0,
        optimizer_state: Literal["reset", "keep"] | None = None,
        lr_decay: float = 1.0,
        float_buffers: Literal["average", "local", "server"] = "average",
        callbacks: list[Callback] | Callback | None = None,
        engine: Literal["sequential"] = "sequential",
        evaluate_every: int = 1,
        stages: list[Literal["G", "L1", "L2"]] | None = None,
        evaluate_data: list[Literal["local", "pooled"]] | None = None,
        logger: Logger | Iterable[Logger] | bool | None = True,
        name: str = "federation",
        version: str | None = None,
        default_root_dir: str | Path = "runs",
        save_state: int = 1,
        enable_progress_bar: bool = True,
        fast_dev_run: bool = False,
        max_time: str | timedelta | dict[str, int] | None = None,
        accelerator: str | Accelerator = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = 1,
        num_nodes: int = 1,
        precision: str | int | None = None,
        plugins: Any = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        sync_batchnorm: bool = False,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | None = None,
        check_val_every_n_epoch: int | None = None,
        log_every_n_steps: int | None = None,
        reload_dataloaders_every_n_epochs: int = 0,
        max_epochs: None = None,
        min_epochs: None = None,
        max_steps: None = None,
        min_steps: None = None,
        enable_checkpointing: None = None,
    ) -> None:
        given = {key: value for key, value in locals().items() if key != "self"}
        arguments.check(given)
        self.arguments = given
        everything = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or [])
        self.callbacks = CallbackList([item for item in everything if isinstance(item, FederatedCallback)])
        self.ordinary_callbacks = [item for item in everything if not isinstance(item, FederatedCallback)]
        self.fast_dev_run = bool(fast_dev_run)
        self.max_rounds = 1 if fast_dev_run else max_rounds
        self.stages = tuple(stages if stages is not None else ("G", "L1", "L2"))
        self.evaluate_data = tuple(evaluate_data if evaluate_data is not None else ("local",))
        self.results: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.rows: list[Row] = []
        self.rounds_done = 0
        self.final_done = False
        self.run: RunFolder | None = None
        self.config: str | None = None
        self.loggers: list[Logger] = []
        self.server: Server | None = None
        self.store = ClientStore()
        self._seconds = 0.0
        self._logger_argument = logger
        self._max_time = arguments.parse_time(max_time)

    # -- fit -------------------------------------------------------------------------------------------------------
    def fit(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        *,
        train_dataloaders: Mapping[str, Any] | None = None,
        val_dataloaders: Mapping[str, Any] | None = None,
        test_dataloaders: Mapping[str, Any] | None = None,
        resume: str | Path | None = None,
    ) -> None:
        """Run the federation.

        Args:
            model: any LightningModule; it is copied, never trained itself.
            datamodule: a :class:`~fedlightning.datamodules.FederatedDataModule`; or
            train_dataloaders, val_dataloaders, test_dataloaders: a loader per client id.
            resume: ``"last"`` (the run of this name that was saved last) or a run's folder: go on at the round
                boundary, bit for bit.

        Raises:
            ValueError: if module, data and callbacks cannot work together; a sentence that says why.
        """
        started = time.monotonic()
        arguments.check_model(model)
        data = arguments.federated_data(datamodule, train_dataloaders, val_dataloaders, test_dataloaders)
        with quiet():
            data.prepare_data()
            data.setup("fit")
        self._assemble(model, data, resume)
        server = self.server
        assert server is not None
        if resume is None:
            self._check(server)
        if self.config is not None and self.run is not None and is_writer():
            self.run.write_config(self.config)
        if resume is None:
            self.callbacks.event("on_federation_start", server)
        progress = self._progress(server)
        before = self._seconds
        with progress:
            while self.rounds_done < self.max_rounds:
                server.round = self.rounds_done
                progress.round_started(server)
                self._round(server, progress.client_done)
                self._seconds = before + time.monotonic() - started
                self._save(server)
                progress.round_ended(server, self.rows)
                if self._max_time is not None and time.monotonic() - started > self._max_time.total_seconds():
                    break
        server.round = max(self.rounds_done - 1, 0)
        if self.rounds_done == self.max_rounds and not self.final_done:
            self._final_jobs(server)
        server.round = self._last_round
        self.callbacks.event("on_federation_end", server)
        self._seconds = before + time.monotonic() - started
        self._finish(server)

    def restore(self, model: LightningModule, datamodule: LightningDataModule, run: str | Path) -> None:
        """Load what ``run`` saved last, to evaluate it or to predict with it; nothing is trained.

        Args:
            model, datamodule: as the run was started with; callbacks likewise.
            run: the run's folder, finished or interrupted.

        Raises:
            FileNotFoundError: if the run has no saved state; ValueError: if the state is of another model or data.
        """
        data = arguments.federated_data(datamodule, None, None, None)
        with quiet():
            data.prepare_data()
            data.setup("test")
        self._assemble(model, data, run, go_on=False)
        assert self.server is not None
        self.server.round = self._last_round

    @property
    def _last_round(self) -> int:
        """The server's round number of the newest scores: visits after the last round count as one more."""
        return max(self.rounds_done - 1 + self.final_done, 0)

    def _assemble(
        self, model: LightningModule, data: FederatedDataModule, resume: str | Path | None, go_on: bool = True
    ) -> None:
        a = self.arguments
        wish = next((c.optimizer_state for c in self.callbacks if getattr(c, "optimizer_state", None)), "reset")
        root, name = a["default_root_dir"], a["name"]
        if resume is not None:
            path = find_last(root, name) if str(resume) == "last" else Path(resume)
            self.run = RunFolder(path.parent.parent, path.parent.name, path.name)
        elif not self.fast_dev_run:
            self.run = RunFolder(root, name, a["version"])
            if (self.run.path / "metrics.csv").exists() and is_writer():
                raise arguments.ConfigurationError(
                    f"There is a run in {self.run.path} already. Choose another version, leave version out, or resume it "
                    f"with resume='{self.run.path}'."
                )
        self.loggers = arguments.loggers(self._logger_argument, self.run) if is_writer() and go_on else []
        settings = LocalSettings(
            seed=a["seed"],
            max_rounds=self.max_rounds,
            local_epochs=None if a["local_steps"] is not None else (a["local_epochs"] or 1),
            local_steps=a["local_steps"],
            optimizer_state=a["optimizer_state"] or wish,
            lr_decay=a["lr_decay"],
            trainer_arguments=arguments.local_trainer(a, self.run),
            callbacks=self.ordinary_callbacks,
            logger=False,
        )
        runner = LocalRunner(model, self.callbacks, data, settings)
        self.store = ClientStore()
        self.server = Server(
            runner,
            max_rounds=self.max_rounds,
            participation=a["participation"],
            float_buffers=a["float_buffers"],
            run_dir=self.run.path if self.run is not None and is_writer() else None,
        )
        self.engine = SequentialEngine(runner, self.store)
        self.rows, self.rounds_done, self.final_done, self._seconds = [], 0, False, 0.0
        if resume is not None:
            assert self.run is not None
            self.rounds_done, extra = persistence.load(self.run.last, self.server, self.store)
            self._seconds = float(extra.get("seconds", 0.0))
            self.final_done = bool(extra.get("final", False)) and self.rounds_done >= self.max_rounds
            scored = self.rounds_done + self.final_done
            self.rows = self.run.keep_rounds(scored) if go_on else self.run.read_rows(scored)

    def _check(self, server: Server) -> None:
        runner = server.runner
        module = runner.build("server")
        setup = Setup(
            module=module,
            template=runner.template,
            kinds=server.kinds,
            callbacks=list(self.callbacks),
            clients=server.clients,
            num_samples=server.num_samples,
            max_rounds=self.max_rounds,
            local_epochs=runner.settings.local_epochs,
            local_steps=runner.settings.local_steps,
            optimizers=arguments.optimizers_of(module),
            first_batch=runner.first_batch,
            warn=arguments.warn,
        )
        if sum(server.num_samples.values()) == 0:
            raise ValueError(f"None of the {len(server.clients)} clients has a training sample. Check the partition.")
        self.callbacks.event("check", setup)

    def _round(self, server: Server, client_done: Callable[[Update], None]) -> None:
        last = server.round + 1 == self.max_rounds
        every = self.arguments["evaluate_every"]
        due = every > 0 and ((server.round + 1) % every == 0 or last)
        splits = (("val",) if due else ()) + (("test",) if last else ())
        inside = Evaluate(splits if "L2" in self.stages else (), self.evaluate_data)
        updates = run_round(server, self.engine, inside, client_done)
        for update in updates:
            if update.error is not None:
                arguments.warn(f"Round {server.round + 1}: {update.error}.")
            elif update.steps == 0 and update.skipped:
                arguments.warn(
                    f"Round {server.round + 1}: client '{update.client}' took no real step, so its weight is 0: "
                    f"{update.skipped} had no gradient, or were skipped by the gradient scaler."
                )
        rows = stage_scores.update_rows(updates)
        if due:
            evaluate = Evaluate(("val",), self.evaluate_data)
            global_rows = stage_scores.stage_g(server, evaluate) if "G" in self.stages else []
            rows += global_rows
            if "L1" in self.stages:
                rows += stage_scores.stage_l1(server, self.store, evaluate, global_rows)
        server.scores = {}
        for row in rows:
            server.scores.setdefault((row.stage, row.data, row.split, row.metric), {})[row.client] = (
                row.value,
                row.num_samples,
            )
        self._record(rows)
        self.callbacks.event("on_round_end", server)
        self.rounds_done = server.round + 1

    def _record(self, rows: list[Row]) -> None:
        self.rows += rows
        if self.run is not None and is_writer():
            self.run.write_rows(rows)
        for logger in self.loggers:
            means = {
                f"{row['split']}/{row['stage']}/{row['data']}/{row['metric']}": row["mean"]
                for row in summarise(row for row in rows if row.split != "test")
                if row["mean"] is not None
            }
            if means:
                logger.log_metrics(means, step=rows[0].round)

    def _save(self, server: Server) -> None:
        every = self.arguments["save_state"]
        if self.run is None or not is_writer() or every == 0:
            return
        if self.rounds_done % every == 0 or self.rounds_done == self.max_rounds:
            persistence.save(self.run.last, server, self.store, self.rounds_done, {"seconds": self._seconds, "final": self.final_done})

    def _final_jobs(self, server: Server) -> None:
        """Visits after the last round; what they change is scored once more, as one round later."""
        owner = server.callbacks.role("final_jobs")
        if owner is None:
            return
        server.round = self.rounds_done
        for job in owner.final_jobs(server):
            message = server.message(replace(job, returns=()))
            server.bytes_down += message.num_bytes
            update = next(iter(self.engine.run([message], Evaluate())))
            server.steps += update.steps
            if update.error is not None:
                arguments.warn(f"After the last round: {update.error}.")
        if "L1" in self.stages and self.arguments["evaluate_every"] > 0:
            self._record(stage_scores.stage_l1(server, self.store, Evaluate(("val",), self.evaluate_data)))
        self.final_done = True
        self._save(server)

    def _finish(self, server: Server) -> None:
        self._summarise(server)
        if self.run is not None and is_writer():
            self._export(server)
        for logger in self.loggers:
            logger.finalize("success")

    # -- evaluation ------------------------------------------------------------------------------------------------
    def validate(self, checkpoint: str = "latest") -> list[dict[str, Any]]:
        """Score models of the fitted federation on validation data; see :meth:`test`."""
        return self._evaluate("val", checkpoint)

    def test(self, checkpoint: str = "all") -> list[dict[str, Any]]:
        """Score models of the fitted federation on test data, local and pooled.

        Args:
            checkpoint: ``"latest"``, a checkpoint callback's name (``"best_global"``, ``"best_local"``), or ``"all"``.

        Returns:
            Rows of ``summary.json``.
        """
        return self._evaluate("test", checkpoint)

    def _evaluate(self, split: str, checkpoint: str) -> list[dict[str, Any]]:
        server = self._fitted()
        kept = {k["name"] for k in server.checkpoints.values()}
        kept |= {k["name"] for client in self.store for k in self.store.get(client).checkpoints.values()}
        if checkpoint not in {"latest", "all", *kept}:
            raise ValueError(
                f"There is no checkpoint '{checkpoint}' in this run; it has {sorted({'latest', *kept})}. "
                "Add LocalCheckpoint() or GlobalCheckpoint() to the callbacks to get one."
            )
        evaluate = Evaluate((split,), ("local", "pooled"))
        rows: list[Row] = []
        if checkpoint in ("latest", "all"):
            latest = stage_scores.stage_g(server, evaluate)
            rows += latest + stage_scores.stage_l1(server, self.store, evaluate, latest)
            rows += [r for r in self.rows if (r.split, r.stage, r.round) == (split, "L2", self.rounds_done)]
        if checkpoint != "latest":
            found = stage_scores.checkpoint_rows(server, self.store, evaluate)
            rows += [row for row in found if checkpoint in ("all", row.checkpoint)]
        known = {row.address for row in self.rows}
        new = [row for row in rows if row.address not in known]
        self._record(new)
        self._summarise(server)
        return summarise(rows)

    def predict(
        self, dataloaders: Any = None, client: str | None = None, *, checkpoint: str = "latest"
    ) -> list[Any] | None:
        """Predictions of one client's deployed model (stage L1), or of the global model.

        Args:
            dataloaders: what to predict on; default: the client's own test data (pooled without a client).
            client: whose model; ``None``: the global one.
            checkpoint: ``"latest"``, or the name of a checkpoint to load first.
        """
        server = self._fitted()
        module = self.module(client, checkpoint)
        if dataloaders is None:
            data = server.runner.data
            dataloaders = data.pooled_dataloader("test") if client is None else data.client_dataloader(client, "test")
        with quiet():
            trainer = Trainer(
                accelerator=self.arguments["accelerator"],
                devices=1,
                precision=self.arguments["precision"],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                limit_predict_batches=self.arguments["limit_predict_batches"],
            )
            return trainer.predict(module, dataloaders=dataloaders)

    def client(self, client: str | int) -> ClientView:
        """The client as it stands: the module it would deploy now (stage L1) and its training samples."""
        return ClientView(str(client), self.module(str(client)), self._fitted().num_samples[str(client)])

    def module(self, client: str | None = None, checkpoint: str = "latest") -> LightningModule:
        """A copy of the global model (``client=None``) or of the model that ``client`` deploys."""
        return stage_scores.deployed_module(self._fitted(), self.store, client, checkpoint)

    # -- files -----------------------------------------------------------------------------------------------------
    def _summarise(self, server: Server) -> None:
        newest = {row.stage: row.round for row in self.rows if row.checkpoint == "latest" and row.round >= self.rounds_done}
        final = [row for row in self.rows if row.checkpoint == "latest" and row.round == newest.get(row.stage)]
        chosen = [row for row in self.rows if row.checkpoint != "latest"]
        self.results = summarise(row for row in (*final, *chosen) if row.split != "train")
        config = {key: value for key, value in self.arguments.items() if key not in ("default_root_dir", "version")}
        callbacks = {callback.key: callback.hyperparameters() for callback in self.callbacks}
        self.summary = {
            "results": self.results,
            "rounds": self.rounds_done,
            "num_clients": len(server.clients),
            "num_samples": server.num_samples,
            "callbacks": callbacks,
            "model": type(server.runner.template).__name__,
            "seed": self.arguments["seed"],
            "bytes_up": server.bytes_up,
            "bytes_down": server.bytes_down,
            "local_steps_total": server.steps,
            "seconds": round(self._seconds, 3),
            "peak_memory_mb": round(peak_memory_mb(), 1),
            "versions": versions(),
            "config_hash": config_hash({**config, "callbacks": callbacks}),
        }
        if self.run is not None and is_writer():
            self.run.write_summary(self.summary)

    def _export(self, server: Server) -> None:
        assert self.run is not None
        folder, template = self.run.path / "checkpoints", type(server.runner.template)
        (folder / "clients").mkdir(parents=True, exist_ok=True)
        names = {kept["name"] for kept in server.checkpoints.values()}
        if names or server.global_module(None) is not None:
            name = next(iter(names), "latest")
            checkpoints.export(folder / "global.ckpt", self.module(None, name), template, {"checkpoint": name})
        for client in server.clients:
            kept = self.store.get(client).checkpoints
            name = next((entry["name"] for entry in kept.values()), "latest")
            path = folder / "clients" / f"{quote(client, safe='')}.ckpt"
            checkpoints.export(path, self.module(client, name), template, {"client": client, "checkpoint": name})

    def _fitted(self) -> Server:
        if self.server is None:
            raise RuntimeError("This FederatedTrainer has no federation yet. Call fit(), or fit(resume=...), first.")
        return self.server

    def _progress(self, server: Server) -> Any:
        from fedlightning.progress import NoProgress, RichProgress

        return RichProgress(self.max_rounds) if self.arguments["enable_progress_bar"] and is_writer() else NoProgress()
