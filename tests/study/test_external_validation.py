"""Internal-external validation: what the tables hold, and that nothing else holds the runs without a site."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlightning import FederatedTrainer
from fedlightning.datamodules import TabularFederatedDataModule
from fedlightning.models import Classifier, LogisticRegression
from fedlightning.report.build import make_page
from fedlightning.report.html import render
from fedlightning.scores.metric_names import summarise
from fedlightning.scores.rows import Row
from fedlightning.study import predicted, samples
from fedlightning.study.external_validation import NEVER, SEEN, curves_of, sites_of
from fedlightning.study.finished_runs import Run
from fedlightning.study.left_out import leave_one_site_out
from fedlightning.study.samples import Predicted
from fedlightning.study.study import Study
from fedlightning.study.subgroups import check_subgroups, values_of

SITES = {"a": 0.8, "b": 0.6, "c": 0.7}


def row(model, stage, client, value):
    return Row(3, stage, model, "latest", "local", "test", client, "test_accuracy", value, 40)


def drawn(sites, shift=0.0):
    rng = np.random.default_rng(1)
    p = np.clip(rng.uniform(0.05, 0.9, 40 * len(sites)) + shift, 0, 1)
    clients = np.repeat(sites, 40)
    labels = (rng.random(len(p)) < p).astype(np.int64)
    return Predicted(
        clients,
        labels,
        np.stack([1 - p, p], 1),
        {"sex": np.array(["f", "m"] * 17 + ["", "m"] * 3)[np.arange(len(p)) % 40]},
    )


def made(path, seed, site=None, name="fedavg"):
    folder = path / f"{name}-{site}-{seed}"
    folder.mkdir(parents=True)
    drop = 0.1 + 0.02 * seed
    scores = [row("personal", "L1", client, value) for client, value in SITES.items() if client != site]
    summary = {"seed": seed, "num_samples": {c: 10 for c in SITES if c != site}}
    if site is not None:
        scores += [row("unseen", "L1", site, SITES[site] - drop), row("unseen", "G", site, 0.5)]
        summary["held_out"] = {"clients": {site: {"test": 40}}}
    samples.write(folder, drawn([site] if site else list(SITES)))
    return Run(name, seed, folder, summary | {"results": summarise(scores)}, site=site)


@pytest.fixture
def study(tmp_path):
    return Study([made(tmp_path, seed, site) for seed in (0, 1) for site in (None, *SITES)])


def test_each_site_has_the_score_of_the_run_without_it_beside_its_own(study):
    lines = {line["site"]: line for line in study.external()}
    assert list(lines) == list(SITES)
    for site, score in SITES.items():
        assert lines[site]["unseen"] == pytest.approx(score - 0.11) and lines[site]["member"] == pytest.approx(score)
        assert lines[site]["gap"] == pytest.approx(-0.11) and lines[site]["n_seeds"] == 2
        assert lines[site]["gap_range"] == pytest.approx([-0.12, -0.1]) and lines[site]["samples"] == 40
    (over,) = sites_of(study.data)
    assert (over["lowest_site"], over["highest_site"], over["sites"]) == ("b", "a", 3)
    assert not any("ci95" in key for line in (over, *lines.values()) for key in line)


def test_no_other_table_holds_the_runs_without_a_site(study):
    assert len(study.data.runs) == 2 and study.overview()[0]["mean"] == pytest.approx(0.7)
    assert not study.unseen()


def test_calibration_and_curves_are_of_the_site_alone(study):
    lines = study.calibrations()
    assert [(line["site"], line["trained"]) for line in lines] == [(s, w) for s in SITES for w in (NEVER, SEEN)]
    assert all(line["samples"] == 40 and line["class"] == 1 for line in lines)
    assert set(curves_of(study.data, 1)) == set(SITES) and len(curves_of(study.data, 1)["a"]["fedavg"]["benefit"]) == 99


def test_a_small_subgroup_has_a_line_and_no_scores(study):
    lines = {line["value"]: line for line in study.subgroups() if line["site"] == "a"}
    assert lines["m"]["samples"] == 20 and lines["m"]["brier"] is not None
    assert lines["missing"]["samples"] == 3 and "brier" not in lines["missing"]


@pytest.mark.slow
def test_the_page_has_the_section_in_the_order_of_tripod(study, tmp_path):
    page = render(make_page({"": study}, tmp_path))
    parts = [
        "external-participants",
        "external-sites",
        "external-calibration",
        "external-benefit",
        "external-subgroups",
    ]
    places = [page.index(f'id="table-{name}"') for name in parts]
    assert places == sorted(places) and places[-1] < page.index("they are not a sample of sites")


def table(path, rows=90):
    rng = np.random.default_rng(0)
    lines = ["age,sex,hospital,ill"]
    lines += [
        f"{a:.0f},{'fm'[i % 2]},{'xyz'[i % 3]},{int(a + 20 * rng.normal() > 60)}"
        for i, a in enumerate(rng.uniform(30, 90, rows))
    ]
    path.write_text("\n".join(lines))
    return TabularFederatedDataModule(path, "ill", client="hospital", batch_size=8, group=False)


def test_from_python(tmp_path):
    trainer = FederatedTrainer(max_rounds=1, default_root_dir=tmp_path, enable_progress_bar=False, logger=False)
    data = table(tmp_path / "t.csv")
    study = leave_one_site_out({"fedavg": trainer}, Classifier(LogisticRegression(3, 2), 2), data, ["sex"], "accuracy")
    lines = study.external()
    assert [line["site"] for line in lines] == ["x", "y", "z"] and all(line["gap"] is not None for line in lines)
    for line in study.calibrations():
        assert line["samples"] == data.num_samples(line["site"], "test")
    of = samples.read(study.data.left_out[0].path)
    assert set(of.clients) == {"x"} and of.columns["sex"].tolist() == data.sample_values("x", "test", "sex")
    accuracy = float((of.probabilities.argmax(1) == of.labels).mean())
    assert accuracy == pytest.approx(lines[0]["unseen"])
    with pytest.raises(ValueError, match=r"There is no column 'sexx' \(subgroup\); did you mean 'sex'"):
        leave_one_site_out({"fedavg": trainer}, Classifier(LogisticRegression(3, 2), 2), data, ["sexx"])


class Gives(Classifier):
    """Predicts what it is told."""

    def __init__(self, found):
        super().__init__(LogisticRegression(1, 2), 2)
        self.found = found

    def predict_step(self, batch, batch_idx=0):
        return self.found


@pytest.mark.parametrize(
    "found, target, why",
    [
        (torch.tensor([0.2, 0.9]), torch.tensor([[1.0, 7.0], [0.0, 3.0]]), "survival is judged by its C-index"),
        (torch.tensor([0.2, 0.9]), torch.tensor([0.1, 0.8]), "the outcome is a number: there are no probabilities"),
        (torch.tensor([[2.0, -1.0], [0.0, 1.0]]), torch.tensor([0, 1]), "they do not add up to 1"),
        (torch.tensor([[0.2, 0.8], [0.5, 0.5]]), torch.tensor([0, 2]), "labels go from 0 to 2"),
        (["a", "b"], torch.tensor([0, 1]), "no probabilities of shape"),
    ],
)
def test_what_is_no_probability_has_a_reason(found, target, why):
    class Data:
        wanted_statistics = None

        def client_dataloader(self, client, split):
            return [(torch.zeros(2, 1), target)]

    class Trainer:
        server = federation = None

        def module(self, client, checkpoint):
            return Gives(found)

    assert why in predicted.predict_samples(Trainer(), Data(), ["a"]).reason


def test_columns_belong_to_the_samples_of_the_loader(tmp_path):
    data = table(tmp_path / "t.csv")
    data.setup()
    place = data.feature_names.index("sex=m")
    for client in data.client_ids:
        x = [row for batch in data.client_dataloader(client, "test") for row in batch[0]]
        assert ["fm"[int(row[place])] for row in x] == data.sample_values(client, "test", "sex")


def test_numbers_are_cut_and_names_are_no_subgroups(tmp_path):
    data = table(tmp_path / "t.csv")
    data.setup()
    ages = data.sample_values("x", "test", "age")
    assert values_of(data, "x", "age>=65") == [">=65" if float(age) >= 65 else "<65" for age in ages]
    check_subgroups(data, ["sex", "age>=65"])
    with pytest.raises(ValueError, match=r"'age' has .* different values; at most 12 make subgroups"):
        check_subgroups(data, ["age"])
    with pytest.raises(ValueError, match="cuts a column of numbers"):
        values_of(data, "x", "sex>=65")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"no file of numpy"])
def test_a_damaged_file_is_told(tmp_path, content):
    (tmp_path / samples.FILE).write_bytes(content)
    assert "cannot be read" in samples.read(tmp_path).reason


def test_where_data_are_elsewhere_it_is_refused():
    with pytest.raises(ValueError, match="predictions of single test samples do not leave sites"):
        leave_one_site_out({"a": FederatedTrainer(engine="flower")}, Classifier(LogisticRegression(3, 2), 2), None)


def test_a_long_name_of_a_site_does_not_reach_the_next_panel(study):
    from fedlightning.report.sections.external import calibration_curves
    from fedlightning.report.styles import styles

    long = "University Hospital of Somewhere, Department of Medicine"
    curves = curves_of(study.data, 1)
    figure = calibration_curves({long: curves["a"], f"{long} 2": curves["b"]}, styles(["fedavg"]))
    titles = [axes.get_title() for axes in figure.axes]
    assert max(map(len, titles)) < 32 and len(set(titles)) == 2


def test_both_ways_are_of_the_same_seeds(tmp_path):
    runs = [made(tmp_path, seed, site) for seed in (0, 1) for site in (None, *SITES) if (seed, site) != (1, "a")]
    other = samples.read(runs[4].path)  # seed 1, all sites
    samples.write(runs[4].path, Predicted(other.clients, 1 - other.labels, other.probabilities, other.columns))
    brier = {(line["site"], line["trained"]): line["brier"] for line in Study(runs).calibrations()}
    own = samples.read(runs[0].path).of("a")
    assert brier["a", SEEN] == pytest.approx(float(((own.probabilities[:, 1] - own.labels) ** 2).mean()))
