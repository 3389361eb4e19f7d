import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.models import DiceMetrics, MonaiUNet, Segmenter
from tests.helpers import make_trainer


def blobs(size=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = (torch.rand(size, 6, 6, 6, generator=generator) > 0.7).long()
    return TensorDataset(y.unsqueeze(1) + 0.3 * torch.randn(size, 1, 6, 6, 6, generator=generator), y)


def test_dice_is_that_of_sets_and_undefined_classes_do_not_count():
    predicted, target = torch.randint(0, 3, (2, 5, 4, 4)), torch.randint(0, 3, (2, 5, 4, 4))
    predicted[0][predicted[0] == 2], target[0][target[0] == 2] = 0, 0  # class 2 is nowhere in the first sample
    found = []
    for i in range(2):
        for label in (1, 2):
            a, b = ({tuple(v) for v in (values[i] == label).nonzero().tolist()} for values in (predicted, target))
            if a or b:
                found.append(2 * len(a & b) / (len(a) + len(b)))
    metrics = DiceMetrics(3)
    for i in range(2):
        metrics.update(predicted[i : i + 1], target[i : i + 1], torch.tensor(float(i)))
    assert len(found) == 3 and float(metrics.compute()["dice"]) == pytest.approx(sum(found) / 3)
    assert float(metrics.compute()["loss"]) == 0.5
    nothing = DiceMetrics(2)
    nothing.update(torch.zeros(1, 3, 3), torch.zeros(1, 3, 3), torch.tensor(0.0))
    assert nothing.compute()["dice"].isnan()


@pytest.mark.parametrize("loss", ["dice", "dice_ce"])
def test_the_loss_is_zero_for_a_sure_and_right_network(loss):
    module = Segmenter(nn.Identity(), num_classes=3, loss=loss)
    y = torch.randint(0, 3, (2, 4, 4))
    right = 50.0 * torch.nn.functional.one_hot(y, 3).permute(0, 3, 1, 2)
    assert float(module.loss(right, y)) == pytest.approx(0, abs=1e-6)
    assert float(module.loss(-right, y)) > 0.5
    logits = torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: module.loss(z, y), logits)


def test_a_federation_of_volumes_learns(tmp_path):
    loaders = {name: DataLoader(blobs(seed=seed), batch_size=4, shuffle=True) for seed, name in enumerate("ab")}
    tests = {name: DataLoader(blobs(seed=9), batch_size=5) for name in "ab"}
    module = Segmenter(nn.Conv3d(1, 2, 1), num_classes=2, loss="dice_ce", lr=0.5)
    trainer = make_trainer(tmp_path, max_rounds=4, local_epochs=2)
    trainer.fit(module, train_dataloaders=loaders, test_dataloaders=tests)
    found = {row["metric"]: row["mean"] for row in trainer.test() if row["stage"] == "G" and row["data"] == "local"}
    assert found["test_dice"] > 0.9 and set(found) == {"test_loss", "test_dice"}


@pytest.mark.parametrize(
    ("net", "y", "match"),
    [
        (nn.Conv2d(1, 3, 1), torch.zeros(2, 5, 5), r"returned \(2, 3, 5, 5\)"),
        (nn.Conv2d(1, 2, 3), torch.zeros(2, 5, 5), r"\(batch, 2, \*space\)"),
        (nn.Conv2d(1, 2, 1), torch.full((2, 5, 5), 4), "from 4 to 4; Segmenter has the classes 0 to 1"),
    ],
)
def test_what_does_not_fit_is_refused(net, y, match):
    with pytest.raises(ValueError, match=match):
        Segmenter(net, num_classes=2)._segmented((torch.zeros(2, 1, 5, 5), y))
    with pytest.raises(ValueError, match=r"num_classes=1.*Background included"):
        Segmenter(net, num_classes=1)


def test_monais_unet_keeps_the_shape_and_its_recipe():
    pytest.importorskip("monai")
    net = MonaiUNet(2, widths=[4, 8])
    assert net(torch.zeros(1, 1, 8, 12, 8)).shape == (1, 2, 8, 12, 8)
    module = Segmenter(net, 2)
    assert module.hparams["net"]["init_args"]["widths"] == [4, 8]


def test_without_monai_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "monai", None)
    monkeypatch.setitem(__import__("sys").modules, "monai.networks.nets", None)
    with pytest.raises(ImportError, match=r"pip install 'monai>=\S+' 'nibabel>=\S+' 'wfdb>="):
        MonaiUNet(2)
