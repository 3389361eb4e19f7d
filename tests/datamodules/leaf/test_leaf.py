import itertools
import json

import numpy as np
import pytest
import torch
from PIL import Image

from fedlightning.datamodules import (
    LEAFCelebADataModule,
    LEAFFEMNISTDataModule,
    LEAFSent140DataModule,
    LEAFSyntheticDataModule,
    ShakespeareDataModule,
)
from fedlightning.datamodules.leaf.datasets import LETTERS, roles_of

SIZES = {"w_2": (12, 3), "w_10": (20, 5), "w_1": (6, 2)}


def write(root, make, sizes=SIZES, change=lambda found: None):
    """Write train/ and test/ as LEAF's split_data.py does: one file a split, users in any order."""
    for place, split in enumerate(("train", "test")):
        data = {user: make(user, split, counts[place]) for user, counts in sizes.items()}
        found = {
            "users": list(sizes),
            "num_samples": [counts[place] for counts in sizes.values()],
            "user_data": {user: {"x": x, "y": y} for user, (x, y) in data.items()},
        }
        if split == "train":
            change(found)
        (root / split).mkdir(parents=True, exist_ok=True)
        (root / split / f"all_data_niid_{split}_9.json").write_text(json.dumps(found))
    return str(root)


def pixels(user, split, size):
    rng = np.random.default_rng(len(user) + size)
    return rng.random((size, 784)).round(3).tolist(), rng.integers(0, 62, size).tolist()


def test_writers_are_clients_and_the_publishers_test_samples_are_the_test_split(tmp_path):
    data = LEAFFEMNISTDataModule(write(tmp_path, pixels), val_fraction=0.25)
    data.prepare_data()
    data.setup()
    assert data.client_ids == ["w_1", "w_2", "w_10"]
    assert [data.num_samples(c, "test") for c in data.client_ids] == [2, 3, 5]
    assert [data.num_samples(c) + data.num_samples(c, "val") for c in data.client_ids] == [6, 12, 20]
    view = data.client_dataloader("w_2", "test").dataset
    x, y = pixels("w_2", "test", 3)
    assert torch.allclose(torch.stack([a for a, _ in view]).flatten(1), torch.tensor(x))
    assert [int(b) for _, b in view] == y and view[0][0].shape == (1, 28, 28)


def test_the_folder_of_leaf_works_too_and_the_largest_can_be_kept(tmp_path):
    write(tmp_path / "data", pixels)
    data = LEAFFEMNISTDataModule(str(tmp_path), largest=2)
    with pytest.warns(UserWarning, match="keeps the 2 largest of 3 users"):
        data.setup()
    assert data.client_ids == ["w_2", "w_10"]


def test_synthetic_files(tmp_path):
    def make(user, split, size):
        return [[0.5] * 60] * size, [float(k % 10) for k in range(size)]

    data = LEAFSyntheticDataModule(write(tmp_path, make))
    data.setup()
    x, y = next(iter(data.client_dataloader("w_10", "train")))
    assert x.shape == (10, 60) and x.dtype == torch.float32 and y.dtype == torch.int64


def tweet(user, split, size):
    text = f"@{user} I love it, don't you?"
    return [[str(k), "Mon Apr 06", "NO_QUERY", user, text, "training"] for k in range(size)], [
        (0, 4)[k % 2] for k in range(size)
    ]


def test_tweets_become_numbers_of_words(tmp_path):
    root = write(tmp_path, tweet)
    data = LEAFSent140DataModule(root, buckets=50)
    data.setup()
    x, y = next(iter(data.client_dataloader("w_10", "train")))
    assert x.shape == (10, 25) and x.max() <= 50 and (x[:, :8] > 0).all() and (x[:, 8:] == 0).all()
    assert set(y.tolist()) == {0, 1}
    (tmp_path / "embs.json").write_text(json.dumps({"vocab": ["I", "love", "you"], "emba": []}))
    known = LEAFSent140DataModule(root, vocabulary=str(tmp_path / "embs.json"))
    assert known.numbers_of("I love dogs")[:4] == [1, 2, 4, 0] and known.vocabulary_size == 5


def test_celebrities(tmp_path):
    folder = tmp_path / "raw" / "img_align_celeba"
    folder.mkdir(parents=True)

    def make(user, split, size):
        names = [f"{user}_{split}_{k}.jpg" for k in range(size)]
        for k, name in enumerate(names):
            Image.fromarray(np.full((218, 178, 3), 10 * k, dtype=np.uint8)).save(folder / name)
        return names, [k % 2 for k in range(size)]

    root = write(tmp_path, make)
    data = LEAFCelebADataModule(root, cache=True)
    data.setup()
    view = data.client_dataloader("w_2", "test").dataset
    assert view[2][0].shape == (3, 84, 84) and abs(float(view[2][0].mean()) * 255 - 20) < 2
    assert torch.equal(view[2][0], view[2][0])  # from the cache
    (folder / "w_2_test_1.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"w_2_test_1.jpg cannot be read as an image"):
        view[1]
    (folder / "w_2_test_1.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 48 images.*w_2_test_1.jpg"):
        LEAFCelebADataModule(root).setup()


PLAY = """A preface.

ROMEO:
{romeo}
goes on

in another paragraph: here.

JULIET:
{juliet}

Nurse:
Ay.

ROMEO:
{more}
"""


def play(folder, **words):
    path = folder / "play.txt"
    found = {"romeo": "But soft! " * 60, "juliet": "O Romeo! " * 200, "more": "Farewell. " * 80} | words
    path.write_text(PLAY.format(**found))
    return path


def test_roles_of_a_text_are_clients_and_no_sample_crosses_a_cut(tmp_path):
    data = ShakespeareDataModule(str(play(tmp_path)), val_fraction=0.2, test_fraction=0.2)
    with pytest.warns(UserWarning, match=r"1 of 3 roles are left out: they say less than min_chars=1000"):
        data.setup()
    assert data.client_ids == ["JULIET", "ROMEO"] and data.num_classes == 80
    spans = {}
    for client in data.client_ids:
        for split in ("train", "val", "test"):
            held = data.indices(client, split)
            assert (np.diff(held) == 1).all()
            spans[client, split] = (int(held[0]), int(held[-1]) + 81)  # characters that the samples read
    ordered = sorted(spans.values())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ordered))
    x, y = data.client_dataloader("ROMEO", "train").dataset[0]
    said = "".join(LETTERS[code] for code in x)
    assert said == ("But soft! " * 60)[:80] and LETTERS[int(y)] == "B" and x.dtype == torch.int64
    text = "".join(LETTERS[int(data.client_dataloader("ROMEO", "test").dataset[k][1])] for k in range(30))
    assert text in "Farewell. " * 80
    x, y = next(iter(data.client_dataloader("JULIET", "train")))
    assert x.shape == (10, 80) and y.shape == (10,)


def test_steps_between_samples_and_strange_characters(tmp_path):
    path = play(tmp_path, juliet="€5! " * 500)
    data = ShakespeareDataModule(str(path), step=80)
    with pytest.warns(UserWarning, match="500 characters are none of LEAF's 80, such as '€'"):
        data.setup()
    assert (np.diff(data.indices("ROMEO", "train")) == 80).all()
    assert (np.diff(data.indices("ROMEO", "test")) == 1).all()


def lines(user, split, size):
    text = ("To be, or not to be: that is the question. " * 20)[: size + 80]
    return [text[k : k + 80] for k in range(size)], [text[k + 80] for k in range(size)]


def test_leafs_own_roles_are_cut_in_time(tmp_path):
    sizes = {"HAMLET": (400, 20), "GHOST": (30, 5)}
    data = ShakespeareDataModule(write(tmp_path, lines, sizes), val_fraction=0.1)
    data.setup()
    train, val = data.indices("HAMLET", "train"), data.indices("HAMLET", "val")
    assert len(val) == 40 and val[0] - train[-1] > 80
    assert [data.num_samples("GHOST", split) for split in ("train", "val")] == [30, 0]
    x, y = data.client_dataloader("HAMLET", "test").dataset[3]
    assert (
        "".join(LETTERS[code] for code in x) == lines("", "", 20)[0][3] and LETTERS[int(y)] == lines("", "", 20)[1][3]
    )


def without_user_data(found):
    del found["user_data"]


def other_users(found):
    found["users"][0] = "nobody"


def fewer_targets(found):
    found["user_data"]["w_10"]["y"].pop()


def other_count(found):
    found["num_samples"][0] += 1


def other_width(found):
    for row in found["user_data"]["w_2"]["x"]:
        row.pop()


def a_word(found):
    found["user_data"]["w_1"]["x"][0][3] = "ink"


def not_a_number(found):
    found["user_data"]["w_1"]["x"][0][3] = float("nan")


def far_away(found):
    found["user_data"]["w_1"]["x"][0][3] = 1e19


def no_pixel(found):
    found["user_data"]["w_1"]["x"][0][3] = 255


def large_label(found):
    found["user_data"]["w_1"]["y"][0] = 62


def half_a_label(found):
    found["user_data"]["w_1"]["y"][0] = 1.5


def endless_label(found):
    found["user_data"]["w_1"]["y"][0] = 10**21


def a_number_for_a_user(found):
    found["users"][0] = 7


def a_list_for_a_user(found):
    found["user_data"]["w_1"] = [[0.5], [1]]


def one_count(found):
    found["num_samples"] = 3


def a_list_of_data(found):
    found["user_data"] = list(found["users"])


def a_digit_in_quotes(found):
    found["user_data"]["w_1"]["x"][0] = ["1"] * 784


def other_digits(found):
    found["user_data"]["w_1"]["y"][0] = "1_0"


def without_a_user(found):
    del found["user_data"]["w_1"]
    found["users"].remove("w_1")
    found["num_samples"].pop()


def nobody(found):
    found.update(users=[], user_data={}, num_samples=[])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (nobody, "is not a list of users, table and list"),
        (without_user_data, "no 'users' and 'user_data'"),
        (other_users, "do not name the same users, such as 'nobody'"),
        (fewer_targets, "user 'w_10' has 20 inputs x, 19 targets y"),
        (other_count, "num_samples 13; they must agree"),
        (other_width, r"user 'w_2' has inputs of shape \(12, 783\)"),
        (a_word, "user 'w_1' has an input that is not a list of 784 numbers"),
        (not_a_number, "an input with NaN, or far from all others"),
        (far_away, "an input with NaN, or far from all others"),
        (no_pixel, "a pixel outside of 0 ... 1"),
        (large_label, "user 'w_1' has targets from .* to 62; the classes are 0 to 61"),
        (half_a_label, "user 'w_1' has a target that is not a whole number .1.5"),
        (endless_label, "user 'w_1' has a target that is not a whole number"),
        (a_number_for_a_user, "do not name the same users, such as 7"),
        (a_list_for_a_user, "user 'w_1' has None inputs x"),
        (one_count, "is not a list of users, table and list"),
        (a_list_of_data, "is not a list of users, table and list"),
        (a_digit_in_quotes, "user 'w_1' has an input that is not a list of 784 numbers"),
        (other_digits, "user 'w_1' has a target that is not a whole number .*'1_0'"),
        (without_a_user, "1 users have test samples and no training samples, such as 'w_1'"),
    ],
)
def test_damaged_files_are_named(change, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        LEAFFEMNISTDataModule(write(tmp_path, pixels, change=change)).setup()


def test_truncated_missing_and_repeated_files(tmp_path):
    root = write(tmp_path, pixels)
    file = tmp_path / "train" / "all_data_niid_train_9.json"
    text = file.read_text()
    (tmp_path / "train" / "b.json").write_text(text)
    with pytest.raises(ValueError, match=r"b.json: user 'w_2' is in all_data_niid_train_9.json, too"):
        LEAFFEMNISTDataModule(root).setup()
    (tmp_path / "train" / "b.json").write_text("{\n" + text[:40])
    with pytest.raises(ValueError, match=r"b.json cannot be read as JSON: .* line 2"):
        LEAFFEMNISTDataModule(root).setup()
    with pytest.raises(FileNotFoundError, match=r"preprocess.sh"):
        LEAFFEMNISTDataModule(str(tmp_path / "elsewhere")).prepare_data()


@pytest.mark.parametrize(
    ("kind", "make", "match"),
    [
        (LEAFSent140DataModule, pixels, "sample 1 of user 'w_2' has no text in column 5"),
        (LEAFCelebADataModule, pixels, "is not a name of an image file"),
        (ShakespeareDataModule, pixels, "is not a text of 80 characters"),
    ],
)
def test_files_of_another_data_set_are_refused(kind, make, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        kind(write(tmp_path, make)).setup()


@pytest.mark.parametrize(("part", "word"), [("x", "input"), ("y", "target")])
def test_an_empty_text_of_a_role_is_named(part, word, tmp_path):
    def change(found):
        found["user_data"]["w_1"][part][1] = None

    root = write(tmp_path, lambda user, split, size: (["a" * 80] * size, ["b"] * size), change=change)
    with pytest.raises(ValueError, match=f"user 'w_1' has an? {word} '?None'? that"):
        ShakespeareDataModule(root).setup()


def test_files_without_a_test_part_are_told(tmp_path):
    root = write(tmp_path, pixels)
    next((tmp_path / "test").iterdir()).unlink()
    with pytest.warns(UserWarning, match="no files in test/, so nothing is tested"):
        LEAFFEMNISTDataModule(root).setup()


def test_a_mark_at_the_beginning_takes_no_speech_away(tmp_path):
    path = tmp_path / "play.txt"
    path.write_bytes(b"\xef\xbb\xbfROMEO:\nSoft!\n\nJULIET:\nAy me!\n")
    assert roles_of(path) == {"ROMEO": "Soft!\n", "JULIET": "Ay me!\n"}


def test_a_text_without_roles_is_refused(tmp_path):
    path = tmp_path / "novel.txt"
    path.write_text("It was the best of times.\n\nIt was the worst of times.")
    with pytest.raises(ValueError, match="names no role"):
        ShakespeareDataModule(str(path)).setup()
    play(tmp_path)
    with pytest.raises(ValueError, match="no role says min_chars=10000"), pytest.warns(UserWarning):
        ShakespeareDataModule(str(tmp_path / "play.txt"), min_chars=10000).setup()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"users": ["a"], "users": ["b"], "user_data": {}}', "the key 'users' stands there twice"),
        ('{"users": ["a"], "user_data": {"a": {"x": [], "y": [], "y": [1]}}}', "the key 'y' stands there twice"),
        ('{"users": [' + "1" * 5000 + "]}", "4300 digits"),
    ],
)
def test_strange_json_is_refused(text, reason, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.json").write_text(text)
    with pytest.raises(ValueError, match=rf"a.json cannot be read as JSON: .*{reason}"):
        LEAFFEMNISTDataModule(str(tmp_path)).setup()


@pytest.mark.parametrize("text", ['{"words": ["a"]}', '["a", 3]', "[]", '{"vocab": "a b"}'])
def test_a_vocabulary_is_a_list_of_words(text, tmp_path):
    (tmp_path / "embs.json").write_text(text)
    with pytest.raises(ValueError, match=r"embs.json is not a vocabulary"):
        LEAFSent140DataModule(str(tmp_path), vocabulary=str(tmp_path / "embs.json")).numbers_of("so")
