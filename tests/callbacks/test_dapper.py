"""Dapper: sheet A 32, second part."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from fedlightning.callbacks import Dapper, FedAvg, LocalAdaptation
from fedlightning.contract import FederatedCallback
from fedlightning.seeding import generator
from fedlightning.tensors import module_state
from tests.callbacks.common import MAKES, SIZES, batches, cut_and_resumed, deployed
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import NormNet, Toy, ToyData, close, differs, federate, global_state, same, samples, spied, toy_data

CASES = {
    "Dapper": Case(
        Dapper(), skip={**NO_PLAIN_FORM, "identical_clients": "every client draws public samples of its own"}
    ),
    "Dapper alone": Case(Dapper(grid=[1.0]), skip=NO_PLAIN_FORM),
}
KEPT = {
    "Dapper": Kept("Dapper", client=("lam", "model"), phases=("adapt-1.0", "fit"), options={"grid": [1.0]}),
}


class WithPublic(ToyData):
    """Toy data beside `public` samples that no client holds."""

    public_count = 30

    def public_dataloader(self):
        return DataLoader(TensorDataset(*samples("public", "train", self.public_count)), batch_size=self.batch_size)


class Endless(IterableDataset):
    def __iter__(self):
        yield from zip(*samples("public", "train", 8), strict=True)


class Streamed(ToyData):
    def public_dataloader(self):
        return DataLoader(Endless(), batch_size=self.batch_size)


def with_public(sizes=SIZES, **options):
    data = toy_data(sizes, **options)
    return WithPublic(data.tensors, batch_size=8)


@pytest.mark.parametrize("make", MAKES)
def test_share_one_is_local_adaptation(make):
    module, options = make(), {"max_rounds": 2, "local_epochs": 2}
    ours = federate(module, toy_data(SIZES), [Dapper(grid=[1.0])], **options)  # no public data needed
    theirs = federate(module, toy_data(SIZES), [LocalAdaptation(epochs=1)], **options)
    beside = federate(module, with_public(), [Dapper(grid=[1.0])], **options)
    for client in SIZES:
        same(deployed(ours, client), deployed(theirs, client))
        same(deployed(beside, client), deployed(theirs, client))


class Still:
    """Returns a loss without slope in the rounds, so that only adaptation moves the model."""

    idle = True

    def training_step(self, batch, batch_idx):
        return 0.0 * sum(p.sum() for p in self.parameters()) if self.idle else super().training_step(batch, batch_idx)


class StillToy(Still, Toy):
    pass


class StillNorm(Still, NormNet):
    pass


class WakeForAdaptation(FederatedCallback):
    def on_visit_start(self, client):
        client.module.idle = client.message.tag != "Dapper"


@pytest.mark.parametrize("make", [lambda: StillToy("adam", dropout=0.2), lambda: StillNorm("momentum")])
def test_share_zero_does_not_depend_on_the_clients_own_samples(make):
    """A stranger's samples in place of the clients' own: even the running statistics are the same."""
    module, data = make(), with_public({"0": 24, "1": 24})
    other = copy.copy(data)
    other.tensors = {c: {**data.tensors[c], "train": samples("stranger", "train", 24)} for c in data.tensors}
    for lam in (0.0, 0.5):
        callbacks = [Dapper(grid=[lam]), WakeForAdaptation()]
        one, two = (federate(module, held, callbacks, max_rounds=1) for held in (data, other))
        for client in ("0", "1"):
            assert differs(deployed(one, client), global_state(one))
            assert differs(deployed(one, client), deployed(two, client)) == (lam > 0)


def by_hand(module, data, client, w, number, lam, ratio, lr):
    """Adapt a copy of `w` in plain torch: gradients of the two batches apart, then their mean by `lam`."""
    x_public, y_public = samples("public", "train", data.public_count)
    size, held = 8, len(data.tensors[client]["train"][1])
    count = min(max(size, round(ratio * held)), data.public_count)
    subset = torch.randperm(data.public_count, generator=generator(0, number, client, "public"))[:count]

    def stream():
        lap = 0
        while True:
            order = subset[torch.randperm(count, generator=generator(0, number, client, f"public-{lap}"))]
            for start in range(0, count - size + 1, size):
                yield x_public[order[start : start + size]], y_public[order[start : start + size]]
            lap += 1

    model, public = copy.deepcopy(module), stream()
    model.load_state_dict(w)
    model.train()
    for x, y in batches(data, client, round=number, phase="adapt"):
        two = []
        for inputs, labels in ((x, y), next(public)):
            model.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            two.append([p.grad.clone() for p in model.parameters()])
        with torch.no_grad():
            for p, own, common in zip(model.parameters(), *two, strict=True):
                p -= lr * (lam * own + (1 - lam) * common)
    x, y = data.tensors[client]["val"]
    model.eval()
    return module_state(model), float(F.cross_entropy(model(x), y).detach())


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_the_choice_and_the_copies_by_hand(ratio):
    module, data, grid = Toy("sgd", lr=0.2), with_public(), (0.0, 0.3, 0.9)
    trainer, _ = spied(module, data, [Dapper(grid=grid, ratio=ratio)], max_rounds=2, local_epochs=2)
    same(global_state(trainer), global_state(federate(module, data, [FedAvg()], max_rounds=2, local_epochs=2)))
    chosen = set()
    for client in SIZES:
        found = {lam: by_hand(module, data, client, global_state(trainer), 2, lam, ratio, 0.2) for lam in grid}
        best = min(found, key=lambda lam: found[lam][1])
        kept = trainer.store.get(client).state["Dapper"]
        assert kept["lam"] == best
        close(deployed(trainer, client), found[best][0], atol=2e-6)
        chosen.add(best)


def test_running_statistics_are_mixed_as_the_losses_are():
    """One step, momentum 0.1: 0.9 old + 0.1 (lam own + (1 - lam) public)."""
    module, data, lam = StillNorm("sgd"), with_public({"0": 8}), 0.3
    data.public_count = 8
    trainer = federate(module, data, [Dapper(grid=[lam]), WakeForAdaptation()], max_rounds=1)
    first, after = global_state(trainer), deployed(trainer, "0")

    def mean(x):
        return torch.nn.functional.linear(x, first["net.0.weight"], first["net.0.bias"]).mean(0)

    own, public = mean(data.tensors["0"]["train"][0]), mean(samples("public", "train", 8)[0])
    expected = 0.9 * first["net.1.running_mean"] + 0.1 * (lam * own + (1 - lam) * public)
    torch.testing.assert_close(after["net.1.running_mean"], expected, atol=1e-6, rtol=1e-5)
    assert int(after["net.1.num_batches_tracked"]) == int(first["net.1.num_batches_tracked"]) + 1


def test_nothing_of_the_copies_travels():
    module, data = Toy("sgd"), with_public()
    trainer, spy = spied(module, data, [Dapper()], max_rounds=2)
    assert all(item.extras == {} for item in (*spy.messages, *spy.updates))
    plain = federate(module, data, [FedAvg()], max_rounds=2)
    assert trainer.server.costs.bytes_up == plain.server.costs.bytes_up
    assert trainer.server.costs.steps == plain.server.costs.steps
    assert trainer.server.costs.extra_work["fine_tuning_steps"] == 4 * (
        3 + 5 + 2
    )  # shares, and an epoch of each client


def test_resumed_is_uninterrupted(tmp_path):
    whole, _, again = cut_and_resumed(tmp_path, NormNet("adam"), with_public(), lambda: [Dapper()], max_rounds=2)
    for client in SIZES:
        same(deployed(again, client), deployed(whole, client))


class Manual(Toy):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_wrong_use():
    for make, sentence in (
        (lambda: Dapper([]), r"Dapper got grid=\[\]"),
        (lambda: Dapper([0.5, 0.5]), "all different, each a number.*Shares of the own data"),
        (lambda: Dapper([0.5, 1.5]), r"grid=\[0.5, 1.5\]. Use a list of .*, each a number in \[0, 1\]"),
        (lambda: Dapper(ratio=0.0), "ratio=0.0"),
        (lambda: Dapper(epochs=0), r"epochs=0. Use a whole number in \[1, inf\)"),
        (lambda: Dapper(choose_on="test"), "choose_on='test'. Use 'val' or 'train'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make()
    with pytest.raises(ValueError, match=r"the data module has none. Set public=0.1"):
        federate(Toy(), toy_data(SIZES), [Dapper()])
    with pytest.raises(
        ValueError, match=r"public_dataloader gives an iterable Endless, but clients draw .* by their index"
    ):
        federate(Toy(), Streamed(toy_data(SIZES).tensors, batch_size=8), [Dapper()])
    with pytest.raises(ValueError, match=r"no client has any\. Set val_fraction"):
        federate(Toy(), with_public(val=0), [Dapper()])
    with pytest.raises(ValueError, match="Manual optimizes manually"):
        federate(Manual(), with_public(), [Dapper()])


def test_a_client_that_cannot_choose_deploys_the_global_model():
    """Its validation loss is not a number with any share."""
    data = with_public()
    x, y = data.tensors["1"]["val"]
    data.tensors["1"] = {**data.tensors["1"], "val": (torch.full_like(x, torch.nan), y)}
    with pytest.warns(UserWarning, match="The loss of client '1' is not finite after adaptation with any lam"):
        trainer = federate(Toy("sgd"), data, [Dapper()], max_rounds=1)
    same(deployed(trainer, "1"), global_state(trainer))
    assert "lam" not in trainer.store.get("1").state["Dapper"]
    assert all(differs(deployed(trainer, client), global_state(trainer)) for client in "02")


def test_a_client_without_validation_data_chooses_on_its_training_data():
    data = with_public()
    x, y = data.tensors["1"]["val"]
    data.tensors["1"] = {**data.tensors["1"], "val": (x[:0], y[:0])}
    module = Toy("sgd")
    found = [federate(module, data, [Dapper(choose_on=split)], max_rounds=1) for split in ("val", "train")]
    same(*(deployed(trainer, "1") for trainer in found))
    assert found[0].store.get("1").state["Dapper"]["lam"] in Dapper().grid
