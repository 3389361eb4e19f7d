"""Certificates and keys: each machine's files, and those of a site that comes later."""

from __future__ import annotations

import shutil
import stat
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="keys: pip install opacus cryptography, or make test-flower")

from fedlightning.cli import main
from fedlightning.errors import ConfigurationError
from fedlightning.sites.flower import certificate_files
from fedlightning.sites.flower.certificate_files import add, make
from fedlightning.sites.flower.reachability import check_certificate
from fedlightning.sites.flower.signatures import Heard, signer, verified
from tests.helpers import one_clock


@pytest.fixture
def made(tmp_path: Path) -> Path:
    make(tmp_path / "keys", ["127.0.0.1"], ["a", "b"])
    return tmp_path / "keys"


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_site_that_comes_later_has_what_the_others_have(made: Path) -> None:
    before = files(made)
    assert add(made, ["c"]) == [made / "c"]
    after = files(made)
    assert before == {name: after[name] for name in before}  # nobody else gets new files
    assert {*after} - {*before} == {"server/sites/c.pub", "c/ca.pem", "c/sign.pub", "c/site.key"}
    assert after["c/ca.pem"] == after["a/ca.pem"] and after["c/sign.pub"] == after["a/sign.pub"]
    assert len({after[f"{site}/site.key"] for site in "abc"}) == 3
    assert stat.S_IMODE((made / "c" / "site.key").stat().st_mode) == 0o600
    echoed = verified(lambda request: request, made / "c" / "sign.pub", "c", Heard(made / "heard"))
    assert echoed(signer(made / "server" / "sign.key", 1)("c", b"request")) == b"request"


def test_the_server_reaches_itself_whatever_the_sites_call_it(tmp_path: Path) -> None:
    from cryptography import x509

    make(tmp_path / "keys", ["fl.example.org", "10.0.0.5"], ["a"])
    certificate = x509.load_pem_x509_certificate((tmp_path / "keys" / "server" / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.5", "127.0.0.1"]


@one_clock
def test_a_server_that_nobody_could_reach_does_not_start(made: Path, tmp_path: Path) -> None:
    own = made / "server"
    for host in ("127.0.0.1", "localhost"):
        check_certificate(own, host)
    with pytest.raises(
        ConfigurationError, match=r"is not for '10\.0\.0\.5'.* make certificates with --hosts 10\.0\.0\.5"
    ):
        check_certificate(own, "10.0.0.5")
    make(tmp_path / "other", ["127.0.0.1"], ["a"])
    shutil.copy(tmp_path / "other" / "server" / "ca.pem", own)
    with pytest.raises(ConfigurationError, match="is not of the authority in"):
        check_certificate(own, "127.0.0.1")
    shutil.copy(tmp_path / "other" / "server" / "server.key", own)
    with pytest.raises(ConfigurationError, match=r"server\.key are not a certificate and its key"):
        check_certificate(own, "127.0.0.1")
    (own / "ca.pem").write_text("")
    with pytest.raises(ConfigurationError, match=r"ca\.pem is not a certificate"):
        check_certificate(own, "127.0.0.1")


@one_clock
@pytest.mark.parametrize(("days", "reason"), [(-1, "has ended: make new ones"), (826, "not valid yet: is the clock")])
def test_a_certificate_out_of_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, reason: str) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(days=days if days > 0 else days - certificate_files.DAYS)

    monkeypatch.setattr(certificate_files, "datetime", Clock)
    make(tmp_path / "keys", ["127.0.0.1"], ["a"])
    with pytest.raises(ConfigurationError, match=reason):
        check_certificate(tmp_path / "keys" / "server", "127.0.0.1")


def test_a_name_is_given_once_and_again_after_it_was_removed(made: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"keys/a is there already"):
        add(made, ["c", "a"])
    assert not (made / "c").exists()
    (made / "a").rename(made.parent / "given away")
    with pytest.raises(ConfigurationError, match=r"a\.pub is there already"):
        add(made, ["a"])
    (made / "server" / "sites" / "a.pub").unlink()
    add(made, ["a"])
    assert (made / "a" / "site.key").read_bytes() != (made.parent / "given away" / "site.key").read_bytes()


def test_what_cannot_be_added(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certificates", "--add", "--sites", "c", "--hosts", "x", "--out", str(made)]) == 2
    assert "--hosts is in the server's certificate" in capsys.readouterr().err
    assert main(["certificates", "--add", "--sites", "c", "--out", str(made / "none")]) == 2
    assert "has no ca.pem" in capsys.readouterr().err
    assert main(["certificates", "--add", "--sites", "server", "--out", str(made)]) == 2
    assert "none of them 'server'" in capsys.readouterr().err
