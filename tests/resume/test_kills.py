"""Killed at any instant and resumed, a run ends as if nothing had happened: 13 kinds of runs, over 200 kills."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.resume.kills import KINDS, count_writes, killed_after, killed_at, same_runs

pytestmark = pytest.mark.slow
QUICK = [kind for kind in KINDS if kind != "processes"]  # its workers start anew with every process: seconds each


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Uninterrupted runs, made when they are asked for, and how often they touch their files."""
    root, made = tmp_path_factory.mktemp("whole"), {}

    def run(kind: str) -> tuple[Path, int]:
        if kind not in made:
            made[kind] = root / kind, count_writes(kind, root / kind)
        return made[kind]

    return run


def check(kind, whole, tmp_path, points, **options):
    expected, _ = whole(kind)
    for point in points:
        root = tmp_path / "root"
        assert killed_at(kind, root, *point, **options) >= 1, point
        try:
            same_runs(expected, root)
        except AssertionError as error:
            raise AssertionError(f"{kind}, killed at {point}: {error}") from error
        shutil.rmtree(root)


def test_at_every_write_of_a_round_and_at_a_third_of_the_others(whole, tmp_path):
    _, writes = whole("everything")
    dense = range(writes // 3, writes * 3 // 5)  # holds the whole second round, and the saving of its state
    check("everything", whole, tmp_path, [(n,) for n in range(1, writes + 1) if n in dense or n % 3 == 0])


def test_with_half_of_what_is_not_on_the_disk_lost(whole, tmp_path):
    _, writes = whole("FedAvg")
    check("FedAvg", whole, tmp_path, [(n,) for n in range(1, writes + 1, 4)], loses=True)


@pytest.mark.parametrize("kind", QUICK)
def test_at_writes_all_over_a_run_and_again_when_resumed(whole, tmp_path, kind):
    _, writes = whole(kind)
    draw = random.Random(kind)
    points = [(1 + (2 * n + 1) * writes // 6, draw.randint(5, 40)) for n in range(3)]
    check(kind, whole, tmp_path, points)


def test_under_worker_processes(whole, tmp_path):
    _, writes = whole("processes")
    check("processes", whole, tmp_path, [(writes // 3, writes // 4)])


@pytest.mark.parametrize("kind", ["everything", "participation", "final visits", "vectorized"])
def test_at_random_instants(whole, tmp_path, kind):
    draw = random.Random(kind)
    expected, _ = whole(kind)
    killed_after(kind, tmp_path / "root", [draw.uniform(0.02, 0.4) for _ in range(6)])
    same_runs(expected, tmp_path / "root")
