"""FedBuff: sheet entry 3.3."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedlightning.algorithm import Facts, FederatedCallback, Update
from fedlightning.callbacks import FedAdam, FedAvg, FedAvgM, FedBuff, Local
from fedlightning.tensors import clone
from fedlightning.virtual_time import Asynchronous, FixedSpeed, LogNormalSpeed, VirtualClock
from tests.conformance.case import Case, Kept
from tests.helpers import NormNet, Toy, close, federate, global_state, same, toy_data

LOOP = Asynchronous(VirtualClock(FixedSpeed(1.0)), at_end="flush")  # a client that joins is seen, too
CASES = {
    "FedBuff": Case(FedBuff(2), neutral=FedBuff(1), arguments={"loop": LOOP, "participation": 1.0}),
}
KEPT = {"FedBuff": Kept("FedBuff", server=("count",), options={"buffer_size": 2}, arguments={"loop": LOOP})}


class Received(FederatedCallback):
    """Notes what arrives, and the server's model of each version."""

    facts = Facts(takes_part=False)

    def __init__(self) -> None:
        self.rounds: list[list[tuple[int, dict[str, torch.Tensor]]]] = []
        self.versions: list[dict[str, torch.Tensor]] = []

    def on_round_start(self, server):
        self.versions.append(clone(server.model))
        self.rounds.append([])

    def on_update(self, server, update):
        self.rounds[-1].append((update.staleness, clone(update.state)))


def asynchronous(callbacks, module=None, data=None, speed=None, **given):
    loop = Asynchronous(VirtualClock(speed or FixedSpeed(1.0)))
    return federate(module or Toy(), data or toy_data(), callbacks, loop=loop, **given)


@pytest.mark.parametrize("more", [[], [FedAvgM(0.9)], [FedAdam(0.1)]], ids=["", "FedAvgM", "FedAdam"])
@pytest.mark.parametrize("make", [Toy, NormNet])
def test_all_alike_it_is_uniform_fedavg(make, more):
    """(b): C = K = m and equal speeds; a server optimizer sees what it sees in synchronous rounds."""
    module = make("momentum")
    found = global_state(asynchronous([FedBuff(3), *more], module, max_rounds=3))
    uniform = (
        [FedAvg("uniform")] if not more else [type(more[0])(**more[0].hyperparameters() | {"weighting": "uniform"})]
    )
    close(found, global_state(federate(module, toy_data(), uniform, max_rounds=3)), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"server_lr": 0.7}, {"staleness": "constant"}])
def test_every_step_by_hand(options):
    """``w + eta_g / K sum_i s(d_i) (w_i - w_tau_i)``, each change counted once; statistics are moved without ``eta_g``."""
    received, module = Received(), NormNet()
    trainer = asynchronous([received, FedBuff(2, **options)], module, speed=LogNormalSpeed(1.0, 1.2), max_rounds=10)
    versions = [*received.versions, clone(global_state(trainer))]
    stale = {staleness for arrivals in received.rounds for staleness, _ in arrivals}
    assert len(stale) > 1 and all(len(arrivals) == 2 for arrivals in received.rounds)
    for number, arrivals in enumerate(received.rounds):
        now, expected = versions[number], {}
        for name, value in now.items():
            if not value.is_floating_point():
                continue
            is_buffer = "running" in name
            change = torch.zeros_like(value, dtype=torch.float64)
            for d, state in arrivals:
                s = 1.0 if options.get("staleness") == "constant" else (1 + d) ** -0.5
                start = now if is_buffer else versions[number - d]
                change += s * (state[name].double() - start[name].double())
            rate = 1.0 if is_buffer else options.get("server_lr", 1.0)
            expected[name] = value.double() + rate / 2 * change
        close({name: versions[number + 1][name] for name in expected}, expected, atol=1e-6)


def test_each_of_several_models_makes_a_step_from_itself():
    """Where the server has a model for each group, ``w`` is the one whose changes are combined."""
    models = {name: {"w": torch.full((2,), start), "n": torch.tensor(7)} for name, start in (("a", 1.0), ("b", 5.0))}
    for name, expected in (("a", 1.0 + 0.5 * 2.0), ("b", 5.0 + 0.5 * -2.0)):
        server = SimpleNamespace(models=models, model=models["a"], combining=name, trainable=["w"], state={})
        mean = {"w": torch.full((2,), 3.0), "n": torch.tensor(9)}
        found = FedBuff(2, server_lr=0.5).on_reduced(server, mean)
        assert found["w"].tolist() == [expected] * 2 and int(found["n"]) == 9
        assert server.state == {"FedBuff": {"count": 0}}


def test_the_last_buffer_is_divided_by_what_it_holds():
    received, module = Received(), Toy()
    loop = Asynchronous(VirtualClock(FixedSpeed(1.0, slowdown={"2": 10})), at_end="flush")
    trainer = federate(module, toy_data(), [received, FedBuff(2)], loop=loop, max_rounds=2)
    (d0, one), (d1, two), (d2, slow) = received.rounds[-1]
    assert (d0, d1, d2) == (0, 0, 1)
    first, start = received.versions[1], received.versions[0]
    expected = {
        name: value.double()
        + (one[name].double() + two[name].double() - 2 * value + 2**-0.5 * (slow[name].double() - start[name])) / 3
        for name, value in first.items()
    }
    close(global_state(trainer), expected)
    assert trainer.server.state["FedBuff"] == {"count": 0}


def test_a_buffer_of_one_is_a_step_for_every_arrival():
    module = Toy()
    found = asynchronous([FedBuff(1)], module, max_rounds=4)
    plain = asynchronous([], module, max_rounds=4)
    assert found.server.costs.virtual_time == plain.server.costs.virtual_time == 2.0


def test_stale_changes_make_a_short_step():
    """The sum is divided by K, not by the weights: the paper's rule."""
    assert FedBuff(2).weighting(None, Update(0, "a", staleness=3)) == 0.5
    assert FedBuff(2, "constant").weighting(None, Update(0, "a", staleness=3)) == 1.0


@pytest.mark.parametrize(
    "options", [{"buffer_size": 0}, {"server_lr": 0}, {"staleness": "linear"}, {"a": -1}, {"max_staleness": -1}]
)
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match="FedBuff got"):
        FedBuff(**options)


def test_where_nothing_travels_there_is_nothing_to_buffer():
    with pytest.raises(ValueError, match="Local lets no model travel, and FedBuff"):
        asynchronous([FedBuff(2), Local()])


def test_order_inside_a_buffer_does_not_matter():
    """(d): two federations whose clients arrive in another order, at equal staleness."""
    module, speeds = Toy(), ({"0": 1.0, "1": 1.2, "2": 1.4}, {"0": 1.4, "1": 1.0, "2": 1.2})
    found = [
        global_state(asynchronous([FedBuff(3)], module, speed=FixedSpeed(1.0, slow), max_rounds=1)) for slow in speeds
    ]
    same(*found)
