"""`evaluation.clients`: some clients are scored, the same in every round; training does not change by a bit."""

from __future__ import annotations

import json

import pytest
import torch

from fedlightning.callbacks import APFL, FedAvg, FedPer, GlobalCheckpoint, HypCluster, LocalCheckpoint
from fedlightning.errors import ConfigurationError
from fedlightning.options import Evaluation
from fedlightning.report.build import make_page
from fedlightning.report.html import render
from fedlightning.study.finished_runs import load_run
from fedlightning.study.study import Study
from tests.helpers import Toy, federate, global_state, make_trainer, same, toy_data


def fit(*callbacks, root=None, module=None, **options):
    torch.manual_seed(0)
    options = {"max_rounds": 2, "participation": 4, "evaluation": 1, **options}
    return federate(module or Toy(), toy_data((12,) * 8), callbacks or [FedAvg()], root, **options)


def scored(trainer, **where):
    return {row.client for row in trainer.rows if all(getattr(row, name) == value for name, value in where.items())}


def rows_of(trainer, clients):
    return [row for row in trainer.rows if row.client in clients or row.split == "train"]


@pytest.mark.parametrize("method", [FedAvg, lambda: FedPer(personal=["net.3"]), lambda: HypCluster(num_clusters=2)])
def test_rows_are_those_of_a_run_that_scores_all(method):
    whole, part = (fit(method(), evaluation=Evaluation(clients=given)) for given in (None, 3))
    chosen = part.server.population.scored
    assert len(chosen) == 3
    same(global_state(part), global_state(whole))
    assert list(part.rows) == rows_of(whole, chosen)
    for trainer in (whole, part):
        trainer.test(verbose=False)
    local = [row for row in rows_of(whole, {*chosen, "all"}) if row.data == "local" or row.client == "all"]
    assert [row for row in part.rows if row.data == "local" or row.client == "all"] == local
    assert scored(part, split="test", stage="L1") == set(chosen)
    assert scored(part, stage="L2", split="val") <= set(chosen) and scored(part, stage="L2", split="train") - set(
        chosen
    )


def test_in_stacks():
    whole, part = (fit(engine="vectorized", evaluation=Evaluation(clients=given)) for given in (None, 3))
    expected = rows_of(whole, part.server.population.scored)
    assert [row.address for row in part.rows] == [row.address for row in expected]
    assert [row.value for row in part.rows] == pytest.approx([row.value for row in expected], abs=1e-5)


def test_the_draw_is_of_the_data_and_nested():
    drawn = {
        given: fit(evaluation=Evaluation(clients=given), max_rounds=1).server.population.scored
        for given in (2, 0.5, 1.0, 8)
    }
    assert len(drawn[2]) == 2 and len(drawn[0.5]) == 4 and set(drawn[2]) < set(drawn[0.5])
    assert drawn[1.0] == drawn[8] == [str(number) for number in range(8)]
    fit(LocalCheckpoint(), evaluation=Evaluation(clients=1.0), max_rounds=1)  # all of them are every client
    assert fit(APFL(), seed=7, evaluation=Evaluation(clients=2), max_rounds=1).server.population.scored == drawn[2]


def test_held_out_clients_are_all_scored():
    trainer = fit(evaluation=Evaluation(clients=1), held_out=3)
    assert scored(trainer, model="unseen") == set(trainer.server.held_out)
    assert len(scored(trainer, stage="L1", split="val") - set(trainer.server.held_out)) == 1


def test_selection_goes_by_those_that_are_scored(tmp_path):
    trainer = fit(GlobalCheckpoint(), evaluation=Evaluation(clients=3), root=tmp_path)
    best = trainer.server.checkpoints["GlobalCheckpoint"]
    values = [
        row.value for row in trainer.rows if (row.stage, row.metric, row.round) == ("G", "val_loss", best["round"])
    ]
    assert len(values) == 3 and best["score"] == pytest.approx(sum(values) / 3, abs=1e-6)
    trainer.test(verbose=False)
    assert scored(trainer, checkpoint="best_global", data="local") == set(trainer.server.population.scored)
    with pytest.raises(ConfigurationError, match=r"LocalCheckpoint goes by the scores of every client.*3 of 8"):
        fit(LocalCheckpoint(), evaluation=Evaluation(clients=3))


@pytest.mark.slow
def test_the_summary_and_the_report_say_so(tmp_path):
    folders = [
        fit(root=tmp_path / name, evaluation=Evaluation(clients=given))
        for name, given in (("a", 3), ("b", 3), ("c", None))
    ]
    for trainer in folders:
        trainer.test(verbose=False)
    a, b, c = (load_run(trainer.run.path, name) for trainer, name in zip(folders, "abc", strict=True))
    found = json.loads((folders[0].run.path / "summary.json").read_text())["evaluation"]
    assert (found["clients"], found["of"]) == (3, 8) and 0 < folders[0].summary["evaluation_seconds"] <= folders[
        0
    ].summary["seconds"]
    assert c.summary["evaluation"]["clients"] == 8 and "who" not in c.summary["evaluation"]
    assert not [one for one in Study([a, b]).problems if one.kind == "different_splits"]
    assert [one.run for one in Study([a, b, c]).problems if one.kind == "different_splits"] == ["c"]
    page = render(make_page({"": Study([a])}))
    assert "3 of 8 clients, the same in every round" in page


def test_drawn_clients_without_samples_are_refused_where_others_have_some():
    drawn = fit(evaluation=Evaluation(clients=2), max_rounds=1).server.population.scored
    for split in ("val", "test"):
        data = toy_data((12,) * 8)
        for client in drawn:
            data.tensors[client][split] = tuple(values[:0] for values in data.tensors[client][split])
        with pytest.raises(ConfigurationError, match=f"drew {', '.join(drawn)}, and none of them has {split} samples"):
            federate(Toy(), data, [GlobalCheckpoint()], evaluation=Evaluation(clients=2, every=1))
        pooled = Evaluation(clients=2, data=["pooled"], test_data=["pooled"])
        federate(Toy(), data, evaluation=pooled, max_rounds=1)
        federate(Toy(), data, evaluation=Evaluation(clients=3, every=1), max_rounds=1)


def test_a_resumed_run_scores_the_same_clients(tmp_path):
    whole = fit(evaluation=Evaluation(clients=3), max_rounds=3, root=tmp_path / "whole")
    fit(evaluation=Evaluation(clients=3), max_rounds=3, root=tmp_path / "half", max_time={"seconds": 0})
    for given in (None, 4):
        other = make_trainer(
            tmp_path / "half", [FedAvg()], max_rounds=3, participation=4, evaluation=Evaluation(clients=given)
        )
        with pytest.raises(ValueError, match=r"evaluation\.clients was 3 and is"):
            other.fit(Toy(), toy_data((12,) * 8), resume="last")
    torch.manual_seed(0)
    again = make_trainer(tmp_path / "half", [FedAvg()], max_rounds=3, participation=4, evaluation=Evaluation(clients=3))
    again.fit(Toy(), toy_data((12,) * 8), resume="last")
    assert list(again.rows) == list(whole.rows)


@pytest.mark.parametrize("wrong", [0, -1, 0.0, 1.5, True, "all", float("nan")])
def test_refused(wrong):
    with pytest.raises(ConfigurationError, match="Evaluation got clients="):
        make_trainer(None, evaluation=Evaluation(every=0, clients=wrong))


def means(trainer, **where):
    """Clients behind each mean of `summary.json`."""
    rows = [row for row in trainer.summary["results"] if all(row[name] == value for name, value in where.items())]
    assert rows
    return {frozenset(row["per_client"]) for row in rows}


def scored_again(folder, given, score="test", **options):
    trainer = make_trainer(
        folder.parent.parent, [FedAvg()], participation=4, evaluation=Evaluation(clients=given), **options
    )
    getattr(trainer, score)(Toy(), toy_data((12,) * 8), run=folder, verbose=False)
    return trainer


def test_a_run_tested_at_other_clients_has_means_over_one_set(tmp_path):
    folder = fit(evaluation=Evaluation(clients=3), root=tmp_path).run.path
    drawn = {
        given: frozenset(fit(evaluation=Evaluation(clients=given), max_rounds=1).server.population.scored)
        for given in (2, 3, 5)
    }
    everybody = frozenset(map(str, range(8)))
    scored_again(folder, 3)
    for given, clients in ((5, drawn[5]), (2, drawn[2]), (None, everybody)):
        with pytest.warns(UserWarning, match="scored 3 of 8 clients in training, and . are scored now"):
            trainer = scored_again(folder, given)
        for stage in ("G", "L1"):
            assert means(trainer, split="test", stage=stage, data="local") == {clients}, (given, stage)
        assert all(some <= clients & drawn[3] for some in means(trainer, stage="L2"))
        assert means(trainer, split="val", stage="L1") == {clients & drawn[3]}
        found = json.loads((folder / "summary.json").read_text())["evaluation"]
        assert found["clients"] == len(clients) and found["in_training"]["clients"] == 3
    trainer = scored_again(folder, 3)
    assert means(trainer, split="test", stage="L1", data="local") == {drawn[3]}
    assert "in_training" not in trainer.summary["evaluation"]


def test_validation_at_others_than_in_training_is_refused(tmp_path):
    folder = fit(evaluation=Evaluation(clients=3), root=tmp_path).run.path
    with (
        pytest.warns(UserWarning),
        pytest.raises(ConfigurationError, match=r"scores of 3 of 8 clients .* 5 are scored now"),
    ):
        scored_again(folder, 5, "validate")
    with pytest.warns(UserWarning):
        trainer = scored_again(folder, 2, "validate")
    assert means(trainer, split="val", stage="L1") == {frozenset(trainer.server.population.scored)}


def test_selection_does_not_compare_scores_of_different_clients(tmp_path):
    data = toy_data((12,) * 8)
    folder = fit(GlobalCheckpoint(), evaluation=Evaluation(clients=3), root=tmp_path).run.path
    options = {"max_rounds": 3, "participation": 4}
    for given, name in ((5, "GlobalCheckpoint"), (None, "GlobalCheckpoint")):
        other = make_trainer(tmp_path, [GlobalCheckpoint()], evaluation=Evaluation(clients=given), **options)
        with pytest.raises(ConfigurationError, match=f"{name} compares .* has scored 3 of 8 clients and would score"):
            other.fit(Toy(), data, resume=folder, allow_config_change=True)
    plain = fit(evaluation=Evaluation(clients=3), root=tmp_path / "plain").run.path
    other = make_trainer(plain.parent.parent, [FedAvg()], evaluation=Evaluation(clients=5), **options)
    with pytest.warns(UserWarning, match=r"evaluation\.clients was 3 and is 5"):
        other.fit(Toy(), data, resume=plain, allow_config_change=True)
    assert {len(clients) for clients in means(other, split="val", stage="L1")} == {5}
    assert (
        other.summary["evaluation"] == {**other.summary["evaluation"], "clients": 5}
        and "in_training" not in other.summary["evaluation"]
    )
