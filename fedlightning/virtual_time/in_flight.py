"""Jobs in flight: messages that have left, and updates that have not yet arrived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from fedlightning.client.record import ClientRecord
from fedlightning.contract.messages import ClientLog, JobTrace, Message, Outcome, Update
from fedlightning.engines.contract import ClientRecords, Engine
from fedlightning.errors import DamagedStateError

if TYPE_CHECKING:
    from fedlightning.virtual_time.clock import VirtualClock


@dataclass
class PendingJob:
    """A job between its message and the arrival of its update.

    Attributes:
        number: Its place in the order of departures, from 0. Of two that arrive at one time the lower comes first.
        message: The message, as it left.
        began: Virtual time of its departure.
        computed: Virtual time at which the client has computed.
        arrival: Virtual time of its arrival; until the job is carried out, the earliest possible one.
        update: The answer, once the job is carried out.
        record: The client's new record, which counts from the arrival on; `None`: unchanged, or not carried out.
    """

    number: int
    message: Message
    began: float
    computed: float
    arrival: float
    update: Update | None = None
    record: ClientRecord | None = None

    @property
    def client(self) -> str:
        """The client's id."""
        return self.message.client

    @property
    def order(self) -> tuple[float, int]:
        """Place in the order of arrivals."""
        return self.arrival, self.number

    def carried_out(self, clock: VirtualClock, update: Update, record: ClientRecord | None) -> None:
        """Take in the answer, whose bytes say when it arrives."""
        self.update, self.record = replace(update, cause=None), record
        self.arrival = self.computed + clock.upload(self.client, self.message.visit, update.num_bytes)

    def trip(self, round: int, staleness: int, outcome: Outcome) -> JobTrace:
        """Return the job for the timeline."""
        sent = self.message.round
        return JobTrace(round + 1, self.client, self.began, self.computed, self.arrival, sent, staleness, outcome)

    def select_in(self, round: int, before: ClientRecord) -> None:
        """Let models that the client has selected in this visit be of the round in which its scores arrive."""
        if self.record is None:
            return
        checkpoints = dict(self.record.checkpoints)
        for key, entry in checkpoints.items():
            is_new = key not in before.checkpoints or before.checkpoints[key].get("score") != entry.get("score")
            if is_new and entry.get("round") == self.message.round + 1:
                checkpoints[key] = {**entry, "round": round + 1}
        self.record = replace(self.record, checkpoints=checkpoints)

    def plain(self) -> dict[str, Any]:
        """Return the job as tensors and plain values."""
        flat = {name: getattr(self, name) for name in ("number", "began", "computed", "arrival")}
        update = None
        if self.update is not None:
            update = {name: value for name, value in vars(self.update).items() if name != "cause"}
            update["logs"] = [vars(log) for log in self.update.logs]
        record = None if self.record is None else dict(vars(self.record))
        return flat | {"message": dict(vars(self.message)), "update": update, "record": record}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> PendingJob:
        """Return the job that :meth:`plain` gave."""
        try:
            message, update, record = plain["message"], plain["update"], plain["record"]
            if update is not None:
                update = Update(**update | {"logs": [ClientLog(**log) for log in update["logs"]]})
            return cls(
                message=Message(**message),
                update=update,
                record=None if record is None else ClientRecord(**record),
                **{field.name: plain[field.name] for field in fields(cls)[:1] + fields(cls)[2:5]},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise DamagedStateError(f"The saved state holds a job in flight that cannot be read: {error!r}.") from None


class PendingRecords(ClientRecords):
    """Records of clients whose visits are carried out before they count: the new ones stay here.

    A visit takes effect when its update arrives. Until then the client's own model is the one that it had.

    Args:
        store: The records as they are.
    """

    def __init__(self, store: ClientRecords) -> None:
        super().__init__(store.limit)
        self._store = store

    def get(self, client: str) -> ClientRecord:
        """Return the record as it is."""
        return self._store.get(client)

    def new(self, client: str) -> ClientRecord | None:
        """Return the record that a visit has left, or `None` if it has left none."""
        return super().get(client) if client in self else None


class SampleForecast:
    """How many training samples visits go through: known before they are carried out.

    Args:
        engine: Knows settings and the clients' numbers of samples and batches.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._batches: Mapping[str, int] | None = None

    def __call__(self, client: str, work: int | None, round: int | None = None) -> float:
        """Return the samples of a visit: of all epochs, or the mean samples of a batch times the steps."""
        runner = self.engine.runner
        data, amount = runner.described, runner.settings.work if work is None else work
        samples = data.num_samples(client, round=round)
        if runner.settings.local_steps is None:
            return samples * amount
        if self._batches is None:
            self._batches = self.engine.describe(details=["batches"]).batches
        batches = self._batches.get(client, 0)
        return min(samples, data.num_samples(client) / batches) * amount if batches else 0.0
