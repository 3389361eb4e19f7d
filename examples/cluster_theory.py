"""When does a client gain from a cluster? The theory of the PI-FL paper, corrected, beside a simulation.

    python examples/cluster_theory.py [--clients 8] [--others 8] [--samples 5] [--sigma 1.0] [--tau 0.7] [--apart 1.0]
        [--out runs/theory]

The model of the paper (Khan et al., "PI-FL", 2023, Eq. 9 to 13): client j of a cluster estimates its own mean
`mu_j ~ N(beta, tau^2)` from `n_j` numbers of standard deviation `sigma`. Alone its squared error is `sigma^2 / n_i`. In a
cluster it takes the mean of all numbers, with weights `w_j = n_j / n_T`.

The paper gives every other client's mean the variance `2 tau^2`, as if these were independent. But they share `beta`, so
their errors are correlated, and the printed error is too small. With the correlation it is

    sigma^2 / n_T + tau^2 ( sum_{j != i} w_j^2 + (1 - w_i)^2 )

and for m clients of `n_0` numbers each `sigma^2 / (m n_0) + tau^2 (m - 1) / m`: a cluster helps if and only if
`tau^2 < sigma^2 / n_0`, whatever its size (as printed: `tau^2 < m sigma^2 / (2 n_0)`, which grows with the cluster).
Federated learning over two clusters (Eq. 11) adds `((sum of the others' weights) (beta_2 - beta_1))^2`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def printed_error(sizes: Sequence[int], i: int, sigma: float, tau: float) -> float:
    """Return client i's error in a cluster as the paper prints it (Eq. 10): without the covariances.

    Args:
        sizes: Numbers of each client of the cluster.
        i: The client.
        sigma: Standard deviation of a client's numbers.
        tau: Standard deviation of the clients' means.
    """
    total = sum(sizes)
    others = sum((n / total) ** 2 * (sigma**2 / n + 2 * tau**2) for j, n in enumerate(sizes) if j != i)
    return others + (sizes[i] / total) ** 2 * sigma**2 / sizes[i]


def cluster_error(sizes: Sequence[int], i: int, sigma: float, tau: float) -> float:
    """Return client i's error in a cluster, covariances included; arguments as for `printed_error`."""
    total = sum(sizes)
    spread = sum((n / total) ** 2 for j, n in enumerate(sizes) if j != i) + (1 - sizes[i] / total) ** 2
    return sigma**2 / total + tau**2 * spread


def federated_error(
    sizes: Sequence[int], others: Sequence[int], i: int, sigma: float, tau: float, apart: float
) -> float:
    """Return the error of client i of the first cluster if both clusters train one model (Eq. 11, corrected).

    Args:
        sizes: Numbers of each client of the first cluster.
        others: Numbers of each client of the second.
        i: The client, of the first.
        sigma: Standard deviation of a client's numbers.
        tau: Standard deviation of the clients' means within a cluster.
        apart: `beta_2 - beta_1`.
    """
    share = sum(others) / (sum(sizes) + sum(others))
    return cluster_error([*sizes, *others], i, sigma, tau) + (share * apart) ** 2


def simulated_error(
    sizes: Sequence[int],
    others: Sequence[int],
    i: int,
    sigma: float,
    tau: float,
    apart: float,
    draws: int = 200_000,
    seed: int = 0,
) -> float:
    """Return the same by simulation: the mean squared distance of the pooled mean from client i's own mean.

    Args:
        sizes: Numbers of each client of the first cluster.
        others: Numbers of each client of the second; none for the cluster alone.
        i: The client, of the first.
        sigma: Standard deviation of a client's numbers.
        tau: Standard deviation of the clients' means within a cluster.
        apart: `beta_2 - beta_1`.
        draws: Repetitions.
        seed: Seed of the draws.
    """
    rng = np.random.default_rng(seed)
    counts = np.array([*sizes, *others], dtype=float)
    centres = np.where(np.arange(len(counts)) < len(sizes), 0.0, apart)
    means = centres + tau * rng.standard_normal((draws, len(counts)))
    averages = means + sigma / np.sqrt(counts) * rng.standard_normal(means.shape)
    pooled = averages @ (counts / counts.sum())
    return float(np.mean((pooled - means[:, i]) ** 2))


def draw(args: argparse.Namespace, sizes: Sequence[int]) -> Path:
    """Draw the errors over tau, and return the figure's path."""
    from matplotlib.figure import Figure

    taus = np.linspace(0.0, 1.5 * max(args.tau, args.sigma / np.sqrt(args.samples)), 40)
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axis = figure.subplots()
    axis.plot(taus, [cluster_error(sizes, 0, args.sigma, t) for t in taus], label="in the cluster")
    axis.plot(taus, [printed_error(sizes, 0, args.sigma, t) for t in taus], "--", label="in the cluster, as printed")
    some = taus[::5]
    axis.plot(some, [simulated_error(sizes, (), 0, args.sigma, t, 0.0, 20_000) for t in some], "k.", label="simulated")
    axis.axhline(args.sigma**2 / args.samples, color="gray", label="alone")
    axis.axvline(args.sigma / np.sqrt(args.samples), color="gray", lw=0.8, ls=":")
    axis.set_xlabel("tau: how much clients of a cluster differ (dotted: the cluster stops to help)")
    axis.set_ylabel("squared error")
    axis.legend(frameon=False)
    path = Path(args.out) / "theory.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def main() -> None:
    """Print and draw the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8, help="clients of the cluster")
    parser.add_argument("--others", type=int, default=8, help="clients of the other cluster")
    parser.add_argument("--samples", type=int, default=5, help="numbers of every client")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the numbers")
    parser.add_argument("--tau", type=float, default=0.7, help="standard deviation of the clients' means")
    parser.add_argument("--apart", type=float, default=1.0, help="distance of the two clusters")
    parser.add_argument("--out", default="runs/theory", help="folder of the figure")
    args = parser.parse_args()
    if min(args.clients, args.samples) < 1 or min(args.others, args.sigma, args.tau) < 0:
        parser.error("clients and samples are 1 or more; others, sigma and tau are not negative")
    sizes, others = [args.samples] * args.clients, [args.samples] * args.others
    alone, inside = args.sigma**2 / args.samples, cluster_error(sizes, 0, args.sigma, args.tau)
    rows = [
        ("alone", alone, simulated_error(sizes[:1], (), 0, args.sigma, args.tau, 0.0)),
        ("in the cluster", inside, simulated_error(sizes, (), 0, args.sigma, args.tau, 0.0)),
        ("in the cluster, as printed", printed_error(sizes, 0, args.sigma, args.tau), None),
        (
            "one model for both clusters",
            federated_error(sizes, others, 0, args.sigma, args.tau, args.apart),
            simulated_error(sizes, others, 0, args.sigma, args.tau, args.apart),
        ),
    ]
    print(f"{'squared error of a client':28} {'formula':>8} {'simulated':>10}")
    for name, formula, simulated in rows:
        print(f"{name:28} {formula:8.3f} {'' if simulated is None else f'{simulated:10.3f}'}")
    words = "helps" if inside < alone else "does not help"
    print(f"tau^2 = {args.tau**2:.3f}, sigma^2 / n = {alone:.3f}: the cluster {words}.")
    print(f"Figure: {draw(args, sizes)}")


if __name__ == "__main__":
    main()
