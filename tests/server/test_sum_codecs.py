"""Codecs whose codes are decoded as a sum: no single update is decoded, and all arrive without entries."""

from __future__ import annotations

import pytest
import torch

from fedlightning.algorithm import SumCodec, UpdateCodec, Wire
from fedlightning.engines.attempts import FederationError
from tests.helpers import Spy, Toy, close, federate, global_state, toy_data

SIZES = {"0": 24, "1": 40, "2": 16}


def module():
    torch.manual_seed(0)
    return Toy()


class Doubled(SumCodec):
    """Sends twice each entry; the server halves their weighted sum."""

    def wire(self, module):
        return Wire(up={"twice": "tensors"})

    def encode(self, client, update):
        update.extras[self.key] = {"twice": {name: 2 * value for name, value in update.state.items()}}
        update.state = {}

    def decode(self, server, message, update):
        raise AssertionError("a single update is decoded")

    def reduce(self, server, updates):
        total = sum(update.num_samples for update in updates)
        names = updates[0].extras[self.key]["twice"]
        codes = [(update.num_samples / total, update.extras[self.key]["twice"]) for update in updates]
        return {name: sum(share * code[name] for share, code in codes) / 2 for name in names}


def test_the_sum_is_decoded_and_nobody_sees_entries():
    spy = Spy()
    found = federate(module(), toy_data(SIZES), [Doubled(), spy], max_rounds=2)
    close(global_state(found), global_state(federate(module(), toy_data(SIZES), max_rounds=2)))
    assert all(not update.state and update.extras["Doubled"] for update in spy.of_round(1).values())


def test_entries_are_missed_beside_any_other_codec():
    class Forgets(Doubled, UpdateCodec):
        pass

    class Single(UpdateCodec):
        wire, encode = Doubled.wire, Doubled.encode

        def decode(self, server, message, update):
            return {}

    federate(module(), toy_data(SIZES), [Forgets()], max_rounds=1)
    with pytest.raises(FederationError, match="was asked for and is missing"):
        federate(module(), toy_data(SIZES), [Single()], max_rounds=1)
