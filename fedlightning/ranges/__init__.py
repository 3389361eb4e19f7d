"""What arguments may be, declared beside them, and checked when an object is made.

`annotations.py` holds what an annotation can say of one argument (:class:`Range`, :class:`Length`, :class:`Instance`, and
`Literal`), `together.py` what is said of several (:func:`at_most_one`, :func:`needs`), and `checking.py` the check
(:func:`checked`).
"""

from fedlightning.ranges.annotations import (
    ClientCount,
    CountOrShare,
    Counts,
    Instance,
    Length,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Range,
    RoundCount,
    RoundCountOrShare,
    Share,
    ShareBelowOne,
    allows,
    described,
    is_boundless,
    is_finite,
    number_in,
    to_python,
)
from fedlightning.ranges.checking import (
    Init,
    check_arguments,
    check_on_creation,
    checked,
    counts_of,
    may_be_infinite,
    ranges_of,
)
from fedlightning.ranges.together import at_least_one, at_most_one, exactly_one, idle_with, needs, shown

__all__ = [
    "ClientCount",
    "CountOrShare",
    "Counts",
    "Init",
    "Instance",
    "Length",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "PositiveShare",
    "Range",
    "RoundCount",
    "RoundCountOrShare",
    "Share",
    "ShareBelowOne",
    "allows",
    "at_least_one",
    "at_most_one",
    "check_arguments",
    "check_on_creation",
    "checked",
    "counts_of",
    "described",
    "exactly_one",
    "idle_with",
    "is_boundless",
    "is_finite",
    "may_be_infinite",
    "needs",
    "number_in",
    "to_python",
    "ranges_of",
    "shown",
]
