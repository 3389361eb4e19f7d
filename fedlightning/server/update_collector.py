"""What becomes of updates as they come, in every loop: counted, folded into the next models, told of.

:class:`UpdateCollector` takes them in, :class:`Aggregation` makes the next models of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedlightning.contract import SumCodec
from fedlightning.contract.messages import GLOBAL, Update, contributors, shallow_copy
from fedlightning.engines.attempts import FederationError, TooFewClientsError, stop_at
from fedlightning.errors import ConfigurationError, warn
from fedlightning.options import FailurePolicy
from fedlightning.scores.rows import not_scored
from fedlightning.server.evaluation import ScoringError
from fedlightning.server.server import Server
from fedlightning.tensors import State, WeightedMean, clone, equal, has_mean, load_state, module_state, narrow, widen
from fedlightning.tensors.entries import keeps_vectors, settle


class Aggregation:
    """Folds a round's updates into the next models, one by one in client order.

    Memory is one accumulator per model, unless a callback's `reduce` needs all updates at once.

    Args:
        server: Holds the models before, and after :meth:`finish`.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.reducer = server.callbacks.role("reduce")
        self.means: dict[str, WeightedMean] = {}
        self.updates: dict[str, list[Update]] = {}

    def fold(self, update: Update, base: Mapping[str, Tensor] | None = None) -> None:
        """Take in one update, which has been checked. Its model entries are released unless the reducer needs them."""
        server = self.server
        server.callbacks.event("on_update", server, update)
        if base is not None:
            update = replace(update, state=self._moved(update, base))
        if self.reducer is not None:
            self.updates.setdefault(update.model, []).append(update)
        else:
            self.means.setdefault(update.model, WeightedMean()).add(update.state, server.weight(update))

    def _moved(self, update: Update, base: Mapping[str, Tensor]) -> State:
        """Return the update's entries, moved as far as the server's have moved since they were sent."""
        now, moved = self.server.models[update.model], dict(update.state)
        for name, value in update.state.items():
            then = base.get(name)
            if then is None or then is now[name] or not has_mean(value):
                continue
            if not torch.equal(then, now[name]):
                moved[name] = narrow(widen(now[name]) + (widen(value) - widen(then)), value)
        return moved

    def finish(self, nobody: bool = False) -> None:
        """Replace the server's models by the new ones."""
        server = self.server
        reduced = {model: self._mean(model, mean) for model, mean in self.means.items()}
        for model, updates in self.updates.items():
            assert self.reducer is not None
            server.models.combining = model
            reduced[model] = self.reducer.reduce(server, updates)
        if nobody and any(callback.claims("on_reduced") for callback in server.callbacks):
            present = server.models[GLOBAL]
            reduced[GLOBAL] = reduced.get(GLOBAL) or {name: present[name] for name in server.shared_names()}
        step = server.callbacks.role("server_step")
        for model, state in reduced.items():
            if not state:
                continue
            server.models.combining = model
            for callback in server.callbacks:
                state = callback.on_reduced(server, state)
            old: dict[str, Tensor] = {name: server.models[model][name] for name in state}
            if nobody and equal(old, state):  # momentum alone would move the model
                continue
            new = state if step is None else step.server_step(server, old, state)
            moved = {**server.models[model], **new}
            server.models[model] = _settled(server.models.architecture(model).module, moved, new)
        server.models.combining = GLOBAL

    def _mean(self, model: str, mean: WeightedMean) -> State:
        """Return the weighted mean, or the change divided by the number that a callback names."""
        server, owner, combined = self.server, self.server.callbacks.role("denominator"), mean.result()
        server.models.combining = model
        divisor = None if owner is None else owner.denominator(server)
        if divisor is None:
            return combined
        if not 0.0 < divisor < math.inf:
            assert owner is not None
            raise ConfigurationError(f"{owner.key}.denominator is {divisor!r}, which must be a positive number.")
        for name, value in combined.items():
            share = mean.weight(name) / divisor
            if has_mean(value) and share != 1.0:
                old = widen(server.models[model][name])
                combined[name] = narrow(old + share * (widen(value) - old), value)
        return combined


def _settled(module: nn.Module, state: State, came: Collection[str]) -> State:
    """Return all entries of a model with the vectors of its spectral norms, which are of its matrices."""
    if not keeps_vectors(state):
        return state
    settled = copy.deepcopy(module)
    load_state(settled, state)
    settle(settled, came)
    return clone(module_state(settled, state))


class UpdateCollector:
    """Takes in the updates of a round, each of which has been checked on arrival.

    Args:
        server: Holds the models before, and after :meth:`step`.
        policy: Says when a failed client ends the run.
        report: Called with each update as it comes, without its entries.

    Attributes:
        done: The updates so far, without their entries.
    """

    def __init__(self, server: Server, policy: FailurePolicy, report: Callable[[Update], None]) -> None:
        self.server, self.policy, self.report = server, policy, report
        self.aggregation = Aggregation(server)
        self.done: list[Update] = []
        self.cause: BaseException | None = None  # of the first failure; each holds its client's model by its traceback

    def count(self, update: Update, trained: bool = True) -> None:
        """Count bytes and work of an update, whether or not it is used. Steps of a job without training are earlier ones."""
        server = self.server
        if update.error is not None:
            stop_at(self.policy, update.error, f"Round {server.round + 1}")
        server.costs.bytes_up += update.num_bytes
        server.costs.steps += update.steps if trained else 0
        server.costs.add_work(update)

    def fold(
        self, update: Update, sent: State | None = None, base: Mapping[str, Tensor] | None = None, trained: bool = True
    ) -> None:
        """Fold an update without error into the next models, and watch its size.

        Args:
            update: The update.
            sent: Entries that the client was sent in place of the server's.
            base: Entries of which the client's change counts; `None`: the model that came is taken.
            trained: Whether the job trained.
        """
        server = self.server
        if trained:
            before = server.models[update.model] if sent is None else {**server.models[update.model], **sent}
            server.parts.tell("on_update", server, update, before)
        if update.state or (trained and server.callbacks.find(SumCodec) is not None):
            self.aggregation.fold(update, base)
        else:
            server.callbacks.event("on_update", server, update)

    def close(self, update: Update, extras: bool = False) -> Update:
        """Tell of an update, and return it without its entries; with its extras if a plan is to see them."""
        self.cause = self.cause or update.cause
        light = shallow_copy(update, state={}, extras=update.extras if extras else {}, cause=None)
        self.done.append(light)
        self.report(light)
        return light

    def step(self, nobody: bool = False) -> None:
        """Make the next models out of what has come, and begin anew."""
        self.aggregation.finish(nobody=nobody)
        self.aggregation = Aggregation(self.server)

    def refuse_if_all_failed(self, since: int = 0) -> None:
        """End the run where every visit has failed.

        Args:
            since: The first update that counts.
        """
        updates = [update for update in self.done[since:] if not update.left_out]
        failed = [update for update in updates if update.error is not None]
        if not updates or len(failed) < len(updates):
            return
        reasons = {str(update.error).replace(f"client '{update.client}' failed: ", "") for update in failed}
        if self.server.round == 0 and len(failed) > 1 and len(reasons) == 1:
            raise FederationError(
                f"{reasons.pop().rstrip('.')}. All {len(failed)} clients failed with this error in round 1: no client could "
                "contribute."
            ) from self.cause
        raise FederationError(
            f"Round {self.server.round + 1}: no client could contribute; {str(failed[0].error).rstrip('.')}"
            + (f" ({len(failed) - 1} more failed)." if len(failed) > 1 else ".")
        ) from self.cause

    def refuse_if_too_few(self) -> None:
        """End the run where fewer clients than needed contributed; of one it is enough that it came."""
        server = self.server
        clients = [update for update in self.done if update.client in server.num_samples and not update.left_out]
        visited = dict.fromkeys(update.client for update in clients)
        counted = {update.client for update in contributors(clients)}
        idle = {update.client for update in clients if update.contributed is False} - counted
        failed = {client: f"client '{client}' took no real step" for client in visited if client in idle}
        failed |= {update.client: update.error for update in clients if update.error is not None}
        needed, arrived = self.policy.needed(len(visited)), len(visited) - len(failed)
        if arrived < needed and not (needed == 1 and idle):
            raise TooFewClientsError(
                f"Round {server.round + 1}: {arrived} of {len(visited)} clients contributed, and failures.min_clients="
                f"{self.policy.min_clients} asks for {needed}; {str(next(iter(failed.values()))).rstrip('.')}"
                + (f" ({len(failed) - 1} more failed)" if len(failed) > 1 else "")
                + ". The state of the rounds before is intact, and resume goes on from there."
            ) from self.cause


def warn_missing_updates(server: Server, updates: list[Update], policy: FailurePolicy) -> None:
    """Warn of clients that contributed nothing, or could not be evaluated, with the reason."""
    for update in updates:
        if update.left_out:
            continue
        if update.error is not None:
            server.note_failure(update.client, update.error)
        elif update.contributed is False:
            skipped = f": {update.skipped} had no gradient, or were skipped by the gradient scaler"
            warn(
                f"Round {server.round + 1}: client '{update.client}' took no real step, so its weight is 0"
                f"{skipped if update.skipped else ', and none of its entries moved'}."
            )
        for stage, data, split, reason in update.gaps:
            missed = not_scored(update.client, stage, data, split, reason)
            stop_at(policy, missed, f"Round {server.round + 1}")
            server.note_failure(update.client, missed, stage)
    gaps = [(update.client, gap) for update in updates for gap in update.gaps if gap[2] != "train"]
    if gaps and not any(update.evaluations for update in updates):
        client, (stage, _, _, reason) = gaps[0]
        raise ScoringError(f"No model could be scored at stage {stage}; client '{client}': {reason}")
