"""One phase of local training for a stack of clients: every client takes exactly the steps it would take alone.

Clients are independent, so only the order of a client's own steps matters. In each turn those whose next batches have
the same shape step together, the smaller batches first: after the ragged last batches, the full batches of all clients
meet again. A client that is done leaves. The stack is ordered by work, so the clients that continue are a slice of it.
Nothing is padded. The group of clients that step together is determined for as many turns as it stays the same.

On a CPU no more clients step together than a core's cache has room for: one part of them takes all its turns, then the
next. A model so large that this is one client is stepped without a map, by the kernels of a single model.

Gradient corrections of algorithms on a stack: `correct_gradient`, mapped over the clients.

A callback writes its correction for one client. Where its payload and state are tensors, they are stacked and the
correction is mapped. Where it reads something that cannot be stacked (the client's id, plain values that differ from
client to client), it is called for one client after another, with the same result.

Work of a callback inside a fit, on a stack of clients: the counterpart of its Lightning hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.func import vmap

from fedlightning.client.client import Client
from fedlightning.client.client_errors import client_failure
from fedlightning.client.runtime import ClientRuntime
from fedlightning.client.trainer_context import select_active_callbacks
from fedlightning.compat.lightning_runs import takes_index
from fedlightning.contract import FederatedCallback, GradientContext, Phase, Stackable
from fedlightning.stacked.batches import Gatherer
from fedlightning.stacked.logs import StackedLogs
from fedlightning.stacked.optimizers import RULES, Settings, StackedOptimizer
from fedlightning.stacked.stack import (
    ClientDraws,
    Rows,
    Stack,
    join_tree,
    named_tensors,
    put,
    side_by_side,
    split_tree,
    take,
)
from fedlightning.stacked.step import NoLossError, Place, StackedStep, StepResult, clip, gradients
from fedlightning.stacked.trainees import Trainee
from fedlightning.stacked.vectorizable import Finding


@dataclass
class Turn:
    """A step that some clients of a stack take together.

    Attributes:
        numbers: Their rows, ascending.
        batch: Their batches, stacked.
        place: Position of these batches in the clients' work.
        settings: The optimizer's settings per parameter group, for all of them or for each.
        parameters: By name, stacked values.
        gradients: By name, stacked gradients before any correction. A parameter that no loss reaches has none.
    """

    numbers: Sequence[int]
    batch: Any
    place: Place
    settings: Sequence[Settings]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    gradients: Mapping[str, Tensor] = field(default_factory=dict)

    def _places(self, chosen: Sequence[int]) -> list[int]:
        return [list(self.numbers).index(number) for number in chosen]

    def batch_of(self, chosen: Sequence[int]) -> Any:
        """Return the batches of some of these clients."""
        if len(chosen) == len(self.numbers):
            return self.batch
        tensors, skeleton = split_tree(self.batch)
        return join_tree(skeleton, [tensor[self._places(chosen)] for tensor in tensors])

    def settings_of(self, group: int, chosen: Sequence[int]) -> Settings:
        """Return the settings of a parameter group for some of these clients."""
        settings = self.settings[group]
        if isinstance(settings, Mapping) or len(chosen) == len(self.numbers):
            return settings
        return [settings[place] for place in self._places(chosen)]

    def rates(self, group: int, chosen: Sequence[int]) -> list[float]:
        """Return the learning rates of a parameter group for some of these clients."""
        settings = self.settings_of(group, chosen)
        return [
            float(group_settings["lr"])
            for group_settings in ([settings] * len(chosen) if isinstance(settings, Mapping) else settings)
        ]


class StackHooks:
    """Base class that does nothing. One object serves one phase of one stack."""

    def before_step(self, turn: Turn) -> None:
        """Act when the clients' gradients are there and no parameter has moved yet."""

    def after_step(self, turn: Turn) -> None:
        """Act after the clients' optimizers have stepped."""

    def finish(self) -> None:
        """Act when the phase is over; the visits continue one by one."""


class _PerClientError(Exception):
    """The correction reads what only a single client has."""


class _StackContext:
    """The :class:`~fedlightning.contract.GradientContext` of a mapped correction, without what only one client has."""

    def __init__(self, anchor: Mapping[str, Tensor], payload: Any, state: Any, lr: Any, phase: str) -> None:
        self.anchor, self.payload, self.state, self.lr, self.phase = anchor, payload, state, lr, phase

    def __getattr__(self, name: str) -> Any:
        raise _PerClientError(name)


class Correction:
    """One callback's correction for the clients of a stack.

    Args:
        callback: Callback with a gradient correction.
        clients: Clients in the order of the stack's rows.
        names: Names of the parameters that train.
        phase: Name of the phase.
        device: Device of the stack.
    """

    def __init__(
        self,
        callback: FederatedCallback,
        clients: Sequence[Client],
        names: Sequence[str],
        phase: str,
        device: torch.device,
    ) -> None:
        self.callback, self.clients, self.phase, self.device = callback, clients, phase, device
        self.anchors = [
            {name: anchor for name in names if (anchor := client.anchor(name, device)) is not None}
            for client in clients
        ]
        trees = [(anchor, *self._own(client)) for anchor, client in zip(self.anchors, clients, strict=True)]
        self._stacked = stack_trees(trees, device)

    def _own(self, client: Client) -> tuple[Any, Any]:
        key = self.callback.key
        return client.message.extras.get(key, {}), client.state.get(key, {})

    @torch.no_grad()
    def __call__(
        self,
        rows: Rows,
        numbers: Sequence[int],
        parameters: Mapping[str, Tensor],
        raw: Mapping[str, Tensor],
        rates: Mapping[str, Sequence[float]],
    ) -> dict[str, Tensor]:
        """Return corrected gradients."""
        if self._stacked is not None:
            try:
                return self._mapped(rows, parameters, raw, rates)
            except (_PerClientError, RuntimeError, TypeError):
                self._stacked = None  # cannot be mapped; an error of the correction itself is raised again below
        return self._one_by_one(numbers, parameters, raw, rates)

    def _mapped(
        self,
        rows: Rows,
        parameters: Mapping[str, Tensor],
        raw: Mapping[str, Tensor],
        rates: Mapping[str, Sequence[float]],
    ) -> dict[str, Tensor]:
        assert self._stacked is not None
        tensors, skeleton = self._stacked
        shared = {name: lr[0] for name, lr in rates.items() if all(value == lr[0] for value in lr)}
        own_rates = {name: torch.tensor(lr, device=self.device) for name, lr in rates.items() if name not in shared}

        def one(
            values: dict[str, Tensor], grads: dict[str, Tensor], tensors: list[Tensor], own_rates: dict[str, Tensor]
        ) -> Any:
            anchor, payload, state = join_tree(skeleton, tensors)
            lrs: dict[str, Any] = {**shared, **own_rates}
            corrected = {}
            for name, gradient in grads.items():
                near = {name: anchor[name]} if name in anchor else {}
                context = cast(GradientContext, _StackContext(near, payload, state, lrs[name], self.phase))
                new = self.callback.correct_gradient(context, name, values[name], gradient)
                corrected[name] = new.to(gradient.dtype)
            return corrected

        values = {name: parameters[name] for name in raw}
        result: dict[str, Tensor] = vmap(one)(values, dict(raw), [take(leaf, rows) for leaf in tensors], own_rates)
        return result

    def _one_by_one(
        self,
        numbers: Sequence[int],
        parameters: Mapping[str, Tensor],
        raw: Mapping[str, Tensor],
        rates: Mapping[str, Sequence[float]],
    ) -> dict[str, Tensor]:
        corrected = {name: torch.empty_like(gradient) for name, gradient in raw.items()}
        for place, number in enumerate(numbers):
            client = self.clients[number]
            payload, state = self._own(client)
            self.callback._client = client
            try:
                for name, gradient in raw.items():
                    near = self.anchors[number]
                    context = GradientContext(
                        anchor={name: near[name]} if name in near else {},
                        payload=payload,
                        state=state,
                        client=client.id,
                        num_samples=client.num_samples,
                        lr=rates[name][place],
                        phase=self.phase,
                    )
                    new = self.callback.correct_gradient(context, name, parameters[name][place], gradient[place])
                    corrected[name][place] = new.to(gradient.dtype)
            finally:
                self.callback._client = None
        return corrected


def stack_trees(trees: Sequence[Any], device: torch.device) -> tuple[list[Tensor], Any] | None:
    """Return trees of tensors and plain values as one tree of stacked tensors; `None` if they are not alike."""
    parts = [split_tree(tree) for tree in trees]
    first_tensors, skeleton = parts[0]
    for others, form in parts[1:]:
        if not _alike(form, skeleton) or any(a.shape != b.shape for a, b in zip(others, first_tensors, strict=True)):
            return None
    return [_stack(group, device) for group in zip(*(part[0] for part in parts), strict=True)], skeleton


def _stack(group: Sequence[Tensor], device: torch.device) -> Tensor:
    """Stack tensors on a client axis; where all clients hold the same tensor, the result is a view of it."""
    if all(tensor is group[0] for tensor in group):
        return group[0].to(device).expand(len(group), *group[0].shape)
    return torch.stack(list(group)).to(device)


def _alike(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError, TypeError):
        return False


CACHE = 2**24
"""Bytes that a step on a CPU may touch.

With many more they come from memory, and a model that needs as much alone gains nothing from a stack. With fewer, the
calls of a step cost more than caches save.
"""


class StackedFit:
    """Trains the clients of a stack through one phase, in place.

    Args:
        runner: The client side of the federation: its settings and callbacks, some of which work inside a fit.
        phase: The phase.
        finding: What the check has found out about a step.
        module: Module of one of the clients; its code runs.
        stack: The clients' tensors.
        trainees: The clients, in the order of the rows.
        optimizer: Optimizer that `configure_optimizers` made for `module`: the parameters that it moves, in their
            groups.
        gatherer: Stacks batches.
        watching: Watches what is done for one client alone.
    """

    def __init__(
        self,
        runner: ClientRuntime,
        phase: Phase,
        finding: Finding,
        module: LightningModule,
        stack: Stack,
        trainees: Sequence[Trainee],
        optimizer: torch.optim.Optimizer,
        gatherer: Gatherer,
        watching: Callable[[list[str]], AbstractContextManager[None]],
    ) -> None:
        arguments, callbacks = runner.settings.trainer_arguments, runner.callbacks
        self.module, self.stack, self.trainees = module, stack, trainees
        self.gatherer, self.watching = gatherer, watching
        self.clip_value = arguments.get("gradient_clip_val")
        self.clip_algorithm = arguments.get("gradient_clip_algorithm") or "norm"
        context, draws = runner.blueprint.precision.train_step_context, ClientDraws() if finding.draws else None
        self.step = StackedStep(module, context, takes_index(module.training_step), draws, stack.shared)
        self.step.watch.looked = finding.uses_index
        self.logs = StackedLogs(stack.size)
        parameters, _ = named_tensors(module)
        by_id = {id(parameter): name for name, parameter in parameters.items()}
        self.group_of: dict[str, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            self.group_of |= {by_id[id(p)]: index for p in group["params"] if p.requires_grad and id(p) in by_id}
        self.names = [name for name in stack.parameters if name in self.group_of]
        self.optimizer: StackedOptimizer = RULES[type(optimizer)](
            {name: stack.tensors[name] for name in self.names}, stack.size
        )
        self.shared_recipe = all(trainee.recipe is trainees[0].recipe for trainee in trainees)
        clients = [trainee.client for trainee in trainees]
        self.device = stack.device
        limited = finding.bytes_of_step and self.device.type == "cpu"
        self._most = max(1, CACHE // finding.bytes_of_step) if limited else stack.size
        self.corrections = [
            Correction(callback, clients, self.names, phase.name, self.device)
            for callback in select_active_callbacks(callbacks.correctors(), phase)
        ]
        stackable = [callback for callback in callbacks if isinstance(callback, Stackable) and callback.is_stackable]
        self.hooks: list[StackHooks] = [callback.stack_hooks(self) for callback in stackable]
        self._failed = False
        self._steps = np.zeros(stack.size, dtype=np.int64)
        self._rates: dict[tuple[str, ...], np.ndarray] = {}

    def run(self) -> None:
        """Train all clients to the end of the phase. The results are in the trainees."""
        for row, trainee in enumerate(self.trainees):
            self._guarded_start(row, trainee)
        with self.step.attached():
            while (alike := self._next()) is not None:
                self._run(*alike)
        if (name := self.stack.find_written()) is not None:
            raise RuntimeError(
                f"'{name}' is frozen and the same for all clients, so that a stack holds it once, and a later step than the "
                "first one wrote into it. Use engine='sequential' or 'processes'."
            )
        for hooks in self.hooks:
            hooks.finish()
        for row, (trainee, metrics) in enumerate(zip(self.trainees, self.logs.metrics(), strict=True)):
            trainee.metrics, trainee.steps = metrics, int(self._steps[row])
            for names, totals in self._rates.items():
                total = float(totals[row])
                for name in names if total else ():
                    trainee.lr_sums[name] = trainee.lr_sums.get(name, 0.0) + total
            trainee.gradient_weights = self.optimizer.gradient_weights(row, trainee.lr_sums)

    def _guarded_start(self, row: int, trainee: Trainee) -> None:
        try:
            self.logs.start_epoch(row)
            with self.watching([trainee.client.id]):
                trainee.start_epoch()
        except BaseException as error:
            self._fail(trainee, client_failure(error))

    def _fail(self, trainee: Trainee, error: BaseException) -> None:
        trainee.error, trainee.done = error, True
        self._failed = True

    def _next(self) -> tuple[list[int], int, int] | None:
        """Return the clients that step next, the samples in their batches, and their turns; `None` if all are done."""
        groups: dict[Any, list[int]] = {}
        for row, trainee in enumerate(self.trainees):
            if trainee.done:
                continue
            try:
                with self.watching([trainee.client.id]):
                    shape = trainee.source.peek()
            except BaseException as error:  # of this client's data
                self._fail(trainee, client_failure(error))
                continue
            place = trainee.place() if self.step.watch.looked else None
            groups.setdefault((shape, place), []).append(row)
        if not groups:
            return None
        key = min(groups, key=lambda key: key[0][0])
        numbers = groups[key]
        parts = -(-len(numbers) // self._most)
        numbers = numbers[: -(-len(numbers) // parts)]
        turns = min(self.trainees[number].ahead for number in numbers) if self.shared_recipe else 1
        return numbers, key[0][0], turns

    def _run(self, numbers: list[int], size: int, turns: int) -> None:
        """Take clients through turns of the same shape; stop where one fails or a step first reads its position."""
        trainees = [self.trainees[number] for number in numbers]
        looked, taken = self.step.watch.looked, 0
        with closing(self.gatherer.batches([trainee.source for trainee in trainees], turns)) as batches:
            for batch in batches:
                self._try(numbers, batch, size, taken)
                taken += 1
                if self._failed or self.step.watch.looked != looked:
                    break
        self._failed = False
        for number in numbers:
            self._advance(number, taken)

    def _advance(self, number: int, turns: int) -> None:
        trainee = self.trainees[number]
        trainee.attempts += turns
        trainee.batch += turns
        if not self.shared_recipe:
            trainee.recipe.tick("step", trainee.batch)
        if trainee.batch == trainee.batches or trainee.attempts >= trainee.expected:
            trainee.epoch += 1
            if not self.shared_recipe:
                trainee.recipe.tick("epoch", trainee.epoch)
            if trainee.attempts >= trainee.expected or trainee.error is not None:
                trainee.done = True
            else:
                self._guarded_start(number, trainee)

    def _try(self, numbers: list[int], batch: Any, size: int, turn: int) -> None:
        """Take a step. If it raises, repeat it client by client, so that only the one whose data are bad fails."""
        kept = {name: self.stack.tensors[name][numbers] for name in self.stack.buffers}
        try:
            self._take_step(numbers, batch, size, turn)
        except NoLossError:
            return
        except BaseException as caught:
            error = client_failure(caught)
            for name, value in kept.items():
                self.stack.tensors[name][numbers] = value
            if len(numbers) == 1:
                self._fail(self.trainees[numbers[0]], error)
                return
            for place, number in enumerate(numbers):
                self._try([number], self.gatherer.one(batch, place), size, turn)

    def _take_step(self, numbers: list[int], batch: Any, size: int, turn: int) -> None:
        rows = side_by_side(numbers)
        tensors, training = self._tensors(rows)
        place = self.trainees[numbers[0]].place(turn)
        draws = [self.trainees[number].source.generator for number in numbers] if self.step.draws else []
        result: StepResult = self.step(tensors, batch, place, draws)
        self.logs.add(numbers, result.logged, self.step.log_calls, size)
        if not isinstance(rows, slice):
            for name, value in zip(self.stack.buffers, tensors[len(self.stack.parameters) :], strict=True):
                put(self.stack.tensors[name], rows, value)
        raw = gradients(result.losses, [training[name] for name in self.names])
        grads = {name: gradient for name, gradient in zip(self.names, raw, strict=True) if gradient is not None}
        del result, raw
        settings = self._settings(numbers)
        moment = Turn(numbers, batch, place, settings, training, grads)
        for hooks in self.hooks:
            hooks.before_step(moment)
        if self.corrections:
            grads = self._corrected(rows, numbers, training, grads, settings)
        if self.clip_value:
            clip(grads.values(), self.clip_value, self.clip_algorithm)
        with torch.no_grad():
            for name, gradient in grads.items():
                self.optimizer.step(name, rows, gradient, settings[self.group_of[name]])
            for hooks in self.hooks:
                hooks.after_step(moment)
        if grads:
            self._count(rows, grads, settings)

    def _corrected(
        self,
        rows: Rows,
        numbers: Sequence[int],
        training: Mapping[str, Tensor],
        grads: dict[str, Tensor],
        settings: Sequence[Settings],
    ) -> dict[str, Tensor]:
        """Return the gradients after the corrections of all callbacks."""
        rates = {name: self._rates_of(settings[self.group_of[name]], numbers) for name in grads}
        values = {name: training[name].detach() for name in grads}
        for correction in self.corrections:
            grads = correction(rows, numbers, values, grads, rates)
        return grads

    def _tensors(self, rows: Rows) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the step's tensors, and those that train: views of the stack where the rows are a slice."""
        tensors, training = [], {}
        for name in (*self.stack.parameters, *self.stack.buffers):
            value = self.stack.take(name, rows).detach()
            if name in self.group_of:
                training[name] = value.requires_grad_()
            tensors.append(value)
        return tensors, training

    def _settings(self, numbers: Sequence[int]) -> list[Settings]:
        """Return the optimizer's settings by parameter group: one mapping if all clients share it, else one each."""
        if self.shared_recipe:
            return list(self.trainees[0].recipe.optimizer.param_groups)
        each = [self.trainees[number].recipe.optimizer.param_groups for number in numbers]
        return [list(groups) for groups in zip(*each, strict=True)]

    @staticmethod
    def _rates_of(settings: Settings, numbers: Sequence[int]) -> list[float]:
        """Return the learning rate of each of these clients."""
        if isinstance(settings, Mapping):
            return [float(settings["lr"])] * len(numbers)
        return [float(group["lr"]) for group in settings]

    def _count(self, rows: Rows, grads: Mapping[str, Tensor], settings: Sequence[Settings]) -> None:
        """Count a step and add up its learning rates."""
        self._steps[rows] += 1
        for index, of_group in enumerate(settings):
            names = tuple(name for name in grads if self.group_of[name] == index)
            if names:
                if names not in self._rates:
                    self._rates[names] = np.zeros(self.stack.size)
                rate = of_group["lr"] if isinstance(of_group, Mapping) else [float(group["lr"]) for group in of_group]
                self._rates[names][rows] += rate
