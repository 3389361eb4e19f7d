"""Check a sub-model by running it beside the full model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedlightning.seeding import isolated
from fedlightning.wrappers.mixing import user_class
from fedlightning.wrappers.muting import muted
from fedlightning.wrappers.slices import mesh
from fedlightning.wrappers.submodel import NORMS, Cut, Units, entry_slices, shrink


def verify(module: LightningModule, cuts: list[Cut], units: Units, run: Callable[[LightningModule], Tensor]) -> None:
    """Check that the sub-model computes what the full model does when all but the kept units are silent.

    Both are copies with random weights and without normalisation. `module` stays as it is.

    Example:
        >>> import torch
        >>> from fedlightning.models import MLP, Classifier
        >>> from fedlightning.wrappers.submodel import first_units, plan_cuts
        >>> from fedlightning.wrappers.submodel_check import verify
        >>> module = Classifier(MLP(4, [6], 2), num_classes=2)
        >>> verify(module, plan_cuts(module), first_units(0.5), lambda net: net(torch.ones(1, 4)).sum())
    """
    full, owner = copy.deepcopy(module).eval(), user_class(module).__name__
    slices = entry_slices(full, cuts, units)
    way_out = "Only chains of linear and convolutional layers, with residual sums, have sub-models"
    with torch.no_grad(), isolated("verify"), muted(full):
        for parameter in full.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.1
            parameter.copy_(torch.randn_like(parameter) * scale)
        small = shrink(copy.deepcopy(full), slices)
        for name, parameter in full.named_parameters(remove_duplicate=False):
            if name in slices:
                at = mesh(slices[name], parameter.shape)
                parameter.copy_(torch.zeros_like(parameter).index_put(at, parameter[at]))
        for model in (full, small):
            for path, layer in list(model.named_modules()):
                if isinstance(layer, NORMS):
                    parent, _, child = path.rpartition(".")
                    setattr(model.get_submodule(parent), child, nn.Identity())
        expected = run(full)
        try:
            with muted(small):
                found = run(small)
        except Exception as error:
            raise ValueError(f"A sub-model of {owner} does not run: {error}. {way_out}.") from error
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-4):
        raise ValueError(f"A sub-model of {owner} does not compute what its units do in the full model. {way_out}.")
