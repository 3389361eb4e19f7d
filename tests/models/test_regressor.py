import copy

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.models import MLP, Classifier, RegressionMetrics, Regressor
from tests.helpers import make_trainer


def loaders(targets=1, clients="abc"):
    found = {}
    for number, client in enumerate(clients):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(40 + 4 * number, 5, generator=generator)
        y = x @ torch.arange(5.0 * targets).view(5, targets) / 5 + number
        found[client] = DataLoader(TensorDataset(x, y.squeeze(1) if targets == 1 else y), batch_size=8, shuffle=True)
    return found


@pytest.mark.parametrize("targets", [1, 3])
def test_scores_are_scikit_learns(targets):
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(50, targets, generator=generator) * 1e-4 + 3
    prediction = target + 1e-4 * torch.randn(50, targets, generator=generator)
    ours = RegressionMetrics()
    for part in (slice(0, 7), slice(7, 50)):
        ours.update(prediction[part], target[part], F.mse_loss(prediction[part], target[part]))
    found = {name: float(value) for name, value in ours.compute().items()}
    p, t = prediction.double().numpy(), target.double().numpy()
    expected = {
        "mse": sk.mean_squared_error(t, p),
        "rmse": sk.mean_squared_error(t, p) ** 0.5,
        "mae": sk.mean_absolute_error(t, p),
        "r2": sk.r2_score(t, p),
        "pearson": np.mean([np.corrcoef(p[:, k], t[:, k])[0, 1] for k in range(targets)]),
        "loss": sk.mean_squared_error(t, p),
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_undefined_scores_are_nan():
    ours = RegressionMetrics()
    ours.update(torch.tensor([[1.0]]), torch.tensor([[2.0]]), torch.tensor(1.0))
    found = ours.compute()
    assert found["mae"] == 1 and found["r2"].isnan() and found["pearson"].isnan()


@pytest.mark.parametrize("loss", ["mse", "l1", "huber"])
def test_losses(loss):
    module = Regressor(MLP(4, [], 1), loss=loss, huber_delta=0.5)
    x, y = torch.randn(9, 4), torch.randn(9)
    error = (module.net(x).squeeze(1) - y).abs()
    expected = {
        "mse": error**2,
        "l1": error,
        "huber": torch.where(error < 0.5, error**2 / 2, 0.5 * (error - 0.25)),
    }[loss].mean()
    for shape in (y, y.unsqueeze(1)):
        assert torch.allclose(module.loss(*module._predicted((x, shape))), expected)


def test_wrong_shapes_and_values_are_refused():
    module = Regressor(MLP(4, [], 2))
    with pytest.raises(ValueError, match=r"predictions of shape \(3, 2\) for targets of shape \(3,\)"):
        module._predicted((torch.zeros(3, 4), torch.zeros(3)))
    with pytest.raises(ValueError, match="Regressor needs batches"):
        module._predicted(torch.zeros(3, 4))
    for options, sentence in (
        ({"loss": "hinge"}, "loss='hinge'. Use 'mse', 'l1' or 'huber'"),
        ({"huber_delta": 0.0}, r"huber_delta=0.0. Use a number in \(0, inf\)"),
        ({"lr": 0.1, "optimizer": torch.optim.Adam}, "and an optimizer"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Regressor(MLP(4, [], 2), **options)


@pytest.mark.parametrize("targets", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_it_learns_alike_under_every_engine_and_comes_back_from_its_checkpoint(targets, tmp_path):
    states, scores = [], []
    torch.manual_seed(0)
    first = Regressor(MLP(5, [8], targets), lr=0.05, loss="huber")
    for name, options in {
        "fast": {"local_loop": "fast"},
        "trainer": {"local_loop": "trainer"},
        "vectorized": {"engine": "vectorized"},
    }.items():
        trainer = make_trainer(tmp_path / name, max_rounds=3, **options)
        given = loaders(targets)
        trainer.fit(copy.deepcopy(first), train_dataloaders=given, val_dataloaders=given)
        states.append(trainer.module().state_dict())
        scores.append([row["mean"] for row in trainer.results if not row["metric"].startswith("train")])
    for other in (1, 2):
        assert all(torch.allclose(states[0][key], states[other][key], atol=1e-6) for key in states[0])
        assert scores[0] == pytest.approx(scores[other], rel=1e-4, abs=1e-5)
    path = next((tmp_path / "fast").rglob("global.ckpt"))
    loaded = Regressor.load_from_checkpoint(path)
    assert loaded.loss_name == "huber" and torch.equal(loaded.net.fc1.weight, states[0]["net.fc1.weight"])


# -- focal loss --------------------------------------------------------------------------------------------------------
def test_the_binary_focal_loss_is_torchvisions():
    torchvision = pytest.importorskip("torchvision")
    logits, y = torch.randn(40, 1) * 4, torch.arange(40) % 2
    for alpha in (0.25, -1):
        weights = None if alpha < 0 else [1 - alpha, alpha]
        module = Classifier(MLP(4, [], 1), 1, focal_gamma=2.0, class_weights=weights)
        expected = torchvision.ops.sigmoid_focal_loss(logits[:, 0], y.float(), alpha=alpha, gamma=2.0, reduction="mean")
        assert torch.allclose(module.training_loss(logits, y), expected, rtol=1e-5)


def test_the_focal_loss_of_several_classes_is_the_formula():
    logits, y = torch.randn(40, 3, dtype=torch.float64, requires_grad=True), torch.arange(40) % 3
    weights = [5.5, 1.0, 0.25]
    module = Classifier(MLP(4, [], 3), 3, focal_gamma=1.5, class_weights=weights)
    probability = (logits.exp() / logits.exp().sum(1, keepdim=True))[range(40), y]
    expected = (torch.tensor(weights)[y] * -((1 - probability) ** 1.5) * probability.log()).mean()
    assert torch.allclose(module.training_loss(logits, y), expected)
    plain = Classifier(MLP(4, [], 3), 3, class_weights=weights)
    rows = torch.tensor(weights)[y]
    assert torch.allclose(plain.training_loss(logits, y), (rows * -probability.log()).sum() / rows.sum())
    zero = Classifier(MLP(4, [], 3), 3, focal_gamma=0.0)
    assert torch.allclose(zero.training_loss(logits, y), F.cross_entropy(logits, y))
    certain = torch.tensor([[80.0, 0.0, 0.0]], requires_grad=True)
    module.training_loss(certain, torch.tensor([0])).backward()
    assert certain.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"focal_gamma": -1.0}, "focal_gamma=-1.0"),
        ({"focal_gamma": 2.0, "label_smoothing": 0.1}, "no smoothing"),
        ({"class_weights": [1.0]}, "1 class_weights for 3 classes"),
        (
            {"class_weights": [1.0, float("nan"), 1.0]},
            r"class_weights=\[1.0, nan, 1.0\]. Use a list, each a number in \[0, inf\)",
        ),
        ({"class_weights": [0.0, 0.0, 0.0]}, "must not all be 0"),
    ],
)
def test_options_of_the_training_loss_are_checked(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        Classifier(MLP(4, [], 3), 3, **options)


def test_the_focal_loss_trains_alike_under_every_engine():
    states = []
    first = Classifier(MLP(5, [8], 3), 3, focal_gamma=2.0, class_weights=[1.0, 2.0, 3.0])
    given = {
        c: DataLoader(TensorDataset(torch.randn(24, 5), torch.arange(24) % 3), batch_size=8, shuffle=True) for c in "ab"
    }
    for options in ({"local_loop": "trainer"}, {"local_loop": "fast"}, {"engine": "vectorized"}):
        trainer = make_trainer(None, **options)
        trainer.fit(copy.deepcopy(first), train_dataloaders=given)
        states.append(trainer.federation.server.model)
    for other in states[1:]:
        assert all(torch.allclose(states[0][key], other[key], atol=1e-6) for key in states[0])
