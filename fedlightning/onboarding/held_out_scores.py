"""Scores of clients that take no part in training: how well a method serves those who come later.

What such a client gets is what the method gives to somebody it has never seen: at stage G its global model, where there is
one, and at stage L1 the model that the client would deploy after one message, with an empty record and no training.
Nothing here trains, keeps a record, or draws random numbers of anybody else, so what the others get does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fedlightning.client.client_errors import client_failure, describe_error
from fedlightning.client.requests import Evaluate
from fedlightning.contract import NEWCOMER
from fedlightning.contract.messages import GLOBAL, Message
from fedlightning.engines.contract import Engine
from fedlightning.engines.score_tasks import ScoreClient, ScoredModel, gaps
from fedlightning.errors import ConfigurationError, listed, warn
from fedlightning.scores.rows import LOCAL, UNSEEN, Gap, Row
from fedlightning.server.evaluation import rows_of_global, scores_of_global
from fedlightning.server.parts import Part
from fedlightning.server.server import Server
from fedlightning.server.summary import describe_clients
from fedlightning.tensors import module_state

if TYPE_CHECKING:
    from fedlightning.server.federation import Federation


def refusal(server: Server, joining: bool = False) -> str | None:
    """Return in a sentence why a method has no model for a client that has not trained; `None` if it has one."""
    for callback in server.callbacks:
        newcomers = callback.facts.newcomers
        if newcomers.no_model and not (joining and newcomers.place):
            way_out = " Onboarding places it by a visit." if newcomers.place else ""
            return f"{callback.key} {newcomers.no_model.rstrip('.')}.{way_out}"
    by_method = server.callbacks.role("global_module") is not None  # it knows when which layers travel
    if not server.shared_names() and not (by_method and server.global_module(None) is not None):
        return "No entry of the model travels, so there is no model for a client that never trained."
    return None


class HeldOutScores(Part):
    """Scores the clients that are held out of training, whenever the others are scored."""

    def __init__(self) -> None:
        self._unseen: Unseen | None = None

    def _of(self, federation: Federation) -> Unseen | None:
        if self._unseen is None and federation.server.held_out:
            self._unseen = Unseen(federation.server, federation.engine)
        return self._unseen

    def check(self, federation: Federation) -> None:
        """Refuse held-out clients that could never be scored."""
        if (unseen := self._of(federation)) is not None:
            unseen.check()

    def score(
        self, federation: Federation, splits: Sequence[str], stages: Sequence[str], checkpoint: str
    ) -> Sequence[Row]:
        unseen = self._of(federation)
        if unseen is None:
            return ()
        selected = [] if checkpoint == "latest" else unseen.checkpoint_rows(splits, checkpoint)
        return unseen.rows(splits, stages) + selected if stages else selected

    def summary(self, federation: Federation) -> dict[str, Any]:
        unseen = self._of(federation)
        return {} if unseen is None else {"held_out": unseen.summary()}


class Unseen:
    """The clients of one federation that take no part in training.

    Args:
        server: The server, whose `held_out` they are.
        engine: Has their data.
        joining: They are onboarded, and have their places where the method has such.
    """

    def __init__(self, server: Server, engine: Engine, joining: bool = False) -> None:
        self.server, self.engine, self.joining = server, engine, joining
        self._has_warned = False

    def check(self) -> None:
        """Say before round 1 if the method has no model for them; refuse clients that could never be scored."""
        held_out, data = self.server.held_out, self.engine.runner.described
        if not held_out:
            return
        if not any(data.num_samples(client, split) for client in held_out for split in ("val", "test")):
            raise ConfigurationError(
                f"held_out keeps {listed(held_out)} out of training to score "
                "them, and none of them has validation or test data. Give them some (val_fraction, test_fraction), or leave "
                "held_out out."
            )
        if self.refusal is not None:
            warn(f"{self.refusal} The held-out clients stay out of training and have no scores.")

    @cached_property
    def refusal(self) -> str | None:
        """Why they have no scores; `None` if they have."""
        return refusal(self.server, self.joining)

    def summary(self) -> dict[str, Any]:
        """Return what `summary.json` says of them: what each holds, and why they have no scores if that is so."""
        withheld = self.server.callbacks.withholding("classes") != ""
        clients = describe_clients(self.engine.describe(details=["classes"]), self.server.held_out, withheld)
        return {"clients": clients} | ({} if self.refusal is None else {"refused": self.refusal})

    def rows(self, splits: Sequence[str], stages: Sequence[str]) -> list[Row]:
        """Score what they would use now, on their own data.

        A client that could not be scored is noted among the failures and left out; it never ends the run.
        """
        if not self.server.held_out or not splits or self.refusal is not None:
            return []
        evaluate = Evaluate(tuple(splits))
        rows = self._without_gaps(self._stage_g(evaluate)) if "G" in stages else []
        if "L1" in stages:
            rows += self._without_gaps(self._stage_l1(evaluate, rows))
        return rows

    def checkpoint_rows(self, splits: Sequence[str], checkpoint: str) -> list[Row]:
        """Score the global models that callbacks selected."""
        server = self.server
        rows = []
        for kept in server.checkpoints.values() if server.held_out and self.refusal is None else ():
            model_name = kept.get("of", GLOBAL)
            ids = [client for client in server.held_out if server.model_of(client) == model_name]
            if ids and checkpoint in ("all", kept["name"]):
                scored = ScoredModel(kept["round"], "G", UNSEEN, kept["name"])
                module = server.global_with(kept["model"], model_name)
                rows += rows_of_global(self.engine, module, ids, Evaluate(tuple(splits)), scored)
        return self._without_gaps(rows)

    def message(self, client: str) -> Message:
        """Return the message with which a client that has not trained is served."""
        message = self.server.message(self.server.job(client, work=0, tag=NEWCOMER))
        self._tell_what_stays(message)
        return message

    def _stage_g(self, evaluate: Evaluate) -> list[Row]:
        server = self.server
        scored = ScoredModel(server.round + 1, "G", UNSEEN)
        module = server.global_module(None)
        if module is None and server.is_mixed:
            local = Evaluate(evaluate.splits)
            modules = [(client, server.global_module(client)) for client in server.held_out]
            row_groups = (
                rows_of_global(self.engine, m, [client], local, scored) for client, m in modules if m is not None
            )
            return [row for rows in row_groups for row in rows]
        if module is None:
            return []
        return rows_of_global(self.engine, module, server.held_out, evaluate, scored)

    def _stage_l1(self, evaluate: Evaluate, global_rows: Sequence[Row]) -> list[Row]:
        server = self.server
        shared = module_state(server.module_with(server.model)) if global_rows and not server.is_mixed else None
        one_for_all = server.callbacks.role("global_module") is None and not server.is_mixed
        known_of = scores_of_global(global_rows if one_for_all else ())
        scored = ScoredModel(server.round + 1, "L1", UNSEEN)
        rows_by_client: dict[str, list[Row]] = {}
        asked: list[str] = []

        def tasks() -> Iterator[ScoreClient]:
            for client in server.held_out:
                try:
                    message = self.message(client)
                except Exception as error:  # of an algorithm that knows the clients of the beginning only
                    rows_by_client[client] = list(
                        gaps(client, LOCAL, evaluate, scored, describe_error(client_failure(error)))
                    )
                    continue
                asked.append(client)
                yield ScoreClient(message, evaluate, scored, shared=shared, known=known_of(client, evaluate.data))

        for place, rows in enumerate(self.engine.map(tasks())):
            rows_by_client[asked[place]] = rows
        return [row for client in server.held_out for row in rows_by_client[client]]

    def _without_gaps(self, rows: Iterable[Row]) -> list[Row]:
        scores = []
        for row in rows:
            if isinstance(row, Gap):
                sentence = row.sentence.replace("client '", "unseen client '", 1)
                self.server.note_failure(row.client, sentence, row.stage)
            else:
                scores.append(row)
        return scores

    def _tell_what_stays(self, message: Message) -> None:
        """Warn once of entries that a client which has not trained holds as the module began."""
        if self._has_warned:
            return
        self._has_warned = True
        server = self.server
        architecture = server.architecture_of(message.client)
        travels = {*server.shared_names(model=message.model), *message.state}
        stays = [name for name in architecture.trainable if name not in travels]
        if stays:
            warn(
                f"{len(stays)} of {len(architecture.trainable)} trainable entries ('{stays[0]}' ...) stay with the clients, "
                "so an unseen client holds them as the module began, untrained. Its scores at stage L1 are those of that "
                "model."
            )
