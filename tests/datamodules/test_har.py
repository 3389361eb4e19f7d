import numpy as np
import pytest
import torch

from fedlightning.datamodules import UCIHARDataModule
from fedlightning.datamodules.har import SIGNALS


def write(root, change=lambda folder: None):
    """UCI's layout: training and test parts of different subjects, each subject's activities in turn, several times."""
    for part, subjects in (("train", (1, 3, 11)), ("test", (2, 4))):
        folder = root / part
        (folder / "Inertial Signals").mkdir(parents=True)
        rows = [(s, a) for s in subjects for a in (1, 2, 3, 4, 5, 6, 1, 2) for _ in range(10)]
        (folder / f"subject_{part}.txt").write_text("".join(f"{s}\n" for s, _ in rows))
        (folder / f"y_{part}.txt").write_text("".join(f"{a}\n" for _, a in rows))
        for number, name in enumerate(SIGNALS):
            lines = ["  " + "  ".join([f"{number + k / 1000:.7e}"] * 128) for k in range(len(rows))]
            (folder / "Inertial Signals" / f"{name}_{part}.txt").write_text("\n".join(lines) + "\n")
        (folder / f"X_{part}.txt").write_text("\n".join(" ".join(["0.5"] * 561) for _ in rows) + "\n")
    change(root)
    return str(root)


def test_subjects_are_clients_and_windows_of_two_splits_do_not_overlap(tmp_path):
    data = UCIHARDataModule(write(tmp_path))
    data.setup()
    assert data.client_ids == ["1", "2", "3", "4", "11"] and data.num_classes == 6
    for client in data.client_ids:
        held = {split: data.indices(client, split) for split in ("train", "val", "test")}
        assert data.class_counts(client, "test") == [4, 4, 2, 2, 2, 2]
        for one, other in (("train", "val"), ("val", "test"), ("train", "test")):
            gaps = np.abs(held[one][:, None] - held[other][None])
            classes = data.class_counts(client, one)
            assert min(classes) > 0
            same = _labels(data, client, one)[:, None] == _labels(data, client, other)[None]
            assert gaps[same].min() > 1
    x, _y = next(iter(data.client_dataloader("1", "train")))
    assert x.shape == (32, 9, 128) and x.dtype == torch.float32 and (x[:, 3].floor() == 3).all()


def _labels(data, client, split):
    view = data.client_dataloader(client, split).dataset
    return np.array([int(view[k][1]) for k in range(len(view))])


def test_the_publishers_features(tmp_path):
    data = UCIHARDataModule(write(tmp_path), inputs="features")
    data.setup()
    assert next(iter(data.client_dataloader("4", "train")))[0].shape == (32, 561)


def short_line(root):
    path = root / "test" / "Inertial Signals" / "body_gyro_y_test.txt"
    path.write_text(path.read_text().replace(path.read_text().splitlines()[2], "1.0 2.0", 1))


def fewer_labels(root):
    path = root / "train" / "y_train.txt"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))


def seventh(root):
    path = root / "test" / "y_test.txt"
    path.write_text(path.read_text().replace("6", "7", 1))


def word(root):
    path = root / "train" / "subject_train.txt"
    path.write_text("one\n" + path.read_text())


def infinite(root):
    path = root / "train" / "Inertial Signals" / "body_acc_x_train.txt"
    path.write_text(path.read_text().replace("0.0000000e+00", "1e400", 1))


def beyond(root):
    path = root / "train" / "Inertial Signals" / "body_acc_x_train.txt"
    path.write_text(path.read_text().replace("0.0000000e+00", "1e39", 1))


def underscore(root):
    path = root / "train" / "Inertial Signals" / "body_acc_x_train.txt"
    path.write_text(path.read_text().replace("0.0000000e+00", "1_0", 1))


def half(root):
    path = root / "train" / "y_train.txt"
    path.write_text(path.read_text().replace("1", "1.5", 1))


def large(root):
    path = root / "test" / "subject_test.txt"
    path.write_text(path.read_text().replace("2", "9" * 21, 1))


def packed(root):
    (root / "test" / "y_test.txt").write_bytes(b"\x1f\x8b\x08")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (infinite, "body_acc_x_train.txt, line 1: number 1 is inf"),
        (beyond, r"body_acc_x_train.txt, line 1: number 1 is 1e\+39"),
        (underscore, "body_acc_x_train.txt, line 1: 128 cells, not 128 numbers .*'1_0'"),
        (half, "y_train.txt, line 1: 1.5 is not one of the activity numbers 1 ... 6"),
        (large, r"subject_test.txt, line 1: number 1 is 1e\+21; get it again"),
        (packed, "y_test.txt is not text in UTF-8"),
        (short_line, r"body_gyro_y_test.txt, line \d+: 2 cells, not 128 numbers"),
        (fewer_labels, r"y_train.txt has 239 lines and subject_train.txt 240"),
        (seventh, r"y_test.txt, line 51: 7 is not one of the activity numbers"),
        (word, "subject_train.txt, line 1: 1 cells, not 1 numbers"),
    ],
)
def test_damaged_files_are_named(change, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        UCIHARDataModule(write(tmp_path, change)).setup()


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"subject_train.txt.* and 19 more files"):
        UCIHARDataModule(str(tmp_path)).prepare_data()
