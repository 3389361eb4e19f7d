"""Records of clients: in memory up to a limit, on disk beyond it, and never lost or changed by that."""

from __future__ import annotations

import pytest
import torch

from fedlightning import FederatedTrainer

# isort: split
from fedlightning.callbacks import FedPer
from fedlightning.client.record import ClientRecord
from fedlightning.engines.contract import ClientRecords, default_limit, tensor_bytes
from fedlightning.errors import ConfigurationError
from fedlightning.tensors import equal, module_state
from tests.helpers import Toy, federate, toy_data


def record(value: float, size: int = 100) -> ClientRecord:
    return ClientRecord(personal={"w": torch.full((size,), value)}, state={"A": {"list": [torch.ones(1)], "n": 3}})


SIZE = 404


def test_bytes():
    assert tensor_bytes(vars(record(0.0))) == SIZE
    assert tensor_bytes({"a": (torch.ones(2, dtype=torch.float64), "text", None)}) == 16


def test_memory_stays_within_the_limit_and_nothing_is_lost():
    store = ClientRecords(limit=3 * SIZE)
    for index in range(10):
        store.put(str(index), record(index))
        assert store.num_bytes <= 3 * SIZE
    assert list(store) == [str(index) for index in range(10)]
    assert "4" in store and "10" not in store
    for index in (9, 0, 5, 5, 2):
        found = store.get(str(index))
        assert torch.equal(found.personal["w"], torch.full((100,), float(index)))
        assert found.state["A"]["n"] == 3 and torch.equal(found.state["A"]["list"][0], torch.ones(1))
        assert store.num_bytes <= 3 * SIZE


def test_a_newer_record_replaces_the_one_on_disk():
    store = ClientRecords(limit=SIZE)
    store.put("a", record(1.0))
    store.put("b", record(2.0))
    store.put("a", record(3.0))
    store.put("b", record(4.0, size=10))
    assert float(store.get("a").personal["w"][0]) == 3.0
    assert float(store.get("b").personal["w"][0]) == 4.0
    assert len(store.get("b").personal["w"]) == 10


def test_what_changed_is_known_whether_on_disk_or_not():
    store = ClientRecords(limit=0)
    store.put("a", record(1.0))
    store.put("b", record(2.0), changed=False)
    store.get("a")
    assert store.changed == {"a"}
    assert store.get("nobody") == ClientRecord()


def test_what_one_callback_keeps_is_forgotten_and_nothing_else():
    store = ClientRecords(limit=0)
    for client, kept in (("a", {"one": 1, "other": 2}), ("b", {"other": 3})):
        store.put(client, ClientRecord(state=kept, visits=4), changed=False)
    store.forget(["a", "b", "nobody"], "one")
    assert store.get("a") == ClientRecord(state={"other": 2}, visits=4) and store.get("b").state == {"other": 3}
    assert store.changed == {"a"}


def test_one_record_larger_than_the_limit_is_still_held():
    store = ClientRecords(limit=1)
    store.put("a", record(1.0))
    assert store.num_bytes == SIZE
    assert 0 < default_limit() < 2**60


def test_a_run_with_its_clients_on_disk_is_the_same_run():
    module = Toy("adam")
    runs = [federate(module, toy_data(), [FedPer()], client_memory_gb=memory) for memory in (None, 0)]
    assert runs[0].store.num_bytes > runs[1].store.num_bytes > 0
    for client in "012":
        assert equal(module_state(runs[0].module(client)), module_state(runs[1].module(client)))
        assert equal(runs[0].store.get(client).personal, runs[1].store.get(client).personal)
    with pytest.raises(ConfigurationError, match="client_memory_gb=-1"):
        FederatedTrainer(client_memory_gb=-1)
