"""The published values of `closed_forms` are those of the formulas."""

from __future__ import annotations

import pytest

from fedlightning.commands.configs import FOLDER
from fedlightning.commands.reproduce import TABLES
from fedlightning.experiments.reproduce.published_tables import read_table
from fedlightning.seeding import first_of_permutation, generator

UNEQUAL = [(1.0, 1.0, 2), (0.5, -1.0, 4), (2.0, 3.0, 10)]  # x, y, steps
Client = tuple[float, float]
"""Curvature and minimiser."""


def fixed_point(lr: float, nova: bool) -> float:
    above = below = 0.0
    for x, y, steps in UNEQUAL:
        reached = 1 - (1 - lr * 2 * x * x) ** steps  # share of the way to its own minimiser
        weight = reached if nova else steps * reached  # by samples, which are as many as steps
        above, below = above + weight * y / x, below + weight
    return above / below


def trajectory(far: float, rounds: int, scaffold: bool, lr: float = 0.02, steps: int = 5) -> float:
    """Two clients with curvatures 2 and 8 around `far` and `-far / 4`; option II, uniform mean."""
    clients: list[Client] = [(2.0, far), (8.0, -far / 4)]
    w, controls = 1.0, [0.0, 0.0]
    for _ in range(rounds):
        c, ends = sum(controls) / 2, []
        for number, (curvature, minimiser) in enumerate(clients):
            y = w
            for _ in range(steps):
                y -= lr * (curvature * (y - minimiser) + (c - controls[number] if scaffold else 0.0))
            controls[number] += (w - y) / (steps * lr) - c
            ends.append(y)
        w = sum(ends) / 2
    return w


def local_steps(
    w: float, curvature: float, minimiser: float, pull: float = 0.0, lr: float = 0.02, steps: int = 5
) -> float:
    y = w
    for _ in range(steps):
        y -= lr * (curvature * (y - minimiser) + pull * (y - w))
    return y


PAIR: list[Client] = [(2.0, 1.0), (8.0, -0.25)]
"""Loss of a client: curvature / 2 (w - minimiser)^2."""


def fedprox(mu: float, rounds: int) -> float:
    w = 1.0
    for _ in range(rounds):
        w = sum(local_steps(w, *client, pull=mu) for client in PAIR) / 2
    return w


def fedadam(lr: float, beta1: float, beta2: float, tau: float, rounds: int) -> float:
    w, m, v = 1.0, 0.0, tau**2
    for _ in range(rounds):
        delta = sum(local_steps(w, *client) for client in PAIR) / 2 - w
        m = beta1 * m + (1 - beta1) * delta
        v = beta2 * v + (1 - beta2) * delta**2
        w += lr * m / (v**0.5 + tau)
    return w


def loss_of(w: float, curvature: float, minimiser: float) -> float:
    return curvature / 2 * (w - minimiser) ** 2


def qfedavg(q: float, rounds: int, lr: float = 0.02) -> float:
    w = 1.0
    for _ in range(rounds):
        above = below = 0.0
        for client in PAIR:
            loss, delta = loss_of(w, *client), (w - local_steps(w, *client, lr=lr)) / lr
            above += loss**q * delta
            below += q * loss ** (q - 1) * delta**2 + loss**q / lr
        w -= above / below
    return w


def afl(gamma: float, rounds: int) -> float:
    w, share = 1.0, 0.5  # of the first client; the second has the rest
    for _ in range(rounds):
        losses = [loss_of(w, *client) for client in PAIR]
        w += share * (local_steps(w, *PAIR[0]) - w) + (1 - share) * (local_steps(w, *PAIR[1]) - w)
        share = min(1.0, max(0.0, share + gamma * (losses[0] - losses[1]) / 2))  # nearest point of the simplex of two
    return w


def apfl(alpha: float, rounds: int, lr: float = 0.02) -> tuple[float, list[float]]:
    w, local = 1.0, [1.0, 1.0]
    for _ in range(rounds):
        ends = []
        for number, (curvature, minimiser) in enumerate(PAIR):
            y, v = w, local[number]
            for _ in range(5):
                mixed = alpha * v + (1 - alpha) * y
                y, v = y - lr * curvature * (y - minimiser), v - lr * alpha * curvature * (mixed - minimiser)
            local[number] = v
            ends.append(y)
        w = sum(ends) / 2
    return w, [alpha * v + (1 - alpha) * w for v in local]


def sampled_scaffold(rounds: int, lr: float = 0.02) -> float:
    """One of two clients a round, as seed 0 draws them; `c` moves by 1/2 of what the participant's `c_i` moves."""
    w, c, controls = 1.0, 0.0, [0.0, 0.0]
    for number in range(rounds):
        (k,) = first_of_permutation(2, 1, generator(0, number, "server", "participation"))
        (curvature, minimiser), y = PAIR[k], w
        for _ in range(5):
            y -= lr * (curvature * (y - minimiser) + c - controls[k])
        moved = (w - y) / (5 * lr) - c
        c, controls[k], w = c + moved / 2, controls[k] + moved, y
    return w


def test_the_numbers_in_yaml_are_computed():
    table = read_table(TABLES / "closed_forms.yaml", FOLDER)
    told = {cell.name.removesuffix(" / global model"): cell.published for cell in table.cells}
    small = "a tenth of the learning rate"
    expected = {
        "FedAvg, 2, 4 and 10 steps": fixed_point(0.05, nova=False),
        "FedNova, 2, 4 and 10 steps": fixed_point(0.05, nova=True),
        f"FedAvg, {small}": fixed_point(0.005, nova=False),
        f"FedNova, {small}": fixed_point(0.005, nova=True),
        "FedNova towards the true minimiser": fixed_point(1e-9, nova=True),
    }
    for far in (1, 10):
        for rounds in (3, 20):
            expected[f"SCAFFOLD, G = {far}, {rounds} rounds"] = trajectory(far, rounds, scaffold=True)
        expected[f"FedAvg, G = {far}"] = trajectory(far, 500, scaffold=False)
        rate = trajectory(far, 21, scaffold=True) / trajectory(far, 20, scaffold=True)
        expected[f"SCAFFOLD's rate / G = {far}"] = rate
    for lam in (0.5, 2):
        expected[f"Ditto, lam = {lam:g}"] = 3.0
        for name, own in (("a", 1.0), ("c", 6.0)):
            expected[f"Ditto, lam = {lam:g} / model of {name}"] = (2 * own + lam * 3.0) / (2 + lam)
    personal = apfl(0.25, 3)
    expected |= {
        "SCAFFOLD, one of two clients a round": sampled_scaffold(12),
        "FedProx, mu = 2": fedprox(2.0, 3),
        "FedAdam, 10 rounds": fedadam(0.05, 0.9, 0.9, 1e-3, 10),
        "q-FedAvg, q = 2": qfedavg(2.0, 3),
        "AFL, 6 rounds": afl(0.1, 6),
        "APFL, alpha = 0.25": personal[0],
        "APFL, alpha = 0.25 / model of flat": personal[1][0],
        "APFL, alpha = 0.25 / model of steep": personal[1][1],
    }
    assert told == pytest.approx(expected, rel=1e-6, abs=1e-12)
