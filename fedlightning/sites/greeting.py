"""What a site tells of itself when it is greeted, before round 1: this table, and nothing else.

docs/how-to/deploy.md lists it.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from fedlightning.client.data_summary import Description, Detail
from fedlightning.storage.files import write_secret, writing

How = Literal["as it is", "keyed", "with public data", "never"]
LEAVES: Mapping[str, How] = {
    "name": "as it is",
    "clients": "as it is",
    "versions": "as it is",
    "time": "as it is",
    "other_code": "as it is",
    "client_ids": "as it is",
    "sizes": "as it is",
    "seed": "as it is",
    "planted_groups": "as it is",
    "loaders": "as it is",
    "batches": "as it is",
    "together": "as it is",
    "statistics": "as it is",
    "over_rounds": "as it is",
    "splits": "keyed",
    "content": "keyed",
    "public": "with public data",
    "public_print": "with public data",
    "public_content": "with public data",
    "module": "never",
    "partition_name": "never",
    "classes": "never",
    "pooled": "never",
}
"""How each field of the answer to a greeting, and of the description of the data in it, leaves a site. `"keyed"`: as a hash
with a key that only the site has, which tells whether something has changed and not what it is. `"with public data"`: where
the server has public data too, with which they are compared."""
DETAILS: tuple[Detail, ...] = tuple(detail for detail in get_args(Detail) if detail not in ("classes", "pooled"))
"""What of the data is looked up for a greeting."""
INSTEAD: Mapping[str, Callable[[Description], Any]] = {
    "module": lambda told: "data of sites",
    "partition_name": lambda told: "at sites",
    "classes": lambda told: dict.fromkeys(told.sizes),
    "pooled": lambda told: (),
    "public": lambda told: None,
    "public_print": lambda told: None,
    "public_content": lambda told: None,
}
CODE = "code"
"""Entry of `splits` that stands for the code of the data module."""


def leaving(told: Description, key: bytes, code: str, public: bool) -> Description:
    """Return what leaves of a description."""
    told = replace(told, splits={**told.splits, CODE: code} if told.splits else {})
    changed: dict[str, Any] = {}
    for name in (field.name for field in fields(told)):
        value, how = getattr(told, name), LEAVES[name]
        if how == "never" or (how == "with public data" and not public):
            changed[name] = INSTEAD[name](told)
        elif how == "keyed" and isinstance(value, Mapping):
            changed[name] = {part: keyed(one, key, f"{name} {part}") for part, one in value.items()}
        elif how == "keyed" and value is not None:
            changed[name] = keyed(value, key, name)
    return replace(told, **changed)


def keyed(value: Any, key: bytes, of: str) -> str:
    """Return a short hash that only who has the key can make.

    Example:
        >>> keyed("a", b"1", "x") == keyed("a", b"1", "x"), keyed("a", b"1", "x") == keyed("a", b"2", "x")
        (True, False)
    """
    return hmac.new(key, json.dumps([of, value]).encode(), "sha256").hexdigest()[:16]


def own_key(path: Path) -> bytes:
    """Return the key of a site, which only this user can read; it is made where there is none yet."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            write_secret(path, secrets.token_bytes(32))
        return path.read_bytes()
