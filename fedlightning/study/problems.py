"""Reasons why runs cannot be compared, in sentences. They are shown beside the numbers and never averaged away."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedlightning.scores.metric_names import bare
from fedlightning.study.baselines import odd_splits, why_not
from fedlightning.study.columns import LOCAL, UNSEEN
from fedlightning.study.data import StudyData
from fedlightning.study.equal_terms import unequal
from fedlightning.study.evidence import (
    no_better_than_constant,
    some_no_better_than_constant,
    still_improving,
    without_effect,
)
from fedlightning.study.finished_runs import natural
from fedlightning.study.roles import NEEDED
from fedlightning.study.target_units import mixed_scales, target_of
from fedlightning.study.token_tables import CONSERVED, missing

NOTES = (
    *("single_seed", "different_budget", "unequal_terms", "undefined", "identical_seeds", "uncomparable_baseline"),
    *("nothing_learnt", "unconverged", "no_effect"),
)
"""Kinds of problems that leave every score as it is, and that a reader must know."""
TOLERANCE = 0.01
"""Relative difference of optimizer steps that still counts as the same budget."""


@dataclass(frozen=True)
class Problem:
    """One thing that a reader must know.

    Attributes:
        kind: `failed`, `duplicate`, `missing_seed`, `missing_score`, `mixed_models`, `mixed_scales`, `different_splits`,
            `different_training_data`, `nan`, `damaged_table`, `tokens_lost`, `no_baseline`, or one of :data:`NOTES`.
        run: Method that has the problem, or `None` for the whole study.
        seed: Seed that has the problem, or `None` for all seeds of the method.
        text: The problem and the way out, in a sentence or two.
    """

    kind: str
    run: str | None
    seed: int | None
    text: str

    @property
    def severity(self) -> str:
        """`"note"` if every score stands as it is, else `"problem"`."""
        return "note" if self.kind in NOTES else "problem"

    def as_dict(self) -> dict[str, Any]:
        """Return the problem as a line of `comparison.json`."""
        return {"kind": self.kind, "severity": self.severity, "run": self.run, "seed": self.seed, "text": self.text}


def find_problems(study: StudyData) -> list[Problem]:
    """Return everything that is wrong with the runs of a study, the worst first."""
    return [
        *_absent_runs(study),
        *_splits(study),
        *_broken(study),
        *_missing_scores(study),
        *_mixed_models(study),
        *_mixed_scales(study),
        *_tables(study),
        *_missing_baselines(study),
        *_other_than_baseline(study),
        *_evidence(study),
        *(Problem("unequal_terms", None, None, text) for text in unequal(study)),
        *_budgets(study),
        *_undefined(study),
        *_seeds(study),
    ]


def _evidence(study: StudyData) -> Iterator[Problem]:
    constant = no_better_than_constant(study)
    sentence = constant or some_no_better_than_constant(study)
    if sentence is not None:
        yield Problem("nothing_learnt", None, None, sentence)
    trained = [name for name in study.methods if (steps(study, name) or 0) > 0]
    improving = still_improving(study)
    if improving:
        who = "All methods" if len(improving) >= len(trained) > 1 else ", ".join(improving)
        gain = f"up to {max(improving.values()):.0%} came in the last quarter of the rounds"
        text = (
            f"{who} still improve{'s' if len(improving) == 1 else ''}: of all that validation curves gained, {gain}. "
            f"More rounds may {'change the order' if trained[1:] else 'do better'}."
        )
        yield Problem("unconverged", None, None, text)
    for method, other, apart in without_effect(study) if constant is None else ():
        text = (
            f"{method} changed nothing measurable against {other}: clients' scores differ by {apart:.2g} on average. Its "
            "term is too weak here, or its option is not what was meant."
        )
        yield Problem("no_effect", method, None, text)


def _absent_runs(study: StudyData) -> Iterator[Problem]:
    for run in study.runs:
        if run.error is not None:
            sentence = f"{run.name}, seed {run.seed}, has no result: {run.error.rstrip('.')}."
            yield Problem("failed", run.name, run.seed, sentence)
    for (name, seed), count in Counter((run.name, run.seed) for run in study.runs).items():
        if count > 1:
            text = (
                f"{name} was given {count} runs with seed {seed}: the last one counts. Give each method its own name."
            )
            yield Problem("duplicate", name, seed, text)
    for name in study.methods:
        seeds = {run.seed for run in study.runs if run.name == name}
        missing = [seed for seed in study.seeds if seed not in seeds]
        for seed in missing:
            others = ", ".join(str(s) for s in sorted(seeds))
            text = f"{name} has no run with seed {seed}: its numbers are of seed {others}, and pairs with others are fewer."
            yield Problem("missing_seed", name, seed, text)


def _splits(study: StudyData) -> Iterator[Problem]:
    for (name, seed), usual in study.odd.items():
        yield Problem(
            "different_splits",
            name,
            seed,
            f"{name}, seed {seed}, was tested on other data than {usual.name} and most runs with this seed. It is left out "
            "of every paired difference, rank and incentive measure. Run it on the same data module, partition and seed.",
        )
    runs = [scores.run for scores in study.finished.values()]
    odd = {word: odd_splits(runs, split) for word, split in (("trained", "train"), ("validated", "val"))}
    for name, seed in dict.fromkeys(key for odd_runs in odd.values() for key in odd_runs if key not in study.odd):
        words = [word for word, odd_runs in odd.items() if (name, seed) in odd_runs]
        example = odd[words[0]][name, seed].name
        text = (
            f"{name}, seed {seed}, was {' and '.join(words)} on other samples than {example} and most runs with this seed; "
            "the test data agree."
        )
        yield Problem("different_training_data", name, seed, text)


def _broken(study: StudyData) -> Iterator[Problem]:
    """Find runs with models that have no finite loss, one problem a run."""
    for (name, seed), scores in study.finished.items():
        places: dict[str, list[str]] = {}
        for score in scores:
            if score.diverged:
                row = score.row
                whose = " of unseen clients" if row["model"] == UNSEEN else ""
                place = f"{row['checkpoint']} {row['stage']}{whose} on {row['data']} {row['split']} data"
                places.setdefault(place, []).extend(c for c in score.diverged if c not in places.get(place, []))
        if places:
            where = "; ".join(f"{place}: client {', '.join(clients)}" for place, clients in list(places.items())[:4])
            more = f"; and {len(places) - 4} more" if len(places) > 4 else ""
            text = (
                f"{name}, seed {seed}, has scores that are NaN or infinite ({where}{more}). They have no mean, and are in no "
                "statistic. The model diverged, or the metric broke."
            )
            yield Problem("nan", name, seed, text)
    for (name, seed), scores in study.finished.items():
        bad = [
            row
            for row in scores.run.rows
            if row.split == "val"
            and bare(row.metric) == "loss"
            and not math.isfinite(row.value)
            and row.model != UNSEEN
        ]
        if bad and not any(score.diverged for score in scores):
            first, count = min(bad, key=lambda row: row.round), len({row.round for row in bad})
            text = (
                f"{name}, seed {seed}, had a validation loss that was NaN or infinite in {count} "
                f"round{'s' if count > 1 else ''} (first: client {first.client}, round {first.round}, stage "
                f"{first.stage}); its curves have gaps there."
            )
            yield Problem("nan", name, seed, text)


def _missing_scores(study: StudyData) -> Iterator[Problem]:
    for (name, seed), scores in study.finished.items():
        if seed in study.deployed(name, every_seed=True):
            continue
        have = ", ".join(scores.metrics(study.split)) or "nothing"
        text = (
            f"{name}, seed {seed}, has no {study.split} {study.metric} of its {study.checkpoint} model; scored on "
            f"{study.split} data: {have}. Test the run with checkpoint='all', or compare another metric."
        )
        yield Problem("missing_score", name, seed, text)


def _mixed_models(study: StudyData) -> Iterator[Problem]:
    """Find methods that deploy models of different checkpoints or stages at different seeds."""
    for name in study.methods:
        seeds_by_model: dict[str, list[str]] = {}
        for seed, score in study.deployed(name).items():
            seeds_by_model.setdefault(f"{score.row['checkpoint']} ({score.row['stage']})", []).append(str(seed))
        if len(seeds_by_model) > 1:
            models = "; ".join(f"{which} at seed {', '.join(seeds)}" for which, seeds in seeds_by_model.items())
            text = (
                f"{name} deploys different models at different seeds ({models}), and its mean is over all of them. Give its "
                "runs the same checkpoints, or compare with --checkpoint latest."
            )
            yield Problem("mixed_models", name, None, text)


def _mixed_scales(study: StudyData) -> Iterator[Problem]:
    runs = [scores.run for scores in study.finished.values()]
    if (text := mixed_scales(((run.name, target_of(run.config)) for run in runs), study.metric)) is not None:
        yield Problem("mixed_scales", None, None, text)


def _tables(study: StudyData) -> Iterator[Problem]:
    """Find tables beside the scores that cannot be read, and ledgers in which tokens were made or lost."""
    for (name, seed), tables in study.tables.items():
        for fault in tables.faults.values():
            yield Problem("damaged_table", name, seed, fault)
        lost = missing(tables.entries)
        if lost > CONSERVED:
            text = (
                f"{name}, seed {seed}, made or lost tokens: in a round of a cluster, refunds and rewards differ from what "
                f"was paid by {lost:.3g}. Its ledger.csv was changed, or the method does not keep its accounts."
            )
            yield Problem("tokens_lost", name, seed, text)


def _undefined(study: StudyData) -> Iterator[Problem]:
    clients_by_seed: dict[str, dict[int, set[str]]] = {}
    for (_, seed), scores in study.finished.items():
        for score in scores:
            if score.row["data"] == LOCAL and score.row["split"] == study.split:
                clients_by_seed.setdefault(score.row["metric"], {}).setdefault(seed, set()).update(score.undefined)
    for metric, groups in clients_by_seed.items():
        clients = sorted(set().union(*groups.values()), key=natural)
        if not clients:
            continue
        seeds = "" if all(len(group) == len(clients) for group in groups.values()) else ", in some seeds"
        text = (
            f"{metric} is not defined on the data of client{'s' * (len(clients) > 1)} {', '.join(clients)}{seeds} (one class "
            "only, no positives, or too few events, for example). It is empty there, and means are over the other clients."
        )
        yield Problem("undefined", None, None, text)


def _missing_baselines(study: StudyData) -> Iterator[Problem]:
    mixed = any(entry.run.summary.get("architectures") for entry in study.finished.values())  # nobody can average these
    for role, name, measures in (
        ("siloed", "siloed run (Local)", "participation rates"),
        ("fedavg", "FedAvg run", "participation rates, appeal and opt-outs"),
    ):
        if role not in study.baselines and study.finished and study.methods[1:] and not (mixed and role == "fedavg"):
            text = f"There is no {name} among the runs, so {measures} are empty. Add it."
            yield Problem("no_baseline", None, None, text)


def _other_than_baseline(study: StudyData) -> Iterator[Problem]:
    """Find methods that cannot be measured against a baseline at some of their seeds."""
    pairs = [(name, study.baselines[role]) for name in study.methods for role in NEEDED if role in study.baselines]
    for method, baseline in pairs:
        reasons: dict[str, list[int]] = {}
        for seed in study.seeds_of(method) if method != baseline else []:
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


def steps(study: StudyData, method: str) -> float | None:
    """Return the optimizer steps of one run of a method, summed over clients and averaged over seeds."""
    counts = [study.finished[method, seed].run.summary.get("local_steps_total") for seed in study.seeds_of(method)]
    steps_of_runs = [float(value) for value in counts if value is not None]
    return sum(steps_of_runs) / len(steps_of_runs) if steps_of_runs else None


def _budgets(study: StudyData) -> Iterator[Problem]:
    budgets: Mapping[str, float] = {
        name: count for name in study.methods if (count := steps(study, name)) is not None and count > 0
    }
    reference = study.baselines.get("fedavg") or next(iter(budgets), None)
    if reference not in budgets or reference is None:
        return
    for name, count in budgets.items():
        relative = count / budgets[reference] - 1
        if abs(relative) > TOLERANCE:
            text = (
                f"{name} took {count:,.0f} local steps, {reference} {budgets[reference]:,.0f} ({relative:+.0%}): the step "
                "budget is not equal."
            )
            yield Problem("different_budget", name, None, text)


def _seeds(study: StudyData) -> Iterator[Problem]:
    if len(study.seeds) == 1:
        text = f"There is one seed ({study.seeds[0]}): nothing can be said about chance. Use --seeds 3 or more."
        yield Problem("single_seed", None, None, text)
    for name in study.methods:
        results = [str(study.finished[name, seed].run.results) for seed in study.seeds_of(name)]
        if len(results) > 1 and len(set(results)) == 1:
            text = f"All {len(results)} seeds of {name} give exactly the same scores: check that its seed reaches its config."
            yield Problem("identical_seeds", name, None, text)
