"""Updates are checked on arrival: one that breaks a rule is a client that failed, and the round goes on without it."""

from __future__ import annotations

import pytest
import torch

from fedlightning import FederatedCallback
from fedlightning.federation.door import checked
from fedlightning.hooks import Job
from fedlightning.messages import Update
from tests.helpers import Toy, federate, same, spied, toy_data

NAME = "net.0.weight"
FAULTS = {
    "NaN": (lambda u: u.state.update({NAME: u.state[NAME] * float("nan")}), "'net.0.weight' holds NaN"),
    "infinity": (lambda u: u.state[NAME].view(-1)[0].fill_(float("inf")), "'net.0.weight' holds NaN or infinite"),
    "shape": (lambda u: u.state.update({NAME: u.state[NAME][:1]}), r"has shape \(1, \d+\), the model's is"),
    "int": (
        lambda u: u.state.update({NAME: u.state[NAME].long()}),
        r"has dtype torch.int64, the model's is torch.float32",
    ),
    "no tensor": (lambda u: u.state.update({NAME: 3.0}), "is a float, not a tensor"),
    "stale": (lambda u: setattr(u, "round", u.round - 1), r"it says round=-1, but answers the message with round=0"),
    "somebody else": (
        lambda u: setattr(u, "client", "0"),
        "it says client='0', but answers the message with client='1'",
    ),
    "another model": (lambda u: setattr(u, "model", "mine"), "it is for model 'mine'; the server has"),
    "too many samples": (
        lambda u: setattr(u, "num_samples", 10**12),
        "num_samples is 1000000000000, but the client has",
    ),
    "negative samples": (lambda u: setattr(u, "num_samples", -5), "num_samples is -5, which is no count"),
    "sparse": (lambda u: u.state.update({NAME: u.state[NAME].to_sparse()}), "is not a dense tensor with values"),
    "no values": (lambda u: u.state.update({NAME: u.state[NAME].to("meta")}), "is not a dense tensor with values"),
    "no arithmetic": (lambda u: u.state.update({NAME: u.state[NAME].to(torch.float8_e4m3fn)}), "it cannot be checked"),
    "rates": (lambda u: setattr(u, "lr_sum", float("nan")), "lr_sum is nan"),
    "metrics": (lambda u: setattr(u, "metrics", {"train_loss": "low"}), "its metrics are not numbers by name"),
    "origin": (lambda u: setattr(u, "origin", ["global"]), r"its origin is \['global'\]"),
    "gaps": (lambda u: setattr(u, "gaps", [3]), "its gaps are not a list of 4 values each"),
    "half a step": (lambda u: setattr(u, "steps", 1.5), "steps is 1.5, which is no count"),
}


class Faulty(FederatedCallback):
    """Client 1 sends what it should not."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def on_send(self, client, update):
        if client.id == "1":
            FAULTS[self.fault][0](update)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_update_is_a_failed_client(fault):
    with pytest.warns(UserWarning, match=f"client '1' was refused: .*{FAULTS[fault][1]}"):
        trainer, spy = spied(Toy(), toy_data(), [Faulty(fault)], max_rounds=1)
    kept = spy.of_round(0)
    same(trainer.server.model, federate_without_client_1(spy))
    assert kept


def federate_without_client_1(spy):
    others = {client: update for client, update in spy.of_round(0).items() if client != "1"}
    total = sum(update.num_samples for update in others.values())
    first = next(iter(others.values()))
    return {
        name: sum(update.num_samples * update.state[name].double() for update in others.values())
        .div(total)
        .to(value.dtype)
        for name, value in first.state.items()
    }


def test_a_good_update_passes_untouched_and_a_missing_entry_does_not():
    trainer = federate(Toy(), toy_data(), [], max_rounds=1)
    server = trainer.server
    message = server.message(Job("0"))
    update = Update(
        message.round, "0", state={name: value.clone() for name, value in server.model.items()}, num_samples=3
    )
    assert checked(server, message, update) is update
    del update.state[NAME]
    assert "'net.0.weight' was asked for and is missing" in str(checked(server, message, update).error)


def test_a_mask_of_infinities_may_stay_one():
    trainer = federate(Toy(), toy_data(), [], max_rounds=1)
    server = trainer.server
    message = server.message(Job("0"))
    server.models["global"] = {**server.model, NAME: torch.full_like(server.model[NAME], float("-inf"))}
    update = Update(message.round, "0", state=dict(server.model), num_samples=3)
    assert checked(server, message, update) is update
