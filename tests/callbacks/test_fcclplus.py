"""FCCL+: algorithms-2, entry 2.15, and its authors' code for what the entry leaves open."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks import FCCLPlus, Local
from fedlightning.callbacks.fcclplus import similarities
from fedlightning.tensors import module_state
from tests.callbacks.public import Deep, own_models, public_data, resumed, two_models
from tests.callbacks.test_fccl import collaborate_loss, step, visits_of
from tests.callbacks.test_fedproto import class_data
from tests.conformance.case import Case, Kept
from tests.helpers import CLASSES, NormNet, Toy, close, federate, same, spied

CASES = {
    "FCCLPlus": Case(
        FCCLPlus(public_samples=6, public_batch_size=4, head="head"),
        neutral=FCCLPlus(inter=0.0, collaborate_epochs=0, head="head"),
    ),
}
KEPT = {
    "FCCLPlus": Kept(
        "FCCLPlus",
        server=("ready",),
        client=("previous",),
        phases=("collaborate", "fit"),
        options={"head": "net.3"},
        public=True,
    ),
}


def representation(model, x):
    return model.net[:-1](x)


def cosines(z, temperature):
    """By pairs: row i has those of all j != i."""
    return torch.stack(
        [
            torch.stack([F.cosine_similarity(z[i], z[j], 0) / temperature for j in range(len(z)) if j != i])
            for i in range(len(z))
        ]
    )


def non_target(teacher, student, labels, temperature, normalised):
    total = 0.0
    for q, p, label in zip(teacher, student, labels.tolist(), strict=True):
        others = [c for c in range(len(p)) if c != label]
        if normalised:
            q, p = (q[others] / temperature).softmax(0), (p[others] / temperature).softmax(0)
        else:
            q, p = (q / temperature).softmax(0)[others], (p / temperature).softmax(0)[others]
        total = total + (q * (q.log() - p.log())).sum()
    return temperature**2 * total / len(labels)


def by_hand(modules, data, visits, ids, batch, similarity=3.0, temperature=0.5, t=3.0, normalised=True, factor=0.1):
    own, previous = {client: copy.deepcopy(module) for client, module in modules.items()}, {}
    public = data.public_dataloader().dataset.tensors[0]
    for number, clients in enumerate(visits):
        blocks = ids[number].split(batch)
        with torch.no_grad():
            logits = [sum(own[c](public[b]) for c in clients) / len(clients) for b in blocks]
            near = [
                sum(cosines(representation(own[c], public[b]), temperature) for c in clients) / len(clients)
                for b in blocks
            ]
        for client in clients:
            model, (x, y) = own[client], data.tensors[client]["train"]
            for block, target, mean in zip(blocks, logits, near, strict=True):
                z = model(public[block])
                loss = collaborate_loss(z, target, 0.0051)
                mine = cosines(representation(model, public[block]), temperature)
                loss = loss + similarity * (mean.softmax(1) * (mean.log_softmax(1) - mine.log_softmax(1))).sum(1).mean()
                step(model, loss, factor)
            for _ in range(2):
                loss = F.cross_entropy(model(x), y)
                if client in previous:
                    loss = loss + non_target(previous[client](x).detach(), model(x), y, t, normalised)
                step(model, loss)
            previous[client] = copy.deepcopy(model)
    return {client: module_state(model) for client, model in own.items()}


class Wide(Deep):
    """Its representations are wider than those of the other architecture."""

    def make(self, hidden, dropout):
        return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 11), nn.Linear(11, CLASSES))


@pytest.mark.parametrize("non_target", ["normalised", "code"])
def test_three_rounds_of_two_architectures_are_what_the_formulas_say(non_target):
    """Twelve samples in batches of five: the last one is smaller. Representations differ in width."""
    module, data = two_models(lr=0.1), public_data()
    module.models["deep"] = Wide(lr=0.1)
    options = {"public_samples": 12, "public_batch_size": 5, "temperature": 0.5, "collaborate_lr_factor": 0.1}
    callback = FCCLPlus(non_target=non_target, **options)
    trainer, spy = spied(module, data, [callback], max_rounds=3, local_epochs=2, participation=2)
    visits, ids = visits_of(spy, 3, "FCCLPlus")
    modules = {client: module.model(["small", "deep"][int(client) % 2]) for client in "012"}
    wanted = by_hand(modules, data, visits, ids, 5, normalised=non_target == "normalised")
    for client, state in wanted.items():
        close(own_models(trainer)[client], state, atol=1e-5)
    rows = next(u.extras["FCCLPlus"]["rows"] for u in spy.updates if u.tag == "predict")
    assert rows.shape == (12, CLASSES + 4) and not rows[10:, CLASSES + 1 :].any() and rows[:10].all()
    assert sorted(ids[0].tolist()) != ids[0].tolist()


def test_similarities_do_not_see_lengths():
    z = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(similarities(z * torch.rand(5, 1).add(0.1), 0.1), cosines(z, 0.1), atol=1e-4, rtol=1e-5)


def test_equal_teachers_have_no_divergence():
    z, y = torch.randn(6, 4, requires_grad=True), torch.tensor([0, 1, 2, 3, 0, 1])
    value = FCCLPlus().divergence(z.detach().clone(), z, (None, y))
    value.backward()
    assert abs(float(value.detach())) < 1e-6 and z.grad.abs().max() < 1e-6


def test_without_phases_it_is_local_training():
    module, data = NormNet("momentum", dropout=0.3), public_data(batch_size=8)
    alone = own_models(federate(module, data, [Local()], max_rounds=2, optimizer_state="reset"))
    ours = own_models(federate(module, data, [FCCLPlus(inter=0.0, collaborate_epochs=0)], max_rounds=2))
    for client in alone:
        same(ours[client], alone[client])


def start():
    return two_models("momentum", lr=0.1), public_data(), [FCCLPlus(public_samples=8, public_batch_size=3)]


def test_two_architectures_resume_bit_for_bit(tmp_path):
    whole = federate(*start(), max_rounds=3, participation=2)
    half = federate(*start(), tmp_path / "h", max_rounds=2, participation=2)
    again = resumed(half, *start(), 3, participation=2)
    assert again.server.costs.bytes_up == whole.server.costs.bytes_up
    for client, state in own_models(whole).items():
        same(own_models(again)[client], state)


def test_what_cannot_work_is_refused():
    class Two(Toy):
        def make(self, hidden, dropout):
            return nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 2))

    data = public_data()
    data.tensors = class_data({"0": [0, 1], "1": [0, 1]}).tensors
    with pytest.raises(ValueError, match="Two has 2 classes: there is one other"):
        federate(Two(), data, [FCCLPlus()])
    for name, value in {"similarity": -1, "temperature": 0, "non_target_temperature": 0, "non_target": "x"}.items():
        with pytest.raises(ValueError, match=f"FCCLPlus got {name}="):
            FCCLPlus(**{name: value})
