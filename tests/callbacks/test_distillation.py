"""What distillation on public data shares: inputs, logits, the divergence, and checks before round 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fedlightning.algorithm import Facts, FederatedCallback, Setup
from fedlightning.callbacks import DSFL, FCCL, FCCLPlus, FedBE, FedDF, FedET, FedMD, FjORD, pFedHR, pFedKnow
from fedlightning.callbacks.shared.distillation import PublicLogits, check_public_logits, inputs_of, kl, logits_of
from fedlightning.callbacks.shared.representations import LABEL_KEYS
from fedlightning.datamodules.labels import LABEL_KEYS as OF_DATA
from fedlightning.testing.toys import ToyData, ToyModule, federate
from tests import helpers
from tests.callbacks.public import public_data
from tests.tasks import Task, TaskData, module_for


def test_labels_have_the_same_names_everywhere() -> None:
    assert LABEL_KEYS == OF_DATA


def test_divergence_is_that_of_the_definition() -> None:
    teacher, student = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    p, q = (torch.softmax(z / 3, 1) for z in (teacher, student))
    expected = 9 * (p * (p / q).log()).sum(1).mean()
    torch.testing.assert_close(kl(teacher, student, 3.0), expected)
    leaves = [z.detach().requires_grad_() for z in (teacher, student)]
    kl(*leaves, 3.0).backward()
    assert leaves[0].grad is None and leaves[1].grad is not None
    assert kl(teacher.half(), student.half()).dtype == torch.float32


def test_at_high_temperature_the_gradient_is_that_of_the_logits() -> None:
    teacher, student = (torch.tensor([row]) for row in ([1.0, -2.0, 1.0], [0.5, 0.5, -1.0]))
    student.requires_grad_()
    kl(teacher, student, 1e3).backward()
    torch.testing.assert_close(student.grad, ((student - teacher) / 3).detach(), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    "batch", [(), {"x": torch.zeros(2), "mask": torch.zeros(2), "y": 1}, {"label": torch.zeros(2)}, "words", ["words"]]
)
def test_batches_without_one_input_are_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="FedX gives the model the inputs of a batch, one tensor"):
        inputs_of(batch, "FedX")


def test_one_logit_is_that_of_class_one() -> None:
    x = torch.randn(4, 3)
    for net in (nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))):
        logits = logits_of(net, x)  # type: ignore[arg-type]
        torch.testing.assert_close(logits.softmax(1)[:, 1], net(x).reshape(-1).sigmoid())


# -- before round 1 ----------------------------------------------------------------------------------------------------
class Method(FederatedCallback):
    """Needs public data, with labels or without."""

    def __init__(self, labels: bool = False) -> None:
        self.labels = labels

    facts = Facts(requires=[PublicLogits(labels="labels")])

    def check(self, setup: Setup) -> None:
        assert check_public_logits(self.key, setup, self.labels) == 3


class Data(ToyData):
    """Public data of choice."""

    def __init__(self, public: Any) -> None:
        super().__init__((12, 7))
        self.given = public

    def public_dataloader(self) -> Any:
        return None if self.given is None else DataLoader(self.given, batch_size=4)


class Stream(IterableDataset[Any]):
    """Samples without positions."""

    def __iter__(self) -> Any:
        return iter(torch.zeros(3, 6))


class NoLogits(ToyModule):
    """Its forward gives the loss' ingredients, not logits."""

    def forward(self, x: Any) -> Any:
        return {"logits": super().forward(x)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0])["logits"], batch[1])

    validation_step = None  # type: ignore[assignment]


class Few(ToyModule):
    """Has two logits for three classes, which its loss hides."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1] % 2)

    validation_step = None  # type: ignore[assignment]


class Manual(ToyModule):
    """Optimizes inside `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


X, Y = torch.randn(9, 6), torch.zeros(9, dtype=torch.long)


def fit(root: Path, data: Any, module: Any = None, labels: bool = False) -> Any:
    from fedlightning import FederatedTrainer

    trainer = FederatedTrainer(
        callbacks=[Method(labels)],
        default_root_dir=root,
        max_rounds=1,
        local_steps=1,
        logger=False,
        save_state=0,
        enable_progress_bar=False,
        accelerator="cpu",
        sanity_check=False,
        evaluation=0,
    )
    trainer.fit(module or ToyModule(), data)
    return trainer


@pytest.mark.parametrize(
    ("public", "module", "labels", "words"),
    [
        (None, None, False, "Method trains on public data, but the data module has none. Set public=0.1"),
        (Stream(), None, False, "draw public samples at random, by their index"),
        (TensorDataset(X), None, True, "Method, on public data, needs one class label a sample"),
        (
            TensorDataset(torch.zeros(9, 1, 4), Y),
            None,
            False,
            r"a public sample has the shape \(1, 4\), a client's \(6,\)",
        ),
        (TensorDataset(X, Y), NoLogits(), False, "cannot read the logits of NoLogits .* forward gives a dict"),
        (TensorDataset(X, Y), Few(), False, "Few gives 2, and a label is 2"),
        (TensorDataset(X, Y + 3), None, True, "ToyModule gives 3, and a label is 3"),
        (TensorDataset(X, Y), Manual(), False, "Manual optimizes manually"),
        (TensorDataset(X.double(), Y), None, False, "cannot read the logits of ToyModule"),
    ],
)
def test_what_distillation_cannot_work_with_is_refused(
    tmp_path: Path, public: Any, module: Any, labels: bool, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        fit(tmp_path, Data(public), module, labels)


def test_what_it_can_work_with_is_not(tmp_path: Path) -> None:
    fit(tmp_path / "a", Data(TensorDataset(X)))
    fit(tmp_path / "b", Data(TensorDataset(X, Y)), labels=True)


def test_a_check_moves_nothing(tmp_path: Path) -> None:
    class Silent(FederatedCallback):
        pass

    one, other = (
        federate(method, ToyData(), tmp_path / method.key, full=True, max_rounds=1) for method in (Method(), Silent())
    )
    for name, value in one.federation.server.model.items():
        assert torch.equal(value, other.federation.server.model[name])


@pytest.mark.parametrize(
    ("method", "size"),
    [
        (FedDF(batch_size=8), "batch_size"),
        (FedDF(batch_size=13, validation=0.2), "batch_size"),  # 14 are left
        (FedBE(batch_size=8), "batch_size"),
        (FedMD(public_samples=9, digest_batch_size=8), "batch size of the public data"),
        (FedMD(public_samples=9, digest_batch_size=8, transfer_epochs=0), "digest_batch_size"),
        (DSFL(distil_batch_size=4), "distil_batch_size"),
        (FCCL(public_batch_size=8), "public_batch_size"),
        (FCCLPlus(public_batch_size=8), "public_batch_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.key,
)
def test_a_last_public_batch_of_one_is_refused_where_a_model_has_batch_normalisation(
    method: FederatedCallback, size: str
) -> None:
    with pytest.raises(ValueError, match=rf"last batch is one sample, and NormNet cannot train on one: .*{size}"):
        helpers.federate(helpers.NormNet(), public_data(public=17, batch_size=16), [method])


def test_a_last_public_batch_of_one_is_no_matter_to_other_models() -> None:
    data = public_data(public=17)
    helpers.federate(helpers.Toy(), data, [FedDF(batch_size=8, steps=4)], max_rounds=1)
    still = FedDF(batch_size=8, steps=4, update_statistics=False)
    helpers.federate(helpers.NormNet(), data, [still], max_rounds=1)


@pytest.mark.parametrize("task", ["regression", "multi-label"])
@pytest.mark.parametrize(
    "method",
    [
        *(DSFL(), FedDF(), FedBE(), FCCL(head="head"), FCCLPlus(head="head"), FedET(), pFedHR(), pFedKnow(head="head")),
        FedMD(transfer_epochs=0, digest_loss="kl"),
        FjORD(head="head"),
    ],
    ids=lambda method: method.key,
)
def test_a_softmax_is_refused_where_a_sample_has_no_class(method: FederatedCallback, task: Task) -> None:
    with pytest.raises(ValueError, match=f"{method.key}.*a sample has targets"):
        helpers.federate(module_for(task), TaskData(task), [method])


@pytest.mark.parametrize("task", ["regression", "multi-label"])
@pytest.mark.parametrize(
    "method",
    [FedMD(transfer_epochs=0), FedDF(steps=0), FedBE(epochs=0), FedET(steps=0), DSFL(distil_epochs=0)],
    ids=lambda method: method.key,
)
def test_what_compares_no_softmax_is_not(method: FederatedCallback, task: Task) -> None:
    helpers.federate(module_for(task), TaskData(task), [method], max_rounds=1)


class Imputes(ToyModule):
    """Has an answer for inputs that are missing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.nan_to_num())


@pytest.mark.parametrize("labels", [False, True])
def test_public_inputs_that_are_not_finite_are_named(tmp_path: Path, labels: bool) -> None:
    """It was blamed on the learning rate, after a round."""
    x = X.clone()
    x[7, 2] = float("nan")
    with pytest.raises(ValueError, match=r"Method compares .* inputs of public sample 7 hold NaN or infinite"):
        fit(tmp_path / "a", Data(TensorDataset(x, Y)), labels=labels)
    fit(tmp_path / "b", Data(TensorDataset(x, Y)), Imputes(), labels=labels)
