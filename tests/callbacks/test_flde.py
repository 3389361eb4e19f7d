"""FL+DE: sheet entry 33."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.algorithm import FederatedCallback
from fedlightning.callbacks import APFL, FLDE, Ditto, FedAdam, FedAvg, FedBN, FedProx, Local, SampleDP
from fedlightning.callbacks.flde import mix_outputs, mix_probabilities
from fedlightning.models import MLP, Classifier
from fedlightning.tensors import module_state
from tests.callbacks.common import SIZES, absent_clients_rest, batches, cut_and_resumed, fixed_data
from tests.conformance.case import Case, Kept
from tests.helpers import (
    FEATURES,
    NetStyle,
    NormNet,
    PiecesStyle,
    Toy,
    ToyData,
    close,
    differs,
    federate,
    global_state,
    make_trainer,
    same,
    spied,
    toy_data,
)

CASES = {"FLDE": Case(FLDE()), "FLDE outputs": Case(FLDE(mix="outputs"))}
KEPT = {
    "FLDE": Kept("FLDE", client=("expert",)),
    "FLDE keep": Kept("FLDE", client=("expert", "optimizer"), arguments={"optimizer_state": "keep"}),
}
X = torch.randn(9, FEATURES, generator=torch.Generator().manual_seed(0))
GATE = ("expert_gate.weight", "expert_gate.bias")


def made(kind=Toy, *given, **options):
    torch.manual_seed(0)
    return kind(*given, **options)


def expert(trainer, client="0"):
    return trainer.store.get(client).state["FLDE"]["expert"]


def probabilities(trainer, client="0"):
    with torch.no_grad():
        return trainer.module(client).eval()(X).softmax(1)


def noisy(**options):
    pytest.importorskip("opacus", reason="SampleDP counts with Opacus: pip install opacus cryptography")
    return SampleDP(**{"delta": 1e-3, "noise_multiplier": 1.0, "noise_seed": 3} | options)


# -- the mixture -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 2, 2), (5, 1), (5,), (5, 1, 2)], ids=str)
def test_mixture_of_probabilities(shape):
    draw = torch.Generator().manual_seed(0)
    own, other = (3 * torch.randn(shape, generator=draw).double() for _ in range(2))
    gate = torch.randn(5, 1, generator=draw).double()
    a = gate.sigmoid().reshape(-1, *[1] * (len(shape) - 1))
    mixed = mix_probabilities(own, other, gate)
    if len(shape) > 1 and shape[1] > 1:
        torch.testing.assert_close(mixed.exp(), a * own.softmax(1) + (1 - a) * other.softmax(1))
        torch.testing.assert_close(mixed.exp().sum(1), torch.ones_like(mixed[:, 0]))
        torch.testing.assert_close(mixed.softmax(1), mixed.exp())
    else:
        torch.testing.assert_close(mixed.sigmoid(), a * own.sigmoid() + (1 - a) * other.sigmoid())
    torch.testing.assert_close(mix_outputs(own, other, gate), a * own + (1 - a) * other)


@pytest.mark.parametrize("classes", [3, 1])
@pytest.mark.parametrize("gate", [1e6, -1e6, 0.0])
def test_numbers_without_bound_give_finite_losses_and_slopes(classes, gate):
    own, other = (s * 1e4 * torch.eye(3, classes).requires_grad_() for s in (1, -1))
    bias = torch.full((3, 1), gate, requires_grad=True)
    mixed = mix_probabilities(own, other, bias)
    slopes = torch.autograd.grad(mixed.sum(), [own, other, bias])
    assert mixed.isfinite().all() and all(one.isfinite().all() for one in slopes)
    alone = {1e6: own, -1e6: other}.get(gate)
    if alone is not None:
        torch.testing.assert_close(mixed, alone if classes == 1 else alone.log_softmax(1))


# -- two rounds in plain torch -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("mix", ["probabilities", "outputs"])
@pytest.mark.parametrize("gate_input", ["features", "input"])
def test_two_rounds_by_hand(mix, gate_input):
    """Losses are written with logarithms of sums of probabilities, in double precision, by another path than the code's."""
    sizes = {"0": 16, "1": 24}
    data, module = toy_data(sizes), made()
    trainer = federate(module, data, [FLDE(mix, gate_input=gate_input, gate_bias=0.3, lr_factor=0.5)])
    world, kept = module.net.double(), {}
    for number in range(2):
        sums = {name: torch.zeros_like(value) for name, value in world.state_dict().items()}
        for client, size in sizes.items():
            own = copy.deepcopy(world)
            begin = nn.Linear(FEATURES if gate_input == "input" else 8, 1).double()
            nn.init.zeros_(begin.weight)
            nn.init.constant_(begin.bias, 0.3)
            other, gate = kept.setdefault(client, (copy.deepcopy(module.net).double(), begin))
            mine = [*other.parameters(), *gate.parameters()]
            for x, y in batches(data, client, round=number):
                x = x.double()
                with torch.no_grad():
                    logits = own(x)
                    phi = x if gate_input == "input" else own[:-1](x)
                a = torch.sigmoid(gate(phi))
                if mix == "probabilities":
                    p = a * logits.softmax(1) + (1 - a) * other(x).softmax(1)
                    loss = -p[torch.arange(len(y)), y].log().mean()
                else:
                    loss = F.cross_entropy(a * logits + (1 - a) * other(x), y)
                steps = torch.autograd.grad(loss, mine)
                of_own = torch.autograd.grad(F.cross_entropy(own(x), y), list(own.parameters()))
                with torch.no_grad():
                    for parameter, step in zip(mine, steps, strict=True):
                        parameter -= 0.5 * 0.1 * step
                    for parameter, step in zip(own.parameters(), of_own, strict=True):
                        parameter -= 0.1 * step
            for name, value in own.state_dict().items():
                sums[name] += value * size / sum(sizes.values())
        world.load_state_dict(sums)
        if number == 0:
            module = made()  # experts begin as the first model
    close(global_state(trainer), {f"net.{name}": value for name, value in world.state_dict().items()})
    for client, (other, gate) in kept.items():
        found = expert(trainer, client)
        close({n: v for n, v in found.items() if n not in GATE}, {f"net.{n}": v for n, v in other.state_dict().items()})
        close({n: found[n] for n in GATE}, dict(zip(GATE, gate.state_dict().values(), strict=True)))
        assert found[GATE[0]].abs().max() > 1e-3


class Scaled(NormNet):
    """Batch normalisation and dropout between the layers; an attribute that its own hook sets scales what it gives."""

    scale = 1.0

    def make(self, hidden, dropout):
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.scale * self.net(x)

    def on_train_epoch_start(self):
        self.scale = 2.0


def test_the_expert_trains_beside_a_global_model_in_eval_mode():
    """Running statistics, a module's own hook, clipping and uniform weights, in plain torch in double precision."""
    sizes = {"0": 16, "1": 24}
    data, module = toy_data(sizes), made(Scaled)
    start = copy.deepcopy(module.net).double()
    trainer = federate(module, data, [FLDE(weighting="uniform")], max_rounds=1, gradient_clip_val=0.05)
    world = {}
    for client in sizes:
        own, other = copy.deepcopy(start), copy.deepcopy(start)
        gate = nn.Linear(8, 1).double()
        nn.init.zeros_(gate.weight), nn.init.zeros_(gate.bias)
        mine = [*other.parameters(), *gate.parameters()]
        steps = [torch.optim.SGD(mine, 0.1), torch.optim.SGD(own.parameters(), 0.1)]
        for x, y in batches(data, client):
            x = x.double()
            with torch.no_grad():
                logits, phi = 2 * own.eval()(x), own[:-1](x)
            a = torch.sigmoid(gate(phi))
            mixed = a * logits.softmax(1) + (1 - a) * (2 * other(x)).softmax(1)
            losses = F.nll_loss(mixed.log(), y), F.cross_entropy(2 * own.train()(x), y)
            for step, loss, moved in zip(steps, losses, (mine, list(own.parameters())), strict=True):
                step.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(moved, 0.05)
                step.step()
        found = expert(trainer, client)
        close({n: found[f"net.{n}"] for n in other.state_dict()}, other.state_dict())
        assert int(found["net.1.num_batches_tracked"]) == sizes[client] // 8
        for name, value in own.state_dict().items():
            world[f"net.{name}"] = world.get(f"net.{name}", 0) + value / 2
    close(
        {n: v for n, v in global_state(trainer).items() if v.is_floating_point() and n in world},
        {n: v for n, v in world.items() if "num_batches" not in n},
    )


def test_the_mixture_is_taken_in_single_precision_at_least():
    half = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert mix_probabilities(half, half, torch.zeros(2)).dtype == torch.float32
    assert mix_probabilities(half.double(), half.double(), torch.zeros(2)).dtype == torch.float64


def test_models_in_double_and_steps_in_bfloat16_run():
    double = federate(made().double(), fixed_data([16, 24]), [FLDE()], max_rounds=1)
    assert {found.dtype for found in expert(double).values()} == {torch.float64}
    low = federate(made(), toy_data({"0": 16, "1": 24}), [FLDE()], max_rounds=1, precision="bf16-true")
    assert differs(expert(low), {**global_state(low), **dict.fromkeys(GATE, torch.zeros(1))})


class Filtered(Toy):
    """Its optimizer has what trains, and it makes nothing of the first batch of an epoch."""

    skips = False

    def on_train_epoch_start(self):
        self.skips = True

    def training_step(self, batch, batch_idx):
        return None if self.skips and batch_idx == 0 else super().training_step(batch, batch_idx)

    def forward(self, x):
        self.log_dict({"first": x.mean()})
        return super().forward(x)

    def configure_optimizers(self):
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], 0.1)


def test_the_gate_trains_beside_frozen_entries_that_are_in_no_optimizer():
    module = made(Filtered)
    module.net[0].weight.requires_grad_(False)
    trainer, spy = spied(module, toy_data(SIZES), [FLDE()], max_rounds=1)
    assert not [update.error for update in spy.updates if update.error]
    assert expert(trainer)[GATE[0]].abs().max() > 0


# -- what M_G is -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
@pytest.mark.parametrize("beside", [(), (FedProx(mu=0.5), FedAdam())], ids=["alone", "FedProx FedAdam"])
def test_the_server_is_that_of_a_run_without_it(make, beside):
    module, given = made(make), {"participation": 2, "max_rounds": 3, "gradient_clip_val": 0.5}
    with_it = federate(module, toy_data(SIZES), [FLDE(), *copy.deepcopy(beside)], **given)
    same(global_state(with_it), global_state(federate(module, toy_data(SIZES), [FedAvg(), *beside], **given)))


def test_a_diverged_expert_is_not_kept_and_does_not_disturb():
    module = made()
    with pytest.warns(UserWarning, match="keeps the expert that it had"):
        trainer = federate(module, toy_data(SIZES), [FLDE(mix="outputs", lr_factor=1e30)])
    same(global_state(trainer), global_state(federate(module, toy_data(SIZES), [FedAvg()])))
    assert all("FLDE" not in trainer.store.get(client).state for client in SIZES)


# -- the ends of the gate ----------------------------------------------------------------------------------------------
def test_a_gate_that_is_open_is_fedavg_and_one_that_is_shut_is_training_alone():
    module = made()
    one, alone, shut = (
        federate(module, toy_data(SIZES), [method], max_rounds=3, optimizer_state="reset")
        for method in (FLDE(gate_bias=1e4), Local(), FLDE(gate_bias=-1e4))
    )
    for client in SIZES:
        with torch.no_grad():
            received = one.server.module_with(one.server.model)(X).softmax(1)
        torch.testing.assert_close(probabilities(one, client), received)
        torch.testing.assert_close(probabilities(shut, client), probabilities(alone, client))
    assert not torch.allclose(probabilities(one), probabilities(shut), atol=1e-3)


def test_each_input_has_a_share_of_its_own_between_0_and_1():
    trainer = federate(made(), toy_data(SIZES), [FLDE(gate_input="input")])
    for client in SIZES:
        found = expert(trainer, client)
        share = (X @ found[GATE[0]].T + found[GATE[1]]).sigmoid()
        assert 0 < share.min() < share.max() < 1


def test_shares_sum_to_one_over_classes_and_never_leave():
    trainer, spy = spied(made(), toy_data(SIZES), [FLDE()], max_rounds=2, participation=2)
    for update in spy.updates:
        assert not [name for name in update.state if "expert" in name or "gate" in name] and not update.extras
    torch.testing.assert_close(trainer.module("0")(X).exp().sum(1), torch.ones(9))
    absent_clients_rest(spy)


# -- stages, newcomers, resume -----------------------------------------------------------------------------------------
def test_a_client_that_never_trained_deploys_the_global_model_and_begins_from_the_first_one():
    module = made()
    trainer = federate(module, toy_data(SIZES), [FLDE()], max_rounds=2, held_out=["2"])
    held = [name for name in trainer.server.model if "expert" in name]
    assert not held and "FLDE" not in trainer.store.get("2").state
    same(module_state(trainer.module("2")), global_state(trainer))


def test_resume(tmp_path):
    for given in ({}, {"optimizer_state": "keep"}):
        root = tmp_path / str(len(given))
        whole, cut, again = cut_and_resumed(
            root, made(NormNet, "momentum"), toy_data(SIZES), lambda: [FLDE()], max_rounds=3, participation=2, **given
        )
        same(global_state(whole), global_state(again))
        for client in SIZES:
            same(module_state(whole.module(client)), module_state(again.module(client)))
        assert differs(expert(whole), expert(cut))


def test_it_stands_beside_layers_at_home_and_frozen_entries():
    module = made(NormNet, "adam")
    module.net[0].weight.requires_grad_(False)
    trainer = federate(module, toy_data(SIZES), [FLDE(), FedBN()])
    assert not expert(trainer)["net.0.weight"].numel()  # a record has no frozen network: it is kept once for all
    same({"w": module_state(trainer.module("0"))["net.0.weight"]}, {"w": module.net[0].weight})
    assert differs({"w": expert(trainer)["net.3.weight"]}, {"w": module.net[3].weight})


# -- without noise beside SampleDP -------------------------------------------------------------------------------------
@pytest.fixture
def draws_by_visit(monkeypatch):
    """Let SampleDP draw by the number of the visit alone, not also by the record, which holds the expert."""
    start = SampleDP.on_visit_start

    def on_visit_start(self, client):
        start(self, client)
        client.scratch[self.key] = str(client.visit)

    monkeypatch.setattr(SampleDP, "on_visit_start", on_visit_start)


@pytest.mark.usefixtures("draws_by_visit")
@pytest.mark.filterwarnings("ignore:SampleDP", "ignore:Optimal order", "ignore:.*LeafSpec", "ignore:.*exploded")
def test_the_expert_has_no_noise_where_the_global_model_is_noise():
    data, given = toy_data({"0": 64, "1": 64}), {"max_rounds": 4, "local_epochs": 4}
    trainer, other = (
        federate(made(), data, [FLDE(gate_bias=bias, lr_factor=3.0), noisy(noise_multiplier=200.0)], **given)
        for bias in (-4.0, 4.0)
    )
    x, y = data.tensors["0"]["train"]
    with torch.no_grad():
        accuracy = [
            float((model.eval()(x).argmax(1) == y).float().mean())
            for model in (trainer.module("0"), trainer.server.module_with(trainer.server.model))
        ]
    assert global_state(trainer)["net.3.weight"].abs().max() > 20 > expert(trainer)["net.3.weight"].abs().max()
    assert accuracy[0] > 0.85 > accuracy[1] + 0.1
    same(global_state(trainer), global_state(other))  # noise and clipping read neither expert nor gate


@pytest.mark.usefixtures("draws_by_visit")
@pytest.mark.filterwarnings("ignore:SampleDP", "ignore:Optimal order", "ignore:.*LeafSpec")
def test_beside_sample_dp_the_server_and_epsilon_are_those_without_experts():
    """sigma > 0 and any clip: the released model does not know that there are experts."""
    runs = [federate(made(), toy_data(SIZES), [*methods, noisy(clip=0.5)], max_rounds=2) for methods in ([FLDE()], [])]
    same(*(global_state(run) for run in runs))
    spent = [run.server.state["SampleDP"]["epsilon"] for run in runs]
    assert spent[0] == spent[1] and set(spent[0]) == set(SIZES)


@pytest.mark.filterwarnings("ignore:SampleDP", "ignore:Optimal order", "ignore:.*LeafSpec")
@pytest.mark.parametrize(("method", "cover"), [(FLDE(), "in_the_clear"), (APFL(), "in_the_clear"), (Ditto(), "noised")])
def test_checkpoints_of_models_without_noise_are_not_called_noised(tmp_path, method, cover):
    trainer = federate(made(), toy_data(SIZES), [method, noisy()], tmp_path, max_rounds=1)
    told = json.loads((trainer.run.path / "privacy.json").read_text())
    assert any(item.startswith("models of clients") for item in told[cover])


# -- what is refused ---------------------------------------------------------------------------------------------------
class Regression(Toy):
    """A mean squared error on one number."""

    def make(self, hidden, dropout):
        return nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def training_step(self, batch, batch_idx):
        return (self(batch[0])[:, 0] - batch[1]).square().mean()

    def score(self, batch, split):
        self.log(f"{split}_loss", self.training_step(batch, 0))


class Sequence(Toy):
    """Two rows a sample go into the last layer."""

    def forward(self, x):
        return self.net(x.repeat(1, 2).reshape(-1, 2, FEATURES)).mean(1)


class Closures(Toy):
    """An optimizer that evaluates the loss again."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.1)


class Labels(Toy):
    """Several labels a sample: no softmax."""

    def training_step(self, batch, batch_idx):
        return F.binary_cross_entropy_with_logits(self(batch[0]), F.one_hot(batch[1], 3).float())


class Shows(Toy):
    """Trains through `self(x)`, and scores past it."""

    def score(self, batch, split):
        self.log(f"{split}_loss", F.cross_entropy(self.net(batch[0]), batch[1]))


def binary(low=0, high=1):
    data = toy_data(SIZES)
    tensors = {
        client: {split: (x, low + (high - low) * (y > 0).long()) for split, (x, y) in splits.items()}
        for client, splits in data.tensors.items()
    }
    return ToyData(tensors)


@pytest.mark.parametrize(
    ("kind", "data", "options", "words"),
    [
        (NetStyle, toy_data, {}, "does not call self"),
        (PiecesStyle, toy_data, {}, "does not call self"),
        (Regression, toy_data, {}, "not a cross entropy"),
        (Regression, binary, {}, "not a cross entropy"),
        (Regression, lambda: binary(-5, 5), {}, "not a cross entropy"),  # slopes as of two classes
        (Sequence, toy_data, {}, "one row a sample"),
        (Closures, toy_data, {}, "FLDE trains a second model by a second LBFGS"),
        (Labels, toy_data, {}, "not a cross entropy"),
        (Toy, toy_data, {"head": "net.1"}, "which is to be a linear layer"),
        (Toy, toy_data, {"head": "net.9"}, "net.9"),
    ],
)
def test_refused_before_round_1(tmp_path, kind, data, options, words):
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path, [FLDE(**options)]).fit(
            made(kind), datamodule=data(SIZES) if data is toy_data else data()
        )


@pytest.mark.parametrize(
    ("change", "words"), [("local_phases", "two models in one fit"), ("wrap_module", "a gate and an expert")]
)
def test_others_that_train_in_phases_or_rebuild_the_module_are_refused(change, words):
    Other = type("Other", (FederatedCallback,), {change: lambda self, first, *rest: first})
    with pytest.raises(ValueError, match=words):
        make_trainer(None, [FLDE(), Other()]).fit(made(), datamodule=toy_data(SIZES))


def test_a_score_that_goes_past_forward_is_no_score(tmp_path):
    with pytest.raises(RuntimeError, match="validation_step of Shows never calls self"):
        federate(made(Shows), toy_data(SIZES), [FLDE()], tmp_path)


def test_regression_and_two_classes_run(tmp_path):
    trainer = federate(made(Regression), toy_data(SIZES), [FLDE(mix="outputs", gate_input="input")])
    assert trainer.module("0")(X).shape == (9, 1)
    torch.manual_seed(0)
    trainer = federate(Classifier(MLP(FEATURES, [5], 1), num_classes=1), binary(), [FLDE()], tmp_path)
    assert trainer.module("0")(X).numel() == 9 and "FLDE" in trainer.store.get("0").state
