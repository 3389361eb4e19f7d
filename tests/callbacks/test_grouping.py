"""Groups found by k-means on one row for each client."""

from __future__ import annotations

import pytest
import torch

from fedlightning.callbacks.shared.memberships import different, first_groups
from tests.callbacks.common import best_partition


def parts(groups):
    return sorted(map(sorted, groups))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [1, 2, 3])
def test_groups_are_those_of_least_squares(count, seed):
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(7, 4, generator=draw, dtype=torch.float64) + 3 * torch.randint(0, 3, (7, 1), generator=draw)
    labels = best_partition(rows, count)
    groups = first_groups(rows, count, seed)
    assert groups == [
        [i for i, label in enumerate(labels) if label == k] for k in range(count)
    ]  # the first client first


def test_the_seed_decides_and_may_be_of_any_size():
    rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    found = [parts(first_groups(rows, 12, seed)) for seed in (1, 1, 2, 2**63 + 1, -5)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_clients_that_differ_by_rounding_are_not_taken_apart(noise, scale):
    rows = torch.tensor([[1.0, 2.0], [-3.0, 1.0], [1.0, 2.0], [-3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    rows = scale * (rows + noise * torch.randn(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    assert first_groups(rows, 4, seed=0) == [[0, 2, 4], [1, 3], [0, 2, 4], [1, 3]]
    assert different(rows, 5) == 2 and different(rows, 1) == 1


def test_small_but_real_differences_count():
    rows = torch.tensor([[1.0, 0.0], [1.0, 1e-4], [1.0, 2e-4]], dtype=torch.float64)
    assert first_groups(rows, 3, seed=0) == [[0], [1], [2]]
    assert different(torch.zeros(3, 2), 3) == 1


def test_one_client_fills_all_groups():
    assert first_groups(torch.ones(1, 2), 3, seed=0) == [[0], [0], [0]]
