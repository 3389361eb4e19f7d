import numpy as np
import pytest
import torch

from fedlightning.datamodules import ArrayDataset
from fedlightning.datamodules.natural import NaturalSites, SiteSamples


class Clinics(NaturalSites):
    """Two clinics of ten patients each; the second has its own test patients."""

    files = ("table.csv", "images")
    way = "ask the clinics"
    classes = 4
    strata = groups = None

    def read(self):
        y = np.arange(20) % 2
        data = ArrayDataset(torch.arange(20.0)[:, None], torch.from_numpy(y))
        rows = {"b": {"train": list(range(10))}, "a": {"train": np.arange(10, 16), "test": np.arange(16, 20)}}
        return SiteSamples(data, rows, y, self.groups, self.strata, training=ArrayDataset(data.x + 100, data.y))


@pytest.fixture
def root(tmp_path):
    (tmp_path / "table.csv").touch()
    (tmp_path / "images").mkdir()
    return str(tmp_path)


def clinics(root, seed=0, **attributes):
    data = Clinics(root, seed=seed)
    vars(data).update(val_fraction=0.2, test_fraction=0.5, **attributes)
    data.setup()
    return data


def test_what_a_client_lacks_is_cut_from_its_training_samples(root):
    data = clinics(root)
    assert data.client_ids == ["b", "a"] and data.num_classes == 4
    sizes = {client: [data.num_samples(client, split) for split in ("train", "val", "test")] for client in "ab"}
    assert sizes == {"b": [4, 1, 5], "a": [5, 1, 4]}
    assert data.indices("a", "test").tolist() == [16, 17, 18, 19]
    held = [data.indices(client, split) for client in "ab" for split in ("train", "val", "test")]
    assert sorted(np.concatenate(held).tolist()) == list(range(20))
    assert all(x >= 100 for x, _ in data.client_dataloader("b", "train").dataset)
    assert all(x < 100 for x, _ in data.client_dataloader("b", "test").dataset)


def test_the_validation_cut_has_a_seed_of_its_own(root):
    first, again, other = (clinics(root, val_seed=seed) for seed in (1, 1, 2))
    assert first.fingerprint("test") == other.fingerprint("test")
    assert first.fingerprint("val") == again.fingerprint("val") != other.fingerprint("val")
    assert clinics(root, seed=1).fingerprint("test") != first.fingerprint("test")


def test_cuts_keep_groups_and_strata(root):
    whole = clinics(root, groups=np.arange(20) // 2)
    for client in "ab":
        groups = [set(whole.sample_groups(client, split)) for split in ("train", "val", "test")]
        assert sum(map(len, groups)) == len(set.union(*groups))
    data = clinics(root, strata=np.repeat([0, 1, 0, 1], [8, 2, 8, 2]))
    assert sum(data.indices("b", "test") >= 8) == 1


@pytest.mark.parametrize(("name", "kind"), [("table.csv", "nothing"), ("images", "nothing"), ("table.csv", "folder")])
def test_files_that_are_not_there_are_named(root, tmp_path, name, kind):
    path = tmp_path / name
    path.rmdir() if name == "images" else path.unlink()
    if kind == "folder":
        path.mkdir()
    with pytest.raises(FileNotFoundError, match=rf"Clinics: {name} not found in {tmp_path}; ask the clinics\."):
        Clinics(root).setup()


@pytest.mark.parametrize(
    "rows", [{"train": [0, 1, 2], "test": [2, 3]}, {"train": [0, 1, 1]}, {"training": [0, 1], "test": [2]}]
)
def test_a_sample_that_is_trained_on_and_tested_on_and_a_misspelt_split_are_refused(root, monkeypatch, rows):
    whole = Clinics(root).read()
    monkeypatch.setattr(Clinics, "read", lambda self: SiteSamples(whole.dataset, {"a": rows}, whole.labels))
    with pytest.raises(ValueError, match=r"Clinics: client 'a' has \d rows of .* each sample once"):
        clinics(root)


def test_a_client_may_have_test_samples_alone(root, monkeypatch):
    whole, rows = Clinics(root).read(), {"a": {"train": list(range(10))}, "b": {"test": [10, 11]}}
    monkeypatch.setattr(Clinics, "read", lambda self: SiteSamples(whole.dataset, rows, whole.labels))
    assert [clinics(root).num_samples("b", split) for split in ("train", "val", "test")] == [0, 0, 2]


@pytest.mark.parametrize("name", ["labels", "groups", "strata"])
@pytest.mark.parametrize("values", [np.arange(3), np.zeros(20), list(range(20))], ids=["short", "kind", "list"])
def test_labels_are_one_whole_number_for_each_sample(root, monkeypatch, name, values):
    whole = Clinics(root).read()
    given = {"labels": whole.labels} | {name: values}
    monkeypatch.setattr(Clinics, "read", lambda self: SiteSamples(whole.dataset, whole.rows, **given))
    with pytest.raises(ValueError, match=rf"^Clinics has {name} of .* for 20 samples\. Give an array"):
        clinics(root)


@pytest.mark.parametrize(
    ("rows", "why"), [([5, 6], "sample 5, and client 'a' has it too"), ([-1], "sample -1, and there are")]
)
def test_a_sample_is_of_one_client_and_of_the_data_set(root, monkeypatch, rows, why):
    whole, places = Clinics(root).read(), {"a": {"train": list(range(6))}, "b": {"test": rows}}
    monkeypatch.setattr(Clinics, "read", lambda self: SiteSamples(whole.dataset, places, whole.labels))
    with pytest.raises(ValueError, match=f"client 'b' has the {why}"):
        clinics(root)
