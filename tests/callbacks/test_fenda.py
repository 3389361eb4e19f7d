"""FENDA-FL: sheet entry 20. The wrapper itself is in tests/wrappers/test_dual.py."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, DemoModel
from torch import nn

import fedlightning
from fedlightning.callbacks import FENDA, FedPer, GlobalCheckpoint, Local, LocalCheckpoint
from fedlightning.tensors import module_state, select
from fedlightning.wrappers import DualExtractor
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import (
    NetStyle,
    NormNet,
    PiecesStyle,
    Toy,
    close,
    differs,
    federate,
    global_state,
    mean_of,
    plain_fit,
    same,
    spied,
    toy_data,
)

CASES = {"FENDA": Case(FENDA(head="head"), skip=NO_PLAIN_FORM)}
KEPT = {"FENDA": Kept("FENDA", options={"head": "net.3"})}

SIZES = {"0": 24, "1": 40, "2": 16}
U = {"net.0.weight", "net.0.bias"}
NORM = {f"net.1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


class Nothing(nn.Module):
    """An extractor of no features."""

    def forward(self, x):
        return x.new_zeros(len(x), 0)


class Dual(Toy):
    """A module that is built from a DualExtractor; either extractor may be empty."""

    def __init__(self, optimizer="adam", shared=8, local=8, order="global_first", fusion="concat"):
        self.widths, self.order, self.fusion = (shared, local), order, fusion
        super().__init__(optimizer)

    def make(self, hidden, dropout):
        u, v = (nn.Sequential(nn.Linear(6, n), nn.Tanh()) if n else Nothing() for n in self.widths)
        width = sum(self.widths) if self.fusion == "concat" else self.widths[0]
        return DualExtractor(u, v, nn.Linear(width, 3), order=self.order, fusion=self.fusion)


@pytest.mark.parametrize(
    ("make", "head", "shared", "options"),
    [
        (Toy, "net.3", U, {}),
        (Toy, "net.3", U, {"fusion": "sum", "init": "fresh"}),
        (Toy, "net.3", U, {"local_extractor": nn.Sequential(nn.Linear(6, 5), nn.Tanh())}),
        (NetStyle, "net.3", U, {"order": "local_first"}),
        (PiecesStyle, "net.head", {"net.body.weight", "net.body.bias"}, {}),
        (NormNet, "net.3", U | NORM, {}),
        (NormNet, "net.3", U | NORM, {"local_extractor": nn.Linear(6, 4), "local_features": 4}),
        (Dual, None, {"net.global_extractor.0.weight", "net.global_extractor.0.bias"}, {}),
    ],
)
def test_only_the_global_extractor_travels(make, head, shared, options):
    """Its batch statistics too; no local name and no name of the head, in either direction."""
    module, data = make("adam"), toy_data(SIZES)
    trainer, spy = spied(module, data, [FENDA(head, **options)], max_rounds=3)
    for item in (*spy.messages, *spy.updates):
        assert set(item.state) == shared and not item.extras
    size = sum(value.numel() * value.element_size() for value in select(module_state(module), shared).values())
    assert trainer.server.costs.bytes_up == trainer.server.costs.bytes_down == 9 * size
    clients = [module_state(trainer.module(client)) for client in SIZES]
    private = set(clients[0]) - shared
    assert any("local_extractor" in name for name in private) and len(private) >= 4
    for client, state in zip(SIZES, clients, strict=True):
        same(select(state, shared), select(global_state(trainer), shared))
        assert set(spy.records[-1][client].personal) == private
        start = module_state(trainer.server.blueprint.build(client))
        assert all(differs({n: state[n]}, start) for n in private if state[n].is_floating_point())
        assert all((value > 0).all() for name, value in state.items() if name.endswith("running_var"))
    assert all(differs({n: clients[0][n]}, clients[1]) for n in private if clients[0][n].is_floating_point())
    averaged = mean_of(spy.of_round(2), SIZES)
    close(select(global_state(trainer), averaged), averaged, atol=0, rtol=0)
    assert trainer.server.global_module() is None


def test_all_start_from_the_same_parts():
    trainer = federate(Toy(), toy_data(SIZES), [FENDA("net.3", init="fresh")], max_rounds=1)
    builds = [module_state(trainer.server.blueprint.build(owner)) for owner in ("server", "0", "2")]
    same(builds[0], builds[1])
    same(builds[0], builds[2])


def test_one_client_is_plain_training_of_the_wrapped_module():
    module, data = NormNet("momentum"), toy_data([24])
    trainer = federate(module, data, [FENDA("net.3")], max_rounds=3, optimizer_state="keep")
    wrapped = trainer.server.blueprint.build("0")
    same(module_state(trainer.module("0")), plain_fit(wrapped, data, "0", max_epochs=3))


def test_absent_clients_keep_their_parts():
    _, spy = spied(Toy("adam"), toy_data(SIZES), [FENDA("net.3")], max_rounds=4, participation=1)
    for number in range(1, 4):
        for client in SIZES:
            if client not in spy.of_round(number):
                before, after = spy.records[number - 1][client], spy.records[number][client]
                assert after is before or not after.visits


def test_without_a_local_extractor_it_is_fedper():
    module, data = Dual(local=0), toy_data(SIZES)
    fenda, a = spied(module, data, [FENDA()], max_rounds=3)
    fedper, b = spied(module, data, [FedPer(personal=["net.head"])], max_rounds=3)
    same(global_state(fenda), global_state(fedper))
    for client in SIZES:
        same(a.records[-1][client].personal, b.records[-1][client].personal)


def test_without_a_global_extractor_it_is_local():
    module, data = Dual(shared=0), toy_data(SIZES)
    fenda, _ = spied(module, data, [FENDA()], max_rounds=3)
    local, _ = spied(module, data, [Local()], max_rounds=3, optimizer_state="reset")
    for client in SIZES:
        same(module_state(fenda.module(client)), module_state(local.module(client)))
    assert fenda.server.costs.bytes_up == 0


def test_the_order_of_features_is_a_permutation_of_the_head():
    one, two = Dual(shared=5, local=3), Dual(shared=5, local=3, order="local_first")
    state = module_state(one)
    weight = state["net.head.weight"]
    two.load_state_dict({**state, "net.head.weight": torch.cat((weight[:, 5:], weight[:, :5]), 1)})
    data = toy_data(SIZES)
    first, second = (federate(module, data, [FENDA()], max_rounds=2) for module in (one, two))
    close(*(select(global_state(t), ["net.global_extractor.0.weight"]) for t in (first, second)), atol=1e-5)
    x = torch.randn(4, 6)
    torch.testing.assert_close(first.module("1")(x), second.module("1")(x), atol=1e-4, rtol=1e-4)


def test_the_local_checkpoint_selects_whole_models(tmp_path):
    trainer = federate(Toy("adam"), toy_data(SIZES), [FENDA("net.3"), LocalCheckpoint()], root=tmp_path)
    kept = trainer.store.get("1").checkpoints["LocalCheckpoint"]["model"]
    assert set(kept) == set(module_state(trainer.module("1")))
    assert {row["checkpoint"] for row in trainer.test()} == {"latest", "best_local"}
    assert not {row.stage for row in trainer.rows} & {"G"}


class OneLayer(Toy):
    def make(self, hidden, dropout):
        return nn.Linear(6, 3)


@pytest.mark.parametrize(
    ("module", "callbacks", "sentence"),
    [
        (Toy(), [FENDA("net.fc")], r"Toy has no submodule `net.fc`.*Its submodules: .*net.3"),
        (Toy(), [FENDA()], r"FENDA needs to know the head of Toy. Set head=.*linear layers here: \['net.0', 'net.3'\]"),
        (Toy(), [FENDA("net")], r"all parameters of Toy are in `net`. Name a smaller submodule"),
        (OneLayer(), [FENDA("net")], r"needs an extractor and a head, but all parameters of OneLayer are in `net`"),
        (BoringModel(), [FENDA("layer")], "all parameters of BoringModel are in `layer`"),
        (DemoModel(), [FENDA("l1")], "all parameters of DemoModel are in `l1`"),
        (Dual(), [FENDA(fusion="sum")], r"FENDA got fusion='sum' but no head.*Set head=\.\.\., or give these options"),
        (Dual(), [FENDA(local_extractor=nn.Linear(6, 2))], "FENDA got local_extractor=.* but no head"),
        (Toy(), [FENDA("net.3"), GlobalCheckpoint()], "GlobalCheckpoint needs a global model.*Use LocalCheckpoint"),
    ],
)
def test_what_cannot_work_is_refused_at_start(module, callbacks, sentence):
    with pytest.raises(ValueError, match=sentence):
        federate(module, toy_data(SIZES), callbacks)


class Averaged(Toy):
    """Keeps an average of its layers, which a wrapper knows nothing of."""

    def __init__(self):
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(self.net)

    def on_train_batch_end(self, *args):
        self.average.update_parameters(self.net)


def test_an_average_of_layers_that_are_replaced_is_refused_before_round_1():
    federate(Averaged(), toy_data((8, 8)), sanity_check=True)
    with pytest.raises(ValueError, match=r"tried before round 1: .*on_train_batch_end.* wrapped by FENDA"):
        federate(Averaged(), toy_data((8, 8)), [FENDA(head="net.3")], sanity_check=True)


def test_parametrized_layers_are_exported(tmp_path):
    module = Toy()
    nn.utils.parametrizations.weight_norm(module.net[0])
    with pytest.warns(UserWarning, match="load needs a module to load the weights into"):
        trainer = federate(module, toy_data((8, 16)), [FENDA(head="net.3")], root=tmp_path)
    wrapped = trainer.module("1")
    trained = {name: value.clone() for name, value in wrapped.state_dict().items()}
    for parameter in wrapped.parameters():
        parameter.data.zero_()
    same(fedlightning.load(trainer.run.path / "checkpoints" / "clients" / "1.ckpt", wrapped).state_dict(), trained)
