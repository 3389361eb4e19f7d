import gzip
import struct
import tarfile
import tracemalloc

import numpy as np
import pytest

from fedlightning.datamodules.readers import cifar_batches, read_idx
from tests.datamodules.images.common import TEST, idx


def test_damaged_idx_files_are_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(idx(TEST)[:-5])
    with pytest.raises(ValueError, match="truncated or too long: its header says 20 x 28 x 28 = 15680 bytes"):
        read_idx(path, 3)
    path.write_bytes(idx(np.arange(5)))
    with pytest.raises(ValueError, match="expected 00000803"):
        read_idx(path, 3)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="begins with nothing"):
        read_idx(path, 1)
    path.write_bytes(gzip.compress(idx(TEST))[:-20])
    with pytest.raises(ValueError, match="damaged gzip"):
        read_idx(path, 3)


def peak(function):
    """Return the most memory that Python and numpy held while a function ran, in bytes."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_sizes_in_headers_are_bounded_before_memory_is_taken(tmp_path):
    path = tmp_path / "file"

    def refused(match, **options):
        def read():
            with pytest.raises(ValueError, match=match):
                read_idx(path, 3, **options)

        assert peak(read) < 2_000_000

    header = bytes([0, 0, 8, 3])
    path.write_bytes(gzip.compress(header + struct.pack(">3I", 60_000, 28, 28) + bytes(10)))
    refused(r"47040000 bytes, \d+ bytes of gzip cannot hold them")
    path.write_bytes(gzip.compress(header + struct.pack(">3I", 1000, 1, 1) + bytes(30_000_000)))
    refused("it has more")
    path.write_bytes(gzip.compress(header + struct.pack(">3I", 70_000, 28, 28) + bytes(30_000_000)))
    refused("not a file of this data set: .* it can have 60000 x 28 x 28 at most", most=(60_000, 28, 28))
    path.write_bytes(header + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1))
    refused("it can have 1073741824 bytes at most")


def test_a_bomb_for_a_cifar_archive_is_refused(tmp_path):
    path = tmp_path / "cifar-10-python.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        member = tarfile.TarInfo("pax")
        member.type, member.size = tarfile.XHDTYPE, 90_000_000
        file.write(member.tobuf(tarfile.GNU_FORMAT))
        for _ in range(90):
            file.write(bytes(1_000_000))

    def read():
        with pytest.raises(ValueError, match=r"cannot be read as CIFAR-10 \(it asks for 90000384 bytes"):
            cifar_batches(path, ["data_batch_1"])

    assert peak(read) < 2_000_000


@pytest.mark.parametrize(
    "code",
    [
        b"cnumpy\nndarray\n(L1000000000L\nltR.",  # an array of any size
        b"\x80\x02}r\xff\xff\xff\x3f.",  # an object with a number that makes the reader's table large
        b"\x80\x04\x8e\x00\x00\x00\x00\x02\x00\x00\x00.",  # a string that is longer than the file
        b"",
        b"\x80\x02]q\x00.",  # no batch
    ],
)
def test_damaged_cifar_pickles_are_refused(tmp_path, code):
    (tmp_path / "data_batch_1").write_bytes(code)

    def read():
        with pytest.raises(ValueError, match=r"data_batch_1 is damaged .* delete it"):
            cifar_batches(tmp_path, ["data_batch_1"])

    assert peak(read) < 2_000_000
