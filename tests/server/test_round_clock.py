"""Rounds without time: nobody is away, nobody is late."""

from __future__ import annotations

from fedlightning.contract import Job
from fedlightning.contract.messages import Update
from fedlightning.server.round_clock import NO_CLOCK, Clock
from fedlightning.virtual_time import VirtualClock


def test_without_a_clock_everything_passes_as_it_is():
    jobs, updates = [Job("a"), None], [Update(0, "a")]
    assert NO_CLOCK.begin(iter(jobs)) == jobs and NO_CLOCK.is_reachable("a") and not NO_CLOCK.takes_time
    assert list(NO_CLOCK.arrivals(iter(updates))) == [(updates[0], None)]
    messages = iter([])
    assert NO_CLOCK.sent(messages) is messages
    NO_CLOCK.end()
    assert NO_CLOCK.trips == () and NO_CLOCK.neighbour_models == {}


def test_the_virtual_clock_is_one_that_synchronous_rounds_can_ask():
    assert isinstance(VirtualClock(), Clock) and VirtualClock().is_always_available
