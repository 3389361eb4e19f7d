"""FedOpt: adaptive server optimizers."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlightning.algorithm import FederatedCallback, Server, State, WeightingName


class FedOpt(FederatedCallback):
    r"""Base of the adaptive server optimizers: the clients' mean change is a pseudo-gradient.

    Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021.

    Down: ``w^t``. Up: ``w_i``. State: server ``m, v``. On trainable parameters only, elementwise, with
    ``Delta = sum_i p_i (w_i - w^t)``:

    * ``m <- beta1 m + (1 - beta1) Delta``
    * ``v <- `` the rule of the subclass
    * ``w <- w + eta_s m / (sqrt(v) + tau)``

    Without bias correction, ``m`` from 0 and ``v`` from ``tau^2``, as in the paper; the options give what libraries
    do. Buffers are averaged: ``running_var`` under a server optimizer goes negative (FENDA-FL paper, appendix H).

    Args:
        server_lr: ``eta_s``. The paper tunes it on a log grid. Default 0.01.
        beta1, beta2: decay of ``m`` and ``v`` (paper: 0.9 and 0.99).
        tau: degree of adaptivity (paper: 1e-3; the FENDA-FL paper 1e-9).
        bias_correction: scale the step as Adam does (Flower, torch).
        v_init: starting value of ``v``; ``None``: ``tau**2``.
        weighting: ``"samples"`` or ``"uniform"``.
    """

    def __init__(
        self,
        server_lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
        bias_correction: bool = False,
        v_init: float | None = None,
        weighting: WeightingName | None = None,
    ) -> None:
        for name, value in (("beta1", beta1), ("beta2", beta2)):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{self.key} got {name}={value}; a decay must be in [0, 1).")
        if server_lr <= 0 or tau <= 0:
            raise ValueError(f"{self.key} got server_lr={server_lr} and tau={tau}; both must be positive.")
        self.server_lr = server_lr
        self.beta1 = beta1
        self.beta2 = beta2
        self.tau = tau
        self.bias_correction = bias_correction
        self.v_init = v_init
        self.weighting = weighting

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """The next ``v``."""
        raise NotImplementedError

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """One server step on trainable parameters; every other entry is what the clients' mean says."""
        own = server.state.get(self.key, {"m": {}, "v": {}, "step": 0})
        trainable = set(server.trainable)
        step = own["step"] + 1
        scale = (1 - self.beta2**step) ** 0.5 / (1 - self.beta1**step) if self.bias_correction else 1.0
        start = self.tau**2 if self.v_init is None else self.v_init
        m, v, new = dict(own["m"]), dict(own["v"]), dict(reduced)
        for name in reduced:
            if name not in trainable:
                continue
            delta = reduced[name].double() - old[name].double()
            m[name] = self.beta1 * m.get(name, delta.new_zeros(delta.shape)) + (1 - self.beta1) * delta
            v[name] = self.second_moment(v.get(name, delta.new_full(delta.shape, start)), delta)
            moved = old[name].double() + self.server_lr * scale * m[name] / (v[name].sqrt() + self.tau)
            new[name] = moved.to(old[name].dtype)
        server.state[self.key] = {"m": m, "v": v, "step": step}
        return new


class FedAdam(FedOpt):
    """FedOpt with ``v <- beta2 v + (1 - beta2) Delta^2``. See :class:`FedOpt`."""

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """Exponential mean of squares."""
        return self.beta2 * v + (1 - self.beta2) * delta.square()


class FedYogi(FedOpt):
    """FedOpt with ``v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)``: ``v`` changes by ``(1 - beta2) Delta^2`` at most.

    See :class:`FedOpt`.
    """

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """A step of fixed size towards the new square."""
        square = delta.square()
        return v - (1 - self.beta2) * square * torch.sign(v - square)


class FedAdagrad(FedOpt):
    """FedOpt with ``v <- v + Delta^2``: steps shrink as squares add up. See :class:`FedOpt`.

    Args:
        server_lr: ``eta_s``. The paper tunes it on a log grid. Default 0.1: ``v`` only grows, so it starts larger than
            FedAdam's.
        beta1: decay of ``m`` (paper: usually 0 here).
        tau: degree of adaptivity (paper: 1e-3).
        v_init: starting value of ``v``; ``None``: ``tau**2``.
        weighting: ``"samples"`` or ``"uniform"``.
    """

    def __init__(
        self,
        server_lr: float = 0.1,
        beta1: float = 0.0,
        tau: float = 1e-3,
        v_init: float | None = None,
        weighting: WeightingName | None = None,
    ) -> None:
        super().__init__(server_lr, beta1, tau=tau, v_init=v_init, weighting=weighting)

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """The sum of squares."""
        return v + delta.square()
