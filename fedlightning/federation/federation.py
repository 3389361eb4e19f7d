"""A federation being trained: server, clients, engine and recorder, and what happens round by round."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info

from fedlightning.federation import stages as stage_scores
from fedlightning.federation import statistics
from fedlightning.federation.changes import Fingerprint, refuse_mixed_validation
from fedlightning.federation.costs import Costs
from fedlightning.federation.deployed import WHEN, export
from fedlightning.federation.engine import Engine
from fedlightning.federation.failures import Decisions, FederationError, in_order
from fedlightning.federation.intake import note_work, tell_of_misses
from fedlightning.federation.loops import Loop, Synchronous
from fedlightning.federation.loops.synchronous import messages
from fedlightning.federation.outgoing import covered, in_words
from fedlightning.federation.rehearsal import Rehearsal
from fedlightning.federation.server import Server
from fedlightning.federation.state import save_state
from fedlightning.federation.store import ClientStore
from fedlightning.federation.summary import evaluation_of, summary_of
from fedlightning.federation.terms import terms_of
from fedlightning.federation.unseen import Unseen
from fedlightning.federation.update_checks import checked
from fedlightning.hooks import POOLED, SumCodec
from fedlightning.run.files import is_writer
from fedlightning.run.persistence import FLUSHED, set_aside
from fedlightning.run.recorder import Recorder
from fedlightning.run.timeline import draw_timeline, note_trips
from fedlightning.scoring.rows import Row, of_clients
from fedlightning.scoring.tasks import LOCAL
from fedlightning.visit.requests import Evaluate

if TYPE_CHECKING:
    from fedlightning.run.progress import NoProgress

MARKS = ("metrics", "loggers")
"""What a saved state knows of the recorder."""


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
        save_every: Rounds between saved states; 0: never.
        fingerprint: Gives what must not change when the run is resumed.
        sanity_check: Whether :meth:`check` tries one batch of every step.
        changes: What has changed all the same, because the user allowed it.
        rounds_done: Finished rounds.
        rounds_saved: Rounds of the newest saved state.
        final_done: Whether the visits after the last round have happened.
        costs: What the run has cost so far.
        scored: Clients that the newest scored round has scored, if it is of a restored run.
        asked_evaluate_every: Rounds between evaluations as the user wants it, where a callback withholds scores too.
        left_out: Data that scores were asked for on and that are not in one place.
    """

    server: Server
    store: ClientStore
    engine: Engine
    recorder: Recorder
    stages: tuple[str, ...]
    evaluate_data: tuple[str, ...]
    test_data: tuple[str, ...]
    evaluate_every: int
    save_every: int
    fingerprint: Fingerprint = lambda joined, held_out: {}
    sanity_check: bool = True
    evaluate_seconds: float | None = None
    loop: Loop = field(default_factory=Synchronous)
    changes: list[str] = field(default_factory=list)
    rounds_done: int = 0
    rounds_saved: int = 0
    final_done: bool = False
    costs: Costs = field(default_factory=Costs)
    scored: list[str] | None = None
    _of_rounds: dict[str, Any] | None = None  # the recorder's mark before the visits after the last round

    def __post_init__(self) -> None:
        self.engine.attempts.note = self._note_try
        self.server.sites = dict(self.engine.sites)
        self.left_out: list[str] = []
        if not self.engine.runner.described.together:
            asked = (*self.evaluate_data, *self.test_data)
            self.left_out = [data for data in (POOLED, "clients") if data in asked]
            self.evaluate_data = tuple(data for data in self.evaluate_data if data == LOCAL)
            self.test_data = tuple(data for data in self.test_data if data == LOCAL)
        self.asked_evaluate_every = self.evaluate_every
        if self.server.callbacks.withholding("scores"):
            self.evaluate_every = 0

    @cached_property
    def unseen(self) -> Unseen:
        """The clients that are held out, to be scored."""
        return Unseen(self.server, self.engine)

    def _note_try(self, client: str, reason: str, where: str, decision: str) -> None:
        when = WHEN if where == "checkpoint" else ""
        self.server.note_failure(client, reason, where.split()[0], when, decision)

    @property
    def decisions(self) -> Decisions:
        """Clients that were left out because of the machine, which holds for rounds that are done again."""
        return self.engine.attempts.decisions

    @property
    def history(self) -> list[dict[str, float]]:
        """Cost of each round: see :class:`~fedlightning.federation.costs.Costs`."""
        return self.costs.history

    @property
    def last_round(self) -> int:
        """Round number of the newest scores, from 0; visits after the last round count as one more."""
        return max(self.rounds_done - 1 + self.final_done, 0)

    @property
    def is_over(self) -> bool:
        """Whether all rounds are done."""
        return self.rounds_done >= self.server.rounds

    @cached_property
    def lasting(self) -> dict[str, Any]:
        """What must not change when the run is resumed."""
        return self.fingerprint((), self.server.held_out)

    def begin(self) -> None:
        """Begin a new federation: tell the callbacks, and find out what must not change when the run is resumed."""
        self.remember_decisions()
        if told := in_words(self.server.callbacks, self.server.outgoing):
            rank_zero_info(told)
        if self.engine.statistics is not None and self.recorder.run is not None and self.recorder.writes:
            statistics.keep(self.engine, self.recorder.run.path)
        self.server.callbacks.event("on_federation_start", self.server)
        if self._saves:
            assert self.lasting is not None  # found before round 1, not in its time

    @property
    def _saves(self) -> bool:
        """Whether this process saves states."""
        return self.recorder.run is not None and self.recorder.writes and self.save_every > 0

    def remember_decisions(self) -> None:
        """Keep decisions that the machine forces on the run in its folder, and read those that are there."""
        run = self.recorder.run
        if run is not None and is_writer():
            self.decisions.path = run.decisions
        self.decisions.load(self.rounds_done)

    def check(self) -> None:
        """Refuse what cannot work, before round 1: see :class:`~fedlightning.federation.rehearsal.Rehearsal`."""
        Rehearsal(self).ask()

    def round(self, progress: NoProgress) -> None:
        """Carry out one round: train, score, tell the callbacks, save.

        Args:
            progress: Is told of the round, of each client that has answered, and of the scores.

        Raises:
            FederationError: If clients that failed end the run.
            ScoringError: If no model could be scored at a stage.
        """
        try:
            self._round(progress)
        except (FederationError, stage_scores.ScoringError):
            self.decisions.undo(self.rounds_done + 1)  # who resumes wants its clients tried again
            raise

    def _round(self, progress: NoProgress) -> None:
        server = self.server
        server.round = self.rounds_done
        progress.round_started(server.round, self.loop.visits(server))
        last = server.round + 1 == server.rounds
        due = self._is_evaluated(server.round)
        splits = (("val",) if due else ()) + (("test",) if last and self.test_data else ())
        scored = None if server.evaluated is server.clients else frozenset(server.evaluated)
        inside = Evaluate(splits if "L2" in self.stages else (), self.evaluate_data, scored)
        server.norms.forget_round()
        updates = self.loop.round(server, self.engine, inside, progress.client_done)
        codec = server.callbacks.find(SumCodec)
        if codec is not None:  # secrets of clients that dropped out, which nobody asks for any more
            self.store.forget(sorted({update.client for update in updates}), codec.key)
        tell_of_misses(server, updates, self.engine.attempts.policy)
        server.explosions.end_round(server.round + 1)
        server.norms.end_round()
        rows = stage_scores.update_rows(updates, server.model_of, server.round)
        rows += self._validated() if due else []
        if due and self.stages and server.round < self.evaluate_every:  # the first time
            stage_scores.tell_of_silence(server, self.engine, "val", rows, asked=False)
        stage_scores.tell_of_the_best(server, rows)
        server.scores = stage_scores.by_client(rows)
        self.recorder.record(rows + (self._unseen() if due else []))
        self.recorder.log_clients(updates)
        if server.run_dir is not None and self.recorder.writes and self.loop.trips:
            note_trips(server.run_dir, self.loop.trips)
        server.callbacks.event("on_round_end", server)
        self.rounds_done = server.round + 1
        if not due and self._is_evaluated(server.round):  # a callback has just made it the last one
            self.recorder.record([*self._validated(), *self._unseen()])
        self.costs.tick()
        self.costs.count(self.server, self.loop.clock is not None)
        self.save()
        progress.round_ended(server.round, rows)

    def _validated(self) -> list[Row]:
        """Score the server's and the clients' models on validation data."""
        started = time.monotonic()
        self.scored = None
        evaluate = Evaluate(("val",), self.evaluate_data)
        rows = stage_scores.stage_g(self.server, self.engine, evaluate) if "G" in self.stages else []
        if "L1" in self.stages:
            rows = rows + stage_scores.stage_l1(self.server, self.engine, evaluate, rows)
        self.costs.evaluation_seconds += time.monotonic() - started
        return rows

    def _unseen(self) -> list[Row]:
        return self.unseen.rows(("val",), self.stages) if self.server.held_out else []

    @cached_property
    def _who(self) -> dict[str, Any]:
        """The clients, for the saved states; who they are does not change from the first of them on."""
        assert self.recorder.run is not None
        assigned = dict(self.server.blueprint.assigned)
        lasting = {"clients": self.server.clients, "held_out": self.server.held_out}
        return set_aside(self.recorder.run.last, lasting | ({"assigned": assigned} if assigned else {}))

    def save(self) -> None:
        """Write the complete state, if this round is one to write."""
        if not self._saves:
            return
        assert self.recorder.run is not None
        server = self.server
        if self.rounds_done % self.save_every == 0 or self.is_over:
            extra = {
                **self.costs.state(),
                "final": self.final_done,
                "lasting": self.lasting,
                **self._who,
                **self.recorder.mark(),
                **{f"{name}_of_rounds": mark for name, mark in (self._of_rounds or {}).items()},
                "spent": self.server.spent,
                "failures": self.server.failures,
                "stopped": self.server.stopped,
                "explosions": self.server.explosions.plain(),
                "norms": self.server.norms.plain(),
                "local_loop": self.engine.runner.loop.reason,
            } | ({"changes": self.changes} if self.changes else {})
            extra |= {FLUSHED: True} if self.loop.flushes and self.rounds_done == server.max_rounds else {}
            save_state(self.recorder.run.last, self.server, self.store, self.rounds_done, extra, self.loop.state())
            self.rounds_saved = self.rounds_done
            self.recorder.logs.begun()

    def finish(self) -> None:
        """Carry out the final visits if all rounds are done, then end the federation for the callbacks."""
        server = self.server
        server.round = self.last_round
        if self.is_over and not self.final_done:
            self._final_jobs()
        server.round = self.last_round
        server.callbacks.event("on_federation_end", server)
        if server.run_dir is not None and self.recorder.writes and self.loop.clock is not None:
            draw_timeline(server.run_dir, {int(entry["round"]): entry["time"] for entry in self.history})
        self.costs.tick()

    def _final_jobs(self) -> None:
        """Visit clients after the last round; what that changes is scored once more, as one round later."""
        server = self.server
        owner = server.callbacks.role("final_jobs")
        if owner is None:
            return
        server.round = self.rounds_done
        self.costs.spent_of_rounds = dict(server.spent)
        jobs = [replace(job, returns=()) for job in owner.final_jobs(server)]
        for update in self.engine.run(messages(server, jobs), Evaluate(), partial(checked, server)):
            server.steps += update.steps
            note_work(server, update, after_last_round=True)
            self.recorder.log_clients([update])
            if update.error is not None:
                server.note_failure(update.client, update.error, when="After the last round")
        if self.recorder.run is not None and self.recorder.writes:
            self._of_rounds = self.recorder.mark()
        if "L1" in self.stages and self.evaluate_every > 0:
            rows = stage_scores.stage_l1(server, self.engine, Evaluate(("val",), self.evaluate_data))
            self.recorder.record(rows + self.unseen.rows(("val",), ("L1",)))
        self.final_done = True
        self.costs.tick()
        self.costs.count(self.server, self.loop.clock is not None)
        self.save()

    def summarise(self, arguments: Mapping[str, Any]) -> None:
        """Bring the recorder's results and summary (and `summary.json`) up to date.

        Args:
            arguments: The trainer's arguments.
        """
        every = self.server.evaluated is self.server.clients
        results = self.recorder.choose_results(self.rounds_done, None if every else self.server.evaluated)
        self.recorder.write_summary(
            summary_of(self.server, self.engine, results, self.rounds_done, self.costs.seconds, arguments, self.history)
            | {
                "evaluation": evaluation_of(self.server, self.scored),
                "evaluation_seconds": round(self.costs.evaluation_seconds, 3),
            }
            | {"terms": terms_of(self.server, sorted(self._kept()), self._validations())}
            | ({"config_changes": self.changes} if self.changes else {})
            | ({"held_out": self.unseen.summary()} if self.server.held_out else {})
            | ({"stopped": self.server.stopped} if self.server.rounds < self.server.max_rounds else {})
            | ({"failures": in_order(self.server.failures, self.server.clients)} if self.server.failures else {})
            | ({"leaves": told} if (told := self._leaves()) else {})
            | ({"warnings": self.server.explosions.warnings} if self.server.explosions.warnings else {})
        )

    def _leaves(self) -> list[dict[str, str]]:
        """Return what leaves clients and how it is covered, where a callback protects them."""
        found = covered(self.server.callbacks, self.server.outgoing)
        return [{"what": item.what, "when": item.when, "cover": cover} for item, cover in found]

    def _kept(self) -> set[str]:
        """Return the names of all selected models, the server's and the clients'."""
        kept = {entry["name"] for entry in self.server.checkpoints.values()}
        return kept | {e["name"] for client in self.store for e in self.store.note(client).checkpoints.values()}

    def _is_evaluated(self, round: int) -> bool:
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
        return sum(map(self._is_evaluated, range(self.rounds_done)))

    def export(self) -> bool:
        """Write the models to use as Lightning checkpoints, in the process that writes.

        Returns:
            Whether a client failed: :meth:`summarise` tells of it.
        """
        if self.recorder.run is None or not self.recorder.writes:
            return False
        return export(self.recorder.run, self.server, self.engine)

    def evaluate(self, split: str, checkpoint: str) -> list[Row]:
        """Score the models as they stand, or as callbacks selected them; see `FederatedTrainer.test`."""
        server = self.server
        kept = self._kept()
        if checkpoint not in {"latest", "all", *kept}:
            raise ValueError(
                f"There is no checkpoint '{checkpoint}' in this run; it has {sorted({'latest', *kept})}. "
                "Add LocalCheckpoint() or GlobalCheckpoint() to the callbacks to get one."
            )
        if split == "val" and (key := server.callbacks.withholding("scores")):
            raise ValueError(
                f"{key} withholds scores on validation data. Score test data, or give {key}(scores='in the clear')."
            )
        if split == "val" and self.scored is not None:
            refuse_mixed_validation(self.scored, server)
        evaluate = Evaluate((split,), self.test_data)
        rows: list[Row] = []
        if checkpoint in ("latest", "all"):
            latest = stage_scores.stage_g(server, self.engine, evaluate)
            rows += latest + stage_scores.stage_l1(server, self.engine, evaluate, latest)
            trained = self.recorder.rows.where(
                lambda model, stage, checkpoint, data, its_split, metric: (stage, its_split) == ("L2", split),
                since=self.rounds_done,
            )
            rows += of_clients((row for row in trained if row.round == self.rounds_done), server.evaluated)
            rows += self.unseen.rows((split,), ("G", "L1"))
        if checkpoint != "latest":
            found = stage_scores.checkpoint_rows(server, self.engine, evaluate)
            rows += [row for row in found if checkpoint in ("all", row.checkpoint)]
            rows += self.unseen.checkpoint_rows((split,), checkpoint)
        stage_scores.tell_of_silence(server, self.engine, split, rows)
        stage_scores.tell_of_the_best(server, rows)
        self.recorder.record(rows)
        return rows
