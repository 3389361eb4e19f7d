"""What federations are compared with: no sharing, and sharing everything."""

from __future__ import annotations

from fedlightning.catalogue.algorithm import OWN_MODEL, Algorithm

# fmt: off
ROWS = (
    Algorithm(
        "Local", "baseline",
        "Every client trains alone (siloed): what it has without a federation.",
        "Baseline: Silo in FENDA-FL, CLT in FLIU, Local in PLayer-FL",
        down="nothing", up="nothing",
        leaves="no entry of the model",
        client_state="its whole model and optimizer",
        deployed=OWN_MODEL,
        weights="none",
        composes="LocalCheckpoint; there is nothing to correct or to average",
        module="partial",
    ),
    Algorithm(
        "Central", "baseline",
        "One model trained on the union of all clients' data: what could be had if data could move.",
        "Baseline: Central in FENDA-FL",
        down="w, to one virtual client that holds all data", up="w",
        client_state="the optimizer (of the virtual client)",
        weights="none",
        composes="GlobalCheckpoint; no other algorithm",
    ),
)
# fmt: on
