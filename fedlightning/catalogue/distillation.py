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
        leaves="no entry of the model",
        client_state="its whole model", server_state="which clients have been visited",
        deployed=OWN_MODEL,
        weights="uniform (default) or samples",
        composes="LocalCheckpoint; no method that shares weights; needs public data, labelled for its transfer learning",
    ),
    Algorithm(
        "FCCL", "personal",
        "Logits on public data are made to correlate with everybody's mean; own old models teach in local training.",
        'Huang et al., "Learn from others and be yourself in heterogeneous federated learning", CVPR 2022',
        down="ids and mean logits of public samples", up="its logits on them",
        leaves="no entry of the model",
        client_state="its whole model, its last and its pre-trained one", server_state="which clients have been visited",
        deployed=OWN_MODEL,
        weights="uniform",
        composes="LocalCheckpoint; no method that shares weights; needs public data",
    ),
    Algorithm(
        "FCCLPlus", "personal",
        "FCCL with similarities of samples on public data, and distillation of non-target classes.",
        'Huang et al., "Generalizable heterogeneous federated cross-correlation and instance similarity learning", IEEE '
        'TPAMI 2023',
        down="ids, mean logits and similarities of public samples", up="its logits and similarities",
        leaves="no entry of the model",
        client_state="its whole model and its last one", server_state="which clients have been visited",
        deployed=OWN_MODEL,
        weights="uniform",
        composes="as FCCL",
    ),
    Algorithm(
        "FedGKT", "personal",
        "Small networks at clients, a large head at the server that trains on their features; logits go both ways.",
        'He, Annavaram, Avestimehr, "Group knowledge transfer: federated learning of large CNNs at the edge", NeurIPS 2020',
        down="the server's logits of each training sample", up="features, logits and label of each training sample",
        leaves="no entry of the model",
        client_state="its small network", server_state="the head, and its newest logits by client",
        of_clients="the server's logits of its training samples",
        deployed="the client's extractor below the server's head; LocalCheckpoint (there is no global model)",
        weights="none: the head trains on all features that come",
        composes="LocalCheckpoint; no method that shares weights; features and labels leave the client",
    ),
    Algorithm(
        "FedET", "global",
        "Small models of clients are averaged by architecture and teach a large model of the server on public data.",
        'Cho et al., "Heterogeneous ensemble knowledge transfer for training large models in federated learning", IJCAI 2022',
        down="w of the client's architecture",
        server_state="one model for each architecture, and the large one",
        deployed="the large model at the server; at a client that of its architecture",
        weights="samples (default) or uniform; confidence (variance of logits) in the ensemble",
        composes="FedProx, server optimizers on the means; not GlobalCheckpoint, parts of models or plans of rounds",
    ),
    Algorithm(
        "FedDF", "global",
        "FedAvg for each architecture; then all returned models together teach each mean on unlabelled public data.",
        'Lin et al., "Ensemble distillation for robust model fusion in federated learning", NeurIPS 2020',
        down="w of the client's architecture",
        server_state="one model for each architecture",
        deployed="the model of the client's architecture; GlobalCheckpoint",
        weights="samples (default) or uniform",
        composes="FedProx, server optimizers (moments for each model); SCAFFOLD with one architecture; not parts of models",
    ),
    Algorithm(
        "FedBE", "global",
        "Clients' models, their mean and models sampled around it teach the mean on unlabelled public data.",
        'Chen, Chao, "FedBE: making Bayesian model ensemble applicable to federated learning", ICLR 2021',
        down="w of the client's architecture",
        server_state="one model for each architecture",
        deployed="the model of the client's architecture; GlobalCheckpoint",
        weights="samples (default) or uniform",
        composes="as FedDF",
    ),
    Algorithm(
        "DSFL", "personal",
        "DS-FL: probabilities on unlabelled public data travel; clients and a server's model learn their sharpened mean.",
        'Itahara et al., "Distillation-based semi-supervised federated learning for communication-efficient collaborative '
        'training with non-IID private data", IEEE TMC 2021',
        down="ids and sharpened mean probabilities of public samples", up="its probabilities on them",
        leaves="no entry of the model",
        client_state="its whole model", server_state="its own model, the newest targets",
        deployed="each client's own model; LocalCheckpoint (the server's is a global model: GlobalCheckpoint)",
        weights="uniform (default) or samples",
        composes="LocalCheckpoint, GlobalCheckpoint; no method that shares weights; needs public data",
    ),
)
# fmt: on
