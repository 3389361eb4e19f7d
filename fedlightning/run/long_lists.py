"""Lists that grow with every round, of which a manifest holds the end: the rest lies in a file that is written now and then.

So a manifest of round 1000 is as long as that of round 100, and a round costs as much.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedlightning.storage.files import write_text_atomically

PART = 25
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
    if not isinstance(tree, list) or len(tree) < 2 * PART:
        return tree
    count = (len(tree) // PART - 1) * PART
    known, last = before if _is_short(before) else {}, json.loads(json.dumps(tree[count - 1]))
    if known.get("entries") == count and known[LAST] == last:
        name = known[HEAD]
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
