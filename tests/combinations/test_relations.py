"""Relations between runs, as oracles for combinations of which no reference exists.

Each relation is a function of a drawn scene; its docstring says where it holds. `COMBINATIONS=2000` is how many scenes the
slow part draws for each.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedlightning.callbacks import (
    AFL,
    IFCA,
    MOON,
    FedAvgM,
    FedExP,
    FedLC,
    FedLP,
    FedNTD,
    FedPer,
    FedProx,
    FedRep,
    FedSAM,
    FeSEM,
    HypCluster,
    LocalAdaptation,
    NormClippedMean,
    PerFedAvg,
    RandomK,
    TopK,
)
from fedlightning.options import Processes
from fedlightning.tensors import module_state
from fedlightning.testing.pairs import difference
from fedlightning.testing.runs import assert_same
from tests.combinations.scenes import CALLBACKS, MODULES, Refused, Scene, reals, results, scenes
from tests.helpers import plain_fit

MANY = int(os.environ.get("COMBINATIONS", "300"))
ROUNDING = 2e-5


class Relation(NamedTuple):
    """A relation, the scenes it is about, and how many of them it is put to.

    Attributes:
        holds: Asserts it of a scene; raises `Refused` where the package refuses one side.
        scenes: The scenes of its domain.
        few: Scenes drawn in the fast part; 0 where each takes seconds.
        least: Share of the drawn ones that must have been accepted.
    """

    holds: Callable[[Any], None]
    scenes: st.SearchStrategy[Any]
    few: int
    least: float = 0.3


RELATIONS: dict[str, Relation] = {}


def relation(drawn: st.SearchStrategy[Any], few: int = 12, least: float = 0.3) -> Callable[[Any], Any]:
    """Enter a function into the relations."""

    def enter(holds: Callable[[Any], None]) -> Callable[[Any], None]:
        RELATIONS[holds.__name__] = Relation(holds, drawn, few, least)
        return holds

    return enter


def floats(state: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that are not integers."""
    return {name: value for name, value in state.items() if value.is_floating_point() or value.is_complex()}


def alike(a: Any, b: Any, most: float = ROUNDING) -> None:
    """Assert that what two runs leave is the same within rounding; entries that one alone has do not count."""
    for label in a.keys() & b.keys():
        for name in a[label].keys() & b[label].keys():
            apart = difference(a[label][name], b[label][name])
            assert apart <= most, f"{label}, {name}: differs by {apart:.2g}"


# -- what is drawn -----------------------------------------------------------------------------------------------------

NEUTRAL: dict[str, Any] = {
    "AFL": AFL(gamma=0.0, start="samples", report="last"),
    "FedAvgM": FedAvgM(beta=0.0),
    "FedExP": FedExP(eps=1e30, average_last=1),
    "FedLC": FedLC(tau=0.0),
    "FedLP": FedLP(q=1.0),
    "FedNTD": FedNTD(beta=0.0),
    "FedPer": FedPer(personal=[]),
    "FedProx": FedProx(mu=0.0),
    "FedRep": FedRep(personal=[], weighting="samples"),
    "FedSAM": FedSAM(rho=0.0),
    "HypCluster": HypCluster(num_clusters=1),
    "IFCA": IFCA(num_clusters=1, weighting="samples"),
    "FeSEM": FeSEM(num_clusters=1, weighting="samples"),
    "LocalAdaptation": LocalAdaptation(epochs=0),
    "MOON": MOON(mu=0.0),
    "NormClippedMean": NormClippedMean(1e30, max_share=1.0),
    "PerFedAvg": PerFedAvg(alpha=0.0, weighting="samples"),
}
"""Callbacks whose strength is zero, however many clients there are."""
CLUSTERS = ("FeSEM", "IFCA", "HypCluster")
PLAIN_MEANS = (
    *(
        "FedAvg",
        "FedProx",
        "FedSAM",
        "FedAvgM",
        "FedNTD",
        "MOON",
        "FedPer",
        "FedAdam",
        "FedLP",
        "RandomK",
        "TopK",
        "QSGD",
    ),
    *("LocalAdaptation", "APFL", "Ditto"),
)
"""Methods that average clients by their samples, so that one without samples weighs nothing."""
WITHOUT_DRAWS = tuple(
    name
    for name in CALLBACKS
    if name.partition(" ")[0]
    in {"FedAvg", "FedProx", "FedSAM", "FedAvgM", "FedNova", "SCAFFOLD", "FedDyn", "APFL", "Ditto"}
    | {"FedPer", "FedAdam", "FedYogi", "FedNTD", "MOON", "Krum", "CoordinateMedian", "TrimmedMean", "GeometricMedian"}
    | {
        "FedExP",
        "QFedAvg",
        "AFL",
        "TopK",
        "CFL",
        "FedAMP",
        "HeurFedAMP",
        "FeSEM",
        "DFedAvg",
        "pFedMe",
        "FedRoD",
        "GPFL",
    }
    | {"FENDA", "FedBN", "FedRep", "FedBABU", "FedALA", "FLIU", "MaxFL", "LGFedAvg", "FedProto", "FedGH", "PLayerFL"}
)
"""Methods that draw nothing."""
LINEAR = (
    "FedAvg",
    "FedProx",
    "FedAvgM",
    "FedAdam",
    "FedYogi",
    "FedAdagrad",
    "RandomK all",
    "TopK all",
    "LocalAdaptation",
)
"""Methods that take a mean by samples of what one step gives, and do the same to it whoever brought it."""


# -- relations ---------------------------------------------------------------------------------------------------------


@relation(st.tuples(scenes(), st.sampled_from([RandomK(1.0), TopK(1.0, feedback=False)])), few=25)
def a_lossless_code_changes_nothing(drawn: Any) -> None:
    """Domain: every scene in which a code is accepted."""
    scene, code = drawn
    alike(results(scene.run()), results(scene.beside(code).run()))


@relation(st.tuples(scenes(most=1), st.sampled_from(sorted(NEUTRAL)), st.booleans()), few=30)
def a_callback_of_strength_zero_equals_its_absence(drawn: Any) -> None:
    """Domain: callbacks whose strength is one number (or list), before or behind another."""
    scene, name, first = drawn
    if any(name in str(other) for other in scene.callbacks) or (name == "AFL" and scene.loader == "dropping"):
        raise Refused  # twice the same; shares by the samples that there are, not by those that are used
    if name == "NormClippedMean" and scene.module in ("full", "counting"):
        raise Refused  # it takes the median of buffers
    order = (NEUTRAL[name], *scene.callbacks) if first else (*scene.callbacks, NEUTRAL[name])
    a, b = (results(one.run()) for one in (scene, scene.but(callbacks=order)))
    if name in CLUSTERS:  # they have other models at the server, and integers are those of whoever came first
        a, b = ({at: floats(value) for at, value in found.items() if at.startswith("client")} for found in (a, b))
    alike(a, b)


@relation(scenes(callbacks=PLAIN_MEANS, options=st.just({})), few=12)
def a_client_without_samples_equals_an_absent_one(scene: Scene) -> None:
    """Domain: means by samples, all clients in every round. The client comes last, for a name may not move the others."""
    names = [f"site{index}" for index in range(len(scene.sizes))]
    with_it = scene.but(sizes=(*scene.sizes, 0), data={"names": [*names, "sitex"]})
    a, b = (results(one.run()) for one in (scene, with_it))
    alike(a, {label: value for label, value in b.items() if "sitex" not in label})


@relation(
    scenes(
        modules=[name for name in MODULES if name not in ("dropout", "two reals")],
        callbacks=WITHOUT_DRAWS,
        loaders=("ordered", "whole"),
        options=st.just({}),
    ),
    few=12,
)
def names_of_clients_do_not_matter(scene: Scene) -> None:
    """Domain: nothing is drawn at random, which is addressed by the client's name: batches in order, no dropout."""
    renamed = scene.but(data={"names": [f"hospital{index}" for index in range(len(scene.sizes))]})
    a, b = (results(one.run()) for one in (scene, renamed))
    alike(a, {label.replace("hospital", "site"): value for label, value in b.items()})


@relation(
    scenes(
        modules=("plain", "momentum", "decay", "adam", "schedule", "complex", "weight_norm")[:3],
        callbacks=LINEAR,
        loaders=("whole",),
        options=st.just({"local_steps": 1}),
        sizes=[(12, 7, 10), (8, 6), (16,)],
    ),
    few=12,
)
def two_halves_of_a_client_equal_the_whole(scene: Scene) -> None:
    """Domain: one step of SGD on all samples a round, means by samples, no batch normalisation."""
    halves = Halved(scene.module, scene.callbacks, scene.sizes, scene.loader, scene.options)
    a, b = results(scene.run()), results(halves.run())
    alike({"server": a["server"]}, {"server": b["server"]})


class Halved(Scene):
    """The scene with its first client as two."""

    def make_data(self) -> Any:
        data, half = super().make_data(), self.sizes[0] // 2
        for split, at in (("train", half), ("val", 3)):
            whole = data.data["site0", split]
            parts = [[tensor[:at] for tensor in whole.tensors], [tensor[at:] for tensor in whole.tensors]]
            data.data["site0", split], data.data["site0b", split] = (
                torch.utils.data.TensorDataset(*part) for part in parts
            )
        data.names = data.listed = sorted([*data.names, "site0b"])
        return data


@relation(scenes(modules=("complex",)), few=15)
def a_complex_parameter_equals_two_reals(scene: Scene) -> None:
    """Domain: methods that take both; float64. Both parts of an entry move alike here, a tie that TopK breaks by rounding."""
    if "TopK" in scene.callbacks:
        raise Refused
    alike(reals(results(scene.run())), results(scene.but(module="two reals").run()))


@relation(
    st.tuples(
        scenes(
            modules=[name for name in MODULES if name not in ("spectral_norm", "two reals")],
            most=0,
            sizes=[(12,), (23,)],
            options=st.sampled_from([{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}]),
        ),
        st.sampled_from([None, *sorted(NEUTRAL)]),
        st.integers(1, 2),
    ),
    few=14,
)
def one_client_is_plain_lightning(drawn: Any) -> None:
    """Domain: one client, kept optimizers, no penalty: bit for bit without a callback, else within rounding."""
    scene, name, epochs = drawn
    rounds = {"max_rounds": 2, "local_steps": None, "local_epochs": epochs, "optimizer_state": "keep"}
    federated = scene.but(options=rounds)
    if name is not None:
        federated = federated.beside(NEUTRAL[name])
    trainer = federated.run()
    plain = plain_fit(
        scene.make_module(), scene.make_data(), "site0", epochs_per_round=epochs, max_epochs=2 * epochs, **scene.options
    )
    ours, plain = ({"module": floats(dict(state))} for state in (module_state(trainer.module("site0")), plain))
    alike(ours, plain, 0.0 if name is None else ROUNDING)


@relation(scenes(), few=16, least=0.2)
def stacked_clients_equal_those_one_by_one(scene: Scene) -> None:
    """Domain: what can be stacked, within rounding; what compares or rounds (QSGD, ties) may fall on the other side."""
    if any(name.startswith(("QSGD", "TopK", "pFedHR")) for name in scene.callbacks):
        raise Refused
    alike(results(scene.run()), results(scene.but(options={"engine": "vectorized"}).run()), 2e-4)


@relation(st.tuples(scenes(), st.integers(1, 2)), few=10)
def a_resumed_run_equals_an_uninterrupted_one(drawn: Any) -> None:
    """Domain: every scene, bit for bit: models, states and scores."""
    scene, after = drawn
    scene = scene.but(options={"save_state": 1, "evaluation": 1})
    with tempfile.TemporaryDirectory() as folder:
        whole = scene.run(Path(folder, "whole"))
        assert_same(whole, scene.cut_and_resumed(Path(folder, "cut"), after), f"{scene}")


SHARES_OF_ALL_ROUNDS = ("FedCovid", "FedKD", "Harmony", "MAPPER", "PIFL", "TIFF")
"""Methods with a schedule or tokens that go by the number of all rounds."""


@relation(scenes(), few=8)
def a_run_made_longer_equals_a_longer_one(scene: Scene) -> None:
    """Domain: scenes without a schedule that is a share of all rounds, bit for bit: models, states and scores."""
    names = [callback if isinstance(callback, str) else type(callback).__name__ for callback in scene.callbacks]
    if any(name.startswith(SHARES_OF_ALL_ROUNDS) for name in names):
        raise Refused
    scene = scene.but(options={"save_state": 1, "evaluation": 1})
    with tempfile.TemporaryDirectory() as folder:
        whole = scene.run(Path(folder, "whole"))
        scene.but(options={"max_rounds": 2}).run(Path(folder, "short"))
        assert_same(whole, scene.run(Path(folder, "short"), resume="last"), f"{scene}")


@relation(scenes(), few=0)
def worker_processes_equal_one_process(scene: Scene) -> None:
    """Domain: every scene, bit for bit: models, states and scores."""
    scene = scene.but(options={"evaluation": 1})
    assert_same(scene.run(), scene.but(options={"engine": Processes(2)}).run(), f"{scene}")


# -- tests -------------------------------------------------------------------------------------------------------------


def check(name: str, count: int, start: int | None = None) -> Counter[str]:
    """Put a relation to so many scenes; return how many were accepted and refused."""
    entry, counts = RELATIONS[name], Counter()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),  # nothing is made smaller: a scene is small, and the fast part is to be fast
    )
    @given(entry.scenes)
    def each(drawn: Any) -> None:
        try:
            entry.holds(drawn)
        except Refused:
            counts["refused"] += 1
        else:
            counts["accepted"] += 1

    each()
    return counts


@pytest.mark.parametrize("name", [name for name, entry in RELATIONS.items() if entry.few])
def test_relation(name: str) -> None:
    entry = RELATIONS[name]
    counts = check(name, entry.few)
    assert counts["accepted"] >= max(1, entry.least * entry.few), f"{name} was hardly checked: {counts}"


@pytest.mark.slow
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("name", RELATIONS)
def test_relation_long(name: str) -> None:
    counts = check(name, MANY if name != "worker_processes_equal_one_process" else MANY // 10)
    assert counts["accepted"] >= RELATIONS[name].least * counts.total(), f"{name} was hardly checked: {counts}"
