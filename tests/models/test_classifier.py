"""The classification module inside Lightning: training, scores, binary heads, precision, refusals."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Trainer
from sklearn import metrics as sk
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedlightning import FederatedTrainer
from fedlightning.callbacks import FedAvg
from fedlightning.datamodules import DigitsDataModule, IIDPartitioner
from fedlightning.models import MLP, Classifier, DigitsCNN, LogisticRegression, SmallTransformer, TinyNet
from fedlightning.models.classifier import check_labels


def loader(x: Tensor, y: Tensor, batch_size: int = 16) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def blobs(samples: int = 200, classes: int = 3, features: int = 4) -> tuple[Tensor, Tensor]:
    y = torch.arange(samples) % classes
    return torch.randn(samples, features) * 0.3 + torch.nn.functional.one_hot(y, features).float(), y


def quiet(**kwargs: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, **{"max_epochs": 1, **kwargs},
    )  # fmt: skip


def run_test(module: Classifier, x: Tensor, y: Tensor, **kwargs: Any) -> dict[str, float]:
    (result,) = quiet(**kwargs).test(module, loader(x, y), verbose=False)
    return {name: float(value) for name, value in result.items()}


def test_trains_with_its_default_optimizer_and_logs() -> None:
    x, y = blobs()
    module = Classifier(MLP(4, [16], 3), 3)
    optimizer = module.configure_optimizers()
    assert type(optimizer) is torch.optim.SGD and optimizer.defaults["lr"] == 0.1
    assert optimizer.defaults["momentum"] == optimizer.defaults["weight_decay"] == 0
    trainer = quiet(max_epochs=8)
    trainer.fit(module, loader(x, y), loader(x, y, 64))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    names = ("loss", "accuracy", "balanced_accuracy", "f1_macro", "f1_macro_all", "auroc", "ece")
    assert set(logged) == {"train_loss", *(f"val_{name}" for name in names)}
    assert logged["val_accuracy"] > 0.9 and logged["val_auroc"] > 0.95
    result = run_test(module, x, y)
    assert set(result) == {f"test_{name}" for name in names}
    for name in names:  # same data, other batches, same module
        assert result[f"test_{name}"] == pytest.approx(logged[f"val_{name}"])


@pytest.mark.parametrize(
    "norm", ["batch", pytest.param("none", marks=pytest.mark.slow), pytest.param("group", marks=pytest.mark.slow)]
)
def test_digits_are_learnt_in_seconds(norm: Any) -> None:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(y))
    x, y = x[order], y[order]
    trainer = quiet(max_epochs=3)
    trainer.fit(Classifier(DigitsCNN(norm=norm), 10), loader(x[:1400], y[:1400]), loader(x[1400:], y[1400:], 100))
    assert trainer.callback_metrics["val_accuracy"] > 0.9


@pytest.mark.slow
def test_text_is_learnt() -> None:
    """Does the token 7 occur? Needs attention to every place and to the mask."""
    tokens = torch.randint(1, 12, (256, 6))
    tokens[torch.arange(6) >= torch.randint(2, 7, (256, 1))] = 0
    y = (tokens == 7).any(1).long()
    net = SmallTransformer(12, 2, max_length=6, dim=16, num_heads=2, num_layers=1, dropout=0.0)
    trainer = quiet(max_epochs=12)
    trainer.fit(Classifier(net, 2, functools.partial(torch.optim.AdamW, lr=3e-3)), loader(tokens, y), loader(tokens, y))
    assert trainer.callback_metrics["val_balanced_accuracy"] > 0.9


def test_scores_of_an_epoch_are_sklearns_and_are_reset() -> None:
    x, y = blobs(50)
    module = Classifier(MLP(4, [8], 3), 3)
    first = run_test(module, x, y)
    guess = module(x).argmax(1)
    assert first["test_f1_macro"] == pytest.approx(sk.f1_score(y, guess, average="macro"), abs=1e-6)
    assert first["test_balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, guess), abs=1e-6)
    area = sk.roc_auc_score(y, module(x).softmax(1).detach(), multi_class="ovr")
    assert first["test_auroc"] == pytest.approx(area, abs=1e-6)
    assert not module.test_metrics.logits and not module.test_metrics.update_called  # nothing is held on to
    assert run_test(module, x[:20], y[:20]) != first
    assert run_test(module, x, y) == first


@pytest.mark.parametrize("num_classes", [1, 2])
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)], ids=["N", "N,1"])
@pytest.mark.parametrize("dtype", [torch.long, torch.float32, torch.bool])
def test_one_logit_is_binary(num_classes: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y = blobs(60, 2, 13)
    module = Classifier(TinyNet(), num_classes)
    logit = module(x).squeeze(1)
    result = run_test(module, x, y.to(dtype).reshape(shape))
    wanted = nn.functional.binary_cross_entropy_with_logits(logit, y.float())
    assert result["test_loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert result["test_accuracy"] == pytest.approx(float(((logit > 0) == y).float().mean()))
    assert result["test_auroc"] == pytest.approx(sk.roc_auc_score(y, logit.detach()), abs=1e-6)
    probability = module.predict_step((x, y))
    torch.testing.assert_close(probability, torch.stack([1 - logit.sigmoid(), logit.sigmoid()], 1))


def test_one_logit_trains_as_two() -> None:
    """Binary cross entropy of z is the cross entropy of (0, z), label smoothing included."""
    module, y = Classifier(LogisticRegression(3), 1), torch.tensor([0, 1, 1, 0])
    logit = torch.randn(4, 1)
    pair = torch.cat([torch.zeros(4, 1), logit], 1)
    for smoothing in (0.0, 0.2):
        wanted = nn.functional.cross_entropy(pair, y, label_smoothing=smoothing)
        torch.testing.assert_close(module.loss(logit, y, smoothing), wanted)
        torch.testing.assert_close(module.loss(logit[:, 0], y, smoothing), wanted)


def test_label_smoothing_is_for_training_only() -> None:
    x, y = blobs(30)
    net = MLP(4, [8], 3)
    smooth, plain = Classifier(net, 3, label_smoothing=0.3), Classifier(net, 3)
    assert smooth.training_step((x, y), 0) != plain.training_step((x, y), 0)
    assert run_test(smooth, x, y) == run_test(plain, x, y)


def test_one_class_only_is_quiet() -> None:
    x, _ = blobs(40)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(sample|nan|metric|AUROC|class)")
        result = run_test(Classifier(MLP(4, [8], 3), 3), x, torch.zeros(40, dtype=torch.long))
    assert result["test_auroc"] != result["test_auroc"] and result["test_loss"] > 0


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true"])
def test_other_precisions(precision: Any) -> None:
    x, y = blobs(60)
    module = Classifier(DigitsCNN(3, norm="batch", input_size=4), 3)
    x = x.repeat(1, 4).to(torch.float64 if precision == "64-true" else torch.float32)
    x = x.bfloat16() if precision == "bf16-true" else x
    trainer = quiet(precision=precision, max_epochs=2)
    trainer.fit(module, loader(x, y), loader(x, y))
    assert trainer.callback_metrics["train_loss"].isfinite()
    assert 0.5 < float(trainer.callback_metrics["val_auroc"]) <= 1
    low = module.class_logits(torch.randn(2, 3, dtype=torch.bfloat16))
    assert low.dtype == torch.float32 and module.loss(low, torch.tensor([0, 1])).dtype == torch.float32


@pytest.mark.parametrize(
    ("y", "sentence"),
    [
        ([0, 1, 3], r"Label 3 is outside 0 \.\. 2: the Classifier has 3 classes\. Set num_classes=4"),
        ([0, -100, 1], r"Label -100 is outside 0 \.\. 2.*Remove unlabelled samples"),
        ([0.0, 0.5, 1.0], "The labels hold fractions"),
    ],
)
@pytest.mark.parametrize("step", ["training_step", "validation_step", "test_step"])
def test_labels_out_of_range(y: list[float], sentence: str, step: str) -> None:
    module = Classifier(MLP(4, [], 3), 3)
    run: Callable[..., Any] = getattr(module, step)
    with pytest.raises(ValueError, match=sentence):
        run((torch.randn(3, 4), torch.tensor(y)), 5)


def test_label_2_of_a_single_logit() -> None:
    """Binary cross entropy itself would take it without a word."""
    with pytest.raises(ValueError, match="Label 2 is outside 0"):
        Classifier(TinyNet(), 1).training_step((torch.randn(2, 13), torch.tensor([0, 2])), 0)


@pytest.mark.parametrize(
    ("outputs", "num_classes", "sentence"),
    [
        (5, 10, r"MLP returned logits of shape \(3, 5\), but Classifier\(num_classes=10\) needs \(N, 10\)"),
        (1, 3, r"\(3, 1\), but Classifier\(num_classes=3\) needs \(N, 3\)"),
        (2, 1, r"\(3, 2\), but Classifier\(num_classes=1\) needs \(N,\) or \(N, 1\)"),
    ],
)
def test_network_with_other_outputs(outputs: int, num_classes: int, sentence: str) -> None:
    module = Classifier(MLP(4, [], outputs), num_classes)
    with pytest.raises(ValueError, match=sentence):
        module.training_step((torch.randn(3, 4), torch.tensor([0, 0, 0])), 0)


def test_bad_arguments_and_batches() -> None:
    net = MLP(4, [], 3)
    with pytest.raises(ValueError, match=r"lr=0\.5 and an optimizer.*optimizer\.init_args\.lr"):
        Classifier(net, 3, optimizer=torch.optim.Adam, lr=0.5)
    with pytest.raises(ValueError, match=r"Classifier got num_classes=0. Use a whole number in \[1, inf\)"):
        Classifier(net, 0)
    with pytest.raises(ValueError, match=r"label_smoothing=1\.0"):
        Classifier(net, 3, label_smoothing=1.0)
    with pytest.raises(ValueError, match=r"needs batches \(x, y\), but the loader gave a dict"):
        Classifier(net, 3).training_step({"x": 1}, 0)


def test_optimizer_scheduler_and_learning_rate() -> None:
    net = MLP(4, [], 3)
    assert Classifier(net, 3, lr=0.5).configure_optimizers().defaults["lr"] == 0.5
    adam = functools.partial(torch.optim.AdamW, lr=0.02)
    step = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    module = Classifier(net, 3, optimizer=adam, scheduler=step)
    made = module.configure_optimizers()
    assert type(made["optimizer"]) is torch.optim.AdamW
    assert made["optimizer"].defaults["weight_decay"] == 0.01  # AdamW's own default, not SGD's 0
    assert made["lr_scheduler"]["interval"] == "epoch"
    trainer = quiet(max_epochs=3)
    trainer.fit(module, loader(*blobs(20)))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.02 / 8)
    by_step = Classifier(net, 3, scheduler=step, scheduler_interval="step").configure_optimizers()
    assert by_step["lr_scheduler"]["interval"] == "step"
    plateau = Classifier(net, 3, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    quiet().fit(plateau, loader(*blobs(20)), loader(*blobs(20)))


def test_head_and_state_dict_hold_the_network_alone() -> None:
    module = Classifier(DigitsCNN(norm="batch"), 10)
    assert module.head_name == "net.fc" and isinstance(module.get_submodule(module.head_name), nn.Linear)
    quiet(limit_val_batches=1).validate(module, loader(torch.randn(8, 64), torch.arange(8)), verbose=False)
    assert list(module.state_dict()) == [f"net.{name}" for name in module.net.state_dict()]


def test_copies_are_independent_and_train_alike() -> None:
    x, y = blobs(60)
    module = Classifier(MLP(4, [8], 3), 3, optimizer=functools.partial(torch.optim.AdamW, lr=0.01))
    others = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    before = copy.deepcopy(module.state_dict())
    for other in others:
        quiet().fit(other, loader(x, y), loader(x, y))
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    first, second = (other.state_dict() for other in others)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["net.fc1.weight"], before["net.fc1.weight"])


def test_loss_and_label_check_under_vmap() -> None:
    """Many clients at once: values cannot be read there, and the check steps aside."""
    module = Classifier(MLP(4, [8], 3), 3)
    weights = {name: torch.stack([value, value * 2]) for name, value in module.net.named_parameters()}

    def loss(state: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        check_labels(y, 3)
        return module.loss(torch.func.functional_call(module.net, state, (x,)), y)

    x, y = torch.randn(2, 5, 4), torch.randint(0, 3, (2, 5))
    stacked = torch.func.vmap(torch.func.grad(loss))(weights, x, y)
    alone = torch.func.grad(loss)({name: value[1] for name, value in weights.items()}, x[1], y[1])
    for name, value in alone.items():
        torch.testing.assert_close(stacked[name][1], value)


def test_further_metrics_are_logged_where_they_are_asked_for_and_survive_a_checkpoint(tmp_path):
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader, TensorDataset

    data = DataLoader(TensorDataset(torch.randn(12, 4), torch.arange(12) % 3), batch_size=5)
    module = Classifier(MLP(4, [], 3), num_classes=3, more_metrics=["kappa", "pr_auc"])
    trainer = Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    (found,) = trainer.test(module, data, verbose=False)
    assert {"test_kappa", "test_pr_auc", "test_auroc"} <= set(found)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = Classifier.load_from_checkpoint(tmp_path / "one.ckpt")
    assert trainer.test(again, data, verbose=False)[0] == found
    (usual,) = trainer.test(Classifier(MLP(4, [], 3), num_classes=3), data, verbose=False)
    assert not {"test_kappa", "test_pr_auc"} & set(usual)


class Volumes(nn.Module):
    """A convolution of two dimensions, one of three, and a linear layer; it notes whether weights are contiguous."""

    inside: ClassVar[set[tuple[bool, ...]]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.plane = nn.Conv2d(2, 4, 3)
        self.space = nn.Conv3d(4, 5, (1, 3, 2))
        self.fc = nn.Linear(5 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        self.inside.add(tuple(weight.is_contiguous() for weight in (self.plane.weight, self.space.weight)))
        x = self.plane(x.view(-1, 2, 8, 4)).relu()
        return self.fc(self.space(x.unsqueeze(2)).flatten(1))


@pytest.mark.parametrize("local_loop", ["trainer", "fast"])
def test_channels_last_changes_the_layout_of_convolutions_and_nothing_else(local_loop: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    plain = Classifier(Volumes(), 10, lr=0.05)
    torch.manual_seed(0)
    module = Classifier(Volumes(), 10, lr=0.05, channels_last=True)
    models = {}
    for each in (plain, module):
        Volumes.inside.clear()
        trainer = FederatedTrainer(
            max_rounds=2, callbacks=[FedAvg()], engine="sequential", local_loop=local_loop,
            logger=False, enable_progress_bar=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(each, DigitsDataModule(partitioner=IIDPartitioner(3), max_train=200))
        models[each] = trainer.module().state_dict()
        assert Volumes.inside == {(each is plain, each is plain)}  # in every client's model
    for name, value in models[module].items():
        assert not torch.equal(value, module.state_dict()[name])  # trained
        torch.testing.assert_close(value, models[plain][name], rtol=1e-3, atol=1e-4)
    weights = models[module]
    assert weights["net.plane.weight"].is_contiguous(memory_format=torch.channels_last)
    assert weights["net.space.weight"].is_contiguous(memory_format=torch.channels_last_3d)
    assert not weights["net.space.weight"].is_contiguous()
