"""FedProto: algorithms-2, entry 2.5."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks import MOON, Ditto, FedPer, FedProto, Local, LocalCheckpoint, fedproto
from fedlightning.callbacks.shared.prototypes import fill_head, pack, unpack
from fedlightning.tensors import module_state
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import (
    CLASSES,
    FEATURES,
    NormNet,
    PiecesStyle,
    Toy,
    ToyData,
    close,
    differs,
    federate,
    same,
    samples,
    spied,
    toy_data,
)

CASES = {
    "FedProto": Case(FedProto(head="head"), neutral=FedProto(lam=0.0, head="head")),
    "FedProto nearest": Case(FedProto(head="head", predictor="nearest", weighting="samples"), skip=NO_PLAIN_FORM),
    "FedProto during": Case(FedProto(head="head", proto_pass="during"), skip=NO_PLAIN_FORM),
}
KEPT = {"FedProto": Kept("FedProto", server=("classes", "prototypes"), client=("classes",), options={"head": "net.3"})}

PROTOS = [lambda: Toy("sgd", lr=0.2), lambda: NormNet("momentum")]


def class_data(owned, count=24, **options):
    """Clients that own some classes only."""

    def part(client, split, size, classes):
        x, y = samples(client, split, 20 * size)
        mine = torch.isin(y, torch.tensor(classes))
        return x[mine][:size], y[mine][:size]

    sizes = {"train": count, "val": 8, "test": 8}
    return ToyData(
        {c: {s: part(c, s, size, classes) for s, size in sizes.items()} for c, classes in owned.items()}, **options
    )


OWNED = {"0": [0, 1], "1": [1, 2], "2": [0, 1, 2]}


def models(trainer):
    return {client: module_state(trainer.module(client)) for client in trainer.server.clients}


def prototypes(trainer):
    return unpack(trainer.server.state["FedProto"])


def means(model, x, y, body=lambda model, x: model.net[:-1](x)):
    """The definition, class by class."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        z = body(model, x)
    return {int(j): z[y == j].mean(0) for j in y.unique()}


@pytest.mark.parametrize("proto_pass", ["after", "during"])
@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.3), lambda: NormNet("momentum")])
def test_without_strength_it_is_local_training(make, proto_pass):
    module, data = make(), toy_data()
    alone = models(federate(module, data, [Local()], max_rounds=3, optimizer_state="reset"))
    ours = models(federate(module, data, [FedProto(lam=0.0, proto_pass=proto_pass)], max_rounds=3))
    for client in alone:
        same(ours[client], alone[client])


def by_hand(module, data, lam, visits):
    """One full-batch SGD step per visit (``visits``: a round's clients); uniform means of the owners' prototypes."""
    own, known = {client: copy.deepcopy(module) for client in data.tensors}, {}
    for clients in visits:
        reported = {}
        for client in clients:
            model = own[client]
            x, y = data.tensors[client]["train"]
            z = model.net[:-1](x)
            target = torch.stack([known.get(int(j), z[i].detach()) for i, j in enumerate(y)])
            loss = F.cross_entropy(model.net[-1](z), y) + lam * F.mse_loss(z, target)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= module.lr * parameter.grad
            for j, c in means(model, x, y).items():
                reported.setdefault(j, []).append(c)
        known = {**known, **{j: torch.stack(cs).mean(0) for j, cs in reported.items()}}
    return {client: module_state(model) for client, model in own.items()}, known


def test_training_and_prototypes_are_what_the_formulas_say():
    module, data = Toy("sgd", lr=0.2), class_data(OWNED, batch_size=64)
    trainer = federate(module, data, [FedProto(lam=5.0)], max_rounds=4)
    wanted, known = by_hand(module, data, 5.0, [list(OWNED)] * 4)
    for client, state in models(trainer).items():
        close(state, wanted[client], atol=2e-6)
    found = prototypes(trainer)
    assert list(found) == [0, 1, 2]
    for j, c in known.items():
        torch.testing.assert_close(found[j], c, atol=2e-6, rtol=1e-5)


def test_samples_of_a_class_without_a_prototype_are_not_pulled():
    """One client a round: those who come later own classes that nobody has reported yet, beside one that is known."""
    owned = {"0": [0, 1], "1": [1, 2], "2": [0, 2]}
    module, data = Toy("sgd", lr=0.2), class_data(owned, batch_size=64)
    trainer, spy = spied(module, data, [FedProto(lam=5.0)], max_rounds=4, participation=1)
    visits = [list(spy.of_round(number)) for number in range(4)]
    reported = [set().union(*(owned[client] for (client,) in visits[:number])) for number in range(4)]
    assert any(
        set(owned[client]) - known and set(owned[client]) & known
        for (client,), known in zip(visits, reported, strict=True)
    )
    wanted, known = by_hand(module, data, 5.0, visits)
    for client in {client for clients in visits for client in clients}:
        close(module_state(trainer.module(client)), wanted[client], atol=2e-6)
    for j, c in known.items():
        torch.testing.assert_close(prototypes(trainer)[j], c, atol=2e-6, rtol=1e-5)


def test_the_first_round_has_no_term_and_later_ones_have():
    module, data = NormNet("adam"), toy_data()
    for rounds in (1, 2):
        runs = [models(federate(module, data, [FedProto(lam=lam)], max_rounds=rounds)) for lam in (0.0, 1.0)]
        assert differs(runs[0]["0"], runs[1]["0"]) == (rounds == 2)


@pytest.mark.parametrize("make", PROTOS)
def test_one_clients_prototypes_are_the_global_ones(make):
    module, data = make(), toy_data([30])
    trainer = federate(module, data, [FedProto()], max_rounds=2)
    x, y = data.tensors["0"]["train"]
    wanted = means(trainer.module("0"), x, y)
    for j, c in prototypes(trainer).items():
        torch.testing.assert_close(c, wanted[j], atol=1e-6, rtol=1e-5)


def test_prototypes_during_training_are_those_of_the_last_epochs_steps():
    """With lr=0 the model stands still, so that both passes see the same representations."""
    module, data = Toy("sgd", lr=0.0, dropout=0.0), toy_data()
    runs = [prototypes(federate(module, data, [FedProto(proto_pass=p)], max_rounds=1, local_epochs=3))
            for p in ("after", "during")]  # fmt: skip
    for j in runs[0]:
        torch.testing.assert_close(runs[0][j], runs[1][j])
    moving = [
        prototypes(federate(Toy("sgd"), data, [FedProto(proto_pass=p)], max_rounds=1)) for p in ("after", "during")
    ]
    assert not torch.equal(moving[0][0], moving[1][0])


def test_prototypes_are_taken_in_eval_mode_and_move_no_statistics():
    module, data = NormNet("momentum"), toy_data()
    _, spy = spied(module, data, [FedProto(lam=0.0)], max_rounds=1)
    alone = spied(module, data, [Local()], max_rounds=1, optimizer_state="reset")[1]
    for client, record in spy.records[0].items():
        same(record.personal, alone.records[0][client].personal)


def test_counts_weight_the_mean_only_if_asked():
    module, data = Toy("sgd"), class_data(OWNED)
    _, spy = spied(module, data, [FedProto(weighting="samples")], max_rounds=1)
    _, plain = spied(module, data, [FedProto()], max_rounds=1)
    assert all(set(u.extras["FedProto"]) == {"prototypes", "classes"} for u in plain.updates)
    sums = {}
    for update in spy.updates:
        extras = update.extras["FedProto"]
        y = data.tensors[update.client]["train"][1]
        for (j, c), count in zip(unpack(extras).items(), extras["counts"].tolist(), strict=True):
            assert count == int((y == j).sum())
            total, weight = sums.get(j, (0.0, 0))
            sums[j] = (total + count * c.double(), weight + count)
    found = unpack(spy.states[-1]["FedProto"])
    for j, (total, weight) in sums.items():
        torch.testing.assert_close(found[j].double(), total / weight, atol=1e-6, rtol=1e-6)
    equal = class_data({"0": [1], "1": [1]})
    runs = [prototypes(federate(module, equal, [FedProto(weighting=w)], max_rounds=1)) for w in ("samples", "uniform")]
    torch.testing.assert_close(runs[0][1], runs[1][1])


def test_a_client_without_a_class_does_not_move_its_prototype():
    module = Toy("sgd")
    few = prototypes(federate(module, class_data({"0": [0, 1]}), [FedProto()], max_rounds=1))
    more = prototypes(federate(module, class_data({"0": [0, 1], "1": [1, 2]}), [FedProto()], max_rounds=1))
    assert torch.equal(few[0], more[0])
    assert not torch.equal(few[1], more[1])


def test_the_wire_carries_prototypes_and_nothing_else():
    """(e): owned classes times (d + 1) numbers."""
    _, spy = spied(NormNet(), class_data(OWNED), [FedProto()], max_rounds=2)
    assert not any(item.state for item in (*spy.messages, *spy.updates))
    for update in spy.updates:
        assert update.extras["FedProto"]["classes"].tolist() == OWNED[update.client]
        assert update.num_bytes == 4 * len(OWNED[update.client]) * (8 + 1)
    first, second = spy.messages[:3], spy.messages[3:6]
    assert all(message.num_bytes == 0 for message in first)
    assert all(message.num_bytes == 4 * 3 * (8 + 1) for message in second)


def test_classes_that_nobody_reported_keep_their_prototype_and_absent_clients_their_model():
    data = class_data({"0": [0], "1": [1], "2": [2]})
    _, spy = spied(Toy("adam"), data, [FedProto()], max_rounds=6, participation=1)
    for number in range(1, 6):
        (client,) = spy.of_round(number)
        before, after = (unpack(spy.states[n]["FedProto"]) for n in (number - 1, number))
        for j, c in before.items():
            assert torch.equal(c, after[j]) == (j != int(client))
        for other, record in spy.records[number].items():
            if other != client:
                assert record is spy.records[number - 1][other] or not record.visits


@pytest.mark.parametrize("restrict", [True, False])
def test_the_nearest_prototype_predicts(restrict, tmp_path):
    """Against the definition: argmin over the distances; with BatchNorm; also as the selected checkpoint."""
    data = class_data(OWNED)
    callbacks = [FedProto(predictor="nearest", restrict=restrict), LocalCheckpoint()]
    trainer = federate(NormNet("momentum"), data, callbacks, tmp_path, max_rounds=3)
    known = prototypes(trainer)
    for client, classes in OWNED.items():
        module = trainer.module(client).eval()
        x = data.tensors[client]["test"][0]
        allowed = [j for j in known if j in classes or not restrict]
        with torch.no_grad():
            z, logits = module.net[:-1](x), module(x)
            squared = torch.stack([(z - known[j]).square().sum(1) for j in allowed])
        assert [allowed[i] for i in squared.argmin(0)] == logits.argmax(1).tolist()
        torch.testing.assert_close(logits[:, allowed].softmax(1), (-squared.T).softmax(1), atol=1e-4, rtol=1e-3)
        trainer.module(client, "best_local")
    assert not trainer.server.global_module(None)


def test_one_logit_separates_two_prototypes():
    head, z = nn.Linear(4, 1), torch.randn(50, 4)
    c = {0: torch.randn(4), 1: torch.randn(4)}
    fill_head(head, c)
    nearer = (z - c[1]).square().sum(1) < (z - c[0]).square().sum(1)
    assert torch.equal(head(z)[:, 0] > 0, nearer)


@pytest.mark.filterwarnings("ignore")
def test_representations_of_two_widths_are_refused(monkeypatch):
    class Wider(FedProto):
        def wrap_module(self, module, owner):
            if owner == "1":
                module.net = nn.Sequential(nn.Linear(FEATURES, 9), nn.ReLU(), nn.Identity(), nn.Linear(9, CLASSES))
            return module

    trainer = federate(Toy(), toy_data(), [Wider()], max_rounds=1)
    assert [(one["client"], "has shape (3, 9)" in one["reason"]) for one in trainer.server.failures] == [("1", True)]
    monkeypatch.setattr(fedproto, "head_widths", lambda module, head: (-1, -1))  # a head that does not tell
    with pytest.raises(ValueError, match=r"Client '1' has representations of 9 numbers, others of 8"):
        federate(Toy(), toy_data(), [Wider()], max_rounds=1)


def test_clients_may_have_models_of_their_own():
    class Deeper(FedProto):
        def wrap_module(self, module, owner):
            if owner == "1":
                module.net = nn.Sequential(nn.Linear(FEATURES, 20), nn.ReLU(), nn.Linear(20, 8), nn.Linear(8, CLASSES))
            return module

    trainer = federate(Toy(), toy_data(), [Deeper()], max_rounds=2)
    assert module_state(trainer.module("1"))["net.0.weight"].shape == (20, FEATURES)
    assert module_state(trainer.module("0"))["net.0.weight"].shape == (8, FEATURES)


def test_mixed_precision_and_steps_of_another_style():
    trainer = federate(PiecesStyle(), toy_data(), [FedProto(head="net.head")], max_rounds=2, precision="bf16-mixed")
    for c in prototypes(trainer).values():
        assert c.dtype == torch.float32 and torch.isfinite(c).all()


def test_what_travels_is_ordered_by_class():
    packed = pack({2: torch.ones(3), 0: torch.zeros(3)})
    assert packed["classes"].tolist() == [0, 2] and packed["prototypes"][1].tolist() == [1, 1, 1]
    assert pack({})["prototypes"].shape == (0, 0)


@pytest.mark.parametrize("other", [MOON(), FedPer(personal="net.3"), Ditto()], ids=lambda other: other.key)
def test_what_works_beside_a_shared_model_is_refused(other):
    with pytest.raises(ValueError, match=rf"FedProto lets no model travel, .*and {other.key} "):
        federate(Toy(), toy_data(), [FedProto(), other])


def test_wrong_use_is_refused():
    for arguments in ({"lam": -1}, {"proto_pass": "before"}, {"predictor": "mean"}, {"weighting": "log"}):
        (name,) = arguments
        with pytest.raises(ValueError, match=f"FedProto got {name}="):
            FedProto(**arguments)
    with pytest.raises(ValueError, match=r"`net.1` of Toy is a ReLU"):
        federate(Toy(), toy_data(), [FedProto(head="net.1", predictor="nearest")])


@pytest.mark.parametrize("proto_pass", ["after", "during"])
def test_samples_that_the_loss_ignores_are_of_no_class(proto_pass):
    """A label of -100 is torch's `ignore_index`."""
    data = toy_data()
    for client, splits in data.tensors.items():
        x, y = splits["train"]
        data.tensors[client] = {**splits, "train": (x, torch.where(torch.arange(len(y)) < 3, -100, y))}
    method = FedProto(proto_pass=proto_pass, predictor="nearest", restrict=False)
    trainer = federate(Toy(), data, [method], max_rounds=2)
    assert trainer.server.state["FedProto"]["classes"].min() >= 0
    assert "failures" not in trainer.summary
