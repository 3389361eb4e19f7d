"""LocalCheckpoint and GlobalCheckpoint: what is selected, when, and that it can be opened again."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

import fedlightning
from fedlightning import FederatedCallback
from fedlightning.algorithm import FirstStep
from fedlightning.callbacks import (
    CFL,
    FLIU,
    IFCA,
    PIFL,
    FedAMP,
    FedGroup,
    FedPer,
    FedSoft,
    FeSEM,
    GlobalCheckpoint,
    LocalCheckpoint,
)
from fedlightning.callbacks.model_selection import ValidationScores
from fedlightning.contract.callback_list import CallbackList
from fedlightning.deployment.checkpoints import load
from fedlightning.server.evaluation import ScoringError
from fedlightning.tensors import module_state
from tests.helpers import NormNet, Toy, differs, federate, global_state, same, spied, toy_data
from tests.server.faulty import FailingHook, Fault

SIZES = {"0": 24, "1": 40, "2": 16}


class Scripted(Toy):
    """A weight that says how often the module was averaged, and validation losses by a script of the tests."""

    script: dict = {}

    def __init__(self):
        super().__init__("sgd", lr=0.0)
        self.count = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.0 * self.count

    def on_train_epoch_end(self):
        with torch.no_grad():
            self.count += 1.0

    def validation_step(self, batch, batch_idx):
        client = next(c for c in SIZES if torch.equal(batch[0], Scripted.data.tensors[c]["val"][0]))
        losses = self.script[client]
        self.log("val_loss", losses[int(self.count)])


def run(script, callback, rounds, **options):
    Scripted.script, Scripted.data = script, toy_data(SIZES, batch_size=16)
    return federate(Scripted(), Scripted.data, [callback], max_rounds=rounds, evaluation=1, **options)


NAN = float("nan")


@pytest.mark.parametrize(
    ("losses", "mode", "best"),
    [
        ([9, 3.0, 1.0, 2.0], "min", 2),
        ([9, 1.0, 1.0, 2.0], "min", 1),  # a tie keeps the earlier
        ([9, 2.0, 3.0, 3.0], "max", 2),
        ([9, NAN, 5.0, NAN], "min", 2),
        ([9, 3.0, float("-inf"), 2.0], "min", 3),
    ],
)
@pytest.mark.parametrize("kind", [LocalCheckpoint, GlobalCheckpoint])
def test_the_running_best_is_kept(losses, mode, best, kind):
    papers = {"smooth": 1, "min_samples": 0} if kind is LocalCheckpoint else {}
    trainer = run(dict.fromkeys(SIZES, losses), kind(mode=mode, **papers), 3)
    entries = [trainer.server.checkpoints.get("GlobalCheckpoint")]
    if kind is LocalCheckpoint:
        entries = [trainer.store.get(client).checkpoints["LocalCheckpoint"] for client in SIZES]
    for entry in entries:
        assert (entry["round"], entry["score"]) == (best, losses[best])
        assert float(entry["model"]["count"]) == best


def test_every_client_chooses_for_itself():
    script = {"0": [0, 1.0, 2.0, 3.0], "1": [0, 3.0, 2.0, 1.0], "2": [0, 3.0, 1.0, 2.0]}
    trainer = run(script, LocalCheckpoint(smooth=1), 3)
    assert [trainer.store.get(c).checkpoints["LocalCheckpoint"]["round"] for c in SIZES] == [1, 3, 2]


@pytest.mark.parametrize(
    ("smooth", "min_samples", "best"),
    [
        (1, 0, 2),  # the luckiest round
        (3, 0, 4),  # the mean of 1, 3 and 2 is lowest
        (3, 11, 6),  # 10 samples are too few
        (9, 0, 6),  # never so many
    ],
)
def test_a_round_is_judged_by_several_evaluations_and_few_samples_by_none(smooth, min_samples, best):
    losses = [99, 9.0, 1.0, 3.0, 2.0, 1.5, 8.0]
    trainer = run(dict.fromkeys(SIZES, losses), LocalCheckpoint(smooth=smooth, min_samples=min_samples), 6)
    entry = trainer.store.get("1").checkpoints["LocalCheckpoint"]
    assert (entry["round"], float(entry["model"]["count"])) == (best, best)
    before = [entry["recent"], entry["score"]]
    trainer.validate(verbose=False)  # the last model once more
    entry = trainer.store.get("1").checkpoints["LocalCheckpoint"]
    assert [entry["recent"], entry["score"]] == before


@pytest.mark.parametrize(
    ("mean", "scores"),
    [("train", [(24 * 5 + 40 * 1 + 16 * 1) / 80, (24 * 1 + 40 * 3 + 16 * 2) / 80]), ("uniform", [7 / 3, 6 / 3])],
)
def test_the_federations_choice_weights_the_clients(mean, scores):
    """Round 1 wins by training samples, round 2 uniformly."""
    trainer = run({"0": [0, 5.0, 1.0], "1": [0, 1.0, 3.0], "2": [0, 1.0, 2.0]}, GlobalCheckpoint(mean=mean), 2)
    kept = trainer.server.checkpoints["GlobalCheckpoint"]
    assert kept["score"] == pytest.approx(min(scores))
    assert kept["round"] == scores.index(min(scores)) + 1


def test_clients_without_a_value_do_not_count():
    trainer = run({"0": [0, NAN, 1.0], "1": [0, 3.0, 4.0], "2": [0, 3.0, 4.0]}, GlobalCheckpoint(mean="uniform"), 2)
    kept = trainer.server.checkpoints["GlobalCheckpoint"]
    assert (kept["round"], kept["score"]) == (1, 3.0) or kept["score"] == 3.0


def test_before_or_after_aggregation_is_explicit():
    """L2 models have one epoch of their own that L1 models do not have yet."""
    options = {"max_rounds": 2, "evaluation": 1}
    data = toy_data(SIZES)
    trained = spied(Toy("adam", lr=0.01), data, [LocalCheckpoint(stage="L2")], **options)
    trainer, spy = trained
    for client in SIZES:
        kept = trainer.store.get(client).checkpoints["LocalCheckpoint"]
        assert kept["stage"] == "L2"
        same(kept["model"], spy.of_round(kept["round"] - 1)[client].state)
    trainer, spy = spied(Toy("adam", lr=0.01), data, [LocalCheckpoint(stage="L1")], **options)
    for client in SIZES:
        kept = trainer.store.get(client).checkpoints["LocalCheckpoint"]
        same(kept["model"], spy.rounds[kept["round"] - 1])


def test_the_global_choice_by_the_trained_models_losses():
    trainer, spy = spied(Toy("adam"), toy_data(SIZES), [GlobalCheckpoint(stage="L2")], max_rounds=3, evaluation=1)
    kept = trainer.server.checkpoints["GlobalCheckpoint"]
    same(kept["model"], spy.rounds[kept["round"] - 1])


def test_absent_clients_choose_too():
    """L1 is evaluated for everybody, so a client that did not take part may find the new model best."""
    trainer = federate(
        Toy("adam", lr=0.01), toy_data(SIZES), [LocalCheckpoint()], participation=1, max_rounds=3, evaluation=1
    )
    for client in SIZES:
        assert trainer.store.get(client).checkpoints["LocalCheckpoint"]["round"] >= 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    callbacks = [GlobalCheckpoint(), LocalCheckpoint(), FLIU(gamma=0.5)]
    root = tmp_path_factory.mktemp("run")
    trainer = federate(NormNet("adam", lr=0.3), toy_data(SIZES), callbacks, root=root, max_rounds=4)
    return trainer, trainer.test()


def test_exports_open_as_the_users_class(finished):
    trainer, _ = finished
    folder = trainer.run.path / "checkpoints"
    best = trainer.server.checkpoints["GlobalCheckpoint"]["model"]
    for opened in (NormNet.load_from_checkpoint(folder / "global.ckpt"), load(folder / "global.ckpt", trust=["tests"])):
        assert type(opened) is NormNet
        assert opened.hparams.lr == 0.3
        same(module_state(opened), best)
        assert not opened.training or opened is not None
    for client in SIZES:
        kept = trainer.store.get(client).checkpoints["LocalCheckpoint"]["model"]
        path = folder / "clients" / f"{client}.ckpt"
        same(module_state(NormNet.load_from_checkpoint(path)), kept)
        same(module_state(fedlightning.load(path, trust=["tests"])), kept)


def test_exports_are_native_lightning_checkpoints(finished):
    trainer, _ = finished
    found = torch.load(trainer.run.path / "checkpoints" / "global.ckpt", weights_only=False)
    assert {"state_dict", "hyper_parameters", "pytorch-lightning_version"} <= set(found)
    assert found["fedlightning"]["checkpoint"] == "best_global"


def test_the_trainer_hands_out_what_was_selected(finished):
    trainer, _ = finished
    kept = trainer.store.get("1").checkpoints["LocalCheckpoint"]
    same(module_state(trainer.module("1", "best_local")), kept["model"])
    same(module_state(trainer.module(None, "best_global")), trainer.server.checkpoints["GlobalCheckpoint"]["model"])
    assert differs(module_state(trainer.module("1")), global_state(trainer))
    with pytest.raises(ValueError, match=r"no checkpoint 'best'.*best_local"):
        trainer.module("1", "best")


def test_testing_scores_each_of_them(finished):
    trainer, results = finished
    found = {(row["checkpoint"], row["model"], row["stage"]) for row in results}
    assert found == {
        ("latest", "global", "G"),
        ("latest", "personal", "L1"),
        ("latest", "personal", "L2"),
        ("best_global", "global", "G"),
        ("best_local", "personal", "L1"),
    }
    for row in results:
        assert row["split"] == "test"
        assert set(row["per_client"]) <= {*SIZES, "all"}
    local = next(
        r for r in results if (r["checkpoint"], r["data"], r["metric"]) == ("best_local", "local", "test_loss")
    )
    for client in SIZES:
        x, y = trainer.federation.engine.runner.data.tensors[client]["test"]
        module = trainer.module(client, "best_local").eval()
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(module(x), y)
        assert local["per_client"][client] == pytest.approx(loss.item(), abs=1e-5)


def test_testing_chooses_nothing(finished):
    """Test scores never reach a selection."""
    trainer, _ = finished
    before = {client: trainer.store.get(client) for client in SIZES}
    trainer.test()
    trainer.validate()
    for client, record in before.items():
        assert trainer.store.get(client) is record


def test_one_of_them_by_name(finished):
    trainer, _ = finished
    assert {row["checkpoint"] for row in trainer.test("best_local")} == {"best_local"}
    assert {row["checkpoint"] for row in trainer.test("latest")} == {"latest"}
    with pytest.raises(ValueError, match=r"no checkpoint 'best'.*\['best_global', 'best_local', 'latest'\]"):
        trainer.test("best")


def test_without_a_global_model_it_is_refused_before_training():
    class Visited(FederatedCallback):
        def on_visit_start(self, client):
            raise AssertionError("training has begun")

    with pytest.raises(
        ValueError, match=r"GlobalCheckpoint needs a global model.*stays with the clients.*LocalCheckpoint"
    ):
        federate(Toy(), toy_data(SIZES), [FedPer(), GlobalCheckpoint(), Visited()])
    for method in (IFCA(), FedGroup(), FeSEM(), FedSoft(), PIFL(monitor="val_loss"), FedAMP()):
        with pytest.raises(
            ValueError, match=f"needs a global model, but {method.key}'s server keeps several. Use LocalCheckpoint"
        ):
            federate(Toy(), toy_data(SIZES), [method, GlobalCheckpoint(), Visited()])
    with pytest.raises(ValueError, match=r"CFL splits the model for all .* GlobalCheckpoint selects .*LocalCheckpoint"):
        federate(Toy(), toy_data(SIZES), [CFL(), GlobalCheckpoint(), Visited()])


@pytest.mark.parametrize("callback", [GlobalCheckpoint(monitor="val_f1"), LocalCheckpoint(monitor="val_f1")])
def test_an_unknown_metric_is_named(callback):
    with pytest.raises(
        (ValueError, ScoringError), match=r"monitors 'val_f1', but validation gives \['val_acc', 'val_loss'\]"
    ):
        federate(Toy(), toy_data(SIZES), [callback], evaluation=1, max_rounds=1)


# -- what must not win -------------------------------------------------------------------------------------------------


class FakeServer:
    """Scores of one round after another, for the selection alone."""

    def __init__(self):
        self.round, self.num_samples, self.failures, self.checkpoints = -1, {"a": 10, "b": 10, "c": 10}, [], {}
        self.callbacks = CallbackList([])

    def next_round(self, values):
        self.round += 1
        self.found = {client: (value, 5) for client, value in values.items()}
        self.scores = {(None, "G", "local", "val", "val_loss"): self.found}

    def global_module(self, client):
        return Toy()

    def score(self, metric, stage):
        return self.found


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_model_that_breaks_on_one_client_does_not_win(bad):
    server, checkpoint = FakeServer(), GlobalCheckpoint()
    for values in ({"a": 0.8, "b": 0.9, "c": 1.0}, {"a": 0.135, "b": bad, "c": 0.997}):
        server.next_round(values)
        checkpoint.on_round_end(server)
    assert server.checkpoints["GlobalCheckpoint"]["round"] == 1


def test_an_undefined_metric_is_a_gap_and_a_client_that_was_not_scored_is_none():
    server, checkpoint = FakeServer(), GlobalCheckpoint(mode="max")
    server.next_round({"a": 0.8, "b": float("nan"), "c": 0.6})
    with pytest.warns(UserWarning, match=r"mean val_loss of 2 of 3 clients: it is not defined for b"):
        checkpoint.on_round_end(server)
    assert server.checkpoints["GlobalCheckpoint"]["score"] == pytest.approx(0.7)
    server.next_round({"a": 0.9, "c": 0.9})
    server.failures.append({"round": 2, "client": "b", "where": "G", "reason": "it broke"})
    checkpoint.on_round_end(server)
    assert server.checkpoints["GlobalCheckpoint"]["round"] == 1


def test_rounds_with_different_gaps_are_compared_by_the_clients_that_have_both():
    server, checkpoint = FakeServer(), GlobalCheckpoint(mode="max")
    for values in ({"a": 0.8, "b": NAN, "c": 0.2}, {"a": 0.7, "b": NAN, "c": NAN}, {"a": 0.9, "b": 0.1, "c": NAN}):
        server.next_round(values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint.on_round_end(server)
    best = server.checkpoints["GlobalCheckpoint"]  # round 2: worse on `a`, though its mean is higher; round 3 is better
    assert (best["round"], best["score"]) == (3, pytest.approx(0.5))


def test_a_held_out_client_that_could_not_be_scored_does_not_choose():
    server, checkpoint = FakeServer(), GlobalCheckpoint()
    server.next_round({"a": 0.8, "b": 0.9, "c": 1.0})
    server.failures.append({"round": 1, "client": "unseen", "where": "G", "reason": "it broke"})
    checkpoint.on_round_end(server)
    assert server.checkpoints["GlobalCheckpoint"]["round"] == 1


def test_a_round_in_which_scoring_succeeded_at_a_further_try_can_be_selected():
    server, checkpoint = FakeServer(), GlobalCheckpoint()
    server.next_round({"a": 0.8, "b": 0.9, "c": 1.0})
    server.failures.append(
        {"round": 1, "client": "b", "where": "G", "reason": "it broke", "decision": "tried again (2 of 2)"}
    )
    checkpoint.on_round_end(server)
    assert server.checkpoints["GlobalCheckpoint"]["round"] == 1


@pytest.mark.parametrize(("retry", "best"), [(False, 3), (True, 2)])
def test_a_client_that_failed_in_training_is_no_reason_to_select_a_round(tmp_path, retry, best):
    """Client 1, whose losses are the largest, fails in round 2: the mean over the two others must not win."""
    script = {"0": [0, 4.0, 1.0, 2.0], "1": [0, 9.0, 2.0 if retry else 8.0, 5.0], "2": [0, 4.0, 1.0, 2.0]}
    Scripted.script, Scripted.data = script, toy_data(SIZES, batch_size=16)
    callbacks = [GlobalCheckpoint(stage="L2"), FailingHook(Fault(tmp_path, "ValueError", 1, round=1), "on_visit_start")]
    options = {"failures": "retry"} if retry else {}
    with pytest.warns(UserWarning, match="client '1' failed"):
        trainer = federate(Scripted(), Scripted.data, callbacks, max_rounds=3, evaluation=1, **options)
    assert trainer.server.checkpoints["GlobalCheckpoint"]["round"] == best


def test_losses_of_different_clients_are_not_compared():
    with pytest.raises(ValueError, match=r"compares the losses of the clients that trained, and participation=2"):
        federate(Toy(), toy_data(), [GlobalCheckpoint(stage="L2")], participation=2, evaluation=1)


@pytest.mark.parametrize("metric", ["val_acc", "val/acc", "val_f1"])
def test_the_lowest_accuracy_is_no_goal_without_a_warning(metric):
    steps = SimpleNamespace(
        run=SimpleNamespace(evaluate_every=1),
        data=SimpleNamespace(has_split=lambda split: True),
        template=Toy(),
        first_step=lambda: FirstStep(logged=(metric, "val_loss")),
    )

    def warned(callback):
        steps.warn = (texts := []).append
        ValidationScores().check(callback, steps)
        return texts

    (text,) = warned(LocalCheckpoint(monitor=metric))
    assert f"monitors '{metric}' with mode='min', so its lowest value is the best" in text
    assert not warned(LocalCheckpoint(monitor=metric, mode="max")) and not warned(LocalCheckpoint())


def test_without_validation_data_a_mean_of_evaluations_is_no_matter():
    with pytest.warns(UserWarning) as told:
        federate(Toy(), toy_data(val=0), [LocalCheckpoint()], max_rounds=2, evaluation=1)
    assert not any("judges a round" in str(one.message) for one in told)


@pytest.mark.parametrize(
    ("options", "why"), [({"evaluation": 0}, "evaluation.every is 0"), ({}, "no client has valid")]
)
def test_nothing_to_select_by_is_said_at_start(options, why):
    data = toy_data(val=12 if options else 0)
    with pytest.warns(UserWarning, match=f"LocalCheckpoint has nothing to select by: {why}"):
        federate(Toy(), data, [LocalCheckpoint()], max_rounds=1, **{"evaluation": 1} | options)
