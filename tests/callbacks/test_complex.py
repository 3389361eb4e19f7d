"""A complex parameter is as two real ones: every method gives what it gives a twin that holds them so, or refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlightning.callbacks import (
    IFCA,
    CenteredClipping,
    ClientDP,
    CoordinateMedian,
    FedGKT,
    FLTrust,
    GeometricMedian,
    Krum,
    NormClippedMean,
    SampleDP,
    TrimmedMean,
)
from fedlightning.callbacks.attacks import ALIE, GaussianAttack, InnerProductManipulation, ModelReplacement, SignFlip
from fedlightning.tensors import State, as_reals, first_nonfinite, interpolate
from fedlightning.testing.toys import WIDTH, ToyData, ToyModule
from tests.conformance.case import Case, collect
from tests.helpers import make_trainer, mostly_slow


class Turn(nn.Module):
    """A complex matrix, or the two real ones that it is made of."""

    def __init__(self, real: bool, dtype: torch.dtype) -> None:
        super().__init__()
        weight = 0.3 * torch.randn(WIDTH, WIDTH, dtype=dtype.to_complex())
        self.weight = nn.Parameter(torch.view_as_real(weight).clone() if real else weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        z = x.to(weight.dtype) @ weight
        return z.real + z.imag


class Turned(ToyModule):
    """The toy module with such a layer."""

    def __init__(self, real: bool, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.dtype_of_inputs = dtype
        self.to(dtype).middle = Turn(real, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.dtype_of_inputs))


def run(callback: Any, real: bool, **arguments: Any) -> Any:
    """Federate the module or its twin."""
    torch.manual_seed(0)
    module = Turned(real, torch.float32 if isinstance(callback, FedGKT) else torch.float64)
    given = {"max_rounds": 3} | arguments
    given = {name: value for name, value in given.items() if name not in ("full", "batch_size")}
    given |= {} if "local_epochs" in given else {"local_steps": given.get("local_steps", 3)}
    trainer, data = make_trainer(None, [copy.deepcopy(callback)], sanity_check=True, **given), ToyData()
    data.batch_size = arguments.get("batch_size", data.batch_size)
    trainer.fit(module, data)
    return trainer


def deployed(trainer: Any, client: str) -> State:
    """The tensors that a client uses in the end; none where the method has no model for it."""
    try:
        return dict(trainer.module(client).state_dict())
    except (RuntimeError, ValueError):
        return {}


def reals(state: State) -> State:
    return {name: as_reals(value) for name, value in state.items()}


OTHERS = {
    "CenteredClipping": Case(CenteredClipping()),
    "ClientDP": Case(ClientDP(delta=1e-3, noise_multiplier=1e-3, clip=1e-3, noise_seed=1)),
    "CoordinateMedian": Case(CoordinateMedian()),
    "FLTrust": Case(FLTrust()),
    "GeometricMedian": Case(GeometricMedian()),
    "IFCA noise": Case(IFCA(init=0.1)),
    "Krum": Case(Krum(bad=0)),
    "NormClippedMean": Case(NormClippedMean()),
    "TrimmedMean": Case(TrimmedMean(trim=0.25)),
    "ALIE": Case(ALIE(["site1", "site2"], z=1.0)),
    "GaussianAttack": Case(GaussianAttack(["site1"])),
    "InnerProductManipulation": Case(InnerProductManipulation(["site1"], knows="everybody")),
    "ModelReplacement": Case(ModelReplacement(["site1"])),
    "SignFlip": Case(SignFlip(["site1"])),
}
RUNS: dict[str, Case] = collect("CASES") | OTHERS
ALWAYS = {
    *("APFL", "CoordinateMedian", "FedALA", "FedAdam", "FedAvgM", "FedDyn", "FedExP", "FedGroup mixed", "FedNova"),
    *("IFCA noise", "L2GD", "PerFedAvg exact", "QFedAvg", "QSGD", "TopK", "pFedBayes", "SignFlip"),
}
REFUSED = {"pFedBayes", "pFedKnow"}
"""Methods that are for real numbers."""
NO_SUCH_LAYER = {"FedBN", "FedRolex", "FeSEMMA", "FederatedDropout", "FjORD", "HeteroFL"}
"""Methods that refuse the twin as well."""


@pytest.mark.parametrize("name", mostly_slow(RUNS, ALWAYS))
def test_a_complex_parameter_is_as_two_real_ones(name: str) -> None:
    case, method = RUNS[name], name.partition(" ")[0]
    if method in REFUSED | NO_SUCH_LAYER:
        with pytest.raises(
            ValueError, match="complex, and .* for real numbers" if method in REFUSED else "Turn|BatchNorm"
        ):
            run(case.algorithm, False, **case.arguments)
        return
    a, b = (run(case.algorithm, real, **case.arguments) for real in (False, True))
    assert not a.server.failures
    torch.testing.assert_close(reals(a.server.model), b.server.model, rtol=1e-5, atol=1e-6)
    for client in a.server.clients:
        torch.testing.assert_close(reals(deployed(a, client)), deployed(b, client), rtol=1e-5, atol=1e-6)
    imaginary = a.server.model.get("middle.weight", torch.ones(1, dtype=torch.complex64)).imag
    assert imaginary.abs().max() > 0


def test_private_steps_train_and_cover_both_parts() -> None:
    """Noise of 1e-5 hides nothing of the gradient; noise alone is as large in both parts."""
    pytest.importorskip("opacus")
    quiet = SampleDP(delta=1e-3, noise_multiplier=0.01, clip=1e-3, noise_seed=1)
    a, b = (run(quiet, real) for real in (False, True))
    torch.testing.assert_close(reals(a.server.model), b.server.model, rtol=0.0, atol=1e-4)
    torch.manual_seed(0)
    start = Turned(False).middle.weight.detach()
    loud = run(SampleDP(delta=1e-3, noise_multiplier=300.0, clip=1e-3, noise_seed=1), False).server.model
    moved = torch.view_as_real(loud["middle.weight"] - start).flatten(0, -2).std(0)
    assert 0.7 < moved[0] / moved[1] < 1.4


def test_states_of_complex_entries_mix_and_are_checked() -> None:
    a, b = {"w": torch.tensor([1 + 2j])}, {"w": torch.tensor([3 - 2j])}
    assert interpolate(a, b, 0.5)["w"].tolist() == [2 + 0j]
    assert first_nonfinite({"w": torch.tensor([complex(0, float("nan"))])}) == "w"
