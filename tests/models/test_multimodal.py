"""MultimodalNet: missing modalities leave no trace, and every fusion is its formula."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fedlightning  # noqa: F401  before lightning

# isort: split
from lightning.pytorch import Trainer

from fedlightning.models import MLP, Classifier, MultimodalNet
from fedlightning.models.recipes import module_recipe
from tests.modalities import NormEncoder

NAN = float("nan")


def net(fusion="concat", **options):
    torch.manual_seed(0)
    return MultimodalNet({"a": MLP(4, [], 6), "b": MLP(2, [], 6)}, 3, width=6, fusion=fusion, **options)


def inputs(batch=5):
    return {"a": torch.randn(batch, 4), "b": torch.randn(batch, 2)}


def by_hand(module, x, fusion):
    features = [module.encoders[name](x[name]) for name in "ab"]
    if fusion == "attention":
        z = torch.stack(features, 1)
        first, _, second = module.fusion
        weights = torch.tanh(z @ first.weight.T + first.bias) @ second.weight.T
        weights = weights.exp() / weights.exp().sum(1, keepdim=True)
        fused = torch.cat([(weights[:, :, [h]] * z).sum(1) for h in range(weights.shape[2])], 1)
    else:
        h = module.fusion(torch.cat(features, 1))
        fused = h * torch.sigmoid(h) if fusion == "gate" else h.clamp_min(0)
    return module.classifier(fused)


@pytest.mark.parametrize("fusion", ["concat", "attention", "gate"])
def test_a_fusion_is_its_formula(fusion):
    module, x = net(fusion), inputs()
    torch.testing.assert_close(module(x), by_hand(module, x, fusion))


@pytest.mark.parametrize("fusion", ["concat", "attention", "gate"])
def test_a_missing_modality_gives_no_gradient_and_does_not_depend_on_others(fusion):
    module, x = net(fusion), inputs()
    x["b"][[1, 3]] = NAN
    logits = module(x)
    alone = module({"a": x["a"][[1]]})  # not in the dict is the same as NaN
    torch.testing.assert_close(logits[[1]], alone)
    logits[[1, 3]].sum().backward()
    assert all(not bool(p.grad.any()) for p in module.encoders["b"].parameters())
    module.zero_grad()
    module(x | {"b": torch.full((5, 2), NAN)}).sum().backward()
    assert all(p.grad is None for p in module.encoders["b"].parameters())


def test_the_attention_on_what_is_missing_is_zero():
    class Steps(nn.Module):
        def forward(self, x):
            return x.unsqueeze(1).expand(-1, 3, -1)

    module = MultimodalNet({"a": Steps(), "b": MLP(2, [], 6)}, 3, width=6, fusion="attention", num_heads=2)
    x = {"a": torch.randn(4, 6), "b": torch.randn(4, 2)}
    x["a"][0], x["b"][1] = NAN, NAN
    tokens, there = module.encode(x)
    _, weights = module.attention(tokens, there)
    assert weights.shape == (4, 4, 2)
    assert not bool(weights[0, :3].any()) and not bool(weights[1, 3].any())
    torch.testing.assert_close(weights.sum(1), torch.ones(4, 2))
    assert bool(module(x).isfinite().all())


def test_batch_statistics_are_those_of_samples_that_have_the_modality():
    module = MultimodalNet({"A": NormEncoder(4), "D": NormEncoder(3)}, 3, width=8)
    x = {"A": torch.randn(6, 4), "D": torch.randn(6, 3)}
    x["D"][:3] = NAN
    module(x)
    seen = module.encoders["D"].linear(x["D"][3:])
    torch.testing.assert_close(module.encoders["D"].norm.running_mean, 0.1 * seen.mean(0))
    before = module.encoders["D"].norm.num_batches_tracked.clone()
    module({"A": x["A"]})
    assert torch.equal(module.encoders["D"].norm.num_batches_tracked, before)


def test_samples_with_one_modality_take_its_own_classifier():
    module, x = net(unimodal_heads=True), inputs()
    x["a"][0], x["b"][2] = NAN, NAN
    logits = module(x)
    torch.testing.assert_close(logits[[0]], module.heads["b"](module.encoders["b"](x["b"][[0]])))
    torch.testing.assert_close(logits[[2]], module.heads["a"](module.encoders["a"](x["a"][[2]])))
    both = {name: values[[1, 3, 4]] for name, values in x.items()}
    torch.testing.assert_close(logits[[1, 3, 4]], by_hand(module, both, "concat"))
    module({"a": x["a"][1:]}).sum().backward()
    assert all(p.grad is None for part in (module.fusion, module.classifier) for p in part.parameters())


def test_broken_values_are_not_taken_for_missing_ones():
    module, x = net(), inputs()
    x["b"][1, 0] = NAN
    assert bool(module(x)[1].isnan().all())


def test_what_cannot_work_is_refused():
    module, x = net(), inputs()
    for given, sentence in (
        (x | {"c": x["a"]}, "has encoders for a, b, and a batch has a, b, c"),
        (x["a"], "needs a dict of inputs"),
        ({name: values * NAN for name, values in x.items()}, "A sample has no modality at all"),
    ):
        with pytest.raises(ValueError, match=sentence):
            module(given)
    with pytest.raises(ValueError, match=r"The encoder of 'a' returns \(5, 4\), but MultimodalNet\(width=6\)"):
        MultimodalNet({"a": MLP(4, [], 4)}, 3, width=6)({"a": x["a"]})
    with pytest.raises(ValueError, match=r"fusion='sum'. Use 'concat', 'attention' or 'gate'"):
        net("sum")
    with pytest.raises(ValueError, match="Use a table of at least one"):
        MultimodalNet({}, 3)


def test_a_checkpoint_is_enough_to_load_it(tmp_path):
    module = Classifier(net("attention"), num_classes=3)
    assert module_recipe(module.net) is not None
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = Trainer(max_epochs=1, limit_train_batches=1, enable_checkpointing=False, **options)
    trainer.fit(module, DataLoader([({"a": torch.randn(4), "b": torch.randn(2)}, 1)]))
    trainer.save_checkpoint(tmp_path / "net.ckpt")
    again = Classifier.load_from_checkpoint(tmp_path / "net.ckpt")
    x = inputs()
    assert torch.equal(again.eval()(x), module.eval()(x))
