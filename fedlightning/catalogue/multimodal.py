"""Clients of different means: rare labels, different sensors, no labels."""

from __future__ import annotations

from fedlightning.catalogue.algorithm import Algorithm

# fmt: off
ROWS = (
    Algorithm(
        "FedCovid", "global",
        "Large hospitals train first; noisy copies of rare positives, a margin loss and log weights.",
        'Wang et al., "Towards federated COVID-19 vaccine side effect prediction", ECML PKDD 2022',
        down="w; the number of its parameters",
        server_state="the number of warm-up rounds",
        weights="log (default), samples or uniform",
        composes="sharing methods, loss and gradient terms, server optimizers; plans its own rounds",
    ),
)
# fmt: on
