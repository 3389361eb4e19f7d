"""FedBE: Chen, Chao, ICLR 2021."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from fedlightning.callbacks import SCAFFOLD, FedAdam, FedAvg, FedBE, FedPer, FedProx, GlobalCheckpoint, LocalCheckpoint
from fedlightning.callbacks.fedbe import dirichlet, gaussian, weighted
from fedlightning.seeding import generator
from fedlightning.tensors import module_state
from tests.callbacks.public import public_data, public_x, resumed, two_models
from tests.callbacks.test_feddf import with_state
from tests.conformance.case import Case, Kept
from tests.helpers import NormNet, Toy, close, differs, federate, mean_of, same, spied

CASES = {
    "FedBE": Case(FedBE(samples=2, epochs=2)),
    "FedBE dirichlet": Case(FedBE("dirichlet", samples=2, epochs=2, swa_every=0, combine="logits")),
}
KEPT = {"FedBE": Kept("FedBE", options={"epochs": 1}, public=True)}


def drawn_by_hand(states, weights, mean, distribution, samples, draw):
    """The paper's models, entry by entry."""
    total, found = sum(weights), []
    if distribution == "dirichlet":
        seed = int(torch.randint(2**62, (), generator=draw))
        for gammas in np.random.default_rng(seed).dirichlet([1.0] * len(states), size=samples):
            share = [g * w for g, w in zip(gammas, weights, strict=True)]
            found.append(
                {
                    k: (sum(a * s[k].double() for a, s in zip(share, states, strict=True)) / sum(share)).float()
                    for k in mean
                }
            )
        return found
    for _ in range(samples):
        model = {}
        for k, m in mean.items():
            v = sum(w / total * (s[k].double() - m.double()) ** 2 for w, s in zip(weights, states, strict=True))
            model[k] = (m + v.sqrt() * torch.randn(m.shape, generator=draw, dtype=torch.float64)).float()
        found.append(model)
    return found


def taught(start, teachers, x, steps, lr, swa_start, every, combine):
    """A student with momentum, full batches, and the average of its models."""
    student = copy.deepcopy(start)
    with torch.no_grad():
        outputs = torch.stack([teacher(x) for teacher in teachers])
        target = outputs.softmax(2).mean(0) if combine == "probabilities" else outputs.mean(0).softmax(1)
    velocity, kept = {k: 0.0 for k, _ in student.named_parameters()}, []
    for step in range(steps):
        p = student(x).log_softmax(1)
        student.zero_grad()
        (target * (target.log() - p)).sum(1).mean().backward()
        rate = lr
        if every and step >= swa_start:
            rate = lr * (1 - 0.5 * ((step - swa_start) % every) / (every - 1))
        with torch.no_grad():
            for k, w in student.named_parameters():
                velocity[k] = 0.9 * velocity[k] + w.grad + 1e-5 * w
                w -= rate * velocity[k]
        done = step + 1
        if every and (done == steps or (done > swa_start and (done - swa_start) % every == 0)):
            kept.append(copy.deepcopy(module_state(student)))
    if not kept:
        return module_state(student)
    return {k: torch.stack([state[k] for state in kept]).mean(0) for k in kept[0]}


OPTIONS = [{}, {"distribution": "dirichlet", "combine": "logits", "weighting": "uniform"}, {"swa_every": 0}]


@pytest.mark.parametrize("options", OPTIONS, ids=["gaussian", "dirichlet", "last model"])
@pytest.mark.fast_cases(1)
def test_three_rounds_are_what_the_paper_says(options):
    models, data = two_models(), public_data((24, 40, 16, 30, 20))
    given = {"samples": 3, "epochs": 8, "lr": 0.1, "swa_start": 0.25, "swa_every": 2, **options}
    trainer, spy = spied(models, data, [FedBE(**given)], max_rounds=3, participation=4, local_epochs=2)
    names = {client: ["small", "deep"][int(client) % 2] for client in "01234"}
    state = {name: module_state(models.model(name)) for name in ("small", "deep")}
    x, seen = public_x(data), set()
    for number in range(3):
        updates = spy.of_round(number)
        seen.add(tuple(updates))
        weights = {c: 1 if given.get("weighting") else u.num_samples for c, u in updates.items()}
        ensemble = [(names[c], u.state) for c, u in updates.items()]
        means = {}
        for name in dict.fromkeys(names[c] for c in updates):
            own = {c: u for c, u in updates.items() if names[c] == name}
            means[name] = mean_of(own, weights)
            if len(own) > 1:
                draw = generator(0, number, "server", "FedBE " + {"small": "global"}.get(name, name))
                states, p = [u.state for u in own.values()], [weights[c] for c in own]
                kind = given.get("distribution", "gaussian")
                more = drawn_by_hand(states, p, means[name], kind, 3, draw)
                ensemble += [(name, one) for one in [means[name], *more]]
        teachers = [with_state(models.model(name), entries) for name, entries in ensemble]
        for name, mean in means.items():
            student = with_state(models.model(name), mean)
            combine = given.get("combine", "probabilities")
            state[name] = taught(student, teachers, x, 8, 0.1, 2, given["swa_every"], combine)
            assert max(float((state[name][k] - mean[k]).abs().max()) for k in mean) > 1e-3
        close(spy.rounds[number], state["small"], atol=1e-5)
    close(trainer.server.models["deep"], state["deep"], atol=1e-5)
    assert len(seen) > 1


def test_draws_have_the_clients_mean_and_variance():
    draw = torch.Generator().manual_seed(0)
    states = [
        {"w": torch.tensor([0.0, 5.0]), "n": torch.tensor(3)},
        {"w": torch.tensor([4.0, 5.0]), "n": torch.tensor(3)},
    ]
    mean = weighted(states, [3.0, 1.0])
    found = torch.stack([one["w"] for one in gaussian(states, [3.0, 1.0], mean, {"w": "w"}, 4000, draw)])
    torch.testing.assert_close(found.mean(0), torch.tensor([1.0, 5.0]), atol=0.1, rtol=0)
    torch.testing.assert_close(found.var(0), torch.tensor([3.0, 0.0]), atol=0.2, rtol=0)
    found = torch.stack([one["w"] for one in dirichlet(states, [1.0, 1.0], 1.0, 4000, draw)])
    assert (found[:, 0] >= 0).all() and (found[:, 0] <= 4).all() and torch.allclose(found[:, 1], torch.tensor(5.0))
    torch.testing.assert_close(found[:, 0].var(), torch.tensor(16 / 12), atol=0.1, rtol=0)  # uniform on [0, 4]


def test_entries_that_are_tied_are_drawn_once_and_others_are_the_mean_s():
    draw = torch.Generator().manual_seed(0)
    states = [{"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}, {k: torch.ones(2) for k in "abc"}]
    (found,) = gaussian(states, [1.0, 1.0], weighted(states, [1.0, 1.0]), {"a": "a", "b": "a"}, 1, draw)
    assert torch.equal(found["a"], found["b"]) and not torch.equal(found["a"], found["c"])
    assert torch.equal(found["c"], torch.full((2,), 0.5))


def test_without_epochs_it_is_fedavg_bit_for_bit():
    module, data = NormNet("momentum", dropout=0.3), public_data(batch_size=8)
    ours, theirs = (federate(module, data, [c], max_rounds=3) for c in (FedBE(epochs=0), FedAvg()))
    same(ours.server.model, theirs.server.model)


def test_statistics_of_the_average_are_those_of_public_data():
    module, data = NormNet("sgd"), public_data((24, 40), public=20)
    trainer = federate(module, data, [FedBE(samples=2, epochs=3)], max_rounds=1)
    with torch.no_grad():
        features = trainer.server.module_with(trainer.server.model).net[0](public_x(data))
    torch.testing.assert_close(trainer.server.model["net.1.running_mean"], features.mean(0), atol=1e-5, rtol=1e-5)
    _, spy = spied(module, data, [FedBE(samples=2, epochs=3, update_statistics=False)], max_rounds=1)
    mean = mean_of(spy.of_round(0), {"0": 24, "1": 40})
    assert not differs(spy.rounds[0], {"net.1.running_mean": mean["net.1.running_mean"]})
    assert differs(spy.rounds[0], {"net.0.weight": mean["net.0.weight"]})


def start():
    callbacks = [FedBE(samples=2, epochs=3), FedAdam(server_lr=0.1), LocalCheckpoint(), GlobalCheckpoint()]
    return two_models("momentum"), public_data((24, 40, 16, 30)), callbacks


@pytest.mark.slow
def test_two_architectures_resume_bit_for_bit(tmp_path):
    options = {"participation": 3, "evaluation": 1}
    whole = federate(*start(), tmp_path / "w", max_rounds=4, **options)
    half = federate(*start(), tmp_path / "h", max_rounds=2, **options)
    again = resumed(half, *start(), 4, **options)
    for key, state in whole.server.models.items():
        same(again.server.models[key], state)


def test_what_goes_with_it_and_wrong_use():
    for other in (FedProx(mu=0.1), SCAFFOLD(), FedAdam()):
        federate(Toy(), public_data(), [FedBE(epochs=2), other], max_rounds=2)
    for arguments in (
        {"distribution": "beta"},
        {"alpha": 0.0},
        {"epochs": -1},
        {"combine": "votes"},
        {"swa_start": 1.0},
    ):
        (name,) = arguments
        with pytest.raises(ValueError, match=f"FedBE got {name}="):
            FedBE(**arguments)
    with pytest.raises(ValueError, match=r"FedBE fuses the whole models .*, and FedPer chooses what travels"):
        federate(Toy(), public_data(), [FedBE(), FedPer(personal="net.3")])
