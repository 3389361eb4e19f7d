"""What the four sub-model methods share: algorithms-2, entries 2.1 to 2.4. The cutting is tested in tests/wrappers."""

from __future__ import annotations

import pytest
import torch

from fedlightning.callbacks import (
    MOON,
    SCAFFOLD,
    FedAdam,
    FedAvg,
    FederatedDropout,
    FedNova,
    FedPer,
    FedProx,
    FedRolex,
    FjORD,
    HeteroFL,
    LocalAdaptation,
    LocalCheckpoint,
    PLayerFL,
)
from fedlightning.contract.messages import Update
from fedlightning.tensors import clone, module_state
from fedlightning.wrappers.slices import ElementMean, take
from tests.helpers import NormNet, Toy, close, differs, federate, global_state, same, spied, toy_data

SIZES = {"0": 24, "1": 40, "2": 16}
METHODS = {
    "HeteroFL": HeteroFL(masked_loss=False),
    "FedRolex": FedRolex(),
    "FederatedDropout": FederatedDropout(rates=[0.75, 0.5]),
    "FjORD": FjORD(rates=[0.6, 0.4], distillation=False),
}
ROLLING = {name: METHODS[name] for name in ("FedRolex", "FederatedDropout")}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
each_rolling = pytest.mark.parametrize("method", ROLLING.values(), ids=ROLLING)


def parts(method, server, number):
    """The slices of all clients in a round."""
    rates = {client: method.rate_of(server, client, number) for client in server.clients}
    return {c: method.slices(server.module, rate, number, c, server.seed) for c, rate in rates.items()}


@each_method
def test_what_is_sent_is_what_is_merged(method):
    """Each element is the mean over who was sent it, two of three clients in a round; others stay, bit for bit."""
    trainer, spy = spied(Toy("adam"), toy_data(SIZES), [method], max_rounds=3, participation=2)
    server, models = trainer.server, [module_state(trainer.server.blueprint.build("server")), *spy.rounds]
    for number in range(3):
        held = parts(method, server, number)
        updates, (old, new) = spy.of_round(number), models[number : number + 2]
        assert len(updates) == 2
        for message in spy.messages:
            if message.round == number:
                same(message.state, take(old, held[message.client]))
        for name in old:
            sums, weights = (torch.zeros(old[name].shape, dtype=torch.float64) for _ in range(2))
            for client, update in updates.items():
                at = torch.zeros(old[name].shape, dtype=torch.bool)
                index = held[client].get(name, (None,) * at.ndim)
                rows = [torch.arange(n) if kept is None else kept for kept, n in zip(index, at.shape, strict=True)]
                at[torch.meshgrid(*rows, indexing="ij")] = True
                weight = SIZES[client] if method.weighting == "samples" else 1
                sums[at] += weight * update.state[name].double().flatten()
                weights[at] += weight
            nobody = weights == 0
            assert torch.equal(new[name][nobody], old[name][nobody])
            close({name: new[name][~nobody]}, {name: (sums / weights)[~nobody].float()})
        assert all(u.num_bytes == sum(v.numel() * 4 for v in u.state.values()) for u in updates.values())
    sent = {update.num_bytes for update in spy.updates}
    assert len(sent) > 1 or method.rates == [0.75]


@each_method
def test_extracting_and_combining_gives_the_model_back(method):
    module = Toy()
    state = module_state(module)
    for number in range(9):
        mean = ElementMean()
        for client, rate in {"0": 0.3, "1": 0.5, "2": 1.0}.items():
            slices = method.slices(module, rate, number, client, seed=3)
            mean.add(take(state, slices), state, slices, weight=1.0 + rate)
        same(mean.result(state), state)
        same(mean.result(state, total=9.0), state)


@each_method
def test_a_late_update_is_merged_where_it_was_cut(method):
    """An update of round 1 that arrives in round 5 changes the elements that its message had, and no other."""
    trainer = federate(Toy(), toy_data(SIZES), [method], max_rounds=1)
    server = trainer.server
    server.round = 1
    slices = parts(method, server, 1)["1"]
    assert slices
    old = clone(server.model)
    state = {name: value + 1.0 for name, value in take(old, slices).items()}
    update = Update(round=1, client="1", state=state, num_samples=40, contributed=True)
    server.round = 5
    new = method.reduce(server, [update])
    same(take(new, slices), state)
    assert all(int((new[name] != old[name]).sum()) == value.numel() for name, value in state.items())


def test_dynamic_widths_are_those_of_the_updates_round():
    trainer = federate(Toy(), toy_data(SIZES), [FedRolex(dynamic=True)], max_rounds=1)
    server, method = trainer.server, FedRolex(dynamic=True)
    drawn = {}
    for server.round in range(6):
        drawn[server.round] = [method.rate_of(server, client) for client in server.clients]
    assert [[method.rate_of(server, c, number) for c in server.clients] for number in range(6)] == list(drawn.values())
    assert len({tuple(rates) for rates in drawn.values()}) > 2


@each_method
def test_without_training_the_model_stands_still(method):
    trainer = federate(Toy(lr=0.0), toy_data(SIZES), [method], max_rounds=2)
    same(global_state(trainer), module_state(trainer.server.blueprint.build("server")))


@pytest.mark.slow
@each_method
def test_workers_and_one_process_train_the_same(method):
    module = NormNet()
    runs = [federate(module, toy_data(SIZES), [method], engine=e) for e in ("sequential", "processes")]
    same(*map(global_state, runs))


@pytest.mark.slow
@each_method
def test_it_composes_with_terms_in_the_gradient_and_a_server_optimizer(method):
    trainer, spy = spied(NormNet("adam"), toy_data(SIZES), [method, FedProx(), FedAdam()], max_rounds=2, evaluation=1)
    trained = [update for update in spy.updates if not update.tag]  # the others bring statistics of BatchNorm
    assert len(trained) == 6 and "failures" not in trainer.summary
    assert (global_state(trainer)["net.1.running_var"] > 0).all()


def test_a_server_optimizer_with_momentum_moves_on_what_nobody_held():
    """Its pseudo-gradient is 0 there, as different_models.md says: without momentum such elements stay, bit for bit."""
    for beta1 in (0.9, 0.0):
        method, step = HeteroFL(masked_loss=False), FedAdam(beta1=beta1, weighting="uniform")
        trainer, spy = spied(Toy(), toy_data(SIZES), [method, step], max_rounds=6, participation=1)
        models = [module_state(trainer.server.blueprint.build("server")), *spy.rounds]
        full = [number for number in range(6) if "0" in spy.of_round(number)]
        moved = [
            differs({"tail": models[number]["net.0.weight"][4:]}, {"tail": models[number + 1]["net.0.weight"][4:]})
            for number in range(6)
        ]
        assert 0 < len(full) < 6 and full[0] < 5
        assert moved == [number in full if beta1 == 0.0 else number >= full[0] for number in range(6)]


REFUSED = [
    *(
        (method, SCAFFOLD(weighting=method.weighting), r"gives clients parts of the model.*, and SCAFFOLD sends values")
        for method in METHODS.values()
    ),
    *((method, FedNova(), r"gives clients parts.*, and FedNova changes the mean") for method in METHODS.values()),
    *((method, PLayerFL(), r"and PLayerFL .*Remove|claim 'plan_round'") for method in METHODS.values()),
    *((method, MOON(), r"other units in every round.*, and MOON keeps") for method in ROLLING.values()),
    *((method, FedPer(), r"other units in every round.*, and FedPer keeps") for method in ROLLING.values()),
    *((method, LocalAdaptation(), r"LocalAdaptation.*claim 'personal_module'") for method in ROLLING.values()),
    *(
        (method, LocalCheckpoint(), r"other units in every round.*, and LocalCheckpoint keeps .*use GlobalCheckpoint")
        for method in ROLLING.values()
    ),
    (HeteroFL(dynamic=True), FedPer(), r"under HeteroFL\(dynamic=True\)\), and FedPer keeps"),
    (FjORD(), MOON(), r"FjORD trains another width in every step, and MOON adds"),
]


@pytest.mark.parametrize(("method", "other", "words"), REFUSED, ids=[f"{m.key}-{o.key}" for m, o, _ in REFUSED])
def test_what_takes_a_part_for_the_whole_is_refused(method, other, words):
    with pytest.raises(ValueError, match=words):
        federate(Toy(), toy_data(), [method, other])


@each_rolling
def test_what_stays_at_a_client_is_refused_where_units_change(method):
    with pytest.raises(ValueError, match=r"with optimizer_state='keep' .* Use optimizer_state='reset'"):
        federate(Toy("adam"), toy_data(), [method], optimizer_state="keep")
    with pytest.raises(ValueError, match=r"float_buffers='local' keeps running statistics"):
        federate(NormNet(), toy_data(), [method], float_buffers="local")


@each_rolling
def test_clients_deploy_the_full_model(method):
    trainer = federate(Toy(), toy_data(), [method])
    for client in trainer.server.clients:
        same(module_state(trainer.module(client)), global_state(trainer))


@each_method
def test_full_widths_are_fedavg_bit_for_bit(method):
    full = {"widths": [1.0]} if isinstance(method, FjORD) else {}
    ours = type(method)(rates=[1.0], **full, **({"masked_loss": False} if isinstance(method, HeteroFL) else {}))
    module = Toy("adam", dropout=0.2)
    runs = [federate(module, toy_data(), [cb]) for cb in (FedAvg(ours.weighting), ours)]
    same(*map(global_state, runs))
