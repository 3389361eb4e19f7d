"""FML: algorithms-2, entry 2.11."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedlightning
from fedlightning.callbacks import (
    FML,
    IFCA,
    MOON,
    SCAFFOLD,
    Ditto,
    FedAdam,
    FedAvg,
    FedKD,
    FedKEMF,
    FedNova,
    FedPer,
    FedProx,
    FedType,
    GlobalCheckpoint,
    Local,
    LocalCheckpoint,
)
from fedlightning.callbacks.fml import MutualLoss
from fedlightning.callbacks.shared.representations import other_task
from fedlightning.models import ClientModels
from fedlightning.options import Processes
from fedlightning.tensors import module_state
from fedlightning.testing.toys import ToyModule
from fedlightning.wrappers.pair import Side, shared_of
from tests.callbacks.common import SIZES, batches, deployed
from tests.conformance.case import Case, Kept
from tests.helpers import (
    CLASSES,
    FEATURES,
    NormNet,
    Toy,
    close,
    federate,
    global_state,
    make_trainer,
    same,
    spied,
    toy_data,
)


def seeded(make, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


OTHER = seeded(ToyModule, 7)
"""Another model: of two equal ones, the private one would have the values of the one that is sent."""
CASES = {
    "FML": Case(FML(OTHER, head="head"), neutral=FML(alpha=1.0, beta=1.0)),
    "FML together": Case(FML(OTHER, detach=False, head="head", weighting="samples"), neutral=FML(alpha=1.0, beta=1.0)),
}
KEPT = {"FML": Kept("FML")}
PREFIX = "shared_model."


class Deep(Toy):
    """Another architecture."""

    def make(self, hidden, dropout):
        return nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, 7), nn.Linear(7, CLASSES))


def mixed(optimizer="momentum"):
    kinds = (lambda: Toy(optimizer), lambda: Deep(optimizer, lr=0.05))
    return ClientModels({name: seeded(make, 5) for name, make in zip(("toy", "deep"), kinds, strict=True)})


def small(optimizer="momentum", lr=0.2):
    return seeded(lambda: Toy(optimizer, lr=lr, hidden=3), 9)


def shared_state(state):
    return {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}


def by_hand(privates, meme, data, visits, alpha=0.5, beta=0.5, epochs=2):
    """Two models and two optimizers a client, in plain torch; `visits`: the clients of each round."""
    for number, clients in enumerate(visits):
        memes = {}
        for client in clients:
            own, theirs = privates[client], copy.deepcopy(meme)
            steppers = [own.configure_optimizers(), theirs.configure_optimizers()]
            for x, y in batches(data, client, round=number, epochs=epochs):
                z, q = own.net(x), theirs.net(x)
                kl = [
                    (target.detach().softmax(1) * (target.detach().softmax(1) / out.softmax(1)).log()).sum(1).mean()
                    for target, out in ((q, z), (z, q))
                ]
                losses = [alpha * F.cross_entropy(z, y) + (1 - alpha) * kl[0]]
                losses += [beta * F.cross_entropy(q, y) + (1 - beta) * kl[1]]
                for stepper, loss in zip(steppers, losses, strict=True):
                    stepper.zero_grad()
                    loss.backward()
                    stepper.step()
            memes[client] = module_state(theirs)
        meme.load_state_dict({n: sum(m[n] for m in memes.values()) / len(memes) for n in module_state(meme)})
    return privates, meme


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_three_rounds_by_hand_with_two_architectures_and_absent_clients(optimizer):
    data, module, meme = toy_data(SIZES), mixed(optimizer), small(optimizer)
    method = FML(meme, alpha=0.3, beta=0.6)
    options = {"max_rounds": 3, "local_epochs": 2, "participation": 2, "optimizer_state": "reset"}
    trainer, spy = spied(module, data, [method], **options)
    visits = [sorted(spy.of_round(number)) for number in range(3)]
    assert len({tuple(clients) for clients in visits}) > 1 and all(len(clients) == 2 for clients in visits)
    start = {client: copy.deepcopy(module.model(trainer.server.architecture_of(client).name)) for client in SIZES}
    privates, meme = by_hand(start, copy.deepcopy(meme), data, visits, 0.3, 0.6)
    for client in SIZES:
        close(deployed(trainer, client), module_state(privates[client]), atol=1e-5)
    close(module_state(trainer.module()), module_state(meme), atol=1e-5)
    assert type(trainer.module("1")) is Deep and type(trainer.module()) is Toy


@pytest.mark.parametrize(
    "options",
    [
        {"local_loop": "fast"},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"local_loop": "trainer"},
    ],
    ids=["fast", "norm", "value", "trainer"],
)
@pytest.mark.fast_cases(1)
def test_without_divergences_it_is_local_training_beside_fedavg(options):
    """Invariant (a), bit for bit, with batch normalisation and weight decay in both."""
    data, private, meme = toy_data(SIZES), NormNet("adamw"), seeded(lambda: NormNet("adamw", lr=0.03, hidden=4), 3)
    options = {"max_rounds": 2, "local_epochs": 2, "participation": 2, "optimizer_state": "reset"} | options
    trainer = federate(private, data, [FML(meme, alpha=1.0, beta=1.0)], **options)
    local = federate(private, data, [Local()], **options)
    for client in SIZES:
        same(deployed(trainer, client), deployed(local, client))
    other = federate(meme, data, [FedAvg(weighting="uniform")], **options)
    same(shared_state(global_state(trainer)), global_state(other))


def test_equal_models_have_no_divergence_and_targets_no_gradient():
    """Invariants (b) and (c)."""
    logits = [torch.randn(5, CLASSES, requires_grad=True) for _ in range(2)]
    own, meme = (Side(z.sum() * 0.0 + 0.7, z, z) for z in logits)
    loss = MutualLoss(alpha=0.5, beta=0.5, detach=True)
    assert loss(own, own, None).item() == pytest.approx(0.7)
    found = torch.autograd.grad(loss.part(own, meme, 0.5), logits, allow_unused=True, retain_graph=True)
    assert found[1] is None and found[0].abs().sum() > 0
    together = torch.autograd.grad(MutualLoss(0.5, 0.5, False).part(own, meme, 0.5), logits)
    assert all(gradient.abs().sum() > 0 for gradient in together)


def test_only_the_shared_model_travels():
    meme = small()
    trainer, spy = spied(mixed(), toy_data(SIZES), [FML(meme)], max_rounds=1)
    count = 4 * sum(value.numel() for value in module_state(meme).values())
    for item in (*spy.messages, *spy.updates):
        assert all(name.startswith(PREFIX) for name in item.state) and item.num_bytes == count
    assert all("shared_model" not in name for name in deployed(trainer, "0"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: [FedProx(mu=0.5), FedAdam(server_lr=0.1)],
        lambda: [SCAFFOLD()],
        lambda: [SCAFFOLD(option=1)],
        lambda: [FedNova()],
    ],
    ids=["FedProx and FedAdam", "SCAFFOLD", "SCAFFOLD 1", "FedNova"],
)
@pytest.mark.fast_cases(2)
def test_terms_and_server_optimizers_act_on_the_shared_model(make):
    """With another learning rate than the private model's."""
    data, private, meme = toy_data(SIZES), Toy("sgd"), small("sgd", lr=0.03)
    options = {"max_rounds": 3, "local_epochs": 2, "optimizer_state": "reset"}
    trainer = federate(private, data, [FML(meme, 1.0, 1.0), *make()], **options)
    plain = federate(meme, data, [FedAvg(weighting="uniform"), *make()], **options)
    close(shared_state(global_state(trainer)), global_state(plain), atol=1e-6)
    same(deployed(trainer, "0"), deployed(federate(private, data, [Local()], **options), "0"))


def test_kept_optimizers_are_the_private_ones():
    data, private, meme = toy_data(SIZES), Toy("adam"), small("adam")
    options = {"max_rounds": 3}
    trainer = federate(private, data, [FML(meme, 1.0, 1.0)], **options)
    local = federate(private, data, [Local()], **options)
    same(deployed(trainer, "1"), deployed(local, "1"))
    fresh = federate(meme, data, [FedAvg(weighting="uniform")], optimizer_state="reset", **options)
    close(shared_state(global_state(trainer)), global_state(fresh))


def run(root=None, **options):
    callbacks = [FML(small()), LocalCheckpoint(), GlobalCheckpoint()]
    options = {"max_rounds": 2, "evaluation": 1, "optimizer_state": "reset"} | options
    return federate(mixed(), toy_data(SIZES), callbacks, root, **options)


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


def test_selected_models_are_exported_and_scored(tmp_path):
    whole = run(tmp_path)
    path = whole.recorder.run.path / "checkpoints"
    private = fedlightning.load(next((path / "clients").glob("1.ckpt")), trust=["tests"])
    assert type(private) is Deep
    best = fedlightning.load(path / "global.ckpt", trust=["tests"])
    kept = whole.server.checkpoints["GlobalCheckpoint"]
    same(module_state(best), kept["model"])
    assert set(kept["model"]) == set(module_state(small()))
    x, y = toy_data(SIZES).tensors["0"]["test"]
    wanted = ("best_global", "0", "test_loss")
    whole.test(checkpoint="best_global", verbose=False)
    scores = [row.value for row in whole.recorder.rows if (row.checkpoint, row.client, row.metric) == wanted]
    assert scores == [pytest.approx(F.cross_entropy(best(x), y).item(), abs=1e-6)]


def test_stage_g_scores_the_shared_model_and_l1_the_private_one(tmp_path):
    trainer = federate(mixed(), toy_data(SIZES), [FML(small())], tmp_path, max_rounds=2)
    rows = {
        (row.stage, row.client): row.value
        for row in trainer.recorder.rows
        if row.metric == "val_loss" and row.round == 2
    }
    same(module_state(trainer.module()), shared_state(global_state(trainer)))
    x, y = toy_data(SIZES).tensors["1"]["val"]
    for stage, module in (("G", trainer.module()), ("L1", trainer.module("1"))):
        assert rows[stage, "1"] == pytest.approx(float(F.cross_entropy(module(x), y)), abs=1e-6)


def test_the_private_step_does_not_see_the_shared_parameters():
    class Decays(Toy):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + 0.1 * sum(p.square().sum() for p in self.parameters())

    module = FML(small("sgd"), 1.0, 1.0).wrap_module(Decays(), "0")
    batch = toy_data(SIZES).tensors["0"]["train"]
    module.training_step(batch, 0).backward()
    found = {name: p.grad.clone() for name, p in shared_of(module).named_parameters()}
    alone = small("sgd")
    alone.training_step(batch, 0).backward()
    close(found, {name: p.grad for name, p in alone.named_parameters()})


def test_shorter_steps_of_the_private_model_under_sgd_are_said():
    with pytest.warns(
        UserWarning, match=r"FML\(alpha=0.25\) leaves the private model 0.25 .* 4 times the learning rate"
    ):
        federate(Toy("sgd"), toy_data(SIZES), [FML(small("sgd"), alpha=0.25)], max_rounds=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for optimizer, alpha in (("adam", 0.5), ("sgd", 1.0)):
            federate(Toy(optimizer), toy_data(SIZES), [FML(small(optimizer), alpha=alpha)], max_rounds=1)
    assert not any("leaves the private model" in str(one.message) for one in caught)


def test_wrong_use_is_refused():
    data = toy_data(SIZES)
    for name in ("alpha", "beta"):
        with pytest.raises(ValueError, match=f"FML got {name}=2"):
            FML(**{name: 2})
    with pytest.raises(ValueError, match="FML got shared=Linear"):
        FML(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"FML needs shared=.*\(toy, deep\)"):
        federate(mixed(), data, [FML()])
    with pytest.raises(ValueError, match=r"Toy uses SGD and the shared Toy Adam"):
        federate(Toy("sgd"), data, [FML(small("adam"))])
    with pytest.raises(ValueError, match=r"without a schedule \(lr_decay"):
        federate(Toy("steplr"), data, [FML(small())])
    with pytest.raises(ValueError, match=r"gives logits \(8, 3\), and `net.0` of the shared Toy \(8, 8\)"):
        federate(Toy(), data, [FML(shared_head="net.0")])
    for other in (MOON(), FedPer(personal="net.3"), IFCA(), Ditto()):
        with pytest.raises(ValueError, match=rf"{other.key}.*FML|FML.*{other.key}"):
            federate(Toy(), data, [FML(), other])


class Levels(Toy):
    """A regression of one number."""

    def make(self, hidden, dropout):
        return nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 1))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0])[:, 0], batch[1])

    def score(self, batch, split):
        self.log(f"{split}_loss", self.training_step(batch, 0))


class Pixels(Toy):
    """A class for each of six places."""

    def make(self, hidden, dropout):
        return nn.Sequential(nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, hidden, 1), nn.Conv1d(hidden, CLASSES, 1))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1][:, None].expand(-1, FEATURES))


def toy_of_numbers():
    data = toy_data(SIZES)
    for splits in data.tensors.values():
        splits |= {split: (x, x.sum(1) / 9) for split, (x, _) in splits.items()}
    return data


@pytest.mark.parametrize("make", [FML, lambda s: FedKD(s, hidden=False), lambda s: FedKEMF(s, steps=0), FedType])
def test_other_tasks_than_classification_are_refused(make):
    """A softmax over one number or over places is not a prediction of classes."""
    method = make(Levels(hidden=3))
    with pytest.raises(ValueError, match=rf"{method.key} .*(whole number|not whole numbers from 0 to 1)"):
        federate(Levels(), toy_of_numbers(), [method])
    with pytest.raises(ValueError, match=rf"{method.key} .*`net.2` gives \(8, 3, 6\).*pixel or token"):
        federate(Pixels(), toy_data(SIZES), [make(Pixels(hidden=3))])


def test_what_tells_another_task_from_its_targets():
    classes, halves = torch.tensor([0, 2, 1]), torch.full((3, 2), 0.5)
    assert not other_task(classes, 3) and not other_task(classes.float(), 3) and not other_task(halves, 2)
    assert not other_task(None, 3) and not other_task(classes[:, None], 3)
    assert "from 0 to 1" in other_task(classes, 2) and "not shares of classes" in other_task(2 * halves, 2)
    federate(Levels(), toy_of_numbers(), [FML(Levels(hidden=3), alpha=1.0, beta=1.0)], max_rounds=1)
