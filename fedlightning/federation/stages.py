"""Scores at the stages of a round: G (the server's model) and L1 (what each client would hold after receiving it).

L2 is scored inside the visit, while the trained model is there. Nothing here changes a client: L1 is evaluated on a
copy of its state, so absent clients are treated like those that took part. The engine decides where models are scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from lightning.pytorch import LightningModule

from fedlightning.federation.engine import Engine
from fedlightning.federation.server import Server
from fedlightning.hooks import Job
from fedlightning.messages import Update
from fedlightning.scoring.results import Row
from fedlightning.scoring.tasks import EVERYBODY, ScoreClient, ScoredModel, ScoreModel
from fedlightning.tensors import load_state, module_state
from fedlightning.visit.requests import Evaluate, Scores


def update_rows(updates: Iterable[Update]) -> list[Row]:
    """Return the L2 scores and training metrics that came with the updates of a round."""
    rows = []
    for update in updates:
        number, client = update.round + 1, update.client
        rows += [
            Row(number, "L2", "personal", "latest", "local", "train", client, metric, value, update.num_samples)
            for metric, value in update.metrics.items()
        ]
        rows += [
            Row(number, stage, "personal", "latest", data, split, client, metric, value, size)
            for stage, data, split, metric, value, size in update.evaluations
        ]
    return rows


def stage_g(server: Server, engine: Engine, evaluate: Evaluate) -> list[Row]:
    """Score stage G, where the method has a global model: one for all, or one per client's cluster."""
    module = server.global_module(None)
    scored = ScoredModel(server.round + 1, "G", "global")
    if module is not None:
        return score_global(server, engine, module, evaluate, scored)

    def tasks() -> Iterator[ScoreModel]:
        own = replace(evaluate, data=tuple(data for data in evaluate.data if data == "local"))
        for client in server.clients:
            module = server.global_module(client)
            if module is not None:
                yield ScoreModel(module, (client,), own, scored)

    return [row for rows in engine.map(tasks()) for row in rows]


def score_global(
    server: Server, engine: Engine, module: LightningModule, evaluate: Evaluate, scored: ScoredModel
) -> list[Row]:
    """Score one model of the server on every client's data, and on the union."""
    tasks = []
    if "local" in evaluate.data:
        for clients in _shares(server.clients, engine.width):
            tasks.append(ScoreModel(module, clients, Evaluate(evaluate.splits), scored))
    if "pooled" in evaluate.data:
        tasks.append(ScoreModel(module, (EVERYBODY,), Evaluate(evaluate.splits, ("pooled",)), scored))
    return [row for rows in engine.map(tasks) for row in rows]


def _shares(clients: Sequence[str], width: int) -> list[tuple[str, ...]]:
    """The clients in order, in parts of nearly equal length: one part, or two for each task that runs at a time."""
    parts = min(1 if width == 1 else 2 * width, len(clients))
    ends = [len(clients) * part // parts for part in range(parts + 1)]
    return [tuple(clients[start:end]) for start, end in pairwise(ends)]


def stage_l1(server: Server, engine: Engine, evaluate: Evaluate, known: Sequence[Row] = ()) -> list[Row]:
    """Score stage L1 of every client.

    Args:
        server: Sends each client what it would send next.
        engine: Carries it out; of the clients' records, only their `checkpoints` may change.
        evaluate: Splits and data.
        known: Stage G's rows of this round; a client that holds exactly the global model takes its local scores from
            there.
    """
    shared = module_state(server.module_with(server.model)) if known else None
    scores: dict[str, dict[str, Scores]] = {}
    for row in known:
        if row.data == "local" and row.checkpoint == "latest":
            scores.setdefault(row.client, {}).setdefault(row.split, {})[row.metric] = row.value
    scored = ScoredModel(server.round + 1, "L1", "personal")
    tasks = (
        ScoreClient(
            server.message(Job(client, work=0)),
            evaluate,
            scored,
            others=server.clients,
            shared=shared,
            known=scores.get(client, {}),
        )
        for client in server.clients
    )
    return [row for rows in engine.map(tasks) for row in rows]


def checkpoint_rows(server: Server, engine: Engine, evaluate: Evaluate) -> list[Row]:
    """Score the models that checkpoint callbacks selected, each at the round and stage it was selected in."""
    rows = []
    for kept in server.checkpoints.values():
        scored = ScoredModel(kept["round"], "G", "global", kept["name"])
        rows += score_global(server, engine, server.module_with(kept["model"]), evaluate, scored)

    def tasks() -> Iterator[ScoreClient]:
        for client in server.clients:
            for kept in engine.store.get(client).checkpoints.values():
                scored = ScoredModel(kept["round"], kept["stage"], "personal", kept["name"])
                message = server.message(Job(client, work=0))
                yield ScoreClient(message, evaluate, scored, others=server.clients, kept=kept["model"])

    return rows + [row for found in engine.map(tasks()) for row in found]


def deployed_module(server: Server, engine: Engine, client: str | None, checkpoint: str) -> LightningModule:
    """Return a module that holds the global model, or the model that a client deploys.

    Args:
        server: The server.
        engine: Opens the client, and has its record.
        client: The client's id; `None`: the global model.
        checkpoint: `"latest"`, or the name of a checkpoint callback.

    Raises:
        ValueError: For an unknown client or checkpoint, or where the method has no global model.
    """
    if client is not None and client not in server.clients:
        raise ValueError(f"There is no client '{client}'. The clients are {server.clients}.")
    kept = server.checkpoints if client is None else engine.store.get(client).checkpoints
    chosen = next((entry for entry in kept.values() if entry["name"] == checkpoint), None)
    if chosen is None and checkpoint != "latest":
        raise ValueError(f"There is no checkpoint '{checkpoint}' here; there is {[k['name'] for k in kept.values()]}.")
    if client is None:
        module = server.module_with(chosen["model"]) if chosen is not None else server.global_module(None)
        if module is None:
            raise ValueError(
                "This federation has no global model: part of the model stays with the clients. Name a client."
            )
        return module
    runner, message = engine.runner, server.message(Job(client, work=0))
    with runner.client(message, engine.store.get(client), evaluating=True) as visited:
        module = runner.personal_module(visited, chosen["stage"] if chosen is not None else "L1")
        if chosen is not None:
            load_state(module, chosen["model"])
    return module
