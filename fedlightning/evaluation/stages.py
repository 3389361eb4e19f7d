"""Scores at the stages of a round: G (the server's model) and L1 (what each client would hold after receiving it).

L2 is scored inside the visit, while the trained model is there. Nothing here changes a client: L1 is evaluated on a
copy of its state, so absent clients are treated like those that took part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from fedlightning.engines.sequential import ClientStore
from fedlightning.evaluation.results import Row
from fedlightning.hooks import Job
from fedlightning.local import Evaluate
from fedlightning.messages import Update
from fedlightning.server import Server
from fedlightning.tensors import equal, load_state, module_state

Known = dict[tuple[str, str], dict[str, float]]
"""Scores that are there already, by (client, split): of clients that hold exactly the global model."""


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


def score_global(
    server: Server,
    module: LightningModule,
    evaluate: Evaluate,
    checkpoint: str = "latest",
    clients: Sequence[str] | None = None,
) -> list[Row]:
    """Score one model of the server on the data of ``clients``; by default on everybody's, and on the union."""
    rows = []
    for client in clients or server.clients:
        if "local" in evaluate.data:
            rows += _score(server, module, client, Evaluate(evaluate.splits), ("G", "global", checkpoint))
    if clients is None and "pooled" in evaluate.data:
        rows += _score(server, module, "all", Evaluate(evaluate.splits, ("pooled",)), ("G", "global", checkpoint))
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
    scores: Known = {}
    for row in known:
        if row.data == "local" and row.checkpoint == "latest":
            scores.setdefault((row.client, row.split), {})[row.metric] = row.value
    for client_id in server.clients:
        record = store.get(client_id)
        with server.runner.client(server.message(Job(client_id, work=0)), record, evaluating=True) as client:
            module = server.runner.personal_module(client, "L1")
            is_global = shared is not None and equal(module_state(module), shared)

            def report(split: str, found: dict[str, float], client: Any = client, module: Any = module) -> None:
                server.callbacks.event("on_client_evaluated", client, "L1", split, found, module)

            mark = ("L1", "personal", "latest")
            rows += _score(server, module, client_id, evaluate, mark, scores if is_global else {}, report)
            if client.record.checkpoints != record.checkpoints:
                kept = record.copy()
                kept.checkpoints = client.record.checkpoints
                store.put(client_id, kept)
    return rows


def checkpoint_rows(server: Server, store: ClientStore, evaluate: Evaluate) -> list[Row]:
    """Scores of the models that checkpoint callbacks selected, each at the round and stage it was selected in."""
    rows = []
    for kept in server.checkpoints.values():
        found = score_global(server, server.module_with(kept["model"]), evaluate, kept["name"])
        rows += [Row(**{**vars(row), "round": kept["round"]}) for row in found]
    for client_id in server.clients:
        for kept in store.get(client_id).checkpoints.values():
            module = deployed_module(server, store, client_id, kept["name"])
            found = _score(server, module, client_id, evaluate, (kept["stage"], "personal", kept["name"]))
            rows += [Row(**{**vars(row), "round": kept["round"]}) for row in found]
    return rows


def deployed_module(server: Server, store: ClientStore, client: str | None, checkpoint: str) -> LightningModule:
    """A module holding the global model, or the model that ``client`` deploys, latest or as a callback selected it.

    Raises:
        ValueError: for an unknown client or checkpoint, or where the method has no global model.
    """
    if client is not None and client not in server.clients:
        raise ValueError(f"There is no client '{client}'. The clients are {server.clients}.")
    kept = server.checkpoints if client is None else store.get(client).checkpoints
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
    with server.runner.client(server.message(Job(client, work=0)), store.get(client), evaluating=True) as visited:
        module = server.runner.personal_module(visited, chosen["stage"] if chosen is not None else "L1")
        if chosen is not None:
            load_state(module, chosen["model"])
    return module


def _score(
    server: Server,
    module: LightningModule,
    client: str,
    evaluate: Evaluate,
    mark: tuple[str, str, str],
    known: Known | None = None,
    report: Callable[[str, dict[str, float]], None] = lambda split, scores: None,
) -> list[Row]:
    """Rows of one model on one client's data; ``mark`` is (stage, model, checkpoint)."""
    stage, model, checkpoint = mark
    rows = []
    for split, data, loader in _loaders(server, client, evaluate):
        local = data == "local"
        scores = (known or {}).get((client, split), {}) if local else {}
        scores = scores or server.runner.scorer.score(module, loader, split)
        size = len(loader.dataset)  # type: ignore[arg-type]
        rows += [
            Row(server.round + 1, stage, model, checkpoint, data, split, client, metric, value, size)
            for metric, value in scores.items()
        ]
        if local:
            report(split, scores)
    return rows


def _loaders(server: Server, client: str, evaluate: Evaluate) -> Iterator[tuple[str, str, DataLoader[Any]]]:
    """The loaders that are there: (split, data, loader)."""
    data = server.runner.data
    for split in evaluate.splits:
        sources: dict[str, Callable[[], DataLoader[Any] | None]] = {}
        if "local" in evaluate.data:
            sources["local"] = partial(data.client_dataloader, client, split)
        if "pooled" in evaluate.data:
            sources["pooled"] = partial(data.pooled_dataloader, split)
        if "clients" in evaluate.data:
            others = [other for other in server.clients if other != client]
            sources |= {f"client:{other}": partial(data.client_dataloader, other, split) for other in others}
        for kind, make in sources.items():
            loader = make()
            if loader is not None and len(loader) > 0:
                yield split, kind, loader
