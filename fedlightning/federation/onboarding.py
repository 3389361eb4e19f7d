"""New clients join a federation that has been fitted: scored as unseen clients, fine-tuned, and scored again.

Each is served as :mod:`fedlightning.federation.unseen` serves a client that never trained, then makes one visit as the
method's clients do, of which nothing is sent back. The federation's models, records and random numbers stay as they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
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
from fedlightning.visit.failing import client_failure, in_words
from fedlightning.visit.requests import Evaluate

ONBOARDED = "onboarded"
"""Checkpoint of a row: the model of a new client after its visit (L2), or after one more message (L1)."""
SPLITS = ("val", "test")
ROWS, SUMMARY, MODELS = "onboarding.csv", "onboarding.json", "newcomers"
"""Files in the run's folder, and the folder of models in its `checkpoints`."""
T = TypeVar("T")


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
        trained: Clients that have made their visit.
        unseen: Serves them, and scores them before their visit.
    """

    server: Server
    engine: Engine
    epochs: int
    rows: list[Row] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    unseen: Unseen = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.unseen = Unseen(self.server, self.engine)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Clients that could not be scored or trained, or whose model could not be made."""
        return [dict(failure) for failure in self.server.failures]

    def run(self) -> None:
        """Score the clients, let each make its visit, and score them again."""
        self.rows += self.unseen.rows(SPLITS, ("G", "L1"))
        if self.epochs:
            self._visit()
            evaluate = Evaluate(SPLITS)
            for stage in ("L2", "L1"):
                scored = ScoredModel(self.server.round + 1, stage, UNSEEN, ONBOARDED)
                self._add(self.engine.map(self._scores(evaluate, scored)))

    def _visit(self) -> None:
        for update in self.engine.map(self._visits()):
            if update.error is None:
                self.trained.append(update.client)
            else:
                self.server.note_failure(update.client, f"new {update.error}", when="Onboarding")

    def _visits(self) -> Iterator[Visit]:
        for client in self.server.held_out:
            job = Job(client, returns=(), tag=NEWCOMER)
            message = self._or_noted(client, "was sent no message", "training", partial(self.server.message, job))
            if message is not None:
                yield Visit(message, Evaluate())

    def _scores(self, evaluate: Evaluate, scored: ScoredModel) -> Iterator[ScoreClient]:
        for client in self.trained:
            kept = self.engine.store.get(client).checkpoints[KeepTrained.__name__] if scored.stage == "L2" else {}
            what = f"was not scored at stage {scored.stage}"
            message = self._or_noted(client, what, scored.stage, partial(self.unseen.message, client))
            if message is not None:
                yield ScoreClient(message, evaluate, scored, kept=kept.get("model"))

    def _or_noted(self, client: str, what: str, where: str, make: Callable[[], T], decision: str = "") -> T | None:
        """Return what is made for one client; `None` where the algorithm or the module fails at it, which is noted."""
        try:
            return make()
        except Exception as error:  # of the user's code
            reason = f"new client '{client}' {what}: {in_words(client_failure(error))}"
            self.server.note_failure(client, reason, where, "Onboarding", decision)
            return None

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

        Nothing of the earlier one is removed before all models are there, and the summary comes last: where it is missing,
        an onboarding was cut off while it replaced files.

        Args:
            folder: The run's folder.
        """
        models = folder / "checkpoints" / MODELS
        fresh = models.with_name(f"{MODELS}.tmp")
        with writing(fresh):
            shutil.rmtree(fresh, ignore_errors=True)  # of a call that was killed
            fresh.mkdir(parents=True)
        self._export(fresh)
        with writing(models):
            (folder / SUMMARY).unlink(missing_ok=True)
            if models.is_dir():
                shutil.rmtree(models)
            fresh.rename(models)
        with writing(folder):
            write_rows(folder / ROWS, self.rows, append=False)
            write_text_atomically(folder / SUMMARY, readable_json(self.summary(), default=str))

    def _export(self, folder: Path) -> None:
        exporter = Exporter(self.server.blueprint.template)
        for client in self.trained if self.epochs else self.server.held_out:
            make, about = partial(self.module, client), {"client": client}
            module = self._or_noted(client, "has no model", "checkpoint", make, decision="not written")
            if module is not None:
                about["checkpoint"] = ONBOARDED if self.epochs else "latest"
                exporter.save(folder / f"{quote(client, safe='')}.ckpt", module, about)
