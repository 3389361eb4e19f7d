"""What methods with clusters share: who belongs to which, round by round, in `clusters.csv` and its picture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.algorithm import GLOBAL, Server, ServerModels, add_round, sheets
from fedlightning.tensors import ties


def first_groups(rows: Tensor, count: int, seed: int) -> list[list[int]]:
    """Return the rows of each group that k-means finds; where there are fewer different rows than groups, some repeat.

    Rows that differ by rounding are equal: clients with the same data, trained one by one or stacked, are not taken apart.

    Example:
        >>> first_groups(torch.tensor([[0.0], [5.0], [0.2]]), 2, seed=0)
        [[0, 2], [1]]
    """
    labels = _by_k_means(rows, different(rows, count), seed)
    groups = [[place for place, label in enumerate(labels) if label == first] for first in dict.fromkeys(labels)]
    return [groups[k % len(groups)] for k in range(count)]


def clusters_of(biases: Tensor, count: int, seed: int) -> list[int]:
    """Return the cluster of each row by k-means, on columns divided by their maximum; numbered as they first occur."""
    top = biases.max(0).values
    rows = biases / torch.where(top > 0, top, torch.ones_like(top))
    labels = _by_k_means(rows, different(rows, count), seed)
    order = list(dict.fromkeys(labels))
    return [order.index(label) for label in labels]


def _by_k_means(rows: Tensor, count: int, seed: int) -> list[int]:
    from sklearn.cluster import KMeans  # slow to import

    labels: list[int] = KMeans(count, n_init=10, random_state=seed % 2**32).fit_predict(rows.numpy()).tolist()
    return labels


def different(rows: Tensor, most: int) -> int:
    """Return how many rows differ by more than rounding, and `most` if there are more.

    Example:
        >>> different(torch.tensor([[1.0], [1.0 + 1e-7], [2.0]]), most=5)
        2
    """
    return min(len(set(ties.representatives(rows))), most)


COLUMNS = ("round", "client", "cluster", "share")
"""Columns of `clusters.csv`."""
FILE = "clusters.csv"
T = TypeVar("T")


class Clusters(ServerModels):
    """Base of methods in which each client belongs to clusters, whose models the server keeps in `server.models`.

    It writes who belongs to which cluster after every round, and draws it at the end.
    """

    def memberships(self, server: Server) -> Mapping[str, Mapping[str, float]]:
        """Return by client the share of each cluster that it belongs to; clients that are not known yet are left out."""
        cluster_by_client = server.state.get(self.key, {}).get("clusters", {})
        return {client: {cluster: 1.0} for client, cluster in cluster_by_client.items()}

    def models_in_use(self, server: Server) -> list[str]:
        """Return the keys in `server.models` of the clusters' models, whether or not they have members now."""
        return [key for key in server.models if key != GLOBAL] or [GLOBAL]

    def on_round_end(self, server: Server) -> None:
        """Write `clusters.csv`."""
        note_memberships(server, self.memberships(server))

    def on_federation_end(self, server: Server) -> None:
        """Draw who belongs to which cluster."""
        draw_memberships(server)


def cluster_module(server: Server, cluster: str | None) -> LightningModule | None:
    """Return a module with a cluster's model; `None` for no cluster, and where some entries stay with the clients."""
    if cluster is None or len(server.shared_names()) < len(server.kinds):
        return None
    return server.module_with(server.models[cluster])


def best_fitted(losses: Tensor) -> Tensor:
    """Return the share of samples, `(models,)`, that each model has the least loss on, float64.

    A sample without a loss under any of them, which a step skips, does not count. All are 0 where none counts.

    Example:
        >>> best_fitted(torch.tensor([[0.1, 0.9, torch.nan, 0.4], [0.4, 0.2, torch.nan, 0.5]]))
        tensor([0.6667, 0.3333], dtype=torch.float64)
    """
    defined = losses[:, ~losses.isnan().all(0)]
    counts = torch.bincount(ties.first_least(defined), minlength=len(losses))
    return counts / torch.tensor(max(defined.shape[1], 1), dtype=torch.float64)


def in_client_order(server: Server, by_client: Mapping[str, T]) -> dict[str, T]:
    """Return what is known of clients in the server's order, so that state does not depend on who answered first."""
    return {client: by_client[client] for client in server.clients if client in by_client}


def note_memberships(server: Server, clusters: Mapping[str, Mapping[str, float]]) -> None:
    """Add a round to `clusters.csv`. Rows of this round and later ones, left by a run that was resumed, go."""
    if server.run_dir is None or not clusters:
        return
    rows = [
        (server.round + 1, client, cluster, round(share, 6))
        for client, share_by_cluster in clusters.items()
        for cluster, share in share_by_cluster.items()
        if share > 0
    ]
    add_round(server.run_dir / FILE, COLUMNS, server.round + 1, rows)


def read_memberships(path: Path) -> list[dict[str, Any]]:
    """Return the rows of `clusters.csv`, `round` and `share` as numbers; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [row for row in sheets.read_table(file) if row["share"]]  # not one that was cut off
    return [row | {"round": int(row["round"]), "share": float(row["share"])} for row in rows]


def draw_memberships(server: Server) -> None:
    """Draw `clusters.csv` to `figures/clusters.png`, if there is such a file."""
    if server.run_dir is not None:
        rows = read_memberships(server.run_dir / FILE)
        if rows:
            save(memberships_figure(rows), server.run_dir / "figures" / "clusters.png")


def memberships_figure(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a figure with a row for each client and a column for each round, in the colour of the client's cluster.

    Of several clusters it is that with the largest share, the paler the smaller this share is. Clients stand in the order
    of their last clusters. White: nothing was known of the client yet.

    Example:
        >>> rows = [{"round": 1, "client": "a", "cluster": "one", "share": 1.0}]
        >>> memberships_figure(rows).axes[0].get_xlabel()
        'round'
    """
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    strongest: dict[tuple[str, int], tuple[float, str]] = {}
    for row in rows:
        place = row["client"], row["round"]
        if place not in strongest or row["share"] > strongest[place][0]:
            strongest[place] = row["share"], row["cluster"]
    clusters = sorted({row["cluster"] for row in rows}, key=_natural)
    places = sorted(strongest, key=lambda place: (_natural(place[0]), place[1]))
    last = {client: clusters.index(strongest[client, number][1]) for client, number in places}
    clients = sorted(last, key=lambda client: last[client])
    rounds = max(row["round"] for row in rows)
    colours = {cluster: colormaps["tab10"](number % 10)[:3] for number, cluster in enumerate(clusters)}
    image = np.ones((len(clients), rounds, 3))
    for (client, number), (share, cluster) in strongest.items():
        image[clients.index(client), number - 1] = 1 - min(share, 1.0) * (1 - np.array(colours[cluster]))
    figure = Figure(figsize=(6.4, 1.6 + 0.22 * min(len(clients), 40)), layout="constrained")
    axis = figure.subplots()
    axis.imshow(image, aspect="auto", interpolation="nearest", extent=(0.5, rounds + 0.5, len(clients) - 0.5, -0.5))
    axis.set_xlabel("round")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set_ylabel("client")
    if len(clients) <= 40:
        axis.set_yticks(range(len(clients)), clients, fontsize=7, parse_math=False)  # a client may be called "$x"
        axis.hlines(np.arange(1, len(clients)) - 0.5, 0.5, rounds + 0.5, color="white", lw=1)
    handles = [Patch(color=colours[cluster], label=cluster) for cluster in clusters[:12]]
    shares = [share for share, _ in strongest.values()]
    pale = ["paler: a smaller share"] if min(shares) < 1 else []
    title = "; ".join([*pale, *(["white: not known yet"] if len(shares) < len(clients) * rounds else [])])
    figure.legend(
        handles=handles, loc="outside upper center", ncols=min(len(handles), 4), fontsize=8, frameon=False,
        title=title or None, title_fontsize=8,
    )  # fmt: skip
    return figure


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names by the numbers in them: `"centre 2"` before `"centre 10"`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def ledger_figure(entries: Sequence[Mapping[str, Any]], start: Mapping[str, float]) -> Any:
    """Return a figure of every client's balance after each round.

    Example:
        >>> paid = {"round": 1, "client": "a", "paid": 1.0, "refunded": 0.0, "rewarded": 0.5}
        >>> axis = ledger_figure([paid], {"a": 10.0}).axes[0]
        >>> axis.lines[0].get_ydata().tolist()
        [10.0, 9.5]
    """
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rounds = max(int(entry["round"]) for entry in entries)
    change = {client: np.zeros(rounds + 1) for client in start}
    for entry in entries:
        change[entry["client"]][int(entry["round"])] += entry["refunded"] + entry["rewarded"] - entry["paid"]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axis = figure.subplots()
    colours = colormaps["tab10" if len(start) <= 10 else "tab20"]
    for number, (client, tokens) in enumerate(start.items()):
        balance = tokens + np.cumsum(change[client])
        width = 3.5 - 2.5 * number / max(len(start) - 1, 1)  # of equal lines each one shows beside those on top of it
        axis.plot(np.arange(rounds + 1), balance, lw=width, color=colours(number % colours.N))
    axis.set_xlabel("round")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set_ylabel("tokens")
    axis.grid(alpha=0.3)
    if len(start) <= 20:
        # a label "_x" would be left out, "$x" read as mathematics
        places = [str(number) for number in range(len(start))]
        legend = figure.legend(axis.lines, places, loc="outside right upper", title="client", fontsize=7, frameon=False)
        for text, client in zip(legend.get_texts(), start, strict=True):
            text.set(parse_math=False, text=client)
    return figure


def save(figure: Any, path: Path) -> None:
    """Save a figure, in a folder that is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
