"""What data that are held once keep of them."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import TensorDataset

from fedlightning.datamodules import Split


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
