"""FedDF: algorithms-2, entry 2.9."""

from __future__ import annotations

import copy

import pytest
import torch

from fedlightning.callbacks import (
    SCAFFOLD,
    FedAdam,
    FedAvg,
    FedDF,
    FedPer,
    FedProx,
    GlobalCheckpoint,
    LocalCheckpoint,
)
from fedlightning.options import Processes
from fedlightning.tensors import module_state
from tests.callbacks.public import own_models, public_data, public_x, resumed, two_models
from tests.conformance.case import Case, Kept
from tests.helpers import NormNet, Toy, close, differs, federate, mean_of, same, spied, toy_data

CASES = {
    "FedDF": Case(FedDF(steps=3), skip={}),
    "FedDF held out": Case(FedDF(steps=3, validation=0.3, drop_worst=True, combine="probabilities")),
}
KEPT = {"FedDF": Kept("FedDF", options={"steps": 2}, public=True)}


def fused(model, teachers, x, steps, combine="logits", temperature=1.0, cosine=True, clip=5.0, lr=1e-3):
    """A student in plain torch: full batches, Adam, a cosine, clipping."""
    student = copy.deepcopy(model)
    with torch.no_grad():
        outputs = torch.stack([teacher(x) for teacher in teachers])
        target = (
            (outputs.mean(0) / temperature).softmax(1)
            if combine == "logits"
            else (outputs / temperature).softmax(2).mean(0)
        )
    optimizer = torch.optim.Adam(student.parameters(), lr)
    for step in range(steps):
        if cosine:
            optimizer.param_groups[0]["lr"] = lr * (1 + torch.cos(torch.tensor(torch.pi * step / steps)).item()) / 2
        p = (student(x) / temperature).log_softmax(1)
        loss = temperature**2 * (target * (target.log() - p)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(student.parameters(), clip)
        optimizer.step()
    return student


def with_state(module, state):
    module = copy.deepcopy(module)
    module.load_state_dict(state)
    return module


OPTIONS = [
    {},
    {"combine": "probabilities", "temperature": 2.0, "lr": 0.02, "cosine": False, "gradient_clip_val": 1e-2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["paper", "others"])
def test_three_rounds_are_what_the_paper_says(options):
    models, data = two_models(), public_data((24, 40, 16, 30))
    given = {"steps": 5, "lr": 0.05, **options}
    trainer, spy = spied(models, data, [FedDF(**given)], max_rounds=3, participation=3, local_epochs=2)
    names = {client: ["small", "deep"][int(client) % 2] for client in "0123"}
    state = {name: module_state(models.model(name)) for name in ("small", "deep")}
    x, seen = public_x(data), set()
    for number in range(3):
        updates = spy.of_round(number)
        seen.add(tuple(updates))
        assert len(updates) == 3
        for client in updates:
            (message,) = [m for m in spy.messages if (m.round, m.client) == (number, client)]
            close(message.state, state[names[client]], atol=1e-5)
        teachers = [with_state(models.model(names[c]), u.state) for c, u in updates.items()]
        for name in state:
            own = {c: u for c, u in updates.items() if names[c] == name}
            start = with_state(models.model(name), mean_of(own, {c: u.num_samples for c, u in own.items()}))
            student = fused(
                start, teachers, x, 5, given.get("combine", "logits"), given.get("temperature", 1.0),
                given.get("cosine", True), given.get("gradient_clip_val", 5.0), given["lr"],
            )  # fmt: skip
            state[name] = module_state(student)
            moved = max(float((state[name][k] - v).abs().max()) for k, v in module_state(start).items())
            assert moved > 1e-3
        close(trainer.server.models["global"] if number == 2 else spy.rounds[number], state["small"], atol=1e-5)
    close(trainer.server.models["deep"], state["deep"], atol=1e-5)
    assert len(seen) > 1
    assert not trainer.server.state.get("FedDF")


def test_without_steps_it_is_fedavg_bit_for_bit():
    module, data = NormNet("momentum", dropout=0.3), public_data(batch_size=8)
    ours, theirs = (federate(module, data, [c], max_rounds=3) for c in (FedDF(steps=0), FedAvg()))
    same(ours.server.model, theirs.server.model)


def test_without_steps_architectures_are_means_of_their_clients():
    _, spy = spied(two_models(), public_data((24, 40, 16, 30)), [FedDF(steps=0)], max_rounds=1)
    updates = spy.of_round(0)
    own = {client: updates[client] for client in "02"}
    close(spy.rounds[0], mean_of(own, {client: update.num_samples for client, update in own.items()}), atol=1e-7)


def test_a_single_client_is_its_own_teacher_and_stays():
    module, data = Toy("adam"), public_data((24,))
    ours, theirs = (federate(module, data, [c], max_rounds=2) for c in (FedDF(steps=20), FedAvg()))
    same(ours.server.model, theirs.server.model)


def test_identical_teachers_and_shifted_logits():
    module, x = Toy(), public_x(public_data())
    start = Toy()
    one = fused(start, [module], x, 3)
    several = [fused(start, [module, module], x, 3, combine) for combine in ("logits", "probabilities")]
    shifted = with_state(module, module_state(module))
    with torch.no_grad():
        shifted.net[3].bias += 7.0
    for other in [*several, fused(start, [shifted], x, 3)]:
        close(module_state(one), module_state(other), atol=1e-4)
    # and in the callback
    data = public_data((24, 24))
    data.tensors["1"] = data.tensors["0"]
    runs = [
        federate(module, data, [FedDF(steps=3, lr=1e-2, combine=combine)], max_rounds=1).server.model
        for combine in ("logits", "probabilities")
    ]
    close(*runs, atol=2e-2)


@pytest.mark.parametrize("moves", [True, False])
def test_statistics_of_students_move_with_public_data_or_stay(moves):
    data = public_data((24, 40), batch_size=8)
    _, spy = spied(NormNet("sgd"), data, [FedDF(steps=3, update_statistics=moves)], max_rounds=1)
    mean = mean_of(spy.of_round(0), {"0": 24, "1": 40})
    assert differs(spy.rounds[0], {"net.1.running_mean": mean["net.1.running_mean"]}) == moves
    assert differs(spy.rounds[0], {"net.0.weight": mean["net.0.weight"]})


def test_teachers_are_in_eval_mode():
    module, data = NormNet("sgd", dropout=0.5), public_data((24, 40), batch_size=8)
    callback = Caught(steps=1)
    _, spy = spied(module, data, [callback], max_rounds=1)
    with torch.no_grad():
        rows = [with_state(module, u.state).eval()(public_x(data)) for u in spy.of_round(0).values()]
    torch.testing.assert_close(Caught.targets, sum(rows) / 2)


class Caught(FedDF):
    targets = None

    def on_round_end(self, server):
        Caught.targets = server.state[self.key]["targets"]
        super().on_round_end(server)


class Members(FedDF):
    count = None

    def ensemble(self, server):
        found = super().ensemble(server)
        Members.count = len(found)
        return found


def test_the_best_model_on_held_out_samples_is_kept_and_bad_teachers_are_left_out():
    data = public_data((60, 60, 60), public=60)
    x, y = data.tensors["2"]["train"]
    data.tensors["2"] = {**data.tensors["2"], "train": (x, (y + 1) % 3)}
    module, accuracies = two_models(lr=0.5).model("small"), {}
    for lr in (0.0, 0.05, 50.0):  # the last one breaks the student: its start is kept
        callback = Members(validation=0.4, drop_worst=True, lr=lr or 0.05, steps=10 * (lr > 0))
        trainer, spy = spied(module, data, [callback], max_rounds=1, local_epochs=40)
        accuracies[lr] = callback.accuracy(trainer.server, trainer.server.module_with(trainer.server.model))[0]
        train, held = (found.tolist() for found in callback.ids(trainer.server))
        assert len(held) == 24 and sorted([*held, *train]) == list(range(60))
    x, y = (tensor[held] for tensor in data.public_dataloader().dataset.tensors)
    right = [float((with_state(Toy(), u.state)(x).argmax(1) == y).double().mean()) for u in spy.of_round(0).values()]
    assert Members.count == sum(share > 1 / 3 for share in right) == 2
    assert min(accuracies.values()) == accuracies[0.0]


class Nobody(FedDF):
    def _beats_guessing(self, server, member):
        return False


def test_where_no_teacher_is_left_the_mean_stays():
    callbacks = Nobody(steps=5, validation=0.5, drop_worst=True), FedAvg()
    module = Toy()
    ours, theirs = (federate(module, public_data(), [c], max_rounds=2) for c in callbacks)
    same(ours.server.model, theirs.server.model)


def start():
    callbacks = [FedDF(steps=3, validation=0.2), FedAdam(server_lr=0.1), LocalCheckpoint(), GlobalCheckpoint()]
    return two_models("momentum"), public_data((24, 40, 16, 30)), callbacks


def test_two_architectures_resume_bit_for_bit_with_a_server_optimizer_for_each(tmp_path):
    options = {"participation": 3, "evaluation": 1}
    whole = federate(*start(), tmp_path / "w", max_rounds=4, **options)
    half = federate(*start(), tmp_path / "h", max_rounds=2, **options)
    again = resumed(half, *start(), 4, **options)
    assert set(whole.server.models) == {"global", "deep"}
    for key, state in whole.server.models.items():
        same(again.server.models[key], state)
    moments = whole.server.state["FedAdam"]
    assert set(moments["models"]["deep"]["m"]) == set(module_state(two_models().model("deep")))
    assert set(moments["m"]) == set(module_state(two_models().model("small")))
    scored = {row.client for row in whole.recorder.rows if row.stage == "G" and row.round == 4}
    assert scored == set("0123")
    deep = own_models(whole)["1"]
    same(deep, whole.server.models["deep"])


def test_held_out_clients_deploy_the_model_of_their_architecture(tmp_path):
    data = public_data((24, 40, 16, 30, 20, 20))
    callbacks = [FedDF(steps=2), LocalCheckpoint()]
    trainer = federate(two_models(), data, callbacks, tmp_path, max_rounds=2, held_out=["4", "5"])
    same(module_state(trainer.module("4")), trainer.server.models["global"])
    same(module_state(trainer.module("5")), trainer.server.models["deep"])
    unseen = {row.client for row in trainer.recorder.rows if row.model == "unseen" and row.stage == "L1"}
    assert unseen == {"4", "5"}
    with pytest.raises(ValueError, match=r"no model for the held-out client '3'.*'deep'"):
        alone = two_models(assign={"0": "small", "1": "small", "2": "small", "3": "deep"})
        federate(alone, public_data((24, 40, 16, 30)), [FedDF(steps=2)], max_rounds=1, held_out=["3"])


@pytest.mark.slow
def test_worker_processes_change_nothing_with_two_architectures():
    module, data, callbacks = start()
    here, there = (
        federate(module, data, callbacks[:2], max_rounds=2, **options) for options in ({}, {"engine": Processes(2)})
    )
    for key, state in here.server.models.items():
        same(there.server.models[key], state)


def test_terms_in_the_gradient_go_with_it():
    for other in (FedProx(mu=0.1), SCAFFOLD(), FedAdam(), GlobalCheckpoint()):
        federate(Toy(), public_data(), [FedDF(steps=2), other], max_rounds=2)
    with pytest.raises(ValueError, match="SCAFFOLD works on models of one architecture"):
        federate(two_models(), public_data(), [FedDF(steps=2), SCAFFOLD()])


def test_wrong_use_is_refused():
    for arguments in ({"steps": -1}, {"lr": 0}, {"combine": "votes"}, {"validation": 1.0}, {"temperature": 0}):
        (name,) = arguments
        with pytest.raises(ValueError, match=f"FedDF got {name}="):
            FedDF(**arguments)
    with pytest.raises(ValueError, match="without validation: it judges by labelled public data"):
        FedDF(drop_worst=True)
    with pytest.raises(ValueError, match=r"FedDF fuses the whole models .*, and FedPer chooses what travels"):
        federate(Toy(), public_data(), [FedDF(), FedPer(personal="net.3")])
    with pytest.raises(ValueError, match="FedDF trains on public data, but the data module has none"):
        federate(Toy(), toy_data(), [FedDF()])
    with pytest.raises(ValueError, match="'deep' is the server's alone"):
        federate(two_models(server="deep"), public_data(), [FedDF()])
    with pytest.raises(ValueError, match="float_buffers='local' keeps a part"):
        federate(NormNet(), public_data(), [FedDF()], float_buffers="local")
