"""FedOpt: the adaptive server optimizers FedAdam, FedYogi and FedAdagrad."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedlightning.algorithm import Facts, FederatedCallback, Newcomers, Server, State, WeightingName
from fedlightning.callbacks.shared.steps import memory, remember
from fedlightning.ranges import NonNegativeFloat, PositiveFloat, ShareBelowOne, make_init
from fedlightning.tensors import narrow, widen


@make_init
class FedOpt(FederatedCallback):
    """Base of the adaptive server optimizers: the clients' mean change is a pseudo-gradient.

    Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021.

    On trainable parameters, elementwise, with ``Delta = sum_i p_i (w_i - w^t)``:

    * ``m <- beta1 m + (1 - beta1) Delta``
    * ``v <-`` the rule of the subclass (:meth:`second_moment`)
    * ``w <- w + eta_s m / (sqrt(v) + tau)``

    As in the paper there is no bias correction, ``m`` starts at 0 and ``v`` at ``tau^2``; the options give what other
    libraries do. Buffers are averaged: under a server optimizer ``running_var`` becomes negative (FENDA-FL paper,
    appendix H).

    * Down: ``w^t``. Up: ``w_i``.
    * State: ``m, v`` and the number of steps at the server.
    * Deployed: the global model ``w``.

    Args:
        server_lr: Server learning rate ``eta_s``. Default 0.01; the paper tunes it on a log grid.
        beta1: Decay of ``m``. Default 0.9 (paper).
        beta2: Decay of ``v``. Default 0.99 (paper).
        tau: Degree of adaptivity. Default 1e-3 (paper); the FENDA-FL paper uses 1e-9.
        bias_correction: Scale the step as Adam does (Flower, torch). Default: no (paper).
        v_init: Starting value of ``v``. ``None`` (default) is ``tau**2``.
        weighting: ``"samples"`` (default) or ``"uniform"``.

    Raises:
        ValueError: If a decay is outside [0, 1), or ``server_lr`` or ``tau`` is not positive.

    Example:
        Without decay a step is ``eta_s`` long, however far the clients' mean has moved.

        >>> from types import SimpleNamespace
        >>> from fedlightning.callbacks import FedAdam
        >>> server = SimpleNamespace(state={}, trainable=["w"], combining="global")
        >>> rule = FedAdam(server_lr=0.5, beta1=0.0, beta2=0.0)
        >>> rule.server_step(server, {"w": torch.zeros(2)}, {"w": torch.tensor([4.0, 400.0])})["w"]
        tensor([0.4999, 0.5000])
    """

    # a step of the server is a step, whoever's changes it takes
    facts = Facts(mixes_architectures=True, asynchronous=True, newcomers=Newcomers(join=True))

    server_lr: PositiveFloat = 0.01
    beta1: ShareBelowOne = 0.9
    beta2: ShareBelowOne = 0.99
    tau: PositiveFloat = 1e-3
    bias_correction: bool = False
    v_init: NonNegativeFloat | None = None
    weighting: WeightingName | None = None

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """Return the next ``v``."""
        raise NotImplementedError

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """Take one adaptive step on trainable parameters; every other entry is the clients' mean."""
        moments: dict[str, Any] = {"m": {}, "v": {}, "step": 0} | memory(server, self.key)
        trainable = set(server.trainable)
        step = moments["step"] + 1
        scale = (1 - self.beta2**step) ** 0.5 / (1 - self.beta1**step) if self.bias_correction else 1.0
        start = self.tau**2 if self.v_init is None else self.v_init
        m, v, new = dict(moments["m"]), dict(moments["v"]), dict(reduced)
        for name in reduced:
            if name not in trainable:
                continue
            delta = widen(reduced[name]) - widen(old[name])
            m[name] = self.beta1 * m.get(name, delta.new_zeros(delta.shape)) + (1 - self.beta1) * delta
            v[name] = self.second_moment(v.get(name, delta.new_full(delta.shape, start)), delta)
            moved = widen(old[name]) + self.server_lr * scale * m[name] / (v[name].sqrt() + self.tau)
            new[name] = narrow(moved, old[name])
        remember(server, self.key, {"m": m, "v": v, "step": step})
        return new


class FedAdam(FedOpt):
    """FedOpt with Adam's second moment, an exponential mean of squares.

    ``v <- beta2 v + (1 - beta2) Delta^2``. The paper, the step, what travels and the arguments are those of
    :class:`FedOpt`.

    Example:
        >>> import torch
        >>> from fedlightning.callbacks import FedAdam
        >>> FedAdam(beta2=0.9).second_moment(torch.tensor([1.0]), torch.tensor([0.5]))
        tensor([0.9250])
    """

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """Return the exponential mean of squares."""
        return self.beta2 * v + (1 - self.beta2) * delta.square()


class FedYogi(FedOpt):
    """FedOpt with Yogi's second moment, which changes by ``(1 - beta2) Delta^2`` at most.

    ``v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)``. The paper, the step, what travels and the arguments are those of
    :class:`FedOpt`.

    Example:
        >>> import torch
        >>> from fedlightning.callbacks import FedYogi
        >>> FedYogi(beta2=0.9).second_moment(torch.tensor([1.0]), torch.tensor([0.5]))
        tensor([0.9750])
    """

    def second_moment(self, v: Tensor, delta: Tensor) -> Tensor:
        """Return ``v`` moved towards the new square by a step that does not depend on their distance."""
        square = delta.square()
        return v - (1 - self.beta2) * square * torch.sign(v - square)


class FedAdagrad(FedOpt):
    """FedOpt with Adagrad's second moment: steps shrink as squares add up.

    ``v <- v + Delta^2``. The paper, the step and what travels are those of :class:`FedOpt`.

    Args:
        server_lr: Server learning rate ``eta_s``. Default 0.1: ``v`` only grows, so the rate starts larger than
            FedAdam's. The paper tunes it on a log grid.
        beta1: Decay of ``m``. Default 0 (the paper's usual value here).
        tau: Degree of adaptivity. Default 1e-3 (paper).
        v_init: Starting value of ``v``. ``None`` (default) is ``tau**2``.
        weighting: ``"samples"`` (default) or ``"uniform"``.

    Raises:
        ValueError: If ``beta1`` is outside [0, 1), or ``server_lr`` or ``tau`` is not positive.

    Example:
        >>> import torch
        >>> from fedlightning.callbacks import FedAdagrad
        >>> FedAdagrad().second_moment(torch.tensor([1.0]), torch.tensor([0.5]))
        tensor([1.2500])
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
        """Return the sum of squares."""
        return v + delta.square()
