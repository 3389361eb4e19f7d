"""PLayer-FL and PLayer-FL-Random: sheet entries 23 and 24. The sensitivity itself is in test_sensitivity.py."""

from __future__ import annotations

import json
import math

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F

from fedlightning.algorithm import Facts
from fedlightning.callbacks import (
    FedAvg,
    FederationSensitivity,
    FedPer,
    FedProx,
    GlobalCheckpoint,
    Local,
    LocalCheckpoint,
    PLayerFL,
    PLayerFLRandom,
)
from fedlightning.contract import FederatedCallback
from fedlightning.tensors import module_state, select
from tests.callbacks.common import SIZES, batches
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NetStyle,
    Toy,
    ToyData,
    close,
    differs,
    federate,
    global_state,
    make_trainer,
    mean_of,
    mostly_slow,
    same,
    spied,
    toy_data,
)

CASES = {"PLayerFL": Case(PLayerFL(threshold=1.1)), "PLayerFLRandom": Case(PLayerFLRandom(threshold=1.1))}
KEPT = {
    "PLayerFL": Kept("PLayerFL", server=("clients", "layers", "order", "personal", "split")),
    "PLayerFLRandom": Kept("PLayerFLRandom", server=("clients", "layers", "order", "personal", "split")),
}

LAYERS = ["net.first", "net.second", "net.third", "net.head"]


class Deep(Toy):
    """Four layers, registered in the reverse of the order in which they are called; ``norm`` after the first."""

    def __init__(self, optimizer="sgd", norm=False, dropout=0.0, lr=0.1):
        self.norm = norm
        super().__init__(optimizer, lr=lr, dropout=dropout)

    def make(self, hidden, dropout):
        parts = {
            "head": nn.Linear(hidden, 3),
            "third": nn.Linear(hidden, hidden),
            "second": nn.Linear(hidden, hidden),
            "first": nn.Linear(6, hidden),
            "norm": nn.BatchNorm1d(hidden) if self.norm else nn.Identity(),
            "drop": nn.Dropout(dropout),
        }
        return nn.ModuleDict(parts)

    def logits(self, x):
        for name in ("first", "norm", "second", "drop", "third"):
            x = self.net[name](x) if name in ("norm", "drop") else torch.tanh(self.net[name](x))
        return self.net["head"](x)

    def forward(self, x):
        return self.logits(x)


def names_of(module, layers):
    inside = {"net.first": ("net.first.", "net.norm.")}
    prefixes = [prefix for layer in layers for prefix in inside.get(layer, (f"{layer}.",))]
    return {name for name in module.state_dict() if name.startswith(tuple(prefixes))}


def own(trainer, key="PLayerFL"):
    return trainer.server.state[key]


# -- the protocol ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
def test_round_one_and_after(norm):
    """F goes up, p is fixed, the layers of that same training follow; then the layers up to p travel, and no other."""
    module, data = Deep("adam", norm=norm), toy_data(SIZES)
    trainer, spy = spied(module, data, [PLayerFL(split=2)], max_rounds=3)
    shared, private = names_of(module, LAYERS[:2]), names_of(module, LAYERS[2:])
    probes, collected = spy.updates[:3], spy.updates[3:6]
    everything = set(module.state_dict())
    for message in spy.messages[:3]:
        assert set(message.state) == everything and message.returns == () and message.tag == "sensitivity"
    for update in probes:
        assert update.state == {} and update.tag == "sensitivity"
        pieces = 5 if norm else 4
        assert {name: value.shape for name, value in update.extras["PLayerFL"].items()} == {
            "sensitivity": (pieces,), "order": (pieces,),
        }  # fmt: skip
    for message, update in zip(spy.messages[3:6], collected, strict=True):
        assert not message.state and message.work == 0
        assert set(update.state) == shared == set(message.returns) and not update.extras
    for item in (*spy.messages[6:], *spy.updates[6:]):
        assert set(item.state) == shared and not item.extras and not item.tag
    assert len(spy.updates) == 6 + 3 + 3
    assert own(trainer)["layers"] == LAYERS and own(trainer)["split"] == 2 and set(own(trainer)["personal"]) == private
    for client in SIZES:
        state = module_state(trainer.module(client))
        same(select(state, shared), select(global_state(trainer), shared))
        assert set(spy.records[-1][client].personal) == private
        same(select(state, private), spy.records[-1][client].personal)
    for a, b in (("0", "1"), ("1", "2")):
        assert differs(*(select(module_state(trainer.module(c)), private) for c in (a, b)))
    same(select(global_state(trainer), private), select(module_state(module), private))
    assert trainer.server.global_module() is None
    per_round = 3 * sum(v.numel() * v.element_size() for v in select(global_state(trainer), shared).values())
    assert trainer.server.costs.bytes_up == 3 * per_round + 3 * pieces * 16


def test_the_probing_epoch_is_the_training_of_round_one():
    """Its shared layers are averaged at once, weighted by samples; its personal ones stay with the clients."""
    module, data = Deep("adam", norm=True), toy_data(SIZES)
    plain, a = spied(module, data, [FedAvg()], max_rounds=1)
    trainer, b = spied(module, data, [PLayerFL(split=2)], max_rounds=1)
    shared = names_of(module, LAYERS[:2])
    same(select(global_state(trainer), shared), select(global_state(plain), shared))
    for client in SIZES:
        trained = a.of_round(0)[client].state
        kept = b.records[0][client].personal  # also what was collected: it stays until the server sends it back
        same(kept, trained)
    close(
        {n: v for n, v in select(global_state(trainer), shared).items() if v.is_floating_point()},
        mean_of({u.client: u for u in b.updates[3:]}, SIZES),
        atol=0,
        rtol=0,
    )
    assert trainer.server.costs.steps == plain.server.costs.steps == sum(u.steps for u in a.updates)
    assert [u.metrics for u in a.updates] == [u.metrics for u in b.updates[:3]]


def test_sensitivity_of_a_federation_is_that_of_plain_trainers():
    """The sum over clients of what FederationSensitivity records in each client's first epoch."""
    module, data = Deep("adam", norm=True), toy_data(SIZES)
    trainer, _ = spied(module, data, [PLayerFL(), FederationSensitivity()], max_rounds=1, local_epochs=2)
    total = trainer.callbacks.find(PLayerFL).sensitivity(trainer.server)
    key = FederationSensitivity().state_key
    parts = [trainer.store.get(c).lightning["fit"]["callbacks"][key]["result"] for c in SIZES]
    assert total.layers == parts[0]["layers"] == LAYERS
    assert total.num_parameters == parts[0]["num_parameters"]
    expected = [sum(part["sensitivity"][k] for part in parts) for k in range(4)]
    assert total.sensitivity == pytest.approx(expected, rel=1e-9)
    assert all(value > 0 for value in total.sensitivity)


@pytest.mark.parametrize("callbacks", [[], [FedProx(mu=5.0)]], ids=["alone", "beside FedProx"])
def test_gradients_are_those_of_the_task(callbacks):
    """Corrections do not enter F; neither does clipping."""
    module, data = Deep(lr=0.0), toy_data({"0": 24})
    found = []
    for options in ({}, {"gradient_clip_val": 1e-3}):
        trainer = federate(module, data, [*callbacks, PLayerFL()], max_rounds=1, **options)
        found.append(trainer.callbacks.find(PLayerFL).sensitivity(trainer.server).sensitivity)
    expected, there = [0.0] * 4, list(batches(data, "0"))
    for x, y in there:
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()
        for k, layer in enumerate(LAYERS):
            parameters = list(module.get_submodule(layer).parameters())
            squares = sum(float((p * p.grad).double().square().sum()) for p in parameters)
            expected[k] += squares / sum(p.numel() for p in parameters) / len(there)
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-5)


# -- reductions --------------------------------------------------------------------------------------------------------

HALF = lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4))  # noqa: E731


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer_state": "keep", "local_epochs": 2, "gradient_clip_val": 0.3, "accumulate_grad_batches": 2},
        {"local_steps": 4, "participation": 2},
        {"precision": "bf16-mixed"},
        *mostly_slow([{"fp16": True, "local_epochs": 3}, {"float_buffers": "server"}], []),
        {"float_buffers": "local"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "callback",
    [
        pytest.param(PLayerFL(threshold=math.inf), id="t=inf"),
        pytest.param(PLayerFL(split=4), id="split=L", marks=pytest.mark.slow),
    ],
)
def test_everything_shared_is_fedavg_bit_for_bit(callback, options):
    """Entry 23 (c), with batch statistics and dropout."""
    module, data = Deep("adam", norm=True, dropout=0.3), toy_data(SIZES)
    options = dict(options)
    half = {"plugins": [HALF()]} if options.pop("fp16", False) else {}
    (_, a), (ours, b) = (spied(module, data, [cb], max_rounds=3, **half, **options) for cb in (FedAvg(), callback))
    for x, y in zip(a.rounds, b.rounds, strict=True):
        same(x, y)
    for client in SIZES:
        for x, y in zip(a.records, b.records, strict=True):
            kept = y[client].personal
            if y[client].last_round == 0:  # also what was collected then: it stays until the server sends it back
                kept = select(kept, list(x[client].personal))
            same(x[client].personal, kept)
    if options.get("float_buffers") is None:
        assert ours.server.global_module() is not None


def test_nothing_shared_is_local_bit_for_bit():
    """Entry 23 (c), also what is in no layer: a buffer of the module's own, a tied parameter."""

    class More(Deep):
        def __init__(self):
            super().__init__("adam", norm=True)
            self.register_buffer("seen", torch.zeros(()))
            self.net["third"].weight = self.net["second"].weight

        def training_step(self, batch, batch_idx):
            self.seen += len(batch[0])
            return super().training_step(batch, batch_idx)

    module, data = More(), toy_data(SIZES)
    theirs, _ = spied(module, data, [Local()], max_rounds=3, optimizer_state="reset")
    ours, spy = spied(module, data, [PLayerFL(split=0)], max_rounds=3)
    for client in SIZES:
        same(module_state(ours.module(client)), module_state(theirs.module(client)))
    assert not any(update.state for update in spy.updates) and not any(m.state for m in spy.messages[3:])
    same(global_state(ours), module_state(module))


def test_a_shared_prefix_of_all_but_the_head_is_fedper():
    module, data = Toy("adam"), toy_data(SIZES)
    (_, a), (_, b) = (spied(module, data, [cb], max_rounds=3) for cb in (FedPer(), PLayerFL(split=1)))
    for x, y in zip(a.rounds, b.rounds, strict=True):
        same(x, y)
    same(a.records[-1]["1"].personal, b.records[-1]["1"].personal)


# -- p -----------------------------------------------------------------------------------------------------------------


class Fixed(PLayerFL):
    """PLayer-FL that has measured the sheet's example: F = (1, 1.2, 1.3, 4)."""

    key = "PLayerFL"

    def sensitivity(self, server):
        found = PLayerFL.sensitivity(self, server)
        found.sensitivity = [1.0, 0.2, 0.1, 2.7]
        return found


@pytest.mark.parametrize(
    ("options", "p"),
    [
        ({}, 1),
        ({"threshold": 1.15}, 1),
        ({"threshold": 2.0}, 3),
        ({"threshold": 1.5, "shift": 1}, 4),
        ({"threshold": 1.5, "shift": 1, "clamp": True}, 3),
        ({"threshold": 2.0, "shift": -1}, 2),
        ({"threshold": 1.15, "shift": -1}, 0),
        ({"threshold": 1.15, "shift": -1, "clamp": True}, 1),
        ({"threshold": 1.15, "shift": -3}, 0),
        ({"threshold": 5.0}, 4),
        ({"threshold": 5.0, "clamp": True}, 3),
        ({"split": 3, "threshold": 1.15}, 3),
        ({"split": 3, "shift": -1}, 2),
        ({"split": 4, "clamp": True}, 3),
    ],
    ids=str,
)
def test_p(options, p):
    trainer, spy = spied(Deep(), toy_data({"0": 8, "1": 8}), [Fixed(**options)], max_rounds=1)
    assert own(trainer)["split"] == p
    assert set(own(trainer)["personal"]) == names_of(Deep(), LAYERS[p:])
    assert {name for update in spy.updates for name in update.state} == names_of(Deep(), LAYERS[:p])


@pytest.mark.parametrize("scale", [1e-3, 64.0])
def test_p_and_f_under_a_scaled_loss(scale):
    class Scaled(Deep):
        factor = 1.0

        def training_step(self, batch, batch_idx):
            return self.factor * super().training_step(batch, batch_idx)

    module, found = Scaled(lr=0.0), []
    for factor in (1.0, scale):
        module.factor = factor
        trainer = federate(module, toy_data(SIZES), [PLayerFL()], max_rounds=1)
        found.append(trainer.callbacks.find(PLayerFL).sensitivity(trainer.server))
    assert found[1].ratios == pytest.approx(found[0].ratios, rel=1e-4)
    assert [found[1].transition(t) for t in (1.05, 1.1, 2, 5)] == [found[0].transition(t) for t in (1.05, 1.1, 2, 5)]


def test_a_frozen_first_layer_is_no_jump():
    module = Deep()
    module.net["first"].requires_grad_(False)
    trainer = federate(module, toy_data(SIZES), [PLayerFL(threshold=1.0001)], max_rounds=1)
    found = trainer.callbacks.find(PLayerFL).sensitivity(trainer.server)
    assert found.sensitivity[0] == 0.0 and found.num_parameters[0] == 0 and own(trainer)["split"] > 1


def test_weights_only_counts_weights_only():
    found = []
    for weights_only in (False, True):
        trainer = federate(Deep(norm=True), toy_data(SIZES), [PLayerFL(weights_only=weights_only)], max_rounds=1)
        found.append(trainer.callbacks.find(PLayerFL).sensitivity(trainer.server))
    assert found[0].num_parameters == [72, 72, 72, 27] and found[1].num_parameters == [56, 64, 64, 24]
    assert found[1].weights_only and not found[0].weights_only


def test_an_order_by_hand():
    order = ["net.second", "net.first"]
    trainer = federate(Deep(), toy_data(SIZES), [PLayerFL(split=1, order=order)], max_rounds=1)
    assert own(trainer)["layers"][:2] == order and "net.second.weight" not in own(trainer)["personal"]


class Forked(Deep):
    """Client 1 meets its layers in another order than client 0."""

    def logits(self, x):
        first, second = ("second", "third") if len(x) == 8 else ("third", "second")
        x = torch.tanh(self.net["first"](x))
        return self.net["head"](torch.tanh(self.net[second](torch.tanh(self.net[first](x)))))


def test_clients_that_meet_layers_in_different_orders_are_summed_layer_by_layer():
    """The first client's order holds; each layer's terms are added to the same layer's."""
    data = toy_data({"0": 8, "1": 10}, batch_size=10)
    trainer = federate(Forked(), data, [PLayerFL(split=2), FederationSensitivity()], max_rounds=1)
    key = FederationSensitivity().state_key
    parts = [trainer.store.get(c).lightning["fit"]["callbacks"][key]["result"] for c in "01"]
    assert parts[0]["layers"] == LAYERS and parts[1]["layers"] == [LAYERS[k] for k in (0, 2, 1, 3)]
    total = trainer.callbacks.find(PLayerFL).sensitivity(trainer.server)
    by_layer = [dict(zip(part["layers"], part["sensitivity"], strict=True)) for part in parts]
    assert total.layers == LAYERS
    assert total.sensitivity == pytest.approx([sum(part[layer] for part in by_layer) for layer in LAYERS], rel=1e-9)


def test_a_norm_belongs_to_the_layer_before_it_as_called():
    """Registered last, called after the first layer: it is shared with that one, statistics too."""
    trainer, spy = spied(Deep(norm=True), toy_data(SIZES), [PLayerFL(split=1)], max_rounds=2)
    assert set(spy.updates[-1].state) == {
        "net.first.weight", "net.first.bias", "net.norm.weight", "net.norm.bias",
        "net.norm.running_mean", "net.norm.running_var", "net.norm.num_batches_tracked",
    }  # fmt: skip
    assert (global_state(trainer)["net.norm.running_var"] > 0).all()


# -- who takes part ----------------------------------------------------------------------------------------------------


def test_partial_participation():
    """F of round 1's participants decides; who comes later starts its personal layers from the common start."""
    module, data = Deep("adam"), toy_data(SIZES)
    trainer, spy = spied(module, data, [PLayerFL(split=2)], max_rounds=5, participation=1)
    (first,) = spy.of_round(0)
    assert set(own(trainer)["clients"]) == {first}
    private = names_of(module, LAYERS[2:])
    assert len({next(iter(spy.of_round(number))) for number in range(5)}) > 1
    seen = set()
    for number in range(5):
        for client in SIZES:
            if client in spy.of_round(number):
                seen.add(client)
            elif number:
                before, after = spy.records[number - 1][client], spy.records[number][client]
                assert after is before or not after.visits
    for client in set(SIZES) - seen:
        same(select(module_state(trainer.module(client)), private), select(module_state(module), private))


def test_a_client_that_fails_in_round_one_has_no_say_and_comes_later():
    tensors = toy_data(SIZES).tensors
    tensors["1"]["train"] = (tensors["1"]["train"][0] * float("nan"), tensors["1"]["train"][1])
    with pytest.warns(UserWarning, match="client '1' failed"):
        trainer, spy = spied(Deep(), ToyData(tensors), [PLayerFL(split=2)], max_rounds=2)
    assert set(own(trainer)["clients"]) == {"0", "2"}
    assert [update.client for update in spy.updates] == ["0", "2"] * 3


def test_without_one_finite_gradient_there_is_no_decision():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1000)
    with pytest.raises(ValueError, match="PLayerFL got no sensitivity in round 1"):
        federate(
            Deep(), toy_data(SIZES), [PLayerFL()], max_rounds=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler)]
        )


def test_the_order_of_clients_does_not_matter():
    runs = []
    for order in ("012", "210"):
        data = toy_data({client: SIZES[client] for client in order})
        torch.manual_seed(0)
        trainer = federate(Deep("adam", norm=True), data, [PLayerFL()], max_rounds=2)
        runs.append((own(trainer)["split"], global_state(trainer)))
    assert runs[0][0] == runs[1][0]
    same(runs[0][1], runs[1][1])


# -- modules of other kinds --------------------------------------------------------------------------------------------


class Adversaries(LightningModule):
    """Manual optimization with two optimizers."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic, self.maker = nn.Linear(4, 1), nn.Linear(6, 4)

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.critic(self.maker(batch[0])).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.maker, self.critic)]


def test_manual_optimization_with_several_optimizers():
    module, data = Adversaries(), toy_data(SIZES)
    trainer, spy = spied(module, data, [PLayerFL(split=1)], max_rounds=2)
    assert own(trainer)["layers"] == ["maker", "critic"]
    assert {name for update in spy.updates for name in update.state} == {"maker.weight", "maker.bias"}
    plain = federate(module, data, max_rounds=1)
    again = federate(module, data, [PLayerFL(split=2)], max_rounds=1)
    same(global_state(plain), global_state(again))


def test_fp16_overflow_does_not_enter_f():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000)
    data = toy_data({"0": 160, "1": 160})
    options = {"max_rounds": 1}
    half, full = (
        federate(Deep(lr=1e-4), data, [PLayerFL()], **options, **more)
        for more in ({"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}, {})
    )
    found = [trainer.callbacks.find(PLayerFL).sensitivity(trainer.server) for trainer in (half, full)]
    assert all(map(math.isfinite, found[0].sensitivity))
    assert 0.05 < found[0].cumulative[-1] / found[1].cumulative[-1] < 20


# -- files, resume, refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [1.1, math.inf])
def test_files_of_a_run(tmp_path, threshold):
    trainer = federate(Deep(), toy_data(SIZES), [PLayerFL(threshold, shift=-1)], root=tmp_path, max_rounds=2)
    found = json.loads((trainer.run.path / "sensitivity.json").read_text(), parse_constant=pytest.fail)
    assert found["layers"] == LAYERS and set(found["clients"]) == set(SIZES)
    assert found["threshold"] == (None if threshold == math.inf else threshold)
    assert found["split"] == own(trainer)["split"] and found["method"] == "online"
    for k in range(4):
        assert found["sensitivity"][k] == pytest.approx(sum(terms[k] for terms in found["clients"].values()))
    assert (trainer.run.path / "figures" / "sensitivity.png").stat().st_size > 1000
    assert not {row.stage for row in trainer.rows} & {"G"} and {"L1", "L2"} <= {row.stage for row in trainer.rows}


class Stop(FederatedCallback):
    facts = Facts(takes_part=False)

    def __init__(self, round):
        self.round = round

    def on_round_start(self, server):
        if server.round == self.round:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_resumed_is_uninterrupted(tmp_path):
    module, data = Deep("adam", norm=True), toy_data(SIZES)
    options = {"max_rounds": 3, "participation": 2, "evaluation": 0}
    whole = federate(module, data, [PLayerFLRandom()], root=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        federate(module, data, [PLayerFLRandom(), Stop(1)], root=tmp_path / "cut", **options)
    again = make_trainer(tmp_path / "cut", [PLayerFLRandom()], **options)
    again.fit(Deep("adam", norm=True), datamodule=data, resume="last")
    same(global_state(whole), global_state(again))
    for client in SIZES:
        same(module_state(whole.module(client)), module_state(again.module(client)))
    texts = [(trainer.run.path / "sensitivity.json").read_text() for trainer in (whole, again)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("callbacks", "sentence"),
    [
        ([PLayerFL(split=5)], r"PLayerFL got split=5; Deep has 4 layers: use 0 to 4"),
        ([PLayerFL(order=["net.frist"])], r"'net.frist' is not a layer of Deep. Close matches: 'net.first'"),
        (
            [PLayerFL(), GlobalCheckpoint()],
            "PLayerFL keeps layers with the clients, and GlobalCheckpoint selects.*or use LocalCheckpoint",
        ),
        ([GlobalCheckpoint(), PLayerFL(split=4, shift=-1)], "PLayerFL keeps layers with the clients"),
        ([GlobalCheckpoint(), PLayerFLRandom(math.inf)], "PLayerFLRandom keeps layers"),
        ([PLayerFL(), PLayerFLRandom()], "PLayerFL and PLayerFLRandom both claim 'plan_round'"),
    ],
)
def test_what_cannot_work_is_refused_at_start(callbacks, sentence):
    with pytest.raises(ValueError, match=sentence):
        federate(Deep(), toy_data(SIZES), callbacks)


def test_a_global_model_may_be_selected_where_there_is_one(tmp_path):
    callbacks = [PLayerFL(split=4), GlobalCheckpoint(), LocalCheckpoint()]
    trainer = federate(Deep(), toy_data(SIZES), callbacks, root=tmp_path)
    assert {row["checkpoint"] for row in trainer.test()} == {"latest", "best_global", "best_local"}


@pytest.mark.parametrize("threshold", [1.0, 0.3, math.nan])
def test_thresholds_that_mean_nothing(threshold):
    with pytest.raises(
        ValueError, match=rf"PLayerFL got threshold={threshold}. Use a number in \(1, inf\]. F is cumulative"
    ):
        PLayerFL(threshold)


def test_a_model_of_one_layer_is_refused():
    class One(NetStyle):
        def make(self, hidden, dropout):
            return nn.Linear(6, 3)

    for callback in (PLayerFL(), PLayerFLRandom()):
        sentence = rf"{callback.key} decides layer by layer, but One has 1 layer. Use FedAvg\(\) or Local\(\)"
        with pytest.raises(ValueError, match=sentence):
            federate(One(), toy_data(SIZES), [callback])


# -- random ------------------------------------------------------------------------------------------------------------


class FixedRandom(PLayerFLRandom):
    """F = (1, 1.2, 1.3, 4): the principled prefix at t = 2 is 3."""

    key = "PLayerFLRandom"
    sensitivity = Fixed.sensitivity


class Draws(FederatedCallback):
    """Somebody who uses the global generator on the server."""

    def __init__(self, seed):
        self.seed = seed

    def on_update(self, server, update):
        torch.manual_seed(self.seed)


def test_a_random_prefix_is_never_the_principled_one_nor_all():
    data = toy_data({"0": 8})
    found = []
    for seed in range(12):
        trainer, spy = spied(Deep(), data, [FixedRandom(2.0)], max_rounds=3 if seed < 2 else 1, seed=seed)
        p = own(trainer, "PLayerFLRandom")["split"]
        found.append(p)
        assert {name for u in spy.updates for name in u.state} == names_of(Deep(), LAYERS[:p])  # a prefix, all rounds
    assert set(found) == {1, 2}
    for other in range(4):  # the run's seed alone says which, whatever else draws
        again = federate(Deep(), data, [Draws(other), FixedRandom(2.0)], max_rounds=1, seed=3)
        assert own(again, "PLayerFLRandom")["split"] == found[3]


def test_with_two_layers_no_other_prefix_may_be_left():
    with pytest.warns(UserWarning, match=r"of 2 layers no other prefix is left than PLayer-FL's \(1\)"):
        trainer = federate(Toy(), toy_data(SIZES), [PLayerFLRandom(split=1)], max_rounds=1)
    assert own(trainer, "PLayerFLRandom")["split"] == 1
    trainer = federate(Toy(), toy_data(SIZES), [PLayerFLRandom(split=2)], max_rounds=1)
    assert own(trainer, "PLayerFLRandom")["split"] == 1
