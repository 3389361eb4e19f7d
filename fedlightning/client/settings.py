"""How every client trains: :class:`LocalSettings`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback

from fedlightning.compat.system import file_name_of


@dataclass
class LocalSettings:
    """Settings of local training. Plain values, so that a worker process can be given them.

    Attributes:
        seed: Addresses all randomness of the run.
        max_rounds: Rounds of the federation: the horizon of schedules under `optimizer_state="keep"`.
        local_epochs: Epochs of a visit; or
        local_steps: Optimizer steps of a visit. One of the two is `None`.
        optimizer_state: `"reset"`: optimizers, schedulers and clocks are new in every visit; `"keep"`: they go on,
            with the horizon of the whole federation.
        lr_decay: Factor on every learning rate per round.
        trainer_arguments: Arguments of `lightning.pytorch.Trainer`, forwarded as they are.
        callbacks: Ordinary Lightning callbacks; each visit works on copies with the client's own state.
        log_clients: Clients whose own logs are kept for the run's loggers; `True`: all.
        local_loop: `"fast"`, `"trainer"`, or `"auto"`: fast where it applies.
        float_buffers: `"average"`: running statistics travel; `"local"`, `"server"`: no client sends them.
    """

    seed: int
    max_rounds: int
    local_epochs: int | None = 1
    local_steps: int | None = None
    optimizer_state: Literal["reset", "keep"] = "reset"
    lr_decay: float = 1.0
    trainer_arguments: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Callback] = field(default_factory=list)
    log_clients: bool | list[str] = False
    local_loop: Literal["auto", "trainer", "fast"] = "auto"
    float_buffers: Literal["average", "local", "server"] = "average"

    def folder_of(self, client: str) -> str | None:
        """Return the folder for what is written inside a client's training; `None` if the run writes nothing."""
        root = self.trainer_arguments.get("default_root_dir")
        return None if root is None else str(Path(root) / "clients" / file_name_of(client))

    def logs(self, client: str) -> bool:
        """Return True if the logs of a client are kept."""
        return self.log_clients if isinstance(self.log_clients, bool) else client in self.log_clients

    def train_batches(self, batches: int) -> int:
        """Return how many of an epoch's training batches Lightning's `limit_train_batches` leaves."""
        return limited(batches, self.trainer_arguments.get("limit_train_batches"))

    @property
    def unit(self) -> Literal["epochs", "steps"]:
        """The unit in which work is counted."""
        return "epochs" if self.local_steps is None else "steps"

    @property
    def work(self) -> int:
        """Default work of a visit, in :attr:`unit`."""
        return self.local_steps if self.local_steps is not None else int(self.local_epochs or 0)


def limited(batches: int, limit: int | float | None) -> int:
    """Return the number of batches that a limit leaves, as in Lightning's `limit_*_batches`.

    Example:
        >>> limited(10, 3), limited(10, 0.25), limited(10, None)
        (3, 2, 10)
    """
    if limit is None:
        return batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)
