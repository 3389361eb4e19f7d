"""The models to use: given to a user one by one, and written as native Lightning checkpoints when a run ends.

Those of clients are made by tasks (:mod:`fedlightning.deployment.export`), where the clients' records and data are.

The models that clients deploy, as tasks: each is written where the client is, handed over, or predicts there.

Checkpoints of clients that come from other machines: checked, and written beside the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.client_errors import client_failure, describe_error
from fedlightning.client.record import ClientRecord
from fedlightning.client.runtime import ClientRuntime
from fedlightning.client.trainer_context import ClientLogger
from fedlightning.client.visit import find_personal_module, open_client
from fedlightning.compat.lightning_runs import detached_copy, quiet
from fedlightning.compat.system import file_name_of
from fedlightning.contract import NEWCOMER, Stage
from fedlightning.contract.messages import Message
from fedlightning.deployment import checkpoints
from fedlightning.deployment.checkpoints import Exporter, describe, is_ours
from fedlightning.engines.attempts import stop_at
from fedlightning.engines.contract import Engine, PlainTask
from fedlightning.engines.score_tasks import ServerModel
from fedlightning.errors import listed
from fedlightning.fast.eligibility import of_callback
from fedlightning.run.folder import RunFolder
from fedlightning.server.evaluation import deploy_what_is_sent
from fedlightning.server.server import AFTER_LAST_ROUND, Server
from fedlightning.storage.files import (
    read_json,
    read_tensors,
    readable_json,
    save_tensors,
    seal,
    write_text_atomically,
    writing,
)
from fedlightning.tensors import State, equal, load_state, module_state, state_digest


@dataclass(frozen=True)
class Deployed:
    """What became of a client's model.

    Attributes:
        client: The client's id.
        module: The model, where it was to be handed over.
        path: The file that was written, as the client's machine names it.
        is_shared: Whether it is the global model, so that nothing was written.
        reason: Why there is none; `None`: there is.
        content: What the file holds, where that was to be brought.
    """

    client: str
    module: LightningModule | None = None
    path: str | None = None
    is_shared: bool = False
    reason: str | None = None
    content: dict[str, Any] | None = None


@dataclass(frozen=True)
class Deploy(PlainTask):
    """Make the model that a client deploys, and hand it over or write it as a Lightning checkpoint.

    It works on a copy of the client's record, and trains nothing.

    Attributes:
        message: What the server would send next.
        kept: Name of the checkpoint callback whose selected model it is; empty: the model as it stands.
        stage: Stage at which that is taken; of a selected model, the one at which it was selected.
        write: Write a file, and do not hand the model over.
        folder: Folder of the file; `None`: the one that the client's own machine has for such.
        about: Plain values to keep in the file.
        shared: The global model: a client that deploys just that writes nothing. `None`: it writes in any case.
        bring: Answer with what the file holds, beside writing it.
    """

    message: Message
    kept: str = ""
    stage: Stage = "L1"
    write: bool = False
    folder: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    shared: ServerModel | None = None
    bring: bool = False

    @property
    def client(self) -> str:
        return self.message.client

    @property
    def address(self) -> tuple[int, str, str]:
        return self.message.round + 1, "checkpoint", self.client

    @property
    def num_bytes(self) -> int:
        return self.message.num_bytes

    def run(self, runner: ClientRuntime, record: ClientRecord) -> tuple[Deployed, ClientRecord | None]:
        """Make the model. Where it is to be handed over, what fails is raised; else the answer says why there is no file."""
        if not self.write:
            return Deployed(self.client, self.module(runner, record)), None
        try:
            module = None if self._is_plainly_shared(runner, record) else self.module(runner, record)
        except BaseException as error:  # of the user's code: the algorithm asks it for losses, say
            return self.lost(describe_error(client_failure(error))), None
        if module is None or self._is_shared(runner, type(module), module_state(module)):
            return Deployed(self.client, is_shared=True), None
        folder = runner.folder if self.folder is None else Path(self.folder)
        if folder is None:
            return self.lost("its machine was given no folder to write to"), None
        path = folder / file_of(self.client)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        about = {"client": self.client, **self.about}
        exporter_of(runner.blueprint).save(path, module, about, runner.blueprint.architecture_of(self.client))
        return Deployed(self.client, path=str(path), content=self._content(path, module) if self.bring else None), None

    def _is_plainly_shared(self, runner: ClientRuntime, record: ClientRecord) -> bool:
        """Return True if the client deploys the global model, as far as it is seen without building its module."""
        blueprint = runner.blueprint
        entries = blueprint.plain_entries(record.personal | self.message.state, self.client)
        if self.kept or entries is None or runner.callbacks.role("personal_module") is not None:
            return False
        return self._is_shared(runner, type(blueprint.template_of(blueprint.architecture_of(self.client))), entries)

    def _is_shared(self, runner: ClientRuntime, kind: type, entries: State) -> bool:
        shared = self.shared
        return shared is not None and shared.kind(runner.blueprint) is kind and equal(entries, shared.state)

    def _content(self, path: Path, module: LightningModule) -> dict[str, Any]:
        """Return what is in the checkpoint, without the description of a module that the server can write itself."""
        content: dict[str, Any] = read_tensors(path)
        if is_ours(module):
            content["fedlightning"].pop("module", None)
        return content

    def module(self, runner: ClientRuntime, record: ClientRecord) -> LightningModule:
        """Return the module."""
        entries = record.checkpoints.values()
        kept = next((entry for entry in entries if entry["name"] == self.kept), None) if self.kept else None
        if self.kept and kept is None:
            raise ValueError(
                f"There is no checkpoint '{self.kept}' here; there is {[entry['name'] for entry in entries]}."
            )
        with open_client(runner, self.message, record, evaluating=True) as visited:
            module = find_personal_module(runner, visited, self.stage if kept is None else kept["stage"])
            entries = visited.record.checkpoints.values()
            load_state(module, next((entry["model"] for entry in entries if entry["name"] == self.kept), {}))
        return module

    def lost(self, reason: str) -> Deployed:
        """An answer that says why there is no model."""
        return Deployed(self.client, reason=reason)

    def failure(self, answer: Deployed) -> tuple[str, str] | None:
        """Return why there is no model, if there is none."""
        return None if answer.reason is None else (self.client, no_checkpoint(self.client, answer.reason))


@dataclass(frozen=True)
class Predict(PlainTask):
    """Predict with a model on the test data of a client, where these are.

    Attributes:
        deploy: The client's model.
        model: A model of the server, in place of the client's.
        client: The client; `None`: everybody, on the union of all test data.
        arguments: Arguments of the Trainer that predicts.
    """

    deploy: Deploy | None
    model: ServerModel | None
    client: str | None
    arguments: Mapping[str, Any]

    @property
    def address(self) -> tuple[int, str, str]:
        return 0, "prediction", self.client or "everybody"

    def run(self, runner: ClientRuntime, record: ClientRecord) -> tuple[tuple[Any] | None, ClientRecord | None]:
        """Return what Lightning's `predict` gives, alone in a tuple; `None` if there are no test data."""
        data = runner.data
        loader = (
            runner.pooled_dataloader("test") if self.client is None else data.client_dataloader(self.client, "test")
        )
        if loader is None:
            return None, None
        if self.model is not None:
            module = self.model.built(runner.blueprint)
        else:
            assert self.deploy is not None
            module = self.deploy.module(runner, record)
        return (predictions(module, loader, self.arguments, runner.settings.callbacks),), None

    def lost(self, reason: str) -> tuple[Any] | None:
        """Raise: who asked waits for predictions."""
        raise RuntimeError(f"There are no predictions: {reason}.")


def predictions(
    module: LightningModule, dataloaders: Any, arguments: Mapping[str, Any], callbacks: Iterable[Callback]
) -> list[Any] | None:
    """Predict with a module, quietly; those of the run's Lightning callbacks that have hooks of prediction are called."""
    called = [callback for callback in callbacks if any("predict" in hook for hook in of_callback(type(callback)))]
    with quiet():
        trainer = Trainer(
            callbacks=called,
            devices=1,
            logger=ClientLogger(),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **arguments,
        )
        return trainer.predict(module, dataloaders=dataloaders)


def file_of(client: str) -> str:
    """Return the name of a client's checkpoint."""
    return f"{file_name_of(client)}.ckpt"


def no_checkpoint(client: str, reason: str) -> str:
    """Return the sentence of a client without a checkpoint."""
    return f"no checkpoint of client '{client}' could be made: {reason}"


def exporter_of(blueprint: Blueprint) -> Exporter:
    """Return the exporter of a blueprint: one in a process, since a Trainer takes longer to make than a small file."""
    exporter: Exporter = blueprint.tools.setdefault("exporter", None) or Exporter(blueprint.template_of, blueprint.base)
    blueprint.tools["exporter"] = exporter
    return exporter


def deployed(server: Server, engine: Engine, client: str | None, checkpoint: str) -> LightningModule | Deploy:
    """Return the model of the server that is to be used, or the task that makes that of a client."""
    if client is not None and client not in server.num_samples and client not in server.held_out:
        raise ValueError(f"There is no client '{client}'. The clients are {listed(map(repr, server.clients), 20)}.")
    if client is None:
        chosen, names = server.selected(checkpoint), [kept["name"] for kept in server.checkpoints.values()]
    else:
        records = engine.store.note(client).checkpoints.values()
        chosen, names = (
            next((entry for entry in records if entry["name"] == checkpoint), None),
            [k["name"] for k in records],
        )
        ours = server.selected(checkpoint, client) if server.callbacks.role("model_of") is not None else None
        if chosen is None and ours is not None:
            return server.module_with(ours["model"], ours["of"])
    if chosen is None and checkpoint != "latest":
        raise ValueError(f"There is no checkpoint '{checkpoint}' here; there is {names}.")
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
    model_or_task = deployed(server, engine, client, checkpoint)
    if isinstance(model_or_task, LightningModule):
        return model_or_task
    module = engine.ask(model_or_task).module
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
    failures = len(server.failures)
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
    answers_by_client = {answer.client: answer for answer in answers}
    for client in clients:
        path, answer = folder / "clients" / file_of(client), answers_by_client.get(client)
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
    return len(server.failures) > failures


def spent_in(folder: Path | None) -> dict[str, Any]:
    """Return what the models of a run have spent, as its `privacy.json` says: an exported file carries it along."""
    if folder is None or not (folder / PRIVACY).exists():
        return {}
    account = read_json(folder / PRIVACY)
    total = account.get("together", account)
    if total["epsilon"] is None:
        return {}
    return {"privacy": {name: total[name] for name in ("epsilon", "delta")} | {"unit": account.get("unit", "client")}}


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
            unsent[client] = describe_error(client_failure(error))
            continue
        yield Deploy(
            message, kept=name, write=True, folder=place, about=about, shared=shared, bring=engine.brings_models
        )


OWN, HPARAMS = "fedlightning", "hyper_parameters"


class Brought:
    """Writes what clients' checkpoints hold into the run's folder, as if they had been written there.

    Args:
        server: Knows the architectures.
        folder: `checkpoints` of the run, where `global.ckpt` is already, if there is one.
    """

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._folder = server, folder
        path = folder / "global.ckpt"
        self._whole = read_tensors(path) if path.exists() and server.global_module(None) is not None else None

    def keep(self, answer: Deployed) -> Deployed:
        """Write a client's checkpoint; return the answer without it. One that is the global model is not written."""
        if answer.reason is not None:
            return answer
        content = answer.content
        reason = self._fault(answer.client, content)
        if reason is not None or content is None:
            return Deployed(answer.client, reason=reason)
        if self._whole is not None and _alike(content, self._whole):
            return Deployed(answer.client, is_shared=True)
        path = self._folder / "clients" / file_of(answer.client)
        temporary = path.with_name(path.name + ".tmp")
        with writing(path):
            temporary.unlink(missing_ok=True)
            self._describe(answer.client, content)
            self._put_base(answer.client, content)
            save_tensors(content, temporary)
            seal(temporary)
            os.replace(temporary, path)
        return Deployed(answer.client, path=str(path))

    def _put_base(self, client: str, content: dict[str, Any]) -> None:
        """Write the frozen network that a model belongs to, which its site does not send: here it is built alike."""
        header = content[OWN].get("base")
        names = header.get("names") if isinstance(header, dict) else None
        if not isinstance(header, dict) or not isinstance(names, list):
            return
        built = self._server.blueprint.base(self._server.architecture_of(client).name)
        base = {name: built[name] for name in names if isinstance(name, str) and name in built}
        if header.get("hash") == state_digest(base):  # else who opens the file is told what is missing
            checkpoints.write_base(self._folder, header["hash"], base)

    def _describe(self, client: str, content: dict[str, Any]) -> None:
        """Write the module down from this side's template, where the file needs no other."""
        module = detached_copy(self._server.blueprint.template_of(self._server.architecture_of(client).name))
        if "wrapped" not in content[OWN] and is_ours(module):
            content[OWN].pop("module", None)
            module.configure_model()
            with suppress(ValueError):  # of other entries: it opens with trust
                load_state(module, content["state_dict"])
                describe(content[OWN], module)

    def _fault(self, client: str, content: Mapping[str, Any] | None) -> str | None:
        """Return why this is not a checkpoint of the client; `None`: it is one."""
        state, header = (content or {}).get("state_dict"), (content or {}).get(OWN)
        entries = isinstance(state, dict) and all(isinstance(entry, Tensor) for entry in state.values())
        if not entries or not isinstance(header, dict) or header.get("client") != client:
            return "its site sends no checkpoint of it"
        template = self._server.blueprint.template_of(self._server.architecture_of(client).name)
        hparams, sent = template.hparams, (content or {}).get(HPARAMS, {})
        if not isinstance(sent, dict):
            return "its site sends a checkpoint without named hyper-parameters"
        # Lightning calls the function that `_instantiator` names: no site says which
        names = (name for name in sent if str(name).startswith("_"))
        strange = next((name for name in names if name not in hparams or hparams[name] != sent[name]), None)
        return None if strange is None else f"its site sends a checkpoint with the hyper-parameter {strange!r:.60}"


def _alike(first: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two checkpoints hold the same model of the same class."""
    mine, theirs = first["state_dict"], other["state_dict"]
    kinds = [(content[OWN].get("class"), "wrapped" in content[OWN]) for content in (first, other)]
    return kinds[0] == kinds[1] and equal(mine, theirs)
