"""Messages and updates: bytes, and what may travel."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from fedlightning import FederatedCallback
from fedlightning.callbacks import FLIU, SCAFFOLD, FedAdam, FedBN, FedPer, FedProx
from fedlightning.contract.messages import Message, Update, Wire, check_extras, tree_bytes
from fedlightning.engines.attempts import FederationError
from fedlightning.engines.sequential import SequentialEngine
from fedlightning.tensors import module_state
from tests.helpers import NormNet, Toy, federate, toy_data


def test_bytes_of_a_tree():
    tree = {
        "f": torch.zeros(3),
        "h": torch.zeros(5, dtype=torch.float16),
        "list": [torch.zeros(2, dtype=torch.int64), 1.0, None, "abc"],
        "deep": {"flag": True, "empty": torch.zeros(0)},
    }
    assert tree_bytes(tree) == 12 + 10 + 16 + 8 + 0 + 3 + 8
    message = Message(0, "a", {"w": torch.zeros(4)}, ("w",), extras={"X": {"c": torch.zeros(1), "n": 3}})
    assert message.num_bytes == 16 + 4 + 8
    assert Update(0, "a", {"w": torch.zeros(4)}, metrics={"loss": 1.0}).num_bytes == 16


def test_messages_and_updates_can_be_sent_to_another_process():
    message = Message(1, "a", {"w": torch.arange(3.0)}, ("w",), extras={"X": {"c": {"w": torch.ones(3)}}})
    back = pickle.loads(pickle.dumps(message))
    assert torch.equal(back.state["w"], message.state["w"])
    assert back.extras["X"]["c"].keys() == {"w"}
    update = pickle.loads(pickle.dumps(Update(1, "a", evaluations=[("L2", "local", "val", "loss", 0.5, 3)])))
    assert update.evaluations[0][4] == 0.5


SHAPES = {"w": torch.Size([2, 3]), "b": torch.Size([2])}


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("scalar", 3),
        ("scalar", True),
        ("scalar", torch.tensor([1.0])),
        ("parameters", {"w": torch.zeros(2, 3)}),
        ("state", {}),
        ("tensors", {"other.w": torch.zeros(9, 4), "n": torch.tensor(3)}),
        ((2, -1), torch.zeros(2, 9)),
        ((), torch.zeros(())),
    ],
)
def test_declared_extras_pass(spec, value):
    check_extras("X", {"c": value}, {"c": spec}, SHAPES)


@pytest.mark.parametrize(
    ("spec", "value", "found"),
    [
        ("scalar", torch.zeros(2), r"\(2,\)"),
        ("scalar", "text", "str"),
        ("parameters", {"w": torch.zeros(3, 2)}, "dict"),
        ("parameters", {"head": torch.zeros(2)}, "dict"),
        ("parameters", torch.zeros(2), r"\(2,\)"),
        ("tensors", {"w": [0.0]}, "dict"),
        ("tensors", {0: torch.zeros(2)}, "dict"),
        ("tensors", torch.zeros(2), r"\(2,\)"),
        ((2, 3), torch.zeros(2, 4), r"\(2, 4\)"),
        ((2,), torch.zeros(2, 4), r"\(2, 4\)"),
    ],
)
def test_other_extras_are_refused_by_name(spec, value, found):
    with pytest.raises(ValueError, match=f"X declares 'c' as .* but sends {found}"):
        check_extras("X", {"c": value}, {"c": spec}, SHAPES)


def test_undeclared_extras_are_refused():
    with pytest.raises(ValueError, match=r"X puts 'data' on the wire but declares only \['c'\].*private"):
        check_extras("X", {"data": torch.zeros(2)}, {"c": "scalar"}, SHAPES)


# -- every uplink and downlink of a run ------------------------------------------------------------------------------


@pytest.fixture
def wires(monkeypatch):
    """All that crosses the wire: (message, update) pairs as the engine sees them."""
    crossed = []
    original = SequentialEngine.run

    def run(self, messages, evaluate, *more):
        kept = []

        def down():
            for message in messages:
                kept.append(message)
                yield message

        for update in original(self, down(), evaluate, *more):
            crossed.append((kept[-1], update))
            yield update

    monkeypatch.setattr(SequentialEngine, "run", run)
    return crossed


RUNS = {
    "fedavg": (NormNet, []),
    "fedper": (Toy, [FedPer(personal=["net.3"])]),
    "fedbn": (NormNet, [FedBN()]),
    "fedper_scaffold_fedadam": (Toy, [FedPer(personal=["net.0"]), SCAFFOLD(), FedAdam()]),
    "fliu_fedprox": (NormNet, [FLIU(), FedProx()]),
}


@pytest.mark.parametrize("name", RUNS)
def test_only_shared_names_and_declared_extras_travel(wires, name):
    make, callbacks = RUNS[name]
    trainer = federate(make("sgd"), toy_data(), callbacks, max_rounds=2)
    server = trainer.server
    shared = set(server.shared_names())
    assert len(wires) == 6
    for message, update in wires:
        assert set(message.state) == set(update.state) == set(message.returns) == shared
        for callback in callbacks:
            wire = callback.wire(server.module)
            assert set(update.extras.get(callback.key, {})) == set(wire.up)
            assert set(message.extras.get(callback.key, {})) == set(wire.down)
        assert set(update.extras) <= {callback.key for callback in callbacks}
    sizes = {n: value.numel() * value.element_size() for n, value in module_state(server.module).items()}
    plain = sum(sizes[n] for n in shared)
    control = sum(sizes[n] for n in shared if server.kinds[n] == "trainable") if "scaffold" in name else 0
    numbers = 16 if "fliu" in name else 0
    assert server.costs.bytes_up == 6 * (plain + control)
    assert server.costs.bytes_down == 6 * (plain + control + numbers)


class Leak(FederatedCallback):
    """Sends what it did not declare."""

    def __init__(self, entry="head"):
        self.entry = entry

    def wire(self, module):
        return Wire(up={"allowed": "scalar"})

    def on_send(self, client, update):
        update.extras[self.key] = {self.entry: client.model_state()}


def test_a_callback_that_leaks_is_stopped_and_nothing_of_it_leaves(wires):
    with pytest.raises(FederationError, match=r"Leak puts 'head' on the wire but declares only \['allowed'\]"):
        federate(Toy("sgd"), toy_data(), [FedPer(), Leak()])
    assert len(wires) == 3
    for _, update in wires:
        assert update.num_bytes == 0
        assert not update.state and not update.extras


class LeakState(FederatedCallback):
    """Puts a private entry among the shared ones."""

    def on_send(self, client, update):
        update.state["net.3.bias"] = client.model_state()["net.3.bias"]


def test_a_private_entry_in_the_state_is_stopped(wires):
    with pytest.raises(FederationError, match=r"net\.3\.bias"):
        federate(Toy("sgd"), toy_data(), [FedPer(personal=["net.3"]), LeakState()])
    for _, update in wires:
        assert "net.3.bias" not in update.state


def test_what_comes_down_is_no_window_on_the_servers_tensors():
    """A client that edits what it received in place must not change the server's model."""

    class Vandal(FederatedCallback):
        def on_visit_start(self, client):
            for parameter in client.module.parameters():
                nn.init.constant_(parameter, 7.0)

    module = Toy("sgd", lr=0.0)
    before = {name: value.clone() for name, value in module_state(module).items()}
    trainer = federate(module, toy_data([8, 8]), [Vandal()], max_rounds=1)
    assert all(bool((value == 7.0).all()) for value in trainer.server.model.values())
    assert all(torch.equal(value, before[name]) for name, value in module_state(module).items())
