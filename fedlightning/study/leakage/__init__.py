"""What the models of a run give away about the samples that they were trained on: attacks, and what they got."""

from fedlightning.study.leakage.audit import Canaries, canaries
from fedlightning.study.leakage.gradients import Inversion, inversion
from fedlightning.study.leakage.ratio import LikelihoodRatio, likelihood_ratio
from fedlightning.study.leakage.usual import Membership, SiteInference, leakage, membership, site_inference
from fedlightning.study.leakage.words import in_words

__all__ = [
    "Canaries",
    "Inversion",
    "LikelihoodRatio",
    "Membership",
    "SiteInference",
    "canaries",
    "in_words",
    "inversion",
    "leakage",
    "likelihood_ratio",
    "membership",
    "site_inference",
]
