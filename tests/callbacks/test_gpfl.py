"""GPFL: sheet A 35."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks import GPFL, FedPer
from fedlightning.callbacks.gpfl import Conditions, contexts
from fedlightning.engines.attempts import FederationError
from fedlightning.models import MLP, Classifier
from fedlightning.tensors import module_state
from tests.callbacks.common import SIZES, batches, deployed
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import NormNet, PiecesStyle, Toy, close, federate, global_state, mean_of, same, spied, toy_data

CASES = {
    "GPFL": Case(GPFL(), skip=NO_PLAIN_FORM),
    "GPFL decay": Case(GPFL(mu=0.01, distance="batch"), skip=NO_PLAIN_FORM),
}
KEPT = {"GPFL": Kept("GPFL")}
HEAD = "net.3"
ADDED = f"{HEAD}.conditions."


def valve(state, z, context):
    """Write the valve down once more, from the entries by name."""

    def branch(name):
        hidden = torch.relu(context @ state[f"{ADDED}{name}.0.weight"].T + state[f"{ADDED}{name}.0.bias"])
        spread = hidden.var(unbiased=False)
        return (hidden - hidden.mean()) / (spread + 1e-5).sqrt() * state[f"{ADDED}{name}.2.weight"] + state[
            f"{ADDED}{name}.2.bias"
        ]

    return torch.relu(z * (1 + branch("gamma")) + branch("beta"))


def by_hand(state, received, data, client, *, lam, angle, mu, lr, distance):
    """Return a visit's end, by plain torch on a dict of tensors."""
    counts = torch.bincount(data.tensors[client]["train"][1], minlength=3).float()
    table = received[f"{ADDED}embeddings.weight"]
    generic, personal = table.mean(0), (counts / counts.sum()) @ table
    state = {name: value.clone().requires_grad_() for name, value in state.items() if "generic" not in name}
    state = {name: value for name, value in state.items() if "personal" not in name}
    for x, y in batches(data, client):
        z = torch.relu(x @ state["net.0.weight"].T + state["net.0.bias"])
        logits = valve(state, z, personal) @ state[f"{HEAD}.weight"].T + state[f"{HEAD}.bias"]
        u = valve(state, z, generic)
        e = state[f"{ADDED}embeddings.weight"]
        cosines = (u / u.norm(dim=1, keepdim=True)) @ (e / e.norm(dim=1, keepdim=True)).T
        apart = u - table[y]
        size = apart.square().sum().sqrt() if distance == "batch" else apart.square().sum(1).sqrt().mean()
        loss = F.cross_entropy(logits, y) + angle * F.cross_entropy(cosines, y) + lam * size
        gradients = torch.autograd.grad(loss, list(state.values()), allow_unused=True)
        with torch.no_grad():
            for (name, value), gradient in zip(state.items(), gradients, strict=True):
                if gradient is not None:
                    value -= lr * (gradient + (mu * value if name.startswith(ADDED) else 0))
    state = {name: value.detach() for name, value in state.items()}
    return state | {f"{ADDED}generic": generic, f"{ADDED}personal": personal}


@pytest.mark.parametrize(("distance", "start"), [("samples", "random"), ("batch", "open")])
def test_two_visits_by_hand(distance, start):
    options = {"lam": 0.3, "angle": 0.7, "mu": 0.1, "distance": distance}
    module, data = Toy("sgd", lr=0.1), toy_data(SIZES, shuffle=False)
    trainer, spy = spied(module, data, [GPFL(**options, valve=start)], max_rounds=2)
    first = trainer.server.module
    for client in SIZES:
        state = module_state(first)
        state = {name: spy.messages[0].state.get(name, value) for name, value in state.items()}
        for number in range(2):
            sent = next(m for m in spy.messages if m.round == number and m.client == client).state
            state = by_hand(state | sent, sent, data, client, lr=0.1, **options)
            update = spy.of_round(number)[client].state
            close(update, {name: state[name] for name in update}, atol=2e-6)
        close(
            {name: value for name, value in deployed(trainer, client).items() if name.startswith(f"{HEAD}.weight")},
            {f"{HEAD}.weight": state[f"{HEAD}.weight"]},
            atol=2e-6,
        )
    sizes = {client: float(size) for client, size in SIZES.items()}
    mean = mean_of(spy.of_round(1), sizes)
    close({name: global_state(trainer)[name] for name in mean}, mean)


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_without_its_terms_and_with_an_open_valve_it_is_fedper(make, monkeypatch):
    monkeypatch.setattr(Conditions, "forward", lambda self, z, context: z)
    module, data = make(), toy_data(SIZES)
    plain = federate(module, data, [FedPer()], max_rounds=3)
    ours = federate(module, data, [GPFL(lam=0.0, angle=0.0)], max_rounds=3)
    for client in SIZES:
        found = deployed(ours, client)
        same({name: found[name] for name in deployed(plain, client)}, deployed(plain, client))


def test_the_head_the_contexts_and_the_frequencies_never_travel():
    _, spy = spied(NormNet("adam"), toy_data(SIZES), [GPFL()], max_rounds=2)
    for item in (*spy.messages, *spy.updates):
        names = set(item.state)
        assert not names & {f"{HEAD}.weight", f"{HEAD}.bias", f"{ADDED}generic", f"{ADDED}personal"}
        assert {f"{ADDED}embeddings.weight", "net.0.weight", "net.1.running_mean"} <= names and item.extras == {}


def test_contexts_are_means_of_the_embeddings_received():
    data = toy_data(SIZES)
    trainer, spy = spied(Toy("sgd"), data, [GPFL()], max_rounds=2)
    table = next(m for m in spy.messages if m.round == 1).state[f"{ADDED}embeddings.weight"]
    for client in SIZES:
        kept = spy.records[1][client].personal
        counts = data.class_counts(client)
        torch.testing.assert_close(kept[f"{ADDED}generic"], table.mean(0))
        torch.testing.assert_close(
            kept[f"{ADDED}personal"], sum(n / sum(counts) * row for n, row in zip(counts, table, strict=True))
        )
        now = deployed(trainer, client)  # stage L1: by the embeddings of the last round
        torch.testing.assert_close(now[f"{ADDED}generic"], global_state(trainer)[f"{ADDED}embeddings.weight"].mean(0))


def test_contexts_of_few_samples():
    table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    same(dict(enumerate(contexts(table, [0, 1]))), {0: torch.tensor([0.5, 0.5]), 1: table[1]})
    same(dict(enumerate(contexts(table, [0]))), dict.fromkeys(range(2), torch.tensor([0.5, 0.5])))


@pytest.mark.parametrize(("outputs", "rows"), [(1, 2), (2, 2), (5, 5)])
def test_there_is_an_embedding_for_each_class(outputs, rows):
    module = GPFL().wrap_module(Classifier(MLP(4, [3], outputs), num_classes=max(2, outputs)), "server")
    assert module.get_parameter("net.fc2.conditions.embeddings.weight").shape == (rows, 3)


def test_each_term_is_used_where_it_has_a_weight():
    for lam, angle, mu in itertools.product((0.0, 1e-3, 1.0), repeat=3):
        gpfl = GPFL(lam=lam, angle=angle, mu=mu)
        assert gpfl.claims("training_loss") == (lam > 0 or angle > 0)
        assert gpfl.claims("correct_gradient") == (mu > 0)


def test_a_sample_at_its_embedding_has_a_gradient_that_is_finite():
    module = GPFL(lam=1.0).wrap_module(Toy(), "server")
    conditions = module.get_submodule(f"{HEAD}.conditions")
    z = torch.zeros(1, 8, requires_grad=True)
    apart = conditions(z, conditions.generic)
    (apart - apart.detach()).norm(dim=1).mean().backward()
    assert torch.isfinite(z.grad).all()


class NoHead(PiecesStyle):
    def make(self, hidden, dropout):
        return nn.ModuleDict({"body": nn.Linear(6, hidden), "head": nn.Conv1d(1, 3, 1)})


def test_wrong_use():
    with pytest.raises(ValueError, match=r"GPFL got lam=-1.0. Use a number in \[0, inf\). 0 turns it off"):
        GPFL(lam=-1.0)
    with pytest.raises(ValueError, match="distance='mean'"):
        GPFL(distance="mean")
    with pytest.raises(ValueError, match=r"num_classes=1. Use a whole number in \[2, inf\), or None"):
        GPFL(num_classes=1)
    with pytest.raises(ValueError, match=r"valve=.shut.\. Use .open. or"):
        GPFL(valve="shut")
    with pytest.raises(ValueError, match=r"begins with a Conv1d"):
        federate(NoHead(), toy_data(SIZES), [GPFL()])
    with pytest.raises(ValueError, match=r"GPFL shares everything but the head.*, and FedPer chooses what travels"):
        federate(Toy(), toy_data(SIZES), [GPFL(), FedPer()])


def test_classes_without_an_embedding_are_refused():
    with pytest.raises(
        FederationError, match=r"GPFL weights 2 class embeddings .* but its data have 3 classes.*Set num_c"
    ):
        federate(Toy(), toy_data(SIZES), [GPFL(num_classes=2)])


def test_copies_of_a_wrapped_module_are_independent():
    module = GPFL(valve="random").wrap_module(Toy(), "server")
    again = copy.deepcopy(module)
    with torch.no_grad():
        again.get_submodule(f"{HEAD}.conditions").personal.fill_(9.0)
    x = torch.ones(2, 6)
    assert not torch.equal(module(x), again(x))
