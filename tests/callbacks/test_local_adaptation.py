"""LocalAdaptation: sheet entry 10."""

from __future__ import annotations

import copy

import pytest

from fedlightning.callbacks import FLIU, FedProx, GlobalCheckpoint, LocalAdaptation
from fedlightning.contract import FederatedCallback
from fedlightning.tensors import module_state, select
from tests.callbacks.common import HEAD, MAKES, SIZES, MomentumDecay, batches, cut_and_resumed, deployed, descend
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Toy,
    close,
    differs,
    federate,
    global_state,
    make_trainer,
    same,
    spied,
    toy_data,
)

CASES = {
    "LocalAdaptation": Case(LocalAdaptation(), neutral=LocalAdaptation(epochs=0)),
    "LocalAdaptation head": Case(
        LocalAdaptation(part="head", head=["head"], keep_if_better=True), neutral=LocalAdaptation(epochs=0)
    ),
}
KEPT = {"LocalAdaptation": Kept("LocalAdaptation", client=("model",), phases=("adapt", "fit"))}


@pytest.mark.parametrize("make", MAKES)
def test_the_global_model_is_unchanged_by_adaptation(make):
    module, data = make(), toy_data(SIZES)
    plain, theirs = spied(module, data, max_rounds=2)
    trainer, spy = spied(module, data, [LocalAdaptation(epochs=2)], max_rounds=2)
    for a, b in zip(spy.rounds, theirs.rounds, strict=True):
        same(a, b)
    same(global_state(trainer), global_state(plain))
    same(module_state(trainer.module()), global_state(plain))
    for client in SIZES:
        assert differs(deployed(trainer, client), global_state(trainer))


@pytest.mark.parametrize("make", MAKES)
def test_no_epochs_deploy_the_global_model(make):
    module, data = make(), toy_data(SIZES)
    trainer = federate(module, data, [LocalAdaptation(epochs=0)], max_rounds=2)
    for client in SIZES:
        same(deployed(trainer, client), global_state(trainer))


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_adaptation_by_hand(optimizer):
    """Plain epochs from the last global model, with a new optimizer."""
    module, data = Toy(optimizer), toy_data(SIZES)
    for how in ("reset", "keep"):
        trainer = federate(module, data, [LocalAdaptation(epochs=3)], max_rounds=2, optimizer_state=how)
        model = copy.deepcopy(module)
        model.load_state_dict(global_state(trainer))
        descend(model, model.configure_optimizers(), batches(data, "1", round=2, epochs=3, phase="adapt"))
        close(deployed(trainer, "1"), module_state(model))


@pytest.mark.parametrize("how", ["reset", "keep"])
def test_the_learning_rate_of_adaptation(how):
    """A factor on the module's; the decay per round goes on, also where other optimizers are kept."""
    seen = []

    class Watch(FederatedCallback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            seen.append((self.client.phase.name, self.client.round, optimizer.param_groups[0]["lr"]))

    options = {"max_rounds": 2, "lr_decay": 0.5, "optimizer_state": how}
    federate(Toy("momentum"), toy_data([24]), [LocalAdaptation(lr_factor=0.25), Watch()], **options)
    assert {(phase, number): lr for phase, number, lr in seen} == pytest.approx(
        {("fit", 0): 0.1, ("fit", 1): 0.05, ("adapt", 2): 0.1 * 0.25 * 0.25}
    )


@pytest.mark.parametrize("part", ["head", "body"])
def test_the_other_part_is_frozen(part):
    """FB: the base is what the global model's is, bit for bit, with its running statistics; likewise the head."""
    trainer = federate(MomentumDecay(), toy_data(SIZES), [LocalAdaptation(epochs=2, part=part)], max_rounds=2)
    body = set(global_state(trainer)) - HEAD
    moving, fixed = (HEAD, body) if part == "head" else (body, HEAD)
    for client in SIZES:
        same(select(deployed(trainer, client), fixed), select(global_state(trainer), fixed))
        for name in moving:
            assert differs(select(deployed(trainer, client), {name}), select(global_state(trainer), {name})), name


def test_the_head_can_be_named():
    module, data = Toy("adam"), toy_data(SIZES)
    named, last = (
        federate(module, data, [LocalAdaptation(part="head", **how)], max_rounds=1)
        for how in ({"head": ["net.3"]}, {"num_layers": 1})
    )
    same(deployed(named, "1"), deployed(last, "1"))


def test_it_does_not_depend_on_other_clients():
    """From one global model, a client adapts to the same copy whoever else is there."""
    module, data = NormNet("adam"), toy_data(SIZES)
    few = toy_data({"1": 40})

    class Still(FederatedCallback):
        """A server that stays where it is."""

        def server_step(self, server, old, reduced):
            return old

    both = [federate(module, d, [Still(), LocalAdaptation()], max_rounds=1) for d in (data, few)]
    same(deployed(both[0], "1"), deployed(both[1], "1"))


def test_clients_never_sampled_adapt_too():
    trainer, spy = spied(Toy("adam"), toy_data(SIZES), [LocalAdaptation()], max_rounds=1, participation=1)
    assert len(spy.updates) == 1
    for client in SIZES:
        assert differs(deployed(trainer, client), global_state(trainer))


def test_it_starts_from_the_selected_global_model(tmp_path):
    """GlobalCheckpoint's best, not the last: with a learning rate that ruins later rounds they differ."""
    module, data = Toy("sgd", lr=1.5), toy_data(SIZES)
    callbacks = [GlobalCheckpoint(), LocalAdaptation(epochs=0)]
    trainer = federate(module, data, callbacks, root=tmp_path, max_rounds=5, local_epochs=2)
    best = trainer.server.checkpoints["GlobalCheckpoint"]
    assert best["round"] < 5
    for client in SIZES:
        same(deployed(trainer, client), best["model"])
    same(global_state(trainer), module_state(trainer.module()))
    assert differs(global_state(trainer), best["model"])


@pytest.mark.parametrize("factor", [0.5, 60.0])
def test_validation_never_gets_worse(tmp_path, factor):
    module, data = Toy("sgd", lr=0.1), toy_data(SIZES)
    options = {"epochs": 5, "lr_factor": factor}
    kept = federate(module, data, [LocalAdaptation(**options, keep_if_better=True)], root=tmp_path, max_rounds=2)
    scores = {(r.stage, r.client, r.round): r.value for r in kept.rows if (r.split, r.metric) == ("val", "val_loss")}
    free = federate(module, data, [LocalAdaptation(**options)], max_rounds=2)
    refused = 0
    for client in SIZES:
        assert scores["L1", client, 3] <= scores["G", client, 2] + 1e-7
        unchanged = not differs(deployed(kept, client), global_state(kept))
        refused += unchanged
        if not unchanged:
            same(deployed(kept, client), deployed(free, client))
    assert refused > 0 if factor > 1 else refused < 3


def test_what_to_monitor():
    module, data = Toy("sgd", lr=2.0), toy_data(SIZES)
    options = {"keep_if_better": True, "monitor": "val_acc", "mode": "max"}
    trainer = federate(module, data, [LocalAdaptation(3, **options)], max_rounds=2)
    for client in SIZES:
        loader = data.client_dataloader(client, "val")
        x, y = next(iter(loader))

        def accuracy(state, x=x, y=y):
            model = copy.deepcopy(module)
            model.load_state_dict(state)
            return (model(x).argmax(-1) == y).float().mean()

        assert accuracy(deployed(trainer, client)) >= accuracy(global_state(trainer))
    with pytest.warns(UserWarning, match="LocalAdaptation monitors 'f1', but validation gives"):
        federate(module, data, [LocalAdaptation(keep_if_better=True, monitor="f1")], max_rounds=1)


def test_a_copy_that_diverges_is_not_deployed():
    with pytest.warns(UserWarning, match=r"own model of client '0' holds NaN.*LocalAdaptation"):
        trainer = federate(Toy("sgd"), toy_data(SIZES), [LocalAdaptation(epochs=40, lr_factor=1e30)], max_rounds=1)
    same(deployed(trainer, "0"), global_state(trainer))


def test_corrections_do_not_act():
    """FedProx holds clients near the server in rounds, not in adaptation."""
    module, data = Toy("sgd"), toy_data(SIZES)
    same(
        *(
            deployed(federate(module, data, [*cb, LocalAdaptation(epochs=3)], max_rounds=1, local_steps=1), "1")
            for cb in ([], [FedProx(mu=9.0)])  # one step per round: FedProx has no effect on the global model
        )
    )


def test_beside_another_personal_method_of_receiving():
    """FLIU blends in rounds; adaptation starts from the blend."""
    trainer = federate(NormNet("adam"), toy_data(SIZES), [FLIU(gamma=0.5), LocalAdaptation()], max_rounds=2)
    assert differs(deployed(trainer, "1"), global_state(trainer))


def test_nothing_of_the_copies_travels():
    module, data = Toy("adam"), toy_data(SIZES)
    trainer, spy = spied(module, data, [LocalAdaptation()], max_rounds=2)
    plain, theirs = spied(module, data, max_rounds=2)
    assert len(spy.updates) == len(theirs.updates)
    assert trainer.server.costs.bytes_up == plain.server.costs.bytes_up
    assert all(message.returns == () for message in spy.messages if message.tag)


def test_restored_and_resumed(tmp_path):
    module, data = NormNet("adam"), toy_data(SIZES)
    whole, cut, again = cut_and_resumed(tmp_path, module, data, lambda: [LocalAdaptation()], max_rounds=2)
    restored = make_trainer(tmp_path / "whole", [LocalAdaptation()], max_rounds=2)
    restored.restore(module, data, whole.run.path)
    for client in SIZES:
        same(deployed(cut, client), global_state(cut))
        same(deployed(restored, client), deployed(whole, client))
        same(deployed(again, client), deployed(whole, client))


@pytest.mark.parametrize("participation", [1.0, 1])
def test_a_finished_federation_that_goes_on(tmp_path, participation):
    """Copies adapted after round 2 are not part of rounds 3 and 4, not even at clients that are not visited in them."""
    module, data = NormNet("adam"), toy_data(SIZES)
    options = {"participation": participation}
    whole = federate(module, data, [LocalAdaptation()], root=tmp_path / "a", max_rounds=4, **options)
    federate(module, data, [LocalAdaptation()], root=tmp_path / "b", max_rounds=2, **options)
    longer = make_trainer(tmp_path / "b", [LocalAdaptation()], max_rounds=4, **options)
    longer.fit(module, datamodule=data, resume="last")
    same(global_state(longer), global_state(whole))
    for client in SIZES:
        same(deployed(longer, client), deployed(whole, client))
    scores = [
        {
            (r.stage, r.client, r.round, r.split, r.metric): r.value
            for r in trainer.rows
            if r.round > 2 and r.split != "train"
        }
        for trainer in (longer, whole)
    ]
    assert scores[0] == scores[1]
    costs = [
        [{k: v for k, v in entry.items() if k != "seconds"} for entry in t.summary["per_round"]]
        for t in (longer, whole)
    ]
    assert costs[0] == costs[1] and [entry["round"] for entry in costs[0]] == [1, 2, 3, 4, 5]
    for name in ("bytes_up", "bytes_down", "local_steps_total", "terms"):
        assert longer.summary[name] == whole.summary[name]
    assert whole.summary["terms"]["fine_tuning_steps"] > 0


def test_a_client_without_samples_deploys_the_global_model():
    trainer = federate(Toy("adam"), toy_data({"0": 24, "1": 0}), [LocalAdaptation()], max_rounds=1)
    same(deployed(trainer, "1"), global_state(trainer))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: LocalAdaptation(epochs=-1), "LocalAdaptation got epochs=-1"),
        (lambda: LocalAdaptation(lr_factor=0.0), r"lr_factor=0.0. Use a number in \(0, inf\)"),
        (lambda: LocalAdaptation(part="top"), "part='top'. Use 'all', 'head'"),
        (lambda: LocalAdaptation(part="head", head=["fc"]), "'fc' is neither a name"),
        (lambda: LocalAdaptation(part="body", num_layers=2), r"a part of Toy by itself \(none\), and no"),
    ],
)
def test_wrong_use(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        federate(Toy(), toy_data(SIZES), [make()])
