"""Data of several modalities: pairs, who has what, and what is missing or wrong. Sheet B 4.3."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
import torch
from scipy.io import wavfile
from sklearn.datasets import load_digits

from fedlightning.datamodules import (
    DigitsDataModule,
    DirichletPartitioner,
    IIDPartitioner,
    ModalityDataset,
    NaturalPartitioner,
    PairedDigitsDataModule,
    SpokenDigitsDataModule,
)
from fedlightning.datamodules.modality_dataset import pair_by_class, transition_matrix
from fedlightning.datamodules.spoken_digits import log_mel, read_recordings
from tests.modalities import senses


def ready(data):
    data.prepare_data()
    data.setup()
    return data


def batches(data, client, split="train"):
    return list(data.client_dataloader(client, split) or ())


# -- pairs ---------------------------------------------------------------------------------------------------------


def test_pairs_have_one_class_and_use_nothing_twice():
    draw = np.random.default_rng(0)
    labels = [draw.integers(0, 4, 50), draw.integers(0, 4, 30), draw.integers(1, 5, 40)]
    chosen = pair_by_class(labels, torch.Generator())
    classes = [found[rows].tolist() for found, rows in zip(labels, chosen, strict=True)]
    assert classes[0] == classes[1] == classes[2]
    assert all(len(set(rows.tolist())) == len(rows) for rows in chosen)
    for each in (1, 2, 3):
        assert classes[0].count(each) == min((found == each).sum() for found in labels)
    assert set(classes[0]) == {1, 2, 3}


def test_no_image_is_in_training_and_test_samples():
    data = ready(PairedDigitsDataModule(IIDPartitioner(2), noise=0.0))
    whole = torch.from_numpy(load_digits().images).float() / 16
    owners = {}
    for name, band in {"upper": slice(0, 4), "lower": slice(4, 8)}.items():
        images = {}
        for place, image in enumerate(whole[:, band]):
            images.setdefault(image.numpy().tobytes(), []).append(place)
        for split in ("train", "test"):
            rows = data._splits[split].dataset.inputs[name]
            found = [images[row[0].numpy().tobytes()] for row in rows]
            single = [places[0] for places in found if len(places) == 1]  # halves that several images share say nothing
            assert len(set(single)) == len(single)
            owners[split, name] = set(single)
    train, test = ({i for (s, _), found in owners.items() if s == split for i in found} for split in ("train", "test"))
    assert len(train) > 1000 and len(test) > 300 and not train & test


def test_halves_of_a_sample_are_of_different_images_of_one_digit():
    images, labels = load_digits().images / 16, load_digits().target
    data = ready(PairedDigitsDataModule(IIDPartitioner(2), noise=0.0))
    dataset = data._splits["test"].dataset
    same = 0
    for x, y in (dataset[i] for i in range(60)):
        of_class = torch.from_numpy(images[labels == int(y)]).float()
        upper = (of_class[:, :4] == x["upper"]).flatten(1).all(1)
        lower = (of_class[:, 4:] == x["lower"]).flatten(1).all(1)
        assert bool(upper.any()) and bool(lower.any())
        same += bool((upper & lower).any())
    assert same < 15  # of 60


def test_one_digit_against_the_others():
    data, whole = (ready(PairedDigitsDataModule(IIDPartitioner(2), positive=p)) for p in (7, None))
    assert torch.equal(data._splits["train"].dataset.y, (whole._splits["train"].dataset.y == 7).long())
    assert data.num_classes == 2
    with pytest.raises(ValueError, match="got positive=10"):
        PairedDigitsDataModule(positive=10)


# -- batches -------------------------------------------------------------------------------------------------------


def test_a_batch_is_a_dict_and_whole_batches_equal_single_samples():
    data = ready(senses(3, sensors={"A+D": 1, "A+D+R": 2}))
    view = data.client_dataloader("0", "train").dataset
    x, y = next(iter(data.client_dataloader("0", "val")))
    assert list(x) == ["A", "D", "R"] and y.dtype == torch.int64 and bool(x["R"].isnan().all())
    rows = view.__getitems__([3, 1]).batch()
    for place, position in enumerate((3, 1)):
        alone, label = view[position]
        assert label == rows[1][place]
        for name, values in alone.items():
            torch.testing.assert_close(values, rows[0][name][place], equal_nan=True, atol=0, rtol=0)
    assert not bool(view.dataset.inputs["R"].isnan().any())  # hiding a modality does not change the data


def test_pooled_batches_have_what_each_client_has():
    data = ready(senses(2, sensors={"A": 1, "A+D+R": 1}))
    x, y = zip(*data.pooled_dataloader("test"), strict=True)
    there = ~torch.cat([part["D"] for part in x]).isnan().all(1)
    assert int(there.sum()) == data.num_samples("1", "test") and len(there) == len(torch.cat(y))


# -- corruptions ---------------------------------------------------------------------------------------------------


def test_rates_of_zero_are_the_clean_data_and_others_keep_the_partition():
    clean = ready(PairedDigitsDataModule(max_train=200))
    zero = ready(PairedDigitsDataModule(max_train=200, missing=0.0, missing_labels=0.0, wrong_labels=0.0))
    gone = ready(PairedDigitsDataModule(max_train=200, missing=0.5, seed=0))
    assert clean.fingerprint("train") == zero.fingerprint("train") != gone.fingerprint("train")
    for client in clean.client_ids:
        for (x, y), (a, b) in zip(batches(clean, client), batches(zero, client), strict=True):
            assert torch.equal(y, b) and all(torch.equal(x[name], a[name]) for name in x)
    for client in gone.client_ids:
        assert np.array_equal(gone.indices(client), clean.indices(client))


def test_a_client_lacks_a_modality_in_all_samples_with_the_given_chance():
    data = ready(PairedDigitsDataModule(IIDPartitioner(300, stratified=False), missing=0.3))
    lacking = [2 - len(data.modalities_of(client)) for client in data.client_ids]
    left_out = 300 - len(lacking)
    assert 0.25 < (sum(lacking) + 2 * left_out) / 600 < 0.35
    assert 0.04 < left_out / 300 < 0.15  # 0.09
    client = next(c for c in data.client_ids if data.modalities_of(c) == ("upper",))
    for split in ("train", "val", "test"):
        for x, _ in batches(data, client, split):
            assert bool(x["lower"].isnan().all()) and not bool(x["upper"].isnan().any())


def test_a_client_without_any_modality_is_left_out_with_a_warning():
    with pytest.warns(UserWarning, match=r"leaves client .* no modality: left out"):
        data = ready(senses(20, missing=0.6))
    assert 0 < len(data.client_ids) < 20
    assert all(data.modalities_of(client) for client in data.client_ids)
    with pytest.raises(ValueError, match="leaves no client a modality"):
        ready(senses(2, missing=0.999))


def test_samples_without_labels_are_dropped_from_training_and_validation():
    clean = ready(PairedDigitsDataModule(IIDPartitioner(3)))
    data = ready(PairedDigitsDataModule(IIDPartitioner(3), missing_labels=0.4))
    for client in clean.client_ids:
        held = set(data.indices(client).tolist())
        assert held < set(clean.indices(client).tolist())
        assert 0.5 < len(held) / clean.num_samples(client) < 0.7
        assert data.num_samples(client, "test") == clean.num_samples(client, "test")


def test_transition_matrices_have_the_level_and_the_sparsity():
    matrix = transition_matrix(11, 0.3, 0.4, torch.Generator())
    assert np.allclose(matrix.sum(1), 1) and np.allclose(matrix.diagonal(), 0.7)
    assert ((matrix == 0).sum(1) == 4).all()
    assert np.allclose(matrix[(matrix > 0) & (matrix < 0.5)], 0.3 / 6)
    assert np.array_equal(transition_matrix(2, 0.3, 0.99, torch.Generator()), [[0.7, 0.3], [0.3, 0.7]])


def test_wrong_labels_follow_a_matrix_for_each_client_and_spare_the_test_data():
    clean = ready(PairedDigitsDataModule(IIDPartitioner(2)))
    data = ready(PairedDigitsDataModule(IIDPartitioner(2), wrong_labels=0.3))
    tables = []
    for client in clean.client_ids:
        rows = data.indices(client)
        right, found = (d._splits["train"].dataset.y[rows] for d in (clean, data))
        assert 0.24 < float((right != found).float().mean()) < 0.36
        table = torch.zeros(10, 10)
        table.index_put_((right, found), torch.ones(len(rows)), accumulate=True)
        assert int((table == 0).sum()) >= 40  # 4 of 9 wrong classes are never taken
        tables.append(table == 0)
        assert data.class_counts(client) == torch.bincount(found, minlength=10).tolist()
    assert not torch.equal(*tables)
    assert torch.equal(clean._splits["test"].dataset.y, data._splits["test"].dataset.y)


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match=r"got sensors=.*, but it is for 2 clients; there are 3 clients"):
        ready(senses(3, sensors={"A": 2}))
    with pytest.raises(ValueError, match=r"it names X; there are 3 clients, and the modalities A, D, R"):
        ready(senses(3, sensors={"A+X": 3}))
    with pytest.raises(ValueError, match="either say who has what, or draw it"):
        senses(3, sensors={"A": 3}, missing=0.1)
    with pytest.raises(ValueError, match=r"got modalities=\['X'\]; it has A, D, R"):
        ready(senses(3, modalities=["X"]))
    with pytest.raises(ValueError, match=r"got wrong_labels=1\.5"):
        senses(3, wrong_labels=1.5)
    with pytest.raises(ValueError, match=r"got 'A' as torch\.uint8; a missing modality is NaN"):
        ModalityDataset({"A": torch.zeros(2, 1, dtype=torch.uint8)}, torch.zeros(2))


# -- spoken digits -------------------------------------------------------------------------------------------------

SPEAKERS = ("ann", "bob", "eve")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Seven takes of each digit by three speakers: a tone for the digit, a length for take and speaker."""
    root = tmp_path_factory.mktemp("fsdd")
    (root / "recordings").mkdir()
    for digit in range(10):
        for place, speaker in enumerate(SPEAKERS):
            for take in range(7):
                seconds = np.arange(1000 + 700 * take + 100 * place) / 8000
                wave = (8000 * np.sin(2 * np.pi * (300 + 150 * digit) * seconds)).astype(np.int16)
                wavfile.write(root / "recordings" / f"{digit}_{speaker}_{take}.wav", 8000, wave)
    return root


def spectra(data, split):
    return {values.numpy().tobytes() for values in data._splits[split].dataset.inputs["audio"]}


def test_no_recording_is_in_training_and_test_samples(recordings):
    data = ready(SpokenDigitsDataModule(str(recordings), partitioner=IIDPartitioner(2)))
    sounds, digits, _, takes = read_recordings(recordings)
    split_of = {sound.numpy().tobytes(): take < 5 for sound, take in zip(sounds, takes, strict=True)}
    assert len(split_of) == len(digits) == 210
    train, test = spectra(data, "train"), spectra(data, "test")
    assert len(train) == 60 and len(test) == 150 and not train & test
    assert all(split_of[sound] for sound in test) and not any(split_of[sound] for sound in train)
    digit_of = {sound.numpy().tobytes(): digit for sound, digit in zip(sounds, digits, strict=True)}
    dataset = data._splits["train"].dataset
    assert [digit_of[s.numpy().tobytes()] for s in dataset.inputs["audio"]] == dataset.y.tolist()
    images = {x.numpy().tobytes() for x in DigitsDataModule().load()[1].x}
    assert all(x.numpy().tobytes() in images for x in data._splits["test"].dataset.inputs["image"])


def test_speakers_can_be_kept_apart(recordings):
    sounds, _, speakers, _ = read_recordings(recordings)
    speaker_of = {sound.numpy().tobytes(): str(speaker) for sound, speaker in zip(sounds, speakers, strict=True)}
    data = ready(SpokenDigitsDataModule(str(recordings), partitioner=IIDPartitioner(2), split="speakers"))
    assert {speaker_of[sound] for sound in spectra(data, "test")} == {"eve"}
    assert {speaker_of[sound] for sound in spectra(data, "train")} == {"ann", "bob"}
    with pytest.raises(ValueError, match="the speakers are ann, bob, eve"):
        ready(SpokenDigitsDataModule(str(recordings), split="speakers", test_speakers=["max"]))
    with pytest.raises(ValueError, match="makes a client of each speaker where all of them have"):
        ready(SpokenDigitsDataModule(str(recordings), partitioner=NaturalPartitioner(), split="speakers"))


def test_a_client_can_be_a_speaker(recordings):
    data = ready(SpokenDigitsDataModule(str(recordings), partitioner=NaturalPartitioner(), val_fraction=0.0))
    assert data.client_ids == list(SPEAKERS)
    assert [data.num_samples(client) for client in SPEAKERS] == [20] * 3


def test_an_archive_is_read_as_the_folder_is(recordings, tmp_path):
    with tarfile.open(tmp_path / "fsdd.tar.xz", "w:xz") as archive:
        for path in sorted((recordings / "recordings").iterdir())[:12]:
            archive.add(path, f"recordings/{path.name}")
        other = tarfile.TarInfo("recordings/readme.txt")
        archive.addfile(other, io.BytesIO())
    sounds, digits, speakers, takes = read_recordings(tmp_path)
    whole = read_recordings(recordings)
    assert torch.equal(sounds, whole[0][:12]) and digits.tolist() == whole[1][:12].tolist()
    assert (speakers[7], takes[7]) == ("bob", 0)
    with pytest.raises(
        FileNotFoundError, match=r"There are no recordings in .*: no files such as recordings/0_george_0"
    ):
        read_recordings(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("wave", "reason"),
    [
        (b"RIFF", "3_x_0.wav cannot be read as a recording"),
        (np.zeros(0, dtype=np.int16), r"3_x_0.wav has 8000 Hz and shape \(0,\) of int16"),
        (np.zeros(900, dtype=np.float32), r"3_x_0.wav .* of float32; FSDD is 8000 Hz mono of 16 bits"),
    ],
)
def test_a_damaged_recording_is_named(wave, reason, tmp_path):
    path = tmp_path / "3_x_0.wav"
    path.write_bytes(wave) if isinstance(wave, bytes) else wavfile.write(path, 8000, wave)
    with pytest.raises(ValueError, match=reason):
        SpokenDigitsDataModule(str(tmp_path)).load()


def test_a_tone_is_highest_in_its_band():
    wave = torch.sin(2 * np.pi * 1000 * torch.arange(8000) / 8000)
    found = log_mel(wave)[0]
    top = 2595 * np.log10(1 + 4000 / 700)
    centre = 2595 * np.log10(1 + 1000 / 700) / top * 33 - 1
    assert abs(float(found.mean(1).argmax()) - centre) <= 1
    assert abs(float(found.mean())) < 1e-4 and float(found.std()) == pytest.approx(1.0, abs=1e-3)


def test_partitions_by_label_divide_both_modalities_alike(recordings):
    data = ready(SpokenDigitsDataModule(str(recordings), partitioner=DirichletPartitioner(3, 0.3)))
    for client in data.client_ids:
        y = torch.cat([labels for _, labels in batches(data, client)])
        assert torch.bincount(y, minlength=10).tolist() == data.class_counts(client)
