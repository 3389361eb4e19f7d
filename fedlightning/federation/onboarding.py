"""New clients join a federation that has been fitted: scored as unseen clients, fine-tuned, and scored again.

Each is served as :mod:`fedlightning.federation.unseen` serves a client that never trained, then makes one visit as the
method's clients do, of which nothing is sent back. The federation's models, records and random numbers stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lightning.pytorch import LightningModule

from fedlightning.blueprint.blueprint import Blueprint
from fedlightning.federation.engine import Engine, Visit
from fedlightning.federation.server import Server
from fedlightning.federation.summary import describe_clients
from fedlightning.federation.unseen import Unseen
from fedlightning.hooks import NEWCOMER, CallbackList, FederatedCallback, Job
from fedlightning.messages import Update
from fedlightning.run.checkpoints import Exporter
from fedlightning.run.files import readable_json, write_text_atomically, writing
from fedlightning.scoring.results import UNSEEN, Gap, Row, summarise, write_rows
from fedlightning.scoring.tasks import ScoreClient, ScoredModel
from fedlightning.tensors import clone, load_state, module_state
from fedlightning.visit.client import Client
from fedlightning.visit.requests import Evaluate

ONBOARDED = "onboarded"
"""Checkpoint of a row: the model of a new client after its visit (L2), or after one more message (L1)."""
SPLITS = ("val", "test")
ROWS, SUMMARY, MODELS = "onboarding.csv", "onboarding.json", "newcomers"
"""Files in the run's folder, and the folder of models in its `checkpoints`."""


class KeepTrained(FederatedCallback):
    """Keeps the model that a new client deploys when its visit ends.

    Args:
        owner: The callback that says which model a client deploys, if any.
    """

    takes_part = False
    rank = 10**6  # what the others keep of a visit is there

    def __init__(self, owner: FederatedCallback | None = None) -> None:
        self.owner = owner

    def on_send(self, client: Client, update: Update) -> None:
        """Keep the model among the client's checkpoints."""
        module = client.module if self.owner is None else self.owner.personal_module(client, "L2")
        model = clone(module_state(module), "cpu")
        client.checkpoints[self.key] = {"name": ONBOARDED, "stage": "L2", "round": client.round + 1, "model": model}


def blueprint_of_visits(blueprint: Blueprint, epochs: int) -> Blueprint:
    """Return the blueprint of new clients: the federation's, with `epochs` of training and optimizers that begin anew.

    Args:
        blueprint: The federation's.
        epochs: Epochs of a visit.
    """
    settings = replace(
        blueprint.settings, local_epochs=epochs, local_steps=None, optimizer_state="reset", log_clients=False
    )
    keeper = KeepTrained(blueprint.callbacks.role("personal_module"))
    return Blueprint(blueprint.template, CallbackList([*blueprint.callbacks, keeper]), settings)


@dataclass
class Onboarding:
    """New clients of one federation.

    Args:
        server: The federation's server, whose `held_out` are the new clients. It is not changed.
        engine: Has their data, and a store of its own.
        epochs: Epochs of each client's visit; 0: none.

    Attributes:
        rows: All scores.
        failures: Clients that could not be scored or trained.
    """

    server: Server
    engine: Engine
    epochs: int
    rows: list[Row] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Score the clients, let each make its visit, and score them again."""
        server, self.unseen = self.server, Unseen(self.server, self.engine)
        self.rows += self.unseen.rows(SPLITS, ("G", "L1"))
        if self.epochs:
            self._visit()
            evaluate = Evaluate(SPLITS)
            for stage in ("L2", "L1"):
                scored = ScoredModel(server.round + 1, stage, UNSEEN, ONBOARDED)
                self._add(self.engine.map(self._score(client, evaluate, scored) for client in self.trained))
        self.failures = [dict(failure) for failure in server.failures]

    def _visit(self) -> None:
        server = self.server
        jobs = (Job(client, returns=(), tag=NEWCOMER) for client in server.held_out)
        for update in self.engine.map(Visit(server.message(job), Evaluate()) for job in jobs):
            if update.error is None:
                self.trained.append(update.client)
            else:
                server.note_failure(update.client, f"new {update.error}", when="Onboarding")

    def _score(self, client: str, evaluate: Evaluate, scored: ScoredModel) -> ScoreClient:
        kept = (
            self.engine.store.get(client).checkpoints[KeepTrained.__name__]["model"] if scored.stage == "L2" else None
        )
        return ScoreClient(self.unseen.message(client), evaluate, scored, kept=kept)

    def _add(self, found: Iterable[Sequence[Row]]) -> None:
        for rows in found:
            for row in rows:
                if isinstance(row, Gap):
                    self.server.note_failure(row.client, f"new {row.sentence}", row.stage, "Onboarding")
                else:
                    self.rows.append(row)

    def module(self, client: str) -> LightningModule:
        """Return the model that a new client has after its visit; without one, what it would deploy."""
        runner, record = self.engine.runner, self.engine.store.get(client)
        with runner.client(self.unseen.message(client), record, evaluating=True) as visited:
            kept = record.checkpoints.get(KeepTrained.__name__)
            module = runner.personal_module(visited, "L1" if kept is None else "L2")
            if kept is not None:
                load_state(module, kept["model"])
        return module

    def summary(self) -> dict[str, Any]:
        """Return the contents of `onboarding.json`."""
        return {
            "clients": describe_clients(self.engine.runner.data, self.server.held_out),
            "epochs": self.epochs,
            "rounds": self.server.round + 1,
            "trained": self.trained,
            "results": summarise(self.rows),
        } | ({"failures": self.failures} if self.failures else {})

    def write(self, folder: Path) -> None:
        """Write scores, summary and models into the run's folder, in the place of an earlier onboarding's.

        Args:
            folder: The run's folder.
        """
        models = folder / "checkpoints" / MODELS
        with writing(folder):
            models.mkdir(parents=True, exist_ok=True)
            for old in models.glob("*.ckpt"):
                old.unlink()
            write_rows(folder / ROWS, self.rows, append=False)
            write_text_atomically(folder / SUMMARY, readable_json(self.summary(), default=str))
        exporter = Exporter(self.server.blueprint.template)
        for client in self.trained if self.epochs else self.server.held_out:
            about = {"client": client, "checkpoint": ONBOARDED if self.epochs else "latest"}
            exporter.save(models / f"{quote(client, safe='')}.ckpt", self.module(client), about)
