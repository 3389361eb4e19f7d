"""The algorithms, one row each: what a person needs to choose one. Classes are imported when they are asked for.

>>> from fedlightning.catalogue import create, list_algorithms
>>> list_algorithms("fed*")
['FedAvg', 'FedSGD', 'FedProx', 'FedAdam', 'FedPer', 'FedBN']
>>> create("fedprox", mu=0.01)
<fedlightning.callbacks.fedprox.FedProx object at ...>
"""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlightning.hooks import FederatedCallback


@dataclass(frozen=True)
class Option:
    """One argument of an algorithm: its name, type and default as text, and what it means."""

    name: str
    type: str
    default: str
    help: str


@dataclass(frozen=True)
class Algorithm:
    """One row of the catalogue.

    Attributes:
        name: how it is called, and the name of its class; class_path: where the class is.
        family: ``"global"`` (one model for all), ``"personal"`` (a model per client) or ``"baseline"``.
        sentence: what it does; paper: who proposed it.
        down, up: what travels to and from a client; client_state, server_state: what stays from round to round.
        deployed: the model that a client uses in the end, and which checkpoints fit.
        weights: how clients are weighted in the mean.
        composes: what it can be combined with, and what not.
    """

    name: str
    class_path: str
    family: str
    sentence: str
    paper: str
    down: str = "w"
    up: str = "w_i"
    client_state: str = "none"
    server_state: str = "none"
    deployed: str = "the global model; GlobalCheckpoint or LocalCheckpoint"
    weights: str = "samples (default), uniform or log"
    composes: str = "all that leaves the mean to the core"

    @property
    def config(self) -> str:
        """Its YAML file, relative to the repository."""
        return f"configs/algorithms/{self.name.lower()}.yaml"

    def load(self) -> type[FederatedCallback]:
        """The class."""
        module, _, name = self.class_path.rpartition(".")
        found: type[FederatedCallback] = getattr(importlib.import_module(module), name)
        return found

    def options(self) -> list[Option]:
        """The arguments, with types and defaults from the signature and texts from the docstring."""
        cls = self.load()
        texts = _argument_texts(cls)
        return [
            Option(name, _type_name(parameter.annotation), _default(parameter.default), texts.get(name, ""))
            for name, parameter in inspect.signature(cls).parameters.items()
        ]


def list_algorithms(filter: str = "*") -> list[str]:
    """Names of the algorithms that match ``filter`` (``"fed*"``) or are of that family (``"personal"``)."""
    wanted = filter.lower()
    return [a.name for a in ALGORITHMS if fnmatch.fnmatch(a.name.lower(), wanted) or a.family == wanted]


def find(name: str) -> Algorithm:
    """The row of an algorithm; upper and lower case, ``-`` and ``_`` make no difference.

    Raises:
        ValueError: there is none of that name; the sentence says which are close.
    """
    rows = {_plain(row.name): row for row in ALGORITHMS}
    if _plain(name) in rows:
        return rows[_plain(name)]
    close = [rows[key].name for key in difflib.get_close_matches(_plain(name), rows, n=3, cutoff=0.5)]
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(row.name for row in ALGORITHMS)}."
    raise ValueError(f"There is no algorithm '{name}'. {hint}")


def create(name: str, **options: Any) -> FederatedCallback:
    """Make an algorithm by its name, ready for ``FederatedTrainer(callbacks=[...])``.

    Args:
        name: as in :func:`list_algorithms`.
        options: arguments of its class.

    Raises:
        ValueError: an unknown name or option.
    """
    row = find(name)
    cls = row.load()
    known = inspect.signature(cls).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        have = f"It has {', '.join(known)}." if known else "It has no options."
        raise ValueError(f"{row.name} has no option '{unknown[0]}'. {have}")
    return cls(**options)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _argument_texts(cls: type) -> dict[str, str]:
    from docstring_parser import parse

    texts: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__):
        if not ancestor.__module__.startswith("fedlightning"):
            continue
        for parameter in parse(ancestor.__doc__ or "").params:
            for name in parameter.arg_name.split(","):  # "beta1, beta2: decay"
                texts[name.strip()] = " ".join((parameter.description or "").replace("``", "").split())
    return texts


def _type_name(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return "" if annotation is inspect.Parameter.empty else text.replace("Literal", "")


def _default(value: Any) -> str:
    return "required" if value is inspect.Parameter.empty else repr(value)


_PLAYER_FL_PAPER = (
    'Elhussein, Gürsoy, "PLayer-FL: a principled approach to personalized layer-wise cross-silo federated learning", '
    "2025"
)
_PERSONAL = "each client's own model; LocalCheckpoint (there is no global model)"

# fmt: off
ALGORITHMS: tuple[Algorithm, ...] = (
    Algorithm(
        "FedAvg", "fedlightning.callbacks.FedAvg", "global",
        "Clients train some epochs from the server's model; the server averages what comes back.",
        'McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017',
        composes="everything: it is the core's default, named",
    ),
    Algorithm(
        "FedSGD", "fedlightning.callbacks.FedSGD", "global",
        "One full-batch gradient step per client and round: one round is one central step.",
        'McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017',
        composes="server optimizers (FedAdam); needs local_steps=1 and a batch that holds a client's whole data",
    ),
    Algorithm(
        "FedProx", "fedlightning.callbacks.FedProx", "global",
        "FedAvg with a proximal term that holds each client near the server's model.",
        'Li et al., "Federated optimization in heterogeneous networks", MLSys 2020',
        composes="everything: it only corrects gradients of what travels",
    ),
    Algorithm(
        "SCAFFOLD", "fedlightning.callbacks.SCAFFOLD", "global",
        "Control variates at server and clients correct the clients' drift.",
        'Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning", ICML 2020',
        down="w, c", up="w_i, change of c_i (twice FedAvg's traffic)",
        client_state="c_i", server_state="c",
        weights="uniform (paper); samples or log",
        composes="gradient and sharing methods; server optimizers while server_lr is 1",
    ),
    Algorithm(
        "FedAdam", "fedlightning.callbacks.FedAdam", "global",
        "The server applies Adam to the clients' mean change.",
        'Reddi et al., "Adaptive federated optimization", ICLR 2021',
        server_state="m, v (first and second moment)",
        composes="client-side methods (FedProx, FedPer, FENDA); one server optimizer only",
    ),
    Algorithm(
        "FedYogi", "fedlightning.callbacks.FedYogi", "global",
        "FedAdam whose second moment moves by at most the new square: it forgets large changes slowly.",
        'Reddi et al., "Adaptive federated optimization", ICLR 2021',
        server_state="m, v (first and second moment)",
        composes="client-side methods (FedProx, FedPer, FENDA); one server optimizer only",
    ),
    Algorithm(
        "FedAdagrad", "fedlightning.callbacks.FedAdagrad", "global",
        "The server applies Adagrad to the clients' mean change.",
        'Reddi et al., "Adaptive federated optimization", ICLR 2021',
        server_state="m, v (first moment, sum of squares)",
        composes="client-side methods (FedProx, FedPer, FENDA); one server optimizer only",
    ),
    Algorithm(
        "FedAvgM", "fedlightning.callbacks.FedAvgM", "global",
        "FedAvg with momentum on the server.",
        'Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated visual '
        'classification", 2019',
        server_state="vel (velocity)",
        composes="client-side methods (FedProx, FedPer, FENDA) and FedNova; one server optimizer only",
    ),
    Algorithm(
        "FedNova", "fedlightning.callbacks.FedNova", "global",
        "Changes are normalised by the steps behind them, so that uneven work does not bias the mean.",
        'Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization", '
        "NeurIPS 2020",
        up="w_i, A_i (one number)",
        client_state="A_i",
        composes="FedProx (its pull is counted), FedPer, server optimizers (FedAvgM: the paper's server momentum); SGD",
    ),
    Algorithm(
        "PerFedAvg", "fedlightning.callbacks.PerFedAvg", "personal",
        "Meta-learning: a global model that is good after one gradient step on a client's own data.",
        'Fallah, Mokhtari, Ozdaglar, "Personalized federated learning with theoretical guarantees: a model-agnostic '
        'meta-learning approach", NeurIPS 2020',
        deployed="w after one step on own training data; LocalCheckpoint (w is the meta-model: GlobalCheckpoint)",
        weights="uniform (paper) or samples",
        composes="FedProx, FedPer, server optimizers; SGD, not with manual optimization",
    ),
    Algorithm(
        "PFedMe", "fedlightning.callbacks.PFedMe", "personal",
        "Personal models are held near a global one, which follows them (Moreau envelopes).",
        'T. Dinh, Tran, Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS 2020',
        client_state="theta_i (personal model)",
        deployed="theta_i; LocalCheckpoint (w is also a global model: GlobalCheckpoint)",
        weights="uniform (paper) or samples (authors' code)",
        composes="FedPer; server optimizers while server_rate is 1; plain SGD, not with manual optimization",
    ),
    Algorithm(
        "L2GD", "fedlightning.callbacks.L2GD", "personal",
        "A shared coin decides between a local step and a step towards the mean of all models.",
        'Hanzely, Richtárik, "Federated learning of a mixture of global and local models", 2020',
        down="xbar, m (aggregation steps in a row)", up="x_i",
        client_state="x_i, its learning rate", server_state="the next m",
        deployed="x_i after the aggregation steps; LocalCheckpoint (xbar is also a global model: GlobalCheckpoint)",
        weights="uniform (paper)",
        composes="FedPer, FedBN; plain SGD; needs local_steps (the coin decides how many)",
    ),
    Algorithm(
        "MOON", "fedlightning.callbacks.MOON", "global",
        "A contrastive loss draws representations to the global model's and away from the client's last model's.",
        'Li, He, Song, "Model-contrastive federated learning", CVPR 2021',
        client_state="its last local model",
        weights="samples (default) or uniform",
        composes="everything that leaves the loss to it: FedProx, server optimizers, FedPer, FedBN, PLayerFL",
    ),
    Algorithm(
        "FedLP", "fedlightning.callbacks.FedLP", "global",
        "Each client sends a random choice of its layers; a layer is averaged over those that sent it.",
        'Zhu et al., "FedLP: layer-wise pruning mechanism for communication-efficient federated learning", ICC 2023',
        up="some layers of w_i",
        weights="samples (default) or uniform (authors' code)",
        composes="FedProx, MOON, FedPer, FedBN, server optimizers",
    ),
    Algorithm(
        "FedLAMA", "fedlightning.callbacks.FedLAMA", "global",
        "Layers on which the clients agree are averaged less often.",
        'Lee, Zhang, Avestimehr, "Layer-wise adaptive model aggregation for scalable federated learning", AAAI 2023',
        down="the layers averaged since the last visit", up="the layers due",
        client_state="its model between averages", server_state="interval and discrepancy of each layer",
        weights="samples (default) or uniform",
        composes="FedProx, MOON, FedPer, FedBN; no other method that plans rounds",
    ),
    Algorithm(
        "HeteroFL", "fedlightning.callbacks.HeteroFL", "global",
        "Clients train the same network at the width they can afford; each entry is averaged over those that hold it.",
        'Diao, Ding, Tarokh, "HeteroFL: computation and communication efficient federated learning for heterogeneous '
        'clients", ICLR 2021',
        down="a slice of w", up="that slice, and which classes the client has",
        deployed="each client its slice; LocalCheckpoint. The full model: GlobalCheckpoint",
        weights="uniform (default) or samples, per element",
        composes="FedProx, MOON, FedPer, server optimizers; not SCAFFOLD; needs a chain of Linear, Conv and norm layers",
    ),
    Algorithm(
        "APFL", "fedlightning.callbacks.APFL", "personal",
        "Each client mixes a local model with the global one and learns how much of each.",
        'Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020',
        client_state="v_i (local model), a_i (its share), v_i's optimizer",
        deployed="a_i v_i + (1 - a_i) w; LocalCheckpoint (w is also a global model: GlobalCheckpoint)",
        weights="samples (default) or uniform (paper)",
        composes="FedProx and server optimizers on w; not with manual optimization",
    ),
    Algorithm(
        "FedPer", "fedlightning.callbacks.FedPer", "personal",
        "A shared body and a personal head, trained jointly.",
        'Arivazhagan et al., "Federated learning with personalization layers", 2019',
        down="u (body)", up="u_i",
        client_state="v_i (head)",
        deployed=_PERSONAL,
        weights="samples (default) or uniform",
        composes="FedProx, SCAFFOLD, server optimizers on the body; FedBN (what either keeps local stays local)",
    ),
    Algorithm(
        "LocalAdaptation", "fedlightning.callbacks.LocalAdaptation", "personal",
        "After the federation every client fine-tunes its own copy of the global model.",
        'Yu, Bagdasaryan, Shmatikov, "Salvaging federated learning by local adaptation", 2020',
        client_state="none; in the end the adapted copy",
        deployed="the adapted copy, from GlobalCheckpoint's selection where there is one; w is also a global model",
        weights="those of the method beside it",
        composes="every global method, FedPer, FedBN; not methods that deploy a model of their own (Ditto, APFL)",
    ),
    Algorithm(
        "Ditto", "fedlightning.callbacks.Ditto", "personal",
        "A personal model beside the global one, held near it; the global one is trained as if it were alone.",
        'Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through personalization", ICML 2021',
        client_state="v_i (its own model), v_i's optimizer where optimizers are kept",
        deployed="v_i; LocalCheckpoint (w is also a global model: GlobalCheckpoint)",
        weights="samples (default) or uniform",
        composes="everything that trains w (FedProx, SCAFFOLD, server optimizers, partial sharing)",
    ),
    Algorithm(
        "FedRep", "fedlightning.callbacks.FedRep", "personal",
        "A shared body and a personal head, trained in turn: first the head, then the body.",
        'Collins et al., "Exploiting shared representations for personalized federated learning", ICML 2021',
        down="u (body)", up="u_i",
        client_state="v_i (head)",
        deployed=_PERSONAL,
        weights="uniform (paper) or samples",
        composes="FedProx, SCAFFOLD, server optimizers on the body; FedBN",
    ),
    Algorithm(
        "FedBABU", "fedlightning.callbacks.FedBABU", "personal",
        "Only the body is trained, under a fixed common head; clients fine-tune after the last round.",
        'Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated image classification", ICLR 2022',
        down="u (body)", up="u_i",
        client_state="none; in the end the fine-tuned copy",
        deployed="the fine-tuned copy; (u, v^0) is also a global model: GlobalCheckpoint",
        weights="uniform (authors) or samples",
        composes="FedProx, SCAFFOLD, server optimizers on the body; FedBN",
    ),
    Algorithm(
        "LGFedAvg", "fedlightning.callbacks.LGFedAvg", "personal",
        "A personal encoder under a shared head: FedPer the other way round.",
        'Liang et al., "Think locally, act globally: federated learning with local and global representations", 2020',
        down="u (top layers)", up="u_i",
        client_state="v_i (encoder)",
        deployed=_PERSONAL,
        weights="samples (default) or uniform (authors' code)",
        composes="FedProx, SCAFFOLD, server optimizers on the top layers; FedBN",
    ),
    Algorithm(
        "MAPPER", "fedlightning.callbacks.MAPPER", "personal",
        "Each client deploys the best of several mixtures of a local model and the global one.",
        'Mansour et al., "Three approaches for personalization with applications to federated learning", 2020',
        up="w_i (the global half)",
        client_state="h_l (local half), lam (its share)",
        deployed="lam h_l + (1 - lam) w; LocalCheckpoint (w is also a global model: GlobalCheckpoint)",
        weights="uniform (paper) or samples",
        composes="FedProx, SCAFFOLD, server optimizers on the global half; not with manual optimization",
    ),
    Algorithm(
        "FedBN", "fedlightning.callbacks.FedBN", "personal",
        "FedAvg on everything except batch normalisation, which stays with each client.",
        'Li et al., "FedBN: federated learning on non-IID features via local batch normalization", ICLR 2021',
        down="w without BatchNorm", up="w_i without BatchNorm",
        client_state="BatchNorm parameters and statistics",
        deployed=_PERSONAL,
        weights="samples (default) or uniform (authors' code)",
        composes="FedProx, SCAFFOLD, server optimizers, FedPer; needs a module with BatchNorm",
    ),
    Algorithm(
        "FENDA", "fedlightning.callbacks.FENDA", "personal",
        "A shared and a private feature extractor under one private head.",
        'Tavakoli et al., "A comprehensive view of personalized federated learning on heterogeneous clinical datasets" '
        "(FENDA-FL), 2024",
        down="u (global extractor)", up="u_i",
        client_state="v1_i (local extractor), v2_i (head)",
        deployed=_PERSONAL,
        weights="samples (default) or uniform",
        composes="FedProx, SCAFFOLD, server optimizers on the global extractor; needs the name of the head",
    ),
    Algorithm(
        "PerFCL", "fedlightning.callbacks.PerFCL", "personal",
        "FENDA whose two extractors are told apart by two contrastive losses.",
        'Zhang et al., "Doubly contrastive representation learning for federated image recognition", Pattern Recognition '
        "139, 2023",
        down="u (global extractor)", up="u_i",
        client_state="v1_i (local extractor), v2_i (head), its last u_i",
        deployed=_PERSONAL,
        weights="samples (default) or uniform",
        composes="as FENDA; needs the name of the head",
    ),
    Algorithm(
        "FedProto", "fedlightning.callbacks.FedProto", "personal",
        "Only class prototypes travel; clients agree on where the classes lie in the space of representations.",
        'Tan et al., "FedProto: federated prototype learning across heterogeneous clients", AAAI 2022',
        down="a prototype per class", up="a prototype per class of the client's",
        client_state="its whole model", server_state="the prototypes",
        deployed=_PERSONAL,
        weights="uniform over the owners of a class (default) or samples",
        composes="FedProx has nothing to hold here; LocalCheckpoint; no method that shares weights",
    ),
    Algorithm(
        "FLIU", "fedlightning.callbacks.FLIU", "personal",
        "A client blends the model it had with the one it receives, by a fixed or size-dependent share.",
        'Hussaini, Theiß, Stein, "Local performance vs. out-of-distribution generalization ...", 2025',
        down="w, n, K",
        client_state="w_i (its own last model)",
        deployed="the blend; LocalCheckpoint. Newcomers use the global model: GlobalCheckpoint",
        weights="uniform (pseudocode) or samples",
        composes="FedProx, server optimizers",
    ),
    Algorithm(
        "PLayerFL", "fedlightning.callbacks.PLayerFL", "personal",
        "Shares the first layers only; how many, the clients' layer sensitivities say after the first epoch.",
        _PLAYER_FL_PAPER,
        down="round 1: w; then layers 1..p", up="round 1: one sensitivity per layer; then layers 1..p",
        client_state="layers p+1..L", server_state="p and the sensitivities",
        deployed=_PERSONAL,
        composes="FedProx, SCAFFOLD, server optimizers on the shared layers; needs at least two layers",
    ),
    Algorithm(
        "PLayerFLRandom", "fedlightning.callbacks.PLayerFLRandom", "baseline",
        "PLayer-FL with a random number of shared layers, drawn once: the control of PLayer-FL.",
        _PLAYER_FL_PAPER,
        down="layers 1..p", up="layers 1..p",
        client_state="layers p+1..L", server_state="p",
        deployed=_PERSONAL,
        composes="as PLayerFL",
    ),
    Algorithm(
        "FedFomo", "fedlightning.callbacks.FedFomo", "personal",
        "Clients download others' models and move towards those that lower their own validation loss.",
        'Zhang et al., "Personalized federated learning with first order model optimization", ICLR 2021',
        down="M models th_n", up="th_i and M scores",
        client_state="th_i (its own model)", server_state="P (who helps whom), the last round's models (O(m * model))",
        deployed=_PERSONAL,
        weights="learned",
        composes="FedPer, FedBN (what they keep stays); not with server optimizers or terms with a common anchor",
    ),
    Algorithm(
        "FedAMP", "fedlightning.callbacks.FedAMP", "personal",
        "Each client is pulled to its own mixture of all models, most to those near its own.",
        'Huang et al., "Personalized cross-silo federated learning on non-IID data", AAAI 2021',
        down="u_i (its mixture)",
        client_state="w_i (its own model)", server_state="all w_j (O(N * model))",
        deployed=_PERSONAL,
        weights="attention by distances",
        composes="FedProx (adds to the pull), FedPer, FedBN; not with server optimizers",
    ),
    Algorithm(
        "HeurFedAMP", "fedlightning.callbacks.HeurFedAMP", "personal",
        "FedAMP with attention by the angles between models, for deep networks.",
        'Huang et al., "Personalized cross-silo federated learning on non-IID data", AAAI 2021',
        down="u_i (its mixture)",
        client_state="w_i (its own model)", server_state="all w_j (O(N * model))",
        deployed=_PERSONAL,
        weights="attention by cosines",
        composes="as FedAMP",
    ),
    Algorithm(
        "FedALA", "fedlightning.callbacks.FedALA", "personal",
        "Clients learn, element by element, how much of the global head they take.",
        'Zhang et al., "FedALA: adaptive local aggregation for personalized federated learning", AAAI 2023',
        client_state="its own top layers and W",
        deployed="the merged model; LocalCheckpoint (w is also a global model: GlobalCheckpoint)",
        composes="FedProx, SCAFFOLD, server optimizers, FedBN; the top layers must travel",
    ),
    Algorithm(
        "PFedLA", "fedlightning.callbacks.PFedLA", "personal",
        "A hypernetwork per client learns at the server how much of whose layers that client gets.",
        'Ma et al., "Layer-wised model aggregation for personalized federated learning" (pFedLA), CVPR 2022',
        down="thbar_i (its mixture)",
        server_state="all theta_j (O(N * model)) and N hypernetworks",
        deployed=_PERSONAL,
        weights="learned",
        composes="FedProx, FedPer, FedBN; not with server optimizers",
    ),
    Algorithm(
        "HeurpFedLA", "fedlightning.callbacks.HeurpFedLA", "personal",
        "pFedLA that does not send the layers for which a client relies on itself most.",
        'Ma et al., "Layer-wised model aggregation for personalized federated learning" (pFedLA), CVPR 2022',
        down="thbar_i without k layers",
        client_state="theta_i (its own model)", server_state="all theta_j (O(N * model)) and N hypernetworks",
        deployed=_PERSONAL,
        weights="learned",
        composes="as PFedLA",
    ),
    Algorithm(
        "IFCA", "fedlightning.callbacks.IFCA", "personal",
        "Several models; each client trains the one that fits its data best.",
        'Ghosh et al., "An efficient framework for clustered federated learning", NeurIPS 2020',
        down="K models theta_j", up="w_i (option 1: a gradient) and its choice",
        server_state="K models, who chose what last",
        deployed="the model that fits the client's data best; LocalCheckpoint",
        weights="uniform (paper) or samples, within a cluster",
        composes="FedProx, FedPer, FedBN; not with SCAFFOLD or server optimizers",
    ),
    Algorithm(
        "HypCluster", "fedlightning.callbacks.HypCluster", "personal",
        "IFCA with models averaged by samples and the deployed one chosen on validation data.",
        'Mansour et al., "Three approaches for personalization with applications to federated learning", 2020',
        down="q models h_k", up="w_i and its choice",
        server_state="q models, who chose what last",
        deployed="the model that fits the client's data best; LocalCheckpoint",
        weights="samples (default) or uniform, within a cluster",
        composes="as IFCA",
    ),
    Algorithm(
        "FedIT", "fedlightning.callbacks.FedIT", "global",
        "Fine-tunes a frozen network by low-rank adapters; only those train and travel.",
        'Zhang et al., "Towards building the federated GPT: federated instruction tuning", ICASSP 2024',
        down="A, B of each adapted layer (and the head, by option)", up="A_i, B_i",
        client_state="the frozen network",
        deployed="the frozen network with the mean adapters; GlobalCheckpoint or LocalCheckpoint",
        composes="FedProx, SCAFFOLD, server optimizers on the adapters; FedPer(personal=[...]) keeps some local; "
        'needs nn.Linear layers and peft: pip install "fedlightning[lora]"',
    ),
    Algorithm(
        "FFALoRA", "fedlightning.callbacks.FFALoRA", "global",
        "FedIT with the first factor of every adapter frozen: half the traffic, and the mean is exact.",
        'Sun et al., "Improving LoRA in privacy-preserving federated learning", ICLR 2024',
        down="B of each adapted layer (and the head, by option)", up="B_i",
        client_state="the frozen network and A",
        deployed="the frozen network with the mean adapters; GlobalCheckpoint or LocalCheckpoint",
        composes="as FedIT",
    ),
    Algorithm(
        "Local", "fedlightning.callbacks.Local", "baseline",
        "Every client trains alone (siloed): what it has without a federation.",
        "Baseline: Silo in FENDA-FL, CLT in FLIU, Local in PLayer-FL",
        down="nothing", up="nothing",
        client_state="its whole model and optimizer",
        deployed=_PERSONAL,
        weights="none",
        composes="LocalCheckpoint; there is nothing to correct or to average",
    ),
    Algorithm(
        "Central", "fedlightning.callbacks.Central", "baseline",
        "One model trained on the union of all clients' data: what could be had if data could move.",
        "Baseline: Central in FENDA-FL",
        down="w, to one virtual client that holds all data", up="w",
        client_state="the optimizer (of the virtual client)",
        weights="none",
        composes="GlobalCheckpoint; no other algorithm",
    ),
)
# fmt: on
