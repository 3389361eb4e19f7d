import sys
import types

import numpy as np
import pytest
import torch

from fedlightning.datamodules import PTBXLDataModule
from fedlightning.datamodules.ptb_xl import LEADS

STATEMENTS = """,description,diagnostic,form,rhythm,diagnostic_class,diagnostic_subclass
NORM,normal ECG,1.0,,,NORM,NORM
IMI,inferior infarction,1.0,,,MI,IMI
NDT,non-diagnostic T,1.0,1.0,,STTC,STTC
LVH,left ventricular hypertrophy,1.0,,,HYP,LVH
SR,sinus rhythm,,,1.0,,
"""
CODES = ["{'NORM': 100.0, 'SR': 0.0}", "{'IMI': 50.0, 'NORM': 50.0}", "{'NDT': 100.0, 'LVH': 80.0}", "{'SR': 0.0}"]
HEADER = "ecg_id,patient_id,age,sex,site,device,report,scp_codes,strat_fold,filename_lr,filename_hr"


def write(root, change=lambda rows: None):
    """PTB-XL's tables: 120 records of 60 patients, three sites and one of a few records, ten folds."""
    root.mkdir(exist_ok=True)
    rows = []
    for k in range(120):
        patient, site = float(k // 2), "" if k == 7 else f"{(3.0, 3.0, 11.0, 2.0)[k // 2 % 4]}" if k < 116 else "40.0"
        cells = [k + 1, patient, 60.0, 0, site, "CS-12", '"ekg, ""normal"""', f'"{CODES[k % 4]}"', 1 + k // 2 % 10]
        rows.append([*map(str, cells), f"records100/00000/{k + 1:05d}_lr", f"records500/00000/{k + 1:05d}_hr"])
    change(rows)
    (root / "ptbxl_database.csv").write_text("\n".join([HEADER, *(",".join(row) for row in rows)]) + "\n")
    (root / "scp_statements.csv").write_text(STATEMENTS)
    return str(root)


@pytest.fixture
def reader(monkeypatch):
    """Stands for wfdb where it is not installed: a record's values are its number."""

    changes = {}  # of a record's number

    def rdrecord(path, physical):
        number = int(path.rpartition("/")[2][:5])
        if number == 13:
            raise KeyError("checksum")
        signal = np.full((999 if number == 21 else 1000, 12), number, dtype=np.float64)
        sums = {"checksum": [-number] * 12, "calc_checksum": lambda: [65536 - number] * 12, "dac": lambda: signal}
        said = {"sig_name": list(LEADS), "units": ["mV"] * 12, "fs": 100, "adc_gain": [1000.0] * 12}
        return types.SimpleNamespace(**sums | said | changes.get(number, {}))

    monkeypatch.setitem(sys.modules, "wfdb", types.SimpleNamespace(rdrecord=rdrecord))
    return changes


def ready(root, **options):
    data = PTBXLDataModule(root, **{"min_records": 5} | options)
    with pytest.warns(UserWarning, match="leaves out"):
        data.setup()
    return data


def test_sites_are_clients_and_folds_the_publishers(tmp_path, reader):
    data = ready(write(tmp_path))
    assert data.client_ids == ["2", "3", "11"] and data.num_classes == 5
    held = {
        split: np.concatenate([data.indices(c, split) for c in data.client_ids]) for split in ("train", "val", "test")
    }
    folds = {"train": range(1, 9), "val": (9,), "test": (10,)}
    for split, rows in held.items():
        assert {1 + row // 2 % 10 for row in rows} <= set(folds[split])
    everything = np.concatenate(list(held.values()))
    assert len(set(everything)) == len(everything) == 120 - 30 - 3  # without a statement; of small sites
    x, _y = next(iter(data.client_dataloader("3", "test")))
    assert x.shape[1:] == (12, 1000) and x.dtype == torch.float32
    assert {int(number) - 1 for number in x[:, 0, 0]} == set(data.indices("3", "test"))


def test_a_finding_is_not_hidden_by_norm(tmp_path):
    data = ready(write(tmp_path))
    labels = data._splits["train"].labels
    assert labels[:4].tolist() == [0, 1, 2, -1]
    normal = ready(str(tmp_path), task="normal")
    assert normal._splits["train"].labels[:4].tolist() == [0, 1, 1, -1] and normal.num_classes == 2


def test_what_is_left_out_and_who_moved_is_said(tmp_path):
    with pytest.warns(UserWarning) as said:
        PTBXLDataModule(write(tmp_path), min_records=5).setup()
    texts = [str(one.message) for one in said]
    assert any(
        "leaves out 33 of 120 records: 30 have no diagnostic statement, 1 no site, and 1 sites" in text
        for text in texts
    )

    def move(rows):
        rows[1][4] = "11.0"

    with pytest.warns(UserWarning, match="1 patients have records at two or more sites"):
        PTBXLDataModule(write(tmp_path, move), min_records=5).setup()


def other_fold(rows):
    rows[1][8] = "5"


def fold_eleven(rows):
    rows[0][8] = rows[1][8] = "11"


def no_table(rows):
    rows[4][7] = '"NORM"'


def deep_table(rows):
    rows[4][7] = '"' + "[" * 300 + '"'


def same_file(rows):
    rows[5][9] = rows[4][9]


def half_fold(rows):
    rows[0][8] = rows[1][8] = "1.5"


def new_statement(rows):
    rows[4][7] = "\"{'XYZ': 10.0}\""


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (other_fold, r"sample 2: patient 0.0 is in folds 1 and 5"),
        (fold_eleven, "a strat_fold other than 1 to 10"),
        (no_table, "sample 5: scp_codes 'NORM' is not a table"),
        (deep_table, r"sample 5: scp_codes '\[\[.* is not a table"),
        (same_file, "has the record 'records100/00000/00005_lr' on two lines"),
        (half_fold, "sample 1: '1.5' in column 'strat_fold' is not a whole number"),
        (new_statement, r"sample 5: statement 'XYZ' is not in scp_statements.csv"),
    ],
)
def test_damaged_tables_are_named(change, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        PTBXLDataModule(write(tmp_path, change), min_records=5).setup()


def test_damaged_records_are_named_and_kept_ones_are_read_once(tmp_path, reader):
    data = ready(write(tmp_path), cache=True)
    dataset = data._splits["train"].dataset
    with pytest.raises(ValueError, match=r"00013_lr cannot be read as a record of wfdb \('checksum'\)"):
        dataset[12]
    with pytest.raises(ValueError, match=r"00021_lr has shape \(12, 999\)"):
        dataset[20]
    assert dataset[2][0] is dataset[2][0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"calc_checksum": lambda: [1] * 12}, "its head does not fit: the checksum"),
        ({"checksum": [None] * 12}, "its head does not fit: the checksum"),
        ({"adc_gain": [1000.0] * 11 + [200.0]}, "its head does not fit: no gain"),  # 0 in the file: wfdb takes 200
        ({"units": ["mV"] * 11 + ["uV"]}, "its head does not fit: units .*'uV'."),
        ({"sig_name": list(LEADS[::-1])}, r"its head does not fit: leads \['V6', .*"),
        ({"fs": 250}, "its head does not fit: 250 samples a second"),
    ],
)
def test_a_record_is_what_its_head_says(change, reason, tmp_path, reader):
    reader[3] = change
    with pytest.raises(ValueError, match=rf"00003_lr cannot be read as a record of wfdb \({reason}\); get it again"):
        ready(write(tmp_path))._splits["train"].dataset[2]


def test_missing_tables_and_no_reader(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"ptbxl_database.csv, scp_statements.csv not found"):
        PTBXLDataModule(str(tmp_path / "no")).prepare_data()
    data = ready(write(tmp_path))
    monkeypatch.setitem(sys.modules, "wfdb", None)
    with pytest.raises(ImportError, match="read by wfdb, which is not installed: pip install"):
        data._splits["train"].dataset[0]
    with pytest.raises(ValueError, match="no site has 500 records"):
        PTBXLDataModule(str(tmp_path), min_records=500).setup()


def test_wfdbs_own_files(tmp_path):
    wfdb = pytest.importorskip("wfdb")
    root = write(tmp_path)
    (tmp_path / "records100" / "00000").mkdir(parents=True)
    signal = np.random.default_rng(0).normal(size=(1000, 12)).round(3)
    leads = ["I", "II", "III", "AVR", "AVL", "AVF", "V1", "V2", "V3", "V4", "V5", "V6"]
    folder = str(tmp_path / "records100" / "00000")
    wfdb.wrsamp(
        "00001_lr", fs=100, units=["mV"] * 12, sig_name=leads, p_signal=signal, fmt=["16"] * 12, write_dir=folder
    )
    data = ready(root)
    x, y = data._splits["train"].dataset[0]
    assert np.allclose(x.numpy(), signal.T, atol=1e-3) and int(y) == 0
