"""What a SuperLink's gate lets through, without the SuperLink; test_attacks.py tries it with one."""

from __future__ import annotations

import asyncio

import pytest

from fedlightning.sites.flower.gateway import HEADER, OWN, SITES, START, Gate, pass_of, public_keys

SECRET = b"secret"
SHOWN = {HEADER: pass_of(SECRET)}


def status(gate, path, kind="http", **headers):
    """Return the status with which a request is answered; 200: it was let through."""
    said = []

    async def send(event):
        said.append(event)

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(gate({"type": kind, "path": path, "headers": given}, None, send))
    return said[0].get("status", said[0].get("code"))


@pytest.fixture
def gate():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    return Gate(app, SECRET, {b"a key"})


def shown(gate, path, **more):
    return status(gate, path, **{HEADER.replace("-", "_"): pass_of(SECRET)}, **more)


@pytest.mark.parametrize(
    "path", [*OWN, START, "/docs", "/openapi.json", "/health", "/", "", "/v1/fleet", "/V1/fleet/x"]
)
def test_nobody_without_the_secret_reaches_what_is_not_for_sites(gate, path):
    wrong = {HEADER.replace("-", "_"): pass_of(b"guess")}
    for given in (
        {},
        wrong,
        {HEADER.replace("-", "_"): SECRET.decode()},
        {"authorization": f"Bearer {SECRET.decode()}"},
    ):
        assert status(gate, path, **given) == 403
    assert status(gate, path, kind="websocket", **{HEADER.replace("-", "_"): pass_of(SECRET)}) == 1008


def test_the_server_itself_reaches_what_it_needs_and_no_more(gate):
    assert all(shown(gate, path) == 200 for path in (*OWN, START, "/v1/runtime/push-messages"))
    for path in ("/v1/control/unregister-node", "/v1/control/add-app", "/v1/control/stream-logs", "/docs"):
        assert shown(gate, path) == 403


def test_sites_wait_until_the_server_has_let_them_be_known(gate):
    path = f"{SITES}activate-node"
    assert status(gate, path) == 503 and status(gate, START) == 403
    assert shown(gate, "/v1/control/register-node") == 200 and status(gate, path) == 503
    assert shown(gate, START) == 200 and status(gate, path) == 200


def test_a_stranger_sends_little(gate):
    """Flower reads a request into memory before it asks for the key."""
    pytest.importorskip("flwr", reason="Flower is in an environment of its own: make test-flower")
    shown(gate, START)
    path = f"{SITES}push-object"
    assert status(gate, path, content_length="65536") == 200
    for given in ({"content_length": "65537"}, {"content_length": "-1"}, {"transfer_encoding": "chunked"}):
        assert status(gate, path, **given) == 413
        assert status(gate, path, **given, flwr_public_key="YSBrZXk=", flwr_signature="YQ==") == 413


def test_a_site_sends_what_it_likes(tmp_path):
    pytest.importorskip("flwr", reason="Flower is in an environment of its own: make test-flower")
    from base64 import b64encode

    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.primitives.asymmetric import sign_message

    from fedlightning.sites.flower.certificate_files import SITE, make

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})

    own, a, b = make(tmp_path / "made", ["127.0.0.1"], ["a", "b"])
    keys = public_keys(own / "sites")
    gate = Gate(app, SECRET, {keys["a"]})
    shown(gate, START)
    for name, folder, expected in (("a", a, 200), ("b", b, 413)):
        signature = sign_message(load_ssh_private_key((folder / SITE).read_bytes(), None), b"now")
        given = {"flwr_public_key": b64encode(keys[name]).decode(), "flwr_signature": b64encode(signature).decode()}
        given |= {TIMESTAMP_HEADER.replace("-", "_"): "now", "content_length": str(10**9)}
        assert status(gate, f"{SITES}push-object", **given) == expected
