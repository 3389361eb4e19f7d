"""FedNTD: sheet C 10."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning import FederatedCallback
from fedlightning.callbacks import FENDA, FedAdam, FedAvg, FedBN, FedLAMA, FedNTD, FedPer, FedProx, PLayerFL
from fedlightning.callbacks.fedntd import not_true_divergence
from fedlightning.models import MLP, Classifier
from fedlightning.tensors import clone, module_state
from tests.callbacks.common import SIZES, Plain, absent_clients_rest, cut_and_resumed, fixed_data, start_of
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NetStyle,
    NormNet,
    PiecesStyle,
    Toy,
    close,
    differs,
    federate,
    global_state,
    same,
    spied,
    toy_data,
)

CASES = {"FedNTD": Case(FedNTD(beta=0.7, tau=2.0, head="head"), neutral=FedNTD(beta=0.0))}
KEPT = {"FedNTD": Kept("FedNTD", options={"head": "net.3"})}


def brute(z, t, labels, tau):
    """The formula, sample by sample, in plain Python."""
    total = 0.0
    for own, other, label in zip(z.tolist(), t.tolist(), labels.tolist(), strict=True):
        p, q = ([math.exp(v / tau) for c, v in enumerate(row) if c != label] for row in (own, other))
        total += sum(b / sum(q) * math.log((b / sum(q)) / (a / sum(p))) for a, b in zip(p, q, strict=True))
    return tau**2 * total / len(labels)


@pytest.mark.parametrize(("tau", "known"), [(1.0, 0.0671308), (3.0, 0.1156885)])
def test_the_sheets_numbers(tau, known):
    z, t = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[1.0, 2.0, 0.0]])
    assert float(not_true_divergence(z, t, torch.tensor([0]), tau)) == pytest.approx(known, abs=1e-6)


@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_the_term_is_the_papers_formula(tau):
    torch.manual_seed(1)
    z, t, labels = (
        torch.randn(16, 5, requires_grad=True),
        torch.randn(16, 5, requires_grad=True),
        torch.randint(5, (16,)),
    )
    found = not_true_divergence(z, t, labels, tau)
    assert float(found.detach()) == pytest.approx(brute(z.double(), t.double(), labels, tau), rel=1e-5)
    assert float(found.detach()) >= 0
    shifted = not_true_divergence(z, t + 7.0, labels, tau)
    torch.testing.assert_close(found, shifted, rtol=1e-5, atol=1e-6)
    found.backward()
    assert t.grad is None
    own = z.grad.gather(1, labels[:, None])
    assert not own.any(), "the label's own logit has no part in it"
    assert (z.grad != 0).sum() == 16 * 4


def test_what_the_label_says_and_who_has_none():
    z, t = torch.randn(2, 6, 4).unbind()
    labels = torch.tensor([0, 1, -100, 2, 3, -100])
    known = labels >= 0
    found = not_true_divergence(z, t, labels, 1.5)
    torch.testing.assert_close(found, not_true_divergence(z[known], t[known], labels[known], 1.5))
    assert float(not_true_divergence(z, t, torch.full((6,), -100), 1.5)) == 0.0
    assert float(not_true_divergence(z, z, labels.clamp_min(0), 1.5)) == pytest.approx(0.0, abs=1e-7)


def test_half_precision_logits_are_compared_in_fp32():
    z, t = torch.randn(2, 6, 4).bfloat16().unbind()
    assert not_true_divergence(z, t, torch.zeros(6, dtype=torch.long), 1.0).dtype == torch.float32


def by_hand(start, x, y, beta, tau, epochs):
    """Visits of FedNTD over batches of 8 in plain torch, the KL in numpy's terms: no function of the package."""
    model, teacher = Plain(start), Plain(start)
    for _ in range(epochs):
        for at in range(0, len(x), 8):
            bx, by = x[at : at + 8], y[at : at + 8]
            model.leaves = [leaf.detach().requires_grad_() for leaf in model.leaves]
            z, t = model(bx), teacher(bx).detach()
            away = torch.eye(z.shape[1], dtype=torch.bool)[by]
            q = (t / tau).exp().masked_fill(away, 0.0)
            q = q / q.sum(1, keepdim=True)
            p = (z / tau).exp().masked_fill(away, 0.0)
            p = p / p.sum(1, keepdim=True)
            kl = torch.where(
                away, torch.zeros_like(q), q * (q.clamp_min(1e-300).log() - p.clamp_min(1e-300).log())
            ).sum(1)
            loss = F.cross_entropy(z, by) + beta * tau**2 * kl.mean()
            gradients = torch.autograd.grad(loss, model.leaves)
            model.leaves = [(w - 0.1 * g).detach() for w, g in zip(model.leaves, gradients, strict=True)]
    return model.leaves


@pytest.mark.parametrize(("beta", "tau"), [(1.0, 1.0), (3.0, 2.5)])
def test_federations_by_hand(beta, tau):
    data, start = fixed_data([16, 24, 10], worlds=2), start_of(Toy)
    _, spy = spied(start, data, [FedNTD(beta, tau)], max_rounds=3, local_epochs=2)
    w = [value.clone() for value in module_state(start).values()]
    names = list(module_state(start))
    for number in range(3):
        total, mean = 0, [0.0 * v for v in w]
        for splits in data.tensors.values():
            x, y = splits["train"]
            trained = by_hand(dict(zip(names, w, strict=True)), x, y, beta, tau, 2)
            mean = [m + len(x) * v for m, v in zip(mean, trained, strict=True)]
            total += len(x)
        w = [m / total for m in mean]
        close(spy.rounds[number], dict(zip(names, w, strict=True)), atol=1e-9)


def test_without_a_weight_it_is_fedavg():
    module, data = NormNet("adam"), toy_data()
    same(*(global_state(federate(module, data, [cb], max_rounds=3)) for cb in (FedAvg(), FedNTD(beta=0.0))))


def test_one_step_is_taken_where_the_term_is_zero_and_a_warning_says_so():
    module, data = Toy("sgd"), toy_data()
    plain = global_state(federate(module, data, max_rounds=2, local_steps=1))
    with pytest.warns(UserWarning, match=r"FedNTD\(beta=5.0\) does nothing here: a visit is one step"):
        ours = federate(module, data, [FedNTD(beta=5.0)], max_rounds=2, local_steps=1)
    close(global_state(ours), plain, atol=1e-7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federate(module, data, [FedNTD()], max_rounds=1, local_steps=2)


class Teacher(FederatedCallback):
    """Looks at FedNTD's teacher when training is over."""

    def __init__(self):
        self.seen = []

    def on_train_end(self, trainer, pl_module):
        teacher = self.client.scratch["FedNTD"]
        self.seen.append((clone(module_state(teacher)), dict(self.client.received)))
        assert not teacher.training
        assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())


def test_the_teacher_is_the_received_model_and_does_not_move():
    """With BatchNorm, whose statistics would move in train mode; the client's own is in train mode again."""
    look = Teacher()
    federate(NormNet("adam"), toy_data(), [FedNTD(), look], max_rounds=2, local_epochs=2)
    assert len(look.seen) == 6
    for state, received in look.seen:
        same(state, received)


def test_the_term_draws_the_batches_and_masks_of_plain_training_alone():
    """A term of no weight to speak of changes nothing but by its size: dropout masks and batches are those of FedAvg."""
    module, data = Toy("sgd", dropout=0.3), toy_data()
    plain = global_state(federate(module, data, max_rounds=2))
    close(global_state(federate(module, data, [FedNTD(beta=1e-9)], max_rounds=2)), plain, atol=1e-7)


def test_few_of_the_clients_take_part():
    module = Toy("adam")
    _, spy = spied(module, toy_data(SIZES), [FedNTD()], max_rounds=4, participation=1)
    absent_clients_rest(spy)
    assert all(len(spy.of_round(number)) == 1 for number in range(4))


def test_resumed_is_uninterrupted(tmp_path):
    whole, _, again = cut_and_resumed(tmp_path, NormNet("adam"), toy_data(), lambda: [FedNTD()], max_rounds=3)
    same(global_state(whole), global_state(again))


def test_the_logged_loss_is_the_tasks_and_what_travels_is_fedavgs():
    _, spy = spied(Toy("sgd", lr=1e-5), toy_data(), [FedNTD(beta=1e4)], max_rounds=2, local_epochs=2)
    assert all(update.metrics["train_loss"] < 5 for update in spy.updates)
    assert not any(item.extras for item in (*spy.messages, *spy.updates))


@pytest.mark.parametrize("style", [NetStyle, PiecesStyle])
def test_any_style_of_step_and_mixed_precision(style):
    module, data = style("adam"), toy_data()
    trained = global_state(federate(module, data, [FedNTD()], max_rounds=2, precision="bf16-mixed"))
    assert all(torch.isfinite(value).all() for value in trained.values())
    assert differs(trained, global_state(federate(module, data, max_rounds=2, precision="bf16-mixed")))


def test_composes_with_a_proximal_term_a_server_optimizer_and_own_statistics():
    _, spy = spied(NormNet("adam"), toy_data(), [FedProx(), FedAdam(), FedBN(), FedNTD()], max_rounds=2)
    assert all(torch.isfinite(v).all() for v in spy.rounds[-1].values() if v.is_floating_point())


def test_on_few_labels_it_forgets_less():
    """After a visit to clients with two of three classes, the third one's logits have moved less than under FedAvg."""
    data = toy_data((60, 60))
    for client, splits in data.tensors.items():
        x, y = splits["train"]
        splits["train"] = (
            x,
            torch.where(y == int(client), 2 - y, y) if int(client) != 1 else torch.where(y == 1, 2, y),
        )
    module = Toy("sgd", lr=0.3)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))

    def drift(callback):
        _, spy = spied(module, data, [callback], max_rounds=1, local_epochs=10)
        moved = []
        with torch.no_grad():
            for update in spy.updates:
                local, old = Toy(), Toy()
                local.load_state_dict(update.state)
                old.load_state_dict(spy.messages[0].state)
                missing = int(update.client)
                others = [c for c in range(3) if c != missing]
                gap = [m(x)[:, missing] - m(x)[:, others].logsumexp(1) for m in (local, old)]
                moved.append(float((gap[0] - gap[1]).abs().mean()))
        return np.mean(moved)

    assert drift(FedNTD(beta=3.0)) < 0.9 * drift(FedAvg())


class Weighted(Toy):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y, weight=torch.tensor([1.0, 2.0, 5.0]), label_smoothing=0.1) + 1e-3


class OneVersusAll(Toy):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.binary_cross_entropy_with_logits(self.net(x), F.one_hot(y, 3).float())


class Squares(Toy):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.net(x), F.one_hot(y, 3).float())


class Nothing(Toy):
    """The last layer's output is not in the loss."""

    def training_step(self, batch, batch_idx):
        self.net(batch[0])
        return self.net[0](batch[0]).square().mean()


@pytest.mark.parametrize("kind", [OneVersusAll, Squares, Nothing])
def test_other_losses_are_refused(kind):
    with pytest.raises(
        ValueError, match=f"FedNTD is defined for the cross entropy, and the loss of {kind.__name__} is no"
    ):
        federate(kind(), toy_data(), [FedNTD()])


def test_a_weighted_and_smoothed_cross_entropy_is_one():
    trained = global_state(federate(Weighted(), toy_data(), [FedNTD()], max_rounds=1))
    assert all(torch.isfinite(value).all() for value in trained.values())


class TwoClasses(Toy):
    def make(self, hidden, dropout):
        return nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 2))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1].clamp_max(1))


def two_classes():
    data = toy_data()
    for splits in data.tensors.values():
        for split, (x, y) in splits.items():
            splits[split] = (x, y.clamp_max(1))
    return data


def test_two_classes_are_refused():
    with pytest.raises(ValueError, match="distils the classes that are not a sample's label, and TwoClasses has 2"):
        federate(TwoClasses(), two_classes(), [FedNTD()])
    with pytest.raises(ValueError, match=r"a logit for each class, but `net.fc2` of Classifier gives \(8, 1\)"):
        federate(Classifier(MLP(6, [4], 1), num_classes=2), two_classes(), [FedNTD()])
    with pytest.raises(ValueError, match=r"FedNTD needs a row of logits|not a cross entropy of what `net.0` gives"):
        federate(Toy(), toy_data(), [FedNTD(head="net.0")])


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (FedPer(), r"says of all classes, but 'net.3.weight' of its head stays with the clients"),
        (FENDA(head="net.3"), r"'net.3.weight' of its head stays with the clients"),
        (PLayerFL(), "but PLayerFL lets layers stay with the clients"),
        (FedLAMA(), "but FedLAMA lets layers stay with the clients"),
    ],
)
def test_heads_that_stay_with_the_clients_are_refused(other, match):
    with pytest.raises(ValueError, match=match):
        federate(Toy(), toy_data(), [FedNTD(head="net.3"), other])


@pytest.mark.parametrize("options", [{"beta": -1.0}, {"tau": 0.0}, {"tau": -2.0}])
def test_senseless_settings_are_refused(options):
    with pytest.raises(ValueError, match=f"FedNTD got {next(iter(options))}="):
        FedNTD(**options)
