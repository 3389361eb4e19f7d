"""Tables of scores: all of them, by stage, checkpoint, metric, client and architecture, and of clients that did not train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedlightning.study.columns import GLOBAL, LOCAL, PERSONAL, POOLED, UNSEEN
from fedlightning.study.data import StudyData, Table
from fedlightning.study.fairness_measures import Spread, drop_rounding
from fedlightning.study.finished_runs import natural
from fedlightning.study.run_scores import FIELDS, Address, Estimate, SeedScore, address, mean_of


def clients(study: StudyData) -> Table:
    """Return the score of each client with each method: one line for each (client, method).

    `score` is that of the model the client would use, averaged over seeds, with `ci95` and `ci95_radius`. `siloed` is
    that of its own siloed model. `gain` is the mean of their differences at the seeds both have, with `gain_ci95`; it is
    positive if the method is better for the client (for a loss, if it is lower). `train` and `test` count its samples.
    """
    silo = study.siloed_scores()
    sizes = _sizes(study)
    sign = 1.0 if study.higher_is_better else -1.0
    lines = []
    for client in _clients(study):
        for method in study.methods:
            scores = {seed: score.per_client.get(client) for seed, score in study.deployed(method).items()}
            siloed = {seed: score.per_client.get(client) for seed, score in silo.items()}
            gains: list[float | None] = []
            for seed in sorted(set(scores) & set(siloed)) if study.comparable(method) else []:
                score, base = scores[seed], siloed[seed]
                gains.append(None if score is None or base is None else sign * (score - base))
            score_estimate, gain = study.estimate(list(scores.values()), study.metric), study.estimate(gains)
            if gain.mean is not None and score_estimate.mean is not None:
                gain = replace(gain, mean=drop_rounding(gain.mean, score_estimate.mean))
            lines.append(
                {
                    "client": client,
                    "method": method,
                    "score": score_estimate.mean,
                    "ci95": score_estimate.ci95,
                    "ci95_radius": score_estimate.radius,
                    "siloed": mean_of(list(siloed.values())),
                    **gain.columns("gain"),
                    "n_seeds": score_estimate.n,
                    "train": sizes.get(client, {}).get("train"),
                    "test": sizes.get(client, {}).get("test"),
                }
            )
    return lines


def matrix(study: StudyData, method: str) -> dict[str, Any]:
    """Return the score of each client's deployed model (row) on each client's data (column), averaged over seeds."""
    names = _clients(study, method)
    columns = {}
    for source in names:
        columns[source] = list(study.deployed(method, data=f"client:{source}").values())
    own_scores = list(study.deployed(method).values())
    values = [
        [
            mean_of([score.per_client.get(row) for score in (own_scores if row == column else columns[column])])
            for column in names
        ]
        for row in names
    ]
    return {
        "clients": names,
        "values": values,
        "row_means": [mean_of(row) for row in values],
        "diagonal_mean": mean_of([values[i][i] for i in range(len(names))]),
        "n_seeds": len(own_scores),
    }


def partition(study: StudyData) -> Table:
    """Return the samples of each client at the first seed: one line for each (client, split).

    `samples` counts them. `classes` counts them by class, for training data only, and is `None` if the run did not write
    it.
    """
    lines = []
    for client, sizes in _sizes(study).items():
        for split in ("train", "val", "test"):
            if sizes.get(split) is not None:
                classes = sizes.get("classes") if split == "train" else None
                lines.append({"client": client, "split": split, "samples": sizes[split], "classes": classes})
    return lines


def class_names(study: StudyData) -> list[str]:
    """Return the names of the classes, as the runs on the usual test data tell them; `[]` where they do not."""
    summaries = (scores.run.summary.get("data", {}) for key, scores in study.finished.items() if key not in study.odd)
    return next((list(map(str, data["class_names"])) for data in summaries if data.get("class_names")), [])


def _sizes(study: StudyData) -> dict[str, dict[str, Any]]:
    """Return the samples of each client by split, from the first run on the usual test data."""
    first = next((scores.run.summary for key, scores in study.finished.items() if key not in study.odd), {})
    sizes: dict[str, dict[str, Any]] = first.get("data", {}).get("clients", {})
    sizes = sizes or {client: {"train": n} for client, n in first.get("num_samples", {}).items()}
    return {client: sizes[client] for client in sorted(sizes, key=natural)}


def _clients(study: StudyData, method: str | None = None) -> list[str]:
    """Return the clients of all runs, or of those of one method; of runs on the usual test data if there are any."""
    keys = [key for key in study.finished if method in (None, key[0]) and key not in study.odd]
    keys = keys or [key for key in study.finished if method in (None, key[0])]
    return list(dict.fromkeys(client for key in keys for client in study.finished[key].run.clients))


def architectures(study: StudyData) -> Table:
    """Return one line for each method and architecture: test scores of the clients that have it, means over them and seeds.

    - `architecture`, `parameters` of its model, `clients` that have it (of the first seed).
    - `mean`: the deployed models, with `ci95` and `ci95_radius`; `worst`: the worst-served of these clients, mean over seeds.
    - `gain`: `mean` minus that of training alone (Local), paired by seed over the same clients, with `gain_ci95` and
      `gain_radius`; `None` without that baseline.
    - `n_seeds` that have a score.
    """
    local = study.baselines.get("siloed")
    alone = study.deployed(local) if local is not None else {}
    lines = []
    for method in study.methods:
        runs = {seed: study.finished[method, seed].run.summary for seed in study.seeds_of(method)}
        architectures_by_seed = {
            seed: summary["architectures"] for seed, summary in runs.items() if summary.get("architectures")
        }
        deployed = study.deployed(method)
        first: dict[str, Any] = next(iter(architectures_by_seed.values()), {})
        for name, about in first.items():
            members = {
                seed: members_of[name]["clients"]
                for seed, members_of in architectures_by_seed.items()
                if name in members_of
            }
            if not any(members.values()):
                continue  # the server's own
            means = {seed: _mean(deployed[seed], clients) for seed, clients in members.items() if seed in deployed}
            others = {seed: _mean(alone[seed], members[seed]) for seed in means if seed in alone}
            gains = [
                None if value is None or others.get(seed) is None else value - others[seed]  # type: ignore[operator]
                for seed, value in means.items()
            ]
            gain = Estimate() if method == local else study.estimate(gains)
            lines.append(
                {
                    "method": method,
                    "architecture": name,
                    "parameters": about["parameters"],
                    "clients": about["clients"],
                    **study.estimate(list(means.values()), study.metric).columns(),
                    "worst": mean_of([_worst(study, deployed[seed], members[seed]) for seed in means]),
                    **gain.columns("gain"),
                    "n_seeds": sum(value is not None for value in means.values()),
                }
            )
    return lines


def _values_of(score: SeedScore, clients: list[str]) -> list[float]:
    return [score.defined[client] for client in clients if client in score.defined] if score.sound else []


def _mean(score: SeedScore, clients: list[str]) -> float | None:
    values = _values_of(score, clients)
    return sum(values) / len(values) if values else None


def _worst(study: StudyData, score: SeedScore, clients: list[str]) -> float | None:
    values = _values_of(score, clients)
    return (min if study.higher_is_better else max)(values) if values else None


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
    seed_scores = list(scores.values())
    overall = study.estimate(
        [score.mean for score in seed_scores], seed_scores[0].row["metric"] if seed_scores else None
    )
    return {
        **overall.columns(),
        "n_seeds": overall.n,
        "per_seed": {str(seed): score.mean for seed, score in scores.items()},
        "weighted_mean": mean_of([score.weighted_mean for score in seed_scores]),
        **{name: statistic(seed_scores, name) for name in STATISTICS},
        "per_client": per_client(seed_scores),
        "clients": min((len(score.defined) for score in seed_scores), default=0),
        "clients_of": max((len(score.per_client) for score in seed_scores), default=0),
        "undefined": list(dict.fromkeys(client for score in seed_scores for client in score.undefined)),
        "diverged": [f"seed {score.seed}: client {client}" for score in seed_scores for client in score.diverged],
    }


def statistic(scores: Iterable[SeedScore], name: str) -> float | None:
    """Return a field of :class:`~fedlightning.study.fairness_measures.Spread`, averaged over seeds."""
    spreads: list[Spread | None] = [score.spread for score in scores]
    return mean_of([None if spread is None else getattr(spread, name) for spread in spreads])


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
            own_mean, all_ = local[seed].mean, pooled[seed].mean
            both[seed] = None if own_mean is None or all_ is None else own_mean + all_
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
            score_by_seed = study.find(method, model=model, checkpoint=checkpoint)
            line |= study.estimate([score.mean for score in score_by_seed.values()], study.metric).columns(name)
        line |= study.estimate(_gains(study, method)).columns("selection")
        lines.append(line | {"deployed": chosen(study, method)[1], "n_seeds": len(study.seeds_of(method))})
    return lines


def _gains(study: StudyData, method: str) -> list[float | None]:
    """Return the deployed score minus that of the latest model of each seed; nothing where the latest is deployed."""
    model, checkpoint, _ = chosen(study, method)
    deployed, latest = study.deployed(method), study.find(method, model=model or PERSONAL, checkpoint="latest")
    pairs = [(deployed[seed].mean, latest[seed].mean) for seed in deployed if seed in latest]
    gains = [None if a is None or b is None else a - b for a, b in pairs]
    return [] if checkpoint == "latest" else gains


def measured(study: StudyData) -> Table:
    """Return every metric of the deployed models on the clients' own data: one line a method.

    Each metric (loss, accuracy, calibration error and so on) has its mean over seeds under its own name, with `NAME_ci95`
    and `NAME_radius`. They are `None` if a run did not measure it, or a model diverged.
    """
    names = dict.fromkeys(name for scores in study.finished.values() for name in scores.metrics(study.split))
    lines = []
    for method in study.methods:
        line: dict[str, Any] = {"method": method}
        for name in names:
            score_by_seed = study.deployed(method, metric=name)
            line |= study.estimate([score.mean for score in score_by_seed.values()], name).columns(name)
        line |= {"n_seeds": len(study.deployed(method)), "seeds": len(study.seeds)}
        lines.append(line | {"comparable": study.comparable(method)})
    return lines


def chosen(study: StudyData, method: str) -> tuple[str | None, str | None, str | None]:
    """Return (model, checkpoint, stage) of the deployed models."""
    row = next((score.row for score in study.deployed(method).values()), None)
    return (None, None, None) if row is None else (row["model"], row["checkpoint"], row["stage"])


def unseen(study: StudyData) -> Table:
    """Return one line a method: the scores of held-out clients on their own test data, means over clients, then seeds.

    - `mean`: the model that an unseen client deploys after one message and no training (stage L1), with `ci95` and
      `ci95_radius`; `worst` and `std` over these clients; `per_client`.
    - `global`: the global model as it stands (stage G); `best_global`: the one selected on the trained clients'
      validation data. Both with `..._ci95` and `..._radius`.
    - `trained`: the deployed models of the clients that trained, as in the overview; `gap`: `mean` minus `trained`, over
      the seeds that have both, with `gap_ci95` and `gap_radius`. They are means over different clients with different
      data: how hard the held-out clients are is part of the gap.
    - `clients`: held-out clients by seed; `n_seeds` that have a score; `refused`: why a method has none.
    """
    return [line for method in study.methods if (line := _unseen_line(study, method)) is not None]


def _unseen_line(study: StudyData, method: str) -> dict[str, Any] | None:
    summaries = [study.finished[method, seed].run.summary for seed in study.seeds_of(method)]
    held_out = [summary["held_out"] for summary in summaries if summary.get("held_out")]
    if not held_out:
        return None
    unseen = _unseen_scores(study, method, "latest", "L1")
    trained = study.deployed(method)
    gaps = [
        None if unseen[seed].mean is None or trained[seed].mean is None else unseen[seed].mean - trained[seed].mean  # type: ignore[operator]
        for seed in unseen
        if seed in trained
    ]
    means = {
        "mean": [score.mean for score in unseen.values()],
        "global": [score.mean for score in _unseen_scores(study, method, "latest", "G").values()],
        "best_global": [score.mean for score in _unseen_scores(study, method, "best_global", "G").values()],
        "gap": gaps,
    }
    line: dict[str, Any] = {"method": method}
    for name, values in means.items():
        line |= study.estimate(values, None if name == "gap" else study.metric).columns(name)
    return line | {
        "worst": statistic(unseen.values(), "worst"),
        "std": statistic(unseen.values(), "std"),
        "trained": mean_of([score.mean for score in trained.values()]) if trained else None,
        "per_client": _unseen_per_client(list(unseen.values())),
        "clients": [", ".join(site_group.get("clients", {})) for site_group in held_out],
        "n_seeds": sum(score.mean is not None for score in unseen.values()),
        "seeds": len(study.seeds),
        "refused": next((site_group["refused"] for site_group in held_out if site_group.get("refused")), None),
    }


def _unseen_per_client(scores: Sequence[SeedScore]) -> dict[str, float | None]:
    """Return each client's mean over the seeds that held it out; `None` where one of them has no value."""
    clients = dict.fromkeys(client for score in scores for client in score.per_client)
    return {c: mean_of([score.per_client[c] for score in scores if c in score.per_client]) for c in clients}


def _unseen_scores(study: StudyData, method: str, checkpoint: str, stage: str) -> dict[int, SeedScore]:
    return study.find(method, model=UNSEEN, checkpoint=checkpoint, stage=stage)
