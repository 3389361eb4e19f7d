"""Tables of scores: all of them, by stage, by checkpoint and by metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedlightning.study.columns import GLOBAL, LOCAL, PERSONAL, POOLED
from fedlightning.study.data import StudyData, Table
from fedlightning.study.fairness import Spread
from fedlightning.study.measures import FIELDS, Address, SeedScore, address, mean_of

STATISTICS = ("median", "std", "variance", "worst", "tenth_percentile", "best")
"""Columns that are statistics over clients."""


def results(study: StudyData) -> Table:
    """Return every score: one line for each (run, model, stage, checkpoint, data, split, metric).

    `mean` is the mean over seeds of the uniform mean over clients, `ci95` its interval, `ci95_radius` half its width,
    `n_seeds` the number of seeds that have a value, and `per_seed` their means. `weighted_mean`, `median`, `std`,
    `variance`, `worst`, `tenth_percentile` and `best` are taken over clients, then averaged over seeds. `per_client` is
    each client's mean over seeds. `clients` is how many of `clients_of` have a score, at the seed that has the fewest;
    `undefined` lists clients whose score does not exist. `diverged` (as "seed 1: client
    3") lists models without a finite loss; with one of these there is no mean. `comparable` is False if the runs were
    tested on other data than the rest.
    """
    lines = []
    for method in study.methods:
        seeds = study.seeds_of(method)
        keys: dict[Address, Mapping[str, Any]] = {}
        for seed in seeds:
            keys |= {address(score.row): score.row for score in study.finished[method, seed]}
        for key, example in keys.items():
            scores = {seed: score for seed in seeds if (score := study.finished[method, seed].get(key)) is not None}
            names = {name: example[name] for name in (*FIELDS, "metric")}
            lines.append({"run": method} | names | summary(study, scores) | {"comparable": study.comparable(method)})
    return lines


def summary(study: StudyData, scores: Mapping[int, SeedScore]) -> dict[str, Any]:
    """Return the columns of :func:`results` for the rows of some seeds."""
    found = list(scores.values())
    overall = study.estimate([score.mean for score in found], found[0].row["metric"] if found else None)
    return {
        **overall.columns(),
        "n_seeds": overall.n,
        "per_seed": {str(seed): score.mean for seed, score in scores.items()},
        "weighted_mean": mean_of([score.weighted_mean for score in found]),
        **{name: statistic(found, name) for name in STATISTICS},
        "per_client": per_client(found),
        "clients": min((len(score.defined) for score in found), default=0),
        "clients_of": max((len(score.per_client) for score in found), default=0),
        "undefined": list(dict.fromkeys(client for score in found for client in score.undefined)),
        "diverged": [f"seed {score.seed}: client {client}" for score in found for client in score.diverged],
    }


def statistic(scores: Iterable[SeedScore], name: str) -> float | None:
    """Return a field of :class:`~fedlightning.study.fairness.Spread`, averaged over seeds."""
    spreads: list[Spread | None] = [score.spread for score in scores]
    return mean_of([None if found is None else getattr(found, name) for found in spreads])


def per_client(scores: Sequence[SeedScore]) -> dict[str, float | None]:
    """Return each client's mean over seeds; `None` if a seed has none."""
    clients = dict.fromkeys(client for score in scores for client in score.per_client)
    return {client: mean_of([score.per_client.get(client) for score in scores]) for client in clients}


def stages(study: StudyData) -> Table:
    """Return the scores of the latest models at each stage: one line for each (method, stage).

    Stage `G` is the server's model after aggregation, `L1` a client's model as received, and `L2` the same after local
    training, before aggregation. `local` (Acc(L)) is the mean over clients of each client's model (at G, the global
    model) on its own data, `pooled` (Acc(G)) the same on the union of all clients' data, and `sum` their sum (FLIU). Each
    has `..._ci95` over seeds.
    """
    lines = []
    for method in study.methods:
        for stage, model in (("G", GLOBAL), ("L1", PERSONAL), ("L2", PERSONAL)):
            where: dict[str, Any] = {"model": model, "stage": stage, "checkpoint": "latest"}
            local, pooled = (study.find(method, data=data, **where) for data in (LOCAL, POOLED))
            if not local and not pooled:
                continue
            line: dict[str, Any] = {"method": method, "stage": stage, "model": model}
            lines.append(line | local_and_pooled(study, local, pooled))
    return lines


def local_and_pooled(
    study: StudyData, local: Mapping[int, SeedScore], pooled: Mapping[int, SeedScore]
) -> dict[str, Any]:
    """Return Acc(L), Acc(G) and their sum over the seeds that have both, with intervals."""
    both: dict[int, float | None] = {}
    for seed in local:
        if seed in pooled:
            one, all_ = local[seed].mean, pooled[seed].mean
            both[seed] = None if one is None or all_ is None else one + all_
    line: dict[str, Any] = {}
    for name, values in (
        (LOCAL, [score.mean for score in local.values()]),
        (POOLED, [score.mean for score in pooled.values()]),
        ("sum", list(both.values())),
    ):
        line |= study.estimate(values, None if name == "sum" else study.metric).columns(name)
    return line | {"n_seeds": len(local)}


def checkpoints(study: StudyData) -> Table:
    """Return the scores of latest, best_global and best_local models: one line a method, means on clients' own data.

    `latest` is each client's model as received after the last round (L1), `latest_global` the server's model (G),
    `best_global` the server's model with the best validation score, and `best_local` each client's own best. Each has
    `..._ci95` and `..._radius`. `deployed` names the one that counts in the overview, and `selection` is its score minus that
    of the latest model, paired over seeds: what selection gained or cost.
    """
    kinds = {
        "latest": (PERSONAL, "latest"),
        "latest_global": (GLOBAL, "latest"),
        "best_global": (GLOBAL, "best_global"),
        "best_local": (PERSONAL, "best_local"),
    }
    lines = []
    for method in study.methods:
        line: dict[str, Any] = {"method": method}
        for name, (model, checkpoint) in kinds.items():
            found = study.find(method, model=model, checkpoint=checkpoint)
            line |= study.estimate([score.mean for score in found.values()], study.metric).columns(name)
        line |= study.estimate(_gains(study, method)).columns("selection")
        lines.append(line | {"deployed": chosen(study, method)[1], "n_seeds": len(study.seeds_of(method))})
    return lines


def _gains(study: StudyData, method: str) -> list[float | None]:
    """Return the deployed score minus that of the latest model of each seed; nothing where the latest is deployed."""
    model, checkpoint, _ = chosen(study, method)
    deployed, latest = study.deployed(method), study.find(method, model=model or PERSONAL, checkpoint="latest")
    pairs = [(deployed[seed].mean, latest[seed].mean) for seed in deployed if seed in latest]
    known = [None if a is None or b is None else a - b for a, b in pairs]
    return [] if checkpoint == "latest" else known


def measured(study: StudyData) -> Table:
    """Return every metric of the deployed models on the clients' own data: one line a method.

    Each metric (loss, accuracy, calibration error and so on) has its mean over seeds under its own name, with `NAME_ci95`
    and `NAME_radius`. They are `None` if a run did not measure it, or a model diverged.
    """
    names = dict.fromkeys(name for found in study.finished.values() for name in found.metrics(study.split))
    lines = []
    for method in study.methods:
        line: dict[str, Any] = {"method": method}
        for name in names:
            found = study.deployed(method, metric=name)
            line |= study.estimate([score.mean for score in found.values()], name).columns(name)
        line |= {"n_seeds": len(study.deployed(method)), "seeds": len(study.seeds)}
        lines.append(line | {"comparable": study.comparable(method)})
    return lines


def chosen(study: StudyData, method: str) -> tuple[str | None, str | None, str | None]:
    """Return (model, checkpoint, stage) of the deployed models."""
    row = next((score.row for score in study.deployed(method).values()), None)
    return (None, None, None) if row is None else (row["model"], row["checkpoint"], row["stage"])
