"""Every option of every public callback at another value changes something, or a sentence says why not."""

from __future__ import annotations

import re

import pytest

from fedlightning.callbacks import DSGD, LDSGD, SWIFT, DFedAvg, FederatedEarlyStopping, FedSAM
from fedlightning.errors import ConfigurationError


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        *((lambda kind=kind: kind("ring", edge_probability=0.9), "edge_probability=0.9 without topology='erdos_renyi'")
          for kind in (DFedAvg, DSGD, LDSGD, SWIFT)),
        (lambda: DFedAvg([[0, 1], [1, 0]], graph_seed=3), "graph_seed=3 without topology='erdos_renyi'"),
        (lambda: FedSAM(eta=0.1), "eta=0.1 without adaptive"),
        (lambda: FederatedEarlyStopping(min_samples=3), "min_samples=3 without criterion='worst client'"),
    ],
    ids=range(7),
)  # fmt: skip
def test_an_option_without_the_one_that_it_belongs_to_is_refused(make, sentence):
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        make()
