"""FederatedEarlyStopping and Budget: when a run ends, that it ends as any other, and that a resumed run decides alike."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from fedlightning.callbacks import (
    Budget,
    FedAsync,
    FedAvg,
    FederatedEarlyStopping,
    FedPer,
    FedRep,
    GlobalCheckpoint,
    LocalAdaptation,
    LocalCheckpoint,
)
from fedlightning.contract import Facts, FederatedCallback
from fedlightning.options import Evaluation
from fedlightning.report.build import build_report
from fedlightning.server.costs import Costs
from fedlightning.server.loop import Synchronous
from fedlightning.virtual_time import Asynchronous, FixedSpeed, VirtualClock, WaitFree
from tests.callbacks.test_model_selection import SIZES, Scripted
from tests.helpers import Toy, make_trainer, same, toy_data
from tests.sites.helpers import Line, at_sites, sites, together


def module():
    torch.manual_seed(0)
    return Toy()


NAN, INF = float("nan"), float("inf")


def stopped_in(script, rounds=9, **options):
    """Train on scripted losses of the server's model, and return the round after which the run ended."""
    Scripted.script, Scripted.data = script, toy_data(SIZES, batch_size=16)
    callbacks = [FederatedEarlyStopping(stage="G", **options), GlobalCheckpoint()]
    trainer = make_trainer(None, callbacks, max_rounds=rounds, evaluation=1)
    trainer.fit(Scripted(), datamodule=Scripted.data)
    found = trainer.summary.get("stopped")
    assert trainer.rounds_done == (rounds if found is None else found["round"])
    return None if found is None else found["round"]


def alike(*losses):
    """Give all three clients the same losses; the first is that of a model that was never averaged."""
    return {key: [99.0, *losses] for key in SIZES}


@pytest.mark.parametrize(
    ("losses", "options", "ends"),
    [
        ([5, 4, 3, 2, 1, 0.9, 0.8, 0.7, 0.6], {"patience": 1}, None),
        ([5, 4, 4, 4, 4, 4, 4, 4, 4], {"patience": 3}, 6),  # a tie is not an improvement
        ([5, 4, 4, 3, 4, 4, 4, 4, 4], {"patience": 2}, 7),  # and an improvement begins anew
        (
            [5, 4.9, 4.8, 4.4, 4.3, 4.2, 4.1, 4, 4],
            {"patience": 3, "min_delta": 0.5},
            8,
        ),  # from the best, not from the last
        ([1, 2, 3, 3, 3, 3, 3, 3, 3], {"patience": 2, "mode": "max"}, 6),
        (
            [5, NAN, INF, 4, NAN, NAN, 4, 4, 4],
            {"patience": 2},
            4,
        ),  # a loss that is NaN or infinite is not an improvement
        ([5, NAN, 4, NAN, NAN, NAN, 4, 4, 4], {"patience": 3}, 7),
        ([NAN, 5, 4, 3, 2, 1, 0.9, 0.8, 0.7], {"patience": 1}, None),  # whatever is finite is better than that
        ([INF, NAN, 5, 4, 4, 4, 4, 4, 4], {"patience": 2}, 7),
    ],
)
def test_it_ends_when_nothing_was_better_for_so_many_evaluations(losses, options, ends):
    assert stopped_in(alike(*losses), **options) == ends


@pytest.mark.parametrize(
    ("criterion", "ends"),
    [("mean", None), ("worst client", 5), ("share improved", 5)],
)
def test_what_must_improve(criterion, ends):
    script = {"0": [9, 8, 7, 6, 5, 4, 3], "1": [9, 9, 9, 9, 9, 9, 9], "2": [9, 9, 9, 9, 9, 9, 9]}
    script = {client: [99.0, *losses] for client, losses in script.items()}
    few = {"min_samples": 1} if criterion == "worst client" else {}
    assert stopped_in(script, rounds=7, patience=3, criterion=criterion, **few) == ends


def test_the_worst_client_has_enough_samples():
    server = SimpleNamespace(
        scores={(None, "L1", "local", "val", "val_loss"): {}},
        score=lambda metric, stage: {"small": (9.0, 3), "large": (1.0, 20)},
    )
    assert FederatedEarlyStopping(criterion="worst client")._values(server) == {"large": 1.0}
    assert set(FederatedEarlyStopping(criterion="mean")._values(server)) == {"small", "large"}
    with pytest.warns(
        UserWarning, match=r"criterion='worst client'.* none of 2 clients has min_samples=21 validation samples"
    ):
        assert not FederatedEarlyStopping(criterion="worst client", min_samples=21)._values(server)


def test_scores_are_compared_over_the_clients_that_have_both():
    early = FederatedEarlyStopping()
    assert early.better({"a": 0.4}, {"a": 0.5, "b": 0.1})  # b was not scored now: its good score counts in neither mean
    assert not early.better({"a": 0.6, "b": 0.1}, {"a": 0.5})  # nor does that of one that is scored for the first time
    assert not early.better({"b": 0.1}, {"a": 0.5})
    assert early.better({"a": 0.4, "b": 0.1}, {"a": 0.5, "b": NAN})
    assert not FederatedEarlyStopping(mode="max").better({"a": NAN}, {"a": 0.5})
    assert FederatedEarlyStopping(mode="max").better({"a": NAN, "b": 0.6}, {"a": 0.9, "b": 0.5})  # undefined: a gap


def test_a_run_that_ends_early_ends_as_any_other(tmp_path):
    callbacks = [FedPer(personal=["net.3"]), LocalAdaptation(), LocalCheckpoint(), Budget(max_steps=11)]
    ended = make_trainer(tmp_path, callbacks, max_rounds=9, evaluation=2, save_state=5, name="ended")
    ended.fit(module(), datamodule=toy_data((8, 8)))
    rounds = ended.rounds_done
    assert 1 < rounds < 9 and ended.summary["stopped"]["round"] == rounds
    assert ended.federation.final_done  # the visits after the last round were made
    plain = make_trainer(tmp_path, callbacks[:-1], max_rounds=rounds, evaluation=2, save_state=5, name="plain")
    plain.fit(module(), datamodule=toy_data((8, 8)))
    assert list(ended.rows) == list(plain.rows)  # the last round's test scores of L2, too
    same(ended.server.model, plain.server.model)
    names = [sorted(path.name for path in (one.run.path / "checkpoints").rglob("*.ckpt")) for one in (ended, plain)]
    assert names[0] == names[1] != []
    again = make_trainer(tmp_path, callbacks, max_rounds=9, evaluation=2, save_state=5, name="ended")
    again.fit(module(), datamodule=toy_data((8, 8)), resume="last")
    assert again.rounds_done == rounds and again.summary["stopped"] == ended.summary["stopped"]
    same(again.server.model, ended.server.model)
    assert len(again.rows) == len(ended.rows)


class Interrupts(FederatedCallback):
    """Ends the process after a round."""

    facts = Facts(takes_part=False)

    def __init__(self, after):
        self.after = after

    def on_round_start(self, server):
        if server.round == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [2, 4])
def test_a_resumed_run_decides_as_one_that_was_not_interrupted(tmp_path, after):
    def trainer(name, *more):
        callbacks = [
            FederatedEarlyStopping(patience=5, mode="max"),
            GlobalCheckpoint(),
            Budget(max_steps=10_000),
            *more,
        ]
        return make_trainer(tmp_path, callbacks, max_rounds=12, evaluation=1, name=name)

    whole, cut, resumed = trainer("whole"), trainer("cut", Interrupts(after)), trainer("cut")
    whole.fit(module(), datamodule=toy_data((8, 8)))
    with pytest.raises(KeyboardInterrupt):
        cut.fit(module(), datamodule=toy_data((8, 8)))
    resumed.fit(module(), datamodule=toy_data((8, 8)), resume="last")
    assert whole.rounds_done == resumed.rounds_done < 12
    assert whole.summary["stopped"] == resumed.summary["stopped"]
    same(whole.server.model, resumed.server.model)


@pytest.mark.parametrize(
    ("loop", "callbacks"),
    [
        (Synchronous(VirtualClock(FixedSpeed(1.0))), []),
        (Asynchronous(VirtualClock(FixedSpeed(1.0)), at_end="flush"), [FedAsync()]),
        (Asynchronous(VirtualClock(FixedSpeed(1.0)), arrivals=2), []),
    ],
)
@pytest.mark.fast_cases(2)
def test_budgets_hold_in_every_loop(loop, callbacks):
    def run(*budget):
        trainer = make_trainer(None, [*callbacks, *budget], max_rounds=12, evaluation=5, loop=loop)
        trainer.fit(module(), datamodule=toy_data((8, 8, 8)))
        return trainer

    whole = run()
    for limit, spent in (
        ({"max_seconds": 0.6 * whole.server.costs.virtual_time}, lambda server: server.costs.virtual_time),
        ({"max_steps": int(0.6 * whole.server.costs.steps)}, lambda server: server.costs.steps),
        (
            {"max_megabytes": 0.6 * (whole.server.costs.bytes_up + whole.server.costs.bytes_down) / 1e6},
            lambda server: (server.costs.bytes_up + server.costs.bytes_down) / 1e6,
        ),
    ):
        ended = run(Budget(**limit))
        assert ended.summary["stopped"]["by"] == "Budget"
        assert 0.3 * next(iter(limit.values())) < spent(ended.server) and ended.rounds_done < 12
        if not getattr(loop, "flushes", False):  # what is in flight in the end comes on top
            assert spent(ended.server) <= next(iter(limit.values()))
        last = [row for row in ended.rows if row.round == ended.rounds_done]
        assert {"G", "L1"} <= {row.stage for row in last if row.split == "val"}


@pytest.mark.parametrize(
    ("costs", "ends"),
    [
        ([10, 2, 2, 2], (3, 1)),  # there is room for one more as dear as the first, and for no two
        ([2, 2, 10, 2], (2, 0)),
        ([5, 5, 5, 5], (1, 1)),
        ([1, 1, 1, 1], None),
    ],
)
@pytest.mark.parametrize("limit", ["max_steps", "max_seconds", "max_megabytes"])
def test_a_budget_goes_by_the_dearest_round_so_far(limit, costs, ends):
    ended = []
    server = SimpleNamespace(costs=Costs(), state={}, round=0)
    server.stop = lambda by, reason, after: ended.append((server.round, after))
    budget = Budget(**{limit: {(10, 2, 2, 2): 35, (2, 2, 10, 2): 20}.get(tuple(costs), 15)})
    for server.round, cost in enumerate(costs):
        server.costs.bytes_up += cost * 10**6
        server.costs.virtual_time += cost
        server.costs.steps += cost
        budget.on_round_end(server)
    assert ended[:1] == ([] if ends is None else [ends])


def test_a_first_round_beyond_the_budget_is_scored_all_the_same():
    trainer = make_trainer(None, [Budget(max_steps=1)], max_rounds=12, evaluation=5)
    trainer.fit(module(), datamodule=toy_data((8, 8)))
    assert trainer.rounds_done == 1 and {row.stage for row in trainer.rows if row.split == "val"} == {"G", "L1"}


def test_no_server_no_difference():
    from fedlightning.callbacks import SWIFT

    callbacks = [SWIFT(), FederatedEarlyStopping(patience=1, mode="max"), LocalCheckpoint()]
    trainer = make_trainer(None, callbacks, max_rounds=30, evaluation=1, local_steps=1, loop=WaitFree())
    trainer.fit(module(), datamodule=toy_data((8, 8, 8)))
    assert trainer.rounds_done < 30 and trainer.summary["stopped"]["by"] == "FederatedEarlyStopping"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "vectorized"])
def test_engines_agree_on_the_end(tmp_path, engine):
    def run(engine):
        callbacks = [FederatedEarlyStopping(patience=2, mode="max"), GlobalCheckpoint()]
        trainer = make_trainer(tmp_path / engine, callbacks, max_rounds=9, evaluation=1, engine=engine)
        trainer.fit(module(), datamodule=toy_data((8, 8)))
        return trainer.summary["stopped"]

    assert run("sequential") == run(engine)


def test_sites_end_as_one_process_does(tmp_path):
    early = FederatedEarlyStopping(patience=1, mode="max")
    given = {
        "max_rounds": 6,
        "evaluation": Evaluation(every=1, stages=["G", "L1"]),
        "others": [early, GlobalCheckpoint()],
    }
    here = together(tmp_path / "here", FedAvg(), **given)
    line = Line(sites(tmp_path / "sites", FedAvg(), **given))
    there = at_sites(line, tmp_path / "there", FedAvg(), **given)
    assert here.rounds_done == there.rounds_done < 6
    assert here.summary["stopped"] == there.summary["stopped"]
    same(here.server.model, there.server.model)


@pytest.mark.parametrize(
    ("callbacks", "options", "reason"),
    [
        ([FederatedEarlyStopping()], {"evaluation": 0}, "has nothing to select by: evaluation.every is 0"),
        ([FederatedEarlyStopping(stage="L2")], {"participation": 1}, "participation=1 leaves some .*stage='L1'"),
        ([Budget(max_seconds=3)], {}, r"limits virtual seconds \(max_seconds\), and this loop has no clock"),
    ],
)
def test_what_cannot_end_a_run_is_refused_before_it(callbacks, options, reason):
    trainer = make_trainer(None, callbacks, **{"max_rounds": 2, "evaluation": 1} | options)
    with pytest.raises(ValueError, match=reason):
        trainer.fit(module(), datamodule=toy_data((8, 8)))


def test_a_budget_without_a_limit_and_an_unknown_monitor():
    with pytest.raises(ValueError, match="Budget got none of max_megabytes, max_seconds, max_steps: it has no limit"):
        Budget()
    trainer = make_trainer(None, [FederatedEarlyStopping("loss")], max_rounds=2, evaluation=1)
    with pytest.raises(ValueError, match=r"monitors 'loss', but validation gives \['val_"), pytest.warns(UserWarning):
        trainer.fit(module(), datamodule=toy_data((8, 8)))


@pytest.mark.parametrize(
    ("callbacks", "options"),
    [
        ([FederatedEarlyStopping(), GlobalCheckpoint(stage="G")], {"evaluation": Evaluation(stages=["G"])}),
        ([FederatedEarlyStopping(stage="G"), FedPer(personal=["net.3"]), LocalCheckpoint(smooth=1)], {}),
    ],
)
def test_a_stage_that_is_not_scored_is_refused(callbacks, options):
    trainer = make_trainer(None, callbacks, max_rounds=2, **{"evaluation": 1} | options)
    with pytest.raises(ValueError, match=r"goes by scores of stage (L1|G), and this run has those of "):
        trainer.fit(module(), datamodule=toy_data((8, 8)))


def test_the_earliest_end_counts():
    class Later(FederatedCallback):
        def on_federation_start(self, server):
            server.stop(self, "it is to end then", after=4)

    trainer = make_trainer(None, [Later(), Budget(max_steps=9)], max_rounds=9)
    trainer.fit(module(), datamodule=toy_data((8, 8)))
    assert trainer.summary["stopped"]["by"] == "Budget" and trainer.rounds_done < 5


def test_a_run_that_had_all_its_rounds_was_not_ended_early(tmp_path):
    trainer = make_trainer(tmp_path, [Budget(max_steps=2)], max_rounds=1)
    trainer.fit(module(), datamodule=toy_data((8, 8)))
    assert "stopped" not in trainer.summary
    again = make_trainer(tmp_path, [Budget(max_steps=2)], max_rounds=3)
    again.fit(module(), datamodule=toy_data((8, 8)), resume="last")
    assert again.rounds_done == 1 and again.summary["stopped"]["by"] == "Budget"


def test_a_decision_of_the_last_round_holds_in_a_longer_run(tmp_path):
    """Its one more round begins before what was done because the run seemed over."""

    def run(name, rounds, **resume):
        callbacks = [
            FederatedEarlyStopping(patience=1, min_delta=100),
            FedRep(personal=["net.3"]),
            LocalCheckpoint(smooth=1),
        ]
        trainer = make_trainer(tmp_path, callbacks, max_rounds=rounds, evaluation=1, name=name)
        trainer.fit(module(), datamodule=toy_data((8, 8)), **resume)
        return trainer

    whole, cut = run("whole", 9), run("cut", 2)
    assert whole.rounds_done == 3 and cut.rounds_done == 2
    again = run("cut", 9, resume="last")
    assert again.rounds_done == 3
    assert again.summary["stopped"] == whole.summary["stopped"]
    same(again.server.model, whole.server.model)
    for client in ("0", "1"):
        same(again.module(client).state_dict(), whole.module(client).state_dict())


def test_nothing_keeps_the_best_models_is_said():
    trainer = make_trainer(None, [FederatedEarlyStopping()], max_rounds=1, evaluation=1)
    with pytest.warns(UserWarning, match=r"nothing keeps the best models. Add LocalCheckpoint\(\)"):
        trainer.fit(module(), datamodule=toy_data((8, 8)))


@pytest.mark.slow
def test_summary_and_report_say_why(tmp_path, capsys):
    callbacks = [FedAvg(), Budget(max_steps=9)]
    trainer = make_trainer(tmp_path, callbacks, max_rounds=9, evaluation=1)
    trainer.fit(module(), datamodule=toy_data((8, 8)))
    trainer.test(verbose=False)
    told = json.loads((trainer.run.path / "summary.json").read_text())["stopped"]
    assert told == {"round": trainer.rounds_done, "by": "Budget", "reason": told["reason"]}
    build_report(tmp_path / "report", [trainer.run.path])
    assert told["reason"] in (tmp_path / "report" / "report.html").read_text()
