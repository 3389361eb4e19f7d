"""SCAFFOLD."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import SGD

from fedlightning.algorithm import (
    WEIGHTINGS,
    Change,
    Client,
    Facts,
    FederatedCallback,
    GradientContext,
    Job,
    Message,
    Newcomers,
    Server,
    Setup,
    State,
    Update,
    WeightingName,
    Wire,
    requires,
)
from fedlightning.callbacks.shared.steps import step_to_mean
from fedlightning.ranges import NonNegativeFloat, make_init
from fedlightning.tensors import add, clone, module_state, select, zeros_like


@make_init
class SCAFFOLD(FederatedCallback):
    """Stochastic controlled averaging: control variates correct the clients' drift.

    Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled averaging for federated learning",
    ICML 2020.

    Client: ``y <- y - eta (g(y) - c_i + c)`` from ``y = x``. Then

    * option I: ``c_i+ = grad F_i(x)`` over the local training set (one extra pass, before training);
    * option II: ``c_i+ = c_i - c + (x - y) / A_i``. ``x - y`` is a sum of the corrected gradients of the steps really
      taken, ``sum_k a_k (g_k - c_i + c)``, and ``A_i = sum_k a_k``, per parameter: the sum of the learning rates of
      plain SGD, and under momentum the effective sum, ``eta ||a||_1`` for a constant ``eta`` (FedNova's ``a``).

    Server: ``x <- x + eta_s (mean(y_i) - x)`` and ``c <- c + (1/N) sum_i Delta c_i``, with N all clients. Weighted by
    samples, both means are: ``c <- c + sum_i p_i Delta c_i`` keeps ``c = sum_i p_i c_i``, which decides what objective
    is minimised.

    * Down: ``x, c``. Up: ``y_i, Delta c_i``. This is twice FedAvg's traffic.
    * State: ``c_i`` at each client for ever, ``c`` at the server. Both start at zero and exist for trainable parameters
      only.
    * Deployed: the global model ``x``.

    Args:
        option: 1 or 2 (default). Option II needs SGD, with or without momentum. With Adam ``x - y`` is not a sum of
            gradients, and with a momentum that goes on from visit to visit it holds gradients of earlier corrections:
            both are refused, and option I takes any optimizer.
        server_lr: Server learning rate ``eta_s``. Default 1 (paper).
        weighting: ``"uniform"`` (paper, default), ``"samples"`` or ``"log"``.

    Raises:
        ValueError: If ``option`` is neither 1 nor 2.

    Note:
        The analysis has one number of local steps for all clients. With ``local_epochs`` and clients of different sizes
        the large ones go far along a correction that the small ones do not follow, and training may become unstable
        (0.61 of the digits right where equal steps give 0.93): count ``local_steps``. A warning says where it applies.

    Example:
        >>> import torch
        >>> from fedlightning.algorithm import GradientContext
        >>> from fedlightning.callbacks import SCAFFOLD
        >>> c, c_i = {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}
        >>> ctx = GradientContext(anchor={}, payload={"c": c}, state={"c": c_i}, client="0", num_samples=8, lr=0.1)
        >>> SCAFFOLD().correct_gradient(ctx, "w", torch.zeros(1), torch.tensor([10.0]))
        tensor([12.])
    """

    option: Literal[1, 2] = 2
    server_lr: NonNegativeFloat = 1.0
    weighting: WeightingName | None = "uniform"

    @property
    def facts(self) -> Facts:
        """`c` is the mean of all `c_i`, which the clients keep."""
        exact, instead = "takes the gradient of the loss that training_step returns", "Use SCAFFOLD(option=2)."
        by_movement = requires.NoClipping("reads gradients off the parameters' movement", "Use SCAFFOLD(option=1).")
        return Facts(
            changes={Change.IN_STEP},
            requires=[requires.AutomaticOptimization(exact, instead) if self.option == 1 else by_movement],
            keeps=True,
            counts_steps=True,
            newcomers=Newcomers(join=self._join),
        )

    def claims(self, role: str) -> bool:
        """Decline the server step where ``eta_s = 1``, so that a server optimizer may take the role."""
        return super().claims(role) and not (role == "server_step" and self.server_lr == 1.0)

    def check(self, setup: Setup) -> None:
        """Refuse what option II cannot read a gradient from; warn where it is inexact, or clients' steps are unequal.

        Raises:
            ValueError: If the weighting is a function, or option II meets an optimizer other than SGD, a maximizing
                one, or a momentum that is kept from visit to visit.
        """
        if callable(weighting := _weighting(setup.callbacks)):
            raise ValueError(
                f"SCAFFOLD keeps c = sum_i p_i c_i over all clients, but weighting={weighting!r} is a function, which "
                f"says nothing of absent clients. Use one of {sorted(WEIGHTINGS)}."
            )
        if self.option == 2:
            self._check_option_2(setup)
        if setup.run.local_epochs is not None:
            window = int(setup.run.trainer_arguments.get("accumulate_grad_batches") or 1)
            of_size = {size: client for client, size in setup.data.num_samples.items() if size}
            steps = {client: -(-setup.data.num_batches(client) // window) for client in of_size.values()}
            few, many = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
            if steps[few] != steps[many]:
                setup.warn(
                    f"SCAFFOLD assumes that all clients take the same number of steps, but with local_epochs="
                    f"{setup.run.local_epochs} client '{few}' takes {steps[few]} and client '{many}' {steps[many]} an epoch, "
                    "which may make it unstable. Set local_steps instead."
                )

    def _check_option_2(self, setup: Setup) -> None:
        step = setup.first_step()  # an optimizer may need a Trainer
        _refuse_optimizers([*setup.optimizers, *step.optimizers], setup.run.optimizer_state)
        if step.clips:
            setup.warn(
                f"SCAFFOLD(option=2) reads gradients off the parameters' movement; where {type(setup.template).__name__}."
                f"{step.clips} changes gradients, it reads others than those of the loss. SCAFFOLD(option=1) takes its "
                "gradient apart."
            )

    def wire(self, module: nn.Module) -> Wire:
        """Declare ``c`` down and ``Delta c_i`` up."""
        return Wire(down={"c": "parameters"}, up={"delta_c": "parameters"})

    def _variates(self, server: Server) -> State:
        """Return ``c`` of the server, zeros at first."""
        stored: State = server.state.get(self.key, {}).get("c", {})
        return stored or zeros_like(server.model, server.trainable)

    def _join(self, server: Server, clients: Sequence[str]) -> None:
        """Set `c <- c sum_old p_i / sum_all p_i`: it stays the mean of all `c_i`, and those of new clients are 0."""
        state = server.state.get(self.key)
        if state:
            weights = _weights(server)
            before = sum(weight for client, weight in weights.items() if client not in clients)
            share = before / sum(weights.values())
            server.state[self.key] = {**state, "c": {name: share * value for name, value in state["c"].items()}}

    def on_broadcast(self, server: Server, job: Job, message: Message) -> None:
        """Send ``c`` of the entries that travel."""
        message.extras[self.key] = {"c": select(self._variates(server), message.state)}

    def on_visit_start(self, client: Client) -> None:
        """Start a new client with ``c_i = 0``. Option I takes its gradient at ``x`` now."""
        c = client.message.extras[self.key]["c"]
        client_state = client.state.setdefault(self.key, {})
        client_state["c"] = zeros_like(c) | client_state.get("c", {})
        if self.option == 1:
            client.scratch[self.key] = client.gradient(split="train")
        elif not client.is_unbuilt:  # another callback may have made training start elsewhere than from x
            client.scratch[self.key] = clone(module_state(client.module, c))

    def correct_gradient(self, ctx: GradientContext, name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Return ``g - c_i + c``."""
        if name not in ctx.payload.get("c", {}):
            return gradient
        difference = ctx.payload["c"][name] - ctx.state["c"][name]
        return gradient + difference.to(gradient.device)

    def on_send(self, client: Client, update: Update) -> None:
        """Keep the new ``c_i`` and send its change. Without a real step it stays as it was.

        Raises:
            ValueError: If option II meets a parameter that another optimizer than SGD has moved (one that is only known
                while training runs; :meth:`check` finds the others).
        """
        client_state = client.state.get(self.key)
        if not client.contributed or client_state is None:
            return
        c, old = client.message.extras[self.key]["c"], client_state["c"]
        if self.option == 1:
            new = {name: client.scratch[self.key].get(name, old[name]) for name in c}
        else:
            trained, weights = module_state(client.module, c), client.gradient_weights
            moved = [name for name in c if client.lr_sums.get(name)]
            unread = next((name for name in moved if not weights.get(name)), None)
            if unread is not None:
                raise ValueError(
                    f"SCAFFOLD(option=2) reads gradients off the parameters' movement, but '{unread}' was not moved by SGD. "
                    "Use SCAFFOLD(option=1)"
                )
            start = client.scratch.get(self.key, client.received)
            new = {name: old[name] - c[name] + (start[name] - trained[name]) / weights[name] for name in moved}
        update.extras[self.key] = {"delta_c": {name: new[name] - old[name] for name in new}}
        client.state[self.key] = {"c": {**old, **new}}

    def on_update(self, server: Server, update: Update) -> None:
        """Add ``p_i Delta c_i`` to a sum.

        ``c`` itself moves when the round is reduced, so that all clients of a round see the same one.
        """
        delta = update.extras.get(self.key, {}).get("delta_c")
        if delta:
            server_state = server.state.setdefault(self.key, {"c": self._variates(server)})
            total = server_state.get("sum", zeros_like(server_state["c"]))
            server_state["sum"] = add(total, delta, alpha=_weights(server)[update.client])

    def on_reduced(self, server: Server, state: State) -> State:
        """Set ``c <- c + sum_i p_i Delta c_i``, where the ``p_i`` of all clients add up to 1."""
        server_state = server.state.get(self.key, {})
        if "sum" in server_state:
            whole = sum(_weights(server).values())
            server.state[self.key] = {"c": add(server_state["c"], server_state["sum"], alpha=1.0 / whole)}
        return state

    def server_step(self, server: Server, old: State, reduced: State) -> State:
        """Return ``x + eta_s (mean(y_i) - x)`` on trainable parameters; every other entry is the clients' mean."""
        return step_to_mean(server, old, reduced, self.server_lr)


def _weighting(callbacks: Iterable[FederatedCallback]) -> WeightingName | Callable[..., float]:
    """Return the weighting that a run's callbacks agree on."""
    return next((callback.weighting for callback in callbacks if callback.weighting is not None), "samples")


def _weights(server: Server) -> dict[str, float]:
    """Return the weight of every client before normalisation. :meth:`SCAFFOLD.check` has refused a function."""
    weight = WEIGHTINGS[str(_weighting(server.callbacks))]
    return {client: weight(count) for client, count in server.num_samples.items()}


def _refuse_optimizers(optimizers: Iterable[Any], optimizer_state: str) -> None:
    """Refuse optimizers from whose movement option II cannot read gradients."""
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind is not SGD:
            raise ValueError(
                f"SCAFFOLD(option=2) reads gradients off the parameters' movement, and {kind.__name__}'s movement is not "
                "a sum of gradients. Use SCAFFOLD(option=1), which takes any optimizer, or SGD."
            )
        if any(group.get("maximize") for group in optimizer.param_groups):
            raise ValueError("SCAFFOLD(option=2) takes descent for granted, but the module's SGD has maximize=True.")
        has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
        if has_momentum and optimizer_state == "keep":
            raise ValueError(
                "SCAFFOLD(option=2) reads gradients off the parameters' movement, but with optimizer_state='keep' the "
                "momentum brings along gradients of earlier rounds. Use optimizer_state='reset', or option=1."
            )
