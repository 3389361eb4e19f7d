"""FCCL: algorithms-2, entry 2.15."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks import FCCL, FedAdam, FedPer, FedProx, GlobalCheckpoint, Local, LocalCheckpoint
from fedlightning.callbacks.fccl import correlation_loss, correlations
from fedlightning.options import Processes
from fedlightning.tensors import module_state
from tests.callbacks.public import own_models, public_data, resumed, two_models
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import CLASSES, NormNet, Toy, close, differs, federate, same, spied, toy_data

OFF = {"pretrain_epochs": 0, "inter": 0.0, "collaborate_epochs": 0}
CASES = {
    "FCCL": Case(
        FCCL(pretrain_epochs=1, public_samples=6, head="head"),
        neutral=FCCL(**OFF, head="head"),
        skip={"identical_clients": "every client draws the order of public samples itself"},
    ),
    "FCCL unbiased": Case(
        FCCL(pretrain_epochs=0, unbiased=True, public_batch_size=None, head="head"),
        skip=NO_PLAIN_FORM | {"identical_clients": "every client draws the order of public samples itself"},
    ),
}
KEPT = {
    "FCCL": Kept(
        "FCCL",
        server=("ready",),
        client=("pretrained", "previous"),
        phases=("collaborate", "fit", "pretrain"),
        options={"head": "net.3", "pretrain_epochs": 1},
        public=True,
    ),
}


def step(model, value, factor=1.0):
    model.zero_grad()
    value.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= factor * model.lr * parameter.grad


def collaborate_loss(z, target, off_diagonal, unbiased=False):
    """Entry by entry, from the sheet."""
    n, total = len(z), 0.0
    divide = n - 1 if unbiased else n
    for u in range(z.shape[1]):
        for v in range(z.shape[1]):
            a, b = z[:, u] - z[:, u].mean(), target[:, v] - target[:, v].mean()
            m = (a / (a.square().sum() / divide).sqrt() * b / (b.square().sum() / divide).sqrt()).sum() / n
            total = total + ((1 - m) ** 2 if u == v else off_diagonal * (1 + m) ** 2)
    return total


def divergence(p, q):
    return (p.softmax(1) * (p.log_softmax(1) - q.log_softmax(1))).sum(1).mean()


def by_hand(
    modules, data, visits, ids, pretrain=2, collaborate=2, factor=0.1, off=0.0051, unbiased=False, inter=1.0, intra=1.0
):
    """Full-batch SGD: two epochs of the local phase. ``ids``: a round's public samples."""
    own = {client: copy.deepcopy(module) for client, module in modules.items()}
    public = data.public_dataloader().dataset.tensors[0]
    previous, pretrained = {}, {}
    for number, clients in enumerate(visits):
        known = [client for client in clients if client in previous or not pretrain]
        if known and collaborate:
            x = public[ids[number]]
            with torch.no_grad():
                target = sum(own[client](x) for client in known) / len(known)
        for client in clients:
            model, (own_x, own_y) = own[client], data.tensors[client]["train"]
            if client not in known:
                for _ in range(pretrain):
                    step(model, F.cross_entropy(model(own_x), own_y))
                previous[client] = pretrained[client] = copy.deepcopy(model)
            elif collaborate:
                for _ in range(collaborate):
                    step(model, collaborate_loss(model(x), target, off, unbiased), factor)
            for _ in range(2):
                loss = F.cross_entropy(model(own_x), own_y)
                for weight, teachers in ((inter, previous), (intra, pretrained)):
                    if client in teachers:
                        loss = loss + weight * divergence(teachers[client](own_x).detach(), model(own_x))
                step(model, loss)
            previous[client] = copy.deepcopy(model)
    return {client: module_state(model) for client, model in own.items()}


def visits_of(spy, rounds, key="FCCL"):
    clients = [[m.client for m in spy.messages if m.round == r and m.work != 0] for r in range(rounds)]
    ids = [
        next((m.extras[key]["ids"] for m in spy.messages if m.round == r and key in m.extras), None)
        for r in range(rounds)
    ]
    return clients, ids


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"pretrain_epochs": 2}, {}),
        ({"pretrain_epochs": 0, "unbiased": True, "off_diagonal": 0.5, "collaborate_lr_factor": 0.05},
         {"pretrain": 0, "unbiased": True, "off": 0.5, "factor": 0.05}),
        ({"pretrain_epochs": 2, "inter": 0.5, "intra": 0.0}, {"inter": 0.5, "intra": 0.0}),
    ],
    ids=["paper", "unbiased without pre-training", "inter alone"],
)  # fmt: skip
def test_three_rounds_of_two_architectures_are_what_the_formulas_say(options, given):
    module, data = two_models(), public_data()
    callback = FCCL(public_samples=12, collaborate_epochs=2, **options)
    trainer, spy = spied(module, data, [callback], max_rounds=4, local_epochs=2, participation=2)
    visits, ids = visits_of(spy, 4)
    assert len({tuple(clients) for clients in visits}) > 1
    modules = {client: module.model(["small", "deep"][int(client) % 2]) for client in "012"}
    for client, state in by_hand(modules, data, visits, ids, **given).items():
        close(own_models(trainer)[client], state, atol=1e-5)


def test_correlations_lie_between_minus_one_and_one_and_do_not_see_scales():
    """(a) and (b)"""
    draw = torch.Generator().manual_seed(0)
    z, other = torch.randn(9, 4, generator=draw), torch.randn(9, 4, generator=draw)
    assert correlations(z, other).abs().max() <= 1 and correlation_loss(z, other, 0.0051) >= 0
    scaled = z * torch.tensor([0.1, 5.0, 1.0, 30.0]) + torch.tensor([3.0, -9.0, 0.0, 1.0])
    torch.testing.assert_close(correlations(scaled, other), correlations(z, other), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.diagonal(correlations(z, z)), torch.ones(4))
    torch.testing.assert_close(torch.diagonal(correlations(z, z, unbiased=True)), torch.full((4,), 8 / 9))


def test_the_gradient_takes_different_classes_towards_minus_one():
    """(d)"""
    draw = torch.Generator().manual_seed(0)
    z, other = torch.randn(9, 2, generator=draw, requires_grad=True), torch.randn(9, 2, generator=draw)
    correlation_loss(z, other, 1.0).backward()
    before, after = correlations(z, other), correlations(z - 0.01 * z.grad, other)
    assert (after - before)[0, 1] < 0 or (after - before)[1, 0] < 0
    assert correlation_loss(z - 0.01 * z.grad, other, 1.0) < correlation_loss(z, other, 1.0)
    alone = torch.randn(9, 2, generator=draw, requires_grad=True)
    matrix = correlations(alone, other)
    (1 + matrix[0, 1]).square().backward()
    assert correlations(alone - 0.01 * alone.grad, other)[0, 1] < matrix[0, 1]


def test_batches_without_a_difference_have_no_gradient():
    for z in (torch.ones(4, 3), torch.randn(1, 3)):
        z.requires_grad_(True)
        correlation_loss(z, z.detach().clone(), 0.1).backward()
        assert torch.equal(z.grad, torch.zeros_like(z))


def test_without_phases_it_is_local_training():
    """(c)"""
    module, data = NormNet("momentum", dropout=0.3), public_data(batch_size=8)
    alone = own_models(federate(module, data, [Local()], max_rounds=2, optimizer_state="reset"))
    ours = own_models(federate(module, data, [FCCL(**OFF)], max_rounds=2))
    for client in alone:
        same(ours[client], alone[client])


@pytest.mark.parametrize("options", [{"inter": 1.0}, {"intra": 1.0}, {"collaborate_epochs": 1}], ids=str)
def test_each_phase_moves_models(options):
    module, data = Toy("sgd"), public_data()
    given = {"pretrain_epochs": 1, "inter": 0.0, "intra": 0.0, "collaborate_epochs": 0}
    runs = [own_models(federate(module, data, [FCCL(**given | o)], max_rounds=2))["0"] for o in ({}, options)]
    assert differs(*runs)


def test_teachers_are_the_models_at_the_end_of_pre_training_and_of_the_last_visit():
    module, data = Toy("sgd"), public_data((24,))
    trainer = federate(module, data, [FCCL(pretrain_epochs=3)], max_rounds=3, local_epochs=1)
    kept = trainer.store.get("0").state["FCCL"]
    same(kept["previous"], own_models(trainer)["0"])
    alone = federate(module, data, [Local()], max_rounds=1, local_epochs=3)
    close(kept["pretrained"], own_models(alone)["0"], atol=1e-6)


def test_the_wire_carries_ids_and_logits_and_nothing_else():
    _, spy = spied(two_models(), public_data(), [FCCL(pretrain_epochs=1, public_samples=7)], max_rounds=2)
    assert not any(item.state for item in (*spy.messages, *spy.updates))
    assert [m.num_bytes for m in spy.messages] == [0] * 3 + [7 * 8] * 3 + [7 * (8 + 4 * CLASSES)] * 3
    assert [u.num_bytes for u in spy.updates] == [0] * 3 + [7 * 4 * CLASSES] * 3 + [0] * 3


def test_logits_are_those_of_models_before_anybody_trains_in_eval_mode():
    module, data = NormNet("momentum", dropout=0.5), public_data((24, 40), batch_size=8)
    callback = FCCL(pretrain_epochs=1, public_samples=7)
    before = federate(module, data, [callback], max_rounds=1)
    _, spy = spied(module, data, [callback], max_rounds=2)
    (message,) = [m for m in spy.messages if (m.round, m.client, m.tag) == (1, "0", "collaborate")]
    x = data.public_dataloader().dataset.tensors[0][message.extras["FCCL"]["ids"]]
    with torch.no_grad():
        rows = [before.module(client).eval()(x) for client in "01"]
    torch.testing.assert_close(message.extras["FCCL"]["mean"], sum(rows) / 2)


def start():
    callback = FCCL(pretrain_epochs=1, public_samples=8, public_batch_size=3)
    return two_models("momentum"), public_data(), [callback, LocalCheckpoint()]


@pytest.mark.slow
def test_two_architectures_resume_bit_for_bit(tmp_path):
    options = {"participation": 2, "evaluation": 1}
    whole = federate(*start(), tmp_path / "w", max_rounds=4, **options)
    half = federate(*start(), tmp_path / "h", max_rounds=2, **options)
    again = resumed(half, *start(), 4, **options)
    assert again.server.costs.bytes_up == whole.server.costs.bytes_up
    for client, state in own_models(whole).items():
        same(own_models(again)[client], state)


@pytest.mark.slow
def test_worker_processes_change_nothing():
    runs = [
        own_models(federate(*start(), max_rounds=3, participation=2, **engine))
        for engine in ({}, {"engine": Processes(2)})
    ]
    for client, state in runs[0].items():
        same(runs[1][client], state)


def test_a_round_in_which_no_logits_come_has_no_collaborative_phase():
    server = SimpleNamespace(
        state={"FCCL": {"ready": ["0"]}},
        participants=lambda: ["0", "1"],
        training=SimpleNamespace(public_ids=lambda count: torch.arange(3)),
    )
    plan = FCCL().plan_round(server)
    assert [(job.client, job.work, job.tag) for job in next(plan)] == [("0", 0, "predict")]
    jobs = plan.send([SimpleNamespace(client="0", error="no power", extras={})])
    assert [(job.client, job.tag) for job in jobs] == [("0", ""), ("1", "pretrain")]


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(ValueError, match="FCCL trains on public data, but the data module has none"):
        federate(Toy(), toy_data(), [FCCL()])

    class Pair(Toy):
        def forward(self, x):
            return self.net(x), x

        def logits(self, x):
            return self(x)[0]

    with pytest.raises(ValueError, match="FCCL cannot read the logits of Pair"):
        federate(Pair(), public_data(), [FCCL()])

    class TwoHeads(Toy):
        def make(self, hidden, dropout):
            return nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 2 * CLASSES), nn.GLU())

    with pytest.raises(ValueError, match=r"head of TwoHeads gives \(.*, 6\) for .* forward has 3 classes"):
        federate(TwoHeads(), public_data(), [FCCL()])
    for other in (FedAdam(), FedProx(mu=0.1), FedPer(personal="net.3")):
        with pytest.raises(ValueError, match=rf"FCCL lets no model travel, .*and {other.key} "):
            federate(Toy(), public_data(), [FCCL(), other])
    with pytest.raises(ValueError, match="GlobalCheckpoint"):
        federate(Toy(), public_data(), [FCCL(), GlobalCheckpoint()], tmp_path, max_rounds=1)
    for name, value in {"public_samples": 0, "public_batch_size": 1, "collaborate_epochs": -1, "inter": -1,
                        "intra": -1, "pretrain_epochs": -1, "off_diagonal": -1,
                        "collaborate_lr_factor": -1}.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"FCCL got {name}="):
            FCCL(**{name: value})
