"""Base of methods in which a client deploys a model of its own beside the one that travels."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule

from fedlightning.algorithm import Client, Facts, FederatedCallback, Stage, State, warn
from fedlightning.tensors import entry_kinds, first_nonfinite, load_state, select


class KeepsModel(FederatedCallback):
    """Base of methods in which each client keeps a whole model that never travels, and deploys it.

    The model is in ``client.state[key]["model"]``. A client that has none yet deploys what it received.

    Example:
        >>> from types import SimpleNamespace
        >>> KeepsModel().read_kept(SimpleNamespace(state={"KeepsModel": {"model": {"w": 1.0}}}))
        {'w': 1.0}
    """

    facts = Facts(keeps=True)

    def read_kept(self, client: Client) -> State:
        """Return the client's own model; empty if it has none yet."""
        model: State = client.state.get(self.key, {}).get("model", {})
        return model

    def keep(self, client: Client, **values: Any) -> None:
        """Store the module as it is, with plain ``values`` beside it.

        A model that diverged is not stored: the client keeps the one it had, and its update is sent all the same.
        """
        state = client.model_state()
        trainable = [name for name, kind in entry_kinds(client.module).items() if kind == "trainable"]
        bad = first_nonfinite(select(state, trainable))
        if bad is None:
            client.state[self.key] = {"model": state, **values}
            return
        warn(
            f"Round {client.round + 1}: '{bad}' of the own model of client '{client.id}' holds NaN or infinite values "
            f"after training, so the client keeps the one it had. Lower the learning rate or {self.key}'s strength, or "
            "clip gradients (gradient_clip_val)."
        )

    def personal_module(self, client: Client, stage: Stage) -> LightningModule:
        """Return the client's own model."""
        module = client.copy_module()
        load_state(module, self.read_kept(client))
        return module
