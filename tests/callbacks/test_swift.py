"""SWIFT: sheet B entry 3.5; what all gossip shares is in test_dfedavg.py."""

from __future__ import annotations

import pytest
import torch

from fedlightning.callbacks import DSGD, SWIFT, FedAvg
from fedlightning.options import FailurePolicy, Processes
from fedlightning.run.job_timeline import read_trips
from fedlightning.tensors import module_state
from fedlightning.topology import make_graph, mixing_weights
from fedlightning.virtual_time import FixedLink, FixedSpeed, LogNormalSpeed, TraceAvailability, VirtualClock, WaitFree
from tests.callbacks.test_dfedavg import NAMES, A, B, nodes
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    close,
    federate,
    make_trainer,
    mostly_slow,
    quadratic_data,
    same,
    toy_data,
)


def clock(slow=None, **link):
    return VirtualClock(FixedSpeed(1.0, slowdown=slow), FixedLink(**link))


SETTINGS = {"local_steps": 1, "optimizer_state": "keep"}
CASES = {
    "SWIFT": Case(
        SWIFT(),
        arguments=SETTINGS | {"loop": WaitFree(clock()), "participation": 1.0},
        skip={"one_client": "plain training has no neighbours, so the loop refuses it; see the test without edges"},
    )
}
KEPT = {
    "SWIFT": Kept("SWIFT", server=("models", "steps"), arguments={"optimizer_state": "keep", "loop": WaitFree(clock())})
}


def by_hand(seconds, until, topology="ring", s=0, delay=0.0, fresh_only=False):
    """An event simulation of its own, in small ticks of time: models by node, and how many steps each has taken."""
    a, b = (torch.tensor(rows, dtype=torch.float64) for rows in (A, B))
    graph = make_graph(topology, NAMES)
    w = mixing_weights("swift", graph)
    x = [torch.zeros(3, dtype=torch.float64) for _ in NAMES]
    taken, seen = [0] * 5, [dict.fromkeys(range(5), -1) for _ in NAMES]
    sent = {(j, 0): (0.0, x[j]) for j in range(5)}  # sender and step: when it is there, and what
    now = 0.0
    while now < until:
        now += 0.5
        ending = [i for i in range(5) if abs((taken[i] + 1) * seconds[i] - now) < 1e-9]
        news = {}
        for i in ending:
            step = -0.1 * a[i] * (x[i] - b[i])
            new = x[i]
            if (taken[i] + 1) % (s + 1) == 0:
                new, own = torch.zeros_like(x[i]), 1.0
                for j in range(5):
                    if j != i and w[i, j] > 0:
                        latest = max(c for (k, c), (there, _) in sent.items() if k == j and there <= now)
                        if fresh_only and latest <= seen[i][j]:
                            continue
                        seen[i][j] = latest
                        new = new + w[i, j] * sent[j, latest][1]
                        own -= float(w[i, j])
                new = new + own * x[i]
            news[i] = new + step
        for i, new in news.items():
            x[i] = new
            taken[i] += 1
            sent[i, taken[i]] = (now + delay * graph.degree[NAMES[i]], new)  # one copy after the other
    return torch.stack(x), taken


@pytest.mark.parametrize(
    ("slow", "options", "delay"),
    [
        ({}, {}, 0.0),
        ({"1": 3.0, "3": 1.5, "4": 2.0}, {}, 0.0),
        ({"1": 3.0, "3": 1.5}, {"s": 1}, 0.0),
        ({"0": 2.0, "2": 2.5}, {"topology": "star"}, 1.7),
        ({"1": 5.0, "3": 1.5}, {"fresh_only": True}, 0.0),
    ],
)
@pytest.mark.fast_cases(3)
def test_against_another_simulation(slow, options, delay):
    size = 24  # bytes of a model
    loop = WaitFree(clock(slow, up=size / delay if delay else None), period=3.0)
    trainer = federate(Quadratic(), quadratic_data(A, B), [SWIFT(**options)], max_rounds=4, loop=loop, **SETTINGS)
    expected, taken = by_hand([slow.get(name, 1.0) for name in NAMES], 12.0, delay=delay, **options)
    assert list(trainer.server.state["SWIFT"]["steps"].values()) == taken
    torch.testing.assert_close(nodes(trainer), expected, atol=1e-12, rtol=0)
    assert trainer.server.costs.virtual_time == 12.0
    torch.testing.assert_close(trainer.server.model["w"], expected.mean(0), atol=1e-12, rtol=0)


@pytest.mark.parametrize("make", [lambda: Toy("momentum"), lambda: NormNet("momentum")])
def test_with_equal_speeds_it_is_dsgd(make):
    module, data = make(), toy_data([16] * 5)
    ours = federate(module, data, [SWIFT()], max_rounds=6, loop=WaitFree(clock()), **SETTINGS)
    plain = federate(module, data, [DSGD(weights="swift")], max_rounds=6, **SETTINGS)
    for client in NAMES:
        close(module_state(ours.module(client)), module_state(plain.module(client)), atol=1e-6)
    assert ours.server.costs.bytes_up == plain.server.costs.bytes_up


@pytest.mark.slow
def test_a_slow_client_holds_nobody_up():
    def steps(slow):
        loop = WaitFree(clock(slow), period=4.0)
        trainer = federate(Quadratic(), quadratic_data(A, B), [SWIFT()], max_rounds=5, loop=loop, **SETTINGS)
        return trainer.server.state["SWIFT"]["steps"]

    assert steps({}) == dict.fromkeys(NAMES, 20)
    assert steps({"2": 10.0}) == dict.fromkeys(NAMES, 20) | {"2": 2}


def test_a_period_may_end_before_a_step_does():
    loop = WaitFree(clock(), period=0.4)
    trainer = federate(
        Quadratic(),
        quadratic_data(A, B),
        [SWIFT()],
        max_rounds=3,
        loop=loop,
        failures=FailurePolicy(min_clients=1),
        **SETTINGS,
    )
    assert trainer.server.costs.virtual_time == pytest.approx(1.2)
    assert trainer.server.costs.steps == 5


def test_rounds_of_steps():
    trainer = federate(
        Quadratic(),
        quadratic_data(A, B),
        [SWIFT()],
        max_rounds=2,
        loop=WaitFree(clock({"0": 100.0}), steps=4),
        **SETTINGS,
    )
    assert trainer.server.costs.steps == 40
    assert trainer.server.state["SWIFT"]["steps"] == {"0": 0} | dict.fromkeys(NAMES[1:], 10)
    assert trainer.server.costs.virtual_time == 10.0


def test_without_edges_it_is_local_sgd():
    with pytest.warns(UserWarning, match="is not connected"):
        trainer = federate(
            Quadratic(), quadratic_data(A, B), [SWIFT([])], max_rounds=4, loop=WaitFree(clock()), **SETTINGS
        )
    a, b = (torch.tensor(rows, dtype=torch.float64) for rows in (A, B))
    torch.testing.assert_close(nodes(trainer), b - b * (1 - 0.1 * a) ** 4, atol=1e-12, rtol=0)


@pytest.mark.parametrize("fresh_only", mostly_slow([False, True], [False]))
@pytest.mark.slow
def test_resumed_with_models_on_their_way(tmp_path, fresh_only):
    def run(place, rounds, resume=None, **options):
        loop = WaitFree(VirtualClock(LogNormalSpeed(0.1, visit_sigma=0.3), FixedLink(up=500.0, down=2000.0)), steps=2)
        trainer = make_trainer(
            place, [SWIFT(fresh_only=fresh_only)], loop=loop, evaluation=0, max_rounds=rounds, **SETTINGS, **options
        )
        trainer.fit(module, datamodule=toy_data([16] * 5), resume=resume)
        return trainer

    module = Toy("momentum")
    whole = run(tmp_path / "whole", 5)
    run(tmp_path / "parts", 2, save_state=1)
    parts = run(tmp_path / "parts", 5, resume="last", save_state=1)
    assert parts.server.costs.virtual_time == whole.server.costs.virtual_time
    assert parts.server.state["SWIFT"]["steps"] == whole.server.state["SWIFT"]["steps"]
    for client in NAMES:
        same(module_state(parts.module(client)), module_state(whole.module(client)))


@pytest.mark.slow
def test_worker_processes():
    loop = WaitFree(VirtualClock(LogNormalSpeed(0.1)), steps=2)
    module, data = Toy("momentum"), toy_data([16] * 5)
    first = federate(module, data, [SWIFT()], max_rounds=2, loop=loop, **SETTINGS)
    second = federate(module, data, [SWIFT()], max_rounds=2, loop=loop, engine=Processes(2), **SETTINGS)
    for client in NAMES:
        same(module_state(first.module(client)), module_state(second.module(client)))


def test_a_round_has_one_score_of_each_client(tmp_path):
    loop = WaitFree(clock({"1": 2.0}), steps=3)
    trainer = federate(Toy(), toy_data(), [SWIFT()], tmp_path, max_rounds=2, loop=loop, evaluation=1, **SETTINGS)
    rows = [row for row in trainer.rows if (row.stage, row.metric, row.data) == ("L2", "val_acc", "local")]
    assert len(rows) == 6
    assert {row.model for row in rows} == {"personal"}


def test_the_timeline_has_every_step(tmp_path):
    loop = WaitFree(clock({"1": 3.0}), period=6.0)
    federate(Toy(), toy_data(), [SWIFT()], tmp_path, max_rounds=1, loop=loop, evaluation=0, **SETTINGS)
    (folder,) = tmp_path.glob("*/version_0")
    rows = read_trips(folder)
    assert len(rows) == 6 + 2 + 6
    late = [(row["arrived"], row["staleness"]) for row in rows if row["client"] == "0"]
    assert late == [(1, 0), (2, 1), (3, 2), (4, 0), (5, 1), (6, 2)]
    assert {(row["began"], row["arrived"]) for row in rows if row["client"] == "1"} == {(0, 3), (3, 6)}


def test_clients_that_are_away_take_no_steps(tmp_path):
    (tmp_path / "trace.csv").write_text(
        "client,start,end\n" + "".join(f"{name},0,100\n" for name in NAMES[1:]) + "0,3.5,100\n"
    )
    away = VirtualClock(FixedSpeed(1.0), availability=TraceAvailability(str(tmp_path / "trace.csv")))
    loop = WaitFree(away, period=6.0)
    trainer = federate(Quadratic(), quadratic_data(A, B), [SWIFT()], max_rounds=1, loop=loop, **SETTINGS)
    assert trainer.server.state["SWIFT"]["steps"] == {"0": 2} | dict.fromkeys(NAMES[1:], 6)


@pytest.mark.parametrize(
    ("callbacks", "options", "sentence"),
    [
        ([SWIFT()], {}, "SWIFT runs in rounds by the loop WaitFree, and trainer.loop is Synchronous"),
        ([DSGD()], {"loop": WaitFree()}, "DSGD runs in rounds by the loop Synchronous, and trainer.loop is WaitFree"),
        ([FedAvg()], {"loop": WaitFree()}, "WaitFree is for clients that talk to their neighbours"),
        ([SWIFT()], {"loop": WaitFree(), "local_steps": 2}, "SWIFT exchanges models in every optimizer step"),
        ([SWIFT()], {"loop": WaitFree(), "optimizer_state": "reset"}, "its Adam begins anew .*optimizer_state='keep'"),
        ([SWIFT()], {"loop": WaitFree(), "participation": 2}, "participation=2 has no meaning in the loop WaitFree"),
        ([SWIFT()], {"loop": WaitFree(VirtualClock(FixedSpeed(0.0)))}, "take a step in no time"),
    ],
)
def test_what_cannot_be_right_is_refused(callbacks, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_trainer(None, callbacks, **SETTINGS | options).fit(Toy("adam"), datamodule=toy_data())


@pytest.mark.parametrize("options", [{"steps": 0}, {"period": 0.0}, {"steps": 1, "period": 1.0}])
def test_senseless_rounds_are_refused(options):
    with pytest.raises(ValueError, match="WaitFree got"):
        WaitFree(**options)


def test_a_negative_s_is_refused():
    with pytest.raises(ValueError, match="SWIFT got s=-1"):
        SWIFT(s=-1)
