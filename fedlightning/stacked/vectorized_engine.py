"""The engine `vectorized`: clients of one architecture train together, as one stack on a leading client axis.

Each client's visit runs as in every engine, with its own message, record, loader and callbacks, up to its local
training. There the visits wait for one another, the clients of a chunk take their steps together, and each visit
continues with its result. Results equal those of `sequential` up to the rounding of sums that are taken in another
order. Federations that cannot be stacked are refused before the first round.

The training of a stack of clients: their batches, seeds and optimizers, then their steps together.

Which engine `engine="auto"` takes: stacks where they are faster, else one client after another.

It goes by what the configuration says, never by measured time, so that a run chooses the same engine on every machine, and
again when it is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from fedlightning.client import visit as visits
from fedlightning.client.client_errors import client_failure
from fedlightning.client.fit import fit as fit_client
from fedlightning.client.fit import start_fit
from fedlightning.client.phases import only_training
from fedlightning.client.probes import TRANSFERS, move_batch
from fedlightning.client.record import ClientRecord
from fedlightning.client.requests import Fit, Score, ScoringTask, VisitSteps
from fedlightning.client.runtime import ClientRuntime
from fedlightning.client.trainer_context import phase_address
from fedlightning.client.visit import bind
from fedlightning.compat.lightning_runs import on_device
from fedlightning.contract import Phase
from fedlightning.contract.messages import Update
from fedlightning.engines.contract import ClientRecords, Task, Visit
from fedlightning.engines.sequential import SequentialEngine
from fedlightning.errors import ConfigurationError
from fedlightning.fast.log_sheet import FastLoopRefused
from fedlightning.options import EngineOptions, Sequential, Vectorized
from fedlightning.seeding import preserved
from fedlightning.stacked.batches import Gatherer, LoaderSource, resident
from fedlightning.stacked.planning import Clock, chunk_size, configure
from fedlightning.stacked.stack import Stack, architecture_key
from fedlightning.stacked.stacked_evaluation import StackedEvaluation
from fedlightning.stacked.stacked_fit import StackedFit
from fedlightning.stacked.trainees import Recipe, Trainee
from fedlightning.stacked.vectorizable import Finding, examine
from fedlightning.tensors import module_state

PARAMETERS = 100_000
"""Entries of a model above which a stack is not chosen: its weights then leave the cache, and one client alone is as fast."""
CLIENTS = 4
"""Clients of a round below which there is little to stack."""


def choose(runner: ClientRuntime, participants: int, synchronous: bool = True) -> tuple[EngineOptions, str]:
    """Return the options of an engine, and why in a line."""
    alone = "engine='auto' takes 'sequential': {}."
    if not synchronous:
        return Sequential(), alone.format("the loop visits clients one by one")
    if runner.settings.log_clients:
        return Sequential(), alone.format("log_clients needs each client's own fit")
    if runner.settings.local_loop == "trainer":
        return Sequential(), alone.format("local_loop='trainer'")
    if participants < CLIENTS:
        return Sequential(), alone.format(f"{participants} clients a round are too few to stack")
    blueprint = runner.blueprint
    entries = max(
        sum(value.numel() for value in module_state(blueprint.build("server", name)).values())
        for name in blueprint.architectures
    )
    if entries > PARAMETERS:
        return Sequential(), alone.format(f"a model of {entries} entries gains nothing in a stack")
    from fedlightning.stacked.vectorizable import analyse

    with preserved():
        reason = analyse(runner).reason
    if reason is not None:
        return Sequential(), alone.format(f"no stack, since {reason}")
    return Vectorized(), (
        f"engine='auto' takes 'vectorized': {participants} clients a round, models of {entries} entries (equal to "
        "'sequential' up to rounding)."
    )


class StackedTraining:
    """Trains clients of one architecture in one stack.

    Args:
        runner: The client side of the federation.
        watching: Watches what is done for one client alone.
    """

    def __init__(self, runner: ClientRuntime, watching: Callable[[list[str]], AbstractContextManager[None]]) -> None:
        self.runner = runner
        self._watching = watching
        self._device = runner.blueprint.device
        self._gatherer = Gatherer(self._device, runner.blueprint.precision.convert_input)

    def trainees(self, fits: Sequence[Fit], template: LightningModule) -> list[Trainee]:
        """Return the clients' batches and optimizers."""
        first, shared = fits[0], None
        by_rows = self._plain_transfer(template)
        trainees = []
        for fit in fits:
            module = template if fit.client.is_unbuilt else fit.client.module
            loader = fit.loader if fit.loader is not None else self.runner.loader(fit.message, "train")
            start_fit(self.runner, fit, loader)
            batches = self._batches(loader)
            in_epochs = (fit.phase.unit or self.runner.settings.unit) == "epochs"
            epochs, steps = (fit.work, None) if in_epochs else (None, fit.work)
            clock = Clock(epochs, steps, batches)
            recipe = shared or configure(module, self.runner.settings, fit.phase, fit.client.round, clock)
            if fit is first and not recipe.schedules and not clock.looked:
                shared = recipe
            seed = partial(self._seed, fit)
            source = resident(loader, batches, seed) if by_rows else None
            trainees.append(
                Trainee(
                    fit.client,
                    source or LoaderSource(loader, partial(self._convert, module), seed),
                    batches,
                    recipe,
                    max_epochs=epochs,
                    max_steps=steps,
                )
            )
        return trainees

    def fit(
        self, phase: Phase, module: LightningModule, trainees: Sequence[Trainee], recipe: Recipe, finding: Finding
    ) -> Stack:
        """Train clients in a stack and return it."""
        runner = self.runner
        architecture = runner.blueprint.architecture_of(trainees[0].client.id)
        base = runner.blueprint.base(architecture) if finding.shares else {}
        differing = {
            name
            for trainee in (trainees if base else ())
            for name in runner.blueprint.without_base(trainee.client.entries, architecture)
        }
        shared = {name: value for name, value in base.items() if name not in differing}
        stack = Stack(module, len(trainees), self._device, shared)
        if trainees[0].client.is_unbuilt:
            stack.fill([trainee.client.entries for trainee in trainees])
        else:
            for row, trainee in enumerate(trainees):
                stack.pull(row, trainee.client.module)
        with (
            nullcontext() if phase.train is None else only_training(module, phase.train),
            on_device(module, self._device),
        ):
            StackedFit(
                runner, phase, finding, module, stack, trainees, recipe.optimizer, self._gatherer, self._watching
            ).run()
        return stack

    def _batches(self, loader: Any) -> int:
        """Return the batches of an epoch, as Lightning counts them under `limit_train_batches`."""
        return self.runner.settings.train_batches(len(loader))

    def _seed(self, fit: Fit, epoch: int) -> tuple[object, ...]:
        return self.runner.settings.seed, fit.client.visit, fit.client.id, phase_address(fit.phase), epoch

    def _convert(self, module: LightningModule, batch: Any) -> Any:
        return move_batch(module, self.runner.blueprint.precision.convert_input(batch))

    @staticmethod
    def _plain_transfer(module: LightningModule) -> bool:
        return not any(is_overridden(hook, module) for hook in TRANSFERS)


Answer = TypeVar("Answer")


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


class VectorizedEngine(SequentialEngine):
    """Trains clients in stacks.

    Args:
        runner: The client side of the federation.
        store: The clients' records.
        clients_per_stack: Number of clients that train together. `None`: as many as fit into a share of the memory (see
            :func:`~fedlightning.stacked.planning.chunk_size`). Results do not depend on it beyond rounding.
    """

    def __init__(self, runner: ClientRuntime, store: ClientRecords, clients_per_stack: int | None = None) -> None:
        super().__init__(runner, store)
        self._clients_requested = self._size = clients_per_stack
        self.device = runner.blueprint.device
        self._evaluation = StackedEvaluation(runner)
        self._training = StackedTraining(runner, self.watching)

    def check(self) -> None:
        """Refuse a federation that cannot be stacked."""
        examine(self.runner)

    def beside(self, runner: ClientRuntime) -> VectorizedEngine:
        return VectorizedEngine(runner, ClientRecords(), self._clients_requested)

    def map(self, tasks: Iterable[Task[Answer]]) -> Iterator[Answer]:
        chunk: list[Task[Answer]] = []
        do: Callable[[Sequence[Any]], Iterator[Any]] = self._visit
        for task in tasks:
            together = self._together(task)
            busy = task.client is not None and task.client in [waiting.client for waiting in chunk]
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
                answers = list(do([tasks[place] for place in places]))
            again = set()
            for place, (answer, record) in zip(places, answers, strict=True):
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
        of_clients = any(task.client is not None for task in tasks)
        yield from self._evaluation.answers(scorings, self.size, of_clients)

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
        except FastLoopRefused as reason:  # the visit cannot begin again in a stack
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
        answers = iter(self._evaluation.scores([request for score in scores for request in score.requests]))
        for member, score in zip(members, scores, strict=True):
            bind(self.runner, score.client)
            self._go_on(member, partial(member.visit.send, [next(answers) for _ in score.requests]))

    def _groups(self, members: Sequence[Member]) -> list[list[Member]]:
        """Group the clients that can train in one stack: same phase, modules that are alike (`architecture_key`)."""
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
            architecture = name if fit.client.is_unbuilt else architecture_key(fit.client.module)
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
