"""Divergence of Gaussians whose standard deviation is `softplus(rho)`, and its derivatives."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def gaussian_kl(mu: Tensor, rho: Tensor, prior_mu: Tensor, prior_rho: Tensor) -> Tensor:
    r"""Return `KL(N(mu, softplus(rho)^2) || N(prior_mu, softplus(prior_rho)^2))`, element by element.

    .. math:: \log\frac{\sigma_w}{\sigma_q} + \frac{\sigma_q^2 + (\mu_q - \mu_w)^2}{2 \sigma_w^2} - \frac{1}{2}

    Example:
        >>> import torch
        >>> gaussian_kl(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([0.0]))
        tensor([0.])
    """
    sigma, prior = F.softplus(rho), F.softplus(prior_rho)
    return (prior / sigma).log() + (sigma.square() + (mu - prior_mu).square()) / (2.0 * prior.square()) - 0.5


def kl_gradients(mu: Tensor, rho: Tensor, prior_mu: Tensor, prior_rho: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the derivatives of :func:`gaussian_kl` by its four arguments."""
    sigma, prior = F.softplus(rho), F.softplus(prior_rho)
    apart = mu - prior_mu
    by_mu = apart / prior.square()
    by_rho = (sigma / prior.square() - 1.0 / sigma) * rho.sigmoid()
    by_prior = (1.0 - (sigma.square() + apart.square()) / prior.square()) / prior * prior_rho.sigmoid()
    return by_mu, by_rho, -by_mu, by_prior
