"""What a module and its callbacks find around them inside a client: folder, logger and data module of its Trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor

from fedlightning.contract.messages import ClientLog

MEDIA = ("add_image", "add_images", "add_histogram", "add_text", "add_figure")
"""Methods of a TensorBoard writer that are called again on the run's loggers, in the form (tag, value, step)."""


class ClientLogger(DummyLogger):
    """A logger that keeps what is logged inside one client's fit, or ignores it. Any call works, none raises.

    The main process writes what was kept to the run's loggers (`Recorder.log_clients`), since a client may train in
    another process.

    Args:
        folder: Folder of the client: `save_dir`, `log_dir`. `None`: the run writes nothing.
        logs: List to append to. `None`: nothing is kept.
        prefix: Put before every name.
        first_step: Added to every step: the client's steps in earlier visits.

    Example:
        >>> logs = []
        >>> logger = ClientLogger("runs/clients/a", logs, first_step=10)
        >>> logger.log_metrics({"loss": 0.5}, step=2)
        >>> logger.experiment.add_scalar("rate", 0.1, 3)
        >>> logs[0].values, logs[0].step, logs[1].values, logs[1].step
        ({'loss': 0.5}, 12, {'rate': 0.1}, 13)
        >>> ClientLogger().experiment.add_scalar("rate", 0.1)  # nothing is kept
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        logs: list[ClientLog] | None = None,
        prefix: str = "",
        first_step: int = 0,
    ) -> None:
        super().__init__()
        self._folder = None if folder is None else str(folder)
        self._logs, self._prefix, self._first_step = logs, prefix, first_step
        self._newest = 0
        self._experiment: Any = ClientExperiment(self)

    @property
    def save_dir(self) -> str | None:
        """Folder of the client."""
        return self._folder

    @property
    def log_dir(self) -> str | None:
        """Folder of the client."""
        return self._folder

    @property
    def root_dir(self) -> str | None:
        """Folder of the client."""
        return self._folder

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep the numbers among `metrics`."""
        values = {name: float(value) for name, value in metrics.items() if _is_number(value)}
        if self._logs is not None and values:
            self._logs.append(ClientLog(self._named(values), self._step(step)))

    def log_media(self, method: str, tag: str, value: Any, step: int | None) -> None:
        """Keep a call of one of :data:`MEDIA`, with the value as it is now."""
        if self._logs is not None:
            value = value.detach().cpu().clone() if isinstance(value, Tensor) else copy.copy(value)
            self._logs.append(ClientLog(self._named({tag: value}), self._step(step), method))

    def _named(self, values: dict[str, Any]) -> dict[str, Any]:
        return {f"{self._prefix}{name}": value for name, value in values.items()}

    def _step(self, step: int | None) -> int:
        self._newest = self._newest if step is None else int(step)
        return self._first_step + self._newest


class ClientExperiment:
    """What `self.logger.experiment` is inside a client. It knows the common calls of TensorBoard and W&B; others do nothing.

    Args:
        logger: Keeps what is logged.
    """

    def __init__(self, logger: ClientLogger) -> None:
        self._logger = logger

    def add_scalar(
        self, tag: str, scalar_value: Any, global_step: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Keep a number."""
        self._logger.log_metrics({tag: scalar_value}, global_step)

    def add_scalars(
        self,
        main_tag: str,
        tag_scalar_dict: Mapping[str, Any],
        global_step: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Keep several numbers under `main_tag/name`."""
        self._logger.log_metrics({f"{main_tag}/{name}": value for name, value in tag_scalar_dict.items()}, global_step)

    def log(self, data: Mapping[str, Any], step: int | None = None, *args: Any, **kwargs: Any) -> None:
        """Keep the numbers among `data`."""
        self._logger.log_metrics(data, step)

    log_metrics = log

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def method(*args: Any, **kwargs: Any) -> None:
            if name in MEDIA and len(args) >= 2:
                step = kwargs.get("global_step", args[2] if len(args) > 2 else None)
                self._logger.log_media(name, args[0], args[1], step)

        return method

    def __getitem__(self, index: Any) -> ClientExperiment:
        return self


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.size == 1 if isinstance(value, np.ndarray) else value.numel() == 1
    return isinstance(value, Number) and not isinstance(value, complex)


@dataclass
class TrainerContext:
    """What the Trainer of a fit shows.

    Attributes:
        folder: `trainer.default_root_dir` and `trainer.log_dir`. `None`: the run writes nothing.
        logger: `trainer.logger`.
        datamodule: `trainer.datamodule`.
    """

    folder: str | None
    logger: ClientLogger
    datamodule: ClientData | None


class ClientData:
    """The user's data module as a client sees it: its attributes, with the loaders of the client in place of its own.

    Args:
        source: The user's data module.
        loader: Gives the client's loader of a split. `None`: of a copy, which belongs to no client.
    """

    _log_hyperparams = prepare_data_per_node = False

    def __init__(self, source: Any, loader: Callable[[str], Any] | None = None) -> None:
        self._source, self._loader = source, loader

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the user's data module, for `isinstance`."""
        return type(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_source":
            raise AttributeError(name)
        return getattr(self._source, name)

    def __reduce__(self) -> Any:
        return ClientData, (self._source,)

    def _of_client(self, split: str) -> Any:
        if self._loader is None:
            raise RuntimeError(
                f"{split}_dataloader() is called on a copy of trainer.datamodule, which belongs to no client. Use "
                "self.trainer.datamodule."
            )
        return self._loader(split)

    def train_dataloader(self) -> Any:
        """Return the client's training batches."""
        return self._of_client("train")

    def val_dataloader(self) -> Any:
        """Return the client's validation batches."""
        return self._of_client("val")

    def test_dataloader(self) -> Any:
        """Return the client's test batches."""
        return self._of_client("test")

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the federation prepares the data."""

    prepare_data = setup = teardown = on_exception = load_state_dict = _nothing
    on_save_checkpoint = on_load_checkpoint = _nothing

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the state of the data is not a client's."""
        return {}
