"""One visit: a message and the client's record in, an update and a new record out.

Read from the top: :func:`carry_out` runs a visit, :func:`visit_steps` is the visit, and below it stand its parts in the
order in which they happen. A visit stops where it needs a fit or scores (:mod:`~fedlightning.client.requests`) and leaves
these to whoever runs it: :func:`carry_out`, or an engine that does them for several clients at once.

The record that came in is never changed, so a visit that fails leaves the client as it was.

:func:`open_client` gives a client that is open: built, with its merged model, and bound to every callback.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule

from fedlightning.client.client import Client
from fedlightning.client.client_errors import client_failure, describe_error
from fedlightning.client.data_summary import count_used_samples
from fedlightning.client.fit import fit
from fedlightning.client.record import ClientRecord, FitResult
from fedlightning.client.requests import (
    Evaluate,
    Fit,
    MissingScores,
    Score,
    ScoreRequest,
    Scores,
    VisitSteps,
    score_or_miss,
)
from fedlightning.client.trainer_context import refuse_unseen
from fedlightning.compat.lightning_runs import detached
from fedlightning.contract import ALTERING, POOLED, FederatedCallback, Phase, Stage, UpdateCodec
from fedlightning.contract.messages import Extra, Message, Update, check_extras, shallow_copy
from fedlightning.datamodules.sampling import samples_in
from fedlightning.errors import Restart, warn
from fedlightning.seeding import seed_all
from fedlightning.tensors import State, clone, equal, first_nonfinite, load_state, pack
from fedlightning.tensors.entries import settle

if TYPE_CHECKING:
    from fedlightning.client.runtime import ClientRuntime


@contextmanager
def open_client(
    runner: ClientRuntime, message: Message, record: ClientRecord, evaluating: bool = False
) -> Iterator[Client]:
    """Open a client with its merged model (stage L1), on a copy of its record, bound to every callback."""
    # The server, or who protects the client, goes by what was sent: a callback that writes into it has a copy.
    sent = clone(message.state) if runner.callbacks.protecting else dict(message.state)
    entries = runner.blueprint.plain_entries(record.personal | sent, message.client)
    module = runner.blueprint.build(message.client) if entries is None else None
    base = runner.blueprint.base(runner.blueprint.architecture_of(message.client))
    client = Client(runner, shallow_copy(message), record.unfolded(base), module, entries)
    client.evaluating = evaluating
    client.received, client.message.state = sent, dict(sent)
    covering = next((callback.key for callback in runner.callbacks.protecting if callback.covers_training), "")
    client.withhold_data("" if evaluating else covering)
    bind(runner, client)
    try:
        if entries is None:
            runner.callbacks.event("on_build", client, client.message)
            client.built_otherwise = runner.blueprint.unlike_base(
                client.module, runner.blueprint.architecture_of(client.id)
            )
            if client.record.personal:
                load_state(client.module, client.record.personal)
            runner.callbacks.event("on_receive", client, client.message)
            load_state(client.module, client.message.state)
            settle(client.module, client.message.state)
        yield client
    finally:
        for callback in runner.callbacks:
            for name in ("_client", "log", "log_dict"):  # Lightning leaves the last two on every callback
                callback.__dict__.pop(name, None)
        if not client.is_unbuilt:
            detached(client.module)


def bind(runner: ClientRuntime, client: Client) -> None:
    """Bind a client to every callback. An engine with several open clients binds the one that it continues with."""
    for callback in runner.callbacks:
        callback._client = client


def find_personal_module(runner: ClientRuntime, client: Client, stage: Stage) -> LightningModule:
    """Return the model that the client deploys at `stage`."""
    owner = runner.callbacks.role("personal_module")
    return client.module if owner is None else owner.personal_module(client, stage)


def find_scored_splits(runner: ClientRuntime, splits: Sequence[str]) -> list[str]:
    """Return the splits whose scores may leave: those on validation data do not where a callback withholds them."""
    withheld = bool(runner.callbacks.withholding("scores"))
    return [split for split in splits if split != "val" or not withheld]


Evaluation = tuple[str, str, str, str, float, int]
"""One score of an update: stage, data, split, metric, value, number of samples."""


def carry_out(
    runner: ClientRuntime, message: Message, record: ClientRecord, evaluate: Evaluate
) -> tuple[Update, ClientRecord]:
    """Carry out one visit on its own.

    A client without samples, with a NaN, or whose code raises, answers with `update.error` and its old record.
    """
    try:
        return _drive(runner, visit_steps(runner, message, record, evaluate))
    except Restart as reason:  # neither the record nor the message has changed
        reason.apply(runner)
        return carry_out(runner, message, record, evaluate)


def _drive(runner: ClientRuntime, steps: VisitSteps) -> tuple[Update, ClientRecord]:
    """Serve the requests of a visit, one after another, until it ends."""
    try:
        request = next(steps)
        while True:
            try:
                result: Any
                if isinstance(request, Fit):
                    result = fit(runner, request)
                else:  # random draws continue from those of the fit
                    result = [score_or_miss(runner, score_request) for score_request in request.requests]
            except BaseException as error:  # an interrupt too: the visit closes its client
                request = steps.throw(error)
            else:
                request = steps.send(result)
    except StopIteration as end:
        answer: tuple[Update, ClientRecord] = end.value
        return answer


def visit_steps(runner: ClientRuntime, message: Message, record: ClientRecord, evaluate: Evaluate) -> VisitSteps:
    """Run one visit as a generator of requests; end with the update and the client's new record."""
    seed_all(runner.settings.seed, message.visit, message.client, "visit")
    update = Update(message.round, message.client, model=message.model, origin=message.model, tag=message.tag)
    update.links = message.links
    try:
        loader = runner.loader(message, "train")
        update.num_samples = count_used_samples(runner, loader)
        if message.work != 0 and update.num_samples == 0:
            update.error = f"client '{message.client}' has no training samples"
            return broadcast_visit_result(update, record)
        with open_client(runner, message, record) as client:  # stage L1: the entries sent, merged with those kept
            client.num_samples = update.num_samples
            before = client.entries if client.is_unbuilt else _buffers(client.module)
            if message.work != 0:
                yield from _train(runner, client, loader)
            for parameter in () if client.is_unbuilt else client.module.parameters():
                parameter.grad = None  # as large as the model, which is copied next
            _note_work(client, update)
            kept = split_entries(runner, client, update, before)
            _send(runner, client, update)
            if message.work != 0:
                client.record.personal = kept
            if message.work != 0 and message.client != POOLED:
                update.evaluations = yield from _evaluate(runner, client, update, evaluate)
            if runner.callbacks.protecting:
                client.received = dict(message.state)  # as it came, whatever callbacks have written into their copy
            leave(runner, client, update)  # every callback has had it
            base = runner.blueprint.base(runner.blueprint.architecture_of(client.id))
            answer = update, client.record.folded(base)
    except BaseException as error:  # one client's failure must not end the round; the loop reports it
        failed = Update(message.round, message.client, model=message.model, tag=message.tag)  # nothing of it leaves
        failed.num_samples, failed.cause = update.num_samples, client_failure(error)
        failed.error = f"client '{message.client}' failed: {describe_error(error)}"
        answer = failed, record
    return broadcast_visit_result(*answer)


def _train(runner: ClientRuntime, client: Client, loader: Any) -> Generator[Fit, Any, None]:
    """Request the visit's fits: one, unless a callback splits the visit into phases."""
    runner.callbacks.event("on_visit_start", client)
    owner = runner.callbacks.role("local_phases")
    phases = [Phase()] if owner is None else owner.local_phases(client)
    names: set[str] = set()
    for phase in phases:
        if phase.name in names:
            raise ValueError(
                f"two phases of the visit are named '{phase.name}', and would share batches and noise. Give each one "
                "a name of its own; repeats= says whose batches it sees again"
            )
        names.add(phase.name)
        client.phase = phase
        before = client.model_state() if phase.keep_as is not None else None
        if phase.start is not None:
            load_state(client.module, phase.start)
        message = client.message
        amounts = (phase.work, message.work, runner.settings.work)
        work = next(amount for amount in amounts if amount is not None)
        fitted: FitResult = yield Fit(client, message, phase, work, loader)
        loader = None  # each of the other phases begins with a new one
        runner.callbacks.event("check_fit", client)
        if phase.keep_as is not None:
            phase.keep_as(client)
            assert before is not None
            load_state(client.module, before)
        if phase.federated and fitted.unseen:
            refuse_unseen(runner.callbacks, client.module, fitted, runner.settings.unit)
        client.work.add(fitted, phase.federated)
    if runner.callbacks.hides_clients:
        client.work.contributed = True


def _note_work(client: Client, update: Update) -> None:
    """Write the client's work into record and update; a job that only collects reports the work of the last fit."""
    record, message, work = client.record, client.message, client.work
    if message.work != 0:
        record.visits += 1
        record.last_round = message.round
        record.num_samples = update.num_samples
        record.contributed, record.steps, record.lr_sum = bool(work.contributed), work.steps, work.lr_sum
    elif message.returns:
        update.num_samples = record.num_samples
    update.contributed = work.contributed if message.work != 0 else record.contributed or None
    update.steps, update.skipped, update.lr_sum = record.steps, work.skipped, record.lr_sum
    update.own_steps, update.selections = work.own_steps, work.selections
    update.metrics, update.logs = client.metrics, client.logs


def split_entries(runner: ClientRuntime, client: Client, update: Update, before: State) -> State:
    """Put the entries that the server asked for into the update; return those that stay with the client.

    An entry that is sent stays as well, unless the message had brought it: what the client alone has is never lost. A frozen
    parameter that is as every module is built does not, if the client's next one is too: that has it.
    """
    message, state = client.message, client.entries
    architecture = runner.blueprint.architecture_of(client.id)
    sent = {name: state[name] for name in message.returns}
    if client.id == POOLED:  # the server has the frozen network
        sent = runner.blueprint.without_base(sent, architecture, but=message.state)
    if message.work == 0 or not client.is_unbuilt:  # what an unbuilt client has trained is its own already
        sent = pack(sent)
    stays = client.record.personal.keys() - client.received.keys()
    kept = {name: value for name, value in state.items() if name not in sent or name in stays}
    kept = pack(runner.blueprint.without_base(kept, architecture, but=client.built_otherwise))
    state = {name: sent[name] if name in sent else kept.get(name, value) for name, value in state.items()}
    bad = first_nonfinite(state)
    bad = bad and _first_diverged(client.module, state, before)
    if bad is not None:
        raise FloatingPointError(
            f"'{bad}' holds NaN or infinite values after training. Lower the learning rate, clip gradients "
            "(gradient_clip_val) or check the data; its update is left out"
        )
    update.state = sent
    return kept


def _send(runner: ClientRuntime, client: Client, update: Update) -> None:
    """Let the callbacks see the update; where its noise came with training, those that do not say what they do a copy."""
    for callback in runner.callbacks:
        if not runner.callbacks.covers_training or ALTERING & set(callback.facts.changes):
            callback.on_send(client, update)
        elif callback.claims("on_send"):
            seen = replace(update, state=clone(update.state), extras={}, evaluations=[], gaps=[])
            callback.on_send(client, seen)
            _take_declared(client, callback, seen, update)


def _take_declared(client: Client, callback: FederatedCallback, seen: Update, update: Update) -> None:
    """Take into an update what a callback declares of what it has made of a copy; the rest is nothing, and that is said."""
    declared = callback.wire(client.module).up
    sent = seen.extras.get(callback.key, {})
    if extras := {name: value for name, value in sent.items() if name in declared}:
        update.extras[callback.key] = extras
    if seen.model == client.message.tag:
        update.model = seen.model
    same = len(sent) == len(extras) and seen.extras.keys() <= {callback.key}
    if not same or seen.evaluations or seen.gaps or not equal(seen.state, update.state):
        warn(
            f"Round {client.round + 1}: what {callback.key} makes of an update in on_send is set to nothing: the noise is in "
            "what training has left, and would not cover it. If it is made of the update alone, declare so in facts: "
            "Change.ALTERS, or Change.PARTS where it leaves entries out."
        )


def _refuse_unasked(client: Client, update: Update) -> None:
    """Refuse entries that the server did not ask for."""
    private = sorted(set(update.state) - set(client.message.returns))
    if private:
        raise ValueError(f"'{private[0]}' is in the update, but the server asked only for what is shared: it stays")


def _evaluate(
    runner: ClientRuntime, client: Client, update: Update, evaluate: Evaluate
) -> Generator[Score, Any, list[Evaluation]]:
    """Request the scores of the model that the client deploys now, on its own and on the pooled data; return them."""
    splits = find_scored_splits(runner, evaluate.splits)
    if not splits:
        return []
    stage: Stage = "L2"
    module = find_personal_module(runner, client, stage)
    places: list[tuple[str, str]] = []
    requests: list[ScoreRequest] = []
    for split in splits:
        for data in evaluate.data:
            try:
                loader = runner.loader(client.message, split) if data == "local" else runner.pooled_dataloader(split)
                has_batches = loader is not None and len(loader) > 0
            except BaseException as error:
                update.gaps.append((stage, data, split, describe_error(client_failure(error))))
                continue
            if loader is not None and has_batches:
                places.append((data, split))
                seed = (runner.settings.seed, client.visit, client.id, "score", stage, split, data)
                requests.append(ScoreRequest(module, loader, split, seed, client.id))
    scored: list[Scores] = (yield Score(client, requests)) if requests else []
    rows: list[Evaluation] = []
    for (data, split), request, scores in zip(places, requests, scored, strict=True):
        if isinstance(scores, MissingScores):
            update.gaps.append((stage, data, split, scores.reason))
            continue
        size = samples_in(request.loader)
        rows += [(stage, data, split, metric, value, size) for metric, value in scores.items()]
        if data == "local":
            runner.callbacks.event("on_client_evaluated", client, stage, split, scores, module)
    return rows


def leave(runner: ClientRuntime, client: Client, update: Update) -> None:
    """Let an update leave its client: the very last call of a visit, when no callback gets the update any more.

    What goes is the entries that the message asks for and the extras that callbacks declare, covered by what protects
    clients and encoded after that; what is attached narrows it (`ClientParts.leave_checks`).
    """
    for protection in runner.callbacks.protecting:
        protection.protect(client, update)
    _refuse_unasked(client, update)  # before a code hides which entries it stands for
    codec = runner.callbacks.answering(UpdateCodec, "encode")
    if codec is not None and client.message.work != 0:
        codec.encode(client, update)
    if runner.callbacks.withholding("logged"):
        update.metrics, update.logs = {}, []
    shapes = {name: value.shape for name, value in client.entries.items()} if update.extras else {}
    callbacks = {callback.key: callback for callback in runner.callbacks}
    for key, extras in update.extras.items():
        if key not in callbacks:
            raise ValueError(f"extras of '{key:.80}' are in the update, and no callback has that key: they stay")
        declared = callbacks[key].wire(client.module).up
        check_extras(key, extras, declared, shapes)
        if client.protection is not None:
            _refuse_other_means(
                client, key, {name: value for name, value in extras.items() if Extra.of(declared[name]).by_class}
            )
    for check in runner.blueprint.parts.leave_checks:
        check(runner.blueprint, client, update)


def _refuse_other_means(client: Client, key: str, extras: Mapping[str, Any]) -> None:
    """Refuse means by class that a callback has made itself, where another one covers them with noise."""
    for name, value in extras.items():
        covered = client.covered_means
        rows = [mean.to(value) for mean in covered.values()]
        if value.dtype.is_floating_point:
            same = all(any(torch.equal(row, mean) for mean in rows) for row in value)
        else:
            same = set(value.flatten().tolist()) <= covered.keys()
        if not same:
            raise ValueError(
                f"'{name}' of {key} holds means by class that no noise covers. Where client.protection is not None, send "
                "what its class_means returns, and the classes of these."
            )


def _buffers(module: LightningModule) -> State:
    """Copy the buffers."""
    return {name: value.detach().clone() for name, value in module.named_buffers(remove_duplicate=False)}


def _first_diverged(module: LightningModule, state: State, before: State) -> str | None:
    """Return the first entry of `state` that training has left with a NaN or an infinity.

    Frozen parameters are left out, since training does not move them. So are buffers that were not finite `before`: a
    mask of infinities may stay one.
    """
    frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    masks = {name for name in buffers & before.keys() if first_nonfinite({name: before[name]}) is not None}
    return first_nonfinite({name: value for name, value in state.items() if name not in frozen | masks})


def broadcast_visit_result(update: Update, record: ClientRecord) -> tuple[Update, ClientRecord]:
    """Under DDP within a client, give every rank what rank 0 has; other ranks never send updates."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return update, record
    if torch.distributed.get_world_size() == 1:
        return update, record
    answer = [(replace(update, cause=None), record)]
    torch.distributed.broadcast_object_list(answer, src=0)
    return answer[0]
