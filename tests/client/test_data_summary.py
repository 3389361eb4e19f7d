"""Sites whose inputs or classes mean something else do not train one network."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import fedlightning.datamodules as datamodules
from fedlightning.client.data_summary import DataSummary, describe
from fedlightning.datamodules import (
    DigitsDataModule,
    DriftingDataModule,
    FederatedDataModule,
    HuggingFaceDataModule,
    IIDPartitioner,
    ImageFolderDataModule,
    NaturalPartitioner,
    Partitioned,
    TabularFederatedDataModule,
    TextTableDataModule,
)
from fedlightning.datamodules.texts import TextDataModule


def table(path: Path, columns: str = "age,dose,site,y", **options) -> TabularFederatedDataModule:
    name = path.name
    rows = [f"{40 + i},{i % 7},{name},{i * 0.5}" for i in range(40)]
    path.write_text("\n".join([columns, *rows]))
    return TabularFederatedDataModule(path, **{"target": "y", "client": "site"} | options)


def notes(path: Path, words: str, **options) -> TextTableDataModule:
    (path.parent / f"{path.name}.txt").write_text(words)
    path.write_text("\n".join(["ward,note,died", *(f"{path.name},fever and pain,{i % 2}" for i in range(20))]))
    vocabulary = str(path.parent / f"{path.name}.txt") if words else None
    return TextTableDataModule(path, "died", "note", client="ward", vocabulary=vocabulary, **options)


def rows(path: Path, *labels, inputs="x", names=(), **columns) -> HuggingFaceDataModule:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict(
        {"x": [0.5, 1.0] * 10, "z": [1.0] * 20, "site": [path.name] * 20, "label": [*labels] * (20 // len(labels))}
    )
    data = data.cast_column("label", datasets.ClassLabel(names=list(names))) if names else data
    return HuggingFaceDataModule(data, inputs, client="site")


class Tokenizer:
    eos_token_id = 0

    def __init__(self, *words: str) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1, 2]}


def texts(path: Path, *words: str) -> TextDataModule:
    return TextDataModule({path.name: ([{"text": "a", "label": 0}, {"text": "b", "label": 1}],)}, Tokenizer(*words))


def pictures(path: Path, **options) -> ImageFolderDataModule:
    for number in range(20):
        file = path / path.name / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((5, 5, 3), dtype=np.uint8)).save(file)
    return ImageFolderDataModule(path, **{"size": (4, 4)} | options)


class Own(LightningDataModule):
    """A data module that knows no clients, as a site may have it."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.meaning = {"inputs": [f"dose in {unit}"]}

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(8, 2), torch.arange(8) % 2), batch_size=4)


def one(path: Path) -> NaturalPartitioner:
    return NaturalPartitioner(groups=lambda dataset: np.full(len(dataset), path.name))


CASES = {
    "columns in another order": ("inputs", lambda p: table(p), lambda p: table(p, "dose,age,site,y")),
    "another scale": ("inputs", lambda p: table(p), lambda p: table(p, scale="none")),
    "other public statistics": (
        "inputs",
        lambda p: table(p, statistics={"age": [60, 9]}),
        lambda p: table(p, statistics={"age": [50, 9]}),
    ),
    "another target": ("inputs", lambda p: table(p), lambda p: table(p, target="dose")),
    "targets in another unit": ("targets", lambda p: table(p), lambda p: table(p, target_statistics=[150, 75])),
    "classes in another order": (
        "targets",
        lambda p: notes(p, "", classes=["0", "1"]),
        lambda p: notes(p, "", classes=["1", "0"]),
    ),
    "another vocabulary": ("inputs", lambda p: notes(p, "fever pain"), lambda p: notes(p, "pain fever")),
    "a vocabulary and hashes": ("inputs", lambda p: notes(p, "fever"), lambda p: notes(p, "")),
    "other hashes": ("inputs", lambda p: notes(p, "", buckets=10), lambda p: notes(p, "", buckets=20)),
    "other tokens": ("inputs", lambda p: texts(p, "a", "b", "c"), lambda p: texts(p, "b", "a", "c")),
    "words as labels": ("targets", lambda p: rows(p, "cat", "dog"), lambda p: rows(p, "cat", "owl")),
    "numbers below 0 as labels": ("targets", lambda p: rows(p, -5, 1), lambda p: rows(p, -5, 0, 1, 1)),
    "names of labels": (
        "targets",
        lambda p: rows(p, 0, 1, names=["cat", "dog"]),
        lambda p: rows(p, 0, 1, names=["dog", "cat"]),
    ),
    "other columns of a data set": (
        "inputs",
        lambda p: rows(p, 0, 1, inputs=["x", "z"]),
        lambda p: rows(p, 0, 1, inputs=["z", "x"]),
    ),
    "another size of images": ("size", lambda p: pictures(p), lambda p: pictures(p, size=(8, 8))),
    "what the user's own data module says": (
        "inputs",
        lambda p: Partitioned(Own("mg"), one(p), test_fraction=0.0),
        lambda p: Partitioned(Own("g"), one(p), test_fraction=0.0),
    ),
    "columns of data that drift": (
        "inputs",
        lambda p: DriftingDataModule(table(p, scale="none"), windows=2),
        lambda p: DriftingDataModule(table(p, "dose,age,site,y", scale="none"), windows=2),
    ),
}


@pytest.mark.parametrize(("kind", "first", "other"), CASES.values(), ids=CASES)
def test_one_network_takes_inputs_and_targets_of_one_meaning(kind, first, other, tmp_path):
    sites = []
    for name, make in (("a", first), ("b", other), ("c", first)):
        data = make(tmp_path / name)
        data.setup("fit")
        sites.append(describe(data))
    assert DataSummary.merged([sites[0], sites[2]]).client_ids == ["a", "c"]
    with pytest.raises(
        ValueError, match=rf"sites of 'a' and 'b' have different {kind}, or in another order.*Give every"
    ):
        DataSummary.merged(sites)


def test_a_site_that_lacks_a_named_class_takes_part(tmp_path):
    sites = []
    for name, labels in (("a", (0, 1, 2, 1)), ("b", (0, 1))):
        data = rows(tmp_path / name, *labels, names=["cat", "dog", "owl"])
        data.setup("fit")
        sites.append(describe(data))
    assert DataSummary.merged(sites).client_ids == ["a", "b"]


SITES_OWN = {
    "where the data are": "root path source images download encoding delimiter decimal name clients datamodule data "
    "train val test",
    "which of them": "max_train max_test max_tiles max_texts skip min_records min_windows min_chars largest step hospitals "
    "centres regions drop max_length max_words public public_fraction public_labels least samples val_samples "
    "test_samples sizes num_clients make",
    "how they are divided": "partitioner client group seed val_seed split_seed val_fraction test_fraction test_speakers "
    "test_trial split by windows starts every memory scored sampler iid alpha beta mixture groups shift label_space",
    "how they are read": "batch_size num_workers pin_memory drop_last cache keep collate_fn collator packing flatten",
    "what is changed in them": "augment transform modalities sensors missing missing_labels wrong_labels names noise "
    "positive features strength concepts grows_over",
    "what `meaning` has names of": "inputs label labels target text event event_value task categorical statistics classes "
    "target_statistics scaling scale ranges categories vocabulary buckets tokenizer class_names",
}
"""Options that sites may have different values of, or that are compared by what comes of them."""


def test_every_option_of_every_data_module_is_compared_or_a_sites_own():
    """A new option is one or the other; which of them is for its author to say."""
    names = {name for names in SITES_OWN.values() for name in names.split()}
    kinds = [kind for kind in (getattr(datamodules, name) for name in dir(datamodules)) if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, FederatedDataModule)]
    assert len(kinds) > 20
    for kind in kinds:
        options = set(inspect.signature(kind).parameters) - {"args", "kwargs"}
        assert set(kind.common_options) <= options or inspect.isabstract(kind)
        assert options <= names | set(kind.common_options), kind


def test_options_of_numpy_are_compared_as_numbers():
    class Scaled(DigitsDataModule):
        common_options = ("statistics",)
        statistics: ClassVar = {"age": (np.float32(1.5), np.arange(2))}

    assert Scaled().meaning["statistics"] == ['{"age": [1.5, [0, 1]]}']


def test_names_do_not_travel(tmp_path):
    data = table(tmp_path / "a", partitioner=IIDPartitioner(2), client=None, drop=["site"])
    data.setup("fit")
    assert not re.search("age|dose", str(describe(data).meaning))
