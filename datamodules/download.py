"""Files of a data set: found on disk, or fetched with a checksum."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError


def fetch(urls: Sequence[str], destination: Path, md5: str) -> Path:
    """Download a file to ``destination``, from the first of ``urls`` that has it intact.

    The file appears under its name only when it is complete and its checksum fits (an interrupted download leaves
    nothing behind, and processes that share ``destination`` cannot see half a file).

    Args:
        urls: mirrors, tried in order.
        destination: path to write; its folder is made.
        md5: checksum that the publisher states, in hexadecimal. It guards against accidents.

    Raises:
        OSError: no mirror gave the right file; the message says what each one did.
    """
    destination.parent.mkdir(parents=True, exist_ok=True)
    problems = []
    for url in urls:
        handle, name = tempfile.mkstemp(dir=destination.parent, prefix=f".{destination.name}.")
        try:
            digest = hashlib.md5(usedforsecurity=False)
            with os.fdopen(handle, "wb") as file, urllib.request.urlopen(url, timeout=60) as response:
                while chunk := response.read(1 << 20):
                    digest.update(chunk)
                    file.write(chunk)
            if digest.hexdigest() == md5:
                os.chmod(name, 0o644)
                os.replace(name, destination)
                return destination
            problems.append(f"{url}: md5 {digest.hexdigest()} instead of {md5}")
        except (URLError, OSError) as error:
            problems.append(f"{url}: {error}")
        finally:
            Path(name).unlink(missing_ok=True)
    raise OSError(
        f"Could not download {destination.name} ({'; '.join(problems)}); put it into {destination.parent} by hand."
    )


def find(names: Sequence[str], folders: Sequence[Path]) -> Path | None:
    """The first of ``names`` in the first of ``folders`` that has one."""
    for folder in folders:
        for name in names:
            if (folder / name).exists():
                return folder / name
    return None


def missing(owner: object, names: Sequence[str], root: Path, folders: Sequence[Path]) -> FileNotFoundError:
    """The error for files that are not there."""
    return FileNotFoundError(
        f"{type(owner).__name__} did not find {', '.join(names)} under root={str(root)!r} (looked in "
        f"{', '.join(str(folder) for folder in folders)}); set download: true, or put the files there."
    )
