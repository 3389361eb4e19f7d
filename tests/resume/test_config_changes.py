"""Runs that are resumed with clients that they did not have."""

from __future__ import annotations

import json

import pytest
import torch

from fedlightning import FederatedCallback
from fedlightning.algorithm import Facts, Newcomers
from fedlightning.callbacks import (
    CFL,
    IFCA,
    L2GD,
    PIFL,
    SCAFFOLD,
    Dapper,
    FedAdam,
    FedAMP,
    FedAvg,
    FedAvgM,
    FedPer,
    GlobalCheckpoint,
    HeteroFL,
    LocalCheckpoint,
    pFedKnow,
)
from tests.helpers import Spy, Toy, ToyData, close, make_trainer, same, toy_data

SIZES = (24, 40, 16, 32)


def fit(root, callbacks, rounds, join=False, resume=False, sizes=SIZES, module=None, **options):
    spy = Spy()
    options = {"name": "a", "version": "v", "max_rounds": rounds, "evaluation": 1} | options
    trainer = make_trainer(root, [spy, *callbacks], **options)
    spy.trainer = trainer
    torch.manual_seed(0)
    more = {"resume": "last"} if resume or join else {}
    trainer.fit(module or Toy("sgd"), datamodule=toy_data(sizes), **more, allow_new_clients=join)
    return trainer, spy


def test_what_a_callback_cannot_take_is_refused_when_clients_join(tmp_path):
    class Wary(FederatedCallback):
        facts = Facts(newcomers=Newcomers(join=True))

        def check(self, setup):
            if len(setup.run.clients) > 3:
                raise ValueError("a fourth client is one too many")

    fit(tmp_path, [Wary()], 1, held_out=["3"])
    with pytest.raises(ValueError, match="one too many"):
        fit(tmp_path, [Wary()], 2, join=True)


@pytest.mark.slow
def test_held_out_clients_join_and_the_others_train_as_they_would_have(tmp_path):
    _, alone = fit(tmp_path / "alone", [FedAvg()], 3, held_out=["3"])
    fit(tmp_path / "run", [FedAvg()], 2, held_out=["3"])
    with pytest.warns(UserWarning, match="From round 3 on client '3' take part"):
        trainer, joined = fit(tmp_path / "run", [FedAvg()], 3, join=True)
    assert trainer.server.clients == ["0", "1", "2", "3"]
    for client in "012":
        same(joined.of_round(2)[client].state, alone.of_round(2)[client].state)
    sizes, sent = trainer.server.num_samples, joined.of_round(2)
    for name, value in trainer.server.model.items():
        mean = sum(sizes[client] * sent[client].state[name].double() for client in "0123") / sum(sizes.values())
        close({name: value}, {name: mean.to(value.dtype)})
    summary = json.loads((trainer.run.path / "summary.json").read_text())
    assert summary["config_changes"] == ["from round 3: client '3' take part"] and summary["num_clients"] == 4
    table = (trainer.run.path / "metrics.csv").read_text().splitlines()
    rounds = {line.split(",")[0] for line in table if ",L1,personal,latest,local,val,3," in line}
    assert rounds == {"3"}


def test_clients_of_new_data_join_twice_and_the_run_resumes_without_a_word(tmp_path, recwarn):
    fit(tmp_path, [FedAvg()], 1, sizes=SIZES[:2])
    fit(tmp_path, [FedAvg()], 2, join=True, sizes=SIZES[:3])
    trainer, _ = fit(tmp_path, [FedAvg()], 3, join=True)
    changes = json.loads((trainer.run.path / "summary.json").read_text())["config_changes"]
    assert changes == ["from round 2: client '2' take part", "from round 3: client '3' take part"]
    recwarn.clear()
    fit(tmp_path, [FedAvg()], 4, resume=True)
    assert not [warning for warning in recwarn if "take part" in str(warning.message)]


def test_public_data_of_clients_that_join_are_no_change_of_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr(ToyData, "public_fraction", 0.25)
    fit(tmp_path, [Dapper(grid=[0.5])], 1, held_out=["3"])
    trainer, _ = fit(tmp_path, [Dapper(grid=[0.5])], 2, join=True)
    assert trainer.summary["config_changes"] == ["from round 2: client '3' take part"]
    monkeypatch.setattr(ToyData, "public_fraction", 0.5)
    with pytest.raises(ValueError, match=r"data \(public\) was '28 samples .* and is '56 samples"):
        fit(tmp_path, [Dapper(grid=[0.5])], 3, resume=True)


class Stop(FederatedCallback):
    """Ends the run before the fourth round."""

    facts = Facts(takes_part=False)

    def on_round_start(self, server):
        if server.round == 3:
            raise KeyboardInterrupt


def test_interrupted_and_resumed_after_a_join_is_uninterrupted(tmp_path):
    callbacks, some = [FedPer(), LocalCheckpoint()], {"participation": 0.5}
    for name in ("whole", "parts"):
        fit(tmp_path / name, callbacks, 2, held_out=["3"], **some)
    whole, _ = fit(tmp_path / "whole", callbacks, 5, join=True, **some)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "parts", [*callbacks, Stop()], 5, join=True, **some)
    parts, _ = fit(tmp_path / "parts", callbacks, 5, resume=True, **some)
    same(whole.server.model, parts.server.model)
    assert (whole.run.path / "metrics.csv").read_text() == (parts.run.path / "metrics.csv").read_text()


def test_without_the_switch_new_clients_are_refused_by_name(tmp_path):
    fit(tmp_path, [FedAvg()], 1, sizes=SIZES[:2])
    with pytest.raises(ValueError, match=r"The data have clients '2', '3', which the run in .* with allow_new_clients"):
        fit(tmp_path, [FedAvg()], 2, resume=True)


@pytest.mark.parametrize(
    ("sizes", "options", "sentence"),
    [
        ({"0": 24, "2": 16, "3": 32}, {}, "'1', the data does not. Use the run's own data .* or begin a new run"),
        (SIZES, {"held_out": ["1"]}, "trained client '1', which held_out keeps out of training now"),
        ({"0": 24, "1": 40, "2": 17, "3": 32}, {"batch_size": 4}, "another configuration"),
    ],
    ids=["gone", "held out now", "another size"],
)
@pytest.mark.fast_cases(2)
def test_nothing_else_may_change(tmp_path, sizes, options, sentence):
    fit(tmp_path, [FedAvg()], 1, sizes=SIZES[:3])
    data = toy_data(sizes, **{key: value for key, value in options.items() if key == "batch_size"})
    given = {key: value for key, value in options.items() if key != "batch_size"}
    trainer = make_trainer(tmp_path, [Spy(), FedAvg()], name="a", version="v", max_rounds=2, evaluation=1, **given)
    with pytest.raises(ValueError, match=sentence):
        trainer.fit(Toy("sgd"), datamodule=data, resume="last", allow_new_clients=True)


@pytest.mark.parametrize("now", [{"sizes": {"0": 24, "2": 16, "3": 32}}, {"held_out": ["1"]}], ids=["gone", "held out"])
def test_clients_that_were_never_drawn_may_not_leave_either(tmp_path, now):
    _, spy = fit(tmp_path, [FedAvg()], 1, sizes=SIZES[:3], participation=1, seed=3)
    assert "1" not in spy.of_round(0)
    with pytest.raises(ValueError, match=r"not client '1' of its own. Clients may join a run; nobody may leave it"):
        fit(tmp_path, [FedAvg()], 2, join=True, participation=1, seed=3, **now)


def test_a_training_set_that_has_changed_beside_a_join_is_refused(tmp_path):
    fit(tmp_path, [FedAvg()], 1, sizes=SIZES[:3])
    with pytest.raises(ValueError, match=r"another configuration: .*data"):
        fit(tmp_path, [FedAvg()], 2, join=True, sizes=(24, 40, 17, 32))


def test_nobody_joins_a_run_that_is_over(tmp_path):
    """They would not train, and test() of this trainer would have them among those that did."""
    fit(tmp_path, [FedAvg()], 1, sizes=SIZES[:3])
    with pytest.raises(
        ValueError, match=r"All 1 rounds of the run in .* are done, so client '3' cannot train .* above 1"
    ):
        fit(tmp_path, [FedAvg()], 1, join=True)


@pytest.mark.parametrize("method", [CFL, FedAMP])
def test_methods_with_state_that_clients_have_a_place_in_refuse(tmp_path, method):
    fit(tmp_path, [method()], 2, sizes=SIZES[:3])
    with pytest.raises(ValueError, match=f"{method.__name__} keeps state at the server.*clients join .3."):
        fit(tmp_path, [method()], 3, join=True)


@pytest.mark.parametrize(
    ("make", "option"), [(lambda: HeteroFL(rates=[1.0, 0.5]), "rates"), (lambda: pFedKnow(prune=[0.0, 0.5]), "prune")]
)
def test_what_is_dealt_in_turn_stays_with_the_clients_that_are_there(tmp_path, make, option):
    fit(tmp_path, [make()], 1, held_out=["1", "3"])
    sentence = f"{make().key} deals {option}=.* with client '1' between them, client '2' would change from"
    with pytest.raises(ValueError, match=sentence):
        fit(tmp_path, [make()], 2, join=True, held_out=["3"])
    fit(tmp_path / "last", [make()], 1, held_out=["3"])
    fit(tmp_path / "last", [make()], 2, join=True)  # behind the others: nobody's place changes


class Remembers(FederatedCallback):
    """Has state of its own at the server and no word on joining."""

    def on_round_end(self, server):
        server.state[self.key] = {"clients": list(server.clients)}


def test_own_callbacks_with_state_are_refused_too(tmp_path):
    fit(tmp_path, [Remembers()], 1, sizes=SIZES[:3])
    with pytest.raises(ValueError, match="Remembers keeps state at the server"):
        fit(tmp_path, [Remembers()], 2, join=True)


@pytest.mark.parametrize(
    "make", [FedAdam, FedAvgM, lambda: L2GD(p=0.5), lambda: IFCA(num_clusters=2), SCAFFOLD], ids=lambda make: make().key
)
def test_methods_whose_state_is_nobodys_go_on(tmp_path, make):
    more = {"local_steps": 1} if make().key == "L2GD" else {"local_steps": 3}
    fit(tmp_path, [make()], 2, sizes=SIZES[:3], **more)
    trainer, spy = fit(tmp_path, [make()], 4, join=True, **more)
    assert "3" in spy.of_round(2) and "3" in spy.of_round(3) and trainer.federation.rounds_done == 4


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_scaffolds_c_stays_the_mean_of_all_c_i(tmp_path, weighting):
    """Those of new clients are 0 until they train; half of the clients train in a round."""
    make = lambda: [SCAFFOLD(weighting=weighting)]  # noqa: E731
    fit(tmp_path, make(), 2, sizes=SIZES[:3], local_steps=3)
    trainer, spy = fit(tmp_path, make(), 3, join=True, local_steps=3)
    weights = trainer.server.num_samples if weighting == "samples" else dict.fromkeys("0123", 1)
    own = {client: spy.records[-1][client].state["SCAFFOLD"]["c"] for client in "0123"}
    for name, c in spy.states[-1]["SCAFFOLD"]["c"].items():
        mean = sum(weights[client] * own[client][name].double() for client in "0123") / sum(weights.values())
        torch.testing.assert_close(c.double(), mean, atol=1e-6, rtol=1e-5)


def test_new_clients_of_pi_fl_get_the_tokens_that_the_others_had(tmp_path):
    make = lambda: [PIFL(monitor="val_acc", utility="gradient")]  # noqa: E731
    before, _ = fit(tmp_path, make(), 2, sizes=SIZES[:3])
    had = sum(before.server.state["PIFL"]["balances"].values())
    trainer, _ = fit(tmp_path, make(), 3, join=True)
    own = trainer.server.state["PIFL"]
    assert sum(own["balances"].values()) == pytest.approx(had + own["tokens"], abs=1e-9)
    assert {entry["client"] for entry in own["ledger"] if entry["round"] == 3} == set("0123")


def test_the_best_model_is_selected_anew(tmp_path):
    before, _ = fit(tmp_path, [FedAvg(), GlobalCheckpoint()], 2, sizes=SIZES[:3])
    kept = next(iter(before.server.checkpoints.values()))
    kept["score"] = -1.0  # nothing would ever be better
    with pytest.warns(UserWarning, match="GlobalCheckpoint selects anew"):
        trainer, _ = fit(tmp_path, [FedAvg(), GlobalCheckpoint()], 3, join=True)
    assert next(iter(trainer.server.checkpoints.values()))["round"] == 3
