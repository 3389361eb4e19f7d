import functools
import operator

import numpy as np
import pytest
import torch
from PIL import Image

from fedlightning.datamodules import ImageFolderDataModule


def draw(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((6, 8, 3), value, dtype=np.uint8)).save(path)


@pytest.fixture
def root(tmp_path):
    """Client a has classes only, b has folders of splits and lacks a class; each image has its own brightness."""
    for number in range(30):
        draw(tmp_path / "a" / ("cat", "dog", "owl")[number % 3] / f"p{number // 2}_{number}.png", number)
    for number in range(12):
        draw(
            tmp_path / "b" / ("train", "test")[number % 4 == 0] / ("cat", "owl")[number % 2] / f"q{number}_0.png",
            100 + number,
        )
    (tmp_path / "a" / "cat" / ".hidden").write_text("")
    return tmp_path


def brightness(data, client, split):
    view = data.client_dataloader(client, split).dataset
    return sorted(round(float(view[k][0].mean()) * 255) for k in range(len(view)))


def test_folders_are_clients_and_splits_are_kept_or_cut(root):
    data = ImageFolderDataModule(str(root), size=(4, 5))
    data.setup()
    assert data.client_ids == ["a", "b"] and data.class_names == ["cat", "dog", "owl"] and data.num_classes == 3
    assert sorted(
        functools.reduce(operator.iadd, (brightness(data, "a", split) for split in ("train", "val", "test")), [])
    ) == list(range(30))
    assert brightness(data, "b", "test") == [100, 104, 108]
    assert len(brightness(data, "b", "val")) == 2 and data.class_counts("b", "train")[1] == 0
    assert data.class_counts("a", "test") == [2, 2, 2]
    x, y = next(iter(data.client_dataloader("a", "train")))
    assert x.shape[1:] == (3, 4, 5) and x.dtype == torch.float32 and y.dtype == torch.int64


def test_grey_cached_transformed_and_read_by_workers(root):
    data = ImageFolderDataModule(
        str(root), size=(4, 4), channels=1, cache=True, transform=lambda x: 1 - x, num_workers=1
    )
    data.setup()
    x, _ = next(iter(data.client_dataloader("b", "test")))
    assert x.shape == (3, 1, 4, 4) and torch.allclose(x.amin(), 1 - torch.tensor(108 / 255))


def test_no_patient_is_in_two_splits(root):
    data = ImageFolderDataModule(str(root), size=(4, 4), group=r"^([pq]\d+)_")
    data.setup()
    held = [{value // 2 for value in brightness(data, "a", split)} for split in ("train", "val", "test")]
    assert not held[0] & held[1] and not held[0] & held[2] and not held[1] & held[2]


def test_a_patient_at_two_clients_is_refused(root):
    draw(root / "b" / "train" / "cat" / "p3_9.png", 1)
    with pytest.raises(ValueError, match=r"p3_9.png: group 'p3' is in the train data of client 'a', too"):
        ImageFolderDataModule(str(root), group=r"^([pq]\d+)_").setup()
    with pytest.raises(ValueError, match=r"group='\(', no regular expression \(missing \)"):
        ImageFolderDataModule(str(root), group="(")
    with pytest.raises(ValueError, match=r"the name does not match group='x\(y\)'"):
        ImageFolderDataModule(str(root), group="x(y)").setup()


def test_damaged_and_strange_files(root):
    data = ImageFolderDataModule(str(root), size=(4, 4))
    data.setup()
    (root / "b" / "test" / "cat" / "q0_0.png").write_bytes(b"\x89PNG cut off")
    with pytest.raises(ValueError, match=r"q0_0.png cannot be read as an image"):
        brightness(data, "b", "test")
    (root / "a" / "cat" / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"notes.txt is not an image by its name"):
        ImageFolderDataModule(str(root)).setup()


def test_missing_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folders of clients"):
        ImageFolderDataModule(str(tmp_path)).prepare_data()
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="has no images in folders of classes"):
        ImageFolderDataModule(str(tmp_path)).setup()
    (tmp_path / "a" / "test").mkdir()
    with pytest.raises(ValueError, match="a folder 'test' and no folder 'train'"):
        ImageFolderDataModule(str(tmp_path)).setup()


def test_a_class_of_one_image_is_asked_about(root):
    draw(root / "a" / "cats" / "p1.png", 3)
    with pytest.warns(
        UserWarning, match="class 'cats' has one of 43 samples. If that is a slip, .* take other folders"
    ):
        ImageFolderDataModule(str(root)).setup()


def test_a_site_that_lacks_a_class_numbers_the_others_as_all_sites_do(root):
    """By its own folders `owl` would be 1 at this site, and 2 at the others."""
    alone = root / "alone"
    alone.mkdir()
    (root / "b").rename(alone / "b")
    data = ImageFolderDataModule(str(alone), size=(4, 5))
    data.setup()
    assert data.named_by_file == {"class_names": ["cat", "owl"]} and data.num_classes == 2
    named = ImageFolderDataModule(str(alone), size=(4, 5), class_names=["cat", "dog", "owl"])
    named.setup()
    assert named.named_by_file == {} and named.num_classes == 3
    assert named.class_counts("b", "train")[:2] == [data.class_counts("b", "train")[0], 0]
    with pytest.raises(ValueError, match=r"there are folders owl, and class_names has \['cat', 'dog'\]"):
        ImageFolderDataModule(str(alone), size=(4, 5), class_names=["cat", "dog"]).setup()
