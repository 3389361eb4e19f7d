"""SCAFFOLD."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from fedlightning.algorithm import (
    Client,
    FederatedCallback,
    GradientContext,
    Job,
    Message,
    Server,
    Setup,
    State,
    Update,
    WeightingName,
    Wire,
    add,
    module_state,
    select,
    zeros_like,
)
from fedlightning.callbacks.shared.steps import is_plain_sgd, step_to_mean


class SCAFFOLD(FederatedCallback):
    """Stochastic controlled averaging: control variates correct the clients' drift.

    Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled averaging for federated learning",
    ICML 2020.

    Client: ``y <- y - eta (g(y) - c_i + c)`` from ``y = x``. Then

    * option I: ``c_i+ = grad F_i(x)`` over the local training set (one extra pass, before training);
    * option II: ``c_i+ = c_i - c + (x - y) / sum_k eta_k`` over the steps really taken, per parameter.

    Server: ``x <- x + eta_s (mean(y_i) - x)`` and ``c <- c + (1/N) sum_i Delta c_i``, with N all clients.

    * Down: ``x, c``. Up: ``y_i, Delta c_i``. This is twice FedAvg's traffic.
    * State: ``c_i`` at each client for ever, ``c`` at the server. Both start at zero and exist for trainable parameters
      only.
    * Deployed: the global model ``x``.

    Args:
        option: 1 or 2 (default). Option II is exact for plain SGD. With momentum or Adam ``x - y`` is no sum of
            gradients: use option I there (a warning says so).
        server_lr: Server learning rate ``eta_s``. Default 1 (paper).
        weighting: ``"uniform"`` (paper, default). Other weightings weight ``x`` only.

    Raises:
        ValueError: If ``option`` is neither 1 nor 2.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import GradientContext
        >>> from fedlightning.callbacks import SCAFFOLD
        >>> c, c_i = {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}
        >>> ctx = GradientContext(anchor={}, payload={"c": c}, state={"c": c_i}, client="0", num_samples=8, lr=0.1)
        >>> SCAFFOLD().correct_gradient(ctx, "w", torch.zeros(1), torch.tensor([10.0]))
        tensor([12.])
    """

    def __init__(self, option: Literal[1, 2] = 2, server_lr: float = 1.0, weighting: WeightingName = "uniform") -> None:
        if option not in (1, 2):
            raise ValueError(
                f"SCAFFOLD got option={option!r}. Option 1 is the gradient at x, option 2 re-uses the steps."
            )
        if server_lr < 0:
            raise ValueError(f"SCAFFOLD got server_lr={server_lr}; a learning rate must be at least 0.")
        self.option = option
        self.server_lr = server_lr
        self.weighting = weighting

    def claims(self, role: str) -> bool:
        """Decline the server step where ``eta_s = 1``, so that a server optimizer may take the role."""
        return super().claims(role) and not (role == "server_step" and self.server_lr == 1.0)

    def check(self, setup: Setup) -> None:
        """Warn where option II is not exact."""
        for optimizer in setup.optimizers:
            if self.option == 2 and not is_plain_sgd(optimizer):
                setup.warn(
                    f"SCAFFOLD(option=2) reads gradients off the parameters' movement, which is exact for plain SGD only; "
                    f"the module uses {type(optimizer).__name__}. SCAFFOLD(option=1) is exact with any optimizer."
                )

    def wire(self, module: nn.Module) -> Wire:
        """Declare ``c`` down and ``Delta c_i`` up."""
        return Wire(down={"c": "parameters"}, up={"delta_c": "parameters"})

    def _variates(self, server: Server) -> State:
        """Return ``c`` of the server, zeros at first."""
        stored: State = server.state.get(self.key, {}).get("c", {})
        return stored or zeros_like(server.model, server.trainable)

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send ``c`` of the entries that travel."""
        message.extras[self.key] = {"c": select(self._variates(server), message.state)}

    def on_visit_start(self, client: Client) -> None:
        """Start a new client with ``c_i = 0``. Option I takes its gradient at ``x`` now."""
        c = client.message.extras[self.key]["c"]
        own = client.state.setdefault(self.key, {})
        own["c"] = zeros_like(c) | own.get("c", {})
        if self.option == 1:
            client.scratch[self.key] = client.gradient(split="train")

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return ``g - c_i + c``."""
        if name not in ctx.payload.get("c", {}):
            return gradient
        difference = ctx.payload["c"][name] - ctx.state["c"][name]
        return gradient + difference.to(gradient.device)

    def on_send(self, client: Client, update: Update) -> None:
        """Keep the new ``c_i`` and send its change. Without a real step it stays as it was."""
        own = client.state.get(self.key)
        if client.steps == 0 or own is None:
            return
        c, old = client.message.extras[self.key]["c"], own["c"]
        if self.option == 1:
            new = {name: client.scratch[self.key].get(name, old[name]) for name in c}
        else:
            trained = module_state(client.module, c)
            new = {
                name: old[name] - c[name] + (client.received[name] - trained[name]) / client.lr_sums[name]
                for name in c
                if client.lr_sums.get(name)
            }
        update.extras[self.key] = {"delta_c": {name: new[name] - old[name] for name in new}}
        client.state[self.key] = {"c": {**old, **new}}

    def on_update(self, server: Server, update: Update) -> None:
        """Add ``Delta c_i`` to a sum.

        ``c`` itself moves when the round is reduced, so that all clients of a round see the same one.
        """
        delta = update.extras.get(self.key, {}).get("delta_c")
        if delta:
            own = server.state.setdefault(self.key, {"c": self._variates(server)})
            total = own.get("sum", zeros_like(own["c"]))
            own["sum"] = add(total, delta)

    def on_reduced(self, server: Server, state: State) -> State:
        """Set ``c <- c + (1/N) sum_i Delta c_i``."""
        own = server.state.get(self.key, {})
        if "sum" in own:
            server.state[self.key] = {"c": add(own["c"], own["sum"], alpha=1.0 / len(server.clients))}
        return state

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """Return ``x + eta_s (mean(y_i) - x)`` on trainable parameters; every other entry is the clients' mean."""
        return step_to_mean(server, old, reduced, self.server_lr)
