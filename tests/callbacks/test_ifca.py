"""IFCA and HypCluster: sheet B 1.1 and 1.2, sheet A 32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedlightning import FederatedCallback
from fedlightning.callbacks import IFCA, SCAFFOLD, FedAdam, FedAvg, FedPer, FedProx, HypCluster
from fedlightning.callbacks.ifca import centre
from fedlightning.callbacks.shared.server_models import another_start
from fedlightning.tensors import module_state
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import (
    NormNet,
    Quadratic,
    Toy,
    ToyData,
    close,
    differs,
    federate,
    global_state,
    make_trainer,
    quadratic_data,
    same,
    spied,
    toy_data,
)

CASES = {
    "IFCA": Case(IFCA(), neutral=IFCA(num_clusters=1)),
    "IFCA option 1": Case(IFCA(option=1), skip=NO_PLAIN_FORM),
    "HypCluster": Case(HypCluster(), neutral=HypCluster(num_clusters=1)),
}
KEPT = {
    "HypCluster": Kept("HypCluster", server=("clusters",), models=("global", "centre 1")),
    "IFCA": Kept("IFCA", server=("clusters",), models=("global", "centre 1")),
}

NAMES = ("0", "1", "2")


class Planted(FederatedCallback):
    """Centres that are given, one value for all of ``w`` each."""

    def __init__(self, *values):
        self.values = values

    def on_federation_start(self, server):
        for j, value in enumerate(self.values):
            server.models[centre(j)] = {"w": torch.full_like(server.model["w"], value)}


def chosen(trainer, key="IFCA"):
    return trainer.server.state[key]["clusters"]


# -- one centre, and centres that are equal --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
@pytest.mark.parametrize(
    ("callback", "weighting"),
    [(IFCA(1), "uniform"), (IFCA(1, weighting="samples"), "samples"), (HypCluster(1), "samples")],
)
def test_one_cluster_is_fedavg(make, callback, weighting):
    module, data = make(), toy_data()
    plain = federate(module, data, [FedAvg(weighting)], max_rounds=3)
    ours = federate(module, data, [callback], max_rounds=3)
    same(global_state(ours), global_state(plain))
    same(module_state(ours.module()), global_state(plain))
    for client in NAMES:
        same(module_state(ours.module(client)), global_state(plain))
    assert ours.server.costs.bytes_down == plain.server.costs.bytes_down


@pytest.mark.parametrize("make", [lambda: Toy("adam", dropout=0.2), lambda: NormNet("momentum")])
def test_equal_centres_never_separate(make):
    module, data = make(), toy_data()
    plain = federate(module, data, [FedAvg("uniform")], max_rounds=1)
    with pytest.warns(UserWarning, match=r"IFCA\(init=0\) starts all centres from one model"):
        ours = federate(module, data, [IFCA(3, init=0)], max_rounds=1)
    assert chosen(ours) == dict.fromkeys(NAMES, 0)
    same(ours.server.models["global"], global_state(plain))
    for j in (1, 2):
        same(ours.server.models[centre(j)], module_state(module))


# -- planted clusters ------------------------------------------------------------------------------------------------

A = [[1.0, 2.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.5, 2.0]]
B = [[5.0, 5.0, 4.0], [-5.0, -4.0, -5.0], [4.0, 5.0, 5.0], [-5.0, -5.0, -6.0]]
MEMBERS = {0: ("0", "2"), 1: ("1", "3")}


def fedavg_of(members, start, rounds, lr=0.1, weighting="uniform"):
    data = quadratic_data([A[int(c)] for c in members], [B[int(c)] for c in members])
    return federate(Quadratic(lr), data, [Planted(start), FedAvg(weighting)], max_rounds=rounds).server.model


@pytest.mark.parametrize("kind", [IFCA, HypCluster])
def test_planted_clusters_are_found_at_once_and_each_is_fedavg_on_its_own(kind):
    callback = kind(2, init=0.1)
    trainer, spy = spied(Quadratic(), quadratic_data(A, B), [callback, Planted(3.0, -3.0)], max_rounds=3)
    for number, state in enumerate(spy.states):
        assert state[callback.key]["clusters"] == {"0": 0, "1": 1, "2": 0, "3": 1}, number
    for j, start in ((0, 3.0), (1, -3.0)):
        same(trainer.server.models[centre(j)], fedavg_of(MEMBERS[j], start, 3))
        for client in MEMBERS[j]:
            same(module_state(trainer.module(client)), trainer.server.models[centre(j)])


@pytest.mark.parametrize("option", [1, 2])
def test_relabelled_centres_relabel_the_result(option):
    runs = [
        federate(Quadratic(), quadratic_data(A, B), [IFCA(3, option, init=0.1), Planted(*values)], max_rounds=3)
        for values in ((3.0, -3.0, 0.5), (0.5, 3.0, -3.0))
    ]
    for here, there in ((0, 1), (1, 2), (2, 0)):
        same(runs[0].server.models[centre(here)], runs[1].server.models[centre(there)])
    assert {c: (j + 1) % 3 for c, j in chosen(runs[0]).items()} == chosen(runs[1])


@pytest.mark.parametrize("option", [1, 2])
def test_a_centre_that_nobody_chooses_stays(option):
    callbacks = [IFCA(3, option, init=0.1), Planted(3.0, 100.0, -3.0)]
    trainer = federate(Quadratic(), quadratic_data(A, B), callbacks, max_rounds=2)
    assert set(chosen(trainer).values()) == {0, 2}
    assert trainer.server.models[centre(1)]["w"].tolist() == [100.0] * 3


def test_each_choice_has_the_least_training_loss_and_a_tie_goes_to_the_first():
    module, data = NormNet("sgd"), toy_data([24, 40, 16, 8, 30])
    trainer, spy = spied(module, data, [IFCA(4, init=0.5)], max_rounds=1)
    centres = [module_state(module)] + [
        {**module_state(module), **message} for message in list(spy.messages[0].extras["IFCA"]["centres"].values())
    ]
    for client, j in chosen(trainer).items():
        x, y = data.tensors[client]["train"]
        losses = []
        for state in centres:
            model = NormNet().eval()
            model.load_state_dict(state)
            losses.append(F.cross_entropy(model(x), y).item())
        assert j == losses.index(min(losses))
    tied = federate(Quadratic(), quadratic_data(A, B), [IFCA(4, init=0.1), Planted(20.0, 0.0, 0.0, 20.0)], max_rounds=1)
    assert set(chosen(tied).values()) == {1}


# -- option 1 --------------------------------------------------------------------------------------------------------


def gradient(client, w):
    return torch.tensor(A[client], dtype=torch.float64) * (w - torch.tensor(B[client], dtype=torch.float64))


def test_option_1_with_one_centre_is_a_step_on_the_mean_loss():
    trainer = federate(Quadratic(), quadratic_data(A, B), [IFCA(1, option=1, server_lr=0.3)], max_rounds=2)
    w = torch.zeros(3, dtype=torch.float64)
    for _ in range(2):
        w = w - 0.3 * sum(gradient(i, w) for i in range(4)) / 4
    close(global_state(trainer), {"w": w}, atol=1e-14)
    close(module_state(trainer.module()), {"w": w}, atol=1e-14)


def test_option_1_divides_by_the_participants_not_by_the_cluster():
    callbacks = [IFCA(2, option=1, server_lr=0.3, init=0.1), Planted(3.0, -3.0)]
    trainer, spy = spied(Quadratic(), quadratic_data(A, B), callbacks, max_rounds=1)
    for j, start in ((0, 3.0), (1, -3.0)):
        w = torch.full((3,), start, dtype=torch.float64)
        expected = w - 0.3 / 4 * sum(gradient(int(c), w) for c in MEMBERS[j])
        close(trainer.server.models[centre(j)], {"w": expected}, atol=1e-14)
    assert not any(update.state for update in spy.updates)
    assert trainer.server.costs.bytes_down == 4 * 2 * 24
    assert trainer.server.costs.bytes_up == 4 * (24 + 8)


def test_option_1_weighted_by_samples_with_partial_participation():
    rows = {c: (A[int(c)], B[int(c)], int(c) + 1) for c in ("0", "1", "2", "3")}
    tensors = {}
    for client, (a, b, count) in rows.items():
        pair = tuple(torch.tensor([row] * count, dtype=torch.float64) for row in (a, b))
        tensors[client] = {"train": pair, "val": tuple(t[:0] for t in pair), "test": tuple(t[:0] for t in pair)}
    callbacks = [IFCA(2, option=1, server_lr=0.3, init=0.1, weighting="samples"), Planted(3.0, -3.0)]
    trainer, spy = spied(Quadratic(), ToyData(tensors), callbacks, max_rounds=1, participation=3)
    present = {int(update.client) for update in spy.updates}
    total = sum(i + 1 for i in present)
    for j, start in ((0, 3.0), (1, -3.0)):
        w = torch.full((3,), start, dtype=torch.float64)
        terms = [(i + 1) / total * gradient(i, w) for i in present if str(i) in MEMBERS[j]]
        close(trainer.server.models[centre(j)], {"w": w - 0.3 * sum(terms)}, atol=1e-14)


def test_option_1_bears_a_client_without_a_batch():
    callbacks = [IFCA(2, option=1, server_lr=0.3, init=0.1)]
    trainer, spy = spied(NormNet("sgd"), toy_data([24, 0, 16]), callbacks, max_rounds=2)
    assert not trainer.server.failures
    sent = {update.client: set(update.extras["IFCA"]) for update in spy.updates}
    assert sent == {"0": {"cluster", "gradient"}, "1": {"cluster"}, "2": {"cluster", "gradient"}}


class Tied(Toy):
    """Two names of one tensor."""

    def __init__(self) -> None:
        super().__init__("sgd", hidden=6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.net[0].weight = nn.Parameter(torch.eye(6))

    def logits(self, x):
        return super().logits(self.again(x))


def test_option_1_moves_a_tied_tensor_under_both_of_its_names():
    trainer = federate(Tied(), toy_data(), [IFCA(2, option=1)], max_rounds=2)
    for model in trainer.server.models.values():
        assert torch.equal(model["again.weight"], model["net.0.weight"])
    assert differs(trainer.server.models["global"], module_state(Tied()))


def test_option_1_touches_parameters_only():
    module = NormNet("sgd")
    trainer = federate(module, toy_data(), [IFCA(2, option=1)], max_rounds=2)
    start = module_state(module)
    for name, value in trainer.server.models["global"].items():
        if name.startswith("net.1.running") or name.endswith("tracked"):
            assert torch.equal(value, start[name])
    assert any(differs(trainer.server.models[key], start) for key in ("global", "centre 1"))


# -- weighting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_mean_within_a_cluster(weighting):
    data = toy_data([24, 40, 16, 8])
    trainer, spy = spied(Toy("sgd"), data, [IFCA(2, weighting=weighting)], max_rounds=1)
    for j in (0, 1):
        members = [u for u in spy.updates if chosen(trainer)[u.client] == j]
        assert {u.model for u in members} <= {centre(j)}
        weights = [float(u.num_samples) if weighting == "samples" else 1.0 for u in members]
        for name, value in trainer.server.models[centre(j)].items():
            if members:
                mean = sum(w * u.state[name].double() for w, u in zip(weights, members, strict=True)) / sum(weights)
                assert torch.equal(value, mean.float())


def test_hypcluster_is_ifca_weighted_by_samples():
    module, data = NormNet("adam"), toy_data()

    class Named(HypCluster):
        key = "IFCA"  # the address of the initial centres

    ours = federate(module, data, [Named(2)], max_rounds=3)
    ifca = federate(module, data, [IFCA(2, weighting="samples")], max_rounds=3)
    for key in ("global", "centre 1"):
        same(ours.server.models[key], ifca.server.models[key])


def test_hypcluster_deploys_what_is_best_on_validation_data():
    """Training data lie near one centre, validation data near the other."""
    train, val = ([[value] * 3] for value in (3.0, -3.0))
    ones = torch.ones(1, 3, dtype=torch.float64)
    pairs = {
        s: (ones, torch.tensor(b, dtype=torch.float64)) for s, b in (("train", train), ("val", val), ("test", val))
    }
    for kind, start in ((HypCluster, -3.0), (IFCA, None)):
        callbacks = [kind(2, init=0.1), Planted(2.0, -3.0)]
        trainer = federate(Quadratic(), ToyData({"0": pairs, "1": pairs}), callbacks, max_rounds=1)
        assert chosen(trainer, kind.__name__) == {"0": 0, "1": 0}  # trained: the best on training data
        w = module_state(trainer.module("0"))["w"]
        assert (w.tolist() == [-3.0] * 3) == (start is not None)


# -- starts ----------------------------------------------------------------------------------------------------------


def test_centres_start_from_seeds_of_their_own():
    module = NormNet("sgd")
    starts = {}
    for seed in (0, 1):
        _, spy = spied(module, toy_data(), [IFCA(3)], max_rounds=1, seed=seed)
        message = spy.messages[0]
        same(message.state, module_state(module))
        starts[seed] = [message.state, *message.extras["IFCA"]["centres"].values()]
        weights = [state["net.0.weight"] for state in starts[seed]]
        assert len({tuple(w.flatten().tolist()) for w in weights}) == 3
    assert differs(starts[0][1], starts[1][1])


class Mixed(Toy):
    """A frozen pre-trained part, a tied pair, an attention block and a parameter that nothing can reset."""

    def make(self, hidden, dropout):
        net = nn.ModuleDict(
            {
                "old": nn.Sequential(nn.Linear(6, hidden), nn.BatchNorm1d(hidden)),
                "one": nn.Linear(hidden, hidden),
                "two": nn.Linear(hidden, hidden),
                "attention": nn.MultiheadAttention(hidden, 2),
                "head": nn.Linear(hidden, 3),
            }
        )
        net["old"].requires_grad_(False)
        net["old"][1].running_mean.fill_(4.0)
        net["two"].weight = net["one"].weight
        self.scale = nn.Parameter(torch.full((2,), 3.0))
        return net


@pytest.mark.parametrize("init", ["random", 0.5])
def test_starts_of_modules_with_every_kind_of_entry(init):
    module = Mixed()
    before = {name: value.clone() for name, value in module_state(module).items()}
    new = another_start(module, init, 0, "here")
    same(module_state(module), before)
    for name, value in new.items():
        kept = name.startswith("net.old") or (name == "scale" and init == "random")
        reset_to_itself = init == "random" and name.startswith("net.attention") and "bias" in name
        assert torch.equal(value, before[name]) == (kept or reset_to_itself), name
    assert torch.equal(new["net.one.weight"], new["net.two.weight"])
    same(new, another_start(module, init, 0, "here"))


def test_a_module_that_cannot_be_initialised_anew_is_refused():
    with pytest.raises(ValueError, match=r"IFCA cannot initialise Quadratic anew.*IFCA\(init=0.1\)"):
        federate(Quadratic(), quadratic_data(A, B), [IFCA()])


# -- what travels, what is deployed ----------------------------------------------------------------------------------


def test_the_wire():
    module = Toy("sgd")
    size = 4 * sum(p.numel() for p in module.parameters())
    trainer = federate(module, toy_data(), [IFCA(3)], max_rounds=2)
    assert trainer.server.costs.bytes_down == 6 * 3 * size
    assert trainer.server.costs.bytes_up == 6 * (size + 8)


def test_terms_that_refer_to_what_was_sent_mean_the_chosen_centre():
    callbacks = [IFCA(2, init=0.1), Planted(3.0, -3.0), FedProx(2.0)]
    _trainer, spy = spied(Quadratic(lr=0.1), quadratic_data(A, B), callbacks, max_rounds=1, local_epochs=2)
    w0 = torch.full((3,), -3.0, dtype=torch.float64)
    w = w0 - 0.1 * gradient(1, w0)
    w = w - 0.1 * (gradient(1, w) + 2.0 * (w - w0))
    close(spy.of_round(0)["1"].state, {"w": w}, atol=1e-14)


def test_stage_g_is_the_clusters_model_and_l1_the_best_centre(tmp_path):
    data = toy_data([24, 40, 16, 8])
    trainer = federate(NormNet("sgd"), data, [IFCA(2)], root=tmp_path, max_rounds=2, participation=3)
    server = trainer.server
    assert server.global_module() is None
    with pytest.raises(ValueError, match="no global model"):
        trainer.module()
    for client in server.clients:
        module = server.global_module(client)
        assert (module is None) == (client not in chosen(trainer))
        if module is not None:
            same(module_state(module), server.models[centre(chosen(trainer)[client])])
        x, y = data.tensors[client]["train"]
        losses = []
        for j in (0, 1):
            model = NormNet().eval()
            model.load_state_dict(server.models[centre(j)])
            losses.append(F.cross_entropy(model(x), y).item())
        same(module_state(trainer.module(client)), server.models[centre(losses.index(min(losses)))])
    stages = {(row.stage, row.client) for row in trainer.rows if row.round == 2}
    assert {client for stage, client in stages if stage == "G"} == set(chosen(trainer))
    assert {client for stage, client in stages if stage == "L1"} == set(server.clients)


def test_looking_at_a_client_changes_nothing():
    trainer = federate(Toy("sgd"), toy_data(), [IFCA(2)], max_rounds=1)
    record, models = trainer.store.get("0"), dict(trainer.server.models)
    state = {key: dict(value) for key, value in trainer.server.state.items()}
    trainer.module("0")
    assert trainer.store.get("0") is record
    assert trainer.server.state == state
    for key, value in models.items():
        same(value, trainer.server.models[key])


def test_clusters_of_bodies_under_personal_heads():
    trainer, spy = spied(Toy("sgd"), toy_data(), [FedPer(), IFCA(2)], max_rounds=2)
    for message in spy.messages:
        for state in (message.state, *message.extras["IFCA"]["centres"].values()):
            assert set(state) == {"net.0.weight", "net.0.bias"}
    assert trainer.server.global_module("0") is None


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [FedAdam(), SCAFFOLD(weighting="uniform")])
def test_server_steps_over_several_centres_are_refused(other):
    with pytest.raises(ValueError, match=rf"IFCA keeps several models.*, and {other.key} "):
        make_trainer(None, [IFCA(), other]).fit(Toy(), datamodule=toy_data())
    federate(Toy(), toy_data(), [IFCA(1), other], max_rounds=1)


@pytest.mark.parametrize(
    "options",
    [
        {"num_clusters": 0},
        {"option": 3},
        {"server_lr": 0.0},
        {"init": -1.0},
        {"init": "same"},
        {"deploy_split": "test"},
    ],
)
def test_senseless_settings_are_refused(options):
    with pytest.raises(ValueError, match=f"IFCA got {next(iter(options))}="):
        IFCA(**options)
