import shutil

import numpy as np
import pytest
import torch

from fedlightning.datamodules import HeartDiseaseDataModule
from fedlightning.datamodules.heart_disease import read_hospital

# complete rows and, of these, rows without disease, as in the UCI files
SIZES = {"cleveland": (303, 164), "hungarian": (261, 163), "switzerland": (46, 1), "va": (130, 29)}


def patient(rng, healthy, **changes):
    row = {
        "age": rng.integers(30, 80), "sex": rng.integers(0, 2), "cp": rng.integers(1, 5),
        "trestbps": rng.integers(90, 180), "chol": rng.integers(120, 400), "fbs": rng.integers(0, 2),
        "restecg": rng.integers(0, 3), "thalach": rng.integers(80, 200), "exang": rng.integers(0, 2),
        "oldpeak": round(float(rng.uniform(0, 4)), 1), "slope": "?", "ca": "?", "thal": "?",
        "num": 0 if healthy else rng.integers(1, 5),
    }  # fmt: skip
    return ",".join(str(value) for value in (row | changes).values())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heart")
    rng = np.random.default_rng(0)
    for name, (size, healthy) in SIZES.items():
        fixed = {"chol": 0} if name == "switzerland" else {}  # as there: cholesterol was never measured
        lines = [patient(rng, i < healthy, **fixed) for i in rng.permutation(size)]
        lines.insert(3, patient(rng, True, trestbps="?"))  # incomplete: dropped
        (folder / f"processed.{name}.data").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def data(root):
    module = HeartDiseaseDataModule(str(root))
    module.prepare_data()
    module.setup()
    return module


def tensors(module, client, split):
    # Train loaders shuffle; the view behind them does not.
    view = module.client_dataloader(client, split).dataset
    return torch.stack([x for x, _ in view]), torch.stack([y for _, y in view])


def test_sizes_are_the_papers(data):
    assert data.client_ids == ["cleveland", "hungarian", "switzerland", "va"]
    sizes = [[data.num_samples(client, split) for client in data.client_ids] for split in ("train", "val", "test")]
    assert sizes[2] == [104, 89, 16, 45]
    assert [a + b for a, b in zip(sizes[0], sizes[1], strict=True)] == [199, 172, 30, 85]
    assert sizes[1] == [40, 34, 6, 17]
    held = [data.indices(c, split) for split in ("train", "val", "test") for c in data.client_ids]
    assert sorted(np.concatenate(held)) == list(range(740))
    assert data.num_classes == 2 and data.batch_size == 4


def test_the_test_set_is_stratified(data):
    for client, (size, healthy) in SIZES.items():
        if client == "switzerland":
            continue  # one healthy patient cannot be stratified
        counts = data.class_counts(client, "test")
        assert abs(counts[0] / sum(counts) - healthy / size) < 0.01


def test_features_are_standardised_by_each_hospitals_training_patients(data):
    for client in data.client_ids:
        x = torch.cat([tensors(data, client, split)[0] for split in ("train", "val")])
        assert x.shape[1] == 13 and x.dtype == torch.float32
        assert x.mean(dim=0).abs().max() < 1e-5
        deviation = x.std(dim=0, correction=0)
        constant = torch.zeros(13, dtype=torch.bool)
        constant[3] = client == "switzerland"
        assert torch.allclose(deviation[~constant], torch.ones(()), atol=1e-4) and (deviation[constant] == 0).all()
        # Nothing is fitted on test patients.
        assert tensors(data, client, "test")[0].mean(dim=0).abs().max() > 1e-3


def test_seed_moves_validation_only_and_split_seed_moves_test(root, data):
    other = HeartDiseaseDataModule(str(root), seed=1)
    other.setup()
    moved = HeartDiseaseDataModule(str(root), split_seed=1)
    moved.setup()
    for client in data.client_ids:
        assert np.array_equal(data.indices(client, "test"), other.indices(client, "test"))
        assert not np.array_equal(data.indices(client, "val"), other.indices(client, "val"))
        assert not np.array_equal(data.indices(client, "test"), moved.indices(client, "test"))


def test_labels_are_classes_or_floats(root, data):
    y = tensors(data, "va", "test")[1]
    assert y.dtype == torch.int64 and torch.bincount(y).tolist() == data.class_counts("va", "test")
    floats = HeartDiseaseDataModule(str(root), binary_float=True)
    floats.setup()
    assert torch.equal(tensors(floats, "va", "test")[1], y.float())
    assert floats.class_counts("va", "test") == data.class_counts("va", "test")


def test_columns_and_one_hot_levels(tmp_path):
    path = tmp_path / "processed.va.data"
    path.write_text(
        "63,1,4,140,260,0,1,112,1,3.5,2,?,?,2\n"
        "44,0,1,130,209,0,0,127,0,0,?,?,?,0\n"
        "50,0,2,?,209,0,0,127,0,0,?,?,?,0\n"
        "\n"
        "55,1,3,120,200,1,2,130,0,1,1,0,7,1\n"
    )
    x, y, _ = read_hospital(path)
    assert x.tolist() == [
        [63, 1, 140, 260, 0, 112, 1, 3.5, 0, 0, 1, 1, 0],
        [44, 0, 130, 209, 0, 127, 0, 0, 0, 0, 0, 0, 0],
        [55, 1, 120, 200, 1, 130, 0, 1, 0, 1, 0, 0, 1],
    ]
    assert y.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1,2,3\n", "line 1: 3 columns instead of 14"),
        ("63,x,4,140,260,0,1,112,1,3,2,?,?,2\n", "line 1: could not convert string to float: 'x'"),
        ("63,1,9,140,260,0,1,112,1,3,2,?,?,2\n", r"column 2 has values other than \(1, 2, 3, 4\)"),
        ("?,1,4,140,260,0,1,112,1,3,2,?,?,2\n", "no complete row"),
    ],
)
def test_other_files_are_refused(tmp_path, text, sentence):
    path = tmp_path / "processed.va.data"
    path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_hospital(path)


def test_missing_files_are_named(tmp_path):
    (tmp_path / "processed.va.data").write_text("")
    with pytest.raises(FileNotFoundError, match=r"processed.cleveland.data, .*archive.ics.uci.edu") as caught:
        HeartDiseaseDataModule(str(tmp_path)).prepare_data()
    assert "processed.va.data" not in str(caught.value) and "download: true" not in str(caught.value)


@pytest.mark.parametrize("client", SIZES)
def test_a_hospital_alone_is_what_it_is_among_the_four(root, data, tmp_path, client):
    """Its site has no other's file; train batches come in the same order too."""
    shutil.copy(root / f"processed.{client}.data", tmp_path)
    own = HeartDiseaseDataModule(str(tmp_path), hospitals=[client])
    own.prepare_data()
    own.setup()
    assert own.client_ids == [client] and own.num_classes == data.num_classes
    for split in ("train", "val", "test"):
        batches = [list(one.client_dataloader(client, split)) for one in (own, data)]
        assert len(batches[0]) == len(batches[1]) > 0
        for here, among in zip(*batches, strict=True):
            assert all(map(torch.equal, here, among))
        assert own.class_counts(client, split) == data.class_counts(client, split)


def test_hospitals_are_in_order_and_named_as_they_are(root, tmp_path):
    own = HeartDiseaseDataModule(str(root), hospitals=["va", "cleveland"])
    own.setup()
    assert own.client_ids == ["cleveland", "va"]
    with pytest.raises(FileNotFoundError, match=r"processed.hungarian.data") as caught:
        HeartDiseaseDataModule(str(tmp_path), hospitals=["hungarian"]).prepare_data()
    assert "cleveland" not in str(caught.value)
    for wrong in ([], ["va", "va"], ["bern"], "va"):
        with pytest.raises(ValueError, match=r"got hospitals=.*(give some of cleveland, hungarian, swit|Use a list)"):
            HeartDiseaseDataModule(str(root), hospitals=wrong)


def test_a_file_that_is_no_table_is_refused(tmp_path):
    path = tmp_path / "processed.va.data"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="is not text in UTF-8"):
        read_hospital(path)
    path.write_bytes(b"1," * 600_000)
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        read_hospital(path)


def test_grades_are_five_classes_of_the_same_patients_and_splits(root, data):
    graded = HeartDiseaseDataModule(str(root), grades=True)
    graded.setup()
    assert graded.num_classes == 5
    for client in data.client_ids:
        for split in ("train", "val", "test"):
            (x, y), (u, v) = tensors(data, client, split), tensors(graded, client, split)
            assert torch.equal(x, u) and torch.equal(y, (v > 0).long())
    with pytest.raises(ValueError, match="both grades=True and binary_float=True"):
        HeartDiseaseDataModule(grades=True, binary_float=True)


def test_columns_are_those_of_the_features(data):
    for client in data.client_ids:
        x, _ = tensors(data, client, "test")
        sex = np.array(data.sample_values(client, "test", "sex"))
        assert set(sex) <= {"0", "1"} and len(np.unique(x[:, 1])) == len(set(sex))
        assert (x[sex == "1", 1].min() if "1" in sex else 1) > (x[sex == "0", 1].max() if "0" in sex else 0)
    with pytest.raises(ValueError, match="no column 'thal'"):
        data.sample_values("va", "test", "thal")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"age": "NaN"}, r"processed.va.data, line 1: 'NaN' is not a finite number"),
        ({"chol": "1e400"}, "line 1: '1e400' is not a finite number"),
        ({"chol": "1e39"}, "line 1: '1e39' is not a finite number of single precision"),
        ({"chol": "2_0"}, "line 1: could not convert string to float: '2_0'"),
        ({"num": -1}, "column 13 has values other than 0 to 4"),
        ({"num": 1.5}, "column 13 has values other than 0 to 4"),
    ],
)
def test_numbers_that_are_none_do_not_reach_training(changes, match, tmp_path):
    path = tmp_path / "processed.va.data"
    path.write_text(patient(np.random.default_rng(0), True, **changes))
    with pytest.raises(ValueError, match=match):
        read_hospital(path)


def test_statistics_that_are_given_are_all_that_features_depend_on(root, data):
    given = HeartDiseaseDataModule(str(root), statistics={"age": [50.0, 10.0]})
    given.setup()
    assert data.coupled_records and not given.coupled_records
    for client in given.client_ids:
        x = tensors(given, client, "test")[0].double()
        rows = read_hospital(root / f"processed.{client}.data")[0]
        chosen = rows[given.indices(client, "test") - sum(SIZES[one][0] for one in SIZES if one < client)]
        assert np.allclose(x[:, 0], (chosen[:, 0] - 50.0) / 10.0, atol=1e-5) and np.allclose(x[:, 1:], chosen[:, 1:])
    for statistics in ({"slope": [1, 1]}, {"age": [50, 0]}):
        with pytest.raises(ValueError, match="mean, standard deviation"):
            HeartDiseaseDataModule(str(root), statistics=statistics)
