import numpy as np
import pytest
import torch

from fedlightning.datamodules import KUHARDataModule
from fedlightning.datamodules.har import KU_ACTIVITIES


def write(root, change=lambda folder: None):
    """The publisher's layout: a folder for each activity, a file for each recording of a subject."""
    for place, name in enumerate(KU_ACTIVITIES):
        folder = root / f"{place}.{name}"
        folder.mkdir(parents=True)
        if place > 3:
            continue
        for subject in (1001, 1010, 1002):
            for take in range(1, 6):
                t = np.arange(25) / 100
                signals = [t, *[t * 0 + subject] * 3, t, *[np.arange(25) + 100 * take] * 3]
                lines = [",".join(f"{v:.4f}" for v in row) for row in np.stack(signals, axis=1)]
                (folder / f"{subject}_A_{take}.csv").write_text("\n".join(lines) + "\n")
    change(root)
    return str(root)


def test_subjects_are_clients_and_a_recording_is_in_one_split(tmp_path):
    data = KUHARDataModule(write(tmp_path), window=10, min_windows=5)
    data.setup()
    assert data.client_ids == ["1001", "1002", "1010"] and data.num_classes == 18
    for client in data.client_ids:
        home = {}
        for split in ("train", "val", "test"):
            view = data.client_dataloader(client, split).dataset
            for k in range(len(view)):
                x, y = view[k]
                assert x.shape == (6, 10) and x.dtype == torch.float32 and (x[0] == int(client)).all()
                take = int(x[3, 0]) // 100
                assert x[3].tolist() == [100 * take + (int(x[3, 0]) % 100) + step for step in range(10)]
                assert home.setdefault((int(y), take), split) == split
        assert (
            sum(data.num_samples(client, split) for split in ("train", "val", "test")) == 4 * 5 * 2
        )  # 25 samples: 2 windows
        assert set(home.values()) == {"train", "val", "test"}


def gap(root):
    path = root / "0.Stand" / "1001_A_1.csv"
    path.write_text(path.read_text().replace("1001.0000,", ",", 1))


def test_recordings_with_gaps_and_small_subjects_are_left_out_and_said(tmp_path):
    def change(root):
        gap(root)
        (root / "1.Sit" / "1099_A_1.csv").write_text((root / "1.Sit" / "1002_A_1.csv").read_text())

    data = KUHARDataModule(write(tmp_path, change), window=10, min_windows=5)
    with pytest.warns(UserWarning, match="1 recordings with gaps and 1 of 4 subjects"):
        data.setup()
    assert sum(data.num_samples("1001", split) for split in ("train", "val", "test")) == 38


def short_line(root):
    path = root / "2.Talk-sit" / "1002_A_3.csv"
    path.write_text("1,2,3\n" + path.read_text())


def other_file(root):
    (root / "2.Talk-sit" / "notes.csv").write_text("")


def empty_file(root):
    (root / "2.Talk-sit" / "1002_A_3.csv").write_text("")


def other_bytes(root):
    (root / "2.Talk-sit" / "1002_A_3.csv").write_bytes(b"\xff\xfe\x00")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (empty_file, "1002_A_3.csv is empty"),
        (other_bytes, "1002_A_3.csv is not text in UTF-8"),
        (short_line, "1002_A_3.csv, line 1: 3 cells, not 8 numbers"),
        (other_file, "notes.csv is not a recording by its name"),
    ],
)
def test_damaged_files_are_named(change, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        KUHARDataModule(write(tmp_path, change), window=10, min_windows=5).setup()


def test_missing_folders_and_too_many_wanted(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"0.Stand, 1.Sit, .*17.Table-tennis not found"):
        KUHARDataModule(str(tmp_path)).prepare_data()
    with pytest.raises(ValueError, match="no subject has min_windows=41"):
        KUHARDataModule(write(tmp_path), window=10, min_windows=41).setup()
