"""FedBABU: sheet entry 17."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedlightning.callbacks import FedAvg, FedBABU, FedBN, GlobalCheckpoint, LocalAdaptation
from fedlightning.tensors import module_state, select
from tests.callbacks.common import HEAD, MAKES, SIZES, AdamWDecay, batches, deployed, descend
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Toy,
    close,
    differs,
    federate,
    global_state,
    make_trainer,
    mean_of,
    same,
    spied,
    toy_data,
)

CASES = {"FedBABU": Case(FedBABU(head=["head"], epochs=1), neutral=FedBABU(head=[], epochs=0))}
KEPT = {"FedBABU": Kept("FedBABU", client=("model",), phases=("adapt", "fit"))}


class NormHead(Toy):
    """A head with statistics and without parameters for them."""

    def make(self, hidden, dropout):
        head = nn.Linear(hidden, 3), nn.BatchNorm1d(3, affine=False)
        return nn.Sequential(nn.Linear(6, hidden), nn.BatchNorm1d(hidden, affine=False), nn.ReLU(), *head)


@pytest.mark.parametrize("how", ["reset", "keep"])
def test_the_head_stays_at_the_common_start(how):
    """(u, v^0) on all clients at all rounds, sampled or not, bit for bit."""
    module, data = AdamWDecay(), toy_data(SIZES)
    callbacks = [FedBABU(epochs=0)]
    options = {"max_rounds": 4, "participation": 2, "local_epochs": 2, "optimizer_state": how}
    trainer, spy = spied(module, data, callbacks, **options)
    start = select(module_state(module), HEAD)
    for records in spy.records:
        for record in records.values():
            if record.visits:
                same(select(record.personal, HEAD), start)
    for client in SIZES:
        same(select(deployed(trainer, client), HEAD), start)
    same(select(global_state(trainer), HEAD), start)
    body = {"net.0.weight", "net.1.weight", "net.1.running_mean"}
    for name in body:
        assert differs(select(global_state(trainer), {name}), select(module_state(module), {name})), name


def test_statistics_of_the_head_stay_and_those_of_the_body_move():
    module, data = NormHead("momentum"), toy_data(SIZES)
    _, spy = spied(module, data, [FedBABU(epochs=0)], max_rounds=2)
    head = {name for name in module.state_dict() if name.startswith(("net.3", "net.4"))}
    for record in spy.records[-1].values():
        same(select(record.personal, head), select(module_state(module), head))
    for name in ("net.1.running_mean", "net.1.num_batches_tracked"):
        assert differs(select(spy.rounds[-1], {name}), select(module_state(module), {name}))


@pytest.mark.parametrize("make", MAKES)
def test_without_a_head_it_is_fedavg(make):
    module, data = make(), toy_data(SIZES)
    ours = federate(module, data, [FedBABU(head=[], epochs=0)], max_rounds=3, local_epochs=2)
    theirs = federate(module, data, [FedAvg(weighting="uniform")], max_rounds=3, local_epochs=2)
    same(global_state(ours), global_state(theirs))


def test_no_fine_tuning_deploys_the_global_model():
    trainer = federate(AdamWDecay(), toy_data(SIZES), [FedBABU(epochs=0)], max_rounds=2)
    for client in SIZES:
        same(deployed(trainer, client), module_state(trainer.module()))


def test_a_visit_by_hand():
    """The body's gradient through the fixed head, in plain torch; the server's mean is uniform."""
    module, data = Toy("momentum"), toy_data(SIZES)
    trainer, spy = spied(module, data, [FedBABU(epochs=0)], max_rounds=1, local_epochs=2)
    for client, update in spy.of_round(0).items():
        model = copy.deepcopy(module)
        model.net[3].requires_grad_(False)
        optimizer = torch.optim.SGD(model.net[0].parameters(), 0.1, momentum=0.9)
        descend(model, optimizer, batches(data, client, epochs=2))
        close(update.state, select(module_state(model), update.state))
    same(select(global_state(trainer), update.state), mean_of(spy.of_round(0), dict.fromkeys(SIZES, 1)))


def test_only_the_body_travels():
    module, data = NormNet("adam"), toy_data(SIZES)
    trainer, spy = spied(module, data, [FedBABU(epochs=1)], max_rounds=2)
    assert {frozenset(item.state) for item in (*spy.messages, *spy.updates)} == {
        frozenset(set(global_state(trainer)) - HEAD)
    }


def test_fine_tuning_by_hand():
    """Of the whole network from (u, v^0), at a share of the learning rate; the global model stays."""
    module, data = Toy("momentum"), toy_data(SIZES)
    trainer = federate(module, data, [FedBABU(epochs=3, lr_factor=0.01)], max_rounds=2)
    plain = federate(module, data, [FedBABU(epochs=0)], max_rounds=2)
    same(global_state(trainer), global_state(plain))
    model = copy.deepcopy(module)
    model.load_state_dict(global_state(plain))
    optimizer = torch.optim.SGD(model.parameters(), 0.1 * 0.01, momentum=0.9)
    descend(model, optimizer, batches(data, "1", round=2, epochs=3, phase="adapt"))
    close(deployed(trainer, "1"), module_state(model))


@pytest.mark.parametrize("part", ["all", "head", "body"])
def test_what_is_fine_tuned(part):
    trainer = federate(AdamWDecay(), toy_data(SIZES), [FedBABU(epochs=2, part=part)], max_rounds=2)
    parts = {"head": HEAD, "body": set(global_state(trainer)) - HEAD}
    for name, names in parts.items():
        own, start = (select(deployed(trainer, client), names) for client in ("0", None))
        if part in ("all", name):
            assert differs(own, start)
        else:
            same(own, start)


def test_the_global_model_can_be_selected(tmp_path):
    """(u, v^0) is a model like any other; fine-tuning starts from the selected one."""
    module, data = Toy("sgd"), toy_data(SIZES)
    callbacks = [GlobalCheckpoint(mode="max"), FedBABU(epochs=0)]  # the worst: not the last
    trainer = federate(module, data, callbacks, root=tmp_path, max_rounds=5, local_epochs=3)
    best = trainer.server.checkpoints["GlobalCheckpoint"]
    assert best["round"] < 5
    for client in SIZES:
        same(deployed(trainer, client), best["model"])


def test_there_is_no_global_model_where_others_keep_parts_of_the_body():
    trainer = federate(NormNet("adam"), toy_data(SIZES), [FedBN(), FedBABU(epochs=1)], max_rounds=1)
    with pytest.raises(ValueError, match="no global model"):
        trainer.module()


def test_restored(tmp_path):
    module, data = NormNet("adam"), toy_data(SIZES)
    trainer = federate(module, data, [FedBABU(epochs=1)], root=tmp_path, max_rounds=2)
    again = make_trainer(tmp_path, [FedBABU(epochs=1)], max_rounds=2)
    again.restore(module, data, trainer.run.path)
    for client in SIZES:
        assert differs(deployed(again, client), global_state(again))
        same(deployed(again, client), deployed(trainer, client))


@pytest.mark.parametrize(
    ("callbacks", "sentence"),
    [
        ([FedBABU(num_layers=2)], r"FedBABU leaves nothing to share: Toy has 2 layer.*use Local"),
        ([FedBABU(head=["fc"])], r"'fc' is neither a name"),
        ([FedBABU(), LocalAdaptation()], r"FedBABU and LocalAdaptation both claim"),
    ],
)
def test_wrong_use(callbacks, sentence):
    with pytest.raises(ValueError, match=sentence):
        federate(Toy(), toy_data(SIZES), callbacks)
