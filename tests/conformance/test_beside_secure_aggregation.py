"""Every method beside secure aggregation: the plain run's models within rounding, or a sentence before round 1."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("cryptography", reason="keys and masks: pip install opacus cryptography")

from fedlightning.callbacks import SecureAggregation
from fedlightning.contract import Facts, FederatedCallback
from fedlightning.tensors import module_state
from fedlightning.testing.runs import deployed
from fedlightning.testing.toys import ToyData, federate
from tests.conformance.case import collect

pytestmark = pytest.mark.slow

METHODS = {name: case for name, case in collect("CASES").items() if name != "SecureAggregation"}
SHORT = {"max_rounds": 2, "local_steps": 2, "sanity_check": False}
ONE_STEP = ("DSGD", "FedSGD", "SWIFT")


class Began(FederatedCallback):
    """Tells whether a first round began."""

    facts = Facts(takes_part=False)

    def __init__(self, rounds):
        self.rounds = rounds

    def on_round_start(self, server):
        self.rounds.append(server.round)


def run(case, *others):
    one = {"local_steps": 1, "batch_size": 15} if type(case.algorithm).__name__ in ONE_STEP else {}
    arguments = {**case.arguments, **SHORT, **one}
    return federate(copy.deepcopy(case.algorithm), ToyData(), None, others=others, **arguments)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_is_exact_or_refused(name):
    case, rounds = METHODS[name], []
    try:
        masked = run(case, SecureAggregation(), Began(rounds))
    except ValueError as error:
        assert not rounds, f"{name} fails in a round: {error}"
        assert "SecureAggregation" in str(error)
        return
    plain = run(case)
    assert len(masked.server.failures) == len(plain.server.failures)
    pairs = [
        (module_state(a), module_state(b)) for (_, a), (_, b) in zip(deployed(plain), deployed(masked), strict=True)
    ]
    pairs += [(plain.server.models[model], masked.server.models[model]) for model in plain.server.models]
    for a, b in pairs:
        for entry, value in a.items():
            if value.is_floating_point():
                assert float((value - b[entry]).abs().max()) < 1e-5, f"{name}: {entry}"
