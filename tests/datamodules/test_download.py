import hashlib

import pytest

from fedlightning.datamodules.download import fetch


def md5(data):
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def test_the_first_mirror_that_is_intact_is_used(tmp_path):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(b"content" * 1000)
    bad.write_bytes(b"error page")
    target = tmp_path / "new" / "folder" / "file"
    urls = [(tmp_path / "absent").as_uri(), bad.as_uri(), good.as_uri()]
    assert fetch(urls, target, md5(good.read_bytes())) == target
    assert target.read_bytes() == good.read_bytes()
    assert [path.name for path in target.parent.iterdir()] == ["file"]  # nothing half-done stays


def test_a_wrong_checksum_leaves_no_file(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(b"abc")
    target = tmp_path / "out" / "file"
    with pytest.raises(OSError, match=f"md5 {md5(b'abc')} instead of 0000.*by hand"):
        fetch([source.as_uri()], target, "0000")
    assert list(target.parent.iterdir()) == []


def test_an_existing_file_survives_a_failed_download(tmp_path):
    target = tmp_path / "file"
    target.write_bytes(b"old")
    with pytest.raises(OSError, match="Could not download file"):
        fetch([(tmp_path / "absent").as_uri()], target, md5(b"new"))
    assert target.read_bytes() == b"old"
