"""A site answers what its server has signed, and nothing else."""

from __future__ import annotations

import pytest

pytest.importorskip("cryptography", reason="it comes with Flower: make test-flower")

from fedlightning.engines.flower.certificates import SIGN, SIGNED, make
from fedlightning.engines.flower.signatures import signer, verified
from fedlightning.wire import read, write


def test_requests_of_the_server_are_answered_and_no_others(tmp_path):
    own, site = make(tmp_path / "ours", ["127.0.0.1"], ["a"])
    other, _ = make(tmp_path / "theirs", ["127.0.0.1"], ["a"])
    answered = []
    answer = verified(lambda request: (answered.append(request), write({"answer": 1}))[1], site / SIGNED)
    request = signer(own / SIGN)(b"work")
    assert read(answer(request)) == {"answer": 1} and answered == [b"work"]
    changed = bytes([request[0] ^ 1]) + request[1:]
    for forged in (signer(other / SIGN)(b"work"), b"work", b"", request + b"!", changed):
        assert "not signed by the server" in read(answer(forged))["refused"]
    assert answered == [b"work"]
