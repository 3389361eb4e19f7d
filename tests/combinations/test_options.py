"""Every option of every public callback at another value changes something, or a sentence says why not."""

from __future__ import annotations

import inspect
import math
import re
import types
from contextlib import suppress
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from fedlightning.callbacks import (
    DSGD,
    IFCA,
    LDSGD,
    PIFL,
    SWIFT,
    TIFF,
    DFedAvg,
    FedAsync,
    FedBABU,
    FedBE,
    FedBuff,
    FedDF,
    FederatedEarlyStopping,
    FedGroup,
    FedMD,
    FedPer,
    FedRep,
    FedSAM,
    GeometricMedian,
    LGFedAvg,
    LocalAdaptation,
    pFedHR,
    pFedKnow,
)
from fedlightning.callbacks.attacks import ModelReplacement
from fedlightning.contract import FederatedCallback
from fedlightning.engines.attempts import FederationError
from fedlightning.errors import ConfigurationError
from fedlightning.ranges.annotations import _annotations, ranges_in
from fedlightning.testing.pairs import difference
from fedlightning.testing.runs import server_of
from tests.combinations.scenes import CALLBACKS, Refused, Scene, results
from tests.conformance.case import Case

UNIONS = (Union, types.UnionType)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        *((lambda kind=kind: kind("ring", edge_probability=0.9), "edge_probability=0.9 without topology='erdos_renyi'")
          for kind in (DFedAvg, DSGD, LDSGD, SWIFT)),
        (lambda: DFedAvg([[0, 1], [1, 0]], graph_seed=3), "graph_seed=3 without topology='erdos_renyi'"),
        (lambda: FedSAM(eta=0.1), "eta=0.1 without adaptive"),
        (lambda: FederatedEarlyStopping(min_samples=3), "min_samples=3 without criterion='worst client'"),
        (lambda: IFCA(server_lr=0.5), "server_lr=0.5 without option=1"),
        (lambda: FedAsync(b=2.0), "b=2.0 without staleness='hinge'"),
        (lambda: FedAsync(decay=0.9), "decay=0.9 without decay_at"),
        (lambda: FedBuff(b=2.0), "b=2.0 without staleness='hinge'"),
        (lambda: FedBE(alpha=0.5), "alpha=0.5 without distribution='dirichlet'"),
        (lambda: FedBE(swa_start=0.5, swa_every=0), "swa_start=0.5 with swa_every=0"),
        (lambda: FedDF(patience=20), "patience=20 without validation"),
        (lambda: FedDF(gradient_clip_val=-1.0), "gradient_clip_val=-1.0"),
        (lambda: FedMD(digest_batch_size=0), "digest_batch_size=0"),
        (lambda: PIFL(gamma=0.2, ledger=False), "gamma=0.2 with ledger=False"),
        (lambda: TIFF(gamma=0.2, eta=0.0), "gamma=0.2 with eta=0.0"),
        (lambda: PIFL(init=0.1, pretrain_rounds=1), "got both init=0.1 and pretrain_rounds=1"),
        *((lambda kind=kind, name=name: kind(**{name: "head", "num_layers": 3}), f"both {name}='head' and num_layers=3")
          for kind, name in ((FedPer, "personal"), (FedRep, "personal"), (LGFedAvg, "shared"), (FedBABU, "head"))),
        (lambda: LocalAdaptation(head="head"), "head='head' without part"),
        (lambda: LocalAdaptation(monitor="val_acc"), "monitor='val_acc' without keep_if_better"),
        (lambda: GeometricMedian(max_share=0.3), "max_share=0.3 without weighted"),
        (lambda: pFedKnow(lam=0.5), "lam=0.5 without guide"),
        (lambda: PIFL(importance="matching", normalize=False), "normalize=False with importance='matching'"),
        (lambda: pFedHR(labels=True, noise=0.5), "noise=0.5 with labels=True"),
        (lambda: FedGroup(mix_mean=True), "mix_mean=True without mix"),
        (lambda: ModelReplacement(["a"], server_lr=0.5), "server_lr=0.5 without scale='exact'"),
    ],
    ids=range(31),
)  # fmt: skip
def test_an_option_without_the_one_that_it_belongs_to_is_refused(make, sentence):
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        make()


# -- every option ------------------------------------------------------------------------------------------------------

BASE = {"evaluation": 1, "max_rounds": 5}
CASE_OF = {type(case.algorithm): case for case in reversed(CALLBACKS.values())}
INERT: dict[str, dict[str, str]] = {
    "more than there are of samples or batches": {
        "FCCL": "public_batch_size",
        "FedBE": "batch_size",
        "FedDF": "batch_size",
        "FedET": "batch_size",
        "FLTrust": "batch_size",
        "FedGH": "server_batch_size",
        "FedMD": "digest_batch_size",
    },
    "a split, a threshold, a slot or a tie of so small a run never comes to it": {
        "CFL": "eps1 eps2 gap start_round min_size",
        "FeSEM": "steps late_start",
        "FeSEMMA": "steps late_start",
        "FedDF": "gradient_clip_val patience",
        "FedExP": "eps",
        "FedGroup": "alpha unit",
        "FedProto": "restrict",
        "FedType": "lambda_reg private_lambda_reg k_reg",
        "GeometricMedian": "nu",
        "NormClippedMean": "max_share",
        "PLayerFL": "clamp",
        "SecureAggregation": "threshold",
        "pFedKnow": "threshold",
        "FedBE": "swa_start",
        "FederatedEarlyStopping": "stage patience criterion",
        "LocalCheckpoint": "min_samples",
        "FedMultimodal": "holders_only",
        "FedSoft": "sigma",
        "Harmony": "num_clusters",
        "PLayerFLRandom": "clamp",
        "PIFL": "gamma max_evaluations",
        "pFedMe": "all_clients",
        "TIFF": "performance_slots random_slots gamma max_evaluations",
        "pFedHR": "temperature noise grouping relu tune_models cka_samples max_stitch",
    },
    "the module has no batch normalisation": {
        "FedBE": "update_statistics",
        "FedDF": "update_statistics",
        "HeteroFL": "static_bn",
        "FedRolex": "static_bn",
        "FederatedDropout": "static_bn",
    },
    "it shows in files of the run's folder only": {"ClientDP": "delta", "LayerDiagnostics": "*"},
}
"""Options that may change nothing in these scenes, by the reason and the class."""
SWEPT = sorted({type(case.algorithm).__name__ for case in CALLBACKS.values()})


def words_in(annotation: Any) -> list[Any]:
    """Return the words that an annotation allows."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return (
        [word for part in get_args(annotation) for word in words_in(part)] if get_origin(annotation) in UNIONS else []
    )


def other_values(kind: type, name: str, value: Any) -> list[Any]:
    """Return other values of an option: the other words, the other bool, both ends of its range and beyond what is usual."""
    annotations = [all_of(cls)[name] for cls in kind.__mro__ if "__init__" in vars(cls) and name in all_of(cls)]
    if isinstance(value, bool) or not annotations:
        return [not value] if isinstance(value, bool) else []
    same = "samples" if name == "weighting" and value is None else value  # what None means there
    words = [word for word in words_in(annotations[0]) if word != same]
    if not isinstance(value, int | float):
        return words
    ranges = ranges_in(annotations[0])[:1]
    ends = [float(end) for each in ranges for end in each.interval[1:-1].split(",")]
    numbers = [type(value)(number) for number in (*ends, 0.03, 50) if math.isfinite(number)]
    return words + [n for n in dict.fromkeys(numbers) if n != value and all(n in each for each in ranges)]


def all_of(cls: type) -> dict[str, Any]:
    """Return what the annotations of a constructor say."""
    return _annotations(inspect.unwrap(vars(cls)["__init__"]), plain=True)


def left_by(callback: FederatedCallback) -> tuple[list[str], Any]:
    """Return the warnings of a run, and all else that it leaves."""
    arguments = CASE_OF[type(callback)].arguments if type(callback) in CASE_OF else {}
    module = "full" if arguments.get("full") else "plain"
    trainer = Scene(module, (Case(callback, arguments=arguments),), (12, 7, 10, 15), options=BASE).run()
    server = server_of(trainer)
    return trainer.said, {
        "rows": [str(row) for row in trainer.rows],
        "costs": (server.costs.bytes_up, server.costs.bytes_down, server.costs.steps, trainer.rounds_done),
        "kept": {client: trainer.store.get(client).checkpoints for client in server.clients},
        "selected": server.checkpoints,
        "states": {"server": server.state, **{client: trainer.store.get(client).state for client in server.clients}},
        **results(trainer),
    }


def silent_options(kind: type) -> list[str]:
    """Return the options of a class, with a value, that change nothing without a word."""
    base = CASE_OF[kind].algorithm if kind in CASE_OF else kind()
    said, left = left_by(base)
    inert = " ".join(classes.get(kind.__name__, "") for classes in INERT.values()).split()
    silent = []
    for name, value in base.hyperparameters().items():
        for other in () if {name, "*"} & {*inert} else other_values(kind, name, value):
            with suppress(
                Refused, ValueError, FederationError, AssertionError
            ):  # what says why, or diverges, is not silent
                words, there = left_by(kind(**base.hyperparameters() | {name: other}))
                if words == said and difference(left, there) == 0.0:
                    silent.append(f"{kind.__name__}({name}={other!r})")
    return silent


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEPT)
def test_every_option_changes_something_or_says_why_not(name: str) -> None:
    silent = silent_options(next(kind for kind in CASE_OF if kind.__name__ == name))
    assert not silent, f"{', '.join(silent)}: nothing changes, and nobody says so"
