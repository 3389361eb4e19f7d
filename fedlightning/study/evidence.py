"""What there is to compare at all: the score of a constant answer, unfinished training, terms without effect, and harm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedlightning.errors import count_of, listed
from fedlightning.scores.metric_names import ACCURACY, metric_label
from fedlightning.study.columns import LOCAL
from fedlightning.study.data import StudyData, Table
from fedlightning.study.fairness_measures import drop_rounding
from fedlightning.study.finished_runs import Run
from fedlightning.study.learning_curves import round_means
from fedlightning.study.run_scores import bounds, mean_of
from fedlightning.study.score_tables import per_client

CHANCE = {"auroc": 0.5, "c_index": 0.5, "r2": 0.0, "cohen_kappa": 0.0}
"""Metric -> what an answer gets that is the same for all samples."""
LATE_SHARE = 0.05
"""Share of all that a curve gained which its last quarter gains while training has not converged."""
MIN_DIFFERENCE = 1e-3
"""Mean difference of clients' scores below which nothing can be measured: of shares as it is, of errors relative."""
TAIL_SHARE = 0.1
"""Share of the clients that are the worst tail."""


@dataclass(frozen=True)
class Reference:
    """What an answer gets that is the same for all samples of a client.

    Attributes:
        name: What is answered.
        by_seed: Seed -> mean over clients of its score.
    """

    name: str
    by_seed: Mapping[int, float]

    @property
    def level(self) -> float:
        """Mean over seeds."""
        return fmean(self.by_seed.values())


def reference(study: StudyData) -> Reference | None:
    """Return the score of a constant answer; `None` where it is not known.

    For accuracy each client's commonest training class, whose share is taken from its training samples. For `rmse` and `mse`
    the mean of the client's own test targets, which `r2` beside them tells.
    """
    if study.metric in CHANCE:
        return Reference("chance", dict.fromkeys(study.seeds, CHANCE[study.metric]))
    levels: dict[int, list[float]] = {}
    names = dict.fromkeys(ACCURACY, "each client’s commonest class") | {"balanced_accuracy": "chance"}
    name = names.get(study.metric, "each client’s mean")
    for (method, seed), scores in study.finished.items():
        if (method, seed) in study.odd:
            continue
        if study.metric in names:
            counts_by_client = [counts for counts in classes_of(scores.run).values() if sum(counts)]
            shares = [
                max(counts) / sum(counts) if study.metric in ACCURACY else 1 / sum(count > 0 for count in counts)
                for counts in counts_by_client
            ]
        else:
            shares = _errors_of_mean(study, method, seed) if study.metric in ("rmse", "mse") else []
        if shares:
            levels.setdefault(seed, []).append(fmean(shares))
    return Reference(name, {seed: fmean(shares) for seed, shares in sorted(levels.items())}) if levels else None


def classes_of(run: Run) -> dict[str, list[int]]:
    """Return the training samples of each class by client, of clients whose data have classes."""
    clients = run.summary.get("data", {}).get("clients", {})
    return {client: about["classes"] for client, about in clients.items() if len(about.get("classes") or ()) > 1}


def _errors_of_mean(study: StudyData, method: str, seed: int) -> list[float]:
    """Return the error of each client's mean test target, from error and R² of a method: R² = 1 - (error / that)²."""
    power = 0.5 if study.metric == "rmse" else 1.0
    score, r2_score = study.deployed(method).get(seed), study.deployed(method, metric="r2").get(seed)
    r2_by_client = {} if r2_score is None else r2_score.defined
    return [
        error / (1 - r2) ** power
        for client, error in (score.defined if score is not None else {}).items()
        if (r2 := r2_by_client.get(client, 1.0)) < 1 and math.isfinite(r2)
    ]


def above_reference(study: StudyData, method: str) -> bool | None:
    """Return whether a method is clearly better than the constant answer: by the interval of the difference at its seeds.

    `None` where that cannot be said.
    """
    gains = _over_constant(study, method)
    if not gains:
        return None
    gain = study.estimate(gains)
    return gain.mean is not None and (gain.ci95 or [gain.mean])[0] > 0


def _over_constant(study: StudyData, method: str) -> list[float]:
    """Return how much better than the constant answer a method is at each seed; nothing where that is not known of all."""
    level, sign = reference(study), 1.0 if study.higher_is_better else -1.0
    scores = (
        {}
        if level is None
        else {s: estimate.mean for s, estimate in study.deployed(method).items() if s in level.by_seed}
    )
    if level is None or None in scores.values():
        return []
    return [sign * (mean - level.by_seed[s]) for s, mean in scores.items() if mean is not None]


def no_better_than_constant(study: StudyData) -> str | None:
    """Return a sentence if no method is clearly above a constant answer."""
    verdicts = [above_reference(study, method) for method in study.methods]
    if any(verdicts) or all(verdict is None for verdict in verdicts):
        return None
    way_out = _more_seeds(study, study.methods) or " Train longer, or tune the learning rate first."
    return (
        f"No method is clearly better than {_constant(study)}: what was learnt, if anything, does not show, and the order of "
        f"the methods means nothing.{way_out}"
    )


def some_no_better_than_constant(study: StudyData) -> str | None:
    """Return a sentence on the methods that are not clearly above a constant answer, where another one is."""
    verdicts = {method: above_reference(study, method) for method in study.methods}
    names = [method for method, above in verdicts.items() if above is False]
    if not names or not any(verdicts.values()):
        return None
    verb = "is" if len(names) == 1 else "are"
    return f"{listed(names, most=len(names))} {verb} not clearly better than {_constant(study)}.{_more_seeds(study, names)}"


def _more_seeds(study: StudyData, methods: Sequence[str]) -> str:
    """Return who is above a constant answer at each seed, so that more seeds may tell; nothing if nobody is."""
    above = [method for method in methods if min(_over_constant(study, method), default=0) > 0]
    if not above:
        return ""
    verb = "is" if len(above) == 1 else "are"
    seeds = count_of(study.seeds, "seed")
    return f" {listed(above, most=len(above))} {verb} better at each seed, but intervals of {seeds} are wide: run more."


def _constant(study: StudyData) -> str:
    level = reference(study)
    assert level is not None  # where a method is above it or not
    what = "answering " + level.name if level.name != "chance" else "chance"
    return f"{what} ({metric_label(study.metric)} {level.level:.3g})"


def word_of_best(study: StudyData) -> str:
    """Return what stands in place of the best method's difference to the best: a dash where none has learnt anything."""
    return "best" if no_better_than_constant(study) is None else "–"


def still_improving(study: StudyData) -> dict[str, float]:
    """Return method -> share of all that its validation curve gained in the last quarter of its rounds, where that is much.

    The curve is that of models as received (L1), else of the server's, by the study's metric, else by the loss. Gains are
    means over seeds, since a round moves one seed's score by chance. What fine-tunes after the last round does not count.
    """
    shares = {}
    for method in study.methods:
        gains = [_gains_of_rounds(study.finished[method, seed].run, study) for seed in study.seeds_of(method)]
        measured = [gain for gain in gains if gain is not None]
        if not measured or len(measured) < len(gains):
            continue
        late, total = (fmean(part) for part in zip(*measured, strict=True))
        if late > LATE_SHARE * total > 0:
            shares[method] = late / total
    return shares


def _gains_of_rounds(run: Run, study: StudyData) -> tuple[float, float] | None:
    """Return what a curve gained in the last quarter of its rounds, and in all of them."""
    for metric, sign in ((study.metric, 1.0 if study.higher_is_better else -1.0), ("loss", -1.0)):
        means = round_means(run, metric)
        rounds = [key for key in sorted(means, key=lambda key: key[2]) if key[2] <= run.summary.get("rounds", math.inf)]
        for stage in ("L1", "G"):
            points = [means[key] for key in rounds if key[:2] == (stage, LOCAL)]
            values = [sign * value for value in points if value is not None]
            if len(values) >= 4 and len(values) == len(points):
                quarter = len(values) // 4
                return fmean(values[-quarter:]) - fmean(values[-2 * quarter : -quarter]), max(values) - values[0]
    return None


def without_effect(study: StudyData) -> Iterator[tuple[str, str, float]]:
    """Yield methods, what they are the same as (FedAvg or siloed training) and how far clients' scores differ on average."""
    for role in ("fedavg", "siloed"):
        base = study.baselines.get(role)
        for method in study.methods if base is not None else ():
            if method == base or not study.comparable(method):
                continue
            distance, limit = _mean_distance(study, method, str(base)) or (1.0, 0.0)
            if distance <= limit:
                yield method, str(base), distance


def _mean_distance(study: StudyData, method: str, other: str) -> tuple[float, float] | None:
    """Return the mean distance of two methods' scores over clients and seeds, and what cannot be measured."""
    a, b = study.deployed(method), study.deployed(other)
    pairs = [
        (value, b[seed].defined[client])
        for seed in a
        if seed in b
        for client, value in a[seed].defined.items()
        if client in b[seed].defined
    ]
    if not pairs:
        return None
    scale = 1.0 if bounds(study.metric, [value for value, _ in pairs])[1] == 1.0 else fmean(abs(v) for _, v in pairs)
    return fmean(abs(x - y) for x, y in pairs), MIN_DIFFERENCE * scale


def negative_transfer(study: StudyData) -> Table:
    """Return one line a method: the clients that lose by it, against their own siloed models, by means over seeds.

    `lose` of `clients` have a negative gain; `mean_loss` is the mean of these, `worst` the lowest gain of all, of `client`;
    `tail` is the mean gain of the worst tenth of the clients (at least one). Losses are negative whatever the metric.
    """
    siloed = study.baselines.get("siloed")
    sign, base = (1.0 if study.higher_is_better else -1.0), study.siloed_scores()
    lines: Table = []
    for method in study.methods if siloed is not None else ():
        seeds = study.comparable_seeds(method, str(siloed))
        scores = {seed: score for seed, score in study.deployed(method).items() if seed in seeds and seed in base}
        if method == siloed or not scores:
            continue
        scores_of_method, alone = per_client(list(scores.values())), per_client([base[seed] for seed in scores])
        gains = _gains(scores_of_method, alone, sign)
        if gains:
            lost = [gain for gain in gains.values() if gain < 0]
            worst = min(gains, key=gains.__getitem__)
            tail = sorted(gains.values())[: max(1, round(TAIL_SHARE * len(gains)))]
            lines.append(
                {"method": method, "reference": siloed, "lose": len(lost), "clients": len(gains)}
                | {"mean_loss": mean_of(list(lost)), "tail": fmean(tail), "worst": gains[worst], "client": worst}
            )
    return lines


def _gains(scores: Mapping[str, float | None], alone: Mapping[str, float | None], sign: float) -> dict[str, float]:
    pairs: dict[str, tuple[Any, Any]] = {client: (score, alone.get(client)) for client, score in scores.items()}
    scored_by_both = {client: pair for client, pair in pairs.items() if None not in pair}
    return {client: drop_rounding(sign * (a - b), a, b) for client, (a, b) in scored_by_both.items()}
