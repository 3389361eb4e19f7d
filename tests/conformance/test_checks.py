"""The checks themselves: for each there is an algorithm that breaks its rule, and the check says so."""

from __future__ import annotations

import itertools
import os
import threading

import pytest
import torch

from fedlightning.algorithm import Facts, FederatedCallback, ModelSelection, Newcomers, Wire
from fedlightning.engines.attempts import FederationError
from fedlightning.testing import check_algorithm
from fedlightning.testing.checks import CHECKS


class Forgets(FederatedCallback):
    """Keeps its argument as something else."""

    def __init__(self, mu: float = 0.1) -> None:
        self.mu = 2 * mu


class Locked(FederatedCallback):
    def __init__(self) -> None:
        self.lock = threading.Lock()


class Counts(FederatedCallback):
    """Keeps what lives from round to round on itself."""

    rounds = 0

    def on_round_end(self, server):
        self.rounds = self.rounds + 1


class Scaled(Counts):
    """Weighs by a number that a resumed run does not have."""

    def server_step(self, server, old, reduced):
        return {
            name: value * (1 + self.rounds) if value.is_floating_point() else value for name, value in reduced.items()
        }


class Still(FederatedCallback):
    def server_step(self, server, old, reduced):
        return old

    def shared_names(self, server, module):
        return list(server.kinds)


class Unaddressed(FederatedCallback):
    def server_step(self, server, old, reduced):
        noise = int.from_bytes(os.urandom(4), "big") / 2**32
        return {name: value + noise if value.is_floating_point() else value for name, value in reduced.items()}


class Ordered(FederatedCallback):
    """Draws from a stream that goes on from run to run, as an order that is left to chance would."""

    def server_step(self, server, old, reduced):
        shift = float(next(STREAM))
        return {name: value + shift if value.is_floating_point() else value for name, value in reduced.items()}


STREAM = itertools.count()


class Looks(ModelSelection):
    """Learns from its own scores."""

    def on_client_evaluated(self, client, stage, split, metrics, module):
        Looks.seen = True

    def server_step(self, server, old, reduced):
        seen, Looks.seen = getattr(Looks, "seen", False), False
        return {
            name: value * (0.5 if seen else 1) if value.is_floating_point() else value
            for name, value in reduced.items()
        }


class Meddles(FederatedCallback):
    """Changes what an absent client keeps, through tensors that it holds."""

    def shared_names(self, server, module):
        return [name for name in server.kinds if name.endswith("weight")]

    def on_send(self, client, update):
        client.state[self.key] = {"held": HELD.setdefault(client.id, torch.zeros(1))}

    def on_round_end(self, server):
        for tensor in HELD.values():
            tensor += 1


HELD: dict = {}


class Leaks(FederatedCallback):
    """Sends what stays, under other names: by their own the core refuses them."""

    def shared_names(self, server, module):
        return [name for name in server.kinds if "head" not in name and not name.startswith(("last", "out"))][:2]

    def wire(self, module):
        return Wire(up={"all": "tensors"})

    def on_send(self, client, update):
        update.extras[self.key] = {"all": {f"my.{name}": value for name, value in client.model_state().items()}}


class Doubles(FederatedCallback):
    """Takes integers and frozen entries for parameters."""

    def server_step(self, server, old, reduced):
        return {name: value + 1 for name, value in reduced.items()}


class Divides(FederatedCallback):
    def on_update(self, server, update):
        1 / (update.num_samples - 1)


class Trusts(FederatedCallback):
    """Keeps training with what a NaN has poisoned, and says nothing."""

    def correct_gradient(self, ctx, name, parameter, gradient):
        return torch.nan_to_num(gradient, nan=0.0)

    def training_loss(self, client, module, batch, loss, features):
        return torch.nan_to_num(loss, nan=0.0)


class Halves(FederatedCallback):
    def on_receive(self, client, message):
        client.module.to(torch.float16).to(torch.float64)


class Named(FederatedCallback):
    """Treats clients by their names."""

    def on_send(self, client, update):
        client.state[self.key] = {"name": torch.tensor([float(client.id.removeprefix("site") or 0)])}

    def personal_module(self, client, stage):
        with torch.no_grad():
            for parameter in client.module.parameters():
                parameter.add_(float(client.id.removeprefix("site")))
        return client.module


class Knows(FederatedCallback):
    """Has something for the clients of the beginning only."""

    def on_federation_start(self, server):
        server.state[self.key] = {client: torch.zeros(1) for client in server.clients}

    def on_broadcast(self, server, job, message):
        server.state[self.key][job.client].clone()

    facts = Facts(newcomers=Newcomers(join=True))  # which is not true


class Alone(FederatedCallback):
    """Is not plain training for a single client."""

    def server_step(self, server, old, reduced):
        return {name: 0.9 * value if value.is_floating_point() else value for name, value in reduced.items()}


BROKEN = {
    "arguments": (Forgets(), "made again"),
    "copies": (Locked(), "cannot pickle"),
    "unchanged_by_a_run": (Counts(), "was changed by a run"),
    "trains": (Still(), "trains nothing"),
    "same_seed_same_result": (Unaddressed(), "with the same seed differ"),
    "order_of_clients": (Ordered(), "depends on the order"),
    "evaluation_changes_nothing": (Looks(), "Evaluation changes"),
    "resume": (Scaled(), "differs from an uninterrupted run"),
    "absent_clients": (Meddles(), "changed the state of client"),
    "wire": (Leaks(), "the private 'body.0.weight' of client 'site0' left it"),
    "every_kind_of_entry": (Doubles(), "the frozen 'scale' moved"),
    "small_and_empty_clients": (Divides(), "division by zero"),
    "nan_client": (Trusts(), "no word about the NaN client"),
    "mixed_precision": (Halves(), "must have the same dtype"),
    "identical_clients": (Named(), "identical clients differ"),
    "unseen_clients": (Knows(), "was not scored"),
    "joining_clients": (Knows(), "site3"),
    "one_client": (Alone(), "is not what plain training gives"),
}


def test_every_check_has_one_that_breaks_it():
    assert set(BROKEN) == set(CHECKS)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(name):
    algorithm, said = BROKEN[name]
    with pytest.raises((AssertionError, TypeError, KeyError, ZeroDivisionError, FederationError), match=said):
        check_algorithm(algorithm, only=[name])
