"""Fed-RoD: sheet C 23."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

import fedlightning
from fedlightning.callbacks import (
    FENDA,
    GPFL,
    SCAFFOLD,
    FedAdam,
    FedAvg,
    FedBN,
    FedPer,
    FedProx,
    FedRep,
    FedRoD,
    GlobalCheckpoint,
    LocalCheckpoint,
)
from fedlightning.callbacks.fedrod import add_personal_head, log_counts, personal_head
from fedlightning.models import MLP, Classifier
from fedlightning.tensors import module_state
from fedlightning.wrappers import unmix
from tests.callbacks.common import MAKES, SIZES, absent_clients_rest, batches, cut_and_resumed, deployed
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import (
    NormNet,
    PiecesStyle,
    Toy,
    ToyData,
    close,
    differs,
    federate,
    global_state,
    mean_of,
    same,
    spied,
    toy_data,
)

CASES = {
    "FedRoD": Case(FedRoD(head="head"), skip=NO_PLAIN_FORM),
    "FedRoD zeros": Case(FedRoD(head="head", init="zeros", weighting="uniform"), skip=NO_PLAIN_FORM),
}
KEPT = {"FedRoD": Kept("FedRoD", options={"head": "net.3"})}
HEAD, OWN = "net.3", "net.3.personal"


def skewed(sizes=SIZES, **options):
    """Clients that lack a class each, and have another one often."""
    data = toy_data(sizes, **options)
    for number, splits in enumerate(data.tensors.values()):
        for split, (x, y) in splits.items():
            splits[split] = (x, torch.where(y == number % 3, (y + 1) % 3, y))
    return data


def balanced(**options):
    """Clients with as many samples of each class."""
    data = toy_data((24, 39, 15), **options)
    for splits in data.tensors.values():
        for split, (x, y) in splits.items():
            splits[split] = (x, torch.arange(len(y)) % 3)
    return data


# -- the sheet's numbers and its two losses ------------------------------------------------------------------------------
def test_the_sheets_number():
    found = F.cross_entropy(torch.zeros(1, 2) + log_counts([100, 1], 2), torch.tensor([1]))
    assert float(found) == pytest.approx(4.6151205, abs=1e-6)


def test_classes_that_a_client_lacks_are_not_pushed():
    logits = torch.randn(8, 4, requires_grad=True)
    labels = torch.tensor([0, 2, 2, 0, 0, 2, 0, 0])
    loss = F.cross_entropy(logits + log_counts([7, 0, 3], 4), labels) - F.cross_entropy(logits, labels)
    assert torch.isfinite(loss)
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits + log_counts([7, 0, 3], 4), labels), logits)
    assert not gradient[:, [1, 3]].any()
    assert gradient[:, [0, 2]].all()


def visit(state, own, data, client, *, lr, round):
    """A visit in plain torch: each batch two losses, two optimizers, features of before the first step."""
    counts = torch.bincount(data.tensors[client]["train"][1], minlength=3)
    body = [state["net.0.weight"], state["net.0.bias"]]
    body, generic, own = (
        [v.clone().requires_grad_() for v in part]
        for part in (body, [state[f"{HEAD}.weight"], state[f"{HEAD}.bias"]], own)
    )
    one, two = torch.optim.SGD([*body, *generic], lr=lr), torch.optim.SGD(own, lr=lr)
    for x, y in batches(data, client, round=round):
        z = torch.relu(x @ body[0].T + body[1])
        g = z @ generic[0].T + generic[1]
        p = g.detach() + z.detach() @ own[0].T + own[1]
        held = counts > 0
        parts = torch.where(held, counts * g.exp(), torch.zeros_like(g))  # n_c exp(g_c) over their sum
        balanced_loss = -(parts.gather(1, y[:, None])[:, 0] / parts.sum(1)).log().mean()
        one.zero_grad()
        two.zero_grad()
        (gradients, personal) = (
            torch.autograd.grad(balanced_loss, [*body, *generic]),
            torch.autograd.grad(F.cross_entropy(p, y), own),
        )
        for parameter, gradient in zip([*body, *generic, *own], [*gradients, *personal], strict=True):
            parameter.grad = gradient
        one.step()
        two.step()
    names = ["net.0.weight", "net.0.bias", f"{HEAD}.weight", f"{HEAD}.bias"]
    return dict(zip(names, [v.detach() for v in (*body, *generic)], strict=True)), [v.detach() for v in own]


@pytest.mark.parametrize("init", ["copy", "zeros"])
def test_federations_by_hand(init):
    module, data = Toy("sgd", lr=0.3), skewed()
    trainer, spy = spied(module, data, [FedRoD(init=init)], max_rounds=3, participation=2)
    first = spy.messages[0].state
    start = [first[f"{HEAD}.weight"], first[f"{HEAD}.bias"]]
    own = dict.fromkeys(SIZES, start if init == "copy" else [0 * v for v in start])
    for number in range(3):
        sent = first if number == 0 else spy.rounds[number - 1]
        for client, update in spy.of_round(number).items():
            expected, own[client] = visit(sent, own[client], data, client, lr=0.3, round=number)
            close(update.state, expected, atol=2e-6)
            kept = spy.records[number][client].personal
            for n, value in zip(("weight", "bias"), own[client], strict=True):
                close({n: kept[f"{OWN}.{n}"]}, {n: value}, atol=2e-6)
        mean = mean_of(spy.of_round(number), {client: float(size) for client, size in SIZES.items()})
        close({name: spy.rounds[number][name] for name in mean}, mean)
    visited = [client for client in SIZES if any(client in spy.of_round(number) for number in range(3))]
    for client in visited:
        used, last = deployed(trainer, client), global_state(trainer)
        for n, value in zip(("weight", "bias"), own[client], strict=True):
            close({n: used[f"{HEAD}.{n}"]}, {n: last[f"{HEAD}.{n}"] + value}, atol=2e-6)


# -- invariants ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", MAKES)
def test_with_equal_classes_the_shared_part_is_fedavgs(make):
    module, data = make(), balanced()
    plain = global_state(federate(module, data, [FedAvg()], max_rounds=3))
    ours = global_state(federate(module, data, [FedRoD()], max_rounds=3))
    same({name: ours[name] for name in plain}, plain)


def test_the_server_does_not_depend_on_personal_heads():
    module, data = NormNet("momentum"), skewed()
    one, other = (global_state(federate(module, data, [FedRoD(init=init)], max_rounds=3)) for init in ("copy", "zeros"))
    names = [name for name in one if not name.startswith(OWN)]
    same({name: one[name] for name in names}, {name: other[name] for name in names})
    plain = global_state(federate(module, data, max_rounds=3))
    assert differs(plain, one)


def test_each_loss_has_gradients_of_its_own_parameters():
    """With lr 0 for one part the other moves as it does with it."""
    module = FedRoD().wrap_module(Toy(), "0")
    _, head = personal_head(module)
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    z = torch.relu(module.net[0](x))
    generic = module.net[3](z)
    two = F.cross_entropy(generic.detach() + head.personal(z.detach()), y)
    one = F.cross_entropy(generic + log_counts([5, 1, 2], 3), y)
    parameters = dict(module.named_parameters())
    for loss, personal in ((one, False), (two, True)):
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        moved = {name for name, g in zip(parameters, gradients, strict=True) if g is not None and g.any()}
        assert moved == {name for name in parameters if name.startswith(OWN) == personal}


def test_a_personal_head_of_zeros_changes_no_prediction_and_a_sum_is_the_sum():
    x = torch.randn(5, 6)
    plain = Toy()
    module = FedRoD(init="zeros").wrap_module(Toy(), "0")
    module.load_state_dict({**module.state_dict(), **plain.state_dict()})
    before = module(x)
    add_personal_head(module)
    assert torch.equal(module(x), before)
    _, head = personal_head(module)
    nn.init.normal_(head.personal.weight)
    z = torch.relu(module.net[0](x))
    total = module(x) + head.personal(z)
    add_personal_head(module)
    torch.testing.assert_close(module(x), total)
    assert not any(p.any() for p in head.personal.parameters())
    left = unmix(module)
    assert type(left) is Toy
    assert left.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(left(x), total)


def test_the_personal_head_and_the_counts_never_travel():
    trainer, spy = spied(NormNet("adam"), skewed(), [FedRoD()], max_rounds=2)
    for item in (*spy.messages, *spy.updates):
        assert not any(name.startswith(OWN) for name in item.state)
        assert item.extras == {}
    assert set(spy.updates[0].state) == set(module_state(NormNet()))
    plain = federate(NormNet("adam"), skewed(), max_rounds=2)
    assert (trainer.server.costs.bytes_up, trainer.server.costs.bytes_down) == (
        plain.server.costs.bytes_up,
        plain.server.costs.bytes_down,
    )


# -- what is deployed ------------------------------------------------------------------------------------------------------
def test_stage_g_scores_the_generic_model_and_l1_the_sum(tmp_path):
    trainer = federate(
        Toy("sgd", lr=0.3), skewed(), [FedRoD(), GlobalCheckpoint(), LocalCheckpoint()], tmp_path, max_rounds=3
    )
    generic = trainer.server.global_module()
    x = torch.randn(7, 6)
    last = global_state(trainer)
    z = torch.relu(generic.net[0](x))
    assert torch.equal(generic(x), F.linear(z, last[f"{HEAD}.weight"], last[f"{HEAD}.bias"]))
    assert differs(module_state(generic), deployed(trainer, "0"))
    for path, module in (("global", generic), ("clients/1", trainer.module("1"))):
        loaded = fedlightning.load(trainer.run.path / f"checkpoints/{path}.ckpt", trust=["tests.helpers"])
        assert torch.equal(loaded(x), module(x))
    stages = {row["stage"] for row in trainer.results}
    assert stages >= {"G", "L1"}


def test_without_common_statistics_there_is_no_generic_model():
    trainer = federate(NormNet(), skewed(), [FedRoD()], max_rounds=1, float_buffers="local")
    assert trainer.server.global_module() is None


def test_personal_is_better_at_home_and_generic_elsewhere():
    data = skewed({"0": 120, "1": 120, "2": 120}, test=60)
    trainer = federate(Toy("sgd", lr=0.2), data, [FedRoD()], max_rounds=8, local_epochs=3)
    generic = trainer.server.global_module().eval()
    home, away, generic_away = [], [], []
    for client in data.tensors:
        own = trainer.module(client).eval()
        for other, splits in data.tensors.items():
            x, y = splits["test"]
            score = float((own(x).argmax(1) == y).float().mean())
            (home if other == client else away).append(score)
            if other != client:
                generic_away.append(float((generic(x).argmax(1) == y).float().mean()))
    assert sum(home) / len(home) > sum(away) / len(away)
    assert sum(generic_away) / len(generic_away) > sum(away) / len(away)


def test_who_never_trained_deploys_the_generic_model():
    trainer, spy = spied(Toy("sgd"), skewed(), [FedRoD()], max_rounds=1, participation=1)
    (visited,) = spy.of_round(0)
    for client in SIZES:
        used = {
            n: v for n, v in deployed(trainer, client).items() if n.startswith(f"{HEAD}.") and not n.startswith(OWN)
        }
        now = {n: global_state(trainer)[n] for n in used}
        assert differs(used, now) == (client == visited)


def test_absent_clients_keep_their_heads_and_resumed_is_uninterrupted(tmp_path):
    _, spy = spied(Toy("adam"), skewed(), [FedRoD()], max_rounds=4, participation=1)
    absent_clients_rest(spy)
    whole, _, again = cut_and_resumed(tmp_path, NormNet("adam"), skewed(), lambda: [FedRoD()], max_rounds=3)
    for client in SIZES:
        same(deployed(whole, client), deployed(again, client))
    same(global_state(whole), global_state(again))


def test_any_style_of_step_and_mixed_precision():
    trained = federate(PiecesStyle("adam"), skewed(), [FedRoD()], max_rounds=2, precision="bf16-mixed")
    assert all(torch.isfinite(v).all() for c in SIZES for v in deployed(trained, c).values())


def test_composes_with_terms_and_server_optimizers():
    for others in ([FedProx(0.5)], [SCAFFOLD(weighting=None)], [FedAdam()]):
        trainer = federate(Toy("sgd"), skewed(), [FedRoD(), *others], max_rounds=2)
        assert all(torch.isfinite(v).all() for v in global_state(trainer).values())


# -- refusals ------------------------------------------------------------------------------------------------------------
class TwoLayers(Toy):
    def make(self, hidden, dropout):
        return nn.Sequential(nn.Linear(6, hidden), nn.Sequential(nn.ReLU(), nn.Linear(hidden, 3)))


class Tied(LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.fc = nn.Linear(3, 3), nn.Linear(3, 3)
        self.fc.weight = self.first.weight

    def forward(self, x):
        return self.fc(torch.relu(self.first(x[:, :3])))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Squares(Toy):
    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]), F.one_hot(batch[1], 3).float())


class Smoothed(Toy):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1], label_smoothing=0.2)


@pytest.mark.parametrize(
    ("module", "options", "match"),
    [
        (TwoLayers(), {"head": "net.1"}, "to a plain nn.Linear, but the head `net.1` of TwoLayers is a Sequential"),
        (NormNet(), {"head": "net.1"}, "is a BatchNorm1d"),
        (Tied(), {"head": "fc"}, "of Tied shares its weight with `first.weight`"),
        (Squares(), {}, "is defined for the cross entropy, and the loss of Squares is not a cross entropy"),
        (
            Classifier(MLP(6, [4], 1), num_classes=2),
            {},
            r"a logit for each class, but `net.fc2` of Classifier gives \(8, 1\)",
        ),
    ],
)
def test_other_heads_and_losses_are_refused(module, options, match):
    data = toy_data()
    if isinstance(module, Classifier):
        data.tensors = {
            c: {s: (x, y.clamp_max(1)) for s, (x, y) in splits.items()} for c, splits in data.tensors.items()
        }
    with pytest.raises(ValueError, match=match):
        federate(module, data, [FedRoD(**options)])


@pytest.mark.parametrize("other", [FedPer(), FedBN(), FENDA(head="net.3"), FedRep(weighting=None)], ids=lambda c: c.key)
def test_other_splits_are_refused(other):
    with pytest.raises(ValueError, match=r"FedRoD (adds|shares|trains)|the head"):
        federate(NormNet(), skewed(), [FedRoD(head="net.3"), other])


def test_what_is_inexact_is_said():
    with pytest.warns(UserWarning, match="that of Smoothed is weighted or smoothed already"):
        federate(Smoothed(), skewed(), [FedRoD()], max_rounds=1)
    with pytest.warns(UserWarning, match=r"clipping by the norm \(gradient_clip_val\) sees the gradients of both"):
        federate(Toy(), skewed(), [FedRoD()], max_rounds=1, gradient_clip_val=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        federate(Toy(), skewed(), [FedRoD()], max_rounds=1, gradient_clip_val=1.0, gradient_clip_algorithm="value")


def test_senseless_settings_are_refused():
    with pytest.raises(ValueError, match="FedRoD got init="):
        FedRoD(init="random")


@pytest.mark.parametrize(
    "make", [lambda: FedRoD(head="net.3"), lambda: GPFL(head="net.3", num_classes=3)], ids=["FedRoD", "GPFL"]
)
def test_classes_are_counted_where_the_data_do_not_tell_them(make, monkeypatch):
    torch.manual_seed(0)
    models = [federate(Toy(), toy_data(), [make()], max_rounds=2).server.model]
    monkeypatch.setattr(ToyData, "class_counts", lambda self, client, split="train": None)
    torch.manual_seed(0)
    models.append(federate(Toy(), toy_data(), [make()], max_rounds=2).server.model)
    same(*models)
