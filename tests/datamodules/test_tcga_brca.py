import numpy as np
import pytest
import torch

from fedlightning.datamodules import TCGABRCADataModule

NAMES = ["age_at_index", '"primary_diagnosis_Infiltrating duct carcinoma, NOS"', *(f"stage_{k}" for k in range(37))]
SIZES = {"train": (20, 15, 10, 10, 10, 5), "test": (6, 5, 4, 4, 4, 3)}


def files(folder, change=lambda brca, split: None):
    """Write both files in FLamby's format: a header, patients in no order, a patient without a region."""
    rng = np.random.default_rng(0)
    brca, split = {}, {}
    parts = [(s, k) for s, sizes in SIZES.items() for k, size in enumerate(sizes) for _ in range(size)]
    for number, (name, region) in enumerate(parts):
        pid = f"TCGA-{region}-{number}"
        brca[pid] = [
            rng.integers(30, 90),
            *rng.integers(0, 2, 38),
            float(number % 3 == 0),
            float(rng.integers(1, 3000)),
        ]
        split[pid] = f"{name},{name}_{region}"
    brca["TCGA-none-0"] = [60, *[0] * 38, 0.0, 10.0]
    lines = [",".join(["pid", *NAMES, "E", "T"])]
    order = rng.permutation(len(brca))
    lines += [",".join([pid, *map(str, brca[pid])]) for pid in np.array(list(brca))[order]]
    told = ["pid,fold,fold2", *(f"{pid},{part}" for pid, part in split.items())]
    change(lines, told)
    (folder / "dataset_creation_scripts").mkdir(parents=True, exist_ok=True)
    (folder / "brca.csv").write_text("\n".join(lines) + "\n")
    (folder / "dataset_creation_scripts" / "train_test_split.csv").write_text("\n".join(told) + "\n")
    return str(folder)


def test_regions_and_splits_are_the_publishers(tmp_path):
    root = files(tmp_path)
    data = TCGABRCADataModule(root, val_fraction=0.0)
    data.setup()
    assert data.client_ids == ["0", "1", "2", "3", "4", "5"] and len(data.feature_names) == 39
    for split, sizes in SIZES.items():
        assert tuple(data.num_samples(client, split) for client in data.client_ids) == sizes
    x, y = next(iter(data.client_dataloader("0", "train")))
    assert x.shape == (8, 39) and y.shape == (8, 2) and x.dtype == y.dtype == torch.float32
    assert set(y[:, 0].tolist()) <= {0.0, 1.0} and data.class_counts("0", "train")[1] == 7
    rows = [line.split(",") for line in (tmp_path / "brca.csv").read_text().splitlines()[1:]]
    first = data.client_dataloader("5", "test").dataset
    ages = {float(row[1]) for row in rows if row[0].startswith("TCGA-5-")}
    assert {float(first[k][0][0]) for k in range(len(first))} <= ages


def test_validation_patients_are_cut_by_event_and_a_region_alone_has_the_same(tmp_path):
    root = files(tmp_path)
    whole, alone = TCGABRCADataModule(root, seed=4), TCGABRCADataModule(root, seed=4, regions=["3"])
    for data in (whole, alone):
        data.setup()
    assert alone.client_ids == ["3"] and whole.num_samples("0", "val") == 4
    for split in ("train", "val", "test"):
        pair = [data.client_dataloader("3", split).dataset for data in (whole, alone)]
        assert all(torch.equal(a[0], b[0]) for a, b in zip(*pair, strict=True))


def lose_a_column(brca, split):
    brca[:] = [line.rpartition(",")[0] for line in brca]


def lose_a_feature(brca, split):
    brca[:] = [line.partition(",")[0] + "," + line.partition(",")[2].partition(",")[2] for line in brca]


def break_a_row(brca, split):
    brca[4] += ",1"


def write_a_word(brca, split):
    brca[3] = brca[3].replace(",", ",sixty,", 1).replace(",0,", ",", 1)


def write_a_far_feature(brca, split):
    cells = brca[2].split(",")
    brca[2] = ",".join([*cells[:5], "1e19", *cells[6:]])


def write_a_wrong_event(brca, split):
    brca[2] = brca[2].rpartition(",")[0].rpartition(",")[0] + ",2.0,100.0"


def repeat_a_patient(brca, split):
    brca.append(brca[1])


def repeat_a_patient_in_another_region(brca, split):
    split.append(split[1].partition(",")[0] + ",test,test_4")


def name_an_unknown_region(brca, split):
    split[2] = split[2].partition(",")[0] + ",train,train_7"


def name_an_unknown_patient(brca, split):
    split.append("TCGA-XX-1,train,train_0")


def lose_a_region(brca, split):
    split[:] = [line for line in split if "test_5" not in line]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lose_a_column, r"no column 'T' \(target\)"),
        (lose_a_feature, "has 38 features, FLamby's file 39"),
        (break_a_row, r"brca.csv, line 5: 43 cells under 42 names"),
        (write_a_word, r"'sixty' in sample 3"),
        (write_a_far_feature, r"column 'stage_2' holds 1e\+19 in sample 2"),
        (write_a_wrong_event, "an E other than 0 and 1"),
        (repeat_a_patient, r"the patient 'TCGA-.*' on two lines"),
        (repeat_a_patient_in_another_region, r"line 98: patient 'TCGA-0-0' is on line 2, too"),
        (name_an_unknown_region, "line 3: there is no part 'train_7'"),
        (name_an_unknown_patient, "line 98: there is no patient 'TCGA-XX-1' in brca.csv"),
        (lose_a_region, "no patients in test_5"),
    ],
)
def test_damaged_files_are_named_with_the_line(change, match, tmp_path):
    data = TCGABRCADataModule(files(tmp_path, change))
    with pytest.raises(ValueError, match=match):
        data.setup()


def test_missing_files_and_regions(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train_test_split.csv.*FLamby"):
        TCGABRCADataModule(str(tmp_path)).setup()
    with pytest.raises(ValueError, match=r"regions=\['6'\]"):
        TCGABRCADataModule(regions=["6"])
