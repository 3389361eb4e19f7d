"""How a round's updates become the next models: what a change counts from."""

from __future__ import annotations

import torch

from fedlightning.contract.messages import Update
from fedlightning.server.update_collector import Aggregation
from tests.helpers import Toy, federate, toy_data

NAME = "net.0.weight"


def test_a_late_change_counts_from_where_the_server_is_now():
    server = federate(Toy(), toy_data(), max_rounds=1).server
    then, now = torch.zeros_like(server.model[NAME]), torch.full_like(server.model[NAME], 4.0)
    server.models["global"] = {**server.model, NAME: now}
    aggregation = Aggregation(server)
    aggregation.fold(Update(0, "0", {NAME: then + 0.5}, num_samples=3, contributed=True), base={NAME: then})
    aggregation.fold(Update(0, "1", {NAME: then + 2.5}, num_samples=1, contributed=True), base={NAME: then})
    aggregation.finish()
    assert torch.equal(server.model[NAME], now + (3 * 0.5 + 1 * 2.5) / 4)
