"""Federated Dropout: algorithms-2, entry 2.3. What it shares with the other sub-model methods: test_partial_training.py."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fedlightning.callbacks import FederatedDropout
from fedlightning.tensors import module_state
from tests.conformance.case import Case, Kept
from tests.helpers import Toy, close, differs, federate, global_state, same, spied, toy_data

CASES = {
    "FederatedDropout": Case(
        FederatedDropout(head="head"),
        neutral=FederatedDropout(rates=[1.0], head="head"),
        skip={"identical_clients": "its clients draw different units"},
    ),
    "FederatedDropout zero_delta": Case(
        FederatedDropout(absent="zero_delta", per_client=False, head="head"),
        neutral=FederatedDropout(rates=[1.0], absent="zero_delta", head="head"),
        skip={"identical_clients": "its clients train other parts than one alone would"},
    ),
}
KEPT = {"FederatedDropout": Kept("FederatedDropout", options={"head": "net.3"})}


def units_of(message, model):
    """The hidden units that a message has, found by their values."""
    rows = message.state["net.0.weight"]
    return [int((model["net.0.weight"] == row).all(1).nonzero()) for row in rows]


def test_draws_are_addressed_by_seed_round_and_client():
    method = FederatedDropout()
    addresses = [(round, client, seed) for round in range(4) for client in "01" for seed in (0, 1)]
    draws = [method.units(0.5, *address)("layer", 64) for address in addresses]
    for draw, address in zip(draws, addresses, strict=True):
        assert len(draw) == 32 and draw.tolist() == sorted(set(draw.tolist()))
        assert torch.equal(draw, method.units(0.5, *address)("other layer", 64))
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)
    chosen = torch.cat([method.units(0.5, round, "0", 0)("layer", 8) for round in range(400)]).bincount()
    assert (abs(chosen - 200.0) < 50).all()  # five standard deviations
    shared = FederatedDropout(per_client=False)
    assert torch.equal(shared.units(0.5, 3, "0", 0)("layer", 64), shared.units(0.5, 3, "1", 0)("layer", 64))


def test_each_client_has_other_units_or_all_the_same():
    for per_client in (True, False):
        method = FederatedDropout(rates=[0.5], per_client=per_client)
        trainer, spy = spied(Toy(), toy_data(), [method], max_rounds=2)
        models = [module_state(trainer.server.blueprint.build("server")), *spy.rounds]
        seen = [{tuple(units_of(m, models[n])) for m in spy.messages if m.round == n} for n in range(2)]
        assert all(len(units) == (3 if per_client else 1) for units in seen) and seen[0] != seen[1]


@pytest.mark.parametrize("absent", ["left_out", "zero_delta"])
def test_three_rounds_are_what_the_formulas_say(absent):
    """One full-batch SGD step a round in plain torch, on the units that the messages show."""
    module, data, sizes = Toy(lr=0.3), toy_data(batch_size=64), {"0": 24, "1": 40, "2": 16}
    trainer, spy = spied(module, data, [FederatedDropout(rates=[0.5, 0.75], absent=absent)], max_rounds=3)
    names, w = list(module_state(module)), [value.clone() for value in module_state(module).values()]
    for j in range(3):
        sums, counts = ([torch.zeros_like(value) for value in w] for _ in range(2))
        for client, size in sizes.items():
            message = next(m for m in spy.messages if (m.round, m.client) == (j, client))
            units = units_of(message, ([module_state(trainer.server.blueprint.build("server")), *spy.rounds])[j])
            x, y = data.tensors[client]["train"]
            own = [v.clone().requires_grad_() for v in (w[0][units], w[1][units], w[2][:, units], w[3])]
            loss = F.cross_entropy(F.linear(F.linear(x, own[0], own[1]).relu(), own[2], own[3]), y)
            new = [v.detach() - module.lr * g for v, g in zip(own, torch.autograd.grad(loss, own), strict=True)]
            for value, total, count, where in zip(
                new, sums, counts, (units, units, (slice(None), units), ...), strict=True
            ):
                total[where] += size * value
                count[where] += size
        for k, (total, count) in enumerate(zip(sums, counts, strict=True)):
            mean = torch.where(count > 0, total / count.clamp_min(1), w[k])
            w[k] = mean if absent == "left_out" else w[k] + count / sum(sizes.values()) * (mean - w[k])
    close(global_state(trainer), dict(zip(names, w, strict=True)), atol=2e-6)


def test_absent_clients_pull_towards_the_old_value():
    module = Toy("adam")
    runs = [
        federate(module, toy_data(), [FederatedDropout(rates=[0.5], absent=a)], max_rounds=1)
        for a in ("left_out", "zero_delta")
    ]
    assert differs(*map(global_state, runs))
    whole = [
        federate(module, toy_data(), [FederatedDropout(rates=[1.0], absent=a)], max_rounds=2)
        for a in ("left_out", "zero_delta")
    ]
    same(*map(global_state, whole))


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match=r"FederatedDropout got absent='zero'. Use 'left_out' or 'zero_delta'"):
        FederatedDropout(absent="zero")
