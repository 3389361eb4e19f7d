"""pFedLA: sheet entry 27."""

from __future__ import annotations

import pytest
import torch

from fedlightning.callbacks import FedAdam, FedAvg, FedBN, Local, pFedLA
from fedlightning.callbacks.pfedla import HyperNetwork
from fedlightning.tensors import module_state
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    close,
    differs,
    federate,
    make_trainer,
    mean_of,
    quadratic_data,
    same,
    spied,
    toy_data,
)

CASES = {"pFedLA": Case(pFedLA()), "pFedLA relu": Case(pFedLA(hn_lr=0.1, normalise="relu"))}
KEPT = {"pFedLA": Kept("PFedLA", server=("models", "psi"))}

NAMES = ("0", "1", "2")
LAYERS = (("net.0.weight", "net.0.bias"), ("net.3.weight", "net.3.bias"))


class Fixed(pFedLA):
    """Weights that are given: ``eye`` (all on itself) or ``even``."""

    def __init__(self, kind="even"):
        super().__init__()
        self.kind = kind

    def weights(self, server, client):
        count = len(server.clients)
        row = torch.full((count,), 1.0 / count, dtype=torch.float64)
        if self.kind == "eye":
            row = torch.eye(count, dtype=torch.float64)[server.clients.index(client)]
        return row.expand(super().weights(server, client).shape)


def floats(state):
    return {name: value for name, value in state.items() if value.is_floating_point()}


@pytest.mark.parametrize("normalise", ["softmax", "relu"])
def test_rows_are_shares(normalise):
    trainer = federate(NormNet("sgd"), toy_data(), [pFedLA(normalise=normalise, hn_lr=5.0)], max_rounds=3)
    callback = trainer.server.callbacks.find(pFedLA)
    seen = []
    for client in NAMES:
        alpha = callback.weights(trainer.server, client)
        assert alpha.shape == (2, 3)
        assert (alpha >= 0).all()
        torch.testing.assert_close(alpha.sum(1), torch.ones(2).double(), atol=1e-14, rtol=0)
        seen.append(alpha)
    assert not torch.equal(seen[0], seen[1])


def test_rectified_weights_that_are_all_zero_are_even():
    network = HyperNetwork(4, 4, (2, 3), "relu")
    with torch.no_grad():
        network.heads.weight.zero_()
        network.heads.bias.copy_(torch.tensor([-1.0, -1, -1, 2, 0, 2]))
    torch.testing.assert_close(network(), torch.tensor([[1 / 3] * 3, [0.5, 0, 0.5]]).double())
    network().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters())


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_all_weight_on_itself_is_local(make):
    module, data = make(), toy_data()
    alone = federate(module, data, [Local()], max_rounds=3, optimizer_state="reset")
    ours = federate(module, data, [Fixed("eye")], max_rounds=3)
    for client in NAMES:
        same(module_state(ours.module(client)), module_state(alone.module(client)))


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_even_weights_are_uniform_fedavg(make):
    module, data = make(), toy_data()
    plain = federate(module, data, [FedAvg("uniform")], max_rounds=3)
    ours = federate(module, data, [Fixed("even")], max_rounds=3)
    for client in NAMES:
        close(floats(module_state(ours.module(client))), floats(plain.server.model), atol=1e-6)


def test_identical_models_give_the_same_whatever_the_weights():
    module = NormNet("sgd")
    _, spy = spied(module, toy_data(), [pFedLA()], max_rounds=1)
    for message in spy.messages[:3]:
        same(message.state, module_state(module))


def test_without_a_rate_the_weights_stay_and_with_one_all_of_the_hypernetwork_moves():
    for rate in (0.0, 5e-3):
        trainer = federate(Toy("sgd"), toy_data(), [pFedLA(hn_lr=rate)], max_rounds=2)
        server = trainer.server
        callback = server.callbacks.find(pFedLA)
        for client in NAMES:
            start = module_state(callback.network(server, client))
            now = server.state["PFedLA"]["psi"][client]
            assert differs(start, now) == (rate > 0)
            for name, value in now.items():
                assert torch.isfinite(value).all()
                assert torch.equal(value, start[name]) == (rate == 0), name


@pytest.mark.parametrize("normalise", ["softmax", "relu"])
@pytest.mark.fast_cases(1)
def test_the_gradient_of_the_hypernetwork_by_finite_differences(normalise):
    """d <thbar(psi), D> / d psi, with <thbar, D> summed here entry by entry."""
    trainer, _spy = spied(Toy("sgd"), toy_data(), [pFedLA(normalise=normalise)], max_rounds=3)
    server, callback = trainer.server, trainer.server.callbacks.find(pFedLA)
    models = callback.models(server)
    draw = torch.Generator().manual_seed(0)
    thbar = callback.personalised(server, "1", models)
    trained = {name: value + torch.randn(value.shape, generator=draw) for name, value in thbar.items()}
    change = {name: trained[name].double() - thbar[name].double() for name in thbar}

    def inner(psi):
        with torch.no_grad():
            alpha = callback.alpha(server, "1", psi)
        return sum(
            float(alpha[layer, j] * (model[name].double() * change[name]).sum())
            for layer, names in enumerate(LAYERS)
            for name in names
            for j, model in enumerate(models.values())
        )

    slope = callback.gradient(server, "1", models, trained)
    psi = callback.psi(server, "1")
    for name, value in psi.items():
        for _ in range(4):
            index = tuple(int(torch.randint(size, (), generator=draw)) for size in value.shape)
            ends = []
            for sign in (1, -1):
                moved = value.clone()
                moved[index] += sign * 1e-6
                ends.append(inner(psi | {name: moved}))
            assert float(slope[name][index]) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4, abs=1e-6)
    direction = {name: torch.randn(value.shape, generator=draw).double() for name, value in psi.items()}
    ends = [inner({n: v + sign * 1e-6 * direction[n] for n, v in psi.items()}) for sign in (1, -1)]
    expected = sum(float((slope[name] * direction[name]).sum()) for name in psi)
    assert expected == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)
    assert abs(expected) > 1e-3


def test_the_step_is_added_and_its_change_is_against_what_was_sent():
    """psi <- psi + eta J'D with D = what came back - thbar as it went down, not the old theta."""
    callback = pFedLA(hn_lr=0.05)
    trainer, spy = spied(Toy("sgd"), toy_data(), [callback], max_rounds=3)
    server, models = trainer.server, {c: u.state for c, u in spy.of_round(1).items()}
    sent = {message.client: message.state for message in spy.messages if message.round == 2}
    after = server.state["PFedLA"]["psi"]
    server.state = {**server.state, "PFedLA": spy.states[1]["PFedLA"]}
    for client in NAMES:
        thbar = callback.personalised(server, client, models)
        same(thbar, sent[client])
        slope = callback.gradient(server, client, models, spy.of_round(2)[client].state)
        before = spy.states[1]["PFedLA"]["psi"][client]
        same(after[client], {name: before[name] + 0.05 * slope[name] for name in before})
        assert differs(thbar, models[client])


A = [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
B = [[1.0, 1.0, 1.0], [1.1, 0.9, 1.0], [-4.0, -4.0, -4.0]]


def loss_of(client, w):
    a, b = (torch.tensor(rows[int(client)], dtype=torch.float64) for rows in (A, B))
    return float(0.5 * (a * (w - b).square()).sum())


def test_a_plus_step_lowers_the_loss_and_a_minus_step_raises_it():
    callback = pFedLA(hn_lr=1e-3)
    trainer, _spy = spied(Quadratic(lr=0.1), quadratic_data(A, B), [callback], max_rounds=2)
    server = trainer.server
    models = callback.models(server)
    for client in NAMES:
        thbar = callback.personalised(server, client, models)["w"]
        trained = {"w": thbar - 0.1 * (thbar - torch.tensor(B[int(client)], dtype=torch.float64))}
        slope, psi = callback.gradient(server, client, models, trained), callback.psi(server, client)
        results = {}
        for sign in (1, -1):
            moved = {name: value + sign * 1e-2 * slope[name] for name, value in psi.items()}
            state = {"psi": {**server.state["PFedLA"]["psi"], client: moved}}
            server.state["PFedLA"] = {**server.state["PFedLA"], **state}
            results[sign] = loss_of(client, callback.personalised(server, client, models)["w"])
        assert results[1] < loss_of(client, thbar) < results[-1]


@pytest.mark.slow
def test_the_hypernetwork_learns_who_helps():
    """Clients 0 and 1 are alike, 2 is not: they learn to hear less of it, and it to hear nothing of them."""
    total, alpha = {}, {}
    for rate in (0.0, 0.2):
        callback = pFedLA(hn_lr=rate)
        trainer = federate(Quadratic(lr=0.1), quadratic_data(A, B), [callback], max_rounds=12)
        alpha[rate] = [callback.weights(trainer.server, client)[0] for client in NAMES]
        total[rate] = sum(loss_of(client, module_state(trainer.module(client))["w"]) for client in NAMES)
    for i in (0, 1):
        assert alpha[0.2][i][2] < 0.75 * alpha[0.0][i][2]
    assert alpha[0.0][2][2] < 0.4 < 0.9 < alpha[0.2][2][2]
    assert total[0.2] < 0.75 * total[0.0]


def test_statistics_go_with_their_layer_and_integers_are_the_clients_own():
    callback = pFedLA()
    trainer, spy = spied(NormNet("sgd"), toy_data(), [callback], max_rounds=1)
    sent = spy.of_round(0)
    for i, client in enumerate(NAMES):
        alpha = callback.weights(trainer.server, client)
        deployed = module_state(trainer.module(client))
        for layer, name in ((0, "net.0.bias"), (0, "net.1.weight"), (0, "net.1.running_var"), (1, "net.3.weight")):
            expected = sum(alpha[layer, j] * update.state[name].double() for j, update in enumerate(sent.values()))
            torch.testing.assert_close(deployed[name].double(), expected, atol=1e-6, rtol=1e-5)
        assert deployed["net.1.num_batches_tracked"] == sent[client].state["net.1.num_batches_tracked"], i


def test_absent_clients_keep_model_and_hypernetwork():
    callback = pFedLA()
    _trainer, spy = spied(Toy("sgd"), toy_data(), [callback], max_rounds=4, participation=1)
    for number in range(1, 4):
        before, after = (spy.states[n]["PFedLA"] for n in (number - 1, number))
        for client in NAMES:
            if client not in spy.of_round(number):
                for part in ("models", "psi"):
                    assert before[part].get(client) is after[part].get(client)


def test_the_wire():
    module = NormNet("sgd")
    size = sum(value.numel() * value.element_size() for value in module_state(module).values())
    trainer = federate(module, toy_data(), [pFedLA()], max_rounds=2)
    assert trainer.server.costs.bytes_up == trainer.server.costs.bytes_down == 6 * size
    with pytest.raises(ValueError, match="no global model"):
        trainer.module()


def test_what_others_keep_local_stays_local():
    _trainer, spy = spied(NormNet("sgd"), toy_data(), [FedBN(), pFedLA()], max_rounds=2)
    for item in (*spy.messages, *spy.updates):
        assert not any(name.startswith("net.1.") for name in item.state)


def test_a_server_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"FedLA keeps several models at the server.*, and FedAdam "):
        make_trainer(None, [FedAdam(), pFedLA()]).fit(Toy(), datamodule=toy_data())


@pytest.mark.parametrize("options", [{"hn_lr": -0.1}, {"embedding": 0}, {"hidden": 0}, {"normalise": "max"}])
def test_senseless_settings_are_refused(options):
    with pytest.raises(ValueError, match=rf"pFedLA got .*{next(iter(options))}="):
        pFedLA(**options)


def test_the_mean_helper_is_what_even_weights_give():
    trainer, spy = spied(Toy("sgd"), toy_data(), [Fixed("even")], max_rounds=1)
    close(module_state(trainer.module("2")), mean_of(spy.of_round(0), dict.fromkeys(NAMES, 1.0)), atol=1e-7)
