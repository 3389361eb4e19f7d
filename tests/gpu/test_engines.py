"""Engines on one GPU: stacks, and several worker processes that share it; random numbers have addresses everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedlightning.callbacks import APFL, FENDA, SCAFFOLD, Ditto, FedAvg, FedProx
from fedlightning.options import Processes
from tests.gpu.on import HERE, near
from tests.gpu.test_loops import digits
from tests.helpers import NormNet, Toy, differs, federate, same, toy_data
from tests.stacked.test_vectorized_engine import ADAM, SGD, assert_equal, pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*has no training samples"),
    pytest.mark.filterwarnings("ignore:.*took no real step"),
]

STACKED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "FedAvg": (Toy, FedAvg, {}),
    "FedProx, clipped": (Toy, FedProx, {"gradient_clip_val": 0.1}),
    "SCAFFOLD": (Toy, SCAFFOLD, {}),
    "Ditto, normalised": (NormNet, Ditto, {}),
    "APFL": (Toy, APFL, {"local_steps": 3}),
    "FENDA": (NormNet, lambda: FENDA(head="net.3"), {}),
    "FedAvg, two at a time": (Toy, FedAvg, {"clients_per_stack": 2}),
    "FedAvg, Adam": (lambda: Toy("adam"), FedAvg, {}),
    "FedAvg, dropout": (lambda: Toy(dropout=0.3), FedAvg, {}),
}


class Noisy(Toy):
    """Adds noise to the inputs where the model is, and drops half of the hidden units."""

    def __init__(self) -> None:
        super().__init__("momentum", dropout=0.5)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x + 0.1 * torch.randn_like(x), y) if self.training else batch


@pytest.mark.parametrize("name", STACKED)
def test_a_stack_takes_the_steps_of_sequential(name: str) -> None:
    make, callback, options = STACKED[name]
    assert_equal(pair(make(), [callback()], **HERE | options), ADAM if "Adam" in name else SGD)


def test_convolutions_in_a_stack_take_the_steps_of_sequential() -> None:
    near(digits(engine="vectorized"), digits(), 1e-4)


@pytest.mark.parametrize("kind", ["augmented", "normalised"])
def test_four_worker_processes_on_one_device_have_the_bits_of_sequential(kind: str) -> None:
    module = Noisy() if kind == "augmented" else NormNet("adam", dropout=0.3)
    runs = [
        federate(module, toy_data([24, 40, 16, 10, 12]), [Ditto()], deterministic=True, **HERE, **engine)
        for engine in ({}, {"engine": Processes(4)})
    ]
    same(*(run.server.model for run in runs))
    near(*runs, 0.0)


def test_random_numbers_on_the_device_have_addresses() -> None:
    """What is drawn does not depend on what this process drew before; and something is drawn."""
    module, models = Noisy(), []
    for seed, drawn_before in ((0, 0), (0, 5), (1, 0)):
        torch.rand(drawn_before, device=HERE["accelerator"])
        trainer = federate(module, toy_data(), [FedAvg()], seed=seed, deterministic=True, **HERE)
        models.append(trainer.server.model)
    same(models[0], models[1])
    assert differs(models[0], models[2])
