"""The plugin that cuts the slow suite into slices."""

from __future__ import annotations

import doctest
import sys
from itertools import chain

import pytest

from tests import slices
from tests.conftest import LONG
from tests.processes import forked
from tests.slices import ROOT

TESTS = """
import pytest

@pytest.mark.parametrize("case", range(3))
@pytest.mark.parametrize("name", "ab")
def test_product(case, name):
    print("ran", case, name)

def test_plain():
    print("ran plain")
"""


def test_examples():
    assert doctest.testmod(slices).failed == 0


def test_slices_share_the_tests_between_them():
    tests = [f"tests/test_{number % 7}.py::test_{number}" for number in range(50)]
    shares = [slices.slice_of(f"{number}/4", tests) for number in range(1, 5)]
    assert sorted(chain(*shares)) == sorted(tests)
    assert {len(share) for share in shares} <= {12, 13}
    assert slices.slice_of("2/4", tests[::-1]) == shares[1]
    for bad in ("0/4", "5/4", "1", "a/b", "1/0", "-1/2"):
        with pytest.raises(pytest.UsageError, match=f"--slice {bad} is not a share"):
            slices.slice_of(bad, tests)


def test_the_order_of_other_tests_changes_with_the_commit():
    tests = [f"test_{number}" for number in range(20)]
    first, second = (sorted(tests, key=lambda test, commit=commit: slices.turn(test, [commit])) for commit in "ab")
    assert first != second and sorted(first) == sorted(second)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slice", "1/2"], "4 passed, 3 deselected"),
        (["--slice", "1/2", "--minutes", "-1"], "4 skipped, 3 deselected"),
    ],
    ids=["a slice", "no time"],
)
@pytest.mark.slow
def test_in_pytest(tmp_path, words, said):
    (tmp_path / "test_some.py").write_text(TESTS)

    def work() -> int:
        sys.modules.pop("conftest", None)
        return pytest.main(
            ["-q", "-c", "/dev/null", "-p", "no:cacheprovider", "-p", "tests.slices", *words, str(tmp_path)]
        )

    done = forked(work, tmp_path)
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr


def test_tests_that_take_long_are_there() -> None:
    for test in LONG.read_text().splitlines():
        file, name = test.partition("[")[0].split("::")[:2]
        assert f"def {name}(" in (ROOT / file).read_text(), test
