"""pFedBayes: sheet A 34."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from fedlightning.callbacks import GPFL, FedAvg, FedPer, FedProx, Local, pFedBayes
from fedlightning.callbacks.pfedbayes import gaussian_kl, kl_gradients, pairs
from fedlightning.seeding import generator
from fedlightning.tensors import module_state
from fedlightning.wrappers import unmix
from tests.callbacks.common import SIZES, AdamWDecay, absent_clients_rest, batches, cut_and_resumed, deployed
from tests.conformance.case import Case, Kept
from tests.helpers import NormNet, Toy, ToyData, close, differs, federate, global_state, mean_of, same, spied, toy_data

CASES = {
    "pFedBayes": Case(
        pFedBayes(),
        neutral=pFedBayes(zeta=0.0, noise=0.0),
        skip={"identical_clients": "every client draws its own weights"},
    ),
    "pFedBayes means": Case(pFedBayes(noise=0.0), neutral=pFedBayes(zeta=0.0, noise=0.0)),
}
KEPT = {"pFedBayes": Kept("pFedBayes", client=("model",))}


def gaussians(seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(50, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(4)]


def test_the_divergence_is_torchs_and_so_are_its_slopes():
    mu, rho, prior_mu, prior_rho = values = gaussians()
    ours = gaussian_kl(*values)
    theirs = kl_divergence(Normal(mu, F.softplus(rho)), Normal(prior_mu, F.softplus(prior_rho)))
    torch.testing.assert_close(ours, theirs)
    assert bool((ours >= 0).all())
    for slope, expected in zip(kl_gradients(*values), torch.autograd.grad(theirs.sum(), values), strict=True):
        torch.testing.assert_close(slope, expected)
    assert float(gaussian_kl(mu, rho, mu, rho).detach().abs().max()) < 1e-12
    assert all(float(slope.abs().max()) < 1e-9 for slope in kl_gradients(mu, rho, mu, rho))


def in_double(data):
    tensors = {c: {s: (x.double(), y) for s, (x, y) in splits.items()} for c, splits in data.tensors.items()}
    return ToyData(tensors)


def by_hand(q, w, data, client, number, *, zeta, every, global_lr, noise, lr):
    """Return both distributions after a visit of one epoch, by autograd through samples and torch's divergence."""
    names = [name for name in q if not name.endswith("_rho")]
    q = {name: value.clone().requires_grad_() for name, value in q.items()}
    w = {name: value.clone().requires_grad_() for name, value in w.items()}
    follower = torch.optim.Adam(list(w.values()), lr=global_lr)
    draw, size, steps = generator(0, number, client, "posterior"), len(data.tensors[client]["train"][1]), 0

    def divergence(frozen_q, frozen_w):
        return sum(
            kl_divergence(
                Normal(frozen_q[n], F.softplus(frozen_q[f"{n}_rho"])),
                Normal(frozen_w[n], F.softplus(frozen_w[f"{n}_rho"])),
            ).sum()
            for n in names
        )

    def fixed(state):
        return {name: value.detach() for name, value in state.items()}

    def follow():
        follower.zero_grad()
        divergence(fixed(q), w).backward()
        follower.step()

    for x, y in batches(data, client, round=number):
        theta = {
            n: q[n] + F.softplus(q[f"{n}_rho"]) * noise * torch.randn(q[n].shape, generator=draw).double()
            for n in names
        }
        hidden = torch.relu(x @ theta["net.0.weight"].T + theta["net.0.bias"])
        logits = hidden @ theta["net.3.weight"].T + theta["net.3.bias"]
        loss = F.cross_entropy(logits, y) + zeta / size * divergence(q, fixed(w))
        gradients = torch.autograd.grad(loss, list(q.values()))
        with torch.no_grad():
            for value, gradient in zip(q.values(), gradients, strict=True):
                value -= lr * gradient
        steps += 1
        if steps % every == 0:
            follow()
    if steps % every:
        follow()
    return fixed(q), fixed(w)


@pytest.mark.parametrize("server_lr", [1.0, 0.4])
def test_two_visits_by_hand(server_lr):
    options = {"zeta": 0.05, "global_lr": 0.02, "noise": 1.0}
    module, data = Toy("sgd", lr=0.1).double(), in_double(toy_data(SIZES))  # Adam divides by what is nearly nothing
    method = pFedBayes(personal_steps=2, server_lr=server_lr, rho=-2.0, **options)
    trainer, spy = spied(module, data, [method], max_rounds=2)
    first = spy.messages[0].state
    own, w = dict.fromkeys(SIZES, first), first
    for number in range(2):
        for client in SIZES:
            own[client], common = by_hand(own[client], w, data, client, number, every=2, lr=0.1, **options)
            close(spy.of_round(number)[client].state, common, atol=1e-9)
            close(spy.records[number][client].state["pFedBayes"]["model"], own[client], atol=1e-9)
        mean = mean_of(spy.of_round(number), dict.fromkeys(SIZES, 1))
        w = {name: (1 - server_lr) * w[name] + server_lr * value for name, value in mean.items()}
        close(spy.rounds[number], w, atol=1e-9)
        w = spy.rounds[number]
    for client in SIZES:
        close(deployed(trainer, client), own[client], atol=1e-9)


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_without_prior_and_noise_it_is_training_alone(make):
    module, data = make(), toy_data(SIZES)
    options = {"max_rounds": 3, "optimizer_state": "reset"}
    ours = federate(module, data, [pFedBayes(zeta=0.0, noise=0.0)], **options)
    local = federate(module, data, [Local()], **options)
    for client in SIZES:
        found, alone = deployed(ours, client), deployed(local, client)
        same({name: found[name] for name in dict(module.named_parameters())}, dict_of(alone, module))


def dict_of(state, module):
    return {name: state[name] for name in dict(module.named_parameters())}


def test_without_prior_the_own_distribution_ignores_the_common_one():
    module, data = Toy("sgd"), toy_data(SIZES)
    runs = [federate(module, data, [pFedBayes(zeta=0.0, global_lr=lr)], max_rounds=3) for lr in (1e-4, 0.1)]
    for client in SIZES:
        same(*(deployed(run, client) for run in runs))
    assert differs(*(global_state(run) for run in runs))


def test_a_server_rate_of_0_leaves_the_common_one():
    module, data = Toy("sgd"), toy_data(SIZES)
    assert all(pFedBayes(server_lr=b).claims("server_step") == (b != 1.0) for b in (0.0, 0.5, 1.0, 2.0))
    trainer, spy = spied(module, data, [pFedBayes(server_lr=0.0)], max_rounds=2)
    same(global_state(trainer), spy.messages[0].state)
    assert all(differs(update.state, spy.messages[0].state) for update in spy.updates)


def test_a_strong_prior_holds_the_own_distribution():
    module, data = Toy("sgd", lr=0.01), toy_data(SIZES)
    start = module_state(module)["net.0.weight"]
    moved = []
    for zeta in (0.0, 1.0, 10.0):
        algorithm = pFedBayes(zeta=zeta, server_lr=0.0, rho=-1.0, global_lr=1e-3, personal_steps=5)
        trainer = federate(module, data, [algorithm], max_rounds=2, local_epochs=3)
        moved.append(float((deployed(trainer, "1")["net.0.weight"] - start).norm()))
    assert moved[0] > moved[1] > moved[2], moved


def test_what_travels_is_twice_fedavgs_and_no_own_distribution():
    module, data = NormNet("adam"), toy_data(SIZES)
    ours, spy = spied(module, data, [pFedBayes()], max_rounds=2)
    parameters = sum(p.numel() for p in module.parameters())
    plain = federate(module, data, [FedAvg()], max_rounds=2)
    assert ours.server.costs.bytes_up - plain.server.costs.bytes_up == 4 * parameters * len(SIZES) * 2
    for update in spy.of_round(1).values():
        own = spy.records[1][update.client].state["pFedBayes"]["model"]
        assert update.extras == {} and not torch.equal(update.state["net.0.weight"], own["net.0.weight"])


def test_spreads_stay_positive_and_learn():
    trainer = federate(Toy("adam"), toy_data(SIZES), [pFedBayes()], max_rounds=3, local_epochs=3)
    found = deployed(trainer, "1")
    for name, value in found.items():
        if name.endswith("_rho"):
            assert bool((F.softplus(value) > 0).all()) and float((value + 3).abs().max()) > 1e-3


def test_accumulated_gradients_are_of_one_sample():
    """Two half batches and one step are the full batch's step."""
    module = Toy("sgd")
    once = federate(module, toy_data([16], batch_size=8, shuffle=False), [pFedBayes()], max_rounds=2)
    halves = toy_data([16], batch_size=4, shuffle=False)
    twice = federate(module, halves, [pFedBayes()], max_rounds=2, accumulate_grad_batches=2)
    close(global_state(once), global_state(twice))
    close(deployed(once, "0"), deployed(twice, "0"))


def test_a_private_head_keeps_means_and_spreads():
    _, spy = spied(Toy("sgd"), toy_data(SIZES), [pFedBayes(), FedPer("net.3")], max_rounds=2)
    for update in spy.updates:
        assert set(update.state) == {f"net.0.{name}" for name in ("weight", "bias", "weight_rho", "bias_rho")}


@pytest.mark.slow
def test_absent_clients_rest_and_resumed_is_uninterrupted(tmp_path):
    absent_clients_rest(spied(Toy("adam"), toy_data(SIZES), [pFedBayes()], max_rounds=3, participation=1)[1])
    whole, _, again = cut_and_resumed(
        tmp_path, NormNet("adam"), toy_data(SIZES), lambda: [pFedBayes()], max_rounds=3, participation=2
    )
    same(global_state(again), global_state(whole))
    for client in SIZES:
        same(deployed(again, client), deployed(whole, client))


def test_the_wrapper_comes_off():
    module = Toy()
    names = list(module.state_dict())
    wrapped = pFedBayes().wrap_module(module, "server")
    assert [mu for _, mu in pairs(wrapped)] == names and len(wrapped.state_dict()) == 2 * len(names)
    assert list(unmix(wrapped).state_dict()) == names and pairs(wrapped) == []


def test_wrong_use():
    for make, sentence in (
        (lambda: pFedBayes(zeta=-1.0), "zeta=-1.0"),
        (lambda: pFedBayes(noise=math.inf), r"noise=inf. Use a number in \[0, inf\)"),
        (lambda: pFedBayes(personal_steps=0), r"personal_steps=0. Use a whole number in \[1, inf\)"),
        (lambda: pFedBayes(global_lr=0.0), r"global_lr=0.0. Use a number in \(0, inf\). With 0 w would never move"),
        (lambda: pFedBayes(rho=math.nan), "rho=nan"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make()
    data = toy_data(SIZES)
    with pytest.raises(ValueError, match="AdamWDecay's optimizer decays weights"):
        federate(AdamWDecay(), data, [pFedBayes()])
    with pytest.raises(
        ValueError, match=r"pFedBayes trains the model that travels without data.*, and FedProx corrects"
    ):
        federate(Toy(), data, [FedProx(), pFedBayes()])
    with pytest.raises(ValueError, match="pFedBayes adds a spread to every parameter of the module, and GPFL"):
        federate(Toy(), data, [GPFL(), pFedBayes()])
    with pytest.warns(UserWarning, match="2 or more diverges: use a learning rate below .* or a smaller zeta"):
        federate(Toy("sgd"), data, [pFedBayes(zeta=5.0)], max_rounds=1)


def test_a_bias_before_batch_normalisation_does_not_follow_rounding():
    """Its gradient is 0 but for rounding, of which Adam made steps of the learning rate: two equal runs, and two results."""
    ends = []
    for order in (False, True):
        data = toy_data((24, 40, 16), shuffle=False, batch_size=64)
        for splits in data.tensors.values() if order else ():
            x, y = splits["train"]
            turned = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
            splits["train"] = x[turned], y[turned]  # one batch: the same sums in another order
        torch.manual_seed(0)
        ends.append(global_state(federate(NormNet(), data, [pFedBayes()], max_rounds=3, local_epochs=4)))
    close(*ends, atol=1e-5)
