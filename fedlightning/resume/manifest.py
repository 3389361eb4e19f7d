"""What a manifest of a saved state may hold.

Lists that grow with every round, of which a manifest holds the end: the rest lies in a file that is written now and then.

So a manifest of round 1000 is as long as that of round 100, and a round costs as much.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from fedlightning.storage.files import write_text_atomically

CHECK = "check"
"""Entry with the manifest's own checksum."""
MANIFEST_FIELDS = {"version", "rounds_done", "server", "clients", "packs", "sha256", "extra", CHECK}
"""Entries of every manifest."""
_HISTORY = {"round", "bytes_up", "bytes_down", "steps", "seconds"}


def fault_of_manifest(manifest: Any) -> str | None:
    """Return what is wrong with the content of a manifest, to follow "is not a manifest", or `None`.

    Files are named as they lie in the folder of the state: a path that leads elsewhere is refused.

    Example:
        >>> empty = {"clients": {}, "packs": {}, "sha256": {}, "extra": {}, "check": ""}
        >>> fault_of_manifest({"version": 1, "rounds_done": 1, "server": "../x.safetensors", **empty})
        ": it names the file '../x.safetensors', which is not in its folder"
    """
    if not isinstance(manifest, dict) or not manifest.keys() >= MANIFEST_FIELDS:
        return ""
    for name in ("version", "rounds_done"):
        if not _is_count(manifest[name]):
            return f": its {name} is {manifest[name]!r:.80}"
    for name in ("clients", "extra", "sha256", "packs"):
        if not isinstance(manifest[name], dict):
            return f": its {name} are not named values"
    for name in (manifest["server"], *manifest["clients"].values(), *manifest["packs"]):
        if not is_file_name(name):
            return f": it names the file {name!r:.80}, which is not in its folder"
    if not all(isinstance(value, str) for value in manifest["sha256"].values()):
        return ": a checksum is not text"
    if not all(_is_count(value) for value in manifest["packs"].values()):
        return ": a number of records is not a count"
    for name in heads_of(manifest["extra"]):
        if not is_file_name(name):
            return f": it names the file {name!r:.80}, which is not in its folder"
    fault = fault_of_extra(whole(manifest["extra"], lambda file: []))
    if fault is None and manifest[CHECK] != sum_of(manifest):
        return ": it is not what was written"
    return fault


def sum_of(manifest: dict[str, Any]) -> str:
    """Return the checksum of a manifest's content, its own entry aside.

    Example:
        >>> sum_of({"rounds_done": 1}) == sum_of({"rounds_done": 1, "check": "abc"}) != sum_of({"rounds_done": 2})
        True
    """
    content = {name: value for name, value in manifest.items() if name != CHECK}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_file_name(name: Any) -> bool:
    """Return True for the name of a file in a folder, on any system: no path.

    Example:
        >>> [is_file_name(name) for name in ("server-000001.safetensors", "a/b", "..", "C:x", "/etc/passwd")]
        [True, False, False, False, False]
    """
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "\0" not in name
        and PurePosixPath(name).name == name
        and PureWindowsPath(name).name == name
    )


def fault_of_extra(extra: dict[str, Any]) -> str | None:
    """Return what is wrong with a manifest's extra values, or `None`."""
    for name in ("metrics", "metrics_of_rounds"):
        mark = extra.get(name)
        if mark is not None and not (
            isinstance(mark, dict) and _is_count(mark.get("bytes")) and isinstance(mark.get("sha256"), str)
        ):
            return f": its mark of {name} is none"
    for name, kind in (("lasting", dict), ("history", list), ("failures", list), ("changes", list)):
        if not isinstance(extra.get(name, kind()), kind):
            return f": its {name} is a {type(extra[name]).__name__}"
    elsewhere = extra.get("elsewhere", {})
    if not isinstance(elsewhere, dict) or not all(map(is_file_name, elsewhere.values())):
        return ": it names a file that is not in its folder"
    seconds = all(_is_number(extra.get(name, 0.0)) for name in ("seconds", "evaluation_seconds"))
    if not seconds or not isinstance(extra.get("final", False), bool):
        return ": its seconds or its end are none"
    mark_lists = [extra.get(name) or [] for name in ("loggers", "loggers_of_rounds")]
    logger_marks = [mark for mark_list in mark_lists if isinstance(mark_list, list) for mark in mark_list]
    if not all(isinstance(mark_list, list) for mark_list in mark_lists) or not all(
        isinstance(mark, dict) and {"logger", "version"} <= mark.keys() for mark in logger_marks
    ):
        return ": its marks of loggers are none"
    explosions = extra.get("explosions", {})
    if not isinstance(explosions, dict) or not isinstance(explosions.get("usual", {}), dict):
        return ": its explosions are none"
    norms = extra.get("norms", {})
    if not isinstance(norms, dict) or not all(
        isinstance(norms_of_client, list) and norms_of_client and all(map(_is_number, norms_of_client))
        for norms_of_client in norms.values()
    ):
        return ": its norms are none"
    rounds = extra.get("history", [])
    if not all(isinstance(entry, dict) and all(_is_number(entry.get(name)) for name in _HISTORY) for entry in rounds):
        return ": its history is not one of rounds"
    failures = extra.get("failures", [])
    if not all(isinstance(entry, dict) for entry in failures):
        return ": its failures are none"
    return None if all(isinstance(text, str) for text in extra.get("changes", [])) else ": its changes are not texts"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TAIL_ENTRIES = 25
"""Entries at the end of a list that a manifest holds, at most."""
HEAD, LAST, TAIL = "file of the first entries", "last of them", "entries after them"


def shortened(tree: Any, folder: Path, before: Any = None) -> Any:
    """Return plain values with files in the places of the beginnings of long lists; they are written here.

    Args:
        tree: The values.
        folder: Where the files lie.
        before: The same of the state before, whose lists have grown since.
    """
    if isinstance(tree, dict):
        old = before if isinstance(before, dict) and HEAD not in before else {}
        return {name: shortened(value, folder, old.get(name)) for name, value in tree.items()}
    if not isinstance(tree, list) or len(tree) < 2 * TAIL_ENTRIES:
        return tree
    count = (len(tree) // TAIL_ENTRIES - 1) * TAIL_ENTRIES
    head, last = before if _is_short(before) else {}, json.loads(json.dumps(tree[count - 1]))
    if head.get("entries") == count and head[LAST] == last:
        name = head[HEAD]
    else:
        text = json.dumps(tree[:count])
        name = f"list-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        write_text_atomically(folder / name, text)
    return {HEAD: name, "entries": count, LAST: last, TAIL: tree[count:]}


def heads_of(tree: Any) -> Iterator[Any]:
    """Yield the names of the files in the places of beginnings of lists."""
    if _is_short(tree):
        yield tree[HEAD]
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from heads_of(value)


def whole(tree: Any, head: Callable[[str], Any]) -> Any:
    """Return the values that :func:`shortened` has shortened; `head` gives the content of a file."""
    if _is_short(tree):
        return [*head(tree[HEAD]), *tree[TAIL]]
    return {name: whole(value, head) for name, value in tree.items()} if isinstance(tree, dict) else tree


def _is_short(tree: Any) -> bool:
    return isinstance(tree, dict) and HEAD in tree and isinstance(tree.get(TAIL), list)
