"""Mixtures of groups: sheet B 1.8.8."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlightning.client.data_summary import describe
from fedlightning.datamodules import DigitsDataModule, MixtureDataModule
from fedlightning.datamodules.held_out import exclude_clients
from fedlightning.server.summary import describe_data

HALVES = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]

DETAILS = ("classes", "splits")


def mixed(**options):
    source = DigitsDataModule(val_fraction=options.pop("val_fraction", 0.0), flatten=options.pop("flatten", False))
    data = MixtureDataModule(source, **{"num_clients": 10, "groups": HALVES, "label_space": "joint"} | options)
    data.setup()
    return data


def first_share(data, split="train"):
    """The share of each client's samples that have a class of the first group."""
    counts = [np.array(data.class_counts(client, split)) for client in data.client_ids]
    return np.array([count[:5].sum() / count.sum() for count in counts])


@pytest.mark.parametrize(
    ("mixture", "expected"),
    [
        ("10:90", [0.9] * 5 + [0.1] * 5),
        ("30:70", [0.7] * 5 + [0.3] * 5),
        ("0:100", [1.0] * 5 + [0.0] * 5),
        ("linear", (np.arange(10) + 0.5) / 10),
        ([[0.25, 0.75]] * 10, [0.25] * 10),
    ],
)
def test_shares(mixture, expected):
    data = mixed(mixture=mixture)
    sizes = {data.num_samples(client) for client in data.client_ids}
    assert len(sizes) == 1 and sizes.pop() >= 60
    assert first_share(data) == pytest.approx(np.array(expected), abs=0.01)
    assert first_share(data, "test") == pytest.approx(np.array(expected), abs=0.04)
    assert data.client_shares[:, 0] == pytest.approx(np.array(expected))


def test_random_shares_are_uniform_for_two_groups():
    from scipy.stats import kstest

    data = MixtureDataModule(DigitsDataModule(), 400, HALVES, "random")
    assert kstest(data.shares(np.random.default_rng(0))[:, 0], "uniform").pvalue > 0.01
    three = MixtureDataModule(DigitsDataModule(), 400, [[0], [1], [2]], "random").shares(np.random.default_rng(0))
    assert np.allclose(three.sum(1), 1) and (three >= 0).all()
    assert three.mean(0) == pytest.approx([1 / 3] * 3, abs=0.04)


def test_shares_that_were_drawn_are_those_of_the_data():
    data = mixed(mixture="random")
    assert data.client_shares[:, 0] == pytest.approx(first_share(data), abs=0.01) and np.ptp(first_share(data)) > 0.3


def test_no_sample_is_used_twice_and_classes_of_a_group_come_evenly():
    data = mixed(val_fraction=0.2)
    for split in ("train", "val", "test"):
        held = np.concatenate([data.indices(client, split) for client in data.client_ids])
        assert len(np.unique(held)) == len(held)
    both = set(data.indices("0", "train")) & set(data.indices("0", "val"))
    assert not both
    counts = np.array(data.class_counts("0", "train"))[:5] + np.array(data.class_counts("0", "val"))[:5]
    assert counts.max() - counts.min() <= 2


def test_the_test_data_can_be_shifted():
    data = mixed(shift=True)
    assert first_share(data, "test") == pytest.approx(1 - first_share(data), abs=0.05)


def test_label_spaces():
    assert mixed().num_classes == 10
    assert mixed(label_space="shared").num_classes == 5
    shared = mixed(label_space="shared", mixture="0:100")
    x, y = shared.client_dataloader("9", "train").dataset[0]
    joint = mixed(mixture="0:100").client_dataloader("9", "train").dataset[0]
    assert torch.equal(x, joint[0]) and int(y) + 5 == int(joint[1])


def test_rotations():
    data = mixed(groups="rotation", label_space="shared", mixture="0:100")
    source = DigitsDataModule().load()[0]
    assert data.num_classes == 10
    for client, turns in (("0", 0), ("9", 1)):
        for index in data.indices(client)[:5]:
            x, y = data.client_dataloader(client, "train").dataset.dataset[int(index)]
            assert torch.equal(x, torch.rot90(source.x[index], turns, (1, 2))) and y == source.y[index]
    assert mixed(groups="rotation").num_classes == 20


def test_each_groups_hold_out_data():
    data = mixed(groups="rotation", label_space="joint")
    whole = 0
    for group in (0, 1):
        labels = torch.cat([y for _, y in data.group_dataloader(group)])
        assert set((labels // 10).tolist()) == {group}
        whole += len(labels)
    assert whole == 359
    with pytest.raises(ValueError, match="no group 2"):
        data.group_dataloader(2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixture": "half"}, "use '10:90'"),
        ({"mixture": [[1.0, 0.0]]}, "give 10 rows"),
        ({"mixture": "-1:2"}, "0 or more"),
        ({"groups": [[0], [0, 1]]}, "no class may be in two groups"),
        ({"groups": [[0], [11]]}, "class 11, which no train sample has"),
        ({"groups": [[0]]}, "a list of at least 2, each a list of at least one"),
        ({"groups": [[0], [1], [2]]}, "for 3 groups"),
        ({"label_space": "both"}, "label_space='both'. Use 'joint' or 'shared'"),
        ({"groups": "rotation", "flatten": True}, "these samples are none"),
        ({"num_clients": 900}, "cannot give 900 clients a sample each"),
    ],
)
def test_senseless_settings_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        mixed(**options)


def test_disjoint_groups_share_no_class_and_no_client():
    groups = [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    data = MixtureDataModule(DigitsDataModule(), 7, groups, mixture="disjoint", label_space="joint")
    data.setup()
    held = [{c for c, n in enumerate(data.class_counts(client)) if n} for client in data.client_ids]
    assert [groups.index(sorted(classes)) for classes in held] == [0, 0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="2 clients for 3 groups"):
        MixtureDataModule(DigitsDataModule(), 2, groups, mixture="disjoint")


def test_planted_groups_are_those_of_most_training_samples():
    groups = mixed(mixture="30:70", shift=True).planted_groups
    assert groups == {str(client): int(client >= 5) for client in range(10)}
    table = [[0.5, 0.5], [0.25, 0.75], [0.75, 0.25]]
    data = mixed(num_clients=3, mixture=table)
    assert data.planted_groups == {"1": 1, "2": 0}, "half and half is of neither group"
    assert describe_data(describe(exclude_clients(data, ["2"]), details=DETAILS))["groups"] == {"1": 1}
    plain = DigitsDataModule()
    plain.setup()
    assert "groups" not in describe_data(describe(plain, details=DETAILS))


def test_a_source_by_group_is_refused():
    with pytest.raises(ValueError, match="group or test_fraction"):
        MixtureDataModule(DigitsDataModule(group=lambda data: data.y.numpy()))
