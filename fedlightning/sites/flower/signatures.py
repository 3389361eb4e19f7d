"""Requests signed by the server, each for one site, one start of the server and one time: sites obey nothing else."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable
from pathlib import Path

from fedlightning.sites.link import Answer
from fedlightning.sites.status import NAME, printable
from fedlightning.storage.files import write_text_atomically
from fedlightning.wire import write

LENGTH = 64
"""Bytes of a signature, which stands in front of what is signed."""
CONTEXT = b"fedlightning request 2\0"
"""What is signed besides, so that a signature is good for nothing else."""
HEAD = struct.Struct(">QQH")
"""Start of the server, number of the request since then, length of the site's name; the name and the request follow."""
Sign = Callable[[str, bytes], bytes]
"""Signs a request to the site of a name."""


def begin(path: Path) -> int:
    """Return a number for a start of the server that is larger than those before, and keep it."""
    began = max(time.time_ns(), _numbers(path)[0] + 1)
    write_text_atomically(path, f"{began} 0")
    return began


def signer(path: Path, began: int) -> Sign:
    """Return what signs requests with a key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key, numbers = Ed25519PrivateKey.from_private_bytes(path.read_bytes()), itertools.count(1)

    def sign(to: str, request: bytes) -> bytes:
        signed = HEAD.pack(began, next(numbers), len(to.encode())) + to.encode() + request
        return key.sign(CONTEXT + signed) + signed

    return sign


class Heard:
    """What a site has heard of its server: each request once, and none of an earlier start.

    Args:
        path: Keeps the newest over starts of the site; a copy beside it does where it is damaged or gone.
    """

    def __init__(self, path: Path) -> None:
        self._paths = path, path.with_name(f"{path.name}.copy")
        self._began, self._newest = max(map(_numbers, self._paths))
        self._before = self._newest  # what came before this start of the site was answered, or is lost and comes anew
        self._seen_numbers: set[int] = set()

    def objection(self, began: int, number: int) -> str | None:
        """Return why a request is not carried out; empty: it came already; `None`: it is new, and noted."""
        if began < self._began:
            return (
                "the request is of an earlier start of the server: somebody sends it again, or the server's clock was set "
                f"back (then stop the site, remove {' and '.join(path.name for path in self._paths)} from its folder and "
                "start it again)"
            )
        if began > self._began:
            self._began, self._newest, self._before = began, 0, 0
            self._seen_numbers.clear()
        if number <= self._before or number in self._seen_numbers:  # Flower does not keep the order
            return ""
        self._seen_numbers.add(number)
        self._newest = max(number, self._newest)
        for path in self._paths:
            write_text_atomically(path, f"{self._began} {self._newest}")
        return None


def verified(answer: Answer, path: Path, name: str, heard: Heard, refused: Callable[[str], None] = print) -> Answer:
    """Return a site that refuses what the server has not signed for it, and does nothing a second time."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    key = Ed25519PublicKey.from_public_bytes(path.read_bytes())

    def checked(request: bytes) -> bytes:
        signed, reason = request[LENGTH:], None
        try:
            key.verify(request[:LENGTH], CONTEXT + signed)
            began, number, length = HEAD.unpack_from(signed)
        except (InvalidSignature, struct.error):
            reason = "the request is not signed by the server that this site belongs to"
        else:
            to = signed[HEAD.size : HEAD.size + length].decode(errors="replace")
            if to != name:
                reason = (
                    f"the request is for site '{printable(to, NAME)}', as the server knows it by its key, and this is "
                    f"'{name}': start it with the --name and the key of one site"
                )
            else:
                try:
                    reason = heard.objection(began, number)
                except OSError:  # else it could be sent again
                    reason = "this site cannot note what it hears: its disk is full, or its folder is closed to it"
        if reason is None:
            return answer(signed[HEAD.size + length :])
        if not reason:
            return write({"lost": ""})
        refused(reason)
        return write({"refused": reason})

    return checked


def _numbers(path: Path) -> tuple[int, int]:
    try:
        began, number = map(int, path.read_text().split())
    except (OSError, ValueError):
        return 0, 0
    return began, number
