"""What clients give before round 1, and what follows: against numpy on the pooled rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlightning.datamodules import ShiftedDataModule, TabularFederatedDataModule
from fedlightning.datamodules.agreed_statistics import (
    BINS,
    bins_of,
    chosen_words,
    mean_and_deviation,
    moments_of,
    quantile,
    standardised,
    words_of,
)
from fedlightning.datamodules.partition_report import find_duplicates
from fedlightning.server.population import total


@pytest.mark.parametrize("centre, spread", [(60, 12), (0, 1e-3), (1e5, 1.0)])
def test_totals_are_the_pooled_mean_and_deviation(centre, spread):
    rng = np.random.default_rng(0)
    parts = [rng.normal(centre + i, spread, 50 + i) for i in range(4)]
    sums = total({str(i): {"moments x": moments_of(part, 5)} for i, part in enumerate(parts)})["moments x"]
    pooled = np.concatenate(parts)
    assert sums == pytest.approx([len(pooled), pooled.sum(), (pooled**2).sum()], rel=1e-12)
    mean, deviation = mean_and_deviation(sums)
    assert mean == pytest.approx(pooled.mean(), rel=1e-12)
    assert deviation == pytest.approx(
        pooled.std(), rel=max(1e-12, 1e-15 * (centre / spread) ** 2)
    )  # what a sum can tell


@pytest.mark.parametrize("same", [0.1, 1e6 + 0.1, 0.0])
def test_a_column_of_one_value_is_not_divided_by_rounding(same):
    found = standardised(np.array([same, same, same, same + 1.0]), [np.arange(3)], [np.arange(4)])
    assert found == pytest.approx([0.0, 0.0, 0.0, 1.0], abs=1e-6)


def test_quantiles_are_off_by_less_than_a_bin():
    rng = np.random.default_rng(1)
    values = rng.gamma(2.0, 10.0, 4000).clip(0, 99)
    counts = bins_of(values, (0, 100), 1)
    assert sum(counts) == len(values)
    for share in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert quantile(counts, (0, 100), share) == pytest.approx(np.quantile(values, share), abs=100 / BINS)
    assert quantile(bins_of(values + 200, (0, 100), 1), (0, 100), 0.5) == 100.0  # beyond the range: its end


def test_nothing_of_fewer_than_the_least_leaves():
    assert moments_of(np.array([1.0, 2.0, np.nan]), 3) == [0.0, 0.0, 0.0]
    counts = bins_of(np.array([1.0, 1.0, 1.0, 70.0, 30.0, 50.0, 90.0]), (0, 100), 3)
    assert sum(counts) == 7 and all(count == 0 or count >= 3 for count in counts)
    assert not counts[91] and not any(bins_of(np.array([1.0, 70.0]), (0, 100), 3))
    values, patients = np.array([1.0] * 5 + [20.0, 40.0, 60.0, 61.0]), np.array([0] * 5 + [1, 2, 3, 4])
    counts = bins_of(values, (0, 100), 2, patients)  # the five rows are of one patient, and do not stand alone
    assert [count for count in counts if count] == [6.0, 3.0] and not any(
        bins_of(values[:5], (0, 100), 2, patients[:5])
    )
    assert bins_of(values, (0, 100), 2, np.arange(9)) == bins_of(values, (0, 100), 2)
    assert words_of(["a", "a", "a", "b"], [1, 1, 1, 2], 2) == {}  # three rows of one patient
    assert words_of(["a", "a", "b"], [1, 2, 3], 2) == {"a": 2.0}
    assert chosen_words({"b": 3.0, "a": 3.0, "c": 9.0}, 2) == ["a", "c"]


@pytest.mark.parametrize(
    "values, named", [([[5.0, 1.0, 1.0]] * 2 + [[0.0] * 3] * 3, "2 sites"), ([[5.0, 1.0, 1.0]] * 2, "2 sites")]
)
def test_of_two_each_could_subtract_its_own(values, named):
    with pytest.raises(ValueError, match=f"'age' has enough values to give at {named}.*scale: local"):
        total({str(i): {"moments age": value} for i, value in enumerate(values)})


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {},
        {"moments x": [1.0]},
        {"moments x": [1.0, float("nan"), 2.0]},
        {"moments x": {"a": 1.0}},
        {"moments y": [1.0] * 3},
    ],
)
def test_nonsense_is_refused(wrong):
    good = {"moments x": [5.0, 1.0, 1.0]}
    with pytest.raises(ValueError, match="'c' does not give the statistics"):
        total({"a": good, "b": good, "c": wrong})


ROWS = "age,lactate,sex,dx,unit,patient,hospital,ill"


def write_table(path, hospitals="abcd", rows=40, only=None):
    """Write a table of stays: gaps in age, two of each patient, a word that one patient has."""
    lines = [ROWS]
    for number, hospital in enumerate(hospitals):
        rng = np.random.default_rng(number)
        for i in range(rows):
            age = "" if i % 9 == 0 else f"{rng.normal(60 + 5 * number, 10):.1f}"
            dx = "rare" if i == 0 else ["I10", "E11", "J44"][int(rng.integers(3))]
            cells = [
                age,
                f"{rng.gamma(2.0, 1.0):.2f}",
                "fm"[i % 2],
                dx,
                ["ICU", "CCU"][i % 2],
                f"{hospital}{i // 2}",
                hospital,
                str(int(rng.random() < 0.4)),
            ]
            if only in (None, hospital):
                lines.append(",".join(cells))
    path.write_text("\n".join(lines))
    return path


def stays(path, **options):
    given = {
        "scale": "federated",
        "ranges": {"lactate": [0, 10]},
        "categories": {"dx": 2, "unit": ["CCU", "ICU", "NICU"]},
    }
    given |= {"classes": ["0", "1"], "group": "patient", "batch_size": 8} | options
    return TabularFederatedDataModule(path, "ill", client="hospital", categorical=["sex"], **given)


def agreed(data):
    return data.with_statistics(total({client: data.statistics_of(client) for client in data.client_ids}))


def test_features_are_those_of_pooled_training_rows(tmp_path):
    data = stays(write_table(tmp_path / "t.csv"))
    data.setup()
    raw = stays(
        tmp_path / "t.csv", scale="none", ranges=None, categories={"dx": ["I10"], "unit": ["ICU"]}, drop=["age"]
    )
    raw.setup()
    ready = agreed(data)
    assert (
        ready.feature_names
        == [
            "age",
            "lactate",
            "sex=f",
            "sex=m",
            "dx=E11",
            "dx=I10",
            "dx=other",
            "unit=CCU",
            "unit=ICU",
            "unit=NICU",
            "unit=other",
        ]
        or len(ready.feature_names) == 11
    )
    place, own = ready.feature_names.index("age"), raw.feature_names.index("lactate")
    x = {
        split: np.concatenate(
            [np.stack([r[0].numpy() for r in ready.client_dataloader(c, split).dataset]) for c in "abcd"]
        )
        for split in ("train", "test")
    }
    ages = np.array([float(v) if v else np.nan for c in "abcd" for v in ready.sample_values(c, "train", "age")])
    known = ~np.isnan(ages)
    expected = np.where(known, (ages - ages[known].mean()) / ages[known].std(), 0.0)
    np.testing.assert_allclose(x["train"][:, place], expected, rtol=1e-6, atol=1e-6)
    lactate = np.concatenate([np.array([r[0][own] for r in raw.client_dataloader(c, "train").dataset]) for c in "abcd"])
    scaled = x["train"][:, ready.feature_names.index("lactate")]
    assert np.corrcoef(lactate, scaled)[0, 1] == pytest.approx(1.0)
    assert abs(np.median(scaled)) < 0.2 and not np.isnan(x["test"]).any()
    assert not any("rare" in name for name in ready.feature_names)


def test_test_and_validation_rows_count_nowhere(tmp_path):
    data = stays(write_table(tmp_path / "t.csv"))
    data.setup()
    ages = [v for v in data.sample_values("a", "train", "age") if v]
    assert data.statistics_of("a")["moments age"][0] == len(ages)


def test_data_that_have_not_agreed_say_so(tmp_path):
    data = stays(write_table(tmp_path / "t.csv"))
    data.setup()
    x, _ = next(iter(data.client_dataloader("a", "train")))
    assert x[:, 0].isnan().all()
    with pytest.raises(ValueError, match="scaled by statistics that a FederatedTrainer asks"):
        data.train_dataloader()
    ready = agreed(data)
    assert not next(iter(ready.train_dataloader()))[0].isnan().any() and ready.wanted_statistics is None
    assert data.wanted_statistics is not None


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"scaling": False}, "scaling: false; leave one of them out"),
        ({"scale": "local"}, "set that, or leave them out"),
        ({"ranges": {"lactate": [3, 1]}}, "give its two ends, the lower first"),
        ({"categories": {"dx": 0}}, "give a list of different codes"),
        ({"categories": {"dx": ["a", "a"]}}, "give a list of different codes"),
        ({"classes": ["1"]}, "a list of at least 2, all different"),
    ],
)
def test_what_means_nothing_is_refused(tmp_path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        stays(write_table(tmp_path / "t.csv"), **options)


def test_a_class_that_is_not_named_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'ill' has the value 0.0, which is not among classes \['1', '2'\]"):
        stays(write_table(tmp_path / "t.csv"), classes=["1", "2"]).setup()


def test_a_constant_is_only_centred_whatever_its_sums_round_to():
    for value in (0.1, 1 / 3, 1e12 + 0.1, -7.7):
        sums = total({str(i): {"moments x": moments_of(np.full(19 + i, value), 5)} for i in range(4)})["moments x"]
        assert mean_and_deviation(sums)[1] == 0.0


def test_words_that_nobody_may_give_are_no_map():
    with pytest.raises(ValueError, match="'dx' has enough values to give at 0 sites"):
        total({name: {"words dx": {}} for name in "abc"})


def test_open_inputs_are_not_compared(tmp_path):
    public = torch.utils.data.TensorDataset(torch.zeros(5, 3), torch.zeros(5).long())
    data = stays(write_table(tmp_path / "t.csv"), public=public)
    data.setup()
    assert find_duplicates(data) is None and not data.public_report()["compared"]


def test_another_module_around_open_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="with scale: federated, so that its inputs are not known yet"):
        ShiftedDataModule(stays(write_table(tmp_path / "t.csv")), "contrast", 0.5).setup()


@pytest.mark.parametrize("named", [["0", "1"], ["0.0", "1.0"]])
def test_codes_are_equal_with_and_without_decimals(tmp_path, named):
    def columns(form, gap):
        lines = [f"{i},{gap if i == 39 else form(i % 2)},ab,{i // 2 % 2}" for i in range(40)]
        path = tmp_path / "codes.csv"
        path.write_text("\n".join(["age,unit,hospital,ill", *lines]))
        data = TabularFederatedDataModule(path, "ill", client="hospital", categories={"unit": named})
        data.setup()
        return next(iter(data._splits.values())).dataset.x[:39, 1:]

    plain, floats = columns(str, "0"), columns(lambda code: f"{code}.0", "")
    assert (plain == floats).all() and not plain[:, -1].any()
