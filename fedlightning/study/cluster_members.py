"""Who belongs to which cluster: how many clusters there are, how often clients change, and whether groups were found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from fedlightning.study.data import StudyData, Table
from fedlightning.study.finished_runs import Run, natural
from fedlightning.study.run_scores import mean_of
from fedlightning.study.run_tables import Membership

Places = dict[str, dict[int, tuple[str, float]]]
"""Client -> round -> the cluster it belongs to most, and its share."""


def clusters(study: StudyData) -> Table:
    """Return one line a method whose runs have a `clusters.csv`: how its clients are divided, means over seeds.

    A client is in the cluster that it belongs to most (of equal shares, the one that the file names first).

    - `clusters`: clusters with a client, after the last round; `most`: the most after any round.
    - `changes`: how often a client is in another cluster than a round before, mean over clients; `changed`: percent of
      clients that ever are; `last_change`: the last round after which one is, 0 if none ever is.
    - `share`: how much of a client belongs to its cluster after the last round, mean over clients.
    - `agreement`: adjusted Rand index of the clusters after the last round and the groups that the data module planted
      (1: the same, 0: as chance would have it), with `agreement_ci95`; `None` unless the run knows them (`groups` under
      `data` in `summary.json`), and where all clients are of one group.
    - `n_seeds`: runs with a readable file.
    """
    lines = []
    for method in study.methods:
        places_by_seed = by_seed(study, method)
        if not places_by_seed:
            continue
        each = [_measures(places_of_seed) for places_of_seed in places_by_seed.values()]
        line: dict[str, Any] = {"method": method} | {
            name: mean_of([measures[name] for measures in each]) for name in each[0]
        }
        agreed = study.estimate(
            [
                agreement(places_of_seed, planted_groups(study.finished[method, s].run))
                for s, places_of_seed in places_by_seed.items()
            ],
            "agreement",
        )
        lines.append(line | agreed.columns("agreement") | {"n_seeds": len(places_by_seed), "seeds": len(study.seeds)})
    return lines


def memberships(study: StudyData) -> Table:
    """Return one line for each method and client: where it began and ended.

    `first` and `cluster` are its clusters after the first round in which it had one and after the last, and `share` what
    of it belongs to the latter, all at `seed`: clusters of several seeds have nothing but their names in common. `group` is
    the planted one, if that is known. `changes` is the mean over seeds (`n_seeds`).
    """
    lines: Table = []
    for method in study.methods:
        places_by_seed = by_seed(study, method)
        seed, places = next(iter(places_by_seed.items()), (0, Places()))
        groups = planted_groups(study.finished[method, seed].run) if places_by_seed else {}
        for client, track in places.items():
            rounds = sorted(track)
            (first, _), (last, share) = track[rounds[0]], track[rounds[-1]]
            changes = [
                float(len(_changes(places_of_seed[client])))
                for places_of_seed in places_by_seed.values()
                if client in places_of_seed
            ]
            lines.append(
                {"method": method, "client": client, "seed": seed, "group": groups.get(client), "first": first}
                | {"cluster": last, "share": share, "changes": mean_of(changes), "n_seeds": len(changes)}
            )
    return lines


def by_seed(study: StudyData, method: str) -> dict[int, Places]:
    """Return by seed where the clients of a method were; seeds without a readable `clusters.csv` are left out."""
    rows_by_seed = {seed: study.tables[method, seed].memberships for seed in study.seeds_of(method)}
    return {seed: places(rows) for seed, rows in rows_by_seed.items() if rows}


def places(rows: Iterable[Membership]) -> Places:
    """Return by client and round the cluster that it belongs to most, with its share.

    Example:
        >>> places([Membership(1, "a", "one", 0.4), Membership(1, "a", "two", 0.6)])
        {'a': {1: ('two', 0.6)}}
    """
    places_by_client: Places = {}
    for row in rows:
        track = places_by_client.setdefault(row.client, {})
        if row.round not in track or row.share > track[row.round][1]:
            track[row.round] = row.cluster, row.share
    return {client: places_by_client[client] for client in sorted(places_by_client, key=natural)}


def planted_groups(run: Run) -> dict[str, str]:
    """Return by client the group that the data module planted; empty if the run does not know them."""
    groups = run.summary.get("data", {}).get("groups")
    return {str(client): str(group) for client, group in groups.items()} if isinstance(groups, dict) else {}


def agreement(places_by_client: Places, groups: Mapping[str, str]) -> float | None:
    """Return the adjusted Rand index of the last clusters and the planted groups; `None` if there is nothing to find.

    Example:
        >>> agreement({"a": {1: ("one", 1.0)}, "b": {1: ("two", 1.0)}}, {"a": "0", "b": "1"})
        1.0
    """
    shared = [client for client in places_by_client if client in groups]
    if len({groups[client] for client in shared}) < 2:
        return None
    from sklearn.metrics import adjusted_rand_score  # slow to import

    return float(
        adjusted_rand_score(
            [groups[client] for client in shared], [_last(places_by_client[client])[0] for client in shared]
        )
    )


def _measures(places_by_client: Places) -> dict[str, float]:
    changes = [_changes(places) for places in places_by_client.values()]
    last = [_last(places) for places in places_by_client.values()]
    inhabited: dict[int, set[str]] = {}
    for places in places_by_client.values():
        for number, (cluster, _) in places.items():
            inhabited.setdefault(number, set()).add(cluster)
    return {
        "clusters": float(len({cluster for cluster, _ in last})),
        "most": float(max(map(len, inhabited.values()))),
        "changes": sum(map(len, changes)) / len(places_by_client),
        "changed": 100.0 * sum(map(bool, changes)) / len(places_by_client),
        "last_change": float(max((number for rounds in changes for number in rounds), default=0)),
        "share": sum(share for _, share in last) / len(places_by_client),
        "clients": float(len(places_by_client)),
    }


def _changes(places: Mapping[int, tuple[str, float]]) -> list[int]:
    """Return the rounds after which a client is in another cluster than after the last one that is known before."""
    rounds = sorted(places)
    return [now for before, now in pairwise(rounds) if places[before][0] != places[now][0]]


def _last(places: Mapping[int, tuple[str, float]]) -> tuple[str, float]:
    return places[max(places)]
