import numpy as np
import pytest
import torch
from PIL import Image

from fedlightning.datamodules import ISIC2019DataModule
from fedlightning.datamodules.isic2019 import MEAN, STD


def write(root, change=lambda lines: None, lesions=False):
    """FLamby's table and images with a shorter side of 224; image k has the brightness 5 k."""
    folder = root / "ISIC_2019_Training_Input_preprocessed"
    folder.mkdir(parents=True)
    lines = ["image,target,center,fold,fold2"]
    for k in range(42):
        centre, split = k % 6, "test" if k % 7 == 0 else "train"
        lines.append(f"ISIC_{k:07d},{k % 8},{centre},{split},{split}_{centre}")
        Image.fromarray(np.full((224, 300, 3), 5 * k, dtype=np.uint8)).save(folder / f"ISIC_{k:07d}.jpg")
    change(lines)
    (root / "train_test_split").write_text("\n".join(lines) + "\n")
    if lesions:
        rows = [f"ISIC_{k:07d},50,anterior torso,{'' if k == 41 else f'L{k // 12}_{k % 6}'},male" for k in range(42)]
        (root / "ISIC_2019_Training_Metadata.csv").write_text(
            "\n".join(["image,age_approx,anatom_site_general,lesion_id,sex", *rows])
        )
    return str(root)


def images(data, client, split):
    """Return the numbers of the images that a client holds, read from their brightness."""
    view = data.client_dataloader(client, split).dataset
    scale = [torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD)]
    return [round(float((view[k][0] * scale[1] + scale[0]).mean()) * 51) for k in range(len(view))]


def test_centres_and_splits_are_the_publishers(tmp_path):
    data = ISIC2019DataModule(write(tmp_path), augment=False, val_fraction=0.0)
    data.setup()
    assert data.client_ids == ["0", "1", "2", "3", "4", "5"] and data.num_classes == 8
    for centre in range(6):
        held = [k for k in range(42) if k % 6 == centre]
        assert images(data, str(centre), "train") == [k for k in held if k % 7]
        assert images(data, str(centre), "test") == [k for k in held if k % 7 == 0]
    x, y = next(iter(data.client_dataloader("2", "train")))
    assert x.shape == (6, 3, 200, 200) and y.dtype == torch.int64


def test_training_images_alone_are_changed_at_random(tmp_path):
    pytest.importorskip("torchvision")
    data = ISIC2019DataModule(write(tmp_path), centres=["2"])
    data.setup()
    train, test = (data.client_dataloader("2", split).dataset for split in ("train", "test"))
    assert train[0][0].shape == (3, 200, 200) and not torch.equal(train[0][0], train[0][0])
    assert torch.equal(test[0][0], test[0][0]) and data.num_classes == 8


def test_lesions_are_not_cut_apart(tmp_path):
    data = ISIC2019DataModule(write(tmp_path, lesions=True), augment=False, val_fraction=0.4)
    with pytest.warns(UserWarning, match=r"\d+ lesions have training and test images in FLamby's split, such as L"):
        data.setup()
    for centre in data.client_ids:
        fit, val = ({k // 12 for k in images(data, centre, split) if k != 41} for split in ("train", "val"))
        assert val and not fit & val


def wrong_target(lines):
    lines[4] = "ISIC_0000003,8,3,train,train_3"


def wrong_fold(lines):
    lines[4] = "ISIC_0000003,1,3,train,train_6"


def twice(lines):
    lines.append(lines[1])


def no_column(lines):
    lines[:] = [line.rpartition(",")[0] for line in lines]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (wrong_target, "line 5: target 8 and fold2 'train_3'"),
        (wrong_fold, "line 5: target 1 and fold2 'train_6'"),
        (twice, "has 1 images on two lines"),
        (no_column, "no column 'fold2'.*did you mean 'fold'"),
    ],
)
def test_damaged_tables_are_named(change, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        ISIC2019DataModule(write(tmp_path, change)).setup()


def test_missing_and_damaged_images(tmp_path):
    root = write(tmp_path)
    file = tmp_path / "ISIC_2019_Training_Input_preprocessed" / "ISIC_0000009.jpg"
    file.write_bytes(file.read_bytes()[:200])
    data = ISIC2019DataModule(root, augment=False, val_fraction=0.0)
    data.setup()
    with pytest.raises(ValueError, match=r"ISIC_0000009.jpg cannot be read"):
        images(data, "3", "train")
    file.unlink()
    with pytest.raises(FileNotFoundError, match="1 of 42 images"):
        ISIC2019DataModule(root).setup()
    with pytest.raises(FileNotFoundError, match="fed_isic2019"):
        ISIC2019DataModule(str(tmp_path / "no")).prepare_data()
    with pytest.raises(ValueError, match=r"centres=\['6'\]"):
        ISIC2019DataModule(centres=["6"])


def test_a_name_that_no_file_has_is_a_missing_image(tmp_path):
    def lengthen(lines):
        lines[2] = "I" * 300 + lines[2][lines[2].index(",") :]

    with pytest.raises(FileNotFoundError, match="1 of 42 images"):
        ISIC2019DataModule(write(tmp_path, lengthen)).setup()
