"""FedALA: sheet entry 29."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fedlightning.callbacks import FedALA, FedAvg, FedPer, FedProx, PLayerFL
from fedlightning.client.visit import open_client
from fedlightning.contract import Job
from fedlightning.tensors import module_state, select
from tests.callbacks.common import HEAD, MAKES, SIZES, deployed
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    close,
    differs,
    federate,
    global_state,
    quadratic_data,
    same,
    spied,
    toy_data,
)

CASES = {"FedALA": Case(FedALA(num_layers=2))}
KEPT = {"FedALA": Kept("FedALA", client=("W", "th"))}


def without_head(state):
    return {name: value for name, value in state.items() if name not in HEAD}


@pytest.mark.parametrize("make", MAKES)
def test_weights_that_stay_at_one_are_fedavg(make):
    module, data = make(), toy_data()
    plain = federate(module, data, [FedAvg()], max_rounds=3)
    ours = federate(module, data, [FedALA(weight_lr=0.0)], max_rounds=3)
    same(global_state(ours), global_state(plain))
    for client in SIZES:
        same(deployed(ours, client), global_state(plain))


def test_weights_that_stay_at_zero_keep_the_own_head():
    module, data = NormNet("adam"), toy_data()
    ours, spy = spied(module, data, [FedALA(weight_lr=0.0, start=0.0)], max_rounds=3)
    fedper = federate(module, data, [FedPer(personal=sorted(HEAD))], max_rounds=3)
    for client in SIZES:
        same(select(deployed(ours, client), HEAD), select(spy.of_round(2)[client].state, HEAD))
        same(deployed(ours, client), deployed(fedper, client))


@pytest.mark.parametrize("make", [lambda: Toy("sgd"), lambda: NormNet("sgd")])
def test_lower_layers_and_buffers_are_the_servers_and_weights_stay_in_range(make):
    trainer, spy = spied(make(), toy_data(), [FedALA(weight_lr=20.0)], max_rounds=3)
    moved = 0
    for client in SIZES:
        state = deployed(trainer, client)
        same(without_head(state), without_head(global_state(trainer)))
        moved += differs(select(state, HEAD), select(global_state(trainer), HEAD))
        weights = spy.records[-1][client].state["FedALA"]["W"]
        assert set(weights) == HEAD
        own = spy.records[-1][client].state["FedALA"]["th"]
        low, high = ({n: op(own[n], global_state(trainer)[n]) for n in HEAD} for op in (torch.minimum, torch.maximum))
        for name, value in weights.items():
            assert ((value >= 0) & (value <= 1)).all()
            assert ((state[name] >= low[name] - 1e-6) & (state[name] <= high[name] + 1e-6)).all()
    assert moved


def test_the_first_round_changes_nothing():
    module = NormNet("adam")
    plain = federate(module, toy_data(), [FedAvg()], max_rounds=1)
    trainer, spy = spied(module, toy_data(), [FedALA()], max_rounds=1)
    same(global_state(trainer), global_state(plain))
    for client in SIZES:
        assert set(spy.records[0][client].state["FedALA"]) == {"th"}


def test_one_step_by_hand():
    """W = clip(1 - eta grad(Th) (Th - th)) with the gradient of the whole batch at the merged model, which is Th."""
    data, eta = toy_data(batch_size=64), 5.0
    callback = FedALA(fraction=1.0, weight_lr=eta, max_passes=1)
    module = Toy("momentum")
    _trainer, spy = spied(module, data, [callback], max_rounds=2)
    theta = spy.rounds[0]
    for client in SIZES:
        th = spy.of_round(0)[client].state
        model = Toy()
        model.load_state_dict(theta)
        x, y = data.tensors[client]["train"]
        gradient = dict(zip(theta, torch.autograd.grad(F.cross_entropy(model(x), y), model.parameters()), strict=True))
        weights = spy.records[1][client].state["FedALA"]["W"]
        for name in HEAD:
            expected = (1 - eta * gradient[name] * (theta[name] - th[name])).clamp(0, 1)
            torch.testing.assert_close(weights[name], expected, atol=1e-6, rtol=1e-5)
            assert (expected < 1).any()


def test_training_starts_from_the_merged_model():
    """With a learning rate of zero in round 2, what comes back is L1."""

    class Once(Toy):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), self.lr)

    _trainer, spy = spied(Once("sgd", lr=0.2), toy_data(), [FedALA(weight_lr=5.0)], max_rounds=2, lr_decay=1e-30)
    theta = spy.rounds[0]
    for client, update in spy.of_round(1).items():
        kept, old = spy.records[1][client].state["FedALA"], spy.records[0][client].state["FedALA"]["th"]
        for name in HEAD:
            merged = torch.lerp(old[name], theta[name], kept["W"][name])
            torch.testing.assert_close(update.state[name], merged, atol=1e-7, rtol=0)
            assert not torch.equal(merged, theta[name])
        same(without_head(update.state), without_head(theta))


def test_differences_that_cancel_are_differences():
    """th - Th = (-0.1, 0.1): its sum is 0, which public code takes for equality."""
    data = quadratic_data([[1.0, 1.0, 1.0]] * 2, [[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0]])
    _trainer, spy = spied(Quadratic(lr=0.1), data, [FedALA(max_passes=1)], max_rounds=2)
    for client in ("0", "1"):
        close(spy.records[1][client].state["FedALA"]["W"], {"w": torch.tensor([0.9, 0.9, 1.0]).double()}, atol=1e-12)


def test_several_passes_by_hand_and_when_they_end():
    """W after k passes over one sample, in closed form; the losses settle at once: 11 passes at first."""
    a, b = [[1.0, 2.0, 0.5], [1.0, 1.0, 1.0]], [[1.0, 0.5, -1.0], [-1.0, 0.0, 2.0]]
    _trainer, spy = spied(Quadratic(lr=0.1), quadratic_data(a, b), [FedALA(weight_lr=0.3)], max_rounds=3)
    for i, client in enumerate(("0", "1")):
        tensor_a, tensor_b = torch.tensor(a[i]).double(), torch.tensor(b[i]).double()
        weights = torch.ones(3).double()
        for number, passes in ((1, 11), (2, 1)):
            th, theta = spy.of_round(number - 1)[client].state["w"], spy.rounds[number - 1]["w"]
            for _ in range(passes):
                merged = th + (theta - th) * weights
                weights = (weights - 0.3 * tensor_a * (merged - tensor_b) * (theta - th)).clamp(0, 1)
            close(spy.records[number][client].state["FedALA"]["W"], {"w": weights}, atol=1e-12)


def test_the_first_time_is_limited():
    """Losses that do not settle: a big step between two samples, 4 passes at most."""

    class Counting(FedALA):
        def on_send(self, client, update):
            super().on_send(client, update)
            client.state[self.key]["probes"] = client.scratch.get("probes", 0)

    data = toy_data(batch_size=64)
    for limit in (4, 50):
        _trainer, spy = spied(Toy("sgd"), data, [Counting(max_passes=limit)], max_rounds=3)
        used = [{c: r[c].state["Counting"]["probes"] for c in SIZES} for r in spy.records]
        assert set(used[0].values()) == {0}
        assert set(used[1].values()) == {min(limit, 11)}
        assert set(used[2].values()) == {1}


def test_a_part_of_the_data_in_every_pass():
    class Seen(FedALA):
        def on_receive(self, client, message):
            super().on_receive(client, message)
            client.scratch["seen"] = client.scratch.get("probes", 0)

        def on_send(self, client, update):
            super().on_send(client, update)
            client.state[self.key]["seen"] = client.scratch["seen"]

    _trainer, spy = spied(Toy("sgd"), toy_data([40, 40]), [Seen(fraction=0.5, max_passes=1)], max_rounds=2)
    assert spy.records[1]["0"].state["Seen"]["seen"] == round(0.5 * 5)


def test_absent_clients_keep_their_head_and_weights():
    trainer, spy = spied(Toy("sgd"), toy_data(), [FedALA()], max_rounds=5, participation=1)
    returned = 0
    for number in range(1, 5):
        for client in SIZES:
            if client not in spy.of_round(number):
                assert spy.records[number][client].state == spy.records[number - 1][client].state
            else:
                returned += "W" in spy.records[number][client].state["FedALA"]
    assert returned
    for client in SIZES:
        record = trainer.store.get(client)
        same(deployed(trainer, client), deployed(trainer, client))
        assert trainer.store.get(client) is record


def test_composes_with_fedprox_whose_anchor_is_the_global_model():
    module, data = Toy("sgd"), toy_data()
    trainer, _spy = spied(module, data, [FedALA(weight_lr=5.0), FedProx(0.1)], max_rounds=2)
    server = trainer.server
    with open_client(trainer.federation.engine.runner, server.message(Job("0")), trainer.store.get("0")) as client:
        same(client.received, global_state(trainer))
        assert differs(module_state(client.module), client.received)


@pytest.mark.parametrize(
    ("callbacks", "sentence"),
    [
        ([FedALA(num_layers=3)], "head of 3 layers cannot be cut from Toy"),
        ([FedALA(), FedPer(personal=["net.3"])], "FedALA merges the last 1 .*keep them with the clients"),
    ],
)
def test_impossible_splits_are_refused(callbacks, sentence):
    with pytest.raises(ValueError, match=sentence):
        federate(Toy(), toy_data(), callbacks)


def test_a_head_that_stops_travelling_is_warned_of():
    with pytest.warns(UserWarning, match=r"FedALA merges the last 1 .* from round 2 other callbacks keep them") as said:
        federate(Toy(), toy_data(), [FedALA(), PLayerFL(split=1)], max_rounds=4)
    assert sum("from round 2" in str(warning.message) for warning in said) == 1


def test_a_frozen_head_is_refused():
    module = Toy()
    module.net[3].requires_grad_(False)
    with pytest.raises(ValueError, match=r"FedALA merges the last 1 layer.*nothing trains"):
        federate(module, toy_data(), [FedALA()])


@pytest.mark.parametrize(
    "options", [{"num_layers": 0}, {"fraction": 0.0}, {"weight_lr": -1.0}, {"start": 1.5}, {"max_passes": 0}]
)
def test_senseless_settings_are_refused(options):
    with pytest.raises(ValueError, match=rf"FedALA got .*{next(iter(options))}="):
        FedALA(**options)
