"""Files of a data set: found on disk, or downloaded with a checksum."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError

LARGEST = 2**30
"""Bytes after which a download is broken off: more than any file of the data sets here has."""


def fetch(urls: Sequence[str], destination: Path, sha256: str, largest: int = LARGEST) -> Path:
    """Download a file to `destination`, from the first of `urls` that has it intact.

    The file appears under its name only when it is complete and its checksum fits. An interrupted download leaves
    nothing behind, and processes that share `destination` cannot see half a file.

    Example:
        >>> import hashlib
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from fedlightning.datamodules.download import fetch
        >>> with TemporaryDirectory() as folder:
        ...     mirror, destination = Path(folder, "mirror.txt"), Path(folder, "raw", "data.txt")
        ...     _ = mirror.write_bytes(b"x")
        ...     checksum = hashlib.sha256(b"x").hexdigest()
        ...     fetch([mirror.as_uri()], destination, sha256=checksum).read_bytes()
        b'x'
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    problems = []
    for url in urls:
        handle, name = tempfile.mkstemp(dir=destination.parent, prefix=f".{destination.name}.")
        try:
            digest, size = hashlib.sha256(), 0
            with os.fdopen(handle, "wb") as file, urllib.request.urlopen(url, timeout=60) as response:
                while chunk := response.read(1 << 20):
                    size += len(chunk)
                    if size > largest:
                        raise OSError(f"more than the {largest} bytes that it may have")
                    digest.update(chunk)
                    file.write(chunk)
            if digest.hexdigest() == sha256:
                os.chmod(name, 0o644)
                os.replace(name, destination)
                return destination
            problems.append(f"{url}: SHA-256 {digest.hexdigest()} instead of {sha256}")
        except (URLError, OSError) as error:
            problems.append(f"{url}: {error}")
        finally:
            Path(name).unlink(missing_ok=True)
    raise OSError(
        f"Could not download {destination.name} ({'; '.join(problems)}); put it into {destination.parent} by hand."
    )


def find(names: Sequence[str], folders: Sequence[Path]) -> Path | None:
    """Return the first of `names` in the first of `folders` that has one, or `None`.

    Example:
        >>> from pathlib import Path
        >>> from fedlightning.datamodules.download import find
        >>> find(["absent.gz", "absent"], [Path("nowhere")]) is None
        True
    """
    for folder in folders:
        for name in names:
            if (folder / name).exists():
                return folder / name
    return None


def missing(owner: object, names: Sequence[str], root: Path, folders: Sequence[Path]) -> FileNotFoundError:
    """Return the error for files that were not found.

    Example:
        >>> from pathlib import Path
        >>> from fedlightning.datamodules import MNISTDataModule
        >>> from fedlightning.datamodules.download import missing
        >>> print(missing(MNISTDataModule(), ["a.gz"], Path("data"), [Path("data")]))
        MNISTDataModule did not find a.gz under root='data' (looked in data); set download: true, ...
    """
    return FileNotFoundError(
        f"{type(owner).__name__} did not find {', '.join(names)} under root={str(root)!r} (looked in "
        f"{', '.join(str(folder) for folder in folders)}); set download: true, or put the files there."
    )


def refuse_absent(owner: object, names: Sequence[str], root: Path, way: str) -> None:
    """Refuse a folder that lacks files which nobody downloads.

    Args:
        owner: The data module.
        names: The files that are lacking.
        root: The folder.
        way: How the user gets them.

    Raises:
        FileNotFoundError: If files are lacking.

    Example:
        >>> from pathlib import Path
        >>> from fedlightning.datamodules.download import refuse_absent
        >>> refuse_absent("mine", ["a.csv"], Path("data"), "unpack it there")
        Traceback (most recent call last):
        FileNotFoundError: str: a.csv not found in data; unpack it there.
    """
    if names:
        raise FileNotFoundError(f"{type(owner).__name__}: {', '.join(names)} not found in {root}; {way}.")
