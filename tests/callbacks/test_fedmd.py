"""FedMD: algorithms-2, entry 2.8."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from fedlightning.callbacks import FedAdam, FedMD, FedPer, FedProx, GlobalCheckpoint, Local, LocalCheckpoint
from fedlightning.options import Processes
from fedlightning.tensors import module_state
from tests.callbacks.public import own_models, public_data, public_x, resumed, two_models
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import CLASSES, NormNet, Toy, close, differs, federate, same, spied, toy_data

CASES = {
    "FedMD": Case(
        FedMD(transfer_epochs=1, public_samples=6),
        neutral=FedMD(transfer_epochs=0, digest_epochs=0),
        skip={"identical_clients": "every client draws the order of public samples itself"},
    ),
    "FedMD kl": Case(FedMD(transfer_epochs=0, digest_loss="kl", weighting="samples"), skip=NO_PLAIN_FORM),
}
KEPT = {
    "FedMD": Kept("FedMD", server=("ready",), phases=("digest", "fit", "transfer"), public=True),
}

DISTANCES = {
    "mae": lambda z, t: (z - t).abs().mean(),
    "mse": lambda z, t: (z - t).square().mean(),
    "kl": lambda z, t: (t.softmax(1) * (t.log_softmax(1) - z.log_softmax(1))).sum(1).mean(),
}


def by_hand(modules, data, visits, ids, transfer=2, digest=2, loss="mae", weighting="uniform", epochs=2):
    """Full-batch SGD, from the paper. ``visits``: a round's clients; ``ids``: a round's public samples."""
    own = {client: copy.deepcopy(module) for client, module in modules.items()}
    loader = data.public_dataloader().dataset
    ready, means = set(), []

    def step(model, value):
        model.zero_grad()
        value.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= model.lr * parameter.grad

    for number, clients in enumerate(visits):
        old = [client for client in clients if client in ready or not transfer]
        x = loader.tensors[0][ids[number]] if old and digest else None
        target = None
        if x is not None:
            with torch.no_grad():
                rows = [own[client](x) for client in old]
            n = [len(data.tensors[c]["train"][0]) if weighting == "samples" else 1 for c in old]
            target = sum(a * row for a, row in zip(n, rows, strict=True)) / sum(n)
            means.append(target)
        for client in clients:
            model, (own_x, own_y) = own[client], data.tensors[client]["train"]
            if client not in old:
                for _ in range(transfer):
                    step(model, F.cross_entropy(model(loader.tensors[0]), loader.tensors[1]))
            elif target is not None:
                for _ in range(digest):
                    step(model, DISTANCES[loss](model(x), target))
            for _ in range(epochs):
                step(model, F.cross_entropy(model(own_x), own_y))
        ready |= set(clients)
    return {client: module_state(model) for client, model in own.items()}, means


def visits_of(spy, rounds):
    """By round, the clients that trained and the ids they were asked for."""
    clients = [[m.client for m in spy.messages if m.round == r and m.work != 0] for r in range(rounds)]
    ids = [
        next((m.extras["FedMD"]["ids"] for m in spy.messages if m.round == r and "FedMD" in m.extras), None)
        for r in range(rounds)
    ]
    return clients, ids


@pytest.mark.parametrize(
    "options", [{}, {"digest_loss": "kl", "weighting": "samples"}, {"transfer_epochs": 0}], ids=str
)
def test_three_rounds_are_what_the_paper_says(options):
    given = {"public_samples": 12, "transfer_epochs": 2, "digest_epochs": 2, **options}
    module, data = two_models(), public_data()
    trainer, spy = spied(module, data, [FedMD(**given)], max_rounds=3, local_epochs=2)
    visits, ids = visits_of(spy, 3)
    modules = {client: module.model(["small", "deep"][int(client) % 2]) for client in "012"}
    wanted, means = by_hand(
        modules, data, visits, ids, given["transfer_epochs"], 2, given.get("digest_loss", "mae"),
        given.get("weighting", "uniform"),
    )  # fmt: skip
    for client, state in own_models(trainer).items():
        close(state, wanted[client], atol=1e-5)
    sent = [m.extras["FedMD"]["consensus"] for m in spy.messages if m.client == "0" and m.tag == "digest"]
    assert len(sent) == len(means) == (3 if given["transfer_epochs"] == 0 else 2)
    for mine, mean in zip(sent, means, strict=True):
        torch.testing.assert_close(mine, mean, atol=1e-5, rtol=1e-5)


def test_absent_clients_digest_nothing_old_and_late_ones_are_transferred_first():
    module, data = Toy("sgd", lr=0.3), public_data((24, 40, 16, 20))
    callback = FedMD(public_samples=9, transfer_epochs=1)
    trainer, spy = spied(module, data, [callback], max_rounds=5, participation=2, local_epochs=2)
    visits, ids = visits_of(spy, 5)
    late = {client for clients in visits[1:] for client in clients} - set(visits[0])
    assert late and len({tuple(clients) for clients in visits}) > 2
    wanted, _ = by_hand(dict.fromkeys("0123", module), data, visits, ids, 1, 1)
    for client in {client for clients in visits for client in clients}:
        close(module_state(trainer.module(client)), wanted[client], atol=1e-5)
    for message in spy.messages:
        first = next(r for r, clients in enumerate(visits) if message.client in clients)
        assert message.tag == ("transfer" if message.round == first else message.tag)
        assert (message.tag == "transfer") == (message.round == first)
    assert trainer.server.state["FedMD"] == {"ready": trainer.server.state["FedMD"]["ready"]}


def test_without_transfer_and_digest_it_is_local_training():
    module, data = NormNet("momentum", dropout=0.3), public_data(batch_size=8)
    alone = own_models(federate(module, data, [Local()], max_rounds=2, optimizer_state="reset"))
    ours = own_models(federate(module, data, [FedMD(transfer_epochs=0, digest_epochs=0)], max_rounds=2))
    for client in alone:
        same(ours[client], alone[client])


def test_one_client_digests_its_own_logits_which_changes_nothing():
    module, data = Toy("sgd"), public_data((24,), batch_size=8)
    alone = own_models(federate(module, data, [Local()], max_rounds=3, optimizer_state="reset"))
    callback = FedMD(transfer_epochs=0, digest_batch_size=None)
    close(own_models(federate(module, data, [callback], max_rounds=3))["0"], alone["0"], atol=1e-5)


def test_identical_clients_agree_before_they_digest():
    data = public_data((24, 24))
    data.tensors["1"] = data.tensors["0"]
    _, spy = spied(Toy("sgd"), data, [FedMD(transfer_epochs=0)], max_rounds=2)
    for message in spy.messages:
        if message.tag == "digest":
            rows = [u.extras["FedMD"]["logits"] for u in spy.updates if u.round == message.round and u.tag == "scores"]
            torch.testing.assert_close(message.extras["FedMD"]["consensus"], rows[0], atol=1e-6, rtol=0)


def test_the_consensus_is_that_of_models_before_anybody_digests_in_eval_mode():
    module, data = NormNet("momentum", dropout=0.5), public_data((24, 40), batch_size=8)
    before = federate(module, data, [FedMD(transfer_epochs=0, public_samples=7)], max_rounds=1)
    _, spy = spied(module, data, [FedMD(transfer_epochs=0, public_samples=7)], max_rounds=2)
    (message,) = [m for m in spy.messages if (m.round, m.client, m.tag) == (1, "0", "digest")]
    x = public_x(data)[message.extras["FedMD"]["ids"]]
    with torch.no_grad():
        rows = [before.module(client).eval()(x) for client in "01"]
    torch.testing.assert_close(message.extras["FedMD"]["consensus"], sum(rows) / 2)


def test_the_wire_carries_ids_and_logits_and_nothing_else():
    _, spy = spied(two_models(), public_data(), [FedMD(transfer_epochs=1, public_samples=7)], max_rounds=2)
    assert not any(item.state for item in (*spy.messages, *spy.updates))
    assert [m.num_bytes for m in spy.messages] == [0] * 3 + [7 * 8] * 3 + [7 * (8 + 4 * CLASSES)] * 3
    assert [u.num_bytes for u in spy.updates] == [0] * 3 + [7 * 4 * CLASSES] * 3 + [0] * 3
    ids = [m.extras["FedMD"]["ids"] for m in spy.messages if m.round == 1]
    assert all(torch.equal(ids[0], other) for other in ids) and len(ids[0].unique()) == 7


def test_the_order_of_clients_does_not_matter():
    module, data = Toy("sgd"), public_data()
    turned = public_data()
    turned.tensors = dict(reversed(data.tensors.items()))
    runs = [own_models(federate(module, d, [FedMD(transfer_epochs=1)], max_rounds=3)) for d in (data, turned)]
    for client in runs[0]:
        same(runs[0][client], runs[1][client])


def test_the_digest_moves_models_as_strongly_as_asked():
    module, data = Toy("sgd"), public_data()
    runs = [
        own_models(federate(module, data, [FedMD(transfer_epochs=0, digest_lr_factor=f)], max_rounds=2))["0"]
        for f in (0.0, 1.0)
    ]
    alone = own_models(federate(module, data, [Local()], max_rounds=2, optimizer_state="reset"))["0"]
    same(runs[0], alone)
    assert differs(runs[1], alone)


def start():
    return two_models("momentum"), public_data(), [FedMD(transfer_epochs=1, public_samples=8), LocalCheckpoint()]


def test_two_architectures_resume_bit_for_bit(tmp_path):
    options = {"participation": 2, "evaluation": 1}
    whole = federate(*start(), tmp_path / "w", max_rounds=4, **options)
    half = federate(*start(), tmp_path / "h", max_rounds=2, **options)
    again = resumed(half, *start(), 4, **options)
    assert again.server.costs.bytes_up == whole.server.costs.bytes_up
    for client, state in own_models(whole).items():
        same(own_models(again)[client], state)


@pytest.mark.slow
def test_worker_processes_change_nothing_with_two_architectures():
    here, there = (federate(*start(), max_rounds=2, **options) for options in ({}, {"engine": Processes(2)}))
    for client, state in own_models(here).items():
        same(own_models(there)[client], state)


def test_wrong_use_is_refused(tmp_path):
    for arguments in ({"public_samples": 0}, {"digest_epochs": -1}, {"digest_loss": "ce"}, {"weighting": "log"}):
        (name,) = arguments
        with pytest.raises(ValueError, match=f"FedMD got {name}="):
            FedMD(**arguments)
    for other in (FedAdam(), FedProx(mu=0.1), FedPer(personal="net.3")):
        with pytest.raises(ValueError, match=rf"FedMD lets no model travel, .*and {other.key} "):
            federate(Toy(), public_data(), [FedMD(), other])
    with pytest.raises(ValueError, match="GlobalCheckpoint"):
        federate(Toy(), public_data(), [FedMD(), GlobalCheckpoint()], tmp_path, max_rounds=1)
    with pytest.raises(ValueError, match="FedMD trains on public data, but the data module has none"):
        federate(Toy(), toy_data(), [FedMD()])
