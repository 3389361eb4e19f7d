"""D-SGD: sheet B entry 3.4; what all gossip shares is in test_dfedavg.py."""

from __future__ import annotations

import pytest
import torch

from fedlightning.callbacks import DSGD, DFedAvg
from fedlightning.tensors import module_state
from tests.callbacks.test_dfedavg import NAMES, RING, A, B, nodes
from tests.conformance.case import Case, Kept
from tests.helpers import NormNet, Quadratic, Toy, close, federate, quadratic_data, spied, toy_data

STEPS = {"local_steps": 1}
CASES = {"DSGD": Case(DSGD(), arguments=STEPS)}
KEPT = {"DSGD": Kept("DSGD", server=("models",))}


@pytest.mark.parametrize("adapt_then_combine", [False, True])
def test_rounds_by_hand(adapt_then_combine):
    callback = DSGD(adapt_then_combine=adapt_then_combine)
    trainer = federate(Quadratic(), quadratic_data(A, B), [callback], max_rounds=4, **STEPS)
    a, b, w = (torch.tensor(rows, dtype=torch.float64) for rows in (A, B, RING))
    x = torch.zeros_like(a)
    for _ in range(4):
        gradient = a * (x - b)  # at each node's own model, before it is mixed
        x = w @ (x - 0.1 * gradient) if adapt_then_combine else w @ x - 0.1 * gradient
    torch.testing.assert_close(nodes(trainer), x, atol=1e-14, rtol=0)


def test_a_node_that_is_away_neither_moves_nor_is_heard():
    trainer, spy = spied(Quadratic(), quadratic_data(A, B), [DSGD("complete")], max_rounds=1, participation=2, **STEPS)
    came = list(spy.of_round(0))
    assert len(came) == 2
    still = [name for name in NAMES if name not in came]
    assert float(nodes(trainer, still).abs().max()) == 0.0
    a, b = (torch.tensor([rows[int(name)] for name in came], dtype=torch.float64) for rows in (A, B))
    torch.testing.assert_close(nodes(trainer, came), 0.1 * a * b)  # from 0, and both began alike


def test_momentum_goes_on_from_round_to_round():
    options, module, still = {"max_rounds": 3, "local_steps": 1}, Toy("momentum"), Toy("sgd")
    still.load_state_dict(module.state_dict())
    with pytest.warns(UserWarning, match="DSGD visits .* memory of its SGD begins anew.*optimizer_state=.keep"):
        lost = federate(module, toy_data(), [DSGD()], **options)
    kept = federate(module, toy_data(), [DSGD()], optimizer_state="keep", **options)
    plain = federate(still, toy_data(), [DSGD()], **options)
    close(module_state(lost.module("0")), module_state(plain.module("0")))
    assert not torch.allclose(kept.server.model["net.0.weight"], plain.server.model["net.0.weight"], atol=1e-4)


def test_variances_are_averaged():
    """What a step takes from a variance could be more than the mixture has; and neighbours sent what they had before it."""
    ours, spy = spied(NormNet(), toy_data([16] * 5), [DSGD()], max_rounds=3, **STEPS)
    name, before, after = (
        "net.1.running_var",
        {m.client: m.state for m in spy.messages if m.round == 2},
        spy.of_round(2),
    )
    for i, client in enumerate(NAMES):
        heard = [before[NAMES[(i + step) % 5]][name].double() for step in (-1, 1)]
        mean = (after[client].state[name].double() + sum(heard)) / 3
        torch.testing.assert_close(module_state(ours.module(client))[name].double(), mean, atol=1e-6, rtol=1e-5)


def test_after_the_step_it_is_dfedavg_with_one():
    module, data = Toy("sgd"), toy_data()
    ours = federate(module, data, [DSGD(adapt_then_combine=True)], max_rounds=3, **STEPS)
    other = federate(module, data, [DFedAvg()], max_rounds=3, **STEPS)
    for client in ("0", "1", "2"):
        close(module_state(ours.module(client)), module_state(other.module(client)), atol=0, rtol=0)


def test_several_steps_are_refused():
    with pytest.raises(ValueError, match="DSGD takes one step per round, but local_steps=None and local_epochs=1"):
        federate(Toy(), toy_data(), [DSGD()])
