import numpy as np
import pytest

from fedlightning.datamodules.plans import _repair, apportion, round_table, sinkhorn


def test_apportion_is_the_largest_remainder():
    assert apportion(np.array([1, 1, 1]), 10).tolist() == [4, 3, 3]
    assert apportion(np.array([0.5, 0.3, 0.2]), 9).tolist() == [4, 3, 2]  # 4.5, 2.7, 1.8
    assert apportion(np.array([0, 0]), 3).tolist() == [2, 1]


def test_apportion_honours_the_minimum():
    rng = np.random.default_rng(0)
    for _ in range(50):
        weights = rng.dirichlet(np.full(20, 0.05))
        parts = apportion(weights, 500, minimum=7)
        assert parts.sum() == 500 and parts.min() >= 7
    with pytest.raises(ValueError, match="lower the minimum"):
        apportion(np.ones(3), 5, minimum=2)


def test_round_table_keeps_margins():
    rng = np.random.default_rng(1)
    for _ in range(200):
        clients, classes = rng.integers(1, 12), rng.integers(1, 8)
        totals = rng.integers(0, 15, classes)
        table = rng.dirichlet(np.full(clients, rng.choice([0.05, 0.5, 5.0])), size=classes).T * totals
        counts = round_table(table)
        assert (counts.sum(axis=0) == totals).all()
        assert (counts >= np.floor(table - 1e-5)).all() and (counts <= np.ceil(table + 1e-5)).all()
        rows = table.sum(axis=1)
        assert (counts.sum(axis=1) >= np.floor(rows - 1e-5)).all() and (
            counts.sum(axis=1) <= np.ceil(rows + 1e-5)
        ).all()


@pytest.mark.parametrize("down", [True, False])
def test_repair_moves_units_along_chains(down):
    # Largest remainder with carry-over is almost never off by more than one, so the repair gets a bad start of its own.
    table = np.array([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5], [1.0, 1.0, 1.0]])
    counts = np.array([[1, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 1]])
    low = np.floor(table).astype(int)
    room = table.sum(axis=1).astype(int)
    give = counts.sum(axis=1) > room if down else counts.sum(axis=1) < room
    _repair(counts, low, table > low, give, room, down)
    assert counts.sum(axis=1).tolist() == [1, 1, 1, 3] and counts.sum(axis=0).tolist() == [2, 2, 2]
    assert (counts >= low).all() and (counts <= np.ceil(table)).all()


def test_round_table_leaves_whole_tables_alone():
    table = np.random.default_rng(2).integers(0, 9, (6, 4))
    shares = table / np.maximum(table.sum(axis=0), 1)
    assert (round_table(shares * table.sum(axis=0)) == table).all()


def test_sinkhorn_margins_form_and_idempotence():
    rng = np.random.default_rng(3)
    start = rng.dirichlet(np.ones(6), size=9) + 1e-3
    columns = rng.integers(50, 150, 6).astype(float)
    rows = np.full(9, columns.sum() / 9)
    scaled = sinkhorn(start, rows, columns)
    assert np.abs(scaled.sum(axis=1) - rows).max() < 1e-9 * rows[0]
    assert np.abs(scaled.sum(axis=0) - columns).max() < 1e-9 * rows[0]
    # a_i P_ij b_j: the logarithm of the ratio is a sum of a row and a column term, so doubly centred it is zero.
    ratio = np.log(scaled / start)
    centred = ratio - ratio.mean(axis=0) - ratio.mean(axis=1, keepdims=True) + ratio.mean()
    assert np.abs(centred).max() < 1e-9
    assert (sinkhorn(scaled, rows, columns) == scaled).all()


def test_sinkhorn_says_when_it_fails():
    with pytest.raises(ValueError, match="make them equal"):
        sinkhorn(np.ones((2, 2)), np.ones(2), np.full(2, 3.0))
    with pytest.raises(ValueError, match="larger alpha"):
        sinkhorn(np.eye(3) + 1e-5, np.array([1.0, 5.0, 3.0]), np.array([5.0, 1.0, 3.0]), max_iterations=2)
