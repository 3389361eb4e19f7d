"""Several models at the server, each trained by the clients whose data it fits."""

from __future__ import annotations

from fedlightning.catalogue.algorithm import OWN_MODEL, Algorithm

# fmt: off
_IFCA = Algorithm(
    "IFCA", "personal",
    "Several models; each client trains the one that fits its data best.",
    'Ghosh et al., "An efficient framework for clustered federated learning", NeurIPS 2020',
    down="K models theta_j", up="w_i (option 1: a gradient) and its choice",
    server_state="K models, who chose what last",
    deployed="the model that fits the client's data best; LocalCheckpoint",
    weights="uniform (paper) or samples, within a cluster",
    composes="FedProx, FedPer, FedBN; not with SCAFFOLD or server optimizers",
)

_FESEM = Algorithm(
    "FeSEM", "personal",
    "Clients are clustered by k-means on their models; each trains its cluster's centre.",
    'Xie et al., "Multi-center federated learning: clients clustering for better personalization", World Wide Web 2022',
    down="its centre C_k", up="W_i",
    server_state="K centres, who is where; with stale=True every W_i (O(N * model))",
    of_clients="its model, with stale=True; else nothing but its cluster",
    deployed="the client's centre; LocalCheckpoint",
    weights="uniform (paper) or samples, within a cluster",
    composes="FedProx, FedPer, FedBN; not with SCAFFOLD or server optimizers",
)

ROWS = (
    _IFCA,
    _IFCA.variant(
        "HypCluster", "IFCA with models averaged by samples and the deployed one chosen on validation data.",
        paper='Mansour et al., "Three approaches for personalization with applications to federated learning", 2020',
        down="q models h_k", up="w_i and its choice",
        server_state="q models, who chose what last",
        weights="samples (default) or uniform, within a cluster",
        composes="as IFCA",
        module="ifca",
    ),
    _FESEM,
    _FESEM.variant(
        "FeSEMMA", "FeSEM that matches hidden units before it compares and averages models.",
        composes="FedProx; networks of Linear, Conv and norm layers in a row, all of which travel",
        module="fesem_ma",
    ),
    Algorithm(
        "CFL", "personal",
        "A cluster that has stopped to move although its clients pull apart is split in two by the angles of their updates.",
        'Sattler et al., "Clustered federated learning: model-agnostic distributed multi-task optimization under privacy '
        'constraints", IEEE TNNLS 2021',
        down="its cluster's model",
        server_state="the models of all clusters, who is where, a norm of round 1; the updates at every split",
        of_clients="its update in the round of a split",
        deployed="the model of the client's cluster; LocalCheckpoint",
        weights="uniform (authors) or samples, within a cluster",
        composes="FedProx, FedPer, FedBN; participation=1.0 only; not with SCAFFOLD or server optimizers",
    ),
    Algorithm(
        "FedGroup", "personal",
        "Clients are grouped once, by the directions of their first updates; each group trains by FedAvg.",
        'Duan et al., "FedGroup: efficient federated learning via decomposed similarity-based clustering", ISPA 2021; '
        "FlexCFL, IEEE TPDS 2022",
        down="its group's model; the first model to newcomers",
        server_state="the first model, m models, m directions, who is where",
        deployed="the model of the client's group; LocalCheckpoint",
        weights="samples (authors) or uniform, within a group; the cold start is uniform",
        composes="FedProx, FedPer, FedBN; not with SCAFFOLD or server optimizers",
    ),
    Algorithm(
        "FedSoft", "personal",
        "Soft clusters: a client's own model is pulled to all centres by the shares of its data that they fit.",
        'Ruan, Joe-Wong, "FedSoft: soft clustered federated learning with proximal local updating", AAAI 2022',
        down="S centres (estimates); the point they pull to", up="w_i; shares u_i",
        client_state="w_i (its own model)", server_state="S centres, u",
        of_clients="the shares of its data that each centre fits",
        deployed=OWN_MODEL,
        weights="by the draw (selected), or u_is n_i",
        composes="FedPer, FedBN; not with server optimizers or terms with a common anchor",
    ),
    Algorithm(
        "PIFL", "personal",
        "Clients pay tokens to train with clusters that fit them, are paid by their Shapley values, and deploy a mixture.",
        'Khan et al., "PI-FL: personalized and incentivized federated learning", 2023',
        down="K models M_k; coalitions' models to score", up="bids, w_i for each cluster, accuracies",
        server_state="K models, balances, contributions, the ledger",
        deployed="sum_k v_k M_k / sum_k v_k; LocalCheckpoint",
        weights="samples (default) or uniform, within a cluster",
        composes="FedProx, FedPer, FedBN; not with SCAFFOLD or server optimizers",
        module="pi_fl",
    ),
)
# fmt: on
