from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from fedlightning.wrappers import (
    DualExtractor,
    FeatureTap,
    dual_by_head,
    feature_taps,
    global_names,
    mix,
    mix_logits,
    mixins_of,
    private_names,
    unmix,
)
from fedlightning.wrappers.mixing import Mixin
from tests.wrappers.modules import (
    CLASSES,
    HIDDEN,
    STYLES,
    Base,
    ThroughForward,
    ThroughLayers,
    ThroughNet,
    ThroughParameters,
    batch_for,
    fit,
    loader,
)


def mean_loss(module: LightningModule) -> float:
    module.eval()
    with torch.no_grad():
        return float(torch.stack([module.step(batch, "probe") for batch in loader(module)]).mean())  # type: ignore


class ProbeMixin(Mixin):
    """Counts, to stand on the same module as FENDA."""

    wraps = ("training_step",)

    def around(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        self.count = getattr(self, "count", 0) + 1  # type: ignore[assignment]
        return call(*args, **kwargs)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("fusion", ["concat", "sum"])
def test_every_style_trains_both_extractors_and_the_head(style: type[Base], fusion: Any) -> None:
    plain = fit(style(), 1)
    module = dual_by_head(style(), style.HEAD, fusion=fusion, init="copy")
    before = copy.deepcopy(module.state_dict())
    trainer = fit(module, 1)
    first = float(trainer.callback_metrics["train_loss"])
    assert set(trainer.callback_metrics) == set(plain.callback_metrics)
    assert first < 2.5
    trainer = fit(module, 4)
    assert float(trainer.callback_metrics["train_loss"]) < first
    for name, parameter in module.named_parameters():
        assert not torch.equal(before[name], parameter), f"{name} did not move"
    assert any(name.startswith("local_extractor.") for name in before)
    optimizer = trainer.optimizers[0]
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in module.parameters())


@pytest.mark.parametrize("optim", ["all", "list", "groups", "pair", "dict", "dicts", "named"])
def test_the_twin_joins_its_originals_in_every_form(optim: str) -> None:
    module = dual_by_head(ThroughForward(optim=optim), "net.fc")
    trainer = fit(module, 1)
    groups = trainer.optimizers[0].param_groups
    held = [p for group in groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(module.parameters()))
    if optim == "groups":
        assert any(p is module.get_parameter("local_extractor.net.conv.weight") for p in groups[0]["params"])
        assert {id(p) for p in groups[1]["params"]} == {id(p) for p in module.get_submodule("net.fc").parameters()}


def test_an_extractor_without_optimizer_is_an_error() -> None:
    module = dual_by_head(ThroughForward(optim="head"), "net.fc")
    with pytest.raises(ValueError, match=r"local_extractor.net.conv.weight.*no optimizer holds it"):
        fit(module, 1)


@pytest.mark.parametrize("style", STYLES)
def test_names_split_into_shared_and_private(style: type[Base]) -> None:
    original = style()
    names = [name for name in original.state_dict() if not name.startswith(f"{style.HEAD}.")]
    module = dual_by_head(copy.deepcopy(original), style.HEAD)
    assert global_names(module) == names
    assert sorted(global_names(module) + private_names(module)) == sorted(module.state_dict())
    assert {n.removeprefix("local_extractor.") for n in private_names(module) if n.startswith("local_")} == set(names)
    for name in names:
        assert torch.equal(module.state_dict()[name], original.state_dict()[name])
        assert torch.equal(module.state_dict()[f"local_extractor.{name}"], original.state_dict()[name])


def test_zero_head_columns_make_the_prediction_global_only() -> None:
    module = dual_by_head(ThroughForward(), "net.fc")
    head = module.get_submodule("net.fc")
    with torch.no_grad():
        head.weight[:, HIDDEN:] = 0  # type: ignore[index]
    head.requires_grad_(False)
    x = batch_for(module)[0]
    module.eval()
    expected = module(x)
    with torch.no_grad():
        for parameter in module.get_submodule("local_extractor").parameters():
            parameter.normal_()
    assert torch.equal(module(x), expected)
    with torch.no_grad():
        module.get_parameter("net.hidden.weight").zero_()
    assert not torch.equal(module(x), expected)


def test_permuted_order_with_permuted_columns_changes_nothing() -> None:
    first = dual_by_head(ThroughForward(), "net.fc", init="fresh").eval()
    second = ThroughForward()
    dual_by_head(second, "net.fc", order="local_first").eval()
    state = copy.deepcopy(first.state_dict())
    weight = state["net.fc.weight"]
    assert weight.shape == (CLASSES, 2 * HIDDEN)
    state["net.fc.weight"] = torch.cat((weight[:, HIDDEN:], weight[:, :HIDDEN]), 1)
    second.load_state_dict(state)
    x = batch_for(first)[0]
    torch.testing.assert_close(first(x), second(x))


def test_the_two_forms_are_one_model() -> None:
    module = dual_by_head(ThroughForward(), "net.fc", init="fresh", seed=4).eval()
    twin = module.get_submodule("local_extractor")
    dual = DualExtractor(
        nn.Sequential(*list(module.net.children())[:-1]),  # type: ignore[union-attr, operator]
        nn.Sequential(*list(twin.net.children())[:-1]),  # type: ignore[union-attr, operator]
        head := nn.Linear(2 * HIDDEN, CLASSES),
    ).eval()
    head.load_state_dict(module.get_submodule("net.fc").state_dict())
    x = batch_for(module)[0]
    torch.testing.assert_close(module(x), dual(x))
    assert [n.partition(".")[0] for n in global_names(dual)] == ["global_extractor"] * len(global_names(dual))
    nested = nn.ModuleDict({"model": dual, "other": nn.Linear(1, 1)})
    assert all(n.startswith("model.global_extractor.") for n in global_names(nested))


def test_initialisation_is_addressed() -> None:
    def made(seed: int, init: Any) -> dict[str, Tensor]:
        module = ThroughForward()
        module.load_state_dict(reference)
        torch.rand(seed + 1)
        before = torch.get_rng_state()
        dual_by_head(module, "net.fc", init=init, seed=seed)
        assert torch.equal(before, torch.get_rng_state())
        return module.state_dict()

    reference = ThroughForward().state_dict()
    one, same, other, kept = made(1, "fresh"), made(1, "fresh"), made(2, "fresh"), made(1, "copy")
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["net.fc.weight"], other["net.fc.weight"])
    assert torch.equal(one["net.fc.weight"], kept["net.fc.weight"])
    assert not torch.equal(one["local_extractor.net.conv.weight"], other["local_extractor.net.conv.weight"])
    assert torch.equal(kept["local_extractor.net.conv.weight"], reference["net.conv.weight"])


@pytest.mark.parametrize("style", STYLES)
def test_another_network_as_local_extractor(style: type[Base]) -> None:
    local = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh())
    module = dual_by_head(style(), style.HEAD, local)
    before = copy.deepcopy(module.state_dict())
    fit(module, 2)
    assert not torch.equal(before["local_extractor.1.weight"], module.state_dict()["local_extractor.1.weight"])
    assert not [name for name in global_names(module) if "local_extractor" in name]


def test_wrong_width_of_a_given_extractor_is_named() -> None:
    with pytest.raises(ValueError, match="local_features"):
        dual_by_head(ThroughForward(), "net.fc", nn.Flatten())
    module = dual_by_head(ThroughForward(), "net.fc", nn.Flatten(), local_features=7)
    with pytest.raises(RuntimeError, match="takes 15 features in all"):
        module(batch_for(module)[0])
    assert dual_by_head(ThroughForward(), "net.fc", nn.Flatten(), local_features=36)(batch_for(module)[0]).shape[1] == 3


def test_the_twin_is_silent_and_has_no_metrics() -> None:
    module = dual_by_head(ThroughParameters(), "out")
    twin = module.get_submodule("local_extractor")
    assert not [m for m in twin.modules() if isinstance(m, Metric)]
    trainer = fit(module, 1)
    assert twin.trainer is trainer  # type: ignore[comparison-overlap]
    assert twin.scale is module.scale  # set by the module's own hook
    assert int(module.accuracy.update_count) in (0, 3)  # type: ignore[union-attr, arg-type, operator]


class Manual(ThroughForward):
    """Manual optimization, toggling before the network runs."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(self.step(batch, "train"))
        optimizer.step()
        self.untoggle_optimizer(optimizer)


def test_manual_optimization() -> None:
    module = dual_by_head(Manual(), "net.fc")
    before = copy.deepcopy(module.state_dict())
    fit(module, 1)
    assert all(p.requires_grad and not torch.equal(before[n], p) for n, p in module.named_parameters())


def test_many_clients_at_once_under_vmap() -> None:
    modules = [dual_by_head(Dense(), "classify", init="fresh", seed=seed).eval() for seed in range(3)]
    stacked, _ = torch.func.stack_module_state(modules)
    x = torch.stack([batch_for(modules[0])[0]] * 3)
    base = modules[0]

    def one(state: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(base, state, (x,))

    together = torch.func.vmap(one, randomness="different")(stacked, x)
    for module, output, inputs in zip(modules, together, x, strict=True):
        torch.testing.assert_close(module(inputs), output)


class Augmented(ThroughForward):
    """Shuffles features at random before the network (like mixup): both extractors must see the same input."""

    seen: list[Tensor]

    def predict(self, x: Tensor) -> Tensor:
        self.seen.append(x := x + torch.randn_like(x))
        return self(x)


@pytest.mark.parametrize("same", [True, False])
def test_both_extractors_see_the_same_augmentation(same: bool) -> None:
    module = Augmented()
    dual_by_head(module, "net.fc", same_draws=same)
    seen: list[Tensor] = []
    module.seen = module.get_submodule("local_extractor").seen = seen  # type: ignore[assignment]
    module.training_step(batch_for(module), 0)
    assert len(seen) == 2 and torch.equal(*seen) is same


def test_autocast_accumulation_and_precision() -> None:
    module = dual_by_head(ThroughLayers(), "fc")
    before = copy.deepcopy(module.state_dict())
    fit(module, 1, precision="bf16-mixed", accumulate_grad_batches=3, gradient_clip_val=1.0)
    assert all(not torch.equal(before[n], p) for n, p in module.named_parameters())


def test_own_statistics_and_eval_mode() -> None:
    module = dual_by_head(ThroughNet(), "net.fc", init="fresh")
    module.training_step(batch_for(module), 0)
    own, twins = module.get_buffer("net.norm.running_mean"), module.get_buffer("local_extractor.net.norm.running_mean")
    assert own.abs().sum() > 0 and twins.abs().sum() > 0 and not torch.equal(own, twins)
    assert not any(part.training for part in module.eval().modules())
    kept = own.clone()
    module.validation_step(batch_for(module), 0)
    assert torch.equal(own, kept)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_independent_and_equal(how: Any) -> None:
    module = dual_by_head(ThroughForward(), "net.fc")
    fit(module, 1)
    other = how(module).eval()
    x = batch_for(module)[0]
    assert torch.equal(other(x), module.eval()(x))
    with torch.no_grad():
        other.get_parameter("local_extractor.net.conv.weight").zero_()
    assert not torch.equal(other(x), module(x))
    fit(other, 1)


def test_it_stacks_with_other_wrappers() -> None:
    for order in (0, 1):
        module = ThroughForward()
        if order:
            mix(module, ProbeMixin)
        dual_by_head(module, "net.fc")
        mix(module, ProbeMixin)
        mix_logits(module, ThroughForward(), 0.5)
        fit(module, 1)
        assert module.count == 3
        assert module.local_extractor.__class__.__name__ == "Twin_ThroughForward"
        with pytest.raises(TypeError, match="cannot be taken off"):
            unmix(module)
        assert mixins_of(module)


def test_feature_taps_give_both_representations() -> None:
    for local in (None, nn.Sequential(nn.Flatten(), nn.Linear(36, 5))):
        module = dual_by_head(ThroughLayers(), "fc", local)
        zg_tap, zl_tap = feature_taps(module)
        with zg_tap, zl_tap:
            module.training_step(batch_for(module), 0).backward()
            zg, zl = zg_tap.take(), zl_tap.take()
        assert zg.shape == (16, 64) and zl.shape == (16, 5 if local else 64) and zg.requires_grad and zl.requires_grad
    dual = DualExtractor(nn.Flatten(), nn.Linear(36, 2), nn.Linear(3, 3))
    assert [type(tap) for tap in feature_taps(dual)] == [FeatureTap, FeatureTap]


class Odd(ThroughForward):
    mode = "twice"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.mode == "skip":
            return None
        if self.mode == "never":
            return self.net.hidden(self.net.flatten(self.net.conv(batch[0]))).sum()
        if self.mode == "swallow":
            try:
                return F.cross_entropy(self(batch[0]), batch[1])
            except Exception:
                return None
        return (self(batch[0]) + self(batch[0])).sum()


def test_a_head_that_is_never_reached_and_one_reached_twice_by_a_network_that_was_given() -> None:
    module = Odd()
    dual_by_head(module, "net.fc")
    batch = batch_for(module)
    module.mode = "never"
    with pytest.raises(RuntimeError, match=r"never called its head `net\."):
        module.training_step(batch, 0)
    given = Odd()
    dual_by_head(given, "net.fc", nn.Sequential(nn.Flatten(), nn.Linear(36, 5)))
    given.mode = "twice"
    with pytest.raises(RuntimeError, match=r"`net\.fc` of Odd was called twice.*Leave local_extractor out"):
        given.training_step(batch, 0)
    for module.mode in ("skip", "swallow"):
        assert (module.training_step(batch, 0) is None) == (module.mode == "skip")
    with pytest.raises(RuntimeError, match="outside a step"):
        module.net(batch[0])
    assert module(batch[0]).shape == (16, CLASSES)  # an error leaves nothing behind


class OneLayer(ThroughForward):
    def build(self) -> None:
        self.fc = nn.Linear(36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))


def test_bad_heads_are_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"ThroughForward has no submodule `fc`. Did you mean `net.fc`"):
        dual_by_head(ThroughForward(), "fc")
    with pytest.raises(ValueError, match="has no submodule ``"):
        dual_by_head(ThroughForward(), "")
    with pytest.raises(ValueError, match="all parameters of ThroughForward are in `net`"):
        dual_by_head(ThroughForward(), "net")
    with pytest.raises(ValueError, match="FENDA needs an extractor and a head"):
        dual_by_head(OneLayer(), "fc")
    normed = ThroughForward()
    normed.net.fc = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, CLASSES))
    with pytest.raises(ValueError, match=r"begins with `net.fc.0` \(LayerNorm\).*fusion='sum'"):
        dual_by_head(normed, "net.fc")
    assert dual_by_head(copy.deepcopy(normed), "net.fc", fusion="sum")(batch_for(normed)[0]).shape == (16, CLASSES)
    assert dual_by_head(normed, "net.fc.1")(batch_for(normed)[0]).shape == (16, CLASSES)
    tied = ThroughForward()
    tied.other = nn.Linear(HIDDEN, CLASSES)
    tied.other.weight = tied.net.fc.weight
    with pytest.raises(ValueError, match="tied"):
        dual_by_head(tied, "net.fc")
    with pytest.raises(ValueError, match="already"):
        dual_by_head(dual_by_head(ThroughForward(), "net.fc"), "net.fc")
    with pytest.raises(ValueError, match="fusion='product'"):
        dual_by_head(ThroughForward(), "net.fc", fusion="product")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no dual extractor"):
        global_names(ThroughForward())


class Dense(ThroughForward):
    """Predicts every pixel through a 1x1 convolution; the head layer stands behind one more 1x1 convolution."""

    HEAD = "classify"

    def build(self) -> None:
        self.body = nn.Conv2d(1, 4, 3, padding=1)
        self.classify = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 5, 1), nn.Conv2d(5, CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.body(x)).mean((2, 3))


def test_a_convolution_as_head() -> None:
    module = dual_by_head(Dense(), "classify")
    assert module.get_parameter("classify.1.weight").shape == (5, 8, 1, 1)
    assert not [n for n in module.state_dict() if n.startswith("local_extractor.classify")]
    before = copy.deepcopy(module.state_dict())
    fit(module, 1)
    assert all(not torch.equal(before[n], p) for n, p in module.named_parameters())


@pytest.mark.slow
def test_a_timm_network() -> None:
    timm = pytest.importorskip("timm")

    class Timm(ThroughForward):
        def build(self) -> None:
            self.net = timm.create_model("resnet18", num_classes=CLASSES, in_chans=1)

    module = dual_by_head(Timm(), "net.fc")
    before = copy.deepcopy(module.state_dict())
    fit(module, 1)
    assert module.get_parameter("net.fc.weight").shape == (CLASSES, 1024)
    assert all(not torch.equal(before[n], p) for n, p in module.named_parameters())
