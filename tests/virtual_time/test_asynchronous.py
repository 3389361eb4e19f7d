"""Asynchronous rounds: who arrives when, what is taken in, what is refused, resume with jobs in flight."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlightning.algorithm import Change, Facts, FederatedCallback, Server, Update
from fedlightning.callbacks import (
    APFL,
    FENDA,
    MOON,
    Ditto,
    FedAdam,
    FedAsync,
    FedBN,
    FedBuff,
    FedPer,
    FedProx,
    GlobalCheckpoint,
    LocalCheckpoint,
)
from fedlightning.engines.attempts import FederationError
from fedlightning.errors import DamagedStateError
from fedlightning.options import Evaluation, Processes
from fedlightning.virtual_time import (
    Asynchronous,
    BernoulliAvailability,
    FixedLink,
    FixedSpeed,
    LogNormalSpeed,
    SampleSpeed,
    TraceAvailability,
    VirtualClock,
)
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    close,
    federate,
    global_state,
    make_trainer,
    quadratic_data,
    same,
    toy_data,
)

SLOW = VirtualClock(FixedSpeed(1.0, slowdown={"2": 10}))


class Watch(FederatedCallback):
    """Notes what arrives: client, virtual time, staleness, the round."""

    facts = Facts(takes_part=False)

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int, int]] = []

    def on_update(self, server: Server, update: Update) -> None:
        self.seen.append((update.client, server.costs.virtual_time, update.staleness, server.round))


class StopBefore(FederatedCallback):
    """Ctrl-C as a round begins."""

    facts = Facts(takes_part=False)

    def __init__(self, round: int) -> None:
        self.round = round

    def on_round_start(self, server: Server) -> None:
        if server.round == self.round:
            raise KeyboardInterrupt


def watched(loop: Asynchronous, callbacks: Sequence[Any] = (), **given: Any) -> tuple[Any, list[Any]]:
    watch = Watch()
    trainer = federate(Toy(), toy_data(), [watch, *callbacks], loop=loop, **{"max_rounds": 6} | given)
    return trainer, watch.seen


def simulated(
    seconds: dict[str, float], windows: dict[str, list[tuple[float, float]]], buffer: int, arrivals: int
) -> list[tuple[str, float, int, int]]:
    """An event simulator of its own: every client starts again as soon as it may; all that arrive at once are seen first."""
    out: list[tuple[float, int, str, int]] = []  # arrival, number, client, version
    version = started = taken = 0
    now, seen = 0.0, []
    while True:
        for client in sorted(seconds):
            flying = any(client == other for _, _, other, _ in out)
            if not flying and any(start <= now < end for start, end in windows[client]):
                out.append((now + seconds[client], started, client, version))
                started += 1
        waking = [
            max(now, start)
            for client in seconds
            if all(client != other for _, _, other, _ in out)
            for start, end in windows[client]
            if now < end
        ]
        upcoming = min([entry[0] for entry in out] + waking)
        for entry in sorted(entry for entry in out if entry[0] == upcoming):
            out.remove(entry)
            seen.append((entry[2], upcoming, version - entry[3], version))
            taken += 1
            version += taken % buffer == 0
            if len(seen) == arrivals:
                return seen
        now = upcoming


@pytest.mark.parametrize("buffer", [1, 2, 3])
def test_arrivals_are_those_of_another_simulator(buffer: int, tmp_path: Path):
    """Unequal speeds, links whose bytes count, windows in time, and ties: clients 0 and 1 often arrive at once."""
    windows = {"0": [(0.0, 1e9)], "1": [(0.0, 5.0), (9.5, 30.0), (35.0, 1e9)], "2": [(2.0, 4.0), (20.0, 1e9)]}
    trace = tmp_path / "trace.csv"
    rows = [f"{client},{start},{end}" for client, spans in windows.items() for start, end in spans]
    trace.write_text("\n".join(["client,start,end", *rows]))
    model = sum(value.numel() * 4 for value in Toy().state_dict().values())
    link = FixedLink(down=model / 0.25, up=model / 0.5, latency=0.125, slowdown={"2": 3})
    speed = FixedSpeed(1.0, slowdown={"1": 3, "2": 2.5})
    loop = Asynchronous(VirtualClock(speed, link, TraceAvailability(trace)), arrivals=buffer)
    rounds = 24 // buffer
    _, seen = watched(loop, max_rounds=rounds, local_steps=1)
    assert seen == simulated({"0": 2.0, "1": 4.0, "2": 5.5}, windows, buffer, rounds * buffer)
    assert len({client for client, *_ in seen}) == 3


def test_simultaneous_arrivals_are_all_seen_before_anybody_starts():
    """With K below the number that arrive at once, the rest of them is older by a step, and new jobs start after them."""
    _, seen = watched(Asynchronous(VirtualClock(FixedSpeed(1.0)), arrivals=1))
    assert [entry[:3] for entry in seen] == [
        ("0", 1.0, 0),
        ("1", 1.0, 1),
        ("2", 1.0, 2),
        ("0", 2.0, 0),
        ("1", 2.0, 1),
        ("2", 2.0, 2),
    ]


def test_concurrency_is_the_number_at_work():
    _, seen = watched(Asynchronous(VirtualClock(FixedSpeed(1.0)), concurrency=2), max_rounds=40, local_steps=1)
    by_time: dict[float, list[str]] = {}
    for client, time, *_ in seen:
        by_time.setdefault(time, []).append(client)
    assert set(map(len, by_time.values())) == {2}
    assert all(len(set(clients)) == 2 for clients in by_time.values())
    counts = {client: sum(client in clients for clients in by_time.values()) for client in ("0", "1", "2")}
    assert min(counts.values()) >= 8  # of 20 times two of three: uniform


def test_a_slow_client_holds_nobody_up():
    trainer, seen = watched(Asynchronous(SLOW, arrivals=2), max_rounds=11)
    assert [entry[:3] for entry in seen if entry[0] == "2"] == [("2", 10.0, 9)]
    assert trainer.server.costs.virtual_time == 11.0
    assert [entry["time"] for entry in trainer.federation.history] == [float(number) for number in range(1, 12)]


def test_samples_and_epochs_take_time():
    clock = VirtualClock(SampleSpeed(0.5))
    _, seen = watched(Asynchronous(clock), local_epochs=2, max_rounds=3)
    assert {client: time for client, time, *_ in seen} == {"2": 16.0, "0": 24.0} | {"2": 16.0 * 2}
    _, seen = watched(Asynchronous(clock), local_steps=3, max_rounds=3)  # batches of 8 samples
    assert {time for _, time, *_ in seen} == {12.0}


def test_a_visit_takes_effect_when_it_arrives():
    """The slow client is carried out together with the first ones; what it keeps and its bytes count from its arrival on."""
    trainer, seen = watched(Asynchronous(SLOW, arrivals=3), [FedPer(personal=["net.3"])], max_rounds=2)
    assert "2" not in {client for client, *_ in seen}
    assert "2" not in trainer.store and set(trainer.store) == {"0", "1"}
    (flight,) = [flight for flight in trainer.federation.loop._in_flight if flight.client == "2"]
    assert flight.update is not None and flight.record is not None
    assert trainer.server.costs.bytes_down > trainer.server.costs.bytes_up == 6 * flight.update.num_bytes


def test_every_visit_draws_anew():
    """Two visits of a client in one round start from one model, and see other batches."""

    class Keep(Watch):
        def on_update(self, server: Server, update: Update) -> None:
            self.seen.append((update.client, update.state))  # type: ignore[arg-type]

    keep = Keep()
    loop = Asynchronous(VirtualClock(FixedSpeed(1.0, slowdown={"1": 100, "2": 100})), arrivals=2)
    federate(Toy(), toy_data(), [keep], loop=loop, max_rounds=1, local_steps=1)
    (first, one), (second, two) = keep.seen  # type: ignore[misc]
    assert first == second == "0"
    with pytest.raises(AssertionError):
        close(one, two)  # type: ignore[arg-type]


def test_stale_updates_are_dropped():
    trainer, seen = watched(Asynchronous(SLOW, arrivals=2, max_staleness=8), max_rounds=11)
    assert "2" not in {client for client, *_ in seen}
    assert trainer.server.failures == []
    assert "2" in trainer.store  # it has trained all the same
    _, seen = watched(Asynchronous(SLOW, arrivals=2, max_staleness=9), max_rounds=11)
    assert [staleness for client, _, staleness, _ in seen if client == "2"] == [9]


def test_a_client_whose_update_is_dropped_keeps_what_has_to_agree_with_the_server():
    class Both(FederatedCallback):
        """Counts the visits of a client, there and at the server."""

        facts = Facts(changes={Change.IN_STEP}, asynchronous=True)
        taken: dict[str, int] = {}

        def on_send(self, client, update):
            own = client.state.setdefault(self.key, {"count": 0})
            own["count"] += 1

        def on_update(self, server, update):
            self.taken[update.client] = self.taken.get(update.client, 0) + 1

    loop = Asynchronous(SLOW, arrivals=2, max_staleness=8)
    trainer = federate(Toy(), toy_data(), [Both()], loop=loop, max_rounds=11)
    own = {client: trainer.store.get(client).state.get("Both", {}) for client in trainer.server.clients}
    assert own == {"0": {"count": Both.taken["0"]}, "1": {"count": Both.taken["1"]}, "2": {}}


def test_at_the_end_jobs_are_dropped_or_waited_for():
    drop, seen = watched(Asynchronous(SLOW, arrivals=2), max_rounds=3)
    assert len(drop.federation.loop._in_flight) == 1 and len(seen) == 6
    flush, seen = watched(Asynchronous(SLOW, arrivals=2, at_end="flush"), max_rounds=3)
    assert not flush.federation.loop._in_flight
    assert [entry[:2] for entry in seen[6:]] == [("2", 10.0)]


@pytest.mark.parametrize("save_state", [1, 2])
@pytest.mark.fast_cases(1)
def test_a_run_that_waited_at_its_end_and_goes_on_is_the_longer_run(save_state: int, tmp_path: Path):
    """Its last round is done again, without waiting; where there is no state from before that, it is refused."""
    module = Toy()
    given = {"loop": Asynchronous(SLOW, arrivals=2, at_end="flush"), "version": "run", "save_state": save_state}
    whole, short = (
        federate(module, toy_data(), [], tmp_path / str(rounds), max_rounds=rounds, **given) for rounds in (5, 3)
    )
    longer = make_trainer(tmp_path / "3", [], max_rounds=5, **given)
    with pytest.warns(UserWarning, match="Round 3 is the next one"):
        longer.fit(module, toy_data(), resume="last")
    same(global_state(longer), global_state(whole))
    assert longer.server.costs.virtual_time == whole.server.costs.virtual_time
    assert (longer.run.path / "timeline.csv").read_bytes() == (whole.run.path / "timeline.csv").read_bytes()
    manifest = short.run.path / "checkpoints" / "last" / "manifest-before.json"
    manifest.unlink()
    even_longer = make_trainer(tmp_path / "3", [], max_rounds=6, **given)
    with pytest.raises(ValueError, match=r"Round 5 of the run .* was its last, and waited for all jobs in flight"):
        even_longer.fit(module, toy_data(), resume="last")


def test_models_that_are_waited_for_at_the_end_are_mixed_in_one_by_one():
    """`alpha` of each: their shares do not add up to more than the whole model."""
    x, ages = torch.zeros(1, dtype=torch.float64), []

    class Sent(FederatedCallback):
        facts = Facts(asynchronous=True)

        def on_update(self, server, update):
            nonlocal x
            share = 0.6 * (1 + len(ages) - update.round) ** -0.5  # the server has made a step of every update before
            ages.append((update.staleness, len(ages) - update.round))
            x = (1 - share) * x + share * update.state["w"]

    data = quadratic_data([[1.0]] * 5, [[float(client)] for client in range(5)])
    loop = Asynchronous(at_end="flush")
    trainer = federate(Quadratic(size=1), data, [FedAsync(alpha=0.6), Sent()], loop=loop, max_rounds=7)
    assert len(ages) == 10 and all(told == real for told, real in ages)
    assert torch.allclose(global_state(trainer)["w"], x, atol=1e-12)


def test_buffers_are_averaged_as_they_are():
    """The change of a running variance, taken at another one, might leave it below 0."""
    module = NormNet()

    class Falling(FederatedCallback):
        """Sends a variance that falls the longer the client was away."""

        def on_send(self, client, update):
            for name in update.state:
                if name.endswith("running_var"):
                    update.state[name] = update.state[name] * 0 + (0.01 if client.id == "2" else 0.5)

    trainer = federate(module, toy_data(), [Falling()], loop=Asynchronous(SLOW), max_rounds=25)
    variances = next(value for name, value in global_state(trainer).items() if name.endswith("running_var"))
    assert float(variances.min()) >= 0.01


def test_a_client_that_arrives_twice_in_a_round_is_scored_once_by_its_last(tmp_path: Path):
    class Last(FederatedCallback):
        facts = Facts(takes_part=False)
        scores: dict[tuple[int, str], float] = {}

        def on_update(self, server, update):
            for _, _, _, metric, value, _ in update.evaluations:
                if metric == "val_loss":
                    self.scores[server.round + 1, update.client] = value

    loop = Asynchronous(VirtualClock(FixedSpeed(1.0, slowdown={"1": 10})), arrivals=4)
    trainer = federate(
        Toy(), toy_data(), [Last()], tmp_path, loop=loop, max_rounds=3, evaluation=Evaluation(stages=["L2"])
    )
    rows = [row for row in trainer.federation.recorder.rows if row.stage == "L2" and row.metric == "val_loss"]
    assert {row.model for row in rows} == {"personal"}
    assert {(row.round, row.client): row.value for row in rows} == Last.scores and len(rows) == len(Last.scores)


def test_a_model_that_a_client_has_selected_is_of_the_round_of_its_score(tmp_path: Path):
    callbacks = [FedBuff(2), LocalCheckpoint(stage="L2", smooth=1)]
    trainer = federate(
        Toy(),
        toy_data(),
        callbacks,
        tmp_path,
        loop=Asynchronous(SLOW),
        max_rounds=12,
        evaluation=Evaluation(stages=["L2"]),
    )
    rows = [row for row in trainer.federation.recorder.rows if row.stage == "L2" and row.metric == "val_loss"]
    best = {}
    for row in (row for row in rows if row.split == "val"):
        if row.client not in best or row.value < best[row.client].value:
            best[row.client] = row
    kept = {client: trainer.store.get(client).checkpoints["LocalCheckpoint"] for client in best}
    assert set(best) == {"0", "1", "2"}
    assert {c: (own["round"], own["score"]) for c, own in kept.items()} == {
        c: (row.round, row.value) for c, row in best.items()
    }


# -- replay and resume -------------------------------------------------------------------------------------------------
def runs() -> dict[str, Any]:
    link = FixedLink(down=1000, up=100)
    clock = VirtualClock(LogNormalSpeed(0.1, 1.0, 0.5), link, BernoulliAvailability(0.5, slot=3.0))
    return {
        "fedasync": (Asynchronous(clock, concurrency=2), [FedAsync(rho=0.1)], {}),
        "fedbuff": (
            Asynchronous(clock, 2),
            [FedBuff(2), FedAdam(0.1), GlobalCheckpoint()],
            {"evaluation": Evaluation(every=2, stages=["G", "L1", "L2"])},
        ),
        "fedper": (Asynchronous(SLOW, arrivals=3), [FedPer(personal=["net.3"]), LocalCheckpoint()], {}),
    }


@pytest.mark.parametrize("name", runs())
@pytest.mark.fast_cases(2)
def test_replay_and_resume_at_every_round(name: str, tmp_path: Path):
    """At each boundary jobs are in flight, some of them carried out; the rest of the run is the same to the bit."""
    module = Toy("momentum", dropout=0.3)
    loop, callbacks, given = runs()[name]
    given = {"loop": loop, "max_rounds": 5, "version": "run", **given}

    def run(folder: Path, *more: Any, **options: Any) -> Any:
        trainer = make_trainer(folder, copy.deepcopy(callbacks) + list(more), **given)
        trainer.fit(module, datamodule=toy_data(), **options)
        return trainer

    whole = run(tmp_path / "whole")
    for stop in (1, 3):
        folder = tmp_path / str(stop)
        with pytest.raises(KeyboardInterrupt):
            run(folder, StopBefore(stop))
        resumed = run(folder, resume="last")
        same(global_state(whole), global_state(resumed))
        assert resumed.server.costs.virtual_time == whole.server.costs.virtual_time
        assert resumed.server.costs.bytes_up == whole.server.costs.bytes_up
        scores = [(tmp_path / one / "federation" / "run" / "metrics.csv").read_bytes() for one in ("whole", str(stop))]
        assert scores[0] == scores[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", runs())
def test_worker_processes_give_the_same_bits(name: str, tmp_path: Path):
    module = Toy("momentum", dropout=0.3)
    loop, callbacks, given = runs()[name]
    given = {"loop": loop, "max_rounds": 5, "version": "run", **given}
    whole = federate(module, toy_data(), copy.deepcopy(callbacks), tmp_path / "a", **given)
    given |= {"engine": Processes(2)}
    with pytest.raises(KeyboardInterrupt):
        federate(module, toy_data(), [*copy.deepcopy(callbacks), StopBefore(3)], tmp_path / "b", **given)
    trainer = make_trainer(tmp_path / "b", callbacks, **given)
    trainer.fit(module, datamodule=toy_data(), resume="last")
    same(global_state(whole), global_state(trainer))


def test_vectorized_gives_the_same_up_to_rounding():
    loop, callbacks, _ = runs()["fedper"]
    module = Toy("momentum")
    one, other = (
        global_state(federate(module, toy_data(), callbacks, loop=loop, engine=engine, max_rounds=3))
        for engine in ("sequential", "vectorized")
    )
    close(one, other, atol=1e-5)


def test_a_damaged_flight_is_refused():
    with pytest.raises(DamagedStateError, match="a job in flight that cannot be read"):
        Asynchronous().load({"departures": 1, "visits": {}, "flights": [{"number": 0}]})
    with pytest.raises(ValueError, match="of another loop"):
        Asynchronous().load({"inboxes": {}})


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [APFL, Ditto, lambda: FENDA(head="net.3"), MOON, FedBN, FedProx])
def test_methods_of_clients_equal_synchronous_rounds_where_all_are_alike(make):
    """Equal speeds, everybody at work, a round of all: what a method does at the client is what it does there."""
    module = NormNet()
    one = federate(module, toy_data(), [make()], max_rounds=2)
    loop = Asynchronous(VirtualClock(FixedSpeed(1.0)), arrivals=3)
    other = federate(module, toy_data(), [make()], loop=loop, max_rounds=2)
    same(global_state(one), global_state(other))
    for client in one.server.clients:
        same(one.client(client).module.state_dict(), other.client(client).module.state_dict())


@pytest.mark.parametrize(
    ("loop", "callbacks", "given", "said"),
    [
        (Asynchronous(arrivals=3), [FedBuff(2)], {}, "arrivals=3, and FedBuff makes a step of every 2"),
        (Asynchronous(), [FedBuff(2), FedAsync()], {}, "both"),
        (Asynchronous(), [], {"participation": 2}, "participation=2 has no meaning"),
        (Asynchronous(), [], {"participation": 1}, "participation=1 has no meaning"),
        (Asynchronous(concurrency=4), [], {}, "the federation has 3 clients"),
        (Asynchronous(VirtualClock(SampleSpeed(slowdown={"x": 2}))), [], {}, "names client 'x'"),
    ],
)
def test_what_cannot_run_is_refused_before_round_1(loop, callbacks, given, said):
    with pytest.raises(ValueError, match=said):
        federate(Toy(), toy_data(), callbacks, loop=loop, **given)


@pytest.mark.parametrize("given", [{"concurrency": 0}, {"concurrency": 1.5}, {"arrivals": 0}, {"at_end": "wait"}])
def test_options_out_of_range(given):
    with pytest.raises(ValueError, match=f"got {next(iter(given))}="):
        Asynchronous(**given)


@pytest.mark.parametrize("callback", [FedAsync(), FedBuff()])
def test_synchronous_rounds_refuse_what_needs_arrivals(callback):
    with pytest.raises(ValueError, match=f"{callback.key} .*Asynchronous"):
        federate(Toy(), toy_data(), [callback])


# -- clients that fail or are not there --------------------------------------------------------------------------------
class Fails(FederatedCallback):
    """Lets some clients fail."""

    def __init__(self, clients: Sequence[str]) -> None:
        self.clients = clients

    def on_visit_start(self, client) -> None:
        if client.id in self.clients:
            raise RuntimeError("out of memory")


def test_a_client_that_fails_counts_for_nothing():
    with pytest.warns(UserWarning, match="client '1' failed"):
        trainer, seen = watched(Asynchronous(VirtualClock(FixedSpeed(1.0)), arrivals=2), [Fails(["1"])], max_rounds=3)
    assert [client for client, *_ in seen] == ["0", "2"] * 3
    assert {failure["client"] for failure in trainer.server.failures} == {"1"}


def test_a_run_of_failures_ends():
    with pytest.raises(FederationError, match="out of memory"):
        watched(Asynchronous(VirtualClock(FixedSpeed(1.0))), [Fails(["0", "1", "2"])])


def test_nobody_can_be_reached_any_more(tmp_path: Path):
    trace = tmp_path / "trace.csv"
    trace.write_text("client,start,end\n0,0,10\n1,0,10\n2,0,10\n")
    clock = VirtualClock(FixedSpeed(4.0), availability=TraceAvailability(trace))
    with pytest.raises(FederationError, match=r"Round 4: .* after 12 virtual seconds, .* 0 of 3 updates"):
        watched(Asynchronous(clock, arrivals=3))
