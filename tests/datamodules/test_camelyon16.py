import numpy as np
import pytest
import torch

from fedlightning.datamodules import Camelyon16DataModule
from fedlightning.models import DeepMIL

HEADER = "label,tumorp1000,tumorp10000,tumorp40000,hospital,hospital_corrected,slide_name"


def write(root, change=lambda lines: None, places=0):
    root.mkdir(exist_ok=True)
    lines = [HEADER]
    for kind, label, size in (("normal", 0, 12), ("tumor", 1, 8), ("test", None, 6)):
        for k in range(size):
            hospital, name = float(k % 2), f"{kind}_{k + 1:03d}.tif"
            lines.append(f"{k // 2 % 2 if label is None else label},,,,{hospital},{hospital},{name}")
            np.save(root / f"{name}.npy", np.full((3 + k, 6 + places), k + 1, dtype=np.float32))
    change(lines)
    (root / "metadata.csv").write_text("\n".join(lines) + "\n")
    return str(root)


def test_hospitals_and_the_challenges_split(tmp_path):
    data = Camelyon16DataModule(write(tmp_path), val_fraction=0.2, max_tiles=5, batch_size=4)
    data.setup()
    assert data.client_ids == ["0", "1"] and data.num_classes == 2
    assert [[data.num_samples(c, s) for s in ("train", "val", "test")] for c in data.client_ids] == [[8, 2, 3]] * 2
    assert data.class_counts("0", "test") == [2, 1]
    view = data.client_dataloader("1", "test").dataset
    bag, label = view[1]  # test_004: 6 tiles of 4
    assert bag.shape == (5, 6) and (bag == 4).all() and int(label) == 1
    x, y = next(iter(data.client_dataloader("0", "train")))
    assert x.shape == (4, 5, 6) and y.dtype == torch.int64


def test_few_tiles_are_filled_up_and_many_are_chosen_once(tmp_path):
    root = write(tmp_path, places=3)
    np.save(tmp_path / "test_006.tif.npy", np.arange(90, dtype=np.float32).reshape(10, 9))
    data = Camelyon16DataModule(root, max_tiles=4, skip=3)
    data.setup()
    short, _ = data.client_dataloader("0", "test").dataset[0]
    assert (short[3] == 0).all() and (short[:3] == 1).all() and short.shape == (4, 6)
    many, again = (data.client_dataloader("1", "test").dataset[2][0] for _ in range(2))
    assert torch.equal(many, again) and len(many[:, 0].unique()) == 4


def test_what_fills_up_a_bag_does_not_change_the_answer():
    net = DeepMIL(features=6, width=4).eval()
    bag = torch.randn(2, 7, 6)
    assert torch.allclose(net(bag), net(torch.cat([bag, torch.zeros(2, 5, 6)], dim=1)), atol=1e-6)
    assert net(torch.zeros(1, 3, 6)).isfinite().all()


def other_label(lines):
    lines[3] = "1" + lines[3][1:]


def half_label(lines):
    lines[2] = "0.5" + lines[2][1:]


def other_hospital(lines):
    lines[2] = lines[2].replace("1.0", "2.0")


def other_name(lines):
    lines[2] = lines[2].replace("normal_002", "slide_002")


def twice(lines):
    lines.append(lines[5])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (twice, "has the slide 'normal_005.tif' on two lines"),
        (other_label, r"line 4: slide 'normal_003.tif', label 1"),
        (other_hospital, "line 3: .*hospital 2"),
        (half_label, "sample 2: '0.5' in column 'label' is not a whole number"),
        (other_name, "line 3: slide 'slide_002.tif'"),
    ],
)
def test_damaged_metadata_are_named(change, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        Camelyon16DataModule(write(tmp_path, change)).setup()


@pytest.mark.parametrize(
    ("array", "match"),
    [
        (np.zeros(5, dtype=np.float32), r"shape \(5,\)"),
        (np.zeros((5, 6), dtype=np.int64), "of int64"),
        (np.full((5, 6), np.nan, dtype=np.float32), "NaN or a feature beyond 1000"),
        (b"no numpy file", "is not a numpy file"),
        (b"PK\x03\x04no archive", "is not a numpy file"),
        ({"a": np.zeros((5, 6))}, "shape None of NpzFile"),
        (np.zeros((5, 7), dtype=np.float32), "has 7 features and others 6"),
        (np.full((5, 6), 1e39), "NaN or a feature beyond 1000"),
        (np.array([[17, 20224, 30464, 0.1, 0, 0.2]]), "feature beyond 1000: leave columns of places out by skip=3"),
    ],
)
def test_damaged_features_are_named(array, match, tmp_path):
    root = write(tmp_path)
    file = tmp_path / "test_001.tif.npy"
    if isinstance(array, bytes):
        file.write_bytes(array)
    else:
        with file.open("wb") as opened:
            np.savez(opened, **array) if isinstance(array, dict) else np.save(opened, array)
    data = Camelyon16DataModule(root)
    data.setup()
    data.client_dataloader("0", "train").dataset[0]
    with pytest.raises(ValueError, match=match):
        data.client_dataloader("0", "test").dataset[0]


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="fed_camelyon16"):
        Camelyon16DataModule(str(tmp_path)).prepare_data()
    root = write(tmp_path)
    (tmp_path / "tumor_003.tif.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 26 slides' features.*tumor_003.tif.npy"):
        Camelyon16DataModule(root).setup()
