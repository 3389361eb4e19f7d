"""Virtual time: how long a client computes, how fast its link is, when it can be reached, and loops that wait for nobody.

A :class:`VirtualClock` is a setting of an experiment, as the partition of the data is: models of speed, link and
availability, whose draws are addressed by client and visit. Nothing here waits, and nothing looks at the wall clock.
"""

from fedlightning.virtual_time.asynchronous import Asynchronous, DrawnStaleness
from fedlightning.virtual_time.availability import (
    AlwaysAvailable,
    Availability,
    BernoulliAvailability,
    DayNightAvailability,
    TraceAvailability,
)
from fedlightning.virtual_time.clock import VirtualClock
from fedlightning.virtual_time.speed import DeviceSpeed, FixedSpeed, LogNormalSpeed, SampleSpeed, Speed
from fedlightning.virtual_time.transfer_times import DeviceLink, FixedLink, Link, LogNormalLink
from fedlightning.virtual_time.wait_free import WaitFree

__all__ = [
    "AlwaysAvailable",
    "Asynchronous",
    "Availability",
    "BernoulliAvailability",
    "DayNightAvailability",
    "DeviceLink",
    "DeviceSpeed",
    "DrawnStaleness",
    "FixedLink",
    "FixedSpeed",
    "Link",
    "LogNormalLink",
    "LogNormalSpeed",
    "SampleSpeed",
    "Speed",
    "TraceAvailability",
    "VirtualClock",
    "WaitFree",
]
