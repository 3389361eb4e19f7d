"""Similarity of two models' representations of the same samples: linear CKA (centred kernel alignment)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from fedlightning.tensors import widen


def linear_cka(x: Tensor, y: Tensor, debiased: bool = False) -> float:
    r"""Return the linear CKA of two representations of the same n samples.

    Kornblith, Norouzi, Lee, Hinton, "Similarity of neural network representations revisited", ICML 2019: with columns
    centred over the samples, :math:`\|Y'X\|_F^2 / (\|X'X\|_F \|Y'Y\|_F)`. (PLayer-FL's equation A.3 prints squares in
    the denominator; CKA(X, X) would not be 1 then.)

    It is in [0, 1], symmetric, and 1 for equal representations. Orthogonal maps, isotropic scaling and shifts of either
    side change nothing, other linear maps do. Where one side has no spread it is 0, with a warning.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])
        >>> round(linear_cka(x, 5 * x + 1), 6)
        1.0
    """
    if len(x) != len(y):
        raise ValueError(f"CKA compares two views of the same samples: got {len(x)} and {len(y)} of them.")
    x, y = _rows(x), _rows(y).to(x.device)
    if debiased or max(x.shape[1], y.shape[1]) > len(x):
        return cka_of_grams(unit_gram(x, debiased), unit_gram(y, debiased))
    _refuse_few(len(x), debiased)
    x, y = _spread(x - x.mean(0)), _spread(y - y.mean(0))
    if not bool(x.any()) or not bool(y.any()):
        _warn_constant()
        return 0.0
    return float((y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm()))


def unit_gram(features: Tensor, debiased: bool = False) -> Tensor:
    """Return the centred Gram matrix of a representation, with Frobenius norm 1.

    The CKA of two representations is the sum of the products of their unit Gram matrices (:func:`cka_of_grams`). So
    models of different widths compare, and n x n numbers travel instead of n x p.

    Example:
        >>> unit_gram(torch.tensor([[1.0], [-1.0]]))
        tensor([[ 0.5000, -0.5000],
                [-0.5000,  0.5000]], dtype=torch.float64)
    """
    x = _rows(features)
    n = len(x)
    _refuse_few(n, debiased)
    x = _spread(x - x.mean(0))
    gram = x @ x.T
    if debiased:
        gram.fill_diagonal_(0)
        sums, total = gram.sum(0, keepdim=True), gram.sum()
        gram = gram - (sums + sums.T) / (n - 2) + total / ((n - 1) * (n - 2))
        gram.fill_diagonal_(0)
    norm = gram.norm()
    if norm == 0:
        _warn_constant()
        return gram
    return gram / norm


def cka_of_grams(a: Tensor, b: Tensor) -> float:
    """Return the CKA of two matrices of :func:`unit_gram`, both `(n, n)`.

    Example:
        >>> gram = unit_gram(torch.tensor([[1.0], [-1.0], [3.0]]))
        >>> round(cka_of_grams(gram, gram), 6)
        1.0
    """
    return float((widen(a) * widen(b)).sum())


def pairwise_cka(grams: Sequence[Tensor]) -> Tensor:
    """Return the CKA of every pair of m models from their unit Gram matrices: `(m, m)`, symmetric.

    Example:
        >>> gram = unit_gram(torch.tensor([[1.0], [-1.0], [3.0]]))
        >>> pairwise_cka([gram, gram]).round(decimals=3)
        tensor([[1., 1.],
                [1., 1.]], dtype=torch.float64)
    """
    flat = torch.stack([widen(gram).flatten() for gram in grams])
    return flat @ flat.T


def _rows(features: Tensor) -> Tensor:
    return widen(features.detach()).reshape(len(features), -1)


def _spread(centred: Tensor) -> Tensor:
    """`centred` at a scale whose squares neither overflow nor vanish: CKA does not depend on it."""
    largest = centred.abs().max()
    return centred / largest if largest > 0 else centred


def _refuse_few(n: int, debiased: bool) -> None:
    if n < (4 if debiased else 2):
        raise ValueError(f"CKA needs at least {4 if debiased else 2} samples here, got {n}.")


def _warn_constant() -> None:
    warnings.warn("A representation is the same for every sample: CKA with it is taken as 0.", stacklevel=3)
