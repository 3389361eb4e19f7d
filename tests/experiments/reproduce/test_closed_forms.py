"""The published values of `closed_forms` are those of the formulas."""

from __future__ import annotations

import pytest

from fedlightning.commands.configs import FOLDER
from fedlightning.commands.reproduce import TABLES
from fedlightning.experiments.reproduce.tables import read_table

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
    assert told == pytest.approx(expected, rel=1e-6, abs=1e-12)
