"""FLoRA: sheet B, entry 4.5. What it shares with HetLoRA is in tests/callbacks/test_low_rank.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedlightning
from fedlightning.algorithm import Facts
from fedlightning.callbacks import (
    SCAFFOLD,
    FedAdam,
    FedCovid,
    FedLP,
    FedNova,
    FedPer,
    FedProx,
    FLoRA,
    GlobalCheckpoint,
    LocalAdaptation,
)
from fedlightning.contract import FederatedCallback
from fedlightning.seeding import generator
from fedlightning.tensors import clone, module_state
from fedlightning.wrappers import unmix
from tests.conformance.case import Case, Kept
from tests.helpers import (
    FEATURES,
    NormNet,
    Toy,
    close,
    differs,
    federate,
    global_state,
    make_trainer,
    same,
    spied,
    toy_data,
)

SKIP = {
    "one_client": "it equals plain training of adapters, which is compared below",
    "identical_clients": "its clients draw adapters of their own",
}
CASES = {
    "FLoRA": Case(FLoRA(r=[3, 2]), skip=SKIP),
    "FLoRA head": Case(FLoRA(r=2, head=["head"]), skip=SKIP, arguments={"full": True}),
}
KEPT = {"FLoRA": Kept("FLoRA", server=("has", "stacks", "version"), client=("version",))}

SIZES = {"0": 24, "1": 40, "2": 16}
RANKS = {"0": 1, "1": 2, "2": 1}
LAYERS = {"net.0": FEATURES, "net.3": 64}


def plain(**options):
    """A callback without dropout whose stacks are smaller than the first layer of `wide()`."""
    return FLoRA(**{"r": RANKS, "dropout": 0.0} | options)


def wide():
    torch.manual_seed(0)
    return Toy(lr=0.05, hidden=64)


def local(state, x, y, rank, scale, draw, epochs=1):
    """Train adapters from `draw(path, shape)` and zero by SGD on batches of 8 in order; return them by layer."""
    a = {path: draw(path, (rank, inputs)).requires_grad_() for path, inputs in LAYERS.items()}
    b = {path: torch.zeros(len(state[f"{path}.weight"]), rank, requires_grad=True) for path in LAYERS}
    factors = [*a.values(), *b.values()]

    def layer(path, h):
        return F.linear(h, state[f"{path}.weight"], state[f"{path}.bias"]) + scale * (h @ a[path].T @ b[path].T)

    for _ in range(epochs):
        for start in range(0, len(x), 8):
            logits = layer("net.3", torch.relu(layer("net.0", x[start : start + 8])))
            gradients = torch.autograd.grad(F.cross_entropy(logits, y[start : start + 8]), factors)
            with torch.no_grad():
                for factor, gradient in zip(factors, gradients, strict=True):
                    factor -= 0.05 * gradient
    return {path: (b[path].detach(), a[path].detach()) for path in LAYERS}


def replay(module, data, taking_part, scales, weights, epochs=1):
    """The networks after each round, in plain torch."""
    state, states = clone(module_state(module)), []
    for number, clients in enumerate(taking_part):
        change = {path: torch.zeros_like(state[f"{path}.weight"], dtype=torch.float64) for path in LAYERS}
        for client in clients:

            def draw(path, shape, client=client, number=number):
                bound = shape[1] ** -0.5
                own = generator(0, number, client, f"adapter {path}")
                return torch.empty(shape).uniform_(-bound, bound, generator=own)

            x, y = data.tensors[client]["train"]
            trained = local(state, x, y, RANKS[client], scales[client], draw, epochs)
            for path, (b, a) in trained.items():
                share = weights[client] / sum(weights[c] for c in clients) * scales[client]
                change[path] += share * b.double() @ a.double()
        state |= {f"{p}.weight": (state[f"{p}.weight"].double() + c).float() for p, c in change.items()}
        states.append(dict(state))
    return states


def base_of(state):
    return {name.replace(".base_layer", ""): value for name, value in state.items() if ".lora_" not in name}


@pytest.mark.parametrize(
    ("options", "participation"),
    [({}, 1.0), ({}, 2), ({"alpha": {"0": 3, "1": 1, "2": 0.5}, "weighting": "uniform"}, 2)],
)
@pytest.mark.fast_cases(1)
def test_three_rounds_against_plain_torch(options, participation):
    """With partial participation a client that was absent trains on the network that the others have made."""
    data, module = type(toy_data())(toy_data(SIZES).tensors, shuffle=False), wide()
    _, spy = spied(module, data, [plain(**options)], max_rounds=3, participation=participation)
    taking_part = [list(spy.of_round(number)) for number in range(3)]
    assert participation == 1.0 or len({tuple(clients) for clients in taking_part}) > 1
    alpha = options.get("alpha", {client: 2 * rank for client, rank in RANKS.items()})
    weights = dict.fromkeys(SIZES, 1) if "weighting" in options else SIZES
    states = replay(module, data, taking_part, {c: alpha[c] / RANKS[c] for c in SIZES}, weights)
    for number in range(3):
        close(base_of(spy.rounds[number]), states[number], atol=1e-5)
    assert differs(states[2], module_state(module))


def test_one_client_is_local_training_of_adapters():
    """(c): the merged network computes what the client's network and adapters compute."""
    data = type(toy_data())(toy_data([30]).tensors, shuffle=False)
    module = wide()
    trainer = federate(module, data, [plain()], max_rounds=1, local_epochs=3)
    expected = replay(module, data, [["0"]], {"0": 2.0}, {"0": 30}, epochs=3)
    close(base_of(global_state(trainer)), expected[0], atol=1e-6)


def test_the_merged_change_is_the_mean_of_the_clients_changes():
    """(b), which :class:`FedIT` violates; with differing ranks, and the head averaged beside it."""
    module = NormNet("momentum", lr=0.05, hidden=32)
    method = FLoRA(r=RANKS, dropout=0.0, head="net.3")
    _, spy = spied(module, toy_data(SIZES), [method], max_rounds=2, local_epochs=2)
    start, end = (base_of(state) for state in (spy.rounds[0], spy.rounds[1]))
    updates = spy.of_round(1)
    exact = sum(
        SIZES[c]
        * 2.0
        * (u.state["net.0.lora_B.default.weight"].double() @ u.state["net.0.lora_A.default.weight"].double())
        for c, u in updates.items()
    ) / sum(SIZES.values())
    assert exact.abs().max() > 1e-3
    torch.testing.assert_close(end["net.0.weight"].double() - start["net.0.weight"], exact, atol=1e-6, rtol=0)
    mean = sum(SIZES[c] * u.state["net.3.weight"].double() for c, u in updates.items()) / sum(SIZES.values())
    torch.testing.assert_close(end["net.3.weight"].double(), mean, atol=1e-6, rtol=0)
    same({"m": end["net.1.running_mean"]}, {"m": module_state(module)["net.1.running_mean"]})


class AtStart(FederatedCallback):
    """Notes what every client begins its training with."""

    facts = Facts(takes_part=False)

    def __init__(self):
        self.seen = {}

    def on_visit_start(self, client):
        x = torch.linspace(-1, 1, 5 * FEATURES).reshape(5, FEATURES)
        client.module.eval()
        self.seen[client.round, client.id] = (clone(module_state(client.module)), client.module(x).detach(), x)
        client.module.train()


def test_every_visit_begins_with_the_server_s_network_and_fresh_adapters():
    """(a); by stacks or by whole weights, the client has the server's very bits, however long it was away."""
    start = AtStart()
    trainer, spy = spied(wide(), toy_data(SIZES), [plain(), start], max_rounds=7, participation=1)
    server, forms, draws = trainer.server, set(), []
    models = [module_state(server.blueprint.build("server")), *spy.rounds]
    for message in spy.messages:
        state, out, x = start.seen[message.round, message.client]
        same(base_of(state), base_of(models[message.round]))
        torch.testing.assert_close(out, server.module_with(models[message.round]).eval()(x), atol=1e-6, rtol=0)
        a = state["net.0.lora_A.default.weight"]
        assert len(a) == RANKS[message.client] and all(a.shape != b.shape or not torch.equal(a, b) for b in draws)
        draws.append(a)
        if message.round:
            own = message.extras["FLoRA"]
            forms |= {(path, f"{path}.A" in own) for path in LAYERS}
            assert all((f"{path}.A" in own) != (f"{path}.base_layer.weight" in message.state) for path in LAYERS) or (
                "sizes" not in own and not message.state
            )
            rows = sum(own.get("sizes", torch.zeros(0)).tolist())
            numbers = sum((64 + FEATURES if p == "net.0" else 64 + 3) * rows for p in LAYERS if f"{p}.A" in own)
            whole = sum(value.numel() for value in message.state.values())
            assert message.num_bytes == 4 * (numbers + whole) + 8 * len(own.get("sizes", ())) + 3 * 8
    assert {("net.0", True), ("net.0", False)} <= forms


def test_another_record_than_the_server_knows_is_refused():
    message = SimpleNamespace(extras={"FLoRA": {"version": 3, "sizes": torch.tensor([2])}})
    with pytest.raises(ValueError, match=r"record of client 'a' has 3 merges, and what came continues from 2"):
        FLoRA().on_receive(SimpleNamespace(id="a", state={"FLoRA": {"version": 3}}), message)


def test_a_client_whose_update_was_refused_merges_nothing_twice():
    class Refused(FederatedCallback):
        """One update breaks a rule of the door, so the server does not know what its client has."""

        def on_send(self, client, update):
            if client.round == 1 and client.id == "1":
                update.num_samples = 10**6

    start = AtStart()
    with pytest.warns(UserWarning, match="was refused"):
        _, spy = spied(wide(), toy_data(SIZES), [plain(r=1), start, Refused()], max_rounds=3)
    message = next(m for m in spy.messages if (m.round, m.client) == (2, "1"))
    assert message.extras["FLoRA"]["sizes"].tolist() == [3, 2]
    same(base_of(start.seen[2, "1"][0]), base_of(spy.rounds[1]))


def test_exports_and_clients_deploy_the_merged_network(tmp_path):
    module, x = NormNet("adamw"), torch.randn(9, FEATURES)
    trainer = federate(module, toy_data(), [FLoRA(r=[3, 1])], tmp_path, max_rounds=2, participation=2, name="stacks")
    expected = trainer.server.global_module()(x)
    assert differs(base_of(global_state(trainer)), module_state(module))
    for file in ("global.ckpt", "clients/1.ckpt", "clients/2.ckpt"):
        opened = fedlightning.load(trainer.run.path / "checkpoints" / file, trust=["tests"])
        torch.testing.assert_close(opened(x), expected, atol=1e-6, rtol=0)
        again = NormNet("adamw")
        again.load_state_dict(unmix(opened).state_dict())
        torch.testing.assert_close(again.eval()(x), expected, atol=1e-6, rtol=0)


def test_clients_are_scored_with_the_network_of_stage_g(tmp_path):
    trainer = federate(Toy(), toy_data(), [FLoRA(r=2)], tmp_path, max_rounds=2, participation=1, name="scores")
    scores = {stage: {} for stage in ("G", "L1")}
    for row in trainer.rows:
        if row.stage in scores and row.split == "val" and row.metric == "val_loss" and row.data == "local":
            scores[row.stage][row.round, row.client] = row.value
    assert scores["G"] == scores["L1"] and len(scores["G"]) == 6


@pytest.mark.slow
def test_worker_processes_give_the_same_bits(tmp_path):
    runs = [
        federate(wide(), toy_data(SIZES), [plain()], tmp_path / engine, max_rounds=3, participation=2, engine=engine)
        for engine in ("sequential", "processes")
    ]
    same(*map(global_state, runs))


# -- beside others ---------------------------------------------------------------------------------------------------


def test_fedprox_pulls_to_the_fresh_adapters():
    module = Toy()
    runs = {
        name: global_state(federate(module, toy_data(), [FLoRA(r=2), *others], max_rounds=2, local_epochs=2))
        for name, others in {"plain": [], "none": [FedProx(mu=0.0)], "all": [FedProx(mu=5.0)]}.items()
    }
    same(runs["plain"], runs["none"])
    start = module_state(module)
    moved = {n: (base_of(s)["net.3.weight"] - start["net.3.weight"]).norm() for n, s in runs.items()}
    assert moved["all"] < 0.7 * moved["plain"]


def test_adaptation_after_the_last_round_starts_from_the_selected_network(tmp_path):
    """And a federation that goes on afterwards continues from the server's network, not from the adapted ones."""
    callbacks = [FLoRA(r=1, dropout=0.0), GlobalCheckpoint(mode="max"), LocalAdaptation(epochs=0)]
    folder, module = tmp_path / "adapted", wide()
    trainer = federate(module, toy_data(), callbacks, folder, max_rounds=3, save_state=1, name="run")
    kept = next(iter(trainer.server.checkpoints.values()))
    assert kept["round"] < 3
    for client in trainer.server.clients:
        same(base_of(module_state(trainer.module(client))), base_of(kept["model"]))
    start = AtStart()
    more = make_trainer(folder, [*callbacks, start], max_rounds=4, save_state=1, name="run")
    more.fit(module, datamodule=toy_data(), resume="last")
    for client in more.server.clients:
        same(base_of(start.seen[3, client][0]), base_of(global_state(trainer)))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (FedAdam(), "makes the step of the server's model"),
        (FedNova(), "changes the mean of the updates"),
        (SCAFFOLD(), "changes the mean of the updates"),
        (FedPer(personal=["net.3"]), "keeps something of its own"),
        (FedCovid(head="net.3"), "plans rounds of its own"),
        (FedLP(), "leaves entries out"),
    ],
    ids=lambda value: getattr(value, "key", ""),
)
def test_what_goes_on_with_old_adapters_is_refused(other, why):
    with pytest.raises(ValueError, match=rf"FLoRA merges the adapters.*, and {other.key} .*{why}.*FedIT in its place"):
        federate(Toy(), toy_data(), [other, FLoRA(weighting=other.weighting)])


def test_kept_optimizers_are_refused():
    with pytest.raises(ValueError, match=r"FLoRA begins every visit with new adapters.*optimizer_state='reset'"):
        federate(Toy(), toy_data(), [FLoRA()], optimizer_state="keep")


# -- weights that two layers share -----------------------------------------------------------------------------------


class Tied(Toy):
    """Two layers with one weight, and one layer that is used twice."""

    def make(self, hidden, dropout):
        net = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)])
        net[1].weight = net[0].weight
        return net

    def __init__(self):
        super().__init__()
        self.again = self.net[2]

    def forward(self, x):
        h = torch.tanh(self.net[1](torch.tanh(self.net[0](x))))
        return self.net[3](torch.tanh(self.again(torch.tanh(self.net[2](h)))))


def test_tied_weights_come_apart_and_a_layer_that_is_used_twice_stays_one():
    trainer, _ = spied(Tied(), toy_data(), [FLoRA(r=2, dropout=0.0)], max_rounds=2)
    state, start = base_of(global_state(trainer)), module_state(Tied())
    assert differs({"a": state["net.0.weight"]}, {"a": state["net.1.weight"]})
    assert torch.equal(state["net.2.weight"], state["again.weight"])
    assert all(differs({name: start[name]}, state) for name in ("net.0.weight", "net.1.weight", "net.2.weight"))


def test_adapters_cannot_become_a_part_of_a_computed_weight():
    module = Toy()
    torch.nn.utils.parametrizations.weight_norm(module.net[0])
    with pytest.raises(ValueError, match=r"'net\.0' is computed by a parametrization.*use FedIT"):
        federate(module, toy_data((8, 8)), [FLoRA(r=2)])
