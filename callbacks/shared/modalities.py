"""What methods for several modalities share: which parts of a module belong to a modality, and which a batch has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from fedlightning.algorithm import Setup, isolated, probes
from fedlightning.callbacks.shared.representations import LABEL_KEYS
from fedlightning.layers import expand
from fedlightning.tensors import clone, module_state, select, to_row
from fedlightning.wrappers import Mixin, muted

Parts = dict[str, list[str]]


def parts_of(module: nn.Module, declared: Parts | None, kind: str) -> dict[str, list[str]]:
    """Return by modality the names of the state entries of its part, such as its encoder.

    Example:
        >>> net = nn.ModuleDict({"encoders": nn.ModuleDict({"audio": nn.Linear(2, 1), "image": nn.Linear(4, 1)})})
        >>> parts_of(net, None, "encoders")["audio"]
        ['encoders.audio.weight', 'encoders.audio.bias']
    """
    names = list(module_state(module))
    if declared is None:
        default = next(
            (
                (path, child)
                for path, child in module.named_modules()
                if path.rpartition(".")[2] == kind and isinstance(child, nn.ModuleDict)
            ),
            None,
        )
        declared = {} if default is None else {modality: [f"{default[0]}.{modality}"] for modality in default[1]}
    parts = {modality: list(expand(part, names)) if part else names for modality, part in declared.items()}
    owned = [name for part in parts.values() for name in part]
    twice = sorted({name for name in owned if owned.count(name) > 1}) if len(parts) > 1 else []
    if twice:
        raise ValueError(f"'{twice[0]}' is in the {kind} of two modalities. An entry belongs to one of them.")
    return parts


def encoders_of(setup: Setup, declared: Parts | None, owner: str) -> dict[str, list[str]]:
    """Return the encoders of a module, as :func:`parts_of` does, and refuse modules and batches without them."""
    parts = parts_of(setup.module, declared, "encoders")
    if not parts:
        raise ValueError(
            f"{owner} needs to know the encoder of each modality, and {type(setup.template).__name__} has no ModuleDict "
            "called 'encoders'. Use MultimodalNet, or set encoders={modality: [names of its entries]}."
        )
    batch = setup.data.first_batch()
    inputs = None if batch is None else inputs_of(batch)
    if batch is not None and inputs is None and len(parts) > 1:
        raise ValueError(
            f"{owner} has the encoders of {', '.join(parts)}, but a batch is not a dict of inputs by modality. Let the "
            "loader "
            "give ({modality: inputs}, labels), as MultimodalDataModule does."
        )
    unknown = [name for name in inputs or {} if name not in parts]
    if unknown:
        raise ValueError(
            f"{owner} has the encoders of {', '.join(parts)}, and a batch has {', '.join(inputs or {})}. Name an encoder "
            "for each modality of the data."
        )
    return parts


def inputs_of(batch: Any) -> dict[str, Tensor] | None:
    """Return the inputs of a batch by modality, `None` if it is not a dict of them.

    Example:
        >>> list(inputs_of(({"audio": torch.zeros(2, 1)}, torch.zeros(2))))
        ['audio']
    """
    x = holder_of(batch)
    return None if x is None else {name: values for name, values in x.items() if name not in LABEL_KEYS}


def holder_of(batch: Any) -> Any:
    """Return the dict in a batch that holds the inputs; `None` if there is none."""
    x = batch[0] if isinstance(batch, tuple | list) and batch else batch
    return x if isinstance(x, Mapping) else None


def samples_with(batch: Any, modalities: list[str]) -> Tensor:
    """Return how many samples of a batch have each modality, int64 `(modalities,)`.

    A sample lacks a modality whose values are all NaN, or that is not in the dict. A batch that is not a dict has the only
    modality there is.

    Example:
        >>> x = {"audio": torch.tensor([[1.0], [torch.nan]])}
        >>> samples_with((x, torch.zeros(2)), ["audio", "image"])
        tensor([1, 0])
    """
    inputs = inputs_of(batch)
    if inputs is None:
        return torch.ones(len(modalities), dtype=torch.int64)
    counts = [rows_with(inputs[name]).sum() if name in inputs else None for name in modalities]
    like = next((count for count in counts if count is not None), torch.tensor(0))
    return torch.stack([torch.zeros_like(like) if count is None else count for count in counts])


def rows_with(values: Tensor) -> Tensor:
    """Return which samples have a modality, bool `(batch,)`: those whose values are not all NaN."""
    return ~values.flatten(1).isnan().all(1) if values.is_floating_point() else values.new_ones(len(values)).bool()


class PassesOver(Mixin):
    """On a module whose training step gives no loss, and so takes no step, while `passes_over` is set."""

    wraps = ("training_step",)
    passes_over = False

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the loss, or `None`."""
        return None if self.passes_over else call(*args, **kwargs)


def drop_modality(batch: Any, modality: str) -> Any:
    """Return a batch in which no sample has a modality."""
    x = dict(holder_of(batch))
    x[modality] = torch.full_like(x[modality], float("nan"))
    return [x, *batch[1:]] if isinstance(batch, tuple | list) else x


def refuse_blind_training(setup: Setup, encoders: Mapping[str, list[str]], owner: str) -> None:
    """Refuse modules that train an encoder on samples without its modality.

    The training step runs on a batch from which one modality after the other is taken away (or which lacks it anyway). Then
    the loss must be a number, and the encoder have no gradient and no moved buffer. Samples that have no other modality
    are left out with it.
    """
    batch = setup.data.first_batch()
    inputs = None if batch is None else inputs_of(batch)
    modalities = [name for name in inputs or {} if bool(rows_with((inputs or {})[name]).any())]
    lacking = [] if inputs is None else [name for name in encoders if name not in modalities]
    cases = {name: drop_modality(batch, name) for name in modalities if len(modalities) > 1} | dict.fromkeys(
        lacking, batch
    )
    for modality, seen in cases.items():
        if modality in modalities:
            others = torch.stack([rows_with((inputs or {})[name]) for name in modalities if name != modality]).any(0)
            if not others.all():
                if int(others.sum()) < 2:  # batch normalisation cannot train on one
                    continue
                seen = apply_to_collection(seen, Tensor, lambda values, rows=others: values[rows])
        module = copy.deepcopy(setup.module).train()
        name, before = type(setup.template).__name__, {k: v.clone() for k, v in module_state(module).items()}
        fault = _fault(module, seen, encoders[modality], before)
        if fault is not None:
            raise ValueError(
                f"{owner}: on samples without {modality!r} {name} {fault}. A client that lacks a modality must not train its "
                "encoder: let the network leave out inputs that are NaN, as MultimodalNet does."
            )


def _fault(module: LightningModule, batch: Any, names: list[str], before: Mapping[str, Tensor]) -> str | None:
    with isolated("blind training"), muted(module), torch.enable_grad():
        try:
            loss = probes.training_loss(module, batch)
        except probes.NoLossError:
            return None
        if not bool(torch.isfinite(loss)):
            return f"has the loss {float(loss.detach())}"
        loss.backward()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in names and parameter.grad is not None:
            return f"gives '{name}' a gradient"
    moved = next((name for name in names if not torch.equal(module_state(module)[name], before[name])), None)
    return None if moved is None else f"moves '{moved}'"


def bias(start: Mapping[str, Tensor], now: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """Return ``1 - cos`` of an encoder's parameters, flattened, between two times; float64, in [0, 2].

    Example:
        >>> bias({"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 3.0])}, ["w"])
        tensor(1., dtype=torch.float64)
    """
    kept = [name for name in names if name in start]
    before, after = (to_row(clone(select(state, kept), "cpu"), kept) for state in (start, now))
    scale = before.norm() * after.norm()
    return 1.0 - before @ after / scale if scale > 0 else torch.zeros((), dtype=torch.float64)
