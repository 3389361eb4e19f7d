"""Sensitivity, gradient variance, Hessian trace and CKA of every layer and client, round by round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from fedlightning.algorithm import (
    Client,
    FederatedCallback,
    Server,
    Setup,
    Update,
    Wire,
    isolated,
    move_batch,
    ordered_layers,
    pieces,
)
from fedlightning.callbacks.diagnostics.gradient_variance import gradient_moments
from fedlightning.callbacks.diagnostics.hessian_trace import hutchinson, mean_and_error
from fedlightning.callbacks.diagnostics.layer_rows import ALL, cut_layers, read_layers, write_layers
from fedlightning.callbacks.diagnostics.layer_similarity import common_samples, layer_grams
from fedlightning.callbacks.diagnostics.layer_tables import METHODS, StageTable, round_rows
from fedlightning.callbacks.diagnostics.layer_values import full_precision, layer_order, refuse_module
from fedlightning.callbacks.diagnostics.sensitivity import SensitivityAccumulator, counted_parameters, scale_of
from fedlightning.callbacks.diagnostics.sensitivity_terms import counts_of

Quantity = Literal["sensitivity_online", "sensitivity", "grad_var_samples", "grad_var_params", "hessian_trace", "cka"]
MeasuredStage = Literal["L1", "L2"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
COUNTS = "num_parameters"
SENT: tuple[str, ...] = (COUNTS, *(name for name in QUANTITIES if name != "cka"))
"""What a client sends a number a layer of, in this order."""
OF_GRADIENTS = ("sensitivity", "grad_var_samples", "grad_var_params")
"""What comes out of one pass over training batches."""


class LayerDiagnostics(FederatedCallback):
    """Records what each layer of each client's model is like, next to any algorithm, and does not change the run.

    Every row goes to ``layers.csv`` in the run's folder; ``figures/layers.png`` and ``figures/transition.png`` are
    drawn at the end. ``callbacks.diagnostics.layers`` reads the table. Per layer, in the order of a forward pass:

    * ``sensitivity_online``: PLayer-FL's ``I``, from the gradients that training computes anyway in the first epoch of
      the visit's first federated fit; no extra pass. ``sensitivity``: the same formula with the mean gradient at the
      stage's model, in eval mode. Each also ``_cumulative`` (``F``) and ``_ratio`` (``F_{l+1} / F_l``, at layer l);
      of client ``all``: of the sum over the clients. The online one belongs to stage L2.
    * ``grad_var_samples``, ``grad_var_params``: the two gradient variances, see ``GradientVariance``.
    * ``hessian_trace``: with its standard error, see ``HessianTrace``. It and ``grad_var_samples`` are sums over a
      layer's parameters and are also given ``_per_parameter``.
    * ``cka``: linear CKA of the layer's outputs for the same samples, each client's mean over the others, and the mean
      over all pairs for ``all``. The samples are taken from the union of the clients' validation data, which no client
      of a real federation sees.

    The measured model is the one that trains and travels, at stage L2 (after local training) or L1 (before). What is
    measured goes up as declared extras and is counted in the run's bytes.

    Args:
        quantities: which; all by default.
        stages: ``"L2"``, ``"L1"`` or both.
        every_n_rounds: record rounds 1, 1 + n, 1 + 2n ...
        num_batches: training batches for sensitivity and gradient variance; ``None``: an epoch.
        hessian_probes, hessian_batches: draws, and training batches, for the Hessian trace.
        cka_samples: samples for CKA; 256 or more are advised.
        cka_debiased: use the unbiased estimate of HSIC, for fewer samples.
        weights_only: leave biases out of all but CKA.
        threshold: of the transition that the figures mark.
    """

    def __init__(
        self,
        quantities: list[Quantity] | None = None,
        stages: list[MeasuredStage] | None = None,
        every_n_rounds: int = 1,
        num_batches: int | None = 10,
        hessian_probes: int = 10,
        hessian_batches: int = 1,
        cka_samples: int = 256,
        cka_debiased: bool = False,
        weights_only: bool = False,
        threshold: float = 1.05,
    ) -> None:
        self.quantities = list(QUANTITIES) if quantities is None else list(quantities)
        self.stages = ["L2"] if stages is None else list(stages)
        for name, given, known in (("quantities", self.quantities, QUANTITIES), ("stages", self.stages, ("L1", "L2"))):
            unknown = [entry for entry in given if entry not in known]
            if unknown or not given:
                raise ValueError(f"{self.key} got {name}={given}. Choose from {', '.join(known)}.")
        least = {"every_n_rounds": 1, "hessian_probes": 2, "hessian_batches": 1, "cka_samples": 4}
        self.every_n_rounds = every_n_rounds
        self.num_batches = num_batches
        self.hessian_probes = hessian_probes
        self.hessian_batches = hessian_batches
        self.cka_samples = cka_samples
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{self.key} got {name}={getattr(self, name)}; use {low} or more.")
        if num_batches is not None and num_batches < 1:
            raise ValueError(f"{self.key} got num_batches={num_batches}; use 1 or more, or null for an epoch.")
        if not threshold > 1.0:
            raise ValueError(f"{self.key} got threshold={threshold}. F is cumulative: use a threshold above 1.")
        if not self._looks and "L1" in self.stages:
            raise ValueError(f"{self.key} got stages={self.stages}, but 'sensitivity_online' is of stage L2 alone.")
        self.cka_debiased = cka_debiased
        self.weights_only = weights_only
        self.threshold = threshold

    @property
    def _looks(self) -> bool:
        """Whether anything needs a pass of its own."""
        return any(name != "sensitivity_online" for name in self.quantities)

    def check(self, setup: Setup) -> None:
        """Refuse a module that cannot be measured (manual optimization, half precision), and CKA without common samples."""
        if self._looks:
            refuse_module(setup.module, self.key)
        if "cka" in self.quantities and not setup.has_pooled("val"):
            raise ValueError(
                f"{self.key} compares the clients' models on validation data (quantity 'cka'), but no client has any. "
                "Give the data a validation split, or leave 'cka' out of quantities."
            )

    def wire(self, module: nn.Module) -> Wire:
        """Order of the layers; (stage, quantity, layer, number and error); Gram matrices (stage, layer, n, n)."""
        return Wire(up={"order": (-1,), "values": (-1, -1, -1, 2), "grams": (-1, -1, -1, -1)})

    # -- client --------------------------------------------------------------------------------------------------------
    def on_visit_start(self, client: Client) -> None:
        """In a round that is recorded, and at stage L1 if that is wanted."""
        if client.round % self.every_n_rounds == 0:
            client.scratch[self.key] = visit = _Visit()
            if "L1" in self.stages:
                visit.stages["L1"] = self._measure(client, "L1", visit)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """The first federated fit of the visit records the online sensitivity."""
        visit = self.client.scratch.get(self.key)
        wanted = "sensitivity_online" in self.quantities and self.client.phase.federated
        if visit is not None and visit.online is None and wanted:
            visit.online = SensitivityAccumulator(pl_module, self.weights_only)
            visit.epoch = (self.client.phase.name, trainer.current_epoch)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """One more step of its first epoch, before any correction (gradients are unscaled here)."""
        visit = self.client.scratch.get(self.key)
        if visit is not None and visit.online is not None:
            if visit.epoch == (self.client.phase.name, trainer.current_epoch):
                visit.online.add_step(optimizer, scale_of(optimizer, trainer))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """The order of the layers is known."""
        visit = self.client.scratch.get(self.key)
        if visit is not None and visit.online is not None:
            visit.online.stop_watching()

    def on_send(self, client: Client, update: Update) -> None:
        """Measure the trained model, and send all that was measured."""
        visit = client.scratch.pop(self.key, None)
        if visit is None:
            return
        if "L2" in self.stages:
            visit.stages["L2"] = self._measure(client, "L2", visit)
        names = [piece.name for piece in pieces(client.module)]
        found = [visit.stages[stage] for stage in self.stages]
        update.extras[self.key] = {
            "order": torch.tensor([names.index(name) for name in visit.order]),
            "values": torch.stack([values for values, _ in found]),
        }
        if "cka" in self.quantities:
            update.extras[self.key]["grams"] = torch.stack([grams for _, grams in found])

    def _measure(self, client: Client, stage: str, visit: _Visit) -> tuple[Tensor, Tensor]:
        """Table (quantity, layer, 2) and Gram matrices (layer, n, n) of the client's module; leaves no trace."""
        module, home = client.module, client.module.device
        module.to(client.device)
        try:
            # A number of its own for every (run, round, client, stage): next_batch and the steps draw from addresses,
            # and what a data set's augmentation draws stays in this block.
            seed = client.rng(f"layer diagnostics {stage}").initial_seed()
            with isolated(seed):
                return self._look(client, stage, visit, seed)
        finally:
            module.to(home)

    def _look(self, client: Client, stage: str, visit: _Visit, seed: int) -> tuple[Tensor, Tensor]:
        module, precision = client.module, full_precision(client.precision)
        if not visit.order:
            if self._looks:
                batch = client.next_batch("layer order")
                visit.order = layer_order(module, batch, precision, seed)
            else:
                visit.order = list(visit.online.order or ()) if visit.online is not None else []
        layers = ordered_layers(module, visit.order)
        values = torch.full((len(SENT), len(layers), 2), torch.nan, dtype=torch.float64)
        counts = counts_of(layers, counted_parameters(module, self.weights_only))
        found: dict[str, list[float]] = {COUNTS: [float(count) for count in counts]}
        if any(name in self.quantities for name in OF_GRADIENTS):
            batches = self._batches(client, f"{stage} gradients", self.num_batches)
            moments = gradient_moments(
                module, batches, precision, seed, weights_only=self.weights_only, order=visit.order
            )
            mean = SensitivityAccumulator(module, self.weights_only, visit.order)
            mean.add(moments.mean)
            found["sensitivity"] = mean.result("mean_gradient").sensitivity
            found["grad_var_samples"] = moments.over_samples(layers)
            found["grad_var_params"] = moments.over_params(layers)
        if stage == "L2" and visit.online is not None and any(visit.online.steps.values()):
            visit.online.order = visit.order
            found["sensitivity_online"] = visit.online.result().sensitivity
        if "hessian_trace" in self.quantities:
            batches = self._batches(client, f"{stage} hessian", self.hessian_batches)
            _, draws = hutchinson(
                module,
                batches,
                precision,
                seed,
                num_probes=self.hessian_probes,
                weights_only=self.weights_only,
                order=visit.order,
            )
            found["hessian_trace"], errors = mean_and_error(draws)
            values[SENT.index("hessian_trace"), :, 1] = torch.tensor(errors, dtype=torch.float64)
        for name, numbers in found.items():
            if name == COUNTS or name in self.quantities:
                values[SENT.index(name), :, 0] = torch.tensor(numbers, dtype=torch.float64)
        if "cka" not in self.quantities:
            return values, torch.empty(0)
        batch, count = common_samples(client, self.cka_samples)
        batch, address = move_batch(module, batch), ("layer similarity", client.round)
        return values, layer_grams(module, batch, count, layers, precision, *address, debiased=self.cka_debiased)

    def _batches(self, client: Client, purpose: str, count: int | None) -> Iterator[Any]:
        loader = client.loader("train")
        assert loader is not None
        for _ in range(min(count or len(loader), len(loader))):
            yield client.next_batch(f"layer diagnostics {purpose}")

    # -- server --------------------------------------------------------------------------------------------------------
    def on_round_start(self, server: Server) -> None:
        """A resumed run writes the rows of its rounds again."""
        if server.run_dir is not None:
            cut_layers(server.run_dir / "layers.csv", server.round)

    def on_update(self, server: Server, update: Update) -> None:
        """Collect what the clients measured."""
        extras = update.extras.get(self.key)
        if extras:
            server.state[self.key] = {**server.state.get(self.key, {}), update.client: extras}

    def on_round_end(self, server: Server) -> None:
        """Write the round's rows; nothing is kept."""
        found = server.state.pop(self.key, {})
        tables = [table for client, extras in found.items() for table in self._tables(server, client, extras)]
        if tables and server.run_dir is not None:
            write_layers(server.run_dir / "layers.csv", round_rows(server.round + 1, tables))

    def _tables(self, server: Server, client: str, extras: dict[str, Tensor]) -> Iterator[StageTable]:
        names = [piece.name for piece in pieces(server.module)]
        layers = ordered_layers(server.module, [names[index] for index in extras["order"].tolist()])
        for place, stage in enumerate(self.stages):
            values = dict(zip(SENT, extras["values"][place], strict=True))
            counts = [int(count) for count in values.pop(COUNTS)[:, 0].tolist()]
            there = {name: table for name, table in values.items() if not bool(table[:, 0].isnan().all())}
            grams = extras["grams"][place] if "grams" in extras else None
            yield StageTable(client, stage, [layer.name for layer in layers], counts, there, grams)

    def on_federation_end(self, server: Server) -> None:
        """Draw the last recorded round's layers, and the transition in every round."""
        rows = read_layers(server.run_dir) if server.run_dir is not None else []
        if not rows or server.run_dir is None:
            return
        from fedlightning.callbacks.diagnostics.layer_figures import layer_numbers, plot_layers, plot_transition

        figures, stage = server.run_dir / "figures", self.stages[-1]
        if not layer_numbers(rows, stage=stage):  # CKA of a single client, say
            return
        figures.mkdir(parents=True, exist_ok=True)
        plot_layers(rows, stage=stage, threshold=self.threshold).savefig(figures / "layers.png", dpi=150)
        ratios = {f"{name}_ratio" for name in METHODS}
        if any(row.stage == stage and row.client == ALL and row.quantity in ratios for row in rows):
            figure = plot_transition({"": rows}, threshold=self.threshold, stage=stage)
            figure.savefig(figures / "transition.png", dpi=150)


@dataclass
class _Visit:
    """What a recorded visit gathers."""

    order: list[str] = field(default_factory=list)
    stages: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    online: SensitivityAccumulator | None = None
    epoch: tuple[str, int] = ("", 0)
