"""States of a run, saved at round boundaries, and the log of what a full disk left out.

What of a federation is saved and restored: the server and the clients' records.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedlightning.client.record import ClientRecord
from fedlightning.compat.lightning_runs import detached_copy
from fedlightning.contract import POOLED
from fedlightning.engines.attempts import Address, LeftOut
from fedlightning.engines.contract import ClientRecords
from fedlightning.errors import DamagedStateError
from fedlightning.resume import state_files
from fedlightning.resume.config_changes import Fingerprint, check_validation_clients
from fedlightning.resume.state_files import FLUSHED, store_long_values
from fedlightning.server.parts import Part
from fedlightning.server.server import Server
from fedlightning.server.summary import summarise_evaluation
from fedlightning.storage.files import is_writing_process
from fedlightning.tensors import load_state, module_state

if TYPE_CHECKING:
    from fedlightning.server.federation import Federation


LOOP = "loop"
"""Entry of what the loop keeps from round to round."""
SERVER_TYPES: dict[str, Any] = {
    **dict.fromkeys(("models", "state", "checkpoints", "model_architectures", "frozen", LOOP), dict),
    **dict.fromkeys(("bytes_up", "bytes_down", "steps"), int),
    "time": float,
}
"""What a saved state holds of the server, and of which type."""
EXTRA = (
    *("seconds", "evaluation_seconds", "history", "spent_of_rounds", "final", "lasting", "clients", "held_out"),
    *("metrics", "loggers", "spent", "failures", "stopped", "local_loop"),
)
"""Values that lie beside the server's state and the records."""
RECORD_TYPES: dict[str, Any] = {
    field.name: {"int": int, "float": int | float, "bool": bool}.get(str(field.type), dict)
    for field in fields(ClientRecord)
}


def save_state(
    folder: Path,
    server: Server,
    store: ClientRecords,
    rounds_done: int,
    extra: dict[str, Any],
    in_flight: dict[str, Any] | None = None,
) -> None:
    """Write the state after `rounds_done` rounds."""
    state_files.save(
        folder,
        rounds_done,
        server.state_dict() | {LOOP: in_flight or {}},
        store.changed,
        lambda client: vars(store.get(client)),
        lambda: module_state(server.blueprint.template),
        extra,
    )
    store.saved()


def restore_state(
    folder: Path, server: Server, store: ClientRecords, go_on: bool = False
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Put back what :func:`save_state` wrote."""
    saved = state_files.load(folder, server.max_rounds if go_on else 0)
    server_state = {"frozen": {}} | saved.server()  # a state of before these hashes has none
    _check(saved, "the server's state", server_state, SERVER_TYPES)
    for model, state in server_state["models"].items():
        if not _is_state(state):
            raise DamagedStateError(f"The state in {folder} is damaged: model '{model}' is not a set of named tensors.")
        architecture = server_state["model_architectures"].get(model)
        if architecture is not None and architecture not in server.models.architectures:
            raise ValueError(
                f"The state in {folder} has a model '{model}' of architecture '{architecture}', which is not among "
                f"{list(server.models.architectures)}. Resume with the ClientModels that the run was started with."
            )
        models = server.models.main if architecture is None else server.models.architectures[architecture]
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        now = {
            name: tuple(shape)
            for name, shape in models.shapes.items()
            if name in state or models.kinds[name] != "frozen"
        }
        if shapes != now:
            differing = sorted(set(shapes.items()) ^ set(now.items()))[0][0]
            raise ValueError(
                f"The state in {folder} holds a different model ('{model}' differs at '{differing}'). "
                "Resume with the module and callbacks that the run was started with."
            )
    unknown = sorted(set(saved.files) - set(server.clients) - {POOLED})
    if unknown and unknown[0] in server.held_out:
        raise ValueError(
            f"The state in {folder} is of a run that trained client '{unknown[0]}', which held_out keeps out of training "
            "now. Resume with the held_out that the run was started with."
        )
    if unknown:
        raise ValueError(
            f"The state in {folder} knows client '{unknown[0]}', the data does not. Use the run's own data (between "
            "machines: wait for all of its sites), or begin a new run."
        )
    template, began = detached_copy(server.blueprint.template), saved.template()
    now = {name: value.shape for name, value in module_state(template).items()}
    if not _is_state(began) or any(now.get(name) != value.shape for name, value in began.items()):
        raise ValueError(
            f"The state in {folder} began with a different module. Resume with the module that the run was started with."
        )
    load_state(template, began)
    server.blueprint.template = template
    server.models.rebuild(server.blueprint)
    _check_frozen(folder, server, server_state["frozen"])
    server.load_state_dict(server_state)
    for client, record in saved.records():
        _check(saved, f"the record of client '{client}'", record, RECORD_TYPES)
        store.put(client, ClientRecord(**record), changed=False)
    return saved.rounds_done, saved.extra, server_state[LOOP]


def _check_frozen(folder: Path, server: Server, hashes: Mapping[str, Any]) -> None:
    """Refuse a state whose frozen parameters, which it does not hold, are not those that modules are built with now."""
    for architecture in server.models.architectures:
        now, then = server.blueprint.base_hash(architecture), hashes.get(architecture)
        if then not in (None, now):
            suffix = f" of architecture '{architecture}'" if architecture else ""
            raise ValueError(
                f"The state in {folder} belongs to frozen parameters{suffix} with the hash {str(then)[:16]}, and those "
                f"that are built now have {now[:16]}: what was trained beside the others would mean nothing. What "
                "configure_model or a callback's wrap_module makes must be as it was when the run was started."
            )


def check_extra(folder: Path, extra: dict[str, Any], parts: Sequence[str]) -> None:
    """Refuse a state without the values that lie beside the server's state, those of parts among them."""
    missing = [name for name in (*EXTRA, *parts) if name not in extra]
    if missing:
        raise DamagedStateError(f"The state in {folder} is damaged: its manifest has no '{missing[0]}'.")


def _check(saved: state_files.SavedState, what: str, part: dict[str, Any], types: dict[str, Any]) -> None:
    """Refuse a part of a state that has other entries than it should."""
    for name in [*types, *part]:
        kind = types.get(name)
        if kind is None or name not in part or not _fits(name, part[name], kind):
            what_it_is = "missing" if name not in part else "unknown" if kind is None else "not what it should be"
            raise DamagedStateError(f"The state in {saved.folder} is damaged: '{name}' in {what} is {what_it_is}.")


def _fits(name: str, value: Any, kind: Any) -> bool:
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind):
        return False
    if name == "personal":
        return _is_state(value)
    if name == LOOP:
        return all(isinstance(key, str) for key in value)
    if name in ("model_architectures", "frozen"):
        return isinstance(value, dict) and all(isinstance(word, str) for pair in value.items() for word in pair)
    return kind is not dict or all(isinstance(key, str) and isinstance(entry, dict) for key, entry in value.items())


def _is_state(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items()
    )


MARKS = {"metrics": "metrics_of_rounds", "loggers": "loggers_of_rounds"}
"""What a saved state knows of the recorder: its marks, and those from before the visits after the last round."""


class Saving(Part):
    """Writes the complete state of a federation after rounds, to go on from: :func:`fedlightning.resume.resumable.restore`.

    Args:
        every: Rounds between saved states; 0: none is saved.
        fingerprint: Gives what must not change when the run is resumed.

    Attributes:
        changes: What has changed all the same, because the user allowed it.
        rounds_saved: Rounds of the newest saved state.
        scored: Clients that the newest scored round has scored, if it is of a restored run.
    """

    def __init__(self, every: int, fingerprint: Fingerprint) -> None:
        self.every, self.fingerprint = every, fingerprint
        self.changes: list[str] = []
        self.rounds_saved = 0
        self.scored: list[str] | None = None
        self._marks_of_rounds: dict[str, Any] | None = None  # the recorder's before the visits after the last round
        self._lasting: dict[str, Any] | None = None
        self._clients: dict[str, Any] | None = None

    def lasting(self, federation: Federation) -> dict[str, Any]:
        """Return what must not change when the run is resumed."""
        if self._lasting is None:
            self._lasting = self.fingerprint((), federation.server.held_out)
        return self._lasting

    def on_begin(self, federation: Federation) -> None:
        self.remember_left_out(federation)
        if self._saves(federation):
            self.lasting(federation)  # before round 1, not in its time

    def on_round_failed(self, federation: Federation) -> None:
        # who resumes wants its clients tried again
        federation.engine.attempts.left_out.undo(federation.rounds_done + 1)

    def on_rounds_over(self, federation: Federation) -> None:
        if federation.recorder.writes:
            self._marks_of_rounds = federation.recorder.mark()

    def on_round_end(self, federation: Federation) -> None:
        if federation.is_evaluated(federation.server.round) and not federation.final_done:
            self.scored = None
        if self._saves(federation) and (federation.rounds_done % self.every == 0 or federation.is_over):
            self._save(federation)

    def on_evaluate(self, federation: Federation, split: str) -> None:
        if split == "val" and self.scored is not None:
            check_validation_clients(self.scored, federation.server)

    def summary(self, federation: Federation) -> Mapping[str, Any]:
        evaluation = {} if self.scored is None else {"evaluation": summarise_evaluation(federation.server, self.scored)}
        return evaluation | ({"config_changes": self.changes} if self.changes else {})

    def _saves(self, federation: Federation) -> bool:
        """Return whether this process saves states."""
        return federation.recorder.writes and self.every > 0

    def remember_left_out(self, federation: Federation) -> None:
        """Keep in the run's folder which clients the machine forces the run to leave out, and read those that are there."""
        run = federation.recorder.run
        if run is not None and is_writing_process():
            federation.engine.attempts.left_out = LeftOutLog(run.decisions)
        federation.engine.attempts.left_out.load(federation.rounds_done)

    def _who(self, federation: Federation, folder: Path) -> dict[str, Any]:
        """Return the clients; who they are does not change from the first saved state on."""
        if self._clients is None:
            server = federation.server
            assigned = dict(server.blueprint.assigned)
            clients = {"clients": server.clients, "held_out": server.held_out}
            self._clients = store_long_values(folder, clients | ({"assigned": assigned} if assigned else {}))
        return self._clients

    def _save(self, federation: Federation) -> None:
        server, run = federation.server, federation.recorder.run
        assert run is not None
        extra = {
            **federation.costs.state(),
            "final": federation.final_done,
            "lasting": self.lasting(federation),
            **self._who(federation, run.last),
            **federation.recorder.mark(),
            **{MARKS[name]: mark for name, mark in (self._marks_of_rounds or {}).items()},
            "failures": server.failures,
            "stopped": server.stopped,
            **federation.parts.state(),
            "local_loop": federation.engine.runner.loop.reason,
        } | ({"changes": self.changes} if self.changes else {})
        if federation.rounds_done == server.max_rounds and (done := _done_at_the_end(federation)):
            extra[FLUSHED] = done
        save_state(run.last, server, federation.store, federation.rounds_done, extra, federation.loop.state())
        self.rounds_saved = federation.rounds_done
        federation.recorder.logs.begun()


def _done_at_the_end(federation: Federation) -> str:
    """Return what the last round did that it would not have done in a longer run, for a sentence; empty: nothing."""
    asked = {callback.key: callback.facts.last_round for callback in federation.server.callbacks}
    differing = {
        key: last_round(federation.server.max_rounds) for key, last_round in asked.items() if last_round is not None
    }
    waited = ["waited for all jobs in flight (at_end='flush')"] if federation.loop.flushes else []
    return " and ".join(waited + [f"{text} ({key})" for key, text in differing.items() if text])


class LeftOutLog(LeftOut):
    """Clients that were left out because of the machine, as a file that is only appended to.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def load(self, rounds_done: int) -> None:
        """Read what was decided of the rounds after `rounds_done`. A line that was cut off while written is ignored."""
        self.reasons.clear()
        if not self.path.exists():
            return
        for line in self.path.read_bytes().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                if line.startswith(b"{") or not line.strip():
                    continue  # cut off
                entry = None
            try:
                if entry.get("undone"):
                    super().undo(entry["round"])
                else:
                    address = (entry["round"], entry["where"], entry["client"], entry["number"])
                    self.reasons[address] = str(entry["reason"])
            except (AttributeError, KeyError, TypeError):
                raise ValueError(
                    f"{self.path} is damaged: {line[:80]!r} says of no client that it was left out. Put the file back from "
                    "a copy; or remove it, and clients that time or the machine has left out are tried again."
                ) from None
        self.reasons = {address: reason for address, reason in self.reasons.items() if address[0] > rounds_done}

    def add(self, address: Address, reason: str) -> None:
        """Note a decision; it is on the disk when this returns."""
        round, where, client, number = address
        self._write({"round": round, "client": client, "where": where, "number": number, "reason": reason})

    def undo(self, round: int) -> None:
        """Forget what was decided in a round that has ended the run: resuming is to try its clients again."""
        super().undo(round)
        if self.path.exists():
            self._write({"round": round, "undone": True})

    def _write(self, entry: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before = self.path.read_bytes() if self.path.exists() else b""
        start = "\n" if before and not before.endswith(b"\n") else ""  # after a line that was cut off
        with self.path.open("a") as file:
            file.write(start + json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
