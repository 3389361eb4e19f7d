"""Held-out clients: kept out of training, scored as unseen clients, and of no effect on anybody else."""

from __future__ import annotations

import json
import warnings
from contextlib import suppress

import pytest
import torch
from lightning.pytorch import LightningModule

from fedlightning.algorithm import NEWCOMER, ModelSelection
from fedlightning.callbacks import (
    APFL,
    CFL,
    IFCA,
    PIFL,
    FedAMP,
    FedAvg,
    FedPer,
    FedSoft,
    FeSEM,
    GlobalCheckpoint,
    HeteroFL,
    Local,
    LocalAdaptation,
    LocalCheckpoint,
)
from fedlightning.client.data_summary import limited  # noqa: F401
from fedlightning.contract import FederatedCallback
from fedlightning.errors import ConfigurationError
from fedlightning.options import Evaluation, Processes
from fedlightning.testing.runs import StopAfter, Stopped, assert_same
from fedlightning.testing.toys import ToyData as CheckData
from fedlightning.testing.toys import ToyModule
from fedlightning.testing.toys import federate as checked
from tests.helpers import Toy, federate, make_trainer, toy_data
from tests.server.test_evaluation import score_by_hand

SIZES = {"a": 24, "b": 40, "c": 16, "d": 20}


def unseen(trainer, **wanted):
    rows = [row for row in trainer.rows if row.model == "unseen"]
    return [row for row in rows if all(getattr(row, key) == value for key, value in wanted.items())]


# -- who is held out -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("held_out", "text"),
    [
        (1.0, "A float is a share"),
        (-1, "A float is a share"),
        (True, "A float is a share"),
        ("a", "A float is a share"),
        (float("nan"), "A float is a share"),
        ([1.5], "a list their ids"),
        (["a", "a"], "twice"),
    ],
)
def test_what_names_no_clients_is_refused(held_out, text):
    with pytest.raises(ConfigurationError, match=text):
        make_trainer(None, held_out=held_out)


@pytest.mark.parametrize(
    ("held_out", "text"), [(["x"], "has client 'x'"), (4, "all 4 clients"), (0.9, "all 4 clients")]
)
def test_clients_that_are_not_there_and_all_clients_are_refused(held_out, text):
    with pytest.raises(ConfigurationError, match=text):
        federate(Toy(), toy_data(SIZES), held_out=held_out)


def test_clients_that_could_never_be_scored_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="none of them has validation or test data"):
        federate(Toy(), toy_data(SIZES, val=0, test=0), root=tmp_path, held_out=["a"])


def test_the_draw_is_of_the_data_and_grows():
    drawn = {}
    for seed in range(4):
        data = toy_data(SIZES)
        data.seed = seed
        for share in (0.25, 0.5):
            trainer = federate(Toy(), data, held_out=share, seed=7 * seed, max_rounds=1)
            drawn[seed, share] = trainer.server.held_out
            assert sorted([*trainer.server.held_out, *trainer.client_ids]) == sorted(SIZES)
        assert set(drawn[seed, 0.25]) < set(drawn[seed, 0.5])
    assert len({tuple(drawn[seed, 0.5]) for seed in range(4)}) > 1
    again = federate(Toy(), toy_data(SIZES), held_out=0.5, seed=1, max_rounds=1)
    assert again.server.held_out == drawn[0, 0.5]


# -- what they are scored on -----------------------------------------------------------------------------------------
def test_their_scores_are_those_of_the_global_model_on_their_own_data(tmp_path):
    data = toy_data(SIZES)
    trainer = federate(Toy(), data, [GlobalCheckpoint()], tmp_path, held_out=["b", "d"], evaluation=2, max_rounds=3)
    assert {row.round for row in unseen(trainer)} == {2, 3}
    trainer.test(verbose=False)
    for split in ("val", "test"):
        for client in "bd":
            by_hand = score_by_hand(trainer.server.model, data, client, split)
            for stage in ("G", "L1"):
                found = unseen(trainer, round=3, stage=stage, split=split, client=client, checkpoint="latest")
                assert {row.metric: row.value for row in found} == pytest.approx(by_hand, rel=1e-5)
                assert {row.num_samples for row in found} == {10 if split == "val" else 12}
    best = unseen(trainer, checkpoint="best_global", split="test")
    assert {row.client for row in best} == {"b", "d"} and {row.stage for row in best} == {"G"}
    for row in trainer.results:
        assert (
            set(row["per_client"]) == ({"b", "d"} if row["model"] == "unseen" else {"a", "c"})
            or row["data"] == "pooled"
        )
    summary = json.loads((trainer.run.path / "summary.json").read_text())
    assert set(summary["held_out"]["clients"]) == {"b", "d"} and summary["num_clients"] == 2
    assert set(summary["data"]["clients"]) == {"a", "c"} == set(summary["num_samples"])


def test_no_mean_of_others_holds_them(tmp_path):
    module = Toy()
    trainer = federate(module, toy_data(SIZES), root=tmp_path, held_out=["b"], evaluation=1)
    others = federate(
        module, toy_data({name: size for name, size in SIZES.items() if name != "b"}), root=tmp_path / "2"
    )
    assert {metric: float(value) for metric, value in trainer.callback_metrics.items()} == {
        metric: float(value) for metric, value in others.callback_metrics.items()
    }
    for key, values in trainer.server.scores.items():
        assert set(values) == {"a", "c", "d"}, key
    trainer.test(verbose=False)
    others.test(verbose=False)
    pooled = [row for row in trainer.rows if row.data == "pooled"]
    assert pooled == [row for row in others.rows if row.data == "pooled"]
    assert {row.num_samples for row in pooled} == {36}


class Watch(ModelSelection):
    """Notes whose training batches a module sees, and who was evaluated."""

    def __init__(self) -> None:
        pass

    def on_client_evaluated(self, client, stage, split, metrics, module):
        client.checkpoints["Watch"] = {"name": "watch", "model": {}, "round": 1, "stage": "L1"}
        assert client.id != "site3"


def test_callbacks_neither_see_their_scores_nor_keep_models_of_them(tmp_path):
    trainer = checked(Watch(), CheckData(), tmp_path, held_out=["site3"], evaluation=Evaluation(every=1, stages=["L1"]))
    assert unseen(trainer) and "site3" not in trainer.store and set(trainer.store) == {"site0", "site1", "site2"}
    selected = federate(Toy(), toy_data(SIZES), [LocalCheckpoint()], tmp_path / "2", held_out=["b"])
    assert "b" not in selected.store


def test_stages_are_those_of_the_run(tmp_path):
    trainer = federate(
        Toy(),
        toy_data(SIZES),
        root=tmp_path,
        held_out=["b"],
        evaluation=Evaluation(stages=["G"]),
        max_rounds=1,
    )
    assert {row.stage for row in unseen(trainer)} == {"G"}
    never = federate(Toy(), toy_data(SIZES), root=tmp_path / "2", held_out=["b"], evaluation=0, max_rounds=1)
    assert not unseen(never)
    never.test(verbose=False)
    assert {row.split for row in unseen(never)} == {"test"}


def test_visits_after_the_last_round_are_not_theirs(tmp_path):
    trainer = federate(Toy(), toy_data(SIZES), [LocalAdaptation()], tmp_path, held_out=["b"], max_rounds=2)
    rows = [row for row in trainer.results if row["model"] == "unseen" and row["stage"] == "L1"]
    assert rows and {row.round for row in unseen(trainer, stage="L1")} == {1, 2, 3}
    assert [row.value for row in unseen(trainer, round=3)] == [row.value for row in unseen(trainer, round=2, stage="G")]
    assert "b" not in trainer.store


# -- what a method gives them ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", [Local(), FedAMP(), FeSEM(), CFL()], ids=lambda method: method.key)
def test_methods_without_a_model_for_them_say_so(method, tmp_path):
    way_out = r" Onboarding places it by a visit\." if method.facts.newcomers.place else ""
    with pytest.warns(UserWarning, match=rf"{method.key} .*never trained\.{way_out} The held-out clients stay out"):
        trainer = federate(Toy(), toy_data(SIZES), [method], tmp_path, held_out=["b"], max_rounds=1)
    assert not unseen(trainer) and trainer.client_ids == ["a", "c", "d"]
    assert trainer.summary["held_out"]["refused"].startswith(method.key)


def test_what_stays_with_clients_is_told_once(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = federate(Toy(), toy_data(SIZES), [FedPer(personal="net.3")], tmp_path, held_out=["b"], max_rounds=2)
    told = [str(one.message) for one in caught if "untrained" in str(one.message)]
    assert len(told) == 1 and "'net.3.weight'" in told[0]
    start = trainer.server.module.state_dict()
    for name, value in trainer.module("b").state_dict().items():
        assert torch.equal(value, start[name] if name.startswith("net.3") else trainer.server.model[name])
    assert {row.stage for row in unseen(trainer)} == {"L1"}  # there is no global model


@pytest.mark.parametrize("method", [IFCA(num_clusters=3), FedSoft(num_clusters=3)], ids=lambda method: method.key)
def test_clusters_give_the_centre_that_fits_them(method, tmp_path):
    data = toy_data(SIZES)
    trainer = federate(Toy(), data, [method], tmp_path, held_out=["b"], max_rounds=3)
    server = trainer.server
    keys = [key for key in server.models if key != "global" or method.key == "IFCA"]
    x, y = data.tensors["b"]["train"]
    losses = []
    for key in keys:
        module = Toy()
        module.load_state_dict(server.models[key])
        with torch.no_grad():
            losses.append(torch.nn.functional.cross_entropy(module.eval()(x), y, reduction="none"))
    table = torch.stack(losses)
    by_loss, by_samples = table.mean(1).argmin(), table.argmin(0).bincount(minlength=3).argmax()
    best = keys[int(by_loss if method.key == "IFCA" else by_samples)]
    for name, value in trainer.module("b").state_dict().items():
        assert torch.equal(value, server.models[best][name])


def test_pi_fl_mixes_the_clusters_for_them(tmp_path):
    method = PIFL(importance="matching", performance_slots=None, ledger=False, incentive=False)
    trainer = federate(Toy(), toy_data(SIZES), [method], tmp_path, held_out=["b"], max_rounds=2)
    found = trainer.module("b").state_dict()
    one, two = (trainer.server.models[key] for key in method.clusters)
    shares = {name: (value - two[name]) / (one[name] - two[name]) for name, value in found.items()}
    share = torch.cat([value.flatten() for value in shares.values()])
    assert share.std() < 1e-3 and 0 <= float(share.mean()) <= 1


def test_apfl_gives_them_the_global_model_and_heterofl_the_whole_one(tmp_path):
    for number, method in enumerate((APFL(alpha=0.5), HeteroFL(rates=[0.5], static_bn=False))):
        trainer = federate(Toy(), toy_data(SIZES), [method], tmp_path / str(number), held_out=["b"], max_rounds=1)
        for name, value in trainer.module("b").state_dict().items():
            assert torch.equal(value, trainer.server.model[name])
    assert any(
        value.shape != trainer.server.model[name].shape for name, value in trainer.module("a").state_dict().items()
    )


class Fussy(FederatedCallback):
    """An algorithm of a user that knows the clients of the beginning only."""

    def on_broadcast(self, server, job, message):
        server.clients.index(job.client)


def test_an_algorithm_that_cannot_serve_them_costs_their_scores_only(tmp_path):
    with pytest.warns(UserWarning, match="unseen client 'b' was not scored at stage L1"):
        trainer = federate(Toy(), toy_data(SIZES), [Fussy()], tmp_path, held_out=["b"], failures="stop")
    assert {row.stage for row in unseen(trainer)} == {"G"}
    assert {(one["client"], one["where"], one["decision"]) for one in trainer.summary["failures"]} == {
        ("b", "L1", "not scored")
    }


class Picky(Toy):
    """Cannot be evaluated on one client's data."""

    def validation_step(self, batch, batch_idx):
        if batch[0].shape[0] == 5:
            raise ValueError("five of them")
        return super().validation_step(batch, batch_idx)


def test_one_that_cannot_be_scored_is_noted_whatever_the_policy(tmp_path):
    data = toy_data(SIZES)
    data.tensors["b"]["val"] = tuple(part[:5] for part in data.tensors["b"]["val"])
    with pytest.warns(UserWarning, match="unseen client 'b' was not scored at stage G on local val data.*five of them"):
        trainer = federate(Picky(), data, [], tmp_path, held_out=["b", "c"], failures="stop")
    assert {row.client for row in unseen(trainer)} == {"c"} and trainer.rounds_done == 2


# -- engines and resuming --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["vectorized", pytest.param("processes", marks=pytest.mark.slow)])
def test_engines_agree(engine, tmp_path):
    options = {"held_out": ["site1", "site3"], "evaluation": 1, "max_rounds": 2}
    for number, method in enumerate((None, IFCA())):
        plain = checked(method, CheckData(), tmp_path / f"a{number}", **options)
        other = checked(
            method,
            CheckData(),
            tmp_path / f"b{number}",
            engine=Processes(2) if engine == "processes" else engine,
            **options,
        )
        mine, theirs = ({row.address: row.value for row in unseen(t)} for t in (plain, other))
        assert mine and theirs == (pytest.approx(mine, abs=1e-5) if engine == "vectorized" else mine)


def test_a_resumed_run_equals_an_uninterrupted_one_and_holds_out_the_same(tmp_path):
    options = {"max_rounds": 3, "save_state": 1, "evaluation": 1, "held_out": 1}
    whole = checked(FedAvg(), CheckData(), tmp_path / "whole", **options)
    with suppress(Stopped):
        checked(FedAvg(), CheckData(), tmp_path / "parts", others=[StopAfter(1)], **options)
    for changed in (2, None, ["site0", "site1"]):
        with pytest.raises(
            ValueError, match=r"other held-out clients: held_out|which held_out keeps out|did not train"
        ):
            checked(FedAvg(), CheckData(), tmp_path / "parts", resume=True, **options | {"held_out": changed})
    given = make_trainer(tmp_path / "parts", [FedAvg()], **{"local_steps": 3} | options | {"held_out": None})
    with pytest.raises(ValueError, match="did not train"):
        given.fit(ToyModule(), CheckData(), resume="last", allow_config_change=True)
    resumed = checked(FedAvg(), CheckData(), tmp_path / "parts", resume=True, **options)
    assert_same(whole, resumed, "held out")
    assert unseen(resumed, round=1) and unseen(resumed, round=3)


@pytest.mark.parametrize(
    ("first", "then", "text"),
    [
        (["b"], None, "did not train client 'b'"),
        (["b", "c"], ["c"], "did not train client 'b'"),
        (["b"], ["c"], "which held_out keeps out of training now"),
        (None, ["b"], "which held_out keeps out of training now"),
    ],
)
def test_a_run_is_scored_with_the_clients_it_held_out(first, then, text, tmp_path):
    """Clients that never trained would be among those that did, in their means."""
    data, module = toy_data(SIZES), Toy()
    run = federate(module, data, root=tmp_path / "1", held_out=first, max_rounds=1).run.path
    other = make_trainer(tmp_path / "2", held_out=then)
    for ask in (other.test, other.validate):
        with pytest.raises(ValueError, match=text):
            ask(module, data, run=run, verbose=False)
    with pytest.raises(ValueError, match=text):
        other.onboard(toy_data({"x": 8}), model=module, datamodule=data, run=run, verbose=False)
    moved = toy_data(SIZES, val=30, test=40)  # the same clients may have got other data
    assert make_trainer(tmp_path / "3", held_out=first).test(module, moved, run=run, verbose=False)


def test_tags_of_messages(tmp_path):
    """Methods know who is new by the tag."""
    seen = []

    class Note(FederatedCallback):
        def on_broadcast(self, server, job, message):
            seen.append((job.client, job.tag == NEWCOMER == message.tag, job.work))

    federate(Toy(), toy_data(SIZES), [Note()], tmp_path, held_out=["b"], max_rounds=1)
    assert ("b", True, 0) in seen and all(new == (client == "b") for client, new, _ in seen)


def test_a_dry_run_names_them():
    trainer = make_trainer(None, held_out=["b"], evaluation=1)
    found = trainer.dry_run(Toy(), toy_data(SIZES))
    assert [(one.id, one.val, one.tried) for one in found.held_out] == [("b", 10, True)]
    assert [one.id for one in found.clients] == ["a", "c", "d"] and "held out, never trained: 1 clients (b)" in str(
        found
    )


def test_models_are_modules(tmp_path):
    """A held-out client's model can be asked for; its data were never trained on."""
    trainer = federate(Toy(), toy_data(SIZES), root=tmp_path, held_out=["b"], max_rounds=1)
    view = trainer.client("b")
    assert isinstance(view.module, LightningModule) and view.num_samples == 40
    with pytest.raises(ValueError, match="There is no client 'x'"):
        trainer.module("x")
