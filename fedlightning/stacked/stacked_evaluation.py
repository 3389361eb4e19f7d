"""Scores of many modules of one class at once: their evaluation steps are taken together, as one stack of clients.

Modules qualify if `vmap` can run their step and if their other evaluation hooks are at most those around an epoch. The
first two modules of a class are scored both ways. Where the scores differ, or anything else speaks against it, modules
of the class are scored one after another, as in every other engine. That is decided once for each class, and once more
for one model that all clients share.

A client's own part in a stacked evaluation: its module's hooks around the epoch, and its metrics.

Modules of one architecture in one stack, for their evaluation: what they must have in common, and their tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import Metric, MetricCollection

from fedlightning.client.client_errors import client_failure
from fedlightning.client.evaluator import names_of
from fedlightning.client.kept import Kept
from fedlightning.client.logged_metrics import nan_where_undefined
from fedlightning.client.probes import TRANSFERS
from fedlightning.client.requests import ScoreRequest, Scores, Scoring, finish, score_in_turn, score_one
from fedlightning.client.runtime import ClientRuntime
from fedlightning.compat.lazy_clones import copy_module
from fedlightning.compat.lightning_runs import on_device, without_warnings
from fedlightning.fast import eligibility
from fedlightning.fast.eligibility import of_module
from fedlightning.fast.fast_evaluation import refusal
from fedlightning.fast.log_sheet import scalar
from fedlightning.stacked.scoring import (
    Iterated,
    MetricUpdate,
    NotStacked,
    Rows,
    ScoringStep,
    Step,
    Sums,
    can_iterate_together,
    evaluating,
    generator_states,
    pieces,
    plain_log,
    rewinding,
    same_states,
    set_generators,
    source_of,
    stacked_batch,
)
from fedlightning.stacked.stack import Contents, attributes_key, join_tree, side_by_side, take

METHODS = frozenset(("log", "log_dict", "validation_step", "test_step"))
"""A module with one of these set on the instance is scored alone."""


class Signature:
    """The tensors of a module and all that it must have in common with others to be scored in one stack.

    Args:
        module: The module.

    Attributes:
        module: The module.
        tensors: Its parameters and buffers, each once, without those of its metrics.
        key: Modules with equal keys can be scored together; `None`: this one must be scored alone. Modules of a
            federation are built from one template, so the key holds what a callback may have changed: tensors, attributes,
            replaced parts, methods set on the instance, forward hooks.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.tensors: dict[str, Tensor] = {}
        self._traits: list[Any] = []
        self._alone = not METHODS.isdisjoint(vars(module))
        self._tensor_ids: set[int] = set()
        self._contents = Contents(module)
        self._walk(module, "")
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in self.tensors.items()]
        self.key = None if self._alone else (*self._traits, *shapes)

    def _walk(self, module: nn.Module, prefix: str) -> None:
        """Add a module and all inside it.

        It reads the dicts in which torch keeps the content of a module. Public ways to them take as long as the
        module's step, and there is none to its hooks.
        """
        attributes = vars(module)
        self._traits += (prefix, type(module))
        if isinstance(module, Metric | MetricCollection):
            return
        self._traits.append(attributes_key(module, self._contents))
        # a tensor that is neither a parameter nor a buffer cannot be stacked
        self._alone = self._alone or any(isinstance(value, Tensor) for value in attributes.values())
        self._alone = self._alone or bool(attributes["_forward_hooks"]) or bool(attributes["_forward_pre_hooks"])
        for kind in ("_parameters", "_buffers"):
            for name, tensor in attributes[kind].items():
                if tensor is not None and id(tensor) not in self._tensor_ids:
                    self._tensor_ids.add(id(tensor))
                    self.tensors[prefix + name] = tensor
        for name, child in attributes["_modules"].items():
            if child is not None:
                self._walk(child, f"{prefix}{name}.")


class Models:
    """The tensors of modules that are scored together.

    Args:
        signatures: Modules with equal keys. One object again and again is a model that all clients share.
        device: Device of the stack.

    Attributes:
        template: Module whose code runs.
        names: Names of the tensors.
        shared: Whether all clients have the same tensors.
    """

    def __init__(self, signatures: Sequence[Signature], device: torch.device) -> None:
        self.template, self.names = signatures[0].module, tuple(signatures[0].tensors)
        self.shared = all(signature is signatures[0] for signature in signatures)
        self._signature, self._device, self._size = signatures[0], device, len(signatures)
        columns = zip(*(signature.tensors.values() for signature in signatures), strict=True)
        with torch.no_grad():
            if self.shared:
                self._tensors = [tensor.detach().to(device) for tensor in signatures[0].tensors.values()]
            else:
                self._tensors = [torch.stack(column).to(device) for column in columns]
        self._versions = [tensor._version for tensor in self._tensors]

    def tensors(self, rows: Sequence[int]) -> list[Tensor]:
        """Return the tensors of the clients at `rows`, ascending; or those of the one model."""
        if self.shared or len(rows) == self._size:
            return self._tensors
        chosen = side_by_side(rows)
        return [take(tensor, chosen) for tensor in self._tensors]

    def check(self) -> None:
        """Refuse steps that have left something in the module, because the next batch might depend on it."""
        if [tensor._version for tensor in self._tensors] != self._versions:
            raise NotStacked("a buffer is changed")
        if Signature(self.template).key != self._signature.key:
            raise NotStacked("an attribute of the module is changed")


Feed = list[tuple[Step, Sequence[Sequence[Tensor]], int]]
"""A client's steps: each with its outputs, `[output][row]`, and the client's row."""


@dataclass(frozen=True)
class EpochHooks:
    """Hooks around the epoch that a class of modules has.

    Attributes:
        before: Hooks before the first batch.
        after: Hooks after the last batch.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]


def hooks_of(kind: type[LightningModule], testing: bool) -> EpochHooks:
    """Return the hooks around the epoch of a class when it is validated, or tested."""
    name, hooks = names_of(testing).hook, of_module(kind)
    before, after = (f"on_{name}_start", f"on_{name}_epoch_start"), (f"on_{name}_epoch_end", f"on_{name}_end")
    return EpochHooks(tuple(filter(hooks.__contains__, before)), tuple(filter(hooks.__contains__, after)))


def scores_of(
    module: LightningModule,
    hooks: EpochHooks,
    feed: Feed,
    logged: dict[str, float | str],
    metric_paths: Collection[str],
    device: torch.device,
) -> dict[str, float]:
    """Return what a client's module has logged at the end of the epoch."""
    noted = _Noted()
    with on_device(module, device), evaluating(module, noted.log), nan_where_undefined(module):
        for hook in hooks.before:
            getattr(module, hook)()
        metrics = _feed(module, feed)
        values = {name: _value(module, value) for name, value in logged.items()}
        for hook in hooks.after:
            noted.hook = hook
            getattr(module, hook)()
        values |= {name: _value(module, value) for name, value in logged.items()}
        for path in metric_paths:
            metrics[path].reset()
    return values | noted.values


def _feed(module: LightningModule, feed: Feed) -> dict[str, Metric]:
    metrics: dict[str, Any] = {}
    for step, outputs, row in feed:
        for event in step.events:
            path = event.metric
            if path is None:
                continue
            if path not in metrics:
                metrics[path] = module.get_submodule(path)
            if isinstance(event, MetricUpdate):
                tensors = [output[row] for output in outputs[event.first : event.end]]
                call = metrics[path] if event.forward else metrics[path].update
                if event.positional:
                    call(*tensors)
                else:
                    args, kwargs = join_tree(event.skeleton, tensors)
                    call(*args, **kwargs)
    return metrics


def _value(module: LightningModule, value: float | str) -> float:
    if not isinstance(value, str):
        return value
    computed: Any = module.get_submodule(value).compute()  # type: ignore[operator]
    if not isinstance(computed, Tensor):
        raise NotStacked(f"the metric {value!r} does not compute a tensor")
    return float(computed)


class _Noted:
    """Collects what a module logs in its hooks."""

    def __init__(self) -> None:
        self.hook = ""
        self.values: dict[str, float] = {}

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not self.hook.endswith("_epoch_end") or name in self.values:
            raise NotStacked(f"self.log({name!r}) is called before the epoch, or twice after it")
        if plain_log(self.hook, name, *args, **kwargs).rule.logger:
            self.values[name] = float(scalar(name, value, NotStacked))


Answer = TypeVar("Answer")
Kind = tuple[type, bool, str]
"""A class, whether it is tested (or validated), and whether its models are `own` or `shared`."""
ALIKE = 1e-2
"""Tolerance, relative and absolute, between the scores of both ways: far above rounding, far below a misreading."""
MAX_OUTPUT_BYTES = 2**28
"""Limit of the step outputs that are kept until metrics are updated, in bytes."""
ARITHMETIC = {"own": 2**23, "shared": 2**26}
"""Floating-point operations of a client's step on a CPU above which stacking costs more than the calls it saves.

With `own` models it reads all their weights at once; with a `shared` one its activations are larger than a cache. Not
measured in seconds, because a resumed run must decide as before.
"""
MAX_OPERATIONS = 2**28
"""Limit of floating-point operations in a step of a stack."""
REFUSED = frozenset(
    ("setup", "teardown", "configure_model", *TRANSFERS, "on_validation_batch_start", "on_validation_batch_end",
     "on_test_batch_start", "on_test_batch_end")
)  # fmt: skip
"""Hooks of modules that are scored one by one."""


class StackedEvaluation:
    """Carries out scoring tasks for many clients at once.

    Args:
        runner: Its scorer is what the results must agree with.
    """

    def __init__(self, runner: ClientRuntime) -> None:
        self._runner = runner
        self._decided: dict[Kind, int] = {}  # how many take a step together at most; 0: scored one by one

    def answers(self, scorings: Sequence[Scoring[Answer]], size: int, of_clients: bool) -> Iterator[Answer]:
        """Yield the answers of scoring tasks, in their order."""
        decided = [at_most for (_, _, whose), at_most in self._decided.items() if whose == "own"]
        if of_clients and decided and not any(decided):
            yield from (score_in_turn(self._runner, scoring) for scoring in scorings)
            return
        scores_by_task: list[list[Scores]] = [[] for _ in scorings]
        requests = ((place, request) for place, scoring in enumerate(scorings) for request in next(scoring))
        try:
            while chunk := list(islice(requests, size)):
                for (place, _), scores in zip(chunk, self.scores([request for _, request in chunk]), strict=True):
                    scores_by_task[place].append(scores)
            for scoring, scores_of_it in zip(scorings, scores_by_task, strict=True):
                yield finish(scoring, scores_of_it)
        finally:
            for scoring in scorings:
                scoring.close()

    def scores(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Return the scores of each request; requests are carried out together where that is possible."""
        groups: dict[Any, list[int]] = {}
        signatures: dict[int, Signature] = {}
        often = Counter(id(request.module) for request in requests)
        for place, request in enumerate(requests):
            whose = ("own", "shared") if often[id(request.module)] > 1 else ("own",)
            groups.setdefault(self._group(request, whose, signatures) or place, []).append(place)
        scores_by_place: dict[int, Scores] = {}
        for key, places in groups.items():
            members = [requests[place] for place in places]
            if isinstance(key, int) or len(members) == 1:
                scored = [score_one(self._runner, member) for member in members]
            else:
                scored = self._together(key[:2], members, [signatures[id(member.module)] for member in members])
            scores_by_place.update(zip(places, scored, strict=True))
        return [scores_by_place[place] for place in range(len(requests))]

    def _group(
        self, request: ScoreRequest, whose: Iterable[str], signatures: dict[int, Signature]
    ) -> tuple[Any, ...] | None:
        """Return a key: requests with equal keys can be scored together. `None`: the request must be scored alone."""
        kind, scored_fast = type(request.module), self._runner.settings.local_loop != "trainer"
        steps = of_module(kind)
        testing = request.split == "test" and "test_step" in steps
        refused = all(self._decided.get((kind, testing, which)) == 0 for which in whose)
        if refused or not (testing or "validation_step" in steps):
            return None
        unfit = eligibility.find_loader_refusal(request.loader, self._limit(testing)) is not None
        if not scored_fast or unfit or not can_iterate_together(request.loader):
            return None
        signature = signatures.get(id(request.module))
        if signature is None:
            signature = signatures[id(request.module)] = Signature(self._runner.blueprint.convert(request.module))
        return None if signature.key is None else (kind, testing, signature.key)

    def _limit(self, testing: bool) -> Any:
        return names_of(testing).limit(self._runner.blueprint.trainer)

    def _together(
        self, kind: tuple[type, bool], members: Sequence[ScoreRequest], signatures: Sequence[Signature]
    ) -> list[Scores]:
        """Score the members in one stack if their class allows it, else one by one."""
        second = next((place for place, signature in enumerate(signatures) if signature is not signatures[0]), None)
        key = (*kind, "shared" if second is None else "own")
        if key not in self._decided:
            self._decided[key] = self._agrees((members[0], members[second or 1]), key)
        if self._decided[key]:
            rewind = rewinding(member.loader for member in members)
            try:
                return self._stacked(members, signatures, kind[1], self._decided[key])
            except BaseException as error:  # what the user's code raises here, it raises again when scored alone
                if not isinstance(error, NotStacked):
                    client_failure(error)
                self._decided[key] = 0
                rewind()
        return [score_one(self._runner, member) for member in members]

    def _agrees(self, members: Sequence[ScoreRequest], kind: Kind) -> int:
        """Return the number of modules that can be evaluated as one stack, or 0 if they must be scored one by one.

        It is 0 if copies of the members have other scores in a stack than alone, or if a stack does not pay. Nothing is
        changed, so a resumed run can decide once more.
        """
        for member in members:
            if REFUSED & of_module(type(member.module)):
                return 0
            if refusal(member.module, member.loader, self._runner.blueprint.trainer, kind[1]) is not None:
                return 0
        rewind = rewinding(member.loader for member in members)
        try:
            signatures = {
                id(module): Signature(copy_module(module)) for module in (member.module for member in members)
            }
            apart = [signatures[id(member.module)] for member in members]
            copies = [
                replace(member, module=signature.module) for member, signature in zip(members, apart, strict=True)
            ]
            stacked = self._stacked(copies, apart, kind[1], len(copies))
            with FlopCounterMode(display=False) as counter:
                alone = [score_one(self._runner, member) for member in copies]
            batches = sum(eligibility.num_batches(member.loader, self._limit(kind[1])) for member in members)
            operations = counter.get_total_flops() // batches
            if not all(map(alike, stacked, alone)):
                return 0
            if self._runner.blueprint.device.type != "cpu":
                return MAX_OPERATIONS
            return 0 if operations > ARITHMETIC[kind[2]] else MAX_OPERATIONS // max(operations, 1)
        except BaseException as error:
            if not isinstance(error, NotStacked):
                client_failure(error)
            return 0
        finally:
            rewind()

    def _stacked(
        self, members: Sequence[ScoreRequest], signatures: Sequence[Signature], testing: bool, at_most: int
    ) -> list[Scores]:
        """Score the members in one stack; `at_most` so many take a step together."""
        limit, device = self._limit(testing), self._runner.blueprint.device
        mode = self._runner.settings.trainer_arguments.get("inference_mode", True)
        scored: list[Scores] = []
        drawn = generator_states(device)
        kept = {signature: Kept(signature.module) for signature in dict.fromkeys(signatures)}
        try:
            models = Models(signatures, device)
            with torch.inference_mode() if mode else torch.no_grad(), without_warnings():
                sources = [
                    source_of(member.loader, eligibility.num_batches(member.loader, limit), member.seed)
                    for member in members
                ]
                sums, feeds = self._steps(models, sources, testing, at_most)
                models.check()
                hooks = hooks_of(type(signatures[0].module), testing)
                for signature, feed, logged in zip(signatures, feeds, sums.values(), strict=True):
                    has_more = bool(feed or hooks.before or hooks.after)
                    # without metrics, only numbers are logged
                    scores = (
                        scores_of(signature.module, hooks, feed, logged, sums.metrics, device) if has_more else logged
                    )
                    kept[signature].put_back()
                    scored.append(cast(Scores, scores))
            if not same_states(drawn, generator_states(device)):
                raise NotStacked("random numbers are drawn")
        finally:
            set_generators(drawn, device)
            for member in kept.values():
                member.put_back()
        return [scores or loss for scores, loss in zip(scored, sums.losses(), strict=True)]

    def _steps(
        self, stack: Models, sources: Sequence[Rows | Iterated], testing: bool, at_most: int
    ) -> tuple[Sums, list[Feed]]:
        """Take all steps. Return what was logged, and for each client what its metrics must be updated with."""
        precision, device = self._runner.blueprint.precision, self._runner.blueprint.device
        step = ScoringStep(stack.template, names_of(testing), precision, stack.names, stack.shared)
        sums, num_bytes = Sums(len(sources)), 0
        feeds: list[Feed] = [[] for _ in sources]
        with on_device(stack.template, device), step.attached():
            for index in range(max(source.count for source in sources)):
                turns: dict[Any, list[int]] = {}
                for row, source in enumerate(sources):
                    if index < source.count:
                        turns.setdefault(source.shape(index), []).append(row)
                for rows in pieces(turns.values(), sources, index, at_most):
                    batch = precision.convert_input(stacked_batch([sources[row] for row in rows], index, device))
                    result = step(stack.tensors(rows), batch, len(rows), index)
                    sums.add(rows, result)
                    if any(event.metric is not None for event in result.events):
                        num_bytes += sum(output.numel() * output.element_size() for output in result.outputs)
                        outputs = [output.unbind(0) for output in result.outputs]
                        for place, row in enumerate(rows):
                            feeds[row].append((result, outputs, place))
                if num_bytes > MAX_OUTPUT_BYTES:
                    raise NotStacked("metrics are fed with too much")
        return sums, feeds


def alike(scores: Scores, expected: Scores) -> bool:
    """Return True if two sets of scores differ by rounding at most."""
    if list(scores) != list(expected):
        return False
    pairs = [(scores[name], expected[name]) for name in scores]
    return all(math.isclose(a, b, rel_tol=ALIKE, abs_tol=ALIKE) or (a != a and b != b) for a, b in pairs)
