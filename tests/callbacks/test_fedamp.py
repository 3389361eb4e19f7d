"""FedAMP and HeurFedAMP: sheet entry 30."""

from __future__ import annotations

import math

import pytest
import torch

from fedlightning.callbacks import SCAFFOLD, FedAdam, FedAMP, FedPer, FedProx, HeurFedAMP, Local
from fedlightning.options import FailurePolicy
from fedlightning.tensors import module_state, select
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    close,
    federate,
    make_trainer,
    quadratic_data,
    same,
    spied,
    toy_data,
)

CASES = {
    "FedAMP observed": Case(FedAMP(), neutral=FedAMP(lam=0.0)),
    "FedAMP": Case(FedAMP(sigma=1.0), neutral=FedAMP(lam=0.0)),
    "FedAMP own": Case(FedAMP(sigma=1.0, start="own"), neutral=FedAMP(lam=0.0, start="own")),
    "HeurFedAMP": Case(HeurFedAMP(alpha=10.0), neutral=HeurFedAMP(lam=0.0)),
}
KEPT = {
    "FedAMP observed": Kept("FedAMP", server=("models", "sigma", "step"), client=("w",)),
    "FedAMP": Kept("FedAMP", server=("models",), client=("w",), options={"sigma": 1.0}),
    "HeurFedAMP": Kept("HeurFedAMP", server=("models", "sigma", "step"), client=("w",)),
}

A = [[1.0, 2.0, 0.5], [2.0, 1.0, 1.0], [0.5, 0.5, 2.0]]
B = [[1.0, 0.0, -1.0], [1.2, 0.1, -0.8], [-3.0, 2.0, 4.0]]
NAMES = ("0", "1", "2")


def xi_by_hand(w, alpha, sigma):
    n = len(w)
    xi = torch.zeros(n, n, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            if i != j:
                xi[i, j] = alpha * math.exp(-float((w[i] - w[j]).square().sum()) / sigma) / sigma
        xi[i, i] = 1 - xi[i].sum()
    return xi


def amp_by_hand(rounds, steps, lr, lam, alpha, sigma, start, decay=1.0):
    a, b = (torch.tensor(rows, dtype=torch.float64) for rows in (A, B))
    w = torch.zeros(3, 3, dtype=torch.float64)
    for k in range(rounds):
        alpha_k = alpha * decay**k
        u = xi_by_hand(w, alpha_k, sigma) @ w  # all from the models at the start of the round
        w = u.clone() if start == "cloud" else w.clone()
        for _ in range(steps):
            w = w - lr * (a * (w - b) + lam / alpha_k * (w - u))
    return w


@pytest.mark.parametrize("start", ["cloud", "own"])
@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_rounds_by_hand(start, decay):
    """Squared penalty (its gradient is linear in the distance), synchronous mixtures, falling alpha."""
    callback = FedAMP(lam=0.7, alpha=1.1, sigma=3.0, start=start, alpha_decay=decay)
    trainer = federate(Quadratic(lr=0.1), quadratic_data(A, B), [callback], max_rounds=4, local_epochs=2)
    expected = amp_by_hand(4, 2, 0.1, 0.7, 1.1, 3.0, start, decay)
    for i, client in enumerate(NAMES):
        close(module_state(trainer.module(client)), {"w": expected[i]}, atol=1e-12)


def rows_of(callback, models, parts=NAMES):
    trainer = federate(Quadratic(), quadratic_data(A[: len(parts)], B[: len(parts)]), [callback], max_rounds=1)
    states = {c: {"w": torch.tensor(m, dtype=torch.float64)} for c, m in zip(parts, models, strict=True)}
    trainer.server.state[callback.key].pop("sigma", None)  # that of the round's models, not of these
    return [callback.attention(trainer.server, client, states) for client in parts]


def test_attention_sums_to_one_is_symmetric_and_not_negative():
    rows = rows_of(FedAMP(alpha=1.5, sigma=3.0), [[0.0, 0, 0], [1, 0, 0], [0, 2, 1]])
    for i, row in enumerate(rows):
        assert list(row) == list(NAMES)
        assert sum(row.values()) == pytest.approx(1.0, abs=1e-15)
        assert min(row.values()) >= 0
        for j in range(3):
            assert row[str(j)] == rows[j][str(i)] or i == j


def test_models_that_coincide_share_alike_by_default():
    for row in rows_of(FedAMP(), [[1.0, 0, 0]] * 3):
        assert list(row.values()) == pytest.approx([1 / 3] * 3, abs=1e-15)


def largest_alpha(w, sigma):
    """With which the most central of three clients keeps a third of itself."""
    kernel = torch.exp(-torch.cdist(w, w).square() / sigma)
    return float(sigma * (2 / 3) / (kernel.sum(1) - 1).max())


MODELS = [[0.3, 0.0, 0.1], [1.0, 0.2, 0.0], [0.0, 2.0, 1.0]]


@pytest.mark.parametrize("factor", [1e-3, 1e4])
def test_observed_attention_does_not_depend_on_the_scale_of_parameters(factor):
    scaled = [[factor * value for value in model] for model in MODELS]
    for kind in (FedAMP, HeurFedAMP):
        rows = rows_of(kind(), MODELS)
        for row, other in zip(rows, rows_of(kind(), scaled), strict=True):
            assert list(row.values()) == pytest.approx(list(other.values()), rel=1e-9)
            assert sum(row.values()) == pytest.approx(1.0)
        assert max(rows[0]["1"], rows[0]["2"]) > 1.2 * min(rows[0]["1"], rows[0]["2"])  # and it is not flat


def test_observed_attention_by_hand():
    w = torch.tensor(MODELS, dtype=torch.float64)
    sigma = sum(float((w[i] - w[j]).square().sum()) for i, j in ((0, 1), (0, 2), (1, 2))) / 3
    expected = xi_by_hand(w, largest_alpha(w, sigma), sigma)
    assert float(expected.diagonal().min()) == pytest.approx(1 / 3)
    for i, row in enumerate(rows_of(FedAMP(), MODELS)):
        assert list(row.values()) == pytest.approx(expected[i].tolist(), rel=1e-12)


def test_angles_count_however_near_the_models_are():
    """Clients start from one model, so that their cosines are nearly 1 and a fixed sharpness sees no difference."""
    base = torch.tensor([5.0, -3.0, 2.0], dtype=torch.float64)
    near, nearer = ([(base + eps * torch.tensor(m)).tolist() for m in MODELS] for eps in (1e-2, 1e-4))
    for row, other in zip(rows_of(HeurFedAMP(), near), rows_of(HeurFedAMP(), nearer), strict=True):
        assert list(row.values()) == pytest.approx(list(other.values()), rel=0.02)
    alike = rows_of(HeurFedAMP(sigma=10.0), nearer)[0]
    assert alike["1"] == pytest.approx(alike["2"], rel=1e-6)
    assert row["1"] > 1.2 * row["0"]


def test_the_scale_follows_the_models_that_came():
    trainer, spy = spied(Toy("sgd"), toy_data(), [FedAMP()], max_rounds=3)
    for number in (1, 2):
        w = [torch.cat([v.double().flatten() for v in u.state.values()]) for u in spy.of_round(number - 1).values()]
        stacked = torch.stack(w)
        sigma = float((torch.pdist(stacked) ** 2).mean())
        mixed = xi_by_hand(stacked, largest_alpha(stacked, sigma), sigma) @ stacked
        sent = {m.client: m.state for m in spy.messages if m.round == number}
        for i, client in enumerate(spy.of_round(number - 1)):
            got = torch.cat([v.double().flatten() for v in sent[client].values()])
            torch.testing.assert_close(got, mixed[i], atol=1e-6, rtol=1e-5)
    assert trainer.server.state["FedAMP"]["sigma"] > 0


@pytest.mark.parametrize(
    ("callback", "sentence"),
    [
        (FedAMP(sigma=1e6), r"FedAMP\(sigma=1e\+06\) counts all clients alike: .*Leave sigma out"),
        (FedAMP(sigma=1e-6), r"FedAMP\(sigma=1e-06\) lets no client listen to another: .*Leave sigma out"),
        (HeurFedAMP(sigma=1e-3), r"HeurFedAMP\(sigma=0.001\) counts all clients alike: .*Leave sigma out"),
        (FedAMP(lam=9.0, alpha=1.0), r"FedAMP pulls by lr \* lam / alpha = 1.8.*2 or more diverges"),
        (HeurFedAMP(lam=9.5, alpha=1.0), r"HeurFedAMP pulls by lr \* lam / alpha = 1.9"),
    ],
)
def test_settings_that_do_nothing_or_too_much_are_told(callback, sentence):
    with pytest.warns(UserWarning, match=sentence):
        federate(
            Toy("sgd", lr=0.2001), toy_data(), [callback], max_rounds=1, failures=FailurePolicy(update_limit=None)
        )  # some diverge


@pytest.mark.parametrize("callback", [FedAMP(), HeurFedAMP(), FedAMP(sigma=1.0), HeurFedAMP(sigma=0.0)])
def test_settings_that_work_are_not_warned_of(callback, recwarn):
    federate(Toy("sgd"), toy_data(), [callback], max_rounds=2)
    assert not [w for w in recwarn if "FedAMP" in str(w.message) and "is for clients" not in str(w.message)]


def test_groups_far_apart_exchange_no_weight():
    callback = FedAMP(alpha=0.3, sigma=1.0)
    near, alike, far = rows_of(callback, [[0.0, 0, 0], [0.1, 0, 0], [1e3, 0, 0]])
    assert near["1"] > 0.29
    assert near["2"] == alike["2"] == far["0"] == far["1"] == 0.0
    assert far["2"] == 1.0


@pytest.mark.parametrize("kind", [FedAMP, HeurFedAMP])
def test_identical_models_are_their_own_cloud(kind):
    module = NormNet("sgd")
    _trainer, spy = spied(module, toy_data(), [kind()], max_rounds=1)
    for message in spy.messages[:3]:
        same(message.state, module_state(module))


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
@pytest.mark.parametrize(
    "callback",
    [
        FedAMP(lam=0.0, start="own"),
        FedAMP(lam=0.0, sigma=1e-12),
        HeurFedAMP(lam=0.0, start="own"),
        HeurFedAMP(lam=0.0, xi_self=1.0),
    ],
    ids=["no pull from own", "sigma to 0", "heuristic no pull", "xi_self=1"],
)
def test_reductions_to_local(make, callback):
    module, data = make(), toy_data()
    alone = federate(module, data, [Local()], max_rounds=3, optimizer_state="reset")
    ours = federate(module, data, [callback], max_rounds=3)
    for client in NAMES:
        same(module_state(ours.module(client)), module_state(alone.module(client)))


def test_sigma_to_0_with_a_pull_is_local_with_a_pull_to_itself():
    _, spy = spied(Toy("sgd"), toy_data(), [FedAMP(lam=5e-13, alpha=1e-12, sigma=1e-11)], max_rounds=3)
    for message in spy.messages[3:9]:
        same(message.state, spy.of_round(message.round - 1)[message.client].state)


def test_the_deployed_model_is_the_clients_own():
    trainer, spy = spied(NormNet("adam"), toy_data(), [FedAMP(sigma=100.0)], max_rounds=3)
    for client, update in spy.of_round(2).items():
        same(module_state(trainer.module(client)), update.state)
        same(trainer.server.state["FedAMP"]["models"][client], update.state)
    with pytest.raises(ValueError, match="no global model"):
        trainer.module()
    same(trainer.server.model, module_state(trainer.server.blueprint.template))


def test_statistics_are_mixed_and_integers_are_the_clients_own():
    _trainer, spy = spied(NormNet("sgd"), toy_data(), [FedAMP(sigma=1e6)], max_rounds=2)
    sent = {message.client: message.state for message in spy.messages if message.round == 1}
    first = spy.of_round(0)
    steps = set()
    for client in NAMES:
        for name in ("net.1.running_mean", "net.1.running_var", "net.0.weight"):
            mean = sum(update.state[name].double() for update in first.values()) / 3  # sigma = 1e6: all alike
            torch.testing.assert_close(sent[client][name].double(), mean, atol=1e-5, rtol=1e-4)
        counted = "net.1.num_batches_tracked"
        assert sent[client][counted] == first[client].state[counted]
        steps.add(int(sent[client][counted]))
    assert len(steps) > 1


def test_absent_clients_keep_their_model_and_count_with_it():
    trainer, spy = spied(Toy("sgd"), toy_data(), [FedAMP(alpha=10.0, sigma=100.0)], max_rounds=5, participation=1)
    w0, latest = module_state(trainer.server.blueprint.template), {}
    for number in range(5):
        message = next(m for m in spy.messages if m.round == number)
        known = {client: latest.get(client, w0) for client in NAMES}
        stacked = torch.stack([torch.cat([v.double().flatten() for v in s.values()]) for s in known.values()])
        expected = (xi_by_hand(stacked, 10.0, 100.0) @ stacked)[NAMES.index(message.client)]
        got = torch.cat([v.double().flatten() for v in message.state.values()])
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
        for client in NAMES:
            if client in spy.of_round(number):
                latest[client] = spy.of_round(number)[client].state
            elif client in latest:
                assert spy.records[number][client] is spy.records[number - 1][client]
    assert len(latest) > 1
    for client in NAMES:
        same(module_state(trainer.module(client)), latest.get(client, w0))


def test_the_wire():
    module = Toy("sgd")
    trainer, spy = spied(module, toy_data(), [FedAMP(lam=2.0, alpha=4.0, sigma=100.0)], max_rounds=2)
    size = 4 * sum(p.numel() for p in module.parameters())
    assert trainer.server.costs.bytes_up == 6 * size
    assert trainer.server.costs.bytes_down == 6 * (size + 8)
    assert spy.messages[0].extras == {"FedAMP": {"pull": 0.5}}


def test_composes_with_a_personal_head_and_a_proximal_term():
    trainer, spy = spied(Toy("sgd"), toy_data(), [FedPer(), FedProx(0.1), FedAMP(sigma=10.0)], max_rounds=2)
    for item in (*spy.messages, *spy.updates):
        assert set(item.state) == {"net.0.weight", "net.0.bias"}
    deployed = module_state(trainer.module("1"))
    same(select(deployed, spy.updates[0].state), spy.of_round(1)["1"].state)
    same({n: deployed[n] for n in ("net.3.weight", "net.3.bias")}, spy.records[-1]["1"].personal)


# -- HeurFedAMP ------------------------------------------------------------------------------------------------------


def test_heuristic_attention_by_hand():
    models = [[1.0, 0, 0], [1.0, 1.0, 0], [0, 0, -2.0]]
    row = rows_of(HeurFedAMP(sigma=3.0, xi_self=0.4), models)[0]
    e = [math.exp(3.0 / math.sqrt(2)), math.exp(0.0)]
    assert row["0"] == 0.4
    assert [row["1"], row["2"]] == pytest.approx([0.6 * e[0] / sum(e), 0.6 * e[1] / sum(e)], rel=1e-12)


def test_heuristic_defaults_and_extremes():
    rows = rows_of(HeurFedAMP(sigma=0.0), [[1.0, 0, 0], [0, 1.0, 0], [0, 0, 0]])
    for row in rows:
        assert list(row.values()) == pytest.approx([1 / 3] * 3)
    assert rows_of(HeurFedAMP(), [[1.0, 0, 0]], ("0",)) == [{"0": 1.0}]


def test_heuristic_pull_by_hand():
    callback = HeurFedAMP(lam=1.0, alpha=2.0, xi_self=1.0, start="own")
    _trainer, spy = spied(Quadratic(lr=0.1), quadratic_data(A, B), [callback], max_rounds=1, local_epochs=2)
    a, b = torch.tensor(A[0], dtype=torch.float64), torch.tensor(B[0], dtype=torch.float64)
    w = 0.1 * a * b
    w = w - 0.1 * (a * (w - b) + 0.5 * w)
    close(spy.of_round(0)["0"].state, {"w": w}, atol=1e-14)


# -- refusals --------------------------------------------------------------------------------------------------------


def test_negative_attention_is_refused():
    with pytest.raises(ValueError, match=r"FedAMP got alpha=1.0 and sigma=1.0 for 3 clients.*alpha \(N - 1\) <= sigma"):
        federate(Quadratic(), quadratic_data(A, B), [FedAMP(alpha=1.0, sigma=1.0)])
    federate(Quadratic(), quadratic_data(A, B), [FedAMP(alpha=0.5, sigma=1.0)], max_rounds=1)


@pytest.mark.parametrize("other", [FedAdam(), SCAFFOLD()])
def test_server_steps_are_refused(other):
    with pytest.raises(ValueError, match=rf"FedAMP keeps several models.*, and {other.key} .*Remove"):
        make_trainer(None, [FedAMP(), other]).fit(Toy(), datamodule=toy_data())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (FedAMP, {"sigma": 0.0}),
        (FedAMP, {"alpha": -1.0}),
        (FedAMP, {"lam": -0.1}),
        (FedAMP, {"alpha_decay": 1.5}),
        (FedAMP, {"start": "zero"}),
        (HeurFedAMP, {"xi_self": 1.5}),
        (HeurFedAMP, {"sigma": -1.0}),
    ],
)
def test_senseless_settings_are_refused(kind, options):
    with pytest.raises(ValueError, match=f"{kind.__name__} got {next(iter(options))}="):
        kind(**options)


@pytest.mark.parametrize("callback", [FedAMP(), HeurFedAMP()])
def test_what_it_is_for_is_said(callback):
    with pytest.warns(UserWarning, match=f"{callback.key} is for clients some of whom have data alike"):
        federate(Toy("sgd"), toy_data(), [callback], max_rounds=1)
