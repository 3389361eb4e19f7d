"""FLTrust: the formula in plain numpy, the server's own training, what is refused, and attacks by most of the clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.callbacks import SCAFFOLD, FedAvg, FedLP, FedPer, FLTrust, HeteroFL, Krum
from fedlightning.callbacks.attacks import ALIE, ModelReplacement, SignFlip
from fedlightning.callbacks.fltrust import trusted
from fedlightning.options import FailurePolicy
from tests.helpers import Toy, ToyData, federate, global_state, make_trainer, same, samples, toy_data

SIZES = {"0": 24, "1": 24, "2": 24, "3": 24, "4": 24}


class WithRoot(ToyData):
    """Clients' data, and root data of the server."""

    root: tuple

    def public_dataloader(self):
        return DataLoader(TensorDataset(*self.root), batch_size=8)


def root_data(count=33, sizes=SIZES, **options):
    data = toy_data(sizes, batch_size=8, **options)
    made = WithRoot(data.tensors, batch_size=8)
    made.root = samples("root", "train", count, skew=0.0)
    return made


def module():
    torch.manual_seed(0)
    return Toy()


def reference(u, own):
    """The paper's three steps, one client after another."""
    total, weights = np.zeros_like(own), 0.0
    for row in u:
        length = np.linalg.norm(row)
        score = max(0.0, float(row @ own / (length * np.linalg.norm(own)))) if length else 0.0
        total += score * (np.linalg.norm(own) / length * row if length else row)
        weights += score
    return total / weights if weights else total


@pytest.mark.parametrize("seed", range(5))
def test_the_formula(seed):
    draw = torch.Generator().manual_seed(seed)
    u, own = (torch.randn(*size, generator=draw, dtype=torch.float64) for size in ((7, 4), (4,)))
    u[0] = 0.0
    u[1] *= 1e6
    np.testing.assert_allclose(trusted(u, own).numpy(), reference(u.numpy(), own.numpy()), atol=1e-12)
    assert float(trusted(u, own).norm()) <= float(own.norm()) * (1 + 1e-12)


def test_nobody_trusted_leaves_the_model():
    own = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert torch.equal(trusted(-own.repeat(3, 1), own), torch.zeros_like(own))
    assert torch.equal(trusted(torch.zeros(3, 2, dtype=torch.float64), own), torch.zeros_like(own))
    torch.testing.assert_close(trusted(5 * own.repeat(2, 1), own), own)


def test_the_servers_own_change_is_plain_sgd_on_its_data():
    whole = global_state(federate(module(), root_data(), [FLTrust(lr=0.05, batch_size=64, epochs=3)], max_rounds=1))
    plain, old = module(), module().state_dict()
    x, y = samples("root", "train", 33, skew=0.0)
    optimizer = torch.optim.SGD(plain.parameters(), 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
    own = torch.cat([(plain.state_dict()[name] - old[name]).double().flatten() for name in old])
    names = list(old)
    found = torch.cat([(whole[name] - old[name]).double().flatten() for name in names])
    assert 0 < float(found.norm()) <= float(own.norm()) * (1 + 1e-4)
    assert float(found @ own) > 0


@pytest.mark.parametrize("attack", [SignFlip([0, 1, 2], 20.0), ModelReplacement([0], 50.0), ALIE([0, 1, 2], z=5.0)])
def test_most_of_the_clients_may_be_bad(attack, tmp_path):
    def loss(callbacks):
        options = {"max_rounds": 4, "evaluation": 4, "local_steps": 6, "failures": FailurePolicy(update_limit=None)}
        trainer = federate(module(), root_data(), callbacks, **options)
        rows = [row.value for row in trainer.rows if (row.stage, row.split, row.metric) == ("G", "val", "val_loss")]
        return np.mean(rows)

    honest, attacked, defended = loss([FedAvg()]), loss([attack]), loss([attack, FLTrust(epochs=2, batch_size=8)])
    assert attacked > honest + 0.2
    assert defended < (attacked + honest) / 2


def test_a_resumed_run_is_the_same(tmp_path):
    def run(name, rounds, **resume):
        trainer = make_trainer(tmp_path, [FLTrust(batch_size=8)], max_rounds=rounds, name=name)
        trainer.fit(module(), datamodule=root_data(), **resume)
        return global_state(trainer)

    whole = run("whole", 3)
    run("cut", 1)
    same(whole, run("cut", 3, resume="last"))


class Unlabelled(WithRoot):
    def public_dataloader(self):
        return DataLoader(TensorDataset(self.root[0]), batch_size=8)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ([SCAFFOLD()], "SCAFFOLD takes delta_c from clients, which FLTrust does not judge"),
        ([FedPer(personal=["net.3"])], "FLTrust compares what clients have learnt.*FedPer"),
        ([FedLP()], "FLTrust compares what clients have learnt.*FedLP"),
        ([HeteroFL()], "both claim 'reduce'"),
        ([Krum()], "both claim 'reduce'"),
    ],
)
def test_what_is_refused_before_round_1(others, reason):
    with pytest.raises(ValueError, match=reason):
        make_trainer(None, [*others, FLTrust()], max_rounds=1).fit(module(), datamodule=root_data())


def test_root_data_have_to_be_there_with_labels():
    with pytest.raises(ValueError, match="FLTrust trains at the server on data of its own, but the data module has no"):
        federate(module(), toy_data(SIZES), [FLTrust()], max_rounds=1)
    data = root_data()
    data.__class__ = Unlabelled
    with pytest.raises(ValueError, match="FLTrust needs public samples with labels"):
        federate(module(), data, [FLTrust()], max_rounds=1)
