"""What a user asks of a federation that has been fitted or restored: scores, models, predictions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from torch import Tensor

from fedlightning import arguments
from fedlightning.blueprint.blueprint import Blueprint
from fedlightning.datamodules.base import FederatedDataModule
from fedlightning.errors import ConfigurationError
from fedlightning.federation.deploy import Deploy, Predict, predictions
from fedlightning.federation.deployed import deployed, deployed_module, spent_in
from fedlightning.federation.engine import Engine
from fedlightning.federation.federation import Federation
from fedlightning.federation.onboarding import Onboarding, blueprint_of_placing, blueprint_of_visits, placing_callback
from fedlightning.federation.server import Server
from fedlightning.federation.store import ClientStore
from fedlightning.federation.unseen import refusal
from fedlightning.hooks import CallbackList
from fedlightning.options import SHORT_FORMS
from fedlightning.run.checkpoints import Exporter
from fedlightning.run.folder import RunFolder
from fedlightning.run.lock import only_thread, only_writer
from fedlightning.run.recorder import Recorder
from fedlightning.scoring.results import summarise
from fedlightning.scoring.rows import LOCAL, UNSEEN, Row
from fedlightning.scoring.server_model import ServerModel
from fedlightning.scoring.table import print_results
from fedlightning.seeding import preserved
from fedlightning.storage.files import is_writer, writing
from fedlightning.visit.description import describe
from fedlightning.visit.runner import LocalRunner


@dataclass
class ClientView:
    """One client as a user sees it.

    Attributes:
        id: The client's id.
        module: The module it would deploy now (stage L1).
        num_samples: Its training samples.
    """

    id: str
    module: LightningModule
    num_samples: int


class Fitted:
    """The part of :class:`~fedlightning.trainer.FederatedTrainer` that reads a federation and trains nothing.

    Attributes:
        arguments: The trainer's arguments.
        callbacks: The federated callbacks.
        ordinary_callbacks: The ordinary ones.
        recorder: Keeps scores and the summary.
        federation: The federation, once there is one.
        given: The model and the data module that it was fitted with or restored for.
    """

    arguments: Mapping[str, Any]
    callbacks: CallbackList
    ordinary_callbacks: list[Callback]
    recorder: Recorder
    federation: Federation | None
    given: tuple[LightningModule | None, LightningDataModule | None] = (None, None)

    def restore(self, model: LightningModule, datamodule: LightningDataModule, run: str | Path) -> None:
        """Load the state that a run saved last: see `FederatedTrainer`."""
        raise NotImplementedError

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
    def store(self) -> ClientStore:
        """The clients' records."""
        return ClientStore() if self.federation is None else self.federation.store

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
            checkpoint = model
            model = None
        if ckpt_path is not None and Path(ckpt_path).is_dir():
            run = ckpt_path if run is None else run
        elif ckpt_path is not None:
            checkpoint = "all" if str(ckpt_path) == "best" else str(ckpt_path)
        if run is not None:
            if model is None or datamodule is None:
                raise ValueError(
                    "To score a run from its folder, give the model and the datamodule that it was started with: "
                    "test(model=..., datamodule=..., run=...)."
                )
            self.restore(model, datamodule, run)
        else:
            for what, given, known in zip(("model", "datamodule"), (model, datamodule), self.given, strict=True):
                if given is not None and given is not known:
                    raise ValueError(
                        f"This trainer's federation was not fitted with this {what}, and scores are those of what was "
                        f"fitted. Leave {what} out, or restore a run: test(model=..., datamodule=..., run=FOLDER)."
                    )
        results = self._evaluate(split, checkpoint)
        if verbose and is_writer():
            print_results(results, split)
        return results

    def _evaluate(self, split: str, checkpoint: str) -> list[dict[str, Any]]:
        federation, run = self._fitted(), self.recorder.run
        with nullcontext() if run is None else only_writer(run.path), federation.engine.at_work():
            rows = federation.evaluate(split, checkpoint)
            federation.summarise(self.arguments)
        return summarise(rows)

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
        in the place of those of an earlier call; no other file changes. `docs/how-to/late_clients.md` says
        what each method does.
        """
        if run is not None:
            if model is None or datamodule is None:
                raise ConfigurationError(
                    "To onboard clients into a run from its folder, give the model and the datamodule that it was started "
                    "with: onboard(newcomers, model=..., datamodule=..., run=...)."
                )
            self.restore(model, datamodule, run)
        federation, folder = self._fitted(), self.recorder.run
        if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 0:
            raise ConfigurationError(f"epochs={epochs!r} must be a whole number; 0 scores the new clients only.")
        own = federation.engine.runner.described
        data = None if newcomers is None else arguments.new_clients_data(newcomers)
        known = own if data is None else describe(data)
        chosen = arguments.new_clients(known, newcomers is None, federation.server, clients)
        arguments.check_new_clients(known, chosen, epochs)
        server = federation.server
        server = server.beside(arguments.assigned_newcomers(server, own, known, chosen), chosen)
        why = refusal(server, joining=True)
        if why is not None:
            raise ConfigurationError(f"{why} It cannot be onboarded.")
        old = federation.engine
        if data is not None and not old.data_here:
            raise ConfigurationError(
                f"onboard(newcomers=...) brings data into this process, and those of {type(old).__name__} are elsewhere. Let "
                "the new clients' sites take part from the start, kept out of training by held_out."
            )

        def engine_of(blueprint: Blueprint) -> Engine:
            runner = old.runner.beside(blueprint) if data is None else LocalRunner(blueprint, data)
            if data is not None and old.statistics is not None:
                runner.agree(old.statistics["totals"])
            engine = old.beside(runner)
            engine.attempts.server = server
            return engine

        engine, placing = engine_of(blueprint_of_visits(server.blueprint, epochs)), None
        if placing_callback(server) is not None:
            placing = engine_of(blueprint_of_placing(server.blueprint))
        onboarding = Onboarding(server, engine, epochs, placing)
        with nullcontext() if folder is None else only_writer(folder.path), engine.at_work(), preserved():
            with nullcontext() if placing is None else placing.at_work():
                onboarding.run()
            if folder is not None and is_writer():
                onboarding.write(folder.path)
        results = summarise(onboarding.rows)
        if verbose and is_writer():
            for split in ("val", "test"):
                if any(row["split"] == split for row in results):
                    print_results(results, split)
        return results

    @only_thread()
    def predict(
        self, dataloaders: Any = None, client: str | None = None, *, checkpoint: str = "latest"
    ) -> list[Any] | None:
        """Predict with one client's deployed model (stage L1), or with the global model.

        Lightning callbacks of this trainer that have hooks of prediction, such as a `BasePredictionWriter`, are called.
        """
        federation = self._fitted()
        given = {name: self.arguments[name] for name in ("accelerator", "precision", "limit_predict_batches")}
        if dataloaders is not None:
            module = self.module(client, checkpoint)
            arguments.check_prediction_data(dataloaders, client)
            return predictions(module, dataloaders, given, self.ordinary_callbacks)
        model = deployed(federation.server, federation.engine, client, checkpoint)
        deploy, model_of_server = (model, None) if isinstance(model, Deploy) else (None, model)
        whole = None if model_of_server is None else ServerModel(model_of_server, federation.server.blueprint)
        found = federation.engine.ask(Predict(deploy, whole, client, given))
        if found is None:
            arguments.check_prediction_data(None, client)
            return None
        return found[0]

    def client(self, client: str | int) -> ClientView:
        """Return the client as it stands: the module it would deploy now (stage L1) and its training samples."""
        known = self._fitted().engine.runner.described
        return ClientView(str(client), self.module(str(client)), known.num_samples(str(client)))

    @only_thread()
    def module(self, client: str | None = None, checkpoint: str = "latest") -> LightningModule:
        """Return a copy of the global model (`client=None`) or of the model that `client` deploys."""
        federation = self._fitted()
        return deployed_module(federation.server, federation.engine, client, checkpoint)

    def save_checkpoint(self, path: str | Path, client: str | None = None, *, checkpoint: str = "latest") -> None:
        """Save the global model, or the model that a client deploys, as a Lightning checkpoint.

        `fedlightning.load` reads it, and so does `load_from_checkpoint` of a module that no algorithm has wrapped.
        """
        module = self.module(client, checkpoint)
        about = {"checkpoint": checkpoint} | ({} if client is None else {"client": client})
        about |= spent_in(self._fitted().server.run_dir)
        with writing(Path(path)):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            blueprint = self._fitted().server.blueprint
            architecture = blueprint.architecture_of("server" if client is None else client)
            Exporter(blueprint.template_of).save(Path(path), module, about, architecture)

    def __repr__(self) -> str:
        """Return the arguments that differ from their defaults, and how far the federation is."""
        parameters = inspect.signature(type(self).__init__).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        defaults |= {name: read(defaults[name]) for name, read in SHORT_FORMS.items()}
        shown = {
            name: value
            for name, value in self.arguments.items()
            if name not in ("callbacks", "self") and name in defaults and value != defaults[name]
        }
        texts = [f"{name}={value!r}" for name, value in shown.items()]
        texts += [f"callbacks={self.callbacks.callbacks + self.ordinary_callbacks!r}"]
        done = (
            "not fitted"
            if self.federation is None
            else f"{self.rounds_done} rounds done, {len(self.client_ids)} clients"
        )
        return f"<{type(self).__name__}({', '.join(texts)}): {done}>"

    @property
    def client_ids(self) -> list[str]:
        """The clients' ids, in order; empty before `fit`."""
        return [] if self.server is None else list(self.server.clients)

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Newest scores by name (`val_loss`), each the mean over clients on their own data; empty before the first.

        They are scores of the latest models as received (L1), or else after aggregation (G) or local training (L2).
        """
        if self.federation is None:
            return {}
        every = max(self.federation.evaluate_every, 1) if self.federation.evaluate_seconds is None else self.rounds_done
        since = max(self.rounds_done - every + 1, 0)
        found: dict[str, dict[tuple[int, int], list[float]]] = {}
        for row in self.rows:
            if row.round >= since and row.checkpoint == "latest" and row.data == LOCAL and row.model != UNSEEN:
                place = (row.round, ("L2", "G", "L1").index(row.stage))
                found.setdefault(row.metric, {}).setdefault(place, []).append(row.value)
        return {metric: torch.tensor(places[max(places)]).mean() for metric, places in found.items()}

    def _fitted(self) -> Federation:
        if self.federation is None:
            raise RuntimeError("This FederatedTrainer has no federation yet. Call fit(), or fit(resume=...), first.")
        return self.federation
