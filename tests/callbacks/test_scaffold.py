"""SCAFFOLD: sheet entry 5."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.nn import functional as F

from fedlightning import FederatedCallback
from fedlightning.callbacks import FLIU, SCAFFOLD, FedAdam, FedAvg, FedPer
from fedlightning.engines.attempts import FederationError
from fedlightning.tensors import module_state, select
from tests.callbacks.common import batches
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    ToyData,
    close,
    federate,
    global_state,
    quadratic_data,
    same,
    spied,
    toy_data,
)

CASES = {
    "SCAFFOLD": Case(SCAFFOLD()),
    "SCAFFOLD option 1": Case(SCAFFOLD(option=1, server_lr=0.9), neutral=SCAFFOLD(option=1)),
}
KEPT = {"SCAFFOLD": Kept("SCAFFOLD", server=("c",), client=("c",))}

A = [[1.0, 2.0, 1.5], [2.0, 1.0, 2.0]]
B = [[1.0, -1.0, 2.0], [-2.0, 3.0, 0.5]]


def variates(records):
    """``c_i`` of every client that has one."""
    return {client: r.state["SCAFFOLD"]["c"] for client, r in records.items() if "SCAFFOLD" in r.state}


@pytest.mark.parametrize("make", [lambda: Toy("sgd", dropout=0.2), lambda: NormNet("sgd")])
@pytest.mark.parametrize("option", [1, 2])
def test_the_first_round_is_uniform_fedavg(make, option):
    module, data = make(), toy_data()
    runs = [federate(module, data, [callback], max_rounds=1, local_epochs=2)
            for callback in (FedAvg(weighting="uniform"), SCAFFOLD(option=option))]  # fmt: skip
    same(*map(global_state, runs))
    later = [federate(module, data, [callback], max_rounds=2) for callback in (FedAvg(weighting="uniform"), SCAFFOLD())]
    assert any(not torch.equal(a, global_state(later[1])[name]) for name, a in global_state(later[0]).items())


@pytest.mark.parametrize("participation", [1.0, 2])
@pytest.mark.parametrize("option", [1, 2])
def test_c_is_the_mean_of_all_clients_variates_after_every_round(option, participation):
    module, data = NormNet("sgd"), toy_data((24, 40, 16, 8))
    trainer, spy = spied(module, data, [SCAFFOLD(option=option)], max_rounds=4, participation=participation)
    names = {name for name, kind in trainer.server.kinds.items() if kind == "trainable"}
    for number, (state, records) in enumerate(zip(spy.states, spy.records, strict=True)):
        c, own = state["SCAFFOLD"]["c"], variates(records)
        assert set(c) == names
        assert len(spy.of_round(number)) == (4 if participation == 1.0 else 2)
        mean = {name: sum(v[name].double() for v in own.values()) / 4 for name in c}
        close(c, mean, atol=1e-6)
        assert any(float(value.abs().max()) > 0 for value in c.values())


class RawGradients(FederatedCallback):
    """Hears every step's gradient before it is corrected, and its learning rate."""

    def __init__(self):
        self.seen = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        rate = optimizer.param_groups[0]["lr"]
        gradients = {name: p.grad.clone() for name, p in pl_module.named_parameters()}
        self.seen.setdefault((self.client.round, self.client.id), []).append((rate, gradients))


class Decaying(Toy):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("make", [Toy, Decaying, NormNet])
def test_option_2_is_the_mean_of_the_rounds_raw_gradients(make):
    """With a schedule: weighted by the learning rates, since x - y is."""
    raw = RawGradients()
    data = toy_data((24, 40, 8))
    _trainer, spy = spied(make(), data, [raw, SCAFFOLD()], max_rounds=3, local_epochs=2, participation=2)
    for number, records in enumerate(spy.records):
        for client in spy.of_round(number):
            steps = raw.seen[number, client]
            total = sum(rate for rate, _ in steps)
            mean = {name: sum(rate * g[name] for rate, g in steps) / total for name in steps[0][1]}
            close(variates(records)[client], mean, atol=2e-5)
            assert records[client].steps == len(steps) == spy.of_round(number)[client].steps


class TwoRates(Toy):
    """The body's learning rate falls in every step, the head's is another and stays."""

    def configure_optimizers(self):
        optimizer, schedule = two_rates(self, self.lr)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def two_rates(module, lr):
    groups = [{"params": module.net[0].parameters()}, {"params": module.net[3].parameters(), "lr": lr / 5}]
    optimizer = torch.optim.SGD(groups, lr)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.7**step, lambda step: 1.0])


def by_hand(module, data, clients, rounds):
    """SCAFFOLD in plain torch: ``x``, ``c`` and every ``c_i``, whose new value is the mean of the visit's raw gradients."""
    x = {name: p.detach().clone() for name, p in module.named_parameters()}
    c = {name: torch.zeros_like(p) for name, p in x.items()}
    own = dict.fromkeys(clients, c)
    for number in range(rounds):
        ends, new = [], {}
        for client in clients:
            model = copy.deepcopy(module)
            model.load_state_dict(x)
            optimizer, schedule = two_rates(model, module.lr)
            total, rates = dict.fromkeys(x, 0.0), dict.fromkeys(x, 0.0)
            for inputs, labels in batches(data, client, round=number, epochs=2):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                body, head = (group["lr"] for group in optimizer.param_groups)
                for name, p in model.named_parameters():
                    lr = body if name.startswith("net.0") else head
                    total[name], rates[name] = total[name] + lr * p.grad, rates[name] + lr
                    p.grad += c[name] - own[client][name]
                optimizer.step()
                schedule.step()
            new[client] = {name: total[name] / rates[name] for name in x}
            ends.append({name: p.detach().clone() for name, p in model.named_parameters()})
        x, c = ({name: sum(s[name] for s in states) / len(clients) for name in x} for states in (ends, [*new.values()]))
        own = new
    return x, c, own


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_option_2_where_parameters_have_different_learning_rates(engine):
    """Each parameter's movement is divided by the sum of its own learning rates."""
    module, data = TwoRates(), toy_data()
    trainer, spy = spied(module, data, [SCAFFOLD()], max_rounds=3, local_epochs=2, engine=engine)
    x, c, own = by_hand(module, data, "012", rounds=3)
    close(global_state(trainer), x, atol=1e-5)
    close(spy.states[-1]["SCAFFOLD"]["c"], c, atol=2e-5)
    for client, found in variates(spy.records[-1]).items():
        close(found, own[client], atol=2e-5)


def test_option_1_is_the_gradient_at_the_received_model():
    module, data = Toy("momentum"), toy_data()
    _trainer, spy = spied(module, data, [SCAFFOLD(option=1)], max_rounds=2)
    for client in "012":
        model = copy.deepcopy(module)
        model.load_state_dict(spy.rounds[0])
        x, y = data.tensors[client]["train"]
        F.cross_entropy(model(x), y).backward()
        gradient = {name: p.grad for name, p in model.named_parameters()}
        close(variates(spy.records[1])[client], gradient, atol=1e-6)


def test_one_step_of_full_batches_is_uniform_fedsgd():
    module, data = Toy("sgd"), toy_data(batch_size=64)
    runs = [federate(module, data, [cb], max_rounds=4, local_steps=1) for cb in (FedAvg("uniform"), SCAFFOLD())]
    close(*map(global_state, runs), atol=1e-6)


def test_one_client_feels_no_correction():
    module, data = Toy("sgd"), toy_data([22])
    close(*(global_state(federate(module, data, cb, max_rounds=5)) for cb in ([], [SCAFFOLD()])), atol=1e-6)


def test_heterogeneous_quadratics_converge_where_fedavg_stalls():
    """(e): to the minimiser of the uniform mean objective, with K = 4 local steps."""
    a, b = torch.tensor(A).double(), torch.tensor(B).double()
    best = (a * b).sum(0) / a.sum(0)
    data = quadratic_data(A, B)
    options = {"max_rounds": 40, "local_epochs": 4}
    drift = global_state(federate(Quadratic(lr=0.25), data, [FedAvg(weighting="uniform")], **options))["w"] - best
    assert float(drift.abs().max()) > 1e-2
    found = global_state(federate(Quadratic(lr=0.25), data, [SCAFFOLD()], **options))["w"]
    torch.testing.assert_close(found, best, atol=1e-12, rtol=0)


def test_server_learning_rate_moves_parameters_and_averages_buffers():
    module, data = NormNet("sgd"), toy_data()
    start = module_state(module)
    full = global_state(federate(module, data, [SCAFFOLD()], max_rounds=1))
    half = global_state(federate(module, data, [SCAFFOLD(server_lr=0.5)], max_rounds=1))
    for name, kind in (("net.0.weight", "trainable"), ("net.1.running_var", "buffer")):
        expected = full[name] if kind == "buffer" else (start[name] + full[name]) / 2
        torch.testing.assert_close(half[name], expected, atol=1e-7, rtol=1e-6)


def test_the_wire_carries_twice_fedavgs_parameters():
    module, data = NormNet("sgd"), toy_data()
    _trainer, spy = spied(module, data, [SCAFFOLD()], max_rounds=2)
    names = {name for name, _ in module.named_parameters()}
    parameters = sum(4 * p.numel() for p in module.parameters())
    state = sum(t.numel() * t.element_size() for t in module_state(module).values())
    for item in (*spy.messages[:6], *spy.updates):
        assert item.num_bytes == state + parameters
        (extra,) = item.extras["SCAFFOLD"].values()
        assert set(extra) == names


def test_private_parameters_have_no_variate_and_are_not_corrected():
    module, data = Toy("sgd"), toy_data()
    _trainer, spy = spied(module, data, [FedPer(personal=["net.3"]), SCAFFOLD()], max_rounds=2)
    names = {"net.0.weight", "net.0.bias"}
    assert all(set(m.extras["SCAFFOLD"]["c"]) == names for m in spy.messages)
    assert all(set(u.extras["SCAFFOLD"]["delta_c"]) == names for u in spy.updates)
    body = select(spy.states[-1]["SCAFFOLD"]["c"], names)
    close(body, {n: sum(v[n].double() for v in variates(spy.records[-1]).values()) / 3 for n in names})


class Sometimes(Toy):
    """A branch that client ``2``'s data never reaches."""

    def __init__(self):
        super().__init__("sgd")
        self.extra = torch.nn.Linear(6, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        if len(x) != 7:
            logits = logits + self.extra(x)
        return F.cross_entropy(logits, y)


def test_a_parameter_without_gradient_keeps_its_variate():
    """Nothing corrected it, so its standing still says nothing about c."""
    _trainer, spy = spied(Sometimes(), toy_data((24, 40, 7)), [SCAFFOLD()], max_rounds=3)
    own = variates(spy.records[-1])
    assert float(own["0"]["extra.weight"].abs().max()) > 0
    assert float(own["2"]["extra.weight"].abs().max()) == 0


# -- momentum ----------------------------------------------------------------------------------------------------------

MOMENTA = {
    "heavy ball": {"momentum": 0.9},
    "dampened": {"momentum": 0.8, "dampening": 0.3},
    "Nesterov": {"momentum": 0.9, "nesterov": True},
    "cycled": {"momentum": 0.9},
    "on the head only": {"momentum": 0.9},
}


class Momentum(Toy):
    def __init__(self, kind="heavy ball", lr=0.02):
        super().__init__("sgd", lr)
        self.kind = kind

    def configure_optimizers(self):
        return momentum_of(self, self.kind, self.lr)


def momentum_of(model, kind, lr):
    """The optimizer of a kind, and a schedule that moves both the learning rate and the momentum."""
    groups = [{"params": model.net[0].parameters()}, {"params": model.net[3].parameters()}]
    if kind == "on the head only":
        groups[0]["momentum"] = 0.0
    optimizer = torch.optim.SGD(groups, lr, **MOMENTA[kind])
    if kind != "cycled":
        return [optimizer], []
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=12)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def with_momentum(module, data, clients, rounds, weights):
    """SCAFFOLD in plain torch. The divisor is what torch's own SGD moves a copy of the model whose gradients are 1."""
    share = {client: weight / sum(weights.values()) for client, weight in weights.items()}
    x = {name: p.detach().clone() for name, p in module.named_parameters()}
    own = {client: {name: torch.zeros_like(p) for name, p in x.items()} for client in clients}
    for number in range(rounds):
        c = {name: sum(share[client] * own[client][name] for client in clients) for name in x}
        ends, new = {}, {}
        for client in clients:
            models = [copy.deepcopy(module) for _ in range(2)]
            made = [momentum_of(model, module.kind, module.lr) for model in models]
            for model in models:
                model.load_state_dict(x)
            for inputs, labels in batches(data, client, round=number, epochs=2):
                loss = F.cross_entropy(models[0](inputs), labels)
                for p, g in zip(
                    models[0].parameters(), torch.autograd.grad(loss, [*models[0].parameters()]), strict=True
                ):
                    p.grad = g
                for name, p in models[0].named_parameters():
                    p.grad += c[name] - own[client][name]
                for p in models[1].parameters():
                    p.grad = torch.ones_like(p)
                for (optimizer,), schedules in made:
                    optimizer.step()
                    for schedule in schedules:
                        schedule["scheduler"].step()
            ends[client], unit = (dict(model.state_dict()) for model in models)
            new[client] = {
                name: own[client][name] - c[name] + (x[name] - ends[client][name]) / (x[name] - unit[name])
                for name in x
            }
        x, own = {name: sum(share[client] * ends[client][name] for client in clients) for name in x}, new
    return x, own


@pytest.mark.parametrize("engine", ["sequential", "vectorized", pytest.param("processes", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", MOMENTA)
def test_option_2_under_momentum(kind, engine):
    """Against plain torch, clients of unequal numbers of steps; divided by the effective sum of learning rates."""
    module, data, sizes = Momentum(kind), toy_data(), {"0": 24, "1": 40, "2": 16}
    weighting = "samples" if kind == "heavy ball" else "uniform"
    weights = sizes if weighting == "samples" else dict.fromkeys(sizes, 1)
    options = {"max_rounds": 3, "local_epochs": 2, "engine": engine}
    trainer = federate(module, data, [SCAFFOLD(weighting=weighting)], **options)
    x, own = with_momentum(module, data, "012", 3, weights)
    close(global_state(trainer), x, atol=1e-5)
    for client in "012":
        close(trainer.store.get(client).state["SCAFFOLD"]["c"], own[client], atol=5e-5)


class HeavyQuadratic(Quadratic):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.6)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("weighting", [pytest.param("uniform", marks=pytest.mark.slow), "samples"])
def test_with_momentum_heterogeneous_quadratics_converge_to_the_pooled_optimum(weighting, engine):
    """The weighting decides whose optimum it is: the mean of clients, or of samples (client 0 holds its sample thrice)."""
    held = [3, 1]
    data = ToyData(
        {
            str(i): {
                split: [torch.tensor([rows[i]] * held[i]).double() for rows in (A, B)]
                for split in ("train", "val", "test")
            }
            for i in range(2)
        }
    )
    share = torch.tensor(held if weighting == "samples" else [1, 1]).double()[:, None]
    a, b = torch.tensor(A).double(), torch.tensor(B).double()
    best = (share * a * b).sum(0) / (share * a).sum(0)
    options = {"max_rounds": 40, "local_epochs": 4, "engine": engine}
    drift = global_state(federate(HeavyQuadratic(lr=0.1), data, [FedAvg(weighting=weighting)], **options))["w"] - best
    assert float(drift.abs().max()) > 1e-2
    found = global_state(federate(HeavyQuadratic(lr=0.1), data, [SCAFFOLD(weighting=weighting)], **options))["w"]
    torch.testing.assert_close(found, best, atol=1e-7, rtol=0)


@pytest.mark.parametrize("participation", [1.0, 2])
def test_weighted_by_samples_c_is_the_weighted_mean_of_all_clients_variates(participation):
    sizes = {"0": 24, "1": 40, "2": 16, "3": 8}
    _, spy = spied(
        NormNet("sgd"), toy_data(sizes), [SCAFFOLD(weighting="samples")], max_rounds=3, participation=participation
    )
    for state, records in zip(spy.states, spy.records, strict=True):
        c, own = state["SCAFFOLD"]["c"], variates(records)
        close(c, {n: sum(sizes[i] * v[n].double() for i, v in own.items()) / sum(sizes.values()) for n in c}, atol=1e-6)


# -- refused and warned ------------------------------------------------------------------------------------------------


class Ascends(Toy):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, maximize=True)


REFUSED = {
    "Adam": (Toy("adam"), {}, r"option=2.*Adam's movement is not a sum of gradients.*option=1"),
    "kept momentum": (Toy("momentum"), {"optimizer_state": "keep"}, r"optimizer_state='keep'.*'reset', or option=1"),
    "ascent": (Ascends(), {}, "maximize=True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_option_2_cannot_read_a_gradient_from_is_refused(name):
    module, options, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        federate(module, toy_data([8]), [SCAFFOLD()], max_rounds=1, **options)
    federate(module, toy_data([8]), [SCAFFOLD(option=1)], max_rounds=1, **options)


def test_an_optimizer_that_only_training_shows_is_refused_by_the_client():
    class Late(Toy):
        def configure_optimizers(self):
            assert self.trainer.max_epochs == 1  # not there when the federation is checked
            return torch.optim.Adam(self.parameters())

    with pytest.raises(FederationError, match=r"was not moved by SGD.*option=1"):
        federate(Late(), toy_data([8]), [SCAFFOLD()], max_rounds=1)


def test_a_weighting_that_says_nothing_of_absent_clients_is_refused():
    method = SCAFFOLD()
    method.weighting = lambda server, update: 1.0
    with pytest.raises(ValueError, match="says nothing of absent clients"):
        federate(Toy("sgd"), toy_data([8]), [method], max_rounds=1)


def test_unequal_numbers_of_steps_are_warned_of_once():
    def warned(sizes, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            federate(Toy("sgd"), toy_data(sizes), [SCAFFOLD()], max_rounds=1, **options)
        return [str(w.message) for w in caught if "same number of steps" in str(w.message)]

    (text,) = warned([8, 24, 40])
    assert "client '0' takes 1 and client '2' 5 an epoch" in text
    assert not warned([8, 24, 40], local_steps=2)
    assert not warned([9, 16])
    assert not warned([8, 16], accumulate_grad_batches=2)


def test_composes_with_a_server_optimizer_only_without_a_server_step_of_its_own():
    federate(Toy("sgd"), toy_data([8, 8]), [SCAFFOLD(), FedAdam()], max_rounds=1)
    with pytest.raises(ValueError, match="SCAFFOLD and FedAdam both claim 'server_step'"):
        federate(Toy("sgd"), toy_data([8, 8]), [SCAFFOLD(server_lr=0.5), FedAdam()], max_rounds=1)


def test_an_unknown_option_is_refused():
    with pytest.raises(ValueError, match="option=3"):
        SCAFFOLD(option=3)


def test_where_training_starts_from_a_blend_the_movement_is_counted_from_there():
    """FLIU starts from a mixture of x and the client's own model: c_i is still the mean of the round's raw gradients."""
    raw, data = RawGradients(), toy_data((24, 24))
    _, spy = spied(Toy(), data, [raw, SCAFFOLD(), FLIU(gamma=0.5, weighting="uniform")], max_rounds=3)
    for client in "01":
        gradients = [g for _, g in raw.seen[2, client]]
        mean = {name: sum(g[name] for g in gradients) / len(gradients) for name in gradients[0]}
        close(variates(spy.records[2])[client], mean, atol=2e-5)
