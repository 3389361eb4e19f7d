"""Attackers who work together: formulas in plain numpy, what is sent, what is refused, and what each does to the mean."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import norm

from fedlightning.algorithm import UpdateInterception
from fedlightning.callbacks import SCAFFOLD, FedAdam, FedAvg, FedAvgM, FedBuff, FedLP, FedProto, HeteroFL, TopK
from fedlightning.callbacks.attacks import ALIE, InnerProductManipulation, ModelReplacement, SignFlip
from fedlightning.contract import FederatedCallback
from fedlightning.options import FailurePolicy
from fedlightning.virtual_time import Asynchronous
from tests.helpers import Toy, differs, federate, global_state, make_trainer, same, toy_data

SIZES = {"0": 24, "1": 40, "2": 16, "3": 24, "4": 24}


def module(lr=0.1):
    torch.manual_seed(0)
    return Toy(lr=lr)


class Looks(UpdateInterception):
    """Notes what is on its way: as an honest client made it, or as the attack left it."""

    def __init__(self, rank=0):
        self.rank, self.seen, self.sent = rank, {}, {}

    def hyperparameters(self):
        return {}

    def intercept(self, server, sent, updates):
        for message, update in zip(sent, updates, strict=True):
            self.seen[update.client] = {name: value.clone() for name, value in update.state.items()}
            self.sent[update.client] = dict(message.state)


class Arrives(FederatedCallback):
    seen: dict = {}

    def on_update(self, server, update):
        self.seen[update.client] = {name: value.clone() for name, value in update.state.items()}


def changes(looks, names):
    return {
        client: np.concatenate([(state[name].double() - looks.sent[client][name].double()).flatten() for name in names])
        for client, state in looks.seen.items()
    }


def intercepted(attack, **options):
    """What everybody sent before and after an attack, in one round."""
    before, arrives = Looks(rank=-1), Arrives()
    arrives.seen.clear()
    federate(
        module(),
        toy_data(SIZES),
        [before, attack, arrives],
        max_rounds=1,
        failures=FailurePolicy(update_limit=None),
        **options,
    )
    names = list(next(iter(before.seen.values())))
    after = replace_seen(before, arrives.seen)
    return changes(before, names), changes(after, names)


def replace_seen(looks, seen):
    other = Looks()
    other.seen, other.sent = dict(seen), looks.sent
    return other


# -- formulas, without our code ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("count", "bad"), [(50, 12), (10, 3), (25, 6), (100, 20), (5, 2)])
def test_z_max_of_the_paper(count, bad):
    win = count // 2 + 1 - bad  # s: good clients to win over
    expected = norm.ppf((count - bad - win) / (count - bad))
    assert ALIE(range(bad)).standard_deviations(count, bad) == pytest.approx(max(expected, 0), abs=1e-12)


@pytest.mark.parametrize("knows", ["colluders", "everybody"])
def test_alie_is_the_mean_minus_z_deviations_of_those_that_are_known(knows):
    before, after = intercepted(ALIE([0, 1], z=1.5, knows=knows))
    known = np.stack([before[one] for one in (("0", "1") if knows == "colluders" else ("2", "3", "4"))])
    expected = known.mean(axis=0) - 1.5 * np.sqrt(np.var(known, axis=0))
    for client in ("0", "1"):
        np.testing.assert_allclose(after[client], expected, atol=1e-6)
    for client in ("2", "3", "4"):
        np.testing.assert_array_equal(after[client], before[client])


def test_z_max_is_of_those_whose_updates_are_combined():
    """Not of the federation: client "3" has no samples, and its update, which changes nothing, is not an honest change."""
    seen = []

    class Notes(ALIE):
        def crafted(self, known, clients, bad):
            seen.append((known.shape[0], bool((known.norm(dim=1) > 0).all()), clients, bad))
            return super().crafted(known, clients, bad)

    data = toy_data(SIZES | {"3": 0})
    federate(module(), data, [FedAvg(), Notes(["0", "1"], knows="everybody")], max_rounds=1)
    assert seen == [(2, True, 4, 2)]


@pytest.mark.parametrize("knows", ["colluders", "everybody"])
def test_inner_product_manipulation_is_the_mean_turned_round(knows):
    before, after = intercepted(InnerProductManipulation([0, 1], epsilon=0.7, knows=knows))
    known = np.stack([before[one] for one in (("0", "1") if knows == "colluders" else ("2", "3", "4"))])
    np.testing.assert_allclose(after["0"], -0.7 * known.mean(axis=0), atol=1e-6)
    np.testing.assert_array_equal(after["0"], after["1"])
    np.testing.assert_array_equal(after["4"], before["4"])


def test_the_mean_becomes_the_model_of_the_bad_client():
    looks = Looks(rank=-1)
    attacked = federate(module(), toy_data(SIZES), [looks, ModelReplacement(["1"], "exact")], max_rounds=1)
    for name in looks.seen["1"]:  # honest changes of the others are what remains of them in the paper too
        rest = sum(SIZES[one] * (looks.seen[one][name] - looks.sent[one][name]).double() for one in SIZES if one != "1")
        expected = looks.seen["1"][name].double() + rest / sum(SIZES.values())
        torch.testing.assert_close(global_state(attacked)[name].double(), expected, atol=1e-5, rtol=0)


def test_what_the_server_multiplies_with_is_made_up_for():
    _, full = intercepted(ModelReplacement(["1"], "exact"))
    before, half = intercepted(ModelReplacement(["1"], "exact", server_lr=2.0))
    np.testing.assert_allclose(full["1"], 2 * half["1"], atol=1e-5)
    np.testing.assert_allclose(full["1"], before["1"] * sum(SIZES.values()) / SIZES["1"], atol=1e-5)


def test_constrain_and_scale_stays_nearer_and_leaves_the_others_alone():
    free, _ = intercepted(ModelReplacement(["1"], "exact"))
    held, _ = intercepted(ModelReplacement(["1"], "exact", alpha=0.3))
    assert np.linalg.norm(held["1"]) < 0.8 * np.linalg.norm(free["1"])
    np.testing.assert_array_equal(held["2"], free["2"])


def test_constrain_and_scale_adds_the_distance_itself():
    net = torch.nn.Linear(2, 1, bias=False)
    client = SimpleNamespace(id="1", received={"weight": net.weight.detach() + torch.tensor([[3.0, 4.0]])})
    loss = ModelReplacement(["1"], alpha=0.25).training_loss(client, net, None, torch.tensor(8.0), {})
    assert float(loss.detach()) == pytest.approx(0.25 * 8.0 + 0.75 * 5.0)


# -- in federations ----------------------------------------------------------------------------------------------------
def test_nobody_bad_changes_nothing():
    plain = global_state(federate(module(), toy_data(SIZES), [FedAvg()], max_rounds=2))
    for attack in (ALIE([]), InnerProductManipulation([]), ModelReplacement([], "exact")):
        same(global_state(federate(module(), toy_data(SIZES), [FedAvg(), attack], max_rounds=2)), plain)


def test_rounds_and_engines_and_resumed_runs_agree(tmp_path):
    def run(name, rounds, attack=True, resume=None, **options):
        callbacks = [ALIE([0, 1], z=2.0)] if attack else []
        trainer = make_trainer(tmp_path, callbacks, max_rounds=rounds, name=name, participation=4, **options)
        trainer.fit(module(), datamodule=toy_data(SIZES), resume=resume)
        return global_state(trainer)

    whole = run("whole", 3)
    run("cut", 1)
    same(run("cut", 3, resume="last"), whole)
    assert differs(whole, run("plain", 3, attack=False))


def test_an_attack_beyond_the_limit_is_a_client_that_failed():
    class Far(ALIE):
        def crafted(self, known, clients, bad):
            return known.mean(dim=0) + 1e30

    with pytest.warns(UserWarning, match="client '0' was refused"):
        trainer = federate(module(), toy_data(SIZES), [Far([0, 1], z=1.0)], max_rounds=1)
    assert {one["client"] for one in trainer.server.failures} == {"0", "1"}


@pytest.mark.parametrize(
    ("callbacks", "options", "reason"),
    [
        ([ALIE([0])], {}, "the one bad client knows only its own"),
        ([ALIE([0, 1, 2])], {}, r"ALIE with 3 bad clients of 5 has no z_max above 0.* is 1"),
        ([ALIE([0, 9])], {}, "ALIE is to be made by client '9'"),
        ([ALIE([0, 1]), TopK()], {}, "ALIE makes one update out of those of all bad clients, and TopK"),
        ([ALIE([0, 1]), HeteroFL()], {}, "ALIE makes one update.*HeteroFL"),
        ([ALIE([0, 1]), FedLP()], {}, "ALIE makes one update.*FedLP"),
        ([ModelReplacement([0], "exact"), TopK()], {}, "ModelReplacement has to know its share"),
        (
            [ModelReplacement([0], "exact"), FedAdam()],
            {},
            "has to know its share.*FedAdam makes the step.*number for scale",
        ),
        ([ModelReplacement([0], "exact"), FedAvgM()], {}, "FedAvgM makes the step of the server's model"),
        ([ALIE([0, 1], z=1.0), FedProto()], {}, "nothing travels here"),
        ([SignFlip([0]), FedProto()], {}, "SignFlip changes the models that bad clients send, and nothing"),
        ([ALIE([0, 1]), FedBuff(buffer_size=2)], {"loop": Asynchronous()}, "ALIE"),
        ([ModelReplacement([0], "exact"), FedBuff(buffer_size=2)], {"loop": Asynchronous()}, "ModelReplacement"),
    ],
)
def test_what_is_refused_before_round_1(callbacks, options, reason):
    with pytest.raises(ValueError, match=reason):
        make_trainer(None, callbacks, max_rounds=1, **options).fit(module(), datamodule=toy_data(SIZES))


def test_a_round_with_one_attacker_who_knows_nothing_says_so():
    with pytest.warns(UserWarning, match="ALIE does nothing: bad clients know 1 changes of model 'global'"):
        federate(module(), toy_data(SIZES), [ALIE([0, 1], z=1.0)], max_rounds=6, participation=1)


def test_extras_stay_honest():
    trainer = federate(module(), toy_data(SIZES), [SCAFFOLD(), ALIE([0, 1], z=1.0)], max_rounds=2)
    assert all(value.isfinite().all() for value in global_state(trainer).values())


@pytest.mark.parametrize("attack", [ALIE([0, 1]), InnerProductManipulation([0, 1]), ModelReplacement([0], "exact")])
def test_sites_refuse_it(attack):
    server = federate(module(), toy_data(SIZES), [], max_rounds=1).server
    server.population.sites = {"0": "here"}
    with pytest.raises(ValueError, match="is an attack for simulations"):
        attack.on_federation_start(server)
    assert set(vars(attack)) <= {*attack.hyperparameters(), "_client"}
