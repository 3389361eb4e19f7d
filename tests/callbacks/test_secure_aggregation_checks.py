"""What SecureAggregation refuses before round 1 of clients and entries."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from fedlightning.callbacks.secure_aggregation import refuse_unfit


def setup(net, clients=20, participation=1.0, stays=()):
    names = [name for name in net.state_dict() if name not in stays]
    return SimpleNamespace(
        module=net,
        run=SimpleNamespace(clients=range(clients), participation=participation),
        shared_names=lambda: tuple(names),
    )


@pytest.mark.parametrize(("clients", "participation", "count"), [(20, 2, 2), (20, 0.1, 2), (2, 1.0, 2), (2, 5, 2)])
def test_sums_of_two_are_refused(clients, participation, count):
    with pytest.raises(ValueError, match=f"{count} clients take part in a round, .* opens sums of 3 at least"):
        refuse_unfit(setup(nn.Linear(2, 2), clients, participation), 8.0, 32, least=3)


def test_sums_of_three_are_not():
    for clients, participation in ((3, 1.0), (20, 3), (20, 0.15), (3, True)):
        refuse_unfit(setup(nn.Linear(2, 2), clients, participation), 8.0, 32, least=3)


def test_integers_with_too_few_levels():
    refuse_unfit(setup(nn.Linear(2, 2), 320), 8.0, 16, least=3)
    with pytest.raises(ValueError, match=r"bits=16\) leaves fewer than a hundred levels for each of 330 clients"):
        refuse_unfit(setup(nn.Linear(2, 2), 330), 8.0, 16, least=3)
    refuse_unfit(setup(nn.Linear(2, 2), 330), 8.0, 32, least=3)


def test_running_statistics_that_count_all_batches():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None))
    with pytest.raises(ValueError, match=r"'1' averages over all batches .* \(momentum=None\)"):
        refuse_unfit(setup(net), 8.0, 32, least=3)
    refuse_unfit(setup(net, stays=("1.num_batches_tracked",)), 8.0, 32, least=3)
    refuse_unfit(setup(nn.Sequential(nn.BatchNorm1d(2))), 8.0, 32, least=3)
