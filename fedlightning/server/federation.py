"""A federation being trained: server, clients, engine and recorder, and what happens round by round."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fedlightning.client.requests import Evaluate
from fedlightning.contract import POOLED, SumCodec
from fedlightning.contract.messages import Update
from fedlightning.engines.attempts import FederationError, sort_failures
from fedlightning.engines.contract import ClientRecords, Engine
from fedlightning.run.recorder import Recorder
from fedlightning.scores.rows import LOCAL, Row, of_clients
from fedlightning.server import evaluation as stage_scores
from fedlightning.server import population
from fedlightning.server.costs import Costs
from fedlightning.server.loop import Loop, Synchronous, messages
from fedlightning.server.parts import Parts
from fedlightning.server.server import AFTER_LAST_ROUND, Server
from fedlightning.server.summary import summarise_evaluation, summarise_terms, summary_of
from fedlightning.server.update_collector import warn_missing_updates


@dataclass
class Federation:
    """All that lives while a federation runs. :class:`~fedlightning.trainer.FederatedTrainer` makes and drives it.

    Attributes:
        server: The server.
        store: The clients' records.
        engine: Carries out visits and scoring.
        recorder: Keeps scores and the summary.
        loop: Says when clients are visited.
        stages: Stages that are scored on validation data.
        evaluate_data: `"local"`, `"pooled"`: the data they are scored on.
        test_data: Whose data :meth:`evaluate` scores on.
        evaluate_every: Rounds between evaluations; 0: never.
        evaluate_seconds: Virtual seconds between evaluations, instead; `None`: counted in rounds.
        sanity_check: Whether :meth:`check` tries one batch of every step.
        rounds_done: Finished rounds.
        final_done: Whether the visits after the last round have happened.
        asked_evaluate_every: Rounds between evaluations as the user wants it, where a callback withholds scores too.
        left_out: Data that scores were asked for on and that are not in one place.
    """

    server: Server
    store: ClientRecords
    engine: Engine
    recorder: Recorder
    stages: tuple[str, ...]
    evaluate_data: tuple[str, ...]
    test_data: tuple[str, ...]
    evaluate_every: int
    sanity_check: bool = True
    evaluate_seconds: float | None = None
    loop: Loop = field(default_factory=Synchronous)
    rounds_done: int = 0
    final_done: bool = False

    def __post_init__(self) -> None:
        self.engine.attempts.note, self.engine.attempts.server = self._note_try, self.server
        self.left_out: list[str] = []
        if not self.engine.runner.described.together:
            asked = (*self.evaluate_data, *self.test_data)
            self.left_out = [data for data in (POOLED, "clients") if data in asked]
            self.evaluate_data = tuple(data for data in self.evaluate_data if data == LOCAL)
            self.test_data = tuple(data for data in self.test_data if data == LOCAL)
        self.asked_evaluate_every = self.evaluate_every
        if self.server.callbacks.withholding("scores"):
            self.evaluate_every = 0

    @property
    def parts(self) -> Parts:
        """What attaches to the federation."""
        return self.server.parts

    def _note_try(self, client: str, reason: str, where: str, decision: str) -> None:
        when = AFTER_LAST_ROUND if where == "checkpoint" else ""
        self.server.note_failure(client, reason, where.split()[0], when, decision)

    @property
    def costs(self) -> Costs:
        """What the run has cost so far."""
        return self.server.costs

    @property
    def history(self) -> list[dict[str, float]]:
        """Cost of each round: see :class:`~fedlightning.server.costs.Costs`."""
        return self.server.costs.history

    @property
    def last_round(self) -> int:
        """Round number of the newest scores, from 0; visits after the last round count as one more."""
        return max(self.rounds_done - 1 + self.final_done, 0)

    @property
    def is_over(self) -> bool:
        """Whether all rounds are done."""
        return self.rounds_done >= self.server.rounds

    def begin(self) -> None:
        """Begin a new federation: tell the callbacks and the parts."""
        if self.engine.statistics is not None and self.recorder.run is not None and self.recorder.writes:
            population.keep(self.engine, self.recorder.run.path)
        self.server.callbacks.event("on_federation_start", self.server)
        self.parts.tell("on_begin", self)

    def check(self) -> None:
        """Refuse what cannot work, before round 1."""
        self.parts.tell("check", self)

    def round(self) -> None:
        """Carry out one round: train, score, tell the callbacks and the parts.

        Raises:
            FederationError: If clients that failed end the run.
            ScoringError: If no model could be scored at a stage.
        """
        try:
            self._round()
        except (FederationError, stage_scores.ScoringError):
            self.parts.tell("on_round_failed", self)
            raise

    def _round(self) -> None:
        server, parts = self.server, self.parts
        server.round = self.rounds_done
        parts.tell("on_round_start", self)
        due = self.is_evaluated(server.round)
        updates = self.loop.round(server, self.engine, self._in_visits(due), partial(parts.tell, "on_visit_end"))
        self._look_at(updates)
        parts.tell("on_round_trained", self, updates)
        rows = self._score(updates, due)
        parts.tell("on_round_scored", self, rows, updates)
        server.callbacks.event("on_round_end", server)
        self.rounds_done = server.round + 1
        if not due and self.is_evaluated(server.round):  # a callback has just made it the last one
            self.recorder.record(self._validated() + parts.score(self, ("val",), self.stages))
        self._end_round()

    def _in_visits(self, due: bool) -> Evaluate:
        """Return what visits score: stage L2, on validation data if that is due, on test data in the last round."""
        server = self.server
        last = server.round + 1 == server.rounds
        splits = (("val",) if due else ()) + (("test",) if last and self.test_data else ())
        scored = None if server.population.all_are_scored else frozenset(server.population.scored)
        return Evaluate(splits if "L2" in self.stages else (), self.evaluate_data, scored)

    def _look_at(self, updates: list[Update]) -> None:
        """Forget secrets of a sum, which nobody asks for any more; warn of clients that contributed nothing."""
        codec = self.server.callbacks.find(SumCodec)
        if codec is not None:
            self.store.forget(sorted({update.client for update in updates}), codec.key)
        warn_missing_updates(self.server, updates, self.engine.attempts.policy)

    def _score(self, updates: list[Update], due: bool) -> list[Row]:
        """Score the models if that is due, and record all scores of the round; return those of clients that train."""
        server = self.server
        rows = stage_scores.rows_from_updates(updates, server.model_of, server.round) + (
            self._validated() if due else []
        )
        if due and self.stages and server.round < self.evaluate_every:  # the first time
            stage_scores.warn_unscored_stages(server, self.engine, "val", rows, asked=False)
        server.scores = stage_scores.index_scores(rows)
        self.recorder.record(rows + (self.parts.score(self, ("val",), self.stages) if due else []))
        self.recorder.log_clients(updates)
        return rows

    def _end_round(self) -> None:
        self.costs.tick()
        self.costs.end_round(self.server.round, self.loop.clock is not None)
        self.parts.tell("on_round_end", self)

    def _validated(self) -> list[Row]:
        """Score the server's and the clients' models on validation data."""
        started = time.monotonic()
        evaluate = Evaluate(("val",), self.evaluate_data)
        rows = stage_scores.score_global_model(self.server, self.engine, evaluate) if "G" in self.stages else []
        if "L1" in self.stages:
            rows = rows + stage_scores.score_received_models(self.server, self.engine, evaluate, rows)
        self.costs.evaluation_seconds += time.monotonic() - started
        return rows

    def finish(self) -> None:
        """Carry out the final visits if all rounds are done, then end the federation for the callbacks."""
        server = self.server
        server.round = self.last_round
        if self.is_over and not self.final_done:
            self._final_jobs()
        server.round = self.last_round
        server.callbacks.event("on_federation_end", server)
        self.parts.tell("on_end", self)
        self.costs.tick()

    def _final_jobs(self) -> None:
        """Visit clients after the last round; what that changes is scored once more, as one round later."""
        server = self.server
        owner = server.callbacks.role("final_jobs")
        if owner is None:
            return
        server.round = self.rounds_done
        self.costs.extra_work_of_rounds = dict(self.costs.extra_work)
        jobs = [replace(job, returns=()) for job in owner.final_jobs(server)]
        for update in self.engine.run(messages(server, jobs), Evaluate()):
            self.costs.steps += update.steps
            self.costs.add_work(update, after_last_round=True)
            self.recorder.log_clients([update])
            if update.error is not None:
                server.note_failure(update.client, update.error, when=AFTER_LAST_ROUND)
        self.parts.tell("on_rounds_over", self)
        if "L1" in self.stages and self.evaluate_every > 0:
            rows = stage_scores.score_received_models(server, self.engine, Evaluate(("val",), self.evaluate_data))
            self.recorder.record(rows + self.parts.score(self, ("val",), ("L1",)))
        self.final_done = True
        self._end_round()

    def summarise(self, arguments: Mapping[str, Any]) -> None:
        """Bring the recorder's results and summary (and `summary.json`) up to date.

        Args:
            arguments: The trainer's arguments.
        """
        population = self.server.population
        results = self.recorder.choose_results(
            self.rounds_done, None if population.all_are_scored else population.scored
        )
        self.recorder.write_summary(
            summary_of(self.server, self.engine, results, self.rounds_done, self.costs.seconds, arguments, self.history)
            | {
                "evaluation": summarise_evaluation(self.server),
                "evaluation_seconds": round(self.costs.evaluation_seconds, 3),
            }
            | {"terms": summarise_terms(self.server, sorted(self._selected_names()), self._validations())}
            | ({"stopped": self.server.stopped} if self.server.rounds < self.server.max_rounds else {})
            | ({"failures": sort_failures(self.server.failures, self.server.clients)} if self.server.failures else {})
            | self.parts.summary(self)
        )

    def _selected_names(self) -> set[str]:
        """Return the names of all selected models, the server's and the clients'."""
        kept = {entry["name"] for entry in self.server.checkpoints.values()}
        return kept | {e["name"] for client in self.store for e in self.store.note(client).checkpoints.values()}

    def is_evaluated(self, round: int) -> bool:
        """Return whether models are scored on validation data at the end of a round, from 0.

        In virtual seconds it is the first round that begins at a multiple of them or later: known before it begins.
        """
        if self.evaluate_every <= 0:
            return False
        if round + 1 == self.server.rounds:
            return True
        if self.evaluate_seconds is None:
            return (round + 1) % self.evaluate_every == 0
        ends = [0.0, 0.0, *(entry["time"] for entry in self.history[:round])]
        return ends[-1] // self.evaluate_seconds > ends[-2] // self.evaluate_seconds

    def _validations(self) -> int:
        """Return the number of rounds so far in which models were scored on validation data."""
        return sum(map(self.is_evaluated, range(self.rounds_done)))

    def evaluate_untrained(self, split: str, least: int) -> None:
        """Score the model that the federation was made with at every client that has at least so many samples of a split."""
        population, data = self.server.population, self.engine.runner.described
        enough = [client for client in population.scored if data.num_samples(client, split) >= least]
        if not enough:
            raise ValueError(
                f"No client has {least} {split} samples or more, so there is nobody to score the model at."
            )
        if len(enough) < len(population.scored):
            population.scored = enough
        self.test_data = tuple(
            data for data in self.test_data if data == LOCAL or len(enough) == len(population.clients)
        )
        self.evaluate(split, "latest")

    def evaluate(self, split: str, checkpoint: str) -> list[Row]:
        """Score the models as they stand, or as callbacks selected them; see `FederatedTrainer.test`."""
        server = self.server
        kept = self._selected_names()
        if checkpoint not in {"latest", "all", *kept}:
            raise ValueError(
                f"There is no checkpoint '{checkpoint}' in this run; it has {sorted({'latest', *kept})}. "
                "Add LocalCheckpoint() or GlobalCheckpoint() to the callbacks to get one."
            )
        if split == "val" and (key := server.callbacks.withholding("scores")):
            raise ValueError(
                f"{key} withholds scores on validation data. Score test data, or give {key}(scores='in the clear')."
            )
        self.parts.tell("on_evaluate", self, split)
        evaluate = Evaluate((split,), self.test_data)
        rows: list[Row] = []
        if checkpoint in ("latest", "all"):
            latest = stage_scores.score_global_model(server, self.engine, evaluate)
            rows += latest + stage_scores.score_received_models(server, self.engine, evaluate, latest)
            trained = self.recorder.rows.where(
                lambda model, stage, checkpoint, data, its_split, metric: (stage, its_split) == ("L2", split),
                since=self.rounds_done,
            )
            rows += of_clients((row for row in trained if row.round == self.rounds_done), server.population.scored)
            rows += self.parts.score(self, (split,), ("G", "L1"))
        if checkpoint != "latest":
            checkpoint_scores = stage_scores.checkpoint_rows(server, self.engine, evaluate)
            rows += [row for row in checkpoint_scores if checkpoint in ("all", row.checkpoint)]
            rows += self.parts.score(self, (split,), (), checkpoint)
        stage_scores.warn_unscored_stages(server, self.engine, split, rows)
        self.parts.tell("on_evaluated", self, rows)
        self.recorder.record(rows)
        return rows
