"""What the tests' own processes promise: a child ends with its work, whatever happens, and is not waited for without end."""

from __future__ import annotations

import os
import sys
import time

import pytest

from tests.processes import fork, forked, wait


def test_output_and_exit_code_come_back(tmp_path):
    def work() -> int:
        print(os.environ["WORD"], os.getcwd() == str(tmp_path.resolve()))
        print("wrong", file=sys.stderr)
        return 3

    done = forked(work, tmp_path, {"WORD": "said"})
    assert (done.returncode, done.stdout, done.stderr) == (3, "said True\n", "wrong\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_child_that_cannot_write_its_last_words_ends(stream, tmp_path):
    """As on a full disk. An exception that gets out of the child would go on as a second test runner."""

    class Full:
        def write(self, text: str) -> int:
            return len(text)

        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    parent = os.getpid()

    def work() -> None:
        setattr(sys, stream, Full())

    code = wait(fork(work), 60)
    assert os.getpid() == parent and code == 1


def test_a_child_that_hangs_is_killed():
    pid = fork(lambda: time.sleep(600))
    with pytest.raises(TimeoutError, match="was killed"):
        wait(pid, 0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_each_test_has_a_time_limit(request):
    assert 0 < float(request.config.getini("timeout")) < float(request.config.getini("faulthandler_timeout"))
    assert request.config.pluginmanager.hasplugin("timeout")
