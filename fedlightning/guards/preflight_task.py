"""What callbacks are asked before round 1: their requirements and their own checks, where the clients' data are.

A check is answered at the server as long as it asks for nothing of the data but what their description says. One that asks
for a batch of clients whose data are elsewhere is a task for the first of them (:class:`PreflightTask`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.pytorch import LightningModule

from fedlightning.client.client_errors import client_failure
from fedlightning.client.data_summary import knows_groups, take_first_batch, train_loaders
from fedlightning.client.fit import configured_callbacks, optimizers_of
from fedlightning.client.record import ClientRecord
from fedlightning.client.runtime import ClientRuntime
from fedlightning.contract import DataView, FederatedCallback, FirstStep, PublicDataView, RunTerms, Setup
from fedlightning.contract.requirements import AutomaticOptimization
from fedlightning.engines.contract import PlainTask
from fedlightning.errors import ControlFlow
from fedlightning.tensors import entry_kinds

if TYPE_CHECKING:
    from fedlightning.guards.preflight import PreflightQuestions

FACTS = {*(term.name for term in fields(RunTerms)), "num_samples", "drifts"} - {"lightning_callbacks"}
"""Plain values of a :class:`~fedlightning.contract.Setup`; a check that is answered elsewhere is sent these."""

REQUIRED = {"training_loss": AutomaticOptimization("adds a term to the loss that training_step returns")}
"""What follows from a method that a callback claims."""


class DataElsewhere(ControlFlow):
    """A check asks for clients' data, and they are elsewhere."""


@dataclass(frozen=True)
class StepFinding:
    """The answer to a question that was asked where a client's batch is.

    Attributes:
        has_batches: `False`: this client has no batch; `None`: loaders of this kind cannot be tried.
        refusal: Why the run cannot work, as a sentence; `None` if nothing speaks against it.
        names: Of a step: metrics that schedulers follow; or those that the module logs, where it was listened to.
        said: Of a check: what it warns of; of a training step: buffers that it changes, but for those of normalisation, and
            attributes and clocks by which it goes and which begin anew in every visit.
        cause: What was raised, where that is in this process.
    """

    has_batches: bool | None = True
    refusal: str | None = None
    names: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    cause: BaseException | None = None

    def __reduce__(self) -> Any:
        return StepFinding, (self.has_batches, self.refusal, self.names, self.said)


def make_setup(
    questions: PreflightQuestions | PreflightTask,
    runner: ClientRuntime,
    modules: Mapping[str, LightningModule],
    architecture: str,
    public: Callable[[], tuple[Any, str]],
    shared_names: Callable[..., Sequence[str]],
    first_step: Callable[[], FirstStep] = FirstStep,
    class_counts: Callable[[str], Sequence[int] | None] = lambda client: None,
    data_here: bool = True,
) -> Setup:
    """Return what callbacks see in their `check` of an architecture; what costs something is looked up when it is asked for.

    Args:
        questions: What is known of the federation beside its modules and the clients' batches.
        runner: The client side of this process.
        modules: A built module of each architecture.
        architecture: Name of the architecture.
        public: Gives the loader of public data, or `None`, and the name of the data module.
        shared_names: As in the `Setup`.
        first_step: As in the `Setup`.
        class_counts: As in the `Setup`.
        data_here: Whether the clients' data are in this process.
    """
    module, blueprint, facts = modules[architecture], runner.blueprint, dict(questions.facts)

    def local(read: Callable[[ClientRuntime], Any]) -> Callable[[], Any]:
        return partial(read, runner) if data_here else _ask_elsewhere

    return Setup(
        module=module,
        template=blueprint.template_of(architecture),
        modules=modules if questions.is_mixed else {},
        kinds=entry_kinds(module),
        callbacks=list(blueprint.callbacks),
        optimizers=optimizers_of(module),
        data=DataView(
            facts.pop("num_samples"),
            facts.pop("drifts"),
            num_batches=lambda client: questions.batches[client],
            first_batch=local(take_first_batch),
            train_loaders=local(train_loaders),
            has_pooled=lambda split: split in questions.pooled,
            has_split=lambda split: split in questions.splits,
            knows_groups=local(knows_groups),
            coupled_records=local(lambda runner: str(runner.data.coupling)),
            class_counts=class_counts,
        ),
        run=RunTerms(**facts, lightning_callbacks=[*blueprint.settings.callbacks, *configured_callbacks(module)]),
        public=PublicDataView(public, blueprint.settings.seed, blueprint.precision.convert_input),
        shared_names=shared_names,
        first_step=first_step,
    )


def _ask_elsewhere() -> NoReturn:
    raise DataElsewhere


def ask_callback(callback: FederatedCallback, setup: Setup) -> StepFinding:
    """Ask a callback's requirements, and then itself; return its refusal and what it warns of."""
    warnings: list[str] = []
    setup.warn = warnings.append
    by_method = [requirement for name, requirement in REQUIRED.items() if callback.claims(name)]
    try:
        for requirement in (*by_method, *callback.facts.requires):
            requirement.check(callback, setup)
        callback.check(setup)
    except ValueError as error:
        return StepFinding(refusal=str(error), said=warnings, cause=error)
    return StepFinding(said=warnings)


@dataclass(frozen=True)
class PreflightTask(PlainTask):
    """What one callback is asked, as a task for a machine that has a client's batch.

    Attributes:
        callback: Key of the callback.
        architecture: Name of the architecture whose module is checked.
        client: The first client with a batch.
        facts: The values of :data:`FACTS`.
        shared: The names that travel in round 1: under "", and under the key of a callback those without its choice.
        batches: Training batches in an epoch of each client.
        pooled: Splits whose union can be had.
        splits: Splits of which any client has samples.
        is_mixed: Whether clients have models of different architectures.
        has_public: Whether the server has public data; a site's own are no use without.
    """

    callback: str
    architecture: str
    client: str
    facts: Mapping[str, Any]
    shared: Mapping[str, tuple[str, ...]]
    batches: Mapping[str, int]
    pooled: tuple[str, ...]
    splits: tuple[str, ...]
    is_mixed: bool
    has_public: bool

    @property
    def address(self) -> tuple[int, str, str]:
        return 0, f"check of {self.callback}", self.client

    def run(self, runner: ClientRuntime, record: ClientRecord) -> tuple[StepFinding, None]:
        """Ask the callback; its refusal and what it warns of are the answer."""
        blueprint = runner.blueprint
        names = blueprint.architectures if self.is_mixed else (self.architecture,)
        loader = runner.data.public_dataloader() if self.has_public else None
        setup = make_setup(
            self,
            runner,
            {name: blueprint.build("server", name) for name in names},
            self.architecture,
            public=lambda: (loader, type(runner.data).__name__),
            shared_names=lambda without=None: self.shared["" if without is None else without.key],
        )
        finding = ask_callback(
            next(callback for callback in blueprint.callbacks if callback.key == self.callback), setup
        )
        if finding.cause is not None:
            client_failure(finding.cause)
        return finding, None

    def lost(self, reason: str) -> StepFinding:
        """An answer that refuses: the callback could not be asked."""
        return StepFinding(refusal=f"{self.callback} could not be checked at client '{self.client}': {reason}.")
