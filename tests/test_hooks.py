"""The contract: roles, events, and callbacks that hold hyper-parameters only."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from lightning.pytorch import Callback

from fedlightning import FederatedCallback, algorithm
from fedlightning.algorithm import AsynchronousMethod, Change, Facts, Need
from fedlightning.callbacks import (
    FLIU,
    SCAFFOLD,
    Central,
    FedAdam,
    FedAvg,
    FedBN,
    FedPer,
    FedProx,
    GlobalCheckpoint,
    Local,
    LocalCheckpoint,
    pFedBayes,
)
from fedlightning.contract import ROLES, CallbackList, Job, Phase
from fedlightning.contract.callback import FAMILIES
from fedlightning.contract.messages import Wire
from fedlightning.engines.attempts import FederationError
from fedlightning.tensors import module_state
from tests.helpers import NormNet, Toy, federate, make_trainer, same, spied, toy_data


def claiming(role, name):
    base = getattr(algorithm, FAMILIES.get(role, "FederatedCallback"))
    return type(name, (base,), {role: lambda self, *args: None})()


def test_what_facts_say_is_refused_as_an_attribute_of_the_class():
    with pytest.raises(TypeError, match=r"Stray sets keeps, .*Stray.facts = Facts\(keeps="):
        type("Stray", (FederatedCallback,), {"keeps": True})


def test_facts_that_are_extended_keep_what_they_had():
    first, second = Need("goes first", (Change.PARTS,)), Need("goes second", ("server_step",))
    found = Facts({Change.START}, [first], keeps=True).extend({Change.PARTS}, [second], takes_part=False)
    assert (found.changes, found.needs) == ({Change.START, Change.PARTS}, (first, second))
    assert (found.keeps, found.takes_part) == (True, False)


@pytest.mark.parametrize(("method", "family"), FAMILIES.items())
def test_a_method_of_a_family_is_refused_on_a_class_of_another(method, family):
    with pytest.raises(TypeError, match=f"Stray defines {method}, .* Derive Stray from {family}"):
        type("Stray", (FederatedCallback,), {method: lambda self, *args: None})


@pytest.mark.parametrize("role", ROLES)
def test_two_that_claim_a_role_are_both_named(role):
    one, other = claiming(role, "Romulus"), claiming(role, "Remus")
    with pytest.raises(ValueError, match=f"Romulus and Remus both claim '{role}', which only one"):
        make_trainer(None, [one, FedProx(), other])
    assert CallbackList([FedProx(), other]).role(role) is other
    assert CallbackList([FedProx()]).role(role) is None


def test_one_callback_twice():
    with pytest.raises(ValueError, match="FedProx is in the list of callbacks 2 times"):
        make_trainer(None, [FedProx(), FedProx(mu=1.0)])


def test_weightings_must_agree():
    with pytest.raises(ValueError, match=r"different weightings: \{'FLIU': 'uniform', 'FedProx': 'samples'\}"):
        make_trainer(None, [FLIU(), FedProx(weighting="samples")])
    with pytest.raises(ValueError, match=r"FedAvg has weighting='size'. Known weightings: .*'uniform'"):
        method = FedAvg()
        method.weighting = "size"
        make_trainer(None, [method])


class Log(FederatedCallback):
    """Writes down every event it hears; two of them with different keys in one run."""

    events: list = []

    def __init__(self, name):
        self.name = name

    @property
    def key(self):
        return self.name

    def note(self, *what):
        Log.events.append((self.name, *what))

    def check(self, setup):
        self.note("check")

    def on_federation_start(self, server):
        self.note("federation_start")

    def on_round_start(self, server):
        self.note("round_start", server.round)

    def on_broadcast(self, server, job, message):
        self.note("broadcast", job.client)

    def on_receive(self, client, message):
        if not client.evaluating:
            self.note("receive", client.id)

    def on_visit_start(self, client):
        assert self.client is client
        self.note("visit_start", client.id)

    def on_train_start(self, trainer, pl_module):
        assert pl_module is self.client.module
        self.note("train_start", self.client.id)

    def on_send(self, client, update):
        self.note("send", client.id)

    def on_update(self, server, update):
        self.note("update", update.client)

    def on_reduced(self, server, state):
        self.note("reduced")
        return {name: value + (1.0 if self.name == "a" else 0.0) for name, value in state.items()}

    def on_round_end(self, server):
        self.note("round_end", server.round)

    def on_federation_end(self, server):
        self.note("federation_end")


def test_events_run_in_list_order_and_update_by_update():
    Log.events = []
    trainer = federate(Toy(lr=0.0), toy_data([8, 8]), [Log("a"), Log("b")], max_rounds=1)
    heard = [event[1:] for event in Log.events if event[0] == "a"]
    heard = [event for event in heard if event[0] != "broadcast" or event in heard]
    visits = [
        [(what, client) for what in ("broadcast", "receive", "visit_start", "train_start", "send", "update")]
        for client in "01"
    ]
    expected = [("check",), ("federation_start",), ("round_start", 0), *visits[0], *visits[1]]
    expected += [("reduced",), ("round_end", 0), ("federation_end",)]
    assert heard == expected
    names = [event[0] for event in Log.events]
    assert names == ["a", "b"] * (len(names) // 2)
    start = module_state(trainer.server.blueprint.template)
    assert torch.allclose(trainer.server.model["net.0.bias"], start["net.0.bias"] + 1.0)


def test_the_client_is_bound_for_the_visit_only():
    callback = Log("a")
    with pytest.raises(RuntimeError, match="only there while a client is being visited"):
        _ = callback.client
    federate(Toy(), toy_data([8]), [callback], max_rounds=1)
    with pytest.raises(RuntimeError, match="only there while"):
        _ = callback.client


EVERYTHING = [
    FedAvg(),
    FedProx(),
    SCAFFOLD(),
    FedAdam(),
    FedPer(),
    FedBN(),
    FLIU(),
    Local(),
    Central(),
    LocalCheckpoint(),
    GlobalCheckpoint(),
]


@pytest.mark.parametrize("callback", EVERYTHING, ids=lambda c: c.key)
def test_a_run_leaves_the_callback_as_it_was(callback):
    """State is explicit: attributes hold hyper-parameters only, before and after."""
    before = copy.deepcopy(vars(callback))
    assert set(before) <= set(callback.hyperparameters())
    federate(NormNet("sgd"), toy_data([8, 8]), [callback], max_rounds=2, evaluation=1)
    assert vars(callback) == before
    for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert vars(copied) == before


class Counter(Callback):
    """An ordinary callback whose state must be each client's own."""

    seen: dict = {}

    def __init__(self):
        self.epochs = 0

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs += 1
        Counter.seen.setdefault(pl_module.owner, []).append(self.epochs)

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


class Owned(FederatedCallback):
    def wrap_module(self, module, owner):
        module.owner = owner
        return module


@pytest.mark.parametrize("state", ["reset", "keep"])
def test_ordinary_callbacks_are_each_clients_own(state):
    Counter.seen, callback = {}, Counter()
    federate(Toy(), toy_data([8, 8, 8]), [Owned(), callback], max_rounds=3, optimizer_state=state)
    assert Counter.seen == {client: [1, 2, 3] for client in "012"}
    assert callback.epochs == 0


class Phases(FederatedCallback):
    """Head first with the body frozen, then the body; then a second model that the visit does not return."""

    def local_phases(self, client):
        def keep(client):
            client.state[self.key] = {"second": client.model_state()}

        return [
            Phase("head", train=("net.3",), work=1, federated=False),
            Phase("body", train=("net.0",)),
            Phase("second", start=client.received, keep_as=keep, federated=False),
        ]

    def on_train_end(self, trainer, pl_module):
        self.client.scratch.setdefault("after", []).append({n: v.clone() for n, v in module_state(pl_module).items()})

    def on_send(self, client, update):
        head, body, second = client.scratch["after"]
        received = client.received
        assert torch.equal(head["net.0.weight"], received["net.0.weight"])
        assert not torch.equal(head["net.3.weight"], received["net.3.weight"])
        assert torch.equal(body["net.3.weight"], head["net.3.weight"])
        assert not torch.equal(body["net.0.weight"], head["net.0.weight"])
        assert not torch.equal(second["net.3.weight"], received["net.3.weight"])
        assert all(torch.equal(value, body[name]) for name, value in update.state.items())
        assert all(torch.equal(value, second[name]) for name, value in client.state[self.key]["second"].items())


@pytest.mark.parametrize("state", ["reset", "keep"])
def test_phases_train_what_they_name_and_start_where_they_say(state):
    trainer = federate(
        Toy("adamw"), toy_data([20]), [Phases(), FedProx(0.1)], max_rounds=2, local_epochs=1, optimizer_state=state
    )
    assert trainer.store.get("0").steps == 3  # the federated phase's
    assert all(parameter.requires_grad for parameter in trainer.module().parameters())


class TwoSteps(FederatedCallback):
    """A plan that first probes everybody, then trains the client with the largest loss."""

    def wire(self, module):
        from fedlightning.contract.messages import Wire

        return Wire(up={"loss": "scalar"})

    def on_send(self, client, update):
        if client.message.tag == "probe":
            update.extras[self.key] = {"loss": client.loss()}

    def plan_round(self, server):
        updates = yield [Job(client, work=0, tag="probe") for client in server.clients]
        assert not any(update.state for update in updates)
        losses = {update.client: update.extras[self.key]["loss"] for update in updates}
        chosen = max(losses, key=losses.get)
        (answer,) = yield [Job(chosen)]
        server.state[self.key] = {"chosen": (answer.client, answer.steps), "losses": losses}


def test_a_plan_of_two_steps():
    data = toy_data([24, 40, 16], batch_size=64)
    module = Toy()
    trainer = federate(module, data, [TwoSteps()], max_rounds=1)
    found = trainer.server.state["TwoSteps"]
    for client, loss in found["losses"].items():
        x, y = data.tensors[client]["train"]
        assert loss == pytest.approx(torch.nn.functional.cross_entropy(module(x), y).item(), abs=1e-6)
    assert found["chosen"] == (max(found["losses"], key=found["losses"].get), 1)
    assert sum(trainer.store.get(client).visits for client in "012") == 1


def test_a_probe_leaves_no_trace():
    """The same run with and without everybody being probed at the start of each round."""

    class Probing(FederatedCallback):
        def plan_round(self, server):
            if self.probe:
                yield [Job(client, work=0) for client in server.clients]
            yield [Job(client) for client in server.clients]

        def __init__(self, probe):
            self.probe = probe

        def on_receive(self, client, message):
            client.gradient()
            client.loss(split="val")
            client.evaluate()
            client.next_batch()

    module = NormNet("adam", dropout=0.2)
    runs = [federate(module, toy_data(), [Probing(probe)], max_rounds=2) for probe in (True, False)]
    plain = federate(module, toy_data(), max_rounds=2)
    for run in runs:
        for name, value in plain.server.model.items():
            assert torch.equal(run.server.model[name], value), name


def test_reduce_gets_every_update_and_its_result_counts():
    class Median(FederatedCallback):
        def reduce(self, server, updates):
            assert [update.client for update in updates] == server.clients
            return {n: torch.stack([u.state[n] for u in updates]).median(0).values for n in updates[0].state}

    trainer, spy = spied(Toy(), toy_data(), [Median()], max_rounds=1)
    stack = torch.stack([update.state["net.0.weight"] for update in spy.updates])
    assert torch.equal(trainer.server.model["net.0.weight"], stack.sort(0).values[1])


def test_a_weight_of_ones_own():
    class Only(FederatedCallback):
        @staticmethod
        def weighting(server, update):
            return 1.0 if update.client == "1" else 0.0

    trainer, spy = spied(Toy(), toy_data(), [Only()], max_rounds=1)
    same(trainer.server.model, spy.of_round(0)["1"].state)


def test_a_weighting_that_is_called_otherwise_is_refused():
    class Bound(FederatedCallback):
        weighting = staticmethod(lambda update: 1.0)

    with pytest.raises(ValueError, match=r"Bound\.weighting is called with the server and the update"):
        make_trainer(None, [Bound()])


class Wrong(FederatedCallback):
    def __init__(self, event):
        self.event = event

    def on_receive(self, client, message):
        if self.event == "receive":
            message.state["net.0.bias"] = torch.zeros(1)


def test_a_callback_that_breaks_a_visit_is_named_with_its_client():
    with pytest.raises(FederationError, match=r"'net.0.bias' has shape \(1,\).*All 3 clients failed with this error"):
        federate(Toy(), toy_data(), [Wrong("receive")])


def test_hyperparameters_are_what_was_passed():
    assert SCAFFOLD(option=1).hyperparameters() == {"option": 1, "server_lr": 1.0, "weighting": "uniform"}
    assert FedPer(personal=["net"]).hyperparameters() == {"personal": ["net"], "num_layers": 1, "weighting": None}


class Mixed:
    def on_job(self, server, job):
        return None


class Stubborn:
    takes_part = False


@pytest.mark.parametrize(
    ("bases", "body", "reason"),
    [
        ((Mixed, FederatedCallback), {}, "Stray defines on_job, .* Derive Stray from ClientSelection"),
        ((Stubborn, FederatedCallback), {}, "Stray sets takes_part, which nothing reads there"),
        ((FederatedCallback,), {"facts": lambda self: Facts()}, r"Stray.facts is <function .*Write facts = Facts\("),
        ((FederatedCallback,), {"facts": None}, "Stray.facts is None"),
        ((FedPer,), {"facts": Facts(keeps=True)}, "Stray.facts takes the place of FedPer.facts .* leaves out Body"),
        ((AsynchronousMethod,), {"facts": Facts(keeps=True)}, "leaves out asynchronous"),
        ((pFedBayes,), {"facts": Facts(keeps=True)}, "Stray.facts takes the place of pFedBayes.facts .*adds a spread"),
    ],
)
def test_what_nothing_would_read_is_refused_as_the_class_is_defined(bases, body, reason):
    with pytest.raises(TypeError, match=reason):
        type("Stray", bases, body)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("on_recieve", "Did you mean on_receive"),
        ("server_steps", "Did you mean server_step"),
        ("corect_gradient", "Did you mean correct_gradient"),
        ("participant", "Did you mean participants"),
        ("on_train_batch_strat", "Did you mean on_train_batch_start"),
        ("place_newcomers", r"reads any more.*newcomers=Newcomers\(place="),
        ("may_leave", r"reads any more.*wire\(module\)"),
        ("client_weight", r"reads any more.*weighting\(self, server, update\)"),
        ("needs_all", r"reads any more.*reduce\(self, server, updates\)"),
        ("needs_every_score", r"reads any more.*EVERY_SCORE"),
    ],
)
def test_a_method_with_a_misspelt_name_of_a_hook_is_refused(name, reason):
    for body in (lambda self, *args: None, staticmethod(lambda *args: None), property(lambda self: None)):
        with pytest.raises(TypeError, match=f"Stray defines {name}, which nothing .*{reason}"):
            type("Stray", (FederatedCallback,), {name: body})
    with pytest.raises(TypeError, match=reason):
        type("Stray", (type("Mixin", (), {name: body}), FederatedCallback), {})


@pytest.mark.parametrize("name", ["on_train_batch_start", "on_receive", "_on_recieve", "distances", "on_aggregate"])
def test_hooks_of_lightning_and_methods_of_an_author_are_let_be(name):
    type("Own", (FederatedCallback,), {name: lambda self, *args: None})


def test_an_attribute_may_be_called_nearly_as_a_hook():
    assert type("Own", (FederatedCallback,), {"reduced": 1}).reduced == 1


def test_facts_in_the_place_of_a_property_of_a_base_are_refused_in_a_run():
    stray = type("Stray", (SCAFFOLD,), {"facts": Facts()})
    with pytest.raises(TypeError, match=r"Stray.facts takes the place of SCAFFOLD.facts .*IN_STEP"):
        CallbackList([stray()])


def test_a_class_that_only_has_the_name_of_a_family_is_none():
    with pytest.raises(TypeError, match="Derive ClientSelection from ClientSelection"):
        type("ClientSelection", (FederatedCallback,), {"on_job": lambda self, server, job: None})


def test_facts_of_several_bases_are_put_together():
    one = type("One", (FederatedCallback,), {"facts": Facts(changes=[Change.PARTS])})
    other = type("Other", (FederatedCallback,), {"facts": Facts(changes=[Change.WORK])})
    with pytest.raises(TypeError, match=r"One.facts takes the place of Other.facts in Both and leaves out WORK"):
        type("Both", (one, other), {})
    both = type("Both", (one, other), {"facts": one.facts.extend(other.facts.changes, other.facts.needs)})
    assert both().facts.changes == {Change.PARTS, Change.WORK}


@pytest.mark.parametrize(
    "made",
    [
        lambda: Facts(changes="START"),
        lambda: Facts(changes=["START"]),
        lambda: Facts(changes=Change.START),
        lambda: Facts(needs=Need("needs it", ["reduce"])),
        lambda: Facts(newcomers="none"),
        lambda: Need("needs it", "reduce"),
        lambda: Need("needs it", ["REDUCE"]),
        lambda: Facts(requires=["labels"]),
    ],
)
def test_facts_in_other_words_are_refused(made):
    with pytest.raises(TypeError, match=r"Facts got|Need got"):
        made()


def test_facts_know_what_becomes_of_optimizers():
    with pytest.raises(ValueError, match="Facts got optimizer_state='kept'"):
        Facts(optimizer_state="kept")


@pytest.mark.parametrize("name", ["server_step", "correct_gradient", "on_job"])
def test_a_method_on_the_object_that_nothing_would_call_is_refused(name):
    method = FedAvg()
    setattr(method, name, lambda *args: None)
    with pytest.raises(ValueError, match=f"FedAvg.{name} is set on the object, where nothing calls it"):
        CallbackList([method])


def test_a_weighting_of_no_known_kind_is_refused_by_name():
    method = FedAvg()
    method.weighting = ["uniform"]
    with pytest.raises(ValueError, match=r"FedAvg has weighting=\['uniform'\]. Known weightings"):
        CallbackList([method])


@pytest.mark.parametrize("entries", [None, 3, iter(["net.0"])])
def test_entries_that_may_leave_are_a_list(entries):
    with pytest.raises(TypeError, match="Wire got entries="):
        Wire(entries=entries)
