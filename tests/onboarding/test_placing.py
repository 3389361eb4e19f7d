"""Clients that are onboarded find their cluster by visits of their own, and the federation stays as it was."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch

from fedlightning.algorithm import Facts, Newcomers
from fedlightning.callbacks import CFL, FedGroup, FedPer, FeSEM, FeSEMMA, Local
from fedlightning.contract import FederatedCallback
from fedlightning.errors import ConfigurationError
from fedlightning.onboarding.onboarding import placing_callback
from fedlightning.options import Processes
from fedlightning.scores.rows import read_rows
from fedlightning.tensors import module_state
from fedlightning.testing.runs import same_tree
from tests.callbacks.common import Breaks, Plain, flat, start_of
from tests.helpers import CLASSES, Quadratic, Toy, ToyData, federate, make_trainer, quadratic_data, same, samples

SIZES = {"0": 96, "1": 120, "2": 96, "3": 96, "4": 108, "5": 72}
NEW = {"x": 108, "y": 84, "z": 96}
MAKES = {
    "CFL": lambda: CFL(gap=0.0, eps1=10.0, eps2=0.0),
    "FedGroup": FedGroup,
    "FedGroup few": lambda: FedGroup(alpha=2, pretrain=2),
    "FeSEM": FeSEM,
    "FeSEM stale": lambda: FeSEM(stale=True, pull=0.1),
    "FeSEMMA": FeSEMMA,
}


def planted(sizes, broken=None):
    """Clients of two groups, in turn: equal inputs, and labels that are the other way round. Batches in a fixed order."""
    tensors = {}
    for number, (client, size) in enumerate(sizes.items()):
        tensors[client] = {}
        for split, count in {"train": size, "val": 7, "test": 9}.items():
            x, y = samples(client, split, count, skew=0.0)
            tensors[client][split] = (x.double(), CLASSES - 1 - y if number % 2 else y)
    if broken is not None:
        tensors[broken]["train"][0][0] = 1e4
    return ToyData(tensors, shuffle=False)


def scores(state, data, client):
    """The scores of a model on a client's test data, in plain torch."""
    x, y = data.tensors[client]["test"]
    logits = Plain(state)(x)
    loss = torch.nn.functional.cross_entropy(logits, y)
    return {"test_loss": loss.item(), "test_acc": (logits.argmax(-1) == y).double().mean().item()}


class Watch(FederatedCallback):
    """Notes the visits that train: client, model that went down, tag, steps, and how often the client was visited."""

    facts = Facts(takes_part=False)

    def __init__(self):
        self.visits = []

    def on_send(self, client, update):
        self.visits.append((client.id, client.message.model, client.message.tag, update.steps, client.record.visits))


def fitted(method, root=None, rounds=2, kind=Breaks, **options):
    watch = Watch()
    trainer = federate(start_of(kind), planted(SIZES), [method, watch], root, max_rounds=rounds, **options)
    watch.visits.clear()
    return trainer, watch


def rule(trainer, name, sent, start):
    """Where a client belongs, in the words of the papers, from what it made of the first model."""
    server, own = trainer.server, trainer.server.state[placing_callback(trainer.server).key]
    if name.startswith("FeSEM"):
        centres = {key: flat(server.models[key]) for key in ("centre 1", "centre 2")}
        nearer = {key: (flat(start) - c).square().sum() - (flat(sent) - c).square().sum() for key, c in centres.items()}
        return max(nearer, key=nearer.get)
    moved = flat(sent) - flat(start)
    cosine = lambda other: float(torch.cosine_similarity(moved, flat(other), dim=0))  # noqa: E731
    if name.startswith("FedGroup"):
        return max(own["directions"], key=lambda group: cosine(own["directions"][group]))
    sides = own["splits"]["global"]["updates"]
    return max(sides, key=lambda part: max(map(cosine, sides[part].values())))


@pytest.mark.parametrize(
    "name",
    [name if name in ("CFL", "FedGroup", "FeSEM") else pytest.param(name, marks=pytest.mark.slow) for name in MAKES],
)
def test_newcomers_land_in_their_group_and_score_like_its_members(name, tmp_path):
    rounds = (
        4 if name == "FeSEM" else 2
    )  # a rule that is biased to the centre that has moved least shows in later rounds
    trainer, watch = fitted(MAKES[name](), tmp_path, rounds)
    server, role = trainer.server, placing_callback(trainer.server)
    before, new = copy.deepcopy([server.models, server.state, server.clients, server.num_samples]), planted(NEW)
    trainer.onboard(new, epochs=2, verbose=False)
    assert same_tree(before, [server.models, server.state, server.clients, server.num_samples])
    summary = json.loads((trainer.run.path / "onboarding.json").read_text())
    places, rows = summary["places"], read_rows(trainer.run.path / "onboarding.csv")
    assert places["x"] == places["z"] != places["y"] and summary["trained"] == ["x", "y", "z"]
    groups = [{role.cluster_of(server, client) for client in part} for part in ("024", "135")]
    assert groups == [{places["x"]}, {places["y"]}]
    start = {key: value.clone() for key, value in module_state(start_of(Breaks)).items()}
    if name == "CFL":
        start = server.state["CFL"]["splits"]["global"]["model"]
    if name.startswith("FeSEM"):
        start = {key: (server.models["centre 1"][key] + server.models["centre 2"][key]) / 2 for key in start}
    for client in NEW:
        again = 2 if name == "FedGroup few" else 1
        model = Plain(start)
        for _ in range(again):
            sent = model.trained(*new.tensors[client]["train"])
        assert places[client] == rule(trainer, name, sent, start)
        by_hand = scores(server.models[places[client]], new, client)
        found = {
            row.metric: row.value
            for row in rows
            if (row.checkpoint, row.stage, row.client, row.split) == ("latest", "L1", client, "test")
        }
        assert found == pytest.approx(by_hand, rel=1e-5)
    # one visit that trains to be placed, the first of an empty record, and one from the cluster's model
    steps = {client: -(-size // 8) for client, size in NEW.items()}
    placing = [(c, s * again, 1) for c, s in steps.items()]
    joining = [(c, s * 2, 1) for c, s in steps.items()]
    assert [(c, s, count) for c, _, tag, s, count in watch.visits if not tag and s] == placing
    assert [(c, s, count) for c, _, tag, s, count in watch.visits if tag and s] == joining


@pytest.mark.parametrize("name", ["CFL", "FedGroup", "FeSEM"])
def test_one_that_fails_or_cannot_train_is_noted_and_the_others_are_placed(name, tmp_path):
    trainer, _ = fitted(MAKES[name](), tmp_path, 2)
    new = planted(NEW, broken="z")
    new.tensors["y"]["train"] = tuple(part[:0] for part in new.tensors["y"]["train"])
    with pytest.warns(UserWarning, match="Onboarding: new client") as told:
        trainer.onboard(new, epochs=1, verbose=False)
    summary = json.loads((trainer.run.path / "onboarding.json").read_text())
    assert list(summary["places"]) == summary["trained"] == ["x"] and set(summary["clients"]) == set(NEW)
    reasons = {one["client"]: one["reason"] for one in summary["failures"]}
    assert "new client 'z' failed: RuntimeError: broken data" in reasons["z"]
    assert "new client 'y' has no training samples" in reasons["y"]
    assert {row.client for row in read_rows(trainer.run.path / "onboarding.csv")} == {"x"}
    assert sum("Onboarding" in str(one.message) for one in told) == 2
    for epochs in (0, 1):
        with pytest.warns(UserWarning, match="Onboarding"):
            assert trainer.onboard(new, ["z"], epochs=epochs, verbose=False) == []
    assert not list((trainer.run.path / "checkpoints/newcomers").glob("*.ckpt"))


def test_held_out_clients_are_not_scored_but_join(tmp_path):
    with pytest.warns(
        UserWarning, match=r"never trained\. Onboarding places it by a visit\. The held-out clients stay out"
    ):
        trainer, _ = fitted(FedGroup(), tmp_path, 2, held_out=["4", "5"])
    assert "Onboarding places it by a visit." in trainer.summary["held_out"]["refused"]
    assert not [row for row in trainer.rows if row.model == "unseen"]
    trainer.onboard(epochs=0, verbose=False)
    found = json.loads((trainer.run.path / "onboarding.json").read_text())["places"]
    clusters = trainer.server.state["FedGroup"]["clusters"]
    assert found == {"4": clusters["0"], "5": clusters["1"]} and found["4"] != found["5"]
    same(module_state(trainer.module("4")), trainer.server.models["global"])  # the federation does not know it


def test_it_goes_down_the_whole_tree(tmp_path):
    """CFL, by hand: at every split from the model before it, to the side of the most similar member."""
    signs = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
    b, watch = [[9.0 * s + 0.1 * i, 5.0 * t, 1.0] for i, (s, t) in enumerate(signs * 2)], Watch()
    trainer = federate(
        Quadratic(), quadratic_data([[1.0] * 3] * 8, b), [CFL(10, 0, gap=0.5), watch], tmp_path, max_rounds=4
    )
    tree, clusters = trainer.server.state["CFL"]["splits"], trainer.server.state["CFL"]["clusters"]
    assert len(set(clusters.values())) == 4 and len(tree) == 3
    new = quadratic_data([[1.0] * 3] * 4, [[7.0 * s, 6.0 * t, 0.0] for s, t in signs])
    new.tensors = {f"new {client}": splits for client, splits in new.tensors.items()}
    found = {}
    watch.visits.clear()
    trainer.onboard(new, epochs=1, verbose=False)
    placing = [(client, count) for client, _, tag, steps, count in watch.visits if steps and not tag]
    assert placing == [(client, 1) for _ in range(2) for client in new.tensors]  # each of them a first visit
    for client, (_, goal) in ((c, s["train"]) for c, s in new.tensors.items()):
        node = "global"
        while node in tree:
            w = tree[node]["model"]["w"].numpy()
            moved = -0.1 * (w - goal[0].numpy())
            best = {
                part: max(
                    moved @ d["w"].numpy() / np.linalg.norm(moved) / np.linalg.norm(d["w"]) for d in members.values()
                )
                for part, members in tree[node]["updates"].items()
            }
            node = max(best, key=best.get)
        found[client] = node
    assert list(found.values()) == [clusters[client] for client in "0123"]
    assert json.loads((trainer.run.path / "onboarding.json").read_text())["places"] == found


def test_what_is_cached_at_a_split_is_what_the_members_sent_from_the_model_before_it():
    trainer, _ = fitted(CFL(gap=0.0, eps1=10.0, eps2=0.0), rounds=2)
    first, _ = fitted(CFL(gap=0.0, eps1=10.0, eps2=0.0), rounds=1)
    split = trainer.server.state["CFL"]["splits"]["global"]
    same(split["model"], first.server.models["global"])
    data = planted(SIZES)
    clusters = trainer.server.state["CFL"]["clusters"]
    for part, members in split["updates"].items():
        assert set(members) == {client for client, cluster in clusters.items() if cluster == part}
        for client, delta in members.items():
            sent = Plain(split["model"]).trained(*data.tensors[client]["train"])
            torch.testing.assert_close(flat(delta), flat(sent) - flat(split["model"]), atol=1e-12, rtol=0)


def test_cfl_without_a_split_serves_the_model_of_all_and_asks_for_no_visit(tmp_path):
    trainer, watch = fitted(CFL(eps1=0.0), tmp_path, 1)
    results = trainer.onboard(planted(NEW), epochs=0, verbose=False)
    assert {row["stage"] for row in results} == {"G", "L1"} and not watch.visits
    assert set(json.loads((trainer.run.path / "onboarding.json").read_text())["places"].values()) == {"global"}


@pytest.mark.parametrize(("method", "text"), [(FedGroup(), "no groups yet"), (FeSEM(), "no centres yet")])
def test_before_anybody_has_trained_there_are_no_places(method, text):
    trainer, _ = fitted(method, rounds=1)
    trainer.server.state = {}
    for key in set(trainer.server.models) - {"global"}:
        del trainer.server.models[key]
    with pytest.raises(ValueError, match=text):
        trainer.onboard(planted(NEW), verbose=False)


def test_from_a_folder_and_with_parts_of_their_own(tmp_path):
    """What a newcomer keeps (its head) is trained by its one visit, not by the one that finds its cluster."""
    data, new, make = planted(SIZES), planted(NEW), lambda: [FeSEM(), FedPer(personal="net.3")]
    first = federate(start_of(Breaks), data, make(), tmp_path, max_rounds=2)
    results = first.onboard(new, epochs=0, verbose=False)
    places = json.loads((first.run.path / "onboarding.json").read_text())["places"]
    again = make_trainer(tmp_path, make(), max_rounds=2)
    assert (
        again.onboard(new, epochs=0, model=start_of(Breaks), datamodule=data, run=first.run.path, verbose=False)
        == results
    )
    begun = module_state(start_of(Breaks))
    centre = first.server.models[places["x"]]
    mixed = {name: (begun if name.startswith("net.3") else centre)[name] for name in begun}
    by_hand = scores(mixed, new, "x")["test_loss"]
    row = next(r for r in results if (r["stage"], r["metric"]) == ("L1", "test_loss"))
    assert row["per_client"]["x"] == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vectorized", "processes"])
def test_engines_agree(engine, tmp_path):
    found = []
    for name in ("sequential", engine):
        options = Processes(2) if name == "processes" else name
        trainer, _ = fitted(FedGroup(), tmp_path / name, 2, Toy, engine=options)
        trainer.onboard(planted(NEW), epochs=1, verbose=False)
        found.append(json.loads((trainer.run.path / "onboarding.json").read_text()))
    assert found[0]["places"] == found[1]["places"]
    means = [{(r["stage"], r["checkpoint"], r["metric"]): r["mean"] for r in one["results"]} for one in found]
    assert means[1] == pytest.approx(means[0], abs=1e-5)


class Odd(FederatedCallback):
    """Places some clients only, and one that nobody asked for."""

    @property
    def facts(self):
        return Facts(newcomers=Newcomers(place=self.place))

    def place(self, server, clients):
        yield []
        return {clients[0]: "here", "stranger": "there"}


def test_who_is_given_no_place_is_noted(tmp_path):
    trainer, _ = fitted(Odd(), tmp_path, 1)
    with pytest.warns(UserWarning, match="Onboarding: new client 'y': Odd found no place for it"):
        trainer.onboard(planted(NEW), ["x", "y"], epochs=0, verbose=False)
    assert json.loads((trainer.run.path / "onboarding.json").read_text())["places"] == {"x": "here"}


def test_another_method_without_a_model_for_them_still_refuses():
    class Cannot(FederatedCallback):
        facts = Facts(newcomers=Newcomers(no_model="does not know them"))

    trainer, _ = fitted(FeSEM(), rounds=1)
    trainer.server.callbacks.callbacks.append(Cannot())
    with pytest.raises(ConfigurationError, match=r"Cannot does not know them\. It cannot be onboarded"):
        trainer.onboard(planted(NEW), verbose=False)
    with pytest.raises(ConfigurationError, match="Local"):
        fitted(Local(), rounds=1)[0].onboard(planted(NEW), verbose=False)
