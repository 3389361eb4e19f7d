import numpy as np
import pytest
import torch

from fedlightning.datamodules import LEAFSent140DataModule, TextTableDataModule
from fedlightning.datamodules.word_numbers import WordNumbers

NOTES = ("Chest pain, worse at night.", "Fever; cough", 'Says "no pain", alert', "Fell; hip hurts")


def write(folder, change=lambda rows: rows):
    rows = [
        [
            str(100 + k // 2),
            ("SEPSIS", "CHEST PAIN")[k % 4 // 2],
            f'"{NOTES[k % 4].replace(chr(34), chr(34) * 2)}"',
            str(k % 2),
        ]
        for k in range(40)
    ]
    path = folder / "notes.csv"
    lines = ["subject,diagnosis,note,died", *(",".join(row) for row in change(rows))]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_words_are_numbers_of_the_texts_and_diagnoses_are_clients(tmp_path):
    data = TextTableDataModule(write(tmp_path), "died", "note", client="diagnosis", group="subject", max_words=6)
    data.setup()
    assert data.client_ids == ["CHEST PAIN", "SEPSIS"] and data.num_classes == 2
    expected = {tuple(data.numbers_of(note)) for note in NOTES}
    home = {}
    for client in data.client_ids:
        for split in ("train", "val", "test"):
            view = data.client_dataloader(client, split).dataset
            for place, row in enumerate(data.indices(client, split)):
                x, _ = view[place]
                assert x.dtype == torch.int64 and tuple(x.tolist()) == tuple(data.numbers_of(NOTES[row % 4]))
                assert home.setdefault(row // 2, (client, split)) == (client, split)
    assert len(expected) == 4 and len(home) == 20
    (tmp_path / "new.csv").write_text(f"note\nPain {NOTES[0].split()[0]}\n")
    (new,) = data.inputs_of(tmp_path / "new.csv", "SEPSIS")
    assert new.dtype == torch.int64 and new.tolist() == list(data.numbers_of(f"Pain {NOTES[0].split()[0]}"))


def test_a_public_vocabulary(tmp_path):
    (tmp_path / "words.txt").write_text("pain\nFever\ncough\n")
    data = TextTableDataModule(
        write(tmp_path),
        "died",
        "note",
        client="diagnosis",
        group="subject",
        vocabulary=str(tmp_path / "words.txt"),
        max_words=4,
    )
    assert data.vocabulary_size == 5 and data.numbers_of("Fever; pain today") == [2, 4, 1, 4]


def test_the_numbers_are_those_of_sent140():
    tweets, notes = LEAFSent140DataModule("x", max_words=9), TextTableDataModule("x.csv", "y", "t", "c", max_words=9)
    assert tweets.numbers_of(NOTES[0]) == notes.numbers_of(NOTES[0]) and tweets.vocabulary_size == notes.vocabulary_size


def test_no_word_is_padding():
    words = WordNumbers(buckets=2, max_words=40)
    numbers = words(" ".join(f"word{k}" for k in range(30)))
    assert set(numbers[:30]) == {1, 2} and numbers[30:] == [0] * 10


def without_text(rows):
    rows[3][2] = ""
    return rows


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        (without_text, {}, "sample 4 has no 'note'"),
        (lambda rows: rows, {"text": "notes"}, "no column 'notes' .text.; did you mean 'note'"),
        (lambda rows: rows, {"categorical": ["note"]}, "its only input is a text"),
        (lambda rows: rows, {"categories": {"subject": 3}}, "its only input is a text"),
    ],
)
def test_wrong_tables_are_named(change, options, match, tmp_path):
    given = {"target": "died", "text": "note", "client": "diagnosis", "group": "subject"} | options
    with pytest.raises(ValueError, match=match):
        TextTableDataModule(write(tmp_path, change), **given).setup()


def test_every_number_is_exact(tmp_path):
    data = TextTableDataModule(write(tmp_path), "died", "note", "diagnosis", group="subject", buckets=2**24 - 1)
    data.setup()
    x, _ = data.client_dataloader("SEPSIS", "train").dataset[0]
    row = int(data.indices("SEPSIS", "train")[0])
    assert np.array_equal(x.numpy(), data.numbers_of(NOTES[row % 4]))
