"""What a server keeps of single clients is what the catalogue says, seen in runs of the conformance suite's cases."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from fedlightning.catalogue import ALGORITHMS, find
from fedlightning.options import Evaluation
from fedlightning.testing.toys import ToyData, federate
from tests.conformance.case import Case, collect

METHODS = {row.name for row in ALGORITHMS}
CASES: dict[str, Case] = {name: case for name, case in collect("CASES").items() if name.partition(" ")[0] in METHODS}
FEW = ("FedAvg", "FedAMP", "FD", "FedProx", "PIFL", "PLayerFL")
"""Cases of the fast suite."""


def tensors_of_clients(kept: Any, clients: set[str], of: str = "") -> Iterator[str]:
    """Yield the client of each tensor in a tree that lies under a client's name."""
    if isinstance(kept, Tensor) and of:
        yield of
    elif isinstance(kept, dict):
        for key, value in kept.items():
            yield from tensors_of_clients(value, clients, of or (key if key in clients else ""))
    elif isinstance(kept, list | tuple):
        for value in kept:
            yield from tensors_of_clients(value, clients, of)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in CASES])
def test_the_catalogue_says_what_the_server_keeps_of_each_client(name):
    case, data = CASES[name], ToyData()
    given = {"max_rounds": 2, "local_steps": 1, "evaluation": Evaluation(test_data=[])} | case.arguments
    server = federate(copy.deepcopy(case.algorithm), data, None, **given).server
    kept = set(tensors_of_clients([server.state, server.models], set(data.client_ids)))
    row = find(type(case.algorithm).__name__)
    if kept:
        assert row.of_clients, f"{row.name} keeps tensors of {sorted(kept)} at the server"
    if name in FEW:
        assert bool(kept) == bool(row.of_clients)
