"""Stragglers and Poisson sampling: changes of jobs and participants that stand beside any method."""

from __future__ import annotations

import copy

import pytest

from fedlightning.callbacks import FedAvg, FedNova, FedProx, HeteroFL, PLayerFL, PoissonSampling, Stragglers
from fedlightning.virtual_time import Asynchronous
from tests.helpers import Toy, federate, global_state, mostly_slow, same, spied, toy_data

SIZES = (16, 16, 16, 16, 16, 16, 16, 16, 16, 16)
BATCHES = 2


def work_of(callbacks, **given):
    """Round -> client -> epochs done."""
    _, spy = spied(
        Toy(), toy_data(SIZES), callbacks, **{"local_epochs": 5, "max_rounds": 6, "participation": 8} | given
    )
    found: dict[int, dict[str, int]] = {}
    for update in spy.updates:
        found.setdefault(update.round, {})[update.client] = update.steps // BATCHES
    return found


@pytest.mark.parametrize("share", mostly_slow([0.0, 0.5, 0.9], [0.5]))
def test_exactly_the_share_straggles_and_the_draw_is_the_methods_business_never(share):
    prox, kept = work_of([FedProx(), Stragglers(share)]), work_of([FedAvg(), Stragglers(share)])
    dropped = work_of([FedAvg(), Stragglers(share, keep=False)])
    assert prox == kept
    full = work_of([])
    for number, done in prox.items():
        assert set(done) == set(full[number]) and all(1 <= epochs <= 5 for epochs in done.values())
        stayed = set(dropped[number])
        assert len(stayed) == 8 - round(8 * share)
        assert all(done[client] == 5 for client in stayed)
    epochs = [
        epochs for number, done in prox.items() for client, epochs in done.items() if client not in dropped[number]
    ]
    assert share == 0.0 or (min(epochs) == 1 and len(set(epochs)) >= 4)


def test_the_codes_draw_never_does_all():
    done = [epochs for clients in work_of([Stragglers(1.0, epochs="code")]).values() for epochs in clients.values()]
    assert max(done) == 4 and min(done) == 1
    assert 5 in [epochs for clients in work_of([Stragglers(1.0)]).values() for epochs in clients.values()]


def test_dropping_is_weight_zero():
    """(f): a straggler that is left out counts for nothing, and the others are renormalised."""
    module, data = Toy(), toy_data(SIZES[:4])
    _, spy = spied(module, data, [Stragglers(0.5, keep=False)], max_rounds=1)
    assert len(spy.updates) == 2
    mean = {n: sum(u.state[n].double() for u in spy.updates) / 2 for n in spy.updates[0].state}
    for name, value in spy.rounds[0].items():
        assert (value.double() - mean[name]).abs().max() < 1e-6


def test_steps_count_as_epochs_do():
    _, spy = spied(Toy(), toy_data(SIZES), [Stragglers(1.0)], local_steps=7, max_rounds=3)
    assert {update.steps for update in spy.updates} <= set(range(1, 8)) and len({u.steps for u in spy.updates}) > 3


@pytest.mark.parametrize("make", [lambda: HeteroFL(rates=[1.0, 0.5]), PLayerFL, FedNova])
def test_it_stands_beside_methods_that_plan(make):
    trainer, spy = spied(Toy(), toy_data(SIZES[:4]), [make(), Stragglers(0.5)], local_epochs=4, max_rounds=3)
    steps = {update.steps for update in spy.updates if update.steps}
    assert len(steps) > 1 and trainer.server.failures == []
    federate(Toy(), toy_data(SIZES[:4]), [make(), Stragglers(0.5, keep=False)], local_epochs=4, max_rounds=3)


@pytest.mark.parametrize(
    ("callback", "given", "said"),
    [
        (Stragglers(), {"local_epochs": 1}, "local_epochs=1 has no part"),
        (Stragglers(), {"local_steps": 1}, "local_steps=1 has no part"),
        (Stragglers(), {"local_epochs": 2, "loop": Asynchronous()}, "Stragglers is defined for synchronous rounds"),
        (PoissonSampling(), {"loop": Asynchronous()}, "PoissonSampling works at the server"),
        (PoissonSampling(), {"participation": 2}, "both say who takes part"),
    ],
)
def test_refused(callback, given, said):
    with pytest.raises(ValueError, match=said):
        federate(Toy(), toy_data(), [callback], **given)


@pytest.mark.parametrize(
    "make", [lambda: Stragglers(1.5), lambda: Stragglers(epochs="all"), lambda: PoissonSampling(0.0)]
)
def test_options_out_of_range(make):
    with pytest.raises(ValueError, match="got"):
        make()


def test_poisson_draws_each_client_by_a_coin_of_its_own():
    _, spy = spied(Toy(), toy_data(SIZES), [PoissonSampling(0.3)], max_rounds=40, local_steps=1)
    counts = [sum(update.round == number for update in spy.updates) for number in range(40)]
    assert sum(counts) == pytest.approx(120, abs=35) and len(set(counts)) > 3
    module = Toy()
    everybody = federate(module, toy_data(), [PoissonSampling(1.0)])
    same(global_state(everybody), global_state(federate(module, toy_data())))


def test_a_round_of_nobody_changes_nothing():
    _, spy = spied(Toy(), toy_data((16,)), [PoissonSampling(0.3)], max_rounds=8, local_steps=1)
    quiet = [number for number in range(1, 8) if all(update.round != number for update in spy.updates)]
    assert quiet
    for number in quiet:
        same(copy.deepcopy(spy.rounds[number]), spy.rounds[number - 1])
