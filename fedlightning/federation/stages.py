"""Scores at the stages of a round: G (the server's model) and L1 (what each client would hold after receiving it).

L2 is scored inside the visit, while the trained model is there. Nothing here changes a client: L1 is evaluated on a
copy of its state, so absent clients are treated like those that took part. Where the scoring happens is the engine's
affair.
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
from fedlightning.scoring.tasks import EVERYBODY, Mark, ScoreClient, ScoreModel
from fedlightning.tensors import load_state, module_state
from fedlightning.visit.requests import Evaluate, Scores


def update_rows(updates: Iterable[Update]) -> list[Row]:
    """L2 scores and training metrics that came with the updates of a round."""
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
    """Stage G, where the method has a global model: one for all, or one per client's cluster."""
    module = server.global_module(None)
    mark = Mark(server.round + 1, "G", "global")
    if module is not None:
        return score_global(server, engine, module, evaluate, mark)

    def tasks() -> Iterator[ScoreModel]:
        own = replace(evaluate, data=tuple(data for data in evaluate.data if data == "local"))
        for client in server.clients:
            module = server.global_module(client)
            if module is not None:
                yield ScoreModel(module, (client,), own, mark)

    return [row for rows in engine.map(tasks()) for row in rows]


def score_global(server: Server, engine: Engine, module: LightningModule, evaluate: Evaluate, mark: Mark) -> list[Row]:
    """Score one model of the server on every client's data, and on the union."""
    tasks = []
    if "local" in evaluate.data:
        for clients in _shares(server.clients, engine.width):
            tasks.append(ScoreModel(module, clients, Evaluate(evaluate.splits), mark))
    if "pooled" in evaluate.data:
        tasks.append(ScoreModel(module, (EVERYBODY,), Evaluate(evaluate.splits, ("pooled",)), mark))
    return [row for rows in engine.map(tasks) for row in rows]


def _shares(clients: Sequence[str], width: int) -> list[tuple[str, ...]]:
    """The clients in order, in parts of nearly equal length: one part, or two for each task that runs at a time."""
    parts = min(1 if width == 1 else 2 * width, len(clients))
    ends = [len(clients) * part // parts for part in range(parts + 1)]
    return [tuple(clients[start:end]) for start, end in pairwise(ends)]


def stage_l1(server: Server, engine: Engine, evaluate: Evaluate, known: Sequence[Row] = ()) -> list[Row]:
    """Stage L1 of every client.

    Args:
        server: sends each client what it would send next.
        engine: carries it out; of the clients' records, only their ``checkpoints`` may change.
        evaluate: splits and data.
        known: stage G's rows of this round; a client that holds exactly the global model has its local scores there.
    """
    shared = module_state(server.module_with(server.model)) if known else None
    scores: dict[str, dict[str, Scores]] = {}
    for row in known:
        if row.data == "local" and row.checkpoint == "latest":
            scores.setdefault(row.client, {}).setdefault(row.split, {})[row.metric] = row.value
    mark = Mark(server.round + 1, "L1", "personal")
    tasks = (
        ScoreClient(
            server.message(Job(client, work=0)),
            evaluate,
            mark,
            others=server.clients,
            shared=shared,
            known=scores.get(client, {}),
        )
        for client in server.clients
    )
    return [row for rows in engine.map(tasks) for row in rows]


def checkpoint_rows(server: Server, engine: Engine, evaluate: Evaluate) -> list[Row]:
    """Scores of the models that checkpoint callbacks selected, each at the round and stage it was selected in."""
    rows = []
    for kept in server.checkpoints.values():
        mark = Mark(kept["round"], "G", "global", kept["name"])
        rows += score_global(server, engine, server.module_with(kept["model"]), evaluate, mark)

    def tasks() -> Iterator[ScoreClient]:
        for client in server.clients:
            for kept in engine.store.get(client).checkpoints.values():
                mark = Mark(kept["round"], kept["stage"], "personal", kept["name"])
                message = server.message(Job(client, work=0))
                yield ScoreClient(message, evaluate, mark, others=server.clients, kept=kept["model"])

    return rows + [row for found in engine.map(tasks()) for row in found]


def deployed_module(server: Server, engine: Engine, client: str | None, checkpoint: str) -> LightningModule:
    """A module holding the global model, or the model that ``client`` deploys, latest or as a callback selected it.

    Raises:
        ValueError: for an unknown client or checkpoint, or where the method has no global model.
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
