import gzip

import numpy as np
import pytest
import torch

from fedlightning.datamodules import IXITinyDataModule

HOSPITALS = ("Guys", "HH", "IOP")


def nifti(values):
    """Return the bytes of a NIfTI-1 file (Cox et al. 2004): a header of 348 bytes and the values in Fortran's order."""
    header = np.zeros(1, dtype=[("size", "<i4"), ("skip", "V36"), ("dim", "<i2", 8), ("skip2", "V14"), ("type", "<i2"),
        ("bits", "<i2"), ("skip3", "V2"), ("pixdim", "<f4", 8), ("offset", "<f4"), ("slope", "<f4"), ("skip4", "V228"),
        ("magic", "S4")])  # fmt: skip
    header["size"], header["type"], header["bits"], header["offset"], header["slope"] = 348, 16, 32, 352, 1
    header["dim"][0, : values.ndim + 1] = [values.ndim, *values.shape]
    header["pixdim"][0, :4], header["magic"] = 1, b"n+1"
    return header.tobytes() + bytes(4) + values.astype("<f4").tobytes(order="F")


def write(root, change=lambda lines: None, size=18):
    """FLamby's table and IXI_sample: person k has a cube of brightness k + 2 in the middle, which is the mask."""
    lines = ["Patient ID,Manufacturer,Split"]
    for k in range(size):
        name = f"IXI{k + 2:03d}-{HOSPITALS[k % 3]}-{800 + k:04d}"
        lines.append(f"{k + 2},{k % 3},{'test' if k % 6 > 3 else 'train'}")
        mask = np.zeros((12, 10, 14), dtype=np.float32)
        mask[3:9, 3:7, 4:10] = 1
        for kind, values in (("T1", mask * (k + 2)), ("label", mask)):
            folder = root / "IXI_sample" / name / kind
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}_{kind}.nii.gz").write_bytes(gzip.compress(nifti(values)))
    change(lines)
    (root / "metadata_tiny.csv").write_text("\n".join(lines) + "\n")
    return str(root)


def ready(root, **options):
    data = IXITinyDataModule(root, **options)
    data.setup()
    return data


def test_hospitals_and_the_publishers_split(tmp_path):
    data = ready(write(tmp_path), val_fraction=0.3)
    assert data.client_ids == ["Guys", "HH", "IOP"] and data.num_classes is None
    sizes = [[data.num_samples(c, split) for split in ("train", "val", "test")] for c in data.client_ids]
    assert sizes == [[4, 2, 0], [2, 1, 3], [2, 1, 3]]
    alone = ready(str(tmp_path), val_fraction=0.3, hospitals=["HH"])
    assert alone.client_ids == ["HH"] and alone.num_samples("HH", "test") == 3


def test_images_are_resized_and_standardised(tmp_path):
    pytest.importorskip("nibabel")
    data = ready(write(tmp_path), cache=True)
    x, y = next(iter(data.client_dataloader("HH", "test")))
    assert x.shape == (2, 1, 48, 60, 48) and y.shape == (2, 48, 60, 48) and y.dtype == torch.int64
    assert x.mean().abs() < 1e-5 and x.std() == pytest.approx(1, abs=1e-3)
    assert float(y.float().mean()) == pytest.approx(6 * 4 * 6 / (12 * 10 * 14), rel=0.03)
    assert x[0, 0][y[0] == 1].mean() > 1 > 0 > x[0, 0][y[0] == 0].mean()
    dataset = data._splits["test"].dataset
    assert dataset[1][0] is dataset[1][0]


def no_patient(lines):
    lines.pop(4)


def twice(lines):
    lines.append(lines[1])


def other_split(lines):
    lines[2] = lines[2].replace("train", "val")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (no_patient, "metadata_tiny.csv has no patient 5"),
        (twice, "names a patient twice"),
        (other_split, "a Split other than train and test"),
    ],
)
def test_damaged_tables_are_named(change, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        ready(write(tmp_path, change))


def test_strange_folders_and_missing_files(tmp_path):
    root = write(tmp_path)
    extra = tmp_path / "IXI_sample" / "IXI002-HH-0999"
    extra.mkdir()
    with pytest.raises(ValueError, match=r"IXI002-HH-0999: there already is IXI002-Guys-0800"):
        ready(root)
    extra.rename(extra.with_name("notes"))
    with pytest.raises(ValueError, match=r"notes is not a folder of IXI"):
        ready(root)
    (tmp_path / "IXI_sample" / "notes").rmdir()
    next((tmp_path / "IXI_sample" / "IXI003-HH-0801" / "label").iterdir()).unlink()
    with pytest.raises(FileNotFoundError, match=r"label has 0 files"):
        ready(root)
    with pytest.raises(FileNotFoundError, match=r"metadata_tiny.csv, IXI_sample not found"):
        ready(str(tmp_path / "no"))
    with pytest.raises(ValueError, match=r"hospitals=\['Basel'\]"):
        IXITinyDataModule(hospitals=["Basel"])


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (np.zeros((4, 4, 4)), "has shape"),
        (np.full((12, 10, 14), 2.0), "values other than 0 and 1"),
        (None, "cannot be read as NIfTI"),
    ],
)
def test_damaged_masks_are_named(values, match, tmp_path):
    pytest.importorskip("nibabel")
    data = ready(write(tmp_path))
    dataset = data._splits["test"].dataset
    path = dataset.masks[1]
    path.write_bytes(path.read_bytes()[:60] if values is None else gzip.compress(nifti(values)))
    with pytest.raises(ValueError, match=match):
        dataset[1]


def test_a_voxel_that_flattens_its_image_is_named(tmp_path):
    pytest.importorskip("nibabel")
    dataset = ready(write(tmp_path))._splits["test"].dataset
    values = np.random.default_rng(0).normal(size=(12, 10, 14))
    values[3, 2, 1] = 1e30
    dataset.images[1].write_bytes(gzip.compress(nifti(values)))
    with pytest.raises(ValueError, match=r"T1.nii.gz has a number beyond single precision, or far from all others"):
        dataset[1]
