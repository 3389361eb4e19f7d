"""timm's models under their names, with their heads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.models import Classifier, TimmNet, load_pretrained, timm_model

needs_timm = pytest.mark.skipif("not __import__('importlib.util').util.find_spec('timm')", reason="timm is an extra")


@needs_timm
@pytest.mark.parametrize(
    ("name", "head", "kwargs"),
    [
        pytest.param("resnet18", "model.fc", {}, marks=pytest.mark.slow),
        pytest.param("efficientnet_b0", "model.classifier", {}, marks=pytest.mark.slow),
        ("mobilenetv3_small_050", "model.classifier", {}),
        ("vit_tiny_patch16_224", "model.head", {"img_size": 32, "patch_size": 8, "depth": 2}),
        ("convnext_atto", "model.head.fc", {}),
    ],
)
def test_head_shape_and_gradient(name: str, head: str, kwargs: dict[str, Any]) -> None:
    net = timm_model(name, num_classes=7, in_chans=1, **kwargs)
    assert net.head_name == head
    layer = net.get_submodule(head)
    assert isinstance(layer, nn.Linear) and layer.out_features == 7
    seen: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits = net(torch.randn(2, 1, 32, 32))
    assert logits.shape == (2, 7)
    torch.testing.assert_close(layer(seen[0]), logits)  # what enters the head is the features, what leaves the logits
    logits.sum().backward()
    assert layer.weight.grad is not None
    assert Classifier(net, 7).head_name == f"net.{head}"


@needs_timm
def test_trains_and_opens_again_without_downloading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    create, asked = timm.create_model, []

    def create_model(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
        asked.append(pretrained)
        return create(name, pretrained=False, **kwargs)

    monkeypatch.setattr(timm, "create_model", create_model)
    net = TimmNet("mobilenetv3_small_050", 2, pretrained=True, model_args={"drop_rate": 0.1})
    module = Classifier(net, 2, lr=0.01)
    data = DataLoader(TensorDataset(torch.randn(8, 3, 32, 32), torch.arange(8) % 2), batch_size=4)
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, max_epochs=1,
    )  # fmt: skip
    trainer.fit(module, data, data)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    loaded = Classifier.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert asked == [True, False]
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded.eval()(x), module.eval()(x))


@needs_timm
def test_unknown_name_several_heads_no_classes() -> None:
    with pytest.raises(ValueError, match=r"timm has no model 'resnet81'. Did you mean resnet18,"):
        TimmNet("resnet81", 2)
    with pytest.raises(ValueError, match=r"no model '%%%'. timm.list_models\(\) names them all"):
        TimmNet("%%%", 2)
    with pytest.raises(ValueError, match="VisionTransformerDistilled has several heads: head, head_dist"):
        timm_model("deit_tiny_distilled_patch16_224", 2, img_size=32, depth=1)
    with pytest.raises(ValueError, match=r"TimmNet got num_classes=0. Use a whole number in \[1, inf\)"):
        TimmNet("resnet18", 0)


def test_without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"pip install 'timm>=\S+' 'torchvision>="):
        TimmNet("resnet18", 2)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"load_pretrained needs transformers.* not installed: pip install 'peft>="):
        load_pretrained("folder")


@pytest.mark.slow
def test_importing_the_models_does_not_import_timm() -> None:
    code = "import fedlightning.models, sys; assert 'timm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
