"""Training and outputs at the server: addressed, on the run's precision, without a trace elsewhere."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedlightning.algorithm import FederatedCallback, Server
from fedlightning.callbacks.shared.distillation import kl, logits_of
from fedlightning.datamodules.federated_data import FederatedDataModule
from fedlightning.testing.toys import ToyData, ToyModule, federate


class Watch(FederatedCallback):
    """Has no part in the run; the tests use its server."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str | None, Server] = {}

    def of(precision: str | None = None) -> Server:
        if precision not in made:
            root = tmp_path_factory.mktemp("run")
            made[precision] = federate(Watch(), ToyData(), root, max_rounds=1, precision=precision).federation.server
        return made[precision]

    return of


def target(server: Server) -> torch.Tensor:
    return torch.linspace(-3, 3, server.training.public_size * 3).view(-1, 3)


def distil(module: ToyModule, batch: Any) -> torch.Tensor:
    return kl(batch.targets, logits_of(module, batch.batch))


def train(server: Server, module: nn.Module | None = None, **how: Any) -> tuple[ToyModule, float]:
    module = server.module_with(server.model) if module is None else module
    loader = server.training.public(targets=target(server), batch_size=4, shuffle=True)
    return module, server.training.fit(module, loader, distil, **({"steps": 7} | how))


def same(one: nn.Module, other: nn.Module) -> bool:
    held = other.state_dict()
    return all(torch.equal(value, held[name]) for name, value in one.state_dict().items())


def test_a_plain_loop_takes_the_same_steps(servers: Any) -> None:
    server = servers()
    module, last = train(server, steps=7, gradient_clip_val=0.05)
    reference = server.module_with(server.model)
    optimizer, step = torch.optim.Adam(reference.parameters(), lr=1e-3), 0
    loader = server.training.public(targets=target(server), batch_size=4, shuffle=True)
    server.training._start(loader, "fit")
    while step < 7:
        loader.sampler.set_epoch(step // 3)  # type: ignore[attr-defined]
        for samples, rows in loader:
            if step < 7:
                loss = kl(rows, reference(samples[0]))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
                optimizer.step()
                step += 1
    assert last == float(loss)
    assert same(module, reference)


def test_steps_learn_and_epochs_are_passes(servers: Any) -> None:
    server = servers()
    _, first = train(server, steps=1)
    by_steps, last = train(server, steps=90, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    by_epochs, _ = train(server, steps=None, epochs=30, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert last < 0.5 * first
    assert same(by_steps, by_epochs)


def test_no_step_changes_nothing(servers: Any) -> None:
    server = servers()
    module = server.module_with(server.model).eval()
    before = copy.deepcopy(module.state_dict())
    _, last = train(server, module, steps=0, validate=lambda module: 1.0)
    assert last != last and not module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_randomness_has_an_address_and_leaves_no_trace(servers: Any) -> None:
    server = servers()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, _ = train(server)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    other, _ = train(server)
    third, _ = train(server, purpose="another")
    assert same(one, other) and not same(one, third)
    server.round, before_round = 5, server.round
    later, _ = train(server)
    server.round = before_round
    assert not same(one, later)


def test_modes_device_and_trainer_are_as_before(servers: Any) -> None:
    server = servers()
    module = server.module_with(server.model).train()
    module.body[1].eval()
    train(server, module, steps=2)
    assert module.training and not module.body[1].training and module._trainer is None
    module.eval()
    train(server, module, steps=2)
    assert not any(part.training for part in module.modules())
    assert all(parameter.grad is None and parameter.device.type == "cpu" for parameter in module.parameters())


def test_frozen_parts_stay(servers: Any) -> None:
    server = servers()
    module = server.module_with(server.model)
    module.body.requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    train(server, module)
    moved = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if not name.startswith("body")}


def test_runs_in_the_runs_precision(servers: Any) -> None:
    server, seen = servers("bf16-mixed"), []

    def loss(module: ToyModule, batch: Any) -> torch.Tensor:
        seen.append(module(batch[0]).dtype)
        return distil(module, batch=type("Pair", (), {"batch": batch, "targets": torch.ones(len(batch[0]), 3)}))

    server.training.fit(server.module_with(server.model), server.training.public(), loss, steps=1)
    rows = server.training.outputs(
        server.module_with(server.model), server.training.public(), lambda module, batch: module(batch[0])
    )
    assert seen == [torch.bfloat16] and rows.dtype == torch.float32
    assert torch.equal(rows, rows.bfloat16().float())


def test_the_best_module_is_kept_and_patience_ends(servers: Any) -> None:
    server, looks = servers(), []
    scores = iter([0.1, 0.5, 0.9, 0.2, 0.3, 0.4, 0.9, 0.1])
    states = []

    def validate(module: ToyModule) -> float:
        assert not module.training
        torch.rand(3)
        states.append(copy.deepcopy(module.state_dict()))
        looks.append(next(scores))
        return looks[-1]

    module, _ = train(server, steps=50, validate=validate, patience=4)
    assert len(looks) == 7  # at the start and after each step; the third was the best, and four steps came after it
    assert all(torch.equal(value, states[2][name]) for name, value in module.state_dict().items())
    plain, _ = train(server, steps=2)
    assert same(module, plain)  # validation does not disturb the training


def test_a_scheduler_steps_after_every_step(servers: Any) -> None:
    server, rates = servers(), []

    def loss(module: ToyModule, batch: Any) -> torch.Tensor:
        rates.append(made[0].param_groups[0]["lr"])
        return distil(module, batch)

    made: list[Any] = []

    def optimizer(parameters: Any) -> Any:
        made.append(torch.optim.SGD(parameters, lr=1.0))
        return made[0]

    loader = server.training.public(targets=target(server))
    server.training.fit(
        server.module_with(server.model), loader, loss, steps=4, optimizer=optimizer,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )  # fmt: skip
    assert rates == [1.0, 0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"steps": None}, "neither steps nor epochs"),
        ({"steps": 1, "epochs": 1}, "give one of them"),
        ({"steps": -1}, "0 or more"),
        ({"patience": 3}, "validate="),
    ],
)
def test_what_cannot_work_is_refused(servers: Any, how: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        train(servers(), **how)


def test_bad_losses_are_refused(servers: Any) -> None:
    server = servers()
    module = server.module_with(server.model)
    with pytest.raises(FloatingPointError, match=r"step 1\. Lower"):
        server.training.fit(
            module, server.training.public(), lambda module, batch: module(batch[0]).sum() * float("nan"), steps=3
        )
    assert module._trainer is None
    with pytest.raises(ValueError, match="a tensor with one number"):
        server.training.fit(
            server.module_with(server.model), server.training.public(), lambda module, batch: module(batch[0]), steps=1
        )
    with pytest.raises(ValueError, match="needs a gradient"):
        frozen = server.module_with(server.model).requires_grad_(False)
        server.training.fit(frozen, server.training.public(), distil, steps=1)


def test_public_ids_are_addressed_subsets(servers: Any) -> None:
    server = servers()
    ids = server.training.public_ids(4)
    assert ids.tolist() == sorted(set(ids.tolist())) and len(ids) == 4
    assert torch.equal(ids, server.training.public_ids(4))
    assert not torch.equal(ids, server.training.public_ids(4, "another"))
    assert server.training.public_ids(99).tolist() == list(range(10))
    with pytest.raises(ValueError, match="1 or more"):
        server.training.public_ids(0)


def test_outputs_leave_no_trace(servers: Any) -> None:
    server = servers()
    module = server.module_with(server.model)
    module.body[1] = nn.BatchNorm1d(8)
    before, state = torch.get_rng_state(), copy.deepcopy(module.state_dict())

    def forward(module: ToyModule, batch: Any) -> torch.Tensor:
        torch.rand(1)
        assert not module.training and not torch.is_grad_enabled()
        return logits_of(module, batch)

    ids = torch.tensor([7, 1, 5])
    rows = server.training.outputs(module, server.training.public(ids), forward)
    assert torch.equal(
        rows, module.eval()(next(iter(server.training.public()))[0].new_tensor(0) + inputs(server)[ids]).detach()
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def inputs(server: Server) -> torch.Tensor:
    return torch.cat([x for x, _ in server.training.public()])


def test_without_public_data_the_sentence_says_how_to_get_some(tmp_path: Path) -> None:
    class NoPublic(ToyData):
        def public_dataloader(self) -> None:  # type: ignore[override]
            return FederatedDataModule.public_dataloader(self)  # type: ignore[return-value]

    server = federate(Watch(), NoPublic(), tmp_path, max_rounds=1).federation.server
    assert server.training.public_size == 0
    with pytest.raises(ValueError, match=r"NoPublic has no public data.*public=0.1.*public: another data set"):
        server.training.public()
