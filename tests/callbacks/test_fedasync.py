"""FedAsync: sheet entry 3.2."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedlightning.algorithm import Facts, FederatedCallback, Update
from fedlightning.callbacks import FedAdam, FedAsync, FedProx
from fedlightning.callbacks.fedasync import staleness_weight
from fedlightning.tensors import clone, module_state
from fedlightning.virtual_time import Asynchronous, FixedSpeed, LogNormalSpeed, VirtualClock
from tests.conformance.case import Case, Kept
from tests.helpers import NormNet, Toy, close, federate, global_state, same, toy_data

LOOP = Asynchronous(VirtualClock(FixedSpeed(1.0)), at_end="flush")  # a client that joins is seen, too
CASES = {
    "FedAsync": Case(
        FedAsync(rho=0.1),
        neutral=FedAsync(alpha=1.0, staleness="constant"),
        arguments={"loop": LOOP, "participation": 1.0},
    )
}
KEPT = {"FedAsync": Kept("FedAsync", arguments={"loop": LOOP})}


class Received(FederatedCallback):
    """Notes what arrives, and the server's model before."""

    facts = Facts(takes_part=False)

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    def on_update(self, server, update):
        self.seen.append((update.staleness, clone(update.state), clone(server.model)))


def asynchronous(callbacks, module=None, data=None, speed=None, concurrency=1.0, **given):
    loop = Asynchronous(VirtualClock(speed or FixedSpeed(1.0)), concurrency=concurrency)
    return federate(module or Toy(), data or toy_data(), callbacks, loop=loop, **given)


@pytest.mark.parametrize(
    ("kind", "a", "staleness", "expected"),
    [
        ("constant", 0.5, 100, 1.0),
        ("polynomial", 0.5, 0, 1.0),
        ("polynomial", 0.5, 3, 0.5),
        ("hinge", 10, 4, 1.0),
        ("hinge", 10, 5, 1 / 11),
        ("hinge", 10, 14, 1 / 101),
    ],
)
def test_oracles_of_the_weight(kind, a, staleness, expected):
    assert staleness_weight(kind, staleness, a, 4) == pytest.approx(expected, abs=1e-15)
    server, update = SimpleNamespace(round=0), Update(0, "a", staleness=staleness)
    assert FedAsync(0.8, kind, a=a).weighting(server, update) == pytest.approx(0.8 * expected)


def test_the_papers_index_begins_at_one():
    server = SimpleNamespace(round=0)
    paper = FedAsync(1.0, paper_index=True).weighting(server, Update(0, "a", staleness=2))
    assert paper == 0.5 == FedAsync(1.0).weighting(server, Update(0, "a", staleness=3))


def test_alpha_decays_once():
    server, update = SimpleNamespace(round=0), Update(0, "a")
    found = []
    for server.round in range(4):
        found.append(FedAsync(0.8, decay_at=3).weighting(server, update))
    assert found == [0.8, 0.8, 0.4, 0.4]


@pytest.mark.parametrize("options", [{}, {"staleness": "hinge", "b": 1.0, "a": 2.0}, {"paper_index": True}])
def test_every_arrival_is_mixed_in_by_hand(options):
    """``x_t = (1 - alpha_t) x_{t-1} + alpha_t x_new``, running statistics too; the reference is written anew here."""
    received, module = Received(), NormNet()
    trainer = asynchronous([received, FedAsync(0.7, **options)], module, speed=LogNormalSpeed(1.0, 1.0), max_rounds=12)
    assert len({staleness for staleness, _, _ in received.seen}) > 1
    models = [*[before for _, _, before in received.seen[1:]], global_state(trainer)]
    for (staleness, came, before), after in zip(received.seen, models, strict=True):
        d = staleness + options.get("paper_index", False)
        if options.get("staleness") == "hinge":
            share = 0.7 if d <= 1 else 0.7 / (2 * (d - 1) + 1)
        else:
            share = 0.7 / (d + 1) ** 0.5
        floats = {name for name, value in before.items() if value.is_floating_point()}
        expected = {name: (1 - share) * before[name].double() + share * came[name].double() for name in floats}
        close({name: after[name] for name in floats}, expected)


def test_mixed_by_one_over_j_it_is_the_mean():
    """(e): three clients start from one model; the j-th arrival counts 1/j."""

    class Mean(FedAsync):
        def weighting(self, server, update):
            return 1.0 / (server.round + 1)

    received, module = Received(), Toy()
    found = global_state(asynchronous([received, Mean()], module, max_rounds=3))
    states = [state for _, state, _ in received.seen]
    assert len(states) == 3
    mean = {name: sum(state[name].double() for state in states) / 3 for name in found}
    close(found, mean, atol=1e-6)
    same_start = global_state(federate(module, toy_data(), [FedProx(0.0, weighting="uniform")], max_rounds=1))
    close(found, same_start, atol=1e-6)


def test_one_client_alone_is_local_training():
    """(a): alpha 1, one client: the optimizer begins anew in every round, and nothing else happens."""
    module, data = Toy("momentum"), toy_data((24,))
    found = asynchronous([FedAsync(1.0, "constant")], module, data, max_rounds=3)
    same(global_state(found), global_state(federate(module, data, max_rounds=3)))


def test_alpha_zero_freezes_the_server():
    module = Toy()
    found = asynchronous([FedAsync(0.0)], module, max_rounds=4)
    same(global_state(found), module_state(module))


def test_one_at_work_is_never_stale():
    received = Received()
    asynchronous([received, FedAsync()], concurrency=1, speed=LogNormalSpeed(1.0, 1.0), max_rounds=6)
    assert [staleness for staleness, _, _ in received.seen] == [0] * 6


def test_the_pull_is_fedproxs():
    module = Toy()
    one, other = (
        global_state(asynchronous(callbacks, module, max_rounds=3, local_epochs=2))
        for callbacks in ([FedAsync(rho=0.7)], [FedAsync(), FedProx(mu=0.7)])
    )
    same(one, other)


def test_a_server_optimizer_beside_it():
    module = Toy()
    one, other = (
        global_state(asynchronous(callbacks, module, max_rounds=3))
        for callbacks in ([FedAsync()], [FedAsync(), FedAdam(0.01)])
    )
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_old_updates_are_dropped():
    received = Received()
    speed = FixedSpeed(1.0, slowdown={"2": 4.5})
    asynchronous([received, FedAsync(max_staleness=4)], speed=speed, max_rounds=20)
    assert max(staleness for staleness, _, _ in received.seen) <= 4


@pytest.mark.parametrize(
    "options", [{"alpha": 1.2}, {"rho": -1}, {"staleness": "linear"}, {"a": -1}, {"max_staleness": -1}, {"decay_at": 0}]
)
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match="FedAsync got"):
        FedAsync(**options)
