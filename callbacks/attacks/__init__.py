"""Attacks of clients, for research on robust aggregation: never beside real sites."""

from fedlightning.callbacks.attacks.backdoor import Backdoor, LabelFlip
from fedlightning.callbacks.attacks.bad_clients import Attack
from fedlightning.callbacks.attacks.colluding import ALIE, Colluding, InnerProductManipulation
from fedlightning.callbacks.attacks.replacement import GaussianAttack, ModelReplacement, SignFlip

__all__ = [
    "ALIE",
    "Attack",
    "Backdoor",
    "Colluding",
    "GaussianAttack",
    "InnerProductManipulation",
    "LabelFlip",
    "ModelReplacement",
    "SignFlip",
]
