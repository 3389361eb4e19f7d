"""DS-FL: algorithms-2, entry 2.10."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from fedlightning.callbacks import DSFL, FedAdam, FedMD, FedPer, FedProx, GlobalCheckpoint, Local, LocalCheckpoint
from fedlightning.callbacks.dsfl import sharpened
from fedlightning.engines.attempts import FederationError
from fedlightning.options import Processes
from fedlightning.tensors import module_state
from tests.callbacks.public import own_models, public_data, resumed, two_models
from tests.conformance.case import Case, Kept
from tests.helpers import CLASSES, NormNet, Toy, close, differs, federate, same, spied, toy_data

CASES = {
    "DSFL": Case(
        DSFL(public_samples=6, distil_epochs=1),
        neutral=DSFL(distil_epochs=0),
        skip={"identical_clients": "every client draws the order of public samples itself"},
    ),
    "DSFL mean": Case(
        DSFL(aggregation="mean", weighting="samples", distil_epochs=1),
        neutral=DSFL(distil_epochs=0),
        skip={"identical_clients": "every client draws the order of public samples itself"},
    ),
}
KEPT = {"DSFL": Kept("DSFL", server=("done", "ids", "targets"), phases=("distil", "fit"), public=True)}


def by_hand(modules, server, data, visits, ids, distil=2, aggregation="era", weighting="uniform", server_lr=0.1):
    """Full-batch SGD, from the paper. ``visits``: a round's clients; ``ids``: a round's public samples."""
    own = {client: copy.deepcopy(module) for client, module in modules.items()}
    server, public = copy.deepcopy(server), data.public_dataloader().dataset.tensors[0]
    newest, done, sent = None, set(), []

    def step(model, value, lr):
        model.zero_grad()
        value.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad

    def learn(model, x, t, lr):
        for _ in range(distil):
            step(model, -(t * model(x).log_softmax(1)).sum(1).mean(), lr)

    for number, clients in enumerate(visits):
        for client in clients:
            model, (x, y) = own[client], data.tensors[client]["train"]
            if newest is not None and client not in done:
                learn(model, *newest, model.lr)
            for _ in range(2):
                step(model, F.cross_entropy(model(x), y), model.lr)
        x = public[ids[number]]
        n = [len(data.tensors[c]["train"][0]) if weighting == "samples" else 1 for c in clients]
        with torch.no_grad():
            p = sum(a * own[c](x).softmax(1) for a, c in zip(n, clients, strict=True)) / sum(n)
        t = (p / 0.1).exp() / (p / 0.1).exp().sum(1, keepdim=True) if aggregation == "era" else p
        sent.append(t)
        newest, done = (x, t), set(clients)
        for client in clients:
            learn(own[client], x, t, own[client].lr)
        learn(server, x, t, server_lr)
    return {client: module_state(model) for client, model in own.items()}, module_state(server), sent


def visits_of(spy, rounds):
    """By round, the clients that trained and the ids that they predicted."""
    found = [[m for m in spy.messages if (m.round, m.tag) == (r, "predict")] for r in range(rounds)]
    return [[m.client for m in messages] for messages in found], [m[0].extras["DSFL"]["predict"] for m in found]


@pytest.mark.parametrize(
    "options", [{}, {"aggregation": "mean", "weighting": "samples", "server_lr": 0.5}], ids=["paper", "others"]
)
def test_three_rounds_are_what_the_paper_says(options):
    models, data = two_models(), public_data((24, 40, 16, 30))
    callback = DSFL(public_samples=12, distil_epochs=2, **options)
    trainer, spy = spied(models, data, [callback], max_rounds=3, participation=3, local_epochs=2)
    visits, ids = visits_of(spy, 3)
    assert len({tuple(clients) for clients in visits}) > 1
    modules = {client: models.model(["small", "deep"][int(client) % 2]) for client in "0123"}
    wanted, server, sent = by_hand(modules, models.model("small"), data, visits, ids, 2, **options)
    for client, state in own_models(trainer).items():
        close(state, wanted[client], atol=1e-5)
    close(trainer.server.model, server, atol=1e-5)
    for number, targets in enumerate(sent):
        mine = next(m.extras["DSFL"]["targets"] for m in spy.messages if (m.round, m.tag) == (number, "distil"))
        torch.testing.assert_close(mine, targets, atol=1e-5, rtol=1e-4)


def test_entropy_reduction_averaging():
    found = sharpened(torch.tensor([[0.9, 0.1]]), 0.1)
    torch.testing.assert_close(found, torch.tensor([[0.99966, 0.00034]]), atol=5e-6, rtol=0)
    p = torch.rand(50, CLASSES, generator=torch.Generator().manual_seed(0)).softmax(1)
    for temperature in (0.01, 0.1, 1.0, 10.0):
        t = sharpened(p, temperature)
        torch.testing.assert_close(t.sum(1), torch.ones(50))
        assert (t >= 0).all() and torch.equal(t.argmax(1), p.argmax(1))
        uniform = torch.full((1, CLASSES), 1 / CLASSES)
        torch.testing.assert_close(sharpened(uniform, temperature), uniform)
    torch.testing.assert_close(sharpened(p, 1e6), torch.full((50, CLASSES), 1 / CLASSES), atol=1e-5, rtol=0)
    torch.testing.assert_close(sharpened(p, 1e-7), F.one_hot(p.argmax(1), CLASSES).float())


def test_absent_clients_distil_the_newest_targets_with_their_ids_when_they_return():
    _, spy = spied(
        Toy("sgd"), public_data((24, 40, 16)), [DSFL(public_samples=7)], max_rounds=6, participation=1, local_epochs=1
    )
    visits, ids = visits_of(spy, 6)
    clients = [client for (client,) in visits]
    assert any(a == b for a, b in pairwise(clients)) and len(set(clients)) > 1
    for message in (m for m in spy.messages if m.tag == "predict" and m.round):
        payload = message.extras["DSFL"]
        was_there = clients[message.round - 1] == message.client
        assert ("targets" in payload) != was_there
        if not was_there:
            assert torch.equal(payload["ids"], ids[message.round - 1])


def test_without_distillation_it_is_local_training():
    module, data = NormNet("momentum", dropout=0.3), public_data(batch_size=8)
    alone = own_models(federate(module, data, [Local()], max_rounds=2, optimizer_state="reset"))
    trainer = federate(module, data, [DSFL(distil_epochs=0)], max_rounds=2)
    for client in alone:
        same(own_models(trainer)[client], alone[client])
    same(trainer.server.model, module_state(module))


@pytest.mark.parametrize("make", [lambda: Toy(hidden=8), lambda: Toy(hidden=80)], ids=["small", "large"])
def test_the_wire_carries_ids_and_probabilities_whatever_the_model(make):
    _, spy = spied(make(), public_data(), [DSFL(public_samples=7)], max_rounds=2)
    assert not any(item.state for item in (*spy.messages, *spy.updates))
    assert [m.num_bytes for m in spy.messages] == ([7 * 8] * 3 + [7 * (8 + 4 * CLASSES)] * 3) * 2
    assert [u.num_bytes for u in spy.updates] == ([7 * 4 * CLASSES] * 3 + [0] * 3) * 2
    for update in spy.updates:
        if update.tag == "predict":
            torch.testing.assert_close(update.extras["DSFL"]["probabilities"].sum(1), torch.ones(7))


def test_the_server_s_model_is_scored_and_selected(tmp_path):
    callbacks = [DSFL(public_samples=10), LocalCheckpoint(), GlobalCheckpoint()]
    module = two_models(server="deep")
    module.models["other"] = copy.deepcopy(module.models["small"])
    trainer = federate(module, public_data(), callbacks, tmp_path, max_rounds=2, evaluation=1)
    rows = [row for row in trainer.recorder.rows if row.stage == "G" and row.round == 2 and row.metric == "val_loss"]
    assert {row.client for row in rows if row.data == "local"} == set("012")
    assert type(trainer.module()) is type(module.model("deep"))
    assert differs(module_state(trainer.module()), module_state(module.model("deep")))
    assert type(trainer.module(None, "best_global")) is type(module.model("deep"))


@pytest.mark.parametrize("callback", [DSFL(), FedMD(transfer_epochs=0)], ids=lambda callback: callback.key)
@pytest.mark.filterwarnings("ignore")
def test_clients_that_fail_are_left_out_and_a_round_of_them_ends_in_a_sentence(callback):
    data = public_data((24, 40))
    data.tensors["1"]["train"][0][:] = float("nan")
    _, spy = spied(Toy("sgd"), data, [callback], max_rounds=2, failures="skip")
    targets = [m.extras[callback.key] for m in spy.messages if m.tag in ("distil", "digest")]
    assert targets and all(torch.isfinite(value).all() for extras in targets for value in extras.values())
    alone = public_data((24,))
    alone.tensors["0"]["train"][0][:] = float("nan")
    with pytest.raises(FederationError, match=r"Round 1: .*client '0' failed"):
        federate(Toy("sgd"), alone, [callback], max_rounds=2, failures="skip")


def start():
    callbacks = [DSFL(public_samples=8, distil_epochs=1), LocalCheckpoint(), GlobalCheckpoint()]
    return two_models("momentum"), public_data(), callbacks


def test_two_architectures_resume_bit_for_bit(tmp_path):
    options = {"participation": 2, "evaluation": 1}
    whole = federate(*start(), tmp_path / "w", max_rounds=4, **options)
    half = federate(*start(), tmp_path / "h", max_rounds=2, **options)
    again = resumed(half, *start(), 4, **options)
    same(again.server.model, whole.server.model)
    assert again.server.costs.bytes_down == whole.server.costs.bytes_down
    for client, state in own_models(whole).items():
        same(own_models(again)[client], state)


@pytest.mark.slow
def test_worker_processes_change_nothing_with_two_architectures():
    module, data, callbacks = start()
    here, there = (
        federate(module, data, callbacks[:1], max_rounds=2, **options) for options in ({}, {"engine": Processes(2)})
    )
    same(there.server.model, here.server.model)
    for client, state in own_models(here).items():
        same(own_models(there)[client], state)


def test_wrong_use_is_refused():
    for arguments in ({"public_samples": 0}, {"temperature": 0.0}, {"aggregation": "votes"}, {"weighting": "log"}):
        (name,) = arguments
        with pytest.raises(ValueError, match=f"DSFL got {name}="):
            DSFL(**arguments)
    with pytest.raises(ValueError, match="DSFL got distil_epochs=-1"):
        DSFL(distil_epochs=-1)
    for other in (FedAdam(), FedProx(mu=0.1), FedPer(personal="net.3")):
        with pytest.raises(ValueError, match=rf"DSFL lets no model travel, .*and {other.key} "):
            federate(Toy(), public_data(), [DSFL(), other])
    with pytest.raises(ValueError, match="DSFL trains on public data, but the data module has none"):
        federate(Toy(), toy_data(), [DSFL()])
