"""FedType: algorithms-2, entry 2.18."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from fedlightning.callbacks import SCAFFOLD, FedAdam, FedAvg, FedProx, FedType, GlobalCheckpoint, Local, LocalCheckpoint
from fedlightning.callbacks.fedtype import PredictionSets, PrivateLoss, ProxyLoss, calibrate, consensus, imitation_loss
from fedlightning.options import Processes
from fedlightning.seeding import generator
from fedlightning.tensors import module_state
from fedlightning.wrappers.pair import Side
from tests.callbacks.common import deployed
from tests.callbacks.test_fml import OTHER, PREFIX, mixed, seeded, shared_state, small
from tests.conformance.case import Case, Kept
from tests.helpers import (
    CLASSES,
    NormNet,
    Toy,
    close,
    differs,
    federate,
    global_state,
    make_trainer,
    same,
    spied,
    toy_data,
)

CASES = {
    "FedType": Case(
        FedType(OTHER, alpha=0.4, head="head"),
        neutral=FedType(imitation=0.0, distillation=0.0),
        skip={
            "identical_clients": "every client draws the samples that calibrate, and the order of the others, itself"
        },
    ),
}
KEPT = {"FedType": Kept("FedType", client=("accuracy",), phases=("fit", "private"))}
SIZES = {"0": 30, "1": 44, "2": 23}
ALPHA, SHARE = 0.3, 0.25
HELD = {"0": 8, "1": 12, "2": 7}
"""Samples that calibrate; of two clients one more, since 33 and 17 would leave a batch with a single one."""


# -- by hand -----------------------------------------------------------------------------------------------------------
def raps(z, temperature, lambda_reg, k_reg):
    """A score for each class, one sample and class after the other."""
    found = torch.zeros_like(z)
    for row, p in enumerate((z / temperature).softmax(1)):
        total = 0.0
        for rank, label in enumerate(sorted(range(len(p)), key=lambda c: -float(p[c])), start=1):
            total = 1.0 if rank == len(p) else total + float(p[label])
            found[row, label] = total + lambda_reg * max(0, rank - k_reg)
    return found


def by_lbfgs(z, y):
    """The temperature of least cross entropy, by another way."""
    inverse = torch.ones(1, dtype=torch.float64, requires_grad=True)
    stepper = torch.optim.LBFGS([inverse], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure():
        stepper.zero_grad()
        loss = F.cross_entropy(inverse * z.double(), y)
        loss.backward()
        return loss

    stepper.step(closure)
    return 1.0 / min(max(float(inverse), 0.1), 10.0)


def sets_by_hand(z, y, lambda_reg, k_reg):
    temperature = by_lbfgs(z, y)
    own = sorted(float(row[label]) for row, label in zip(raps(z, temperature, lambda_reg, k_reg), y, strict=True))
    rank = math.ceil((len(y) + 1) * (1 - ALPHA))
    limit = own[rank - 1] if rank <= len(own) else math.inf

    def find(logits):
        inside = [{c for c in range(CLASSES) if s[c] <= limit} for s in raps(logits, temperature, lambda_reg, k_reg)]
        return [one | {int(z.argmax())} for one, z in zip(inside, logits, strict=True)]

    return find


def private_loss_by_hand(z, y, ours, sure):
    imitation, agreement = 0.0, 0.0
    for row, (w, p) in enumerate(zip(ours, sure, strict=True)):
        others = set(range(CLASSES)) - p
        for a in p:
            for b in others:
                imitation = imitation + F.relu(z[row, b] - z[row, a]) / (len(p) * len(others))
        agreement += len(w & p) / (len(w | p) if len(w) <= len(p) else len(p))
    return F.cross_entropy(z, y) + agreement / len(z) * imitation / len(z)


def batches_by_hand(x, y, ids, client, number, epochs=2):
    for epoch in range(epochs):
        order = torch.randperm(len(ids), generator=generator(0, "batches", f"samples of {client}", number, epoch))
        for part in ids[order].split(8):
            yield x[part], y[part]


def by_hand(privates, proxy, data, visits, lambda_reg=0.2, k_reg=1):
    known = {}
    for number, clients in enumerate(visits):
        sent = {}
        for client in clients:
            x, y = data.tensors[client]["train"]
            order = torch.randperm(len(x), generator=generator(0, client, "FedType", "calibration"))
            held, ids = (part.sort().values for part in order.tensor_split([HELD[client]]))
            own, theirs = privates[client], copy.deepcopy(proxy)
            with torch.no_grad():
                accuracy = float((own.net(x[ids]).argmax(1) == y[ids]).double().mean())
                fallen = max(0.0, known.get(client, 0.0) - accuracy)
                known[client] = accuracy
                of_own = sets_by_hand(own.net(x[held]), y[held], 1.0, k_reg)
                of_proxy = sets_by_hand(theirs.net(x[held]), y[held], lambda_reg + (1 - lambda_reg) * fallen, k_reg)
            stepper = own.configure_optimizers()
            for a, b in batches_by_hand(x, y, ids, client, number):
                z = own.net(a)
                loss = private_loss_by_hand(z, b, of_own(z.detach()), of_proxy(theirs.net(a).detach()))
                stepper.zero_grad()
                loss.backward()
                stepper.step()
            stepper = theirs.configure_optimizers()
            for a, b in batches_by_hand(x, y, ids, client, number):
                z, target = theirs.net(a), (own.net(a).detach() / 2).softmax(1)
                kl = (target * (target / (z / 2).softmax(1)).log()).sum(1).mean()
                stepper.zero_grad()
                (F.cross_entropy(z, b) + 0.7 * kl).backward()
                stepper.step()
            sent[client] = module_state(theirs)
        total = sum(SIZES[client] for client in sent)
        mean = {n: sum(SIZES[c] * state[n] for c, state in sent.items()) / total for n in module_state(proxy)}
        proxy.load_state_dict(mean)
    return privates, proxy


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_three_rounds_by_hand_with_two_architectures_and_absent_clients(optimizer):
    data, module, proxy = toy_data(SIZES), mixed(optimizer), small(optimizer)
    method = FedType(proxy, ALPHA, SHARE, distillation=0.7, temperature=2.0, lambda_reg=0.2, k_reg=1)
    trainer, spy = spied(module, data, [method], max_rounds=3, local_epochs=2, participation=2)
    visits = [sorted(spy.of_round(number)) for number in range(3)]
    assert len({tuple(clients) for clients in visits}) > 1 and all(len(clients) == 2 for clients in visits)
    start = {client: copy.deepcopy(module.model(trainer.server.architecture_of(client).name)) for client in SIZES}
    privates, proxy = by_hand(start, copy.deepcopy(proxy), data, visits)
    for client in SIZES:
        close(deployed(trainer, client), module_state(privates[client]), atol=1e-5)
    close(module_state(trainer.module()), module_state(proxy), atol=1e-5)


# -- the sets ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("alpha", [0.1, 0.3])
def test_sets_cover_new_samples(alpha):
    """Invariant (d): exchangeable samples, a model that is neither right nor calibrated."""
    draw, found, sizes = torch.Generator().manual_seed(3), [], []
    for _ in range(40):
        x = torch.randn(100 + 400, 6, generator=draw)
        y = (x @ torch.randn(6, 6, generator=draw) + torch.randn(500, 6, generator=draw)).argmax(1)
        z = 7.0 * (F.one_hot(y, 6) + 0.8 * torch.randn(500, 6, generator=draw))
        sets = calibrate(z[:100], y[:100], alpha, lambda_reg=0.1, k_reg=2)
        inside = sets(z[100:])
        found.append(float(inside[range(400), y[100:]].double().mean()))
        sizes.append(float(inside.sum(1).double().mean()))
        assert found[-1] >= 1 - alpha - 2.5 / math.sqrt(100)
    assert sum(found) / 40 >= 1 - alpha - 0.01  # not by covering everything:
    assert sum(found) / 40 <= 1 - alpha + 0.06 and sum(sizes) / 40 < 4.0


def test_too_few_samples_give_sets_of_all_classes():
    z, y = torch.randn(8, 4), torch.zeros(8).long()
    assert calibrate(z, y, 0.1, 0.0, 5)(z).all()  # nine are needed
    assert calibrate(z[:0], y[:0], 0.1, 0.0, 5)(z).all()
    assert not calibrate(100 * F.one_hot(y, 4).float(), y, 0.2, 1.0, 0)(z).all()


def test_scores_are_sums_of_probabilities_with_a_penalty_on_ranks():
    z = torch.tensor([[0.5, 0.3, 0.2]]).log()
    found = PredictionSets(1.0, 0.8, lambda_reg=0.25, k_reg=1).scores(z)
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.8 + 0.25, 1.0 + 0.5]]))
    assert PredictionSets(1.0, 0.1, 0.0, 5)(z).tolist() == [[True, False, False]]  # never empty


def test_imitation_is_0_in_the_right_order_and_without_a_class_outside():
    """Invariant (a), and the gradient that the authors' loss has not."""
    z = torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 4.0]], requires_grad=True)
    some, all_classes = torch.tensor([[True, True, False]] * 2), torch.ones(2, 3).bool()
    assert imitation_loss(z[:1], some[:1]) == 0.0 and imitation_loss(z, all_classes) == 0.0
    assert imitation_loss(z, some).item() == pytest.approx((3.0 + 2.0) / 2 / 2)
    (found,) = torch.autograd.grad(imitation_loss(z, some), z)
    torch.testing.assert_close(found[1], torch.tensor([-0.25, -0.25, 0.5]))
    assert found[0].abs().sum() == 0


def test_consensus_is_a_share_and_1_for_equal_sets():
    """Invariant (b)."""
    sets = torch.tensor([[bool(number >> bit & 1) for bit in range(4)] for number in range(1, 16)])
    for one in sets:
        found = consensus(sets, one.expand_as(sets))
        assert ((found >= 0) & (found <= 1)).all() and found[(sets == one).all(1)] == 1.0
    one, two = torch.tensor([[True, True, True, False]]), torch.tensor([[False, True, False, True]])
    assert (consensus(one, two).item(), consensus(two, one).item()) == (0.5, 0.25)


def test_each_loss_has_a_gradient_for_its_own_model_only():
    logits = [torch.randn(5, CLASSES, requires_grad=True) for _ in range(2)]
    own, proxy = (Side(F.cross_entropy(z, torch.arange(5) % CLASSES), z, z) for z in logits)
    sets = PredictionSets(1.0, 0.5, 0.0, 5)
    for loss, active in ((PrivateLoss(1.0, sets, sets), 0), (ProxyLoss(1.0, 1.0), 1)):
        found = torch.autograd.grad(loss(own, proxy, None), logits, allow_unused=True)
        assert found[active].abs().sum() > 0 and found[1 - active] is None


# -- in a federation ---------------------------------------------------------------------------------------------------
def test_without_both_terms_it_is_local_training_beside_fedavg():
    """Invariant (c), bit for bit, with batch normalisation and weight decay."""
    data = toy_data(SIZES)
    private, proxy = NormNet("adamw"), seeded(lambda: Toy("adamw", lr=0.03, hidden=4), 3)
    options = {"max_rounds": 2, "local_epochs": 2, "participation": 2, "optimizer_state": "reset"}
    trainer = federate(private, data, [FedType(proxy, imitation=0.0, distillation=0.0)], **options)
    local = federate(private, data, [Local()], **options)
    for client in SIZES:
        same(deployed(trainer, client), deployed(local, client))
    same(shared_state(global_state(trainer)), global_state(federate(proxy, data, [FedAvg()], **options)))


@pytest.mark.parametrize("make", [lambda: [FedProx(mu=0.5), FedAdam(server_lr=0.1)], lambda: [SCAFFOLD()]])
def test_the_proxy_may_be_trained_by_another_method(make):
    data, private, proxy = toy_data(SIZES), Toy("sgd"), small("sgd", lr=0.03)
    options = {"max_rounds": 3, "local_epochs": 2}
    trainer = federate(private, data, [FedType(proxy, imitation=0.0, distillation=0.0), *make()], **options)
    close(shared_state(global_state(trainer)), global_state(federate(proxy, data, make(), **options)), atol=1e-6)
    same(deployed(trainer, "0"), deployed(federate(private, data, [Local()], **options), "0"))


def test_only_the_proxy_travels():
    """Invariant (e)."""
    proxy = small()
    trainer, spy = spied(mixed(), toy_data(SIZES), [FedType(proxy, ALPHA, SHARE)], max_rounds=1)
    count = 4 * sum(value.numel() for value in module_state(proxy).values())
    for item in (*spy.messages, *spy.updates):
        assert all(name.startswith(PREFIX) for name in item.state) and item.num_bytes == count
    assert all("shared_model" not in name for name in deployed(trainer, "0"))


def test_samples_that_calibrate_never_train():
    """A gradient of theirs would be infinite; sets have logits only."""
    data = toy_data(SIZES)
    for client, count in SIZES.items():
        assert abs(HELD[client] - SHARE * count) < 2
        order = torch.randperm(count, generator=generator(0, client, "FedType", "calibration"))
        data.tensors[client]["train"][0][order[: HELD[client]]] = 1e30
    trainer = federate(mixed(), data, [FedType(small(), ALPHA, SHARE)], max_rounds=2)
    for client in SIZES:
        assert all(value.isfinite().all() for value in deployed(trainer, client).values())
    assert all(value.isfinite().all() for value in global_state(trainer).values())


def test_the_frozen_model_does_not_move():
    """Running statistics of the proxy are those of its own steps."""
    data, proxy = toy_data(SIZES), seeded(lambda: NormNet("sgd", hidden=4), 3)
    method = FedType(proxy, ALPHA, SHARE, distillation=0.0)
    _, spy = spied(Toy(dropout=0.5), data, [method], max_rounds=1)
    for update in spy.updates:
        steps = math.ceil((SIZES[update.client] - HELD[update.client]) / 8)
        assert update.steps == update.own_steps == steps
        assert update.state[f"{PREFIX}net.1.num_batches_tracked"] == steps


def test_the_frozen_model_is_in_eval_mode():
    """Dropout in a model that does not move changes nothing in the other one."""

    class Drops(Toy):
        def forward(self, x):  # by the flag of the outermost module
            return super().forward(F.dropout(x, self.hparams.dropout, self.training))

    options, found = {"max_rounds": 2}, []
    for dropout in (0.0, 0.5):
        still, moving = seeded(lambda d=dropout: Drops("sgd", lr=0.0, dropout=d), 9), seeded(lambda: Toy("sgd"), 5)
        proxies = federate(still, toy_data(SIZES), [FedType(small("sgd"), imitation=0.0)], **options)
        method = FedType(still, ALPHA, SHARE, distillation=0.0, lambda_reg=1.0, k_reg=0)
        privates = federate(moving, toy_data(SIZES), [method], **options)
        found.append([shared_state(global_state(proxies)), deployed(privates, "1")])
    for one, other in zip(*found, strict=True):
        same(one, other)


def test_the_penalty_grows_with_a_fall_of_the_private_accuracy(monkeypatch):
    """`l0 + (1 - l0) D`, for the proxy's sets only."""
    z, y = torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 0, 1])
    monkeypatch.setattr(FedType, "_logits", lambda self, client, ids: (z, z, y))
    method, found = FedType(lambda_reg=0.4, private_lambda_reg=0.7), []
    for before in ({}, {"accuracy": 0.25}, {"accuracy": 0.75}):
        client = SimpleNamespace(state={"FedType": before})
        own, proxy = method.calibrated(client, torch.arange(4), torch.arange(4))
        found.append((own.lambda_reg, round(proxy.lambda_reg, 6)))
        assert client.state == {"FedType": {"accuracy": 0.5}}
    assert found == [(0.7, 0.4), (0.7, 0.4), (0.7, 0.4 + 0.6 * 0.25)]


def run(root=None, **options):
    callbacks = [FedType(small(), ALPHA, SHARE, lambda_reg=0.1, k_reg=0), LocalCheckpoint(), GlobalCheckpoint()]
    return federate(mixed(), toy_data(SIZES), callbacks, root, **{"max_rounds": 2, "evaluation": 1} | options)


@pytest.mark.slow
def test_worker_processes_and_resume_change_nothing(tmp_path):
    whole = run(tmp_path / "a", max_rounds=3, optimizer_state="keep")
    options = {"engine": Processes(2), "optimizer_state": "keep"}
    half = run(tmp_path / "b", **options)
    again = make_trainer(tmp_path / "b", half.callbacks.callbacks, max_rounds=3, evaluation=1, **options)
    again.fit(mixed(), datamodule=toy_data(SIZES), resume=half.recorder.run.path)
    same(global_state(whole), global_state(again))
    for client in SIZES:
        same(deployed(whole, client), deployed(again, client))


def test_all_three_models_are_scored(tmp_path):
    """The proxy as trained by the client is that of stage L2 with `deploy="proxy"`."""
    rows = {}
    for deploy in ("private", "proxy"):
        method = FedType(small(), ALPHA, SHARE, deploy=deploy)
        trainer, spy = spied(mixed(), toy_data(SIZES), [method], tmp_path / deploy, max_rounds=2)
        rows[deploy] = {
            (row.stage, row.client): row.value
            for row in trainer.recorder.rows
            if row.metric == "val_loss" and row.round == 2
        }
    x, y = toy_data(SIZES).tensors["1"]["val"]
    for key, module in (("G", trainer.module()), ("L1", trainer.module("1"))):
        assert rows["proxy"][key, "1"] == pytest.approx(float(F.cross_entropy(module(x), y)), abs=1e-6)
    assert rows["private"]["G", "1"] == rows["proxy"]["G", "1"] == rows["proxy"]["L1", "1"]
    (sent,) = (update for update in spy.updates if update.client == "1" and update.round == 1)
    local = small()
    local.load_state_dict(shared_state(sent.state))
    assert rows["proxy"]["L2", "1"] == pytest.approx(float(F.cross_entropy(local(x), y)), abs=1e-6)
    assert rows["private"]["L2", "1"] != rows["proxy"]["L2", "1"]


def test_terms_change_both_models():
    data, options = toy_data(SIZES), {"max_rounds": 2}
    full = federate(mixed(), data, [FedType(small(), ALPHA, SHARE)], **options)
    alone = federate(mixed(), data, [FedType(small(), ALPHA, SHARE, imitation=1e-9, distillation=0.0)], **options)
    assert differs(shared_state(global_state(full)), shared_state(global_state(alone)))
    assert differs(deployed(full, "1"), deployed(alone, "1"))


def test_wrong_use_is_refused():
    for name, value in (
        ("alpha", 0.0),
        ("alpha", 1.0),
        ("calibration", 1.5),
        ("imitation", -1),
        ("distillation", -1),
        ("temperature", 0),
        ("lambda_reg", 2.0),
        ("private_lambda_reg", -1.0),
        ("k_reg", -1),
        ("deploy", "both"),
    ):
        with pytest.raises(ValueError, match=f"FedType got {name}="):
            FedType(**{name: value})

    class Regression(Toy):
        def training_step(self, batch, batch_idx):
            return (self.net(batch[0])[:, 0] - batch[1].float()).square().mean()

    data = toy_data(SIZES)
    for splits in data.tensors.values():
        for split, (x, y) in splits.items():
            splits[split] = x, y.float() * 5
    with pytest.raises(ValueError, match=r"FedType.*not whole numbers from 0 to 2"):
        federate(Regression(), data, [FedType(seeded(Regression, 3))])
