"""Whether a client counts in a round, whatever way its module trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedlightning import callbacks as c
from fedlightning.algorithm import Client, FederatedCallback, Message, Update, contributors
from fedlightning.engines.attempts import FederationError, TooFewClientsError
from fedlightning.errors import ConfigurationError
from fedlightning.options import FailurePolicy
from tests.helpers import Toy, differs, federate, global_state, make_trainer, same, spied, toy_data

LOOPS = ["auto", pytest.param("trainer", marks=pytest.mark.slow)]


class Manual(Toy):
    """Steps what `self.optimizers()` returns: the others are to train as it does."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Unwrapped(Manual):
    """Steps the optimizer without Lightning's wrapper."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Around(torch.optim.Optimizer):
    """An optimizer around another one, as implementations of SAM are."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)


class Inner(Manual):
    """Steps the optimizer inside the one that it configures."""

    def configure_optimizers(self) -> Any:
        return Around(self.parameters(), self.lr)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.base.step()


class OfItsOwn(Manual):
    """Configures no optimizer and moves its parameters itself."""

    def configure_optimizers(self) -> Any:
        return None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        parameters = list(self.parameters())
        gradients = torch.autograd.grad(self.loss(batch), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(gradient, alpha=-self.lr)


class ByHand(OfItsOwn):
    """The same under automatic optimization, where a step without a loss is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr)


class Second(Manual):
    """Has two optimizers, and steps the second one."""

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.net[0].parameters(), self.lr)
        return [first, torch.optim.SGD(self.net[3].parameters(), self.lr)]

    which = 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()[self.which]
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class SecondAsFirst(Second):
    """The same with the two in the other order."""

    which = 0

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()[::-1]


class Idle(Manual):
    """Never steps."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


class OnLarge(Toy):
    """Skips the batches of clients with few samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if len(batch[0]) == 8 else None


def made(kind: type[Toy]) -> Toy:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("kind", "like"),
    [(Unwrapped, Manual), (Inner, Manual), (OfItsOwn, Manual), (ByHand, Manual), (Second, SecondAsFirst)],
)
def test_a_client_counts_whatever_moves_its_entries(kind: type[Toy], like: type[Toy], loop: str) -> None:
    trainer, spy = spied(made(kind), toy_data(), local_loop=loop)
    expected = federate(made(like), toy_data(), local_loop=loop)
    same(global_state(trainer), global_state(expected))
    assert all(update.contributed and update.skipped >= 0 for update in spy.updates)


def test_a_client_that_moves_nothing_is_told_of_and_weighs_nothing() -> None:
    with pytest.warns(
        UserWarning, match="client '1' took no real step, so its weight is 0, and none of its entries moved"
    ):
        trainer, spy = spied(made(Idle), toy_data(), max_rounds=1)
    assert [update.contributed for update in spy.updates] == [False] * 3 and contributors(spy.updates) == []
    same(global_state(trainer), made(Idle).state_dict())


class Merges(FederatedCallback):
    """Lets clients begin elsewhere than at what came."""

    def on_receive(self, client: Client, message: Message) -> None:
        message.state = {name: value + 1.0 for name, value in message.state.items()}


@pytest.mark.filterwarnings("ignore:.*took no real step")
def test_a_model_that_was_merged_and_not_trained_does_not_count() -> None:
    trainer = federate(made(Idle), toy_data(), [Merges()], max_rounds=1)
    same(global_state(trainer), made(Idle).state_dict())


def test_steps_past_the_wrapper_are_counted_as_work() -> None:
    data = toy_data((8, 16, 24))
    trainer, expected = (federate(made(one), data, local_steps=4, max_rounds=1) for one in (Unwrapped, Manual))
    same(global_state(trainer), global_state(expected))
    assert trainer.server.costs.steps == 12


@pytest.mark.parametrize(
    ("kind", "callbacks", "options", "owner"),
    [
        (Unwrapped, [c.FedProx(mu=0.1)], {}, "FedProx"),
        (OfItsOwn, [c.SCAFFOLD()], {}, "SCAFFOLD"),
        (OfItsOwn, [c.L2GD()], {"local_steps": 1}, "L2GD"),
        (OfItsOwn, [], {"local_steps": 2}, "local_steps"),
    ],
)
@pytest.mark.parametrize("tried", [True, False])
def test_what_goes_by_steps_is_refused_where_they_are_not_seen(
    kind: type[Toy], callbacks: list[Any], options: dict[str, Any], owner: str, tried: bool
) -> None:
    """Before round 1 by the step that is tried; without one, in the first visit."""
    trainer = make_trainer(None, callbacks, sanity_check=tried, **options)
    said = f"{owner} goes by the steps of optimizers" + ("" if tried else "|would never end")
    with pytest.raises(ConfigurationError if tried else FederationError, match=said):
        trainer.fit(made(kind), datamodule=toy_data())


def test_second_optimizers_steps_carry_scaffold() -> None:
    states = [global_state(federate(made(kind), toy_data(), [c.SCAFFOLD()])) for kind in (Second, SecondAsFirst)]
    same(*states)
    assert differs(states[0], global_state(federate(made(Second), toy_data())))


@pytest.mark.filterwarnings("ignore:.*took no real step")
def test_the_threshold_counts_who_contributed() -> None:
    data = toy_data((24, 40, 4), drop_last=False)
    with pytest.raises(TooFewClientsError, match=r"2 of 3 clients contributed, .*client '2' took no real step"):
        federate(made(OnLarge), data, failures=FailurePolicy(min_clients=3), max_rounds=1)
    federate(made(OnLarge), data, failures=FailurePolicy(min_clients=2), max_rounds=1)
    federate(made(Idle), data, max_rounds=1)  # of the usual one it is enough that it came


@pytest.mark.parametrize("said", [1, "yes"])
def test_what_a_client_says_of_itself_is_yes_or_no(said: Any) -> None:
    class Lies(FederatedCallback):
        def on_send(self, client: Client, update: Update) -> None:
            update.contributed = said

    with pytest.raises(FederationError, match=r"contributed is .*, which is neither yes nor no"):
        federate(made(Toy), toy_data(), [Lies()], max_rounds=1)
