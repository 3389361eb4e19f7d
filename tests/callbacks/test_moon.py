"""MOON: sheet entry 9."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning import FederatedCallback
from fedlightning.callbacks import FENDA, MOON, FedAvg, FedPer, FedProx, LGFedAvg, Local
from fedlightning.callbacks.shared.representations import contrastive_loss, labels_of
from fedlightning.tensors import clone, module_state
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

CASES = {"MOON": Case(MOON(head="head"), neutral=MOON(mu=0.0))}
KEPT = {"MOON": Kept("MOON", client=("previous",), options={"head": "net.3"})}


def brute(z, g, p, temperature):
    """The formula, sample by sample, in plain Python."""
    terms = []
    for a, b, c in zip(z.double(), g.double(), p.double(), strict=True):
        near, far = (math.exp(float(a @ o / (a.norm() * o.norm())) / temperature) for o in (b, c))
        terms.append(-math.log(near / (near + far)))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("temperature", [0.5, 0.1, 2.0])
def test_the_loss_is_the_papers_formula(temperature):
    torch.manual_seed(1)
    z, g, p = torch.randn(3, 16, 5)
    found = float(contrastive_loss(z, g, p, temperature))
    assert found == pytest.approx(brute(z, g, p, temperature), rel=1e-5)
    assert 0.0 < found <= math.log(1 + math.exp(2 / temperature))
    worst = float(contrastive_loss(z, -z, z, temperature))
    assert worst == pytest.approx(math.log(1 + math.exp(2 / temperature)), rel=1e-5)


def test_equal_teachers_give_log_two_and_no_gradient():
    torch.manual_seed(1)
    z, g = torch.randn(8, 5, requires_grad=True), torch.randn(8, 5)
    loss = contrastive_loss(z, g, g, 0.5)
    (gradient,) = torch.autograd.grad(loss, z)
    assert torch.equal(loss.detach(), torch.tensor(2.0).log())
    assert not gradient.any()


def test_silent_representations_have_no_gradient():
    """A cosine at 0 has none; by the usual formula it would be 1/eps times too large."""
    z = torch.zeros(4, 5, requires_grad=True)
    (gradient,) = torch.autograd.grad(contrastive_loss(z, torch.randn(4, 5), torch.zeros(4, 5), 0.5), z)
    assert not gradient.any()


def test_half_precision_features_are_compared_in_fp32():
    z, g, p = torch.randn(3, 16, 5).bfloat16()
    assert contrastive_loss(z, g, p, 0.5).dtype == torch.float32


def by_hand(module, data, mu, temperature, rounds):
    """MOON with one full-batch SGD step per epoch and two epochs, without a line of the package's training."""
    body = lambda model, x: model.net[:-1](x)  # noqa: E731
    server, last = copy.deepcopy(module), {}
    for _ in range(rounds):
        sent = {}
        for client in data.tensors:
            x, y = data.tensors[client]["train"]
            model = copy.deepcopy(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=module.lr)
            for _ in range(2):
                z = body(model, x)
                loss = F.cross_entropy(model.net[-1](z), y)
                if client in last:
                    with torch.no_grad():
                        g, p = body(server, x), body(last[client], x)
                    near, far = (F.cosine_similarity(z, o).div(temperature).exp() for o in (g, p))
                    loss = loss - mu * (near / (near + far)).log().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            sent[client] = last[client] = model
        total = sum(len(data.tensors[c]["train"][0]) for c in sent)
        mean = {
            n: sum(len(data.tensors[c]["train"][0]) * m.state_dict()[n] for c, m in sent.items()) / total
            for n in server.state_dict()
        }
        server = copy.deepcopy(server)
        server.load_state_dict(mean)
    return module_state(server)


@pytest.mark.parametrize("style", [Toy, NetStyle])
def test_training_is_what_the_formulas_say(style):
    module, data = style("sgd", lr=0.3), toy_data(batch_size=64)
    found = global_state(federate(module, data, [MOON(mu=2.0, temperature=0.7)], max_rounds=4, local_epochs=2))
    close(found, by_hand(module, data, 2.0, 0.7, 4), atol=2e-6)
    assert differs(found, global_state(federate(module, data, max_rounds=4, local_epochs=2)))


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.3), lambda: NormNet("momentum")])
def test_without_strength_it_is_fedavg(make):
    module, data = make(), toy_data()
    same(*(global_state(federate(module, data, [cb], max_rounds=3)) for cb in (FedAvg(), MOON(mu=0.0))))


def test_the_first_round_is_fedavg_and_later_ones_are_not():
    module, data = NormNet("adam"), toy_data()
    runs = [spied(module, data, [cb], max_rounds=2)[1].rounds for cb in (FedAvg(), MOON())]
    same(runs[0][0], runs[1][0])
    assert differs(runs[0][1], runs[1][1])


class Teachers(FederatedCallback):
    """Looks at MOON's teachers when training is over."""

    def __init__(self):
        self.seen = []

    def on_train_end(self, trainer, pl_module):
        for teacher, what in zip(self.client.scratch.get("MOON", []), ("received", "previous"), strict=False):
            known = self.client.received if what == "received" else self.client.state["MOON"]["previous"]
            self.seen.append((what, clone(module_state(teacher)), dict(known), teacher.training))
            assert not any(p.requires_grad or p.grad is not None for p in teacher.parameters())


def test_teachers_are_the_received_and_the_last_model_and_do_not_move():
    """With BatchNorm, whose statistics would move in train mode."""
    look = Teachers()
    __, spy = spied(NormNet("adam"), toy_data(), [MOON(), look], max_rounds=3, local_epochs=2)
    assert len(look.seen) == 2 * 3 * 2
    for _, state, known, training in look.seen:
        same(state, known)
        assert not training
    for client, update in spy.of_round(2).items():
        same(spy.records[2][client].state["MOON"]["previous"], update.state)


def test_an_absent_client_keeps_its_last_model():
    _, spy = spied(Toy("adam"), toy_data(), [MOON()], max_rounds=5, participation=1)
    sent = {}
    for number, records in enumerate(spy.records):
        sent |= spy.of_round(number)
        for client, record in records.items():
            assert ("MOON" in record.state) == (client in sent)
            if client in sent:
                same(record.state["MOON"]["previous"], sent[client].state)


def test_the_logged_loss_is_the_tasks():
    _, spy = spied(Toy("sgd", lr=0.0), toy_data(), [MOON(mu=1000.0)], max_rounds=2)
    assert all(update.metrics["train_loss"] < 5 for update in spy.updates)


def test_what_travels_is_fedavgs():
    _, spy = spied(NormNet(), toy_data(), [MOON()], max_rounds=2)
    assert not any(item.extras for item in (*spy.messages, *spy.updates))


def test_composes_with_a_private_head_and_a_proximal_term():
    _, spy = spied(Toy("adam"), toy_data(), [FedPer(), FedProx(), MOON()], max_rounds=3)
    assert all(set(update.state) == {"net.0.weight", "net.0.bias"} for update in spy.updates)
    assert set(spy.records[-1]["0"].state["MOON"]["previous"]) == set(module_state(Toy()))


def test_any_style_of_step_and_mixed_precision():
    module, data = PiecesStyle("adam"), toy_data()
    trained = global_state(federate(module, data, [MOON(head="net.head")], max_rounds=2, precision="bf16-mixed"))
    assert all(torch.isfinite(value).all() for value in trained.values())
    assert differs(trained, global_state(federate(module, data, max_rounds=2, precision="bf16-mixed")))


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match="mu=-1"):
        MOON(mu=-1)
    with pytest.raises(ValueError, match="temperature=0"):
        MOON(temperature=0)
    with pytest.raises(ValueError, match=r"MOON cannot see the features of Toy: .*`head`.*Set head="):
        federate(Toy(), toy_data(), [MOON(head="head")])
    with pytest.raises(ValueError, match=r"MOON cannot see .*not called.*Set head="):
        federate(Unused(), toy_data(), [MOON()])


@pytest.mark.parametrize("other", [LGFedAvg(num_layers=1), Local(), FENDA(head="net.3")], ids=lambda c: c.key)
def test_a_representation_that_nothing_shared_feeds_is_refused(other):
    """The teachers would be equal, and the loss without a gradient: FENDA's last layer is in its private twin."""
    with pytest.raises(ValueError, match=r"MOON compares .* nothing that travels comes before it.* remove MOON"):
        federate(Deep(), toy_data(), [MOON(), other])


def test_a_representation_of_shared_statistics_is_one():
    """FedPer keeps every weight before the head: what comes is statistics of batch normalisation."""
    federate(NormNet(), toy_data(), [MOON(), FedPer(["net.0", "net.1.weight", "net.1.bias"])], max_rounds=1)
    federate(Deep(), toy_data(), [MOON(head="net.3"), FENDA(head="net.3")], max_rounds=1)


class Deep(Toy):
    def make(self, hidden, dropout):
        middle = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU())
        return nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), middle, nn.Linear(hidden, 4))


class Unused(Toy):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)


@pytest.mark.parametrize(
    "batch", [(torch.zeros(4, 2), torch.arange(4)), {"x": torch.zeros(4, 2), "y": torch.arange(4)[:, None]}]
)
def test_labels_of_a_batch(batch):
    assert labels_of(batch, "X").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("batch", [torch.zeros(4), (torch.zeros(4),), {"x": 1}, (torch.zeros(4), torch.zeros(4, 2))])
def test_batches_without_labels_are_refused(batch):
    with pytest.raises(ValueError, match="X needs one class label a sample"):
        labels_of(batch, "X")
