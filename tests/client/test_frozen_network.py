"""A frozen network is in memory once, and is kept by nobody: what clients hold of it takes no memory of its own."""

from __future__ import annotations

import copy
import gc
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedlightning.callbacks import APFL, Ditto, FedExLoRA, FedIT, FedPer, FedSALoRA, FLoRA, LocalCheckpoint, pFedMe
from fedlightning.compat.lazy_clones import copy_module, lazy_clone
from fedlightning.options import Processes
from fedlightning.tensors import module_state
from tests.helpers import Toy, close, differs, federate, global_state, make_trainer, same, toy_data

pytest.importorskip("peft")
WIDTH = 300
FROZEN = WIDTH**2
ADAPTERS: dict[str, Any] = {"r": 2, "target_modules": ["net.0"]}


class WithFrozen(Toy):
    """A small network beside a large weight that nothing trains; notes how many memories of its size there are at a step.

    It does so where there is a list for it: that looks at all objects of the process, which takes a tenth of a second.
    """

    counts: ClassVar[list[int] | None] = None

    def make(self, hidden: int, dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 3), nn.Linear(WIDTH, WIDTH, bias=False))

    def logits(self, x: Tensor) -> Tensor:
        return self.net[0](x) + 0 * self.net[1].weight.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.counts is not None:
            self.counts.append(len(memories()))
        return super().training_step(batch, batch_idx)


def with_frozen() -> WithFrozen:
    torch.manual_seed(0)
    return WithFrozen()


def memories() -> set[int]:
    """Addresses of the memories of the frozen weight's size; `data_ptr` would make lazy clones real."""
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    return {torch._C._data_address(each) for each in tensors if each.numel() == FROZEN}


@pytest.mark.parametrize("local_loop", ["fast", "trainer"])
@pytest.mark.parametrize(
    ("methods", "most"),
    [
        ([FedIT(**ADAPTERS)], 1),
        ([FedSALoRA(**ADAPTERS)], 1),
        ([FLoRA(**ADAPTERS)], 1),
        ([FedExLoRA(**ADAPTERS)], 1),
        ([FedIT(**ADAPTERS), FedPer(personal=["net.0"])], 1),
        ([FedIT(**ADAPTERS), LocalCheckpoint(smooth=1)], 1),
        # a second model is written into the client's module, and what was there is put back after it
        ([FedIT(**ADAPTERS), Ditto()], 5),
        ([FedIT(**ADAPTERS), APFL()], 5),
        ([FedIT(**ADAPTERS), pFedMe()], 5),
    ],
    ids=lambda value: " ".join(method.key for method in value) if isinstance(value, list) else "",
)
def test_a_frozen_network_is_in_memory_once_however_many_clients(methods, most, local_loop, monkeypatch):
    monkeypatch.setattr(WithFrozen, "counts", counts := [])
    gc.collect()
    before = len(memories())
    federate(
        with_frozen(), toy_data((8,) * 6), copy.deepcopy(methods), local_loop=local_loop, max_rounds=2, evaluation=1
    )
    assert 1 <= max(counts) - before <= most


@pytest.mark.parametrize(
    "second", [Ditto(), APFL(), pFedMe(), LocalCheckpoint(smooth=1)], ids=lambda callback: callback.key
)
def test_what_callbacks_keep_of_a_client_has_no_frozen_network(second, tmp_path):
    options: dict[str, Any] = {"max_rounds": 2, "save_state": 1, "name": "a", "evaluation": 1}
    trainer = federate(with_frozen(), toy_data(), [FedIT(**ADAPTERS), second], tmp_path, **options)
    folder = trainer.run.path / "checkpoints/last"
    assert max(file.stat().st_size for file in folder.glob("records*.safetensors")) < 4 * FROZEN
    resumed = make_trainer(tmp_path, [FedIT(**ADAPTERS), copy.deepcopy(second)], **options | {"max_rounds": 4})
    resumed.fit(with_frozen(), datamodule=toy_data(), resume="last")
    whole = federate(
        with_frozen(),
        toy_data(),
        [FedIT(**ADAPTERS), copy.deepcopy(second)],
        tmp_path / "b",
        max_rounds=4,
        evaluation=1,
    )
    for client in whole.server.clients:
        same(module_state(resumed.module(client)), module_state(whole.module(client)))


@pytest.mark.slow
def test_worker_processes_give_the_same_bits_with_a_frozen_network():
    runs = [
        federate(with_frozen(), toy_data(), [FedIT(**ADAPTERS), Ditto()], max_rounds=2, engine=engine)
        for engine in ("sequential", Processes(workers=2))
    ]
    same(*map(global_state, runs))
    same(*(module_state(run.module(run.server.clients[0])) for run in runs))


SEEN: list[int] = []


class InStack(WithFrozen):
    """Notes it where a stack does not look: what a step changes of its module is refused there."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        SEEN.append(len(memories()))
        return Toy.training_step(self, batch, batch_idx)


@pytest.mark.parametrize(
    ("methods", "most"),
    [([FedIT(**ADAPTERS)], 1), ([FedSALoRA(**ADAPTERS)], 1), ([FedIT(**ADAPTERS), APFL()], 6 + 1)],
    ids=["FedIT", "FedSALoRA", "APFL"],
)
def test_a_stack_holds_a_frozen_network_once_and_trains_as_clients_alone(methods, most):
    options: dict[str, Any] = {"max_rounds": 2, "evaluation": 1}
    torch.manual_seed(0)
    module = InStack()
    alone = federate(copy.deepcopy(module), toy_data((8,) * 6), copy.deepcopy(methods), **options)
    SEEN.clear()
    gc.collect()
    before = len(memories())
    together = federate(module, toy_data((8,) * 6), methods, engine="vectorized", **options)
    assert SEEN and max(SEEN) - before <= most
    close(global_state(alone), global_state(together))
    for client in alone.server.clients:
        close(module_state(alone.module(client)), module_state(together.module(client)))


class Moves(WithFrozen):
    """Writes into the frozen weight in every step, past torch's count of edits: as a target network that follows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net[1].weight.data.add_(1.0)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.net[1].weight.requires_grad_(False)
        return super().configure_optimizers()


def test_what_one_client_writes_into_a_frozen_entry_no_other_one_sees():
    module = Moves()
    began = module.net[1].weight.detach().clone()
    trainer = federate(module, toy_data((8, 8)), [FedIT(**ADAPTERS)], max_rounds=1, local_steps=2)
    assert torch.equal(module.net[1].weight, began)
    for client in trainer.server.clients:
        entry = next(value for name, value in trainer.store.get(client).personal.items() if value.numel() == FROZEN)
        assert torch.equal(entry, began + 1 + 1)


def test_what_a_step_of_a_stack_writes_into_a_frozen_entry_is_each_client_s_own():
    class MovesInStack(Moves):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            with torch.no_grad():  # a map refuses `data`
                self.net[1].weight.add_(1.0)
            return Toy.training_step(self, batch, batch_idx)

    module = MovesInStack()
    began = module.net[1].weight.detach().clone()
    options: dict[str, Any] = {"max_rounds": 2, "local_steps": 2, "evaluation": 0}
    alone = federate(copy.deepcopy(module), toy_data((8, 8)), [FedIT(**ADAPTERS)], **options)
    together = federate(module, toy_data((8, 8)), [FedIT(**ADAPTERS)], engine="vectorized", **options)
    assert torch.equal(module.net[1].weight, began)
    for client in alone.server.clients:
        close(module_state(alone.module(client)), module_state(together.module(client)))


def test_lazy_clones_are_copies():
    weight = nn.Linear(WIDTH, WIDTH)
    copied = copy_module(weight)
    before = weight.weight.detach().clone()
    copied.weight.data.add_(1)
    assert torch.equal(weight.weight, before) and torch.equal(copied.weight, before + 1)
    weight.weight.data.zero_()
    assert torch.equal(copied.weight, before + 1)
    for odd in (before.T, before[:200], before.half().to_sparse(), torch.zeros(FROZEN, device="meta")):
        if odd.layout == torch.strided and odd.device.type == "cpu":
            assert torch.equal(lazy_clone(odd), odd) and lazy_clone(odd).is_contiguous()
    same(copy_module(nn.Sequential(weight, weight)).state_dict(), nn.Sequential(weight, weight).state_dict())
    assert differs(dict(weight.named_parameters()), dict(copied.named_parameters()))
