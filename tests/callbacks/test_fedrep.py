"""FedRep: sheet entry 16."""

from __future__ import annotations

import copy

import pytest
import torch

from fedlightning.callbacks import FedAvg, FedBABU, FedPer, FedProx, FedRep, FedType
from fedlightning.contract import FederatedCallback
from fedlightning.tensors import clone, module_state, select
from tests.callbacks.common import HEAD, MAKES, SIZES, MomentumDecay, absent_clients_rest, batches, deployed, descend
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

CASES = {"FedRep": Case(FedRep(personal=["head"], head_epochs=2), neutral=FedRep(personal=[]))}
KEPT = {"FedRep": Kept("FedRep", phases=("fit", "head"))}

BODY = {"net.0.weight", "net.0.bias"}
NORM = {f"net.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
QUICK = {"head_epochs": 2, "final_head": False}


class Watch(FederatedCallback):
    """Notes the module at the start and the end of each phase."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, pl_module):
        self.seen.append((self.client.id, self.client.phase.name, "start", clone(module_state(pl_module))))

    def on_train_end(self, trainer, pl_module):
        self.seen.append((self.client.id, self.client.phase.name, "end", clone(module_state(pl_module))))

    def of(self, client, round=0):
        """(phase, start, end) of the client's phases in a round of two phases."""
        mine = [entry for entry in self.seen if entry[0] == client][4 * round : 4 * round + 4]
        return [(a[1], a[3], b[3]) for a, b in zip(mine[::2], mine[1::2], strict=True)]


@pytest.mark.parametrize("how", ["reset", "keep"])
def test_one_part_moves_at_a_time(how):
    """After phase 1 the body is what was received, bit for bit, statistics too; after phase 2 the head is phase 1's."""
    watch = Watch()
    _, spy = spied(
        MomentumDecay(), toy_data(SIZES), [watch, FedRep(**QUICK)], max_rounds=2, local_epochs=2, optimizer_state=how
    )
    for number in (0, 1):
        for client in SIZES:
            (one, start, middle), (two, start_two, end) = watch.of(client, number)
            assert (one, two) == ("head", "fit")
            received = spy.rounds[number - 1] if number else module_state(MomentumDecay())
            same(select(middle, BODY | NORM), select(start, BODY | NORM))
            if number:
                same(select(start, BODY | NORM), select(received, BODY | NORM))
                same(select(start, HEAD), select(spy.records[0][client].personal, HEAD))
            same(start_two, middle)
            same(select(end, HEAD), select(middle, HEAD))
            for names in ({"net.3.weight"}, {"net.3.bias"}):
                assert differs(select(start, names), select(middle, names))
            for name in sorted(BODY | NORM - {"net.0.bias"}):  # a bias before batch normalisation has no gradient
                assert differs(select(middle, {name}), select(end, {name})), name


def train(model, over, names):
    """Plain torch on the named parameters only."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    descend(model, optimizer, over)


def test_a_visit_by_hand():
    module, data = Toy("momentum"), toy_data(SIZES)
    head, body = ({f"net.{i}.{name}" for name in ("weight", "bias")} for i in (3, 0))
    trainer, spy = spied(module, data, [FedRep(head_epochs=3, final_head=False)], max_rounds=1, local_epochs=2)
    for client, update in spy.of_round(0).items():
        model = copy.deepcopy(module)
        train(model, batches(data, client, epochs=3, phase="head"), head)
        train(model, batches(data, client, epochs=2), body)
        close(update.state, select(module_state(model), body))
        close(select(deployed(trainer, client), head), select(module_state(model), head))
        assert update.steps == 2 * len(data.client_dataloader(client, "train"))  # of the body: what travels
    same(select(global_state(trainer), body), mean_of(spy.of_round(0), dict.fromkeys(SIZES, 1)))


def test_the_bodys_update_is_fedavg_with_the_head_fixed():
    """tau_h = 0: heads stay at init, and the body's round is FedAvg's on a module whose head is frozen."""

    class Frozen(Toy):
        def make(self, hidden, dropout):
            net = super().make(hidden, dropout)
            net[3].requires_grad_(False)
            return net

    data, module, frozen = toy_data(SIZES), Toy("momentum"), Frozen("momentum")
    frozen.load_state_dict(module.state_dict())
    trainer, spy = spied(module, data, [FedRep(head_epochs=0)], max_rounds=3)
    reference = federate(frozen, data, [FedAvg(weighting="uniform")], max_rounds=3)
    same(select(global_state(trainer), BODY), select(global_state(reference), BODY))
    for client in SIZES:
        same(select(deployed(trainer, client), HEAD), select(module_state(module), HEAD))
    assert not any(update.tag for update in spy.updates)


@pytest.mark.parametrize("make", MAKES)
def test_without_a_head_it_is_fedavg(make):
    module, data = make(), toy_data(SIZES)
    ours = federate(module, data, [FedRep(personal=[])], max_rounds=2)
    same(global_state(ours), global_state(federate(module, data, [FedAvg(weighting="uniform")], max_rounds=2)))


def test_without_body_epochs_nothing_shared_moves():
    module, data = NormNet("adam"), toy_data(SIZES)
    trainer = federate(module, data, [FedRep(head_epochs=2, body_epochs=0)], max_rounds=2)
    same(global_state(trainer), module_state(module))
    assert differs(select(deployed(trainer, "0"), HEAD), select(module_state(module), HEAD))


@pytest.mark.parametrize(
    "options", [{"local_epochs": 1}, {"local_steps": 3}, {"local_steps": 3, "optimizer_state": "keep"}]
)
def test_epochs_are_epochs_whatever_the_trainer_counts(options):
    watch, steps = Watch(), []

    class Count(FederatedCallback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            steps.append((self.client.id, self.client.round, self.client.phase.name))

    federate(
        Toy("sgd"), toy_data([24]), [watch, Count(), FedRep(head_epochs=4, body_epochs=2)], max_rounds=3, **options
    )
    for number in range(3):
        assert steps.count(("0", number, "head")) == 4 * 3
        assert steps.count(("0", number, "fit")) == 2 * 3
    assert steps.count(("0", 3, "head")) == 4 * 3  # after the last round
    assert steps.count(("0", 3, "fit")) == 0


def test_only_the_body_travels():
    module, data = NormNet("adam"), toy_data(SIZES)
    trainer, spy = spied(module, data, [FedRep(head_epochs=1)], max_rounds=2)
    assert {frozenset(item.state) for item in spy.messages} == {frozenset(BODY | NORM)}
    assert {frozenset(update.state) for update in spy.updates} == {frozenset(BODY | NORM)}
    assert trainer.server.global_module() is None
    same(select(global_state(trainer), HEAD), select(module_state(module), HEAD))


def test_after_the_last_round_every_client_trains_its_head_again():
    module, data = NormNet("adam"), toy_data(SIZES)
    options = {"max_rounds": 2, "participation": 1}
    plain, spy = spied(module, data, [FedRep(**QUICK)], **options)
    ours = federate(module, data, [FedRep(head_epochs=2)], **options)
    same(global_state(ours), global_state(plain))
    visited = {update.client for update in spy.updates}
    assert visited != set(SIZES)
    for client in SIZES:
        tuned, before = deployed(ours, client), deployed(plain, client)
        same(select(tuned, BODY | NORM), select(global_state(ours), BODY | NORM))
        assert differs(select(tuned, HEAD), select(before, HEAD))


def test_heads_of_the_end_survive_restoring(tmp_path):
    module, data = NormNet("adam"), toy_data(SIZES)
    trainer = federate(module, data, [FedRep(head_epochs=2)], root=tmp_path, max_rounds=2)
    again = make_trainer(tmp_path, [FedRep(head_epochs=2)], max_rounds=2)
    again.restore(module, data, trainer.run.path)
    for client in SIZES:
        same(deployed(again, client), deployed(trainer, client))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
def test_a_finished_run_that_goes_on_is_the_longer_run(tmp_path, lost):
    """Heads that were trained after round 2 are not part of rounds 3 and 4, unless the state before them is lost."""
    module, data = NormNet("adam"), toy_data(SIZES)
    options = {"participation": 1, "optimizer_state": "keep"}
    whole = federate(module, data, [FedRep(head_epochs=2)], tmp_path / "a", max_rounds=4, **options)
    short = federate(module, data, [FedRep(head_epochs=2)], tmp_path / "b", max_rounds=2, **options)
    refused = make_trainer(tmp_path / "b", [FedRep(head_epochs=3)], max_rounds=4, **options)
    with pytest.raises(ValueError, match=r"FedRep\.head_epochs was 2 and is 3"):
        refused.fit(module, datamodule=data, resume="last")
    again = make_trainer(tmp_path / "b", [FedRep(head_epochs=2)], max_rounds=2, **options)
    again.restore(module, data, short.run.path)  # a run that may not go on is over, as it was
    for client in SIZES:
        same(deployed(again, client), deployed(short, client))
    longer = make_trainer(tmp_path / "b", [FedRep(head_epochs=2)], max_rounds=4, **options)
    if lost:
        (short.run.path / "checkpoints" / "last" / "manifest-before.json").unlink()
        with pytest.warns(UserWarning, match="the state before the visits after that is lost"):
            longer.fit(module, datamodule=data, resume="last")
        return
    longer.fit(module, datamodule=data, resume="last")
    same(global_state(longer), global_state(whole))
    for client in SIZES:
        same(deployed(longer, client), deployed(whole, client))
    assert longer.summary["terms"] == whole.summary["terms"]
    assert [row for row in longer.rows if row.round > 2] == [row for row in whole.rows if row.round > 2]
    again = make_trainer(tmp_path / "b", [FedRep(head_epochs=2)], max_rounds=4, **options)
    again.restore(module, data, longer.run.path)
    for client in SIZES:
        same(deployed(again, client), deployed(whole, client))


def test_absent_clients_keep_their_heads():
    _, spy = spied(Toy("adam"), toy_data(SIZES), [FedRep(**QUICK)], max_rounds=3, participation=1)
    absent_clients_rest(spy)


def test_corrections_act_on_the_body_only():
    """A huge FedProx strength holds the body and leaves the head."""
    module, data = Toy("sgd", lr=0.01), toy_data(SIZES)
    free, held = (
        spied(module, data, [FedRep(**QUICK), *cb], max_rounds=1, local_epochs=3) for cb in ([], [FedProx(99.0)])
    )
    start = module_state(module)
    moved = [(spy.of_round(0)["1"].state["net.0.weight"] - start["net.0.weight"]).norm() for _, spy in (free, held)]
    assert moved[1] < 0.7 * moved[0]
    same(*(select(deployed(trainer, "1"), HEAD) for trainer, _ in (free, held)))


def test_it_is_not_fedper():
    module, data = Toy("sgd"), toy_data(SIZES)
    ours, per = (federate(module, data, [cb], max_rounds=1) for cb in (FedRep(**QUICK), FedPer(weighting="uniform")))
    assert differs(select(global_state(ours), BODY), global_state(per))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: FedRep(head_epochs=-1), r"FedRep got head_epochs=-1\. Use a whole number in \[0, inf\)"),
        (lambda: FedRep(body_epochs=-1), r"FedRep got body_epochs=-1\. Use .*or None\. None is the trainer's"),
        (lambda: FedRep(num_layers=2), r"FedRep leaves nothing to share: Toy has 2 layer.*use Local"),
        (lambda: FedRep(personal=["head"]), r"'head' is neither a name"),
    ],
)
def test_wrong_use(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        federate(Toy(), toy_data(SIZES), [make()])


@pytest.mark.parametrize(
    ("make", "frozen", "way"),
    [
        (FedRep, "net.0", r"Set body_epochs=0"),
        (FedRep, "net.3", r"Set head_epochs=0"),
        (lambda: FedRep(body_epochs=0), "net.3", r"Set head_epochs=0"),
        (FedBABU, "net.0", r"use Local\(\)"),
    ],
)
def test_a_part_in_which_nothing_trains(make, frozen, way):
    module = Toy()
    module.get_submodule(frozen).requires_grad_(False)
    with pytest.raises(ValueError, match=rf"'{frozen}\.weight', '{frozen}\.bias'\), and no parameter.*{way}"):
        federate(module, toy_data(SIZES), [make()])


@pytest.mark.parametrize(
    ("frozen", "make"), [("net.0", lambda: FedRep(body_epochs=0)), ("net.3", lambda: FedRep(head_epochs=0))]
)
def test_a_part_that_is_left_out_may_be_frozen(frozen, make):
    module = Filters()
    module.get_submodule(frozen).requires_grad_(False)
    assert not federate(module, toy_data(SIZES), [make()], max_rounds=1).server.failures


class Filters(Toy):
    """Its optimizer holds what trains as it is made."""

    def configure_optimizers(self):
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], 0.01)


class Whole(Toy):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


@pytest.mark.parametrize("local_loop", ["fast", "trainer"])
@pytest.mark.parametrize("make", [lambda: FedRep(head_epochs=2), lambda: FedType(Filters())], ids=["FedRep", "FedType"])
def test_optimizers_that_hold_what_trains_do_as_those_that_hold_everything(make, local_loop):
    models = []
    for kind in (Filters, Whole):
        torch.manual_seed(0)
        trainer = federate(kind(), toy_data(SIZES), [make()], max_rounds=2, local_loop=local_loop)
        models.append(trainer.server.model | module_state(trainer.module("0")))
    same(*models)
