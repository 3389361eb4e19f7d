"""Which line of the user's code failed."""

from __future__ import annotations

import json

from fedlightning.errors import users_line


def reads_nothing():
    json.loads("")


def test_the_line_is_the_users_even_where_the_standard_library_fails():
    try:
        reads_nothing()
    except ValueError as error:
        assert users_line(error).startswith("test_errors.py, line ") and users_line(error).endswith("in reads_nothing")


def test_an_error_of_the_standard_library_alone_is_nobodys():
    try:
        json.loads("")
    except ValueError as error:
        assert error.__traceback__ is not None
        assert users_line(error.with_traceback(error.__traceback__.tb_next)) == ""
