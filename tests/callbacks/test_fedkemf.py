"""FedKEMF: algorithms-2, entry 2.16."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.callbacks import FML, FedAvg, FedKEMF, Local
from fedlightning.callbacks.fedkemf import ensemble_of
from fedlightning.tensors import module_state
from tests.callbacks.common import SIZES, batches, deployed
from tests.callbacks.test_fml import OTHER, mixed, seeded, shared_state, small
from tests.conformance.case import Case, Kept
from tests.helpers import FEATURES, NormNet, Toy, ToyData, close, federate, global_state, same, samples, spied, toy_data

CASES = {
    "FedKEMF": Case(FedKEMF(OTHER, steps=3, head="head"), neutral=FedKEMF(mutual=0.0, steps=0)),
    "FedKEMF vote": Case(FedKEMF(OTHER, "vote", steps=3, head="head"), neutral=FedKEMF(mutual=0.0, steps=0)),
}
KEPT = {"FedKEMF": Kept("FedKEMF", options={"steps": 0})}


class WithPublic(ToyData):
    """With twelve public samples, without labels."""

    def public_dataloader(self):
        return DataLoader(TensorDataset(samples("public", "train", 12)[0]), batch_size=12)


def data(sizes=SIZES):
    return WithPublic(toy_data(sizes).tensors)


def by_hand(privates, knowledge, given, visits, how, steps):
    """Clients and server in plain torch; the server's batch is all public samples."""
    (public,) = given.public_dataloader().dataset.tensors
    for number, clients in enumerate(visits):
        sent = {}
        for client in clients:
            own, theirs = privates[client], copy.deepcopy(knowledge)
            steppers = [net.configure_optimizers() for net in (own, theirs)]
            for x, y in batches(given, client, round=number, epochs=2):
                z, q = own.net(x), theirs.net(x)
                for stepper, (out, other) in zip(steppers, ((z, q), (q, z)), strict=True):
                    target = other.detach().softmax(1)
                    loss = F.cross_entropy(out, y) + (target * (target / out.softmax(1)).log()).sum(1).mean()
                    stepper.zero_grad()
                    loss.backward()
                    stepper.step()
            sent[client] = theirs
        with torch.no_grad():
            logits = [net.net(public) for net in sent.values()]
        if how == "max":
            target = torch.maximum(*logits).softmax(1)
        elif how == "mean":
            target = ((logits[0] + logits[1]) / 2).softmax(1)
        else:
            target = sum(F.one_hot(z.argmax(1), 3) for z in logits) / 2.0  # of two voters, both or one each
        total = sum(SIZES[client] for client in sent)
        states = {client: module_state(net) for client, net in sent.items()}
        mean = {n: sum(SIZES[c] * state[n] for c, state in states.items()) / total for n in module_state(knowledge)}
        knowledge.load_state_dict(mean)
        stepper = torch.optim.Adam(knowledge.parameters(), 0.01)
        for _ in range(steps):
            stepper.zero_grad()
            out = knowledge.net(public).log_softmax(1)
            (torch.special.xlogy(target, target) - target * out).sum(1).mean().backward()
            stepper.step()
    return privates, knowledge


@pytest.mark.parametrize("how", ["max", "mean", "vote"])
def test_three_rounds_by_hand_with_two_architectures_and_absent_clients(how):
    module, knowledge, given = mixed(), small(lr=0.1), data()
    method = FedKEMF(knowledge, how, steps=4, server_lr=0.01)
    trainer, spy = spied(module, given, [method], max_rounds=3, local_epochs=2, participation=2)
    visits = [sorted(spy.of_round(number)) for number in range(3)]
    assert len({tuple(clients) for clients in visits}) > 1
    start = {c: copy.deepcopy(module.model(trainer.server.architecture_of(c).name)) for c in SIZES}
    privates, knowledge = by_hand(start, copy.deepcopy(knowledge), given, visits, how, 4)
    for client in SIZES:
        close(deployed(trainer, client), module_state(privates[client]), atol=1e-5)
    close(module_state(trainer.module()), module_state(knowledge), atol=1e-5)


def test_without_distillation_it_is_fml_at_half_the_rate():
    """Shares of one half double what a learning rate must be: plain SGD, bit for bit."""
    options = {"max_rounds": 3, "participation": 2, "optimizer_state": "reset"}
    runs = []
    for method, lr in ((FedKEMF, 0.1), (FML, 0.2)):
        knowledge = seeded(lambda lr=lr: Toy("sgd", lr=lr, hidden=3), 9)
        private = seeded(lambda lr=lr: Toy("sgd", lr=lr), 5)
        given = {"steps": 0} if method is FedKEMF else {}
        runs.append(federate(private, toy_data(SIZES), [method(knowledge, weighting="uniform", **given)], **options))
    same(global_state(runs[0]), global_state(runs[1]))
    for client in SIZES:
        same(deployed(runs[0], client), deployed(runs[1], client))


def test_without_divergences_it_is_local_training_beside_fedavg():
    options = {"max_rounds": 2, "optimizer_state": "reset"}
    private, knowledge, given = NormNet("adam"), small("adam"), toy_data(SIZES)
    trainer = federate(private, given, [FedKEMF(knowledge, mutual=0.0, steps=0)], **options)
    same(shared_state(global_state(trainer)), global_state(federate(knowledge, given, [FedAvg()], **options)))
    same(deployed(trainer, "0"), deployed(federate(private, given, [Local()], **options), "0"))


def test_the_network_of_a_single_client_stays_as_it_is():
    runs = [federate(mixed(), data({"0": 24}), [FedKEMF(small(), steps=steps)]) for steps in (0, 50)]
    same(global_state(runs[0]), global_state(runs[1]))


def test_ensembles():
    logits = torch.tensor([[[2.0, 0.0, 1.0]], [[0.0, 3.0, 1.0]]])
    torch.testing.assert_close(ensemble_of(logits, "max"), torch.tensor([[2.0, 3.0, 1.0]]).softmax(1))
    torch.testing.assert_close(ensemble_of(logits, "mean"), torch.tensor([[1.0, 1.5, 1.0]]).softmax(1))
    torch.testing.assert_close(ensemble_of(logits, "vote"), torch.tensor([[0.5, 0.5, 0.0]]))
    torch.testing.assert_close(ensemble_of(logits[[0, 1, 1]], "vote"), torch.tensor([[0.0, 1.0, 0.0]]))


def test_running_statistics_of_teachers_stay_and_private_entries_never_change_at_the_server():
    knowledge = NormNet()
    trainer = federate(Toy(), data(), [FedKEMF(knowledge, steps=5)], max_rounds=2)
    start, now = module_state(Toy()), global_state(trainer)
    built = module_state(trainer.server.blueprint.build("server"))
    assert all(torch.equal(now[name], built[name]) for name in start)
    shared = shared_state(now)
    assert shared["net.1.num_batches_tracked"] > 0 and torch.isfinite(shared["net.1.running_var"]).all()


def test_wrong_use_is_refused():
    for name, value in (("ensemble", "median"), ("mutual", -1), ("steps", -1), ("server_lr", 0), ("temperature", 0)):
        with pytest.raises(ValueError, match=f"FedKEMF got {name}="):
            FedKEMF(**{name: value})
    with pytest.raises(ValueError, match=r"FedKEMF trains on public data, but .* none"):
        federate(Toy(), toy_data(SIZES), [FedKEMF(small())])

    class Wide(WithPublic):
        def public_dataloader(self):
            return DataLoader(TensorDataset(torch.zeros(4, FEATURES + 1)), batch_size=4)

    with pytest.raises(ValueError, match=r"FedKEMF needs public samples like the clients'"):
        federate(Toy(), Wide(toy_data(SIZES).tensors), [FedKEMF(small())])
