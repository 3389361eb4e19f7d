"""Whether some callbacks in some situation would be refused before round 1: asked in one place, of a small federation."""

from __future__ import annotations

import copy
import io
import re
import traceback
import warnings
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedlightning.compat.lightning_runs import quiet
from fedlightning.contract import Facts, FederatedCallback
from fedlightning.models import ClientModels
from fedlightning.options import Evaluation
from fedlightning.testing.toys import ToyData, ToyModule
from fedlightning.trainer import FederatedTrainer
from tests.sites.helpers import Line, at_sites
from tests.sites.helpers import sites as two_sites

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule

ROOT = Path(__file__).resolve().parents[1]
BASE: dict[str, Any] = {
    "max_rounds": 3,
    "local_steps": 3,
    "evaluation": Evaluation(every=1, test_data=[]),
    "save_state": 0,
}


class Module(ToyModule):
    """A classifier that every method can train: a chain of layers, one of them a batch normalisation."""

    def __init__(self, width: int = 8, depth: int = 1, optimizer: Any = torch.optim.SGD) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.optimizer = optimizer
        self.body[0], self.body[1] = nn.Linear(6, width), nn.BatchNorm1d(width)
        self.middle = nn.Linear(width, width)
        self.body.extend(nn.Linear(width, width) for _ in range(depth - 1))
        self.head = nn.Linear(width, 3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return a plain optimizer."""
        found: torch.optim.Optimizer = self.optimizer(self.parameters(), lr=self.lr)
        return found


class Private(ToyData):
    """Toy data without public samples."""

    def public_dataloader(self) -> Any:
        """Return nothing."""


class Begins(BaseException):
    """Round 1 would begin."""


class Stop(FederatedCallback):
    """Ends a run in place of round 1."""

    facts = Facts(takes_part=False)
    rank = 10**6

    def on_federation_start(self, server: Any) -> None:
        """End the run: nothing has refused it."""
        raise Begins


@dataclass(frozen=True)
class Answer:
    """What is said before round 1: the error that refuses, if one does, the place that raises it, and warnings."""

    sentence: str | None = None
    error: str = ""
    place: str = ""
    warned: tuple[str, ...] = ()

    def mark(self, first: str, second: str | None = None) -> str | None:
        """Return which of the two callbacks are not named; `None`: they are accepted."""
        if self.sentence is None:
            return None
        names = [name.partition(" ")[0] for name in (first, second) if name is not None]
        named = [re.search(rf"\b{name}\b", self.sentence) is not None for name in names]
        mark = "" if all(named) else "-" if not any(named) else "<" if named[0] else ">"
        return mark if self.error in ("ValueError", "ConfigurationError") else f"{mark}({self.error})"


def ask(
    listed: Iterable[Callback],
    beside: Callback | None = None,
    sizes: Sequence[int] = (12, 7, 10, 15),
    batch_size: int = 5,
    public: bool = True,
    optimizer: Any = torch.optim.SGD,
    models: Sequence[tuple[int, int]] = (),
    server: str | None = None,
    sites: bool = False,
    full: bool = False,
    **arguments: Any,
) -> Answer:
    """Return what is said of some callbacks before round 1."""
    asked = [*copy.deepcopy([*listed, *([] if beside is None else [beside])]), Stop()]
    arguments = copy.deepcopy(BASE | arguments)
    data = (ToyData if public else Private)(sizes)
    data.batch_size = batch_size
    torch.manual_seed(0)
    module: LightningModule = Module(optimizer=optimizer)
    if models:
        module = ClientModels({f"m{index}": Module(*shape) for index, shape in enumerate(models)}, server=server)
    error: BaseException | None = None
    with (
        quiet(),
        redirect_stderr(io.StringIO()),
        warnings.catch_warnings(record=True) as caught,
        TemporaryDirectory() as at,
    ):
        warnings.simplefilter("always")
        try:
            if sites:
                given: dict[str, Any] = {"others": asked, "full": full, "batch_size": batch_size, **arguments}
                at_sites(Line(two_sites(Path(at), **given)), Path(at) / "server", public=True, **given)
            else:
                shown: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu"}
                FederatedTrainer(callbacks=asked, default_root_dir=at, **shown, **arguments).fit(module, data)
        except (Begins, Exception) as raised:
            error = raised
    assert error is not None, "The run came to its end: nothing has stopped it where round 1 begins."
    warned = tuple(sorted({str(one.message) for one in caught}))
    if isinstance(error, Begins):
        return Answer(warned=warned)
    return Answer(str(error), type(error).__name__, _place(error), warned)


def _place(error: BaseException) -> str:
    """Return where an error was raised: the last place in this repository."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
            return f"{path.relative_to(ROOT)}:{frame.lineno} {frame.name}"
    return ""
