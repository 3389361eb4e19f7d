import numpy as np
import pytest
import torch
from PIL import Image

from fedlightning.datamodules import ImageFolderDataModule
from fedlightning.datamodules.image_files import ImageFiles

RAMP = np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16)


def read(path, array, size=(8, 8), **options):
    Image.fromarray(array).save(path)
    return ImageFiles([path], np.array([0]), size, **options)[0][0]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_grey_of_16_bits_keeps_its_depth(tmp_path, name, channels):
    x = read(tmp_path / name, RAMP.astype(np.int32) if name == "a.pgm" else RAMP, channels=channels)
    expected = torch.from_numpy(RAMP.astype(np.float32)) / 65535
    assert torch.equal(x, expected.expand(channels, 8, 8))  # Pillow's own conversion makes 63 of 64 pixels white
    for crop in (False, True):
        small = read(tmp_path / "b.tif", RAMP, (4, 4), channels=channels, cache=True, crop=crop)
        assert small.shape == (channels, 4, 4) and 0.4 < float(small.mean()) < 0.6 and small.dtype == torch.float32


def test_floats_are_black_at_0_and_white_at_1(tmp_path):
    ramp = (RAMP / 65535).astype(np.float32)
    assert torch.equal(read(tmp_path / "a.tif", ramp, channels=1)[0], torch.from_numpy(ramp))


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.full((4, 4), np.nan, dtype=np.float32), "NaN or outside of 0"),
        (np.full((4, 4), 200, dtype=np.float32), "NaN or outside of 0"),
        (np.full((4, 4), 70000, dtype=np.int32), "whole numbers up to 70000, and nothing says which is white"),
    ],
)
def test_grey_without_a_white_is_refused(tmp_path, array, reason):
    with pytest.raises(ValueError, match=rf"a.tif cannot be read as an image \(.*{reason}.* save it with 8 or 16 bits"):
        read(tmp_path / "a.tif", array)


def test_images_of_8_bits_are_as_pillow_converts_them(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 4), dtype=np.uint8)
    for number, mode in enumerate(("1", "L", "LA", "P", "RGB", "RGBA")):
        path = tmp_path / f"{number}.png"
        Image.fromarray(pixels).convert(mode).save(path)
        for channels, name in ((1, "L"), (3, "RGB")):
            with Image.open(path) as image:
                expected = np.array(image.convert(name)).reshape(5, 6, channels).transpose(2, 0, 1)
            x = ImageFiles([path], np.array([0]), (5, 6), channels=channels)[0][0]
            assert torch.equal(x, torch.from_numpy(expected).float() / 255)


def test_every_error_of_pillow_names_the_file(tmp_path, monkeypatch):
    def fail(path):
        raise TypeError("unsupported operand")  # as a TIFF does whose tag of sizes is damaged

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(ValueError, match=r"a.tif cannot be read as an image \(unsupported operand\)"):
        ImageFiles([tmp_path / "a.tif"], np.array([0]), (4, 4))[0]


def test_other_numbers_of_channels_are_refused():
    with pytest.raises(ValueError, match=r"ImageFolderDataModule got channels=2. Use 1 or 3"):
        ImageFolderDataModule("data", channels=2)
