"""Scores of many modules of one class at once: their evaluation steps are taken together, as one stack of clients.

Modules qualify if `vmap` can run their step and if their other evaluation hooks are at most those around an epoch. The
first two modules of a class are scored both ways. Where the scores differ, or anything else speaks against it, modules
of the class are scored one after another, as in every other engine. That is decided once for each class, and once more
for one model that all clients share.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar, cast

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedlightning.client.client_errors import client_failure
from fedlightning.client.evaluator import names_of
from fedlightning.client.kept import Kept
from fedlightning.client.probes import TRANSFERS
from fedlightning.client.requests import ScoreRequest, Scores, Scoring, finish, score_in_turn, score_one
from fedlightning.client.runtime import LocalRunner
from fedlightning.compat.attached import on_device
from fedlightning.compat.quiet import without_warnings
from fedlightning.fast import eligibility as fast_refusals
from fedlightning.fast.eligibility import of_module
from fedlightning.fast.evaluation import refusal
from fedlightning.stacked.scoring.clients import Feed, hooks_of, scores_of
from fedlightning.stacked.scoring.log_limits import NotStacked
from fedlightning.stacked.scoring.models import Models, Signature
from fedlightning.stacked.scoring.sources import (
    Iterated,
    Rows,
    can_iterate_together,
    generator_states,
    pieces,
    rewinding,
    same_states,
    set_generators,
    source_of,
    stacked_batch,
)
from fedlightning.stacked.scoring.step import ScoringStep
from fedlightning.stacked.scoring.sums import Sums

Answer = TypeVar("Answer")
Kind = tuple[type, bool, str]
"""A class, whether it is tested (or validated), and whether its models are `own` or `shared`."""
ALIKE = 1e-2
"""Tolerance, relative and absolute, between the scores of both ways: far above rounding, far below a misreading."""
HELD = 2**28
"""Limit of the step outputs that are kept until metrics are updated, in bytes."""
ARITHMETIC = {"own": 2**23, "shared": 2**26}
"""Floating-point operations of a client's step on a CPU above which stacking costs more than the calls it saves.

With `own` models it reads all their weights at once; with a `shared` one its activations are larger than a cache. Not
measured in seconds, because a resumed run must decide as before.
"""
TOGETHER = 2**28
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

    def __init__(self, runner: LocalRunner) -> None:
        self._runner = runner
        self._decided: dict[Kind, int] = {}  # how many take a step together at most; 0: scored one by one

    def answers(self, scorings: Sequence[Scoring[Answer]], size: int, own: bool) -> Iterator[Answer]:
        """Yield the answers of scoring tasks, in their order."""
        known = [at_most for (_, _, whose), at_most in self._decided.items() if whose == "own"]
        if own and known and not any(known):
            yield from (score_in_turn(self._runner, scoring) for scoring in scorings)
            return
        found: list[list[Scores]] = [[] for _ in scorings]
        requests = ((place, one) for place, scoring in enumerate(scorings) for one in next(scoring))
        try:
            while chunk := list(islice(requests, size)):
                for (place, _), scores in zip(chunk, self.scores([one for _, one in chunk]), strict=True):
                    found[place].append(scores)
            for scoring, scores_of_it in zip(scorings, found, strict=True):
                yield finish(scoring, scores_of_it)
        finally:
            for scoring in scorings:
                scoring.close()

    def scores(self, requests: Sequence[ScoreRequest]) -> list[Scores]:
        """Return the scores of each request; requests are carried out together where that is possible."""
        groups: dict[Any, list[int]] = {}
        signatures: dict[int, Signature] = {}
        often = Counter(id(one.module) for one in requests)
        for place, one in enumerate(requests):
            whose = ("own", "shared") if often[id(one.module)] > 1 else ("own",)
            groups.setdefault(self._group(one, whose, signatures) or place, []).append(place)
        found: dict[int, Scores] = {}
        for key, places in groups.items():
            members = [requests[place] for place in places]
            if isinstance(key, int) or len(members) == 1:
                scored = [score_one(self._runner, member) for member in members]
            else:
                scored = self._together(key[:2], members, [signatures[id(member.module)] for member in members])
            found.update(zip(places, scored, strict=True))
        return [found[place] for place in range(len(requests))]

    def _group(
        self, one: ScoreRequest, whose: Iterable[str], signatures: dict[int, Signature]
    ) -> tuple[Any, ...] | None:
        """Return a key: requests with equal keys can be scored together. `None`: the request must be scored alone."""
        kind, scored_fast = type(one.module), self._runner.settings.local_loop != "trainer"
        steps = of_module(kind)
        testing = one.split == "test" and "test_step" in steps
        refused = all(self._decided.get((kind, testing, which)) == 0 for which in whose)
        if refused or not (testing or "validation_step" in steps):
            return None
        unfit = fast_refusals.of_loader(one.loader, self._limit(testing)) is not None
        if not scored_fast or unfit or not can_iterate_together(one.loader):
            return None
        signature = signatures.get(id(one.module))
        if signature is None:
            signature = signatures[id(one.module)] = Signature(self._runner.blueprint.convert(one.module))
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
            rewind = rewinding(one.loader for one in members)
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
        for one in members:
            if REFUSED & of_module(type(one.module)):
                return 0
            if refusal(one.module, one.loader, self._runner.blueprint.trainer, kind[1]) is not None:
                return 0
        rewind = rewinding(one.loader for one in members)
        try:
            signatures = {id(module): Signature(copy.deepcopy(module)) for module in (one.module for one in members)}
            apart = [signatures[id(one.module)] for one in members]
            copies = [replace(one, module=signature.module) for one, signature in zip(members, apart, strict=True)]
            stacked = self._stacked(copies, apart, kind[1], len(copies))
            with FlopCounterMode(display=False) as counter:
                alone = [score_one(self._runner, one) for one in copies]
            batches = sum(fast_refusals.num_batches(one.loader, self._limit(kind[1])) for one in members)
            operations = counter.get_total_flops() // batches
            if not all(map(alike, stacked, alone)):
                return 0
            if self._runner.blueprint.device.type != "cpu":
                return TOGETHER
            return 0 if operations > ARITHMETIC[kind[2]] else TOGETHER // max(operations, 1)
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
        found: list[Scores] = []
        drawn = generator_states(device)
        kept = {signature: Kept(signature.module) for signature in dict.fromkeys(signatures)}
        try:
            models = Models(signatures, device)
            with torch.inference_mode() if mode else torch.no_grad(), without_warnings():
                sources = [
                    source_of(one.loader, fast_refusals.num_batches(one.loader, limit), one.seed) for one in members
                ]
                sums, feeds = self._steps(models, sources, testing, at_most)
                models.check()
                hooks = hooks_of(type(signatures[0].module), testing)
                for signature, feed, logged in zip(signatures, feeds, sums.values(), strict=True):
                    own = bool(feed or hooks.before or hooks.after)
                    # without metrics, only numbers are logged
                    scores = scores_of(signature.module, hooks, feed, logged, sums.metrics, device) if own else logged
                    kept[signature].put_back()
                    found.append(cast(Scores, scores))
            if not same_states(drawn, generator_states(device)):
                raise NotStacked("random numbers are drawn")
        finally:
            set_generators(drawn, device)
            for one in kept.values():
                one.put_back()
        return [scores or loss for scores, loss in zip(found, sums.losses(), strict=True)]

    def _steps(
        self, stack: Models, sources: Sequence[Rows | Iterated], testing: bool, at_most: int
    ) -> tuple[Sums, list[Feed]]:
        """Take all steps. Return what was logged, and for each client what its metrics must be updated with."""
        precision, device = self._runner.blueprint.precision, self._runner.blueprint.device
        step = ScoringStep(stack.template, names_of(testing), precision, stack.names, stack.shared)
        sums, held = Sums(len(sources)), 0
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
                        held += sum(output.numel() * output.element_size() for output in result.outputs)
                        outputs = [output.unbind(0) for output in result.outputs]
                        for place, row in enumerate(rows):
                            feeds[row].append((result, outputs, place))
                if held > HELD:
                    raise NotStacked("metrics are fed with too much")
        return sums, feeds


def alike(found: Scores, expected: Scores) -> bool:
    """Return True if two sets of scores differ by rounding at most."""
    if list(found) != list(expected):
        return False
    pairs = [(found[name], expected[name]) for name in found]
    return all(math.isclose(a, b, rel_tol=ALIKE, abs_tol=ALIKE) or (a != a and b != b) for a, b in pairs)
