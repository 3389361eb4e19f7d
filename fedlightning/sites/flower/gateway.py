"""Flower's SuperLink behind a gate: sites reach what is for sites, and all else wants the secret of the server's process.

Flower 1.41 has all its interfaces at one port (`--control-api-address` is without effect) and asks nobody who he is that
lists, stops and starts runs or unregisters a site. So this file is run instead of `flower-superlink`. It imports
nothing of FedLightning, whose start takes seconds; what it needs of Flower are `create_app` and the names of headers.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any

HEADER = "fedlightning-pass"
SITES = "/v1/fleet/"
"""What begins so is for sites: Flower asks for their keys there."""
OWN = ("/v1/runtime/", *(f"/v1/control/{name}" for name in ("list-nodes", "list-runs", "register-node", "stop-run")))
"""What begins so is for the server's process; nobody unregisters a site."""
START = "/v1/control/start-run"
"""With this the server's process has let its sites be known."""
STRANGER_BYTES = 2**16
"""Bytes that a stranger may send: Flower reads a request before it asks for the key."""

Asgi = Callable[[Mapping[str, Any], Any, Any], Awaitable[None]]


def pass_of(secret: bytes) -> str:
    """Return what the server's process shows: not the secret itself, which also is a key of Flower's."""
    return hmac.new(secret, b"fedlightning gate", hashlib.sha256).hexdigest()


class Gate:
    """An ASGI application that lets some requests through to another.

    Args:
        app: The other.
        secret: That of the server's process.
        keys: Public keys of the sites, as Flower sends them; `None`: there are none to prove.
    """

    def __init__(self, app: Asgi, secret: bytes, keys: Collection[bytes] | None) -> None:
        self._app, self._pass, self._keys = app, pass_of(secret).encode(), keys
        self._is_open = False

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        kind = scope["type"]
        status = None if kind == "lifespan" else 403 if kind != "http" else self.refusal(scope)
        if status is None:
            await self._app(scope, receive, send)
        elif kind == "http":
            headers = [(b"content-length", b"0"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def refusal(self, scope: Mapping[str, Any]) -> int | None:
        """Return the status with which a request is refused; `None`: it is let through."""
        path, headers = str(scope["path"]), {bytes(name).lower(): bytes(value) for name, value in scope["headers"]}
        if path.startswith(SITES):
            if not self._is_open:
                return 503  # a SuperNode asks again
            return None if _is_small(headers) or self._is_of_site(headers) else 413
        if not hmac.compare_digest(headers.get(HEADER.encode(), b""), self._pass):
            return 403
        self._is_open |= path == START
        return None if path.startswith((*OWN, START)) else 403

    def _is_of_site(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request comes from a site, as far as can be seen before it is read; Flower looks again."""
        from flwr.common.constant import TIMESTAMP_HEADER
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
        from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

        if self._keys is None:
            return True
        names = (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
        key, signature, stamp = (headers.get(name.lower().encode(), b"") for name in names)
        try:
            public_key = base64.b64decode(key, validate=True)
            return public_key in self._keys and verify_signature(
                bytes_to_public_key(public_key), stamp, base64.b64decode(signature, validate=True)
            )
        except (ValueError, binascii.Error):
            return False


def _is_small(headers: Mapping[bytes, bytes]) -> bool:
    length = headers.get(b"content-length", b"")
    return b"transfer-encoding" not in headers and (not length or (length.isdigit() and int(length) <= STRANGER_BYTES))


def public_keys(folder: Path) -> dict[str, bytes]:
    """Return the public keys of sites, as Flower sends them, by the sites' names."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    key_by_site = {}
    for path in sorted(folder.glob("*.pub")):
        key = load_ssh_public_key(path.read_bytes())
        key_by_site[path.stem] = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return key_by_site


def main(program: str, secret: str, keys: str, *words: str) -> None:
    """Run a SuperLink behind a gate."""
    from flwr.superlink import main as superlink
    from flwr.superlink.cli.flower_superlink import flower_superlink

    allowed_keys = None if not keys else set(public_keys(Path(keys)).values())
    make, content = superlink.create_app, Path(secret).read_bytes()
    superlink.create_app = lambda *arguments: Gate(make(*arguments), content, allowed_keys)
    sys.argv = [program, *words]
    flower_superlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
