"""Means by class under SampleDP: what one sample moves, their noise, what they spend, and the methods that send them."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

pytest.importorskip("opacus", reason="SampleDP counts with Opacus: pip install opacus cryptography")

from fedlightning.algorithm import Extra, FederatedCallback, Wire
from fedlightning.callbacks import FD, MOON, FedAvg, FedProto, SampleDP, sample_dp
from fedlightning.callbacks.sample_dp import SURE, released_means, sums_by_class
from fedlightning.callbacks.shared.ledger import Ledger
from fedlightning.datamodules import LoaderDataModule
from fedlightning.engines.attempts import FederationError
from tests.callbacks.test_sample_dp import SIZES, Cut, Shaken, dp, module
from tests.helpers import Toy, federate, make_trainer, samples, toy_data

pytestmark = [
    pytest.mark.filterwarnings("ignore:SampleDP"),
    pytest.mark.filterwarnings("ignore:Optimal order"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]
METHODS = [FedProto(), FD(output_pass="after", head="net")]


def drawn(count=60, width=4, scale=3.0):
    draw = torch.Generator().manual_seed(0)
    return scale * torch.randn(count, width, generator=draw), torch.randint(0, 3, (count,), generator=draw)


@pytest.mark.parametrize("vector", [torch.full((4,), 1e6), torch.zeros(4), torch.full((4,), torch.nan)], ids=str)
@pytest.mark.parametrize("clip", [0.5, 5.0])
def test_one_sample_moves_sums_and_counts_by_the_square_root_of_two_at_most(vector, clip):
    z, labels = drawn()
    one = sums_by_class([(z, labels)], 3, clip)
    more = torch.cat([z[30:], vector[None]]), torch.cat([labels[30:], labels[:1]])
    two = sums_by_class([(z[:30], labels[:30]), more], 3, clip)
    moved = math.sqrt(sum(float((one[name] - two[name]).square().sum()) for name in one))
    assert moved <= math.sqrt(2.0) + 1e-9


def test_without_noise_they_are_the_means_of_clipped_vectors():
    z, labels = drawn()
    cut = z * (2.0 / z.norm(dim=1, keepdim=True)).clamp(max=1.0)
    found = released_means(sums_by_class([(z, labels)], 4, 2.0), 2.0, 1e-9, "s", "a")
    assert list(found) == [0, 1, 2]
    for label, mean in found.items():
        assert torch.allclose(mean.float(), cut[labels == label].mean(0), atol=1e-5)


def test_the_noise_has_its_deviation_and_a_class_that_may_not_be_there_is_not_sent():
    exact = {
        "sums": torch.zeros(2, 20_000, dtype=torch.float64),
        "counts": torch.tensor([1e9, 0.0], dtype=torch.float64),
    }
    found = released_means(exact, 0.5, 3.0, "s", "a")
    assert list(found) == [0]
    assert float(found[0].std()) * 1e9 == pytest.approx(0.5 * 3.0 * math.sqrt(2.0), rel=0.03)
    other = released_means(exact | {"sums": exact["sums"] + 1e-6}, 0.5, 3.0, "s", "a")
    assert abs(float(torch.corrcoef(torch.stack([found[0], other[0]]))[0, 1])) < 0.05


def test_the_noisy_count_alone_decides_what_is_sent_and_divides():
    """The exact one would tell whether a sample is there."""
    std, noise = math.sqrt(2.0), 1.0
    exact = {"sums": torch.full((1, 5000), 60.0, dtype=torch.float64), "counts": torch.tensor([SURE * std + 1e-9])}
    sent = [released_means(exact, 1.0, noise, "s", f"{one}") for one in range(60)]
    assert 15 < sum(bool(means) for means in sent) < 45
    counts = torch.tensor([60.0 / float(means[0].mean()) for means in sent if means])
    assert counts.std() > 0.3 and float(counts.min()) > SURE * std - 0.1


def test_a_release_is_in_the_ledger_at_its_full_rate(tmp_path):
    callback = dp(means_noise=2.0, ledger=str(tmp_path / "ledger"))
    federate(module(), toy_data({"0": 24, "1": 24}), [FedProto(), callback], max_rounds=1)
    with Ledger(callback.ledger, "0", "").hold(None) as steps:
        assert (2.0, 1.0, 1) in {tuple(one) for one in steps}


def test_other_means_of_a_visit_that_is_done_again_count_again(tmp_path):
    data = Shaken(toy_data({"0": 24, "1": 24}).tensors)
    for rounds, cut in ((1, False), (2, True), (2, False)):
        callbacks = [FedProto(), dp(noise_seed=None, ledger=str(tmp_path / "ledger")), *([Cut()] if cut else [])]
        trainer = make_trainer(tmp_path, callbacks, max_rounds=rounds, name="a")
        with pytest.raises(KeyboardInterrupt) if cut else nullcontext():
            trainer.fit(module(), datamodule=data, resume="last" if rounds > 1 else None)
    visits = json.loads((tmp_path / "ledger" / "0.json").read_text())["runs"].values()
    assert sorted(noise for ((noise, *_),) in visits) == [1.0] * 3 + [10.0] * 3


@pytest.mark.parametrize("method", METHODS, ids=lambda one: one.key)
def test_a_release_is_counted_and_told(tmp_path, method):
    callback = dp(noise_seed=None, means_noise=2.0)
    trainer = make_trainer(tmp_path, [method, callback], max_rounds=2)
    trainer.fit(module(), datamodule=toy_data(SIZES))
    told = json.loads((trainer.run.path / "privacy.json").read_text())
    steps = trainer.store.get("0").state["SampleDP"]["history"]
    assert steps == [[1.0, 1 / 3, 6], [2.0, 1.0, 2]]
    assert told["epsilon_by_client"]["0"] == pytest.approx(callback.epsilon_of(steps), rel=1e-5)
    assert {"'classes' of " + method.key + " (in each visit)"} <= set(told["noised"])
    assert not [text for text in told["in_the_clear"] if method.key in text]


def test_nobody_who_is_in_no_class_by_chance_breaks_a_round():
    """With much noise no class is sent at all."""
    for method in METHODS:
        trainer = federate(module(), toy_data(SIZES), [method, dp(means_noise=1e4)], max_rounds=2)
        assert trainer.rounds_done == 2 and not trainer.server.failures


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        (FedProto(proto_pass="during"), {}, "FedProto has proto_pass='during'"),
        (FedProto(weighting="samples"), {}, "FedProto takes counts from clients"),
        (FD(), {}, "FD has output_pass='during'"),
        (FD(output_pass="after"), {}, "Name the nn.Sequential that ends with this layer as head"),
        (FedProto(), {"unit": "patient"}, "unit='patient' does not cover them"),
        (FedProto(), {"noise_multiplier": None, "epsilon": 3.0}, "release means by class too"),
        (MOON(), {}, "MOON adds a term to the loss that may couple"),
    ],
    ids=str,
)
def test_what_is_not_covered_is_refused(method, options, reason):
    with pytest.raises(ValueError, match=reason):
        federate(module(), toy_data(SIZES), [method, dp(**options)], max_rounds=1)


def test_a_budget_that_has_no_room_for_a_release_is_not_exceeded(tmp_path):
    free = SampleDP(delta=1e-3, noise_multiplier=1.0)
    epsilon = free.epsilon_of([(1.0, 1 / 3, 6), (2.0, 1.0, 2)]) * 1.001  # of the client with the fewest batches
    trainer = make_trainer(tmp_path, [FedProto(), dp(means_noise=2.0, epsilon=epsilon)], max_rounds=9)
    trainer.fit(module(), datamodule=toy_data({"0": 24, "1": 24}))
    assert trainer.rounds_done == 2 and max(trainer.server.state["SampleDP"]["epsilon"].values()) <= epsilon


class OwnMeans(FederatedCallback):
    """Sends means by class that it has made of what a step has left on the module, as FedProto does without SampleDP."""

    def wire(self, module):
        return Wire(up={"means": Extra((-1, -1), by_class=True), "classes": Extra((-1,), whole=True, by_class=True)})

    def on_send(self, client, update):
        update.extras[self.key] = self.made(client)

    def made(self, client):
        return {"means": client.module.seen[None]}


class OwnClasses(OwnMeans):
    def made(self, client):
        return {"classes": torch.tensor([1])}


class LeavesMeans(Toy):
    def training_step(self, batch, batch_idx):
        self.seen = batch[0].detach().mean(0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [OwnMeans, OwnClasses])
def test_means_that_a_method_has_made_itself_do_not_leave(kind):
    """They were taken for covered, because they were declared as means by class."""
    with pytest.raises(FederationError, match=rf"of {kind.__name__} holds means by class that no noise covers"):
        federate(module(LeavesMeans), toy_data({"0": 24, "1": 24}), [FedAvg(), dp(), kind()], max_rounds=1)


@pytest.mark.parametrize("kind", ["left out", "drawn twice"])
def test_each_sample_counts_once_whatever_the_loader_leaves_out_or_repeats(kind, monkeypatch):
    """One sample moved others out of the last batch, or was drawn several times: up to seven, where noise is for 1.41."""
    x, y = samples("0", "train", 20)
    held, exact = TensorDataset(x, y), []
    sampler = RandomSampler(held, replacement=True) if kind == "drawn twice" else None
    loader = DataLoader(held, batch_size=8, sampler=sampler, shuffle=sampler is None, drop_last=sampler is None)

    def noted(*given):
        exact.append(sums_by_class(*given))
        return exact[-1]

    monkeypatch.setattr(sample_dp, "sums_by_class", noted)
    federate(module(), LoaderDataModule({"0": loader}), [FedProto(), dp()], max_rounds=1)
    assert exact[0]["counts"].tolist() == torch.bincount(y, minlength=3).tolist()


def test_a_release_is_not_named_by_the_data_alone(tmp_path):
    """Its name stands in the run's folder: a hash of the exact sums told which of two data sets they are of."""
    names = []
    for run in ("a", "b"):
        callback = dp(noise_seed=None, noise_multiplier=1e-6, clip=1e-9)
        make_trainer(tmp_path, [FedProto(lam=0.0), callback], max_rounds=1, name=run).fit(
            module(), datamodule=toy_data(SIZES)
        )
        (file,) = (tmp_path / run).rglob("clients/0/privacy.json")
        names.append({name.partition(" ")[2] for name in json.loads(file.read_text())["runs"]})
    assert not names[0] & names[1]
