"""pFedKnow: sheet B 4.4."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks import MOON, SCAFFOLD, FedAdam, FedLP, FedProx, pFedKnow
from fedlightning.callbacks.pfedknow import pseudo_label_loss, select_kept
from fedlightning.tensors import module_state
from tests.conformance.case import Case, Kept
from tests.helpers import NormNet, Toy, ToyData, close, federate, global_state, mean_of, same, samples, spied, toy_data

SKIP = {"one_client": "clients train on pseudo-labels, never on their own"}
SURE = {"threshold": 0.0}
CASES = {
    "pFedKnow": Case(pFedKnow(head="head", **SURE), skip=SKIP),
    "pFedKnow server": Case(
        pFedKnow(server="site0", prune=0.0, head="head", **SURE),
        skip=SKIP | {"small_and_empty_clients": "it names its clients otherwise, and this one names 'site0'"},
    ),
}
KEPT = {"pFedKnow": Kept("pFedKnow")}


def test_whole_models_without_server_data_are_fedavg_on_pseudo_labels():
    """The same federation by hand: labels are those of the model that is sent."""
    module, data = Toy(), toy_data((16, 8), batch_size=16)
    ours = federate(module, data, [pFedKnow(prune=0.0, **SURE)], max_rounds=1)
    ends = []
    for client in data.client_ids:
        x, _ = next(iter(data.client_dataloader(client, "train")))
        loss = F.cross_entropy(module(x), module(x).argmax(1))
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        ends.append({n: p - 0.1 * g for (n, p), g in zip(module.named_parameters(), gradients, strict=True)})
    expected = {n: ((16 * ends[0][n] + 8 * ends[1][n]) / 24).detach() for n in ends[0]}
    close(global_state(ours), expected, atol=1e-6)


@pytest.mark.parametrize("make", [lambda: Toy("adamw"), lambda: NormNet("momentum")])
@pytest.mark.parametrize("others", [(), (FedProx(mu=1.0),)])
def test_pruned_weights_stay_zero_and_nobodys_elements_stay(make, others):
    module = make()
    trainer, spy = spied(
        module, toy_data(), [pFedKnow(prune=[0.5, 0.25], **SURE), *others], max_rounds=1, local_epochs=2
    )
    start, end = module_state(module), global_state(trainer)
    sent = spy.of_round(0)
    for name in ("net.0.weight", "net.3.weight"):
        magnitudes = start[name].abs().flatten().sort().values
        limits = {c: magnitudes[round(s * len(magnitudes)) - 1] for c, s in {"0": 0.5, "1": 0.25, "2": 0.5}.items()}
        masks = {c: start[name].abs() > limit for c, limit in limits.items()}
        for client, update in sent.items():
            assert not bool(update.state[name][~masks[client]].any())
            assert bool(update.state[name][masks[client]].all())
        weights = {c: sent[c].num_samples * masks[c].double() for c in "012"}
        held = sum(weights.values())
        expected = sum(weights[c] * sent[c].state[name].double() for c in "012") / held
        assert torch.equal(end[name][held == 0], start[name][held == 0]) and bool((held == 0).any())
        torch.testing.assert_close(end[name][held > 0], expected[held > 0].float())
    mean = mean_of(sent, {c: float(u.num_samples) for c, u in sent.items()})
    close({"b": end["net.0.bias"]}, {"b": mean["net.0.bias"]}, atol=1e-7)


@pytest.mark.parametrize("make", [lambda: Toy("adam"), lambda: NormNet("momentum"), lambda: Toy("adamw")])
@pytest.mark.fast_cases(1)
def test_pruned_weights_stay_zero_although_an_optimizer_goes_on(make):
    """What is pruned changes from round to round, and momentum of the round before would move it."""
    method = pFedKnow(prune=0.5, **SURE)
    _, spy = spied(make(), toy_data(), [method], max_rounds=3, local_epochs=2, optimizer_state="keep")
    sent = {(message.round, message.client): message.state for message in spy.messages}
    changed = 0
    for update in spy.updates:
        for name in ("net.0.weight", "net.3.weight"):
            pruned = sent[update.round, update.client][name] == 0
            assert not bool(update.state[name][pruned].any())
            changed += update.round > 0 and not torch.equal(pruned, sent[0, update.client][name] == 0)
    assert changed


def test_labels_of_clients_do_not_matter_and_those_of_the_server_do():
    module, ends = Toy(), []
    for turned in ((), ("1", "2"), ("0",)):
        parts = {
            c: {"train": samples(c, "train", 16), "val": samples(c, "val", 4), "test": samples(c, "test", 4)}
            for c in "012"
        }
        for client in turned:
            x, y = parts[client]["train"]
            parts[client]["train"] = x, 2 - y
        ends.append(global_state(federate(module, ToyData(parts), [pFedKnow("0", **SURE)], max_rounds=2)))
    same(ends[0], ends[1])
    assert not torch.equal(ends[0]["net.0.weight"], ends[2]["net.0.weight"])


def test_the_server_trains_first_and_after_every_aggregation():
    _, spy = spied(Toy(), toy_data(), [pFedKnow("1", prune=0.0, **SURE)], max_rounds=2)
    order = [(update.round, update.client, update.tag) for update in spy.updates]
    clients = [("0", "unlabelled"), ("2", "unlabelled")]
    server = "1", "labelled"
    assert order == [
        *((0, *job) for job in (server, *clients, server)),
        *((1, *job) for job in (*clients, server)),
    ]
    first, then = spy.updates[0], next(m for m in spy.messages if m.client == "0")
    same(first.state, then.state)  # what the server has learned goes to the clients
    same(spy.updates[3].state, spy.rounds[0])


def test_pseudo_labels_that_are_not_sure_count_zero():
    teacher = torch.tensor([[5.0, 0.0], [0.1, 0.0], [0.0, 4.0]])
    logits = torch.randn(3, 2, requires_grad=True)
    loss = pseudo_label_loss(logits, teacher, 0.95)
    expected = F.cross_entropy(logits[[0, 2]], torch.tensor([0, 1]), reduction="sum") / 3
    torch.testing.assert_close(loss, expected)
    assert float(pseudo_label_loss(logits, teacher * 0, 0.95).detach()) == 0.0


def test_a_label_that_is_just_sure_enough_counts():
    logits, even = torch.randn(3, 2), torch.zeros(3, 2)
    torch.testing.assert_close(pseudo_label_loss(logits, even, 0.5), F.cross_entropy(logits, torch.zeros(3).long()))


@pytest.mark.parametrize("prune", [0.0, 0.3])
def test_what_starts_at_zero_is_not_what_was_pruned(prune):
    """Biases are never pruned, and without pruning nothing is."""
    module = Toy()
    with torch.no_grad():
        module.net[0].bias.zero_()
        module.net[3].bias.zero_()
        module.net[3].weight[0, 0] = 0.0
    end = global_state(federate(module, toy_data(), [pFedKnow(prune=prune, **SURE)], max_rounds=1))
    assert bool(end["net.3.bias"].all()) and bool(end["net.0.bias"].any())
    assert bool(end["net.3.weight"][0, 0]) == (prune == 0.0)


def test_what_is_pruned_is_smallest():
    w = torch.tensor([[0.3, -0.1, 0.0], [2.0, 0.2, -0.1]])
    assert select_kept(w, 0.0).all()
    assert select_kept(w, 1 / 3).tolist() == [[True, False, False], [True, True, True]]
    assert select_kept(w, 0.1).tolist() == [[True, True, False], [True, True, True]]  # a zero counts as pruned


class Guided(Toy):
    """With a frozen teacher beside the network."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 3).requires_grad_(not frozen)


def test_the_guide_teaches_the_server_and_never_travels():
    module, data = Guided(), toy_data((16, 8), batch_size=16)
    _, spy = spied(module, data, [pFedKnow("0", guide="teacher", lam=2.0, head="net.3", **SURE)], max_rounds=1)
    x, y = next(iter(data.client_dataloader("0", "train")))
    target = module.teacher(x).softmax(1).detach()
    logits = module.net(x)
    kl = (target * (target.log() - logits.log_softmax(1))).sum(1).mean()
    names = [n for n, _ in module.named_parameters() if not n.startswith("teacher")]
    gradients = torch.autograd.grad(F.cross_entropy(logits, y) + 2 * kl, list(module.net.parameters()))
    first = {n: module_state(module)[n] - 0.1 * g for n, g in zip(names, gradients, strict=True)}
    close(spy.updates[0].state, first, atol=1e-6)
    assert not any("teacher" in name for message in spy.messages for name in message.state)


@pytest.mark.filterwarnings("ignore:pFedKnow has no labelled data")
def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="got server='x', and there is no such client"):
        federate(Toy(), toy_data(), [pFedKnow("x")])
    with pytest.raises(ValueError, match="guide 'teacher' trains"):
        federate(Guided(frozen=False), toy_data(), [pFedKnow("0", guide="teacher", head="net.3")])
    with pytest.raises(ValueError, match=r"pFedKnow tells from its own pruning.*, and FedAdam "):
        federate(Toy(), toy_data(), [FedAdam(), pFedKnow("0")])
    with pytest.raises(ValueError, match="SCAFFOLD"):
        federate(Toy(), toy_data(), [SCAFFOLD(), pFedKnow("0")])
    with pytest.raises(ValueError, match=r"pFedKnow tells from its own pruning .* Remove pFedKnow or FedLP"):
        federate(Toy(), toy_data(), [FedLP(), pFedKnow("0")])
    with pytest.raises(ValueError, match=r"pFedKnow trains clients on a loss without labels, and MOON adds"):
        federate(Toy(), toy_data(), [MOON(), pFedKnow("0")])
    for name, value in {"prune": 1.0, "threshold": 2.0, "lam": -1.0}.items():
        with pytest.raises(ValueError, match=f"pFedKnow got {name}="):
            pFedKnow(**{name: value})
