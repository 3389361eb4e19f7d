"""Virtual time: oracles of the models, addressed draws, windows at their edges, and what is refused."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction
from pathlib import Path

import pytest

from fedlightning.virtual_time import (
    AlwaysAvailable,
    Availability,
    BernoulliAvailability,
    DayNightAvailability,
    DeviceLink,
    DeviceSpeed,
    FixedLink,
    FixedSpeed,
    LogNormalLink,
    LogNormalSpeed,
    SampleSpeed,
    TraceAvailability,
    VirtualClock,
)

CLIENTS = [str(client) for client in range(400)]
PHONES = {"phone": {"share": 3, "seconds_per_sample": 0.1}, "desktop": {"share": 1, "seconds_per_sample": 0.01}}


def trace(folder: Path, *lines: str) -> Path:
    path = folder / "trace.csv"
    path.write_text("\n".join(["client,start,end", *lines]) + "\n")
    return path


def test_duration_is_download_and_compute_and_upload():
    clock = VirtualClock(SampleSpeed(0.5, overhead=1.0, slowdown={"b": 3}), FixedLink(100, 10, 0.25, {"b": 2}))
    assert clock.duration("a", 0, samples=4, bytes_down=50, bytes_up=20) == 0.75 + 3.0 + 2.25
    assert clock.duration("b", 0, samples=4, bytes_down=50, bytes_up=20) == 1.5 + 9.0 + 4.5


@pytest.mark.parametrize("speed", [FixedSpeed(3), SampleSpeed(1, overhead=2), LogNormalSpeed(1), DeviceSpeed(PHONES)])
def test_no_samples_take_no_time(speed):
    assert VirtualClock(speed).compute("1", 0, 0) == 0.0
    assert VirtualClock(speed).compute("1", 0, 8) > 0.0


def test_log_normal_median_and_spread():
    speed = LogNormalSpeed(0.01, sigma=0.7)
    logs = [math.log(speed.seconds(1, client, 0, 100)) for client in CLIENTS]
    assert statistics.fmean(logs) == pytest.approx(0.0, abs=4 * 0.7 / 20)
    assert statistics.stdev(logs) == pytest.approx(0.7, rel=0.15)
    visits = LogNormalSpeed(0.01, sigma=0.0, visit_sigma=0.7)
    assert statistics.stdev(math.log(visits.seconds(1, "a", n, 100)) for n in range(400)) == pytest.approx(
        0.7, rel=0.15
    )


def test_devices_are_drawn_by_share_and_are_the_same_for_speed_and_link():
    speed = DeviceSpeed(PHONES)
    link = DeviceLink({"phone": {"share": 3, "up": 10}, "desktop": {"share": 1, "up": 1000}})
    slow = {client for client in CLIENTS if speed.seconds(5, client, 0, 10) == 1.0}
    assert len(slow) == pytest.approx(300, abs=35)
    assert slow == {client for client in CLIENTS if link.seconds(5, client, 0, 1000, "up") == 100.0}
    assert slow != {client for client in CLIENTS if speed.seconds(6, client, 0, 10) == 1.0}


def test_log_normal_links_share_a_clients_factor():
    link = LogNormalLink(down=100, up=10, sigma=1.0)
    factors = {link.seconds(0, client, 0, 100, "down") for client in CLIENTS}
    assert len(factors) == len(CLIENTS)
    assert all(
        link.seconds(0, client, 0, 100, "up") == pytest.approx(10 * link.seconds(0, client, 3, 100, "down"))
        for client in CLIENTS[:20]
    )


def test_the_two_messages_of_a_visit_are_drawn_apart():
    link = LogNormalLink(down=100, up=100, sigma=0.0, visit_sigma=1.0)
    both = [[link.seconds(0, client, 0, 100, way) for way in ("down", "up")] for client in CLIENTS]
    assert all(down != up for down, up in both)
    logs = [[math.log(seconds) for seconds in way] for way in zip(*both, strict=True)]
    assert abs(statistics.correlation(*logs)) < 4 / 20
    assert all(statistics.stdev(way) == pytest.approx(1.0, rel=0.15) for way in logs)


def availabilities(folder: Path) -> list[Availability]:
    return [
        AlwaysAvailable(),
        BernoulliAvailability(0.2, slot=0.1),
        DayNightAvailability(length=0.3, period=1.1, spread=0.7),
        DayNightAvailability(length=0.3, start=0.9, period=1.1),
        TraceAvailability(trace(folder, "0,0,0.1", "0,0.7,0.9", "1,0.2,0.3", "1,0.3,0.4"), period=0.9),
        TraceAvailability(trace(folder, "0,0,0.1", "0,0.7,0.9", "1,0.2,0.3"), others=True),
    ]


@pytest.mark.parametrize("model", range(6))
def test_next_available_is_the_first_time(model: int, tmp_path: Path):
    """Also where the next time is the edge of a slot or a window, which no rounding may put on the wrong side."""
    here = availabilities(tmp_path)[model]
    waits = 0
    for client in ("0", "1"):
        for step in range(300):
            time = step * 0.037
            then = here.next_available(7, client, time)
            assert then >= time and (then == time) == here.available(7, client, time)
            if then < math.inf:
                assert here.available(7, client, then)
                assert then == time or not here.available(7, client, math.nextafter(then, 0.0))
                waits += then > time
            else:
                assert model == 5  # a trace without a period ends
    assert waits or model == 0


def test_the_end_of_a_window_is_outside(tmp_path: Path):
    hours = DayNightAvailability(length=4.0, start=2.0, spread=0.0, period=10.0)
    once = TraceAvailability(trace(tmp_path, "a,2,6"))
    again = TraceAvailability(trace(tmp_path, "a,2,6"), period=10.0)
    for model in (hours, once, again):
        assert model.available(0, "a", 2.0) and model.available(0, "a", math.nextafter(6.0, 0.0))
        assert not model.available(0, "a", 6.0) and not model.available(0, "a", math.nextafter(2.0, 0.0))
    assert [model.next_available(0, "a", 6.0) for model in (hours, once, again)] == [12.0, math.inf, 12.0]
    slots = BernoulliAvailability(0.5, slot=10.0)
    ends = [client for client in CLIENTS if slots.available(0, client, 9.0) and not slots.available(0, client, 11.0)]
    assert ends and not any(slots.available(0, client, 10.0) for client in ends)


def test_shares_of_time():
    night = DayNightAvailability(length=0.25, period=1.0)
    coin = BernoulliAvailability(0.25, slot=1.0)
    for model in (night, coin):
        there = [model.available(0, client, 0.5 + day * 1.37) for client in CLIENTS for day in range(10)]
        assert sum(there) / len(there) == pytest.approx(0.25, abs=0.03)
        assert {model.available(0, client, 3.5) for client in CLIENTS} == {True, False}


def test_slots_begin_at_multiples():
    coin = BernoulliAvailability(0.5, slot=0.1)
    for place in range(2000):
        begin = place * 0.1
        assert coin.available(0, "a", begin) == coin.available(0, "a", float(Fraction(begin) + Fraction(1, 20)))


def test_every_answer_is_addressed(tmp_path: Path):
    def answers(clock: VirtualClock) -> list[float]:
        return [
            value
            for client in CLIENTS[:5]
            for value in (clock.duration(client, 3, 10, 10, 10), clock.next_available(client, 12.3))
        ]

    def clock(seed: int) -> VirtualClock:
        return VirtualClock(LogNormalSpeed(1.0, 1.0, 1.0), LogNormalLink(), BernoulliAvailability(0.1, 1.0), seed=seed)

    assert answers(clock(0)) == answers(clock(0)) != answers(clock(1))
    assert clock(0) == clock(0) != clock(1)
    assert "LogNormalSpeed(seconds_per_sample=1.0" in repr(clock(0))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FixedSpeed(-1), "FixedSpeed got seconds_per_visit=-1. Give a number of at least 0"),
        (lambda: SampleSpeed(float("nan")), "seconds_per_sample=nan"),
        (lambda: SampleSpeed(True), "seconds_per_sample=True"),
        (lambda: SampleSpeed(slowdown={"a": -1}), r"slowdown\['a'\]=-1"),
        (lambda: SampleSpeed(slowdown=[1]), "table of numbers by client"),
        (lambda: FixedLink(down=0), "down=0. Give a number above 0"),
        (lambda: LogNormalLink(None, None), "no speed to spread"),
        (lambda: DeviceSpeed({}), "Give a table such as"),
        (lambda: DeviceSpeed({"phone": {"share": 1}}), "'phone' lacks 'seconds_per_sample'"),
        (lambda: DeviceSpeed({"phone": {"seconds_per_sample": 1, "speed": 2}}), "unknown 'speed'"),
        (lambda: DeviceSpeed({"phone": {"share": 0, "seconds_per_sample": 1}}), "shares of all classes are 0"),
        (lambda: DeviceSpeed(PHONES, {"a": "tablet"}), "client 'a' has the class 'tablet', which is not among"),
        (lambda: BernoulliAvailability(0), "probability=0"),
        (lambda: DayNightAvailability(length=0), "nobody would ever be let in"),
        (lambda: DayNightAvailability(length=2, period=1, spread=0), "a period has 1"),
        (lambda: TraceAvailability("nowhere.csv"), "cannot read nowhere.csv"),
        (lambda: VirtualClock(speed=AlwaysAvailable()), "speed=AlwaysAvailable.*a Speed"),
    ],
)
def test_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["a,5,2"], "line 2 of .*begins at 0 or later and before it ends"),
        (["a,0,1", "a,x,2"], "line 3 of .* has start='x'"),
        (["a,0"], "line 2 of .* has end=None"),
        ([], "nobody would ever be let in"),
        (["a,3,3"], "nobody would ever be let in"),
        (["a,0,101"], "period=100 would cut it off"),
    ],
)
def test_bad_traces(lines, said, tmp_path: Path):
    with pytest.raises(ValueError, match=said):
        TraceAvailability(trace(tmp_path, *lines), period=100)


def test_a_trace_needs_its_columns(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text("id,from,to\na,0,1\n")
    with pytest.raises(ValueError, match="it needs client, start and end"):
        TraceAvailability(path)


def test_a_clock_fits_the_clients(tmp_path: Path):
    with pytest.raises(ValueError, match="SampleSpeed names client 'z', which the federation does not have"):
        VirtualClock(SampleSpeed(slowdown={"z": 2})).check(["a", "b"])
    elsewhere = VirtualClock(availability=TraceAvailability(trace(tmp_path, "c,0,1")))
    with pytest.raises(ValueError, match="never lets in any of the 2 clients"):
        elsewhere.check(["a", "b"])
    with pytest.warns(UserWarning, match="never lets in 1 of the 2 clients \\('b'"):
        elsewhere.check(["c", "b"])
