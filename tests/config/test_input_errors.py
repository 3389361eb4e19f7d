"""Which errors are told in a line, and which need their traceback."""

from __future__ import annotations

import pytest
import torch

from fedlightning.callbacks import FedAvg
from fedlightning.config.input_errors import explain


class Checks(FedAvg):
    """An author's callback, as the guide writes them."""

    def check(self, setup):
        raise ValueError("Checks needs public data. Set public_fraction.")

    def on_round_start(self, server):
        raise ValueError("a mistake of the author")


class Breaks(FedAvg):
    def check(self, setup):
        torch.zeros(2).reshape(3)


def raised(call):
    with pytest.raises(Exception, match=r"Checks|mistake|shape") as caught:
        call(None)
    return caught.value


def test_what_a_callback_refuses_in_its_check_is_told_in_a_line():
    assert explain(raised(Checks().check)) == "Checks needs public data. Set public_fraction."


@pytest.mark.parametrize("call", [Checks().on_round_start, Breaks().check])
def test_other_errors_of_a_callback_keep_their_traceback(call):
    assert explain(raised(call)) is None
