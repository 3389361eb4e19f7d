"""Texts in folders, and the configuration that fine-tunes an encoder on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fedlightning.cli import main
from fedlightning.datamodules import ByteTokenizer, DirichletPartitioner, IIDPartitioner, TextFolderDataModule

LANGUAGE = Path(__file__).parents[2] / "configs/language"
SPLITS = ("train", "val", "test")


@pytest.fixture
def mails(tmp_path):
    for number in range(160):
        kind = ("ham", "spam")[number % 2]
        file = tmp_path / "mails" / kind / f"{number:03}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{'win money' if kind == 'spam' else 'see you'} {number}")
    return tmp_path / "mails"


def rows_of(data, client, split):
    loader = data.client_dataloader(client, split)
    return [] if loader is None else [(bytes(row["input_ids"]).decode(), row["labels"]) for row in loader.dataset]


def test_every_text_is_at_one_client_in_one_split_with_the_class_of_its_folder(mails):
    data = TextFolderDataModule(str(mails), DirichletPartitioner(4, 0.3), ByteTokenizer(), val_fraction=0.25)
    rows = [row for client in data.client_ids for split in SPLITS for row in rows_of(data, client, split)]
    files = [(file.read_text(), int(file.parent.name == "spam")) for file in mails.glob("*/*.txt")]
    assert sorted(rows) == sorted(files) and data.class_names == ["ham", "spam"]
    counts = [Counter(label for _, label in rows_of(data, client, "train")) for client in data.client_ids]
    assert max(count[0] / count.total() for count in counts) > 0.7  # skewed


def test_fewer_texts_are_drawn_by_the_seed(mails):
    few = [
        TextFolderDataModule(str(mails), DirichletPartitioner(2, 10.0), ByteTokenizer(), max_texts=40, seed=seed)
        for seed in (0, 0, 1)
    ]
    texts = [
        {row for client in data.client_ids for split in SPLITS for row in rows_of(data, client, split)} for data in few
    ]
    assert texts[0] == texts[1] != texts[2] and [len(some) for some in texts] == [40, 40, 40]


def test_classes_are_all_visible_folders_whatever_few_texts_are_drawn(mails):
    for name in ("mails/.git/config", "mails/ham/.DS_Store", "mails/rare/0.txt"):
        file = mails.parent / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("hidden" if "/." in name else "rare")
    data = [TextFolderDataModule(str(mails), IIDPartitioner(2), ByteTokenizer(), max_texts=n) for n in (None, 20)]
    assert [some.class_names for some in data] == [["ham", "rare", "spam"]] * 2
    rows = [{row for c in "01" for split in SPLITS for row in rows_of(some, c, split)} for some in data]
    assert len(rows[0]) == 161 and "hidden" not in dict(rows[0])
    assert rows[1] < rows[0] and {label for _, label in rows[1]} == {0, 2}


def test_texts_are_utf_8_on_every_machine(mails):
    (mails / "ham/000.txt").write_bytes("sch\u00f6n".encode())
    program = (
        "from fedlightning.datamodules import *\n"
        "data = TextFolderDataModule('.', IIDPartitioner(1), ByteTokenizer(), test_fraction=0, val_fraction=0)\n"
        "print(list('sch\\u00f6n'.encode()) in [row['input_ids'] for row in data.client_dataloader('0', 'train').dataset])"
    )
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=mails, env=ascii_only, capture_output=True, text=True, check=False)
    assert done.stdout.split()[-1:] == ["True"], done.stderr


def test_a_text_without_tokens_is_refused(mails):
    (mails / "ham/000.txt").write_text("")
    with pytest.raises(ValueError, match=r"Row \d+ of client '0' \(\w+\) has no tokens"):
        TextFolderDataModule(str(mails), IIDPartitioner(1), ByteTokenizer())


def test_a_folder_without_classes_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no texts in .*write .*/<class>/<file>"):
        TextFolderDataModule(str(tmp_path), DirichletPartitioner(2, 1.0), ByteTokenizer())


@pytest.fixture
def encoder(tmp_path):
    """A tiny random encoder with a tokenizer of words, as a folder."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    pytest.importorskip("peft")
    words = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "win", "money", "see", "you"))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = str(tmp_path / "encoder")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    transformers.BertModel(transformers.BertConfig(vocab_size=6, pad_token_id=0, **sizes)).save_pretrained(folder)
    return folder


def places(encoder, mails, out):
    return [
        f"--model.init_args.model.init_args.folder={encoder}",
        f"--data.init_args.tokenizer={encoder}",
        f"--data.init_args.root={mails}",
        f"--trainer.default_root_dir={out}",
        "--trainer.max_rounds=4",
        "--model.init_args.lr=0.02",
    ]


def test_the_configuration_of_mails_learns_and_sends_adapters_and_the_head(encoder, mails, tmp_path):
    assert main(["fit", f"--config={LANGUAGE / 'mails.yaml'}", *places(encoder, mails, tmp_path)]) == 0
    summary = json.loads((tmp_path / "mails/version_0/summary.json").read_text())
    numbers = 2 * (32 * 8 + 8 * 32) + 2 * 32 + 2  # query and value, and the head
    assert summary["bytes_up"] == 4 * 8 * 4 * numbers
    accuracy = [row["mean"] for row in summary["results"] if row["metric"] == "test_accuracy"]
    assert max(accuracy) > 0.9


@pytest.mark.slow
def test_the_methods_of_mails_run(encoder, mails, tmp_path):
    words = places(encoder, mails, tmp_path)
    words = [word for word in words if "default_root_dir" not in word]
    grid = str(LANGUAGE / "mails_methods.yaml")
    assert main(["compare", "--grid", grid, "--seeds", "1", "--out", str(tmp_path / "out"), *words]) == 0
    assert (tmp_path / "out/report/report.html").exists() or list((tmp_path / "out").rglob("report.html"))


def test_a_site_may_lack_a_folder_of_a_class(mails):
    """Its file alone would number the classes otherwise than another's."""
    parts = IIDPartitioner(1), ByteTokenizer()
    here = TextFolderDataModule(str(mails), *parts)
    assert here.named_by_file == {"class_names": here.class_names} and "class_names" in here.coupling
    named = TextFolderDataModule(str(mails), *parts, class_names=["eggs", *here.class_names])
    assert named.named_by_file == {} and not named.coupling and named.meaning["targets"] == named.class_names
    labels = {int(label) for batch in named.train_dataloader() for label in batch["labels"]}
    assert labels == set(range(1, 1 + len(here.class_names)))
    with pytest.raises(ValueError, match=r"there are folders .*, and class_names has"):
        TextFolderDataModule(str(mails), *parts, class_names=["eggs", here.class_names[0]])
