"""Common parts of the layer diagnostics: their result, the epochs they record, and how a module is held still."""

from __future__ import annotations

import csv
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, astuple, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn

from fedlightning.algorithm import add_round, isolated, probes, sheets
from fedlightning.callbacks.diagnostics.sensitivity_terms import counted_parameters
from fedlightning.layers import ForwardOrder
from fedlightning.ranges import PositiveInt, checked

ALL = "all"
"""In the column of clients: all clients together."""


@dataclass(frozen=True)
class LayerRow:
    """One number.

    Attributes:
        round: The round, counted from 1 (of a plain Trainer's run: the epoch).
        stage: `L1` (before local training) or `L2` (after it).
        client: The client's id, or `all`: the sum over clients of a sensitivity, the mean over pairs of CKA.
        layer_index: The layer's number from 1, in the order in which a forward pass meets the layers.
        layer: The layer's name.
        quantity: The quantity's name.
        value: The number; a ratio may be infinite or NaN.
        std_error: Its standard error; NaN where there is none.

    Example:
        >>> LayerRow(round=1, stage="L2", client="0", layer_index=1, layer="net.0", quantity="cka", value=0.5).std_error
        nan
    """

    round: int
    stage: str
    client: str
    layer_index: int
    layer: str
    quantity: str
    value: float
    std_error: float = float("nan")


COLUMNS = [field.name for field in fields(LayerRow)]
_NUMBERS: dict[str, Callable[[str], Any]] = {"round": int, "layer_index": int, "value": float, "std_error": float}


def write_layers(path: Path, rows: Iterable[LayerRow]) -> None:
    """Add rounds to a CSV file. Rows of these rounds and later ones, left by a run that was resumed, go.

    Example:
        >>> path = Path("layers.csv")
        >>> for number in (1, 2, 3, 2):  # resumed after round 1
        ...     write_layers(path, [LayerRow(number, "L2", "0", 1, "net.0", "cka", 0.5)])
        >>> [(row.round, row.value) for row in read_layers(path)]
        [(1, 0.5), (2, 0.5)]
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, of_round in groupby(rows, key=lambda row: row.round):
        add_round(path, COLUMNS, number, map(astuple, of_round))


def read_layers(path: str | Path) -> list[LayerRow]:
    """Return the rows of a `layers.csv`; empty if there is none.

    A last line that was cut off when the process was killed is left out.

    Example:
        >>> read_layers("a/folder/without/a/run")
        []
    """
    path = Path(path)
    path = path / "layers.csv" if path.is_dir() else path
    if not path.exists():
        return []
    try:
        text = path.read_text()
        complete = text[: text.rfind("\n") + 1]
        return [
            LayerRow(**{name: _NUMBERS.get(name, str)(line[name]) for name in COLUMNS})
            for line in sheets.read_table(complete.splitlines())
        ]
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path} is damaged: it holds something that LayerDiagnostics does not write ({type(error).__name__}: {error}). "
            "Restore the file, or remove it."
        ) from None


Reduce = Callable[[Tensor], Tensor]
"""Mean of a tensor over the processes that share the batches."""


@dataclass
class LayerValues:
    """One number per layer, in the order in which a forward pass meets the layers.

    Attributes:
        quantity: Name of the quantity.
        layers: Names of the layers.
        num_parameters: Number of parameters that count in each layer (those that train).
        values: The numbers.
        std_errors: Their standard errors, `None` where there are none.
        epoch: The epoch of the fit after which they were measured.
        settings: Options of the measurement.

    Example:
        >>> found = LayerValues("hessian_trace", ["body", "head"], [4, 2], [8.0, 3.0])
        >>> found.per_parameter
        [2.0, 1.5]
    """

    quantity: str
    layers: list[str]
    num_parameters: list[int]
    values: list[float]
    std_errors: list[float] | None = None
    epoch: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def per_parameter(self) -> list[float]:
        """The numbers divided by how many parameters count; 0 where none does."""
        return [value / n if n else 0.0 for value, n in zip(self.values, self.num_parameters, strict=True)]

    def rows(self, client: str = "", stage: str = "L2") -> list[LayerRow]:
        """Return the numbers as :class:`~fedlightning.callbacks.diagnostics.layer_values.LayerRow`, for tables and figures.

        Args:
            client: Name to put in the column of clients.
            stage: `L1` or `L2`, for the column of stages.
        """
        errors = self.std_errors or [math.nan] * len(self.values)
        return [
            LayerRow(self.epoch + 1, stage, client, index, layer, self.quantity, value, error)
            for index, (layer, value, error) in enumerate(zip(self.layers, self.values, errors, strict=True), 1)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> LayerValues:
        """Return the values that :meth:`to_dict` described."""
        return LayerValues(**values)


class LayerRecorder(Callback):
    """Base of callbacks that measure the layers at the end of epochs, in a pass of their own that leaves no trace.

    The pass runs `training_step` in eval mode (no dropout; running statistics are used and stay), in the parameters'
    own precision without autocast. Under DDP each process measures its batches and the result covers all of them.
    A subclass implements :meth:`measure`.

    Args:
        num_batches: Number of training batches. `None` takes an epoch.
        every_n_epochs: Record after every so many epochs.
        weights_only: Leaves biases out.
        seed: Address of the measurement's randomness.

    Attributes:
        results: A :class:`LayerValues` for every recorded epoch; they are the callback's Lightning state.

    Raises:
        ValueError: If a number is below 1.
    """

    @checked
    def __init__(
        self, num_batches: PositiveInt | None, every_n_epochs: PositiveInt, weights_only: bool, seed: int
    ) -> None:
        self.num_batches = num_batches
        self.every_n_epochs = every_n_epochs
        self.weights_only = weights_only
        self.seed = seed
        self.results: list[LayerValues] = []

    def options(self) -> dict[str, Any]:
        """Return the arguments that this callback was made with."""
        return {
            name: getattr(self, name) for name in inspect.signature(type(self).__init__).parameters if name != "self"
        }

    @property
    def result(self) -> LayerValues | None:
        """The newest result; `None` before the first."""
        return self.results[-1] if self.results else None

    @property
    def state_key(self) -> str:
        """A key that is unique by options, so that several may record one run."""
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in self.options().items())})"

    def measure(
        self, module: LightningModule, batches: Iterable[Any], precision: Precision, reduce: Reduce
    ) -> LayerValues:
        """Return the numbers of `module`."""
        raise NotImplementedError

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse modules and strategies that cannot be measured."""
        refuse_module(pl_module, type(self).__name__)
        if not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
            raise ValueError(
                f"{type(self).__name__} needs the whole model in one process, but "
                f"{type(trainer.strategy).__name__} may share it among several. Use one device or strategy='ddp'."
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure, if this epoch is one to record."""
        if (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        address = (self.seed, type(self).__name__, trainer.current_epoch, trainer.global_rank)
        with training_batches(trainer, pl_module, self.num_batches, *address) as batches:
            layer_values = self.measure(
                pl_module,
                batches,
                full_precision(trainer.precision_plugin),
                lambda value: trainer.strategy.reduce(value, reduce_op="mean"),
            )
        layer_values.epoch = trainer.current_epoch
        self.results.append(layer_values)

    def state_dict(self) -> dict[str, Any]:
        """Return the results as plain values."""
        return {"results": [layer_values.to_dict() for layer_values in self.results]} if self.results else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the results of an earlier run."""
        self.results = [LayerValues.from_dict(values) for values in state_dict.get("results", [])]


def refuse_module(module: LightningModule, owner: str) -> None:
    """Refuse a module that cannot be run once more without training it, or not exactly enough.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> refuse_module(BoringModel().half(), "HessianTrace")
        Traceback (most recent call last):
        ValueError: HessianTrace needs parameters in float32 or float64, but 'layer.weight' of BoringModel is torch.float16...
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"{owner} runs training_step once more, but {name} optimizes in it (manual optimization). Return the loss "
            "from training_step, or leave this diagnostic out."
        )
    for entry, parameter in counted_parameters(module).items():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{owner} needs parameters in float32 or float64, but '{entry}' of {name} is {parameter.dtype}. Train "
                "with precision='bf16-mixed', '16-mixed', '32-true' or '64-true'."
            )


def full_precision(precision: Precision) -> Precision:
    """Return a precision plugin without autocast and loss scaling, in the dtype of the parameters.

    Example:
        >>> from lightning.pytorch.plugins.precision import MixedPrecision
        >>> full_precision(MixedPrecision("bf16-mixed", "cpu")).precision
        '32-true'
    """
    return precision if isinstance(precision, DoublePrecision) else Precision()


@contextmanager
def at_rest(module: nn.Module) -> Iterator[None]:
    """Put `module` in eval mode for the block; afterwards each submodule gets its own mode back.

    Recurrent networks run without cuDNN, which has no backward pass in eval mode and no second derivative.

    Example:
        >>> module = nn.Dropout()
        >>> with at_rest(module):
        ...     print(module.training)
        False
        >>> module.training
        True
    """
    modes = {child: child.training for child in module.modules()}
    recurrent = any(isinstance(child, nn.RNNBase) for child in modes)
    module.eval()
    try:
        with torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext():
            yield
    finally:
        for child, mode in modes.items():
            child.training = mode


def first_and_all(batches: Iterable[Any]) -> tuple[Any, Iterator[Any]]:
    """Return the first batch, and an iterator that begins with it.

    Example:
        >>> first, batches = first_and_all("abc")
        >>> first, list(batches)
        ('a', ['a', 'b', 'c'])
    """
    following = iter(batches)
    for first in following:
        return first, itertools.chain([first], following)
    raise ValueError("There is no training batch to measure the layers on. Check limit_train_batches and the loader.")


def layer_order(module: LightningModule, batch: Any, precision: Precision, *seed: object) -> list[str]:
    """Return the pieces of `module` in the order in which a step on `batch` calls them; leaves no trace.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> class Reversed(BoringModel):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.ModuleDict({"head": nn.Linear(4, 2), "body": nn.Linear(32, 4)})
        ...     def training_step(self, batch, batch_idx):
        ...         return self.layer["head"](self.layer["body"](batch)).sum()
        >>> layer_order(Reversed(), torch.ones(1, 32), Precision())
        ['layer.body', 'layer.head']
    """
    order = ForwardOrder(module)
    try:
        with at_rest(module), torch.no_grad(), probes.probing(module, precision, *seed):
            probes.training_loss(module, batch)
    finally:
        names = order.names()
    return names


@contextmanager
def loader_batches(trainer: Trainer, count: int | None, *seed: object) -> Iterator[Iterator[Any]]:
    """Give training batches as the loaders make them; afterwards the loaders' generators are put back."""
    limit = trainer.num_training_batches
    count = count if not math.isfinite(limit) else min(count or int(limit), int(limit))
    loaders = CombinedLoader(trainer.train_dataloader, "max_size_cycle")
    generators = {id(g): g for loader in loaders.flattened for g in _generators(loader)}
    before = [generator.get_state() for generator in generators.values()]
    try:
        with isolated(*seed, "loader"):
            yield (batch for batch, _, _ in itertools.islice(loaders, count))
    finally:
        for generator, state in zip(generators.values(), before, strict=True):
            generator.set_state(state)


@contextmanager
def training_batches(
    trainer: Trainer, module: LightningModule, count: int | None, *seed: object
) -> Iterator[Iterator[Any]]:
    """Give the batches of :func:`loader_batches` on the module's device, in the parameters' own precision."""
    double = isinstance(trainer.precision_plugin, DoublePrecision)
    convert = trainer.precision_plugin.convert_input if double else lambda batch: batch
    with loader_batches(trainer, count, *seed) as batches:
        yield (probes.move_batch(module, convert(batch)) for batch in batches)


def _generators(loader: Any) -> Iterator[torch.Generator]:
    sampler = getattr(loader, "sampler", None)
    for owner in (loader, sampler, getattr(loader, "batch_sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            yield generator
