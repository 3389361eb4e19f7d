"""FedLC: sheet entry C7."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch.nn import functional as F

from fedlightning.callbacks import MOON, SCAFFOLD, FedAvg, FedLC, FedPer, FedProx, FedSAM
from fedlightning.callbacks.fedlc import calibrated_loss
from fedlightning.callbacks.shared.logit_calibration import kind_of_loss
from fedlightning.engines.attempts import FederationError
from fedlightning.tensors import module_state
from fedlightning.testing.pairs import check_pair
from tests.callbacks.common import MAKES, batches, cut_and_resumed
from tests.conformance.case import Case, Kept
from tests.helpers import (
    CLASSES,
    NetStyle,
    NormNet,
    Toy,
    ToyData,
    close,
    differs,
    federate,
    global_state,
    same,
    spied,
    toy_data,
)

CASES = {
    "FedLC": Case(FedLC(head="head"), neutral=FedLC(tau=0.0)),
    "FedLC printed": Case(FedLC(tau=0.1, exclude_true=True, head="head"), neutral=FedLC(tau=0.0)),
}
KEPT = {"FedLC": Kept("FedLC", options={"head": "net.3"})}


def skewed():
    """Clients with all classes, with two of the three, and with counts that differ much."""
    data = toy_data((24, 40, 16))
    for client, classes in (("1", [0, 2]), ("2", [1, 1, 1, 2])):
        for x, y in [data.tensors[client]["train"]]:
            y.copy_(torch.tensor(classes * 20)[: len(x)])
    return data


def counts_of(data, client):
    return torch.bincount(data.tensors[client]["train"][1], minlength=CLASSES)


def brute(logits, labels, counts, tau, printed):
    """The formulas, sample by sample, in plain Python; absent classes have no part in any sum."""
    terms = []
    for row, y in zip(logits.double().tolist(), labels.tolist(), strict=True):
        f = {c: z - tau * n**-0.25 for c, (z, n) in enumerate(zip(row, counts, strict=True)) if n}
        below = sum(math.exp(value) for c, value in f.items() if not (printed and c == y))
        terms.append(-math.log(math.exp(f[y]) / below))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("printed", [False, True])
@pytest.mark.parametrize("tau", [0.1, 1.0, 3.0])
def test_the_loss_is_the_papers_formula(tau, printed):
    draw = torch.Generator().manual_seed(1)
    counts = [7, 0, 300, 1, 45]
    logits, labels = 2 * torch.randn(20, 5, generator=draw), torch.tensor([0, 2, 3, 4] * 5)
    found = calibrated_loss(FedLC(tau=tau).calibrated(logits, torch.tensor(counts)), labels, printed)
    assert float(found) == pytest.approx(brute(logits, labels, counts, tau, printed), rel=1e-5)


def test_the_sheets_numbers():
    """(c): ``z = (0, 0)``, ``n = (100, 1)``, ``y = 1``, ``tau = 1``."""
    logits = FedLC().calibrated(torch.zeros(1, 2), torch.tensor([100, 1]))
    assert float(calibrated_loss(logits, torch.tensor([1]))) == pytest.approx(1.09237, abs=1e-5)
    assert float(calibrated_loss(logits, torch.tensor([1]), True)) == pytest.approx(0.68377, abs=1e-5)


def test_rare_classes_must_win_by_more():
    """(e)."""
    shifted = FedLC().calibrated(torch.zeros(1, 5), torch.tensor([1, 2, 10, 100, 1000]))[0]
    assert shifted.tolist() == sorted(shifted.tolist()) and shifted[-1] == 0.0


def test_equal_counts_change_nothing():
    """(b): exactly."""
    logits = torch.randn(4, 3)
    assert torch.equal(FedLC().calibrated(logits, torch.tensor([17, 17, 17])), logits)


def by_hand(module, data, client, start, number, tau, printed=False):
    """A visit of one epoch in plain torch: the calibrated loss in place of the cross entropy."""
    model = copy.deepcopy(module)
    model.load_state_dict(start)
    optimizer, counts = model.configure_optimizers(), counts_of(data, client)
    present = counts > 0
    margin = tau * counts[present].double() ** -0.25
    place = torch.cumsum(present, 0) - 1
    for x, y in batches(data, client, round=number):
        f = model(x)[:, present].double() - margin
        if printed:
            own = F.one_hot(place[y], int(present.sum())).bool()
            loss = (torch.logsumexp(f.masked_fill(own, -torch.inf), 1) - f[own]).mean()
        else:
            loss = F.nll_loss(f.log_softmax(1), place[y])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return module_state(model)


@pytest.mark.parametrize("style", [Toy, NetStyle, NormNet])
@pytest.mark.parametrize("printed", [False, True])
def test_training_is_what_the_formulas_say(style, printed):
    module, data = style("momentum", lr=0.05), skewed()
    method = FedLC(tau=1.5, exclude_true=printed, head="net.3")
    _, spy = spied(module, data, [method], max_rounds=2, participation=2)
    starts = [module.state_dict(), spy.rounds[0]]
    for update in spy.updates:
        expected = by_hand(module, data, update.client, starts[update.round], update.round, 1.5, printed)
        close(update.state, expected, atol=5e-6)


@pytest.mark.parametrize("make", MAKES)
def test_without_strength_it_is_fedavg(make):
    """(a)."""
    module, data = make(), skewed()
    same(*(global_state(federate(module, data, [cb], max_rounds=3)) for cb in (FedAvg(), FedLC(tau=0.0))))
    assert differs(*(global_state(federate(module, data, [cb], max_rounds=3)) for cb in (FedAvg(), FedLC())))


def test_an_absent_class_gets_no_gradient():
    """(d): its row of the head stays as it is, bit for bit, at a client that lacks it."""
    module, data = Toy("momentum"), skewed()
    _, spy = spied(module, data, [FedLC(tau=0.5)], max_rounds=1, local_epochs=2)
    start = module_state(module)
    for update in spy.updates:
        absent = counts_of(data, update.client) == 0
        for name in ("net.3.weight", "net.3.bias"):
            assert torch.equal(update.state[name][absent], start[name][absent])
            assert differs({name: update.state[name][~absent]}, {name: start[name][~absent]})


@pytest.mark.parametrize("printed", [False, True])
def test_a_client_with_one_class_learns_nothing(printed):
    """The printed loss has nothing in its denominator then."""
    module, data = Toy("sgd"), toy_data((8, 16))
    data.tensors["0"]["train"][1].fill_(2)
    _, spy = spied(module, data, [FedLC(exclude_true=printed)], max_rounds=1)
    close(spy.of_round(0)["0"].state, module_state(module), atol=1e-7)
    assert differs(spy.of_round(0)["1"].state, module_state(module))


class Regularised(Toy):
    """Its loss has more than a cross entropy."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0.1 * sum(p.square().sum() for p in self.parameters())


def test_what_else_is_in_the_loss_stays():
    """With equal counts in each client the difference is 0, so that training is FedAvg's."""
    data = toy_data((24, 12))
    for splits in data.tensors.values():
        x, y = splits["train"]
        y.copy_(torch.arange(len(x)) % CLASSES)
    same(*(global_state(federate(Regularised_(), data, [cb], max_rounds=2)) for cb in (FedAvg(), FedLC())))


def Regularised_():
    torch.manual_seed(0)
    return Regularised("sgd")


class NoCounts(ToyData):
    """Data that say nothing of classes."""

    def class_counts(self, client, split="train"):
        return None


def test_labels_are_counted_where_nobody_counted_them():
    module, data = Toy("sgd"), skewed()
    runs = [federate(module, kind(data.tensors), [FedLC()], max_rounds=2) for kind in (ToyData, NoCounts)]
    same(*map(global_state, runs))


class Ignores(Toy):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1], ignore_index=255)


def test_ignored_labels_count_for_nothing():
    """A batch of nothing else has no loss in torch either: the last class of every client is there in each."""
    torch.manual_seed(0)
    module, data = Ignores("sgd"), NoCounts(skewed().tensors)
    before = {client: counts_of(data, client) for client in data.tensors}
    for client, splits in data.tensors.items():
        x, y = splits["train"]
        splits["train"] = (torch.cat([x, x[:3]]), torch.cat([y, torch.full((3,), 255)]))
        assert torch.equal(torch.bincount(splits["train"][1], minlength=256)[:CLASSES], before[client])
    trained = federate(module, data, [FedLC()], max_rounds=1)
    assert all(torch.isfinite(value).all() for value in global_state(trained).values())
    with pytest.raises(FederationError, match="the data of client '0' have 256 classes, its model 3 logits"):
        federate(module, ToyData(data.tensors), [FedLC()], max_rounds=1)


def test_counts_stay_with_the_client_and_nothing_is_kept():
    _, spy = spied(Toy("sgd"), skewed(), [FedLC()], max_rounds=2)
    assert not any(item.extras for item in (*spy.messages, *spy.updates))
    assert not any(record.state for record in spy.records[-1].values())


def test_the_logged_loss_is_the_tasks_and_scores_are_of_plain_logits():
    data = skewed()
    found = [spied(Toy_(), data, [cb], max_rounds=1)[1].updates for cb in (FedAvg(), FedLC(tau=50.0))]
    for plain, update in zip(*found, strict=True):
        assert update.metrics["train_loss"] == pytest.approx(plain.metrics["train_loss"], abs=1e-6)


def Toy_():
    torch.manual_seed(0)
    return Toy("sgd", lr=0.0)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision(precision):
    module, data = Toy("sgd"), skewed()
    trained = global_state(federate(module, data, [FedLC()], max_rounds=2, precision=precision))
    assert all(torch.isfinite(value).all() for value in trained.values())
    assert differs(trained, global_state(federate(module, data, max_rounds=2, precision=precision)))


@pytest.mark.slow
def test_a_cut_run_goes_on_bit_for_bit(tmp_path):
    whole, _, again = cut_and_resumed(tmp_path, Toy("adam"), skewed(), lambda: [FedLC()], max_rounds=3, participation=2)
    same(global_state(whole), global_state(again))


@pytest.mark.parametrize("other", [FedProx(mu=0.2), SCAFFOLD(), MOON(head="head"), FedSAM()], ids=lambda c: c.key)
def test_the_order_of_the_list_says_nothing(other):
    check_pair(FedLC(head="head"), other)


def test_it_stands_beside_a_private_head():
    federate(Toy("sgd"), skewed(), [FedPer(), FedLC()], max_rounds=1)


# -- which losses ------------------------------------------------------------------------------------------------------


class Loss(Toy):
    """Trains on a loss of the logits."""

    def __init__(self, loss):
        super().__init__("sgd")
        self.loss = loss

    def training_step(self, batch, batch_idx):
        return self.loss(self(batch[0]), batch[1])


def focal(logits, y):
    p = logits.softmax(1).gather(1, y[:, None])[:, 0]
    return -((1 - p).square() * p.log()).mean()


OTHERS = {
    "squares": lambda logits, y: F.mse_loss(logits, F.one_hot(y, 3).float()),
    "focal": focal,
    "sum": lambda logits, y: F.cross_entropy(logits, y, reduction="sum"),
    "twice softmax": lambda logits, y: F.cross_entropy(logits.softmax(1), y),
    "margin": lambda logits, y: F.multi_margin_loss(logits, y),
    "each class": lambda logits, y: F.binary_cross_entropy_with_logits(logits, F.one_hot(y, 3).float()),
    "part": lambda logits, y: 0.5 * F.cross_entropy(logits, y),
    "none": lambda logits, y: 0.0 * logits.sum(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_than_the_cross_entropy_are_refused(name):
    with pytest.raises(
        ValueError, match=r"FedLC changes the logits of a cross entropy, and the loss of Loss is not a mean"
    ):
        federate(Loss(OTHERS[name]), skewed(), [FedLC()], max_rounds=1)
    federate(Loss(OTHERS[name]), skewed(), [FedLC(tau=0.0)], max_rounds=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"weight": torch.tensor([1.0, 3.0, 0.5])}, "class weights"), ({"label_smoothing": 0.1}, "smoothed labels")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weighted_and_smoothed_cross_entropies_are_warned_of(options, words):
    with pytest.warns(UserWarning, match=rf"FedLC adds what changed logits .* Loss has {words}"):
        federate(Loss(lambda logits, y: F.cross_entropy(logits, y, **options)), skewed(), [FedLC()], max_rounds=1)


@pytest.mark.filterwarnings("error:FedLC")
def test_a_log_softmax_in_the_network_is_a_cross_entropy():
    federate(Loss(lambda logits, y: F.nll_loss(logits.log_softmax(1), y)), skewed(), [FedLC()], max_rounds=1)


def test_a_batch_without_labels_of_any_class_says_nothing():
    assert kind_of_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.tensor([-100, -100])) == "plain"


class OneLogit(Toy):
    def __init__(self):
        super().__init__("sgd")
        self.net[3] = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return F.binary_cross_entropy_with_logits(self(batch[0])[:, 0], (batch[1] > 0).float())


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match="tau=-1"):
        FedLC(tau=-1)
    with pytest.raises(ValueError, match=r"FedLC needs a logit for each class of every sample, .* rows of 1 for"):
        federate(OneLogit(), skewed(), [FedLC()])
    numbers = skewed()
    for splits in numbers.tensors.values():
        splits["train"] = (splits["train"][0], torch.rand(len(splits["train"][0])))
    with pytest.raises(ValueError, match="FedLC needs one class label a sample, a whole number"):
        federate(Loss(lambda logits, y: logits[:, 0].sub(y).square().mean()), numbers, [FedLC()])
    with pytest.raises(ValueError, match=r"FedLC cannot see the features of Toy: .*Set head="):
        federate(Toy(), skewed(), [FedLC(head="nothing")])


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ([[9, 0, 0], [0, 9, 0]], True),
        ([[9, 9, 0], [0, 9, 9]], False),
        ([[9, 9, 9], [1, 9, 9]], False),
        ([None, None], False),
    ],
)
def test_absent_classes_are_told_of_at_the_start(counts, told, monkeypatch):
    known = dict(zip("01", counts, strict=True))
    monkeypatch.setattr(ToyData, "class_counts", lambda self, client, split="train": known[client])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federate(Toy(), toy_data((8, 8)), [FedLC()], max_rounds=1)
    said = [str(one.message) for one in caught if "does not have" in str(one.message)]
    assert len(said) == told and all("2 of 2 clients lack some of 3 (client '0' has 1)" in text for text in said)
