"""Harmony. The way through a round, and where each step is:

1. The server asks clients it does not know for their modalities (`plan_round`, `on_send`).
2. Stage 1: each client trains one network per modality (`local_phases`, `on_train_batch_start`); `reduce` averages them.
3. Stage 2: clients with several modalities train encoders and fusion; `regroup` clusters them and averages the fusion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from fedlightning.algorithm import (
    Client,
    Extra,
    Facts,
    Job,
    Message,
    Newcomers,
    Phase,
    Plan,
    Server,
    Setup,
    State,
    Update,
    WeightingName,
    Wire,
    address,
    contributors,
    warn,
)
from fedlightning.callbacks.shared.memberships import Clusters, clusters_of, in_client_order
from fedlightning.callbacks.shared.modalities import (
    Parts,
    PassesOver,
    bias,
    encoders_of,
    holder_of,
    parts_of,
    refuse_blind_training,
    rows_with,
    samples_with,
)
from fedlightning.callbacks.shared.server_models import NO_SERVER_STEP
from fedlightning.ranges import ClientCount, RoundCountOrShare, make_init
from fedlightning.tensors import WeightedMean, clone, select
from fedlightning.wrappers import mix

ASK, UNIMODAL, FUSION = "modalities", "unimodal", "fusion"
PASSED_OVER = "passed_over"
"""Batches of stage 1, in all visits of a client, in which no sample had the modality that was training."""


@make_init
class Harmony(Clusters):
    r"""Two stages for clients with different sensors: a network per modality, then the fusion within clusters.

    Ouyang, Xie, Fu, Cheng, Pan, Ling, Xing, Zhou, Huang, "Harmony: heterogeneous multi-modal federated learning through
    disentangled model training", MobiSys 2023.

    * Stage 1: a client trains for each of its modalities the encoder and a classifier of its own, apart from the others.
      The server averages them over the clients that have the modality.
    * Stage 2: clients with several modalities begin with these encoders and train everything. Their bias
      ``d_k(j) = 1 - cos(encoder_j, encoder_j at the start of the stage)`` goes to the server. Among clients with equal
      modalities it divides each column by its maximum, finds ``num_clusters`` clusters by k-means and averages only the
      fusion (all that belongs to no modality) within them. Encoders stay with the clients.
    * Down: stage 1: the networks of the client's modalities; stage 2: its cluster's fusion. Up: the same, and ``d``.
    * State: of a client its encoders at the start of stage 2; at the server who has what, each client's fusion, ``d``.
    * Deployed: of a client with one modality the network of stage 1, else its own encoders with its cluster's fusion.

    The module must take samples with one modality through that modality's classifier, and be
    ``MultimodalNet(unimodal_heads=True)`` or like it. **In stage 1 the fusion is not trained**: the scores of clients
    with several modalities are those of an untrained one until stage 2. The authors' client adds the mean update to a
    classifier that has the update already; here it takes the mean itself. Their learning rates (encoders 1e-4, classifier
    1e-3 in stage 2) belong into ``configure_optimizers``.

    Args:
        stage1: Rounds of stage 1: a share of all rounds (float) or a number (int). Default 2/3 (authors: 200 and 100
            epochs). ``1.0``: no stage 2.
        num_clusters: G. Default 3 (authors).
        encoders: By modality, names or prefixes of the entries of its encoder; an empty list is the whole module. ``None``
            (default): the submodules of the ``ModuleDict`` called ``encoders``.
        heads: Likewise the classifiers of single modalities. ``None``: those of the ``ModuleDict`` called ``heads``.
        weighting: ``"uniform"`` (authors' code, default), ``"samples"`` or ``"log"``, in both stages.

    Raises:
        ValueError: If an argument is outside its range; before round 1, if the module lacks encoders or heads; in stage 2,
            if no client has several modalities.

    Example:
        >>> biases = torch.tensor([[0.1, 0.2], [0.1, 0.19], [0.9, 0.01]])  # of three clients for two modalities
        >>> clusters_of(biases, 2, seed=0)
        [0, 0, 1]
    """

    facts = Facts(
        needs=[NO_SERVER_STEP],
        newcomers=Newcomers(
            no_model="finds a client's fusion by the encoders that it has trained, and has none for one that never trained"
        ),
    )

    stage1: RoundCountOrShare = 2 / 3
    num_clusters: ClientCount = 3
    encoders: Parts | None = None
    heads: Parts | None = None
    weighting: WeightingName | None = "uniform"

    def check(self, setup: Setup) -> None:
        """Refuse modules without the parts, those that train blindly, and callbacks that work on one global model."""
        encoders = encoders_of(setup, self.encoders, self.key)
        heads = parts_of(setup.module, self.heads, "heads")
        missing = [name for name in encoders if name not in heads]
        if missing and len(encoders) > 1:
            raise ValueError(
                f"Harmony trains a classifier for each modality, and {type(setup.template).__name__} has none for "
                f"{', '.join(missing)}. Use MultimodalNet(unimodal_heads=True), or set heads={{modality: [names]}}."
            )
        if len(encoders) > 1:
            refuse_blind_training(setup, {m: [*encoders[m], *heads[m]] for m in encoders}, self.key)

    def wire(self, module: nn.Module) -> Wire:
        """Declare which modalities a client has, and its biases, up."""
        return Wire(up={"present": Extra((-1,), low=0.0, high=1.0, due=(ASK,)), "bias": Extra((-1,), due=(FUSION,))})

    # -- what belongs to whom ------------------------------------------------------------------------------------------
    def networks(self, module: nn.Module) -> dict[str, list[str]]:
        """Return by modality the entries of its encoder and classifier."""
        heads = parts_of(module, self.heads, "heads")
        return {m: [*part, *heads.get(m, ())] for m, part in parts_of(module, self.encoders, "encoders").items()}

    def fusion(self, module: nn.Module, names: Iterable[str]) -> list[str]:
        """Return those of `names` that belong to no modality."""
        owned = {name for part in self.networks(module).values() for name in part}
        return [name for name in names if name not in owned]

    def in_stage_1(self, server: Server) -> bool:
        """Return True in the rounds of stage 1."""
        return server.round < int(server.state[self.key]["stage1"])

    # -- server --------------------------------------------------------------------------------------------------------
    def on_federation_start(self, server: Server) -> None:
        """Fix the length of stage 1, which a run that is made longer later does not change."""
        rounds = self.stage1 if isinstance(self.stage1, int) else round(self.stage1 * server.max_rounds)
        server.state[self.key] = {
            "stage1": int(rounds), "modalities": {}, "classifiers": {}, "clusters": {}, "bias": {}
        }  # fmt: skip

    def plan_round(self, server: Server) -> Plan:
        """Ask who has what, then train single modalities, or the fusion."""
        asked = server.participants() if self.in_stage_1(server) else list(server.clients)
        unknown = [client for client in asked if client not in server.state[self.key]["modalities"]]
        if unknown:
            answers = yield [Job(client, work=0, down=(), returns=(), tag=ASK) for client in unknown]
            self._note_modalities(server, answers)
        server_state = server.state[self.key]
        networks, shared = self.networks(server.module), set(server.shared_names())
        returned = set(server.returned_names())
        if self.in_stage_1(server):
            jobs = []
            for client in asked:
                names = [n for m in server_state["modalities"].get(client, ()) for n in networks[m]]
                if names:
                    down, up = (tuple(n for n in names if n in travelling) for travelling in (shared, returned))
                    jobs.append(Job(client, down=down, returns=up, tag=UNIMODAL))
            if jobs:
                yield jobs
            return
        several = [client for client in server.clients if len(server_state["modalities"].get(client, ())) > 1]
        if not several:
            raise ValueError(
                "Harmony's stage 2 is for clients with several modalities, and no client has more than one. Use stage1=1.0."
            )
        fusion = self.fusion(server.module, server.kinds)
        jobs = []
        for client in self._drawn(server, several):
            names = fusion if client in server_state["classifiers"] else [
                *(n for m in server_state["modalities"][client] for n in networks[m]), *fusion
            ]  # fmt: skip
            down, up = tuple(n for n in names if n in shared), tuple(n for n in fusion if n in returned)
            jobs.append(Job(client, down=down, returns=up, tag=FUSION, keep=True))
        self.regroup(server, contributors((yield jobs)))

    def _note_modalities(self, server: Server, answers: Sequence[Update]) -> None:
        server_state, modalities = server.state[self.key], list(self.networks(server.module))
        modalities_by_client = dict(server_state["modalities"])
        for update in answers:
            if update.error is None:
                has_modality = update.extras[self.key]["present"].tolist()
                modalities_by_client[update.client] = [
                    m for m, has in zip(modalities, has_modality, strict=True) if has
                ]
        server.state[self.key] = {**server_state, "modalities": in_client_order(server, modalities_by_client)}

    @staticmethod
    def _drawn(server: Server, several: list[str]) -> list[str]:
        """Return as many clients with several modalities as take part in a round."""
        count = min(len(server.participants()), len(several))
        places = torch.randperm(len(several), generator=server.rng("nodes of stage 2", "participation"))[:count]
        return [several[place] for place in sorted(places.tolist())]

    def reduce(self, server: Server, updates: list[Update]) -> State:
        """Average each modality's network over the clients that sent it; nothing in stage 2, where clusters are averaged."""
        mean = WeightedMean()
        for update in updates if self.in_stage_1(server) else ():
            mean.add(update.state, server.weight(update))
        return mean.result()

    def regroup(self, server: Server, updates: Sequence[Update]) -> None:
        """Cluster the clients of each set of modalities by their biases, and average the fusion within clusters.

        Args:
            server: The server, whose state changes.
            updates: What clients sent in this round, with the fusion and the biases.
        """
        server_state = server.state[self.key]
        answers = {update.client: update for update in updates}
        biases = server_state["bias"] | {c: update.extras[self.key]["bias"] for c, update in answers.items()}
        classifiers = dict(server_state["classifiers"])
        clusters: dict[str, str] = {}
        sets: dict[tuple[str, ...], list[str]] = {}
        for client in server.clients:
            if client in biases:
                sets.setdefault(tuple(server_state["modalities"][client]), []).append(client)
        for modalities, members in sets.items():
            rows, seed = torch.stack([biases[client] for client in members]), server.blueprint.settings.seed
            labels = clusters_of(rows, self.num_clusters, address(seed, self.key, server.round, *modalities))
            for k in sorted(set(labels)):
                cluster = [client for client, label in zip(members, labels, strict=True) if label == k]
                clusters |= dict.fromkeys(cluster, f"{'+'.join(modalities)} {k + 1}")
                mean = WeightedMean()
                for client in cluster:
                    if client in answers:
                        mean.add(answers[client].state, server.weight(answers[client]))
                classifiers |= {client: mean.result() for client in cluster if client in answers}
        server.state[self.key] = {
            **server_state,
            "bias": in_client_order(server, biases),
            "classifiers": in_client_order(server, classifiers),
            "clusters": in_client_order(server, clusters),
        }

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send a client its own fusion, and for an evaluation no encoders that it has trained on itself."""
        server_state = server.state.get(self.key, {})
        fusion = server_state.get("classifiers", {}).get(job.client)
        if fusion is None:
            return
        if job.tag != FUSION:
            allowed = set(self.fusion(server.module, message.state))
            message.state = {name: value for name, value in message.state.items() if name in allowed}
        message.state = {**message.state, **select(fusion, set(fusion) & set(message.state))}

    def global_module(self, server: Server, client: str | None) -> LightningModule | None:
        """Return the averaged model where there is one modality; of several there is no model for all."""
        alone = len(self.networks(server.module)) == 1 and len(server.shared_names()) == len(server.kinds)
        return server.module_with(server.model) if alone else None

    # -- client --------------------------------------------------------------------------------------------------------
    def on_visit_start(self, client: Client) -> None:
        """Find the modalities; keep the encoders with which stage 2 begins."""
        client.scratch[self.key] = self._present(client)
        client_state = client.state.get(self.key, {})
        if client.message.tag == FUSION and "start" not in client_state:
            encoders = parts_of(client.module, self.encoders, "encoders")
            names = {name for part in encoders.values() for name in part}
            start = {name: value for name, value in client.module.named_parameters() if name in names}
            client.state[self.key] = {
                **client_state, "start": clone({name: value.detach() for name, value in start.items()}, "cpu")
            }  # fmt: skip

    def local_phases(self, client: Client) -> Iterable[Phase]:
        """Train one modality after the other in stage 1, everything at once in stage 2."""
        if client.message.tag != UNIMODAL:
            yield Phase()
            return
        networks, kind = self.networks(client.module), type(client.module)
        mix(client.module, PassesOver)
        try:
            for place, (modality, names) in enumerate(networks.items()):
                if client.scratch[self.key][place]:
                    client.scratch[ASK] = modality
                    whole = len(networks) == 1 and len(names) == len(client.entries)
                    yield Phase("fit" if place == 0 else modality, train=None if whole else tuple(names))
        finally:
            client.module.__class__ = kind
            vars(client.module).pop("passes_over", None)
        client.scratch.pop(ASK, None)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """In stage 1 take away the other modalities, and samples without this one; pass over a batch that has only such.

        Raises:
            ValueError: If samples lack the modality and the batch is a tuple, which cannot be changed.
        """
        modality, x = self.client.scratch.get(ASK), holder_of(batch)
        if modality is None or x is None:
            return
        rows = rows_with(x[modality]) if modality in x else torch.zeros(0, dtype=torch.bool)
        vars(pl_module)["passes_over"] = not bool(rows.any())
        if not bool(rows.any()):
            self.client.scratch[PASSED_OVER] = self.client.scratch.get(PASSED_OVER, 0) + 1
            return
        for other in self.networks(pl_module):
            if other != modality:
                x.pop(other, None)
        if not bool(rows.all()):
            if not isinstance(batch, list):
                raise ValueError(f"some samples lack {modality!r}; let the loader give lists [inputs, labels]")
            batch[:] = apply_to_collection(batch, Tensor, lambda values: values[rows])

    def on_send(self, client: Client, update: Update) -> None:
        """Send the modalities, or the biases."""
        if passed_over := client.scratch.get(PASSED_OVER, 0):
            self._count(client, passed_over)
        if client.message.tag == ASK:
            update.extras[self.key] = {"present": self._present(client).float()}
        elif client.message.tag == FUSION and client.contributed:
            has_modality = client.scratch[self.key].tolist()
            encoders = parts_of(client.module, self.encoders, "encoders")
            start, now = client.state[self.key]["start"], client.entries
            biases = [
                bias(start, now, names) for names, has in zip(encoders.values(), has_modality, strict=True) if has
            ]
            update.extras[self.key] = {"bias": torch.stack(biases)}

    def _count(self, client: Client, passed_over: int) -> None:
        """Count batches without a sample to train on in the client's state; say so the first time."""
        client_state = client.state.get(self.key, {})
        if PASSED_OVER not in client_state:
            warn(
                f"Harmony passes over batches of client '{client.id}' in which no sample has the modality that trains: "
                f"{passed_over} in round {client.round + 1}. A larger batch size leaves fewer of them."
            )
        client.state[self.key] = {**client_state, PASSED_OVER: client_state.get(PASSED_OVER, 0) + passed_over}

    def check_update(self, server: Server, message: Message, update: Update) -> None:
        """Refuse other modalities, and another number of biases than the client has modalities."""
        extras, num_modalities = update.extras.get(self.key, {}), len(self.networks(server.module))
        if "present" in extras and len(extras["present"]) != num_modalities:
            raise ValueError(f"it tells of {len(extras['present'])} modalities, and there are {num_modalities}")
        client_modalities = server.state.get(self.key, {}).get("modalities", {}).get(update.client)
        if "bias" in extras and client_modalities is not None and len(extras["bias"]) != len(client_modalities):
            raise ValueError(f"it has {len(extras['bias'])} biases for {len(client_modalities)} modalities")

    def _present(self, client: Client) -> Tensor:
        """Return which modalities the client's training data have, bool `(modalities,)`."""
        modalities = list(self.networks(client.module))
        counts = [samples_with(batch, modalities).cpu() for batch in client.loader("train") or ()]
        total = torch.stack(counts).sum(0) if counts else torch.zeros(len(modalities))
        return total > 0
