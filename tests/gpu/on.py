"""Where these tests run: on the first GPU, or on what FEDLIGHTNING_TEST_ACCELERATOR names (`cpu` rehearses them)."""

from __future__ import annotations

import copy
import os
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first matrix product: for deterministic=True

import torch

from fedlightning.testing.runs import tensors_in
from fedlightning.testing.toys import ToyData, ToyModule
from tests.conformance.case import Case
from tests.helpers import federate

ACCELERATOR = os.environ.get("FEDLIGHTNING_TEST_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "")
REAL = ACCELERATOR == "cuda"
HERE: dict[str, Any] = {"accelerator": ACCELERATOR}
"""Arguments of a trainer that runs on the device of these tests."""


def tf32(wanted: bool) -> None:
    """Let matrix products and convolutions in single precision round to 10 bits, or not."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = wanted


def run(case: Case, root: Any = None, others: Any = (), **options: Any) -> Any:
    """Federate the toy module with the toy data and the case's algorithm: 2 rounds of 3 steps at most."""
    resume = options.pop("resume", None)
    arguments = {"max_rounds": 2, "local_steps": 3, "deterministic": True} | case.arguments | options
    full, batch_size = arguments.pop("full", False), arguments.pop("batch_size", None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = ToyModule(full=full)
    data = ToyData()
    data.batch_size = batch_size or data.batch_size
    return federate(module, data, [copy.deepcopy(case.algorithm), *others], root, resume=resume, **arguments)


def kept(trainer: Any) -> list[torch.Tensor]:
    """Return all tensors that a run ends with: models, the server's state, the clients' records."""
    records = [trainer.store.get(client) for client in trainer.server.clients]
    return tensors_in([trainer.server.models, trainer.server.state, [[each.personal, each.state] for each in records]])


def near(first: Any, second: Any, tolerance: float) -> None:
    """Assert that two runs end with the same numbers, up to a tolerance: relative for those beyond 1."""
    pairs = list(zip(kept(first), kept(second), strict=True))
    assert pairs
    for a, b in pairs:
        assert a.device.type == b.device.type == "cpu", "what is kept between visits is in the machine's memory"
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, equal_nan=True)
