"""The engine `vectorized`: clients of one architecture train together, as one stack on a leading client axis.

Each client's visit runs as in every engine, with its own message, record, loader and callbacks, up to its local
training. There the visits wait for one another, the clients of a chunk take their steps together, and each visit
continues with its result. Results equal those of `sequential` up to the rounding of sums that are taken in another
order. Federations that cannot be stacked are refused before the first round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from lightning.pytorch import LightningModule

from fedlightning.client import visit as visits
from fedlightning.client.client_errors import client_failure
from fedlightning.client.fit import fit as fit_client
from fedlightning.client.record import ClientRecord
from fedlightning.client.requests import Fit, Score, ScoringTask, VisitSteps
from fedlightning.client.runtime import LocalRunner
from fedlightning.client.visit import bind
from fedlightning.contract.messages import Update
from fedlightning.engines.base import Task, Visit
from fedlightning.engines.records import ClientStore
from fedlightning.engines.sequential import SequentialEngine
from fedlightning.errors import ConfigurationError
from fedlightning.fast.log_sheet import NotInFastLoop
from fedlightning.stacked.evaluation import StackedEvaluation
from fedlightning.stacked.planning import chunk_size
from fedlightning.stacked.stack import named_tensors
from fedlightning.stacked.training import StackedTraining
from fedlightning.stacked.vectorizable import Finding, examine

Answer = TypeVar("Answer")
PLAIN = (bool, int, float, str)
"""Types of attributes that a step may read, and in which the clients of a stack must agree."""


@dataclass
class Member:
    """A client of a chunk.

    Attributes:
        client: Its id.
        visit: Its visit.
        before: Its record before the visit.
        fit: The fit that the visit waits for, if any.
        score: The scores that the visit waits for, if any.
        answer: Update and new record, when the visit is over.
    """

    client: str
    visit: VisitSteps
    before: ClientRecord
    fit: Fit | None = None
    score: Score | None = None
    answer: tuple[Update, ClientRecord] | None = None

    def go_on(self, step: Any) -> None:
        """Run the visit up to its next request or its end; `step` starts it or hands it the result it waits for."""
        self.fit = self.score = None
        try:
            request = step()
        except StopIteration as end:
            self.answer = end.value
            return
        if isinstance(request, Fit):
            self.fit = request
        else:
            self.score = request


def _architecture(module: LightningModule) -> Any:
    """Return a key: modules with equal keys can train in one stack (class, tensors, values that steps may read)."""
    tensors = [(name, value.shape, value.dtype) for part in named_tensors(module) for name, value in part.items()]
    plain = [(name, value) for name, value in vars(module).items() if type(value) in PLAIN]
    return type(module), tuple(tensors), tuple(plain)


class VectorizedEngine(SequentialEngine):
    """Trains clients in stacks.

    Args:
        runner: The client side of the federation.
        store: The clients' records.
        clients_per_stack: Number of clients that train together. `None`: as many as fit into a share of the memory (see
            :func:`~fedlightning.stacked.planning.chunk_size`). Results do not depend on it beyond rounding.
    """

    def __init__(self, runner: LocalRunner, store: ClientStore, clients_per_stack: int | None = None) -> None:
        super().__init__(runner, store)
        self._asked = self._size = clients_per_stack
        self.device = runner.blueprint.device
        self._evaluation = StackedEvaluation(runner)
        self._training = StackedTraining(runner, self.watching)

    def check(self) -> None:
        """Refuse a federation that cannot be stacked."""
        examine(self.runner)

    def beside(self, runner: LocalRunner) -> VectorizedEngine:
        return VectorizedEngine(runner, ClientStore(), self._asked)

    def map(self, tasks: Iterable[Task[Answer]]) -> Iterator[Answer]:
        chunk: list[Task[Answer]] = []
        do: Callable[[Sequence[Any]], Iterator[Any]] = self._visit
        for task in tasks:
            together = self._together(task)
            busy = task.client is not None and task.client in [one.client for one in chunk]
            if chunk and (together is None or together != do or len(chunk) >= self.size or busy):
                yield from do(chunk)
                chunk = []
            if together is not None:
                do = together
                chunk.append(task)
                continue
            yield from super().map([task])
        if chunk:
            yield from do(chunk)

    def _together_until_settled(
        self, tasks: Sequence[Any], do: Callable[[Sequence[Any]], Iterator[tuple[Any, ClientRecord | None]]]
    ) -> Iterator[Any]:
        """Carry out tasks together and settle their answers.

        Where one is to be tried again all are, and the results of the last try count: then they are what they would have
        been without the failure, for how a sum is rounded depends on who is in the stack.
        """
        attempts = {place: self.attempts.of(task) for place, task in enumerate(tasks)}
        settled: dict[int, tuple[Any, ClientRecord | None]] = {}
        for place, attempt in attempts.items():
            left_out = attempt.left_out_answer()
            if left_out is not None:
                settled[place] = left_out
        places = [place for place in attempts if place not in settled]
        waiting = set(places)
        while waiting:
            with self.watching([tasks[place].address[2] for place in places], allowance=len(places)):
                found = list(do([tasks[place] for place in places]))
            again = set()
            for place, (answer, record) in zip(places, found, strict=True):
                done = attempts[place].settle(answer, record)
                if done is None:
                    again.add(place)
                elif place in waiting or tasks[place].failure(done[0]) is None:
                    settled[place] = done
            waiting = again
        for place, task in enumerate(tasks):
            answer, record = settled[place]
            if record is not None and task.client is not None:
                self.store.put(task.client, record)
            yield answer

    def _together(self, task: Task[Any]) -> Callable[[Sequence[Any]], Iterator[Any]] | None:
        """Return the method that carries out several tasks of this kind at once, if there is one."""
        if isinstance(task, Visit):
            return self._visit if task.message.work != 0 else None
        return self._score if hasattr(task, "scoring") else None

    def _score(self, tasks: Sequence[Any]) -> Iterator[Any]:
        return self._together_until_settled(tasks, self._scores)

    def _scores(self, tasks: Sequence[ScoringTask[Any]]) -> Iterator[tuple[Any, ClientRecord | None]]:
        scorings = [task.scoring(self.runner, self._record(task.client)) for task in tasks]
        own = any(task.client is not None for task in tasks)
        yield from self._evaluation.answers(scorings, self.size, own)

    def _record(self, client: str | None) -> ClientRecord:
        return ClientRecord() if client is None else self.store.get(client)

    @property
    def size(self) -> int:
        """Number of clients in a stack."""
        if self._size is None:
            self._size = chunk_size(self.found.bytes_of_client, self.found.bytes_of_step, self.device)
        return self._size

    @property
    def found(self) -> Finding:
        """Findings of :meth:`check`. A resumed run checks at its first visit."""
        return examine(self.runner)

    def _visit(self, tasks: Sequence[Visit]) -> Iterator[Update]:
        return self._together_until_settled(tasks, self._visits)

    def _visits(self, tasks: Sequence[Visit]) -> Iterator[tuple[Update, ClientRecord | None]]:
        members = []
        for task in tasks:
            before = self.store.get(task.client)
            member = Member(task.client, visits.visit_steps(self.runner, task.message, before, task.evaluate), before)
            self._go_on(member, partial(next, member.visit))
            members.append(member)
        while waiting := [member for member in members if member.answer is None]:
            fitting = [member for member in waiting if member.fit is not None]
            for group in self._groups([member for member in fitting if cast(Fit, member.fit).phase.is_task]):
                self._train(group)
            for member in fitting:
                if member.fit is not None and not member.fit.phase.is_task:
                    self._fit_alone(member)
            self._score_trained([member for member in waiting if member.score is not None])
        for member in members:
            assert member.answer is not None
            update, after = member.answer
            yield update, None if after is member.before else after

    def _go_on(self, member: Member, step: Callable[[], Any]) -> None:
        with self.watching([member.client]):
            member.go_on(step)

    def _fit_alone(self, member: Member) -> None:
        """Fit one client by its own local loop, in a phase whose loss or data are not the task's."""
        fit = cast(Fit, member.fit)
        bind(self.runner, fit.client)
        try:
            with self.watching([member.client]):
                result = fit_client(self.runner, fit)
        except NotInFastLoop as reason:  # the visit cannot begin again in a stack
            raise ConfigurationError(
                f"engine='vectorized' trains phase '{fit.phase.name}' client by client, and the fast loop cannot: {reason}. "
                "Use local_loop='trainer', or engine='sequential' or 'processes'."
            ) from reason
        except BaseException as error:
            self._go_on(member, partial(member.visit.throw, error))
        else:
            self._go_on(member, partial(member.visit.send, result))

    def _score_trained(self, members: Sequence[Member]) -> None:
        """Score the models that visits wait for, together where possible. A client whose scores fail, fails alone."""
        scores = [cast(Score, member.score) for member in members]
        found = iter(self._evaluation.scores([one for score in scores for one in score.requests]))
        for member, score in zip(members, scores, strict=True):
            bind(self.runner, score.client)
            self._go_on(member, partial(member.visit.send, [next(found) for _ in score.requests]))

    def _groups(self, members: Sequence[Member]) -> list[list[Member]]:
        """Group the clients that can train in one stack: same phase, same tensors and plain values of the modules."""
        groups: dict[Any, list[Member]] = {}
        for member in members:
            fit = member.fit
            assert fit is not None
            phase = fit.phase
            same = (
                phase.name,
                phase.train,
                phase.unit,
                phase.lr_factor,
                phase.federated,
                phase.terms_of,
                phase.repeats,
            )
            name = self.runner.blueprint.architecture_of(fit.client.id)
            architecture = name if fit.client.is_unbuilt else _architecture(fit.client.module)
            groups.setdefault((same, architecture), []).append(member)
        return list(groups.values())

    # -- training ----------------------------------------------------------------------------------------------------
    def _train(self, members: Sequence[Member]) -> None:
        fits = [cast(Fit, member.fit) for member in members]
        unbuilt = fits[0].client.is_unbuilt
        order: list[int] = []
        try:
            template = self.runner.blueprint.build_around({}, fits[0].client.id) if unbuilt else fits[0].client.module
            trainees = self._training.trainees(fits, template)
            order = sorted(range(len(fits)), key=lambda place: -trainees[place].expected)
            in_order = [trainees[place] for place in order]
            stack = self._training.fit(fits[0].phase, template, in_order, trainees[0].recipe, self.found)
            stack.to_cpu()
        except BaseException as caught:  # in a part that they share, such as the optimizer
            error = client_failure(caught)
            for member, fit in zip(members, fits, strict=True):
                bind(self.runner, fit.client)
                self._go_on(member, partial(member.visit.throw, error))
            return
        rows = {place: row for row, place in enumerate(order)}
        for place, (member, fit, trainee) in enumerate(zip(members, fits, trainees, strict=True)):
            bind(self.runner, fit.client)
            if trainee.error is not None:
                self._go_on(member, partial(member.visit.throw, trainee.error))
                continue
            if unbuilt:
                fit.client.set_entries(stack.row(rows[place]))
            else:
                stack.push(rows[place], fit.client.module)
            fit.client.metrics |= trainee.metrics
            fit.client.record.lightning.setdefault(fit.phase.name, {}).update(precision={}, callbacks={})
            self._go_on(member, partial(member.visit.send, trainee))
