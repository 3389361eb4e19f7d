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
    interpolate,
    module_state,
    select,
    zeros_like,
)


class SCAFFOLD(FederatedCallback):
    """Stochastic controlled averaging: control variates correct the clients' drift.

    Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled averaging for federated learning",
    ICML 2020.

    Down: ``x, c``. Up: ``y_i, Delta c_i`` (twice FedAvg's traffic). State: ``c_i`` at each client for ever, ``c`` at
    the server; both start at zero and exist for trainable parameters only.

    Client: ``y <- y - eta (g(y) - c_i + c)``, then

    * option I: ``c_i+ = grad F_i(x)`` over the local training set (one extra pass, before training);
    * option II: ``c_i+ = c_i - c + (x - y) / sum_k eta_k`` over the steps really taken, per parameter.

    Server: ``x <- x + eta_s (mean(y_i) - x)``, ``c <- c + (1/N) sum_i Delta c_i`` with N all clients.

    Args:
        option: 1 or 2. Option II is exact for plain SGD; with momentum or Adam ``x - y`` is no sum of gradients, so use
            option I there (a warning says so).
        server_lr: ``eta_s`` (paper: 1).
        weighting: ``"uniform"`` (paper). Other weightings weight ``x`` only.
    """

    def __init__(self, option: Literal[1, 2] = 2, server_lr: float = 1.0, weighting: WeightingName = "uniform") -> None:
        if option not in (1, 2):
            raise ValueError(
                f"SCAFFOLD got option={option!r}. Option 1 is the gradient at x, option 2 re-uses the steps."
            )
        self.option = option
        self.server_lr = server_lr
        self.weighting = weighting

    def check(self, setup: Setup) -> None:
        """Warn where option II is not exact."""
        for optimizer in setup.optimizers:
            plain = type(optimizer).__name__ == "SGD" and not optimizer.defaults.get("momentum")
            if self.option == 2 and not plain:
                setup.warn(
                    f"SCAFFOLD(option=2) reads gradients off the parameters' movement, which is exact for plain SGD only; "
                    f"the module uses {type(optimizer).__name__}. SCAFFOLD(option=1) is exact with any optimizer."
                )

    def wire(self, module: nn.Module) -> Wire:
        """``c`` down, ``Delta c_i`` up."""
        return Wire(down={"c": "parameters"}, up={"delta_c": "parameters"})

    def _variates(self, server: Server) -> State:
        stored: State = server.state.get(self.key, {}).get("c", {})
        return stored or zeros_like(server.model, server.trainable)

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send ``c`` for what travels."""
        message.extras[self.key] = {"c": select(self._variates(server), message.state)}

    def on_visit_start(self, client: Client) -> None:
        """A new client starts with ``c_i = 0``; option I takes its gradient at ``x`` now."""
        c = client.message.extras[self.key]["c"]
        own = client.state.setdefault(self.key, {})
        own["c"] = zeros_like(c) | own.get("c", {})
        if self.option == 1:
            client.scratch[self.key] = client.gradient(split="train")

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """``g - c_i + c``."""
        if name not in ctx.payload.get("c", {}):
            return gradient
        difference = ctx.payload["c"][name] - ctx.state["c"][name]
        return gradient + difference.to(gradient.device)

    def on_send(self, client: Client, update: Update) -> None:
        """New ``c_i``; its change goes up. Without a real step it stays."""
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
        """Sum the changes; ``c`` itself moves when the round is reduced, so all clients saw the same one."""
        delta = update.extras.get(self.key, {}).get("delta_c")
        if delta:
            own = server.state.setdefault(self.key, {"c": self._variates(server)})
            total = own.get("sum", zeros_like(own["c"]))
            own["sum"] = add(total, delta)

    def on_reduced(self, server: Server, state: State) -> State:
        """``c <- c + (1/N) sum Delta c_i``."""
        own = server.state.get(self.key, {})
        if "sum" in own:
            server.state[self.key] = {"c": add(own["c"], own["sum"], alpha=1.0 / len(server.clients))}
        return state

    def claims(self, role: str) -> bool:
        """With ``eta_s = 1`` there is no server step, and a server optimizer may take the role."""
        return super().claims(role) and not (role == "server_step" and self.server_lr == 1.0)

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """``x + eta_s (mean(y_i) - x)`` on trainable parameters; the rest is averaged."""
        trainable = set(server.trainable)
        moved = interpolate(
            {name: reduced[name] for name in reduced if name in trainable},
            {name: old[name] for name in reduced if name in trainable},
            self.server_lr,
        )
        return {**reduced, **moved}
