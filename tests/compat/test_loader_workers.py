"""Processes start and talk where the temporary folder's path is too long for a socket."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing import util
from pathlib import Path

from fedlightning.compat.system import MAX_PATH_BYTES, short_sockets, short_temporary_folder
from tests.processes import forked


def test_a_usual_folder_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert short_temporary_folder() == "/tmp"


def test_a_process_starts_where_the_folder_has_a_long_name(tmp_path):
    long = tmp_path / ("a long name with spaces and an ümlaut " * 3)
    long.mkdir()

    def work() -> None:
        tempfile.tempdir = str(long)
        multiprocessing.process.current_process()._config.pop("tempdir", None)  # as in a new process
        short_sockets()
        assert tempfile.gettempdir() == str(long)  # other files go where the user wants them
        folder = util.get_temp_dir()
        assert len(os.fsencode(Path(folder).parent)) <= MAX_PATH_BYTES
        context = multiprocessing.get_context("spawn")
        assert context.Manager().list([1])[0] == 1  # its server listens on a socket
        os.rmdir(folder) if not os.listdir(folder) else None

    done = forked(work, tmp_path)
    assert done.returncode == 0, done.stderr
