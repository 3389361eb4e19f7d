"""LayerDiagnostics: sensitivity, gradient variance, Hessian trace and CKA per layer, client and round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fedlightning.algorithm import Client, Extra, FederatedCallback, Server, Setup, Update, Wire, isolated, probes
from fedlightning.callbacks.diagnostics.gradient_variance import gradient_moments
from fedlightning.callbacks.diagnostics.hessian_trace import hutchinson, mean_and_error
from fedlightning.callbacks.diagnostics.layer_values import (
    ALL,
    LayerRow,
    at_rest,
    full_precision,
    layer_order,
    read_layers,
    refuse_module,
    write_layers,
)
from fedlightning.callbacks.diagnostics.sensitivity import scale_of
from fedlightning.callbacks.diagnostics.sensitivity_terms import (
    Sensitivity,
    SensitivityAccumulator,
    counted_parameters,
    counts_of,
    layers_sent,
    order_to_send,
)
from fedlightning.callbacks.diagnostics.similarity import pairwise_cka, unit_gram
from fedlightning.layers import Layer, ordered_layers
from fedlightning.ranges import Length, PositiveInt, Range


def common_samples(client: Client, count: int) -> tuple[Any, int]:
    """Return a batch that is the same at every client, and its size.

    The samples are taken at equal distances from the clients' validation samples, one client after another, so each
    client gives in proportion to what it has. No client of a real federation sees the others' data: this is for
    experiments.
    """
    loader = _pooled_validation(client)
    if loader is None:
        raise ValueError("CKA compares models on the pooled validation data, and there is none.")
    total = len(loader.dataset)  # type: ignore[arg-type]
    count = min(count, total)
    with isolated("common samples", client.round):
        picked = [loader.dataset[i * total // count] for i in range(count)]
        return client.precision.convert_input(loader.collate_fn(picked)), count


def _pooled_validation(client: Client) -> DataLoader[Any] | None:
    """The union of all clients' validation data. A client offers its own data only, as it should; a diagnostic of a
    simulation has to look past it.
    """
    return client._runner.pooled_dataloader("val")


def layer_grams(
    module: LightningModule,
    batch: Any,
    count: int,
    layers: Sequence[Layer],
    precision: Precision,
    *seed: object,
    debiased: bool = False,
) -> Tensor:
    """Return the unit Gram matrix of each layer's output on `batch`.

    A layer's output is what its operation returns, before the normalisation and the activation that follow; maps and
    sequences are flattened. A layer gets NaNs if it is not a module of its own (`cls_token`), is not called, or does not
    give one row per sample.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from fedlightning.layers import ordered_layers
        >>> module, batch = BoringModel(), torch.randn(5, 32)
        >>> tuple(layer_grams(module, batch, 5, ordered_layers(module), Precision(), "seed").shape)
        (1, 5, 5)
    """
    grams = torch.full((len(layers), count, count), torch.nan)
    with _caught(module, layers) as outputs:
        with at_rest(module), torch.no_grad(), probes.probing(module, precision, *seed):
            probes.training_loss(module, batch)
    for index, layer in enumerate(layers):
        output = outputs.pop(layer.name, None)
        if output is not None and output.ndim > 0 and len(output) == count:
            grams[index] = unit_gram(output, debiased).float().cpu()
    return grams


@contextmanager
def _caught(module: nn.Module, layers: Sequence[Layer]) -> Iterator[dict[str, Tensor]]:
    """Outputs of the layers' modules, of the first call of each, while the block runs."""
    outputs: dict[str, Tensor] = {}
    modules = dict(module.named_modules())

    def note(name: str) -> Callable[..., None]:
        def hook(child: nn.Module, inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple | list) and output else output  # recurrent nets, attention
            if isinstance(tensor, Tensor):
                outputs.setdefault(name, tensor.detach().clone())  # an activation may work in place

        return hook

    handles = [modules[la.name].register_forward_hook(note(la.name)) for la in layers if la.name in modules]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


METHODS = {"sensitivity_online": "online", "sensitivity": "mean_gradient"}
"""The two sensitivities and where their gradients come from; they are not the same quantity."""
SUMS = ("grad_var_samples", "hessian_trace")
"""Sums over a layer's parameters: they are also given per parameter, as the sensitivity is."""


@dataclass(frozen=True)
class StageTable:
    """The measurements of one client at one stage.

    Attributes:
        client: The client's id.
        stage: `L1` or `L2`.
        layers: Names of the layers in order.
        num_parameters: Number of parameters that count in each layer.
        values: By quantity, `(num_layers, 2)`: the number and its standard error, NaN where there is none.
        grams: Unit Gram matrices `(num_layers, n, n)`, or `None`.

    Example:
        >>> table = StageTable("0", "L2", ["body"], [4], {"hessian_trace": torch.tensor([[8.0, 1.0]])})
        >>> [(row.quantity, row.value, row.std_error) for row in table.rows(1)]
        [('hessian_trace', 8.0, 1.0), ('hessian_trace_per_parameter', 2.0, 0.25)]
    """

    client: str
    stage: str
    layers: list[str]
    num_parameters: list[int]
    values: dict[str, Tensor]
    grams: Tensor | None = None

    def rows(self, number: int) -> Iterator[LayerRow]:
        """Give the client's own rows of round `number`, with the quantities that follow from what it sent."""
        for quantity, table in self.values.items():
            if quantity in METHODS:
                yield from sensitivity_rows(self.sensitivity(quantity), quantity, number, self.stage, self.client)
                continue
            yield from self._rows(number, quantity, table)
            if quantity in SUMS:
                counts = torch.tensor(self.num_parameters, dtype=table.dtype).clamp_min(1)
                yield from self._rows(number, f"{quantity}_per_parameter", table / counts[:, None])

    def _rows(self, number: int, quantity: str, table: Tensor) -> Iterator[LayerRow]:
        for index, (layer, (value, error)) in enumerate(zip(self.layers, table.tolist(), strict=True), 1):
            yield LayerRow(number, self.stage, self.client, index, layer, quantity, value, error)

    def sensitivity(self, quantity: str) -> Sensitivity:
        """Return one of the two sensitivities, with F, the ratios and the transition."""
        return Sensitivity(self.layers, self.num_parameters, self.values[quantity][:, 0].tolist(), METHODS[quantity])


def sensitivity_rows(measured: Sensitivity, quantity: str, number: int, stage: str, client: str) -> Iterator[LayerRow]:
    """Give `I_l`, `F_l` (`_cumulative`) and `F_{l+1} / F_l` (`_ratio`, at layer l) as rows.

    Example:
        >>> found = Sensitivity(["body", "head"], [2, 2], [1.0, 3.0])
        >>> [(row.quantity, row.layer, row.value) for row in sensitivity_rows(found, "I", 1, "L2", "0")][2:]
        [('I_cumulative', 'body', 1.0), ('I_cumulative', 'head', 4.0), ('I_ratio', 'body', 4.0)]
    """
    parts = {"": measured.sensitivity, "_cumulative": measured.cumulative, "_ratio": measured.ratios}
    for suffix, values in parts.items():
        for index, (layer, value) in enumerate(zip(measured.layers, values, strict=False), 1):  # one ratio less
            yield LayerRow(number, stage, client, index, layer, quantity + suffix, value)


def round_rows(number: int, tables: Sequence[StageTable]) -> list[LayerRow]:
    """Return all rows of a round: each client's, the sums of the sensitivities, CKA between the clients.

    If clients meet the layers in different orders, sums are left out: F is cumulative, so its order is part of it.

    Example:
        >>> values = {"sensitivity": torch.tensor([[1.0, math.nan], [3.0, math.nan]])}
        >>> tables = [StageTable(client, "L2", ["body", "head"], [4, 4], values) for client in "01"]
        >>> [row.value for row in round_rows(1, tables) if (row.client, row.quantity) == (ALL, "sensitivity_cumulative")]
        [2.0, 8.0]
    """
    rows = [row for table in tables for row in table.rows(number)]
    for stage in dict.fromkeys(table.stage for table in tables):
        members = [table for table in tables if table.stage == stage]
        first = members[0]
        rows += [
            LayerRow(number, stage, ALL, index, layer, "num_parameters", float(count))
            for index, (layer, count) in enumerate(zip(first.layers, first.num_parameters, strict=True), 1)
        ]
        if all(table.layers == first.layers for table in members):
            for quantity in (name for name in METHODS if any(name in table.values for table in members)):
                total = Sensitivity.sum([table.sensitivity(quantity) for table in members if quantity in table.values])
                rows += sensitivity_rows(total, quantity, number, stage, ALL)
        rows += cka_rows(number, stage, [table for table in members if table.grams is not None])
    return rows


def cka_rows(number: int, stage: str, tables: Sequence[StageTable]) -> Iterator[LayerRow]:
    """Give each client's mean CKA with the others, per layer, and the mean over all pairs; layers are paired by name."""
    if len(tables) < 2:
        return
    grams = [dict(zip(table.layers, table.grams, strict=True)) for table in tables if table.grams is not None]
    for index, layer in enumerate(tables[0].layers, 1):
        grams_of_layer = [of_layer[layer] for of_layer in grams if layer in of_layer]
        if len(grams_of_layer) < len(tables) or any(bool(gram.isnan().any()) for gram in grams_of_layer):
            continue
        between = pairwise_cka(grams_of_layer)
        between.fill_diagonal_(0)
        scores = (between.sum(dim=1) / (len(grams_of_layer) - 1)).tolist()
        for table, score in zip(tables, scores, strict=True):
            yield LayerRow(number, stage, table.client, index, layer, "cka", score)
        yield LayerRow(number, stage, ALL, index, layer, "cka", math.fsum(scores) / len(scores))


Quantity = Literal["sensitivity_online", "sensitivity", "grad_var_samples", "grad_var_params", "hessian_trace", "cka"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
COUNTS = "num_parameters"
SENT: tuple[str, ...] = (COUNTS, *(name for name in QUANTITIES if name != "cka"))
"""Quantities of which a client sends one number per layer, in this order."""
OF_GRADIENTS = ("sensitivity", "grad_var_samples", "grad_var_params")
"""Quantities that one pass over training batches gives."""
Columns = tuple[Sequence[float], ...]
"""One number per layer, and its standard error where there is one."""


class LayerLook:
    """A measurement of a client's module, which is on the device; leaves no trace.

    Args:
        options: The callback with its options.
        client: The client.
        stage: `L1` or `L2`.
        seed: Address of the randomness of the passes.
        order: Pieces in order; `None` takes them as a training batch calls them.
        online: The online sensitivity of the visit, if it was recorded.

    Attributes:
        order: The pieces in order.
        layers: The layers in order.
    """

    def __init__(
        self,
        options: LayerDiagnostics,
        client: Client,
        stage: str,
        seed: int,
        order: list[str] | None,
        online: SensitivityAccumulator | None,
    ) -> None:
        self.options, self.client, self.stage, self.seed, self.online = options, client, stage, seed, online
        self.module, self.precision = client.module, full_precision(client.precision)
        if order is None:
            order = layer_order(self.module, client.next_batch("layer order"), self.precision, seed)
        self.order, self.layers = order, ordered_layers(self.module, order)
        self.how: dict[str, Any] = {"weights_only": options.weights_only, "order": order}

    def values(self) -> Tensor:
        """Return the numbers and their standard errors, `(num_quantities, num_layers, 2)`; NaN where there are none."""
        asked = self.options.quantities
        counts = counts_of(self.layers, counted_parameters(self.module, self.options.weights_only))
        columns_by_quantity: dict[str, Columns] = {COUNTS: ([float(count) for count in counts],)}
        if any(name in asked for name in OF_GRADIENTS):
            columns_by_quantity |= self._gradients()
        if self.stage == "L2" and self.online is not None and any(self.online.steps.values()):
            self.online.order = self.order
            columns_by_quantity["sensitivity_online"] = (self.online.result().sensitivity,)
        if "hessian_trace" in asked:
            columns_by_quantity["hessian_trace"] = self._hessian()
        values = torch.full((len(SENT), len(counts), 2), torch.nan, dtype=torch.float64)
        for name, columns in columns_by_quantity.items():
            if name == COUNTS or name in asked:
                values[SENT.index(name), :, : len(columns)] = torch.tensor(columns, dtype=torch.float64).T
        return values

    def _gradients(self) -> dict[str, Columns]:
        batches = self._batches("gradients", self.options.num_batches)
        moments = gradient_moments(self.module, batches, self.precision, self.seed, **self.how)
        at_mean = SensitivityAccumulator(self.module, **self.how)
        at_mean.add(moments.mean)
        return {
            "sensitivity": (at_mean.result("mean_gradient").sensitivity,),
            "grad_var_samples": (moments.over_samples(self.layers),),
            "grad_var_params": (moments.over_params(self.layers),),
        }

    def _hessian(self) -> Columns:
        batches, probes = self._batches("hessian", self.options.hessian_batches), self.options.hessian_probes
        _, draws = hutchinson(self.module, batches, self.precision, self.seed, num_probes=probes, **self.how)
        return mean_and_error(draws)

    def grams(self) -> Tensor:
        """Return the layers' unit Gram matrices `(num_layers, n, n)`; empty if CKA is not asked for."""
        if "cka" not in self.options.quantities:
            return torch.empty(0)
        batch, count = common_samples(self.client, self.options.cka_samples)
        batch, address = probes.move_batch(self.module, batch), ("layer similarity", self.client.round)
        debiased = self.options.cka_debiased
        return layer_grams(self.module, batch, count, self.layers, self.precision, *address, debiased=debiased)

    def _batches(self, purpose: str, count: int | None) -> Iterator[Any]:
        """`count` training batches, at most an epoch."""
        loader = self.client.loader("train")
        assert loader is not None
        for _ in range(min(count or len(loader), len(loader))):
            yield self.client.next_batch(f"layer diagnostics {self.stage} {purpose}")


MeasuredStage = Literal["L1", "L2"]


class LayerDiagnostics(FederatedCallback):
    """A recorder of the layers of every client's model, next to any algorithm; it does not change the run.

    Every row goes to `layers.csv` in the run's folder; `figures/layers.png` and `figures/transition.png` are drawn at the
    end. `callbacks.diagnostics.layers` reads the table. Per layer, in the order of a forward pass:

    * `sensitivity_online`: PLayer-FL's `I`, from the gradients that training computes anyway in the first epoch of the
      visit's first federated fit; no extra pass. It belongs to stage L2.
    * `sensitivity`: the same formula with the mean gradient at the stage's model, in eval mode. Both sensitivities also
      come as `_cumulative` (`F`) and `_ratio` (`F_{l+1} / F_l`, at layer l), and for client `all` of the sum over the
      clients.
    * `grad_var_samples`, `grad_var_params`: the two gradient variances, see `GradientVariance`.
    * `hessian_trace`: with its standard error, see `HessianTrace`. It and `grad_var_samples` are sums over a layer's
      parameters and are also given `_per_parameter`.
    * `cka`: linear CKA of the layer's outputs for the same samples: each client's mean over the others, and for `all` the
      mean over all pairs. The samples are taken from the union of the clients' validation data, which no client of a
      real federation sees.

    The measured model is the one that trains and travels, at stage L2 (after local training) or L1 (before). The
    measurements go up as declared extras and are counted in the run's bytes.

    Args:
        quantities: Names of the quantities. `None` records all.
        stages: `["L1"]`, `["L2"]` or both. `None` records L2.
        every_n_rounds: Records rounds 1, 1 + n, 1 + 2n ...
        num_batches: Training batches for sensitivity and gradient variance. `None` takes an epoch.
        hessian_probes: Draws for the Hessian trace.
        hessian_batches: Training batches for the Hessian trace.
        cka_samples: Samples for CKA; 256 or more are advised.
        cka_debiased: Uses the unbiased estimate of HSIC, for fewer samples.
        weights_only: Leaves biases out of all but CKA.
        threshold: Threshold of the transition that the figures show.

    Raises:
        ValueError: If a quantity or stage is unknown, or a number is too small.

    Example:
        >>> from fedlightning.callbacks import LayerDiagnostics
        >>> LayerDiagnostics(quantities=["cka"], every_n_rounds=5).stages
        ['L2']
    """

    def __init__(
        self,
        quantities: Annotated[list[Quantity], Length()] | None = None,
        stages: Annotated[list[MeasuredStage], Length()] | None = None,
        every_n_rounds: PositiveInt = 1,
        num_batches: Annotated[int, Range("[1, inf)", "None is a whole epoch.")] | None = 10,
        hessian_probes: Annotated[int, Range("[2, inf)")] = 10,
        hessian_batches: PositiveInt = 1,
        cka_samples: Annotated[int, Range("[4, inf)")] = 256,
        cka_debiased: bool = False,
        weights_only: bool = False,
        threshold: Annotated[float, Range("(1, inf)", "F is cumulative, so every ratio is at least 1.")] = 1.05,
    ) -> None:
        self.quantities = list(QUANTITIES) if quantities is None else list(quantities)
        self.stages = ["L2"] if stages is None else list(stages)
        self.every_n_rounds = every_n_rounds
        self.num_batches = num_batches
        self.hessian_probes = hessian_probes
        self.hessian_batches = hessian_batches
        self.cka_samples = cka_samples
        self.cka_debiased = cka_debiased
        self.weights_only = weights_only
        self.threshold = threshold
        if not self._has_passes and "L1" in self.stages:
            raise ValueError(f"{self.key} got stages={self.stages}, but 'sensitivity_online' is of stage L2 alone.")

    @property
    def _has_passes(self) -> bool:
        """Whether any quantity needs a pass of its own."""
        return any(name != "sensitivity_online" for name in self.quantities)

    def check(self, setup: Setup) -> None:
        """Refuse modules that cannot be measured (manual optimization, half precision), and CKA without common samples."""
        if self._has_passes:
            refuse_module(setup.module, self.key)
        if "cka" in self.quantities and not setup.data.has_pooled("val"):
            if setup.data.has_split("val"):
                raise ValueError(
                    f"{self.key} compares the clients' models on the same validation data (quantity 'cka'), those of all "
                    "clients, which cannot be had in one place here. Leave 'cka' out of quantities."
                )
            raise ValueError(
                f"{self.key} compares the clients' models on validation data (quantity 'cka'), but no client has any. "
                "Give the data a validation split, or leave 'cka' out of quantities."
            )

    def wire(self, module: nn.Module) -> Wire:
        """Declare the order `(pieces,)`, values `(stages, quantities, layers, 2)` and grams `(stages, layers, n, n)`."""
        values, grams = Extra((-1, -1, -1, 2), gaps=True), Extra((-1, -1, -1, -1), gaps=True)
        return Wire(up={"order": (-1,), "values": values, "grams": grams})

    # -- client ------------------------------------------------------------------------------------------------------
    def on_visit_start(self, client: Client) -> None:
        """Begin the record of this visit, if the round is one to record, and measure stage L1 if asked for."""
        if client.round % self.every_n_rounds == 0:
            client.scratch[self.key] = visit = _Visit()
            if "L1" in self.stages:
                visit.stages["L1"] = self._measure(client, "L1", visit)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin the online sensitivity with the first federated fit of the visit."""
        visit = self.client.scratch.get(self.key)
        recorded = "sensitivity_online" in self.quantities and self.client.phase.federated
        if visit is not None and visit.online is None and recorded:
            visit.online = SensitivityAccumulator(pl_module, self.weights_only)
            visit.epoch = (self.client.phase.name, trainer.current_epoch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Add a step of that fit's first epoch, before any correction (gradients are unscaled here)."""
        visit = self.client.scratch.get(self.key)
        if visit is not None and visit.online is not None:
            if visit.epoch == (self.client.phase.name, trainer.current_epoch):
                visit.online.add_step(optimizer, scale_of(optimizer, trainer))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Stop watching: the order of the layers is known."""
        visit = self.client.scratch.get(self.key)
        if visit is not None and visit.online is not None:
            visit.online.stop_watching()

    def on_send(self, client: Client, update: Update) -> None:
        """Measure stage L2 if asked for, and send all measurements."""
        visit = client.scratch.pop(self.key, None)
        if visit is None:
            return
        if "L2" in self.stages:
            visit.stages["L2"] = self._measure(client, "L2", visit)
        tables, grams = zip(*(visit.stages[stage] for stage in self.stages), strict=True)
        update.extras[self.key] = {
            "order": order_to_send(client.module, visit.order or ()),
            "values": torch.stack(tables),
            **({"grams": torch.stack(grams)} if "cka" in self.quantities else {}),
        }

    def _measure(self, client: Client, stage: str, visit: _Visit) -> tuple[Tensor, Tensor]:
        """Table `(quantities, layers, 2)` and Gram matrices `(layers, n, n)` of the client's module; leaves no trace."""
        module, home = client.module, client.module.device
        if not self._has_passes:  # then no batch is there to show the order, but training has shown it
            visit.order = list(visit.online.order or ()) if visit.online is not None else []
        module.to(client.device)
        try:
            # A number of its own for every (run, round, client, stage): next_batch and the steps draw from addresses,
            # and what a data set's augmentation draws stays in this block.
            seed = client.rng(f"layer diagnostics {stage}").initial_seed()
            with isolated(seed):
                look = LayerLook(self, client, stage, seed, visit.order, visit.online)
                visit.order = look.order
                return look.values(), look.grams()
        finally:
            module.to(home)

    # -- server ------------------------------------------------------------------------------------------------------
    def on_update(self, server: Server, update: Update) -> None:
        """Collect the clients' measurements."""
        extras = update.extras.get(self.key)
        if extras:
            server.state[self.key] = {**server.state.get(self.key, {}), update.client: extras}

    def on_round_end(self, server: Server) -> None:
        """Write the round's rows and forget the measurements."""
        by_client = server.state.pop(self.key, {})
        tables = [table for client, extras in by_client.items() for table in self._tables(server, client, extras)]
        if tables and server.run_dir is not None:
            write_layers(server.run_dir / "layers.csv", round_rows(server.round + 1, tables))

    def _tables(self, server: Server, client: str, extras: dict[str, Tensor]) -> Iterator[StageTable]:
        layers = [layer.name for layer in layers_sent(server.module, extras["order"])]
        for place, stage in enumerate(self.stages):
            values = dict(zip(SENT, extras["values"][place], strict=True))
            counts = [int(count) for count in values.pop(COUNTS)[:, 0].tolist()]
            measured = {name: table for name, table in values.items() if not bool(table[:, 0].isnan().all())}
            grams = extras["grams"][place] if "grams" in extras else None
            yield StageTable(client, stage, layers, counts, measured, grams)

    def on_federation_end(self, server: Server) -> None:
        """Draw the layers of the last recorded round, and the transition in every round."""
        rows = read_layers(server.run_dir) if server.run_dir is not None else []
        if not rows or server.run_dir is None:
            return
        from fedlightning.callbacks.diagnostics.layer_figures import layer_numbers, plot_layers, plot_transition

        figures, stage = server.run_dir / "figures", self.stages[-1]
        if not layer_numbers(rows, stage=stage):  # for example CKA of a single client
            return
        figures.mkdir(parents=True, exist_ok=True)
        plot_layers(rows, stage=stage, threshold=self.threshold).savefig(figures / "layers.png", dpi=150)
        ratios = {f"{name}_ratio" for name in METHODS}
        if any(row.stage == stage and row.client == ALL and row.quantity in ratios for row in rows):
            figure = plot_transition({"": rows}, threshold=self.threshold, stage=stage)
            figure.savefig(figures / "transition.png", dpi=150)


@dataclass
class _Visit:
    """The record of one visit: the layers' order, measurements by stage, and the online sensitivity of one epoch."""

    order: list[str] | None = None
    stages: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    online: SensitivityAccumulator | None = None
    epoch: tuple[str, int] = ("", 0)
