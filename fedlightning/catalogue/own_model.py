"""A model of each client's own, made with or beside a global one."""

from __future__ import annotations

from fedlightning.catalogue.algorithm import Algorithm, beside_global

PRIVATE = "each client's private model; LocalCheckpoint (the shared model is also a global one: GlobalCheckpoint)"
"""What is deployed where a small shared model trains beside a private one."""

# fmt: off
ROWS = (
    Algorithm(
        "APFL", "personal",
        "Each client mixes a local model with the global one and learns how much of each.",
        'Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020',
        client_state="v_i (local model), a_i (its share), v_i's optimizer",
        deployed=beside_global("a_i v_i + (1 - a_i) w"),
        weights="samples (default) or uniform (paper)",
        composes="FedProx and server optimizers on w; not with manual optimization",
    ),
    Algorithm(
        "Ditto", "personal",
        "A personal model beside the global one, held near it; the global one is trained as if it were alone.",
        'Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through personalization", ICML 2021',
        client_state="v_i (its own model), v_i's optimizer where optimizers are kept",
        deployed=beside_global("v_i"),
        weights="samples (default) or uniform",
        composes="everything that trains w (FedProx, SCAFFOLD, server optimizers, partial sharing)",
    ),
    Algorithm(
        "MAPPER", "personal",
        "Each client deploys the best of several mixtures of a local model and the global one.",
        'Mansour et al., "Three approaches for personalization with applications to federated learning", 2020',
        up="w_i (the global half)",
        client_state="h_l (local half), lam (its share)",
        deployed=beside_global("lam h_l + (1 - lam) w"),
        weights="uniform (paper) or samples",
        composes="FedProx, SCAFFOLD, server optimizers on the global half; not with manual optimization",
    ),
    Algorithm(
        "pFedMe", "personal",
        "Personal models are held near a global one, which follows them (Moreau envelopes).",
        'T. Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS 2020',
        client_state="theta_i (personal model)",
        deployed=beside_global("theta_i"),
        weights="uniform (paper) or samples (authors' code)",
        composes="FedPer; server optimizers while server_lr is 1; plain SGD, not with manual optimization",
    ),
    Algorithm(
        "L2GD", "personal",
        "A shared coin decides between a local step and a step towards the mean of all models.",
        'Hanzely, Richtárik, "Federated learning of a mixture of global and local models", 2020',
        down="xbar, m (aggregation steps in a row)", up="x_i",
        client_state="x_i, its learning rate", server_state="the next m",
        deployed="x_i after the aggregation steps; LocalCheckpoint (xbar is also a global model: GlobalCheckpoint)",
        weights="uniform (paper)",
        composes="FedPer, FedBN; plain SGD; needs local_steps (the coin decides how many)",
    ),
    Algorithm(
        "PerFedAvg", "personal",
        "Meta-learning: a global model that is good after one gradient step on a client's own data.",
        'Fallah, Mokhtari, Ozdaglar, "Personalized federated learning with theoretical guarantees: a model-agnostic '
        'meta-learning approach", NeurIPS 2020',
        deployed="w after one step on own training data; LocalCheckpoint (w is the meta-model: GlobalCheckpoint)",
        weights="uniform (paper) or samples",
        composes="FedProx, FedPer, server optimizers; SGD, not with manual optimization",
        module="per_fedavg",
    ),
    Algorithm(
        "FLIU", "personal",
        "A client blends the model it had with the one it receives, by a fixed or size-dependent share.",
        'Hussaini, Theiß, Stein, "Local performance vs. out-of-distribution generalization ...", 2025',
        down="w, n, K",
        client_state="w_i (its own last model)",
        deployed="the blend; LocalCheckpoint. Newcomers use the global model: GlobalCheckpoint",
        weights="uniform (pseudocode) or samples",
        composes="FedProx, server optimizers",
    ),
    Algorithm(
        "FedALA", "personal",
        "Clients learn, element by element, how much of the global head they take.",
        'Zhang et al., "FedALA: adaptive local aggregation for personalized federated learning", AAAI 2023',
        client_state="its own top layers and W",
        deployed=beside_global("the merged model"),
        composes="FedProx, SCAFFOLD, server optimizers, FedBN; the top layers must travel",
    ),
    Algorithm(
        "LocalAdaptation", "personal",
        "After the federation every client fine-tunes its own copy of the global model.",
        'Yu, Bagdasaryan, Shmatikov, "Salvaging federated learning by local adaptation", 2020',
        client_state="none; in the end the adapted copy",
        deployed="the adapted copy, from GlobalCheckpoint's selection where there is one; w is also a global model",
        weights="those of the method beside it",
        composes="every global method, FedPer, FedBN; not methods that deploy a model of their own (Ditto, APFL)",
        module="local_adaptation",
    ),
    Algorithm(
        "Dapper", "personal",
        "After the federation every client fine-tunes the global model on its own data and on public data.",
        'Mansour et al., "Three approaches for personalization with applications to federated learning", 2020',
        client_state="none; in the end the chosen copy, its lam",
        deployed="the chosen copy, from GlobalCheckpoint's selection where there is one; w is also a global model",
        weights="those of the method beside it",
        composes="as LocalAdaptation; needs public data (public_fraction); not with manual optimization",
    ),
    Algorithm(
        "FML", "personal",
        "A private model of any architecture and a small shared one learn from each other; only the shared one travels.",
        'Shen et al., "Federated mutual learning", 2020',
        down="the shared model", up="the client's shared model",
        client_state="the private model",
        deployed=PRIVATE,
        weights="uniform (paper), samples or log",
        composes="FedProx, SCAFFOLD, server optimizers on the shared model; not with what chooses what travels or trains",
    ),
    Algorithm(
        "FedKD", "personal",
        "A private teacher and a small shared student distil into each other; the student's updates travel at low rank.",
        'Wu et al., "Communication-efficient federated learning via knowledge distillation", Nature Communications 2022',
        down="the student's change (U, s, V), or the student", up="the student's change (U, s, V)",
        client_state="the teacher, W_h, the last student", server_state="the last change, which student a client has",
        deployed=PRIVATE,
        weights="uniform (default), samples or log",
        composes="FedProx on the student; not with server optimizers or what reads updates while they are compressed",
    ),
    Algorithm(
        "pFedBayes", "personal",
        "Every weight is a Gaussian; each client's own distribution is held near a common prior that follows it.",
        'Zhang et al., "Personalized federated learning via variational Bayesian inference", ICML 2022',
        down="w: mu, rho", up="w_i: mu_i, rho_i",
        client_state="q_i (its own mu and rho)",
        deployed=beside_global("the means of q_i"),
        weights="uniform (paper) or samples",
        composes="FedPer; server optimizers while server_lr is 1; no weight decay, adapters or manual optimization",
    ),
)
# fmt: on
