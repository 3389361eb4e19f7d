"""The models that clients deploy, as tasks: each is written where the client is, handed over, or predicts there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from fedlightning.client.blueprint import Blueprint
from fedlightning.client.client_errors import client_failure, in_words
from fedlightning.client.record import ClientRecord
from fedlightning.client.runtime import LocalRunner
from fedlightning.client.session import find_personal_module, open_client
from fedlightning.client.trainer_context import ClientLogger
from fedlightning.codec.packed import packed
from fedlightning.compat.quiet import quiet
from fedlightning.compat.system import file_name_of
from fedlightning.contract import Stage
from fedlightning.contract.messages import Message
from fedlightning.deployment.checkpoints import Exporter, is_ours
from fedlightning.engines.base import PlainTask
from fedlightning.engines.server_model import ServerModel
from fedlightning.fast.hooks import of_callback
from fedlightning.storage.files import read_tensors, writing
from fedlightning.tensors import equal, load_state, module_state


@dataclass(frozen=True)
class Deployed:
    """What became of a client's model.

    Attributes:
        client: The client's id.
        module: The model, where it was to be handed over.
        path: The file that was written, as the client's machine names it.
        is_shared: Whether it is the global model, so that nothing was written.
        reason: Why there is none; `None`: there is.
        content: What the file holds (:func:`~fedlightning.codec.packed.packed`), where that was to be brought.
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

    def run(self, runner: LocalRunner, record: ClientRecord) -> tuple[Deployed, ClientRecord | None]:
        """Make the model. Where it is to be handed over, what fails is raised; else the answer says why there is no file."""
        if not self.write:
            return Deployed(self.client, self.module(runner, record)), None
        try:
            module = self.module(runner, record)
        except BaseException as error:  # of the user's code: the algorithm asks it for losses, say
            return self.lost(in_words(client_failure(error))), None
        if self.shared is not None and self.shared.kind(runner.blueprint) is type(module):
            if equal(module_state(module), self.shared.state):
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

    def _content(self, path: Path, module: LightningModule) -> Any:
        """Return what is in the checkpoint, without the description of a module that the server can write itself."""
        content = read_tensors(path)
        if is_ours(module):
            content["fedlightning"].pop("module", None)
        return packed(content)

    def module(self, runner: LocalRunner, record: ClientRecord) -> LightningModule:
        """Return the module."""
        own = record.checkpoints.values()
        kept = next((entry for entry in own if entry["name"] == self.kept), None) if self.kept else None
        if self.kept and kept is None:
            raise ValueError(f"There is no checkpoint '{self.kept}' here; there is {[entry['name'] for entry in own]}.")
        with open_client(runner, self.message, record, evaluating=True) as visited:
            module = find_personal_module(runner, visited, self.stage if kept is None else kept["stage"])
            if kept is not None:
                load_state(module, kept["model"])
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
        model: A model of the server, in the place of the client's.
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

    def run(self, runner: LocalRunner, record: ClientRecord) -> tuple[tuple[Any] | None, ClientRecord | None]:
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
    called = [one for one in callbacks if any("predict" in hook for hook in of_callback(type(one)))]
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
    found: Exporter = blueprint.tools.setdefault("exporter", None) or Exporter(blueprint.template_of)
    blueprint.tools["exporter"] = found
    return found
