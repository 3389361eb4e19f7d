"""Clients share a part of the model and keep the rest."""

from __future__ import annotations

from fedlightning.catalogue.algorithm import OWN_MODEL, WHOLE, Algorithm

# fmt: off
_FEDPER = Algorithm(
    "FedPer", "personal",
    "A shared body and a personal head, trained jointly.",
    'Arivazhagan et al., "Federated learning with personalization layers", 2019',
    down="u (body)", up="u_i",
    leaves="the body; never the head",
    client_state="v_i (head)",
    deployed=OWN_MODEL,
    weights="samples (default) or uniform",
    composes="FedProx, SCAFFOLD, server optimizers on the body; FedBN (what either keeps local stays local)",
    module="partial",
)

_FENDA = Algorithm(
    "FENDA", "personal",
    "A shared and a private feature extractor under one private head.",
    'Tavakoli et al., "A comprehensive view of personalized federated learning on heterogeneous clinical datasets" '
    "(FENDA-FL), 2024",
    down="u (global extractor)", up="u_i",
    leaves="the global extractor; neither the local one nor the head",
    client_state="v1_i (local extractor), v2_i (head)",
    deployed=OWN_MODEL,
    weights="samples (default) or uniform",
    composes="FedProx, SCAFFOLD, server optimizers on the global extractor; needs the name of the head",
)

_PLAYER_FL = Algorithm(
    "PLayerFL", "personal",
    "Shares the first layers only; how many, the clients' layer sensitivities say after the first epoch.",
    'Elhussein, Gürsoy, "PLayer-FL: a principled approach to personalized layer-wise cross-silo federated learning", '
    "2025",
    down="round 1: w; then layers 1..p", up="round 1: one sensitivity per layer; then layers 1..p",
    leaves=f"{WHOLE}: which layers are personal the server says after round 1",
    client_state="layers p+1..L", server_state="p and the sensitivities",
    deployed=OWN_MODEL,
    composes="FedProx, SCAFFOLD, server optimizers on the shared layers; needs at least two layers",
    module="player_fl",
)

ROWS = (
    _FEDPER,
    _FEDPER.variant(
        "FedRep", "A shared body and a personal head, trained in turn: first the head, then the body.",
        paper='Collins et al., "Exploiting shared representations for personalized federated learning", ICML 2021',
        weights="uniform (paper) or samples",
        composes="FedProx, SCAFFOLD, server optimizers on the body; FedBN",
    ),
    Algorithm(
        "FedBABU", "personal",
        "Only the body is trained, under a fixed common head; clients fine-tune after the last round.",
        'Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated image classification", ICLR 2022',
        down="u (body)", up="u_i",
        leaves="the body; never the head",
        client_state="none; in the end the fine-tuned copy",
        deployed="the fine-tuned copy; (u, v^0) is also a global model: GlobalCheckpoint",
        weights="uniform (authors) or samples",
        composes="FedProx, SCAFFOLD, server optimizers on the body; FedBN",
    ),
    Algorithm(
        "LGFedAvg", "personal",
        "A personal encoder under a shared head: FedPer the other way round.",
        'Liang et al., "Think locally, act globally: federated learning with local and global representations", 2020',
        down="u (top layers)", up="u_i",
        leaves="the top layers; never the encoder",
        client_state="v_i (encoder)",
        deployed=OWN_MODEL,
        weights="samples (default) or uniform (authors' code)",
        composes="FedProx, SCAFFOLD, server optimizers on the top layers; FedBN",
        module="partial",
    ),
    Algorithm(
        "FedBN", "personal",
        "FedAvg on everything except batch normalisation, which stays with each client.",
        'Li et al., "FedBN: federated learning on non-IID features via local batch normalization", ICLR 2021',
        down="w without BatchNorm", up="w_i without BatchNorm",
        leaves="everything outside BatchNorm layers",
        client_state="BatchNorm parameters and statistics",
        deployed=OWN_MODEL,
        weights="samples (default) or uniform (authors' code)",
        composes="FedProx, SCAFFOLD, server optimizers, FedPer; needs a module with BatchNorm",
        module="partial",
    ),
    _FENDA,
    _FENDA.variant(
        "PerFCL", "FENDA whose two extractors are told apart by two contrastive losses.",
        paper='Zhang et al., "Doubly contrastive representation learning for federated image recognition", '
        "Pattern Recognition 139, 2023",
        client_state="v1_i (local extractor), v2_i (head), its last u_i",
        composes="as FENDA; needs the name of the head",
    ),
    Algorithm(
        "GPFL", "personal",
        "Class embeddings and a conditional valve guide a shared extractor; each client has a head of its own.",
        'Zhang et al., "GPFL: simultaneously learning global and personalized feature information for personalized federated '
        'learning", ICCV 2023',
        down="f, E (class embeddings), CoV (valve)", up="f_i, E_i, CoV_i",
        leaves="all but the head and the contexts",
        client_state="the head and the contexts",
        deployed=OWN_MODEL,
        weights="samples (default) or uniform",
        composes="FedProx, SCAFFOLD, server optimizers on what is shared; needs labels; not with manual optimization",
    ),
    Algorithm(
        "FedProto", "personal",
        "Only class prototypes travel; clients agree on where the classes lie in the space of representations.",
        'Tan et al., "FedProto: federated prototype learning across heterogeneous clients", AAAI 2022',
        down="a prototype per class", up="a prototype per class of the client's",
        leaves="no entry of the model",
        client_state="its whole model", server_state="the prototypes",
        deployed=OWN_MODEL,
        weights="uniform over the owners of a class (default) or samples",
        composes="FedProx has nothing to hold here; LocalCheckpoint; no method that shares weights",
    ),
    Algorithm(
        "FedGH", "personal",
        "Own extractors under one header, which the server trains on mean representations of classes.",
        'Yi et al., "FedGH: heterogeneous federated learning with generalized global header", ACM MM 2023',
        down="the header", up="a mean representation per class of the client's",
        leaves="the header; never the rest",
        client_state="its extractor", server_state="the header",
        deployed=OWN_MODEL,
        weights="none: a step for each pair that comes",
        composes="LocalCheckpoint; no method that shares weights; representations of one width",
    ),
    Algorithm(
        "FD", "personal",
        "Only mean predictions per class travel; each client learns from what the others predict for a label.",
        'Jeong et al., "Communication-efficient on-device machine learning: federated distillation and augmentation under '
        'non-IID private data", 2018',
        down="the others' mean prediction per class", up="a mean prediction per class of the client's",
        leaves="no entry of the model",
        client_state="its whole model", server_state="what each client sent last",
        of_clients="its mean predictions per class",
        deployed=OWN_MODEL,
        weights="uniform over the clients that have a class (default) or samples",
        composes="FedProx has nothing to hold here; LocalCheckpoint; no method that shares weights",
    ),
    _PLAYER_FL,
    _PLAYER_FL.variant(
        "PLayerFLRandom", "PLayer-FL with a random number of shared layers, drawn once: the control of PLayer-FL.",
        family="baseline",
        down="layers 1..p", up="layers 1..p",
        server_state="p",
        composes="as PLayerFL",
        module="player_fl",
    ),
)
# fmt: on
