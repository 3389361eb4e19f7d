"""Wrappers of somebody else's LightningModule: a class is mixed in, the object stays the user's."""

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
