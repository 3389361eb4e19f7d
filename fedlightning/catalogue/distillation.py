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
        client_state="its whole model", server_state="its own model, the newest targets",
        deployed="each client's own model; LocalCheckpoint (the server's is a global model: GlobalCheckpoint)",
        weights="uniform (default) or samples",
        composes="LocalCheckpoint, GlobalCheckpoint; no method that shares weights; needs public data",
    ),
)
# fmt: on
