"""FedRolex: algorithms-2, entry 2.2. What it shares with the other sub-model methods is in test_partial_training.py."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from fedlightning.callbacks import FedRolex, HeteroFL
from fedlightning.tensors import module_state
from tests.conformance.case import NO_PLAIN_FORM, Case, Kept
from tests.helpers import Toy, close, federate, global_state, same, toy_data

CASES = {
    "FedRolex": Case(
        FedRolex(head="head"),
        neutral=FedRolex(rates=[1.0], head="head"),
        skip={"identical_clients": "its clients differ in width"},
    ),
    "FedRolex dynamic": Case(
        FedRolex(dynamic=True, static_bn=False, head="head"),
        skip={**NO_PLAIN_FORM, "identical_clients": "its clients differ in width"},
    ),
}
KEPT = {"FedRolex": Kept("FedRolex", options={"head": "net.3"})}


@pytest.mark.parametrize("width", [1, 5, 8, 16])
@pytest.mark.parametrize("rate", [1.0, 0.5, 0.3, 0.25, 0.0625])
def test_over_as_many_rounds_as_units_each_unit_is_chosen_alike(rate, width):
    for first in (0, 3):
        windows = [FedRolex().units(rate, first + j, "any", 0)("layer", width) for j in range(width)]
        chosen = Counter(unit for window in windows for unit in window.tolist())
        assert chosen == dict.fromkeys(range(width), max(1, int(rate * width)))
        assert all(window.tolist() == sorted(set(window.tolist())) for window in windows)


def test_all_clients_windows_start_at_one_unit():
    for j in range(8):
        starts = [set(FedRolex().units(rate, j, "any", 0)("layer", 8).tolist()) for rate in (0.125, 0.25, 0.5, 1.0)]
        assert starts[0] == {j} and all(small <= large for small, large in pairwise(starts))


@pytest.mark.parametrize("scaler", [False, True])
def test_a_window_that_stands_still_is_heterofl(scaler):
    options = {"rates": [1.0, 0.5, 0.25], "scaler": scaler, "masked_loss": False, "static_bn": False}
    module = Toy("adam")
    runs = [federate(module, toy_data(), [cb]) for cb in (FedRolex(stride=0, **options), HeteroFL(**options))]
    same(*map(global_state, runs))


def by_hand(module, data, rates, rounds, scaler):
    """One full-batch SGD step a round on the rows and columns of a window, in plain torch: eight hidden units."""
    w1, b1, w2, b2 = (value.clone() for value in module_state(module).values())
    for j in range(rounds):
        sums = [torch.zeros_like(value) for value in (w1, b1, w2, b2)]
        counts = [torch.zeros_like(value) for value in (w1, b1, w2, b2)]
        for client, rate in rates.items():
            x, y = data.tensors[client]["train"]
            units = sorted((j + k) % 8 for k in range(max(1, int(rate * 8))))
            own = [v.clone().requires_grad_() for v in (w1[units], b1[units], w2[:, units], b2)]
            hidden = F.linear(x, own[0], own[1])
            loss = F.cross_entropy(F.linear((hidden / rate if scaler else hidden).relu(), own[2], own[3]), y)
            new = [v.detach() - module.lr * g for v, g in zip(own, torch.autograd.grad(loss, own), strict=True)]
            for value, total, count, where in zip(
                new, sums, counts, (units, units, (slice(None), units), ...), strict=True
            ):
                total[where] += value
                count[where] += 1
        w1, b1, w2, b2 = (
            torch.where(n > 0, s / n.clamp_min(1), old)
            for s, n, old in zip(sums, counts, (w1, b1, w2, b2), strict=True)
        )
    return dict(zip(module_state(module), (w1, b1, w2, b2), strict=True))


@pytest.mark.parametrize("scaler", [False, True])
def test_three_rounds_are_what_the_formulas_say(scaler):
    module, data, rates = Toy(lr=0.3), toy_data(batch_size=64), {"0": 0.5, "1": 0.3, "2": 0.125}
    found = global_state(federate(module, data, [FedRolex(rates=rates, scaler=scaler)], max_rounds=3))
    close(found, by_hand(module, data, rates, 3, scaler), atol=2e-6)


def test_a_negative_stride_is_refused():
    with pytest.raises(ValueError, match=r"FedRolex got stride=-1\. Use a whole number in \[0, inf\)"):
        FedRolex(stride=-1)
