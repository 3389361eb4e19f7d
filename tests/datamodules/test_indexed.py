"""What data that are held once keep of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedlightning.datamodules import IndexedFederatedDataModule, Split


def test_labels_and_groups_do_not_lie_in_the_datasets_memory() -> None:
    y, patients = torch.tensor([0, 1, 1]), torch.tensor([4, 4, 5])
    split = Split(TensorDataset(torch.zeros(3, 2), y), [[0, 1, 2]], y.numpy(), groups=patients.numpy())
    y.share_memory_(), patients.share_memory_()  # as torch does when it sends them to a loader's worker
    assert not np.shares_memory(split.labels, y.numpy()) and split.labels.flags.owndata
    assert split.groups.flags.owndata
    assert (split.labels.tolist(), split.groups.tolist()) == ([0, 1, 1], [4, 4, 5])


def test_what_has_memory_of_its_own_is_not_copied() -> None:
    labels = np.array([0, 1, 1])
    assert Split(TensorDataset(torch.zeros(3, 2)), [[0, 1, 2]], labels).labels is labels


class Mine(IndexedFederatedDataModule):
    """Five samples of two clients, with what a test says."""

    def __init__(self, rows=((0, 1, 2), (3, 4)), **arrays):
        super().__init__(2)
        self.rows, self.arrays = rows, arrays

    def build(self):
        return ["a", "b"], {"train": Split(TensorDataset(torch.arange(5.0)), self.rows, **self.arrays)}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"labels": np.array([0, 1])}, r"labels of int64 of shape \(2,\) for 5 samples"),
        ({"labels": np.zeros((5, 1), int)}, r"labels of int64 of shape \(5, 1\)"),
        ({"labels": np.zeros(5)}, "labels of float64"),
        ({"labels": np.array(list("abcab"))}, "labels of <U1"),
        ({"labels": [0, 1, 0, 1, 1]}, "labels of kind list"),
        ({"groups": np.arange(6)}, r"groups of int64 of shape \(6,\)"),
        ({"rows": [[0, 1], [2, 5]]}, "client 'b' has the row 5 in its train split, and there are 5 samples"),
        ({"rows": [[-6], [2, 3]]}, "client 'a' has the row -6"),
        ({"rows": [[0.0, 1.0], [2]]}, "client 'a' has the row float64"),
    ],
)
def test_labels_groups_and_rows_go_with_the_samples(given, sentence) -> None:
    with pytest.raises(ValueError, match=f"^Mine.*{sentence}"):
        Mine(**given).setup()


def test_labels_may_be_a_tensor_and_a_client_may_have_nothing() -> None:
    data = Mine([[], [4, -5]], labels=torch.tensor([0, 1, 1, 0, 2]))
    data.setup()
    assert (data.num_samples("a"), data.num_samples("b"), data.num_classes) == (0, 2, 3)
