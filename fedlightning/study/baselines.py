"""Which baseline a method may be measured against: the same splits, seeds, rounds and clients, or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fedlightning.study.measures import SeedScore
from fedlightning.study.problems import Problem, fingerprint
from fedlightning.study.roles import ROLES, role
from fedlightning.study.runs import Run

if TYPE_CHECKING:
    from fedlightning.study.study import Study

NEEDED = ("siloed", "fedavg")
"""Roles that incentive measures are taken against."""
_WORDS = {"siloed": "a siloed run (Local)", "fedavg": "a FedAvg run"}


def choose(study: Study) -> dict[str, str]:
    """The method of each role: of several, the one that is comparable with the most runs; then the first."""
    chosen: dict[str, str] = {}
    for wanted in ROLES:
        candidates = [name for name in study.methods if _role(study, name) == wanted]
        if candidates:
            chosen[wanted] = max(candidates, key=lambda name: _partners(study, name))
    return chosen


def why_not(run: Run, baseline: Run) -> str | None:
    """What makes two runs of one seed uncomparable, in a few words; ``None`` if nothing does."""
    if run.clients != baseline.clients:
        return f"other clients ({len(run.clients)} against {len(baseline.clients)})"
    for split in ("test", "train", "val"):
        if fingerprint(run, split) != fingerprint(baseline, split):
            return f"another {split} split"
    rounds, others = run.summary.get("rounds"), baseline.summary.get("rounds")
    return f"{rounds} rounds against {others}" if rounds != others else None


def comparable_seeds(study: Study, method: str, *others: str) -> list[int]:
    """Seeds at which ``method`` and every one of ``others`` have comparable runs."""
    return [
        seed
        for seed in study.seeds_of(method)
        if all(
            (name, seed) in study.finished
            and why_not(study.finished[method, seed].run, study.finished[name, seed].run) is None
            for name in others
        )
    ]


def siloed_scores(study: Study) -> dict[int, SeedScore]:
    """Each client's own model on its own data, by seed."""
    return study.deployed(study.baselines["siloed"]) if "siloed" in study.baselines else {}


def federated_scores(study: Study) -> dict[int, SeedScore]:
    """FedAvg's global model on each client's data, by seed."""
    return study.shared(study.baselines["fedavg"]) if "fedavg" in study.baselines else {}


def problems(study: Study) -> list[Problem]:
    """Baselines that are not there, and methods that differ from theirs."""
    found = []
    for wanted in NEEDED:
        if wanted not in study.baselines and study.finished:
            measures = "participation rates" if wanted == "siloed" else "participation rates, appeal and opt-outs"
            text = f"There is no {_WORDS[wanted].removeprefix('a ')} among the runs, so {measures} are empty. Add it."
            found.append(Problem("no_baseline", None, None, text))
    for name in study.methods:
        for wanted in NEEDED:
            baseline = study.baselines.get(wanted)
            if baseline is not None and baseline != name:
                found += list(_differing(study, name, baseline))
    return found


def _differing(study: Study, method: str, baseline: str) -> Iterator[Problem]:
    reasons: dict[str, list[int]] = {}
    for seed in study.seeds_of(method):
        if (baseline, seed) not in study.finished:
            why: str | None = f"{baseline} has no result there"
        else:
            why = why_not(study.finished[method, seed].run, study.finished[baseline, seed].run)
        if why is not None:
            reasons.setdefault(why, []).append(seed)
    for why, seeds in reasons.items():
        listed = ", ".join(map(str, seeds))
        text = (
            f"{method} cannot be measured against {baseline} at seed {listed}: {why}. Participation rate, appeal and "
            "opt-outs leave that out."
        )
        yield Problem("uncomparable_baseline", method, seeds[0] if len(seeds) == 1 else None, text)


def _role(study: Study, method: str) -> str | None:
    """The role of a method whose finished runs all play it."""
    roles = {role(study.finished[method, seed].run) for seed in study.seeds_of(method)}
    return roles.pop() if len(roles) == 1 else None


def _partners(study: Study, baseline: str) -> int:
    return sum(len(comparable_seeds(study, name, baseline)) for name in study.methods if name != baseline)
