"""What a parametrization keeps beside its weight: the two unit vectors by which a spectral norm knows its matrix.

They are worked out from the matrix, a little in every training step, and an evaluation takes them as they are. So they are
no running statistics: the mean of several clients' vectors is no unit vector, and vectors that did not come with their matrix
belong to another one. Both kinds are worked out anew; vectors that came as one client left them stay.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

VECTORS = ("_u", "_v")
"""Names of the vectors in a spectral norm of torch."""
MOST = 100
"""Power iterations until vectors that were worked out anew count as found."""


def keeps_vectors(names: Collection[str]) -> bool:
    """Return True if one of a module's entries is such a vector, by its name."""
    return any(name.endswith("._u") and "parametrizations." in name for name in names)


@torch.no_grad()
def settle(module: nn.Module, came: Collection[str]) -> None:
    """Work out a module's vectors anew where they have to be: they are no unit vectors, or their matrix came without them.

    Example:
        >>> layer = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2))
        >>> _ = layer.parametrizations.weight.original.data.mul_(5.0)
        >>> settle(layer, ["parametrizations.weight.original"])
        >>> round(float(torch.linalg.matrix_norm(layer.eval().weight, 2)), 4)
        1.0
    """
    for path, layer in module.named_modules():
        for weight, chain in layer.parametrizations.items() if parametrize.is_parametrized(layer) else ():
            prefix = f"{path}.parametrizations.{weight}.".removeprefix(".")
            for place, norm in enumerate(chain):
                vectors = [vector for name, vector in norm.named_buffers(recurse=False) if name in VECTORS]
                its_own = f"{prefix}{place}._u" in came or not any(
                    name.startswith(f"{prefix}original") for name in came
                )
                if vectors and not (its_own and all(map(_is_unit, vectors))):
                    _work_out(chain, vectors[0])


def _is_unit(vector: Tensor) -> bool:
    """Return whether a vector has the length 1, but for rounding."""
    return abs(float(vector.norm()) - 1.0) < 8 * torch.finfo(vector.dtype).eps


def _work_out(chain: nn.Module, vector: Tensor) -> None:
    """Let a spectral norm iterate, as in training, until its vector stays."""
    mode = chain.training
    chain.train()
    for _ in range(MOST):
        before = vector.clone()
        chain()
        if float((vector - before).norm()) < 8 * torch.finfo(vector.dtype).eps:
            break
    chain.train(mode)
