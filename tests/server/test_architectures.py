"""Clients whose models have different architectures."""

import pytest
import torch
from torch import nn

import fedlightning
from fedlightning.algorithm import Facts, ServerModels
from fedlightning.callbacks import (
    SCAFFOLD,
    FedAdam,
    FedAMP,
    FedAvg,
    FedAvgM,
    FedPer,
    FedProto,
    FedProx,
    GlobalCheckpoint,
    LGFedAvg,
    Local,
    LocalCheckpoint,
)
from fedlightning.contract import FederatedCallback
from fedlightning.models import ClientModels
from fedlightning.options import Processes
from fedlightning.tensors import module_state
from tests.helpers import CLASSES, FEATURES, Toy, federate, make_trainer, toy_data


class Deep(Toy):
    """Two hidden layers; its head has the name and shape of the others'."""

    def make(self, hidden, dropout):
        return nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, 8), nn.Linear(8, CLASSES))


def seeded(make, seed):
    torch.manual_seed(seed)
    return make()


MODELS = {"small": lambda: seeded(Toy, 1), "deep": lambda: seeded(lambda: Deep("momentum"), 2)}
SIZES = [16, 12, 20, 8]


def models(**options):
    return ClientModels({name: make() for name, make in MODELS.items()}, **options)


def data():
    return toy_data(SIZES)


class OneModelEach(ServerModels):
    """FedAvg among the clients of one architecture."""

    facts = Facts(mixes_architectures=True)

    def on_federation_start(self, server):
        for name in server.models.architectures:
            server.models.add(name, name)

    def model_of(self, server, client):
        return server.architecture_of(client).name


def states(trainer):
    return {client: module_state(trainer.module(client)) for client in trainer.server.clients}


def same(one, other):
    assert one.keys() == other.keys()
    for client, state in one.items():
        assert state.keys() == other[client].keys(), client
        assert all(torch.equal(value, other[client][name]) for name, value in state.items()), client


def resumed_from(trainer, module, callbacks, rounds=3, given=None, **options):
    """Go on with the run of a trainer."""
    root = trainer.recorder.run.path.parent.parent
    another = make_trainer(root, callbacks, max_rounds=rounds)
    another.fit(module, datamodule=given or data(), resume=trainer.recorder.run.path, **options)
    return another


def alone(name, callbacks, **options):
    """A federation of one architecture; what its clients have is what they would have here."""
    return federate(MODELS[name](), data(), callbacks, max_rounds=2, **options)


@pytest.mark.slow
def test_each_client_trains_alone_as_in_a_federation_of_its_architecture():
    trainer = federate(models(), data(), [Local()], max_rounds=2)
    apart = {name: states(alone(name, [Local()])) for name in MODELS}
    same(states(trainer), {client: apart[["small", "deep"][int(client) % 2]][client] for client in "0123"})
    assert type(trainer.module("1")) is Deep and type(trainer.module("0")) is Toy
    assert trainer.server.is_mixed
    with pytest.raises(ValueError, match="no global model"):
        trainer.module()


def test_one_model_for_each_architecture_is_fedavg_among_its_clients():
    trainer = federate(models(), data(), [OneModelEach()], max_rounds=3, evaluation=1)
    for name, members in (("small", ["0", "2"]), ("deep", ["1", "3"])):
        other = federate(MODELS[name](), data(), [FedAvg(), Only(members)], max_rounds=3)
        same({"": trainer.server.models[name]}, {"": other.server.model})
        assert trainer.server.architecture(name).name == name
    rows = [row for row in trainer.recorder.rows if row.stage == "G"]
    assert {row.client for row in rows} == {"0", "1", "2", "3"}
    trained = [
        row for row in trainer.recorder.rows if row.stage == "L2" and row.round == 3 and row.metric == "val_loss"
    ]
    assert {(row.client, row.model) for row in trained} == {(client, "personal") for client in "0123"}
    results = {row.client: row.value for row in rows if row.metric == "val_loss" and row.round == 3}
    module = trainer.server.module_with(trainer.server.models["deep"], "deep")
    x, y = map(
        torch.stack, zip(*trainer.federation.engine.runner.data.client_dataloader("1", "val").dataset, strict=True)
    )
    assert results["1"] == pytest.approx(float(nn.functional.cross_entropy(module(x), y)), abs=1e-6)


class Builds(FederatedCallback):
    """Lets a client build a module of every architecture."""

    facts = Facts(mixes_architectures=True)

    def on_visit_start(self, client):
        built = {name: client.module_of(name) for name in client.architectures}
        assert {name: type(module) for name, module in built.items()} == {"small": Toy, "deep": Deep}
        own = client.initial_module()
        same({"": module_state(built["deep" if client.id in "13" else "small"])}, {"": module_state(own)})
        client.state[self.key] = {"built": list(built)}


def test_a_client_can_build_every_architecture():
    trainer = federate(models(), data(), [Local(), Builds()], max_rounds=1)
    assert all(trainer.store.get(client).state["Builds"]["built"] == ["small", "deep"] for client in "0123")


class Only(FederatedCallback):
    def __init__(self, members):
        self.members = members

    def plan_round(self, server):
        yield [server.job(client) for client in self.members]


@pytest.mark.parametrize("make", [lambda: [LGFedAvg("net.3"), FedProx(0.1)], lambda: [OneModelEach()]])
@pytest.mark.slow
def test_resume_and_worker_processes_change_nothing(make, tmp_path):
    whole = federate(models(assign="size"), data(), make(), max_rounds=3)
    half = federate(models(assign="size"), data(), make(), max_rounds=2, root=tmp_path)
    resumed = resumed_from(half, models(assign="size"), make())
    same(states(whole), states(resumed))
    assert {k: list(v) for k, v in whole.server.models.items()} == {
        k: list(v) for k, v in resumed.server.models.items()
    }
    same(whole.server.models, resumed.server.models)
    others = federate(models(assign="size"), data(), make(), max_rounds=3, engine=Processes(2))
    same(states(whole), states(others))
    again = fedlightning.load(next((resumed.recorder.run.path / "checkpoints/clients").glob("2.ckpt")), trust=["tests"])
    same({"": module_state(again)}, {"": states(whole)["2"]})


def test_a_common_head_is_averaged_over_all_and_the_rest_stays():
    trainer = federate(models(), data(), [LGFedAvg("net.3")], max_rounds=1)
    assert trainer.server.shared_names() == ("net.3.weight", "net.3.bias")
    heads = [trainer.federation.store.get(client) for client in trainer.server.clients]
    assert all("net.3.weight" not in record.personal for record in heads)
    assert {len(record.personal) for record in heads} == {2, 4}
    first = {client: state["net.3.weight"] for client, state in states(trainer).items()}
    assert all(torch.equal(value, trainer.server.model["net.3.weight"]) for value in first.values())


def test_what_not_all_models_have_is_refused():
    with pytest.raises(ValueError, match=r"'net.0.weight' travels .* is \(8, 6\) in 'small'.*different_models.md"):
        federate(ClientModels({"small": Toy(), "wide": Toy(hidden=9)}), data(), [FedAvg()])
    with pytest.raises(
        ValueError, match=r"FedAMP works on models of one architecture, and ClientModels gives .*.small, deep"
    ):
        federate(models(), data(), [FedAMP()])
    with pytest.raises(ValueError, match=r"engine='vectorized' cannot train .* different architectures"):
        federate(models(), data(), [Local()], engine="vectorized", optimizer_state="reset")
    with pytest.raises(ValueError, match=r"no 'deep': 'net.2.bias' differs"):
        trainer = federate(models(), data(), [Local()], max_rounds=1)
        trainer.server.models.add("extra", "deep", trainer.server.model)
    with pytest.raises(ValueError, match="no architecture 'huge'"):
        trainer.server.models.add("extra", "huge")


class Longer(Toy):
    """As `Toy`, with one more layer at the end of the chain or beside it."""

    def __init__(self, beside=False):
        super().__init__()
        if beside:
            self.beside = nn.Linear(CLASSES, CLASSES)
        else:
            self.net.append(nn.Linear(CLASSES, CLASSES))


@pytest.mark.parametrize("order", [1, -1])
def test_what_travels_must_be_the_same_part_of_all_models(order):
    """Whichever model is the server's: it was refused in one order, and in the other a layer silently stayed, or left."""
    beside = dict([("toy", Toy()), ("more", Longer(beside=True))][::order])
    with pytest.raises(ValueError, match=r"'beside\.weight' travels"):
        federate(ClientModels(beside), data(), [FedAvg()], max_rounds=1)
    deeper = dict([("toy", Toy()), ("deeper", Longer())][::order])
    with pytest.raises(ValueError, match=r"'net\.3\.weight' travels in 'deeper' and not in 'toy'"):
        federate(ClientModels(deeper), data(), [FedPer()], max_rounds=1)
    trainer = federate(ClientModels(beside), data(), [LGFedAvg(["net"])], max_rounds=1)
    assert trainer.server.shared_names() == ("net.0.weight", "net.0.bias", "net.3.weight", "net.3.bias")


def test_a_check_runs_for_every_architecture():
    class Sees(FederatedCallback):
        facts = Facts(mixes_architectures=True)
        seen: list = []

        def check(self, setup):
            self.seen.append((type(setup.template).__name__, len(setup.kinds), len(setup.optimizers)))

    federate(models(), data(), [Local(), Sees()], max_rounds=1)
    assert Sees.seen == [("Toy", 4, 1), ("Deep", 6, 1)]


def test_an_error_in_a_step_of_the_second_architecture_shows_before_round_1():
    broken = Deep()
    broken.net[2] = nn.Linear(5, 8)
    with pytest.raises(ValueError, match=r"Deep.*training_step"):
        federate(ClientModels({"small": Toy(), "deep": broken}), data(), [Local()], sanity_check=True)


def test_resuming_keeps_the_models_of_clients_and_refuses_others(tmp_path):
    begun = federate(models(), data(), [Local()], max_rounds=1, root=tmp_path)
    more = toy_data([16, 12, 20, 8, 8])
    with pytest.raises(ValueError, match=r"small: model.lr"):
        changed = ClientModels({"small": Toy(lr=0.2), "deep": MODELS["deep"]()})
        resumed_from(begun, changed, [Local()])
    with pytest.raises(ValueError, match=r"model.assign"):
        resumed_from(begun, models(assign="size"), [Local()])
    resumed = resumed_from(begun, models(), [Local()], 2, more, allow_new_clients=True)
    kinds = {client: type(resumed.module(client)).__name__ for client in "01234"}
    assert kinds == {"0": "Toy", "1": "Deep", "2": "Toy", "3": "Deep", "4": "Toy"}


def test_assignments_by_name_must_stay(tmp_path):
    by_name = {"0": "deep", "1": "small", "2": "small", "3": "deep"}
    trainer = federate(
        models(assign=by_name), data(), [FedProto(head="net.3"), LocalCheckpoint()], max_rounds=1, root=tmp_path
    )
    kept = {client: type(trainer.module(client, "best_local")).__name__ for client in "0123"}
    assert kept == {"0": "Deep", "1": "Toy", "2": "Toy", "3": "Deep"}
    with pytest.raises(ValueError, match=r"Client '0' .* has a model 'deep', and ClientModels assigns it 'small' now"):
        resumed_from(trainer, models(assign=by_name | {"0": "small"}), [FedProto(head="net.3"), LocalCheckpoint()])


def test_a_model_for_the_server_alone():
    trainer = federate(models(server="deep"), data(), [Local()], max_rounds=1)
    assert {type(trainer.module(client)) for client in "0123"} == {Toy}
    assert type(trainer.server.module) is Deep and len(trainer.server.model) == 6


def test_server_optimizers_move_what_is_shared():
    trainer = federate(models(), data(), [LGFedAvg("net.3"), FedAdam(server_lr=0.1)], max_rounds=2)
    assert set(trainer.server.state["FedAdam"]["m"]) == {"net.3.weight", "net.3.bias"}


@pytest.mark.parametrize("make", [lambda: FedAdam(server_lr=0.1), lambda: FedAvgM(0.9, 0.5)])
def test_server_optimizers_keep_moments_for_every_model(make):
    """Both networks have `net.0.weight` and `net.3.weight`: with moments by name alone they would mix."""
    trainer = federate(models(), data(), [OneModelEach(), make()], max_rounds=3)
    for name, members in (("small", ["0", "2"]), ("deep", ["1", "3"])):
        other = federate(MODELS[name](), data(), [make(), Only(members)], max_rounds=3)
        same({"": trainer.server.models[name]}, {"": other.server.model})


def test_a_method_for_one_global_model_is_refused_beside_several():
    with pytest.raises(ValueError, match=r"SCAFFOLD works on the one global model, and OneModelEach keeps several"):
        federate(Toy(), data(), [OneModelEach(), SCAFFOLD()])


@pytest.mark.slow
def test_the_model_of_each_architecture_is_selected_by_its_clients(tmp_path):
    trainer = federate(
        models(), data(), [OneModelEach(), GlobalCheckpoint()], tmp_path, max_rounds=4, evaluation=1, seed=3
    )
    for name, members in (("small", ["0", "2"]), ("deep", ["1", "3"])):
        rows = [row for row in trainer.recorder.rows if (row.stage, row.metric) == ("G", "val_loss")]
        means = {
            number: sum(
                row.value * trainer.server.num_samples[row.client]
                for row in rows
                if row.round == number and row.client in members
            )
            for number in range(1, 5)
        }
        kept = trainer.server.selected("best_global", members[0])
        assert kept["of"] == name and kept["round"] == min(means, key=means.get)
        same({"": kept["model"]}, {"": module_state(trainer.module(members[1], "best_global"))})
    trainer.test(verbose=False)
    rows = [row for row in trainer.recorder.rows if row.checkpoint == "best_global" and row.split == "test"]
    assert {(row.client, row.data) for row in rows} == {(client, "local") for client in "0123"}


@pytest.mark.slow
def test_the_summary_and_a_dry_run_name_the_architectures(tmp_path):
    trainer = federate(models(assign="blocks"), data(), [Local()], max_rounds=1, root=tmp_path)
    found = trainer.summary["architectures"]
    assert found["small"] == {"class": "Toy", "parameters": 83, "clients": ["0", "1"]}
    assert found["deep"]["clients"] == ["2", "3"]
    report = str(make_trainer(tmp_path, [Local()]).dry_run(models(assign="blocks"), data()))
    assert "small (Toy): 83 parameters, 2 clients" in report and "deep (Deep)" in report


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["Toy", "Deep", "Toy"]),
        ({"server": "deep"}, ["Toy", "Toy", "Toy"]),  # which no client has
        ({"assign": "size"}, ["Deep", "Toy", "Toy"]),  # 16, 12, 20 and 8 samples have trained
    ],
)
@pytest.mark.fast_cases(1)
def test_newcomers_of_other_data_get_their_architecture_by_the_rule(options, expected, tmp_path):
    """They all got the server's, without a word."""
    trainer = federate(models(**options), data(), [LGFedAvg("net.3")], tmp_path, max_rounds=1)
    assigned = dict(trainer.server.blueprint.assigned)
    trainer.onboard(toy_data([*SIZES, 30, 5, 14]), verbose=False)
    found = [
        fedlightning.load(trainer.recorder.run.path / f"checkpoints/newcomers/{client}.ckpt", trust=["tests"])
        for client in "456"
    ]
    assert [type(module).__name__ for module in found] == expected
    assert trainer.server.blueprint.assigned == assigned


def test_newcomers_without_a_model_by_name_are_refused():
    by_name = {"0": "deep", "1": "small", "2": "small", "3": "deep"}
    trainer = federate(models(assign=by_name), data(), [LGFedAvg("net.3")], max_rounds=1)
    with pytest.raises(ValueError, match=r"names none for new client '4'. Use a rule .* held_out"):
        trainer.onboard(toy_data([*SIZES, 30]), verbose=False)
    held = federate(models(assign=by_name), data(), [LGFedAvg("net.3")], max_rounds=1, held_out=["3"])
    assert {row["client"] for row in held.onboard(verbose=False) if "client" in row} <= {"3"}
    assert held.server.architecture_of("3").name == "deep"


def test_a_selected_model_that_no_unseen_client_has_is_passed_over(tmp_path):
    """A single client was held out: the other architecture's model had nobody to be scored by, and the run broke."""
    callbacks = [OneModelEach(), GlobalCheckpoint()]
    trainer = federate(models(), data(), callbacks, tmp_path, max_rounds=1, evaluation=1, held_out=["3"])
    trainer.test(verbose=False)
    unseen = [row for row in trainer.rows if row.model == "unseen" and row.checkpoint == "best_global"]
    assert {(row.client, row.split) for row in unseen} == {("3", "test")}
