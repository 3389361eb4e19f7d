import pickle
from contextlib import suppress

import numpy as np
import pytest
import torch

from fedlightning.datamodules import DirichletPartitioner, HuggingFaceDataModule, IIDPartitioner
from fedlightning.datamodules.huggingface import Rows

datasets = pytest.importorskip("datasets")


def patients(count=40, **more):
    draw = np.random.default_rng(0)
    rows = {
        "age": draw.integers(20, 90, count).tolist(),
        "values": draw.normal(size=(count, 3)).round(3).tolist(),
        "kind": ["ill", "well"] * (count // 2),
        "hospital": [("Rome", "Oslo", "Bern")[k % 3] for k in range(count)],
        "patient": [f"p{k // 2}" for k in range(count)],
    }
    return datasets.Dataset.from_dict(rows | more)


def test_a_column_names_the_clients_and_values_are_the_tables(tmp_path):
    patients().save_to_disk(tmp_path / "saved")
    data = HuggingFaceDataModule(str(tmp_path / "saved"), ["values", "age"], "kind", client="hospital", batch_size=64)
    data.setup()
    assert data.client_ids == ["Bern", "Oslo", "Rome"] and data.class_names == ["ill", "well"] and data.num_classes == 2
    table, seen = patients(), []
    for client in data.client_ids:
        for split in ("train", "val", "test"):
            rows = data.indices(client, split)
            assert {table[int(row)]["hospital"] for row in rows} == {client}
            seen += rows.tolist()
            view = data.client_dataloader(client, split).dataset
            for place, row in enumerate(rows):
                x, y = view[place]
                cells = table[int(row)]
                assert torch.equal(x, torch.tensor([*cells["values"], cells["age"]], dtype=torch.float32))
                assert data.class_names[int(y)] == cells["kind"]
    assert sorted(seen) == list(range(40))


def test_batches_equal_single_samples_in_this_process_and_in_workers():
    data = HuggingFaceDataModule(patients(), "values", "kind", partitioner=IIDPartitioner(2), num_workers=1)
    data.setup()
    loader = data.client_dataloader("0", "test")
    x, y = next(iter(loader))
    assert torch.equal(x, torch.stack([loader.dataset[k][0] for k in range(len(x))])) and y.dtype == torch.int64


def test_rows_stay_on_disk(tmp_path):
    patients(4000, text=["x" * 1000] * 4000).save_to_disk(tmp_path / "saved")
    rows = Rows(datasets.load_from_disk(str(tmp_path / "saved")), ["values"], torch.zeros(4000))
    assert len(pickle.dumps(rows)) < 60_000  # a worker process gets names of files, not rows
    assert torch.equal(pickle.loads(pickle.dumps(rows))[7][0], rows[7][0])


def test_given_splits_stay_and_follow_the_partition(tmp_path):
    given = datasets.DatasetDict({"train": patients(60), "validation": patients(30), "test": patients(30)})
    given.save_to_disk(tmp_path / "saved")
    data = HuggingFaceDataModule(str(tmp_path / "saved"), "values", "kind", client="hospital")
    data.setup()
    assert [data.num_samples("Rome", split) for split in ("train", "val", "test")] == [20, 10, 10]


def test_a_group_is_at_one_client_and_in_one_split():
    data = HuggingFaceDataModule(
        patients(), "values", "kind", partitioner=DirichletPartitioner(3, 1.0, min_samples=2), group="patient"
    )
    data.setup()
    table, home = patients(), {}
    for client in data.client_ids:
        for split in ("train", "val", "test"):
            for row in data.indices(client, split):
                assert home.setdefault(table[int(row)]["patient"], (client, split)) == (client, split)
    assert len(home) == 20


def test_words_as_labels_are_numbered_by_all_rows_and_a_class_label_is_not():
    """One record with another word gives all others other numbers: a callback that hides records refuses that."""
    words, named = patients(), patients().cast_column("kind", datasets.ClassLabel(names=["ill", "well"]))
    data, given = (HuggingFaceDataModule(table, "age", "kind", client="hospital") for table in (words, named))
    for module in (data, given):
        module.setup()
    assert (
        data.named_by_file == {"a ClassLabel of 'kind'": ["ill", "well"]} and "a ClassLabel of 'kind'" in data.coupling
    )
    assert given.named_by_file == {} and not given.coupling and given.class_names == data.class_names


def test_images_and_class_names():
    pixels = [np.full((4, 5, 3), 51 * (k % 5), dtype=np.uint8) for k in range(20)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    table = datasets.Dataset.from_dict({"image": pixels, "label": [0, 1] * 10}, features=features)
    data = HuggingFaceDataModule(table, "image", partitioner=IIDPartitioner(2))
    data.setup()
    assert data.class_names == ["cat", "dog"]
    view = data.client_dataloader("1", "train").dataset
    x, _ = view[0]
    assert x.shape == (3, 4, 5) and x.dtype == torch.float32
    assert torch.allclose(x, torch.full_like(x, 0.2 * (int(view.indices[0]) % 5)))


def length(text):
    return torch.tensor([len(text)])


def test_texts_need_a_transform_tokens_do_not():
    table = patients(text=[f"{'a' * (k + 1)}" for k in range(40)], tokens=[[k, 1] for k in range(40)])
    data = HuggingFaceDataModule(table, "text", "kind", client="hospital")
    data.setup()
    with pytest.raises(ValueError, match=r"'text' holds texts; give transform="):
        next(iter(data.client_dataloader("Rome", "train")))
    data = HuggingFaceDataModule(table, "text", "kind", client="hospital", transform=length)
    data.setup()
    view = data.client_dataloader("Rome", "train").dataset
    assert [int(view[k][0]) for k in range(5)] == [int(row) + 1 for row in view.indices[:5]]
    data = HuggingFaceDataModule(table, "tokens", "kind", client="hospital")
    data.setup()
    assert next(iter(data.client_dataloader("Rome", "train")))[0].dtype == torch.int64


def test_measurements_are_no_classes():
    table = patients(price=[k + 0.5 for k in range(40)])
    data = HuggingFaceDataModule(table, "values", "price", client="hospital")
    data.setup()
    x, y = next(iter(data.client_dataloader("Oslo", "train")))
    assert data.num_classes is None and y.dtype == torch.float32 and len(x) == len(y)


def test_files_through_load_dataset(tmp_path, monkeypatch):
    (tmp_path / "files").mkdir()
    patients().to_csv(tmp_path / "files" / "train.csv")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(FileNotFoundError, match=r"is not a folder of Dataset.save_to_disk.*download=True"):
        HuggingFaceDataModule(str(tmp_path / "files"), "age", "kind", client="hospital").setup()
    data = HuggingFaceDataModule(str(tmp_path / "files"), "age", "kind", client="hospital", download=True)
    data.setup()
    x, _ = next(iter(data.client_dataloader("Bern", "train")))
    assert data.num_samples("Bern") == 8 and x.shape == (8, 1)


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        ({}, {"client": "hospitals"}, r"no column 'hospitals'; there are 'age', 'values'"),
        (
            {"kind": [None, *["ill", "well"] * 19, "ill"]},
            {"client": "hospital"},
            r"Row 0 of the train data has no 'kind'",
        ),
        ({"hospital": [*["Rome"] * 39, None]}, {"client": "hospital"}, r"Row 39 of the train data has no 'hospital'"),
        ({"kind": [["ill", "well"]] * 40}, {"client": "hospital"}, r"neither classes nor one number"),
        ({"ward": [float("nan"), *[1.0, 2.0] * 19, 1.0]}, {"client": "ward"}, r"Row 0 of the train data has no 'ward'"),
        ({}, {"client": "hospital", "inputs": ["age", "kind"]}, r"Column 'kind' is the label and among inputs="),
        ({}, {"client": "hospital", "inputs": []}, r"got inputs=\[\]. Use a text, or a list of at least one"),
        ({}, {}, r"neither client nor partitioner"),
        ({}, {"client": "hospital", "partitioner": IIDPartitioner(2)}, r"name the column of the clients, or give"),
    ],
)
def test_wrong_tables_are_named(change, options, match):
    with pytest.raises(ValueError, match=match):
        HuggingFaceDataModule(patients(**change), **{"inputs": "values", "label": "kind"} | options).setup()


def test_gaps_and_objects_in_inputs_are_named():
    with pytest.raises(ValueError, match=r"Row 3 has a gap in 'age'"):
        Rows(patients(age=[1, 2, 3, None, *range(36)]), ["age"], torch.zeros(40))[3]
    with pytest.raises(ValueError, match=r"Row 2: 'kind', 'age' holds no numbers and no image"):
        Rows(patients(), ["kind", "age"], torch.zeros(40))[2]
    with pytest.raises(ValueError, match=r"splits validation; one of them must be called 'train'"):
        HuggingFaceDataModule(datasets.DatasetDict({"validation": patients()}), "age", client="hospital").setup()


def test_hidden_labels_and_empty_splits():
    features = datasets.Features({"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = datasets.Dataset.from_dict({"x": [0.5] * 20, "label": [0, 1] * 10}, features=features)
    hidden = datasets.Dataset.from_dict({"x": [0.5] * 4, "label": [-1] * 4}, features=features)
    given = {"partitioner": IIDPartitioner(2)}
    with pytest.raises(ValueError, match="Row 0 of the test data has the 'label' -1"):
        HuggingFaceDataModule({"train": rows, "test": hidden}, "x", **given).setup()
    data = HuggingFaceDataModule({"train": rows, "test": hidden.select([])}, "x", **given)
    data.setup()
    assert data.num_samples("0", "test") > 0  # cut from the training data
    gaps = datasets.Dataset.from_dict({"x": [0.5] * 20, "label": [0.5, float("nan")] * 10})
    with pytest.raises(ValueError, match="Row 1 of the train data has no"):
        HuggingFaceDataModule(gaps, "x", **given).setup()


def test_grey_images_of_16_bits_keep_their_depth():
    pixels = np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    table = datasets.Dataset.from_dict({"image": [pixels] * 20, "label": [0, 1] * 10}, features=features)
    x = Rows(table, ["image"], torch.zeros(20))[0][0]
    assert torch.equal(x[0], torch.from_numpy(pixels.astype(np.float32)) / 65535) and len(x) == 1


def test_a_label_for_none_is_no_class():
    """-1 is what public benchmarks write for a hidden label, in columns of plain numbers too."""
    rows = {"x": [0.5] * 30, "label": [-1, 0, 1] * 10}
    with pytest.raises(ValueError, match=r"Column 'label': 10 of 30 labels are -1, by which .* make it a ClassLabel"):
        HuggingFaceDataModule(datasets.Dataset.from_dict(rows), "x", partitioner=IIDPartitioner(2)).setup()
    known, hidden = (datasets.Dataset.from_dict(rows | {"label": labels}) for labels in ([0, 1] * 15, [-1] * 30))
    given = {"train": known, "test": hidden}
    with pytest.raises(ValueError, match="30 of 60 labels are -1"):
        HuggingFaceDataModule(given, "x", partitioner=IIDPartitioner(2)).setup()
    signs = datasets.Dataset.from_dict(rows | {"label": [-1, 1] * 15})
    data = HuggingFaceDataModule(signs, "x", partitioner=IIDPartitioner(2))
    data.setup()
    assert data.num_classes == 2
    stray = datasets.Dataset.from_dict(rows | {"label": [0, 1] * 14 + [0, 7]})
    with pytest.warns(UserWarning, match="class 7 has one of 30 samples"):
        HuggingFaceDataModule(stray, "x", partitioner=IIDPartitioner(2)).setup()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_numbers_that_no_sample_holds_are_named(value):
    with pytest.raises(ValueError, match=r"Row 3: 'x' holds no numbers .*NaN, or a number beyond single precision"):
        Rows(patients(x=[0.5] * 3 + [value] + [0.5] * 36), ["x"], torch.zeros(40))[3]
    with pytest.raises(ValueError, match=r"column 'y' holds|has no 'y'|neither classes nor one"):
        target = patients(y=[0.5] * 3 + [value] + [0.25] * 36)
        HuggingFaceDataModule(target, "values", "y", client="hospital").setup()


def test_a_damaged_image_names_its_row():
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    cells = [{"bytes": b"no image", "path": None}] * 4
    table = datasets.Dataset.from_dict({"image": cells, "label": [0, 1, 0, 1]}, features=features)
    with pytest.raises(ValueError, match=r"Rows \[2\] cannot be read .*Get the data set again"):
        Rows(table, ["image"], torch.zeros(4))[2]


def test_a_label_that_is_no_class_is_refused():
    rows = {"x": [0.5] * 20, "label": [0, 1] * 9 + [0, 2**50]}
    with pytest.raises(ValueError, match=r"has the label 1125899906842624, and classes are counted from 0"):
        HuggingFaceDataModule(datasets.Dataset.from_dict(rows), "x", partitioner=IIDPartitioner(2)).setup()


def test_damaged_files_of_a_saved_data_set_are_named(tmp_path):
    """Some of them end the process where Arrow reads them without a look."""
    patients().save_to_disk(tmp_path / "saved")
    draw = np.random.default_rng(3)
    for path in (tmp_path / "saved").iterdir():
        content = path.read_bytes()
        for _ in range(20):
            damaged = bytearray(content)
            for place in draw.integers(0, len(content), 3):
                damaged[place] = draw.integers(0, 256)
            path.write_bytes(damaged)
            data = HuggingFaceDataModule(str(tmp_path / "saved"), "values", "kind", client="hospital")
            with suppress(ValueError):
                data.setup()
                [data.client_dataloader(client, "train").dataset[0] for client in data.client_ids]
        path.write_bytes(content)
