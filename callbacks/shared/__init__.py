"""Code that several algorithms share: models kept at the server, representations, prototypes, sub-models and steps.

`__all__` is for authors of other packages; the rest may change from version to version.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlightning.callbacks.shared.logit_calibration import (
        check_cross_entropy,
        known_labels,
        samples_by_class,
        with_other_cross_entropy,
    )
    from fedlightning.callbacks.shared.representations import head_path, labels_of, rows

_CALIBRATION = ("check_cross_entropy", "known_labels", "samples_by_class", "with_other_cross_entropy")
_MODULES = dict.fromkeys(_CALIBRATION, "logit_calibration") | dict.fromkeys(
    ("head_path", "labels_of", "rows"), "representations"
)
__all__ = [
    "check_cross_entropy",
    "head_path",
    "known_labels",
    "labels_of",
    "rows",
    "samples_by_class",
    "with_other_cross_entropy",
]


def __getattr__(name: str) -> Any:
    """Import what authors may use when it is first asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)
