"""The contract of loops: :class:`Loop`."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedlightning.client.record import ClientRecord
from fedlightning.client.requests import Evaluate
from fedlightning.contract import POOLED, Change, ClientSelection, Job
from fedlightning.contract.messages import Trip, Update
from fedlightning.engines.base import Engine
from fedlightning.errors import ConfigurationError
from fedlightning.ranges import check_on_creation
from fedlightning.server.round_clock import Clock
from fedlightning.server.server import Server


class Loop(ABC):
    """When clients are visited, and what a round is.

    A round ends with a step of the server's models; after it the federation scores, tells the callbacks and saves. What lives
    from round to round (a clock, messages in flight) is given by :meth:`state` and goes with every saved state. A loop object
    holds options only, each under its argument's name, and what :meth:`load` can put back: the trainer copies it for
    every run.
    """

    clock: Clock | None = None
    """The virtual clock of a loop that has one."""
    holds_records: bool = False
    """Whether clients' records are put into the store later than the visits that made them: they must be here then."""
    trips: Sequence[Trip] = ()
    """The jobs that came back in the last round, where there is a clock."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let arguments be checked by their annotations."""
        super().__init_subclass__(**options)
        check_on_creation(cls)

    def check(self, server: Server) -> None:  # noqa: B027 - most loops take everything
        """Refuse before round 1, with ``ValueError`` and a sentence, callbacks that this loop cannot run."""

    @abstractmethod
    def round(
        self, server: Server, engine: Engine, evaluate: Evaluate, report: Callable[[Update], None] = lambda update: None
    ) -> list[Update]:
        """Carry out one round, up to the new models.

        Args:
            server: Holds the models before, and after.
            engine: Carries out the visits.
            evaluate: What to score at stage L2, while the trained models are there.
            report: Called with each update as it comes.

        Returns:
            The updates that came in this round, without their model entries.
        """

    def absent(self) -> str:
        """Return what keeps clients out of rounds, for a sentence; empty: nothing."""
        return ""

    @property
    def flushes(self) -> bool:
        """Whether the last round is none that a longer run would have: it waits for what is in flight."""
        return False

    def visits(self, server: Server) -> int:
        """Return how many visits the next round is expected to have: for the progress bar."""
        return len(server.participants())

    def state(self) -> dict[str, Any]:
        """Return what lives from round to round: tensors and plain values."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state` returned.

        Raises:
            ValueError: If it is the state of another loop.
        """
        if state:
            raise ValueError(
                f"The saved state holds {sorted(state)} of another loop than {self!r}. Resume with the run's own loop."
            )

    def hyperparameters(self) -> dict[str, Any]:
        """Return the arguments this loop was made with, read from the attributes of the same names."""
        names = [name for name in inspect.signature(type(self).__init__).parameters if name not in ("self", "kwargs")]
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def __repr__(self) -> str:
        """Return the class with its options."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.hyperparameters().items())
        return f"{type(self).__name__}({options})"


def allowed(server: Server, job: Job) -> Job | None:
    """Return a job as the callbacks let it be carried out (`on_job`, chained), or `None` if one of them leaves it out."""
    if job.client == POOLED:
        return job
    now: Job = job
    for callback in server.callbacks:
        if not isinstance(callback, ClientSelection):
            continue
        answer: Job | None = callback.on_job(server, now)
        if answer is None:
            return None
        if not isinstance(answer, Job) or answer.client != job.client:
            raise ConfigurationError(
                f"{callback.key}.on_job was asked about a job of client '{job.client}' and answered {answer!r:.200}. It "
                "returns the job, a changed one of the same client, or None to leave it out."
            )
        now = answer
    return now


def left_out(server: Server, job: Job) -> Update:
    """Return the answer that a plan gets for a job that was not carried out: nothing came, and nobody failed."""
    update = Update(server.round, job.client, model=job.model, tag=job.tag)
    return replace(update, error=f"client '{job.client}' was left out of round {server.round + 1}", left_out=True)


def left_behind(server: Server, before: ClientRecord, after: ClientRecord) -> ClientRecord:
    """Return what a client keeps of a visit whose update is left out: all, but what has to agree with the server's."""
    keys = [callback.key for callback in server.callbacks.making(Change.IN_STEP)]
    state = {key: value for key, value in after.state.items() if key not in keys}
    return replace(after, state=state | {key: before.state[key] for key in keys if key in before.state})


def last_scores(updates: Sequence[Update]) -> list[Update]:
    """Take scores and training metrics out of all but each client's last update: a round has one of each.

    Where some of a client's updates were scored and others were not, or failed, it is the last one that was scored.
    """

    def rank(update: Update) -> tuple[bool, bool]:
        return bool(update.evaluations or update.gaps), bool(update.metrics)

    last: dict[str, int] = {}
    for place, update in enumerate(updates):
        if rank(update) >= rank(updates[last.get(update.client, place)]):
            last[update.client] = place
    return [
        update if last[update.client] == place else replace(update, evaluations=[], gaps=[], metrics={})
        for place, update in enumerate(updates)
    ]
