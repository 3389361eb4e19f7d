"""Clients of different means: rare labels, different sensors, no labels."""

from __future__ import annotations

from fedlightning.catalogue.algorithm import OWN_MODEL, Algorithm

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
    Algorithm(
        "FedMultimodal", "global",
        "FedAvg in which the encoder of a modality is averaged over the clients that have it.",
        'Feng et al., "FedMultimodal: a benchmark for multimodal federated learning", KDD 2023',
        up="w_i without the encoders of modalities that the client lacks",
        composes="sharing methods, gradient terms, server optimizers",
    ),
    Algorithm(
        "Harmony", "personal",
        "First a network for each modality, apart from the others; then the fusion, averaged within clusters of clients.",
        'Ouyang et al., "Harmony: heterogeneous multi-modal federated learning through disentangled model training", '
        "MobiSys 2023",
        down="the networks of its modalities; then its cluster's fusion", up="the same; biases d",
        client_state="encoders at the start of stage 2",
        server_state="who has which modalities, the fusion and the biases of each client",
        of_clients="its fusion network, its biases",
        deployed=OWN_MODEL,
        weights="uniform (default), samples or log",
        composes="FedProx, FedBN; not with server optimizers or other plans",
    ),
    Algorithm(
        "pFedKnow", "global",
        "Labels at the server only; clients train pruned models on pseudo-labels of the model that they receive.",
        'Wang et al., "Knowledge-enhanced semi-supervised federated learning for aggregating heterogeneous lightweight '
        'clients in IoT", SDM 2023',
        down="w, pruned for each client", up="w_i, pruned",
        weights="samples (default), uniform or log, over those who hold an element",
        composes="FedProx, FedBN; not with server optimizers or other plans",
    ),
)
# fmt: on
