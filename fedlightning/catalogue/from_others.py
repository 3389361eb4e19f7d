"""Each client gets a model made for it from other clients' models."""

from __future__ import annotations

from fedlightning.catalogue.algorithm import OWN_MODEL, Algorithm

# fmt: off
_FEDAMP = Algorithm(
    "FedAMP", "personal",
    "Each client is pulled to its own mixture of all models, most to those near its own.",
    'Huang et al., "Personalized cross-silo federated learning on non-IID data", AAAI 2021',
    down="u_i (its mixture)",
    client_state="w_i (its own model)", server_state="all w_j (O(N * model))", of_clients="its model",
    deployed=OWN_MODEL,
    weights="attention by distances",
    composes="FedProx (adds to the pull), FedPer, FedBN; not with server optimizers",
)

_PFEDLA = Algorithm(
    "pFedLA", "personal",
    "A hypernetwork per client learns at the server how much of whose layers that client gets.",
    'Ma et al., "Layer-wised model aggregation for personalized federated learning" (pFedLA), CVPR 2022',
    down="thbar_i (its mixture)",
    server_state="all theta_j (O(N * model)) and N hypernetworks", of_clients="its model, its hypernetwork",
    deployed=OWN_MODEL,
    weights="learned",
    composes="FedProx, FedPer, FedBN; not with server optimizers",
)

ROWS = (
    Algorithm(
        "FedFomo", "personal",
        "Clients download others' models and move towards those that lower their own validation loss.",
        'Zhang et al., "Personalized federated learning with first order model optimization", ICLR 2021',
        down="M models th_n", up="th_i and M scores",
        client_state="th_i (its own model)", server_state="P (who helps whom), the last round's models (O(m * model))",
        of_clients="its model of the last round",
        deployed=OWN_MODEL,
        weights="learned",
        composes="FedPer, FedBN (what they keep stays); not with server optimizers or terms with a common anchor",
    ),
    _FEDAMP,
    _FEDAMP.variant(
        "HeurFedAMP", "FedAMP with attention by the angles between models, for deep networks.",
        weights="attention by cosines",
        composes="as FedAMP",
    ),
    _PFEDLA,
    _PFEDLA.variant(
        "HeurpFedLA", "pFedLA that does not send the layers for which a client relies on itself most.",
        down="thbar_i without k layers",
        client_state="theta_i (its own model)",
        composes="as pFedLA",
    ),
    Algorithm(
        "pFedHR", "personal",
        "Networks of any architecture are taken apart at the server; what is put together anew teaches the clients.",
        'Wang et al., "Towards personalized federated learning via heterogeneous model reassembly" (pFedHR), NeurIPS 2023',
        down="a candidate: stitched blocks of clients' networks", up="th_i",
        client_state="its whole model", server_state="each client's candidate (O(N * model) at most)",
        of_clients="the network made for it",
        deployed=OWN_MODEL,
        weights="none: nothing is averaged",
        composes="LocalCheckpoint; no method that shares weights; needs public data and networks that are chains of layers",
    ),
)
# fmt: on
