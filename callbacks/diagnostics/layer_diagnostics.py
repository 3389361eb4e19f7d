"""LayerDiagnostics: sensitivity, gradient variance, Hessian trace and CKA per layer, client and round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlightning.algorithm import Client, Extra, FederatedCallback, Server, Setup, Update, Wire, isolated
from fedlightning.callbacks.diagnostics.layer_look import COUNTS, QUANTITIES, SENT, LayerLook, Quantity
from fedlightning.callbacks.diagnostics.layer_rows import ALL, read_layers, write_layers
from fedlightning.callbacks.diagnostics.layer_tables import METHODS, StageTable, round_rows
from fedlightning.callbacks.diagnostics.layer_values import refuse_module
from fedlightning.callbacks.diagnostics.sensitivity import SensitivityAccumulator, scale_of
from fedlightning.callbacks.diagnostics.sensitivity_terms import layers_sent, order_to_send
from fedlightning.ranges import Length, PositiveInt, Range

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
        found = server.state.pop(self.key, {})
        tables = [table for client, extras in found.items() for table in self._tables(server, client, extras)]
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
