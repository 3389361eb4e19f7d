"""No server: each client has a model of its own and mixes it with its neighbours' models."""

from __future__ import annotations

from fedlightning.catalogue.algorithm import Algorithm

# fmt: off
_DFEDAVG = Algorithm(
    "DFedAvg", "personal",
    "No server: clients train, then each averages its model with its neighbours'.",
    'Sun, Li, Wang, "Decentralized federated averaging", IEEE TPAMI 2022',
    down="nothing", up="y_i to each neighbour",
    client_state="x_i (its own model)",
    of_clients="in a simulation, and between sites, its model: this process plays the network",
    deployed="each node's own model x_i; LocalCheckpoint (the consensus average is also scored: GlobalCheckpoint)",
    weights="mixing weights W: Metropolis (default), uniform, SWIFT's or given",
    composes="FedPer, FedBN, Ditto, APFL, FENDA, FedProx; nothing that needs a server",
)

ROWS = (
    _DFEDAVG,
    _DFEDAVG.variant(
        "DSGD", "No server: in every round each client takes one step and averages its model with its neighbours'.",
        paper='Lian et al., "Can decentralized algorithms outperform centralized algorithms?" (D-SGD), NeurIPS 2017',
        up="x_i to each neighbour",
    ),
    _DFEDAVG.variant(
        "LDSGD", "No server: local steps alone, then some that each end in an average of neighbours.",
        paper='Li et al., "Communication-efficient local decentralized SGD methods" (LD-SGD), 2019',
        up="y_i to each neighbour, i2 times",
    ),
    _DFEDAVG.variant(
        "SWIFT", "No server, and nobody waits: each client steps at its own pace with its neighbours' latest models.",
        paper='Bornstein et al., "SWIFT: rapid decentralized federated learning via wait-free model ...", ICLR 2023',
        up="x_i to each neighbour, every step",
        weights="mixing weights W: SWIFT's (default), Metropolis, uniform or given",
        composes="as DFedAvg; needs the loop WaitFree",
    ),
)
# fmt: on
