import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedlightning.datamodules import (
    ArrayDataset,
    ArrayFederatedDataModule,
    DirichletPartitioner,
    IIDPartitioner,
    NaturalPartitioner,
    Partitioned,
    QuantitySkewPartitioner,
    TabularFederatedDataModule,
)
from fedlightning.datamodules.groups import codes_of, cut_groups, keys_of_groups, looks_like_identifier
from fedlightning.datamodules.held_out import exclude_clients

SPLITS = ("train", "val", "test")


def table(folder, hospitals=3, patients=40, change=lambda rows: None):
    """Patients with one to six visits each, in any order, each of one hospital."""
    rng = np.random.default_rng(1)
    rows = [
        [f"p{p}", ["Rome", "Oslo", "Bern"][p % hospitals], rng.integers(30, 80), int(rng.random() < 0.4)]
        for p in range(patients)
        for _ in range(1 + p % 6)
    ]
    rng.shuffle(rows)
    change(rows)
    path = folder / "visits.csv"
    path.write_text("\n".join(",".join(map(str, row)) for row in [["patient_id", "hospital", "age", "ill"], *rows]))
    return path, np.array([row[0] for row in rows])


def holders(data, names):
    """Return every (client, split) that holds a sample of each group."""
    found = {}
    for client in data.client_ids:
        for split in SPLITS:
            for name in names[data.indices(client, split)]:
                found.setdefault(name, set()).add((client, split))
    return found


@pytest.mark.parametrize(
    "by",
    [
        {"client": "hospital"},
        {"partitioner": IIDPartitioner(3), "drop": ["hospital"]},
        {"partitioner": DirichletPartitioner(3, 0.5), "drop": ["hospital"]},
        {"partitioner": QuantitySkewPartitioner(3, stratified=False), "drop": ["hospital"]},
        {"partitioner": NaturalPartitioner("hospital")},
    ],
    ids=lambda by: str(next(iter(by.values()))).split(" ")[0],
)
def test_no_patient_is_at_two_clients_or_in_two_splits(by, tmp_path):
    path, names = table(tmp_path)
    data = TabularFederatedDataModule(path, "ill", group="patient_id", public=0.1, **by)
    data.setup()
    held = holders(data, names)
    public = set(names[np.concatenate(list(data._public.values()))])
    assert all(len(places) == 1 for places in held.values())
    assert not public & set(held) and public | set(held) == set(names)
    sizes = [sum(data.num_samples(c, split) for c in data.client_ids) for split in SPLITS]
    assert all(sizes) and "patient_id" not in data.feature_names


def test_rows_without_a_group_are_divided_as_before(tmp_path):
    path, _ = table(tmp_path)
    one, two = (
        TabularFederatedDataModule(path, "ill", client="hospital", drop=["patient_id"], group=group)
        for group in (False, "patient_id")
    )
    one.setup()
    two.setup()
    assert [one.num_samples(c, "test") / sum(one.num_samples(c, s) for s in SPLITS) for c in one.client_ids] == (
        pytest.approx([0.2] * 3, abs=0.01)
    )
    assert one.fingerprint("train") != two.fingerprint("train")


def test_an_identifier_that_repeats_is_asked_about(tmp_path):
    path, _ = table(tmp_path)
    with pytest.warns(UserWarning, match=r"'patient_id' has 40 different values in \d+ rows.*group='patient_id'"):
        TabularFederatedDataModule(path, "ill", client="hospital", drop=["patient_id"]).setup()
    for name in ("id", "Patient", "subject no", "lesion_id", "MRN", "patientID".lower()):
        assert looks_like_identifier(name, ["1", "1", "2"]) or name == "patientid"
    for name, cells in (("age", "112"), ("paid", "112"), ("id", "123"), ("id", "111")):
        assert not looks_like_identifier(name, list(cells))


def test_a_patient_at_two_hospitals_is_refused(tmp_path):
    def move(rows):
        next(row for row in rows if row[0] == "p5")[1] = "Rome"

    path, _ = table(tmp_path, change=move)
    with pytest.raises(
        ValueError, match=r"Group 'p5' has samples at client '(Rome|Bern)' and at '(Rome|Bern)' \(sample \d+\)"
    ):
        TabularFederatedDataModule(path, "ill", client="hospital", group="patient_id").setup()


def test_a_row_without_a_patient_is_refused(tmp_path):
    def lose(rows):
        rows[3][0] = ""

    path, _ = table(tmp_path, change=lose)
    with pytest.raises(ValueError, match="sample 4 has no 'patient_id', so no group"):
        TabularFederatedDataModule(path, "ill", client="hospital", group="patient_id").setup()


def test_any_dataset_by_group():
    speakers = np.arange(20).repeat(5)
    data = Partitioned.from_datasets(
        TensorDataset(torch.zeros(100, 2), torch.arange(100) % 2),
        partitioner=IIDPartitioner(4),
        group=speakers,
        test_fraction=0.2,
    )
    data.setup()
    held = holders(data, speakers)
    assert len(held) == 20 and all(len(places) == 1 for places in held.values())


def test_a_speaker_in_the_given_test_data_too_is_refused():
    train, test = (TensorDataset(torch.zeros(10, 2), torch.arange(10) % 2) for _ in range(2))
    groups = {"train": np.arange(10), "test": np.arange(9, 19)}
    with pytest.raises(ValueError, match="1 groups have samples in both the train and the test data, such as 9"):
        Partitioned.from_datasets(train, test=test, partitioner=IIDPartitioner(2), group=groups).setup()


def test_groups_have_their_most_frequent_label_and_are_cut_whole():
    assert keys_of_groups([1, 1, 0, 2], ["a", "a", "a", "b"], "labels").tolist() == [1, 2]
    assert keys_of_groups(4, ["a", "a", "a", "b"], "nothing") == 2
    groups, labels = np.arange(30).repeat(4), (np.arange(30) % 3).repeat(4)
    rest, part = cut_groups(np.arange(120), 0.2, torch.Generator().manual_seed(0), labels, groups)
    assert len(part) == 24 and np.bincount(labels[part]).tolist() == [8, 8, 8]
    assert not set(groups[rest]) & set(groups[part])


class Visits(ArrayFederatedDataModule):
    def load(self):
        x = torch.arange(120.0).unsqueeze(1)
        y = torch.arange(120) // 3 % 2
        return ArrayDataset(x[:90], y[:90]), ArrayDataset(x[90:], y[90:])


def visits_of(dataset):
    return (dataset.x[:, 0] // 3).long().numpy()  # three visits of each of 40 patients


@pytest.mark.parametrize("test_fraction", [None, 0.25])
def test_arrays_by_group(test_fraction):
    data = Visits(DirichletPartitioner(3, 1.0), group=visits_of, test_fraction=test_fraction, public=0.1)
    data.setup()
    held = {}
    for client in data.client_ids:
        for split in SPLITS:
            view = data.client_dataloader(client, split)
            for x, _ in [] if view is None else view.dataset:
                held.setdefault(int(x) // 3, []).append((client, split))
    assert all(len(set(places)) == 1 and len(places) == 3 for places in held.values())
    public = {int(x) // 3 for batch, _ in data.public_dataloader() for x in batch}
    assert public and not public & set(held) and len(public | set(held)) == 40


def test_who_holds_which_groups_is_known_in_the_order_of_the_samples():
    x, patients = torch.arange(30.0)[:, None], np.arange(30) // 3
    data = Partitioned.from_datasets(
        TensorDataset(x, torch.arange(30) % 2), partitioner=IIDPartitioner(2), test_fraction=0.0, group=patients
    )
    data.setup()
    for held in (data, exclude_clients(data, ["1"])):
        for split in ("train", "val"):
            rows = [int(row) for row, _ in data.client_dataloader("0", split).dataset]
            assert held.sample_groups("0", split).tolist() == patients[rows].tolist()
    assert data.sample_groups("0", "test") is None
    free = Partitioned.from_datasets(TensorDataset(x, x), partitioner=IIDPartitioner(2), test_fraction=0.0)
    free.setup()
    assert free.sample_groups("0") is None


@pytest.mark.parametrize("missing", [float("nan"), None, ""])
def test_a_sample_without_a_group_is_refused(missing):
    groups = np.array([*([1.0] * 4), *([2.0] * 3), missing], dtype=object if missing is None else None)
    with pytest.raises(ValueError, match="Sample 8 of the train data has no group"):
        codes_of(groups, 8, "train")


def test_a_column_of_many_words_that_repeat_may_name_patients(tmp_path):
    place, _ = table(tmp_path, patients=80)
    place.write_text(place.read_text().replace("patient_id", "who"))
    options = {"target": "ill", "partitioner": IIDPartitioner(3)}
    with pytest.raises(ValueError, match=r"If it names patients, .* give group: who; else leave it out with drop"):
        TabularFederatedDataModule(place, **options).setup()
    with pytest.warns(UserWarning, match=r"rows of one may now be in training and test data: give group='who'"):
        TabularFederatedDataModule(place, **options, drop=["who"]).setup()
    TabularFederatedDataModule(place, **options, group="who").setup()
