"""MAPPER: sheet entry 32, third part."""

from __future__ import annotations

import copy
from functools import partial
from itertools import islice

import pytest
import torch
from torch.nn import functional as F

from fedlightning.algorithm import ModelSelection
from fedlightning.callbacks import MAPPER, FedAvg, FedProx, Local
from fedlightning.tensors import clone, module_state
from tests.callbacks.common import (
    MAKES,
    SIZES,
    A,
    AdamWDecay,
    B,
    absent_clients_rest,
    batches,
    cut_and_resumed,
    deployed,
)
from tests.conformance.case import Case, Kept
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    close,
    differs,
    federate,
    global_state,
    mean_of,
    quadratic_data,
    same,
    spied,
    toy_data,
)

CASES = {"MAPPER": Case(MAPPER(), neutral=MAPPER(grid=[0.0]))}
KEPT = {"MAPPER": Kept("MAPPER", client=("lam", "model"), phases=("fit", "local-0.25", "local-0.5", "local-0.75"))}
at_once = partial(MAPPER, warmup=0)
"""As in the paper: no round of FedAvg comes first."""


@pytest.mark.parametrize("make", MAKES)
def test_share_zero_is_fedavg(make):
    """Grid {0}: FedAvg; with one global step FedAvg of one step, however long local training is."""
    module, data = make(), toy_data(SIZES)
    plain = FedAvg(weighting="uniform")
    ours, theirs = (federate(module, data, [cb], max_rounds=3, local_epochs=2) for cb in (at_once([0.0]), plain))
    same(global_state(ours), global_state(theirs))
    for client in SIZES:
        same(deployed(ours, client), global_state(ours))
    ours = federate(module, data, [at_once([0.0], global_steps=1)], max_rounds=3, local_epochs=2)
    same(global_state(ours), global_state(federate(module, data, [plain], max_rounds=3, local_steps=1)))


@pytest.mark.parametrize("make", [*MAKES, AdamWDecay])
@pytest.mark.parametrize("how", ["reset", pytest.param("keep", marks=pytest.mark.slow)])
def test_share_one_is_training_alone_and_the_global_model_never_moves(make, how):
    module, data = make(), toy_data(SIZES)
    options = {"max_rounds": 3, "local_epochs": 2, "optimizer_state": how}
    ours, local = (federate(module, data, [cb], **options) for cb in (at_once([1.0]), Local()))
    same(global_state(ours), module_state(module))
    for client in SIZES:
        same(deployed(ours, client), deployed(local, client))


def by_hand(module, data, client, grid, h_c, h_l, number, epochs, global_steps):
    """One visit in plain torch, by autograd through the mixture (no factor is written down)."""
    names = [name for name, _ in module.named_parameters()]

    def loss_of(model, lam, local, common, x, y):
        mixed = {name: lam * local[name] + (1 - lam) * common[name] for name in names}
        return F.cross_entropy(torch.func.functional_call(model, mixed, (x,)), y)

    def fit(lam, local, common, trained, steps=None):
        parameters = [trained[name].requires_grad_() for name in names]
        optimizer = type(module)(**module.hparams).configure_optimizers()
        optimizer = type(optimizer)(parameters, **optimizer.defaults)
        for x, y in islice(batches(data, client, round=number, epochs=epochs), steps):
            optimizer.zero_grad()
            loss_of(module, lam, local, common, x, y).backward()
            optimizer.step()
        return {name: value.detach() for name, value in trained.items()}

    x, y = data.tensors[client]["train"]
    candidates = []
    for lam in grid:
        local = clone(h_l)
        local = fit(lam, local, h_c, local) if lam else local
        candidates.append((float(loss_of(module, lam, local, h_c, x, y)), lam, local))
    losses = {lam: loss for loss, lam, _ in candidates}
    _, lam, local = min(candidates, key=lambda candidate: candidate[0])
    common = clone(h_c)
    return lam, local, fit(lam, local, common, common, global_steps), losses


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("steps", [1, None])
def test_two_visits_by_hand(optimizer, steps):
    module, data, grid = Toy(optimizer, lr=0.05), toy_data(SIZES), (0.0, 0.3, 0.8)
    trainer, spy = spied(module, data, [at_once(grid, global_steps=steps)], max_rounds=2, local_epochs=2)
    for client in SIZES:
        h_l = module_state(module)
        for number, h_c in enumerate([module_state(module), spy.rounds[0]]):
            lam, h_l, common, losses = by_hand(module, data, client, grid, h_c, h_l, number, 2, steps)
            kept = spy.records[number][client].state["MAPPER"]
            assert losses[kept["lam"]] == min(losses.values())  # the chosen lam attains the minimum
            close(kept["model"], h_l, atol=5e-6)
            close(spy.of_round(number)[client].state, common, atol=5e-6)
        mixed = {name: lam * h_l[name] + (1 - lam) * value for name, value in global_state(trainer).items()}
        close(deployed(trainer, client), mixed, atol=5e-6)
    same(global_state(trainer), mean_of(spy.of_round(1), dict.fromkeys(SIZES, 1)))


def test_quadratics_in_closed_form():
    """The mixture reaches the client's minimiser: h_l = (b - (1 - lam) h_c) / lam; then h_c has no gradient left."""
    module, data = Quadratic(lr=0.6), quadratic_data(A, B)
    with torch.no_grad():
        module.w.fill_(0.5)
    for lam in (0.5, 1.0):
        trainer, spy = spied(module, data, [at_once([lam])], max_rounds=1, local_epochs=120)
        for client, b in zip("01", torch.tensor(B).double(), strict=True):
            own = spy.records[0][client].state["MAPPER"]["model"]["w"]
            torch.testing.assert_close(own, (b - (1 - lam) * 0.5) / lam, atol=1e-2, rtol=0)
            torch.testing.assert_close(deployed(trainer, client)["w"], b, atol=1e-2, rtol=0)
        torch.testing.assert_close(global_state(trainer)["w"], module_state(module)["w"], atol=1e-2, rtol=0)


def test_the_global_step_in_closed_form():
    """One step at lam from equal halves: h_l <- h - eta lam g(h); h_c <- h - eta (1 - lam) g(h(lam))."""
    module, data, lam, lr = Quadratic(lr=0.1), quadratic_data(A, B), 0.25, 0.1
    _, spy = spied(module, data, [at_once([lam], global_steps=1)], max_rounds=1, local_steps=1)
    for client, a, b in zip("01", torch.tensor(A).double(), torch.tensor(B).double(), strict=True):
        h_l = lr * lam * a * b
        torch.testing.assert_close(spy.records[0][client].state["MAPPER"]["model"]["w"], h_l)
        torch.testing.assert_close(spy.of_round(0)[client].state["w"], -lr * (1 - lam) * a * (lam * h_l - b))


def test_every_client_counts():
    """The defect of public code: only the last client's update was in the list. A client at lam = 1 counts too."""
    module, data = Toy("sgd"), toy_data(SIZES)
    trainer, spy = spied(module, data, [at_once()], max_rounds=2)
    assert all(update.steps for update in spy.updates)
    same(global_state(trainer), mean_of(spy.of_round(1), dict.fromkeys(SIZES, 1)))
    trainer, spy = spied(module, data, [at_once([1.0])], max_rounds=1)
    assert len([update for update in spy.updates if update.steps]) == 3


def test_the_choice_can_be_made_on_validation_data():
    module, data = Toy("sgd", lr=0.5), toy_data({"0": 8, "1": 40}, val=40)
    for split in ("train", "val"):
        _, spy = spied(module, data, [at_once([0.0, 1.0], choose_on=split)], max_rounds=1, local_epochs=12)
        local = federate(module, data, [Local()], max_rounds=1, local_epochs=12)
        for client in ("0", "1"):
            losses = {}
            for lam, state in ((0.0, module_state(module)), (1.0, deployed(local, client))):
                model = copy.deepcopy(module)
                model.load_state_dict(state)
                x, y = data.tensors[client][split]
                losses[lam] = float(F.cross_entropy(model(x), y).detach())
            assert losses[spy.records[0][client].state["MAPPER"]["lam"]] == min(losses.values())


def test_what_is_deployed_at_each_stage(tmp_path):
    """L1: with the h_c received; L2: with the client's own; G: h_c. Statistics are those the mixture has seen."""
    module, data = NormNet("momentum"), toy_data(SIZES)
    seen = []

    class Watch(ModelSelection):
        def on_client_evaluated(self, client, stage, split, metrics, module):
            if split == "val" and client.round == 1:
                own = client.state["MAPPER"]
                seen.append((client.id, stage, own, clone(module_state(module)), clone(module_state(client.module))))

    trainer = federate(module, data, [Watch(), at_once([0.4])], root=tmp_path, max_rounds=2)
    assert {(client, stage) for client, stage, *_ in seen} == {(c, s) for c in SIZES for s in ("L1", "L2")}
    for _, stage, own, used, h_c in seen:
        if stage == "L1":
            same(h_c, global_state(trainer))
        for name, value in used.items():
            if name in dict(module.named_parameters()):
                torch.testing.assert_close(value, 0.4 * own["model"][name] + 0.6 * h_c[name])
            else:
                assert torch.equal(value, own["model"][name])


def test_accumulated_gradients_are_taken_at_one_mixture():
    """Two half batches and one step are the full batch's step."""
    module, data = Toy("sgd"), toy_data([16], batch_size=8, shuffle=False)
    halves = toy_data([16], batch_size=4, shuffle=False)
    once = federate(module, data, [at_once([0.3, 0.7])], max_rounds=2)
    twice = federate(module, halves, [at_once([0.3, 0.7])], max_rounds=2, accumulate_grad_batches=2)
    close(global_state(once), global_state(twice))
    close(module_state(once.module("0")), module_state(twice.module("0")))


def test_other_terms_act_on_the_global_half():
    module, data = Toy("sgd", lr=0.05), toy_data(SIZES)
    free, held = (
        spied(module, data, [at_once([0.5]), *cb], max_rounds=1, local_epochs=3) for cb in ([], [FedProx(mu=15.0)])
    )
    for client in SIZES:
        same(*(spy.records[0][client].state["MAPPER"]["model"] for _, spy in (free, held)))
    start = module_state(module)["net.0.weight"]
    moved = [(global_state(trainer)["net.0.weight"] - start).norm() for trainer, _ in (free, held)]
    assert moved[1] < 0.6 * moved[0]


def test_nothing_of_the_local_half_travels():
    module, data = NormNet("adam"), toy_data(SIZES)
    ours, spy = spied(module, data, [at_once()], max_rounds=2)
    plain = federate(module, data, max_rounds=2)
    assert (ours.server.costs.bytes_up, ours.server.costs.bytes_down) == (
        plain.server.costs.bytes_up,
        plain.server.costs.bytes_down,
    )
    assert all(item.extras == {} for item in (*spy.messages, *spy.updates))
    for client, update in spy.of_round(1).items():
        assert differs(update.state, spy.records[1][client].state["MAPPER"]["model"])


def test_absent_clients_rest():
    trainer, spy = spied(Toy("adam"), toy_data(SIZES), [at_once()], max_rounds=3, participation=1)
    absent_clients_rest(spy)
    for client in SIZES:
        if not trainer.store.get(client).visits:
            same(deployed(trainer, client), global_state(trainer))


@pytest.mark.slow  # the conformance suite resumes it too
@pytest.mark.parametrize("how", ["reset", "keep"])
def test_resumed_is_uninterrupted(tmp_path, how):
    module, data = NormNet("adam"), toy_data(SIZES)
    whole, _, again = cut_and_resumed(tmp_path, module, data, lambda: [at_once()], max_rounds=3, optimizer_state=how)
    same(global_state(again), global_state(whole))
    for client in SIZES:
        same(deployed(again, client), deployed(whole, client))


def test_a_longer_run_keeps_the_warm_up_it_began_with(tmp_path):
    """Clients that have a local model do not go back to deploying it beside a global one that trains alone."""
    module, data, saved = Toy(), toy_data(SIZES), {"save_state": 1, "evaluation": 0}
    path = federate(module, data, [MAPPER()], tmp_path, max_rounds=2, **saved).run.path
    longer = federate(module, data, [MAPPER()], tmp_path, max_rounds=6, resume=path, **saved)  # half of them: 3
    whole = federate(module, data, [MAPPER(warmup=1)], max_rounds=6)
    same(global_state(longer), global_state(whole))
    for client in SIZES:
        same(deployed(longer, client), deployed(whole, client))


def test_other_precision():
    trainer = federate(NormNet("adam"), toy_data(SIZES), [at_once()], max_rounds=2, precision="bf16-mixed")
    assert all(value.dtype != torch.bfloat16 for value in module_state(trainer.module("0")).values())


class Manual(Toy):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: at_once([]), r"MAPPER got grid=\[\]"),
        (
            lambda: at_once([0.5, 1.5]),
            r"grid=\[0.5, 1.5\]. Use a list of .*, each a number in \[0, 1\]",
        ),
        (lambda: at_once([0.5, 0.5]), "all different, each a number.*Shares of the local model"),
        (lambda: at_once(global_steps=0), r"global_steps=0. Use a whole number in \[1, inf\), or None"),
        (lambda: at_once(choose_on="test"), "choose_on='test'. Use 'train' or 'val'"),
    ],
)
def test_wrong_use(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_manual_optimization_is_refused():
    with pytest.raises(ValueError, match=r"MAPPER takes gradients at a mixture, but Manual optimizes manually"):
        federate(Manual(), toy_data(SIZES), [at_once()])


@pytest.mark.parametrize(("warmup", "rounds"), [(2, 2), (0.5, 2), (0.25, 1), (1.0, 4)])
def test_the_first_rounds_are_those_of_fedavg(warmup, rounds):
    module, data = NormNet("momentum"), toy_data(SIZES)
    _, ours = spied(module, data, [MAPPER(warmup=warmup)], max_rounds=4)
    _, theirs = spied(module, data, [FedAvg(weighting="uniform")], max_rounds=4)
    for number in range(4):
        if number < rounds:
            same(ours.rounds[number], theirs.rounds[number])
        else:
            assert differs(ours.rounds[number], theirs.rounds[number])


def test_after_the_warmup_the_local_model_begins_from_the_global_one():
    module, data = Toy(), toy_data(SIZES)
    trainer = federate(module, data, [MAPPER([1.0], warmup=2)], max_rounds=3)
    start = federate(module, data, [FedAvg(weighting="uniform")], max_rounds=2)
    same(global_state(trainer), global_state(start))  # with a share of 1 nothing moves it
    for client in SIZES:
        assert differs(deployed(trainer, client), global_state(start))
    without = federate(module, data, [MAPPER(warmup=3)], max_rounds=3)
    for client in SIZES:
        same(deployed(without, client), global_state(without))
