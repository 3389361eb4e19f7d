"""Federation sensitivity against brute force: sheet entries 23 and M1."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

from fedlightning.callbacks import FederationSensitivity, Sensitivity
from fedlightning.callbacks.diagnostics.sensitivity import SensitivityAccumulator

EXAMPLE = (1.0, 1.2, 1.3, 4.0, 5.0)


def from_cumulative(f: Iterable[float], counts: list[int] | None = None) -> Sensitivity:
    f = list(f)
    terms = [b - a for a, b in zip([0.0, *f], f, strict=False)]
    return Sensitivity([f"layer{k}" for k in range(len(f))], counts or [1] * len(f), terms)


# -- F, the ratios and p ---------------------------------------------------------------------------------------------


def test_f_is_the_running_sum_and_never_decreases():
    found = Sensitivity(["a", "b", "c"], [1, 1, 1], [0.5, 0.0, 2.0])
    assert found.cumulative == [0.5, 0.5, 2.5]
    assert [b - a for a, b in zip(found.cumulative, found.cumulative[1:], strict=False)] == found.sensitivity[1:]
    assert found.ratios == [1.0, 5.0]


@pytest.mark.parametrize(("threshold", "p"), [(2.0, 3), (1.15, 1), (5.0, 5), (math.inf, 5)])
def test_the_transition_of_the_sheets_example(threshold, p):
    assert from_cumulative(EXAMPLE).transition(threshold) == p


@pytest.mark.parametrize("scale", [1e-12, 0.1, 7.0, 1e12])
@pytest.mark.parametrize("threshold", [1.05, 1.15, 2.0, 4.0])
def test_the_scale_of_the_loss_does_not_move_the_transition(scale, threshold):
    found = from_cumulative(EXAMPLE)
    scaled = Sensitivity(found.layers, found.num_parameters, [scale**2 * term for term in found.sensitivity])
    assert scaled.transition(threshold) == found.transition(threshold)


@pytest.mark.parametrize("threshold", [1.0, 0.5, -1.0, math.nan])
def test_a_threshold_that_every_ratio_passes_is_refused(threshold):
    with pytest.raises(ValueError, match="above 1"):
        from_cumulative(EXAMPLE).transition(threshold)


def test_a_silent_first_layer_is_a_jump_only_if_it_trains():
    f = (0.0, 1.0, 1.1, 9.0)
    assert from_cumulative(f).ratios[0] == math.inf
    assert from_cumulative(f).transition(2.0) == 1  # unused embedding rows, say
    assert from_cumulative(f, [0, 1, 1, 1]).transition(2.0) == 3  # frozen
    assert from_cumulative(f).transition(math.inf) == 4


def test_nothing_but_zeros_has_no_jump():
    found = from_cumulative((0.0, 0.0, 0.0))
    assert all(map(math.isnan, found.ratios))
    assert found.transition(1.5) == 3


def test_one_layer_is_federated_whole():
    assert from_cumulative((3.0,)).transition(2.0) == 1
    assert from_cumulative((3.0,)).ratios == []


def test_the_sum_over_clients_is_unweighted_and_comes_before_the_ratio():
    one, two = from_cumulative((1.0, 1.5)), from_cumulative((1.0, 9.0))
    total = Sensitivity.sum([one, two])
    assert total.cumulative == [2.0, 10.5]
    assert total.ratios == [5.25]
    assert Sensitivity.sum([two, one]) == total
    with pytest.raises(ValueError, match="different layers"):
        Sensitivity.sum([one, from_cumulative((1.0, 2.0, 3.0))])
    with pytest.raises(ValueError, match="no client"):
        Sensitivity.sum([])


def test_it_survives_json():
    found = Sensitivity(["a", "b", "c"], [0, 2, 3], [0.0, 0.1, 1 / 3], "one_batch", weights_only=True)
    assert Sensitivity.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found


# -- a run -------------------------------------------------------------------------------------------------------------


class Net(LightningModule):
    """Two layers, registered in the reverse of the order in which they are called."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.last, self.first = nn.Linear(5, 3), nn.Linear(4, 5)
        self.norm, self.drop = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return self.scale * loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Full(Net):
    """With batch statistics, dropout and a metric: what an extra pass may leave traces in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.accuracy = Accuracy(task="multiclass", num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.accuracy.update(logits.detach(), y)
        return F.cross_entropy(logits, y)


class Spy(Callback):
    """Brute force: each step's ``(theta grad)^2``, summed over each parameter tensor."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.at_end: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.current_epoch == 0:
            found = pl_module.named_parameters()
            self.steps.append({n: float((p.detach().double() * p.grad.double()).square().sum()) for n, p in found})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            self.at_end = {name: value.detach().clone() for name, value in pl_module.state_dict().items()}


def samples(count: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator))


def fit(
    module: LightningModule, callbacks: list[Callback], loader: Any = None, epochs: int = 1, **options: Any
) -> Trainer:
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False} | options
    trainer = Trainer(max_epochs=epochs, accelerator="cpu", callbacks=callbacks, enable_model_summary=False, **options)
    trainer.fit(module, DataLoader(samples(), batch_size=6) if loader is None else loader)
    return trainer


def net(kind: Any = Net, *args: Any) -> Any:
    torch.manual_seed(11)
    return kind(*args)


def brute_force(steps: list[dict[str, float]], kinds: tuple[str, ...] = ("weight", "bias")) -> list[float]:
    sizes = {"first.weight": 20, "first.bias": 5, "last.weight": 15, "last.bias": 3}
    terms = []
    for layer in ("first", "last"):
        members = [f"{layer}.{kind}" for kind in kinds]
        total = sum(step[name] for step in steps for name in members) / len(steps)
        terms.append(total / sum(sizes[name] for name in members))
    return terms


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, 4), ({"accumulate_grad_batches": 2}, 2), ({"precision": "bf16-mixed"}, 4), ({"gradient_clip_val": 1e-3}, 4)],
)
def test_online_is_the_mean_over_the_optimizer_steps_of_the_first_epoch(options, steps):
    found, spy = FederationSensitivity(), Spy()
    fit(net(), [spy, found], epochs=2, **options)
    assert len(spy.steps) == steps
    assert found.result is not None
    assert found.result.layers == ["first", "last"]  # as called, not as registered
    assert found.result.num_parameters == [25, 18]
    assert found.result.sensitivity == pytest.approx(brute_force(spy.steps), rel=1e-9)
    assert (found.result.method, found.result.weights_only) == ("online", False)


def test_weights_only_leaves_biases_out_of_the_sum_and_of_the_count():
    found, spy = FederationSensitivity(weights_only=True), Spy()
    fit(net(), [spy, found])
    assert found.result is not None
    assert found.result.num_parameters == [20, 15]
    assert found.result.sensitivity == pytest.approx(brute_force(spy.steps, ("weight",)), rel=1e-9)


def test_a_later_epoch_can_be_recorded_and_several_recorders_share_a_run():
    first, second = FederationSensitivity(), FederationSensitivity(epoch=1)
    trainer = fit(net(), [first, second], epochs=2)
    assert first.result is not None
    assert second.result is not None
    assert first.result.sensitivity != second.result.sensitivity
    assert len({callback.state_key for callback in (first, second)}) == 2
    assert trainer.current_epoch == 2


def test_online_trains_the_very_same_model_and_calls_forward_no_more_often():
    calls: list[int] = []
    runs = []
    for callbacks in ([], [FederationSensitivity()]):
        module = net(Full)
        module.first.register_forward_hook(lambda *_: calls.append(len(runs)))
        torch.manual_seed(5)
        fit(module, callbacks, epochs=2)
        runs.append(({n: v.clone() for n, v in module.state_dict().items()}, torch.get_rng_state()))
        assert not any(child._forward_pre_hooks for child in module.modules())
    assert calls.count(0) == calls.count(1)
    assert all(torch.equal(runs[0][0][name], value) for name, value in runs[1][0].items())
    assert torch.equal(runs[0][1], runs[1][1])


def test_fp16_gradients_are_unscaled_and_a_skipped_step_does_not_count():
    def amp() -> list[Any]:  # the first scale overflows fp16: the first steps are skipped
        return [
            MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000))
        ]

    found, spy = FederationSensitivity(), Spy()
    fit(net(), [spy, found], plugins=amp(), loader=DataLoader(samples(120), batch_size=6))
    finite = [step for step in spy.steps if all(map(math.isfinite, step.values()))]
    assert 0 < len(finite) < len(spy.steps)
    assert found.result is not None
    assert found.result.sensitivity == pytest.approx(brute_force(finite), rel=1e-9)
    assert max(found.result.sensitivity) < 1.0  # scaled ones are 2**20 squared too large


def test_gradients_that_a_fused_optimizer_will_unscale_itself_are_divided_by_the_scale():
    found = FederationSensitivity()

    class Fused(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.02, fused=True)

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**7, growth_interval=1000))
    spy = Spy()
    fit(net(Fused), [spy, found], plugins=[plugin])
    assert found.result is not None
    scaled = brute_force(spy.steps)
    assert found.result.sensitivity == pytest.approx([term / 2**14 for term in scaled], rel=1e-9)


def test_a_run_without_one_finite_gradient_has_no_result():
    found = FederationSensitivity()
    with pytest.warns(UserWarning, match="no finite gradient"):
        fit(net(Net, math.nan), [found])
    assert found.result is None


def test_the_scale_of_the_loss_scales_f_by_its_square():
    small, large = FederationSensitivity("one_batch"), FederationSensitivity("one_batch")
    for scale, found in ((1.0, small), (8.0, large)):
        module = net(Net, scale)
        module.configure_optimizers = lambda module=module: torch.optim.SGD(module.parameters(), lr=0.0)
        fit(module, [found])
    assert small.result is not None
    assert large.result is not None
    assert large.result.sensitivity == pytest.approx([64 * term for term in small.result.sensitivity], rel=1e-5)
    assert large.result.ratios == pytest.approx(small.result.ratios, rel=1e-5)


@pytest.mark.parametrize(("method", "used"), [("mean_gradient", 24), ("one_batch", 6)])
def test_an_extra_pass_measures_the_gradient_at_the_end_of_the_epoch(method, used):
    found, spy = FederationSensitivity(method), Spy()
    fit(net(), [spy, found], epochs=2)
    module = net()
    module.load_state_dict(spy.at_end)
    x, y = samples()[:used]
    F.cross_entropy(module(x), y).backward()
    squares = {n: float((p.detach().double() * p.grad.double()).square().sum()) for n, p in module.named_parameters()}
    assert found.result is not None
    assert found.result.sensitivity == pytest.approx(brute_force([squares]), rel=1e-5)
    assert found.result.method == method


@pytest.mark.parametrize("method", ["mean_gradient", "one_batch"])
@pytest.mark.parametrize("own_generator", [False, True])
def test_an_extra_pass_leaves_no_trace(method, own_generator):
    runs = []
    for callbacks in ([], [FederationSensitivity(method)]):
        module = net(Full)
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(6) if own_generator else None
        loader = DataLoader(samples(), batch_size=6, shuffle=True, generator=generator)
        fit(module, callbacks, loader, epochs=3)  # batch order, dropout and statistics of the later epochs tell
        state = {name: value.clone() for name, value in module.state_dict().items()}
        runs.append((state, torch.get_rng_state(), module.accuracy.compute(), vars(module).keys()))
        assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in module.parameters())
    (state, rng, accuracy, attributes), (state_2, rng_2, accuracy_2, attributes_2) = runs
    assert all(torch.equal(state[name], value) for name, value in state_2.items())
    assert torch.equal(rng, rng_2)
    assert torch.equal(accuracy, accuracy_2)
    assert attributes == attributes_2


def test_gradients_that_stand_before_an_extra_pass_stand_after_it():
    class Look(Callback):
        def __init__(self) -> None:
            self.seen: list[dict[str, Tensor]] = []

        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.seen.append({n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None})

    before, after = Look(), Look()
    fit(net(), [before, FederationSensitivity("mean_gradient"), after])
    assert before.seen[0].keys() == after.seen[0].keys() != set()
    assert all(torch.equal(value, after.seen[0][name]) for name, value in before.seen[0].items())


def test_limits_on_training_batches_hold_for_the_extra_pass():
    limited, one = FederationSensitivity("mean_gradient"), FederationSensitivity("one_batch")
    fit(net(), [limited, one], limit_train_batches=1)
    assert limited.result is not None
    assert one.result is not None
    assert limited.result.sensitivity == pytest.approx(one.result.sensitivity, rel=1e-9)


class Manual(Net):
    """Two optimizers; the second steps on every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        one, two = self.optimizers()
        one.zero_grad()
        two.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        one.step()
        if batch_idx % 2 == 0:
            two.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.first, self.last)]


class SpyOptimizers(Callback):
    def __init__(self) -> None:
        self.steps: dict[str, list[float]] = {"first": [], "last": []}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        members = [(n, p) for n, p in pl_module.named_parameters() if id(p) in own]
        layer = members[0][0].split(".")[0]
        self.steps[layer].append(sum(float((p.detach().double() * p.grad.double()).square().sum()) for _, p in members))


def test_manual_optimization_counts_each_optimizers_own_steps():
    found, spy = FederationSensitivity(), SpyOptimizers()
    fit(net(Manual), [spy, found])
    assert [len(steps) for steps in spy.steps.values()] == [4, 2]
    means = [sum(steps) / len(steps) for steps in spy.steps.values()]
    assert found.result is not None
    assert found.result.sensitivity == pytest.approx([means[0] / 25, means[1] / 18], rel=1e-9)


def test_an_extra_pass_over_manual_optimization_is_refused():
    with pytest.raises(ValueError, match="Use method='online'"):
        fit(net(Manual), [FederationSensitivity("mean_gradient")])


def test_a_frozen_layer_has_nothing_that_counts_and_is_no_jump():
    module = net()
    module.first.requires_grad_(False)
    found = FederationSensitivity()
    fit(module, [found])
    assert found.result is not None
    assert found.result.num_parameters == [0, 18]
    assert found.result.sensitivity[0] == 0.0
    assert found.result.transition(2.0) == 2


def test_normalisation_counts_with_the_layer_before_it():
    found = FederationSensitivity()
    fit(net(Full), [found])
    assert found.result is not None
    assert found.result.layers == ["first", "last"]
    assert found.result.num_parameters == [25 + 10, 18]


def test_one_layer_gives_one_number():
    class One(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Identity(), nn.Linear(4, 3)

    found = FederationSensitivity()
    fit(net(One), [found])
    assert found.result is not None
    assert found.result.layers == ["last"]
    assert found.result.transition(1.5) == 1


def test_the_result_is_the_callbacks_lightning_state():
    found, again = FederationSensitivity(), FederationSensitivity()
    assert found.result is None
    fit(net(), [found])
    again.load_state_dict(found.state_dict())
    assert again.result == found.result
    again.load_state_dict({})
    assert again.result is None


def test_a_recorder_used_for_one_client_after_another_mixes_nothing():
    shared, alone = FederationSensitivity(), FederationSensitivity()
    fit(net(), [shared])
    fit(net(Full), [shared])
    fit(net(Full), [alone])  # the same seed: net() sets it
    assert shared.result is not None
    assert alone.result is not None
    assert shared.result == alone.result


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"method='exact'.*'online'"):
        FederationSensitivity("exact")  # type: ignore[arg-type]


# -- without a Trainer -------------------------------------------------------------------------------------------------


def test_the_accumulator_alone_equals_brute_force_and_keeps_no_tensor():
    module = net()
    recorded = SensitivityAccumulator(module, order=["first", "last"])
    steps = []
    for start in (0, 8, 16):
        x, y = samples()[start : start + 8]
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()
        recorded.add_step()
        found = module.named_parameters()
        steps.append({n: float((p.detach().double() * p.grad.double()).square().sum()) for n, p in found})
    assert recorded.result().sensitivity == pytest.approx(brute_force(steps), rel=1e-12)
    assert all(isinstance(value, float) for value in recorded.sums.values())


def test_tiny_and_huge_gradients_are_added_in_float64():
    module = nn.Linear(1, 1, bias=False)
    recorded = SensitivityAccumulator(module, order=["weight"])
    with torch.no_grad():
        module.weight.fill_(1.0)
    for gradient in (1e-25, 1e25):
        recorded.add({"weight": torch.full((1, 1), gradient)})
    assert recorded.sums["weight"] == pytest.approx(1e50, rel=1e-6)
    recorded.add({"weight": torch.full((1, 1), math.inf)})
    assert recorded.steps["weight"] == 2


def test_a_parameter_that_a_step_does_not_reach_adds_zero_to_the_mean():
    module = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    recorded, optimizer = SensitivityAccumulator(module, order=["a", "b"]), torch.optim.SGD(module.parameters())
    for names in ("ab", "a", "a", "a"):
        optimizer.zero_grad()
        sum(module[name](torch.ones(1, 1)).sum() for name in names).backward()
        recorded.add_step(optimizer)
    assert recorded.result().sensitivity == [1.0, 0.25]


def test_an_infinite_gradient_that_is_not_counted_still_means_no_step():
    module = nn.Linear(2, 2)
    recorded = SensitivityAccumulator(module, weights_only=True, order=["weight+bias"])
    module.weight.grad, module.bias.grad = torch.ones(2, 2), torch.tensor([math.inf, 0.0])
    recorded.add_step()
    assert recorded.steps == {"weight": 0}


def test_weights_only_leaves_out_biases_by_their_own_name():
    module = nn.ModuleDict(
        {
            "bias_free": nn.Linear(2, 2),
            "norm": nn.BatchNorm1d(2),
            "lstm": nn.LSTM(2, 2),
            "attention": nn.MultiheadAttention(2, 1),
        }
    )
    counted = SensitivityAccumulator(module, weights_only=True, order=["bias_free"]).counted
    attention = {"attention.in_proj_weight", "attention.out_proj.weight"}
    lstm = {"lstm.weight_ih_l0", "lstm.weight_hh_l0"}
    assert set(counted) == {"bias_free.weight", "norm.weight"} | lstm | attention


def test_different_methods_are_not_summed():
    one, two = Sensitivity(["a"], [1], [1.0], "online"), Sensitivity(["a"], [1], [1.0], "one_batch")
    with pytest.raises(ValueError, match="different methods"):
        Sensitivity.sum([one, two])


def test_a_run_resumed_in_the_middle_of_the_epoch_counts_every_step(tmp_path):
    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    x, y = samples()[:6]
    loader = DataLoader(TensorDataset(x.repeat(4, 1), y.repeat(4)), batch_size=6)  # Lightning starts it anew
    whole, resumed = FederationSensitivity(), FederationSensitivity()
    fit(net(), [whole, Save()], loader)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[resumed],
        enable_model_summary=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), loader, ckpt_path=tmp_path / "middle.ckpt")
    assert whole.result is not None
    assert resumed.result is not None
    assert resumed.result.layers == whole.result.layers
    assert resumed.result.sensitivity == pytest.approx(whole.result.sensitivity, rel=1e-6)


# -- the figure --------------------------------------------------------------------------------------------------------


DRAWN = {
    (f, threshold): pytest.mark.slow
    for f in (EXAMPLE, (0.0, 1.0, 3.0), (0.0, 0.0), (2.0,), tuple(range(1, 31)))
    for threshold in (None, 1.5, math.inf)
} | {(EXAMPLE, None): (), ((0.0, 1.0, 3.0), 1.5): (), ((0.0, 0.0), 1.5): (), ((2.0,), math.inf): ()}


@pytest.mark.parametrize(("f", "threshold"), [pytest.param(*given, marks=marks) for given, marks in DRAWN.items()])
def test_the_figure_draws_whatever_a_run_may_give(f, threshold, tmp_path):
    path = tmp_path / "sensitivity.png"
    figure = from_cumulative(map(float, f)).plot(threshold, path)
    assert len(figure.axes) == 3
    assert path.stat().st_size > 1000
