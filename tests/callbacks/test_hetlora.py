"""HetLoRA: sheet B, entry 4.5."""

from __future__ import annotations

import copy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import fedlightning
from fedlightning.callbacks import SCAFFOLD, Ditto, FedAdam, FedALA, FedIT, FedLP, FedPer, FedProx, HetLoRA
from fedlightning.callbacks.hetlora import norm_of_change, padded
from fedlightning.contract.messages import Update
from fedlightning.tensors import clone, module_state
from tests.conformance.case import Case, Kept
from tests.helpers import FEATURES, NormNet, Toy, close, differs, federate, global_state, same, spied, toy_data

SKIP = {
    "one_client": "it equals plain training of adapters, which is compared below",
    "identical_clients": "its clients differ in rank",
}
CASES = {
    "HetLoRA": Case(HetLoRA(r=[3, 2]), skip=SKIP),
    "HetLoRA head": Case(
        HetLoRA(r=2, head=["head"]), skip={"one_client": SKIP["one_client"]}, arguments={"full": True}
    ),
    "HetLoRA pruning": Case(HetLoRA(r=[4, 2], gamma=0.5, lam=5.0), skip=SKIP),
}
KEPT = {"HetLoRA": Kept("HetLoRA")}

SIZES = {"0": 24, "1": 40, "2": 16}
RANKS = {"0": 6, "1": 4, "2": 2}
LAYERS = ("net.0", "net.3")
A, B = "{}.lora_A.default.weight", "{}.lora_B.default.weight"


def toy(lr=0.1):
    torch.manual_seed(1)
    return Toy(lr=lr)


def ordered(sizes=SIZES):
    return type(toy_data())(toy_data(sizes).tensors, shuffle=False)


def replay(start, data, taking_part, ranks, *, scale, gamma, lam, weights=None):
    """Factors after each round and the clients' ranks, in plain torch."""
    factors = {name: value.clone() for name, value in start.items() if ".lora_" in name}
    ranks, states, tail = dict(ranks), [], torch.linalg.vector_norm
    for clients in taking_part:
        sums, total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in factors.items()}, 0.0
        for client in clients:
            rank, (x, y) = ranks[client], data.tensors[client]["train"]
            kept = max(1, int(gamma * rank))
            a = {p: factors[A.format(p)][:rank].clone().requires_grad_() for p in LAYERS}
            b = {p: factors[B.format(p)][:, :rank].clone().requires_grad_() for p in LAYERS}

            def term(a=a, b=b, kept=kept):
                return sum(tail(b[p][:, kept:]) * tail(a[p][kept:]) for p in LAYERS)

            def layer(p, h, a=a, b=b):
                base = F.linear(h, start[f"{p}.base_layer.weight"], start[f"{p}.base_layer.bias"])
                return base + scale * (h @ a[p].T @ b[p].T)

            before, own = float(term()), [*a.values(), *b.values()]
            for at in range(0, len(x), 8):
                loss = F.cross_entropy(layer("net.3", torch.relu(layer("net.0", x[at : at + 8]))), y[at : at + 8])
                gradients = torch.autograd.grad(loss + lam * term(), own)
                with torch.no_grad():
                    for value, gradient in zip(own, gradients, strict=True):
                        value -= 0.1 * gradient
            if float(term()) < before:
                ranks[client] = rank = kept
            a, b = ({p: v.detach() for p, v in part.items()} for part in (a, b))
            norm = sum((b[p][:, :rank] @ a[p][:rank]).double().square().sum() for p in LAYERS).sqrt()
            weight = norm if weights is None else weights[client]
            total += weight
            for p in LAYERS:
                sums[A.format(p)][:rank] += weight * a[p][:rank]
                sums[B.format(p)][:, :rank] += weight * b[p][:, :rank]
        factors = {name: (value / total).float() for name, value in sums.items()}
        states.append(factors)
    return states, ranks


@pytest.mark.parametrize("participation", [1.0, 2])
@pytest.mark.parametrize("options", [{}, {"gamma": 0.6, "lam": 3.0}, {"gamma": 1.0, "weighting": "samples"}], ids=str)
def test_three_rounds_against_plain_torch(options, participation):
    method = HetLoRA(r=RANKS, alpha=12, dropout=0.0, **options)
    data = ordered()
    trainer, spy = spied(toy(), data, [method], max_rounds=3, participation=participation)
    start = module_state(trainer.server.blueprint.build("server"))
    taking_part = [list(spy.of_round(number)) for number in range(3)]
    weights = SIZES if "weighting" in options else None
    states, ranks = replay(
        start, data, taking_part, RANKS, scale=12 / 6, gamma=method.gamma, lam=method.lam, weights=weights
    )
    for number in range(3):
        close({name: spy.rounds[number][name] for name in states[number]}, states[number], atol=1e-5)
    assert RANKS | trainer.server.state.get("HetLoRA", {}).get("ranks", {}) == ranks
    assert (ranks != RANKS) == (method.lam == 3.0)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_equal_ranks_without_pruning_are_fedit(weighting):
    """(e), bit for bit."""
    module, data, options = toy(), toy_data(), {"r": 4, "alpha": 8, "weighting": weighting}
    runs = [
        spied(module, data, [method(**options, **more)], max_rounds=3, participation=2)
        for method, more in ((FedIT, {}), (HetLoRA, {"gamma": 1.0}))
    ]
    same(*(global_state(trainer) for trainer, _ in runs))
    assert runs[0][0].server.costs.bytes_up == runs[1][0].server.costs.bytes_up
    assert differs(global_state(runs[0][0]), module_state(runs[0][0].server.blueprint.build("server")))


def test_equal_norms_weigh_alike():
    """(e): changes of one norm that differ in everything else; twice the norm counts twice."""
    trainer, spy = spied(toy(), toy_data(), [method := HetLoRA(r=[4, 2], gamma=1.0)], max_rounds=2)
    server = trainer.server
    updates = [copy.deepcopy(update) for update in spy.of_round(1).values()]
    for factor, update in zip((1.0, 1.0, 2.0), updates, strict=True):
        by = factor / norm_of_change(server, update)
        update.state |= {B.format(p): update.state[B.format(p)] * by for p in LAYERS}
        assert norm_of_change(server, update) == pytest.approx(
            sum((update.state[B.format(p)] @ update.state[A.format(p)]).square().sum() for p in LAYERS) ** 0.5
        )
    mean = method.reduce(server, updates)
    for name, value in mean.items():
        one, two, three = (padded(update.state[name], value).double() for update in updates)
        torch.testing.assert_close(value.double(), (one + two + 2 * three) / 4, atol=1e-6, rtol=0)


def test_padding_and_truncating_is_the_identity():
    """(e), and neither changes what an adapter adds."""
    torch.manual_seed(0)
    a, b = torch.randn(2, 5), torch.randn(3, 2)
    whole_a, whole_b = padded(a, torch.empty(4, 5)), padded(b, torch.empty(3, 4))
    assert torch.equal(whole_a[:2], a) and torch.equal(whole_b[:, :2], b)
    torch.testing.assert_close(whole_b @ whole_a, b @ a)


def test_where_no_adapter_has_moved_all_weigh_alike():
    trainer, spy = spied(toy(lr=0.0), toy_data(), [method := HetLoRA(r=[4, 2], head="net.3")], max_rounds=1)
    updates = [copy.deepcopy(update) for update in spy.updates]
    for number, update in enumerate(updates):
        update.state["net.3.bias"] = torch.full((3,), float(number))
    assert [trainer.server.weight(update) for update in updates] == [0.0, 0.0, 0.0]
    assert method.reduce(trainer.server, updates)["net.3.bias"].tolist() == [1.0, 1.0, 1.0]


def test_what_travels_is_of_the_client_s_rank():
    _, spy = spied(NormNet(), toy_data(SIZES), [HetLoRA(r=RANKS, gamma=0.5, lam=3.0)], max_rounds=4)
    ranks = {client: [] for client in SIZES}
    for update in spy.updates:
        rank = len(update.state[A.format("net.0")])
        assert update.num_bytes == 4 * rank * (FEATURES + 8 + 8 + 3)
        ranks[update.client].append(rank)
    for message in (m for m in spy.messages if m.round):
        assert message.num_bytes == 4 * ranks[message.client][message.round - 1] * (FEATURES + 8 + 8 + 3) + 8
    assert all(one >= two for own in ranks.values() for one, two in pairwise(own))
    assert [own[0] for own in ranks.values()] == list(RANKS.values())  # B is zero in round 1: nothing can be smaller
    assert any(own[-1] < own[0] for own in ranks.values()) and all(own[-1] >= 1 for own in ranks.values())


def test_rows_that_were_pruned_stay_zero():
    """In the client's module, which keeps its shape, with an optimizer that decays and has moments."""
    callbacks = [HetLoRA(r=4, gamma=0.5, lam=50.0), FedProx(mu=0.1)]
    trainer = federate(Toy("adamw", lr=0.02), toy_data(), callbacks, max_rounds=5)
    pruned = trainer.server.state["HetLoRA"]["ranks"]
    assert pruned and not trainer.server.failures  # FedProx pulls to rows of the module's number
    for client, rank in pruned.items():
        module = trainer.client(client).module
        state = module_state(module)
        assert len(state[A.format("net.0")]) == 4
        assert not state[A.format("net.0")][rank:].any() and not state[B.format("net.0")][:, rank:].any()
        assert state[A.format("net.0")][:rank].any(1).all()


def test_a_client_deploys_its_rows_and_the_server_all(tmp_path):
    module, x = NormNet("adamw"), torch.randn(9, FEATURES)
    method = HetLoRA(r={"0": 4, "1": 1, "2": 2}, gamma=1.0)
    trainer = federate(module, toy_data(), [method], tmp_path, max_rounds=2, participation=2, name="rows")
    state, folder = global_state(trainer), trainer.run.path / "checkpoints"
    for client, rank in method.r.items():
        opened = fedlightning.load(folder / f"clients/{client}.ckpt", trust=["tests"])
        own = module_state(opened)
        same({A: own[A.format("net.0")], B: own[B.format("net.0")]}, {
            A: state[A.format("net.0")][:rank], B: state[B.format("net.0")][:, :rank]
        })  # fmt: skip
        cut = clone(state)
        for path in LAYERS:
            cut[A.format(path)][rank:] = 0
        torch.testing.assert_close(opened(x), trainer.server.module_with(cut).eval()(x), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        fedlightning.load(folder / "global.ckpt", trust=["tests"])(x),
        trainer.server.module_with(state).eval()(x),
        atol=1e-6,
        rtol=1e-5,
    )


@pytest.mark.slow
def test_worker_processes_give_the_same_bits(tmp_path):
    method, module = HetLoRA(r=RANKS, gamma=0.5, lam=3.0), toy()
    runs = [
        federate(module, toy_data(SIZES), [method], tmp_path / engine, max_rounds=3, participation=2, engine=engine)
        for engine in ("sequential", "processes")
    ]
    same(*map(global_state, runs))
    assert runs[0].server.state == runs[1].server.state


# -- beside others ---------------------------------------------------------------------------------------------------


def test_others_act_on_the_padded_adapters():
    module, data, method = toy(), toy_data(), HetLoRA(r=[4, 2, 1], weighting="uniform")
    runs = {
        name: global_state(federate(module, data, [method, *others], max_rounds=3))
        for name, others in {
            "plain": [], "none": [FedProx(mu=0.0)], "all": [FedProx(mu=5.0)], "adam": [FedAdam(server_lr=0.01)],
        }.items()
    }  # fmt: skip
    same(runs["plain"], runs["none"])
    assert differs(runs["plain"], runs["all"]) and differs(runs["plain"], runs["adam"])
    trainer, spy = spied(module, data, [method, FedPer(personal=["net.3"])], max_rounds=2)
    assert {name.rpartition(".lora")[0] for name in spy.updates[0].state} == {"net.0"}
    assert len(module_state(trainer.client("2").module)[A.format("net.3")]) == 1


def test_a_personal_model_has_the_client_s_rank():
    """It began with the largest rank, so every client of another rank failed."""
    trainer = federate(toy(), toy_data(), [HetLoRA(r=[4, 2, 1]), Ditto()], max_rounds=2)
    assert not trainer.server.failures
    for client, rank in {"0": 4, "1": 2, "2": 1}.items():
        assert len(trainer.store.get(client).state["Ditto"]["model"][A.format("net.0")]) == rank


def test_both_factors_travel_or_none():
    with pytest.raises(ValueError, match=r"'net.3.lora_B.*stays at the clients, but HetLoRA cuts.*\('net.3'\)"):
        federate(Toy(), toy_data(), [HetLoRA(), FedPer(personal=["net.3.lora_B"])])


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (SCAFFOLD(weighting=None), "HetLoRA gives clients parts of the model.*, and SCAFFOLD sends values"),
        (FedLP(), "HetLoRA weighs a client by the product.*, and FedLP leaves entries out"),
        (FedALA(), "HetLoRA prunes rows.*, and FedALA makes the model.*use gamma=1"),
    ],
    ids=lambda value: getattr(value, "key", ""),
)
def test_what_is_wrong_with_parts_is_refused(other, why):
    with pytest.raises(ValueError, match=why):
        federate(Toy(), toy_data(), [other, HetLoRA()])


def test_kept_optimizers_are_refused_only_with_pruning():
    with pytest.raises(ValueError, match=r"HetLoRA prunes ranks.*optimizer_state='reset', or gamma=1"):
        federate(Toy(), toy_data(), [HetLoRA()], optimizer_state="keep")
    federate(Toy("momentum"), toy_data(), [HetLoRA(gamma=1.0)], optimizer_state="keep", max_rounds=1)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"gamma": 0.0}, r"gamma=0.0. Use a number in \(0, 1\]. 1 prunes nothing"),
        ({"gamma": 1.5}, r"gamma=1.5. Use a number in \(0, 1\]"),
        ({"lam": -1.0}, r"lam=-1.0. Use a number in \[0, inf\)"),
    ],
)
def test_impossible_pruning_is_refused(bad, words):
    with pytest.raises(ValueError, match=f"HetLoRA got {words}"):
        HetLoRA(**bad)


def test_an_update_without_factors_has_no_norm():
    server = SimpleNamespace(module=Toy())
    assert norm_of_change(server, Update(0, "0", state={})) == 0.0
