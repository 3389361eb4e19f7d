"""What lets a single client past a rule for all of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedlightning.algorithm import FederatedCallback, Wire
from fedlightning.callbacks import FedAvg, SampleDP, TopK
from fedlightning.callbacks.shared.single_updates import refuse_other_ways


class Sends(FederatedCallback):
    def wire(self, module):
        return Wire(up={"score": "scalar"})


class Looks(FederatedCallback):
    def on_update(self, server, update):
        pass


class Compares(FederatedCallback):
    def check_update(self, server, message, update):
        pass


def judge(*others, sums=False):
    owner = FedAvg()
    refuse_other_ways(owner, SimpleNamespace(callbacks=[owner, *others], module=None), "does not judge", sums)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (Sends(), "Sends takes score from clients, which FedAvg does not judge"),
        (Looks(), "Looks goes by single updates"),
        (Compares(), "Compares goes by single updates"),
    ],
)
def test_what_is_taken_from_single_clients_is_refused(other, reason):
    with pytest.raises(ValueError, match=reason):
        judge(other)


def test_codecs_pass_and_what_stands_beside_sums_passes_there_only():
    judge(TopK(0.5))
    private = SampleDP(delta=1e-3, noise_multiplier=1.0)
    judge(private, sums=True)
    with pytest.raises(ValueError, match="SampleDP takes epsilon, left from clients"):
        judge(private)
