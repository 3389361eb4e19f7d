"""What is asked before round 1: :meth:`PreflightQuestions.ask` is the one list of questions, in their order.

What cannot work is refused in a sentence. The modules that questions look at are built once. What takes a client's batch is
asked where the batch is: callbacks (:mod:`~fedlightning.guards.preflight_task`) and one batch of every step
(:mod:`~fedlightning.guards.step_trials`); where that is another machine, all of it travels together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedlightning.contract import POOLED, Change, FederatedCallback, FirstStep, Setup
from fedlightning.contract.capabilities import EVERY_SCORE
from fedlightning.datamodules.federated_data import SPLITS
from fedlightning.engines.attempts import add_site_name
from fedlightning.engines.contract import Task
from fedlightning.errors import ConfigurationError, listed, warn
from fedlightning.guards.begins_anew import CLOCKS
from fedlightning.guards.composition import changes_of, refuse_combinations
from fedlightning.guards.preflight_task import DataElsewhere, PreflightTask, StepFinding, ask_callback, make_setup
from fedlightning.guards.step_trials import StepTrial, StepTrials
from fedlightning.privacy.outgoing import list_outgoing, make_outgoing_filter
from fedlightning.ranges import counts_of
from fedlightning.server.loop import Synchronous
from fedlightning.server.model_store import refuse_mixed, refuse_uncommon
from fedlightning.server.parts import Part
from fedlightning.tensors import module_state
from fedlightning.wrappers import user_class

if TYPE_CHECKING:
    from fedlightning.server.federation import Federation

SIZE_RATIO_LIMIT = 100
"""Times the median of the others' samples from which a claim is told of."""
WORDS = {POOLED: "pooled data", "clients": "other clients' data"}


class Preflight(Part):
    """Asks before round 1 what cannot work."""

    def check(self, federation: Federation) -> None:
        questions = PreflightQuestions(federation)
        questions.ask()
        vars(
            questions
        ).clear()  # modules and optimizers go now: what callbacks were asked with still refers to the questions


class PreflightQuestions:
    """A federation before round 1, and what is known of it.

    Args:
        federation: The federation.

    Attributes:
        tried: Steps that were tried already, together with the checks of callbacks.
    """

    def __init__(self, federation: Federation) -> None:
        self.federation, self.server, self.engine = federation, federation.server, federation.engine
        self.blueprint, self.is_mixed = self.server.blueprint, self.server.is_mixed
        self.findings_by_trial: dict[StepTrial, StepFinding] = {}

    def ask(self) -> None:
        """Ask everything. What costs little comes first, and a callback's own check before what knows less.

        Raises:
            ValueError: With a sentence, if something cannot work.
        """
        for question in (
            self.counts,
            self.participation,
            self.scored_clients,
            self.data_elsewhere,
            self.claimed_sizes,
            self.models,
            self.callbacks,
            partial(refuse_uncommon, self.server),
            self.loop,
            self.engine.check,
            self.steps,
        ):
            question()

    # -- what is known -------------------------------------------------------------------------------------------------
    @cached_property
    def modules(self) -> dict[str, LightningModule]:
        """A module of every architecture, built once for all who look at it."""
        return {name: self.blueprint.build("server", name) for name in self.server.models.architectures}

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What callbacks are told in plain values: those of :data:`~fedlightning.guards.preflight_task.FACTS`."""
        server, settings, loop = self.server, self.blueprint.settings, self.federation.loop
        return {
            "clients": server.clients,
            "num_samples": server.num_samples,
            "max_rounds": server.max_rounds,
            "local_epochs": settings.local_epochs,
            "local_steps": settings.local_steps,
            "optimizer_state": settings.optimizer_state,
            "trainer_arguments": settings.trainer_arguments,
            "evaluate_every": self.federation.evaluate_every,
            "participation": server.participation.share,
            "loop": type(loop).__name__,
            "absent": self._absent or loop.absent(),
            "has_clock": loop.clock is not None,
            "drifts": bool(server.population.over_rounds),
        }

    @property
    def _absent(self) -> str:
        """What keeps clients out of rounds, the loop apart; empty: nothing."""
        participation, clients = self.server.participation, len(self.server.clients)
        if not participation.is_everybody and participation.share != clients:
            return f"participation={participation.share}"
        away = {Change.ABSENCE, "participants"}
        return next((callback.key for callback in self.server.callbacks if away & changes_of(callback)), "")

    @cached_property
    def batches(self) -> Mapping[str, int]:
        """Training batches in an epoch of each client."""
        return self.engine.describe(details=["batches"]).batches

    @cached_property
    def pooled(self) -> tuple[str, ...]:
        """Splits whose union over the clients can be had in one place."""
        return tuple(self.engine.describe(details=["pooled"]).pooled)

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """Splits of which any client has samples."""
        data = self.engine.runner.described
        return tuple(split for split in SPLITS if any(data.num_samples(client, split) for client in data.client_ids))

    @cached_property
    def first_client(self) -> str | None:
        """The first client that has a training batch; `None`: nobody has."""
        return next((client for client in self.engine.runner.described.client_ids if self.batches[client]), None)

    @property
    def scored_splits(self) -> Mapping[str, Sequence[str]]:
        """The splits that models will be scored on, each with whose data."""
        run = self.federation
        due = {"val": run.evaluate_data} if run.evaluate_every > 0 and run.stages else {}
        return due | ({"test": run.test_data} if run.test_data else {})

    def class_counts(self, client: str) -> Sequence[int] | None:
        """Return a client's training samples by class, where that is known here."""
        return self.engine.describe(details=["classes"]).classes.get(client) if self.engine.data_here else None

    # -- the configuration ---------------------------------------------------------------------------------------------
    def counts(self) -> None:
        """Refuse numbers of clients above how many there are; tell of numbers of rounds that the run does not reach."""
        server, num_clients = self.server, len(self.server.clients)
        asked = [("The trainer", "participation", "clients", server.participation.share)]
        owners = (*server.callbacks, self.federation.loop)
        asked += [(type(owner).__name__, *counted) for owner in owners for counted in counts_of(owner)]
        for owner, name, things, count in asked:
            if things == "clients" and isinstance(count, int) and count > num_clients:
                raise ConfigurationError(
                    f"{owner} got {name}={count}, and the federation has {self._clients}. Use {num_clients} at most."
                )
            if things == "rounds" and count > server.max_rounds > 1:
                warn(
                    f"{owner} got {name}={count}, and the run has {server.max_rounds} rounds: what comes then never does."
                )

    @property
    def _clients(self) -> str:
        count, held_out = len(self.server.clients), len(self.server.held_out)
        return f"{count} client{'s' * (count != 1)}{f', {held_out} held out apart' * bool(held_out)}"

    def participation(self) -> None:
        """Refuse rounds that nobody, or two, could plan or finish."""
        server, needed = self.server, self.engine.attempts.policy.min_clients
        visited = len(server.participants())
        chooser = server.callbacks.role("participants")
        if chooser is not None and server.participation.share != 1.0:
            raise ConfigurationError(
                f"participation={server.participation.share} and {chooser.key} both say who takes part in a round. Remove "
                "one of them."
            )
        reducer, divisor = server.callbacks.role("reduce"), server.callbacks.role("denominator")
        if reducer is not None and divisor is not None:
            raise ConfigurationError(
                f"{divisor.key} names the number that a sum of updates is divided by, and {reducer.key} combines updates in "
                "a way of its own. Remove one of them."
            )
        if chooser is None and isinstance(needed, int) and needed > visited:
            raise ConfigurationError(
                f"failures.min_clients={needed}, but a round visits {visited} of the {len(server.clients)} clients: no round "
                "could be finished. Lower it, or raise participation."
            )
        if sum(server.num_samples.values()) == 0:
            raise ValueError(f"None of the {len(server.clients)} clients has a training sample. Check the partition.")

    def scored_clients(self) -> None:
        """Refuse `evaluation.clients` where every client's scores are needed, or where those that it drew have none."""
        server, described = self.server, self.engine.runner.described
        if server.population.all_are_scored:
            return
        for callback in server.callbacks:
            if EVERY_SCORE in callback.facts.needs:
                raise ConfigurationError(
                    f"{callback.key} goes by the scores of every client, and evaluation.clients scores "
                    f"{len(server.population.scored)} of {len(server.clients)}. Leave evaluation.clients out, or "
                    f"{callback.key}."
                )
        for split in (split for split, data in self.scored_splits.items() if "local" in data):
            drawn, having = (
                [client for client in clients if described.num_samples(client, split)]
                for clients in (server.population.scored, server.clients)
            )
            if having and not drawn:
                raise ConfigurationError(
                    f"evaluation.clients drew {listed(server.population.scored)}, and "
                    f"none of them has {split} samples, so that nobody would be scored on them; {len(having)} of the "
                    f"{len(server.clients)} clients have some. Raise it, or give every client a {split} split."
                )

    def data_elsewhere(self) -> None:
        """Warn of scores on data that are not in one place; refuse a run that would have no others."""
        if not self.federation.left_out:
            return
        words = " and ".join(WORDS[data] for data in self.federation.left_out)
        if not self.federation.evaluate_data:
            raise ConfigurationError(
                f"Models are to be scored on {words} only, and the clients' data are not in one place. Add 'local' to "
                "evaluation.data."
            )
        warn(f"Scores on {words} are left out: the clients' data are not in one place.")

    def claimed_sizes(self) -> None:
        """Say where a client that is elsewhere claims many more samples than all others: nobody here can check that."""
        sizes = {} if self.engine.data_here else self.server.num_samples
        client = max(sizes, key=lambda name: sizes[name], default="")
        others = sorted(size for name, size in sizes.items() if name != client and size)
        if len(others) > 1 and sizes[client] > SIZE_RATIO_LIMIT * (usual := others[len(others) // 2]):
            share = sizes[client] / sum(sizes.values())
            claim = f"client '{client}' says that it has {sizes[client]} training samples, {share:.1%} of all"
            warn(
                f"{add_site_name(claim, client, self.engine.sites.get(client))}; the median of the others is {usual}. It is "
                "weighted by them in a mean, and nobody here can check it: if you do not believe it, leave it out, or "
                "weight uniformly."
            )

    def models(self) -> None:
        """Refuse callbacks that several models are too many for, or that cannot say what leaves; list all that does."""
        refuse_mixed(self.server)
        for module in self.modules.values():
            refuse_quantized(module)
        for client in {self.blueprint.architecture_of(client): client for client in self.server.clients}.values():
            make_outgoing_filter(self.blueprint, client)
        self.server.outgoing = list_outgoing(self.federation)

    def loop(self) -> None:
        """Refuse a loop that cannot run these callbacks, or not here."""
        loop, seconds = self.federation.loop, self.federation.evaluate_seconds
        if seconds is not None and loop.clock is None:
            raise ConfigurationError(
                f"evaluation.seconds={seconds} counts virtual seconds, and the loop {loop!r} has no clock. "
                "Give it one (docs/explanation/time.md), or use evaluation.every, which counts rounds."
            )
        loop.check(self.server)
        if self.server.population.over_rounds and not isinstance(loop, Synchronous):
            raise ConfigurationError(
                f"The clients' training data change from round to round, and {type(loop).__name__} has no rounds in which "
                "all clients train. Leave out trainer.loop, or the drift (data)."
            )
        if loop.holds_records and not self.federation.store.is_here:
            raise ConfigurationError(
                f"The loop {type(loop).__name__} carries out visits before they count, and holds back what clients "
                "keep until then; here their records are at their sites. Leave out trainer.loop (with a method that runs in "
                "rounds), or use an engine that has the clients here (engine='sequential')."
            )

    def steps(self) -> None:
        """Run one batch of every step that the run will use, on copies."""
        for module in self.modules.values():
            _warn_compiled(module)
        if self.federation.sanity_check:
            self._trials.check(self.modules)
            for architecture, names in self._trials.changed.items():
                self._warn_changed_buffers(architecture, names)
                self._warn_beginnings(architecture, names)

    def _warn_beginnings(self, architecture: str, changed: Sequence[str]) -> None:
        """Say which attributes and clocks begin anew in every visit, where steps go by what earlier ones made of them."""
        module = self.modules[architecture]
        clocks = [f"self.{name}" for name in changed if name in CLOCKS]
        names = [name for name in changed if name not in CLOCKS and name not in module_state(module)]
        if clocks and self.server.max_rounds > 1:
            warn(
                f"Steps of {user_class(module).__name__} go by {' and '.join(clocks)}, and with optimizer_state='reset' "
                "clocks begin at 0 in every visit of a client: what is planned for later than one visit lasts is never "
                "reached. Set optimizer_state='keep', with which clocks, optimizers and schedules go on."
            )
        if names:
            warn(
                f"Steps of {user_class(module).__name__} take {listed(map(repr, names))} up where the step before left off, "
                "and every visit of a client begins with the first value: an attribute is not an entry of the model. If "
                "it is to go on, make it a buffer (register_buffer), or use self.current_epoch or self.global_step, which go "
                "on with optimizer_state='keep'."
            )

    def _warn_changed_buffers(self, architecture: str, changed: Sequence[str]) -> None:
        """Say how buffers are combined that training changes: counts, or weights that each client takes from its data."""
        server = self.server
        if self.blueprint.settings.float_buffers != "average" or len(server.clients) < 2:
            return
        module, kinds = self.modules[architecture], server.models.architectures[architecture].kinds
        names = [name for name in server.shared_in(architecture) if name in changed]
        ways = {
            "averaged over the clients": [name for name in names if kinds[name] == "float_buffer"],
            "taken from the first client": [name for name in names if kinds[name] == "int_buffer"],
        }
        clauses = [
            f"{listed(map(repr, buffers))} {'is' if len(buffers) == 1 else 'are'} {how}"
            for how, buffers in ways.items()
            if buffers
        ]
        if clauses:
            warn(
                f"Training changes buffers of {user_class(module).__name__}: after each round {' and '.join(clauses)}, "
                "and sent to all. That is not a sum over the clients, and nobody's own value. If that is not meant: "
                f"FedPer(personal={names[:5]}) or float_buffers='local' keep them with each client, and "
                "register_buffer(..., persistent=False) makes them new in every visit."
            )

    @cached_property
    def _trials(self) -> StepTrials:
        return StepTrials(self.engine, list(self.scored_splits), self.findings_by_trial)

    # -- callbacks -----------------------------------------------------------------------------------------------------
    def callbacks(self) -> None:
        """Let callbacks refuse what cannot work: each alone, and one beside another.

        One that needs a batch from elsewhere is asked there, together with the steps that :meth:`steps` will try. Refusals
        and warnings come in the order of the callbacks all the same.
        """
        findings: list[tuple[FederatedCallback, StepFinding | PreflightTask]] = []
        for callback, architecture, setup in [*self._setups()]:
            try:
                finding = ask_callback(callback, setup)
            except DataElsewhere:
                if self.first_client is not None:
                    findings.append((callback, self._task(callback, architecture, setup)))
                continue
            findings.append((callback, finding))
            if finding.refusal is not None:  # it counts if none of those before refuses
                break
        tasks: list[Task[StepFinding]] = [finding for _, finding in findings if isinstance(finding, PreflightTask)]
        refused = any(isinstance(finding, StepFinding) and finding.refusal for _, finding in findings)
        trials = not refused and self.federation.sanity_check and not self.engine.data_here
        steps = list(self._trials.first()) if trials else []
        answers = list(self.engine.map([*tasks, *steps])) if tasks or steps else []
        self.findings_by_trial.update(zip(steps, answers[len(tasks) :], strict=True))
        answered = iter(answers)
        for callback, answerable in findings:
            answer = next(answered) if isinstance(answerable, PreflightTask) else answerable
            if answer.refusal is not None:
                missing = "public data" in answer.refusal and self._no_public
                if missing or answer.cause is None:
                    raise ConfigurationError(f"{callback.key} {missing}" if missing else answer.refusal)
                raise answer.cause
            for text in answer.said:
                warn(text)

    def _setups(self) -> Iterator[tuple[FederatedCallback, str, Setup]]:
        """Yield every callback, for every architecture; callbacks that cannot stand together are refused."""
        for name in self.modules:
            setup = make_setup(
                self,
                self.engine.runner,
                self.modules,
                name,
                self.engine.public,
                partial(self.server.shared_in, name),
                partial(self.first_step, name),
                self.class_counts,
                self.engine.data_here,
            )
            refuse_combinations(setup.callbacks, setup)
            yield from ((callback, name, setup) for callback in self.server.callbacks)

    def first_step(self, architecture: str) -> FirstStep:
        """Return what one step shows; nothing where no step is to be tried."""
        return self._trials.first_step(architecture) if self.federation.sanity_check else FirstStep()

    def _task(self, callback: FederatedCallback, architecture: str, setup: Setup) -> PreflightTask:
        shared = {"": tuple(setup.shared_names())}
        shared |= {other.key: tuple(setup.shared_names(without=other)) for other in setup.callbacks}
        return PreflightTask(
            callback.key,
            architecture,
            str(self.first_client),
            self.facts,
            shared,
            self.batches,
            self.pooled,
            self.splits,
            self.is_mixed,
            has_public=not self._no_public,
        )

    @cached_property
    def _no_public(self) -> str:
        """What is said of a method that needs public data, where they are missing and the clients are elsewhere."""
        return self.engine.no_public if self.engine.no_public and self.engine.public()[0] is None else ""


def refuse_quantized(module: LightningModule) -> None:
    """Refuse layers of whole numbers (`torch.ao`): their weights are not entries, so that nobody sends or saves them.

    Raises:
        ConfigurationError: Naming a layer.
    """
    for name, value in module.state_dict().items():
        parts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(part, Tensor) and part.is_quantized for part in parts):
            raise ConfigurationError(
                f"'{name}' of {user_class(module).__name__} holds quantized weights, which no state holds and through which "
                "no gradient goes: what is before them would not train. Train the network in float32 or bfloat16, and "
                "quantize what is deployed."
            )


def _warn_compiled(module: LightningModule) -> None:
    """Say that compiling takes time, and when: the first batch of training and of evaluation wait for it, without a word."""
    compiled = [path for path, child in module.named_modules() if type(child).__name__ == "OptimizedModule"]
    if compiled:
        rank_zero_info(
            f"{user_class(module).__name__} compiles {listed(map(repr, compiled))} (torch.compile) at the first batches of "
            "training and of evaluation, which takes up to minutes on a CPU: once in each process, for all clients. "
            "TORCH_COMPILE_DISABLE=1 runs without."
        )
