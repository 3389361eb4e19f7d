"""New clients join a federation that has been fitted: scored as unseen clients, fine-tuned, and scored again.

Each is served as :mod:`fedlightning.onboarding.held_out_scores` serves a client that never trained, then makes one visit as
the method's clients do, of which nothing is sent back. The federation's models, records and random numbers stay as they are.

Where a method finds a client's place (its cluster) by an update, visits for that come first (`Newcomers.place`). They are
those of a round, and only the place is kept of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.client import Client
from fedlightning.client.client_errors import client_failure, describe_error
from fedlightning.client.requests import Evaluate
from fedlightning.contract import NEWCOMER, CallbackList, Facts, FederatedCallback, Job, Placing
from fedlightning.contract.messages import Message, Update
from fedlightning.deployment.export import Deploy
from fedlightning.engines.contract import ClientRecords, Engine, Visit
from fedlightning.engines.score_tasks import ScoreClient, ScoredModel
from fedlightning.onboarding.held_out_scores import Unseen
from fedlightning.scores.metric_names import summarise
from fedlightning.scores.rows import UNSEEN, Gap, Row, write_rows
from fedlightning.server.server import Server
from fedlightning.server.summary import describe_clients
from fedlightning.storage.files import readable_json, write_text_atomically, writing
from fedlightning.tensors import clone, module_state

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

    facts = Facts(takes_part=False)
    rank = 10**6  # what the others keep of a visit is there

    def __init__(self, owner: FederatedCallback | None = None) -> None:
        self.owner = owner

    def on_send(self, client: Client, update: Update) -> None:
        """Keep the model among the client's checkpoints."""
        module = client.module if self.owner is None else self.owner.personal_module(client, "L2")
        model = clone(module_state(module), "cpu")
        client.checkpoints[self.key] = {"name": ONBOARDED, "stage": "L2", "round": client.round + 1, "model": model}


def placing_callback(server: Server) -> FederatedCallback | None:
    """Return the callback that places newcomers by visits; `None` if nobody has to."""
    return next((callback for callback in server.callbacks if callback.facts.newcomers.place), None)


def blueprint_of_visits(blueprint: Blueprint, epochs: int) -> Blueprint:
    """Return the blueprint of new clients: the federation's, with `epochs` of training and optimizers that begin anew."""
    settings = replace(
        blueprint.settings, local_epochs=epochs, local_steps=None, optimizer_state="reset", log_clients=False
    )
    keeper = KeepTrained(blueprint.callbacks.role("personal_module"))
    return replace(blueprint, callbacks=CallbackList([*blueprint.callbacks, keeper]), settings=settings)


def blueprint_of_placing(blueprint: Blueprint) -> Blueprint:
    """Return the blueprint of the visits by which new clients find their place: a round's, with nothing to go on from."""
    settings = replace(blueprint.settings, optimizer_state="reset", log_clients=False)
    return replace(blueprint, settings=settings)


@dataclass
class Onboarding:
    """New clients of one federation.

    Args:
        server: A copy of the federation's server, whose `held_out` are the new clients.
        engine: Has their data, and a store of its own.
        epochs: Epochs of each client's visit; 0: none.
        placing: The engine of the visits by which they find their place; `None`: the method has no places.

    Attributes:
        rows: All scores.
        trained: Clients that have made their visit.
        places: Where each client belongs, in a method with places.
        newcomers: The new clients, also those that found no place.
        unseen: Serves them, and scores them before their visit.
    """

    server: Server
    engine: Engine
    epochs: int
    placing: Engine | None = None
    rows: list[Row] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    newcomers: list[str] = field(init=False)
    unseen: Unseen = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.newcomers = list(self.server.held_out)
        self.unseen = Unseen(self.server, self.engine, joining=True)

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Clients that could not be placed, scored or trained, or whose model could not be made."""
        return [dict(failure) for failure in self.server.failures]

    def run(self) -> None:
        """Find the clients' places, score them, let each make its visit, and score them again."""
        if self.placing is not None:
            self._place(self.placing)
        self.rows += self.unseen.rows(SPLITS, ("G", "L1"))
        if self.epochs:
            self._visit()
            evaluate = Evaluate(SPLITS)
            for stage in ("L2", "L1"):
                scored = ScoredModel(self.server.round + 1, stage, UNSEEN, ONBOARDED)
                self._add(self.engine.map(self._scores(evaluate, scored)))

    def _place(self, engine: Engine) -> None:
        """Carry out the method's plan on what is the server's own from here on; leave out who finds no place."""
        server, owner = self.server, placing_callback(self.server)
        plan = None if owner is None else owner.facts.newcomers.place
        assert owner is not None and plan is not None
        server.detach()
        sizes = server.num_samples
        described, now = engine.runner.described, server.round
        server.population.num_samples = sizes | {
            client: described.num_samples(client, round=now) for client in self.newcomers
        }
        self.places = self._placed(engine, plan(server, list(self.newcomers)))
        server.population.num_samples = sizes
        noted = {failure["client"] for failure in server.failures}
        for client in self.newcomers:
            if client not in self.places and client not in noted:
                server.note_failure(
                    client, f"new client '{client}': {owner.key} found no place for it", when="Onboarding"
                )
        server.population.held_out = [client for client in self.newcomers if client in self.places]

    def _placed(self, engine: Engine, plan: Placing) -> dict[str, str]:
        server, answers = self.server, None
        while True:
            try:
                jobs = next(plan) if answers is None else plan.send(answers)
            except StopIteration as end:
                return {client: place for client, place in (end.value or {}).items() if client in self.newcomers}
            answers = []
            engine.store = ClientRecords()  # every visit is a first one
            for update in engine.run(self._messages(jobs), Evaluate()):
                reason = update.error
                if reason is None and not update.contributed:
                    reason = f"client '{update.client}' took no training step, by which it would find its place"
                if reason is None:
                    answers.append(update)
                else:
                    server.note_failure(update.client, reason.replace("client '", "new client '", 1), when="Onboarding")

    def _messages(self, jobs: Iterable[Job]) -> Iterator[Message]:
        return self._make_visits(
            ((job.client, partial(self.server.message, job)) for job in jobs), "was sent no message"
        )

    def _visit(self) -> None:
        for update in self.engine.map(self._visits()):
            if update.error is None:
                self.trained.append(update.client)
            else:
                self.server.note_failure(update.client, f"new {update.error}", when="Onboarding")

    def _visits(self) -> Iterator[Visit]:
        jobs = (self.server.job(client, returns=(), tag=NEWCOMER) for client in self.server.held_out)
        return (Visit(message, Evaluate()) for message in self._messages(jobs))

    def _scores(self, evaluate: Evaluate, scored: ScoredModel) -> Iterator[ScoreClient]:
        kept = KeepTrained.__name__ if scored.stage == "L2" else ""
        messages = ((client, partial(self.unseen.message, client)) for client in self.trained)
        for message in self._make_visits(messages, f"was not scored at stage {scored.stage}", scored.stage):
            yield ScoreClient(message, evaluate, scored, kept=kept)

    def _make_visits(
        self,
        wanted: Iterable[tuple[str, Callable[[], Message]]],
        otherwise: str,
        where: str = "training",
        decision: str = "",
    ) -> Iterator[Message]:
        """Yield each client's message; where the algorithm or the module fails at it, that is noted in its place."""
        for client, make in wanted:
            try:
                message = make()
            except Exception as error:  # of the user's code
                reason = f"new client '{client}' {otherwise}: {describe_error(client_failure(error))}"
                self.server.note_failure(client, reason, where, "Onboarding", decision)
                continue
            yield message

    def _add(self, row_groups: Iterable[Sequence[Row]]) -> None:
        for rows in row_groups:
            for row in rows:
                if isinstance(row, Gap):
                    self.server.note_failure(row.client, f"new {row.sentence}", row.stage, "Onboarding")
                else:
                    self.rows.append(row)

    def summary(self) -> dict[str, Any]:
        """Return the contents of `onboarding.json`."""
        withheld = self.server.callbacks.withholding("classes") != ""
        return {
            "clients": describe_clients(self.engine.describe(details=["classes"]), self.newcomers, withheld),
            "epochs": self.epochs,
            "rounds": self.server.round + 1,
            "trained": self.trained,
            "results": summarise(self.rows),
        } | {name: content for name, content in (("places", self.places), ("failures", self.failures)) if content}

    def write(self, folder: Path) -> None:
        """Write scores, summary and models into the run's folder, in place of an earlier onboarding's.

        Nothing of the earlier one is removed before all models are there, and the summary comes last: where it is missing,
        an onboarding was cut off while it replaced files.
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
        for answer in self.engine.map(self._models(folder)):
            if answer.reason is not None:
                reason = f"new client '{answer.client}' has no model: {answer.reason}"
                self.server.note_failure(answer.client, reason, "checkpoint", "Onboarding", "not written")

    def _models(self, folder: Path) -> Iterator[Deploy]:
        """Yield the tasks that write the models which new clients have after their visits; without one, what they deploy."""
        place = str(folder) if self.engine.shares_disk else None
        about = {"checkpoint": ONBOARDED if self.epochs else "latest"}
        clients = self.trained if self.epochs else self.server.held_out
        messages = ((client, partial(self.unseen.message, client)) for client in clients)
        for message in self._make_visits(messages, "has no model", "checkpoint", "not written"):
            kept = ONBOARDED if message.client in self.trained else ""
            yield Deploy(message, kept=kept, write=True, folder=place, about=about)
