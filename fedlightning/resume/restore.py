"""A federation goes on from a saved state: :func:`restore`."""

from __future__ import annotations

from fedlightning.contract.families import Protection
from fedlightning.resume.config_changes import (
    Changes,
    changes_since,
    check_rescored,
    check_scored,
    join_clients,
    keep_assigned,
    scored_before,
)
from fedlightning.resume.saving import MARKS, Saving
from fedlightning.resume.server_state import check_extra, restore_state
from fedlightning.resume.state_files import UNDONE, go_back
from fedlightning.server.federation import Federation


def restore(federation: Federation, go_on: bool, allow_changes: bool = False, allow_new_clients: bool = False) -> None:
    """Load the state that the run's folder holds.

    Args:
        federation: A federation as it was assembled, before any round.
        go_on: The run will be trained further, so scores of rounds that are not in the state are cut off.
        allow_changes: Go on although the configuration has changed; the summary lists what has.
        allow_new_clients: Go on although there are clients that the run did not have; the summary lists them.

    Raises:
        ValueError: If the run would go on with another configuration than it was started with, or with clients that it may
            not have or that a callback has no place for, or be scored with others than it trained.
    """
    run, saving = federation.recorder.run, federation.parts.find(Saving)
    assert run is not None
    federation.rounds_done, extra, in_flight = restore_state(run.last, federation.server, federation.store, go_on)
    check_extra(run.last, extra, federation.parts.keys)
    federation.server.stopped = extra["stopped"]
    if go_on:
        federation.loop.load(in_flight)
    saving.rounds_saved = federation.rounds_done
    keep_assigned(extra, federation.server.blueprint, run.path)
    changes = Changes()
    if not go_on:
        check_scored(extra, federation.server, run.path)
    else:
        changes = changes_since(
            extra,
            federation.server,
            saving.fingerprint,
            run.path,
            rounds_done=federation.rounds_done,
            allow_changes=allow_changes,
            allow_new_clients=allow_new_clients,
        )
        for callback in federation.server.callbacks:
            if changes.configuration and isinstance(callback, Protection):
                callback.check_changes(changes.configuration)
    saving.scored = scored_before(extra, federation.server, federation.engine.runner.described.seed)
    if not changes.joined:
        check_rescored(saving.scored, federation.server, run.path, go_on)
    saving.changes = [*extra.get("changes", []), *changes.told(federation.rounds_done + 1)]
    if changes.joined:
        federation.server.round = federation.rounds_done
        join_clients(federation.server, changes.joined)
    federation.costs.load(extra)
    federation.server.failures[:] = extra["failures"]
    federation.parts.load(extra)
    loop = federation.engine.runner.loop
    loop.reason = loop.reason or extra["local_loop"]  # a run that is over trains no more, and tells all the same
    federation.final_done = bool(extra["final"]) and federation.is_over
    if go_on and extra["final"] and not federation.final_done:
        federation.costs.forget_final_visits(federation.rounds_done)
    scored = federation.rounds_done + federation.final_done
    marks = (
        extra if federation.final_done else {name: extra.get(earlier, extra[name]) for name, earlier in MARKS.items()}
    )
    mark = marks["metrics"]
    if go_on:
        if UNDONE in extra:
            go_back(run.last)
        rows = run.keep_rounds(mark)
        federation.recorder.start_with(rows, run.metrics.place() if federation.recorder.writes else None)
        more = (bool(extra["final"]) and not federation.final_done) or UNDONE in extra
        federation.recorder.reopen_logs(marks, scored, differs=more or changes != Changes())
    else:
        federation.recorder.start_with(run.read_rows(scored, mark))
    federation.server.round = federation.last_round
    if go_on:
        saving.remember_left_out(federation)
    if changes.joined:
        federation.check()
    federation.parts.tell("on_restored", federation)
