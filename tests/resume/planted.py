"""Files of a run with something else in them, for tests: planted pickles, and other content under a right checksum."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from fedlightning.callbacks import SCAFFOLD, LocalCheckpoint
from fedlightning.codec.container import layout
from fedlightning.codec.tree import Writer, load
from fedlightning.resume.manifest import sum_of
from fedlightning.storage.files import sha256
from tests.helpers import Toy, make_trainer, toy_data


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, flag: Path) -> None:
        self.flag = str(flag)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.flag,)


def as_pickle(path: Path, flag: Path) -> None:
    """Put a bare pickle into a file."""
    path.write_bytes(pickle.dumps(Evil(flag)))


def as_archive(path: Path, flag: Path) -> None:
    """Put a pickle where `torch.load` looks for one, next to what was there."""
    file = io.BytesIO()
    torch.save({"state_dict": {"a": torch.ones(1)}, "evil": Evil(flag)}, file)
    path.write_bytes(file.getvalue())


def as_legacy(path: Path, flag: Path) -> None:
    """Put a pickle into a file of the format that torch wrote before 1.6."""
    torch.save({"a": Evil(flag)}, path, _use_new_zipfile_serialization=False)


def as_yaml(path: Path, flag: Path) -> None:
    """Put a YAML tag that makes Python objects into a file."""
    path.write_text(f'evil: !!python/object/apply:os.mkdir ["{flag}"]\n')


PLANTS = {plant.__name__: plant for plant in (as_pickle, as_archive, as_legacy, as_yaml)}


def make_run(root: Path, rounds: int = 2, **options: Any) -> Any:
    """Return a fitted trainer whose run is `root/run/version_0`."""
    trainer = trainer_of(root, rounds, **options)
    trainer.fit(toy(), datamodule=toy_data())
    (trainer.run.path / "config.yaml").write_text("trainer: {seed: 3}\n")
    return trainer


def trainer_of(root: Path, rounds: int = 2, **options: Any) -> Any:
    """Return the trainer of such a run."""
    return make_trainer(root, [SCAFFOLD(), LocalCheckpoint()], max_rounds=rounds, name="run", seed=3, **options)


def toy() -> Toy:
    """Return the module of such a run."""
    torch.manual_seed(0)
    return Toy("sgd")


def resume(root: Path, rounds: int = 3, **options: Any) -> Any:
    """Go on with such a run, as somebody does who trusts checksums."""
    trainer = trainer_of(root, rounds)
    trainer.fit(toy(), datamodule=toy_data(), resume=root / "run" / "version_0", **options)
    return trainer


def evaluate(root: Path) -> Any:
    """Score such a run again."""
    trainer = trainer_of(root)
    trainer.restore(toy(), toy_data(), root / "run" / "version_0")
    return trainer.test()


def sign(last: Path, **changes: Any) -> None:
    """Write the manifest anew, with the checksums of the files as they are, and without the state before."""
    manifest = json.loads((last / "manifest.json").read_text()) | changes
    manifest["sha256"] = {name: sha256(last / name) for name in manifest["sha256"] if (last / name).exists()}
    manifest["check"] = sum_of(manifest)
    (last / "manifest.json").write_text(json.dumps(manifest))
    (last / "manifest-before.json").unlink(missing_ok=True)


def rewrite(path: Path, change: Any) -> None:
    """Change the content of an exported checkpoint."""
    content = torch.load(path, weights_only=True)
    torch.save(change(content), path)


def rewrite_values(path: Path, change: Any) -> None:
    """Change the values in a file of a state; what is not a dict then is written all the same."""
    writer = Writer("it")
    text = writer.text(writer.node(change(load(path))))
    path.write_bytes(b"".join(layout(text, writer.tensors)))


def repack(path: Path, compression: int) -> None:
    """Pack the entries of an archive."""
    with zipfile.ZipFile(path) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries:
            archive.writestr(name, content)
