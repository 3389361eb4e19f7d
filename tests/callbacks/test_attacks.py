"""LabelFlip: what bad clients train on, and that nothing else changes. Attacks on what is sent are tested with the rules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.callbacks import FedAvg
from fedlightning.callbacks.attacks import GaussianAttack, LabelFlip
from fedlightning.datamodules.loaders import LoaderDataModule
from tests.helpers import Toy, federate, global_state, same, toy_data

SIZES = {"0": 24, "1": 40, "2": 16}


def module():
    torch.manual_seed(0)
    return Toy()


@pytest.mark.parametrize("loop", ["fast", "trainer"])
def test_it_is_training_on_data_with_those_labels(loop):
    def data(flipped):
        draw = torch.Generator().manual_seed(0)
        loaders = {}
        for name, size in SIZES.items():
            x, y = torch.randn(size, 6, generator=draw), torch.randint(0, 3, (size,), generator=draw)
            loaders[name] = DataLoader(TensorDataset(x, 2 - y if name in flipped else y), batch_size=8)
        return LoaderDataModule(loaders)

    options = {"max_rounds": 2, "local_loop": loop}
    attacked = federate(module(), data(()), [FedAvg(), LabelFlip(clients=["0", "2"], classes=3)], **options)
    same(global_state(attacked), global_state(federate(module(), data(("0", "2")), [FedAvg()], **options)))


def test_nobody_bad_changes_nothing():
    plain = federate(module(), toy_data(SIZES), [FedAvg()], max_rounds=2)
    same(
        global_state(federate(module(), toy_data(SIZES), [FedAvg(), LabelFlip([], 3)], max_rounds=2)),
        global_state(plain),
    )


def test_order_and_samples_stay():
    plain = federate(module(), toy_data(SIZES), [FedAvg()], max_rounds=1)
    attacked = federate(module(), toy_data(SIZES), [FedAvg(), LabelFlip(["1"], 3)], max_rounds=1)
    assert attacked.server.costs.steps == plain.server.costs.steps
    assert any(
        not torch.equal(a, b)
        for a, b in zip(global_state(attacked).values(), global_state(plain).values(), strict=True)
    )


def test_what_it_cannot_flip_is_said():
    with pytest.raises(ValueError, match="is to be made by client '7'"):
        federate(module(), toy_data(SIZES), [LabelFlip([7], 3)], max_rounds=1)
    with pytest.warns(UserWarning, match="needs batches"):
        federate(module(), toy_data(SIZES), [LabelFlip(["1"], 2)], max_rounds=1)
    with pytest.raises(ValueError, match="needs batches"):
        LabelFlip(["1"], 3).flipped(torch.zeros(3))


def test_gaussian_noise_is_in_the_place_of_the_change_and_another_one_for_each_entry():
    client = SimpleNamespace(rng=lambda address: torch.Generator().manual_seed(len(address)))
    attack, change = GaussianAttack(["1"], std=0.5), torch.full((4000,), 9.0, dtype=torch.float64)
    sent = attack.attacked(client, change, "w")
    assert abs(float(sent.mean())) < 0.05 and float(sent.std()) == pytest.approx(0.5, rel=0.05)
    assert not torch.equal(sent, attack.attacked(client, change, "bias"))
