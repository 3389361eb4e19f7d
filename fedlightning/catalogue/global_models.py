"""One model for all clients."""

from __future__ import annotations

from fedlightning.catalogue.algorithm import Algorithm

# fmt: off
_FEDAVG = Algorithm(
    "FedAvg", "global",
    "Clients train some epochs from the server's model; the server averages what comes back.",
    'McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017',
    composes="everything: it is the core's default, named",
)

_FEDADAM = Algorithm(
    "FedAdam", "global",
    "The server applies Adam to the clients' mean change.",
    'Reddi et al., "Adaptive federated optimization", ICLR 2021',
    server_state="m, v (first and second moment)",
    composes="client-side methods (FedProx, FedPer, FENDA); one server optimizer only",
    module="fedopt",
)

_FEDIT = Algorithm(
    "FedIT", "global",
    "Fine-tunes a frozen network by low-rank adapters; only those train and travel.",
    'Zhang et al., "Towards building the federated GPT: federated instruction tuning", ICASSP 2024',
    down="A, B of each adapted layer (and the head, by option)", up="A_i, B_i",
    leaves="the adapters (and the head, by option); never the network",
    client_state="the frozen network",
    deployed="the frozen network with the mean adapters; GlobalCheckpoint or LocalCheckpoint",
    composes="FedProx, SCAFFOLD, server optimizers on the adapters; FedPer(personal=[...]) keeps some local; "
    'needs nn.Linear layers and peft: pip install "fedlightning[lora]"',
    module="lora",
)

ROWS = (
    _FEDAVG,
    _FEDAVG.variant(
        "FedSGD", "One full-batch gradient step per client and round: one round is one central step.",
        composes="server optimizers (FedAdam); needs local_steps=1 and a batch that holds a client's whole data",
        module="fedavg",
    ),
    Algorithm(
        "FedProx", "global",
        "FedAvg with a proximal term that holds each client near the server's model.",
        'Li et al., "Federated optimization in heterogeneous networks", MLSys 2020',
        composes="everything: it only corrects gradients of what travels",
    ),
    Algorithm(
        "SCAFFOLD", "global",
        "Control variates at server and clients correct the clients' drift.",
        'Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning", ICML 2020',
        down="w, c", up="w_i, change of c_i (twice FedAvg's traffic)",
        client_state="c_i", server_state="c",
        weights="uniform (paper); samples or log",
        composes="gradient and sharing methods; server optimizers while server_lr is 1",
    ),
    Algorithm(
        "MaxFL", "global",
        "A model that as many clients as possible find better than their own: who is near that counts most.",
        'Cho et al., "Maximizing global model appeal in federated learning", TMLR 2024',
        up="w_i, q_i, whether w satisfies the client",
        client_state="rho_i (its requirement)", server_state="who has one",
        weights="q_i: largest where F_i(w) is near rho_i",
        composes="FedProx and other terms in the gradient; not with server optimizers or parts that stay local",
    ),
    Algorithm(
        "TIFF", "global",
        "FedAvg that clients pay tokens for, and are paid by for what they contribute.",
        'Han et al., "TIFF: tokenized incentive for federated learning", IEEE CLOUD 2022',
        server_state="the model, balances, contributions, the ledger",
        weights="samples (default) or uniform",
        composes="FedProx and other terms in the gradient; not with server optimizers or parts that stay local",
    ),
    _FEDADAM,
    _FEDADAM.variant(
        "FedYogi", "FedAdam whose second moment moves by at most the new square: it forgets large changes slowly.",
        module="fedopt",
    ),
    _FEDADAM.variant(
        "FedAdagrad", "The server applies Adagrad to the clients' mean change.",
        server_state="m, v (first moment, sum of squares)",
        module="fedopt",
    ),
    _FEDADAM.variant(
        "FedAvgM", "FedAvg with momentum on the server.",
        paper='Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated visual '
        'classification", 2019',
        server_state="vel (velocity)",
        composes="client-side methods (FedProx, FedPer, FENDA) and FedNova; one server optimizer only",
    ),
    Algorithm(
        "FedNova", "global",
        "Changes are normalised by the steps behind them, so that uneven work does not bias the mean.",
        'Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization", '
        "NeurIPS 2020",
        up="w_i, A_i (one number)",
        client_state="A_i",
        composes="FedProx (its pull is counted), FedPer, server optimizers (FedAvgM: the paper's server momentum); SGD",
    ),
    Algorithm(
        "MOON", "global",
        "A contrastive loss draws representations to the global model's and away from the client's last model's.",
        'Li, He, Song, "Model-contrastive federated learning", CVPR 2021',
        client_state="its last local model",
        weights="samples (default) or uniform",
        composes="everything that leaves the loss to it: FedProx, server optimizers, FedPer, FedBN, PLayerFL",
    ),
    Algorithm(
        "FedLP", "global",
        "Each client sends a random choice of its layers; a layer is averaged over those that sent it.",
        'Zhu et al., "FedLP: layer-wise pruning mechanism for communication-efficient federated learning", ICC 2023',
        up="some layers of w_i",
        weights="samples (default) or uniform (authors' code)",
        composes="FedProx, MOON, FedPer, FedBN, server optimizers",
    ),
    Algorithm(
        "FedLAMA", "global",
        "Layers on which the clients agree are averaged less often.",
        'Lee, Zhang, Avestimehr, "Layer-wise adaptive model aggregation for scalable federated learning", AAAI 2023',
        down="the layers averaged since the last visit", up="the layers due",
        client_state="its model between averages", server_state="interval and discrepancy of each layer",
        weights="samples (default) or uniform",
        composes="FedProx, MOON, FedPer, FedBN; no other method that plans rounds",
    ),
    Algorithm(
        "HeteroFL", "global",
        "Clients train the same network at the width they can afford; each entry is averaged over those that hold it.",
        'Diao, Ding, Tarokh, "HeteroFL: computation and communication efficient federated learning for heterogeneous '
        'clients", ICLR 2021',
        down="a slice of w", up="that slice, and which classes the client has",
        deployed="each client its slice; LocalCheckpoint. The full model: GlobalCheckpoint",
        weights="uniform (default) or samples, per element",
        composes="FedProx, MOON, FedPer, server optimizers; not SCAFFOLD; needs a chain of Linear, Conv and norm layers",
    ),
    Algorithm(
        "FedRolex", "global",
        "Clients train a window of units that moves on in every round, so that all units are trained alike.",
        'Alam et al., "FedRolex: model-heterogeneous federated learning with rolling sub-model extraction", NeurIPS 2022',
        down="the round's window of w", up="that window",
        deployed="the full model; GlobalCheckpoint",
        weights="uniform (default) or samples, per element",
        composes="FedProx, server optimizers; not SCAFFOLD, nor what keeps a part of the model at a client; needs a chain of "
        "Linear, Conv and norm layers",
    ),
    Algorithm(
        "FederatedDropout", "global",
        "Each client trains a random choice of the units, drawn anew in every round: a small dense network.",
        'Caldas et al., "Expanding the reach of federated learning by reducing client resource requirements", 2018',
        down="some units of w", up="those units",
        deployed="the full model; GlobalCheckpoint",
        weights="samples (default) or uniform, per element",
        composes="as FedRolex",
    ),
    Algorithm(
        "FjORD", "global",
        "Every local step trains the network at a random width, so that it can be deployed at any.",
        'Horvath et al., "FjORD: fair and accurate federated learning under heterogeneous targets with ordered dropout", '
        "NeurIPS 2021",
        down="the first units of w", up="those units",
        deployed="each client its largest width; LocalCheckpoint. The full model: GlobalCheckpoint",
        weights="samples (default) or uniform, per element",
        composes="FedProx, FedPer, server optimizers; not SCAFFOLD, nor other terms in the loss; needs a chain of Linear, "
        "Conv and norm layers",
    ),
    Algorithm(
        "FedAsync", "global",
        "Asynchronous: every model that arrives is mixed into the server's at once, less the older it is.",
        'Xie, Koyejo, Gupta, "Asynchronous federated optimization", OPT workshop 2020',
        down="w of version tau", up="w_i",
        weights="none: alpha s(staleness) of each arrival",
        composes="client-side methods (FedProx, FedPer, FedBN, FENDA, Ditto, APFL) and server optimizers; needs an "
        "asynchronous loop (trainer.loop)",
    ),
    Algorithm(
        "FedBuff", "global",
        "Asynchronous: the server makes a step whenever a buffer of clients' changes is full.",
        'Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022',
        down="w of version tau", up="w_i",
        weights="s(staleness), divided by the size of the buffer",
        composes="as FedAsync",
    ),
    _FEDIT,
    _FEDIT.variant(
        "FFALoRA", "FedIT with the first factor of every adapter frozen: half the traffic, and the mean is exact.",
        paper='Sun et al., "Improving LoRA in privacy-preserving federated learning", ICLR 2024',
        down="B of each adapted layer (and the head, by option)", up="B_i",
        leaves="B of each adapter (and the head, by option); never the network",
        client_state="the frozen network and A",
        composes="as FedIT",
        module="lora",
    ),
    Algorithm(
        "FLoRA", "global",
        "Adapters of differing ranks are stacked, not averaged, and merged into the network in every round.",
        'Wang et al., "FLoRA: federated fine-tuning large language models with heterogeneous low-rank adaptations", '
        "NeurIPS 2024",
        down="the stacked A, B of the rounds that a client has missed, or W of a layer where that is smaller",
        up="A_i, B_i of the client's rank (and the head, by option)",
        leaves="the adapters (and the head, by option); never the network",
        client_state="the merged network", server_state="the newest stacks, what each client has",
        deployed="the merged network; GlobalCheckpoint or LocalCheckpoint",
        composes="FedProx and other terms in gradient or loss, LocalAdaptation; not server optimizers, SCAFFOLD, nor what "
        'keeps a part of the model at a client; needs nn.Linear layers and peft: pip install "fedlightning[lora]"',
    ),
    Algorithm(
        "HetLoRA", "global",
        "Adapters of differing ranks are padded for the mean, truncated for each client, and pruned by clients.",
        'Cho et al., "Heterogeneous LoRA for federated fine-tuning of on-device foundation models", EMNLP 2024',
        down="the first r_i rows of A and B (and the head, by option)", up="A_i, B_i of the client's rank",
        leaves="the adapters (and the head, by option); never the network",
        client_state="the frozen network", server_state="ranks of clients that have pruned",
        deployed="each client the first r_i rows; LocalCheckpoint. All rows: GlobalCheckpoint",
        weights="norm of the client's change (default), samples, uniform or log",
        composes="FedProx, server optimizers on the padded adapters, FedPer; not SCAFFOLD nor methods that plan rounds; "
        'needs nn.Linear layers and peft: pip install "fedlightning[lora]"',
    ),
)
# fmt: on
