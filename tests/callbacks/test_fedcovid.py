"""FedCovid: sheet B 4.2."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from fedlightning.callbacks import FedAvg, FedCovid, FedProx
from fedlightning.callbacks.fedcovid import margin_loss, positives_loss
from fedlightning.tensors import module_state
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    close,
    differs,
    federate,
    global_state,
    make_trainer,
    mean_of,
    quadratic_data,
    same,
    spied,
    toy_data,
)

PLAIN = {"lam_c": 0.0, "lam_m": 0.0, "lam_w": 0.0, "warmup": 0, "large": 1.0}
CASES = {
    "FedCovid": Case(FedCovid(head="head"), neutral=FedCovid(**PLAIN)),
    "FedCovid semi-hard": Case(FedCovid(head="head", mining="semi-hard", large=1), neutral=FedCovid(**PLAIN)),
}
KEPT = {"FedCovid": Kept("FedCovid", server=("warmup",))}


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_without_its_terms_it_is_fedavg_with_log_weights(make):
    module = make()
    plain = federate(module, toy_data(), [FedAvg("log")], max_rounds=3, participation=2)
    ours = federate(module, toy_data(), [FedCovid(**PLAIN)], max_rounds=3, participation=2)
    same(global_state(plain), global_state(ours))


def test_the_mean_is_by_the_logarithm_of_one_more_than_the_samples():
    trainer, spy = spied(Toy(), toy_data((24, 40, 1)), [FedCovid(warmup=0)], max_rounds=1)
    weights = {"0": math.log(25), "1": math.log(41), "2": math.log(2)}
    close(mean_of(spy.of_round(0), weights), global_state(trainer), atol=1e-7)
    ones, spy = spied(Toy(), toy_data((1, 1)), [FedCovid(warmup=0)], max_rounds=1)
    close(mean_of(spy.of_round(0), {"0": 1.0, "1": 1.0}), global_state(ones), atol=1e-7)


def test_large_clients_train_first_and_small_ones_train_less():
    module, data = Toy(), toy_data((8, 32, 16, 24))
    options = {"max_rounds": 4, "local_epochs": 4, "participation": 3}
    trainer, spy = spied(module, data, [FedCovid(large=2, small_work=0.25)], **options)
    assert [sorted(spy.of_round(t)) for t in (0, 1)] == [["1", "3"], ["1", "3"]]
    assert all(len(spy.of_round(t)) == 3 for t in (2, 3))
    assert trainer.server.state["FedCovid"] == {"warmup": 2}
    batches = {"0": 1, "1": 4, "2": 2, "3": 3}
    for update in spy.updates:
        epochs = 4 if update.client in ("1", "3") else 1
        assert update.steps == epochs * batches[update.client]
        rate = 0.1 if update.client in ("1", "3") else 0.02
        assert update.lr_sum == pytest.approx(rate * update.steps)


def test_a_longer_run_keeps_the_warm_up_it_began_with(tmp_path):
    options = {"evaluation": 1, "save_state": 1}
    first = federate(Toy(), toy_data(), [FedCovid(large=1)], tmp_path, max_rounds=2, **options)
    path = first.run.path
    longer = make_trainer(tmp_path, [FedCovid(large=1)], max_rounds=6, **options)
    longer.fit(Toy(), datamodule=toy_data(), resume=path)
    assert longer.server.state["FedCovid"] == {"warmup": 1}


def brute_margin(z, y, margin):
    """The mean over anchors, with the only positive and negative that each has."""
    terms = []
    for i in range(len(y)):
        p = [j for j in range(len(y)) if j != i and y[j] == y[i]]
        n = [j for j in range(len(y)) if y[j] != y[i]]
        if p and n:
            d = [1 - float(z[i] @ z[j] / (z[i].norm() * z[j].norm())) for j in (*p, *n)]
            assert len(d) == 2
            terms.append(max(d[0] - d[1] + margin, 0.0))
    return sum(terms) / len(terms)


def test_the_margin_loss_is_the_papers_formula():
    torch.manual_seed(0)
    z, y = torch.randn(3, 5), torch.tensor([1, 1, 0])
    assert float(margin_loss(z, y, 0.5)) == pytest.approx(brute_margin(z, y, 0.5), rel=1e-5)


@pytest.mark.parametrize("mining", ["random", "semi-hard"])
def test_the_margin_loss_is_zero_where_it_should_be(mining):
    near = torch.tensor([[1.0, 0.0], [1.0, 0.1], [-1.0, 0.0], [-1.0, 0.1]])
    assert float(margin_loss(near, torch.tensor([0, 0, 1, 1]), 0.2, mining)) == 0.0
    z = torch.randn(4, 3, requires_grad=True)
    for labels in ([1, 1, 1, 1], [0, 1, 2, 3]):  # no negative, no positive
        loss = margin_loss(z, torch.tensor(labels), 0.2, mining)
        assert float(loss) == 0.0
        assert torch.equal(torch.autograd.grad(loss, z)[0], torch.zeros(4, 3))


def test_semi_hard_takes_the_nearest_negative_beyond_the_positive():
    angles = torch.tensor([0.0, 0.5, 0.4, 0.7, 3.0])  # anchor, positive, nearer negative, semi-hard one, easy one
    z, y = torch.stack([angles.cos(), angles.sin()], 1), torch.tensor([1, 1, 0, 2, 3])
    d = [1 - math.cos(a) for a in (0.5, 0.7)]
    other = [1 - math.cos(0.5), 1 - math.cos(2.5)]  # of the second anchor: no negative is semi-hard
    assert other[1] > other[0] + 0.2
    assert float(margin_loss(z, y, 0.2, "semi-hard")) == pytest.approx(d[0] - d[1] + 0.2, rel=1e-4)


def test_noisy_positives_count_alone_and_may_be_missing():
    logits, y = torch.randn(5, 3), torch.tensor([1, 0, 1, 2, 0])
    assert torch.allclose(positives_loss(logits, y, 1), F.cross_entropy(logits[[0, 2]], y[[0, 2]]))
    one = logits[:, :1]
    expected = F.binary_cross_entropy_with_logits(one[[0, 2], 0], torch.ones(2))
    assert torch.allclose(positives_loss(one, (y == 1).long(), 1), expected)
    z = torch.randn(2, 3, requires_grad=True)
    loss = positives_loss(z, torch.tensor([0, 2]), 1)
    assert float(loss) == 0.0
    assert torch.equal(torch.autograd.grad(loss, z)[0], torch.zeros(2, 3))


def test_without_noise_positives_count_once_more():
    """One full batch, one step: the gradient is that of CE(all) + 2 CE(positives), by hand."""
    torch.manual_seed(0)
    module, data = Toy(lr=0.5), toy_data((24,), batch_size=24)
    trained = federate(module, data, [FedCovid(lam_c=2.0, lam_m=0.0, lam_w=0.0, noise=0.0, head="net.3")], max_rounds=1)
    x, y = next(iter(data.client_dataloader("0", "train")))
    parameters = list(module.parameters())
    logits = module(x)
    loss = F.cross_entropy(logits, y) + 2.0 * F.cross_entropy(logits[y == 1], y[y == 1])
    gradients = torch.autograd.grad(loss, parameters)
    expected = {name: p.detach() - 0.5 * g for (name, p), g in zip(module.named_parameters(), gradients, strict=True)}
    close(expected, global_state(trained), atol=1e-6)


def test_noise_acts_in_training_only_and_moves_the_model():
    quiet = federate(Toy(), toy_data(), [FedCovid(lam_m=0, noise=0.0)], max_rounds=1)
    noisy = federate(Toy(), toy_data(), [FedCovid(lam_m=0, noise=0.5)], max_rounds=1)
    assert differs(global_state(quiet), global_state(noisy))
    module = noisy.module("0")
    x = torch.randn(4, 6)
    assert torch.equal(module(x), module(x))
    assert module_state(module).keys() == module_state(Toy()).keys()


def test_the_proximal_term_is_divided_by_the_number_of_parameters():
    a, b = [[1.0, 2.0, 1.0]], [[5.0, -5.0, 4.0]]
    ours = FedCovid(lam_c=0, lam_m=0, lam_w=0.9, warmup=0)
    data = quadratic_data(a, b)
    found = global_state(federate(Quadratic(0.1), data, [ours], max_rounds=1, local_epochs=3))
    expected = federate(Quadratic(0.1), data, [FedProx(mu=2 * 0.9 / 3)], max_rounds=1, local_epochs=3)
    close(found, global_state(expected), atol=1e-14)


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match=r"FedCovid\(positive=3\) trains on copies of one class, but 'net.3' gives"):
        federate(Toy(), toy_data(), [FedCovid(positive=3)])
    with pytest.raises(ValueError, match="FedCovid cannot see the features of Quadratic"):
        federate(Quadratic(), quadratic_data([[1.0] * 3], [[1.0] * 3]), [FedCovid(head="w")])
    for name, value in {
        "lam_c": -1.0,
        "copies": 0,
        "mining": "hard",
        "warmup": 1.5,
        "large": 0,
        "small_lr": 0.0,
    }.items():
        with pytest.raises(ValueError, match=rf"FedCovid got .*{name}="):
            FedCovid(**{name: value})


def test_a_small_weight_is_used_and_none_is_not():
    off = {"lam_c": 0.0, "lam_m": 0.0, "lam_w": 0.0, "small_lr": 1.0}
    roles = {
        "lam_c": "training_loss",
        "lam_m": "training_loss",
        "lam_w": "correct_gradient",
        "small_lr": "local_phases",
    }
    for name, role in roles.items():
        used = FedCovid(**{**off, name: 1e-3})
        assert {each for each in set(roles.values()) if used.claims(each)} == {role}
    assert not any(FedCovid(**off).claims(role) for role in roles.values())
