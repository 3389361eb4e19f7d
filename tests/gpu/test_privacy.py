"""Private and masked training on a GPU: the noise, the clipping and the sums of the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from fedlightning.callbacks import ClientDP, SampleDP, SecureAggregation
from tests.conformance.case import Case
from tests.gpu.on import HERE, near, run
from tests.helpers import Toy, close, federate, toy_data

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # that the noise is known, that clients are few
]

PRIVATE: dict[str, Any] = {
    "ClientDP": lambda: ClientDP(delta=1e-3, noise_multiplier=1.0, clip=0.1, noise_seed=1),
    "SampleDP": lambda: SampleDP(delta=1e-3, noise_multiplier=1.0, clip=0.1, noise_seed=1),
}


@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize(("precision", "tolerance"), [("64-true", 1e-9), ("32-true", 1e-4)])
def test_noise_and_clipping_are_those_of_the_cpu(name: str, precision: Any, tolerance: float) -> None:
    pytest.importorskip("opacus")
    case = Case(PRIVATE[name]())
    near(run(case, precision=precision, **HERE), run(case, precision=precision), tolerance)


def test_a_masked_sum_is_the_sum() -> None:
    pytest.importorskip("cryptography")
    module, data = Toy(), toy_data([16, 24, 32, 40])
    masked, plain = (
        federate(module, data, callbacks, deterministic=True, **HERE) for callbacks in ([SecureAggregation()], [])
    )
    close(masked.server.model, plain.server.model, atol=1e-5)
