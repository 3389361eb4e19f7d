"""What a client keeps from visit to visit: a visit that fails leaves it as it was."""

from __future__ import annotations

import pytest
import torch

from fedlightning import FederatedCallback
from fedlightning.client.record import ClientRecord
from tests.helpers import Toy, federate, toy_data


def test_a_copy_can_be_changed_without_changing_the_record():
    value = torch.ones(2)
    record = ClientRecord(state={"one": {"list": [1], "table": {"value": value}}})
    copy = record.copy()
    copy.state["one"]["list"].append(2)
    copy.state["one"]["table"]["more"] = 3
    assert record.state == {"one": {"list": [1], "table": {"value": value}}}
    assert copy.state["one"]["table"]["value"] is value


@pytest.mark.filterwarnings("ignore:Round")
def test_a_visit_that_fails_takes_back_what_it_has_edited_in_place():
    class Notes(FederatedCallback):
        def on_send(self, client, update):
            client.state.setdefault(self.key, {"rounds": []})["rounds"].append(client.round)
            if (client.id, client.round) == ("1", 1):
                raise ValueError("lost")

    trainer = federate(Toy(), toy_data(), [Notes()], max_rounds=3)
    found = {client: trainer.store.get(client).state["Notes"]["rounds"] for client in "012"}
    assert found == {"0": [0, 1, 2], "1": [0, 2], "2": [0, 1, 2]}
