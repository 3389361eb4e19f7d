import copy

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from fedlightning.callbacks import GradientVariance, HessianTrace
from fedlightning.client.probes import (
    batch_gradient,
    mean_gradient,
    mean_loss,
    normalisation_statistics,
    outputs,
    sample_losses,
)
from tests.helpers import Toy, federate, global_state, same, toy_data


class Frozen(Toy):
    """Has a part that its user keeps in eval mode, as a frozen backbone's dropout."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Dropout().eval()


@pytest.mark.parametrize("probe", [mean_loss, sample_losses])
def test_a_probe_leaves_every_part_in_its_mode(probe):
    module = Frozen().train()
    module.frozen.eval()
    batch = [torch.ones(3, 6), torch.tensor([0, 1, 2])]
    value = probe(module, [batch], Precision(), 0, "probe")
    assert torch.as_tensor(value).isfinite().all()
    assert module.training and module.net.training and not module.frozen.training


class Remembers(Toy):
    """Its steps move a momentum encoder, a queue and what it has as attributes, as public implementations do."""

    def __init__(self, by="data"):
        super().__init__()
        self.by, self.key = by, copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("queue", torch.zeros(4, 6))
        self.norm = nn.BatchNorm1d(6)
        self.hidden, self.count, self.losses, self.draws = None, 0, [], np.random.default_rng(0)
        self.centre = torch.zeros(6)

    def training_step(self, batch, batch_idx):
        x = self.norm(batch[0])
        for followed, follower in zip(self.net.parameters(), self.key.parameters(), strict=True):
            if self.by == "data":
                follower.data = follower.data * 0.9 + followed.data * 0.1
            else:
                follower.data.mul_(0.9).add_(followed.data, alpha=0.1)
        self.queue[self.count % 4] = x[0].detach()
        self.centre += x.mean(0).detach()
        before = torch.zeros(6) if self.hidden is None else self.hidden.detach()
        self.hidden = x.mean(0) + 0.5 * before
        self.count += 1
        target = self.key(x).softmax(-1) + float(self.draws.random())
        loss = ((self.net(x + self.hidden) - target) ** 2).mean() + self.queue.mean()
        self.losses.append(loss.detach())
        return loss

    def everything(self):
        kept = {"centre": self.centre, "draw": torch.tensor(copy.deepcopy(self.draws).random())}
        kept |= {
            "hidden": torch.zeros(1) if self.hidden is None else self.hidden.detach(),
            "count": torch.tensor(self.count),
        }
        return copy.deepcopy(self.state_dict() | kept | {f"loss {i}": loss for i, loss in enumerate(self.losses)})


def _batches():
    return [(torch.randn(5, 6), torch.zeros(5).long()) for _ in range(2)]


PROBES = {
    "mean_loss": lambda module: mean_loss(module, _batches(), Precision(), 0),
    "sample_losses": lambda module: sample_losses(module, _batches(), Precision(), 0),
    "batch_gradient": lambda module: batch_gradient(module, _batches()[0], Precision(), 0),
    "mean_gradient": lambda module: mean_gradient(module, _batches(), Precision(), 0),
    "statistics": lambda module: normalisation_statistics(module, _batches(), Precision(), 0),
    "outputs": lambda module: outputs(
        module,
        _batches(),
        lambda net, batch: net.training_step(batch, 0).reshape(1),
        torch.device("cpu"),
        Precision(),
        0,
    ),
}


@pytest.mark.parametrize("by", ["data", "in place"])
@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_leaves_what_steps_move_beside_the_optimizer(probe, by):
    torch.manual_seed(0)
    module = Remembers(by).train()
    for batch in _batches():
        module.training_step(batch, 0)
    before, objects = module.everything(), (module.losses, module.hidden)
    PROBES[probe](module)
    same(module.everything(), before)
    assert (module.losses, module.hidden) == objects and module.losses is objects[0]


def test_a_probe_of_a_second_model_that_trains_moves_it():
    module = Remembers().train()
    before = module.everything()
    batch_gradient(module, _batches()[0], Precision(), 0, update_buffers=True)
    after = module.everything()
    assert module.count == 1 and not torch.equal(before["key.0.weight"], after["key.0.weight"])


@pytest.mark.parametrize("callback", [HessianTrace(), GradientVariance()], ids=lambda one: type(one).__name__)
def test_a_run_with_a_probe_and_one_without_train_the_same_model(callback):
    torch.manual_seed(0)
    module, data = Remembers(), toy_data()
    runs = [federate(copy.deepcopy(module), data, callbacks, max_rounds=2) for callbacks in ([], [callback])]
    same(*map(global_state, runs))
