"""Writing files so that a killed process or a lost disk cache leaves the old one or the new one, never half of it.

And reading them so that whatever their bytes are, they run no code, take no more memory than they are long, and fail with a
sentence. The process that watches many runs reads and writes without torch, which is imported where tensors are.

Files that others append to: how far they were when a state was saved, and whether they are still what they were.

Tables of a run that grow by some rows a round, and of which a resumed run takes back what it writes again.

Configurations as JSON, the same in every process, and a short hash of one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedWriter, BytesIO
from pathlib import Path
from typing import IO, Any, cast

import yaml

from fedlightning.compat import sheets
from fedlightning.errors import warn


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` as JSON can hold it, the same in every process.

    Example:
        >>> plain({"classes": {2: "b", "a": 1}, "names": {"y", "x"}})
        {'classes': {'2': 'b', 'a': 1}, 'names': ['x', 'y']}
    """
    return {name: json.loads(_plain(value)) for name, value in config.items()}


def config_hash(config: Any) -> str:
    """Return a short hash of a configuration."""
    return hashlib.sha256(_plain(config).encode()).hexdigest()[:12]


def _plain(value: Any) -> str:
    return json.dumps(_with_text_keys(value), sort_keys=True, default=_stable)


def _with_text_keys(value: Any) -> Any:
    """Replace what JSON cannot take or sort: keys that are not texts, and sets, whose order differs between processes."""
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else _key(key): _with_text_keys(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_with_text_keys(entry) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(_plain(entry) if not isinstance(entry, str) else entry for entry in value)
    return value


def _key(key: Any) -> str:
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else _stable(key)


def _stable(value: Any) -> str:
    """Return a text that is the same in every process: an object's text may hold addresses in memory."""
    text = str(value)
    if f"{id(value):x}" in text:
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return re.sub(r"0x[0-9a-fA-F]+", "0x", text)


ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TAKEN = (errno.ENOTDIR, errno.EEXIST, errno.EISDIR)


class UnwritableError(OSError):
    """A file of a run that cannot be written: a full disk, a folder without permission, a file where a folder should be."""


class UnreadableError(ValueError):
    """A file whose content is not what it should be."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in a sentence what keeps a file or folder from being written.

    Example:
        >>> with writing(Path("runs/a/metrics.csv")):
        ...     raise OSError(errno.ENOSPC, "No space left on device")
        Traceback (most recent call last):
        fedlightning.storage.files.UnwritableError: runs/a/metrics.csv cannot be written: No space left on device. Make...
    """
    try:
        yield
    except UnwritableError:
        raise
    except OSError as error:
        if error.errno in ROOM:
            way_out = "Make room, then go on"
        elif error.errno in TAKEN:
            way_out = "Something else lies in its place: choose another default_root_dir, name or version, or go on"
        else:
            way_out = "Use a folder that you may write into (default_root_dir), or mend this one and go on"
        raise UnwritableError(
            f"{path} cannot be written: {error.strerror or error}. {way_out} with resume: a state that was saved before is "
            "untouched."
        ) from error


def is_writing_process() -> bool:
    """Return True in the one process of a run that writes files (rank 0 under DDP)."""
    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")  # torchrun sets RANK and GROUP_RANK, Lightning the others
    return all(int(os.environ.get(rank, 0)) == 0 for rank in ranks)


def broadcast_from_rank_zero(value: Any) -> Any:
    """Return the value of the first process of a group, in all of them: they stop after the same round, or wait for ever."""
    import torch

    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        agreed = [value]
        torch.distributed.broadcast_object_list(agreed, src=0)
        return agreed[0]
    return value


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only this user reads, and wait until it and its name are on the disk."""
    with replacing(path, secret=True) as temporary, temporary.open("wb") as file:
        file.write(content)
        file.flush()
        sync(file.fileno())
    sync_folder(path.parent)


def save_tensors(value: Any, path: Path) -> None:
    """Write a value with `torch.save`; what the disk refuses is an OSError, as for any other file.

    `torch.save` turns the error of a full disk into a RuntimeError about positions in an archive.
    """
    import torch

    with path.open("wb") as file:
        watched = _Watched(file)
        try:
            torch.save(value, cast(IO[bytes], watched))  # all that it asks of a file is write
        except RuntimeError as error:
            raise (watched.refused or error) from error


class _Watched:
    """A file to write to that remembers the error by which it refused."""

    def __init__(self, file: BufferedWriter) -> None:
        self.file = file
        self.refused: OSError | None = None
        self.flush = file.flush

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.refused = error
            raise


@contextmanager
def replacing(path: Path, secret: bool = False) -> Iterator[Path]:
    """Give a temporary file to write, and put it in place of `path`; if that fails nothing is left of it.

    A `secret` one is this user's only, before anything is written into it. Whatever writes a secret goes through here.
    """
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        try:
            if secret:
                temporary.unlink(missing_ok=True)  # a leftover that others may read, or a link that leads elsewhere
                os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()  # a full disk needs the room
            raise


def write_text_atomically(path: Path, text: str, lasting: bool = True) -> None:
    """Write a text file so that it is the old one or the new one."""
    with replacing(path) as temporary, temporary.open("w") as file:
        file.write(text)
        if lasting:
            file.flush()
            sync(file.fileno())
    if lasting:
        sync_folder(path.parent)


def readable_json(value: Any, levels: int = 3, default: Callable[[Any], Any] | None = None) -> str:
    """Return JSON with the entries of the outer levels on lines of their own, and each of the inner ones on one line.

    A thousand clients are a thousand lines, and the inner ones are written by `json`'s C code, twenty times as fast.

    Example:
        >>> from fedlightning.storage.files import readable_json
        >>> print(readable_json({"seed": 1, "clients": {"a": {"val": 3, "test": 4}}}, levels=2))
        {
         "seed": 1,
         "clients": {
          "a": {"val": 3, "test": 4}
         }
        }
    """
    return _lines(value, levels, "\n", default)


def _lines(value: Any, levels: int, end: str, default: Callable[[Any], Any] | None) -> str:
    if levels == 0 or not value or not isinstance(value, dict | list | tuple):
        return json.dumps(value, default=default)
    below = partial(_lines, levels=levels - 1, end=end + " ", default=default)
    if isinstance(value, dict):
        # a key is written as `json` writes it: None and numbers become text
        entries = [json.dumps({key: 0})[1:-2] + below(entry) for key, entry in value.items()]
    else:
        entries = [below(entry) for entry in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return first + end + " " + f",{end} ".join(entries) + end + last


def read_mapping(path: Path) -> dict[str, Any]:
    """Return what a JSON or YAML file of a run holds."""
    way_out = "Put it back from a copy, or make the run again."
    try:
        text = path.read_text()
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UnreadableError(f"{path} is damaged ({' '.join(str(error).split())}). {way_out}") from None
    if not isinstance(content, dict):
        raise UnreadableError(f"{path} is damaged (it holds no entries). {way_out}")
    return content


def sync(file: int) -> None:
    """Wait until an open file is on the disk."""
    os.fsync(file)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system opens folders."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sha256(path: Path, size: int | None = None) -> str:
    """Return the SHA-256 of a file, or of its first `size` bytes, in hexadecimal."""
    digest, left = hashlib.sha256(), path.stat().st_size if size is None else size
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


SEAL = b"sha256:"
"""Beginning of the comment at the end of a sealed archive; the checksum of all bytes before it follows."""
SEAL_LENGTH = len(SEAL) + 64


def seal(path: Path) -> None:
    """Append a checksum to a file that `torch.save` wrote: the comment of the archive, which other readers pass over."""
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(SEAL_LENGTH.to_bytes(2, "little"))
    checksum = sha256(path)
    with path.open("ab") as file:
        file.write(SEAL + checksum.encode())


def check_seal(path: Path) -> None:
    """Compare a file with its checksum, or, where it has none, the entries of the archive with theirs."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(-min(size, SEAL_LENGTH), os.SEEK_END)
        tail = file.read()
    if tail.startswith(SEAL):
        if tail != SEAL + sha256(path, size - SEAL_LENGTH).encode():
            raise UnreadableError("its bytes are not those that were written: its checksum is another")
        return
    try:
        with zipfile.ZipFile(path) as archive:
            plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
            broken = archive.testzip() if plain else None  # what is packed is refused elsewhere
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, EOFError) as error:
        raise UnreadableError(f"it is not a whole archive ({error!s:.100})") from None
    if broken is not None:
        raise UnreadableError(f"its entry {broken!r:.60} is damaged")


DIRECTORY = 0x10
"""Bit of a zip entry's attributes that makes it a folder."""


def read_tensors(path: Path | BytesIO) -> Any:
    """Read what :func:`save_tensors` wrote."""
    import torch

    size = path.stat().st_size if isinstance(path, Path) else len(path.getbuffer())
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise UnreadableError("it is packed, which such a file never is")
        if any(entry.external_attr & DIRECTORY for entry in entries):  # torch reads none, and leaves memory as it was
            raise UnreadableError("it marks an entry as a folder, which such a file has none of")
        if sum(entry.file_size for entry in entries) > size:
            raise UnreadableError("it claims to hold more than it is long")
        if isinstance(path, BytesIO):
            path.seek(0)
        return torch.load(path, map_location="cpu", weights_only=True)
    except UnreadableError:
        raise
    except Exception as error:  # whatever torch stumbles over in such bytes
        raise UnreadableError(_in_short(error)) from None


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"it is not JSON ({_in_short(error)})") from None


def _in_short(error: Exception) -> str:
    """Return the reason that an error of torch gives, without its advice to read the file unsafely."""
    text = str(error)
    match = re.search(r"GLOBAL ([\w.]+)", text)
    if match is not None:
        return f"it names {match[1]}, which may be code"
    match = re.search(r"WeightsUnpickler error: ([^\n]{1,200})", text) or re.match(r"(.{1,200}?)(?:\. |\n|$)", text)
    reason = match[1].strip().rstrip(".") if match is not None else ""
    return "it holds no tensors and plain values" if not reason or "eights only" in reason else reason


Mark = dict[str, Any]
"""What is known of a store when a state is saved, in plain values."""


class AppendOnlyFile:
    """A file that grows, and what is known of it without reading it again from its beginning.

    Args:
        path: The file.
        has_header: It is a table, which is written anew when its first line changes.
    """

    def __init__(self, path: Path, has_header: bool = False) -> None:
        self.path, self.has_header = path, has_header
        self._begin(b"")

    def _begin(self, header: bytes) -> None:
        self._header, self._size, self._lines, self._sum = header, 0, 0, hashlib.sha256()

    def __reduce__(self) -> Any:
        """Copies and workers read the file themselves: a checksum under way cannot be pickled."""
        return type(self), (self.path, self.has_header)

    def mark(self) -> Mark:
        """Return size and checksum of the file; of a table also its first line and the number of lines."""
        if not self.path.exists():
            self._begin(b"")
        else:
            with self.path.open("rb") as file:
                header = file.readline() if self.has_header else b""
                if header != self._header or self.path.stat().st_size < self._size:
                    self._begin(header)
                file.seek(self._size)
                while block := file.read(1 << 20):
                    self._lines += block.count(b"\n")
                    self._size += len(block)
                    self._sum.update(block)
        table = {"lines": self._lines, "header": self._header.decode(errors="replace")}
        return {"bytes": self._size, "sha256": self._sum.hexdigest()} | (table if self.has_header else {})


def is_the_one(path: Path, mark: Mark) -> bool:
    """Return whether a file begins with what it was at `mark`."""
    return sha256(path, mark["bytes"]) == mark["sha256"]


def set_aside(path: Path, name: str) -> None:
    """Put a damaged log aside, and say so: the logger gets the run's scores again."""
    os.replace(path, path.with_name(name))
    warn(f"{path} is not what was logged: it is now called {name}, and the run's scores are logged again.")


TAIL_BYTES = 4096
"""Bytes at the end of a file in which its last line is looked for."""


def add_round(path: Path, columns: Sequence[str], number: int, rows: Iterable[Sequence[Any]]) -> None:
    """Add a round's rows to a CSV table. Rows of this round and later ones, left by a run that was resumed, go.

    Where there are none the rows are appended, so that a round costs what it adds. A last line that was cut off goes too.

    Args:
        path: The file; without one it begins.
        columns: Its header. The first column is the round.
        number: The round, from 1.
        rows: The round's rows, the round first.

    Raises:
        UnwritableError: If it cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "rounds.csv"
        >>> for number in (1, 2, 3, 2):  # resumed after round 1
        ...     add_round(path, ["round", "client"], number, [(number, "a")])
        >>> path.read_text().split()
        ['round,client', '1,a', '2,a']
    """
    with writing(path):
        if _ends_before(path, number):
            with path.open("a", newline="") as file:
                sheets.Writer(file).writerows(rows)
            return
        kept = _rows_before(path, len(columns), number)
        with replacing(path) as beside, beside.open("w", newline="") as file:
            sheets.Writer(file).writerows([columns, *kept, *rows])


def _ends_before(path: Path, number: int) -> bool:
    """Return True if the file is there, its last line is whole, and of a round before this one."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        last = file.read().decode(errors="replace").splitlines(keepends=True)[-1:]
    start = last[0].partition(",")[0] if last and last[0].endswith("\n") else ""
    return start.isdecimal() and int(start) < number


def _rows_before(path: Path, width: int, number: int) -> list[list[str]]:
    """Return the rows of earlier rounds; not one that was cut off."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = list(sheets.read_lines(file))[1:]
    return [row for row in rows if len(row) == width and row[-1] and int(row[0]) < number]
