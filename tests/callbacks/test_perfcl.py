"""PerFCL: sheet entry 21."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning import FederatedCallback
from fedlightning.callbacks import FENDA, PerFCL
from fedlightning.tensors import clone, module_state
from fedlightning.wrappers import DualExtractor, global_names
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import CLASSES, FEATURES, NormNet, Toy, close, differs, federate, same, spied, toy_data

CASES = {"PerFCL": Case(PerFCL(head="head", init="fresh"), skip=NO_PLAIN_FORM)}
KEPT = {"PerFCL": Kept("PerFCL", client=("previous",), options={"head": "net.3"})}


class Dual(Toy):
    """Built from a dual extractor, so that its parts have names."""

    def __init__(self, lr=0.3, local=5):
        super().__init__("sgd", lr=lr)
        self.net = DualExtractor(
            nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh()),
            nn.Sequential(nn.Linear(FEATURES, local), nn.Tanh()),
            nn.Linear(5 + local, CLASSES),
        )


def models(trainer):
    return {client: module_state(trainer.module(client)) for client in trainer.server.clients}


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.3), lambda: NormNet("momentum")])
def test_without_weights_it_is_fenda(make):
    module, data = make(), toy_data()
    runs = [models(federate(module, data, [cb], max_rounds=3)) for cb in (FENDA("net.3"), PerFCL(0, 0, head="net.3"))]
    for client in runs[0]:
        same(runs[0][client], runs[1][client])


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
@pytest.mark.fast_cases(1)
def test_the_first_round_is_fenda_and_later_ones_are_not(weights):
    module, data = NormNet("adam"), toy_data()
    for rounds in (1, 2):
        a, b = (models(federate(module, data, [cb], max_rounds=rounds))
                for cb in (FENDA("net.3"), PerFCL(*weights, head="net.3")))  # fmt: skip
        assert any(differs(a[client], b[client]) for client in a) == (rounds == 2)


def by_hand(module, data, mu, gamma, temperature, rounds):
    """One full-batch step of SGD per round and client."""

    def con(z, near, far):
        a, b = (F.cosine_similarity(z, o).div(temperature).exp() for o in (near, far))
        return -(a / (a + b)).log().mean()

    own = {client: copy.deepcopy(module) for client in data.tensors}
    u, last = copy.deepcopy(module.net.global_extractor), {}
    for _ in range(rounds):
        for client, model in own.items():
            x, y = data.tensors[client]["train"]
            model.net.global_extractor.load_state_dict(u.state_dict())
            zg, zl = model.net.global_extractor(x), model.net.local_extractor(x)
            loss = F.cross_entropy(model.net.head(torch.cat([zg, zl], 1)), y)
            if client in last:
                with torch.no_grad():
                    received, own_g, own_l = u(x), last[client][0](x), last[client][1](x)
                loss = loss + mu * con(zg, received, own_g) + gamma * con(zl, own_l, received)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= module.lr * parameter.grad
            last[client] = copy.deepcopy((model.net.global_extractor, model.net.local_extractor))
        sizes = {client: len(data.tensors[client]["train"][0]) for client in own}
        mean = {
            name: sum(sizes[c] * m.net.global_extractor.state_dict()[name] for c, m in own.items())
            / sum(sizes.values())
            for name in u.state_dict()
        }
        u.load_state_dict(mean)
    return {client: module_state(model) for client, model in own.items()}, u.state_dict()


def test_training_is_what_the_formulas_say():
    module, data = Dual(), toy_data(batch_size=64)
    trainer, _spy = spied(module, data, [PerFCL(mu=2.0, gamma=3.0, temperature=0.7)], max_rounds=4)
    wanted, u = by_hand(module, data, 2.0, 3.0, 0.7, 4)
    private = [name for name in module_state(module) if not name.startswith("net.global_extractor")]
    for client, state in models(trainer).items():
        close({n: state[n] for n in private}, {n: wanted[client][n] for n in private}, atol=2e-6)
    close({n: trainer.server.model[f"net.global_extractor.{n}"] for n in u}, dict(u), atol=2e-6)


class Teachers(FederatedCallback):
    """Looks at the teachers when training is over."""

    def __init__(self):
        self.seen = []

    def on_train_end(self, trainer, pl_module):
        for teacher, known in zip(self.client.scratch.get("PerFCL", []), self.known(), strict=False):
            state = clone(module_state(teacher))
            self.seen.append(({name: state[name] for name in known}, dict(known)))
            assert not teacher.training

    def known(self):
        yield self.client.received
        yield self.client.state["PerFCL"]["previous"]


def test_teachers_do_not_move_and_only_the_global_extractor_travels():
    look = Teachers()
    trainer, spy = spied(NormNet("adam"), toy_data(), [PerFCL(head="net.3"), look], max_rounds=3)
    assert len(look.seen) == 2 * 2 * 3
    for state, known in look.seen:
        same(state, known)
    shared = set(global_names(trainer.server.module))
    assert shared == {name for name in module_state(NormNet()) if not name.startswith("net.3")}
    for item in (*spy.messages, *spy.updates):
        assert set(item.state) == shared and not item.extras
    for client, record in spy.records[-1].items():
        same(record.state["PerFCL"]["previous"], spy.of_round(2)[client].state)


def test_widths_that_differ_are_refused_for_the_local_term_only():
    data = toy_data([16, 16])
    with pytest.raises(ValueError, match=r"5 global and 7 local.*gamma=0"):
        federate(Dual(local=7), data, [PerFCL()])
    federate(Dual(local=7), data, [PerFCL(gamma=0.0)], max_rounds=2)


def test_wrong_use_is_refused():
    for arguments, words in (({"mu": -1}, "mu=-1"), ({"gamma": -1}, "gamma=-1"), ({"temperature": 0}, "temperature=0")):
        with pytest.raises(ValueError, match=words):
            PerFCL(**arguments)
    with pytest.raises(ValueError, match="needs to know the head"):
        federate(Toy(), toy_data(), [PerFCL()])
