"""What the models of a run give away about the samples that they were trained on: attacks, and what they got."""

from fedlightning.leakage.audit import Canaries, canaries
from fedlightning.leakage.basic_attacks import Membership, SiteInference, leakage, membership, site_inference
from fedlightning.leakage.gradients import Inversion, inversion
from fedlightning.leakage.likelihood_ratio import LikelihoodRatio, likelihood_ratio
from fedlightning.report.leakage_sentences import describe_attacks

__all__ = [
    "Canaries",
    "Inversion",
    "LikelihoodRatio",
    "Membership",
    "SiteInference",
    "canaries",
    "describe_attacks",
    "inversion",
    "leakage",
    "likelihood_ratio",
    "membership",
    "site_inference",
]
