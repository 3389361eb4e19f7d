"""Tables of scores: everything, by stage, by checkpoint, by client, between clients; and who holds what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedlightning.study.fairness import Spread
from fedlightning.study.measures import FIELDS, Address, SeedScore, address, mean_of

if TYPE_CHECKING:
    from fedlightning.study.study import Study

STATISTICS = ("median", "std", "variance", "worst", "tenth_percentile", "best")


def results(study: Study) -> list[dict[str, Any]]:
    """Every score: one line for each (run, model, stage, checkpoint, data, split, metric).

    ``mean`` is the mean over seeds of the uniform mean over clients, ``ci95`` its interval, ``ci95_radius`` half its
    width, ``n_seeds`` the seeds that have a value, ``per_seed`` their means; ``weighted_mean``, ``median``, ``std``,
    ``variance``, ``worst``, ``tenth_percentile`` and ``best`` are taken over clients, then averaged over seeds;
    ``per_client`` is each client's mean over seeds. ``undefined`` lists clients whose score does not exist, ``diverged``
    (as "seed 1: client 3") those of models without a finite loss: with one of these there is no mean.
    ``comparable`` is False where the runs were tested on other data than the rest.
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


def summary(study: Study, scores: Mapping[int, SeedScore]) -> dict[str, Any]:
    """The columns of :func:`results` for the rows of some seeds."""
    found = list(scores.values())
    overall = study.estimate([score.mean for score in found])
    return {
        "mean": overall.mean,
        "ci95": overall.ci95,
        "ci95_radius": overall.radius,
        "n_seeds": overall.n,
        "per_seed": {str(seed): score.mean for seed, score in scores.items()},
        "weighted_mean": mean_of([score.weighted_mean for score in found]),
        **{name: statistic(found, name) for name in STATISTICS},
        "per_client": per_client(found),
        "undefined": list(dict.fromkeys(client for score in found for client in score.undefined)),
        "diverged": [f"seed {score.seed}: client {client}" for score in found for client in score.diverged],
    }


def statistic(scores: Iterable[SeedScore], name: str) -> float | None:
    """A field of :class:`~fedlightning.study.fairness.Spread`, mean over seeds."""
    spreads: list[Spread | None] = [score.spread for score in scores]
    return mean_of([None if found is None else getattr(found, name) for found in spreads])


def per_client(scores: Sequence[SeedScore]) -> dict[str, float | None]:
    """Each client's mean over seeds; ``None`` where a seed has none."""
    clients = dict.fromkeys(client for score in scores for client in score.per_client)
    return {client: mean_of([score.per_client.get(client) for score in scores]) for client in clients}


def stages(study: Study) -> list[dict[str, Any]]:
    """The latest models at each stage: one line for each (method, stage), never mixed.

    ``local``: Acc(L), each client's model (at G, the global model) on its own data, mean over clients; ``pooled``:
    Acc(G), on the union of all clients' data; ``sum``: of the two (FLIU); each with ``..._ci95`` over seeds. ``stage``:
    ``G`` the server's model after aggregation, ``L1`` as received, ``L2`` after local training, before aggregation.
    """
    lines = []
    for method in study.methods:
        for stage, model in (("G", "global"), ("L1", "personal"), ("L2", "personal")):
            where: dict[str, Any] = {"model": model, "stage": stage, "checkpoint": "latest"}
            local, pooled = (study.find(method, data=data, **where) for data in ("local", "pooled"))
            if not local and not pooled:
                continue
            line: dict[str, Any] = {"method": method, "stage": stage, "model": model}
            lines.append(line | local_and_pooled(study, local, pooled))
    return lines


def local_and_pooled(study: Study, local: Mapping[int, SeedScore], pooled: Mapping[int, SeedScore]) -> dict[str, Any]:
    """Acc(L), Acc(G) and their sum over the seeds that have both, with intervals."""
    both: dict[int, float | None] = {}
    for seed in local:
        if seed in pooled:
            one, all_ = local[seed].mean, pooled[seed].mean
            both[seed] = None if one is None or all_ is None else one + all_
    line: dict[str, Any] = {}
    for name, values in (
        ("local", [score.mean for score in local.values()]),
        ("pooled", [score.mean for score in pooled.values()]),
        ("sum", list(both.values())),
    ):
        found = study.estimate(values)
        line |= {name: found.mean, f"{name}_ci95": found.ci95, f"{name}_radius": found.radius}
    return line | {"n_seeds": len(local)}


def checkpoints(study: Study) -> list[dict[str, Any]]:
    """Latest, best_global and best_local side by side: one line a method, mean over clients of each own data.

    ``latest`` is each client's model as received after the last round (L1), ``latest_global`` the server's model (G),
    ``best_global`` the server's model with the best validation score, ``best_local`` each client's own best; each with
    ``..._ci95`` and ``..._radius``. ``deployed`` names the one that counts in the overview.
    """
    kinds = {
        "latest": ("personal", "latest"),
        "latest_global": ("global", "latest"),
        "best_global": ("global", "best_global"),
        "best_local": ("personal", "best_local"),
    }
    lines = []
    for method in study.methods:
        line: dict[str, Any] = {"method": method}
        for name, (model, checkpoint) in kinds.items():
            found = study.estimate([s.mean for s in study.find(method, model=model, checkpoint=checkpoint).values()])
            line |= {name: found.mean, f"{name}_ci95": found.ci95, f"{name}_radius": found.radius}
        lines.append(line | {"deployed": chosen(study, method)[1], "n_seeds": len(study.seeds_of(method))})
    return lines


def measured(study: Study) -> list[dict[str, Any]]:
    """Everything that was measured of the deployed models on the clients' own data: one line a method.

    For each metric (loss, accuracy, calibration error ...) its mean over seeds under its own name, with ``NAME_ci95`` and
    ``NAME_radius``; ``None`` where a run did not measure it, or a model diverged.
    """
    names = dict.fromkeys(name for found in study.finished.values() for name in found.metrics(study.split))
    lines = []
    for method in study.methods:
        line: dict[str, Any] = {"method": method}
        for name in names:
            found = study.estimate([score.mean for score in study.deployed(method, metric=name).values()])
            line |= {name: found.mean, f"{name}_ci95": found.ci95, f"{name}_radius": found.radius}
        line |= {"n_seeds": len(study.deployed(method)), "seeds": len(study.seeds)}
        lines.append(line | {"comparable": study.comparable(method)})
    return lines


def chosen(study: Study, method: str) -> tuple[str | None, str | None, str | None]:
    """(model, checkpoint, stage) of the deployed models."""
    row = next((score.row for score in study.deployed(method).values()), None)
    return (None, None, None) if row is None else (row["model"], row["checkpoint"], row["stage"])


def clients(study: Study) -> list[dict[str, Any]]:
    """Each client with each method: one line for each (client, method).

    ``score``: of the model the client would use, mean over seeds, with ``ci95`` and ``ci95_radius``; ``siloed``: of its own
    siloed model; ``gain``: the mean of their differences at the seeds both have, positive where the method is better for
    the client (for a loss, where it is lower), with ``gain_ci95``; ``train``, ``test``: its samples.
    """
    silo = study.deployed(study.baselines["siloed"]) if "siloed" in study.baselines else {}
    sizes = _sizes(study)
    sign = 1.0 if study.higher_is_better else -1.0
    lines = []
    for client in _clients(study):
        for method in study.methods:
            scores = {seed: score.per_client.get(client) for seed, score in study.deployed(method).items()}
            own = {seed: score.per_client.get(client) for seed, score in silo.items()}
            gains: list[float | None] = []
            for seed in sorted(set(scores) & set(own)) if study.comparable(method) else []:
                score, base = scores[seed], own[seed]
                gains.append(None if score is None or base is None else sign * (score - base))
            found, gain = study.estimate(list(scores.values())), study.estimate(gains)
            lines.append(
                {
                    "client": client,
                    "method": method,
                    "score": found.mean,
                    "ci95": found.ci95,
                    "ci95_radius": found.radius,
                    "siloed": mean_of(list(own.values())),
                    "gain": gain.mean,
                    "gain_ci95": gain.ci95,
                    "gain_radius": gain.radius,
                    "n_seeds": found.n,
                    "train": sizes.get(client, {}).get("train"),
                    "test": sizes.get(client, {}).get("test"),
                }
            )
    return lines


def matrix(study: Study, method: str) -> dict[str, Any]:
    """Each client's model (row) on each client's data (column), mean over seeds; ``None`` where not scored.

    Returns:
        ``clients``, ``values`` (a list of rows), ``row_means`` (a client's model offered to everybody, its own data
        included; ``None`` if a cell is missing), ``diagonal_mean`` and ``n_seeds``. Models are the deployed ones.
    """
    names = _clients(study, method)
    columns = {}
    for source in names:
        columns[source] = list(study.deployed(method, data=f"client:{source}").values())
    own = list(study.deployed(method).values())
    values = [
        [
            mean_of([score.per_client.get(row) for score in (own if row == column else columns[column])])
            for column in names
        ]
        for row in names
    ]
    return {
        "clients": names,
        "values": values,
        "row_means": [mean_of(row) for row in values],
        "diagonal_mean": mean_of([values[i][i] for i in range(len(names))]),
        "n_seeds": len(own),
    }


def partition(study: Study) -> list[dict[str, Any]]:
    """Who holds what at the first seed: one line for each (client, split), ``samples`` and ``classes``.

    ``classes`` are the samples of each class (``None`` where the run did not say; it says so for training data).
    """
    lines = []
    for client, held in _sizes(study).items():
        for split in ("train", "val", "test"):
            if held.get(split) is not None:
                classes = held.get("classes") if split == "train" else None
                lines.append({"client": client, "split": split, "samples": held[split], "classes": classes})
    return lines


def _first(study: Study) -> Mapping[str, Any]:
    found = [scores.run.summary for key, scores in study.finished.items() if key not in study.odd]
    return found[0] if found else {}


def _sizes(study: Study) -> dict[str, dict[str, Any]]:
    first = _first(study)
    known: dict[str, dict[str, Any]] = first.get("data", {}).get("clients", {})
    return known or {client: {"train": n} for client, n in first.get("num_samples", {}).items()}


def _clients(study: Study, method: str | None = None) -> list[str]:
    keys = [key for key in study.finished if method in (None, key[0]) and key not in study.odd]
    keys = keys or [key for key in study.finished if method in (None, key[0])]
    return list(dict.fromkeys(client for key in keys for client in study.finished[key].run.clients))
