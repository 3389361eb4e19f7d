"""FlexLoRA against its formulas in numpy; beside the other methods of its sheet: `test_fedexlora.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlightning.callbacks import FlexLoRA
from fedlightning.callbacks.shared.low_rank import singular_factors
from fedlightning.tensors import module_state
from tests.conformance.case import Case, Kept
from tests.helpers import Toy, close, federate, global_state, spied, toy_data

SKIP = {"one_client": "it equals plain training of adapters, which is compared below"}
CASES = {
    "FlexLoRA": Case(FlexLoRA(r=[3, 2]), skip=SKIP | {"identical_clients": "its clients differ in rank"}),
    "FlexLoRA head": Case(FlexLoRA(r=2, head=["head"]), skip=SKIP, arguments={"full": True}),
}
KEPT = {"FlexLoRA": Kept("FlexLoRA")}


def best(matrix, rank):
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] * s[:rank] @ v[:rank]


def test_flexlora_of_one_client_keeps_the_product():
    """(b)."""
    trainer, spy = spied(Toy(), toy_data([30]), [FlexLoRA(r=2, alpha=2, dropout=0.0)], max_rounds=1, local_epochs=2)
    state, sent = global_state(trainer), spy.updates[0].state
    for path in ("net.0", "net.3"):
        a, b = (f"{path}.lora_{factor}.default.weight" for factor in "AB")
        close({"m": state[b] @ state[a]}, {"m": sent[b] @ sent[a]})
        assert not torch.equal(state[a], sent[a])


def test_flexlora_clients_have_the_prefix_of_their_rank_whatever_their_order():
    """(d) and (e)."""
    ranks = {"0": 3, "1": 1, "2": 2}
    trainer, spy = spied(Toy(), toy_data(), [FlexLoRA(r=ranks, alpha=3, dropout=0.0)], max_rounds=2)
    name, states = "net.0.lora_A.default.weight", spy.rounds
    for message in spy.messages:
        if message.round == 1 and message.work != 0:
            assert torch.equal(message.state[name], states[0][name][: ranks[message.client]])
    b, a = (states[1][f"net.0.lora_{factor}.default.weight"].double() for factor in "BA")
    shares, mean = {"0": 24 / 80, "1": 40 / 80, "2": 16 / 80}, 0
    for client, update in spy.of_round(1).items():
        one = update.state
        mean = (
            mean + shares[client] * (one["net.0.lora_B.default.weight"] @ one["net.0.lora_A.default.weight"]).double()
        )
    torch.testing.assert_close(b @ a, torch.tensor(best(mean.numpy(), 3)), atol=1e-6, rtol=1e-5)
    assert all((row[row.abs().argmax()] > 0) for row in a)
    assert len(trainer.module("1").state_dict()[name]) == 1


def test_a_rank_that_nobody_had_can_learn_again():
    """With zeros in both factors a component would never get a gradient."""
    data = toy_data({"0": 16, "1": 16, "2": 16})
    method = FlexLoRA(r={"0": 1, "1": 1, "2": 4}, alpha=4, dropout=0.0)
    trainer, spy = spied(Toy(), data, [method], max_rounds=1, participation=1, seed=2)
    (client,) = spy.of_round(0)
    assert client != "2"  # else the seed is to be another one
    start = module_state(trainer.server.blueprint.build("server"))
    a, b = (global_state(trainer)[f"net.0.lora_{factor}.default.weight"] for factor in "AB")
    assert torch.equal(a[1:], start["net.0.lora_A.default.weight"][1:]) and not b[:, 1:].any() and b[:, 0].any()


def test_singular_factors_are_those_of_the_product():
    draw = torch.Generator().manual_seed(3)
    b, a = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((7, 9), (9, 5)))
    for rank in (1, 3, 9):
        left, right = singular_factors(b, a, rank)
        np.testing.assert_allclose(left @ right, best((b @ a).numpy(), rank), atol=1e-12)
        np.testing.assert_allclose(left.T @ left, right @ right.T, atol=1e-12)  # balanced


def test_short_numbers_keep_all_their_components():
    """What bfloat16 rounds, times a layer's width, is more than the largest singular value: adapters were zero."""
    draw = torch.Generator().manual_seed(3)
    b, a = (torch.randn(shape, generator=draw).bfloat16() for shape in ((512, 3), (3, 256)))
    left, right = singular_factors(b, a, 3)
    np.testing.assert_allclose(left @ right, b.double() @ a.double(), atol=1e-12)
    options = {"r": 2, "dropout": 0.0}
    trainer, spy = spied(Toy(hidden=256), toy_data(), [FlexLoRA(**options)], max_rounds=1, precision="bf16-true")
    b, a = (f"net.0.lora_{factor}.default.weight" for factor in "BA")
    shares = zip(spy.of_round(0).values(), (24 / 80, 40 / 80, 16 / 80), strict=True)
    mean = sum(share * (one.state[b].double() @ one.state[a].double()).numpy() for one, share in shares)
    found = (global_state(trainer)[b].double() @ global_state(trainer)[a].double()).numpy()
    assert np.linalg.norm(found - best(mean, 2)) < 0.02 * np.linalg.norm(mean)


def test_a_kept_optimizer_is_refused_where_factors_are_new():
    with pytest.raises(ValueError, match="FlexLoRA makes new factors"):
        federate(Toy("momentum"), toy_data(), [FlexLoRA(r=2)], optimizer_state="keep")
