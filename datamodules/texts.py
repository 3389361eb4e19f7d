"""Texts for transformers: tokenized rows of each client, padded into dict batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fedlightning.datamodules.arrays import federate
from fedlightning.datamodules.federated_data import SPLITS
from fedlightning.datamodules.labels import refuse_other_folders
from fedlightning.datamodules.loaders import LoaderDataModule
from fedlightning.datamodules.plans import Partitioner
from fedlightning.datamodules.sampling import AddressedSampler
from fedlightning.errors import import_package
from fedlightning.ranges import Length, PositiveInt, ShareBelowOne, checked
from fedlightning.seeding import generator

IGNORED = -100
"""Label of a token that is not a target, as in transformers."""
OTHERS = ("token_type_ids", "position_ids", "decoder_input_ids", "decoder_attention_mask")
"""Columns of a tokenized row that go into its batch too, padded with 0."""


class ByteTokenizer:
    """Bytes as tokens: a tokenizer that needs no files, for tests and small language models. Vocabulary: 258.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer("Hi")["input_ids"], tokenizer.decode([72, 105, 256])
        ([72, 105], 'Hi')
    """

    eos_token_id, pad_token_id, vocab_size = 256, 257, 258

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        """Return the bytes of a text as `input_ids`."""
        return {"input_ids": list(text.encode())}

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return bytes(token for token in map(int, tokens) if token < 256).decode(errors="replace")


class TextDataModule(LoaderDataModule):
    """Each client's texts as dict batches for transformers: `input_ids`, `attention_mask`, `labels`.

    A row is a dict, of a list or of a `datasets.Dataset`. It has `input_ids` already, with `labels` or `label` (else every
    token is a target), and what a tokenizer puts beside them; where its `attention_mask` is 0 it is padding, which is taken
    away. Or it has texts for the tokenizer:

    * `text` and `label`: a class of each text; `label` is a whole number.
    * `text` alone: a language model's; every token is a target. With `packing` the texts follow each other, with an end of
      text between, and are cut into rows of `max_length` tokens; the last is what is left.
    * `prompt` and `response`: the tokens of the response, and the end after them, are the only targets. They are tokenized
      apart, so that no template is searched for in tokens.

    Rows are cut to `max_length` and padded to the longest of their batch, by their length and not by a token: where a
    tokenizer pads with its end of text, the true end stays a target.

    Args:
        clients: By client id, the rows for training, validation and testing; later ones may be missing.
        tokenizer: Called with a text, it returns `input_ids`; with `eos_token_id`, and perhaps `pad_token_id`. One for all
            clients: they have one model.
        batch_size: Number of rows in a batch.
        max_length: Tokens of a row at most.
        packing: Whether a language model's texts are packed.
        collator: Makes a batch of a list of tokenized rows, as those of transformers do. `None`: as above.

    Raises:
        ValueError: If a row has none of these columns or no token, packed rows have labels, or a client has no training text.

    Example:
        >>> from fedlightning.datamodules.texts import ByteTokenizer, TextDataModule
        >>> rows = [{"prompt": "1+1=", "response": "2"}, {"prompt": "2+2=", "response": "4"}]
        >>> data = TextDataModule({"a": (rows, rows), "b": (rows,)}, ByteTokenizer(), batch_size=2)
        >>> next(iter(data.client_dataloader("a", "val")))["labels"][0].tolist()
        [-100, -100, -100, -100, 50, 256]
    """

    @checked
    def __init__(
        self,
        clients: Mapping[str, Sequence[Any]],
        tokenizer: Any = None,
        batch_size: PositiveInt = 16,
        max_length: PositiveInt = 512,
        packing: bool = False,
        collator: Callable[[list[dict[str, Any]]], Mapping[str, Tensor]] | None = None,
    ) -> None:
        pad = getattr(tokenizer, "pad_token_id", None)
        self.collator = collator or partial(
            pad_rows, pad=(getattr(tokenizer, "eos_token_id", 0) or 0) if pad is None else pad
        )
        self.tokenizer, self.batch_size, self.max_length, self.packing = tokenizer, batch_size, max_length, packing
        splits: list[dict[str, DataLoader[Any]]] = [{}, {}, {}]
        for client, client_splits in clients.items():
            for split, rows, loaders in zip(("train", "val", "test"), client_splits, splits, strict=False):
                if tokenized := self._tokenized(rows, str(client), split):
                    loaders[str(client)] = self._loader(tokenized, str(client), split == "train")
        empty = next((client for client in clients if str(client) not in splits[0]), None)
        if empty is not None:
            raise ValueError(f"Client '{empty}' has no training text. Leave it out, or give it rows.")
        super().__init__(splits[0], splits[1], splits[2])

    @property
    def meaning(self) -> dict[str, list[str]]:
        words: dict[str, int] = getattr(self.tokenizer, "get_vocab", dict)()
        return super().meaning | {"inputs": sorted(words, key=words.__getitem__)} if words else super().meaning

    @property
    def coupled_records(self) -> str:
        if not self.packing:
            return ""
        return "packing=True cuts a client's texts as one, so that each moves all rows after it. Leave packing out."

    def _loader(self, rows: list[dict[str, Any]], client: str, shuffle: bool) -> DataLoader[Any]:
        sampler = AddressedSampler(len(rows), client, shuffle=shuffle)
        return DataLoader(
            rows,  # type: ignore[arg-type]
            self.batch_size,
            sampler=sampler,
            generator=sampler.generator,
            collate_fn=self.collator,
        )

    def _tokenized(self, rows: Any, client: str, split: str) -> list[dict[str, Any]]:
        tokenized = [self._row(row, f"Row {number} of client '{client}' ({split})") for number, row in enumerate(rows)]
        if not self.packing:
            empty = next((number for number, row in enumerate(tokenized) if not len(row["input_ids"])), None)
            if empty is not None:  # a row of padding has scores too, of nothing
                raise ValueError(f"Row {empty} of client '{client}' ({split}) has no tokens. Leave out empty texts.")
            return [{name: cut(value, self.max_length) for name, value in row.items()} for row in tokenized]
        if any("labels" in row for row in tokenized):
            raise ValueError(
                f"Client '{client}' ({split}) has rows with labels or responses, and packing=True makes every token a "
                "target. Leave packing out, or give rows of text alone."
            )
        tokens, size = list(chain.from_iterable(row["input_ids"] for row in tokenized)), self.max_length
        packed = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        return [{"input_ids": row} for row in packed if len(row) > 1]  # one token alone predicts nothing

    def _row(self, row: Mapping[str, Any], place: str) -> dict[str, Any]:
        if "input_ids" in row:
            return _without_padding(row)
        if self.tokenizer is None or not ("text" in row or {"prompt", "response"} <= set(row)):
            way = (
                "give a tokenizer"
                if self.tokenizer is None
                else "name them text, text and label, or prompt and response"
            )
            raise ValueError(f"{place} has the columns {sorted(row)} and no input_ids: {way}.")
        end = [self.tokenizer.eos_token_id]
        if "prompt" in row:
            prompt = list(self.tokenizer(row["prompt"])["input_ids"])
            response = [*self.tokenizer(row["response"], add_special_tokens=False)["input_ids"], *end]
            return {"input_ids": prompt + response, "labels": [IGNORED] * len(prompt) + response}
        tokens = list(self.tokenizer(row["text"])["input_ids"])
        return {"input_ids": tokens, "labels": row["label"]} if "label" in row else {"input_ids": tokens + end}


class TextFolderDataModule(TextDataModule):
    """Texts in folders of their classes, `root/<class>/<file>` in UTF-8, that a partitioner divides among clients.

    Test and validation texts are cut from each client's, stratified by class. Classes are the folders in ascending order
    (`class_names`); what is hidden (`.git`, `.DS_Store`) is left out.

    Args:
        root: Folder of the classes' folders.
        partitioner: Divides the texts.
        tokenizer: As for :class:`TextDataModule`, or a folder that transformers' `AutoTokenizer` reads.
        batch_size: Number of rows in a batch.
        max_length: Tokens of a text at most.
        max_texts: Use only this many texts, chosen by `seed`.
        val_fraction: Share of a client's training texts for validation.
        test_fraction: Share of a client's texts for testing.
        seed: Seed of the division.
        class_names: The folders of classes in their order, where a site may lack some of them.

    Raises:
        FileNotFoundError: If there is no folder of a class with a text.
        ValueError: If there is a folder that `class_names` lacks.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedlightning.datamodules import ByteTokenizer, IIDPartitioner, TextFolderDataModule
        >>> with TemporaryDirectory() as root:
        ...     for number in range(20):
        ...         file = Path(root, ("ham", "spam")[number % 2], f"{number}.txt")
        ...         file.parent.mkdir(exist_ok=True)
        ...         _ = file.write_text("a text")
        ...     data = TextFolderDataModule(root, IIDPartitioner(2), ByteTokenizer())
        >>> data.client_ids, data.class_names, data.num_samples("0")
        (['0', '1'], ['ham', 'spam'], 6)
    """

    @checked
    def __init__(
        self,
        root: str,
        partitioner: Partitioner,
        tokenizer: Any,
        batch_size: PositiveInt = 16,
        max_length: PositiveInt = 512,
        max_texts: PositiveInt | None = None,
        val_fraction: ShareBelowOne = 0.2,
        test_fraction: ShareBelowOne = 0.2,
        seed: int = 0,
        class_names: Annotated[Sequence[str], Length(2, different=True)] | None = None,
    ) -> None:
        if isinstance(tokenizer, str):
            needs = "A tokenizer from a folder needs transformers, which peft brings along"
            tokenizer = import_package("transformers", needs, "lora").AutoTokenizer.from_pretrained(tokenizer)
        files = sorted(file for file in Path(root).glob("[!.]*/[!.]*") if file.is_file())
        if not files:
            raise FileNotFoundError(f"There are no texts in {root}; write {root}/<class>/<file>, as ham/0001.txt.")
        here = sorted({file.parent.name for file in files})
        self.class_names, self._named = list(class_names or here), class_names is not None
        refuse_other_folders(root, here, self.class_names)
        if max_texts is not None:
            order = torch.randperm(len(files), generator=generator(seed, "texts"))[:max_texts]
            files = [files[place] for place in sorted(order.tolist())]
        labels = np.array([self.class_names.index(file.parent.name) for file in files])
        rows = [
            {"text": file.read_text("utf-8", errors="replace"), "label": int(label)}
            for file, label in zip(files, labels, strict=True)
        ]
        by_split: Any = {"train": labels}
        ids, splits = federate(partitioner, {"train": rows}, by_split, by_split, seed, val_fraction, test_fraction)  # type: ignore[dict-item]
        clients = {
            client: tuple([rows[row] for row in splits[name].indices[place]] for name in SPLITS if name in splits)
            for place, client in enumerate(ids)
        }
        super().__init__(clients, tokenizer, batch_size, max_length)

    @property
    def named_by_file(self) -> dict[str, Any]:
        return {} if self._named else {"class_names": self.class_names}


def _without_padding(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenized row as plain numbers: without texts and padding, its class among `labels`."""
    plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}
    if "label" in plain:
        plain.setdefault("labels", plain.pop("label"))
    tokens, labels = plain["input_ids"], plain.get("labels")
    padding = {place for place, kept in enumerate(plain.get("attention_mask", ())) if not kept}
    along = {"input_ids", "attention_mask", *OTHERS[:2]}
    # a decoder's labels are of another length, or happen to be of this one
    if isinstance(labels, list) and len(labels) == len(tokens):
        along |= {"labels"} if all(labels[place] in (IGNORED, tokens[place]) for place in padding) else set()
    return {
        name: [token for place, token in enumerate(value) if place not in padding] if name in along else value
        for name, value in plain.items()
        if not isinstance(value, str)
    }


def cut(value: Any, length: int) -> Any:
    """Return a list of tokens cut to a length; anything else as it is."""
    return value[:length] if isinstance(value, list) else value


def pad_rows(rows: list[dict[str, Any]], pad: int) -> dict[str, Tensor]:
    """Return a batch of rows of tokens; rows without labels are their own targets.

    Example:
        >>> batch = pad_rows([{"input_ids": [5, 6]}, {"input_ids": [7]}], pad=6)
        >>> batch["labels"].tolist(), batch["attention_mask"].tolist()
        ([[5, 6], [7, -100]], [[1, 1], [1, 0]])
    """

    def padded(values: list[list[int]], filling: int) -> Tensor:
        length = max(map(len, values))
        return torch.tensor([[*value, *[filling] * (length - len(value))] for value in values])

    tokens = [list(row["input_ids"]) for row in rows]
    labels = [row.get("labels", row["input_ids"]) for row in rows]
    return {
        "input_ids": padded(tokens, pad),
        "attention_mask": padded([[1] * len(row) for row in tokens], 0),
        **{name: padded([list(row[name]) for row in rows], 0) for name in OTHERS if name in rows[0]},
        "labels": torch.tensor(labels)
        if isinstance(labels[0], int | float)
        else padded([list(row) for row in labels], IGNORED),
    }
