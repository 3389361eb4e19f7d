"""What a module and its callbacks find around them inside a client: folder, logger and data module of its Trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedlightning.client.client_logger import ClientLogger


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
