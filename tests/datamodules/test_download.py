import hashlib

import pytest

from fedlightning.datamodules.download import fetch


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def test_the_first_mirror_that_is_intact_is_used(tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(b"content" * 1000)
    bad.write_bytes(b"error page")
    target = tmp_path / "new" / "folder" / "file"
    urls = [(tmp_path / "absent").as_uri(), bad.as_uri(), good.as_uri()]
    assert fetch(urls, target, sha256(good.read_bytes())) == target
    assert target.read_bytes() == good.read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["file"]  # nothing half-done stays


def test_a_wrong_checksum_leaves_no_file(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"abc")
    target = tmp_path / "out" / "file"
    with pytest.raises(OSError, match=f"SHA-256 {sha256(b'abc')} instead of 0000.*by hand"):
        fetch([source.as_uri()], target, "0000")
    assert list(target.parent.iterdir()) == []


def test_an_existing_file_survives_a_failed_download(tmp_path):
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with pytest.raises(OSError, match="Could not download file"):
        fetch([(tmp_path / "absent").as_uri()], target, sha256(b"new"))
    assert target.read_bytes() == b"old"


def test_a_download_without_an_end_is_broken_off(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"a" * 3000)
    with pytest.raises(OSError, match="more than the 2000 bytes that it may have"):
        fetch([source.as_uri()], tmp_path / "out", sha256(source.read_bytes()), largest=2000)
