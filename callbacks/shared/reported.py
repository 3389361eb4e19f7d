"""Server methods that report another model than the one that clients go on training from."""

from __future__ import annotations

from lightning.pytorch import LightningModule

from fedlightning.algorithm import Job, Message, Server, State
from fedlightning.tensors import select


def reported_module(server: Server, entries: State) -> LightningModule | None:
    """Return the global model with other entries; `None` where a part of the model stays with the clients."""
    if len(server.shared_names()) < len(server.kinds):
        return None
    return server.module_with({**server.model, **entries})


def send_reported(job: Job, message: Message, entries: State) -> None:
    """Put other entries into a message to a client that is evaluated: it deploys the reported model."""
    if job.work == 0:
        message.state = {**message.state, **select(entries, message.state)}
