"""Clients share what they predict, on public data or through a fused model."""

from __future__ import annotations

from fedlightning.catalogue.algorithm import OWN_MODEL, Algorithm

# fmt: off
ROWS = (
    Algorithm(
        "FedMD", "personal",
        "Only logits on public data travel; each client digests their mean, then trains on its own data.",
        'Li, Wang, "FedMD: heterogenous federated learning via model distillation", NeurIPS workshop 2019',
        down="ids and mean logits of public samples", up="its logits on them",
        client_state="its whole model", server_state="which clients have been visited",
        deployed=OWN_MODEL,
        weights="uniform (default) or samples",
        composes="LocalCheckpoint; no method that shares weights; needs public data, labelled for its transfer learning",
    ),
)
# fmt: on
