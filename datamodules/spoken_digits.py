"""Images of digits paired with spoken digits: two modalities that somebody really recorded."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedlightning.datamodules.arrays import ArrayFederatedDataModule
from fedlightning.datamodules.digits import DigitsDataModule
from fedlightning.datamodules.modality_dataset import ModalityDataset, pair_by_class
from fedlightning.datamodules.multimodal_data import MultimodalDataModule
from fedlightning.datamodules.plans import Partitioner
from fedlightning.ranges import Instance, checked, needs
from fedlightning.seeding import generator

NAME = re.compile(r"(\d)_([a-z]+)_(\d+)\.wav")
RATE, WINDOW, HOP, BANDS, FRAMES = 8000, 256, 128, 32, 48
"""8 kHz; windows of 32 ms every 16 ms; mel bands; frames of a sample (0.77 s: 95 % of the recordings are shorter)."""
TEST_TAKES = 5
"""Takes 0 to 4 of each speaker and digit are the test set, as the publishers say."""


class SpokenDigitsDataModule(MultimodalDataModule):
    """Modalities `image` and `audio`: images of digits, each with a recording of somebody who says it.

    The recordings are the Free Spoken Digit Dataset (Jackson et al.; CC BY-SA 4.0): 3000 takes of ten digits by six
    speakers. `audio` is a log-mel spectrogram `(batch, 1, 32, 48)`, with mean 0 and deviation 1 in each recording; `image`
    is what `images` gives. Image and recording of a sample have the same digit. Each is used once, and none is in both
    training and test samples.

    Args:
        root: Folder with `recordings/0_george_0.wav` and so on, or with one `.tar`, `.tar.gz` or `.tar.xz` of them.
        images: The images, such as `MNISTDataModule(root=...)`. Its partitioner is not used. `None` is
            `DigitsDataModule()`, which needs no files.
        partitioner: Divides the samples among clients. `None` is `DirichletPartitioner(num_clients=10, alpha=0.5)`.
            `NaturalPartitioner()` makes a client of each speaker.
        split: `"recordings"`: takes 0 to 4 of each speaker and digit are for testing (the publishers' rule).
            `"speakers"`: all takes of `test_speakers` are.
        test_speakers: The speakers to test on, with `split="speakers"`. Default: the last by name.
        options: The other arguments of `MultimodalDataModule`, by name.

    Raises:
        FileNotFoundError: At `setup`, if there are no recordings in `root`.
        ValueError: If `split` is unknown, or a test speaker is.

    Example:
        >>> from fedlightning.datamodules import MNISTDataModule, SpokenDigitsDataModule
        >>> data = SpokenDigitsDataModule(root="data/fsdd", images=MNISTDataModule(root="data"))
        >>> data.split
        'recordings'
    """

    @checked
    @needs("test_speakers", "split", value="speakers", why="other splits do not look at speakers. Set both.")
    def __init__(
        self,
        root: str = "data/fsdd",
        images: Annotated[ArrayFederatedDataModule, Instance("It pairs images in memory.")] | None = None,
        partitioner: Partitioner | None = None,
        *,
        split: Literal["recordings", "speakers"] = "recordings",
        test_speakers: list[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(partitioner, **options)
        if images is not None and (images.group is not None or images.test_fraction is not None):
            raise ValueError(
                "SpokenDigitsDataModule pairs images one by one; leave group and test_fraction of images out."
            )
        self.root, self.images = Path(root), DigitsDataModule() if images is None else images
        self.split, self.test_speakers = split, test_speakers
        self._speakers: dict[str, np.ndarray] = {}

    def prepare_data(self) -> None:
        """Let the images be downloaded, if they are."""
        self.images.prepare_data()

    def load(self) -> tuple[ModalityDataset, ModalityDataset]:
        sounds, digits, speakers, takes = read_recordings(self.root)
        if self.split == "recordings":
            testing = takes < TEST_TAKES
        else:
            all_speakers = sorted(set(speakers.tolist()))
            testing_speakers = all_speakers[-1:] if self.test_speakers is None else self.test_speakers
            if not testing_speakers or not set(testing_speakers) < set(all_speakers):
                raise ValueError(
                    f"SpokenDigitsDataModule got test_speakers={testing_speakers}; the speakers are "
                    f"{', '.join(all_speakers)}. Name some, not all of them."
                )
            testing = np.isin(speakers, testing_speakers)
        parts = []
        for name, images, chosen in zip(("train", "test"), self.images.load(), (~testing, testing), strict=True):
            heard = np.flatnonzero(chosen)
            seen, spoken = pair_by_class([images.y.numpy(), digits[heard]], generator("spoken digits", name))
            order = torch.randperm(len(seen), generator=generator("spoken digits", name, "order"))
            rows, recordings = torch.from_numpy(seen)[order], heard[spoken][order.numpy()]
            pixels, labels = images.rows(rows)
            self._speakers[name] = speakers[recordings]
            parts.append(ModalityDataset({"image": pixels.float(), "audio": sounds[recordings]}, labels))
        return parts[0], parts[1]

    def groups(self, split: str, dataset: ModalityDataset) -> np.ndarray:
        """Return each sample's speaker.

        Raises:
            ValueError: If speakers are kept apart for testing, or samples are limited.
        """
        if getattr(self.partitioner, "groups", None) is not None:
            return super().groups(split, dataset)
        if self.split == "speakers" or len(self._speakers[split]) != len(dataset):
            raise ValueError(
                "SpokenDigitsDataModule makes a client of each speaker where all of them have training and test samples: "
                "use split='recordings' without max_train and max_test, or another partitioner."
            )
        return self._speakers[split]


def read_recordings(root: Path) -> tuple[Tensor, np.ndarray, np.ndarray, np.ndarray]:
    """Return spectrograms `(recordings, 1, 32, 48)`, digits, speakers and takes, in the order of the file names."""
    from scipy.io import wavfile

    recordings = []
    for name, file in sorted(_files(root), key=lambda pair: pair[0]):
        try:
            rate, wave = wavfile.read(file)
        except Exception as error:  # scipy raises many kinds at damaged files
            raise ValueError(f"{name} cannot be read as a recording ({error}); get it again.") from error
        if rate != RATE or wave.ndim != 1 or wave.dtype != np.int16 or not len(wave):
            raise ValueError(
                f"{name} has {rate} Hz and shape {wave.shape} of {wave.dtype}; FSDD is {RATE} Hz mono of 16 bits."
            )
        digit, speaker, take = NAME.fullmatch(name).groups()  # type: ignore[union-attr]
        recordings.append((log_mel(torch.from_numpy(wave.astype(np.float32) / 32767)), int(digit), speaker, int(take)))
    if not recordings:
        raise FileNotFoundError(
            f"There are no recordings in {root}: no files such as recordings/0_george_0.wav, and no .tar of them. Get the "
            "Free Spoken Digit Dataset and set root to its folder."
        )
    spectrograms, digits, speakers, takes = zip(*recordings, strict=True)
    return torch.stack(spectrograms), np.array(digits), np.array(speakers), np.array(takes)


def _files(root: Path) -> Iterator[tuple[str, io.BytesIO]]:
    """Yield name and bytes of every recording: of files in folders first, else of archives."""
    waves = [
        path for folder in (root, root / "recordings") for path in folder.glob("*.wav") if NAME.fullmatch(path.name)
    ]
    for path in waves:
        yield path.name, io.BytesIO(path.read_bytes())
    if waves:
        return
    for archive in sorted(path for path in root.glob("*.tar*") if path.is_file()):
        with tarfile.open(archive) as opened:  # members are read, never extracted
            for member in opened:
                name = Path(member.name).name
                if member.isfile() and NAME.fullmatch(name):
                    yield name, io.BytesIO(opened.extractfile(member).read())  # type: ignore[union-attr]


def log_mel(wave: Tensor) -> Tensor:
    """Return a log-mel spectrogram with mean 0 and deviation 1, `(1, 32, 48)`; short recordings end in silence.

    Example:
        >>> import torch
        >>> from fedlightning.datamodules.spoken_digits import log_mel
        >>> log_mel(torch.randn(4000)).shape
        torch.Size([1, 32, 48])
    """
    length = WINDOW + HOP * (FRAMES - 1)
    wave = torch.nn.functional.pad(wave, (0, max(0, length - len(wave))))[:length]
    window = torch.hann_window(WINDOW)
    power = torch.stft(wave, WINDOW, HOP, window=window, center=False, return_complex=True).abs().square()
    spectrogram = (_mel_filters() @ power + 1e-6).log()
    return ((spectrogram - spectrogram.mean()) / spectrogram.std().clamp_min(1e-5))[None]


@cache
def _mel_filters() -> Tensor:
    """Return triangular filters `(bands, frequencies)` at equal distances in mel (O'Shaughnessy's formula)."""
    top = 2595 * np.log10(1 + RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, BANDS + 2) / 2595) - 1)
    bins = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    rising = (bins[None] - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins[None]) / (edges[2:] - edges[1:-1])[:, None]
    return torch.from_numpy(np.maximum(0, np.minimum(rising, falling)).astype(np.float32))
