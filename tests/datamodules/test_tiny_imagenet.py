import numpy as np
import pytest
import torch
from PIL import Image

from fedlightning.datamodules import IIDPartitioner, NaturalPartitioner, TinyImageNetDataModule

CLASSES = ("n0002", "n0001", "n0003")


def write(root, change=lambda folder: None):
    """The publisher's layout; the grey value of an image is 60 times its class, and the second class has one grey image."""
    (root / "wnids.txt").write_text("\n".join(CLASSES) + "\n")
    rows = []
    for place, name in enumerate(CLASSES):
        folder = root / "train" / name / "images"
        folder.mkdir(parents=True)
        for k in range(6):
            mode = "L" if (place, k) == (1, 0) else "RGB"
            Image.new(mode, (64, 64), 60 * place if mode == "L" else (60 * place,) * 3).save(
                folder / f"{name}_{k}.JPEG"
            )
        (root / "val" / "images").mkdir(parents=True, exist_ok=True)
        for k in range(2):
            Image.new("RGB", (64, 64), (60 * place,) * 3).save(root / "val" / "images" / f"val_{3 * k + place}.JPEG")
            rows.append(f"val_{3 * k + place}.JPEG\t{name}\t0\t32\t44\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(rows) + "\n")
    change(root)
    return str(root)


@pytest.mark.parametrize("cache", [False, True])
def test_images_and_classes_are_the_files(cache, tmp_path):
    data = TinyImageNetDataModule(write(tmp_path), IIDPartitioner(2), cache=cache)
    data.prepare_data()
    data.setup()
    assert data.class_names == list(CLASSES) and data.num_classes == 3
    for split, total in (("train", 18), ("test", 6)):
        rows = [data.client_dataloader(client, part).dataset for client in data.client_ids for part in _parts(split)]
        samples = [view[k] for view in rows for k in range(len(view))]
        assert len(samples) == total
        for x, y in samples * 2:
            assert x.shape == (3, 64, 64) and torch.allclose(x, torch.full_like(x, 60 * int(y) / 255), atol=0.01)


def _parts(split):
    return ("train", "val") if split == "train" else ("test",)


def test_limits_and_partitions(tmp_path):
    root = write(tmp_path)
    data = TinyImageNetDataModule(root, IIDPartitioner(1), max_train=7, max_test=2, val_fraction=0)
    data.setup()
    assert data.num_samples("0") == 7 and data.num_samples("0", "test") == 2
    for split in ("train", "test"):
        for x, y in data.client_dataloader("0", split).dataset:
            assert x.mean() == pytest.approx(60 * int(y) / 255, abs=0.01)
    with pytest.raises(ValueError, match="no natural groups"):
        TinyImageNetDataModule(root, NaturalPartitioner()).setup()


def unknown(root):
    path = root / "val" / "val_annotations.txt"
    path.write_text(path.read_text().replace("n0003", "n0009", 1))


def no_image(root):
    (root / "val" / "images" / "val_4.JPEG").unlink()


def no_class(root):
    for path in (root / "train" / "n0001" / "images").iterdir():
        path.unlink()


def class_twice(root):
    path = root / "wnids.txt"
    path.write_text(path.read_text() + path.read_text().split()[0])


def none_to_test(root):
    (root / "val" / "val_annotations.txt").write_text("")


def twice(root):
    path = root / "val" / "val_annotations.txt"
    path.write_text("\n".join([*path.read_text().splitlines(), path.read_text().splitlines()[2]]))


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        (none_to_test, ValueError, "val_annotations.txt is empty"),
        (class_twice, ValueError, "wnids.txt has the class 'n.*' on two lines"),
        (twice, ValueError, "has the image 'val_1.JPEG' on two lines"),
        (unknown, ValueError, "val_annotations.txt, line 5: not a file, a class of wnids.txt"),
        (no_image, FileNotFoundError, "1 of 6 images .* such as .*val_4.JPEG"),
        (no_class, FileNotFoundError, "no images in .*n0001"),
    ],
)
def test_wrong_files_are_named(change, kind, match, tmp_path):
    with pytest.raises(kind, match=match):
        TinyImageNetDataModule(write(tmp_path, change), IIDPartitioner(2)).setup()


def test_damaged_images_and_missing_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"wnids.txt, train, val/val_annotations.txt not found"):
        TinyImageNetDataModule(str(tmp_path)).prepare_data()
    data = TinyImageNetDataModule(write(tmp_path), IIDPartitioner(1))
    (tmp_path / "train" / "n0001" / "images" / "n0001_3.JPEG").write_bytes(np.zeros(9, np.uint8).tobytes())
    data.setup()
    with pytest.raises(ValueError, match=r"n0001_3.JPEG cannot be read as an image"):
        list(data.client_dataloader("0", "train")) + list(data.client_dataloader("0", "val"))
