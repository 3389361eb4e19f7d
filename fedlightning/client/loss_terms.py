"""Loss terms: what callbacks add to the loss that a module's `training_step` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from lightning.pytorch import LightningModule
from torch import Tensor

from fedlightning.client.client import Client
from fedlightning.contract import FederatedCallback
from fedlightning.wrappers.mixing import Mixin, mix


class LossTermMixin(Mixin):
    """Runs a client's training step with feature taps attached, then adds the callbacks' terms to its loss."""

    wraps = ("training_step",)

    def around(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the step's output with its loss replaced. A skipped batch (`None`) stays skipped."""
        terms: _Terms = vars(self)["loss_terms"]
        client, callbacks = terms.client, terms.callbacks
        module = cast(LightningModule, self)
        batch = args[0] if args else kwargs["batch"]
        taps = {callback.key: callback.feature_taps(module) for callback in callbacks}
        with ExitStack() as stack:
            for of_callback in taps.values():
                for tap in of_callback.values():
                    stack.enter_context(tap)
            output = call(*args, **kwargs)
            loss = output.get("loss") if isinstance(output, dict) else output
            if not isinstance(loss, Tensor):
                return output
            for callback in callbacks:
                features = {label: tap.features for label, tap in taps[callback.key].items()}
                loss = callback.training_loss(client, module, batch, loss, features)
        return {**output, "loss": loss} if isinstance(output, dict) else loss


class _Terms:
    """The client and the callbacks whose terms act. A copy of the module refers to the same."""

    def __init__(self, client: Client, callbacks: Sequence[FederatedCallback]) -> None:
        self.client, self.callbacks = client, tuple(callbacks)

    def __deepcopy__(self, memo: Any) -> _Terms:
        return self


@contextmanager
def loss_terms(client: Client, callbacks: Sequence[FederatedCallback]) -> Iterator[None]:
    """Within the block, the training step of the client's module returns the loss with the term of every callback.

    The module's class is swapped and put back, so its logging, hooks and names stay the same.
    """
    module: LightningModule = client.module
    if not module.automatic_optimization:
        raise ValueError(
            f"{callbacks[0].key} adds a term to the loss that training_step returns, but {type(module).__name__} "
            "optimizes manually. Use automatic optimization."
        )
    own_class = module.__class__
    mix(module, LossTermMixin)
    vars(module)["loss_terms"] = _Terms(client, callbacks)
    try:
        yield
    finally:
        module.__class__ = own_class
        for part in module.modules():  # a twin in the module has the attributes of its host
            vars(part).pop("loss_terms", None)
