"""Every method with tasks and clients that few were written for: it is right, or refused before round 1 in a sentence."""

from __future__ import annotations

import copy
import math
from typing import Any, get_args

import pytest

from fedlightning import FederatedTrainer
from fedlightning.algorithm import Facts, FederatedCallback
from fedlightning.options import Evaluation
from tests.conformance.case import Case, collect
from tests.tasks import OTHER, Task, TaskData, module_for

CASES: dict[str, Case] = collect("CASES")


class Began(FederatedCallback):
    """Notes that round 1 has begun."""

    facts = Facts(takes_part=False)
    rank = 10**6

    def __init__(self) -> None:
        self.rounds = 0

    def on_round_start(self, server: Any) -> None:
        self.rounds += 1


def refusal(name: str, task: Task) -> str | None:
    """Run a method for two rounds. Return the sentence that refuses it before round 1; `None` after a run that is right."""
    case = CASES[name]
    arguments = {"max_rounds": 2, "local_steps": 3, "save_state": 0, "evaluation": Evaluation(every=1, stages=["L1"])}
    arguments |= copy.deepcopy(case.arguments)
    full, batch_size = arguments.pop("full", False), arguments.pop("batch_size", None)
    data, method = TaskData(task), copy.deepcopy(case.algorithm)
    data.batch_size = batch_size or data.batch_size
    began = Began()
    trainer = FederatedTrainer(
        callbacks=[method, began], logger=False, enable_progress_bar=False, accelerator="cpu", **arguments
    )
    try:
        trainer.fit(module_for(task, full), data)
    except ValueError as error:
        if began.rounds:
            raise
        assert type(method).__name__ in str(error), f"the sentence does not name the method: {error}"
        return str(error)
    failures = trainer.summary.get("failures", [])
    assert not failures, failures
    scores = [row["mean"] for row in trainer.results if row["metric"] == "val_loss"]
    assert all(math.isfinite(score) for score in scores), scores
    return None


PREDICTS_CLASSES = {
    *("DSFL", "FCCL", "FCCLPlus", "FD", "FedBE", "FedCovid", "FedDF", "FedET", "FedGH", "FedGKT", "FedKD", "FedKEMF"),
    *(
        "FedLC",
        "FedMD",
        "FedNTD",
        "FedProto",
        "FedRoD",
        "FedType",
        "FjORD",
        "FLDE",
        "FML",
        "GPFL",
        "pFedHR",
        "pFedKnow",
    ),
}
"""Methods whose own loss or exchange is of one class a sample: they refuse any other task."""
WITHOUT = {"FjORD plain", "FLDE outputs"}
"""Variants of theirs without that loss."""
BATCH_NORM = {"FedBN": "batch normalisation cannot train on one sample, whatever the method"}


@pytest.mark.slow
@pytest.mark.parametrize("task", get_args(Task))
@pytest.mark.parametrize("name", CASES)
def test_every_method_is_right_or_refused(name: str, task: Task) -> None:
    if name in BATCH_NORM and task == "one sample at a client":
        pytest.skip(BATCH_NORM[name])
    said = refusal(name, task)
    refused = task in OTHER and name.partition(" ")[0] in PREDICTS_CLASSES and name not in WITHOUT
    assert (said is not None) == refused, said
