"""What becomes of updates as they come: what of them is counted."""

from __future__ import annotations

import gc
from typing import Any, ClassVar

import pytest
from torch import Tensor, nn

from fedlightning import FederatedCallback
from fedlightning.callbacks import FedAvg
from fedlightning.contract import Job
from tests.helpers import Toy, federate, toy_data


class CollectsLater(FederatedCallback):
    """Lets everybody train, and collects the models in a second list of jobs."""

    def plan_round(self, server):
        yield [Job(client, returns=()) for client in server.clients]
        yield [Job(client, work=0, returns=server.returned_names()) for client in server.clients]


def test_steps_of_a_model_that_is_collected_later_count_once():
    plain, later = (federate(Toy(), toy_data(), callbacks, max_rounds=2) for callbacks in ([], [CollectsLater()]))
    assert later.server.costs.steps == plain.server.costs.steps > 0
    assert later.server.costs.bytes_up == plain.server.costs.bytes_up > 0


class CountsModels(Toy):
    """Notes at each step how many memories of the size of its weight exist in the process."""

    width = 300
    counts: ClassVar[list[int]] = []

    def make(self, hidden: int, dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 3), nn.Linear(self.width, self.width, bias=False))

    def logits(self, x: Tensor) -> Tensor:
        return self.net[0](x) + 0 * self.net[1].weight.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
        large = [each for each in tensors if each.numel() == self.width**2 and each.device.type == "cpu"]
        self.counts.append(len({each.data_ptr() for each in large}))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("local_loop", ["fast", "trainer"])
def test_few_models_are_in_memory_at_once(local_loop):
    CountsModels.counts.clear()
    gc.collect()
    federate(CountsModels(), toy_data((8, 8, 8, 8)), [FedAvg()], local_loop=local_loop, max_rounds=2)
    # the user's module, the server's model, the client's and its gradient, and the sum, which is kept in float64
    assert 4 <= max(CountsModels.counts[1:]) <= 5
