"""One client lies in what a method declares: it alone has failed, and the run goes on."""

from __future__ import annotations

import copy

import pytest
import torch

from fedlightning.callbacks import fedgh, fedgkt
from fedlightning.guards.update_checks import UpdateChecks
from fedlightning.options import Evaluation
from fedlightning.testing.toys import ToyData, federate
from tests.conformance.case import collect

CASES = collect("CASES")
LIAR = "site1"
CHECK = UpdateChecks.check_update


def in_tree(change, tree):
    if isinstance(tree, dict):
        return {name: in_tree(change, part) for name, part in tree.items()}
    return change(tree) if isinstance(tree, torch.Tensor) else tree


LIES = {
    "NaN": lambda x: x * float("nan") if x.is_floating_point() else x,
    "huge": lambda x: torch.full_like(x, 1e30) if x.is_floating_point() else x,
    "far numbers": lambda x: x if x.is_floating_point() else torch.full_like(x, 2**30),
    "longer": lambda x: torch.cat([x, x]) if x.ndim else x,
    "shorter": lambda x: x[:-1] if x.ndim else x,
}
OF = {  # lies that a method's own numbers can tell
    "FD inclusive": ("NaN", "far numbers", "longer"),
    "FedProto nearest": ("NaN", "huge", "longer"),
    "FedGH": ("NaN", "huge"),
    "FedGKT": ("NaN", "far numbers"),
    "FedMD": ("NaN", "longer", "shorter"),
    "FedFomo": ("NaN", "far numbers"),
    "FedKD": ("NaN", "shorter"),
    "HeteroFL": ("far numbers", "longer"),
    "PLayerFL": ("NaN", "shorter"),
    "SCAFFOLD": ("NaN", "huge", "longer"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "lie"), [(method, lie) for method, lies in OF.items() for lie in lies])
def test_a_lie_is_the_liars_failure(method, lie, monkeypatch):
    def lying(self, server, message, update):
        if update.error is None and message.client == LIAR:
            update.extras = in_tree(LIES[lie], update.extras)
        return CHECK(self, server, message, update)

    monkeypatch.setattr(UpdateChecks, "check_update", lying)
    case = CASES[method]
    given = {"evaluation": Evaluation(every=0, test_data=[]), "max_rounds": 2} | case.arguments
    trainer = federate(copy.deepcopy(case.algorithm), ToyData(), None, **given)
    assert {entry["client"] for entry in trainer.server.failures} == {LIAR} and trainer.rounds_done == 2
    assert all(float(value.abs().max()) < 1e3 for state in trainer.server.models.values() for value in state.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["FLoRA", "HetLoRA pruning", "HeteroFL"])
def test_a_part_of_another_shape_is_the_liars_failure(method, monkeypatch):
    def lying(self, server, message, update):
        if update.error is None and message.client == LIAR:
            first = next(name for name, value in update.state.items() if value.ndim)
            update.state = {**update.state, first: update.state[first][:1]}
        return CHECK(self, server, message, update)

    monkeypatch.setattr(UpdateChecks, "check_update", lying)
    case = CASES[method]
    given = {"evaluation": Evaluation(every=0, test_data=[]), "max_rounds": 2} | case.arguments
    trainer = federate(copy.deepcopy(case.algorithm), ToyData(), None, **given)
    assert {entry["client"] for entry in trainer.server.failures} == {LIAR} and trainer.rounds_done == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("FD", "outputs"),
        ("FD inclusive", "outputs"),
        ("FCCL", "rows"),
        ("FCCLPlus", "rows"),
        ("DSFL", "probabilities"),
        ("FedMD", "logits"),
        ("FedProto", "prototypes"),
        ("FedGH", "prototypes"),
        ("FedGKT", "features"),
        ("FedGKT", "logits"),
    ],
)
@pytest.mark.parametrize("more", [1, -1])
def test_rows_of_another_width_are_the_liars_failure(method, name, more, monkeypatch):
    reasons = []

    def lying(self, server, message, update):
        for extras in update.extras.values() if message.client == "site0" else ():  # the first: nobody to compare with
            if update.error is None and name in extras:
                rows = extras[name]
                extras[name] = torch.cat([rows, rows[:, :1]], 1) if more > 0 else rows[:, :-1]
        answer = CHECK(self, server, message, update)
        reasons.append(answer.error or name)
        return answer

    monkeypatch.setattr(UpdateChecks, "check_update", lying)
    case = CASES[method]
    given = {"evaluation": Evaluation(every=0, test_data=[]), "max_rounds": 2} | case.arguments
    trainer = federate(copy.deepcopy(case.algorithm), ToyData((12, 7, 10)), None, **given)
    assert {entry["client"] for entry in trainer.server.failures} == {"site0"} and trainer.rounds_done == 2
    assert all(f"'{name}'" in reason or reason == name for reason in reasons)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "name"), [("FedGH", "prototypes"), ("FedGKT", "features")])
def test_most_clients_tell_the_width_where_the_head_does_not(method, name, monkeypatch):
    def lying(self, server, message, update):
        for extras in update.extras.values() if message.client == "site0" else ():
            extras[name] = torch.cat([extras[name], extras[name][:, :1]], 1)
        return CHECK(self, server, message, update)

    monkeypatch.setattr(UpdateChecks, "check_update", lying)
    for one in (fedgh, fedgkt):
        monkeypatch.setattr(one, "head_widths", lambda module, head: (-1, -1))
    case = CASES[method]
    given = {"evaluation": Evaluation(every=0, test_data=[]), "max_rounds": 2} | case.arguments
    trainer = federate(copy.deepcopy(case.algorithm), ToyData((12, 7, 10)), None, **given)
    assert {entry["client"] for entry in trainer.server.failures} == {"site0"} and trainer.rounds_done == 2
