"""FD: algorithms-2, entry 2.7."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks import FD, MOON, Ditto, FedAdam, FedPer, FedProx, GlobalCheckpoint, Local, fd
from fedlightning.callbacks.shared.distillation import both_classes
from fedlightning.tensors import module_state
from tests.callbacks.test_fedproto import class_data
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import CLASSES, FEATURES, NormNet, PiecesStyle, Toy, close, differs, federate, same, spied, toy_data

CASES = {
    "FD": Case(FD(head="head")),  # one client has nobody to learn from: local training
    "FD inclusive": Case(FD(head="head", loo=False, exchange="logits", weighting="samples"), skip=NO_PLAIN_FORM),
    "FD after": Case(FD(head="head", output_pass="after")),
}
KEPT = {"FD": Kept("FD", server=("tables", "total", "weight"), options={"head": "net.3"})}

OWNED = {"0": [0, 1], "1": [1, 2], "2": [0, 1, 2]}


def models(trainer):
    return {client: module_state(trainer.module(client)) for client in trainer.server.clients}


def rows_of(extras):
    """A payload by class."""
    return dict(zip(extras["classes"].tolist(), extras["outputs"], strict=True))


def sent_to(spy, number, client):
    """What a client was sent in a round, by class."""
    (message,) = [m for m in spy.messages if (m.round, m.client) == (number, client) and m.work != 0]
    return rows_of(message.extras["FD"]) if "FD" in message.extras else {}


class Doubled(Toy):
    """In float64."""

    def __init__(self, **options):
        super().__init__(**options)
        self.double()

    def logits(self, x):
        return self.net(x.double())


def by_hand(module, data, gamma, visits, loo=True, exchange="probabilities", output_pass="during", weighting="uniform"):
    """Two full-batch SGD steps a visit, written from the paper, sample by sample; ``visits``: a round's clients."""
    own, last = {client: copy.deepcopy(module) for client in data.tensors}, {}
    given = []
    for clients in visits:
        known = {client: dict(table) for client, table in last.items()}
        for client in clients:
            model, (x, y) = own[client], data.tensors[client]["train"]
            targets = {}
            for label in range(CLASSES):
                found = [t[label] for other, t in known.items() if label in t and not (loo and other == client)]
                weights = [n if weighting == "samples" else 1 for _, n in found]
                if found:
                    mean = sum(w * f for (f, _), w in zip(found, weights, strict=True)) / sum(weights)
                    targets[label] = mean.softmax(0) if exchange == "logits" else mean
            given.append(targets)

            def outputs(model=model, x=x):
                logits = model.logits(x)
                return logits if exchange == "logits" else logits.softmax(1)

            met = {label: [] for label in y.unique().tolist()}
            for _ in range(2):
                logits = model.logits(x)
                loss = F.cross_entropy(logits, y)
                for b, label in enumerate(y.tolist()):
                    if label in targets:
                        loss = loss - gamma / len(y) * (targets[label] * logits[b].log_softmax(0)).sum()
                if output_pass == "during":
                    for b, label in enumerate(y.tolist()):
                        met[label].append(outputs()[b].detach())
                model.zero_grad()
                loss.backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= module.lr * parameter.grad
            if output_pass == "after":
                for b, label in enumerate(y.tolist()):
                    met[label].append(outputs()[b].detach())
            last.setdefault(client, {}).update({j: (torch.stack(f).mean(0), len(f)) for j, f in met.items()})
    return {client: module_state(model) for client, model in own.items()}, given


@pytest.mark.parametrize("make", [Toy, Doubled])
@pytest.mark.parametrize(
    "options",
    [{}, {"loo": False, "exchange": "logits"}, {"output_pass": "after", "weighting": "samples"}],
    ids=["paper", "inclusive logits", "after samples"],
)
def test_three_rounds_are_what_the_formulas_say(make, options):
    module, data = make(optimizer="sgd", lr=0.5), class_data(OWNED, batch_size=64)
    trainer, spy = spied(module, data, [FD(gamma=2.0, **options)], max_rounds=3, local_epochs=2)
    wanted, given = by_hand(module, data, 2.0, [list(OWNED)] * 3, **options)
    for client, state in models(trainer).items():
        close(state, wanted[client], atol=1e-6)
    for place, targets in enumerate(given):
        number, client = divmod(place, 3)
        found = sent_to(spy, number, str(client))
        assert list(found) == list(targets)
        for label, row in targets.items():
            mine = found[label].softmax(0) if options.get("exchange") == "logits" else found[label]
            torch.testing.assert_close(mine.double(), row.double(), atol=1e-6, rtol=1e-5)


def test_absent_clients_count_with_what_they_sent_last():
    module, data = Toy("sgd", lr=0.5), class_data(OWNED, batch_size=64)
    trainer, spy = spied(module, data, [FD(gamma=2.0)], max_rounds=6, participation=1, local_epochs=2)
    visits = [list(spy.of_round(number)) for number in range(6)]
    assert len({client for (client,) in visits}) > 1 and len({tuple(v) for v in visits}) < 6  # somebody comes back
    wanted, _ = by_hand(module, data, 2.0, visits)
    for client in {client for clients in visits for client in clients}:
        close(module_state(trainer.module(client)), wanted[client], atol=1e-6)


def test_a_label_that_a_visit_does_not_meet_keeps_its_row():
    """Visits of one small step see some of the labels only."""
    data = toy_data((12, 12), batch_size=2)
    _, spy = spied(Toy("sgd"), data, [FD()], max_rounds=6, local_steps=1)
    met, last = {"0": {}, "1": {}}, [len(u.extras["FD"]["classes"]) for u in spy.updates]
    assert min(last) < CLASSES
    for number in range(6):
        for client in met:
            other = met["1" if client == "0" else "0"]
            found = sent_to(spy, number, client)
            assert list(found) == sorted(other)
            for label, row in other.items():
                torch.testing.assert_close(found[label], row, atol=1e-12, rtol=1e-6)
        for client, update in spy.of_round(number).items():
            met[client] |= rows_of(update.extras["FD"])
    assert len(met["0"]) > min(last)


@pytest.mark.parametrize("callback", [FD(gamma=0.0), FD(gamma=0.0, output_pass="after")], ids=["during", "after"])
def test_without_strength_it_is_local_training(callback):
    module, data = NormNet("momentum", dropout=0.3), toy_data()
    alone = models(federate(module, data, [Local()], max_rounds=2, optimizer_state="reset"))
    ours = models(federate(module, data, [callback], max_rounds=2))
    for client in alone:
        same(ours[client], alone[client])


def test_one_client_has_nobody_to_learn_from():
    module, data = Toy("adam"), toy_data((24,))
    alone = models(federate(module, data, [Local()], max_rounds=3, optimizer_state="reset"))
    trainer, spy = spied(module, data, [FD(gamma=5.0)], max_rounds=3)
    same(models(trainer)["0"], alone["0"])
    assert all(message.num_bytes == 0 for message in spy.messages)


def test_the_first_round_has_no_term_and_later_ones_have():
    module, data = Toy("adam"), toy_data()
    for rounds in (1, 2):
        runs = [models(federate(module, data, [FD(gamma=g)], max_rounds=rounds)) for g in (0.0, 1.0)]
        assert differs(runs[0]["0"], runs[1]["0"]) == (rounds == 2)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_of_two_clients_each_gets_the_others_rows(weighting):
    _, spy = spied(Toy("sgd"), toy_data((24, 40)), [FD(weighting=weighting)], max_rounds=3)
    for number in (1, 2):
        for client, other in (("0", "1"), ("1", "0")):
            found, wanted = sent_to(spy, number, client), rows_of(spy.of_round(number - 1)[other].extras["FD"])
            assert list(found) == list(wanted)
            for label, row in wanted.items():
                torch.testing.assert_close(found[label], row, atol=1e-12, rtol=1e-7)


def test_targets_are_distributions_and_a_label_of_nobody_else_is_not_sent():
    data = class_data({"0": [0, 1], "1": [1, 2], "2": [1]})
    _, spy = spied(Toy("sgd"), data, [FD()], max_rounds=2)
    assert {client: list(sent_to(spy, 1, client)) for client in "012"} == {"0": [1, 2], "1": [0, 1], "2": [0, 1, 2]}
    for client in "012":
        for row in sent_to(spy, 1, client).values():
            assert (row >= 0).all()
            torch.testing.assert_close(row.sum(), torch.tensor(1.0))
    _, spy = spied(Toy("sgd"), data, [FD(loo=False)], max_rounds=2)
    assert all(list(sent_to(spy, 1, client)) == [0, 1, 2] for client in "012")


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_wire_carries_rows_and_nothing_else(weighting):
    _, spy = spied(NormNet(), class_data(OWNED), [FD(weighting=weighting)], max_rounds=2)
    assert not any(item.state for item in (*spy.messages, *spy.updates))
    for update in spy.updates:
        classes = OWNED[update.client]
        assert update.extras["FD"]["classes"].tolist() == classes
        assert update.num_bytes == 4 * len(classes) * (CLASSES + 1 + (weighting == "samples"))
        if weighting == "samples":
            y = update.extras["FD"]["counts"].tolist()
            assert sum(y) == 24
    assert [message.num_bytes for message in spy.messages] == [0] * 3 + [4 * CLASSES * (CLASSES + 1)] * 3


def test_the_order_of_clients_does_not_matter():
    module, data = Toy("sgd"), toy_data((24, 40, 16))
    turned = type(data)(dict(reversed(data.tensors.items())))
    runs = [models(federate(module, d, [FD(gamma=1.0)], max_rounds=3)) for d in (data, turned)]
    for client in runs[0]:
        close(runs[0][client], runs[1][client])


def test_outputs_after_training_are_taken_in_eval_mode_and_move_no_statistics():
    module, data = NormNet("momentum", dropout=0.5), toy_data((24, 40))
    trainer, spy = spied(module, data, [FD(gamma=0.0, output_pass="after")], max_rounds=1)
    for client in trainer.server.clients:
        x, y = data.tensors[client]["train"]
        with torch.no_grad():
            found = trainer.module(client).eval()(x).softmax(1)
        for label, row in rows_of(spy.of_round(0)[client].extras["FD"]).items():
            torch.testing.assert_close(row, found[y == label].mean(0))


def test_clients_may_have_models_of_their_own():
    class Deeper(FD):
        def wrap_module(self, module, owner):
            if owner == "1":
                module.net = nn.Sequential(nn.Linear(FEATURES, 20), nn.ReLU(), nn.Linear(20, 8), nn.Linear(8, CLASSES))
            return module

    trainer = federate(Toy(), toy_data(), [Deeper()], max_rounds=2)
    assert module_state(trainer.module("1"))["net.0.weight"].shape == (20, FEATURES)
    assert module_state(trainer.module("0"))["net.0.weight"].shape == (8, FEATURES)


@pytest.mark.filterwarnings("ignore")
def test_clients_of_two_numbers_of_classes_are_refused(monkeypatch):
    class More(FD):
        def wrap_module(self, module, owner):
            if owner == "1":
                module.net[3] = nn.Linear(8, CLASSES + 1)
            return module

    trainer = federate(Toy(), toy_data(), [More()], max_rounds=1)
    assert [(one["client"], "'outputs' as ('rows', 3)" in one["reason"]) for one in trainer.server.failures] == [
        ("1", True)
    ]
    monkeypatch.setattr(fd, "head_widths", lambda module, head: (-1, -1))  # a head that does not tell
    with pytest.raises(ValueError, match=r"Client '1' has 4 classes, others 3\. FD needs the same"):
        federate(Toy(), toy_data(), [More()], max_rounds=1)


def test_one_logit_is_two_classes():
    class OneLogit(Toy):
        def make(self, hidden, dropout):
            return nn.Linear(FEATURES, 1)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.binary_cross_entropy_with_logits(self(x)[:, 0], y.float())

    z = torch.tensor([[3.0], [-1.0]])
    torch.testing.assert_close(both_classes(z).softmax(1)[:, 1], z[:, 0].sigmoid())
    _, spy = spied(OneLogit(), class_data({"0": [0, 1], "1": [0, 1]}), [FD()], max_rounds=2)
    assert sent_to(spy, 1, "0")[1].shape == (2,)


def test_labels_to_ignore_are_in_no_row():
    client, logits = SimpleNamespace(scratch={}), torch.eye(4, CLASSES)
    FD()._note(client, logits, torch.tensor([1, -100, 1, -100]))
    sums, counts = client.scratch["FD"]
    assert counts.tolist() == [0, 2, 0]
    torch.testing.assert_close(sums[1].float(), logits[[0, 2]].softmax(1).sum(0))


def test_mixed_precision_keeps_targets_in_full_precision():
    trainer = federate(PiecesStyle(), toy_data(), [FD(head="net.head")], max_rounds=2, precision="bf16-mixed")
    for table in trainer.server.state["FD"]["tables"].values():
        torch.testing.assert_close(table["outputs"].sum(1), table["weights"].float(), atol=1e-6, rtol=0)


def test_a_client_without_finite_outputs_is_left_out():
    data = toy_data((24, 40, 16))
    data.tensors["1"]["train"][0][:] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = federate(Toy(), data, [FD()], max_rounds=2, failures="skip")
    assert list(trainer.server.state["FD"]["tables"]) == ["0", "2"]


def test_what_works_on_a_model_that_travels_is_refused(tmp_path):
    for other in (FedAdam(), FedProx(mu=0.1), MOON(), FedPer(personal="net.3"), Ditto()):
        with pytest.raises(ValueError, match=rf"FD lets no model travel, .*and {other.key} "):
            federate(Toy(), toy_data(), [FD(), other])
    with pytest.raises(ValueError, match="GlobalCheckpoint"):
        federate(Toy(), toy_data(), [FD(), GlobalCheckpoint()], tmp_path, max_rounds=1)


def test_wrong_use_is_refused():
    for arguments in ({"gamma": -1}, {"exchange": "features"}, {"output_pass": "before"}, {"weighting": "log"}):
        (name,) = arguments
        with pytest.raises(ValueError, match=f"FD got {name}="):
            FD(**arguments)
    with pytest.raises(ValueError, match=r"`net.0` of Toy gives \(8, 2\) for 8 samples whose largest label is 2\."):
        federate(Toy(hidden=2), class_data({"0": [2]}), [FD(head="net.0")])
