"""Synchronous rounds on a clock: how long they last, deadlines, partial work, over-selection, availability."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedlightning.algorithm import Facts, FederatedCallback, Job, Plan, Server, Update, UpdateCodec, Wire
from fedlightning.callbacks import (
    CFL,
    QSGD,
    SCAFFOLD,
    FedAvg,
    FedPer,
    FedProx,
    GlobalCheckpoint,
    HeteroFL,
    PLayerFL,
    RandomK,
    TopK,
)
from fedlightning.callbacks.poisson import PoissonSampling
from fedlightning.callbacks.stragglers import Stragglers
from fedlightning.engines.attempts import FederationError
from fedlightning.errors import ConfigurationError
from fedlightning.options import Evaluation
from fedlightning.run.job_timeline import read_trips
from fedlightning.server.loop import Synchronous
from fedlightning.virtual_time import (
    Asynchronous,
    BernoulliAvailability,
    FixedLink,
    FixedSpeed,
    SampleSpeed,
    TraceAvailability,
    VirtualClock,
)
from tests.helpers import NormNet, Toy, close, federate, global_state, make_trainer, same, spied, toy_data
from tests.server.test_synchronous import Chosen

SLOW = VirtualClock(FixedSpeed(1.0, slowdown={"2": 10}))


def times(trainer: Any) -> list[float]:
    return [entry["time"] for entry in trainer.federation.history]


def test_a_clock_alone_changes_no_number():
    module = Toy("momentum", dropout=0.3)
    plain = federate(module, toy_data(), [FedProx()], participation=2, max_rounds=3)
    timed = federate(module, toy_data(), [FedProx()], participation=2, max_rounds=3, loop=Synchronous(SLOW))
    same(global_state(plain), global_state(timed))
    assert "time" not in plain.federation.history[0]


def test_a_round_lasts_as_long_as_its_slowest_participant():
    model = sum(value.numel() * 4 for value in Toy().state_dict().values())
    clock = VirtualClock(SampleSpeed(0.5), FixedLink(down=model / 2, up=model, latency=0.25))
    trainer, _ = spied(Toy(), toy_data(), [Chosen([["0"], ["1", "2"]])], loop=Synchronous(clock), local_epochs=2)
    assert times(trainer) == [24.0 + 3.5, 27.5 + 40.0 + 3.5]


class Twice(FederatedCallback):
    """Visits the clients in two lists, the second of probes."""

    def plan_round(self, server: Server) -> Plan:
        yield [server.job(client) for client in server.participants()]
        yield [Job("0", work=0, returns=())]


def test_lists_of_a_plan_follow_one_another():
    clock = VirtualClock(FixedSpeed(2.0), FixedLink(latency=0.5))
    assert times(federate(Toy(), toy_data(), [Twice()], loop=Synchronous(clock), max_rounds=1)) == [3.0 + 1.0]


@pytest.mark.parametrize(
    "callbacks", [[], [HeteroFL(rates=[1.0])], [PLayerFL()]], ids=["FedAvg", "HeteroFL", "PLayerFL"]
)
def test_who_is_late_has_no_part_in_the_round(callbacks):
    """It equals a federation in which that client is not drawn; its bytes and steps are counted, and it has not failed."""
    module = Toy()
    late = federate(module, toy_data(), callbacks, loop=Synchronous(SLOW, deadline=5.0))
    absent = federate(module, toy_data(), [*copy.deepcopy(callbacks), Chosen([["0", "1"]])])
    same(global_state(late), global_state(absent))
    assert times(late) == [5.0, 10.0] or callbacks
    assert late.server.costs.bytes_up > absent.server.costs.bytes_up
    assert late.server.failures == []


def test_a_late_client_has_trained_all_the_same():
    trainer = federate(Toy(), toy_data(), [FedPer(personal=["net.3"])], loop=Synchronous(SLOW, deadline=5.0))
    assert trainer.store.get("2").visits == 2


@pytest.mark.parametrize("late", [{"deadline": 5.0}, {"first": 2}], ids=str)
def test_a_late_client_keeps_what_has_to_agree_with_the_server(late):
    """SCAFFOLD's c is the mean of all c_i: of a change that has not been taken in the client knows nothing either."""
    module, data = Toy(), toy_data((16, 16, 16))
    trainer = federate(module, data, [SCAFFOLD()], loop=Synchronous(SLOW, **late), local_steps=2, max_rounds=3)
    absent = federate(module, data, [SCAFFOLD(), Chosen([["0", "1"]] * 3)], local_steps=2, max_rounds=3)
    same(global_state(trainer), global_state(absent))
    c = trainer.server.state["SCAFFOLD"]["c"]
    own = [trainer.store.get(client).state.get("SCAFFOLD", {}).get("c", {}) for client in trainer.server.clients]
    assert own[0] and not own[2]
    close(c, {name: sum(c_i[name] for c_i in own if c_i) / 3 for name in c}, atol=1e-6)
    assert trainer.store.get("2").visits == 3  # the rest is as it left it


def test_everybody_late_leaves_the_model_and_warns():
    module = Toy()
    with pytest.warns(UserWarning, match="none of 3 updates came before the deadline of 0.5"):
        trainer = federate(module, toy_data(), loop=Synchronous(SLOW, deadline=0.5), max_rounds=1)
    same(global_state(trainer), dict(module.state_dict()))


def test_slow_clients_do_a_part_of_their_work():
    """Two seconds for each client's epoch, of which client 2 is three times slower; 3 epochs are asked for."""
    speed = SampleSpeed(0.1, slowdown={"0": 1.0, "1": 0.6, "2": 4.5})  # 2.4, 2.4 and 7.2 seconds an epoch
    loop = Synchronous(VirtualClock(speed), deadline=7.5, late="partial")
    trainer, spy = spied(Toy(), toy_data(), loop=loop, local_epochs=3, max_rounds=1)
    assert {update.client: update.steps for update in spy.updates} == {"0": 9, "1": 15, "2": 2}
    assert times(trainer) == [pytest.approx(7.2)]
    loop = Synchronous(VirtualClock(speed), deadline=5.0, late="partial")
    _, spy = spied(Toy(), toy_data(), loop=loop, local_epochs=3, max_rounds=1)
    assert {update.client: update.steps for update in spy.updates} == {"0": 6, "1": 10}  # client 2 has too little time


def test_a_part_of_the_work_leaves_time_for_the_way_back():
    """Two of three epochs of 2.4 seconds: the update takes two more."""
    size = sum(value.numel() * 4 for value in Toy().state_dict().values())
    clock = VirtualClock(SampleSpeed(0.1, slowdown={"1": 0.6}), FixedLink(up=size / 2))
    loop = Synchronous(clock, deadline=7.5, late="partial")
    trainer, spy = spied(Toy(), toy_data((24, 40)), loop=loop, local_epochs=3, max_rounds=1)
    assert {update.client: update.steps for update in spy.updates} == {"0": 6, "1": 10}
    assert times(trainer) == [pytest.approx(6.8)]


def test_a_part_of_the_work_that_is_late_because_of_what_travels_beside_the_model_is_told():
    """SCAFFOLD's control variates take two seconds more: two epochs were planned, and are late."""
    size = sum(value.numel() * 4 for value in Toy().state_dict().values())
    loop = Synchronous(VirtualClock(SampleSpeed(0.1), FixedLink(up=size / 2)), deadline=7.5, late="partial")
    with pytest.warns(UserWarning, match="Client '0' did as much as was in time .* its updates have more bytes"):
        federate(Toy(), toy_data((24, 16)), [SCAFFOLD()], loop=loop, local_epochs=3, max_rounds=1)


@pytest.mark.parametrize("code", [RandomK(0.1), TopK(0.05), QSGD()], ids=lambda code: code.key)
@pytest.mark.parametrize("module", [Toy, NormNet])
def test_a_part_of_the_work_is_planned_by_the_code_that_travels(code, module):
    """Each epoch is 2.4 seconds and the code a second; the entries would be 10 at least, and leave no time."""
    trainer, spy = spied(module(), toy_data((24, 24)), [code], max_rounds=1)
    seconds = {update.client: update.num_bytes for update in spy.updates}
    for message in spy.messages:
        assert code.planned_bytes(trainer.server, message) == seconds[message.client]
    clock = VirtualClock(SampleSpeed(0.1), FixedLink(up=seconds["0"]))
    loop = Synchronous(clock, deadline=2 * 2.4 + 1.0 + 1e-6, late="partial")
    trainer, spy = spied(module(), toy_data((24, 24)), [code], loop=loop, local_epochs=3, max_rounds=1)
    assert {update.client: update.steps for update in spy.updates} == {"0": 6, "1": 6}
    assert times(trainer) == [pytest.approx(5.8)]


class Odd(UpdateCodec):
    """A code of a length that it does not tell: the entries, as they are."""

    def wire(self, module):
        return Wire(up={"all": "parameters"})

    def encode(self, client, update):
        update.extras[self.key], update.state = {"all": update.state}, {}

    def decode(self, server, message, update):
        return update.extras[self.key]["all"]


def test_a_code_of_unknown_length_is_told_of_once():
    loop = Synchronous(VirtualClock(SampleSpeed(0.1)), deadline=5.0, late="partial")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federate(Toy(), toy_data((24, 16)), [Odd()], loop=loop, local_epochs=3)
    assert [str(one.message)[:24] for one in caught if "late='partial'" in str(one.message)] == [
        "How many bytes Odd sends"
    ]


@pytest.mark.parametrize("quiet", ["drop", "no time at all", "fails"])
def test_a_late_client_whose_work_was_not_planned_is_not_told_of(quiet):
    """One that drops out anyway, for which even one epoch is too much, or that has failed."""
    size = sum(value.numel() * 4 for value in Toy().state_dict().values())
    clock = VirtualClock(
        SampleSpeed(0.1, slowdown={"0": 9.0 if quiet == "no time at all" else 1.0}), FixedLink(up=size / 2)
    )
    loop = Synchronous(clock, deadline=10.0, late="drop" if quiet == "drop" else "partial")
    others = [Fails()] if quiet == "fails" else []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federate(Toy(), toy_data((24, 4)), [SCAFFOLD(), *others], loop=loop, local_epochs=3, max_rounds=1)
    assert not [one for one in caught if "Client '0' did as much as was in time" in str(one.message)]


class Fails(FederatedCallback):
    """Client 0 does not get through."""

    def on_visit_start(self, client):
        if client.id == "0":
            raise RuntimeError("gone")


def test_the_first_updates_suffice():
    clock = VirtualClock(FixedSpeed(1.0, slowdown={"0": 3, "1": 2}))
    module = Toy()
    trainer = federate(module, toy_data(), loop=Synchronous(clock, first=2))
    same(global_state(trainer), global_state(federate(module, toy_data(), [Chosen([["1", "2"]])])))
    assert times(trainer) == [2.0, 4.0]


def test_ties_are_settled_by_the_order_of_clients():
    module = Toy()
    trainer = federate(module, toy_data(), loop=Synchronous(VirtualClock(FixedSpeed(1.0)), first=1))
    same(global_state(trainer), global_state(federate(module, toy_data(), [Chosen([["0"]])])))


def test_only_those_who_can_be_reached_are_drawn(tmp_path: Path):
    trace = tmp_path / "trace.csv"
    trace.write_text("client,start,end\n0,0,1.5\n1,4,5\n2,4,9\n")
    clock = VirtualClock(FixedSpeed(1.0), availability=TraceAvailability(trace))
    trainer, spy = spied(Toy(), toy_data(), loop=Synchronous(clock), max_rounds=6)
    seen = [[update.client for update in spy.updates if update.round == number] for number in range(6)]
    assert seen == [["0"], ["0"], ["1", "2"], ["2"], ["2"], ["2"]]
    assert times(trainer) == [1.0, 2.0, 5.0, 6.0, 7.0, 8.0]
    with pytest.raises(FederationError, match="Round 8: no client can be reached any more after 9 virtual seconds"):
        federate(Toy(), toy_data(), loop=Synchronous(clock), max_rounds=9)


def test_a_plan_that_visits_whom_it_likes_gets_nobody_who_is_away(tmp_path: Path):
    class Everybody(FederatedCallback):
        def __init__(self) -> None:
            self.errors: list[list[str | None]] = []

        def plan_round(self, server: Server) -> Plan:
            updates = yield [server.job(client) for client in server.clients]
            self.errors.append([update.error for update in updates])

    trace = tmp_path / "trace.csv"
    trace.write_text("client,start,end\n0,0,100\n2,0,100\n")
    plan = Everybody()
    clock = VirtualClock(FixedSpeed(1.0), availability=TraceAvailability(trace))
    with pytest.warns(UserWarning, match="never lets in 1 of the 3"):
        federate(Toy(), toy_data(), [plan], loop=Synchronous(clock), max_rounds=1)
    assert [error is None for error in plan.errors[0]] == [True, False, True]


def test_resume_and_the_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timelines_are_drawn: Callable[..., None]
):
    monkeypatch.setattr("fedlightning.virtual_time.clock.draw_timeline", timelines_are_drawn)
    clock = VirtualClock(SampleSpeed(0.1, overhead=0.5), availability=BernoulliAvailability(0.5, slot=2.0))
    loop, module = Synchronous(clock, deadline=3.0), Toy("momentum")

    class Stop(FederatedCallback):
        facts = Facts(takes_part=False)

        def on_round_start(self, server: Server) -> None:
            if server.round == 2:
                raise KeyboardInterrupt

    def run(folder: str, *callbacks: FederatedCallback, **options: Any) -> Any:
        trainer = make_trainer(tmp_path / folder, [FedAvg(), *callbacks], max_rounds=4, loop=loop, version="run")
        trainer.fit(module, datamodule=toy_data(), **options)
        return trainer

    whole = run("a")
    with pytest.raises(KeyboardInterrupt):
        run("b", Stop())
    resumed = run("b", resume="last")
    same(global_state(whole), global_state(resumed))
    assert times(whole) == times(resumed)
    rows = [read_trips(tmp_path / folder / "federation" / "run") for folder in "ab"]
    assert rows[0] == rows[1] and {row["round"] for row in rows[0]} == {1, 2, 3, 4}
    assert {row["outcome"] for row in rows[0]} == {"taken", "late"}
    assert (tmp_path / "b/federation/run/figures/timeline.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"deadline": 3}, "without clock"),
        ({"first": 3}, "without clock"),
        ({"clock": SLOW, "deadline": 0}, "deadline=0"),
        ({"clock": SLOW, "first": 0}, "first=0"),
        ({"clock": SLOW, "late": "wait"}, "late='wait'"),
        ({"clock": SLOW, "late": "partial"}, "without deadline"),
    ],
)
def test_options_out_of_range(given, said):
    with pytest.raises(ValueError, match=said):
        Synchronous(**given)


@pytest.mark.parametrize("callback", [GlobalCheckpoint(stage="L2"), CFL()], ids=lambda callback: callback.key)
@pytest.mark.parametrize(
    ("others", "loop", "said"),
    [
        ([PoissonSampling(0.5)], Synchronous(), "PoissonSampling"),
        ([Stragglers(keep=False)], Synchronous(), "Stragglers"),
        ([], Synchronous(SLOW, deadline=5.0), "the loop's deadline=5.0"),
        ([], Synchronous(SLOW, first=2), "the loop's first=2"),
        ([], Synchronous(VirtualClock(availability=BernoulliAvailability(0.5))), "the clock's availability"),
        ([], Asynchronous(), "Asynchronous"),
    ],
)
def test_what_compares_all_clients_refuses_what_keeps_some_out(callback, others, loop, said):
    with pytest.raises(ValueError, match=said):
        federate(Toy(), toy_data(), [copy.deepcopy(callback), *others], loop=loop, max_rounds=1, evaluation=1)


def test_an_update_that_fails_is_waited_for_until_it_has_failed():
    class Fails(FederatedCallback):
        def on_send(self, client: Any, update: Update) -> None:
            if client.id == "2":
                raise RuntimeError("no network")

    with pytest.warns(UserWarning, match="no network"):
        trainer = federate(Toy(), toy_data(), [Fails()], loop=Synchronous(SLOW), max_rounds=1)
    assert times(trainer) == [10.0]


def test_scores_by_the_clock(tmp_path):
    module, clock = Toy(), VirtualClock(SampleSpeed(0.1))
    given = {"max_rounds": 7, "loop": Synchronous(clock), "local_steps": 1}
    plain = federate(module, toy_data(), root=tmp_path / "plain", **given)
    ends = [0.0, *(entry["time"] for entry in plain.federation.history)]
    period = 2.5 * ends[1]  # rounds are of one length: multiples lie in the rounds 3, 6, ... which begin before them
    seconds = federate(module, toy_data(), root=tmp_path / "seconds", evaluation=Evaluation(seconds=period), **given)
    scored = {row.round for row in seconds.rows if row.split == "val"}
    crossed = [n + 1 for n in range(1, 7) if any(ends[n - 1] < k * period <= ends[n] for k in range(1, 9))]
    assert scored == {*crossed, 7} == {4, 6, 7}
    assert {row for row in plain.rows if row.round in scored and row.split == "val"} == {
        row for row in seconds.rows if row.split == "val"
    }
    assert seconds.federation._validations() == len(scored) and seconds.callback_metrics.keys() >= {"val_loss"}
    for wrong, said in (({"evaluation": Evaluation(seconds=1.0), "loop": "synchronous"}, "has no clock"),):
        with pytest.raises(ConfigurationError, match=said):
            federate(Toy(), toy_data(), **{**given, "evaluation": 1, **wrong})
