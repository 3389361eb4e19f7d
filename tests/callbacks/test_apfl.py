"""APFL: sheet entry 14."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional as F

from fedlightning.algorithm import Facts, ModelSelection
from fedlightning.callbacks import APFL, FedAvg, FedProx, Local
from fedlightning.callbacks.apfl import alpha_slope, mix, next_alpha
from fedlightning.commands.run import Commands
from fedlightning.contract import FederatedCallback
from fedlightning.tensors import module_state
from tests.callbacks.common import SIZES, batches
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NetStyle,
    NormNet,
    PiecesStyle,
    Toy,
    close,
    differs,
    federate,
    global_state,
    make_trainer,
    mostly_slow,
    same,
    spied,
    toy_data,
)

CASES = {
    "APFL": Case(APFL(), neutral=APFL(alpha=0.0, adaptive=False)),
    "APFL logits": Case(APFL(mix="logits"), neutral=APFL(alpha=0.0, adaptive=False, mix="logits")),
}
KEPT = {
    "APFL": Kept("APFL", client=("alpha", "v")),
    "APFL keep": Kept(
        "APFL",
        client=("alpha", "optimizer", "rates", "v"),
        options={"mix": "logits"},
        arguments={"optimizer_state": "keep"},
    ),
}

MIXES = ["params", "logits"]
QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"


def own(trainer, client="0"):
    return trainer.store.get(client).state["APFL"]


class ByHand:
    """The pseudocode on one client: simultaneous steps of w, v and, on the first batch, a."""

    def __init__(
        self, w, alpha=0.5, mix="params", lr=0.1, alpha_lr=None, adaptive=True, alpha_decay=0.0, clip=0.0, window=1
    ):
        self.w, self.v, self.alpha, self.mix = copy.deepcopy(w), copy.deepcopy(w), alpha, mix
        self.lr, self.alpha_lr, self.adaptive, self.decay = (
            lr,
            lr if alpha_lr is None else alpha_lr,
            adaptive,
            alpha_decay,
        )
        self.clip, self.window = clip, window

    def mixture(self, x):
        a = torch.tensor(self.alpha, requires_grad=True)
        v = {n: p.detach().clone().requires_grad_() for n, p in self.v.named_parameters()}
        w = {n: p.detach() for n, p in self.w.named_parameters()}
        call = torch.func.functional_call
        if self.mix == "params":
            h = call(self.w, {n: a * v[n] + (1 - a) * w[n] for n in w}, (x,))
        else:
            h = a * call(self.w, v, (x,)) + (1 - a) * call(self.w, w, (x,))
        return h, v, a

    def round(self, batches):
        step_v, step_w = {}, {}
        next_alpha = self.alpha
        for index, (x, y) in enumerate(batches):
            h, v, a = self.mixture(x)
            *gradient, slope = torch.autograd.grad(F.cross_entropy(h, y), [*v.values(), a])
            if index == 0 and self.adaptive:
                next_alpha = min(max(self.alpha - self.alpha_lr * (float(slope) + self.decay * self.alpha), 0.0), 1.0)
            of_w = torch.autograd.grad(F.cross_entropy(self.w(x), y), list(self.w.parameters()))
            for total, found in ((step_v, gradient), (step_w, of_w)):
                for name, g in zip(v, found, strict=True):
                    total[name] = total.get(name, 0) + g / self.window
            if (index + 1) % self.window == 0 or index + 1 == len(batches):
                for model, step in ((self.v, step_v), (self.w, step_w)):
                    norm = sum(float(g.square().sum()) for g in step.values()) ** 0.5
                    factor = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
                    with torch.no_grad():
                        for name, parameter in model.named_parameters():
                            parameter -= self.lr * factor * step[name]
                self.alpha, step_v, step_w = next_alpha, {}, {}


# -- the step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alpha": 0.25, "adaptive": False},
        {"alpha_lr": 0.7},
        {"alpha_decay": 0.02},
        {"clip": 0.05},
        {"window": 2},
        {"window": 3, "clip": 0.05},
    ],
    ids=str,
)
def test_rounds_by_hand(mix, options):
    """The gradient at the vbar of before the step, a moved once on the first batch, clipping, a ragged last window."""
    module, data = Toy(), toy_data({"0": 40})
    hand = ByHand(module, mix=mix, **options)
    trainer_options = {"gradient_clip_val": options.get("clip"), "accumulate_grad_batches": options.get("window", 1)}
    apfl = APFL(mix=mix, **{name: value for name, value in options.items() if name not in ("clip", "window")})
    alphas = []
    trainer, spy = spied(module, data, [apfl], max_rounds=3, **trainer_options)
    for number in range(3):
        hand.round(list(batches(data, "0", round=number)))
        alphas.append(spy.records[number]["0"].state["APFL"]["alpha"])
        assert alphas[-1] == pytest.approx(hand.alpha, rel=1e-5)
    close(own(trainer)["v"], module_state(hand.v))
    close(global_state(trainer), module_state(hand.w))
    assert any(alpha != apfl.alpha for alpha in alphas) == options.get(
        "adaptive", True
    )  # a may move by a last bit only
    deployed = trainer.module("0")
    x = torch.randn(5, 6)
    torch.testing.assert_close(deployed(x), hand.mixture(x)[0].detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mix", MIXES)
def test_the_derivative_of_alpha_is_exact(mix):
    """Entry 14 (e): against a central difference in double precision."""

    class Double(Toy):
        def make(self, hidden, dropout):
            return super().make(hidden, dropout).double()

        def training_step(self, batch, batch_idx):
            return super().training_step((batch[0].double(), batch[1]), batch_idx)

        def score(self, batch, split):
            super().score((batch[0].double(), batch[1]), split)

    module, data, rate = Double(), toy_data({"0": 8}), 1e-3
    _, spy = spied(module, data, [APFL(alpha=0.3, alpha_lr=rate, mix=mix)], max_rounds=3, lr_decay=0.9)
    before, after = spy.records[1]["0"].state["APFL"], spy.records[2]["0"].state["APFL"]
    ((x, y),) = batches(data, "0", round=2)
    w, a = spy.rounds[1], before["alpha"]

    def loss(share):
        call = torch.func.functional_call
        if mix == "params":
            h = call(module, {n: share * before["v"][n] + (1 - share) * w[n] for n in w}, (x.double(),))
        else:
            h = share * call(module, before["v"], (x.double(),)) + (1 - share) * call(module, dict(w), (x.double(),))
        return float(F.cross_entropy(h, y))

    slope = (loss(a + 1e-5) - loss(a - 1e-5)) / 2e-5
    assert abs(slope) > 1e-5
    # logits keep alpha as a float32 buffer
    assert (a - after["alpha"]) / rate == pytest.approx(slope, rel=1e-5 if mix == "params" else 1e-3)


def test_the_rule_for_one_client_is_the_rule_for_a_stack():
    torch.manual_seed(0)
    v, w, gradients = ({"a": torch.randn(3, 4, 5), "b": torch.randn(3, 2)} for _ in range(3))
    slopes = alpha_slope(v, w, gradients, stacked=True)
    for row in range(3):
        of_row = [{name: value[row] for name, value in state.items()} for state in (v, w, gradients)]
        assert float(slopes[row]) == pytest.approx(float(alpha_slope(*of_row)), rel=1e-12)
        by_hand = sum(float(((v[n] - w[n]) * gradients[n])[row].sum()) for n in v)
        assert float(slopes[row]) == pytest.approx(by_hand, rel=1e-5)
    torch.testing.assert_close(mix(v["a"], w["a"], 0.25), 0.25 * v["a"] + 0.75 * w["a"])
    assert next_alpha(0.5, slope=0.2, lr=0.1, decay=0.4) == pytest.approx(0.5 - 0.1 * (0.2 + 0.4 * 0.5))
    assert (next_alpha(0.5, 9.0, 1.0), next_alpha(0.5, -9.0, 1.0)) == (0.0, 1.0)


@pytest.mark.parametrize("mix", MIXES)
def test_equal_models_give_no_slope(mix):
    """Entry 14 (f): in round 1 v = w, so a stays."""
    trainer = federate(Toy(), toy_data(SIZES), [APFL(alpha=0.4, alpha_lr=100.0, mix=mix)], max_rounds=1)
    assert [own(trainer, client)["alpha"] for client in SIZES] == pytest.approx([0.4] * 3, abs=1e-5)


@pytest.mark.parametrize("mix", MIXES)
def test_alpha_stays_a_share(mix):
    _, spy = spied(Toy(), toy_data(SIZES), [APFL(alpha_lr=1e3, mix=mix)], max_rounds=4)
    found = {record.state["APFL"]["alpha"] for records in spy.records for record in records.values()}
    assert all(0.0 <= alpha <= 1.0 for alpha in found) and found & {0.0, 1.0}


@pytest.mark.parametrize("mix", MIXES)
def test_alpha_moves_under_accumulation(mix):
    options = {"max_rounds": 2, "accumulate_grad_batches": 4}
    trainer = federate(Toy(), toy_data({"0": 40}), [APFL(alpha_lr=1.0, mix=mix)], **options)
    assert own(trainer)["alpha"] != 0.5


# -- what it must not change -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"alpha": 0.0}, {}, {"alpha": 1.0}, {"mix": "logits"}], ids=str)
@pytest.mark.parametrize("make", [lambda: Toy("momentum", dropout=0.4), lambda: NormNet("adam")])
def test_the_server_follows_fedavg_bit_for_bit(options, make):
    """Entry 14 (d), with dropout and batch statistics, and what it logs."""
    module, data = make(), toy_data(SIZES)
    callback, run = (
        APFL(**options),
        {"max_rounds": 3, "gradient_clip_val": 0.3, "accumulate_grad_batches": 2, "participation": 2},
    )
    (plain, a), (ours, b) = (spied(module, data, [cb], **run) for cb in (FedAvg(), callback))
    for x, y in zip(a.rounds, b.rounds, strict=True):
        same(x, y)
    assert [u.metrics for u in a.updates] == [u.metrics for u in b.updates]
    assert plain.server.costs.bytes_up == ours.server.costs.bytes_up and not any(u.extras for u in b.updates)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("make", [lambda: Toy("adamw"), lambda: NormNet("momentum")])
def test_a_share_of_zero_is_the_global_model(mix, make):
    """Entry 14 (b): nothing of v moves, not even by weight decay."""
    module, data = make(), toy_data(SIZES)
    trainer = federate(module, data, [APFL(alpha=0.0, adaptive=False, mix=mix)], max_rounds=3)
    x = torch.randn(5, 6)
    for client in SIZES:
        same(own(trainer, client)["v"], module_state(module))
        expected, found = trainer.module()(x), trainer.module(client)(x)
        assert torch.equal(expected, found)
    if mix == "params":
        same(module_state(trainer.module("0")), global_state(trainer))


def test_an_adaptive_share_of_zero_does_not_let_weight_decay_at_v():
    """The derivative is taken on the first batch, but a step of size zero is none, whatever the optimizer does."""
    module = Toy("adamw")
    trainer = federate(module, toy_data(SIZES), [APFL(alpha=0.0, alpha_lr=0.0)], max_rounds=2)
    same(own(trainer)["v"], module_state(module))


@pytest.mark.parametrize(
    "make", [lambda: Toy("adamw"), *mostly_slow([lambda: NormNet("momentum"), lambda: PiecesStyle("steplr")], [])]
)
def test_a_share_of_one_is_local_training_bit_for_bit(make):
    """Entry 14 (c)."""
    module, data = make(), toy_data(SIZES)
    options = {"max_rounds": 3, "local_epochs": 2, "gradient_clip_val": 0.3, "optimizer_state": "keep"}
    ours = federate(module, data, [APFL(alpha=1.0, adaptive=False)], **options)
    theirs = federate(module, data, [Local()], **options)
    for client in SIZES:
        same(module_state(ours.module(client)), module_state(theirs.module(client)))


def test_a_share_of_one_by_logits_is_local_training():
    module, data = NormNet("momentum"), toy_data(SIZES)
    options = {"max_rounds": 3, "optimizer_state": "keep"}
    ours = federate(module, data, [APFL(alpha=1.0, adaptive=False, mix="logits")], **options)
    theirs = federate(module, data, [Local()], **options)
    close(own(ours)["v"], module_state(theirs.module("0")))


@pytest.mark.parametrize("optimizer", ["onecycle", "steplr"])
@pytest.mark.parametrize("state", ["reset", "keep"])
def test_schedules_of_w_are_those_of_v(optimizer, state):
    """Learning rates and the momentum that OneCycleLR moves, warm restarts or not; a = 1 makes v a local model."""
    module, data = Toy(optimizer), toy_data({"0": 40})
    options = {"max_rounds": 2, "optimizer_state": state, "lr_decay": 0.5}
    ours = federate(module, data, [APFL(alpha=1.0, adaptive=False)], **options)
    same(module_state(ours.module("0")), module_state(federate(module, data, [Local()], **options).module("0")))


def test_optimizers_of_v_start_anew_or_go_on():
    module, data = Toy("adam"), toy_data(SIZES)
    results = {}
    for state in ("reset", "keep"):
        trainer = federate(module, data, [APFL(alpha=1.0, adaptive=False)], optimizer_state=state)
        assert ("optimizer" in own(trainer)) == (state == "keep")
        results[state] = own(trainer)["v"]
    assert differs(results["reset"], results["keep"])


class FailsIn(FederatedCallback):
    """A client whose visit fails after training."""

    def __init__(self, round):
        self.round = round

    def on_send(self, client, update):
        if client.round == self.round and client.id == "0":
            raise RuntimeError("the line is dead")


def test_a_failed_visit_leaves_v_and_its_optimizer_as_they_were():
    """State tensors are replaced, never edited: a copy of the kept momentum trains, not the momentum itself."""
    module, data = Toy("adam"), toy_data(SIZES)
    trainer = federate(module, data, [APFL()], max_rounds=1, optimizer_state="keep")
    kept = copy.deepcopy(own(trainer))
    with pytest.warns(UserWarning, match="the line is dead"):
        trainer = federate(module, data, [APFL(), FailsIn(1)], max_rounds=2, optimizer_state="keep")
    now = own(trainer)
    same(now["v"], kept["v"])
    for state, before in zip(now["optimizer"]["state"].values(), kept["optimizer"]["state"].values(), strict=True):
        same(state, before)


def test_absent_clients_keep_v_and_alpha_and_take_the_present_w():
    trainer, spy = spied(Toy(), toy_data(SIZES), [APFL()], max_rounds=5, participation=1)
    for number in range(1, 5):
        for client in SIZES:
            if client not in spy.of_round(number):
                before, after = spy.records[number - 1][client], spy.records[number][client]
                assert after is before or not after.visits
    client = next(iter(spy.of_round(1)))
    kept, w = own(trainer, client), global_state(trainer)
    expected = {name: kept["alpha"] * kept["v"][name] + (1 - kept["alpha"]) * w[name] for name in w}
    close(module_state(trainer.module(client)), expected)


def test_l2_is_scored_with_the_local_w_and_l1_with_the_received_one(tmp_path):
    seen = []

    class Look(ModelSelection):
        def on_client_evaluated(self, client, stage, split, metrics, module):
            kept = client.state["APFL"]
            w = module_state(client.module)
            mixed = {n: kept["alpha"] * kept["v"][n] + (1 - kept["alpha"]) * w[n] for n in w}
            close(module_state(module), mixed)
            seen.append((stage, client.id, mixed))

    trainer = federate(Toy(), toy_data(SIZES), [APFL(), Look()], root=tmp_path, max_rounds=1)
    assert {stage for stage, *_ in seen} == {"L1", "L2"}
    l1, l2 = (next(m for s, c, m in seen if (s, c) == (stage, "1")) for stage in ("L1", "L2"))
    assert differs(l1, l2)
    assert {row.stage for row in trainer.rows} == {"G", "L1", "L2"}


# -- batch statistics, precision, other networks -----------------------------------------------------------------------


def test_buffers_of_the_deployed_model_are_those_that_training_v_moved():
    module, data = NormNet(), toy_data({"0": 24})
    trainer = federate(module, data, [APFL(alpha=0.5, adaptive=False)], max_rounds=1)
    kept = own(trainer)["v"]
    assert int(kept["net.1.num_batches_tracked"]) == 3 and differs(kept, global_state(trainer))
    deployed = module_state(trainer.module("0"))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(deployed[f"net.1.{name}"], kept[f"net.1.{name}"])
    # by hand: one pass at vbar, whose running mean moves by momentum 0.1 a batch
    hand = ByHand(nn.Sequential(*module.net), adaptive=False)
    mean = torch.zeros(8)
    for x, y in batches(data, "0"):
        vbar = {n: 0.5 * v + 0.5 * dict(hand.w.named_parameters())[n] for n, v in hand.v.named_parameters()}
        mean = 0.9 * mean + 0.1 * F.linear(x, vbar["0.weight"], vbar["0.bias"]).mean(0)
        hand.round([(x, y)])
    torch.testing.assert_close(kept["net.1.running_mean"], mean, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mix", MIXES)
def test_steps_that_the_scaler_skips_move_neither_w_nor_v_nor_alpha(mix):
    module, data = Toy("momentum"), toy_data({"0": 80})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)  # overflows for ever in one round
    apfl = APFL(alpha_lr=1.0, mix=mix)
    trainer, spy = spied(module, data, [apfl], max_rounds=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    skipped = spy.updates[0].skipped
    assert skipped >= 10 - spy.updates[0].steps > 0
    if spy.updates[0].steps == 0:
        same(own(trainer)["v"], module_state(module))
        assert own(trainer)["alpha"] == 0.5


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**20])
@pytest.mark.fast_cases(1)
def test_fp16_is_near_fp32(mix, scale):
    """Scaled gradients of v are unscaled before clipping; the first steps of the largest scale are skipped."""
    torch.manual_seed(1)
    module, data = Toy(), toy_data({"0": 160})
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
    half = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    runs = [
        federate(module, data, [APFL(mix=mix, alpha_lr=0.5)], max_rounds=2, gradient_clip_val=0.5, **options)
        for options in ({}, half)
    ]
    exact = scale < 2.0**20
    close(own(runs[1])["v"], own(runs[0])["v"], atol=0.02 if exact else 0.3, rtol=0.02)
    assert own(runs[1])["alpha"] == pytest.approx(own(runs[0])["alpha"], abs=0.01 if exact else 0.1)
    assert all(torch.isfinite(value).all() for value in own(runs[1])["v"].values())


class Steep(Toy):
    """Its gradients are 64 times those of the module's own: under fp16 they overflow where the others do not."""

    def forward(self, x):
        return 64 * self.net(x)


def test_a_step_where_only_v_overflows_is_a_step_of_w_only():
    personal, data = Steep(), toy_data({"0": 80})
    half = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**15))]}
    trainer, spy = spied(
        Toy(), data, [APFL(mix="logits", personal_model=personal, adaptive=False)], max_rounds=1, **half
    )
    assert spy.updates[0].steps > 0
    same(own(trainer)["v"], module_state(personal))


def test_a_personal_model_that_diverges_is_a_failed_client():
    class Explodes(Toy):
        def __init__(self, *args):
            super().__init__()
            self.net[3].weight.data *= 1e38

    apfl = APFL(mix="logits", personal_model=Explodes(), alpha=1.0, adaptive=False)
    with pytest.raises(RuntimeError, match=r"'net.*' of the personal model holds NaN or infinite values"):
        federate(Toy(), toy_data({"0": 24}), [apfl])


class Wide(Toy):
    """Another network with attributes of the same names."""

    def __init__(self, lr=0.03, hidden=20):
        super().__init__("momentum", lr=lr, hidden=hidden)

    def forward(self, x):
        assert self.optimizer_name == "momentum"
        return self.net(x)


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_another_network_as_personal_model(precision):
    module, data = Toy("steplr"), toy_data(SIZES)
    personal = Wide()
    options = {"max_rounds": 4, "precision": precision, "optimizer_state": "keep"}
    trainer, spy = spied(module, data, [APFL(mix="logits", personal_model=personal)], **options)
    same(global_state(trainer), global_state(federate(module, data, **options)))
    assert own(trainer)["v"]["net.0.weight"].shape == (20, 6) and differs(own(trainer)["v"], module_state(personal))
    assert own(trainer)["optimizer"]["param_groups"][0]["momentum"] == 0.9
    # its own rate, halved as StepLR has halved that of w after two epochs, at the border of two visits
    assert own(trainer)["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.015)
    size = sum(value.numel() * value.element_size() for value in global_state(trainer).values())
    assert {update.num_bytes for update in spy.updates} == {size}


class Stateful(NetStyle):
    """Its own hooks set what its step needs, collect outputs, freeze a part by eval() and skip a batch."""

    def __init__(self):
        super().__init__()
        self.outputs = []
        self.sizes = []

    def make(self, hidden, dropout):
        return nn.Sequential(nn.Linear(6, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.5), nn.Linear(hidden, 3))

    def on_train_start(self):
        self.net[1].eval()
        self.net[2].eval()

    def on_train_epoch_start(self):
        self.forward = self.forward  # as Lightning does under DDP: a bound method on the instance
        self.temperature = torch.tensor(2.0)
        self.seen = []

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            return None
        assert not self.net[1].training
        loss = F.cross_entropy(self.net(batch[0]) / self.temperature, batch[1])
        self.outputs.append(float(loss))
        self.seen.append(batch_idx)
        return loss

    def on_train_epoch_end(self):
        self.sizes.append((len(self.outputs), len(self.seen)))
        self.log("sizes", float(len(self.outputs)))


def test_a_module_whose_hooks_hold_state():
    """What only the module's hooks know reaches its twin; what the twin collects does not reach the module."""
    module, data = Stateful(), toy_data({"0": 24})
    trainer, spy = spied(module, data, [APFL(alpha_lr=1.0)], max_rounds=2)
    assert spy.updates[0].metrics["sizes"] == 2.0 and spy.updates[0].error is None
    kept = own(trainer)
    assert int(kept["v"]["net.1.num_batches_tracked"]) == 0  # in eval mode, as the module's own
    assert differs(kept["v"], module_state(module)) and kept["alpha"] != 0.5


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"alpha": 1.5}, r"APFL got alpha=1\.5\. Use a number in \[0, 1\]"),
        ({"mix": "weights"}, "mix='weights'. Use 'params'"),
        ({"personal_model": Toy()}, "Set mix='logits'"),
        (
            {"personal_model": nn.Linear(6, 3), "mix": "logits"},
            "got personal_model=.*Use a LightningModule, or None. It says how v trains",
        ),
    ],
)
def test_wrong_arguments(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        APFL(**options)


def test_the_personal_model_in_yaml(tmp_path):
    wide = {"net": {"class_path": "DigitsCNN", "init_args": {"norm": "batch"}}, "num_classes": 10}
    apfl = {"mix": "logits", "personal_model": {"class_path": "fedlightning.models.Classifier", "init_args": wide}}
    config = {"trainer": {"callbacks": [{"class_path": "fedlightning.callbacks.APFL", "init_args": apfl}]}}
    (tmp_path / "apfl.yaml").write_text(yaml.safe_dump(config))
    words = ["--config", str(QUICKSTART), "--config", str(tmp_path / "apfl.yaml"), "--data.max_train=150"]
    found = Commands("fit", [*words, f"--trainer.default_root_dir={tmp_path}"]).trainer.callbacks.find(APFL)
    assert any(isinstance(child, nn.BatchNorm2d) for child in found.personal_model.modules())


class Manual(Toy):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Phases(FederatedCallback):
    def local_phases(self, client):
        return []


@pytest.mark.parametrize(
    ("module", "callbacks", "sentence"),
    [
        (Manual(), [APFL()], "beside Manual, which optimizes manually. Use FedPer"),
        (NetStyle(), [APFL(mix="logits")], r"NetStyle.training_step does not call self\(x\).*Use APFL\(mix='params'\)"),
        (PiecesStyle(), [APFL(mix="logits")], r"PiecesStyle.training_step does not call self\(x\)"),
        (Toy(), [APFL(), Phases()], "APFL trains two models in one fit, and Phases fits several times"),
        (Toy(), [APFL(), APFL()], "APFL is in the list of callbacks 2 times"),
    ],
)
def test_what_cannot_work_is_refused_at_start(module, callbacks, sentence):
    with pytest.raises(ValueError, match=sentence):
        federate(module, toy_data(SIZES), callbacks)


@pytest.mark.parametrize("make", [Toy, NetStyle, PiecesStyle])
def test_any_style_of_module(make):
    """Same numbers, whether the step calls forward, the network or its parts."""
    module, data = make(), toy_data(SIZES)
    trainer = federate(module, data, [APFL(), FedProx(mu=0.1)])
    assert differs(own(trainer)["v"], module_state(module))


# -- resume ------------------------------------------------------------------------------------------------------------


class Stop(FederatedCallback):
    facts = Facts(takes_part=False)

    def on_round_start(self, server):
        if server.round == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize(("mix", "state"), [("params", "reset"), ("params", "keep"), ("logits", "keep")])
def test_resumed_is_uninterrupted(tmp_path, mix, state):
    options = {"max_rounds": 4, "optimizer_state": state, "participation": 2, "evaluation": 0}
    module, data = NormNet("adam"), toy_data(SIZES)
    whole = federate(module, data, [APFL(mix=mix)], root=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        federate(module, data, [APFL(mix=mix), Stop()], root=tmp_path / "cut", **options)
    again = make_trainer(tmp_path / "cut", [APFL(mix=mix)], **options)
    again.fit(NormNet("adam"), datamodule=data, resume="last")
    for client in SIZES:
        a, b = own(whole, client), own(again, client)
        same(a["v"], b["v"])
        assert a["alpha"] == b["alpha"]
        same(module_state(whole.module(client)), module_state(again.module(client)))
    same(global_state(whole), global_state(again))


class ByClosure(Toy):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.1)


def test_an_optimizer_that_needs_a_closure_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="APFL trains a second model by a second LBFGS, whose step evaluates the loss again"
    ):
        federate(ByClosure(), toy_data(), [APFL()], tmp_path)
