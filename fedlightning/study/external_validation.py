"""Internal-external validation: each site once held out, and what a method is worth at a site that it never saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from fedlightning.study.calibration import Calibration, calibration, calibration_intervals, curve, net_benefit
from fedlightning.study.columns import UNSEEN
from fedlightning.study.data import StudyData, Table
from fedlightning.study.finished_runs import Run
from fedlightning.study.run_scores import mean_of
from fedlightning.study.samples import Predicted

SEEN, NEVER = "as a member", "never seen"
"""Whether the site of a line took part in training."""
MIN_SAMPLES = 10
"""Fewest samples of a subgroup that has scores; of fewer, the numbers would be of single persons."""
MOST_CLASSES = 5
"""Up to this many classes each has its curves."""


def external(study: StudyData) -> Table:
    """Return one line for each method and held-out site, means over seeds.

    - `unseen`: the score of the model that the held-out site would deploy (stage L1), trained by the others; `global` and
      `best_global`: that of the server's latest and selected model there.
    - `member`: the score of the site's deployed model where all sites trained, over the same seeds; `gap`: `unseen` minus
      `member`, on the same test data.
    - `..._range`: lowest and highest over seeds. There are no intervals over sites: a few sites are not a sample of sites.
    - `samples`: the site's test samples; `n_seeds` with both scores; `refused`: why there is none.
    """
    lines = []
    for method in study.methods:
        runs = [run for run in study.left_out if run.name == method]
        for site in dict.fromkeys(run.site for run in runs if run.site is not None):
            lines.append(_line(study, method, site, [run for run in runs if run.site == site]))
    return lines


def sites_of(study: StudyData) -> Table:
    """Return one line a method over its held-out sites: lowest and highest score; `member` is of the sites with a score."""
    lines, every = [], external(study)
    for method in dict.fromkeys(line["method"] for line in every):
        own_lines = [line for line in every if line["method"] == method]
        score_by_site = {line["site"]: line["unseen"] for line in own_lines if line["unseen"] is not None}
        low, high = (
            (min(score_by_site, key=score_by_site.__getitem__), max(score_by_site, key=score_by_site.__getitem__))
            if score_by_site
            else (None, None)
        )
        members = [line["member"] for line in own_lines if line["site"] in score_by_site and line["member"] is not None]
        mean = mean_of(list(score_by_site.values())) if score_by_site else None
        lines.append(
            {"method": method, "sites": len(score_by_site), "of": len(own_lines), "mean": mean}
            | {
                "lowest": score_by_site.get(low),
                "lowest_site": low,
                "highest": score_by_site.get(high),
                "highest_site": high,
            }
            | {"member": mean_of(members) if members else None}
            | {"refused": next((line["refused"] for line in own_lines if line["refused"]), None)}
        )
    return lines


def calibrations(study: StudyData) -> Table:
    """Return one line for each method, site, class and way of training: the fields of `Calibration`, means over seeds.

    `slope`, `in_the_large`, `brier` and `auroc` have `..._ci95`, over the site's patients.
    """
    return [
        {"method": method, "site": site, "class": number, "trained": way}
        | _mean([calibration(*pair) for pair in pairs])
        | calibration_intervals(pairs)
        for method, site, way, number, pairs in _cases(study)
    ]


def subgroups(study: StudyData) -> Table:
    """Return one line for each method, site, column and value of it: how its samples fare at a site never seen.

    A subgroup with fewer than `MIN_SAMPLES` samples has a line without scores.
    """
    lines: Table = []
    for method, site, way, predictions in _predictions(study):
        if way != NEVER:
            continue
        for column in predictions[0].columns:
            for value in sorted(set(predictions[0].columns[column].tolist())):
                parts = [predicted.at(predicted.columns[column] == value) for predicted in predictions]
                for number in _classes(parts[0]):
                    line = {"method": method, "site": site, "column": column, "value": value or "missing"}
                    scores: dict[str, Any] = {"samples": len(parts[0].labels)}
                    if min(len(part.labels) for part in parts) >= MIN_SAMPLES:
                        scores = _mean([calibration(*_pair(part, number)) for part in parts])
                    lines.append(line | {"class": number} | scores)
    return lines


def curves_of(study: StudyData, number: int) -> dict[str, dict[str, Any]]:
    """Return by site and method, for a class and sites never seen: `calibration`, `benefit` and `all`, over all seeds."""
    curves_by_site: dict[str, dict[str, Any]] = {}
    for method, site, way, class_number, pairs in _cases(study):
        if way == NEVER and class_number == number:
            events, p = (np.concatenate(part) for part in zip(*pairs, strict=True))
            curves_by_site.setdefault(site, {})[method] = {
                "calibration": curve(events, p),
                "benefit": net_benefit(events, p),
                "samples": len(pairs[0][0]),
            }
    return curves_by_site


def classes_of(study: StudyData) -> list[int]:
    """Return the classes that have lines: of two the second, of more each against the rest."""
    return sorted({number for *_, number, _ in _cases(study)})


def reasons(study: StudyData) -> list[str]:
    """Return in sentences why runs have no probabilities."""
    samples = [(run, study.samples.get(run.path)) for run in study.left_out]
    sentences = [
        f"There are no probabilities of {run.name}: {sample.reason}."
        for run, sample in samples
        if sample and sample.reason
    ]
    return list(dict.fromkeys(sentences))


def _line(study: StudyData, method: str, site: str, runs: Sequence[Run]) -> dict[str, Any]:
    metric, scores_by_name = study.metric, {"unseen": [], "global": [], "best_global": [], "member": [], "gap": []}  # type: ignore[var-annotated]
    for run in runs:
        member = study.finished.get((method, run.seed))
        member_score = (member.run.scores(metric, checkpoint=study.checkpoint) or {}).get(site) if member else None
        unseen = _at(run, metric, site, "latest", "L1")
        scores_by_name["unseen"].append(unseen)
        scores_by_name["global"].append(_at(run, metric, site, "latest", "G"))
        scores_by_name["best_global"].append(_at(run, metric, site, "best_global", "G"))
        scores_by_name["member"].append(member_score)
        scores_by_name["gap"].append(None if unseen is None or member_score is None else unseen - member_score)
    scored = {name: [value for value in values if value is not None] for name, values in scores_by_name.items()}
    line: dict[str, Any] = {"method": method, "site": site, "samples": _samples(runs, site)}
    for name, values in scored.items():
        line[name] = mean_of(values) if values else None
        line[f"{name}_range"] = [min(values), max(values)] if len(values) > 1 else None
    refused = next((why for run in runs if (why := run.summary.get("held_out", {}).get("refused"))), None)
    failed = next((f"seed {run.seed} failed: {run.error}" for run in runs if run.error is not None), None)
    return line | {"n_seeds": len(scored["gap"]), "seeds": len(runs), "refused": refused or failed}


def _at(run: Run, metric: str, site: str, checkpoint: str, stage: str) -> float | None:
    return (run.scores(metric, model=UNSEEN, checkpoint=checkpoint, stage=stage) or {}).get(site)


def _samples(runs: Sequence[Run], site: str) -> int | None:
    counts_of_runs = (run.summary.get("held_out", {}).get("clients", {}).get(site, {}) for run in runs)
    return next((counts["test"] for counts in counts_of_runs if counts.get("test") is not None), None)


Pair = tuple[np.ndarray, np.ndarray]
"""Events and probabilities."""


def _predictions(study: StudyData) -> Iterator[tuple[str, str, str, list[Predicted]]]:
    """Yield method, site, way of training and, for each seed, the predictions on the site's test data."""
    for line in external(study):
        method, site = line["method"], line["site"]
        left_out = [run for run in study.left_out if (run.name, run.site) == (method, site)]
        seeds = {run.seed for run in left_out if run.error is None}  # both ways are of the same seeds
        members = [study.finished[method, seed].run for seed in study.seeds_of(method) if seed in seeds]
        for way, runs in ((NEVER, left_out), (SEEN, members)):
            samples = [study.samples.get(run.path) for run in runs]
            predictions = [
                predicted for sample in samples if sample is not None and len((predicted := sample.of(site)).labels)
            ]
            if predictions:
                yield method, site, way, predictions


def _cases(study: StudyData) -> Iterator[tuple[str, str, str, int, list[Pair]]]:
    for method, site, way, predictions in _predictions(study):
        for number in _classes(predictions[0]):
            yield method, site, way, number, [_pair(predicted, number) for predicted in predictions]


def _classes(predicted: Predicted) -> list[int]:
    count = predicted.probabilities.shape[1]
    return [1] if count == 2 else list(range(count))


def _pair(predicted: Predicted, number: int) -> Pair:
    return (predicted.labels == number).astype(np.float64), predicted.probabilities[:, number]


def _mean(rows: Sequence[Calibration]) -> dict[str, Any]:
    """Return the means over seeds of every field; one that a seed lacks is `None`."""
    fields: list[Mapping[str, Any]] = [asdict(row) | {"observed": row.observed} for row in rows]
    means = {name: [field_values[name] for field_values in fields] for name in fields[0]}
    return {
        name: None if None in values else values[0] if len(set(values)) == 1 else float(np.mean(values))
        for name, values in means.items()
    }
