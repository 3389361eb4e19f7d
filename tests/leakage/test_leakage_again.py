"""Attacks that train again: likelihood ratio, canaries, and images from a gradient."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import beta, binom
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.callbacks import ClientDP, FedAvg, SampleDP
from fedlightning.cli import main
from fedlightning.datamodules.loaders import LoaderDataModule
from fedlightning.leakage import canaries, describe_attacks, inversion, likelihood_ratio
from fedlightning.leakage.audit import canaries_for, epsilon_bound, p_value, power_of
from fedlightning.leakage.gradients import distance, psnr
from fedlightning.leakage.likelihood_ratio import confidence, standing_out
from fedlightning.models import Classifier
from tests.datamodules.test_agreed_statistics import stays, write_table
from tests.helpers import Toy, federate, toy_data

pytest.importorskip("opacus")


def module(hidden=64):
    torch.manual_seed(0)
    return Toy("adam", lr=0.02, hidden=hidden)


def by_heart(sizes, test=40):
    """Random labels: there is nothing to learn but the samples themselves."""
    draw = torch.Generator().manual_seed(0)

    def loaders(counts):
        return {
            name: DataLoader(
                TensorDataset(torch.randn(count, 6, generator=draw), torch.randint(0, 3, (count,), generator=draw)),
                batch_size=16,
            )
            for name, count in counts.items()
        }

    return LoaderDataModule(loaders(sizes), test=loaders(dict.fromkeys(sizes, test)))


# -- the bound of epsilon, without our code ----------------------------------------------------------------------------
@pytest.mark.parametrize(("guesses", "right"), [(100, 80), (50, 50), (30, 20), (200, 110)])
def test_without_delta_it_is_the_interval_of_clopper_and_pearson(guesses, right):
    low = beta.ppf(0.05, right, guesses - right + 1)  # one-sided, 95 %
    expected = max(0.0, math.log(low / (1 - low)))
    assert epsilon_bound(guesses, guesses, right) == pytest.approx(expected, abs=1e-6)


def test_delta_is_paid_for_as_in_theorem_5_2():
    canaries_, guesses, right, epsilon, delta = 120, 60, 48, 0.8, 1e-3
    share = math.exp(epsilon) / (1 + math.exp(epsilon))
    within = [sum(binom.pmf(right - j, guesses, share) for j in range(1, i + 1)) / i for i in range(1, canaries_ + 1)]
    expected = sum(binom.pmf(k, guesses, share) for k in range(right, guesses + 1)) + 2 * canaries_ * delta * max(
        within
    )
    assert p_value(canaries_, guesses, right, epsilon, delta) == pytest.approx(expected, rel=1e-9)
    assert epsilon_bound(120, 60, 55, 1e-3) < epsilon_bound(120, 60, 55)


def test_randomised_response_is_seldom_overrated():
    """Under epsilon-DP the bound is above epsilon in 5 % of the trials at most."""
    draw, epsilon = np.random.default_rng(0), 1.2
    right = draw.binomial(100, 1 / (1 + math.exp(-epsilon)), size=400)
    bounds = [epsilon_bound(100, 100, int(one)) for one in right]
    assert np.mean(np.array(bounds) > epsilon) <= 0.075 and np.mean(bounds) > 0.5


def test_what_so_many_guesses_could_have_shown():
    found = [epsilon_bound(many, many, many) for many in (10, 20, 100)]
    assert found == sorted(found) and found[0] < 1.1
    assert epsilon_bound(10, 10, 4) == 0.0


# -- canaries in runs --------------------------------------------------------------------------------------------------
def test_canaries_are_found_without_noise_and_nothing_is_changed():
    data = toy_data((40,), test=60, batch_size=16)
    trainer = federate(module(), data, [FedAvg()], max_rounds=1, local_epochs=60)
    before = {name: value.clone() for name, value in trainer.server.model.items()}
    found = canaries(trainer, data, count=60)
    assert found["epsilon"] > 0.5 and found["accounted"] is None
    assert found["canaries"] == 60 and found["guesses"] == 30 and found["epsilon"] <= found["most"]
    assert all(torch.equal(value, before[name]) for name, value in trainer.server.model.items())
    assert found == canaries(trainer, data, count=60)
    assert "nothing is accounted for it" in describe_attacks({"canaries": found})[0]


@pytest.mark.parametrize(
    ("dp", "unit"),
    [
        (lambda folder: SampleDP(delta=1e-3, noise_multiplier=2.0, ledger=folder), "record"),
        (lambda folder: ClientDP(delta=1e-3, noise_multiplier=2.0, ledger=folder), "client"),
    ],
)
def test_the_bound_is_below_what_is_accounted_and_no_ledger_knows(dp, unit, tmp_path):
    data = by_heart({"a": 32, "b": 32, "c": 32}, test=12)
    ledger = tmp_path / "ledger"
    trainer = federate(module(8), data, [dp(str(ledger))], tmp_path, max_rounds=1, local_epochs=4)
    known = {path.name: path.read_text() for path in ledger.glob("*.json")}
    said = []
    found = canaries(trainer, data, report=said.append)
    claimed = json.loads((trainer.run.path / "privacy.json").read_text())["epsilon"]
    assert (found["canaries"], found["leak"]) == (36, 2 * claimed)
    assert said[0].startswith("36 canaries show an epsilon of") and said[1].startswith("audit run with")
    assert known and {path.name: path.read_text() for path in ledger.glob("*.json")} == known
    assert found["unit"] == unit and found["delta"] == 1e-3
    assert 0 <= found["epsilon"] < found["accounted"] < math.inf
    assert "accounted as" in describe_attacks({"canaries": found})[0]
    other = canaries(trainer, data, count=24, unit="record" if unit == "client" else "client")
    assert other["accounted"] is None and other["delta"] == 0  # the guarantee is of another unit


class Wide(Toy):
    """Sixty numbers: room for many canaries."""

    def make(self, hidden, dropout):
        return torch.nn.Sequential(torch.nn.Linear(60, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 3))


def test_a_client_that_is_a_canary_is_found_without_noise():
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(60, 3, generator=draw)

    def loaders(count):
        inputs = [torch.randn(count, 60, generator=draw) for _ in range(8)]
        return {
            str(place): DataLoader(TensorDataset(x, (x @ weights).argmax(1)), batch_size=16)
            for place, x in enumerate(inputs)
        }

    data = LoaderDataModule(loaders(24), test=loaders(6))
    torch.manual_seed(0)
    trainer = federate(Wide(hidden=32), data, [FedAvg()], max_rounds=2, local_epochs=4)
    found = canaries(trainer, data, count=30, unit="client")
    assert found["unit"] == "client" and found["epsilon"] > 0.3


def test_power_is_how_often_guesses_refute_what_is_accounted():
    draw, share = np.random.default_rng(0), 1 / (1 + math.exp(-2.0))
    for accounted, delta in ((0.0, 0.0), (1.0, 0.0), (1.0, 1e-4)):
        right = draw.binomial(50, share, 4000)
        refuted = {hits: epsilon_bound(100, 50, hits, delta) > accounted for hits in set(right.tolist())}
        often = np.mean([refuted[hits] for hits in right.tolist()])
        assert power_of(100, 2.0, accounted, delta) == pytest.approx(often, abs=0.03)
    assert power_of(100, 16.0, 8.0, 1e-3) == 0.0  # not even if all are right


def test_canaries_are_as_many_as_have_the_power():
    count = canaries_for(0.8, 2000, 1.0, 0.5, 0.0, 0.95)
    assert count > 100 and power_of(count, 1.0, 0.5) >= 0.8 > power_of(count - 4, 1.0, 0.5)
    assert canaries_for(0.8, 2000, 3.0, 0.0, 0.0, 0.95) == 100  # they have more
    assert canaries_for(0.8, 60, 1.0, 0.5, 0.0, 0.95) == 60  # there are no more
    assert canaries_for(0.99, 120, 1.0, 0.5, 0.0, 0.95) <= 120
    with pytest.raises(ValueError, match="power=1 is not a probability"):
        canaries_for(1.0, 60, 1.0, 0.5, 0.0, 0.95)


def test_too_few_canaries():
    data = by_heart({"a": 20, "b": 20}, test=3)
    trainer = federate(module(8), data, [FedAvg()], max_rounds=1)
    with pytest.raises(ValueError, match="6 canaries are to be had"):
        canaries(trainer, data)


# -- likelihood ratio --------------------------------------------------------------------------------------------------
def test_scores_are_deviations_from_models_that_have_not_seen_a_sample():
    draw = np.random.default_rng(0)
    without = draw.normal(2.0, 1.5, (10, 6))
    without[:4, 0], without[1:, 5] = np.nan, np.nan
    found = draw.normal(size=6)
    scores = standing_out(found, without)
    known = [without[~np.isnan(without[:, place]), place] for place in range(6)]
    shared = sum(((one - one.mean()) ** 2).sum() for one in known[:5]) / sum(len(one) - 1 for one in known[:5])
    expected = [(found[place] - known[place].mean()) / math.sqrt(shared) for place in range(5)]
    np.testing.assert_allclose(scores[:5], expected)
    assert np.isnan(scores[5])  # one model is too few
    p = np.array([0.9, 0.5, 0.01])
    np.testing.assert_allclose(confidence(-np.log(p)), np.log(p / (1 - p)))


def test_members_learnt_by_heart_stand_out():
    data = by_heart({"a": 30, "b": 30}, test=30)
    trainer = federate(module(), data, [FedAvg()], max_rounds=1, local_epochs=40)
    found = likelihood_ratio(trainer, data, shadows=6)
    assert found["low"] > 0.55 and found["shadows"] == 6 and (found["members"], found["others"]) <= (60, 60)
    assert "with 6 shadow runs" in describe_attacks({"likelihood_ratio": found})[0]
    with pytest.raises(ValueError, match="3 shadow runs are too few"):
        likelihood_ratio(trainer, data, shadows=3)


# -- images from a gradient --------------------------------------------------------------------------------------------
class Sees(Toy):
    """Images of one channel and 4 x 4 pixels."""

    def make(self, hidden, dropout):
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(16, hidden), torch.nn.Sigmoid(), torch.nn.Linear(hidden, 3)
        )


def test_an_image_comes_back_from_its_gradient(tmp_path):
    draw = torch.Generator().manual_seed(0)
    images = DataLoader(TensorDataset(torch.rand(20, 1, 4, 4, generator=draw), torch.arange(20) % 3), batch_size=4)
    torch.manual_seed(0)
    data = LoaderDataModule({"a": images})
    trainer = federate(Sees(hidden=32), data, [FedAvg()], max_rounds=1)
    for matching in ("cosine", "squared"):
        found = inversion(trainer, data, steps=300, matching=matching, picture=tmp_path / f"{matching}.png")
        assert found["psnr"] > found["psnr_of_mean"] + 8
        true, again = np.array(found["images"])
        assert true.shape == again.shape == (1, 1, 4, 4) and (tmp_path / f"{matching}.png").stat().st_size > 100
    assert inversion(trainer, data, steps=5)["psnr"] < found["psnr"]
    with pytest.raises(ValueError, match="5 images of a step"):
        inversion(trainer, data, batch=5)
    with pytest.raises(ValueError, match="no client 'b'"):
        inversion(trainer, data, client="b")


def test_distances_of_gradients():
    one = [torch.tensor([1.0, 2.0]), torch.tensor([[2.0]])]
    assert float(distance([2 * part for part in one], one, "cosine")) == pytest.approx(0.0, abs=1e-6)
    assert float(distance([-part for part in one], one, "cosine")) == pytest.approx(2.0)
    assert float(distance([2 * part for part in one], one, "squared")) == pytest.approx(9.0)
    assert psnr(0.0, 1.0) == 99.0 and psnr(1.0, 1.0) == 0.0


def test_only_images_with_labels_can_be_made_again():
    data = by_heart({"a": 20})
    trainer = federate(module(8), data, [FedAvg()], max_rounds=1)
    with pytest.raises(ValueError, match="inversion needs batches"):
        inversion(trainer, data)


# -- the command and the page ------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_results_stand_beside_each_other_and_in_the_report(tmp_path, capsys):
    run = [f"--trainer.default_root_dir={tmp_path}", "--trainer.max_rounds=1", "--trainer.local_epochs=1"]
    assert main(["fit", "--config", "configs/quickstart.yaml", *run]) == 0
    folder = tmp_path / "quickstart" / "version_0"
    for attack in ("canaries", "inversion", "usual", "ratio"):
        more = {"ratio": ["--shadows=4"], "canaries": ["--canaries=20"]}.get(attack, [])
        assert main(["leakage", "--run", str(folder), "--attack", attack, "--samples=60", "--json", *more]) == 0
    told = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    found = json.loads((folder / "leakage.json").read_text())
    assert all(found[name] for name in ("membership", "likelihood_ratio", "canaries", "inversion"))
    assert told["canaries"] == found["canaries"] and "images" not in told["inversion"]
    assert (folder / "leakage_images.png").exists()
    assert main(["leakage", "--run", str(folder), "--attack", "inversion", "--batch=9"]) == 2
    assert "--attack inversion: 9 images of a step" in capsys.readouterr().err
    assert main(["report", str(folder), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "report.html").read_text()
    assert "What attackers got" in page and "Images from a gradient" in page and "Canaries: " in page
    (folder / "leakage.json").write_text('{"membership": 3}')
    assert main(["report", str(folder), "--out", str(tmp_path / "page")]) == 0
    assert "What attackers got" not in (tmp_path / "page" / "report.html").read_text()


@pytest.mark.parametrize("attack", [lambda *run: likelihood_ratio(*run, shadows=4, samples=20), canaries])
def test_runs_again_have_the_statistics_that_the_run_agreed_on(tmp_path, attack):
    """Without them every input is NaN, and no client can train."""
    data = stays(write_table(tmp_path / "t.csv"))
    data.setup()
    features = data.client_dataloader("a", "train").dataset[0][0].numel()
    net = torch.nn.Linear(features, 2)
    trainer = federate(Classifier(net, num_classes=2), data, [FedAvg()], tmp_path, max_rounds=1)
    assert attack(trainer, data)
