"""A site answers what its server has signed for it, once, and nothing else."""

from __future__ import annotations

import pytest

pytest.importorskip("cryptography", reason="it comes with Flower: make test-flower")

from fedlightning.sites.flower.certificate_files import SIGN, SIGNED, make
from fedlightning.sites.flower.signatures import Heard, begin, signer, verified
from fedlightning.wire import read, write


@pytest.fixture
def machines(tmp_path):
    """The server's folder, those of the sites a and b, and another server's."""
    return *make(tmp_path / "ours", ["127.0.0.1"], ["a", "b"]), make(tmp_path / "theirs", ["127.0.0.1"], ["a"])[0]


class Site:
    """A site behind its check, which notes what reaches it and what is told to people there."""

    def __init__(self, keys, folder, name):
        self.answered, self.told = [], []
        done = lambda request: (self.answered.append(request), write({"answer": 1}))[1]  # noqa: E731
        folder.mkdir(exist_ok=True)
        self._check = verified(done, keys / SIGNED, name, Heard(folder / "heard"), self.told.append)

    def said(self, request):
        return read(self._check(request))


def test_requests_of_the_server_are_answered_and_no_others(tmp_path, machines):
    own, a, _, other = machines
    site, sign = Site(a, tmp_path / "a", "a"), signer(own / SIGN, 7)
    request = sign("a", b"work")
    assert site.said(request) == {"answer": 1} and site.answered == [b"work"]
    changed = bytes([request[0] ^ 1]) + request[1:]
    later = request[:71] + bytes([request[71] + 1]) + request[72:]  # the same with another start of the server
    for forged in (signer(other / SIGN, 7)("a", b"work"), b"work", b"", request + b"!", changed, later, request[:70]):
        assert "not signed by the server" in site.said(forged)["refused"]
    assert site.answered == [b"work"] and "not signed by the server" in site.told[0]


def test_a_request_for_one_site_is_refused_by_another(tmp_path, machines):
    own, _, b, _ = machines
    site = Site(b, tmp_path / "b", "b")
    assert "is for site 'a'" in site.said(signer(own / SIGN, 7)("a", b"hello"))["refused"]
    assert not site.answered and "and this is 'b'" in site.told[0]


def test_what_comes_again_is_not_done_again(tmp_path, machines):
    """Not at once, not when the site has started anew, not from before the server did; in any order."""
    own, a, *_ = machines
    sign = signer(own / SIGN, 7)
    first, second, third = (sign("a", name) for name in (b"1", b"2", b"3"))
    site = Site(a, tmp_path / "a", "a")
    assert [site.said(one) for one in (second, first)] == [{"answer": 1}] * 2  # Flower does not keep the order
    assert [site.said(one) for one in (first, second)] == [{"lost": ""}] * 2
    site = Site(a, tmp_path / "a", "a")
    assert [site.said(one) for one in (first, second, third)] == [{"lost": ""}, {"lost": ""}, {"answer": 1}]
    assert site.said(signer(own / SIGN, 8)("a", b"new")) == {"answer": 1}
    for one in (third, sign("a", b"4")):
        assert "of an earlier start of the server" in site.said(one)["refused"]
    assert site.answered == [b"3", b"new"]
    assert "of an earlier start" in Site(a, tmp_path / "a", "a").said(third)["refused"]


def test_starts_of_a_server_have_growing_numbers_whatever_its_clock(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time_ns", lambda: 100)
    found = [begin(tmp_path / "began") for _ in range(3)]
    assert found == [100, 101, 102]
    (tmp_path / "began").write_text("nonsense")
    assert begin(tmp_path / "began") == 100


@pytest.mark.parametrize(
    "damage", [lambda path: path.unlink(), lambda path: path.write_text("12")], ids=["gone", "damaged"]
)
@pytest.mark.parametrize("name", ["heard", "heard.copy"])
def test_a_memory_that_is_gone_or_damaged_lets_nothing_be_done_again(tmp_path, machines, damage, name):
    own, a, *_ = machines
    first, second = (signer(own / SIGN, began)("a", b"work") for began in (7, 8))
    site = Site(a, tmp_path / "a", "a")
    assert [site.said(one) for one in (first, second)] == [{"answer": 1}] * 2
    damage(tmp_path / "a" / name)
    site = Site(a, tmp_path / "a", "a")
    assert "remove heard and heard.copy" in site.said(first)["refused"] and site.said(second) == {"lost": ""}
    for path in (tmp_path / "a").iterdir():  # who wants it to forget
        path.unlink()
    assert Site(a, tmp_path / "a", "a").said(first) == {"answer": 1}


def test_a_request_that_cannot_be_noted_is_refused(tmp_path, machines):
    """On a full disk it would be carried out again when somebody sends it again."""
    own, a, *_ = machines
    site, sign = Site(a, tmp_path / "a", "a"), signer(own / SIGN, 7)
    (tmp_path / "a" / "heard.tmp").symlink_to("/dev/full")
    assert "cannot note what it hears" in site.said(sign("a", b"work"))["refused"] and not site.answered
    assert site.said(sign("a", b"work")) == {"answer": 1}  # there is room again
