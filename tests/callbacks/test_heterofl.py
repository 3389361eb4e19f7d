"""HeteroFL: algorithms-2, entry 2.1. The cutting itself is tested in tests/wrappers/test_submodel.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import fedlightning
from fedlightning import FederatedCallback
from fedlightning.algorithm import ModelSelection
from fedlightning.callbacks import MOON, SCAFFOLD, FedAdam, FedAvg, FedPer, FedProx, HeteroFL, LocalCheckpoint, PLayerFL
from fedlightning.tensors import module_state
from tests.callbacks.test_fedproto import class_data
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import (
    CLASSES,
    FEATURES,
    NormNet,
    Toy,
    close,
    differs,
    federate,
    global_state,
    same,
    spied,
    toy_data,
)

CASES = {
    "HeteroFL": Case(
        HeteroFL(head="head"),
        neutral=HeteroFL(rates=[1.0], masked_loss=False, head="head"),
        skip={"identical_clients": "its clients differ in width"},
    ),
    "HeteroFL one width": Case(HeteroFL(rates=[0.5], head="head"), skip=NO_PLAIN_FORM),
    "HeteroFL dynamic": Case(
        HeteroFL(dynamic=True, static_bn=False, head="head"),
        skip={**NO_PLAIN_FORM, "identical_clients": "its clients differ in width"},
    ),
}
KEPT = {"HeteroFL": Kept("HeteroFL", options={"head": "net.3"})}

PLAIN = {"scaler": False, "masked_loss": False, "static_bn": False}
SIZES = {"0": 24, "1": 40, "2": 16}
CUT = {"net.0.weight": (0,), "net.0.bias": (0,), "net.3.weight": (1,)}


def part(name, value, rate):
    """The slice of an entry of ``Toy`` by hand: eight hidden units, nothing else is cut."""
    kept = math.ceil(rate * 8)
    for dimension in CUT.get(name, ()):
        value = value.narrow(dimension, 0, kept)
    return value


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_with_full_widths_it_is_fedavg(make, weighting):
    module, data = make(), toy_data()
    ours = HeteroFL(rates=[1.0], masked_loss=False, static_bn=False, weighting=weighting)
    same(*(global_state(federate(module, data, [cb], max_rounds=3)) for cb in (FedAvg(weighting), ours)))


def test_each_client_gets_and_sends_its_slice():
    module = Toy()
    trainer, spy = spied(module, toy_data(), [HeteroFL(rates=[1.0, 0.5, 0.3], **PLAIN)], max_rounds=2)
    models = [module_state(trainer.server.blueprint.build("server")), spy.rounds[0]]
    for message in spy.messages[:6]:
        rate = [1.0, 0.5, 0.3][int(message.client)]
        assert message.extras["HeteroFL"] == {"rate": rate}
        for name, value in message.state.items():
            assert torch.equal(value, part(name, models[message.round][name], rate))
    for update in spy.updates:
        rate = [1.0, 0.5, 0.3][int(update.client)]
        assert {n: v.shape for n, v in update.state.items()} == {
            n: part(n, v, rate).shape for n, v in models[0].items()
        }
        assert update.num_bytes == sum(part(n, v, rate).numel() * 4 for n, v in models[0].items())


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_every_element_is_the_mean_over_those_who_hold_it(weighting):
    """Element by element, in plain Python."""
    rates = {"0": 0.5, "1": 0.75, "2": 0.25}
    callback = HeteroFL(rates=rates, weighting=weighting, **PLAIN)
    _trainer, spy = spied(Toy("adam"), toy_data(SIZES), [callback], max_rounds=2)
    old, new = spy.rounds
    weights = SIZES if weighting == "samples" else dict.fromkeys(SIZES, 1)
    for name, value in new.items():
        for index in torch.cartesian_prod(*[torch.arange(n) for n in value.shape]).reshape(-1, value.ndim).tolist():
            where = tuple(index)
            held = {
                c: float(u.state[name][where])
                for c, u in spy.of_round(1).items()
                if all(i < n for i, n in zip(where, u.state[name].shape, strict=True))
            }
            if not held:
                assert value[where] == old[name][where]
            else:
                mean = sum(weights[c] * v for c, v in held.items()) / sum(weights[c] for c in held)
                assert float(value[where]) == pytest.approx(mean, abs=1e-7, rel=1e-6)
    same(
        {n: part(n, new[n], 1.0)[..., 6:] if n == "net.3.weight" else new[n][6:] for n in CUT},
        {n: part(n, old[n], 1.0)[..., 6:] if n == "net.3.weight" else old[n][6:] for n in CUT},
    )


def test_without_training_the_global_model_stands_still():
    for dtype in ("32-true", "64-true"):
        data = toy_data([8] * 7)
        trainer = federate(
            Toy("sgd", lr=0.0), data, [HeteroFL(rates=[1.0, 0.5, 0.25], weighting="samples")], precision=dtype
        )
        same(global_state(trainer), module_state(trainer.server.blueprint.build("server")))


def by_hand(module, data, rates, rounds, mask, scaler):
    """One full-batch SGD step a round on hand-cut weights, in functional form."""
    w = {name: value.clone() for name, value in module_state(module).items()}
    for _ in range(rounds):
        total = {name: torch.zeros_like(value) for name, value in w.items()}
        count = {name: torch.zeros_like(value) for name, value in w.items()}
        for client, rate in rates.items():
            x, y = data.tensors[client]["train"]
            own = {n: part(n, v, rate).clone().requires_grad_() for n, v in w.items()}
            hidden = F.linear(x, own["net.0.weight"], own["net.0.bias"])
            logits = F.linear((hidden / rate if scaler else hidden).relu(), own["net.3.weight"], own["net.3.bias"])
            present = torch.tensor([int(j in y) for j in range(CLASSES)]).bool()
            if mask:
                logits = torch.where(present, logits, torch.zeros(()))
            gradients = torch.autograd.grad(F.cross_entropy(logits, y), list(own.values()))
            for (name, value), gradient in zip(own.items(), gradients, strict=True):
                new, kept = (value - module.lr * gradient).detach(), part(name, total[name], rate)
                holds = torch.ones_like(new)
                if mask and name.startswith("net.3"):
                    holds[~present] = 0
                kept += new * holds
                part(name, count[name], rate).add_(holds)
        w = {name: torch.where(count[name] > 0, total[name] / count[name].clamp_min(1), w[name]) for name in w}
    return w


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("scaler", [False, True])
def test_training_is_what_the_formulas_say(mask, scaler):
    owned = {"0": [0, 1], "1": [1], "2": [0, 1]}
    module, data = Toy(lr=0.3), class_data(owned, batch_size=64)
    rates = {"0": 1.0, "1": 0.5, "2": 0.2}
    callback = HeteroFL(rates=rates, scaler=scaler, masked_loss=mask)
    found = global_state(federate(module, data, [callback], max_rounds=4))
    close(found, by_hand(module, data, rates, 4, mask, scaler), atol=2e-6)
    if mask:
        start = module_state(module)
        same(*({n: s[n][2] for n in ("net.3.weight", "net.3.bias")} for s in (found, start)))


def test_a_mask_of_all_classes_is_plain_cross_entropy():
    module, data = Toy("adam"), class_data({"0": [0, 1, 2], "1": [0, 1, 2]}, count=40)
    runs = [federate(module, data, [HeteroFL(masked_loss=m)], max_rounds=2) for m in (True, False)]
    same(*map(global_state, runs))


class Inside(FederatedCallback):
    """Looks at the module while it trains."""

    def __init__(self):
        self.outputs = {}

    def on_train_start(self, trainer, pl_module):
        x = torch.ones(4, FEATURES)
        layer = pl_module.net[0]
        with torch.no_grad():
            trained = layer.train()(x)
            self.outputs[self.client.id] = (trained, layer.eval()(x))
            layer.train()


def test_the_scaler_divides_in_training_only_and_not_at_full_width():
    look = Inside()
    federate(Toy(), toy_data(), [HeteroFL(rates=[1.0, 0.5, 0.25]), look], max_rounds=1)
    for client, rate in {"0": 1.0, "1": 0.5, "2": 0.25}.items():
        trained, deployed = look.outputs[client]
        assert torch.equal(trained, deployed / rate)


def test_a_clients_deployed_model_is_its_slice_of_the_global_one(tmp_path):
    """Also as an exported checkpoint, which holds layers of other sizes than the class makes."""
    trainer = federate(Toy(), toy_data(), [HeteroFL(), LocalCheckpoint()], tmp_path, max_rounds=2)
    for client, rate in {"0": 1.0, "1": 0.5, "2": 0.25}.items():
        state = module_state(trainer.module(client))
        same(state, {n: part(n, v, rate) for n, v in global_state(trainer).items()})
        loaded = fedlightning.load(trainer.run.path / "checkpoints/clients" / f"{client}.ckpt", trust=["tests"])
        best = module_state(trainer.module(client, "best_local"))
        same(module_state(loaded), best)
    assert {"G", "L1", "L2"} <= {row.stage for row in trainer.rows}


def test_dynamic_rates_are_drawn_anew_in_every_round():
    callback = HeteroFL(rates=[1.0, 0.5, 0.25], dynamic=True)
    _trainer, spy = spied(Toy("adam"), toy_data(), [callback], max_rounds=8)
    drawn = [[m.extras["HeteroFL"]["rate"] for m in spy.messages if m.round == n] for n in range(8)]
    assert len({tuple(rates) for rates in drawn}) > 4
    assert {rate for rates in drawn for rate in rates} == {1.0, 0.5, 0.25}
    again, other = (spied(Toy("adam"), toy_data(), [callback], max_rounds=8, seed=seed)[1].messages for seed in (0, 1))
    assert [m.extras for m in again] == [m.extras for m in spy.messages] != [m.extras for m in other]
    with pytest.raises(Exception, match="with optimizer_state='keep'"):
        federate(Toy("adam"), toy_data(), [callback], optimizer_state="keep")


# -- static batch normalisation ----------------------------------------------------------------------------------------


def test_static_statistics_are_the_means_over_all_batches_of_the_new_model():
    module, data = NormNet("momentum"), toy_data(SIZES, batch_size=8, shuffle=False)
    trainer, spy = spied(module, data, [HeteroFL(masked_loss=False)], max_rounds=2)
    state, means, variances = global_state(trainer), [], []
    for client in SIZES:
        for x in data.tensors[client]["train"][0].split(8):
            hidden = F.linear(x, state["net.0.weight"], state["net.0.bias"])
            means.append(hidden.mean(0))
            variances.append(hidden.var(0))
    close(
        {n: state[n] for n in ("net.1.running_mean", "net.1.running_var")},
        {"net.1.running_mean": torch.stack(means).mean(0), "net.1.running_var": torch.stack(variances).mean(0)},
    )
    probes = [message for message in spy.messages if message.work == 0]
    assert probes and all(m.state["net.0.weight"].shape == (8, FEATURES) for m in probes)


def test_static_statistics_do_not_change_what_is_trained():
    module, data = NormNet("adam"), toy_data()
    runs = [federate(module, data, [HeteroFL(static_bn=s)], max_rounds=3) for s in (True, False)]
    states = [global_state(run) for run in runs]
    same(*({n: v for n, v in s.items() if "running" not in n} for s in states))
    assert differs(*({n: v for n, v in s.items() if "running" in n} for s in states))


def test_a_slice_is_deployed_with_the_statistics_of_its_clients_data():
    data = toy_data(SIZES, batch_size=64)
    trainer = federate(NormNet("momentum"), data, [HeteroFL(rates=[0.5])], max_rounds=1)
    for client in SIZES:
        state, x = module_state(trainer.module(client)), data.tensors[client]["train"][0]
        hidden = F.linear(x, state["net.0.weight"], state["net.0.bias"])
        assert hidden.shape[1] == 4
        torch.testing.assert_close(state["net.1.running_var"], hidden.var(0))


def test_a_full_client_that_keeps_its_head_is_scored_with_statistics_of_the_full_width():
    """Beside FedPer the server makes none, and the mean that travels is over clients of several widths."""

    class Two(NormNet):
        def make(self, hidden, dropout):
            first, second = (
                torch.nn.Sequential(torch.nn.Linear(n, hidden), torch.nn.BatchNorm1d(hidden)) for n in (6, 8)
            )
            return torch.nn.Sequential(first, torch.nn.ReLU(), second, torch.nn.Linear(hidden, CLASSES))

    seen = []

    class Look(ModelSelection):
        def on_client_evaluated(self, client, stage, split, metrics, module):
            if (client.id, stage) == ("0", "L1"):
                seen.append(module_state(module))

    data = toy_data({"0": 32, "1": 32}, batch_size=32, shuffle=False)
    rates = {"0": 1.0, "1": 0.5}
    federate(Two(), data, [HeteroFL(rates=rates), FedPer(["net.3"]), Look()], max_rounds=2, evaluation=1)
    for state in seen:
        x = F.linear(data.tensors["0"]["train"][0], state["net.0.0.weight"], state["net.0.0.bias"])
        x = F.batch_norm(x, None, None, state["net.0.1.weight"], state["net.0.1.bias"], training=True).relu()
        x = F.linear(x, state["net.2.0.weight"], state["net.2.0.bias"])
        torch.testing.assert_close(state["net.2.1.running_mean"], x.mean(0), rtol=1e-4, atol=1e-5)
    assert seen


# -- composition and refusals ------------------------------------------------------------------------------------------


def test_composes_with_other_methods():
    together = [HeteroFL(), FedProx(), MOON(), FedPer(), FedAdam(), LocalCheckpoint()]
    trainer, spy = spied(NormNet("adam"), toy_data(), together, max_rounds=3, evaluation=1)
    assert len(spy.updates) == 9
    assert not any(name.startswith("net.3") for item in (*spy.messages, *spy.updates) for name in item.state)
    for client, rate in {"0": 1.0, "1": 0.5, "2": 0.25}.items():
        assert trainer.store.get(client).personal["net.3.weight"].shape == (CLASSES, math.ceil(rate * 8))
    assert (global_state(trainer)["net.1.running_var"] > 0).all()


def test_the_proximal_anchor_is_the_slice():
    """A pull of lr * mu = 1 takes every step back to the anchor but for the gradient."""
    module, data = Toy("sgd", lr=0.1), toy_data(batch_size=64)
    _, spy = spied(module, data, [HeteroFL(**PLAIN), FedProx(mu=10.0)], max_rounds=1, local_epochs=3)
    _, once = spied(module, data, [HeteroFL(**PLAIN)], max_rounds=1)
    for client, update in spy.of_round(0).items():
        assert differs(update.state, once.of_round(0)[client].state)
        for name, value in update.state.items():
            assert (value - part(name, module_state(module)[name], [1.0, 0.5, 0.25][int(client)])).abs().max() < 0.3


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        (
            [HeteroFL(), SCAFFOLD()],
            r"HeteroFL gives clients parts of the model.*, and SCAFFOLD sends values",
        ),
        (
            [HeteroFL(static_bn=False), PLayerFL()],
            r"HeteroFL gives clients parts.*, and PLayerFL plans rounds of its own",
        ),
        ([HeteroFL(dynamic=True), LocalCheckpoint()], r"dynamic=True\)\), and LocalCheckpoint keeps"),
        ([HeteroFL(rates={"0": 1.0})], r"no rates for client '1'"),
    ],
)
def test_senseless_pairs_are_refused(callbacks, words):
    with pytest.raises(ValueError, match=words):
        federate(Toy(), toy_data(), callbacks)


@pytest.mark.parametrize("head", ["net.3", ["net.3"], [], None])
def test_the_head_by_name_or_in_a_list(head):
    module, data = Toy(), class_data({"0": [0, 1], "1": [1]})
    runs = [federate(module, data, [HeteroFL(head=h)]) for h in (head, None)]
    same(*map(global_state, runs))


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match=r"HeteroFL got head=\['net.0', 'net.3'\], but one layer gives the logits"):
        HeteroFL(head=["net.0", "net.3"])
    with pytest.raises(ValueError, match=r"HeteroFL got rates=\[\]. Use a list of at least one"):
        HeteroFL(rates=[])
    for arguments in ({"rates": [0.0]}, {"rates": [1.5]}, {"rates": {"0": -1.0}}):
        with pytest.raises(ValueError, match=r"HeteroFL got rates=.*\(0, 1\]"):
            HeteroFL(**arguments)
    with pytest.raises(ValueError, match="draws widths from a list"):
        HeteroFL(rates={"0": 1.0}, dynamic=True)
