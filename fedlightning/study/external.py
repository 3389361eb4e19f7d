"""Internal-external validation: each site once held out, and what a method is worth at a site that it never saw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from fedlightning.study.calibration import Calibration, calibration, calibration_intervals, curve, net_benefit
from fedlightning.study.columns import UNSEEN
from fedlightning.study.data import StudyData, Table
from fedlightning.study.measures import mean_of
from fedlightning.study.runs import Run
from fedlightning.study.samples import Predicted

SEEN, NEVER = "as a member", "never seen"
"""Whether the site of a line took part in training."""
FEWEST = 10
"""Fewest samples of a subgroup that has scores; of fewer, the numbers would be of single persons."""
MOST_CLASSES = 5
"""Up to this many classes each has its curves."""


def external(study: StudyData) -> Table:
    """Return one line for each method and held-out site, means over seeds.

    - `unseen`: the score of the model that the held-out site would deploy (stage L1), trained by the others; `global` and
      `best_global`: that of the server's latest and selected model there.
    - `member`: the score of the site's deployed model where all sites trained, over the same seeds; `gap`: `unseen` minus
      `member`, on the same test data.
    - `..._range`: lowest and highest over seeds. There are no intervals over sites: a few sites are no sample of sites.
    - `samples`: the site's test samples; `n_seeds` with both scores; `refused`: why there is none.
    """
    lines = []
    for method in study.methods:
        runs = [run for run in study.left_out if run.name == method]
        for site in dict.fromkeys(run.site for run in runs if run.site is not None):
            lines.append(_line(study, method, site, [run for run in runs if run.site == site]))
    return lines


def sites_of(study: StudyData, line_of: str = "unseen") -> Table:
    """Return one line a method over its held-out sites: lowest and highest score; `member` is of the sites with a score."""
    lines, every = [], external(study)
    for method in dict.fromkeys(line["method"] for line in every):
        own = [line for line in every if line["method"] == method]
        known = {line["site"]: line[line_of] for line in own if line[line_of] is not None}
        low, high = (min(known, key=known.__getitem__), max(known, key=known.__getitem__)) if known else (None, None)
        members = [line["member"] for line in own if line["site"] in known and line["member"] is not None]
        mean = mean_of(list(known.values())) if known else None
        lines.append(
            {"method": method, "sites": len(known), "of": len(own), "mean": mean}
            | {"lowest": known.get(low), "lowest_site": low, "highest": known.get(high), "highest_site": high}
            | {"member": mean_of(members) if members else None}
            | {"refused": next((line["refused"] for line in own if line["refused"]), None)}
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

    A subgroup with fewer than `FEWEST` samples has a line without scores.
    """
    lines: Table = []
    for method, site, way, found in _predictions(study):
        if way != NEVER:
            continue
        for column in found[0].columns:
            for value in sorted(set(found[0].columns[column].tolist())):
                parts = [one.at(one.columns[column] == value) for one in found]
                for number in _classes(parts[0]):
                    line = {"method": method, "site": site, "column": column, "value": value or "missing"}
                    scores: dict[str, Any] = {"samples": len(parts[0].labels)}
                    if min(len(part.labels) for part in parts) >= FEWEST:
                        scores = _mean([calibration(*_pair(part, number)) for part in parts])
                    lines.append(line | {"class": number} | scores)
    return lines


def curves_of(study: StudyData, number: int) -> dict[str, dict[str, Any]]:
    """Return by site and method, for a class and sites never seen: `calibration`, `benefit` and `all`, over all seeds."""
    found: dict[str, dict[str, Any]] = {}
    for method, site, way, of, pairs in _cases(study):
        if way == NEVER and of == number:
            events, p = (np.concatenate(part) for part in zip(*pairs, strict=True))
            found.setdefault(site, {})[method] = {
                "calibration": curve(events, p),
                "benefit": net_benefit(events, p),
                "samples": len(pairs[0][0]),
            }
    return found


def classes_of(study: StudyData) -> list[int]:
    """Return the classes that have lines: of two the second, of more each against the rest."""
    return sorted({number for *_, number, _ in _cases(study)})


def reasons(study: StudyData) -> list[str]:
    """Return in sentences why runs have no probabilities."""
    held = [(run, study.samples.get(run.path)) for run in study.left_out]
    said = [
        f"There are no probabilities of {run.name}: {found.reason}." for run, found in held if found and found.reason
    ]
    return list(dict.fromkeys(said))


def _line(study: StudyData, method: str, site: str, runs: Sequence[Run]) -> dict[str, Any]:
    metric, found = study.metric, {"unseen": [], "global": [], "best_global": [], "member": [], "gap": []}  # type: ignore[var-annotated]
    for run in runs:
        member = study.finished.get((method, run.seed))
        own = (member.run.scores(metric, checkpoint=study.checkpoint) or {}).get(site) if member else None
        unseen = _at(run, metric, site, "latest", "L1")
        found["unseen"].append(unseen)
        found["global"].append(_at(run, metric, site, "latest", "G"))
        found["best_global"].append(_at(run, metric, site, "best_global", "G"))
        found["member"].append(own)
        found["gap"].append(None if unseen is None or own is None else unseen - own)
    known = {name: [value for value in values if value is not None] for name, values in found.items()}
    line: dict[str, Any] = {"method": method, "site": site, "samples": _samples(runs, site)}
    for name, values in known.items():
        line[name] = mean_of(values) if values else None
        line[f"{name}_range"] = [min(values), max(values)] if len(values) > 1 else None
    refused = next((why for run in runs if (why := run.summary.get("held_out", {}).get("refused"))), None)
    failed = next((f"seed {run.seed} failed: {run.error}" for run in runs if run.error is not None), None)
    return line | {"n_seeds": len(known["gap"]), "seeds": len(runs), "refused": refused or failed}


def _at(run: Run, metric: str, site: str, checkpoint: str, stage: str) -> float | None:
    return (run.scores(metric, model=UNSEEN, checkpoint=checkpoint, stage=stage) or {}).get(site)


def _samples(runs: Sequence[Run], site: str) -> int | None:
    held = (run.summary.get("held_out", {}).get("clients", {}).get(site, {}) for run in runs)
    return next((one["test"] for one in held if one.get("test") is not None), None)


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
            held = [study.samples.get(run.path) for run in runs]
            found = [own for one in held if one is not None and len((own := one.of(site)).labels)]
            if found:
                yield method, site, way, found


def _cases(study: StudyData) -> Iterator[tuple[str, str, str, int, list[Pair]]]:
    for method, site, way, found in _predictions(study):
        for number in _classes(found[0]):
            yield method, site, way, number, [_pair(one, number) for one in found]


def _classes(found: Predicted) -> list[int]:
    count = found.probabilities.shape[1]
    return [1] if count == 2 else list(range(count))


def _pair(found: Predicted, number: int) -> Pair:
    return (found.labels == number).astype(np.float64), found.probabilities[:, number]


def _mean(found: Sequence[Calibration]) -> dict[str, Any]:
    """Return the means over seeds of every field; one that a seed lacks is `None`."""
    fields: list[Mapping[str, Any]] = [asdict(one) | {"observed": one.observed} for one in found]
    means = {name: [one[name] for one in fields] for name in fields[0]}
    return {
        name: None if None in values else values[0] if len(set(values)) == 1 else float(np.mean(values))
        for name, values in means.items()
    }
