"""Gradient-form terms in every precision, with clipping and accumulation; steps that a scaler skips are not steps."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from fedlightning import FederatedCallback
from fedlightning.callbacks import FLIU, SCAFFOLD, Ditto, FedAdam, FedALA, FedAMP, FedAvg, FedAvgM, FedProx, FedYogi
from fedlightning.engines.attempts import FederationError
from fedlightning.tensors import first_nonfinite
from tests.helpers import NormNet, Toy, close, federate, plain_fit, same, spied, toy_data


def fp16(init_scale=2.0**10, **options):
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, **options)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


PRECISIONS = {
    "32": dict,
    "bf16": lambda: {"precision": "bf16-mixed"},
    "fp16": fp16,
    "64": lambda: {"precision": "64-true"},
}
PLANS = {
    "plain": {},
    "clip": {"gradient_clip_val": 0.2},
    "clip_value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "accumulate": {"accumulate_grad_batches": 2},
    "both": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2},
}
# clipping turns on small differences of the norm, half precision rounds the gradient itself
TOLERANCE = {"32": 2e-6, "64": 1e-10, "bf16": 2e-6, "fp16": 2e-5}


class WithTerm(Toy):
    """The same terms in the loss: ``mu/2 ||w - anchor||^2 + <linear, w>``, added in fp32."""

    def __init__(self, mu=0.0, linear=None):
        super().__init__("momentum" if linear is None else "sgd")
        self.mu, self.linear = mu, linear
        self.anchor = None

    def on_train_start(self):
        self.anchor = {name: p.detach().clone() for name, p in self.named_parameters()}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx).to(next(self.parameters()).dtype)
        for name, p in self.named_parameters():
            loss = loss + 0.5 * self.mu * (p - self.anchor[name]).square().sum()
            if self.linear is not None:
                loss = loss + (self.linear[name] * p).sum()
        return loss


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_fedprox_is_its_loss_form(precision, plan):
    data = toy_data([32])
    reference = WithTerm(mu=2.0)
    module = Toy("momentum")
    module.load_state_dict(reference.state_dict())
    options = PLANS[plan]
    _, spy = spied(module, data, [FedProx(mu=2.0)], max_rounds=1, local_epochs=3, **options, **PRECISIONS[precision]())
    expected = plain_fit(reference, data, "0", epochs_per_round=3, max_epochs=3, **options, **PRECISIONS[precision]())
    (update,) = spy.updates
    assert update.steps == (6 if "accumulate_grad_batches" in options else 12)
    assert update.skipped == 0
    close(update.state, expected, atol=TOLERANCE[precision])
    free = plain_fit(module, data, "0", epochs_per_round=3, max_epochs=3, **options, **PRECISIONS[precision]())
    assert max(float((free[n] - v).abs().max()) for n, v in update.state.items()) > 20 * TOLERANCE[precision]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_scaffold_is_its_loss_form(precision, plan):
    """Round 2: every client steps on its loss plus ``<c - c_i, w>``."""
    data, options = toy_data([32, 16]), PLANS[plan]
    module = Toy("sgd")
    _, spy = spied(module, data, [SCAFFOLD()], max_rounds=2, local_epochs=2, **options, **PRECISIONS[precision]())
    c = spy.states[0]["SCAFFOLD"]["c"]
    dtype = torch.float64 if precision == "64" else torch.float32
    assert {value.dtype for value in c.values()} == {dtype}
    for client in "01":
        own = spy.records[0][client].state["SCAFFOLD"]["c"]
        reference = WithTerm(linear={name: c[name] - own[name] for name in c})
        if precision == "64":
            reference = reference.double()
        reference.load_state_dict(spy.rounds[0])
        loader = data.client_dataloader(client, "train")

        class Second:
            def setup(self, stage):
                pass

            def client_dataloader(self, client, split, loader=loader):
                loader.sampler.start = lambda **kw: type(loader.sampler).start(loader.sampler, **kw | {"round": 1})
                return loader

        expected = plain_fit(
            reference, Second(), client, epochs_per_round=2, max_epochs=2, **options, **PRECISIONS[precision]()
        )
        close(spy.of_round(1)[client].state, expected, atol=TOLERANCE[precision])
        # and option II's bookkeeping, in the steps really taken
        update = spy.of_round(1)[client]
        rate = module.lr * update.steps
        moved = {n: own[n] - c[n] + (spy.rounds[0][n] - update.state[n]) / rate for n in c}
        close(spy.records[1][client].state["SCAFFOLD"]["c"], moved, atol=1e-5)


@pytest.mark.parametrize("precision", ["32", "bf16", "fp16"])
def test_without_strength_it_is_fedavg_in_every_precision(precision):
    module, data = NormNet("adam"), toy_data()
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    runs = [federate(module, data, cb, **options, **PRECISIONS[precision]()) for cb in ([], [FedProx(mu=0.0)])]
    same(*(run.server.model for run in runs))
    first = [
        federate(module, data, [cb], max_rounds=1, **options, **PRECISIONS[precision]())
        for cb in (SCAFFOLD(option=1), FedAvg("uniform"))
    ]
    same(*(run.server.model for run in first))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_client_is_a_plain_fit_in_mixed_precision(precision):
    """The scaler's state goes on from visit to visit, also where optimizers do not."""
    module, data = Toy("adam"), toy_data([24])
    make = PRECISIONS[precision] if precision == "bf16" else lambda: fp16(growth_interval=4)
    ours = federate(module, data, max_rounds=3, optimizer_state="keep", gradient_clip_val=0.5, **make())
    same(ours.server.model, plain_fit(module, data, "0", max_epochs=3, gradient_clip_val=0.5, **make()))


class Raw(FederatedCallback):
    """Unscaled gradients before any correction."""

    def __init__(self):
        self.seen = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradients = {name: p.grad.clone() for name, p in pl_module.named_parameters()}
        self.seen.setdefault((self.client.round, self.client.id), []).append(gradients)


class Overflows(Toy):
    """The second batch of every epoch is too large for half precision."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return super().training_step((x * 1e7 if batch_idx == 1 else x, y), batch_idx)


@pytest.mark.parametrize("state", ["reset", "keep"])
def test_a_skipped_step_is_no_step(state):
    raw, data = Raw(), toy_data([32, 24])
    _, spy = spied(
        Overflows("sgd"), data, [raw, SCAFFOLD(), FedProx(0.1)], max_rounds=2, optimizer_state=state, **fp16()
    )
    for update in spy.updates:
        attempts = {"0": 4, "1": 3}[update.client]
        assert (update.steps, update.skipped) == (attempts - 1, 1)
        assert update.lr_sum == pytest.approx(0.1 * update.steps)
    for client in "01":
        real = [g for g in raw.seen[0, client] if first_nonfinite(g) is None]
        assert len(real) == len(raw.seen[0, client]) - 1
        mean = {name: sum(g[name] for g in real) / len(real) for name in real[0]}
        own = spy.records[0][client].state["SCAFFOLD"]["c"]
        # FedProx pulls a little; c and c_i are still zero in round 1
        for name, value in mean.items():
            torch.testing.assert_close(own[name], value, atol=0.05, rtol=0.05)
    _trainer, spy = spied(Overflows("sgd"), data, [SCAFFOLD()], max_rounds=1, **fp16())
    assert all(first_nonfinite(update.state) is None for update in spy.updates)


def test_without_a_real_step_weight_is_zero_and_the_scale_is_kept():
    """A scale far too large: the first rounds only find a better one, and must not lose it."""
    module, data = Toy("sgd"), toy_data([16, 16])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _trainer, spy = spied(module, data, [SCAFFOLD()], max_rounds=12, **fp16(init_scale=2.0**30))
    steps = [spy.of_round(number)["0"].steps for number in range(12)]
    assert steps[0] == 0 and steps[-1] == 2
    assert steps == sorted(steps)
    assert any("took no real step, so its weight is 0" in str(w.message) for w in caught)
    for number, model in enumerate(spy.rounds):
        if not any(update.steps for update in spy.of_round(number).values()):
            assert all(torch.equal(value, dict(module.named_parameters())[name]) for name, value in model.items())
            assert all(not (u.extras.get("SCAFFOLD")) for u in spy.of_round(number).values())
    scales = [spy.records[number]["0"].lightning["fit"]["precision"]["scale"] for number in range(3)]
    assert scales == [2.0**28, 2.0**26, 2.0**24]


@pytest.mark.parametrize("callback", [FedProx(0.1), SCAFFOLD()], ids=lambda c: c.key)
def test_fused_optimizers_are_refused_under_fp16(callback):
    class Fused(Toy):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1, fused=True)

    with pytest.raises(FederationError, match=f"{callback.key} corrects gradients, but the fused SGD.*fused=False"):
        federate(Fused(), toy_data([8]), [callback], **fp16())
    federate(Fused(), toy_data([8]), [callback])
    federate(Fused(), toy_data([8]), [FLIU()], max_rounds=1)


def test_statistics_that_overflow_do_not_reach_the_server():
    """The scaler skips the step, but batch normalisation has seen the infinity."""

    class Overflowing(NormNet):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return super().training_step((x * 1e30 if len(x) == 7 else x, y), batch_idx)

    with pytest.warns(UserWarning, match=r"client '1' failed.*running_(mean|var)' holds NaN"):
        trainer = federate(Overflowing("sgd"), toy_data([16, 15]), [FedAdam()], max_rounds=1, **fp16())
    assert first_nonfinite(trainer.server.model) is None


def test_a_mask_of_infinities_may_stay():
    class Masked(Toy):
        def __init__(self):
            super().__init__("sgd")
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    trainer = federate(Masked(), toy_data())
    assert torch.equal(trainer.server.model["mask"], torch.tensor([0.0, float("-inf")]))


def test_true_double_precision_is_double_everywhere():
    trainer, spy = spied(Toy("sgd"), toy_data(), [SCAFFOLD(), FedAdam()], max_rounds=2, precision="64-true")
    for item in (*spy.messages, *spy.updates):
        assert {value.dtype for value in item.state.values()} == {torch.float64}
    assert trainer.module("0").net[0].weight.dtype == torch.float64
    assert isinstance(copy.deepcopy(trainer.module()), Toy)


# -- bf16-true: parameters and gradients are in half precision, what corrects and accumulates them is not ----------------
@pytest.mark.parametrize(
    "algorithm", [FedProx(mu=0.3), FedAMP(lam=0.3, alpha=1.0), Ditto(lam=0.3)], ids=lambda c: c.key
)
def test_a_pull_to_an_anchor_is_computed_in_fp32(algorithm, monkeypatch):
    """``g + mu (w - anchor)`` of half-precision ``g``, ``w`` and ``anchor``, rounded only when all is added up."""
    kind, pulls = type(algorithm), []
    correct = kind.correct_gradient

    def watched(self, ctx, name, parameter, gradient):
        found = correct(self, ctx, name, parameter, gradient)
        if found is not gradient:  # Ditto pulls the personal model only
            pulls.append((ctx.client, name, parameter.clone(), gradient.clone(), found))
        return found

    monkeypatch.setattr(kind, "correct_gradient", watched)
    _, spy = spied(Toy("sgd"), toy_data(), [algorithm], max_rounds=1, precision="bf16-true")
    sent = {message.client: message.state for message in spy.messages}
    for client, name, w, g, found in pulls:
        anchor = sent[client][name]
        assert {w.dtype, g.dtype, anchor.dtype} == {torch.bfloat16}
        assert found.dtype == torch.float32
        assert torch.equal(found, g.float() + 0.3 * (w.float() - anchor.float()))
    assert sum(not torch.equal(found, g.float()) for *_, g, found in pulls) > 8


@pytest.mark.parametrize(
    "algorithm",
    [SCAFFOLD(option=1), SCAFFOLD(option=2), FedAdam(), FedYogi(), FedAvgM(), FedALA(num_layers=2)],
    ids=lambda c: f"{c.key}{getattr(c, 'option', '')}",
)
def test_what_accumulates_over_rounds_is_kept_in_fp32(algorithm):
    """Control variates, moments, velocities, merging weights; models alone are in the run's precision."""
    trainer, spy = spied(Toy("sgd"), toy_data(), [algorithm], max_rounds=3, precision="bf16-true")
    assert {value.dtype for value in trainer.server.model.values()} == {torch.bfloat16}
    found = {}
    for place, state in [("server", spy.states[-1]), *((c, r.state) for c, r in spy.records[-1].items())]:
        for entry, value in state.get(algorithm.key, {}).items():
            if isinstance(value, dict) and entry != "th":
                found |= {f"{place}/{entry}/{name}": tensor for name, tensor in value.items()}
    assert found
    assert {name for name, value in found.items() if value.dtype not in (torch.float32, torch.float64)} == set()
    extras = [x for m in (*spy.messages, *spy.updates) for tree in m.extras.values() for x in tree.values()]
    assert {value.dtype for tree in extras for value in tree.values()} <= {torch.float32}


def test_control_variates_lose_nothing_on_their_way():
    """``c`` is the mean of the ``c_i`` to fp32's accuracy, although every one of them stems from half-precision models."""
    _, spy = spied(Toy("sgd"), toy_data(), [SCAFFOLD()], max_rounds=4, precision="bf16-true")
    for state, records in zip(spy.states, spy.records, strict=True):
        own = [record.state["SCAFFOLD"]["c"] for record in records.values()]
        mean = {name: sum(c[name].double() for c in own) / len(own) for name in own[0]}
        close(state["SCAFFOLD"]["c"], mean, atol=1e-6)
