"""FedGH: algorithms-2, entry 2.6."""

from __future__ import annotations

import copy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks import IFCA, MOON, SCAFFOLD, FedAdam, FedGH, FedPer, FedProx, GlobalCheckpoint, Local
from fedlightning.models import ClientModels
from fedlightning.options import Processes
from fedlightning.tensors import module_state
from tests.callbacks.test_fedproto import class_data
from tests.conformance.case import Case, Kept
from tests.helpers import CLASSES, FEATURES, NormNet, Toy, close, differs, federate, make_trainer, same, spied, toy_data
from tests.server.test_architectures import Deep, seeded
from tests.server.test_architectures import same as same_trees

CASES = {
    "FedGH": Case(FedGH(head="head"), neutral=FedGH(head="head", warmup=9)),
    "FedGH batches": Case(
        FedGH(head="head", server_batch_size=4, server_epochs=3, shuffle=True, server_momentum=0.9, means="batches"),
        neutral=FedGH(head="head", warmup=9),
    ),
}
KEPT = {"FedGH": Kept("FedGH", options={"head": "net.3"})}
HEAD = ("net.3.weight", "net.3.bias")
AUTHORS = {"server_batch_size": 1, "server_epochs": 1, "shuffle": False}


class Wide(Deep):
    """Two hidden layers, momentum; the head of the others."""

    def __init__(self, **options):
        super().__init__("momentum", **options)


def models(**options):
    return ClientModels({"small": seeded(Toy, 1), "deep": seeded(Wide, 2)}, **options)


def states(trainer):
    return {client: module_state(trainer.module(client)) for client in trainer.server.clients}


def class_means(model, x, y, size, means):
    """Mean representations, written sample by sample."""
    found = {}
    with torch.no_grad():
        for label in sorted(set(y.tolist())):
            batches = [
                [model.net[:3](x[i : i + 1])[0] for i in range(start, min(start + size, len(x))) if y[i] == label]
                for start in range(0, len(x), size)
            ]
            if means == "batches":
                own = [sum(rows) / len(rows) for rows in batches if rows]
            else:
                own = [row for rows in batches for row in rows]
            found[label] = sum(own) / len(own)
    return found


def by_hand(modules, data, visits, lr, server_lr, momentum=0.0, decay=0.0, size=1, epochs=1, means="samples", batch=64):
    """Two full-batch SGD steps a visit, then the server's steps with gradients of softmax regression by formula."""
    own = {client: copy.deepcopy(module) for client, module in modules.items()}
    w, b = (module_state(next(iter(modules.values())))[name].clone() for name in HEAD)
    for clients in visits:
        pairs = []
        for client in clients:
            model, (x, y) = own[client], data.tensors[client]["train"]
            speed = [torch.zeros_like(p) for p in model.parameters()]
            with torch.no_grad():
                model.net[3].weight.copy_(w)
                model.net[3].bias.copy_(b)
            for _ in range(2):
                grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
                with torch.no_grad():
                    for place, (p, g) in enumerate(zip(model.parameters(), grads, strict=True)):
                        speed[place] = g + (0.9 * speed[place] if type(model) is Wide else 0)
                        p -= lr * speed[place]
            pairs += [(z, label) for label, z in class_means(model, x, y, batch, means).items()]
        vw, vb = torch.zeros_like(w), torch.zeros_like(b)
        for _ in range(epochs):
            for start in range(0, len(pairs), size):
                gw, gb = decay * w, decay * b
                part = pairs[start : start + size]
                for z, label in part:
                    p = (w @ z + b).softmax(0)
                    p[label] -= 1
                    gw, gb = gw + p[:, None] * z / len(part), gb + p / len(part)
                vw, vb = momentum * vw + gw, momentum * vb + gb
                w, b = w - server_lr * vw, b - server_lr * vb
    return own, (w, b)


@pytest.mark.parametrize(
    "options",
    [
        AUTHORS,
        {
            "shuffle": False,
            "server_batch_size": 2,
            "server_epochs": 2,
            "server_momentum": 0.9,
            "server_weight_decay": 0.01,
        },
        {**AUTHORS, "means": "batches"},
    ],
    ids=["authors", "mini-batches", "means of batches"],
)
def test_three_rounds_of_two_architectures_are_what_the_formulas_say(options):
    """With partial participation: an absent client takes the newest header over its own extractor."""
    whole = class_data({"0": [0, 1], "1": [1, 2], "2": [0, 1, 2]}, batch_size=64)
    trainer, spy = spied(
        models(), whole, [FedGH(server_lr=0.3, **options)], max_rounds=4, local_epochs=2, participation=2
    )
    visits = [list(spy.of_round(number)) for number in range(4)]
    assert len({tuple(clients) for clients in visits}) > 1
    start = {client: [seeded(Toy, 1), seeded(Wide, 2)][int(client) % 2] for client in "012"}
    names = {"size": "server_batch_size", "epochs": "server_epochs", "momentum": "server_momentum",
             "decay": "server_weight_decay", "means": "means"}  # fmt: skip
    given = {mine: options[theirs] for mine, theirs in names.items() if theirs in options}
    own, (w, b) = by_hand(start, whole, visits, 0.1, 0.3, **given)
    close({n: trainer.server.model[n] for n in HEAD}, dict(zip(HEAD, (w, b), strict=True)), atol=1e-6)
    for client, module in own.items():
        wanted = dict(module_state(module)) | dict(zip(HEAD, (w, b), strict=True))
        close(states(trainer)[client], wanted, atol=1e-6)


def test_a_small_last_batch_counts_more_in_means_of_batches():
    """The order of the batches is that of a probe, so the batch size of 5 of 12 samples is looked at in the update only."""
    data = toy_data((12,), batch_size=5, shuffle=False)
    x, y = data.tensors["0"]["train"]
    for means in ("samples", "batches"):
        trainer, spy = spied(Toy(), data, [FedGH(means=means)], max_rounds=1)
        trained = copy.deepcopy(Toy())
        trained.load_state_dict(trainer.store.get("0").personal)
        wanted = class_means(trained, x, y, 5, means)
        found = spy.updates[0].extras["FedGH"]
        assert found["classes"].tolist() == list(wanted)
        torch.testing.assert_close(found["prototypes"], torch.stack(list(wanted.values())))


def test_one_step_on_one_pair_is_a_step_of_softmax_regression():
    """(c), and (d): the row of a class that no client has moves through the softmax alone."""
    trainer, spy = spied(Toy(), class_data({"0": [1]}), [FedGH(**AUTHORS, server_lr=0.7)], max_rounds=1)
    z = spy.updates[0].extras["FedGH"]["prototypes"][0]
    w, b = (spy.messages[0].state[name] for name in HEAD)
    p = (w @ z + b).softmax(0)
    direction = torch.tensor([0.0, 1.0, 0.0]) - p
    torch.testing.assert_close(trainer.server.model[HEAD[0]], w + 0.7 * direction[:, None] * z)
    torch.testing.assert_close(trainer.server.model[HEAD[1]], b + 0.7 * direction)
    assert (trainer.server.model[HEAD[1]] - b)[[0, 2]].lt(0).all()


def test_a_header_that_does_not_move_and_is_not_taken_leaves_local_training():
    """(a)"""
    module, data = NormNet("momentum", dropout=0.3), toy_data()
    alone = states(federate(module, data, [Local()], max_rounds=2, optimizer_state="reset"))
    never = federate(module, data, [FedGH(server_lr=0.0, warmup=2)], max_rounds=2)
    same_trees(states(never), alone)
    same(never.server.model, module_state(module))
    once = federate(module, data, [FedGH(server_lr=0.0)], max_rounds=1)
    first = states(federate(module, data, [Local()], max_rounds=1, optimizer_state="reset"))
    for client, state in first.items():  # the header that it began with is that of all
        kept = once.store.get(client).personal
        same({name: kept[name] for name in state}, state)


def test_all_clients_have_one_header_after_download_and_keep_their_extractors():
    """(b)"""
    trainer, spy = spied(models(), toy_data(), [FedGH(warmup=1)], max_rounds=3)
    assert all(set(message.state) == (set(HEAD) if message.round else set()) for message in spy.messages)
    sent = [message.state for message in spy.messages if message.work is None][-1]
    heads = [{name: state[name] for name in HEAD} for state in states(trainer).values()]
    for one, other in pairwise(heads):
        same(one, other)
    assert not differs(heads[0], trainer.server.model) and differs(heads[0], sent)
    bodies = [state["net.0.weight"] for state in states(trainer).values()]
    assert not torch.equal(bodies[0], bodies[2])


def test_nothing_but_representations_goes_up():
    _, spy = spied(NormNet(), class_data({"0": [0, 1], "1": [2]}), [FedGH()], max_rounds=2)
    assert not any(update.state for update in spy.updates)
    for update in spy.updates:
        classes = {"0": [0, 1], "1": [2]}[update.client]
        assert update.extras["FedGH"]["classes"].tolist() == classes
        assert update.num_bytes == 4 * len(classes) * (8 + 1)
    assert {message.num_bytes for message in spy.messages} == {4 * CLASSES * (8 + 1)}


def test_scores_after_the_header_is_replaced_and_after_training(tmp_path):
    trainer = federate(Toy(), toy_data(), [FedGH(server_lr=1.0)], tmp_path, max_rounds=2, evaluation=1)
    rows = {
        stage: [r.value for r in trainer.recorder.rows if (r.stage, r.metric, r.split) == (stage, "val_loss", "val")]
        for stage in ("G", "L1", "L2")
    }
    assert len(rows["L1"]) == len(rows["L2"]) == 6 and rows["L1"] != rows["L2"]
    assert not rows["G"]


def shuffled():
    return [FedGH(shuffle=True, server_epochs=2, server_batch_size=2)]


@pytest.mark.slow
def test_two_architectures_resume_bit_for_bit(tmp_path):
    whole = federate(models(), toy_data([16, 12, 20, 8]), shuffled(), max_rounds=3, participation=3)
    half = federate(models(), toy_data([16, 12, 20, 8]), shuffled(), max_rounds=2, root=tmp_path, participation=3)
    resumed = make_trainer(tmp_path, shuffled(), max_rounds=3, participation=3)
    resumed.fit(models(), datamodule=toy_data([16, 12, 20, 8]), resume=half.recorder.run.path)
    same_trees(states(whole), states(resumed))
    same_trees(whole.server.models, resumed.server.models)


@pytest.mark.slow
def test_worker_processes_change_nothing():
    runs = [
        federate(models(), toy_data([16, 12, 20, 8]), shuffled(), max_rounds=2, participation=3, **engine)
        for engine in ({}, {"engine": Processes(2)})
    ]
    same_trees(*map(states, runs))
    same_trees(*(run.server.models for run in runs))


def test_representations_are_taken_in_eval_mode_and_move_no_statistics():
    data = toy_data((24,))
    trainer, spy = spied(NormNet("momentum", dropout=0.5), data, [FedGH()], max_rounds=1)
    x, y = data.tensors["0"]["train"]
    module = NormNet("momentum", dropout=0.5)
    module.load_state_dict(trainer.store.get("0").personal)
    module.eval()
    with torch.no_grad():
        z = module.net[:3](x)
    for label, row in zip(*(spy.updates[0].extras["FedGH"][part] for part in ("classes", "prototypes")), strict=True):
        torch.testing.assert_close(row, z[y == label].mean(0))


def test_one_logit_is_two_classes():
    class OneLogit(Toy):
        def make(self, hidden, dropout):
            return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.binary_cross_entropy_with_logits(self(x)[:, 0], y.float())

        def score(self, batch, split):
            pass

    trainer, spy = spied(OneLogit(), class_data({"0": [0, 1]}), [FedGH(**AUTHORS, server_lr=0.5)], max_rounds=1)
    z, labels = (spy.updates[0].extras["FedGH"][part] for part in ("prototypes", "classes"))
    w, b = spy.messages[0].state["net.2.weight"], spy.messages[0].state["net.2.bias"]
    for row, label in zip(z, labels, strict=True):
        error = (w @ row + b).sigmoid() - label
        w, b = w - 0.5 * error[:, None] * row, b - 0.5 * error
    torch.testing.assert_close(trainer.server.model["net.2.weight"], w)
    torch.testing.assert_close(trainer.server.model["net.2.bias"], b)


def test_labels_to_ignore_are_in_no_mean():
    z, y = torch.eye(4, 8), torch.tensor([1, -100, 1, -100])
    for means in ("samples", "batches"):
        update = SimpleNamespace(extras={})
        FedGH(means=means).on_send(
            SimpleNamespace(contributed=True, feature_pass=lambda taps: [((z, y), {"z": z})]), update
        )
        assert update.extras["FedGH"]["classes"].tolist() == [1]
        torch.testing.assert_close(update.extras["FedGH"]["prototypes"][0], (z[0] + z[2]) / 2)


def test_a_round_trains_the_header_well():
    """One pass at 0.01 hardly moved it, and a client deploys its extractor under it."""
    gained = []
    for method in (FedGH(), FedGH(**AUTHORS, server_lr=0.01)):
        trainer, spy = spied(Toy(), class_data({"0": [0, 1], "1": [1, 2], "2": [0, 2]}), [method], max_rounds=1)
        sent = [update.extras["FedGH"] for update in spy.updates]
        z, labels = (torch.cat([one[part] for one in sent]) for part in ("prototypes", "classes"))
        losses = [
            float(F.cross_entropy(z @ state[HEAD[0]].T + state[HEAD[1]], labels.long()))
            for state in (spy.messages[0].state, trainer.server.model)
        ]
        gained.append(losses[0] - losses[1])
    assert gained[0] > 3 * gained[1] > 0


def test_a_header_with_batch_normalisation_trains_without_a_last_pair_of_its_own():
    class NormHead(Toy):
        def make(self, hidden, dropout):
            head = nn.Sequential(nn.BatchNorm1d(hidden), nn.Linear(hidden, CLASSES))
            return nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), head)

    data = class_data({"0": [0, 1], "1": [1, 2], "2": [0]})
    method = FedGH(head="net.2", server_batch_size=4)
    federate(NormHead(), data, [method], max_rounds=2)
    federate(NormHead(), class_data({"0": [0]}), [method], max_rounds=2)


def test_a_frozen_header_stays():
    module = Toy()
    module.net[3].requires_grad_(False)
    trainer = federate(module, toy_data(), [FedGH(server_lr=1.0)], max_rounds=1)
    same({n: trainer.server.model[n] for n in HEAD}, {n: module_state(module)[n] for n in HEAD})


def test_headers_that_are_not_alike_are_refused_before_round_1():
    def pair(other, callback=None):
        return federate(ClientModels({"small": Toy(), "other": other}), toy_data(), [callback or FedGH()], max_rounds=1)

    with pytest.raises(
        ValueError, match=r"those of 'small' have 8 numbers, those of 'other' 5\. Give the layer before"
    ):
        pair(Toy(hidden=5))
    more = Deep()
    more.net[3] = nn.Linear(8, CLASSES + 1)
    with pytest.raises(ValueError, match=r"'net.3.bias' is \(3,\) in 'small' and \(4,\) in 'other'"):
        pair(more, FedGH(warmup=1))
    longer = Toy()
    longer.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES))
    with pytest.raises(ValueError, match=r"it is `net.3` in 'small' and `net.1` in 'other'\. Give it one name"):
        pair(longer)


def test_headers_that_cannot_be_trained_on_rows_are_refused():
    class Skips(Toy):
        def make(self, hidden, dropout):
            return nn.ModuleDict(
                {"body": nn.Linear(FEATURES, 8), "head": nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))}
            )

        def forward(self, x):
            return self.net["head"](self.net["body"](x))

    with pytest.raises(
        ValueError, match=r"`net.head` of Skips at the server on 1 representations .* larger server_batch"
    ):
        federate(Skips(), toy_data(), [FedGH(head="net.head", server_batch_size=1)])
    federate(Skips(), toy_data(), [FedGH(head="net.head", server_batch_size=3)], max_rounds=1)
    with pytest.raises(ValueError, match=r"`net` of Toy and nothing else, but it is the whole model"):
        federate(Toy(), toy_data(), [FedGH(head="net")])

    class Tied(Toy):
        def make(self, hidden, dropout):
            net = nn.Sequential(nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8))
            net[1].weight = net[3].weight
            return net

    with pytest.raises(ValueError, match=r"shares 'net.1.weight' with the rest"):
        federate(Tied(), toy_data(), [FedGH()])
    with pytest.raises(ValueError, match=r"`net.0` of Toy gives \(8, 2\) for 8 samples whose largest label is 2"):
        federate(Toy(hidden=2), class_data({"0": [2]}, batch_size=8), [FedGH(head="net.0")])


def test_what_works_on_a_model_that_comes_back_is_refused(tmp_path):
    for other in (FedAdam(), FedProx(mu=0.1), MOON(), FedPer(personal="net.3"), SCAFFOLD()):
        with pytest.raises(ValueError, match=rf"FedGH takes no model back.*, and {other.key} "):
            federate(Toy(), toy_data(), [FedGH(), other])
    with pytest.raises(ValueError, match="IFCA"):
        federate(Toy(), toy_data(), [FedGH(), IFCA()])
    with pytest.raises(ValueError, match="GlobalCheckpoint"):
        federate(Toy(), toy_data(), [FedGH(), GlobalCheckpoint()], tmp_path, max_rounds=1)


def test_wrong_use_is_refused():
    for name, value in {"server_lr": -1, "server_momentum": -1, "server_weight_decay": -1, "warmup": -1,
                        "server_batch_size": 0, "server_epochs": 0, "means": "medians"}.items():  # fmt: skip
        with pytest.raises(ValueError, match=f"FedGH got {name}="):
            FedGH(**{name: value})
