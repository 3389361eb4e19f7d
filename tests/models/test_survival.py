import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from fedlightning.models import CoxRegressor, LogisticRegression, SurvivalMetrics
from fedlightning.models.survival import concordance, cox_loss, stratified_c_index, uno_concordance
from tests.helpers import make_trainer


def patients(size=60, seed=0, ties=True):
    rng = np.random.default_rng(seed)
    risk = rng.normal(size=size).round(1 if ties else 9)
    time = rng.exponential(np.exp(-risk)) * 10
    time = np.ceil(time) if ties else time
    event = rng.random(size) < 0.6
    return tuple(torch.from_numpy(np.asarray(values, dtype=np.float64)) for values in (risk, time, event))


def slow_cox(risk, time, event):
    return sum(
        math.log(sum(math.exp(risk[j]) for j in range(len(risk)) if time[j] >= time[i])) - float(risk[i])
        for i in range(len(risk))
        if event[i]
    )


def slow_pairs(risk, time, event):
    concordant, comparable = 0.0, 0
    for i in range(len(risk)):
        for j in range(len(risk)):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                comparable += 1
                concordant += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return concordant, comparable


@pytest.mark.parametrize("ties", [True, False])
def test_the_loss_and_the_pairs_are_those_of_two_plain_loops(ties):
    risk, time, event = patients(ties=ties)
    assert float(cox_loss(risk, time, event, "sum")) == pytest.approx(slow_cox(risk, time, event))
    assert float(cox_loss(risk, time, event)) == pytest.approx(slow_cox(risk, time, event) / 60)
    assert float(cox_loss(risk, time, event, "events")) == pytest.approx(slow_cox(risk, time, event) / int(event.sum()))
    assert concordance(risk, time, event) == slow_pairs(risk, time, event)


def test_the_order_of_samples_and_a_constant_do_not_matter():
    risk, time, event = patients()
    other = torch.randperm(60)
    assert torch.allclose(cox_loss(risk, time, event), cox_loss(risk[other] + 300, time[other], event[other]))
    assert concordance(risk, time, event) == concordance(risk[other] + 300, time[other], event[other])


def test_gradients_are_exact_and_zero_without_events():
    risk, time, event = patients(size=12)
    assert torch.autograd.gradcheck(lambda r: cox_loss(r, time, event), risk.requires_grad_())
    loss = cox_loss(risk, time, torch.zeros(12), "events")
    loss.backward()
    assert float(loss.detach()) == 0 and not risk.grad.any()


def test_the_concordance_is_lifelines():
    utils = pytest.importorskip("lifelines.utils")
    for seed in range(5):
        risk, time, event = patients(seed=seed)
        concordant, comparable = concordance(risk, time, event)
        expected = utils.concordance_index(time.numpy(), -risk.numpy(), event.numpy())
        assert concordant / comparable == pytest.approx(expected, abs=1e-12)


def test_pooled_and_stratified_are_different_numbers():
    """Sites whose risks are right within and wrong across: from pair counts, and from strata given to the metric."""
    sites = [patients(seed=seed) for seed in range(3)]
    sites = [(risk - 5.0 * k, time / (1 + 20 * k), event) for k, (risk, time, event) in enumerate(sites)]
    counts = [concordance(*site) for site in sites]
    pooled, stratified, single = (SurvivalMetrics() for _ in range(3))
    for k, (risk, time, event) in enumerate(sites):
        pooled.update(risk, time, event)
        stratified.update(risk, time, event, torch.full((60,), k))
        single.reset()
        single.update(risk, time, event)
        assert float(single.compute()["c_index"]) == pytest.approx(counts[k][0] / counts[k][1])
    everything = slow_pairs(*(torch.cat(column) for column in zip(*sites, strict=True)))
    assert float(pooled.compute()["c_index"]) == pytest.approx(everything[0] / everything[1])
    within = float(stratified.compute()["c_index"])
    assert within == pytest.approx(stratified_c_index(counts)) and within > 0.1 + float(pooled.compute()["c_index"])


def test_few_events_are_a_gap():
    metrics = SurvivalMetrics(min_events=3, pair_counts=True)
    metrics.update(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 1.0, 0.0]))
    found = metrics.compute()
    assert found["c_index"].isnan() and float(found["comparable_pairs"]) == 3 and float(found["concordant_pairs"]) == 0
    nothing = SurvivalMetrics(min_events=0)
    nothing.update(torch.zeros(2), torch.ones(2), torch.zeros(2))
    assert nothing.compute()["c_index"].isnan()
    assert math.isnan(stratified_c_index([]))


def clients(sizes=(20, 35, 12)):
    found = {}
    for number, size in enumerate(sizes):
        risk, time, event = patients(size, seed=number)
        x = torch.randn(size, 4, generator=torch.Generator().manual_seed(number)) + risk.float().unsqueeze(1)
        found[f"site{number}"] = TensorDataset(x, torch.stack([event, time], dim=1).float())
    return found


def test_a_round_of_whole_clients_is_a_step_on_the_stratified_likelihood(tmp_path):
    """One full batch a client, weighted by samples: the gradient of the sum of the sites' likelihoods over all samples."""
    data = clients()
    module = CoxRegressor(LogisticRegression(4), lr=0.3)
    reference = LogisticRegression(4)
    reference.load_state_dict(module.net.state_dict())
    loaders = {name: DataLoader(held, batch_size=100, shuffle=True) for name, held in data.items()}
    trainer = make_trainer(tmp_path, max_rounds=2, local_epochs=1)
    trainer.fit(module, train_dataloaders=loaders)
    for _ in range(2):
        parts = [(reference(held.tensors[0]).squeeze(1), held.tensors[1]) for held in data.values()]
        loss = sum(cox_loss(risk, y[:, 1], y[:, 0], "sum") for risk, y in parts) / 67
        reference.zero_grad()
        loss.backward()
        with torch.no_grad():
            reference.fc.weight -= 0.3 * reference.fc.weight.grad
    found = trainer.federation.server.model["net.fc.weight"]
    assert torch.allclose(found, reference.fc.weight, atol=1e-6)


def test_scores_of_a_run_do_not_depend_on_the_batch_size(tmp_path):
    found = []
    for size in (7, 100):
        data = {name: DataLoader(held, batch_size=size) for name, held in clients((40, 50)).items()}
        trainer = make_trainer(tmp_path / str(size), max_rounds=1, local_epochs=1)
        module = CoxRegressor(LogisticRegression(4), lr=0.0, pair_counts=True)
        torch.manual_seed(0)
        torch.nn.init.ones_(module.net.fc.weight)
        trainer.fit(module, train_dataloaders=data, test_dataloaders=data)
        found.append({row["metric"]: row["mean"] for row in trainer.summary["results"] if row["stage"] == "L2"})
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert {"test_loss", "test_c_index", "test_comparable_pairs", "test_concordant_pairs"} <= set(found[0])


@pytest.mark.parametrize(
    ("outputs", "y", "match"),
    [
        (1, torch.zeros(5), r"\(batch, 2\): events"),
        (1, torch.tensor([[30.0, 1.0]] * 5), "an event of 30; column 0"),
        (2, torch.zeros(5, 2), "one output"),
    ],
)
def test_what_is_no_survival_batch_is_refused(outputs, y, match):
    module = CoxRegressor(LogisticRegression(4, outputs))
    with pytest.raises(ValueError, match=match):
        module._hazards((torch.zeros(5, 4), y))


def test_checkpoints_rebuild_the_module(tmp_path):
    from lightning import Trainer

    module = CoxRegressor(LogisticRegression(4), reduction="events", min_events=2)
    trainer = Trainer(
        default_root_dir=tmp_path, logger=False, max_steps=1, enable_progress_bar=False, accelerator="cpu"
    )
    trainer.fit(module, DataLoader(clients((20,))["site0"], batch_size=20))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = CoxRegressor.load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.reduction == "events" and again.test_metrics.min_events == 2


def slow_uno(risk, time, event, horizon):
    """Two plain loops over the samples, and one over times for the probability not to be censored."""

    def uncensored_before(at):
        stays = 1.0
        for when in sorted({float(t) for t, e in zip(time, event, strict=True) if not e and t < at}):
            censored = sum(bool(t == when and not e) for t, e in zip(time, event, strict=True))
            risky = sum(bool(t > when or (t == when and not e)) for t, e in zip(time, event, strict=True))
            stays *= 1 - censored / risky
        return stays

    above = below = 0.0
    for i in range(len(risk)):
        if event[i] and time[i] < horizon:
            weight = uncensored_before(float(time[i])) ** -2
            for j in range(len(risk)):
                if time[j] > time[i] or (time[j] == time[i] and not event[j]):
                    below += weight
                    above += weight * (0.5 if risk[i] == risk[j] else float(risk[i] > risk[j]))
    return above, below


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("horizon", [2.0, 8.0, 1e9])
def test_unos_pairs_are_those_of_plain_loops(ties, horizon):
    case = patients(size=40, seed=3, ties=ties)
    assert uno_concordance(*case, horizon) == pytest.approx(slow_uno(*case, horizon), rel=1e-12)


def test_unos_index_is_that_of_scikit_survival():
    # concordance_index_ipcw(y, y, risk, tau) of scikit-survival on these samples
    rng = np.random.default_rng(1)
    risk, times, censored = rng.normal(size=30), rng.exponential(size=30), rng.exponential(2.0, size=30)
    time, event = np.minimum(times, censored), times <= censored
    found = uno_concordance(*map(torch.from_numpy, (risk, time, event)), horizon=1.0)
    assert stratified_c_index([found]) == pytest.approx(0.5855560649981135, rel=1e-9)


def test_without_censoring_before_the_horizon_uno_is_harrell():
    risk, time, _ = patients(ties=False)
    event = torch.ones_like(time)
    assert uno_concordance(risk, time, event, 1e9) == pytest.approx(concordance(risk, time, event))


def test_unos_index_does_not_follow_the_censoring():
    """Risks that tell late events badly: early censoring hides these from Harrell's index, and not from Uno's."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=3000)
    times = rng.exponential(np.exp(-x))
    risk = np.where(times < 0.5, x, -x)
    whole = concordance(*map(torch.from_numpy, (risk, times, np.ones(3000))))
    limits = rng.exponential(0.7, size=3000)
    seen = tuple(map(torch.from_numpy, (risk, np.minimum(times, limits), (times <= limits).astype(float))))
    harrell, uno = stratified_c_index([concordance(*seen)]), stratified_c_index([uno_concordance(*seen, 2.0)])
    truth = stratified_c_index([uno_concordance(*map(torch.from_numpy, (risk, times, np.ones(3000))), 2.0)])
    assert abs(uno - truth) < 0.03 < abs(harrell - truth) and 0 < stratified_c_index([whole]) < 1


def test_uno_by_stratum_weighs_pairs_by_the_censoring_of_their_own_stratum():
    risk, time, event = patients(size=40, seed=5)
    event[20:] = (torch.arange(20) % 4 == 0).double()
    strata = torch.arange(40) // 20
    parts = [uno_concordance(risk[own], time[own], event[own], 6.0) for own in (slice(20), slice(20, 40))]
    metrics = SurvivalMetrics(min_events=1, horizon=6.0)
    metrics.update(risk, time, event, strata)
    assert float(metrics.compute()["uno_c_index"]) == pytest.approx(stratified_c_index(parts), rel=1e-6)
    risk[0] = math.nan
    metrics.reset()
    metrics.update(risk, time, event, strata)
    assert metrics.compute()["uno_c_index"].isnan()


def test_few_events_before_the_horizon_are_a_gap():
    risk, time, event = patients(ties=False)
    early = int(event[time < 1.0].sum())
    for least, gap in ((early, False), (early + 1, True)):
        metrics = SurvivalMetrics(min_events=least, horizon=1.0)
        metrics.update(risk, time, event)
        scores = metrics.compute()
        assert bool(scores["uno_c_index"].isnan()) is gap and not scores["c_index"].isnan()
    with pytest.raises(ValueError, match="horizon"):
        SurvivalMetrics(horizon=-1.0)


def test_a_module_logs_unos_index(tmp_path):
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    y = torch.stack([torch.ones(40), torch.rand(40, generator=torch.Generator().manual_seed(1))], 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    trainer = make_trainer(tmp_path, max_rounds=1)
    module = CoxRegressor(LogisticRegression(in_features=2), horizon=0.5)
    trainer.fit(module, train_dataloaders={"a": loader}, val_dataloaders={"a": loader})
    assert {row.metric for row in trainer.rows} >= {"val_c_index", "val_uno_c_index"}
