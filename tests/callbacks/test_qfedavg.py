"""q-FedAvg: sheet C 14."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedlightning import FederatedCallback
from fedlightning.algorithm import Change, Facts
from fedlightning.callbacks import IFCA, FedAdam, FedAvg, FedPer, FedProx, MaxFL, QFedAvg
from fedlightning.callbacks.qfedavg import relative_power
from fedlightning.engines.attempts import FederationError
from fedlightning.tensors import module_state
from tests.callbacks.common import FailsOnce, Plain, absent_clients_rest, cut_and_resumed, fixed_data, start_of
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

CASES = {
    "QFedAvg": Case(QFedAvg(q=1.0), neutral=QFedAvg(q=0.0)),
    "QFedAvg samples": Case(QFedAvg(q=0.5, lipschitz=3.0, shares="samples"), neutral=QFedAvg(q=0.0)),
}
KEPT = {"QFedAvg": Kept("QFedAvg", server=("sums",))}

A = [[1.0, 2.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
B = [[1.0, 2.0, 1.0], [0.8, 1.5, 1.0], [1.0, -1.0, 0.2]]


def loss(i, w):
    return 0.5 * (np.array(A[i]) * (w - np.array(B[i])) ** 2).sum()


def steps(i, w, count, lr):
    for _ in range(count):
        w = w - lr * np.array(A[i]) * (w - np.array(B[i]))
    return w


def next_model(w, trained, losses, q, lipschitz, shares):
    """The paper's rule, as it is printed."""
    total, bound = np.zeros_like(w), 0.0
    for w_k, f, p in zip(trained, losses, shares, strict=True):
        f = f + 1e-10
        d = lipschitz * (w - w_k)
        total = total + p * f**q * d
        bound += p * (q * f ** (q - 1) * (d**2).sum() + lipschitz * f**q)
    return w - total / bound


@pytest.mark.parametrize("q", [0.001, 0.5, 1.0, 5.0])
@pytest.mark.parametrize("lipschitz", [None, 3.0])
def test_rounds_by_hand(q, lipschitz):
    module = Quadratic(lr=0.1)
    ours = federate(module, quadratic_data(A, B), [QFedAvg(q, lipschitz)], max_rounds=4, local_epochs=3)
    w = np.zeros(3)
    for _ in range(4):
        trained, losses = [steps(i, w, 3, 0.1) for i in range(3)], [loss(i, w) for i in range(3)]
        w = next_model(w, trained, losses, q, lipschitz or 1 / 0.1, [1, 1, 1])
    np.testing.assert_allclose(global_state(ours)["w"], w, atol=1e-12)


def test_the_sheets_numbers():
    """w = 0, w_k = (-0.1, -0.3), F = (1, 4), L = 10."""
    data = quadratic_data([[0.5], [9 / 8]], [[-2.0], [-8 / 3]])
    for q, known in ((1.0, -0.2166667), (0.0, -0.2)):
        _, spy = spied(Quadratic(lr=0.1, size=1), data, [QFedAvg(q)], max_rounds=1)
        assert [float(update.state["w"]) for update in spy.updates] == pytest.approx([-0.1, -0.3], abs=1e-12)
        assert float(spy.rounds[0]["w"]) == pytest.approx(known, abs=1e-7)


@pytest.mark.parametrize("q", [0.5, 2.0])
def test_one_client_takes_a_shorter_step_of_its_own(q):
    _, spy = spied(Quadratic(lr=0.1), quadratic_data(A[:1], B[:1]), [QFedAvg(q)], max_rounds=1, local_epochs=4)
    moved = spy.updates[0].state["w"].numpy()
    dw = moved / 0.1
    share = loss(0, 0.0) / (loss(0, 0.0) + q * 0.1 * (dw**2).sum())
    assert 0 < share < 1
    np.testing.assert_allclose(spy.rounds[0]["w"], share * moved, atol=1e-9)


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
@pytest.mark.parametrize("shares", ["uniform", "samples"])
def test_with_q_0_it_is_fedavg_to_the_last_bit(make, shares):
    module = make()
    plain = federate(module, toy_data(), [FedAvg(shares)], max_rounds=3)
    ours = federate(module, toy_data(), [QFedAvg(q=0.0, shares=shares)], max_rounds=3)
    same(global_state(ours), global_state(plain))
    assert (ours.server.costs.bytes_up, ours.server.costs.bytes_down) == (
        plain.server.costs.bytes_up,
        plain.server.costs.bytes_down,
    )


@pytest.mark.parametrize(("q", "shares"), [(1.0, "uniform"), (0.3, "samples")])
def test_a_federation_by_hand(q, shares):
    """Three of five clients take part in a round, one fails once; losses and steps in plain torch, the rule in numpy."""
    data, start = fixed_data([16, 24, 10, 8, 20], worlds=2), start_of(Toy)
    callbacks = [QFedAvg(q, shares=shares), FailsOnce("1", 0)]
    with pytest.warns(UserWarning, match="'1' failed"):
        _, spy = spied(start, data, callbacks, max_rounds=4, participation=4)
    w, seen = module_state(start), set()
    for number in range(4):
        came = list(spy.of_round(number))
        seen |= set(came)
        trained, losses, sizes = [], [], []
        for client in came:
            x, y = data.tensors[client]["train"]
            losses.append(float(F.cross_entropy(Plain(w)(x), y)))
            trained.append(Plain(w).trained(x, y))
            sizes.append(len(x))
            assert float(spy.of_round(number)[client].extras["QFedAvg"]["loss"]) == pytest.approx(losses[-1], abs=1e-12)
        flat = [np.concatenate([v.detach().numpy().ravel() for v in state.values()]) for state in (w, *trained)]
        new = next_model(flat[0], flat[1:], losses, q, 10.0, sizes if shares == "samples" else [1] * len(came))
        found = np.concatenate([spy.rounds[number][name].numpy().ravel() for name in w])
        np.testing.assert_allclose(found, new, atol=1e-9)
        w = spy.rounds[number]
    assert seen == set("01234")


def test_the_learning_rate_is_the_rounds_own():
    module = Quadratic(lr=0.1)
    ours = federate(module, quadratic_data(A, B), [QFedAvg(q=2.0)], max_rounds=3, local_epochs=2, lr_decay=0.5)
    w = np.zeros(3)
    for number in range(3):
        lr = 0.1 * 0.5**number
        trained, losses = [steps(i, w, 2, lr) for i in range(3)], [loss(i, w) for i in range(3)]
        w = next_model(w, trained, losses, 2.0, 1 / lr, [1, 1, 1])
    np.testing.assert_allclose(global_state(ours)["w"], w, atol=1e-12)


def test_who_does_not_move_leaves_the_model_where_it_is():
    for lr in (0.0, 1e-30):
        found = federate(Quadratic(lr=lr), quadratic_data(A, B), [QFedAvg(q=2.0)], max_rounds=2)
        np.testing.assert_allclose(global_state(found)["w"], 0.0, atol=1e-25)


@pytest.mark.parametrize("q", [0.1, 0.5, 3.0])
def test_a_client_that_fits_already_is_no_division_by_0(q):
    data = quadratic_data(A, [[0.0, 0.0, 0.0], *B[1:]])
    assert torch.isfinite(global_state(federate(Quadratic(), data, [QFedAvg(q)], max_rounds=2))["w"]).all()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_large_powers_of_small_and_large_losses(scale):
    """At q = 200 the powers themselves are out of range; the largest loss decides, and the rule's scale is the losses'."""
    a = (scale * np.array(A)).tolist()
    module = Quadratic(lr=0.1 / scale)
    _, spy = spied(module, quadratic_data(a, B), [QFedAvg(q=200.0, lipschitz=1e-9 * scale)], max_rounds=1)
    worst = max(range(3), key=lambda i: loss(i, np.zeros(3)))
    one = next(update for update in spy.updates if update.client == str(worst))
    np.testing.assert_allclose(spy.rounds[0]["w"], one.state["w"], rtol=1e-3)


def test_losses_too_far_apart_are_refused():
    assert relative_power(1e-300, 1.0, 100.0) == 0.0
    with pytest.raises(ValueError, match=r"QFedAvg\(q=100.0\) weighs .* too far apart for that. Use a smaller q"):
        relative_power(1.0, 1e-3, 100.0)


def test_statistics_of_batches_stay_positive_and_move_as_the_parameters_do():
    _, spy = spied(NormNet("sgd"), toy_data(), [QFedAvg(q=3.0)], max_rounds=3, local_epochs=3)
    before = spy.messages[0].state
    for number, state in enumerate(spy.rounds):
        assert (state["net.1.running_var"] > 0).all()
        own = spy.states[number]["QFedAvg"]["sums"]["global"]
        share = own["weights"] / (own["weights"] + 3.0 / (own["lr"] / own["steps"]) * own["bends"])
        losses = {c: float(u.extras["QFedAvg"]["loss"]) for c, u in spy.of_round(number).items()}
        power = {c: f**3 for c, f in losses.items()}
        for name in ("net.1.running_mean", "net.0.weight"):
            mean = sum(power[c] * u.state[name].double() for c, u in spy.of_round(number).items()) / sum(power.values())
            close({name: state[name]}, {name: before[name] + share * (mean - before[name])}, atol=1e-6)
        before = state


@pytest.mark.slow
def test_a_larger_q_is_fairer():
    """Of clients that disagree, the largest loss at the fixed point falls with q."""
    a, b = [[1.0]] * 4, [[0.0], [0.0], [0.0], [4.0]]
    largest = []
    for q in (0.0, 1.0, 5.0):
        found = federate(Quadratic(lr=0.1, size=1), quadratic_data(a, b), [QFedAvg(q)], max_rounds=150)
        w = float(global_state(found)["w"])
        gradient = sum((0.5 * (w - v[0]) ** 2) ** q * (w - v[0]) for v in b)
        assert gradient == pytest.approx(0.0, abs=1e-3), "it is not the minimiser of sum F^(q+1) / (q+1)"
        largest.append(max(0.5 * (w - v[0]) ** 2 for v in b))
    assert largest == sorted(largest, reverse=True)
    assert largest[2] < 0.7 * largest[0]


def test_what_is_sent_and_who_is_absent():
    trainer, spy = spied(Toy("sgd"), toy_data(), [QFedAvg(q=1.0)], max_rounds=4, participation=2)
    absent_clients_rest(spy)
    assert all(
        set(update.extras) == {"QFedAvg"} and set(update.extras["QFedAvg"]) == {"loss"} for update in spy.updates
    )
    assert not any(message.extras for message in spy.messages)
    state = sum(v.numel() * v.element_size() for v in global_state(trainer).values())
    assert trainer.server.costs.bytes_up == len(spy.updates) * (state + 8)


def test_resumed_is_uninterrupted(tmp_path):
    whole, _, again = cut_and_resumed(tmp_path, NormNet("sgd"), toy_data(), lambda: [QFedAvg(q=1.0)], max_rounds=3)
    same(global_state(whole), global_state(again))


def test_it_composes_with_terms_server_optimizers_and_own_heads():
    module = Toy("sgd")
    plain, _ = spied(module, toy_data(), [QFedAvg(q=1.0)], max_rounds=2)
    for others in ([FedProx(0.5)], [FedAdam()], [FedPer()]):
        _, spy = spied(module, toy_data(), [QFedAvg(q=1.0), *others], max_rounds=2)
        assert differs(spy.rounds[-1], global_state(plain))
    assert all(set(update.state) == {"net.0.weight", "net.0.bias"} for update in spy.updates)


def test_each_model_of_a_cluster_has_its_own_sums():
    """IFCA: the rule for those that have chosen a centre, whatever the others' losses are."""
    callbacks = [IFCA(init=2.0, weighting=None), QFedAvg(q=2.0)]
    data = quadratic_data([[1.0], [1.5], [1.0], [0.5]], [[2.0], [3.0], [-2.0], [-4.0]])
    trainer, spy = spied(Quadratic(lr=0.1, size=1), data, callbacks, max_rounds=1, local_epochs=2)
    groups = {}
    for update in spy.updates:
        groups.setdefault(update.model, []).append(update)
    assert len(groups) == 2
    sent = {"global": spy.messages[0].state} | spy.messages[0].extras["IFCA"]["centres"]
    for model, updates in groups.items():
        w = sent[model]["w"].numpy()
        losses = [float(u.extras["QFedAvg"]["loss"]) for u in updates]
        expected = next_model(w, [u.state["w"].numpy() for u in updates], losses, 2.0, 10.0, [1] * len(updates))
        np.testing.assert_allclose(trainer.server.models[model]["w"], expected, atol=1e-12)


class Merging(FederatedCallback):
    facts = Facts(changes={Change.START})


class Reducing(FederatedCallback):
    def reduce(self, server, updates):
        return {}


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (Merging(), "by the loss of the model that it was sent, and Merging makes the model that training starts from"),
        (Reducing(), "and Reducing combines updates in a way of its own"),
        (IFCA(option=1, weighting=None), "and IFCA plans rounds of its own"),
        (MaxFL(), "ask for different weightings|plans rounds"),
        (FedAvg("samples"), "ask for different weightings"),
    ],
)
def test_what_has_no_one_loss_for_each_change_is_refused(other, match):
    with pytest.raises(ValueError, match=match):
        federate(Toy(), toy_data(), [QFedAvg(q=1.0), other])


@pytest.mark.parametrize(("optimizer", "name"), [("adam", "Adam"), ("momentum", "SGD with momentum")])
def test_optimizers_without_such_an_l_are_named(optimizer, name, recwarn):
    with pytest.warns(
        UserWarning, match=f"L = 1 / lr, which is that of plain SGD, and the module's optimizer is {name}"
    ):
        federate(Toy(optimizer), toy_data(), [QFedAvg()], max_rounds=1)
    recwarn.clear()
    federate(Toy(optimizer), toy_data(), [QFedAvg(lipschitz=2.0)], max_rounds=1)
    assert not [one for one in recwarn if "QFedAvg" in str(one.message)]


class Negative(Toy):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) - 100.0


class Manual(Toy):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().step()


def test_losses_that_have_no_power_are_refused():
    with pytest.raises(ValueError, match="QFedAvg weighs clients by the loss that training_step returns, but Manual"):
        federate(Manual(), toy_data(), [QFedAvg()])
    with pytest.raises(FederationError, match=r"was refused: .*'loss' is not in \[0, inf\]"):
        federate(Negative(), toy_data(), [QFedAvg()])


@pytest.mark.parametrize("options", [{"q": -1.0}, {"q": float("inf")}, {"lipschitz": 0.0}, {"shares": "log"}])
def test_senseless_settings_are_refused(options):
    with pytest.raises(ValueError, match=f"QFedAvg got {next(iter(options))}="):
        QFedAvg(**options)


def test_a_callback_before_it_may_ask_for_a_weight(tmp_path):
    class Asks(FederatedCallback):
        def __init__(self):
            self.weights = []

        def on_update(self, server, update):
            self.weights.append(server.weight(update))

    class AsksLater(Asks):
        pass

    asking = [Asks(), AsksLater()]
    federate(Toy("sgd"), toy_data(), [asking[0], QFedAvg(), asking[1]], tmp_path, max_rounds=2)
    given = [callback.weights for callback in asking]
    assert given[0] == given[1] and given[0]
