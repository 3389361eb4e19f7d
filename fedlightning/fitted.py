"""A federation that has been fitted or restored: scores, models, predictions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor

from fedlightning import arguments
from fedlightning.arguments import TrainerOptions
from fedlightning.client.blueprint import Blueprint
from fedlightning.client.data_summary import describe
from fedlightning.client.runtime import ClientRuntime
from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.deployment.checkpoints import Exporter
from fedlightning.deployment.export import Deploy, Predict, deployed, deployed_module, predictions, spent_in
from fedlightning.engines.contract import Engine
from fedlightning.engines.score_tasks import ServerModel
from fedlightning.errors import ConfigurationError
from fedlightning.onboarding.held_out_scores import refusal
from fedlightning.onboarding.onboarding import Onboarding, blueprint_of_placing, blueprint_of_visits, placing_callback
from fedlightning.ranges import to_python
from fedlightning.resume.lock import only_writer
from fedlightning.run.folder import RunFolder
from fedlightning.scores.metric_names import summarise
from fedlightning.scores.rows import LOCAL, UNSEEN
from fedlightning.scores.table import print_results
from fedlightning.seeding import preserved
from fedlightning.server.federation import Federation
from fedlightning.storage.files import is_writing_process, writing


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


@dataclass
class FittedFederation:
    """A federation that has been fitted or restored, as a user asks it; it trains nothing.

    Attributes:
        federation: The federation.
        options: What the trainer was told.
        model: The module that was fitted.
        datamodule: The data that it was fitted to; `None`: loaders, as in `fit`.
    """

    federation: Federation
    options: TrainerOptions
    model: LightningModule | None = None
    datamodule: LightningDataModule | None = None

    @property
    def _run(self) -> RunFolder | None:
        return self.federation.recorder.run

    def refuse_others(self, model: LightningModule | None, datamodule: LightningDataModule | None) -> None:
        """Refuse to score a module or data that were not fitted."""
        for what, argument in (("model", model), ("datamodule", datamodule)):
            if argument is not None and argument is not getattr(self, what):
                raise ValueError(
                    f"This trainer's federation was not fitted with this {what}, and scores are those of what was "
                    f"fitted. Leave {what} out, or restore a run: test(model=..., datamodule=..., run=FOLDER)."
                )

    def score(self, split: str, checkpoint: str, verbose: bool) -> list[dict[str, Any]]:
        """Score models on a split; see `FederatedTrainer.test`."""
        federation, run = self.federation, self._run
        federation.server.blueprint.refuse_changed()
        with nullcontext() if run is None else only_writer(run.path), federation.engine.at_work():
            rows = federation.evaluate(split, checkpoint)
            federation.summarise(self.options.arguments)
        results = summarise(rows)
        if verbose and is_writing_process():
            print_results(results, split)
        return results

    def onboard(
        self, newcomers: FederatedDataModule | None, clients: Sequence[str | int] | None, epochs: int, verbose: bool
    ) -> list[dict[str, Any]]:
        """Let new clients join; see `FederatedTrainer.onboard`."""
        federation, folder, epochs = self.federation, self._run, to_python(epochs)
        federation.server.blueprint.refuse_changed()
        if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 0:
            raise ConfigurationError(f"epochs={epochs!r} must be a whole number; 0 scores the new clients only.")
        run_data = federation.engine.runner.described
        data = None if newcomers is None else arguments.new_clients_data(newcomers)
        newcomers_data = run_data if data is None else describe(data)
        chosen = arguments.new_clients(newcomers_data, newcomers is None, federation.server, clients)
        arguments.check_new_clients(newcomers_data, chosen, epochs)
        server = federation.server
        server = server.beside(arguments.assigned_newcomers(server, run_data, newcomers_data, chosen), chosen)
        why = refusal(server, joining=True)
        if why is not None:
            raise ConfigurationError(f"{why} It cannot be onboarded.")
        old = federation.engine
        if data is not None and not old.data_here:
            raise ConfigurationError(
                f"onboard(newcomers=...) brings data into this process, and those of {type(old).__name__} are elsewhere. Let "
                "the new clients' sites take part from the start, kept out of training by held_out."
            )

        def make_engine(blueprint: Blueprint) -> Engine:
            runner = old.runner.beside(blueprint) if data is None else ClientRuntime(blueprint, data)
            if data is not None and old.statistics is not None:
                runner.agree(old.statistics["totals"])
            engine = old.beside(runner)
            engine.attempts.server = server
            return engine

        engine, placing = make_engine(blueprint_of_visits(server.blueprint, epochs)), None
        if placing_callback(server) is not None:
            placing = make_engine(blueprint_of_placing(server.blueprint))
        onboarding = Onboarding(server, engine, epochs, placing)
        with nullcontext() if folder is None else only_writer(folder.path), engine.at_work(), preserved():
            with nullcontext() if placing is None else placing.at_work():
                onboarding.run()
            if folder is not None and is_writing_process():
                onboarding.write(folder.path)
        results = summarise(onboarding.rows)
        if verbose and is_writing_process():
            for split in ("val", "test"):
                if any(row["split"] == split for row in results):
                    print_results(results, split)
        return results

    def predict(
        self, dataloaders: Any = None, client: str | int | None = None, *, checkpoint: str = "latest"
    ) -> list[Any] | None:
        """Predict with one client's deployed model (stage L1), or with the global model.

        Lightning callbacks of the trainer that have hooks of prediction, such as a `BasePredictionWriter`, are called.
        """
        federation, client = self.federation, _named(client)
        options = {name: self.options.arguments[name] for name in ("accelerator", "precision", "limit_predict_batches")}
        if dataloaders is not None:
            arguments.check_prediction_data(dataloaders, client)
            module = self.module(client, checkpoint)
            return predictions(module, dataloaders, options, self.options.ordinary_callbacks)
        federation.server.blueprint.refuse_changed()
        model = deployed(federation.server, federation.engine, client, checkpoint)
        deploy, model_of_server = (model, None) if isinstance(model, Deploy) else (None, model)
        whole = None if model_of_server is None else ServerModel(model_of_server, federation.server.blueprint)
        models = federation.engine.ask(Predict(deploy, whole, client, options))
        if models is None:
            arguments.check_prediction_data(None, client)
            return None
        return models[0]

    def client(self, client: str | int) -> ClientView:
        """Return the client as it stands: the module it would deploy now (stage L1) and its training samples."""
        data = self.federation.engine.runner.described
        return ClientView(str(client), self.module(str(client)), data.num_samples(str(client)))

    def module(self, client: str | int | None = None, checkpoint: str = "latest") -> LightningModule:
        """Return a copy of the global model (`client=None`) or of the model that `client` deploys."""
        federation = self.federation
        federation.server.blueprint.refuse_changed()
        return deployed_module(federation.server, federation.engine, _named(client), checkpoint)

    def save_checkpoint(self, path: str | Path, client: str | int | None = None, *, checkpoint: str = "latest") -> None:
        """Save the global model, or the model that a client deploys, as a Lightning checkpoint.

        `fedlightning.load` reads it, and so does `load_from_checkpoint` of a module that no algorithm has wrapped.
        """
        client = _named(client)
        module = self.module(client, checkpoint)
        about = {"checkpoint": checkpoint} | ({} if client is None else {"client": client})
        about |= spent_in(self.federation.server.run_dir)
        with writing(Path(path)):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            blueprint = self.federation.server.blueprint
            architecture = blueprint.architecture_of("server" if client is None else client)
            Exporter(blueprint.template_of).save(Path(path), module, about, architecture)

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Newest scores by name, each the mean over clients on their own data; see `FederatedTrainer`.

        They are scores of the latest models as received (L1), or else after aggregation (G) or local training (L2).
        """
        federation = self.federation
        every = max(federation.evaluate_every, 1) if federation.evaluate_seconds is None else federation.rounds_done
        since = max(federation.rounds_done - every + 1, 0)
        values: dict[str, dict[tuple[int, int], list[float]]] = {}
        for row in federation.recorder.rows:
            if row.round >= since and row.checkpoint == "latest" and row.data == LOCAL and row.model != UNSEEN:
                place = (row.round, ("L2", "G", "L1").index(row.stage))
                values.setdefault(row.metric, {}).setdefault(place, []).append(row.value)
        return {metric: torch.tensor(places[max(places)]).mean() for metric, places in values.items()}


def _named(client: str | int | None) -> str | None:
    """Return a client's id, which is a text, of a client that may be named by a number; `None`: the federation."""
    return None if client is None else str(client)
