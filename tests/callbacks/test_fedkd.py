"""FedKD: algorithms-2, entry 2.12."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning.callbacks import SCAFFOLD, FedAdam, FedAvg, FedKD, FedProx, Local
from fedlightning.callbacks.fedkd import factors, product
from fedlightning.tensors import module_state
from fedlightning.wrappers.pair import Side
from tests.callbacks.common import SIZES, batches, deployed
from tests.callbacks.test_fml import OTHER, PREFIX, mixed, seeded, shared_state, small
from tests.conformance.case import Case, Kept
from tests.helpers import CLASSES, FEATURES, Spy, Toy, close, federate, global_state, same, spied, toy_data

CASES = {
    "FedKD": Case(FedKD(OTHER, head="head"), neutral=FedKD(strength=0.0)),
    "FedKD whole": Case(
        FedKD(OTHER, head="head", strength=1.0, detach=False, energy_start=1.0, energy_end=1.0),
        neutral=FedKD(strength=0.0),
    ),
}
KEPT = {
    "FedKD": Kept(
        "FedKD",
        server=("change", "rounds", "there", "version"),
        client=("student", "version"),
        options={"shared": Toy(hidden=9)},
    )
}


def wide(optimizer="momentum"):
    """A student whose first matrix is worth its factors."""
    return seeded(lambda: Toy(optimizer, lr=0.1, hidden=24), 9)


def compressed(change, energy):
    """What is left of a change, by NumPy; itself where its factors are no smaller."""
    matrix = change.double().numpy()
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    keep = next(k for k in range(len(s) + 1) if (s[:k] ** 2).sum() >= energy * (s**2).sum() * (1 - 1e-12))
    if keep * (sum(matrix.shape) + 1) >= matrix.size or energy == 1.0:
        return change, None
    return torch.tensor((u[:, :keep] * s[:keep]) @ v[:keep], dtype=torch.float32), keep


def by_hand(privates, maps, student, data, visits, energies, detach, strength, hidden=True):
    """Teacher, student and map of representations of every client, written from the paper."""
    kept = []
    for number, (clients, energy) in enumerate(zip(visits, energies, strict=True)):
        sent, old = {}, module_state(copy.deepcopy(student))
        for client in clients:
            own, theirs = privates[client], copy.deepcopy(student)
            first = [*own.parameters(), *([maps[client]] if hidden else [])]
            steppers = [type(own)(**own.hparams), theirs]
            steppers = [
                torch.optim.SGD(first, own.lr, momentum=0.9),
                torch.optim.SGD(theirs.parameters(), theirs.lr, momentum=0.9),
            ]
            for x, y in batches(data, client, round=number, epochs=2):
                reps = [net[:-1](x) for net in (own.net, theirs.net)]
                z, q = own.net[-1](reps[0]), theirs.net[-1](reps[1])
                task = [F.cross_entropy(out, y) for out in (z, q)]
                stop = (lambda t: t.detach()) if detach else (lambda t: t)
                scale = stop(task[0] + task[1])

                def kl(target, out, stop=stop):
                    return (stop(target).softmax(1) * (stop(target).log_softmax(1) - out.log_softmax(1))).sum(1).mean()

                near = [0.0, 0.0]
                if hidden:
                    mapped = reps[1] @ maps[client].T
                    near = [(reps[0] - stop(mapped)).square().mean(), (stop(reps[0]) - mapped).square().mean()]
                total = task[0] + task[1] + strength * (kl(q, z) + near[0] + kl(z, q) + near[1]) / scale
                for stepper in steppers:
                    stepper.zero_grad()
                total.backward()
                for stepper in steppers:
                    stepper.step()
            sent[client] = {}
            for name, value in module_state(theirs).items():
                change = value - old[name]
                if value.ndim == 2:
                    change, k = compressed(change, energy)
                    kept.append(k)
                sent[client][name] = old[name] + change
        new = {}
        for name, value in old.items():
            change = sum(state[name] for state in sent.values()) / len(sent) - value
            new[name] = value + (compressed(change, energy)[0] if value.ndim == 2 else change)
        student.load_state_dict(new)
    return privates, student, kept


@pytest.mark.parametrize("detach", [False, True])
def test_three_rounds_by_hand_with_two_architectures_and_absent_clients(detach):
    data, module, student = toy_data(SIZES), mixed(), wide()
    strength = 0.3 if detach else 1.0
    method = FedKD(student, strength=strength, detach=detach, energy_start=0.8, energy_end=0.95)
    options = {"max_rounds": 3, "local_epochs": 2, "participation": 2}
    trainer, spy = spied(module, data, [method], **options)
    visits = [sorted(spy.of_round(number)) for number in range(3)]
    assert len({tuple(clients) for clients in visits}) > 1
    names = {client: trainer.server.architecture_of(client).name for client in SIZES}
    start = {client: copy.deepcopy(module.model(name)) for client, name in names.items()}
    maps = {}
    for client, name in names.items():
        built = trainer.server.blueprint.build("server", name)
        maps[client] = nn.Parameter(built.get_submodule("shared_projection").weight.detach().clone())
    energies = [0.8, 0.85, 0.9]
    privates, student, kept = by_hand(start, maps, copy.deepcopy(student), data, visits, energies, detach, strength)
    assert any(kept)  # something did travel as factors
    for client in SIZES:
        close(deployed(trainer, client), module_state(privates[client]), atol=1e-5)
    close(module_state(trainer.module()), module_state(student), atol=1e-5)


def test_the_gradient_of_the_task_keeps_its_sign_when_losses_are_small():
    """With a gradient through the denominator the step goes uphill on the task: the authors' form."""
    slopes = []
    for method in (FedKD(), FedKD(strength=1.0, detach=False)):
        losses = torch.full((2,), 0.01, requires_grad=True)
        logits = torch.tensor([[[2.0, -1.0]], [[-1.0, 2.0]]])
        own, shared = (Side(loss, z, torch.zeros(1, 3)) for loss, z in zip(losses, logits, strict=True))
        method.joint_loss()(own, shared, None).backward()
        slopes.append(losses.grad)
    assert (slopes[0] > 0).all() and (slopes[1] < 0).all()


def test_without_distillation_and_compression_it_is_fedavg_beside_local_training():
    """Invariants (a) and (c), bit for bit."""
    data, private, student = toy_data(SIZES), Toy("adam"), small("adam")
    options = {"max_rounds": 3, "participation": 2, "optimizer_state": "reset"}
    method = FedKD(student, strength=0.0, energy_start=1.0, energy_end=1.0)
    trainer, spy = spied(private, data, [method], **options)
    same(
        shared_state(global_state(trainer)),
        global_state(federate(student, data, [FedAvg(weighting="uniform")], **options)),
    )
    same(deployed(trainer, "1"), deployed(federate(private, data, [Local()], **options), "1"))
    assert not any(item.extras.get("FedKD") for item in (*spy.messages, *spy.updates))


@pytest.mark.parametrize("shape", [(30, 20), (6, 40), (16, 8, 3, 3)])
@pytest.mark.parametrize("energy", [0.5, 0.9, 0.99])
def test_the_error_is_what_the_energy_says_and_factors_are_smaller(shape, energy):
    """Invariants (b) and (e)."""
    draw = torch.Generator().manual_seed(1)
    change = torch.randn(shape, generator=draw)
    change = change * torch.logspace(0, -3, shape[0]).view(-1, *[1] * (len(shape) - 1))
    found = factors(change, energy)
    rows, columns = change.flatten(1).shape
    if found is None:
        _, s, _ = np.linalg.svd(change.flatten(1).numpy(), full_matrices=False)
        count = int((np.cumsum(s**2) < energy * (s**2).sum()).sum()) + 1
        assert count * (rows + columns + 1) >= rows * columns
        return
    assert sum(part.numel() for part in found.values()) == len(found["s"]) * (rows + columns + 1) < rows * columns
    error = (product(found, change.shape) - change).norm() / change.norm()
    assert error <= (1 - energy) ** 0.5 + 1e-6
    fewer = {"u": found["u"][:, :-1], "s": found["s"][:-1], "v": found["v"][:-1]}
    assert (product(fewer, change.shape) - change).norm() / change.norm() > (1 - energy) ** 0.5  # as few as possible


def test_energies_of_one_and_changes_of_zero():
    assert factors(torch.randn(9, 9), 1.0) is None
    found = factors(torch.zeros(9, 9), 0.9)
    assert product(found, torch.Size([9, 9])).abs().sum() == 0 and found["u"].numel() == 0


def test_bytes_are_those_of_the_factors_and_absent_clients_get_the_whole_student():
    """Invariants (d) and (e), and what a client is sent that missed a round."""
    student = wide()
    whole = 4 * sum(value.numel() for value in module_state(student).values())
    options = {"max_rounds": 6, "participation": 2}
    trainer, spy = spied(mixed(), toy_data(SIZES), [FedKD(student, energy_start=0.6, energy_end=0.6)], **options)
    took_part = {}
    small_ones = 0
    for message in spy.messages:
        extras = {name: v for name, v in message.extras["FedKD"].items() if "/" in name}
        if took_part.get(message.client, -2) == message.round - 1:
            matrices = {name.rpartition("/")[0] for name in extras}
            assert not matrices & set(message.state)
            assert (
                message.num_bytes
                == 16 + 4 * sum(v.numel() for v in (*message.state.values(), *extras.values()))
                <= whole + 16
            )
            small_ones += bool(extras)
        else:
            assert message.num_bytes == whole + 16 and not extras
        if message.work != 0:
            took_part[message.client] = message.round
    assert small_ones
    up = [(*update.state.values(), *update.extras["FedKD"].values()) for update in spy.updates]
    assert trainer.server.costs.bytes_up == 4 * sum(value.numel() for sent in up for value in sent) < len(up) * whole
    assert len(took_part) == 3
    own = trainer.server.state["FedKD"]["there"]
    record = {client: trainer.federation.store.get(client).state["FedKD"] for client in own}
    assert {client: kept["version"] for client, kept in record.items()} == own
    for client, kept in record.items():  # a student that was put together from factors is the server's, bit for bit
        if own[client]:
            same(kept["student"], {name: spy.rounds[own[client] - 1][name] for name in kept["student"]})


def test_a_longer_run_does_not_take_back_the_energy_that_it_has_reached(tmp_path):
    def run(max_rounds, **options):
        spy, method = Spy(), FedKD(wide(), energy_start=0.6, energy_end=0.8)
        data, saved = toy_data(SIZES), {"save_state": 1, "evaluation": 0}
        trainer = federate(Toy(), data, [spy, method], tmp_path, max_rounds=max_rounds, **saved | options)
        return trainer, {message.round: message.extras["FedKD"]["energy"] for message in spy.messages}

    first, began = run(2)
    _, went_on = run(4, resume=first.run.path)
    assert began == pytest.approx({0: 0.6, 1: 0.7}) and went_on == pytest.approx({2: 0.8, 3: 0.8})


def test_vectors_travel_as_they_are():
    trainer, spy = spied(mixed(), toy_data(SIZES), [FedKD(wide(), energy_start=0.3, energy_end=0.3)], max_rounds=2)
    mean = sum(update.state[f"{PREFIX}net.0.bias"].double() for update in spy.of_round(1).values()) / 3
    torch.testing.assert_close(global_state(trainer)[f"{PREFIX}net.0.bias"].double(), mean)
    for update in spy.updates:
        assert {name for name in update.state if "bias" in name} == {f"{PREFIX}net.0.bias", f"{PREFIX}net.3.bias"}


def test_a_proximal_term_is_anchored_at_the_student_that_was_put_together():
    data, options = toy_data(SIZES), {"max_rounds": 3, "local_epochs": 2}
    runs = [
        spied(Toy(), data, [FedKD(wide(), energy_start=0.5, energy_end=0.5), FedProx(mu=mu)], **options)[1]
        for mu in (0.0, 9.0)
    ]
    name = f"{PREFIX}net.0.weight/s"
    moved = [sum(update.extras["FedKD"][name].norm().item() for update in spy.of_round(2).values()) for spy in runs]
    assert moved[1] < 0.7 * moved[0]


def test_wrong_use_is_refused():
    data = toy_data(SIZES)
    for name, value in (("strength", -1), ("energy_start", 0), ("energy_end", 1.5)):
        with pytest.raises(ValueError, match=f"FedKD got {name}={value}"):
            FedKD(**{name: value})
    with pytest.raises(ValueError, match=r"FedKD sends a client's update as factors.*, and SCAFFOLD .*energy_start=1"):
        federate(Toy(), data, [FedKD(small()), SCAFFOLD()])
    with pytest.raises(ValueError, match=r"FedAdam.*both claim 'server_step'|both claim"):
        federate(Toy(), data, [FedKD(small()), FedAdam()])

    class ConvHead(Toy):
        def make(self, hidden, dropout):
            return nn.Sequential(nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, CLASSES, FEATURES), nn.Flatten())

    with pytest.raises(ValueError, match=r"`net.1` of ConvHead is a Conv1d.*hidden=False"):
        federate(ConvHead(), data, [FedKD(small())])
    federate(ConvHead(), data, [FedKD(small(), hidden=False)], max_rounds=1)


def test_that_private_models_may_stay_behind_is_said():
    with pytest.warns(UserWarning, match=r"FedKD\(strength=0.3\) draws each private model .* Compare it with Local"):
        federate(Toy(), toy_data(SIZES), [FedKD(small())], max_rounds=1)
