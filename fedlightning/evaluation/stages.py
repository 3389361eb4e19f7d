"""Scores at the stages of a round: G (the server's model) and L1 (what each client would hold after receiving it).

L2 is scored inside the visit, while the trained model is there. Nothing here changes a client: L1 is evaluated on a
copy of its state, so absent clients are treated like those that took part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning.pytorch import LightningModule

from fedlightning.engines.sequential import ClientStore
from fedlightning.evaluation.results import Row
from fedlightning.hooks import Job
from fedlightning.local import Evaluate
from fedlightning.messages import Update
from fedlightning.server import Server
from fedlightning.tensors import State, equal, load_state, module_state

Scores = dict[str, float]


def update_rows(updates: Iterable[Update]) -> list[Row]:
    """L2 scores and training metrics that came with the updates of a round."""
    rows = []
    for update in updates:
        number = update.round + 1
        for metric, value in update.metrics.items():
            rows.append(
                Row(
                    number, "L2", "personal", "latest", "local", "train", update.client, metric, value, update.num_samples
                )
            )
        for stage, data, split, metric, value, size in update.evaluations:
            rows.append(Row(number, stage, "personal", "latest", data, split, update.client, metric, value, size))
    return rows


def score_global(
    server: Server,
    module: LightningModule,
    evaluate: Evaluate,
    checkpoint: str = "latest",
    clients: Sequence[str] | None = None,
) -> list[Row]:
    """Score one model of the server on every client's data, and on the union."""
    runner, number = server.runner, server.round + 1
    rows = []
    for split in evaluate.splits:
        targets = [(c, "local", runner.data.client_dataloader(c, split)) for c in clients or server.clients]
        if "pooled" in evaluate.data and clients is None:
            targets.append(("all", "pooled", runner.data.pooled_dataloader(split)))
        for client, data, loader in targets:
            if loader is None or len(loader) == 0:
                continue
            size = len(loader.dataset)  # type: ignore[arg-type]
            for metric, value in runner.scorer.score(module, loader, split).items():
                rows.append(Row(number, "G", "global", checkpoint, data, split, client, metric, value, size))
    return rows


def stage_g(server: Server, evaluate: Evaluate) -> list[Row]:
    """Stage G, where the method has a global model: one for all, or one per client's cluster."""
    module = server.global_module(None)
    if module is not None:
        return score_global(server, module, evaluate)
    rows = []
    for client in server.clients:
        module = server.global_module(client)
        if module is not None:
            rows += score_global(server, module, evaluate, clients=[client])
    return rows


def stage_l1(server: Server, store: ClientStore, evaluate: Evaluate, known: Sequence[Row] = ()) -> list[Row]:
    """Stage L1 of every client.

    Args:
        server: sends each client what it would send next.
        store: the clients' records; only their ``checkpoints`` may change.
        evaluate: splits and data.
        known: stage G's rows of this round; a client that holds exactly the global model has its local scores there.
    """
    rows: list[Row] = []
    shared = module_state(server.module_with(server.model)) if known else None
    known_local = {
        (row.client, row.split, row.metric): row for row in known if row.data == "local" and row.checkpoint == "latest"
    }
    for client in server.clients:
        rows += _client_l1(server, store, client, evaluate, shared, known_local)
    return rows


def _client_l1(
    server: Server,
    store: ClientStore,
    client_id: str,
    evaluate: Evaluate,
    shared: State | None,
    known: dict[tuple[str, str, str], Row],
) -> list[Row]:
    runner, number = server.runner, server.round + 1
    record = store.get(client_id)
    rows = []
    with runner.client(server.message(Job(client_id, work=0)), record, evaluating=True) as client:
        module = runner.personal_module(client, "L1")
        is_global = shared is not None and equal(module_state(module), shared)
        for split in evaluate.splits:
            for data in evaluate.data:
                local = data == "local"
                loader = runner.data.client_dataloader(client_id, split) if local else runner.data.pooled_dataloader(split)
                if loader is None or len(loader) == 0:
                    continue
                owner = client_id if local else "all"
                if is_global:
                    where = [key for key in known if key[:2] == (owner, split)] if local else []
                    scores = {key[2]: known[key].value for key in where}
                else:
                    scores = {}
                scores = scores or runner.scorer.score(module, loader, split)
                size = len(loader.dataset)  # type: ignore[arg-type]
                rows += [
                    Row(number, "L1", "personal", "latest", data, split, client_id, metric, value, size)
                    for metric, value in scores.items()
                ]
                if local:
                    runner.callbacks.event("on_client_evaluated", client, "L1", split, scores, module)
        if client.record.checkpoints != record.checkpoints:
            kept = record.copy()
            kept.checkpoints = client.record.checkpoints
            store.put(client_id, kept)
    return rows


def checkpoint_rows(server: Server, store: ClientStore, evaluate: Evaluate) -> list[Row]:
    """Scores of the models that checkpoint callbacks selected, each at the round and stage it was selected in."""
    rows = []
    for kept in server.checkpoints.values():
        module = server.module_with(kept["model"])
        found = score_global(server, module, evaluate, kept["name"])
        rows += [Row(**{**vars(row), "round": kept["round"]}) for row in found]
    for client_id in server.clients:
        record = store.get(client_id)
        for kept in record.checkpoints.values():
            with server.runner.client(server.message(Job(client_id, work=0)), record, evaluating=True) as client:
                module = server.runner.personal_module(client, kept["stage"])
                load_state(module, kept["model"])
                for split in evaluate.splits:
                    for data in evaluate.data:
                        loader = (
                            server.runner.data.client_dataloader(client_id, split)
                            if data == "local"
                            else server.runner.data.pooled_dataloader(split)
                        )
                        if loader is None or len(loader) == 0:
                            continue
                        size = len(loader.dataset)  # type: ignore[arg-type]
                        scores = server.runner.scorer.score(module, loader, split)
                        rows += [
                            Row(kept["round"], kept["stage"], "personal", kept["name"], data, split, client_id, m, v, size)
                            for m, v in scores.items()
                        ]
    return rows


def deployed_module(server: Server, store: ClientStore, client: str | None, checkpoint: str) -> LightningModule:
    """A module holding the global model, or the model that ``client`` deploys, latest or as a callback selected it.

    Raises:
        ValueError: for an unknown client or checkpoint, or where the method has no global model.
    """
    kept = server.checkpoints if client is None else store.get(client).checkpoints
    chosen = next((entry for entry in kept.values() if entry["name"] == checkpoint), None)
    if chosen is None and checkpoint != "latest":
        raise ValueError(f"There is no checkpoint '{checkpoint}' here; there is {[k['name'] for k in kept.values()]}.")
    if client is None:
        module = server.module_with(chosen["model"]) if chosen is not None else server.global_module(None)
        if module is None:
            raise ValueError("This federation has no global model: part of the model stays with the clients. Name a client.")
        return module
    if client not in server.clients:
        raise ValueError(f"There is no client '{client}'. The clients are {server.clients}.")
    with server.runner.client(server.message(Job(client, work=0)), store.get(client), evaluating=True) as visited:
        module = server.runner.personal_module(visited, chosen["stage"] if chosen is not None else "L1")
        if chosen is not None:
            load_state(module, chosen["model"])
    return module
