"""FeSEM-MA, matched averaging: sheet B 1.4."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from fedlightning import FederatedCallback
from fedlightning.callbacks import FedBN, FedPer, FeSEM, FeSEMMA
from fedlightning.callbacks.fesem_ma import hidden_units, matched, permuted
from fedlightning.models import MLP, CifarCNN, DigitsCNN
from fedlightning.tensors import clone, load_state, module_state
from tests.callbacks.common import FailsOnce, Plain, best_partition, fixed_data, flat, mean_state, start_of
from tests.conformance.case import Case, Kept
from tests.helpers import NormNet, Quadratic, Toy, close, federate, quadratic_data, same, spied, toy_data

ROW = "it refuses networks whose layers are not in a row, and those of this check are tied"
CASES = {
    "FeSEMMA": Case(FeSEMMA(), neutral=FeSEMMA(num_clusters=1), skip={"wire": ROW, "every_kind_of_entry": ROW}),
}
KEPT = {"FeSEMMA": Kept("FeSEMMA", server=("clusters", "models"), models=("global", "centre 1", "centre 2"))}

NETS = {
    "mlp": (lambda: MLP(6, [5, 4], 3), (7, 6)),
    "cnn": (lambda: DigitsCNN(norm="batch"), (3, 1, 8, 8)),
    "two convolutions": (lambda: CifarCNN(3, 32), (2, 3, 32, 32)),
}


def shuffled(net, seed=0):
    """The net's state with all hidden units in another order."""
    draw, cuts, state = torch.Generator().manual_seed(seed), hidden_units(net, "the test"), module_state(net)
    for layer in dict.fromkeys(cut.leaving for cut in cuts if cut.leaving):
        state = permuted(state, cuts, layer, torch.randperm(len(state[f"{layer}.weight"]), generator=draw))
    return state


def randomised(make, seed=0):
    torch.manual_seed(seed)
    net = make().double().eval()
    for value in module_state(net).values():
        if value.is_floating_point():
            value.copy_(torch.rand_like(value) + 0.1)
    return net


@pytest.mark.parametrize("name", ["mlp", "cnn", "two convolutions"])
def test_another_order_of_hidden_units_is_the_same_function(name):
    make, shape = NETS[name]
    net = randomised(make)
    x = torch.rand(shape, dtype=torch.float64)
    before, state = net(x), clone(shuffled(net))
    assert any(not torch.equal(value, state[name]) for name, value in module_state(net).items())
    load_state(net, state)
    torch.testing.assert_close(net(x), before, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_reordered_network_is_put_back(name):
    net = randomised(NETS[name][0])
    same(matched(shuffled(net), module_state(net), hidden_units(net, "")), module_state(net))


@pytest.mark.parametrize("seed", range(3))
def test_the_assignment_is_the_best_of_all(seed):
    torch.manual_seed(seed)
    ours, other = MLP(3, [5], 2).double(), MLP(3, [5], 2).double()
    w, c = ([*module_state(net).values()] for net in (ours, other))  # weight, bias, weight, bias

    def cost(order):
        return sum(((w[0][a] - c[0][b]) ** 2).sum() + (w[1][a] - c[1][b]) ** 2 for b, a in enumerate(order))

    def whole(order):
        return cost(order) + ((w[2][:, list(order)] - c[2]) ** 2).sum()

    best = min(itertools.permutations(range(5)), key=cost)
    expected = list(best) if whole(best) < whole(range(5)) else list(range(5))
    found = matched(module_state(ours), module_state(other), hidden_units(ours, ""))
    for name, value in zip(("fc1.weight", "fc1.bias"), w[:2], strict=True):
        assert torch.equal(found[name], value[expected])
    assert torch.equal(found["fc2.weight"], w[2][:, expected]) and torch.equal(found["fc2.bias"], w[3])


def test_a_network_that_matching_brings_no_nearer_stays():
    net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False))
    state = {"0.weight": torch.tensor([[0.0], [0.1]]), "1.weight": torch.tensor([[9.0, 0.0]])}
    near = {"0.weight": torch.tensor([[0.1], [0.0]]), "1.weight": torch.tensor([[9.0, 0.0]])}
    same(matched(state, near, hidden_units(net, "")), state)  # the other order is nearer in the first layer alone
    far = {**near, "1.weight": torch.tensor([[0.0, 9.0]])}
    same(matched(state, far, hidden_units(net, "")), far)


class Shuffle(FederatedCallback):
    """Clients whose answers have their hidden units in another order."""

    def on_send(self, client, update):
        draw = torch.Generator().manual_seed(int(client.id) + 10 * client.round)
        cuts = hidden_units(client.module, "the test")
        for layer in dict.fromkeys(cut.leaving for cut in cuts if cut.leaving):
            order = torch.randperm(len(update.state[f"{layer}.weight"]), generator=draw)
            update.state = permuted(update.state, cuts, layer, order)


@pytest.mark.parametrize("make", [Toy, lambda: NormNet("momentum")])
def test_the_order_in_which_clients_answer_does_not_matter(make):
    module, data = make(), toy_data([24, 24, 16, 16], shuffle=False)
    plain = federate(module, data, [FeSEM()], max_rounds=3)
    ours = federate(module, data, [FeSEMMA(), Shuffle()], max_rounds=3)
    assert ours.server.state["FeSEMMA"]["clusters"] == plain.server.state["FeSEM"]["clusters"]
    blind = federate(module, data, [FeSEM(), Shuffle()], max_rounds=3)
    for key in ("centre 1", "centre 2"):
        close(ours.server.models[key], plain.server.models[key], atol=1e-6)
    assert (
        blind.server.models["centre 1"]["net.0.weight"] - plain.server.models["centre 1"]["net.0.weight"]
    ).norm() > 0.1


def test_planted_groups_are_found():
    a, b = [[1.0, 2.0, 1.0]] * 4, [[5.0, 5.0, 4.0], [-5.0, -4.0, -5.0], [4.0, 5.0, 5.0], [-5.0, -5.0, -6.0]]
    with pytest.warns(UserWarning, match="no hidden layer to match: FeSEMMA does what FeSEM does"):
        _, spy = spied(Quadratic(), quadratic_data(a, b), [FeSEMMA()], max_rounds=2)
    clusters = spy.states[-1]["FeSEMMA"]["clusters"]
    assert clusters["0"] == clusters["2"] != clusters["1"] == clusters["3"]


class Backwards(Toy):
    """Layers that do not follow one another as they are registered."""

    def make(self, hidden, dropout):
        return nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6), "head": nn.Linear(6, 3)})

    def logits(self, x):
        return self.net["head"](torch.relu(self.net["a"](torch.relu(self.net["b"](x)))))


class Recurrent(Toy):
    def make(self, hidden, dropout):
        return nn.ModuleDict({"cell": nn.GRUCell(6, 8), "head": nn.Linear(8, 3)})

    def logits(self, x):
        return self.net["head"](self.net["cell"](x))


@pytest.mark.parametrize(
    ("module", "others", "match"),
    [
        (Backwards(), [], "then it computes something else"),
        (Recurrent(), [], "matches the hidden units of Linear and Conv layers in a row, and Recurrent has others"),
        (Toy(), [FedPer()], "'net.3.weight', which stays with the clients, would keep the old one"),
        (NormNet(), [FedBN()], "'net.1.weight', which stays with the clients"),
    ],
)
def test_what_cannot_be_sorted_is_refused(module, others, match):
    with pytest.raises(ValueError, match=match):
        federate(module, toy_data(), [FeSEMMA(), *others])


def reordered(state, order):
    """The net of ``Plain`` with its hidden units in another order, by hand."""
    w, a, v, b = state.values()
    return dict(zip(state, (w[order], a[order], v[:, order], b), strict=True))


def by_permutations(state, centre):
    """The order of least cost of incoming weights and biases, of all there are; the old one where that is as near."""

    def cost(order):
        found = [*reordered(state, list(order)).values()]
        return sum(float((x - y).square().sum()) for x, y in zip(found[:2], [*centre.values()][:2], strict=True))

    best = reordered(state, list(min(itertools.permutations(range(4)), key=cost)))
    gap = [float((flat(one) - flat(centre)).square().sum()) for one in (best, state)]
    return best if gap[0] < gap[1] else state


@pytest.mark.parametrize("options", [{"weighting": "samples"}, {"stale": True, "steps": 2}], ids=["samples", "stale"])
def test_a_federation_by_hand(options):
    """Five of six clients take part, units come in another order each time; who comes later does not move a centre."""
    data, start, algorithm = fixed_data([16, 24, 16, 8, 20, 8], worlds=2), start_of(Toy), FeSEMMA(**options)
    with pytest.warns(UserWarning, match="'4' failed"):
        trainer, spy = spied(start, data, [FailsOnce("4", 0), algorithm, Shuffle()], max_rounds=5, participation=5)
    first, centres, where, last = module_state(start), [], {}, {}
    sizes = {client: len(splits["train"][0]) for client, splits in data.tensors.items()}
    weights = sizes if algorithm.weighting == "samples" else dict.fromkeys(sizes, 1)
    for number in range(5):
        trained = {}
        for client in (c for c in spy.of_round(number) if spy.of_round(number)[c].error is None):
            own = centres[where[client]] if client in where else first
            order = torch.randperm(4, generator=torch.Generator().manual_seed(int(client) + 10 * number)).tolist()
            trained[client] = reordered(Plain(own).trained(*data.tensors[client]["train"]), order)
        models = {**last, **trained} if algorithm.stale else trained
        order, known = [client for client in trainer.server.clients if client in models], set(where)

        def mean(members, centre, models=models):
            return mean_state([(weights[c], by_permutations(models[c], centre)) for c in members])

        if not centres:
            known = set(order)
            labels = best_partition(torch.stack([flat(by_permutations(models[c], first)) for c in order]), 2)
            centres = [mean([c for c, k in zip(order, labels, strict=True) if k == j], first) for j in range(2)]
        for _ in range(algorithm.steps):
            gaps = [[(flat(by_permutations(models[c], m)) - flat(m)).norm() for m in centres] for c in order]
            found = torch.tensor(gaps).argmin(1).tolist()
            for j in range(2):
                members = [c for c, k in zip(order, found, strict=True) if k == j and c in known]
                centres[j] = mean(members, centres[j]) if members else centres[j]
            where |= dict(zip(order, found, strict=True))
        last |= {client: state for client, state in trained.items() if client in known}
        assert spy.states[number]["FeSEMMA"]["clusters"] == {c: f"centre {k + 1}" for c, k in where.items()}
    assert len(where) == 6 and len(set(where.values())) == 2
    for j, centre in enumerate(centres, start=1):
        close(trainer.server.models[f"centre {j}"], centre, atol=1e-9, rtol=0)
