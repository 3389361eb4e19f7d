"""The models to use: given to a user one by one, and written as native Lightning checkpoints when a run ends.

Those of clients are made by tasks (:mod:`fedlightning.deployment.tasks`), where the clients' records and data are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from fedlightning.client.client_errors import client_failure, in_words
from fedlightning.contract import NEWCOMER
from fedlightning.deployment import checkpoints
from fedlightning.deployment.tasks import Deploy, exporter_of, file_of, no_checkpoint
from fedlightning.deployment.uploaded_checkpoints import Brought
from fedlightning.engines.attempts import stop_at
from fedlightning.engines.base import Engine
from fedlightning.engines.server_model import ServerModel
from fedlightning.errors import listed
from fedlightning.run.folder import RunFolder
from fedlightning.server.evaluation import deploy_what_is_sent
from fedlightning.server.server import AFTER_LAST_ROUND, Server
from fedlightning.storage.files import read_json, readable_json, write_text_atomically, writing
from fedlightning.tensors import module_state


def deployed(server: Server, engine: Engine, client: str | None, checkpoint: str) -> LightningModule | Deploy:
    """Return the model of the server that is to be used, or the task that makes that of a client."""
    if client is not None and client not in server.num_samples and client not in server.held_out:
        raise ValueError(f"There is no client '{client}'. The clients are {listed(map(repr, server.clients), 20)}.")
    if client is None:
        chosen, known = server.selected(checkpoint), [kept["name"] for kept in server.checkpoints.values()]
    else:
        own = engine.store.note(client).checkpoints.values()
        chosen, known = next((entry for entry in own if entry["name"] == checkpoint), None), [k["name"] for k in own]
        ours = server.selected(checkpoint, client) if server.callbacks.role("model_of") is not None else None
        if chosen is None and ours is not None:
            return server.module_with(ours["model"], ours["of"])
    if chosen is None and checkpoint != "latest":
        raise ValueError(f"There is no checkpoint '{checkpoint}' here; there is {known}.")
    if client is None:
        module = server.global_with(chosen["model"]) if chosen is not None else server.global_module(None)
        if module is None:
            raise ValueError(
                "This federation has no global model: part of the model stays with the clients. Name a client."
            )
        return module
    message = server.message(server.job(client, work=0, tag=NEWCOMER if client in server.held_out else ""))
    return Deploy(message, kept="" if chosen is None else checkpoint)


def deployed_module(server: Server, engine: Engine, client: str | None, checkpoint: str) -> LightningModule:
    """Return a module that holds the global model, or the model that a client deploys; arguments as of :func:`deployed`."""
    found = deployed(server, engine, client, checkpoint)
    if isinstance(found, LightningModule):
        return found
    module = engine.ask(found).module
    assert module is not None
    return module


def export(run: RunFolder, server: Server, engine: Engine) -> bool:
    """Write the models to use as native Lightning checkpoints: the selected ones, else the latest.

    The file of a client that deploys the global model is a link to the global one: no disk full of copies. Of more clients
    than :data:`LINKED`, only those that were visited and have a model of their own have a file. A client whose model
    cannot be made has no file, and is told as a client that could not be scored is. Where the clients' machines do
    not have the run's folder, each writes into one of its own, and `checkpoints/clients.json` says where; or
    (`engine.brings_models`) they are sent, and lie where they always do.
    """
    told = len(server.failures)
    folder = run.path / "checkpoints"
    with writing(folder):
        (folder / "clients").mkdir(parents=True, exist_ok=True)
    names = [kept["name"] for kept in server.checkpoints.values() if "of" not in kept]
    whole = None
    if names or server.global_module(None) is not None:
        name = next(iter(names), "latest")
        whole = deployed_module(server, engine, None, name)
        about = {"checkpoint": name} | spent_in(run.path)
        exporter_of(server.blueprint).save(folder / "global.ckpt", whole, about, server.architecture().name)
    shared = ServerModel(whole, server.blueprint) if whole is not None and engine.shares_disk else None
    where: dict[str, str | None] = {}
    unsent: dict[str, str] = {}
    clients = _with_files(server, engine)
    tasks = _tasks(server, engine, clients, folder / "clients", shared, unsent, spent_in(run.path))
    answers = map(Brought(server, folder).keep, engine.map(tasks)) if engine.brings_models else engine.map(tasks)
    found = {one.client: one for one in answers}
    for client in clients:
        path, answer = folder / "clients" / file_of(client), found.get(client)
        if answer is None or answer.reason is not None:
            reason = no_checkpoint(client, unsent[client] if answer is None else str(answer.reason))
            stop_at(engine.attempts.policy, reason, AFTER_LAST_ROUND)
            server.note_failure(client, reason, "checkpoint", AFTER_LAST_ROUND, "not written")
            with writing(path):
                path.unlink(missing_ok=True)  # of an earlier end of this run
        elif answer.is_shared and len(server.clients) > LINKED:
            with writing(path):
                path.unlink(missing_ok=True)
        elif answer.is_shared:
            checkpoints.link(path, folder / "global.ckpt")
        elif not engine.shares_disk and not engine.brings_models:
            where[client] = answer.path
            with writing(path):
                path.unlink(missing_ok=True)  # of an earlier end of this run, which brought it here
    places = folder / "clients.json"
    with writing(folder):
        if where:
            write_text_atomically(places, readable_json(where))
        else:
            places.unlink(missing_ok=True)
    return len(server.failures) > told


def spent_in(folder: Path | None) -> dict[str, Any]:
    """Return what the models of a run have spent, as its `privacy.json` says: an exported file carries it along."""
    if folder is None or not (folder / PRIVACY).exists():
        return {}
    told = read_json(folder / PRIVACY)
    total = told.get("together", told)
    if total["epsilon"] is None:
        return {}
    return {"privacy": {name: total[name] for name in ("epsilon", "delta")} | {"unit": told.get("unit", "client")}}


PRIVACY = "privacy.json"
LINKED = 1000
"""Clients up to which each has a file of its own among the exported checkpoints, be it a link to the global one."""


def _with_files(server: Server, engine: Engine) -> list[str]:
    """Return the clients of which files may be written: all, or of very many those that may have a model of their own."""
    if len(server.clients) <= LINKED:
        return server.clients
    visited = [client for client in server.clients if client in engine.store]
    if server.is_mixed or not deploy_what_is_sent(server, engine, module_state(server.module_with(server.model))):
        return visited
    notes = ((client, engine.store.note(client)) for client in visited)
    return [client for client, note in notes if note.is_personal or note.checkpoints]


def _tasks(
    server: Server,
    engine: Engine,
    clients: list[str],
    folder: Path,
    shared: ServerModel | None,
    unsent: dict[str, str],
    spent: Mapping[str, Any],
) -> Iterator[Deploy]:
    """Yield the tasks; note in `unsent` why a client could be sent no message."""
    place = str(folder) if engine.shares_disk else None
    for client in clients:
        name = next((entry["name"] for entry in engine.store.note(client).checkpoints.values()), "")
        about = {"checkpoint": name or "latest", **spent}
        try:
            message = server.message(server.job(client, work=0))
        except Exception as error:  # of an algorithm
            unsent[client] = in_words(client_failure(error))
            continue
        yield Deploy(
            message, kept=name, write=True, folder=place, about=about, shared=shared, bring=engine.brings_models
        )
