"""Changes to a LightningModule that somebody else wrote: the object and its class stay usable as they are.

In order of importance:

* `mixing`: `mix` a class into a module and `unmix` it again. Everything below is built on it.
* `muting`: run a step once more without log entries, metric updates or moved buffers.
* `features`: read the input or output of a submodule during a step.
* `dual`: FENDA's two feature extractors (`fusion` and `twin` are its machinery).
* `mixer`: APFL's mixture of two models' logits.
* `submodel`: a smaller copy of a network (`slices` is the arithmetic).
* `adapters`: low-rank adapters.
* `heads`: find a network's head by name. `follow`: keep a second copy of a module in step with the first.
"""

from fedlightning.wrappers.dual import DualExtractor, dual_by_head, feature_taps, global_names, private_names
from fedlightning.wrappers.features import FeatureTap
from fedlightning.wrappers.heads import find_submodule
from fedlightning.wrappers.mixer import (
    MixerMixin,
    mix_logits,
    mixer_branch,
    own_state_names,
    personal_gradients,
    uses_forward,
)
from fedlightning.wrappers.mixing import (
    AddedParametersMixin,
    Mixin,
    adopt_parameters,
    mix,
    mixins_of,
    unmix,
    user_class,
)
from fedlightning.wrappers.muting import frozen_buffers, muted
from fedlightning.wrappers.twin import DualByHeadMixin

__all__ = [
    "AddedParametersMixin",
    "DualByHeadMixin",
    "DualExtractor",
    "FeatureTap",
    "Mixin",
    "MixerMixin",
    "adopt_parameters",
    "dual_by_head",
    "feature_taps",
    "find_submodule",
    "frozen_buffers",
    "global_names",
    "mix",
    "mix_logits",
    "mixer_branch",
    "mixins_of",
    "muted",
    "own_state_names",
    "personal_gradients",
    "private_names",
    "unmix",
    "uses_forward",
    "user_class",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)
