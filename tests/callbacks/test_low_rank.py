"""What FLoRA and HetLoRA share: a rank for each client. And what all methods with adapters share: weights under two names."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from fedlightning.callbacks import FedIT, FLoRA, HetLoRA
from fedlightning.tensors import module_state
from fedlightning.wrappers import unmix
from tests.helpers import FEATURES, Toy, close, differs, federate, global_state, make_trainer, same, spied, toy_data

BOTH = pytest.mark.parametrize("method", [FLoRA, HetLoRA])
FIRST = "net.0.lora_A.default.weight"


@BOTH
def test_a_list_is_dealt_in_turn_and_a_table_names_clients(method):
    module, data = Toy(), toy_data([16, 16, 16])
    runs = [spied(module, data, [method(r=r)], max_rounds=2) for r in ([4, 1], {"2": 4, "1": 1, "0": 4})]
    same(*(global_state(trainer) for trainer, _ in runs))
    for _, spy in runs:
        assert {c: len(update.state[FIRST]) for c, update in spy.of_round(0).items()} == {"0": 4, "1": 1, "2": 4}
    with pytest.raises(ValueError, match=rf"{method.__name__} got no r for client '2'.*one for each client"):
        federate(module, data, [method(r={"0": 1, "1": 1})])


@BOTH
@pytest.mark.parametrize("bad", [{"r": 0}, {"r": []}, {"r": [4, 0]}, {"r": {"0": -1}}, {"r": 2.5}, {"alpha": 0.0}])
def test_impossible_ranks_are_refused(method, bad):
    ((name, value),) = bad.items()
    words = "Give one number at least" if value == [] else "Use a (whole )?number in "
    with pytest.raises(ValueError, match=rf"{method.__name__} got {name}={re.escape(str(value))}\. {words}"):
        method(**bad)


def test_alphas_are_dealt_as_ranks_are():
    trainer = federate(Toy(), toy_data([16, 16, 16]), [method := FLoRA(r=[4, 1], alpha=[8, 3, 2])], max_rounds=1)
    assert [method.scale_of(trainer.server, client) for client in "012"] == [2.0, 3.0, 0.5]
    with pytest.raises(ValueError, match="FLoRA got no alpha for client '1'"):
        federate(Toy(), toy_data([16, 16]), [FLoRA(alpha={"0": 1.0})])


@BOTH
@pytest.mark.parametrize("name", ["0", "9"])
def test_clients_join_where_nobody_is_dealt_another_rank(method, name, tmp_path):
    module, callbacks = Toy(), [method(r=[3, 1])]
    before = toy_data({"1": 16, "2": 16})
    federate(module, before, callbacks, tmp_path, max_rounds=1, name="a", save_state=1)
    trainer = make_trainer(tmp_path, callbacks, max_rounds=2, name="a", save_state=1)
    more = toy_data({"1": 16, "2": 16, name: 16})
    options = {"datamodule": more, "resume": "last", "allow_new_clients": True}
    if name == "0":
        with pytest.raises(
            ValueError, match=rf"{method.__name__} deals r=\[3, 1\] .*client '1' would change from 3 to 1"
        ):
            trainer.fit(module, **options)
        return
    with pytest.warns(UserWarning, match="client '9' take part"):
        trainer.fit(module, **options)
    assert not trainer.server.failures and set(trainer.store) >= {"9"}


@BOTH
def test_held_out_clients_have_the_largest_rank_or_their_own(method, tmp_path):
    data = toy_data({"a": 16, "b": 16, "c": 16, "d": 16})
    table = {"a": 2, "b": 3, "c": 1}
    trainer = federate(
        Toy(), data, [method(r=table)], tmp_path, max_rounds=2, held_out=["c", "d"], evaluation=1, name="a"
    )
    scored = {row.client: row.value for row in trainer.rows if row.model == "unseen" and row.metric == "val_loss"}
    assert scored.keys() == {"c", "d"} and not trainer.server.failures
    assert [method(r=table).rank_of(trainer.server, client) for client in "cd"] == [1, 3]


# -- weights under two names -----------------------------------------------------------------------------------------


class Twice(Toy):
    """A layer that is used twice, and so has two paths."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.again = self.first

    def forward(self, x):
        return self.net(torch.tanh(self.again(torch.tanh(self.first(x)))))


@pytest.mark.parametrize("method", [FedIT(r=2), FLoRA(r=2), HetLoRA(r=[2, 1])], ids=lambda value: value.key)
def test_adapters_of_a_layer_that_is_used_twice_travel(method):
    """They stayed at the clients: one of their names was not among those that travel."""
    trainer, spy = spied(Twice(), toy_data(), [method], max_rounds=2)
    names = {"first.lora_B.default.weight", "again.lora_B.default.weight"}
    assert all(names <= set(update.state) for update in spy.updates)
    state, start = global_state(trainer), module_state(trainer.server.blueprint.build("server"))
    moved = {n for n in state if differs({n: start[n]}, state)}
    what = "base_layer" if isinstance(method, FLoRA) else "lora_B.default"
    assert {f"first.{what}.weight", f"again.{what}.weight"} <= moved
    same({n[6:]: v for n, v in state.items() if n.startswith("first")}, {
        n[6:]: v for n, v in state.items() if n.startswith("again")
    })  # fmt: skip
    assert trainer.server.global_module() is not None


class Tied(Toy):
    """Two layers with one weight."""

    def make(self, hidden, dropout):
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        net[2].weight = net[0].weight
        return net


@pytest.mark.parametrize("targets", [None, ["net.0"]])
def test_merging_adapters_into_a_tied_weight_changes_its_own_layer_only(targets):
    """Both layers got the adapters of both."""
    module, x = Tied(lr=0.5), torch.randn(7, FEATURES)
    trained = federate(module, toy_data(), [FedIT(dropout=0.0, target_modules=targets)]).module()
    expected = trained(x).detach()
    plain = unmix(trained)
    torch.testing.assert_close(plain(x), expected, atol=1e-5, rtol=1e-4)
    assert type(plain) is Tied and plain.net[0].weight is not plain.net[2].weight
    if targets is not None:
        close({"w": plain.net[2].weight}, {"w": module.net[2].weight})
